"""Bytes of one rank and of a node in every phase of a run, from the shapes of the model's parameters. No torch.

P are the model's parameters, X the trained ones, N the ranks, w the bytes of a weight, g those of an added-up gradient
(4, or 2 in fp16), s those of the optimizer's states per parameter (8 for Adam). A function for each ZeRO stage has its
formulas (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5); what DeepSpeed 0.19.8 holds besides was
read in its code and measured, tensor by tensor, on two and four ranks (docs/planning.md).
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from toolkit.config.mesh import accumulation, micro_rows
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import Attention, Device, Dtype, Init, LossKernel, Packing, RunConfig, TuningMethod
from toolkit.plan.activations import Rows, layer_bytes, saved_bytes
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.parameters import Outline, layer_of, stage_outlines, tensor_part

CHUNK_BYTES = 128 * 2**20
"""Of the logits in float32 that the loss computes at once: models/loss.py's constant of this name, as a test checks."""
_CHUNK_COPIES = 2.5
"""Times that a chunk's bytes are held: logits, probabilities, and their gradient in the model's type."""
_ALL_REDUCE = 500_000_000
"""Elements that DeepSpeed flattens at once where ZeRO does not (engine.py, MEMORY_OPT_ALLREDUCE_SIZE, 0.19.8)."""
WIDTHS = {Dtype.fp32: 4, Dtype.bf16: 2, Dtype.fp16: 2}
"""Bytes of a weight."""

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


def plan_rank(outline: Outline, cfg: RunConfig, world_size: int, on_cpu: bool = False) -> RankMemory:
    """Return the memory of one rank on the longest rows that the config allows.

    With `on_cpu` ranks run on processors, where a device's memory and the host's are one.
    """
    if (stages := cfg.parallel.pipeline) == 1:
        return _Rank(tensor_part(outline, cfg.parallel.tensor), cfg, world_size, on_cpu).memory()
    # One micro-batch forward and one back in turn: the first stage waits longest for its first gradient.
    held = (min(accumulation(cfg, world_size), stages - stage) for stage in range(stages))
    parts = zip(stage_outlines(outline, stages), held, strict=True)
    found = [_Rank(part, cfg, world_size, on_cpu, in_flight).memory() for part, in_flight in parts]
    peaks = tuple(one.peak(one.worst) for one in found)
    return replace(found[peaks.index(max(peaks))], stages=peaks)


def longest_rows(outline: Outline, cfg: RunConfig, on_cpu: bool = False) -> Rows:
    """Return the largest micro-batch that the config allows."""
    packed = cfg.data.packing is Packing.packed
    varlen = packed and cfg.model.attention in (Attention.auto, Attention.varlen)
    blocks = packed and not varlen
    width = WIDTHS[cfg.precision.dtype]
    learned = cfg.tuning.method in (TuningMethod.ptuning_v2, TuningMethod.prompt)
    return Rows(
        rows=micro_rows(cfg),
        length=cfg.data.max_length,
        prefix=cfg.tuning.num_tokens if learned else 0,
        mask_bytes=width if outline.is_v1 or blocks or learned else 0,
        mask_per_layer=blocks or (learned and not outline.is_v1),
        varlen=varlen,
        keeps_inputs=cfg.zero.stage == 3,
        on_cpu=on_cpu,
        parts=cfg.parallel.sequence,
        mlp_pieces=cfg.kernels.mlp_pieces,
    )


