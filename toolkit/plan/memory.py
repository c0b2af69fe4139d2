"""Bytes of one rank and of a node in every phase of a run, from the shapes of the model's parameters. No torch.

P are the model's parameters, X the trained ones, N the ranks, w the bytes of a weight, g those of an added-up gradient
(4, or 2 in fp16), s those of the optimizer's states per parameter (8 for Adam). A function for each ZeRO stage has its
formulas (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5); what DeepSpeed 0.19.8 holds besides was
read in its code and measured, tensor by tensor, on two and four ranks (docs/planning.md).

Activations, which the forward pass keeps for the backward pass, are written down from what the models' operations save
(transformers 5.23, torch 2.13; `tests/unit/test_plan_activations.py` holds it against the real models): H hidden width,
I inner width, A width of all heads.

- RMSNorm: the input in float32 and one float32 per token, the normed states (w H) if its weight is trained.
- A linear layer: its input, once for those that share it, if its weight is trained or LoRA is added to it. LoRA also
  keeps the output of its first matrix, and with dropout its own input and a mask.
- Attention by a fused kernel: query, key, value, result and a float32 per head and token.
- SwiGLU: gate, up and the activated gate (3 w I); GELU: its input.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from toolkit.config import mesh, objective, rule_tables, schema
from toolkit.plan import division
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.outline import Outline, is_routed, layer_of


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
    sizes: Counter[str] = Counter()
    for layer in range(outline.sizes["layers"]):
        sizes.update(layer_bytes(outline, rows, width, layer, dropout))
    # Beside the layers: the mask that all share, cosines and sines, the ids, the last norm.
    hidden, tokens, rotary = outline.sizes["hidden"], rows.tokens, outline.sizes["rotary"]
    if outline.is_v1:
        sizes["norms"] += tokens * (width * hidden + 2 * _statistic(rows, width))
    else:
        trained = width * hidden if "model.norm.weight" in outline.trained else 0
        sizes["norms"] += tokens * (4 * hidden + 4 + trained)
    sizes["mask"] += 0 if rows.mask_per_layer else _mask(rows)
    sizes["attention"] += 2 * tokens * width * rotary if rotary == outline.sizes["head_size"] else 0
    sizes["attention"] += 8 * tokens if any("embed" in name for name in outline.trained) else 0
    return dict(sizes)


def layer_bytes(outline: Outline, rows: Rows, width: int, layer: int, dropout: float = 0.0) -> dict[str, int]:
    """Return the same of one layer. Arguments as above."""
    if f"saved_{width}" in outline.sizes:
        return _measured_bytes(outline, rows, width, layer, dropout)
    return dict((_V1 if outline.is_v1 else _Dense)(outline, rows, width, layer, dropout).bytes)


def _measured_bytes(outline: Outline, rows: Rows, width: int, layer: int, dropout: float) -> dict[str, int]:
    """Return the same of a model that was measured on equally many tokens for each expert: all of it being trained, or
    with LoRA none of it, and what LoRA keeps besides: a rank's output and the input of each matrix, but one input for
    all of a module that are as wide.
    """
    if not outline.targets or rows.keeps_inputs:
        routed = routed_bytes(outline, rows, width)[0]
        return {"layers": outline.sizes[f"saved_{width}"] * rows.tokens, **({"experts": routed} if routed else {})}
    inputs: dict[tuple[str, int], int] = {}
    sizes: Counter[str] = Counter({"layers": outline.sizes[f"frozen_{width}"] * rows.tokens})
    for name in outline.targets:
        if layer_of(name) != layer:
            continue
        factor, count = outline.shapes[f"{name}.lora_A.default.weight"], 1.0
        rank = factor[0]
        if is_routed(name):
            rank, count = factor[0] // outline.sizes["experts"], _rows_of_experts(outline, 1)[1]
        sizes["lora"] += int(rows.tokens * count * width * rank)
        is_apart = dropout > 0  # each has its own input, and which of its numbers are left
        key = (name if is_apart else name.rpartition(".")[0], factor[1])
        inputs[key] = int(rows.tokens * count * factor[1] * (width + is_apart * (width if rows.on_cpu else 1)))
    sizes["lora"] += sum(inputs.values())
    sizes["experts"] += routed_bytes(outline, rows, width)[0]
    return {kind: size for kind, size in sizes.items() if size}


def _rows_of_experts(outline: Outline, tokens: int) -> tuple[int, float]:
    """Return of how many rows a rank's tokens are for experts, and how many its own experts get."""
    sent = tokens * outline.sizes["chosen"]
    return sent, sent * outline.received


