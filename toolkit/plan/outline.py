"""The outline of the model that a config names: its parameters by name and shape, what tuning adds and trains, and what
a stage or a rank has of it. No torch.

Known by formula are ChatGLM-6B's own class and, of transformers, GLM, GLM-4, Llama, Mistral, Qwen2 and Qwen3; any other
model is measured once and cached.
"""

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from toolkit import children, disk
from toolkit.config import files, mesh, schema
from toolkit.messages import ConfigError, ModelError, did_you_mean, file_bytes, joined, parsed_json, say, tr

Shapes = dict[str, tuple[int, ...]]
Sizes = dict[str, int]
"""layers, hidden, inner, heads, head_size, keys (width of all keys of a token), prefix (where P-Tuning's network
begins), norms (in a layer), rotary (dimensions of a head that turn with the position); and `flop_sizes`."""
_HEAD = "lm_head.weight"
SCORE = "score.weight"
"""What transformers calls the head of a sequence classifier."""
_OUTPUT = (_HEAD, "lm_head.modules_to_save.default.weight", SCORE, "score.modules_to_save.default.weight")
_DENSE = ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
MIXTURES = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe"),
)
"""`model_type` of the mixtures of experts whose FLOPs are known, as a test compares: the routed experts of a layer are
one tensor, and num_experts_per_tok of them compute a token."""


