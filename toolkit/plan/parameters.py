"""The parameters of a GLM by name and shape, and how many of them are trained, without loading anything. No torch.

Shapes are those of ChatGLM-6B's own class and of transformers' GlmForCausalLM; other models are not known here.
"""

import math
from collections.abc import Mapping
from typing import Any

from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.plan.names import ALL_LINEAR, check_matches, default_targets

Shapes = dict[str, tuple[int, ...]]


def shapes_of_config(config: Mapping[str, Any]) -> tuple[Shapes, dict[str, int]] | None:
    """Return the parameters that a config.json describes, and its sizes; None for a model that is not known here.

    Args:
        config: of an official ChatGLM folder, or of a GlmForCausalLM in transformers' layout.
    """
    if "inner_hidden_size" in config:
        return _v1(config)
    heads = config.get("num_attention_heads", 0)
    if "padded_vocab_size" in config:
        return _glm(
            vocab=config["padded_vocab_size"],
            hidden=config["hidden_size"],
            inner=config["ffn_hidden_size"],
            layers=config["num_layers"],
            heads=heads,
            groups=config["multi_query_group_num"] if config.get("multi_query_attention") else heads,
            size=config["kv_channels"],
            bias=bool(config.get("add_qkv_bias", False)),
        )
    if config.get("model_type") == "glm" and not config.get("tie_word_embeddings"):
        return _glm(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            size=config.get("head_dim") or config["hidden_size"] // heads,
            bias=bool(config.get("attention_bias", False)),
        )
    return None


def _glm(
    *, vocab: int, hidden: int, inner: int, layers: int, heads: int, groups: int, size: int, bias: bool
) -> tuple[Shapes, dict[str, int]]:
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, width in (("q", heads), ("k", groups), ("v", groups)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (width * size, hidden)
            if bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (width * size,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * size)
        shapes[f"{at}mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return shapes, {
        "layers": layers,
        "hidden": hidden,
        "keys": groups * size,
        "prefix": 2 * layers * groups * size,
        "heads": heads,
        "head_size": size,
    }


def _v1(config: Mapping[str, Any]) -> tuple[Shapes, dict[str, int]]:
    hidden, inner, layers = config["hidden_size"], config["inner_hidden_size"], config["num_layers"]
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    for layer in range(layers):
        at = f"transformer.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = shapes[f"{at}{name}.bias"] = (hidden,)
        for name, out, width in (
            ("attention.query_key_value", 3 * hidden, hidden),
            ("attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", inner, hidden),
            ("mlp.dense_4h_to_h", hidden, inner),
        ):
            shapes[f"{at}{name}.weight"], shapes[f"{at}{name}.bias"] = (out, width), (out,)
    for end in ("weight", "bias"):
        shapes[f"transformer.final_layernorm.{end}"] = (hidden,)
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    # The original's prefix network begins with embeddings of the hidden width.
    return shapes, {
        "layers": layers,
        "hidden": hidden,
        "keys": hidden,
        "prefix": hidden,
        "heads": config["num_attention_heads"],
        "head_size": hidden // config["num_attention_heads"],
    }


def count(shapes: Shapes, sizes: Mapping[str, int], tuning: TuningConfig) -> tuple[int, int]:
    """Return how many parameters are trained and how many there are, with what the method adds.

    Args:
        shapes: of the model.
        sizes: of the functions above.
        tuning: without `tuning.adapter`, which decides for itself.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    whole = sum(map(math.prod, shapes.values()))
    if tuning.method is TuningMethod.full:
        return whole, whole
    if tuning.method is TuningMethod.freeze:
        names = {name for name in shapes if _layer(name) >= sizes["layers"] - tuning.last_layers}
        for pattern in tuning.patterns:
            names.update(check_matches("tuning.patterns", pattern, shapes))
        return sum(math.prod(shapes[name]) for name in names), whole
    added = _added(shapes, sizes, tuning)
    return added, whole + added


def _added(shapes: Shapes, sizes: Mapping[str, int], tuning: TuningConfig) -> int:
    if tuning.method is TuningMethod.prompt:
        return tuning.num_tokens * sizes["hidden"]
    if tuning.method is TuningMethod.ptuning_v2:
        width = 2 * sizes["layers"] * sizes["keys"]
        if not tuning.projection:
            return tuning.num_tokens * width
        begin, hidden = sizes["prefix"], sizes["hidden"]
        return tuning.num_tokens * begin + begin * hidden + hidden + hidden * width + width
    modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    linear = [name for name in modules if _layer(name) >= 0]
    patterns = tuning.target_modules or default_targets("", linear)
    targets = linear
    if ALL_LINEAR not in patterns:
        targets = [name for one in patterns for name in check_matches("tuning.target_modules", one, modules)]
    owners = {name.rpartition(".")[0] for name in shapes}
    saved = {name for one in tuning.save_modules for name in check_matches("tuning.save_modules", one, owners)}
    added = sum(tuning.rank * sum(modules[name]) + (modules[name][0] if tuning.dora else 0) for name in set(targets))
    return added + sum(math.prod(shape) for name, shape in shapes.items() if name.rpartition(".")[0] in saved)


def _layer(name: str) -> int:
    """Return the number of the layer that a parameter belongs to, -1 for none."""
    _, found, rest = name.partition(".layers.")
    return int(rest.partition(".")[0]) if found else -1