def routed_bytes(outline: Outline, rows: Rows, width: int) -> tuple[int, int]:
    """Return what the routed experts of a layer keep beyond what was measured, and what more is there at one moment.
    R rows are sent and N come (`Outline.received`), of H numbers; I are an expert's inner width. Kept are N gates, ups
    and activated gates, if experts are trained also their inputs and what goes into the second matrix. At one moment:
    the received rows, and again in the order of their experts, beside those that are sent; or in the backward pass two
    gradients in float32 and one in the rows' type, as routers weigh in float32.
    """
    if "chosen" not in outline.sizes:
        return 0, 0
    hidden, inner = outline.sizes["hidden"], outline.sizes["expert_inner"]
    sent, received = _rows_of_experts(outline, rows.tokens)
    saved_width = 3 * inner + (hidden + inner if not outline.targets else 0)
    moment = max(sent * hidden * (8 + width), (sent + 2 * received) * hidden * width)
    return int((received - sent) * saved_width * width), int(moment)


def _statistic(rows: Rows, width: int) -> int:
    """Return the bytes of LayerNorm's mean of a token: on CPUs it has the states' precision."""
    return width if rows.on_cpu else 4


def _mask(rows: Rows) -> int:
    return rows.rows * rows.length * (rows.length + rows.prefix) * rows.mask_bytes


class _Layer:
    """Adds up what one layer keeps for its backward pass, bytes by kind; `width`: bytes of an activation's number."""

    def __init__(self, outline: Outline, rows: Rows, width: int, layer: int, dropout: float) -> None:
        self.outline, self.rows, self.width, self.dropout = outline, rows, width, dropout
        self.size = outline.sizes
        self.bytes: Counter[str] = Counter()
        self.at = f"{'transformer' if outline.is_v1 else 'model'}.layers.{layer}."
        # Whether the states that come in have a gradient: something before is trained.
        before = (name for name in outline.trained if not name.startswith(("lm_head", "score.")) and "norm" not in name)
        self.has_gradient = any(layer_of(name) < layer for name in before)
        self.run()

    def run(self) -> None:
        raise NotImplementedError

    def keep(self, kind: str, per_token: int) -> None:
        self.bytes[kind] += self.rows.tokens * per_token

    def trains(self, module: str) -> bool:
        return f"{self.at}{module}.weight" in self.outline.trained

    def linear(self, kind: str, modules: tuple[str, ...], width_in: int, is_kept: bool = False) -> None:
        """Add linear layers that share one input of `width_in` numbers per token; `is_kept`: it is counted already."""
        with_lora = [name for name in modules if self.at + name in self.outline.targets]
        drops, mask_width = self.dropout > 0, (self.width if self.rows.on_cpu else 1) if self.has_gradient else 0
        trains = any(self.trains(name) for name in modules)
        needs_input = trains or (with_lora and not drops) or (self.rows.keeps_inputs and self.has_gradient)
        if needs_input and not is_kept:
            self.keep(kind, self.width * width_in)
        for name in with_lora:
            rank = self.outline.shapes[f"{self.at}{name}.lora_A.default.weight"][0]
            self.keep("lora", self.width * rank + ((self.width + mask_width) * width_in if drops else 0))
        self.has_gradient = self.has_gradient or bool(with_lora) or trains

    def attention(self, keys: int, values: int) -> None:
        """Add a fused kernel: queries, outputs, `keys` and `values` numbers per token, and a float32 for each head."""
        rows, query_width = self.rows, self.size["heads"] * self.size["head_size"]
        self.keep("attention", self.width * (2 * query_width + keys + values) + 4 * self.size["heads"])
        self.bytes["attention"] += rows.rows * rows.prefix * self.width * (keys + values)
        if rows.mask_per_layer:
            self.bytes["mask"] += _mask(rows)
        self.has_gradient = True

    def mlp(self, first: tuple[str, ...], last: str, inner_copies: int) -> None:
        """Add a feed-forward layer, which keeps `inner_copies` of its inner states, or in pieces only its input."""
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


CHUNK_BYTES = 128 * 2**20
"""Of the logits in float32 that the loss computes at once: models/loss.py's constant of this name, as a test checks."""
_CHUNK_COPIES = 2.5
"""Times that a chunk's bytes are held: logits, probabilities, and their gradient in the model's type."""
_DISTILLED_PART, _DISTILLED_COPIES = 4, 12.5
"""Beside a teacher chunks are a fourth (distill_losses.py), and so many times their bytes are held."""
_ALL_REDUCE = 500_000_000
"""Elements that DeepSpeed flattens at once where ZeRO does not (engine.py, MEMORY_OPT_ALLREDUCE_SIZE, 0.19.8)."""
WIDTHS = {schema.Dtype.fp32: 4, schema.Dtype.bf16: 2, schema.Dtype.fp16: 2}
"""Bytes of a weight."""

