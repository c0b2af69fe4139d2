"""The FLOPs of a training step, by the shapes of a model's parameters. No torch.

Only matrix products are counted, 2 FLOPs for each multiplication and addition; in a decoder they are nearly everything.
What the result needs is counted, even if an implementation computes more:

- Linear layers, for each token that is not padding. Looking up an embedding is no FLOP. Of routed experts those that
  are chosen for a token, K of E, and the router's choice among all; in a first trained layer what runs side by side
  (router, shared and routed experts) counts as if one followed the other.
- Attention, for each pair of a token and one that it sees: L (L + 1) / 2 of a sample of L tokens, also in packed rows.
A
  kernel without causality computes L x L, one without samples the square of the row, which is not needed. ChatGLM-6B's
  prompts are counted as causal, though their tokens see all of the prompt.
- The output layer, for trained tokens only: no other token's logits are needed.
- Backward, the same again for the gradients of trained weights, and the same again for those of activations down to the
  first trained parameter; twice for the pairs of attention. In the first trained layer attention's gradients count in
  full, even if LoRA is not in queries, keys or values, as kernels compute them together.
- `recomputed` is what activation checkpointing adds; it belongs to hardware FLOPs, not to model FLOPs.

Not counted: the states of linear attention and state spaces, DoRA's norms, P-Tuning's projection, the tokens of a soft
prompt. Mixtures of experts are known by `outline.MIXTURES`.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from toolkit.plan.outline import Shapes, elements_used_by_token, is_routed, layer_of

_HEAD_NAMES = ("lm_head", "score.", "embed_out", "output_layer")
_ORDER_IN_LAYER = (
    ("input_layernorm", "ln_1"),
    (
        *("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn", "Wqkv", "q_norm", "k_norm"),
        *("q_a_proj", "kv_a_proj"),  # of latent attention, as what follows them
    ),
    ("q_b_proj", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm"),
    (),  # attention itself
    ("o_proj", "out_proj", "attention.dense", "attn.c_proj"),
    ("norm", "ln_2"),
    ("gate_proj", "up_proj", "dense_h_to_4h", "c_fc", "fc1", "experts.base_layer.lora_"),
    ("down_proj", "dense_4h_to_h", "c_proj", "fc2", "mlp.gate.", "router", "expert_gate", "experts.lora_"),
)
"""Parts of the names of a layer's parameters, in the order in which the layer uses them."""
_KEYS, _ATTENTION = 4, 6
"""Twice their index in that order, as LoRA's second factor comes between a matrix and the next one."""
Position = tuple[int, int]
"""When a forward pass uses a parameter: its layer (-1: before, the number of layers: after them), and the order there.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts of tokens that a pass computes."""

    tokens: int
    """Tokens that go through the layers."""
    pairs: int
    """Pairs of a token and one that it sees, itself included."""
    trained_tokens: int
    """Tokens whose loss is computed."""


@dataclass(frozen=True, slots=True)
class FlopRates:
    """FLOPs per unit of `Work`."""

    per_token: int = 0
    """Of the linear layers."""
    per_pair: int = 0
    """Of attention, all layers together."""
    per_trained_token: int = 0
    """Of the output layer."""

    def flops(self, work: Work) -> int:
        """Return the FLOPs of some work."""
        return self.per_token * work.tokens + self.per_pair * work.pairs + self.per_trained_token * work.trained_tokens


@dataclass(frozen=True, slots=True)
class Formula:
    """The FLOPs of training a model."""

    forward: FlopRates
    backward: FlopRates
    """Of the backward pass, without recomputation."""
    recomputed: FlopRates
    """What activation checkpointing adds."""

    def model_flops(self, work: Work) -> int:
        """Return what training on some tokens needs."""
        return self.forward.flops(work) + self.backward.flops(work)

    def hardware_flops(self, work: Work) -> int:
        """Return the same with activations computed again in the backward pass."""
        return self.model_flops(work) + self.recomputed.flops(work)


def is_countable(shapes: Shapes, sizes: Mapping[str, int]) -> bool:
    """Whether `formula` knows such a model: no mixture of experts but those of `outline.MIXTURES`."""
    return "chosen" in sizes or not any("expert" in name for name in shapes)