@dataclass(slots=True)
class _Rank:
    outline: Outline
    cfg: RunConfig
    world: int
    on_cpu: bool
    in_flight: int = 1
    """Micro-batches whose activations are there at once."""
    weight: int = field(init=False)
    grad: int = field(init=False)
    """Bytes of a number of an added-up gradient."""
    all: int = field(init=False)
    """P."""
    trained: int = field(init=False)
    """X."""
    states: float = field(init=False)
    """Bytes that the optimizer keeps per trained parameter, beside weights."""
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        dtype = self.cfg.precision.dtype
        self.weight, self.states = WIDTHS[dtype], OPTIMIZERS[self.cfg.optim.name].state_bytes
        self.grad = 2 if dtype is Dtype.fp16 else 4
        self.all, self.trained = self.outline.num_parameters, self.outline.num_trained
        self.rows = longest_rows(self.outline, self.cfg, self.on_cpu)

    @property
    def is_half(self) -> bool:
        return self.weight == 2

    @property
    def offloads(self) -> bool:
        return self.cfg.zero.offload_optimizer.device is not Device.none

    @property
    def largest(self) -> int:
        return max((math.prod(self.outline.shapes[name]) for name in self.outline.trained), default=0)

    @property
    def bucket(self) -> int:
        """Elements of the buffers into which gradients are gathered before they are reduced."""
        zero = self.cfg.zero
        copies = 2 if zero.overlap_comm and zero.stage in (1, 2) else 1
        return 0 if zero.stage == 0 else min(zero.reduce_bucket_size, self.trained) * copies

    def part(self, elements: int) -> int:
        """Return a rank's share."""
        return -(-elements // (self.world // (self.cfg.parallel.pipeline * self.cfg.parallel.tensor)))

    def memory(self) -> RankMemory:
        stage = _STAGES[self.cfg.zero.stage](self)
        forward = self.forward(stage)
        moments = [forward, forward | stage.first_gradient, stage.backward, stage.update]
        steps = [Counter(stage.at_rest) + Counter(parts) for parts in moments]
        step = max(steps, key=lambda parts: sum(parts.values()))
        full = {"gathered": self.weight * self.largest_anywhere()} if self.cfg.zero.stage == 3 else {}
        device = {
            "load": self.load(stage.load),
            "step": dict(step),
            "evaluation": dict(Counter(stage.at_rest) + Counter(self.evaluation())),
            "save": dict(Counter(stage.at_rest) + Counter(self.gathered())),  # a checkpoint's probe is a forward pass
            "export": dict(Counter(stage.at_rest) + Counter(full)),
        }
        host = self.host()
        if self.on_cpu:
            first = int(host.get("optimizer", 0) * 4 / (4 + self.states))
            loaded = host | {"optimizer": first} if "optimizer" in host else host
            device = {
                phase: dict(Counter(parts) + Counter(loaded if phase == "load" else host))
                for phase, parts in device.items()
            }
            host = {}
        return RankMemory(device=device, host=host)

    def largest_anywhere(self) -> int:
        return max(map(math.prod, self.outline.shapes.values()))

    def weights(self) -> int:
        """Bytes of all weights; QLoRA has those of the layers' matrices in 4 bits, and 1/64 byte of statistics."""
        if self.cfg.tuning.method is not TuningMethod.qlora:
            return self.weight * self.all
        small = sum(
            math.prod(shape)
            for name, shape in self.outline.shapes.items()
            if len(shape) == 2 and layer_of(name) >= 0 and name not in self.outline.trained
        )
        return self.weight * (self.all - small) + small // 2 + small // 64

    def forward(self, stage: "_Stage") -> Parts:
        """At the end of a forward pass, when everything is kept for the backward pass, and its beginning."""
        parts = self.activations() | {"loss": self.loss()}
        zero = self.cfg.zero
        if zero.stage == 3 and self.all <= zero.stage3_max_live_parameters:
            # Everything is fetched once and stays: no more is on its way when the activations are there.
            coming, staying = self.gathered(), self.gathered(ahead=False)
            extra = sum(coming.values()) - sum(staying.values())
            parts = coming if extra > sum(parts.values()) else parts | staying
        else:
            parts |= self.gathered()
        return parts | (stage.accumulated if accumulation(self.cfg, self.world) > 1 else {})

    def gathered(self, ahead: bool = True) -> Parts:
        """Stage 3: the layers that are whole for the moment, and those on their way."""
        zero = self.cfg.zero
        if zero.stage != 3:
            return {}
        live = min(self.all, zero.stage3_max_live_parameters)
        coming = min(self.all, max(zero.stage3_prefetch_bucket_size, self.outline.largest_layer())) if ahead else 0
        return {"gathered": self.weight * min(live + coming, 2 * self.all)}

    def activations(self) -> Parts:
        """Activations by kind."""
        rows, dropout, sizes = self.rows, self.cfg.tuning.dropout, self.outline.sizes
        inner = self.weight * sizes["inner"] * -(-rows.tokens // rows.mlp_pieces)
        computed = {"backward": (4 if rows.mlp_pieces == 1 else 7) * inner}  # of a piece also what it keeps
        if not self.cfg.train.activation_checkpointing.enabled:
            saved = saved_bytes(self.outline, rows, self.weight, dropout)
            return {kind: self.in_flight * size for kind, size in saved.items()} | computed
        last = layer_bytes(self.outline, rows, self.weight, sizes["layers"] - 1, dropout)
        inputs = self.weight * sizes["hidden"] * rows.tokens * sizes["layers"] * self.in_flight
        return {"layer inputs": inputs, **last, **computed}

    @property
    def is_loss_chunked(self) -> bool:
        """Whether no more than a chunk of logits is there at once; see models/loss.py for where it cannot be."""
        has_more = any("lm_head.lora_A" in name or "lm_head.modules_to_save" in name for name in self.outline.shapes)
        return (
            self.cfg.kernels.loss is not LossKernel.full
            and not has_more
            and not self.outline.sizes.get("logits_change")
        )

    def loss(self, with_gradients: bool = True) -> int:
        """The output layer's, whose logits are computed a chunk at a time."""
        rows = self.rows
        vocab, hidden = self.outline.vocabulary
        if not self.is_loss_chunked:  # logits as they are, in float32, their probabilities, and gradients
            copies = 8 + (self.weight if self.is_half else 0) + (4 if with_gradients else 0)
            return rows.tokens * (vocab * copies + self.weight * hidden)
        chunk = min(rows.tokens * vocab * 4, CHUNK_BYTES)
        if not with_gradients:
            return int(2 * chunk) + self.weight * hidden * rows.tokens
        matrix = 4 * vocab * hidden if self.outline.trains_head else 0
        again = matrix if self.is_half and rows.tokens * vocab * 4 > CHUNK_BYTES else 0
        return int(_CHUNK_COPIES * chunk) + (self.weight + 4) * hidden * rows.tokens + matrix + again

    def evaluation(self) -> Parts:
        """Rows of the same size forward, nothing kept; or answers, if they take more."""
        rows, sizes, asked = self.rows, self.outline.sizes, self.cfg.evaluate
        layer = self.weight * (4 * sizes["inner"] + 4 * sizes["hidden"])
        parts = {"activations": layer * rows.tokens, "loss": self.loss(with_gradients=False)}
        if asked.metrics:
            tokens = asked.batch_size * (rows.length + rows.prefix + asked.max_new_tokens)
            answers = {
                "activations": layer * asked.batch_size * rows.length,
                "loss": 4 * asked.batch_size * self.outline.vocabulary[0],
                "cache": 2 * self.weight * sizes["keys"] * sizes["layers"] * tokens,
            }
            parts = max(parts, answers, key=lambda found: sum(found.values()))
        return parts | self.gathered()

    def load(self, parts: Parts) -> Parts:
        """When DeepSpeed makes its own copies of the weights; on CPU ranks beside the weights as they are read."""
        if self.on_cpu and self.cfg.model.init is Init.random:  # made in float32, in full
            return parts | {"weights": parts["weights"] + max(0, 4 * self.all - sum(parts.values()))}
        if self.on_cpu:
            return parts | {"read": self.weight * self.largest_anywhere()}  # of the tensor that is copied from its file
        return parts

    def zenflow_host(self, part: int) -> int:
        """Bytes of what ZenFlow adds on the host: states of chosen columns; a second gradient and old weights."""
        zenflow = self.cfg.zero.zenflow
        if not zenflow.enabled:
            return 0
        chosen = 2 * self.weight * int(self.trained * zenflow.topk_ratio) if zenflow.offload else 0
        return chosen + (8 * part if zenflow.overlap_step else 0)

    def host(self) -> Parts:
        """What is offloaded."""
        zero, part = self.cfg.zero, self.part(self.trained)
        parts: Counter[str] = Counter()
        if zero.offload_optimizer.device is Device.cpu:
            parts["optimizer"] = int((4 + self.states) * part)
        elif zero.offload_optimizer.device is Device.nvme:
            tile = min(part, zero.sub_group_size)
            parts["optimizer"] = 4 * tile * zero.offload_optimizer.buffer_count
        if self.offloads:
            parts["gradients"] = (4 + self.grad) * part if zero.stage == 3 else (4 + 2 * self.weight) * part
            parts["zenflow"] = self.zenflow_host(part)
            if zero.offload_optimizer.super_offload:  # the process's own copy of a tile's gradients
                parts["gradients"] += 4 * min(part, zero.sub_group_size)
        if zero.offload_param.device is Device.cpu:
            parts["weights"] = self.weight * self.part(self.all)
        elif zero.offload_param.device is Device.nvme:
            parts["weights"] = self.weight * zero.offload_param.buffer_size * zero.offload_param.buffer_count
        return {kind: count for kind, count in parts.items() if count}


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
    """Weights w P, states (4 + s) X / N, gradients w X, and w X / N of them reduced."""
    if rank.cfg.precision.dtype is Dtype.bf16 and not rank.offloads:
        return _stage1_bf16(rank)
    weight, trained = rank.weight, rank.trained
    own, bucket = weight * rank.part(trained), weight * rank.bucket
    at_rest = _at_rest_below_3(rank)
    return _Stage(
        load=_load_flattened(rank, at_rest),
        at_rest=at_rest,
        accumulated={"gradients": weight * trained, "buckets": bucket},
        backward={"gradients": weight * trained, "buckets": bucket + own - rank.part(own)},
        update={} if rank.offloads else {"gradients": (rank.grad + 4) * rank.part(trained)},
    )


def _stage1_bf16(rank: _Rank) -> _Stage:
    """DeepSpeed's BF16_Optimizer: weights w P, states (4 + s) X / N, gradients w X, and 4 X in float32."""
    own = {"gradients": rank.weight * rank.trained}
    at_rest = _at_rest_below_3(rank) | {"gradients": 4 * rank.trained}
    return _Stage(
        load=_without_states(rank, at_rest),
        at_rest=at_rest,
        accumulated=own,
        backward=own | {"buckets": rank.weight * rank.trained},
        update=own,
    )


def _stage2(rank: _Rank) -> _Stage:
    """Weights w P, states (4 + s) X / N, gradients g X / N."""
    cfg, weight, part = rank.cfg, rank.weight, rank.part(rank.trained)
    is_bf16, bucket = cfg.precision.dtype is Dtype.bf16, weight * rank.bucket
    gradients = 0 if rank.offloads else rank.grad * part
    flush = weight * min(rank.trained, cfg.zero.reduce_bucket_size) + weight * rank.largest // 2
    backward = {"gradients": gradients, "buckets": bucket + flush}
    if not rank.offloads and not is_bf16:  # a micro-batch's beside those before it; bf16 adds up in one buffer
        backward["buckets"] = bucket + max(flush, rank.grad * part + weight * rank.largest)
        if accumulation(cfg, rank.world) == 1:  # none are before it
            backward["gradients"] = 0
    vocab, hidden = rank.outline.vocabulary
    at_rest = _at_rest_below_3(rank)
    update = 4 * part + 4 * rank.largest // 2 if is_bf16 else (rank.grad + 4) * part
    return _Stage(
        load=_load_flattened(rank, at_rest),
        at_rest=at_rest,
        accumulated={"gradients": gradients},
        first_gradient={"loss": weight * vocab * hidden if rank.outline.trains_head else 0, "buckets": bucket},
        backward=backward,
        update={} if rank.offloads else {"gradients": update},
    )


def _stage3(rank: _Rank) -> _Stage:
    """Weights w P / N, states (4 + s) X / N, gradients g X / N; and the layers that are gathered."""
    zero, weight, part = rank.cfg.zero, rank.weight, rank.part(rank.trained)
    sizes = map(math.prod, rank.outline.shapes.values())
    persistent = sum(size for size in sizes if size <= zero.stage3_param_persistence_threshold)
    own = rank.part(rank.all) if zero.offload_param.device is Device.none else 0
    states = {} if rank.offloads else {"optimizer": int((4 + rank.states) * part), "gradients": rank.grad * part}
    at_rest = {"weights": weight * (own + persistent), **states, "buckets": weight * rank.bucket}
    if zero.zero_hpz_partition_size > 1:  # the second copy, split over the ranks of one node
        at_rest["second weights"] = weight * -(-rank.all // zero.zero_hpz_partition_size)
    flush = weight * min(rank.trained, zero.reduce_bucket_size) + weight * rank.largest // 2
    return _Stage(
        load=_without_states(rank, at_rest),
        at_rest=at_rest,
        backward={**rank.gathered(ahead=False), "buckets": flush},
        update={} if rank.offloads else {"gradients": 4 * min(part, zero.sub_group_size)},
    )


_STAGES = (_stage0, _stage1, _stage2, _stage3)


def _at_rest_below_3(rank: _Rank) -> Parts:
    """Return what stages 1 and 2 hold between two steps."""
    if not rank.offloads:
        return {"weights": rank.weights(), "optimizer": int((4 + rank.states) * rank.part(rank.trained))}
    parts = {"weights": rank.weights(), "buckets": (rank.weight + rank.grad) * rank.largest // 2}
    zenflow = rank.cfg.zero.zenflow
    if zenflow.enabled:  # gradients of the chosen columns on every rank, and two states of the weights' type
        parts["zenflow"] = rank.weight * int(rank.trained * zenflow.topk_ratio) * (1 if zenflow.offload else 3)
    return parts


def _without_states(rank: _Rank, at_rest: Parts) -> Parts:
    """Return what is there before the states are."""
    if rank.offloads:
        return at_rest
    return at_rest | {"optimizer": at_rest["optimizer"] - int(rank.states * rank.part(rank.trained))}


def _load_flattened(rank: _Rank, at_rest: Parts) -> Parts:
    """Return the same where weights are flattened, and the copy is freed before the states are made."""
    parts = _without_states(rank, at_rest)
    if rank.offloads:
        return parts
    return parts | {"weights": parts["weights"] + max(0, rank.weight * rank.trained - parts["optimizer"])}


PROCESS_BYTES = int(0.6 * GIB)
"""Private memory of a rank with torch, DeepSpeed and transformers imported."""
CUDA_BYTES = 2 * GIB
"""What CUDA adds to it in host memory; by what others report, not measured here."""
HEAP_SHARE = 0.5
"""Of what comes and goes within a step, what the heap of a CPU rank keeps beyond it: glibc takes blocks of up to 32 MiB
from one heap, whose holes fit no larger block. Measured: 0.45 on packed rows of 1,024 tokens, and nothing of it with
MALLOC_MMAP_THRESHOLD_=262144."""
_RESIDENT = ("weights", "second weights", "optimizer")
WORKER_BYTES = int(0.3 * GIB)
"""Of a data-loader process."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What one machine holds; without the pages of the tokenised data, which give way to anything else."""

    phases: dict[str, Parts]
    """Bytes by kind while weights load, while steps are done, and while is exported."""

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(sum(parts.values()) for parts in self.phases.values())


def heap_bytes(memory: RankMemory) -> int:
    """Return what the heap of a rank on processors keeps beyond its tensors."""
    return int(HEAP_SHARE * sum(size for kind, size in memory.device["step"].items() if kind not in _RESIDENT))


def process_bytes(memory: RankMemory) -> int:
    """Return the memory of a rank on processors: the process, its tensors, and what the heap keeps."""
    return PROCESS_BYTES + memory.peak(memory.worst) + heap_bytes(memory)


def plan_host(outline: Outline, cfg: RunConfig, machine: Machine, memory: RankMemory) -> HostMemory:
    """Return the memory of one machine."""
    ranks = machine.ranks
    always: Parts = {"processes": ranks * (PROCESS_BYTES + (0 if machine.on_cpu else CUDA_BYTES))}
    if cfg.data.num_workers:
        always["loaders"] = ranks * cfg.data.num_workers * WORKER_BYTES
    offloaded = {kind: ranks * size for kind, size in memory.host.items()}
    steps = Counter(always) + Counter(offloaded)
    if machine.on_cpu:
        steps.update({"tensors": ranks * memory.peak("step"), "heap": ranks * heap_bytes(memory)})
    if cfg.checkpoint.asynchronous:
        steps["copies"] = ranks * checkpoint_bytes(outline, cfg) // machine.world_size
    loading = Counter(always) + Counter({"weights": ranks * _loaded(outline, cfg, machine.world_size)})
    if machine.on_cpu:
        loading["read"] = ranks * memory.device["load"].get("read", 0)
    exporting = Counter(steps)
    if cfg.checkpoint.export:
        exporting["exported"] = export_bytes(outline, cfg)  # on the first rank
        if cfg.checkpoint.verify_export:  # an adapter, or a layer of a model at a time
            layer = WIDTHS[cfg.precision.dtype] * outline.largest_layer()
            exporting["read again"] = min(layer, exporting["exported"])
    return HostMemory({"load": dict(loading), "step": dict(steps), "export": dict(exporting)})


def _loaded(outline: Outline, cfg: RunConfig, world_size: int) -> int:
    """Return the bytes of weights that a rank has in host memory before they go to its device."""
    width = WIDTHS[cfg.precision.dtype]
    if cfg.model.init is Init.random:
        return 4 * outline.num_parameters
    if cfg.zero.stage == 3:
        return width * max(outline.vocabulary[0] * outline.vocabulary[1], outline.num_parameters // world_size)
    return width * outline.num_parameters


def checkpoint_bytes(outline: Outline, cfg: RunConfig) -> int:
    """Return the bytes of one checkpoint, of all ranks: trained weights, and states in float32."""
    states = 12 if cfg.zero.stage or WIDTHS[cfg.precision.dtype] == 2 else 8
    weights = WIDTHS[cfg.precision.dtype] if cfg.zero.stage < 3 else 0
    return (states + weights) * outline.num_trained


def export_bytes(outline: Outline, cfg: RunConfig) -> int:
    """Return the bytes of what is exported: the model, or what was added to it."""
    whole = all(name in outline.trained for name in outline.shapes) or cfg.tuning.method.value == "freeze"
    return WIDTHS[cfg.precision.dtype] * (outline.num_parameters if whole else outline.num_trained)


def offloads_to_disk(cfg: RunConfig) -> bool:
    """Whether DeepSpeed's states lie on an NVMe disk."""
    return Device.nvme in (cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device)
