"""Bytes that the forward pass keeps for the backward pass, by kind. No torch.

Written down from what the models' operations save (transformers 5.23, torch 2.13; `tests/unit/test_plan_activations.py`
holds it against the real models): H hidden width, I inner width, A width of all heads, w bytes of a number.

- RMSNorm: the input in float32 and one float32 per token, the normed states (w H) if its weight is trained.
- A linear layer: its input, once for those that share it, if its weight is trained or LoRA is added to it. LoRA also
  keeps the output of its first matrix, and with dropout its own input and a mask.
- Attention by a fused kernel: query, key, value, result and a float32 per head and token.
- SwiGLU: gate, up and the activated gate (3 w I); GELU: its input.
"""

import math
from collections import Counter
from dataclasses import dataclass

from toolkit.plan.parameters import Outline, layer_of


@dataclass(frozen=True, slots=True)
class Rows:
    """What one forward pass gets."""

    rows: int
    """B."""
    length: int
    """S, tokens of each, padding included."""
    prefix: int = 0
    """Learned keys and values before each row (P-Tuning v2), or embeddings (prompt tuning)."""
    mask_bytes: int = 0
    """Of a number of the attention mask; 0 without a mask."""
    mask_per_layer: bool = False
    """Whether each layer keeps the mask again: PyTorch converts a boolean one to numbers at each call."""
    varlen: bool = False
    """Whether attention is computed for each sample of a packed sequence alone."""
    keeps_inputs: bool = False
    """Whether frozen linear layers keep their inputs too, as DeepSpeed's own linear function does under ZeRO-3."""
    on_cpu: bool = False
    """There dropout's mask has numbers instead of truth values."""
    parts: int = 1
    """Ranks that divide the tokens of each row; this one has a part."""
    mlp_pieces: int = 1
    """In which feed-forward layers take them; of more than one only what goes in is kept."""

    @property
    def tokens(self) -> int:
        """Of one rank, in all."""
        return self.rows * -(-self.length // self.parts)

    def key_copies(self, heads: int) -> int:
        """Return how often each of so many heads of keys is there, over the ranks that divide rows."""
        return self.parts // math.gcd(heads, self.parts)


def saved_bytes(outline: Outline, rows: Rows, width: int, dropout: float = 0.0) -> dict[str, int]:
    """Return the bytes by kind: norms, attention, mlp, lora, mask. `width`: bytes of a number; `dropout`: LoRA's."""
    kept: Counter[str] = Counter()
    for layer in range(outline.sizes["layers"]):
        kept.update(layer_bytes(outline, rows, width, layer, dropout))
    # Beside the layers: the mask that all share, cosines and sines, the ids, the last norm.
    hidden, tokens, rotary = outline.sizes["hidden"], rows.tokens, outline.sizes["rotary"]
    if outline.is_v1:
        kept["norms"] += tokens * (width * hidden + 2 * _statistic(rows, width))
    else:
        trained = width * hidden if "model.norm.weight" in outline.trained else 0
        kept["norms"] += tokens * (4 * hidden + 4 + trained)
    kept["mask"] += 0 if rows.mask_per_layer else _mask(rows)
    kept["attention"] += 2 * tokens * width * rotary if rotary == outline.sizes["head_size"] else 0
    kept["attention"] += 8 * tokens if any("embed" in name for name in outline.trained) else 0
    return dict(kept)


def layer_bytes(outline: Outline, rows: Rows, width: int, layer: int, dropout: float = 0.0) -> dict[str, int]:
    """Return the same of one layer. Arguments as above."""
    if f"saved_{width}" in outline.sizes:  # measured on the whole model in training, whatever is trained of it
        return {"layers": outline.sizes[f"saved_{width}"] * rows.tokens}
    return dict((_V1 if outline.is_v1 else _Dense)(outline, rows, width, layer, dropout).bytes)


def _statistic(rows: Rows, width: int) -> int:
    """Return the bytes of LayerNorm's mean of a token: on CPUs it has the states' precision."""
    return width if rows.on_cpu else 4


def _mask(rows: Rows) -> int:
    return rows.rows * rows.length * (rows.length + rows.prefix) * rows.mask_bytes


class _Layer:
    """Adds up what one layer keeps, operation by operation."""

    def __init__(self, outline: Outline, rows: Rows, width: int, layer: int, dropout: float) -> None:
        self.outline, self.rows, self.width, self.dropout = outline, rows, width, dropout
        self.size = outline.sizes
        self.bytes: Counter[str] = Counter()
        self.at = f"{'transformer' if outline.is_v1 else 'model'}.layers.{layer}."
        # Whether the states that come in have a gradient: something before is trained.
        before = (name for name in outline.trained if not name.startswith("lm_head") and "norm" not in name)
        self.has_gradient = any(layer_of(name) < layer for name in before)
        self.run()

    def run(self) -> None:
        raise NotImplementedError

    def keep(self, kind: str, per_token: int) -> None:
        self.bytes[kind] += self.rows.tokens * per_token

    def trains(self, module: str) -> bool:
        return f"{self.at}{module}.weight" in self.outline.trained

    def linear(self, kind: str, modules: tuple[str, ...], width_in: int, is_kept: bool = False) -> None:
        """Linear layers that share one input, which something else may keep already."""
        added = [name for name in modules if self.at + name in self.outline.targets]
        drops, mask = self.dropout > 0, (self.width if self.rows.on_cpu else 1) if self.has_gradient else 0
        trains = any(self.trains(name) for name in modules)
        needs = trains or (added and not drops) or (self.rows.keeps_inputs and self.has_gradient)
        if needs and not is_kept:
            self.keep(kind, self.width * width_in)
        for name in added:
            rank = self.outline.shapes[f"{self.at}{name}.lora_A.default.weight"][0]
            self.keep("lora", self.width * rank + ((self.width + mask) * width_in if drops else 0))
        self.has_gradient = self.has_gradient or bool(added) or trains

    def attention(self, keys: int, values: int) -> None:
        """A fused kernel; `keys` and `values` per token."""
        rows, wide = self.rows, self.size["heads"] * self.size["head_size"]
        self.keep("attention", self.width * (2 * wide + keys + values) + 4 * self.size["heads"])
        self.bytes["attention"] += rows.rows * rows.prefix * self.width * (keys + values)
        if rows.mask_per_layer:
            self.bytes["mask"] += _mask(rows)
        self.has_gradient = True

    def mlp(self, first: tuple[str, ...], last: str, inner_copies: int) -> None:
        """A feed-forward layer, which keeps its inner states so many times; in pieces it is computed again."""
        if self.rows.mlp_pieces > 1:
            names = (*first, last)
            self.has_gradient |= any(self.trains(name) or self.at + name in self.outline.targets for name in names)
            if self.has_gradient:
                self.keep("mlp", self.width * self.size["hidden"])
            return
        self.linear("mlp", first, self.size["hidden"])
        if self.has_gradient:
            self.keep("mlp", inner_copies * self.width * self.size["inner"])
        self.linear("mlp", (last,), self.size["inner"])


class _Dense(_Layer):
    """A layer of transformers' decoders."""

    def norm(self, name: str, wide: int = 0, groups: int = 1) -> None:
        wide, trains = wide or self.size["hidden"], self.trains(name)
        if self.has_gradient:
            self.keep("norms", 4 * wide + 4 * groups)
        if trains:
            self.keep("norms", self.width * wide)
        self.has_gradient = self.has_gradient or trains

    def run(self) -> None:
        size, rows = self.size, self.rows
        wide, groups = size["heads"] * size["head_size"], size["keys"] // size["head_size"]
        self.norm("input_layernorm")
        self.linear("attention", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), size["hidden"])
        if f"{self.at}self_attn.q_norm.weight" in self.outline.shapes:
            self.norm("self_attn.q_norm", wide, size["heads"])
            self.norm("self_attn.k_norm", size["keys"], groups)
        partial = size["rotary"] < size["head_size"]
        if self.has_gradient and partial:  # cosines and sines, repeated in each layer
            self.keep("attention", 2 * self.width * size["rotary"])
        had = self.has_gradient or bool(rows.prefix)
        if had:
            keys = wide if rows.mask_bytes or rows.prefix else size["keys"] * rows.key_copies(groups)
            self.attention(keys, keys)
        # Heads that are put together of a turned and an unturned half leave attention in an order that is copied.
        self.linear("attention", ("self_attn.o_proj",), wide, is_kept=had and (rows.varlen or not partial))
        if size["norms"] == 4:
            self.norm("post_self_attn_layernorm")
        self.norm("post_attention_layernorm")
        self.mlp(("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", 3)
        if size["norms"] == 4:
            self.norm("post_mlp_layernorm")


class _V1(_Layer):
    """A layer of ChatGLM-6B."""

    def norm(self, name: str) -> None:
        if self.has_gradient or self.trains(name):
            self.keep("norms", self.width * self.size["hidden"] + 2 * _statistic(self.rows, self.width))
            self.has_gradient = True

    def run(self) -> None:
        hidden = self.size["hidden"]
        self.norm("input_layernorm")
        self.linear("attention", ("attention.query_key_value",), hidden)
        had = self.has_gradient or bool(self.rows.prefix)
        if had:
            # The values stay where query, key and value were computed together; with a prefix they are copied.
            self.attention(hidden, hidden if self.rows.prefix else 3 * hidden)
        self.linear("attention", ("attention.dense",), hidden, is_kept=had)
        self.norm("post_attention_layernorm")
        self.mlp(("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", 1)
