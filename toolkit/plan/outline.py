"""The outline of a model: names and shapes of its parameters, with those of its fine-tuning method. No torch."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from toolkit.config import schema
from toolkit.plan.tuning_targets import SCORE, matching_names

Shapes = dict[str, tuple[int, ...]]
Targets = Mapping[str, list[str]]
"""`tuning.target_modules` joined by spaces (all-linear, "" for the usual ones) -> the layers that LoRA is added to."""
Sizes = dict[str, int]
"""layers, hidden, inner, heads, head_size, keys (width of a token's keys), prefix (width of P-Tuning's embedding before
its MLP), norms (in a layer), rotary (dimensions of a head that are rotated); and `flop_sizes`."""
HEAD = "lm_head.weight"
TOWERS = "towers."
"""How names begin of what the loss of text gives no gradient, such as towers for images: held, but never trained."""
TRAINED_ROWS = "token_adapter"
"""In names of rows of an embedding that LoRA trains along (peft's `trainable_token_indices`)."""
MAGNITUDES = ".lora_magnitude_vector.default.weight"
"""How the name of what DoRA trains more than LoRA in a linear layer ends, after the layer's."""
OUTPUT = (HEAD, "lm_head.modules_to_save.default.weight", SCORE, "score.modules_to_save.default.weight")
MIXTURES = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe"),
)
"""`model_type` of the mixtures of experts whose FLOPs are known, as a test compares: the routed experts of a layer are
one tensor, and num_experts_per_tok of them compute a token."""
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
    """See `flop_sizes`; raises whatever an odd config makes fail."""
    layers, heads, hidden = read("num_hidden_layers"), read("num_attention_heads"), read("hidden_size")
    if not (layers and heads and hidden):
        return {}
    sizes = {"layers": layers, "heads": heads, "head_size": read("head_dim") or hidden // heads}
    layer_types = read("layer_types") or ()
    num_without = sum(layer_type in WITHOUT_ATTENTION for layer_type in layer_types)
    if len(layer_types) == layers and num_without:
        sizes["attending"] = layers - num_without
    if latent := read("kv_lora_rank"):
        rotated, value = read("qk_rope_head_dim"), read("v_head_dim")
        sizes |= {"head_size": read("qk_nope_head_dim") + rotated, "value_size": value, "cached": latent + rotated}
    if read("model_type") in MIXTURES:
        sizes["experts"] = next(filter(None, map(read, ("n_routed_experts", "num_local_experts", "num_experts"))))
        sizes["chosen"] = read("num_experts_per_tok")
        sizes["expert_inner"] = read("moe_intermediate_size") or read("intermediate_size")
    return sizes


def is_routed(name: str) -> bool:
    """Whether a parameter belongs to routed experts, in contrast to shared ones, which see every token."""
    return ".experts." in name


def elements_used_by_token(name: str, count: int, sizes: Mapping[str, int]) -> int:
    """Return how many of a parameter's `count` elements a token is computed with; of routed experts the chosen ones."""
    return count * sizes["chosen"] // sizes["experts"] if "chosen" in sizes and is_routed(name) else count


def shapes_of_random(vocab_size: int, shape: schema.ShapeConfig) -> tuple[Shapes, Sizes]:
    """Return shapes and sizes of a random model (`model.init=random`)."""
    return decoder_shapes(
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


def decoder_shapes(config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
    """Return shapes and sizes of transformers' GLM, Llama and their kind by the keys of a config.json."""
    model_type, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    layers, heads, vocab = config["num_hidden_layers"], config["num_attention_heads"], config["vocab_size"]
    groups = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    is_glm = model_type in ("glm", "glm4")
    bias = model_type == "qwen2" or bool(config.get("attention_bias", False))
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] if model_type == "glm4" else []
    rows = {"q": heads * head_size, "k": groups * head_size, "v": groups * head_size}
    layer: Shapes = {f"self_attn.{name}_proj.weight": (width, hidden) for name, width in rows.items()}
    layer |= {f"self_attn.{name}_proj.bias": (width,) for name, width in rows.items() if bias}
    layer["self_attn.o_proj.weight"] = (hidden, heads * head_size)
    if bias and model_type in ("llama", "qwen3"):
        layer["self_attn.o_proj.bias"] = (hidden,)
    if model_type == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head_size,), "self_attn.k_norm.weight": (head_size,)}
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
    usual_share = 0.5 if is_glm else 1.0
    rotary_share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", usual_share))
    return shapes, {
        "layers": layers,
        "hidden": hidden,
        "inner": inner,
        "heads": heads,
        "head_size": head_size,
        "keys": groups * head_size,
        "prefix": 2 * layers * groups * head_size,
        "norms": len(norms),
        "rotary": int(head_size * rotary_share),
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
        matrices = [shape for name, shape in self.shapes.items() if name in OUTPUT]
        if not matrices:
            matrices = [shape for name, shape in self.shapes.items() if len(shape) == 2 and layer_of(name) < 0]
        rows, columns = max(matrices)  # with the most rows
        return rows, columns

    @property
    def trains_head(self) -> bool:
        """Whether the output layer's weight is trained."""
        is_tied = not any(name in self.shapes for name in OUTPUT)
        trained_matrices = (name for name in self.trained if TRAINED_ROWS not in name)
        return any(("embed" in name if is_tied else name in OUTPUT) for name in trained_matrices)

    def largest_layer(self, inside: bool = False) -> int:
        """Return the parameters of the largest layer; unless `inside`, all that are in no layer count as one more."""
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
    """Return the outline of a model with what a fine-tuning method trains of it or adds to it; `tuning.adapter` is not
    read. `targets`: of a measured model, the layers that LoRA is added to; without them they are found by their names.
    """
    if tuning.method is schema.TuningMethod.full:  # all but image and audio encoders
        return Outline(shapes, frozenset(name for name in shapes if not name.startswith(TOWERS)), sizes)
    if tuning.method is schema.TuningMethod.freeze:  # the last layers, and what `tuning.patterns` match
        trained = {name for name in shapes if layer_of(name) >= sizes["layers"] - tuning.last_layers}
        for pattern in tuning.patterns:
            trained.update(matching_names("tuning.patterns", pattern, shapes))
        return Outline(shapes, frozenset(trained), sizes)
    if tuning.method in (schema.TuningMethod.lora, schema.TuningMethod.qlora):
        from toolkit.plan.lora_outline import with_lora

        measured_layers = (targets or {}).get(" ".join(tuning.target_modules), [])
        return with_lora(shapes, sizes, tuning, measured_layers)
    if tuning.method is schema.TuningMethod.ptuning_v2:
        added = _prefix_encoder_shapes(sizes, tuning)
    else:  # prompt tuning
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


@cache
def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter is in, -1 for none."""
    if name.startswith("prefix_encoder."):
        return -1
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def rank_part(outline: Outline, cfg: schema.RunConfig) -> Outline:
    """Return a rank's part of a model, or of a pipeline stage, before ZeRO divides it."""
    if cfg.parallel.tensor == cfg.parallel.expert == 1:
        return outline
    from toolkit.plan.division import expert_part, tensor_part

    return expert_part(tensor_part(outline, cfg.parallel.tensor), cfg.parallel.expert, cfg.model.expert_capacity)


def zero_groups(part: Outline, ranks: int) -> list[tuple[int, int, int]]:
    """Return (number of parameters, of trained ones, ranks that ZeRO divides them over) of two groups: parameters that
    all `ranks` share, and routed experts, which only some ranks share.
    """
    size = part.sizes.get("expert_ranks", 1)
    routed = {name for name in part.shapes if size > 1 and is_routed(name)}
    groups = ((part.shapes.keys() - routed, ranks), (routed, ranks // size))
    return [(part.count(names), part.count(names & part.trained), over) for names, over in groups]
