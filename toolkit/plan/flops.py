"""The FLOPs of a training step, by the shapes of a model's parameters. No torch.

Only matrix products are counted, 2 FLOPs for each multiplication and addition; in a decoder they are nearly everything.
What the result needs is counted, even if an implementation computes more:

- Linear layers, for each token that is not padding. Looking up an embedding is no FLOP. Of routed experts those that
  are chosen for a token, K of E, and the router's choice among all; in a first trained layer what runs side by side
  (router, shared and routed experts) counts as if one followed the other.
- Attention, for each pair of a token and one that it sees: L (L + 1) / 2 of a sample of L tokens, also in packed rows.
  A kernel without causality computes L x L, one without samples the square of the row, which is not needed.
  ChatGLM-6B's prompts are counted as causal, though their tokens see all of the prompt.
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
from typing import NamedTuple

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


class _Matrix(NamedTuple):
    """A matrix that tokens are multiplied with."""

    flops: int
    """Of a product with one token."""
    is_trained: bool
    position: Position


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
    trained_names = shapes if trained is None else trained
    # The first trained parameter in the order of computation: nothing before it gets a gradient.
    first = min((_position_of(name, layers) for name in trained_names), default=(layers + 1, 0))
    by_name: dict[str, _Matrix] = {}
    for name in (name for name in shapes if _is_multiplied(name, shapes)):
        flops = 2 * elements_used_by_token(name, math.prod(shapes[name]), sizes)
        by_name[name] = _Matrix(flops, name in trained_names, _position_of(name, layers))
    matrices = [matrix for name, matrix in by_name.items() if layer_of(name) >= 0]
    outside = [name for name in by_name if layer_of(name) < 0]
    head_names = [name for name in outside if any(part in name for part in _HEAD_NAMES)]
    if not head_names and outside:  # a tied embedding, the largest matrix, is the head
        head_names = [max(outside, key=lambda name: by_name[name].flops)]
    heads = [by_name[name]._replace(position=(layers, 1)) for name in head_names]
    # Per pair of tokens and layer with attention: scores and weighted values.
    pair_flops = 2 * sizes["heads"] * (sizes["head_size"] + sizes.get("value_size", sizes["head_size"]))

    def rates(per_token: int, num_passes: int, per_trained_token: int) -> FlopRates:
        """Return the rates with attention in so many passes of a layer; hybrids' layers with attention are spread
        evenly over the model.
        """
        per_pair = num_passes * pair_flops * sizes.get("attending", layers) // layers
        return FlopRates(per_token + prefix_tokens * per_pair, per_pair, per_trained_token)

    forward = rates(sum(matrix.flops for matrix in matrices), layers, sum(head.flops for head in heads))
    num_attention_gradients = sum((layer, _ATTENTION) > first for layer in range(layers))
    backward = rates(_backward_flops(matrices, first), 2 * num_attention_gradients, _backward_flops(heads, first))
    # Layers with a gradient are computed again. The first one's input then gets a gradient too, though nothing before
    # it is trained: for products and attention up to the first trained parameter that is more than `backward` has.
    again = [matrix for matrix in matrices if matrix.position[0] >= first[0]]
    num_again = sum(layer >= first[0] for layer in range(layers))
    added_flops = sum(matrix.flops * (2 if matrix.position <= first else 1) for matrix in again)
    recomputed = rates(added_flops, num_again + 2 * (num_again - num_attention_gradients), 0)
    return Formula(forward, backward, recomputed)


def _is_multiplied(name: str, shapes: Shapes) -> bool:
    """Whether tokens are multiplied with a parameter: with a matrix or the stack of experts' matrices, but not with
    learned prompts, nor with the original of which `save_modules` trains a copy.
    """
    if name.startswith(("prefix_encoder.", "soft_prompt.")) or "original_module" in name:
        return False
    # LoRA's first factors of all experts lie on top of each other in one matrix.
    num_axes = 3 if is_routed(name) and "lora_A" not in name else 2
    module, _, end = name.rpartition(".")
    return len(shapes[name]) == num_axes and f"{module}.modules_to_save.default.{end}" not in shapes


def _backward_flops(matrices: Iterable[_Matrix], first: Position) -> int:
    """Return the FLOPs of a token's backward pass: of each matrix a product for its gradient if it is trained, and one
    for its input's if something before it is trained, from the position `first` on.
    """
    return sum(matrix.flops * (matrix.is_trained + (matrix.position > first)) for matrix in matrices)


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