def shapes_of_config(config: Mapping[str, Any]) -> tuple[Shapes, Sizes] | None:
    """Return parameters and sizes by a config.json, official ChatGLM or transformers; None for an unknown model."""
    if "inner_hidden_size" in config:
        return _v1(config)
    if "padded_vocab_size" in config:
        is_grouped = config.get("multi_query_attention")
        return _dense(
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
    is_known = config.get("model_type") in _DENSE and "quantization_config" not in config
    return _dense(config) if is_known else None


def flop_sizes(read: Callable[[str], Any]) -> Sizes:
    """Return what FLOPs depend on besides shapes, by the values of a config: layers, heads, head_size; of latent
    attention value_size, and cached (numbers of a token and layer); of MIXTURES experts, chosen ones of a token, and
    expert_inner, the inner width of one.

    {} for a model whose attention is not known.
    """
    layers, heads, hidden = (read(name) or 0 for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden):
        return {}
    sizes = {"layers": layers, "heads": heads, "head_size": read("head_dim") or hidden // heads}
    if latent := read("kv_lora_rank"):
        turned, value = read("qk_rope_head_dim"), read("v_head_dim")
        sizes |= {"head_size": read("qk_nope_head_dim") + turned, "value_size": value, "cached": latent + turned}
    if read("model_type") in MIXTURES:
        sizes["experts"] = next(filter(None, map(read, ("n_routed_experts", "num_local_experts", "num_experts"))))
        sizes["chosen"] = read("num_experts_per_tok")
        sizes["expert_inner"] = read("moe_intermediate_size") or read("intermediate_size")
    return sizes


BUSIEST = 1.5
"""Assumed, not measured: of the mean, how many rows the rank gets that gets the most, where ranks divide experts."""


def busiest(capacity: float) -> float:
    """Return that number, where experts take no more than a capacity says (`model.expert_capacity`; 0: all)."""
    return min(BUSIEST, capacity or BUSIEST)


def is_routed(name: str) -> bool:
    """Whether a parameter is of the experts that a router chooses among; shared ones see every token."""
    return ".experts." in name


def met_by_token(name: str, count: int, sizes: Mapping[str, int]) -> int:
    """Return how many of the `count` numbers of a parameter one token meets: of routed experts the chosen ones'."""
    return count * sizes["chosen"] // sizes["experts"] if "chosen" in sizes and is_routed(name) else count


def shape_of_random(vocab_size: int, shape: schema.ShapeConfig) -> tuple[Shapes, Sizes]:
    """Return the same of a random model (`model.init=random`)."""
    return _dense(
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


def _dense(config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
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
        shapes[_HEAD] = (vocab, hidden)
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


def _v1(config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
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
    shapes[_HEAD] = (config["vocab_size"], hidden)
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
    """What is trained, and in what."""

    shapes: Shapes
    """Every parameter, with what tuning adds, named as the real model's."""
    trained: frozenset[str]
    sizes: Sizes
    targets: frozenset[str] = frozenset()
    """Names of the linear layers that LoRA is added to."""
    received: float = 1.0
    """Rows for experts that a rank gets at most, divided by those that it sends."""
    teacher: "Outline | None" = None
    """Another model that this one is distilled from."""

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
        """Whether the output layer's own gradient is needed."""
        tied = not any(name in self.shapes for name in _OUTPUT)
        return any(("embed" in name if tied else name in _OUTPUT) for name in self.trained)

    def largest_layer(self, inside: bool = False) -> int:
        """Return the number of parameters of the largest layer; what is in none counts as a layer, but for `inside`."""
        layers: Counter[int] = Counter()
        for name, shape in self.shapes.items():
            layers[layer_of(name)] += math.prod(shape)
        return max(size for layer, size in layers.items() if layer >= 0 or not inside)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_active(self) -> int:
        """Those that one token meets; all of a mixture of experts that MIXTURES does not name."""
        return sum(met_by_token(name, math.prod(shape), self.sizes) for name, shape in self.shapes.items())

    @property
    def num_trained(self) -> int:
        """Those that are trained."""
        return _count(self, self.trained)


def tuned(shapes: Shapes, sizes: Sizes, tuning: schema.TuningConfig) -> Outline:
    """Return a model with what a fine-tuning method adds to it, and what is trained; `tuning.adapter` is not read."""
    if tuning.method is schema.TuningMethod.full:
        return Outline(shapes, frozenset(shapes), sizes)
    if tuning.method is schema.TuningMethod.freeze:
        names = {name for name in shapes if layer_of(name) >= sizes["layers"] - tuning.last_layers}
        for pattern in tuning.patterns:
            names.update(check_matches("tuning.patterns", pattern, shapes))
        return Outline(shapes, frozenset(names), sizes)
    if tuning.method in (schema.TuningMethod.lora, schema.TuningMethod.qlora):
        return _with_lora(shapes, sizes, tuning)
    added: Shapes = {"soft_prompt.embedding.weight": (tuning.num_tokens, sizes["hidden"])}
    if tuning.method is schema.TuningMethod.ptuning_v2:
        width = 2 * sizes["layers"] * sizes["keys"]
        added = {"prefix_encoder.embedding.weight": (tuning.num_tokens, width)}
        if tuning.projection:
            begin, hidden = sizes["prefix"], sizes["hidden"]
            added = {
                "prefix_encoder.embedding.weight": (tuning.num_tokens, begin),
                "prefix_encoder.trans.0.weight": (hidden, begin),
                "prefix_encoder.trans.0.bias": (hidden,),
                "prefix_encoder.trans.2.weight": (width, hidden),
                "prefix_encoder.trans.2.bias": (width,),
            }
    return Outline(shapes | added, frozenset(added), sizes)


def _with_lora(shapes: Shapes, sizes: Sizes, tuning: schema.TuningConfig) -> Outline:
    # A head that is the embedding's weight is a module that can be named, though it has no parameter of its own.
    embedded = [shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    is_tied = bool(embedded) and not any(name in shapes for name in _OUTPUT)
    named = shapes | {_HEAD: embedded[0]} if is_tied else shapes
    modules = {
        name.removesuffix(".weight"): shape
        for name, shape in named.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith(_ROUTERS)
    }
    experts = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    if experts:  # peft takes their names for the routed experts', but Qwen2 MoE's (adapter_settings.taken_for_experts)
        modules = {name: shape for name, shape in modules.items() if not name.endswith(_OF_SINGLE_EXPERTS)}
    linear = [name for name in modules if layer_of(name) >= 0]
    patterns = tuning.target_modules or default_targets("", linear)
    targets = linear
    if ALL_LINEAR not in patterns:
        fitting = modules.keys() | experts.keys()
        targets = [name for one in patterns for name in check_matches("tuning.target_modules", one, fitting)]
    owners = {name.rpartition(".")[0] for name in named}
    saved = {name for one in tuning.save_modules for name in check_matches("tuning.save_modules", one, owners)}
    added: Shapes = {}
    for name in dict.fromkeys(targets):
        if name in experts:
            number, out, width = experts[name]
            added[f"{name}.lora_A.default.weight"] = (tuning.rank * number, width)
            added[f"{name}.lora_B.default.weight"] = (out, tuning.rank, number)
            continue
        out, width = modules[name]
        added[f"{name}.lora_A.default.weight"] = (tuning.rank, width)
        added[f"{name}.lora_B.default.weight"] = (out, tuning.rank)
        if tuning.dora:
            added[f"{name}.lora_magnitude_vector.default.weight"] = (out,)
    for name, shape in named.items():
        owner, _, end = name.rpartition(".")
        if owner in saved:  # peft keeps the original beside the copy that it trains
            added[f"{owner}.modules_to_save.default.{end}"] = shape
    return Outline(shapes | added, frozenset(added), sizes, frozenset(targets))


@cache
def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter belongs to, -1 for none."""
    if name.startswith("prefix_encoder."):
        return -1
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


ALL_LINEAR = "all-linear"
_ROUTERS = (".gate.weight", ".router.weight")
"""What transformers (5.23) calls the matrices of routers, which are no linear layers of PyTorch's."""
_ATTENTION = {"chatglm": ["query_key_value"], "glm": ["q_proj", "k_proj", "v_proj"]}
"""By model type, what the ChatGLM repositories train: query, key and value, one matrix in their own code."""
_OF_SINGLE_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
_USUAL = (
    ["q_proj", "k_proj", "v_proj"],
    ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
    ["query_key_value"],
    ["qkv_proj"],
    ["c_attn"],
    ["Wqkv"],
)
"""What query, key and value are called elsewhere."""


def select_names(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return the names that match any of the patterns (`*`, `?`) as a whole or from a dot on."""
    return [name for name in names if any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns)]


def default_targets(model_type: str, linear: Collection[str]) -> list[str]:
    """Return LoRA's default `target_modules`: query, key and value, else every linear layer."""
    usual = (names for names in _USUAL if all(select_names(linear, [name]) for name in names))
    return _ATTENTION.get(model_type) or next(usual, [ALL_LINEAR])


def check_matches(key: str, pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that match a pattern; an error if there are none."""
    if found := select_names(names, [pattern]):
        return found
    ends = sorted({".".join(name.split(".")[-2:]) if "." in pattern else name.rpartition(".")[2] for name in names})
    raise ConfigError(
        joined(
            tr("{key}: nothing in this model is called '{pattern}'.", key=key, pattern=pattern),
            did_you_mean(pattern, ends),
            tr("Known: {names}.", names=", ".join(ends)),
        )
    )


def stage_outlines(outline: Outline, num_stages: int) -> list[Outline]:
    """Return the pipeline stages of a model as models, in the order in which they compute.

    Its head has no rows where a stage lacks it; states that come in are a trained parameter of no rows, as they have a
    gradient. What tuning adds does not count where stages are divided. ModelError for a stage that would train nothing.
    """
    layers, hidden = outline.sizes["layers"], outline.sizes["hidden"]
    before = {name: shape for name, shape in outline.shapes.items() if "embed" in name}
    after = {name: shape for name, shape in outline.shapes.items() if layer_of(name) < 0 and name not in before}
    after |= {} if {_HEAD, SCORE} & {*after} else {name: shape for name, shape in before.items() if not _is_added(name)}
    inner = [{name: s for name, s in outline.shapes.items() if layer_of(name) == layer} for layer in range(layers)]
    parts = [before, *inner, after]
    sizes = [sum(math.prod(shape) for name, shape in part.items() if not _is_added(name)) for part in parts]
    bounds = stage_bounds(sizes, layers, num_stages)
    found = []
    for stage, (first, end) in enumerate(pairwise(bounds), 1):
        held = {name: shape for part in parts[first:end] for name, shape in part.items()}
        trained, names = held.keys() & outline.trained, list(held)
        if not trained:
            raise untrained_stage(num_stages, stage, names[0], names[-1])
        before_it = max(first - 1, 0)  # layers, which are counted from the stage's first
        states: Shapes = {"hidden_states": (0, hidden)} if first else {}
        head: Shapes = {_HEAD: (0, hidden)} if end < len(parts) else {}
        found.append(
            replace(
                outline,
                shapes={_renumbered(name, before_it): shape for name, shape in held.items()} | states | head,
                trained=frozenset(_renumbered(name, before_it) for name in trained) | states.keys(),
                targets=frozenset(_renumbered(name, before_it) for name in outline.targets if f"{name}.weight" in held),
                sizes=outline.sizes | {"layers": min(end, layers + 1) - max(first, 1)},
            )
        )
    return found


def _renumbered(name: str, before: int) -> str:
    """Return a parameter's name where so many layers before its own are left out."""
    number = layer_of(name)
    return name.replace(f".{number}.", f".{number - before}.", 1)


def untrained_stage(stages: int, stage: int, first: str, last: str) -> ModelError:
    """Return the error about a stage, from 1, without a parameter to train: DeepSpeed's optimizers want one, and what a
    stage hands on has to have a gradient.
    """
    return ModelError(
        "parallel.pipeline = {stages}: stage {stage}, from {first} to {last}, would have nothing to train. Train "
        "something in each stage (tuning.last_layers, tuning.patterns, tuning.target_modules), or use parallel=data "
        "with zero=stage3, which divides frozen parameters too.",
        stages=stages,
        stage=stage,
        first=first,
        last=last,
    )


def _is_added(name: str) -> bool:
    """Whether a parameter is one that LoRA adds to the model."""
    return ".lora_" in name or ".modules_to_save." in name


def stage_bounds(sizes: Sequence[int], layers: int, num_stages: int) -> list[int]:
    """Return where stages begin and end in a model's parts, by size: an embedding, `layers` layers, and the rest. Each
    stage has a layer, so that each has what an adapter trains.
    """
    if num_stages > layers:
        raise ModelError(
            "parallel.pipeline = {stages} is more than the model's {layers} layers. Use at most {layers}.",
            stages=num_stages,
            layers=layers,
        )
    units = [sizes[0] + sizes[1], *sizes[2:layers], sum(sizes[layers:])]
    return [0, *(bound + 1 for bound in balance_stages(units, num_stages)[1:-1]), len(sizes)]


def balance_stages(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return where the parts of a sequence begin and end that differ least: as DeepSpeed divides layers by parameters.

    Step by step the division is kept whose largest and smallest part differ least, of equal ones the one whose last
    part is the shortest (deepspeed 0.19.8, runtime/utils.py, partition_balanced). There are more `sizes` than parts, of
    which none is empty.
    """
    ends = [0, *accumulate(sizes)]
    found: dict[int, tuple[float, float, list[int]]] = {0: (0, math.inf, [0])}
    for _ in range(num_parts):
        longer = {}
        for end in range(1, len(ends)):
            ways = [
                (max(largest, ends[end] - ends[begin]), min(smallest, ends[end] - ends[begin]), [*bounds, end])
                for begin, (largest, smallest, bounds) in found.items()
                if begin < end
            ]
            if ways:
                longer[end] = min(reversed(ways), key=lambda way: way[0] - way[1])
        found = longer
    return found[len(sizes)][2]


def tensor_part(outline: Outline, size: int) -> Outline:
    """Return a rank's part of a model under tensor parallelism."""
    if size == 1:
        return outline
    sizes = outline.sizes
    mesh.check_split(
        {"heads": sizes["heads"], "key_heads": sizes["keys"] // sizes["head_size"], "inner": sizes["inner"]}, size
    )
    shapes = {name: mesh.part_shape(name, shape, size) for name, shape in outline.shapes.items()}
    own = {name: sizes[name] // size for name in ("heads", "keys", "inner")}
    return replace(outline, shapes=shapes, sizes=sizes | own)


def active_line(outline: Outline) -> list[str]:
    """Return a line on a mixture of experts whose active parameters are known."""
    sizes, shapes = outline.sizes, outline.shapes
    if "chosen" not in sizes:
        return []
    inner = sum(met_by_token(name, math.prod(shape), sizes) for name, shape in shapes.items() if layer_of(name) >= 0)
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


def _count(outline: Outline, names: Iterable[str]) -> int:
    return sum(math.prod(outline.shapes[name]) for name in names)


def expert_part(outline: Outline, size: int, capacity: float = 0.0) -> Outline:
    """Return a rank's part of a model whose routed experts are divided over `size` ranks; all else is whole."""
    if size == 1:
        return outline
    routed = {name: shape for name, shape in outline.shapes.items() if is_routed(name)}
    counts = {shape[0] for name, shape in routed.items() if not _is_added(name)} or {0}
    if uneven := [count for count in counts if count % size or not count]:
        raise ConfigError(
            "parallel.expert = {size} cannot divide the {count} routed experts of a layer of this model. Use a divisor "
            "of that number, or 1 for a model without them.",
            size=size,
            count=uneven[0],
        )
    parts = {
        name: (*shape[:-1], shape[-1] // size) if "lora_B" in name else (shape[0] // size, *shape[1:])
        for name, shape in routed.items()
    }
    # The tokens of as many ranks meet these experts, so that those of one rank cost what they did.
    sizes = outline.sizes | {"experts": outline.sizes.get("experts", 0) // size, "expert_ranks": size}
    return replace(outline, shapes=outline.shapes | parts, sizes=sizes, received=busiest(capacity))


def rank_part(outline: Outline, cfg: schema.RunConfig) -> Outline:
    """Return what a rank has of a model, or of a pipeline stage of it, before ZeRO divides that."""
    return expert_part(tensor_part(outline, cfg.parallel.tensor), cfg.parallel.expert, cfg.model.expert_capacity)


def zero_groups(part: Outline, ranks: int) -> list[tuple[int, int, int]]:
    """Return of a rank's part parameters, trained ones, and over how many of `ranks` ZeRO divides them: routed experts
    over those that have the same ones.
    """
    size = part.sizes.get("expert_ranks", 1)
    routed = {name for name in part.shapes if size > 1 and is_routed(name)}
    groups = ((part.shapes.keys() - routed, ranks), (routed, ranks // size))
    return [(_count(part, names), _count(part, names & part.trained), over) for names, over in groups]


def dispatched_bytes(part: Outline, states_bytes: int, recomputes: bool) -> tuple[float, int]:
    """Return the bytes that a rank sends to those which have other experts for a micro-batch, and in how many
    collectives: the states of each token go to each chosen expert and back, forward, backward, and in recomputation;
    before they go, how many will.

    Experts are assumed to be chosen equally often. `states_bytes`: hidden states of a micro-batch.
    """
    size = part.sizes.get("expert_ranks", 1)
    if size == 1:
        return 0.0, 0
    layers, passes = len({layer_of(name) for name in part.shapes if is_routed(name)}), 3 if recomputes else 2
    once = part.sizes.get("chosen", 0) * states_bytes * (size - 1) / size
    return layers * passes * 2 * once, layers * (3 * passes - 1)


def exchanged_bytes(outline: Outline, size: int, states_bytes: int, recomputes: bool) -> tuple[float, int]:
    """Return the bytes that a rank sends to its neighbours for a micro-batch, and in how many collectives.

    Of each matrix that is split by columns the output is added up in the forward pass, and where that is computed
    again once more, of each other one what goes back in the backward pass (deepspeed 0.19.8, module_inject/layers.py:
    one all-reduce for each matrix, also of three that share an input); ring algorithms taken for granted.
    `states_bytes`: hidden states of a micro-batch.
    """
    if size == 1:
        return 0.0, 0
    kinds = {name: mesh.split_of(name) for name, shape in outline.shapes.items() if len(shape) == 2}
    # What is added up is as wide as the hidden states, and between LoRA's two factors as their rank.
    columns = [outline.shapes[name][0] for name, kind in kinds.items() if kind is mesh.Split.columns]
    others = [outline.shapes[name][1] for name, kind in kinds.items() if kind not in (None, mesh.Split.columns)]
    widths = [*columns, *others, *(columns if recomputes else ())]
    return sum(widths) / outline.sizes["hidden"] * 2 * (size - 1) / size * states_bytes, len(widths)


_MEASURE_S = 300
NO_MODEL = 3
"""Exit code of what measures, where the last line says why this is no model that could be trained."""
_FORM = 3
"""Of what is remembered; another one is measured anew."""


def outline_of(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline:
    """Return what is trained, and in what; a model whose group has `model.published` needs no directory.

    `vocab_size`: of a random model's tokenizer; 0 takes the most that the recipe allows.
    """
    found = cached_outline(cfg, vocab_size) or _tuned(cfg, *_measured(cfg, config_of(cfg)))
    if not found.num_trained:
        raise ConfigError(tr("tuning: nothing of this model would be trained as far as its parameters' names tell."))
    other = _teacher(cfg)
    return replace(found, teacher=outline_of(other)) if other else found


def cached_outline(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline | None:
    """Return the same; None for a model that no formula knows and that has not been measured yet."""
    model = cfg.model
    if model.init is schema.Init.random:
        return _taught(cfg, _tuned(cfg, *shape_of_random(vocab_size or model.shape.vocab_size, model.shape)))
    config = config_of(cfg)
    try:
        found = shapes_of_config(config)
        if found and (texts := [size for shape in found[0].values() for size in shape if type(size) is not int]):
            raise ValueError(tr("{value} is no number", value=texts[0]))  # a text times a number is a longer text
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=_file(cfg), reason=repr(error)) from error
    if found is None and (kept := _cache_of(cfg, config)).is_file():
        found = _read(kept)
    return _taught(cfg, _tuned(cfg, *found)) if found else None


def _taught(cfg: schema.RunConfig, outline: Outline) -> Outline | None:
    """Return an outline with that of the teacher; None where it has not been measured yet."""
    if (other := _teacher(cfg)) is None:
        return outline
    found = cached_outline(other)
    return found and replace(outline, teacher=found)


def _teacher(cfg: schema.RunConfig) -> schema.RunConfig | None:
    """Return a config of the teacher, as a model that is trained; None where there is no other model."""
    if cfg.task.kind is not schema.TaskKind.distill or not cfg.distill.teacher or schema.has_own_teacher(cfg):
        return None
    path = cfg.distill.teacher
    published = published_models("hub_id").get(path, {})
    model = replace(cfg.model, init=schema.Init.pretrained, path=path, name=path, published=published)
    return replace(cfg, task=schema.TaskConfig(), model=model, tuning=schema.TuningConfig())


def _tuned(cfg: schema.RunConfig, shapes: Shapes, sizes: Sizes) -> Outline:
    """Return a language model with the head that the task gives it, and what is trained of it."""
    if cfg.task.has_head:
        rest = {name: shape for name, shape in shapes.items() if name != _HEAD}
        # Labels that only the data know are taken for two: the head is next to nothing.
        head = len(schema.score_labels(cfg)) or 2, sizes["hidden"]
        shapes, sizes = rest | {SCORE: head}, sizes | {"logits_change": 0}
    return tuned(shapes, sizes, tuning_of(cfg))


def tuning_of(cfg: schema.RunConfig) -> schema.TuningConfig:
    """Return `tuning`; with the head of a task that adds one, which is always trained."""
    if not cfg.task.has_head:
        return cfg.tuning
    given, module = cfg.tuning, SCORE.partition(".")[0]
    return replace(given, patterns=[*given.patterns, SCORE], save_modules=[*given.save_modules, module])


@cache
def published_models(by: str = "name") -> dict[str, dict[str, Any]]:
    """Return the models of conf/model/ whose sizes are known, with what their config.json says of them: by name, or by
    another key of their files, such as hub_id.
    """
    groups = [files.read(path).values for path in sorted((files.conf_folder() / "model").glob("*.yaml"))]
    return {group[by]: group["published"] for group in groups if "published" in group and by in group}


def config_of(cfg: schema.RunConfig) -> dict[str, Any]:
    """Return config.json of the model, or what its group says of a published one that is not there."""
    model, file = cfg.model, _file(cfg)
    if file is None:
        if model.published:
            return model.published
        raise ConfigError(
            "model.path = '{path}' holds no config.json, and '{name}' is none of the models whose "
            "sizes are known here ({known}). Set model.path to a directory with the model's "
            "config.json; no weights are needed.",
            path=model.path,
            name=model.name,
            known=", ".join(published_models()),
        )
    try:
        config = parsed_json(file_bytes(file))
        if not isinstance(config, dict):
            raise ValueError("[]")
    except (ValueError, OSError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=file, reason=error) from None
    return config


def _file(cfg: schema.RunConfig) -> Path | None:
    file = Path(cfg.model.path) / "config.json"
    return file if cfg.model.path and file.is_file() else None


def _measured(cfg: schema.RunConfig, config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
    """Build the model on the meta device, in a process of its own, once for each config.json."""
    kept, folder = _cache_of(cfg, config), Path(cfg.model.path).absolute()
    say("{kind} is not known by formula: its outline is measured, once.", kind=config.get("model_type"))
    try:
        with tempfile.TemporaryDirectory() as published:
            if _file(cfg) is None:  # what model.published says of it
                folder = Path(published)
                (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            command = [sys.executable, "-m", "toolkit.models.outline", str(folder)]
            # Without a standard input: nobody is to be asked whether code of the folder may run.
            ran = children.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MEASURE_S)
        reason = (ran.stderr.strip().splitlines() or ["?"])[-1] if ran.returncode else ""
        if ran.returncode == NO_MODEL:
            raise ModelError(reason)
    except subprocess.TimeoutExpired:
        reason = tr("no answer within {seconds} s", seconds=_MEASURE_S)
    if reason:
        file = folder / "config.json"
        raise ConfigError("{file}: the model cannot be built to be measured: {reason}", file=file, reason=reason)
    write_cache(kept, json.loads(ran.stdout.strip().splitlines()[-1]))
    return _read(kept)


def _cache_of(cfg: schema.RunConfig, config: Mapping[str, Any]) -> Path:
    return cache_file(cfg, "outline", [config, _FORM, version("transformers")])


def _read(file: Path) -> tuple[Shapes, Sizes]:
    measured = json.loads(file.read_text(encoding="utf-8"))
    return {name: tuple(shape) for name, shape in measured["shapes"].items()}, measured["sizes"]


def cache_file(cfg: schema.RunConfig, kind: str, inputs: object) -> Path:
    """Return where something is kept that depends on these inputs alone."""
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.prepare.dir) / "plan" / f"{kind}-{key}.json"


def write_cache(file: Path, values: Any) -> None:
    """Write values as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(file, json.dumps(values).encode() + b"\n")
