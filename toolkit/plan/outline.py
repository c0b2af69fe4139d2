"""The outline of a model: names and shapes of its parameters, with those of its fine-tuning method. No torch.

There are formulas for ChatGLM-6B and transformers' GLM, GLM-4, Llama, Mistral, Qwen2 and Qwen3.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from toolkit.config import schema
from toolkit.messages import tr
from toolkit.plan.tuning_targets import ALL_LINEAR, SCORE, check_matches, default_targets

Shapes = dict[str, tuple[int, ...]]
Targets = Mapping[str, list[str]]
"""`tuning.target_modules`, all-linear or "" for an empty list -> the layers that a measured model gets LoRA in."""
Sizes = dict[str, int]
"""layers, hidden, inner, heads, head_size, keys (width of a token's keys), prefix (width of P-Tuning's embedding before
its MLP), norms (in a layer), rotary (dimensions of a head that are rotated); and `flop_sizes`."""
HEAD = "lm_head.weight"
TOWERS = "towers."
"""How names begin of what the loss of text gives no gradient, such as towers for images: held, but never trained."""
TRAINED_ROWS = "token_adapter"
"""In names of rows of an embedding that LoRA trains along (peft's `trainable_token_indices`)."""
_OUTPUT = (HEAD, "lm_head.modules_to_save.default.weight", SCORE, "score.modules_to_save.default.weight")
_DENSE = ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
MIXTURES = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe"),
)
"""`model_type` of the mixtures of experts whose FLOPs are known, as a test compares: the routed experts of a layer are
one tensor, and num_experts_per_tok of them compute a token."""


def shapes_of_config(config: Mapping[str, Any]) -> tuple[Shapes, Sizes] | None:
    """Return parameters and sizes by a config.json, official ChatGLM or transformers; None for an unknown model."""
    if "inner_hidden_size" in config:
        return _chatglm_6b_shapes(config)
    if "padded_vocab_size" in config:
        is_grouped = config.get("multi_query_attention")
        return _decoder_shapes(
            {
                "model_type": "glm",
                "vocab_size": config["padded_vocab_size"],
                "hidden_size": config["hidden_size"],
                "intermediate_size": config["ffn_hidden_size"],
                "num_hidden_layers": config["num_layers"],
                "num_attention_heads": config["num_attention_heads"],
                "num_key_value_heads": config["multi_query_group_num" if is_grouped else "num_attention_heads"],
                "head_dim": config["kv_channels"],
                "attention_bias": bool(config.get("add_qkv_bias", False)),
            }
        )
    return _decoder_shapes(config) if config.get("model_type") in _DENSE else None


WITHOUT_ATTENTION = ("conv", "linear_attention", "mlp", "moe", "recurrent")
"""Values of `layer_types` (transformers 5.23) for layers in which tokens do not see each other in pairs."""


def flop_sizes(read: Callable[[str], Any]) -> Sizes:
    """Return the sizes that FLOPs depend on besides shapes; `read` returns a config's value. They are layers, heads and
    head_size; in a hybrid attending, the layers with attention; for latent attention value_size and cached (elements of
    a token and layer); for MIXTURES experts, chosen (experts of a token) and expert_inner, their inner width. {} for a
    model whose attention is not known.
    """
    try:
        sizes = _flop_sizes(read)
    except Exception:  # reading an odd config may fail, as transformers' (5.23) with values of each layer
        return {}
    return sizes if all(type(size) is int for size in sizes.values()) else {}