PROCESS_BYTES = int(0.7 * GIB)
"""Private memory of a rank with torch, DeepSpeed, transformers and peft imported."""
CUDA_BYTES = 2 * GIB
"""What CUDA adds to it in host memory; by what others report, not measured here."""
HEAP_SHARE = 0.3
"""Of what comes and goes within a step, what the heap of a CPU rank keeps beyond it: glibc takes blocks of up to 32 MiB
from one heap, whose holes fit no larger block. Measured with SmolLM2-135M on two ranks: packed rows in float32 and bf16
under ZeRO 2, rows apart under ZeRO 0, preference pairs, reward LoRA: processes took 0.84 to 1.02 of what is planned.
"""
_RESIDENT = ("weights", "second weights", "optimizer")
WORKER_BYTES = int(0.3 * GIB)
"""Of a data-loader process."""

Parts = dict[str, int]
"""Bytes by kind: weights, gradients, optimizer, buckets, gathered, activations by kind, loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank holds."""

    device: dict[str, Parts]
    """Bytes of device memory in each phase: load, step, evaluation, save, export."""
    host: Parts
    """Bytes of host memory, beside what the process itself takes: offloaded states, and the buffers for them."""
    stages: tuple[int, ...] = ()
    """Peaks of each pipeline stage's ranks, of which this is the largest; () without stages."""

    def peak(self, phase: str) -> int:
        """Return the device's bytes in a phase."""
        return sum(self.device[phase].values())

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.device, key=self.peak)


def plan_rank(outline: Outline, cfg: schema.RunConfig, world_size: int, on_cpu: bool = False) -> RankMemory:
    """Return the memory of one rank on the longest rows that the config allows; of CPU ranks the host's is in it."""
    if (stages := cfg.parallel.pipeline) == 1:
        return _Rank(division.rank_part(outline, cfg), cfg, world_size, on_cpu).memory()
    # One micro-batch forward and one back in turn: the first stage waits longest for its first gradient.
    held = (min(mesh.accumulation(cfg, world_size), stages - stage) for stage in range(stages))
    parts = (division.rank_part(part, cfg) for part in division.stage_outlines(outline, stages))
    ranks = [
        _Rank(part, cfg, world_size, on_cpu, in_flight).memory() for part, in_flight in zip(parts, held, strict=True)
    ]
    peaks = tuple(rank.peak(rank.worst) for rank in ranks)
    return replace(ranks[peaks.index(max(peaks))], stages=peaks)


def longest_rows(outline: Outline, cfg: schema.RunConfig, on_cpu: bool = False) -> Rows:
    """Return the largest micro-batch that the config allows."""
    packed = cfg.data.packing is schema.Packing.packed or objective.shares_prompts(cfg)
    varlen = packed and cfg.model.attention in (schema.Attention.auto, schema.Attention.varlen)
    blocks = packed and not varlen
    width = WIDTHS[cfg.precision.dtype]
    learned = cfg.tuning.method in (schema.TuningMethod.ptuning_v2, schema.TuningMethod.prompt)
    has_mask = learned and cfg.parallel.sequence == 1
    return Rows(
        # Of a pair both answers, in one row where they share a mask.
        rows=mesh.micro_rows(cfg) * (1 if blocks else objective.data_unit(cfg)[1]),
        length=cfg.data.max_length * (objective.data_unit(cfg)[1] if blocks else 1),
        prefix=cfg.tuning.num_tokens if learned else 0,
        mask_bytes=width if outline.is_v1 or blocks or has_mask else 0,
        mask_per_layer=blocks or (has_mask and not outline.is_v1),
        varlen=varlen,
        keeps_inputs=cfg.zero.stage == 3,
        on_cpu=on_cpu,
        parts=cfg.parallel.sequence,
        mlp_pieces=cfg.kernels.mlp_pieces,
    )


