"""Bytes of the activations that a forward pass saves for its backward pass, from the shapes of a model. No torch.

The formulas follow the models' operations (transformers 5.23, torch 2.13); `tests/unit/test_plan_activations.py`
compares them with the real models. H: hidden width; I: inner width.

- RMSNorm: the input in float32 and one float32 per token, the normed states (w H) if its weight is trained.
- A linear layer: its input, once for those that share it, if its weight is trained or LoRA is added to it. LoRA also
  keeps the output of its first matrix, and with dropout its own input and a mask; DoRA both its outputs too.
- Attention by a fused kernel: query, key, value, result and a float32 per head and token.
- SwiGLU: gate, up and the activated gate (3 w I); GELU: its input.
"""

import math
from collections import Counter
from dataclasses import dataclass

from toolkit.plan.outline import MAGNITUDES, Outline, is_routed, layer_of


@dataclass(frozen=True, slots=True)
class Rows:
    """The shape of a micro-batch, and how its rows are computed."""

    rows: int
    """B."""
    length: int
    """S, tokens of a row, padding included."""
    prefix: int = 0
    """Learned keys and values before each row (P-Tuning v2), or embeddings (prompt tuning)."""
    mask_bytes: int = 0
    """Bytes of an element of the attention mask; 0 without a mask."""
    mask_per_layer: bool = False
    """Whether each layer saves a copy of the mask, as PyTorch converts a boolean one at each call."""
    varlen: bool = False
    """Whether attention computes each sample of a packed sequence by itself."""
    keeps_inputs: bool = False
    """Whether frozen linear layers save their inputs too, as DeepSpeed's linear function does under ZeRO-3."""
    on_cpu: bool = False
    """On CPUs dropout's mask has the activations' type instead of bool."""
    parts: int = 1
    """Number of ranks that each row is divided over."""
    mlp_pieces: int = 1
    """Number of pieces in which feed-forward layers take the tokens; with several, only their inputs are saved."""

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.rows * -(-self.length // self.parts)

    def key_copies(self, heads: int) -> int:
        """Return how many copies of each of `heads` heads of keys the ranks that share a row have."""
        return self.parts // math.gcd(heads, self.parts)


def activation_bytes(outline: Outline, rows: Rows, width: int, dropout: float = 0.0) -> dict[str, int]:
    """Return the bytes of a model's activations by kind (norms, attention, mlp, lora, mask, or layers of a measured
    model). `width`: bytes of an element; `dropout`: LoRA's.
    """
    sizes: Counter[str] = Counter()
    for layer in range(outline.sizes["layers"]):
        sizes.update(layer_activation_bytes(outline, rows, width, layer, dropout))
    # Outside the layers: the mask that all share, cosines and sines, the ids, the last norm (an RMSNorm saves its input
    # and one number per token in float32).
    hidden, tokens, rotary = outline.sizes["hidden"], rows.tokens, outline.sizes["rotary"]
    if outline.is_v1:
        sizes["norms"] += tokens * (width * hidden + 2 * _layernorm_statistic_bytes(rows, width))
    else:
        trained = width * hidden if "model.norm.weight" in outline.trained else 0
        sizes["norms"] += tokens * (4 * hidden + 4 + trained)
    sizes["mask"] += 0 if rows.mask_per_layer else _mask_size(rows)
    is_shared = rotary == outline.sizes["head_size"]  # cosines and sines; else each layer repeats them, see add_parts
    sizes["attention"] += 2 * tokens * width * rotary if is_shared else 0
    trains_embedding = any("embed" in name for name in outline.trained)
    sizes["attention"] += 8 * tokens if trains_embedding else 0  # its gradient needs the ids, int64
    return dict(sizes)


def layer_activation_bytes(
    outline: Outline, rows: Rows, width: int, layer: int, dropout: float = 0.0
) -> dict[str, int]:
    """Return the bytes of one layer's activations by kind; `width`, `dropout`: as in `activation_bytes`."""
    if f"saved_{width}" in outline.sizes:
        return _measured_bytes(outline, rows, width, layer, dropout)
    layer_type = _ChatGLM6BLayer if outline.is_v1 else _DecoderLayer
    return dict(layer_type(outline, rows, width, layer, dropout).bytes)


def _measured_bytes(outline: Outline, rows: Rows, width: int, layer: int, dropout: float) -> dict[str, int]:
    """Return the bytes of a layer's activations (layers, lora, experts) in a model without formulas, from the bytes per
    token that `toolkit.models.outline` has measured, where each expert gets equally many tokens.
    """
    # With LoRA the layers are frozen and save less, unless ZeRO-3 keeps their inputs all the same.
    is_frozen = bool(outline.targets) and not rows.keeps_inputs
    per_token = outline.sizes[f"{'frozen' if is_frozen else 'saved'}_{width}"]
    sizes = {"layers": per_token * rows.tokens}
    sizes["lora"] = _measured_lora_bytes(outline, rows, width, layer, dropout) if is_frozen else 0
    sizes["experts"] = expert_activation_bytes(outline, rows, width)[0]
    return {kind: size for kind, size in sizes.items() if size}


def _measured_lora_bytes(outline: Outline, rows: Rows, width: int, layer: int, dropout: float) -> int:
    """Return the bytes that a layer's LoRA saves: the output of each first factor, and the inputs. Without dropout the
    linear layers of a module that take the same width share an input; with it each has its own, and a mask.
    """
    outputs, inputs = 0, dict[tuple[str, int], int]()  # of inputs: (module or linear layer, width) -> bytes
    mask_width = width if rows.on_cpu else 1
    for name in outline.targets:
        if layer_of(name) != layer:
            continue
        rank, width_in = outline.shapes[f"{name}.lora_A.default.weight"]
        times = 1.0  # how often a token comes: once for each expert that is chosen for it
        if is_routed(name):  # the shape has the ranks of all experts together
            rank, times = rank // outline.sizes["experts"], _rows_of_experts(outline, 1)[1]
        outputs += int(rows.tokens * times * width * rank)
        drops = dropout > 0
        owner = name if drops else name.rpartition(".")[0]
        inputs[owner, width_in] = int(rows.tokens * times * width_in * (width + (mask_width if drops else 0)))
        outputs += _dora_bytes(outline, name, rows, width, input_has_gradient=layer > 0)
    return outputs + sum(inputs.values())


def _dora_bytes(outline: Outline, name: str, rows: Rows, width: int, input_has_gradient: bool) -> int:
    """Return the bytes that DoRA saves more than LoRA in a linear layer, 0 without it: the outputs of the layer and of
    the factors, for the gradient of the magnitudes, and two vectors with a number for each magnitude, three if the
    layer's input has a gradient (peft 0.21.2, lora/dora.py).
    """
    [out] = outline.shapes.get(name + MAGNITUDES, (0,))
    return width * out * (2 * rows.tokens + 2 + input_has_gradient)


def dora_temporary_bytes(outline: Outline, width: int) -> int:
    """Return the most bytes that a linear layer's forward pass takes for its norms with DoRA, 0 without it: an identity
    matrix [in, in], the product of the factors, this scaled, and its sum with the weight (peft 0.21.2, lora/dora.py).
    """
    most = 0
    for name in outline.targets:
        if name + MAGNITUDES in outline.shapes:
            [out], (_, width_in) = outline.shapes[name + MAGNITUDES], outline.shapes[f"{name}.lora_A.default.weight"]
            most = max(most, width * (width_in * width_in + 3 * out * width_in))
    return most


def _rows_of_experts(outline: Outline, tokens: int) -> tuple[int, float]:
    """Return the number of rows that a rank sends to experts for its tokens, and the number that its own receive."""
    sent = tokens * outline.sizes["chosen"]
    return sent, sent * outline.received


def expert_activation_bytes(outline: Outline, rows: Rows, width: int) -> tuple[int, int]:
    """Return the bytes that a layer's routed experts save beyond the measured ones, and those of temporary tensors.

    R rows of width H are sent and N received (`Outline.received`); I is an expert's inner width. Saved are N gates, ups
    and activated gates, and if experts are trained their inputs and those of the second matrix. Temporary are the sent
    rows, and the received ones twice, as they are sorted by experts; or in the backward pass two gradients in float32,
    as routers' weights are float32, and one in the rows' type.
    """
    if "chosen" not in outline.sizes:
        return 0, 0
    hidden, inner = outline.sizes["hidden"], outline.sizes["expert_inner"]
    sent, received = _rows_of_experts(outline, rows.tokens)
    saved_width = 3 * inner + (hidden + inner if not outline.targets else 0)
    temporary = max(sent * hidden * (8 + width), (sent + 2 * received) * hidden * width)
    return int((received - sent) * saved_width * width), int(temporary)


def _layernorm_statistic_bytes(rows: Rows, width: int) -> int:
    """Return the bytes of each of a token's two statistics in LayerNorm, in the states' precision on CPUs."""
    return width if rows.on_cpu else 4


def _mask_size(rows: Rows) -> int:
    """Return the bytes of one copy of the attention mask: whether a token of a row sees a key."""
    return rows.rows * rows.length * (rows.length + rows.prefix) * rows.mask_bytes


class _Layer:
    """Adds up the bytes that a layer saves for its backward pass, by kind; `width`: bytes of an element. Its parts are
    added in the order of the forward pass: each may set `has_gradient`, without which the next ones save less.
    """

    def __init__(self, outline: Outline, rows: Rows, width: int, layer: int, dropout: float) -> None:
        self.outline, self.rows, self.width, self.dropout = outline, rows, width, dropout
        self.size = outline.sizes
        self.bytes: Counter[str] = Counter()
        self.at = f"{'transformer' if outline.is_v1 else 'model'}.layers.{layer}."
        # Whether the layer's input has a gradient, as something before it is trained. Like the embedding, head and last
        # norm are in no layer, but they come after all of them.
        before = (name for name in outline.trained if not name.startswith(("lm_head", "score.")) and "norm" not in name)
        self.has_gradient = any(layer_of(name) < layer for name in before)
        self.add_parts()

    def add_parts(self) -> None:
        """Add the layer's operations in the order of the forward pass."""
        raise NotImplementedError

    def save(self, kind: str, per_token: int) -> None:
        """Add saved bytes per token."""
        self.bytes[kind] += self.rows.tokens * per_token

    def trains(self, module: str) -> bool:
        """Whether a module's weight is trained."""
        return f"{self.at}{module}.weight" in self.outline.trained

    def linear(self, kind: str, modules: tuple[str, ...], width_in: int, is_kept: bool = False) -> None:
        """Add linear layers that share one input of `width_in` elements per token; `is_kept`: it is counted already."""
        with_lora = [name for name in modules if self.at + name in self.outline.targets]
        drops = self.dropout > 0  # then LoRA's input is another one: without what is dropped
        trains = any(self.trains(name) for name in modules)
        needs_input = trains or (with_lora and not drops) or (self.rows.keeps_inputs and self.has_gradient)
        if needs_input and not is_kept:
            self.save(kind, self.width * width_in)
        mask_width = self.width if self.rows.on_cpu else 1
        for name in with_lora:
            rank = self.outline.shapes[f"{self.at}{name}.lora_A.default.weight"][0]
            self.save("lora", self.width * rank)
            if drops:  # the mask is for the gradient of what was before it
                self.save("lora", (self.width + (mask_width if self.has_gradient else 0)) * width_in)
            self.bytes["lora"] += _dora_bytes(self.outline, self.at + name, self.rows, self.width, self.has_gradient)
        self.has_gradient = self.has_gradient or bool(with_lora) or trains

    def attention(self, keys: int, values: int) -> None:
        """Add a fused kernel: queries, outputs, `keys` and `values` elements per token, and a float32 per head."""
        rows, query_width = self.rows, self.size["heads"] * self.size["head_size"]
        self.save("attention", self.width * (2 * query_width + keys + values) + 4 * self.size["heads"])
        self.bytes["attention"] += rows.rows * rows.prefix * self.width * (keys + values)
        if rows.mask_per_layer:
            self.bytes["mask"] += _mask_size(rows)
        self.has_gradient = True

    def mlp(self, first: tuple[str, ...], last: str, inner_copies: int) -> None:
        """Add a feed-forward layer, which saves `inner_copies` of its inner states, or in pieces its input alone."""
        if self.rows.mlp_pieces > 1:
            names = (*first, last)
            self.has_gradient |= any(self.trains(name) or self.at + name in self.outline.targets for name in names)
            if self.has_gradient:
                self.save("mlp", self.width * self.size["hidden"])
            return
        self.linear("mlp", first, self.size["hidden"])
        if self.has_gradient:
            self.save("mlp", inner_copies * self.width * self.size["inner"])
        self.linear("mlp", (last,), self.size["inner"])


class _DecoderLayer(_Layer):
    """A decoder layer of transformers' Llama, GLM and their kind."""

    def norm(self, name: str, wide: int = 0, groups: int = 1) -> None:
        """Add an RMSNorm over `wide` elements per token (0: the hidden width), in so many groups with a norm each. It
        saves its input and a number per group in float32, and the normed states if its weight is trained.
        """
        wide, trains = wide or self.size["hidden"], self.trains(name)
        if self.has_gradient:
            self.save("norms", 4 * wide + 4 * groups)
        if trains:
            self.save("norms", self.width * wide)
        self.has_gradient = self.has_gradient or trains

    def add_parts(self) -> None:
        """Add the layer's parts in forward order, see `_Layer`."""
        size, rows = self.size, self.rows
        query_width, key_heads = size["heads"] * size["head_size"], size["keys"] // size["head_size"]
        self.norm("input_layernorm")
        self.linear("attention", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), size["hidden"])
        if f"{self.at}self_attn.q_norm.weight" in self.outline.shapes:
            self.norm("self_attn.q_norm", query_width, size["heads"])
            self.norm("self_attn.k_norm", size["keys"], key_heads)
        partial = size["rotary"] < size["head_size"]
        if self.has_gradient and partial:  # cosines and sines, repeated in each layer
            self.save("attention", 2 * self.width * size["rotary"])
        saves_attention = self.has_gradient or bool(rows.prefix)
        if saves_attention:
            # With a mask PyTorch's kernel gets keys repeated for every head of queries (transformers, use_gqa_in_sdpa).
            keys = query_width if rows.mask_bytes or rows.prefix else size["keys"] * rows.key_copies(key_heads)
            self.attention(keys, keys)
        # With partial rotation the output of attention has another memory layout, so that it is copied.
        is_kept = saves_attention and (rows.varlen or not partial)
        self.linear("attention", ("self_attn.o_proj",), query_width, is_kept)
        if size["norms"] == 4:
            self.norm("post_self_attn_layernorm")
        self.norm("post_attention_layernorm")
        self.mlp(("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", inner_copies=3)  # SwiGLU
        if size["norms"] == 4:
            self.norm("post_mlp_layernorm")


class _ChatGLM6BLayer(_Layer):
    """A layer of ChatGLM-6B."""

    def norm(self, name: str) -> None:
        """Add what a LayerNorm saves for backward."""
        if self.has_gradient or self.trains(name):
            self.save("norms", self.width * self.size["hidden"] + 2 * _layernorm_statistic_bytes(self.rows, self.width))
            self.has_gradient = True

    def add_parts(self) -> None:
        """Add the layer's parts in forward order, see `_Layer`; attention saves only what gradients need."""
        hidden = self.size["hidden"]
        self.norm("input_layernorm")
        self.linear("attention", ("attention.query_key_value",), hidden)
        saves_attention = self.has_gradient or bool(self.rows.prefix)
        if saves_attention:
            # The values are a view of query, key and value in one tensor; with a prefix they are copied.
            self.attention(hidden, hidden if self.rows.prefix else 3 * hidden)
        self.linear("attention", ("attention.dense",), hidden, is_kept=saves_attention)
        self.norm("post_attention_layernorm")
        self.mlp(("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", inner_copies=1)  # GELU
