"""The floating-point operations of training, from the shapes of a model's parameters. No torch.

Counted are matrix products, 2 FLOPs for each multiplication and addition, and nothing else: of a dense decoder they are
nearly everything. What is counted is what the result needs, whoever computes more:

- Linear layers, for each token that is not padding. Looking up an embedding is no FLOP.
- Attention, for each pair of a token and one that it sees: L (L + 1) / 2 of a sample of L tokens, also for samples that
  share a row. A kernel that knows no causality computes L x L, one that knows no samples the square of the row: that is
  no one's need. ChatGLM-6B's prompts see all of themselves; they are counted as if they did not, as elsewhere.
- The output layer, for trained tokens only: no other token's logits are needed.
- Backward, as much again for the gradients of trained weights, and as much again for those of activations as far down
  as something is trained; twice for the pairs of attention. Of the first layer that is trained, attention's gradients
  count whole, also where LoRA leaves out the queries, keys or values: kernels compute them together.
- `recomputed` is what activation checkpointing adds, and belongs to no model FLOPs: hardware FLOPs are both.

Not counted: DoRA's norms, P-Tuning's projection, the tokens of a soft prompt. Mixtures of experts are not known.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from toolkit.plan.parameters import Shapes

_HEADS = ("lm_head", "embed_out", "output_layer")
_ADDED = ("prefix_encoder.", "soft_prompt.")
_ORDER = (
    ("input_layernorm", "ln_1"),
    ("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn", "Wqkv", "q_norm", "k_norm"),
    (),  # attention itself
    ("o_proj", "out_proj", "attention.dense", "attn.c_proj"),
    ("norm", "ln_2"),
    ("gate_proj", "up_proj", "dense_h_to_4h", "c_fc", "fc1"),
    ("down_proj", "dense_4h_to_h", "c_proj", "fc2"),
)
"""Parts of the names of a layer's parameters, in the order in which the layer uses them."""
_KEYS, _ATTENTION = 2, 4
"""Twice their place in that order: between a matrix and the next lies what LoRA adds behind its own first one."""

Place = tuple[int, int]
"""Where in the forward pass a parameter is used: its layer (-1 before, their number after), and the order there."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed on."""

    tokens: int
    """Tokens that go through the layers."""
    pairs: int
    """Pairs of a token and one that it sees, itself included."""
    trained_tokens: int
    """Tokens whose loss is computed."""


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs for one of each."""

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
    """The FLOPs of one model and way of training."""

    forward: Rates
    """Of the forward pass."""
    backward: Rates
    """Of the backward pass, without what is computed again in it."""
    recomputed: Rates
    """What activation checkpointing adds."""

    def model_flops(self, work: Work) -> int:
        """Return what training on some tokens needs."""
        return self.forward.flops(work) + self.backward.flops(work)

    def hardware_flops(self, work: Work) -> int:
        """Return the same with activations computed again in the backward pass."""
        return self.model_flops(work) + self.recomputed.flops(work)


def is_countable(shapes: Shapes) -> bool:
    """Whether `formula` knows such a model: no mixture of experts."""
    return not any("expert" in name for name in shapes)


def formula(
    shapes: Shapes, sizes: Mapping[str, int], trained: Collection[str] | None = None, prefix_tokens: int = 0
) -> Formula:
    """Return the FLOPs of a dense decoder.

    Args:
        shapes: parameters by name, with what tuning adds: `tuned`'s, or a real model's.
        sizes: `layers`, `heads` and `head_size`; others are not looked at.
        trained: names of the trained parameters; None is all.
        prefix_tokens: learned keys and values that every token sees besides (P-Tuning v2).
    """
    layers = sizes["layers"]
    names = shapes if trained is None else trained
    first = min((_place(name, layers) for name in names), default=(layers + 1, 0))
    inner, outer = _matrices(shapes)
    matrices = [(2 * math.prod(shapes[name]), name in names, _place(name, layers)) for name in inner]
    heads = [(2 * math.prod(shapes[name]), name in names, (layers, 1)) for name in outer]
    pair = 4 * sizes["heads"] * sizes["head_size"]
    behind = sum((layer, _ATTENTION) > first for layer in range(layers))
    again = sum(layer >= first[0] for layer in range(layers))

    def rates(per_token: int, num_layers: int, per_trained_token: int) -> Rates:
        return Rates(per_token + prefix_tokens * num_layers * pair, num_layers * pair, per_trained_token)

    def backward(parts: list[tuple[int, bool, Place]]) -> int:
        return sum(cost * (is_trained + (place > first)) for cost, is_trained, place in parts)

    # A layer is computed again from its input, which gets a gradient whether or not something before it is trained.
    layers_again = sum(cost * (1 + (place <= first)) for cost, _, place in matrices if place[0] >= first[0])
    return Formula(
        rates(sum(cost for cost, *_ in matrices), layers, sum(cost for cost, *_ in heads)),
        rates(backward(matrices), 2 * behind, backward(heads)),
        rates(layers_again, again + 2 * (again - behind), 0),
    )


def causal_pairs(lengths: Iterable[int]) -> int:
    """Return the pairs of tokens that samples of these lengths need."""
    return sum(length * (length + 1) // 2 for length in lengths)


def _matrices(shapes: Shapes) -> tuple[list[str], list[str]]:
    """Return the names of the parameters that tokens are multiplied with: in the layers, and of the output layer."""
    flat = [
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and not name.startswith(_ADDED) and not _is_replaced(name, shapes)
    ]
    outside = [name for name in flat if _layer(name) is None]
    heads = [name for name in outside if any(part in name for part in _HEADS)]
    if not heads and outside:  # the embedding serves as both, the largest that there is
        heads = [max(outside, key=lambda name: math.prod(shapes[name]))]
    return [name for name in flat if _layer(name) is not None], heads


def _is_replaced(name: str, shapes: Shapes) -> bool:
    """Whether a trained copy is computed with instead: LoRA's `save_modules`."""
    owner, _, end = name.rpartition(".")
    return "original_module" in name or f"{owner}.modules_to_save.default.{end}" in shapes


def _place(name: str, layers: int) -> Place:
    if name.startswith("prefix_encoder."):  # keys and values of the first layer, as of all others
        return 0, _KEYS
    layer = _layer(name)
    if layer is not None:
        order = next((number for number, parts in enumerate(_ORDER) if any(part in name for part in parts)), 0)
        return layer, 2 * order + ("lora_B" in name)
    if any(part in name for part in _HEADS):
        return layers, 1
    return (layers, 0) if any(part in name for part in ("norm", "ln_f")) else (-1, 0)


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)