class _Rank:
    """The memory of one rank, by kind and phase. `outline`: the part of the model that it has; `world`: all ranks;
    `in_flight`: micro-batches whose activations it holds at once, as stages of a pipeline do.
    """

    def __init__(self, outline: Outline, cfg: schema.RunConfig, world: int, on_cpu: bool, in_flight: int = 1) -> None:
        self.outline, self.cfg, self.world, self.on_cpu, self.in_flight = outline, cfg, world, on_cpu, in_flight
        self.all, self.trained = outline.num_parameters, outline.num_trained  # P, X
        self.ranks = world // (cfg.parallel.pipeline * cfg.parallel.tensor)  # N, with equal parameters
        groups = division.zero_groups(outline, self.ranks)
        self.own_groups = [-(-trained // over) for _, trained, over in groups]
        self.own_all, self.own_trained = sum(-(-size // over) for size, _, over in groups), sum(self.own_groups)
        self.weight = WIDTHS[cfg.precision.dtype]
        self.is_half = self.weight == 2
        # Bytes of a number of an added-up gradient, and of the optimizer's states of a trained parameter.
        self.grad = 2 if cfg.precision.dtype is schema.Dtype.fp16 else 4
        self.states = rule_tables.OPTIMIZERS[cfg.optim.name].state_bytes
        self.largest = max((math.prod(outline.shapes[name]) for name in outline.trained), default=0)
        self.largest_of_all = max(map(math.prod, outline.shapes.values()))
        self.rows = longest_rows(outline, cfg, on_cpu)
        zero = cfg.zero
        self.offloads = zero.offload_optimizer.device is not schema.Device.none
        copies = 2 if zero.overlap_comm and zero.stage in (1, 2) else 1
        # Elements of the buffers into which gradients are gathered before they are reduced.
        self.bucket = 0 if zero.stage == 0 else min(zero.reduce_bucket_size, self.trained) * copies

    def part(self, elements: int) -> int:
        """Return a rank's share of what all have."""
        return -(-elements // self.ranks)

    def memory(self) -> RankMemory:
        """Return the bytes at the peak of each phase; a CPU rank's host memory is part of its device's."""
        stage = _STAGES[self.cfg.zero.stage](self)
        stage = replace(stage, at_rest=stage.at_rest | self.teacher())
        forward = self.forward(stage)
        moments = [_sum(stage.at_rest, parts) for parts in (forward, forward | stage.first_gradient)]
        moments += [_sum(stage.at_rest, parts) for parts in (stage.backward, stage.update)]
        device = {
            "load": stage.load,
            "step": max(moments, key=lambda parts: sum(parts.values())),
            "evaluation": _sum(stage.at_rest, self.evaluation()),
            "save": _sum(stage.at_rest, self.gathered()),  # a checkpoint's probe is a forward pass
            "export": _sum(
                stage.at_rest, {"gathered": self.weight * self.largest_of_all} if self.cfg.zero.stage == 3 else {}
            ),
        }
        if self.outline.teacher and self.cfg.distill.top_k:  # it is there and gone before the student
            device = {"teacher": self.teacher(is_ahead=True), **device}
        host = self.host()
        if not self.on_cpu:
            return RankMemory(device=device, host=host)
        # DeepSpeed copies the weights while those that are read, or made in float32, are still there.
        if self.cfg.model.init is schema.Init.random:
            device["load"] = _sum(stage.load, {"weights": max(0, 4 * self.all - sum(stage.load.values()))})
        else:
            device["load"] = stage.load | {"read": self.weight * self.largest_of_all}  # the tensor that is copied
        loaded = dict(host)
        if "optimizer" in host:
            loaded["optimizer"] = int(host["optimizer"] * 4 / (4 + self.states))
        device = {phase: _sum(parts, loaded if phase == "load" else host) for phase, parts in device.items()}
        return RankMemory(device=device, host={})

    def teacher(self, is_ahead: bool = False) -> Parts:
        """Return the bytes of distillation's teacher, which only runs forward: its weights (under stage 3 this rank's
        part, and the layers that are gathered), and one layer's states. `is_ahead`: whether it runs before training.
        """
        other = self.outline.teacher
        if other is None or bool(self.cfg.distill.top_k) != is_ahead:
            return {}
        size, zero = other.num_parameters, self.cfg.zero
        if zero.stage == 3:
            ahead = max(zero.stage3_prefetch_bucket_size, other.largest_layer())
            gathered = min(size, min(size, zero.stage3_max_live_parameters) + min(size, ahead))
            size = gathered + (self.part(size) if zero.offload_param.device is schema.Device.none else 0)
        layer = 4 * other.sizes["inner"] + 4 * other.sizes["hidden"]
        return {"teacher": self.weight * (size + layer * self.rows.tokens)}

    def weights(self) -> int:
        """Return the bytes of all weights. QLoRA has the layers' matrices and experts in 4 bits, with 1/64 byte of
        statistics for each number, and expands the experts of one matrix of a layer at a time.
        """
        if self.cfg.tuning.method is not schema.TuningMethod.qlora:
            return self.weight * self.all
        small = sum(in_4_bits(self.outline))
        stacks = (
            math.prod(shape) for name, shape in self.outline.shapes.items() if len(shape) == 3 and is_routed(name)
        )
        return self.weight * (self.all - small + max(stacks, default=0)) + small // 2 + small // 64

    def forward(self, stage: "_Stage") -> Parts:
        """Return the bytes when all is kept for the backward pass, or of stage 3 while it gathers, if that is more."""
        parts = self.activations() | {"loss": self.loss()}
        zero = self.cfg.zero
        if zero.stage == 3 and self.all <= zero.stage3_max_live_parameters:
            # Everything is fetched once and stays: no more is on its way when the activations are there.
            coming, staying = self.gathered(), self.gathered(ahead=False)
            extra = sum(coming.values()) - sum(staying.values())
            parts = coming if extra > sum(parts.values()) else parts | staying
        else:
            parts |= self.gathered()
        return parts | (stage.accumulated if mesh.accumulation(self.cfg, self.world) > 1 else {})

    def gathered(self, ahead: bool = True) -> Parts:
        """Return the bytes of the layers that stage 3 has gathered, and if `ahead` of those being prefetched."""
        zero = self.cfg.zero
        if zero.stage != 3:
            return {}
        live = min(self.all, zero.stage3_max_live_parameters)
        coming = min(self.all, max(zero.stage3_prefetch_bucket_size, self.outline.largest_layer())) if ahead else 0
        return {"gathered": self.weight * min(live + coming, 2 * self.all)}

    def activations(self) -> Parts:
        """Return the bytes of activations by kind: those kept for the backward pass, and those of one layer in it."""
        rows, dropout, sizes = self.rows, self.cfg.tuning.dropout, self.outline.sizes
        inner = self.weight * sizes["inner"] * -(-rows.tokens // rows.mlp_pieces)
        routed = routed_bytes(self.outline, rows, self.weight)[1]
        # Of a piece also what it keeps.
        computed = {"backward": max((4 if rows.mlp_pieces == 1 else 7) * inner, routed)}
        if self.cfg.precision.fp8 is not schema.Fp8.none:
            computed["fp8"] = self.scaled()
        if not self.cfg.train.activation_checkpointing.enabled:
            saved = saved_bytes(self.outline, rows, self.weight, dropout)
            return {kind: self.in_flight * size for kind, size in saved.items()} | computed
        last = layer_bytes(self.outline, rows, self.weight, sizes["layers"] - 1, dropout)
        inputs = self.weight * sizes["hidden"] * rows.tokens * sizes["layers"] * self.in_flight
        return {"layer inputs": inputs, **last, **computed}

    def scaled(self) -> int:
        """Return the bytes of an FP8 product with the largest matrix: both factors, and the larger one in float32
        (torch.compile does without).
        """
        matrices = [shape for name, shape in self.outline.shapes.items() if layer_of(name) >= 0 and len(shape) == 2]
        rows, columns = max(matrices, key=math.prod)
        sizes = rows * columns, self.rows.tokens * max(rows, columns)
        return 5 * max(sizes) + min(sizes)

    def loss(self, with_gradients: bool = True) -> int:
        """Return the bytes of output layer and loss, computed in chunks except as models/loss.py says."""
        rows, (vocab, hidden) = self.rows, self.outline.vocabulary
        has_more = any("lm_head.lora_A" in name or "lm_head.modules_to_save" in name for name in self.outline.shapes)
        if self.cfg.kernels.loss is schema.LossKernel.full or has_more or self.outline.sizes.get("logits_change"):
            # Logits as they are, in float32, their probabilities, and gradients.
            copies = 8 + (self.weight if self.is_half else 0) + (4 if with_gradients else 0)
            return rows.tokens * (vocab * copies + self.weight * hidden)
        is_distilled = self.cfg.task.kind is schema.TaskKind.distill
        chunk = min(rows.tokens * vocab * 4, CHUNK_BYTES // (_DISTILLED_PART if is_distilled else 1))
        held = _DISTILLED_COPIES if is_distilled else _CHUNK_COPIES if with_gradients else 2.0
        if not with_gradients:
            return int(held * chunk) + self.weight * hidden * rows.tokens
        inputs = int(held * chunk) + (self.weight + 4) * hidden * rows.tokens
        if not self.outline.trains_head:
            return inputs
        matrix, group = 4 * vocab * hidden, 2 * hidden // self.weight
        logits = (
            min(rows.tokens, group) * vocab * self.weight if min(rows.tokens, group) * vocab * 4 > CHUNK_BYTES else 0
        )
        return inputs + matrix + logits + (min(matrix, CHUNK_BYTES) if self.is_half else 0)

    def evaluation(self) -> Parts:
        """Return the bytes of an evaluation: of a forward pass over rows as large as in training, which keeps nothing,
        or of generating answers, if that takes more.
        """
        rows, sizes, asked = self.rows, self.outline.sizes, self.cfg.evaluate
        layer = self.weight * (4 * sizes["inner"] + 4 * sizes["hidden"])
        single_token = replace(rows, rows=1, length=1, parts=1)
        layer = max(layer, routed_bytes(self.outline, single_token, self.weight)[1])
        parts = {"activations": layer * rows.tokens, "loss": self.loss(with_gradients=False)}
        if asked.metrics:
            tokens = asked.batch_size * (rows.length + rows.prefix + asked.max_new_tokens)
            answers = {
                "activations": layer * asked.batch_size * rows.length,
                "loss": 4 * asked.batch_size * self.outline.vocabulary[0],
                "cache": self.weight * sizes.get("cached", 2 * sizes["keys"]) * sizes["layers"] * tokens,
            }
            parts = max(parts, answers, key=lambda part_sizes: sum(part_sizes.values()))
        return parts | self.gathered()

    def host(self) -> Parts:
        """Return the bytes of host memory for what is offloaded, by kind."""
        zero, part = self.cfg.zero, self.own_trained
        parts: Counter[str] = Counter()
        if zero.offload_optimizer.device is schema.Device.cpu:
            parts["optimizer"] = int((4 + self.states) * part)
        elif zero.offload_optimizer.device is schema.Device.nvme:
            tile = min(part, zero.sub_group_size)
            parts["optimizer"] = 4 * tile * zero.offload_optimizer.buffer_count
        if self.offloads:
            parts["gradients"] = (4 + self.grad) * part if zero.stage == 3 else (4 + 2 * self.weight) * part
            if zero.zenflow.enabled:  # states of chosen columns; a second gradient and old weights
                chosen = 2 * self.weight * int(self.trained * zero.zenflow.topk_ratio) if zero.zenflow.offload else 0
                parts["zenflow"] = chosen + (8 * part if zero.zenflow.overlap_step else 0)
            if zero.offload_optimizer.super_offload:  # the process's own copy of a tile's gradients
                parts["gradients"] += 4 * min(part, zero.sub_group_size)
        if zero.offload_param.device is schema.Device.cpu:
            parts["weights"] = self.weight * self.own_all
        elif zero.offload_param.device is schema.Device.nvme:
            parts["weights"] = self.weight * zero.offload_param.buffer_size * zero.offload_param.buffer_count
        parts.update({} if self.on_cpu else self.page_locked())
        return {kind: count for kind, count in parts.items() if count}

    def page_locked(self) -> Parts:
        """Return the bytes that page-locked blocks take beyond what is in them: torch 2.13 rounds each up to a power of
        two and keeps freed ones (ATen/core/CachingHostAllocator.h: allocate, maybe_cache_block).
        Blocks of DeepSpeed 0.19.8: below stage 3 of each group (those of one rate and decay taken for all) the master
        weights, their gradients and a copy in the model's type, and each accumulated gradient (stage_1_and_2.py); under
        stage 3 all gradients, those of a tile, each offloaded weight, and then all trained ones (stage3.py).
        """
        zero, weight, own_numbers = self.cfg.zero, self.weight, self.own_trained
        sizes = {name: math.prod(shape) for name, shape in self.outline.shapes.items()}
        trained, parts = [size for name, size in sizes.items() if name in self.outline.trained], Counter[str]()
        if self.offloads and zero.offload_optimizer.pin_memory and zero.stage < 3:
            parts["optimizer"] = _rounding(4, *self.own_groups)
            accumulated = _rounding(weight, *trained) * own_numbers // max(self.trained, 1)
            parts["gradients"] = parts["optimizer"] + _rounding(weight, *self.own_groups) + accumulated
        elif self.offloads and zero.offload_optimizer.pin_memory:
            tiles = [0]
            for size in map(self.part, trained):
                tiles[-1:] = [tiles[-1] + size] if tiles[-1] < zero.sub_group_size else [tiles[-1], size]
            tiles = [*tiles, max(tiles) * zero.offload_optimizer.super_offload]  # the process's own copy
            is_there = zero.offload_optimizer.device is schema.Device.cpu
            parts["gradients"] = _rounding(self.grad, own_numbers) + (_rounding(4, *tiles) if is_there else 0)
        if zero.offload_param.device is schema.Device.cpu and zero.offload_param.pin_memory:
            parts["weights"] = weight * own_numbers + _rounding(weight, own_numbers, *map(self.part, sizes.values()))
        return parts


def _rounding(width: int, *sizes: int) -> int:
    """Return how much larger blocks are than so many numbers of `width` bytes, as powers of two."""
    return sum((1 << (width * size - 1).bit_length()) - width * size for size in sizes if size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """What a ZeRO stage holds in the moments of a run, beside activations and gathered layers."""

    load: Parts
    """Before the first step, which makes the optimizer's states."""
    at_rest: Parts
    accumulated: Parts = field(default_factory=dict)
    """In a forward pass, from the second micro-batch on; this and what follows, beyond `at_rest`."""
    first_gradient: Parts = field(default_factory=dict)
    """When the first gradient is there and activations are not freed yet."""
    backward: Parts
    """At the end of the backward pass, when gradients are complete and reduced."""
    update: Parts


def _stage0(rank: _Rank) -> _Stage:
    """Weights w P, states s X, gradients w X; half precision: (4 + s) X, and 8 X while gradients become float32."""
    weight, trained = rank.weight, rank.trained
    states = int(((4 if rank.is_half else 0) + rank.states) * trained)
    at_rest = {"weights": rank.weights(), "optimizer": states}
    return _Stage(
        load=at_rest | {"optimizer": states - int(rank.states * trained)},
        at_rest=at_rest,
        accumulated={"gradients": weight * trained},
        backward={"gradients": weight * trained, "buckets": weight * min(trained, _ALL_REDUCE)},
        update={"gradients": weight * trained + (8 * trained if rank.is_half else 0)},
    )


def _stage1(rank: _Rank) -> _Stage:
    """Weights w P, states (4 + s) X / N, gradients w X, and w X / N of them reduced.
    In bf16 by DeepSpeed's BF16_Optimizer: gradients w X, and 4 X in float32.
    """
    weight, trained = rank.weight, rank.trained
    own_weights, bucket = weight * rank.own_trained, weight * rank.bucket
    at_rest = _at_rest_below_3(rank)
    if rank.cfg.precision.dtype is schema.Dtype.bf16 and not rank.offloads:
        at_rest |= {"gradients": 4 * trained}
        return _Stage(
            load=_before_states(rank, at_rest, is_flattened=False),
            at_rest=at_rest,
            accumulated={"gradients": weight * trained},
            backward={"gradients": weight * trained, "buckets": weight * trained},
            update={"gradients": weight * trained},
        )
    return _Stage(
        load=_before_states(rank, at_rest),
        at_rest=at_rest,
        accumulated={"gradients": weight * trained, "buckets": bucket},
        backward={"gradients": weight * trained, "buckets": bucket + own_weights - rank.part(own_weights)},
        update={} if rank.offloads else {"gradients": (rank.grad + 4) * rank.own_trained},
    )


def _stage2(rank: _Rank) -> _Stage:
    """Weights w P, states (4 + s) X / N, gradients g X / N."""
    cfg, weight, part = rank.cfg, rank.weight, rank.own_trained
    is_bf16, bucket = cfg.precision.dtype is schema.Dtype.bf16, weight * rank.bucket
    gradients = 0 if rank.offloads else rank.grad * part
    flush = weight * min(rank.trained, cfg.zero.reduce_bucket_size) + weight * rank.largest // 2
    backward = {"gradients": gradients, "buckets": bucket + flush}
    if is_bf16 and not rank.offloads and rank.trained > cfg.zero.reduce_bucket_size:
        # A bucket is flattened and sent while the next gradient is there, in bf16 and in float32; one that is larger
        # goes past the buckets. What layers are computed again from is kept to the end of the pass.
        sent = 0 if rank.largest > cfg.zero.reduce_bucket_size else weight * cfg.zero.reduce_bucket_size
        flush = sent + (weight + 4) * rank.largest
        inputs = rank.activations().get("layer inputs", 0)
        backward |= {"buckets": bucket + flush} | ({"layer inputs": inputs} if inputs else {})
    if not rank.offloads and not is_bf16:  # a micro-batch's beside those before it; bf16 adds up in one buffer
        backward["buckets"] = bucket + max(flush, rank.grad * part + weight * rank.largest)
        if mesh.accumulation(cfg, rank.world) == 1:  # none are before it
            backward["gradients"] = 0
    vocab, hidden = rank.outline.vocabulary
    at_rest = _at_rest_below_3(rank)
    update = 4 * part + 4 * rank.largest // 2 if is_bf16 else (rank.grad + 4) * part
    return _Stage(
        load=_before_states(rank, at_rest),
        at_rest=at_rest,
        accumulated={"gradients": gradients},
        first_gradient={"loss": weight * vocab * hidden if rank.outline.trains_head else 0, "buckets": bucket},
        backward=backward,
        update={} if rank.offloads else {"gradients": update},
    )


def _stage3(rank: _Rank) -> _Stage:
    """Weights w P / N, states (4 + s) X / N, gradients g X / N; and the layers that are gathered."""
    zero, weight, part = rank.cfg.zero, rank.weight, rank.own_trained
    sizes = map(math.prod, rank.outline.shapes.values())
    persistent = sum(size for size in sizes if size <= zero.stage3_param_persistence_threshold)
    own_numbers = rank.own_all if zero.offload_param.device is schema.Device.none else 0
    states = {} if rank.offloads else {"optimizer": int((4 + rank.states) * part), "gradients": rank.grad * part}
    at_rest = {"weights": weight * (own_numbers + persistent), **states, "buckets": weight * rank.bucket}
    if zero.zero_hpz_partition_size > 1:  # the second copy, split over the ranks of one node
        at_rest["second weights"] = weight * -(-rank.all // zero.zero_hpz_partition_size)
    flush = weight * min(rank.trained, zero.reduce_bucket_size) + weight * rank.largest // 2
    return _Stage(
        load=_before_states(rank, at_rest, is_flattened=False),
        at_rest=at_rest,
        backward={**rank.gathered(ahead=False), "buckets": flush},
        update={} if rank.offloads else {"gradients": 4 * min(part, zero.sub_group_size)},
    )


_STAGES = (_stage0, _stage1, _stage2, _stage3)


def _at_rest_below_3(rank: _Rank) -> Parts:
    """Return what stages 1 and 2 hold between two steps."""
    if not rank.offloads:
        return {"weights": rank.weights(), "optimizer": int((4 + rank.states) * rank.own_trained)}
    parts = {"weights": rank.weights(), "buckets": (rank.weight + rank.grad) * rank.largest // 2}
    zenflow = rank.cfg.zero.zenflow
    if zenflow.enabled:  # gradients of the chosen columns on every rank, and two states of the weights' type
        parts["zenflow"] = rank.weight * int(rank.trained * zenflow.topk_ratio) * (1 if zenflow.offload else 3)
    return parts


def _before_states(rank: _Rank, at_rest: Parts, is_flattened: bool = True) -> Parts:
    """Return the bytes before the optimizer's states exist; a copy of the weights, for flattening, is freed by then."""
    if rank.offloads:
        return at_rest
    optimizer = at_rest["optimizer"] - int(rank.states * rank.own_trained)
    copy = max(0, rank.weight * rank.trained - optimizer) if is_flattened else 0
    return at_rest | {"optimizer": optimizer, "weights": at_rest["weights"] + copy}


def _sum(first: Parts, second: Parts) -> Parts:
    return dict(Counter(first) + Counter(second))


def in_4_bits(outline: Outline) -> list[int]:
    """Return the numbers of each matrix that QLoRA has in 4 bits: those of layers and of experts that are not
    trained.
    """
    return [
        math.prod(shape)
        for name, shape in outline.shapes.items()
        if len(shape) == 2 + is_routed(name) and layer_of(name) >= 0 and name not in outline.trained
    ]


def heap_bytes(memory: RankMemory) -> int:
    """Return what the heap of a CPU rank keeps beyond its tensors."""
    return int(HEAP_SHARE * sum(size for kind, size in memory.device["step"].items() if kind not in _RESIDENT))


def process_bytes(memory: RankMemory) -> int:
    """Return the memory of a CPU rank: the process, its tensors, and what the heap keeps."""
    return PROCESS_BYTES + memory.peak(memory.worst) + heap_bytes(memory)


def plan_host(outline: Outline, cfg: schema.RunConfig, machine: Machine, memory: RankMemory) -> dict[str, Parts]:
    """Return the bytes of one node by kind in the phases load, step and export; without the pages of the tokenized
    data, which give way to anything else.
    """
    ranks, width = machine.ranks, WIDTHS[cfg.precision.dtype]
    always: Parts = {"processes": ranks * (PROCESS_BYTES + (0 if machine.on_cpu else CUDA_BYTES))}
    if cfg.data.num_workers:
        always["loaders"] = ranks * cfg.data.num_workers * WORKER_BYTES
    steps = _sum(always, {kind: ranks * size for kind, size in memory.host.items()})
    if machine.on_cpu:
        steps |= {"tensors": ranks * memory.peak("step"), "heap": ranks * heap_bytes(memory)}
    if cfg.checkpoint.asynchronous:
        steps["copies"] = ranks * checkpoint_bytes(outline, cfg) // machine.world_size
    # What a rank has in host memory before it goes to its device.
    model_of_rank = division.expert_part(outline, cfg.parallel.expert)  # of experts each rank reads its own alone
    weights = (4 if cfg.model.init is schema.Init.random else width) * model_of_rank.num_parameters
    if cfg.model.init is not schema.Init.random and cfg.tuning.method is schema.TuningMethod.qlora:
        small = in_4_bits(model_of_rank)  # which leave the host one after another
        weights -= width * (sum(small) - max(small)) - (sum(small) // 2 if machine.on_cpu else 0)
    if cfg.model.init is not schema.Init.random and cfg.zero.stage == 3:
        rows, columns = outline.vocabulary
        weights = width * max(rows * columns, outline.num_parameters // machine.world_size)
    if outline.teacher:  # which is loaded before the student, or after it
        size, (rows, columns) = outline.teacher.num_parameters, outline.teacher.vocabulary
        is_parted = cfg.zero.stage == 3
        weights = max(weights, width * (max(rows * columns, size // machine.world_size) if is_parted else size))
    loading = always | {"weights": ranks * weights}
    if machine.on_cpu:
        loading["read"] = ranks * memory.device["load"].get("read", 0)
    exporting = dict(steps)
    if cfg.checkpoint.export:
        exporting["exported"] = export_bytes(outline, cfg)  # on the first rank
        if cfg.checkpoint.verify_export:  # an adapter, or a layer of a model at a time
            exporting["read again"] = min(width * outline.largest_layer(), exporting["exported"])
    return {"load": loading, "step": steps, "export": exporting}


def checkpoint_bytes(outline: Outline, cfg: schema.RunConfig) -> int:
    """Return the bytes of one checkpoint, of all ranks: trained weights in fp32, and their states."""
    return int((4 + rule_tables.OPTIMIZERS[cfg.optim.name].state_bytes) * outline.num_trained)


def export_bytes(outline: Outline, cfg: schema.RunConfig) -> int:
    """Return the bytes of what is exported: the model, or what was added to it."""
    is_whole = cfg.tuning.method.value in ("full", "freeze")
    return WIDTHS[cfg.precision.dtype] * (outline.num_parameters if is_whole else outline.num_trained)