def formula(
    shapes: Shapes, sizes: Mapping[str, int], trained: Collection[str] | None = None, prefix_tokens: int = 0
) -> Formula:
    """Return the FLOPs of a decoder's forward pass, backward pass, and recomputation of layers.
    `shapes` include what tuning adds; `sizes` are those of `outline.flop_sizes`; `trained`: names, None: all;
    `prefix_tokens` are learned keys and values that every token sees besides (P-Tuning v2).
    """
    layers = sizes["layers"]
    names = shapes if trained is None else trained
    # The first trained parameter in the order of computation: nothing before it gets a gradient.
    first = min((_position_of(name, layers) for name in names), default=(layers + 1, 0))
    # FLOPs per token of each matrix, experts' in three dimensions; of LoRA's `save_modules` only the trained copy's.
    costs = {
        name: 2 * elements_used_by_token(name, math.prod(shape), sizes)
        for name, shape in shapes.items()
        if len(shape) == 2 + (is_routed(name) and "lora_A" not in name)  # LoRA's first factors lie on top of each other
        and not name.startswith(("prefix_encoder.", "soft_prompt."))
        and "original_module" not in name
        and ".modules_to_save.default.".join(name.rsplit(".", 1)) not in shapes
    }
    outside = [name for name in costs if layer_of(name) < 0]
    head_names = [name for name in outside if any(part in name for part in _HEAD_NAMES)]
    if not head_names and outside:  # a tied embedding, the largest matrix, is the head
        head_names = [max(outside, key=costs.__getitem__)]
    # (FLOPs per token, whether it is trained, position) of each matrix.
    matrices = [(costs[name], name in names, _position_of(name, layers)) for name in costs if name not in outside]
    heads = [(costs[name], name in names, (layers, 1)) for name in head_names]
    attending = sizes.get("attending", layers)
    # Per pair of tokens and layer: scores and weighted values.
    pair_flops = 2 * sizes["heads"] * (sizes["head_size"] + sizes.get("value_size", sizes["head_size"]))
    # Layers whose attention comes after the first trained parameter, and those with any gradient.
    attending_with_gradient = sum((layer, _ATTENTION) > first for layer in range(layers))
    recomputed_layers = sum(layer >= first[0] for layer in range(layers))

    def rates(per_token: int, num_layers: int, per_trained_token: int) -> FlopRates:
        per_pair = num_layers * pair_flops * attending // layers  # hybrids alternate from the first layer to the last
        return FlopRates(per_token + prefix_tokens * per_pair, per_pair, per_trained_token)

    def backward(parts: list[tuple[int, bool, Position]]) -> int:
        """Return FLOPs: of a product for a weight's gradient if it is trained, and of one for its input's if something
        before it is.
        """
        return sum(cost * (is_trained + (position > first)) for cost, is_trained, position in parts)

    # A recomputed layer's input gets a gradient even if nothing before it is trained.
    layers_again = sum(cost * (1 + (position <= first)) for cost, _, position in matrices if position[0] >= first[0])
    return Formula(
        forward=rates(sum(cost for cost, *_ in matrices), layers, sum(cost for cost, *_ in heads)),
        backward=rates(backward(matrices), 2 * attending_with_gradient, backward(heads)),
        recomputed=rates(layers_again, recomputed_layers + 2 * (recomputed_layers - attending_with_gradient), 0),
    )


def causal_pairs(lengths: Iterable[int]) -> int:
    """Return the pairs of tokens that samples of these lengths need."""
    return sum(length * (length + 1) // 2 for length in lengths)


@cache
def _position_of(name: str, layers: int) -> Position:
    """Return the position of a parameter, see `Position`."""
    if name.startswith("prefix_encoder."):  # keys and values of the first layer, as of all others
        return 0, _KEYS
    if (layer := layer_of(name)) >= 0:
        order = next((number for number, parts in enumerate(_ORDER_IN_LAYER) if any(part in name for part in parts)), 0)
        return layer, 2 * order + ("lora_B" in name)
    if any(part in name for part in _HEAD_NAMES):
        return layers, 1
    return (layers, 0) if any(part in name for part in ("norm", "ln_f")) else (-1, 0)