def _flop_sizes(read: Callable[[str], Any]) -> Sizes:
    layers, heads, hidden = (read(name) or 0 for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden):
        return {}
    sizes = {"layers": layers, "heads": heads, "head_size": read("head_dim") or hidden // heads}
    kinds = read("layer_types") or ()
    if len(kinds) == layers and (others := sum(kind in WITHOUT_ATTENTION for kind in kinds)):
        sizes["attending"] = layers - others
    if latent := read("kv_lora_rank"):
        turned, value = read("qk_rope_head_dim"), read("v_head_dim")
        sizes |= {"head_size": read("qk_nope_head_dim") + turned, "value_size": value, "cached": latent + turned}
    if read("model_type") in MIXTURES:
        sizes["experts"] = next(filter(None, map(read, ("n_routed_experts", "num_local_experts", "num_experts"))))
        sizes["chosen"] = read("num_experts_per_tok")
        sizes["expert_inner"] = read("moe_intermediate_size") or read("intermediate_size")
    return sizes


BUSIEST = 1.5
"""Assumed, not measured: rows of the busiest rank, as a multiple of the mean, if experts are divided over ranks."""


def load_of_busiest_rank(capacity: float) -> float:
    """Return `BUSIEST`, limited by `model.expert_capacity` (0: no limit)."""
    return min(BUSIEST, capacity or BUSIEST)


def is_routed(name: str) -> bool:
    """Whether a parameter belongs to routed experts, in contrast to shared ones, which see every token."""
    return ".experts." in name


def elements_used_by_token(name: str, count: int, sizes: Mapping[str, int]) -> int:
    """Return how many of a parameter's `count` elements a token is computed with; of routed experts the chosen ones."""
    return count * sizes["chosen"] // sizes["experts"] if "chosen" in sizes and is_routed(name) else count


def shapes_of_random(vocab_size: int, shape: schema.ShapeConfig) -> tuple[Shapes, Sizes]:
    """Return shapes and sizes of a random model (`model.init=random`)."""
    return _decoder_shapes(
        {
            "model_type": "glm",
            "vocab_size": vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "attention_bias": True,
        }
    )


def _decoder_shapes(config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
    """Return shapes and sizes of transformers' GLM, Llama and their kind."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    layers, heads, vocab = config["num_hidden_layers"], config["num_attention_heads"], config["vocab_size"]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    is_glm = kind in ("glm", "glm4")
    bias = kind == "qwen2" or bool(config.get("attention_bias", False))
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] if kind == "glm4" else []
    rows = {"q": heads * size, "k": groups * size, "v": groups * size}
    layer: Shapes = {f"self_attn.{name}_proj.weight": (width, hidden) for name, width in rows.items()}
    layer |= {f"self_attn.{name}_proj.bias": (width,) for name, width in rows.items() if bias}
    layer["self_attn.o_proj.weight"] = (hidden, heads * size)
    if bias and kind in ("llama", "qwen3"):
        layer["self_attn.o_proj.bias"] = (hidden,)
    if kind == "qwen3":
        layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    into = {"gate_up": 2 * inner} if is_glm else {"gate": inner, "up": inner}
    layer |= {f"mlp.{name}_proj.weight": (width, hidden) for name, width in into.items()}
    layer["mlp.down_proj.weight"] = (hidden, inner)
    if config.get("mlp_bias"):
        layer |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    layer |= {f"{name}.weight": (hidden,) for name in norms}
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    shapes |= {f"model.layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes[HEAD] = (vocab, hidden)
    rope = config.get("rope_parameters") or {}
    rotary = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5 if is_glm else 1.0))
    return shapes, {
        "layers": layers,
        "hidden": hidden,
        "inner": inner,
        "heads": heads,
        "head_size": size,
        "keys": groups * size,
        "prefix": 2 * layers * groups * size,
        "norms": len(norms),
        "rotary": int(size * rotary),
    }


def _chatglm_6b_shapes(config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
    """Return shapes and sizes of ChatGLM-6B."""
    hidden, inner, layers = config["hidden_size"], config["inner_hidden_size"], config["num_layers"]
    norms = ("input_layernorm", "post_attention_layernorm")
    matrices = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    layer: Shapes = {f"{name}.{end}": (hidden,) for name in norms for end in ("weight", "bias")}
    layer |= {f"{name}.weight": shape for name, shape in matrices.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    shapes |= {f"transformer.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    shapes |= {f"transformer.final_layernorm.{end}": (hidden,) for end in ("weight", "bias")}
    shapes[HEAD] = (config["vocab_size"], hidden)
    heads = config["num_attention_heads"]
    return shapes, {
        "layers": layers,
        "hidden": hidden,
        "inner": inner,
        "heads": heads,
        "head_size": hidden // heads,
        "keys": hidden,
        # The original's prefix network begins with embeddings of the hidden width.
        "prefix": hidden,
        "norms": 2,
        "rotary": hidden // heads,
    }


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's parameters, and which are trained."""

    shapes: Shapes
    """Name -> shape of every parameter, the adapter's too, as in the real model."""
    trained: frozenset[str]
    """Names of the trained parameters."""
    sizes: Sizes
    targets: frozenset[str] = frozenset()
    """Names of the linear layers that LoRA is added to."""
    received: float = 1.0
    """Most rows that a rank's experts receive, divided by the rows that the rank sends."""
    teacher: "Outline | None" = None
    """The teacher of distillation, if it is another model."""

    @property
    def is_v1(self) -> bool:
        """Whether the model is ChatGLM-6B's own class."""
        return any(name.startswith(("transformer.layers.", "transformer.final_layernorm.")) for name in self.shapes)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """Rows and columns of the output layer, which may be the embedding."""
        matrices = [shape for name, shape in self.shapes.items() if name in _OUTPUT] or [
            shape for name, shape in self.shapes.items() if len(shape) == 2 and layer_of(name) < 0
        ]
        return max(matrices)[0], max(matrices)[1]

    @property
    def trains_head(self) -> bool:
        """Whether the output layer's weight is trained."""
        tied = not any(name in self.shapes for name in _OUTPUT)
        trained_matrices = (name for name in self.trained if TRAINED_ROWS not in name)
        return any(("embed" in name if tied else name in _OUTPUT) for name in trained_matrices)

    def largest_layer(self, inside: bool = False) -> int:
        """Return the parameters of the largest layer; unless `inside`, those outside of layers count as one."""
        layers: Counter[int] = Counter()
        for name, shape in self.shapes.items():
            if not name.startswith(TOWERS):
                layers[layer_of(name)] += math.prod(shape)
        return max(size for layer, size in layers.items() if layer >= 0 or not inside)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_active(self) -> int:
        """Number of parameters that one token is computed with; all if MIXTURES lacks the model type."""
        return sum(elements_used_by_token(name, math.prod(shape), self.sizes) for name, shape in self.shapes.items())

    @property
    def num_trained(self) -> int:
        """Number of trained parameters."""
        return self.count(self.trained)

    def count(self, names: Iterable[str]) -> int:
        """Return the number of elements of some parameters."""
        return sum(math.prod(self.shapes[name]) for name in names)


def with_tuning(shapes: Shapes, sizes: Sizes, tuning: schema.TuningConfig, targets: Targets | None = None) -> Outline:
    """Return the outline of a model with a fine-tuning method's parameters; `tuning.adapter` is not read. `targets`:
    the layers that each value of tuning.target_modules matches, only for LoRA; without it they are found by name.
    """
    if tuning.method is schema.TuningMethod.full:
        return Outline(shapes, frozenset(name for name in shapes if not name.startswith(TOWERS)), sizes)
    if tuning.method is schema.TuningMethod.freeze:
        trained = {name for name in shapes if layer_of(name) >= sizes["layers"] - tuning.last_layers}
        for pattern in tuning.patterns:
            trained.update(check_matches("tuning.patterns", pattern, shapes))
        return Outline(shapes, frozenset(trained), sizes)
    if tuning.method in (schema.TuningMethod.lora, schema.TuningMethod.qlora):
        return _with_lora(shapes, sizes, tuning, (targets or {}).get(" ".join(tuning.target_modules), []))
    if tuning.method is schema.TuningMethod.ptuning_v2:
        added = _prefix_encoder_shapes(sizes, tuning)
    else:
        added = {"soft_prompt.embedding.weight": (tuning.num_tokens, sizes["hidden"])}
    return Outline(shapes | added, frozenset(added), sizes)


def _prefix_encoder_shapes(sizes: Sizes, tuning: schema.TuningConfig) -> Shapes:
    """Return the shapes of the parameters of P-Tuning v2 (models/prompt_tuning.py)."""
    keys_and_values = 2 * sizes["layers"] * sizes["keys"]
    if not tuning.projection:
        return {"prefix_encoder.embedding.weight": (tuning.num_tokens, keys_and_values)}
    return {
        "prefix_encoder.embedding.weight": (tuning.num_tokens, sizes["prefix"]),
        "prefix_encoder.trans.0.weight": (sizes["hidden"], sizes["prefix"]),
        "prefix_encoder.trans.0.bias": (sizes["hidden"],),
        "prefix_encoder.trans.2.weight": (keys_and_values, sizes["hidden"]),
        "prefix_encoder.trans.2.bias": (keys_and_values,),
    }


def with_trained_rows(outline: Outline, count: int) -> Outline:
    """Return the outline of a model with LoRA that also trains so many rows of its embedding and output layer, unless
    one of these is trained in full.
    """
    vocabulary = outline.vocabulary
    tables = [name for name, shape in outline.shapes.items() if shape == vocabulary and layer_of(name) < 0]
    if any(name in outline.trained for name in tables):
        return outline
    ends = f".{TRAINED_ROWS}.trainable_tokens_delta.default"
    rows = {name.removesuffix(".weight") + ends: (count, vocabulary[1]) for name in tables}
    return replace(outline, shapes=outline.shapes | rows, trained=outline.trained | rows.keys())


def _with_lora(shapes: Shapes, sizes: Sizes, tuning: schema.TuningConfig, targets: list[str]) -> Outline:
    """Return the outline of a model with LoRA in `targets`, or in those of the settings if there are none."""
    # A head that is tied to the embedding can be a target, though it has no parameter of its own.
    embedded = [shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    is_tied = bool(embedded) and not any(name in shapes for name in _OUTPUT)
    named = shapes | {HEAD: embedded[0]} if is_tied else shapes
    modules = {
        name.removesuffix(".weight"): shape
        for name, shape in named.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith(_ROUTERS)
    }
    experts = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    if experts:  # peft mistakes linear layers of these names for experts (adapter_settings.mistaken_for_experts)
        modules = {name: shape for name, shape in modules.items() if not name.endswith(_EXPERT_LIKE_NAMES)}
    linear = [name for name in modules if layer_of(name) >= 0]
    patterns = tuning.target_modules or default_targets("", linear)
    if not targets and ALL_LINEAR in patterns:
        targets = linear
    elif not targets:
        fitting = modules.keys() | experts.keys()
        targets = [name for pattern in patterns for name in check_matches("tuning.target_modules", pattern, fitting)]
    owners = {name.rpartition(".")[0] for name in named}
    saved = {name for pattern in tuning.save_modules for name in check_matches("tuning.save_modules", pattern, owners)}
    added: Shapes = {}
    frozen: Shapes = {}
    for name in dict.fromkeys(targets):
        if name in experts:
            number, out, width = experts[name]
            added[f"{name}.lora_A.default.weight"] = (tuning.rank * number, width)
            added[f"{name}.lora_B.default.weight"] = (out, tuning.rank, number)
            continue
        out, width = named[f"{name}.weight"]
        added[f"{name}.lora_A.default.weight"] = (tuning.rank, width)
        added[f"{name}.lora_B.default.weight"] = (out, tuning.rank)
        if tuning.init in (schema.LoraInit.pissa, schema.LoraInit.olora):
            frozen |= {f"{name}.initial_A": (tuning.rank, width), f"{name}.initial_B": (out, tuning.rank)}
        if tuning.dora:
            added[f"{name}.lora_magnitude_vector.default.weight"] = (out,)
    for name, shape in named.items():
        owner, _, end = name.rpartition(".")
        if owner in saved:  # peft keeps the original too
            added[f"{owner}.modules_to_save.default.{end}"] = shape
    return Outline(shapes | added | frozen, frozenset(added), sizes, frozenset(targets))


@cache
def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter is in, -1 for none."""
    if name.startswith("prefix_encoder."):
        return -1
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


_ROUTERS = (".gate.weight", ".router.weight")
"""Names of routers' matrices in transformers (5.23), which are no nn.Linear."""
_EXPERT_LIKE_NAMES = (".gate_proj", ".up_proj", ".down_proj")


def active_parameters_line(outline: Outline) -> list[str]:
    """Return a line about active parameters in a list, [] if the model has no experts, or they are not known."""
    sizes, shapes = outline.sizes, outline.shapes
    if "chosen" not in sizes:
        return []
    inner = sum(
        elements_used_by_token(name, math.prod(shape), sizes) for name, shape in shapes.items() if layer_of(name) >= 0
    )
    text = tr(
        "Mixture of experts: {active} of {total} parameters are active per token, {inner} of those in layers ({chosen} "
        "of {count} routed experts in each).",
        active=f"{outline.num_active:,}",
        total=f"{outline.num_parameters:,}",
        inner=f"{inner:,}",
        chosen=sizes["chosen"],
        count=sizes["experts"],
    )
    return [text]
