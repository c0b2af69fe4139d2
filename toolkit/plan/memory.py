"""Memory in bytes of a rank and of a node in each phase of a run, from the shapes of the model's parameters. No torch.

P: number of the model's parameters; X: of trained ones; N: ranks; w: bytes of a weight; g: of an accumulated gradient
(4, or 2 in fp16); m: of a master weight (4); s: of the optimizer's states per parameter (8 for Adam). With
precision.optimizer_states=bf16 g and m are 2, and s is half. Each ZeRO stage has a function with its
formulas (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5). What DeepSpeed 0.19.8 allocates besides
is from its code, and was measured tensor by tensor on two and four ranks (docs/planning.md).
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from toolkit.config import mesh, objective, rule_tables, schema
from toolkit.plan.activations import (
    Rows,
    activation_bytes,
    dora_temporary_bytes,
    expert_activation_bytes,
    layer_activation_bytes,
)
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.outline import TRAINED_ROWS, Outline, is_routed, layer_of, rank_part, zero_groups

CHUNK_BYTES = 128 * 2**20
"""Bytes of the float32 logits of a chunk: the constant in models/loss.py, as a test checks."""
_CHUNK_COPIES = 2.5
"""Factor of a chunk's bytes: logits, probabilities, and their gradient in the model's type."""
_DISTILLED_PART, _DISTILLED_COPIES = 4, 12.5
"""With a teacher chunks are a fourth (distill_losses.py), and take this factor of their bytes."""
_ALL_REDUCE = 500_000_000
"""Elements that DeepSpeed flattens at once without ZeRO (engine.py, MEMORY_OPT_ALLREDUCE_SIZE, 0.19.8)."""
_KEPT_INPUTS = 3
"""Inputs of layers that stay on the GPU under cpu_checkpointing: the last one, and two whose copies may be under way
(deepspeed 0.19.8, offload_activations.py, keep_last_count and max_fwd_stash_count)."""
BF16_CHUNK = 2**22
"""Elements that an update with states in bf16 computes in float32 at once (engine/bf16_adam.py)."""
WIDTHS = {schema.Dtype.fp32: 4, schema.Dtype.bf16: 2, schema.Dtype.fp16: 2}
"""Bytes of a weight."""
PROCESS_BYTES = int(0.7 * GIB)
"""Private memory of a rank with torch, DeepSpeed, transformers and peft imported."""
CUDA_BYTES = 2 * GIB
"""Host memory that CUDA adds to a process; by others' reports, not measured here."""
HEAP_SHARE = 1.0
"""Fraction of a step's temporary tensors by which the heap of a CPU rank is larger. The process keeps what a step frees
(launch/allocator.py), and glibc 2.36 finds no aligned block in a freed one of the same size, so that tensors take their
room twice. Measured with SmolLM2-135M: benchmarks/README.md, 2026-11-30, memory of a CPU process.
"""
_RESIDENT = ("weights", "second weights", "optimizer")
WORKER_BYTES = int(0.3 * GIB)
"""Memory of a data-loader process."""
Parts = dict[str, int]
"""Bytes by kind: weights, gradients, optimizer, buckets, gathered, activations by kind, loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank."""

    device: dict[str, Parts]
    """Bytes of device memory in each phase: load, step, evaluation, save, export."""
    host: Parts
    """Bytes of host memory besides the process's own: offloaded states, and the buffers for them."""
    stages: tuple[int, ...] = ()
    """Peaks of each pipeline stage's ranks, of which this is the largest; () without stages."""

    def peak(self, phase: str) -> int:
        """Return the device's bytes in a phase."""
        return sum(self.device[phase].values())

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.device, key=self.peak)


def bf16_chunk_elements(trained: int) -> int:
    """Return the float32 numbers of an update with states in bf16 of so many parameters: a chunk's five tensors."""
    return 5 * min(BF16_CHUNK, trained)


def plan_rank(outline: Outline, cfg: schema.RunConfig, world_size: int, on_cpu: bool = False) -> RankMemory:
    """Return the memory of a rank, of the largest pipeline stage, on the longest rows; a CPU's `device` is the host."""
    if (stages := cfg.parallel.pipeline) == 1:
        return RankPlanner(rank_part(outline, cfg), cfg, world_size, on_cpu).memory()
    from toolkit.plan.division import stage_outlines

    # Stages alternate forward and backward passes; earlier stages wait longer for their first backward pass.
    ranks = []
    for stage, stage_outline in enumerate(stage_outlines(outline, stages)):
        in_flight = min(mesh.accumulation(cfg, world_size), stages - stage)
        ranks.append(RankPlanner(rank_part(stage_outline, cfg), cfg, world_size, on_cpu, in_flight).memory())
    peaks = tuple(rank.peak(rank.worst) for rank in ranks)
    return replace(ranks[peaks.index(max(peaks))], stages=peaks)


def longest_rows(outline: Outline, cfg: schema.RunConfig, on_cpu: bool = False) -> Rows:
    """Return the largest micro-batch that the config allows."""
    packed = cfg.data.packing is schema.Packing.packed or objective.shares_prompts(cfg)
    varlen = packed and cfg.model.attention in (schema.Attention.auto, schema.Attention.varlen)
    by_mask = packed and not varlen  # a mask keeps the samples of a row apart
    width = WIDTHS[cfg.precision.dtype]
    learned = cfg.tuning.method in (schema.TuningMethod.ptuning_v2, schema.TuningMethod.prompt)
    has_mask = learned and cfg.parallel.sequence == 1
    return Rows(
        # A pair has two rows, or one if its answers share a mask.
        rows=mesh.micro_rows(cfg) * (1 if by_mask else objective.data_unit(cfg)[1]),
        length=cfg.data.max_length * (objective.data_unit(cfg)[1] if by_mask else 1),
        prefix=cfg.tuning.num_tokens if learned else 0,
        mask_bytes=width if outline.is_v1 or by_mask or has_mask else 0,
        mask_per_layer=by_mask or (has_mask and not outline.is_v1),
        varlen=varlen,
        keeps_inputs=cfg.zero.stage == 3,
        on_cpu=on_cpu,
        parts=cfg.parallel.sequence,
        mlp_pieces=cfg.kernels.mlp_pieces,
    )


class RankPlanner:
    """Computes the memory of one rank, by kind and phase. `outline`: its part of the model; `world`: number of ranks;
    `in_flight`: micro-batches whose activations it holds at once, several in a pipeline stage.
    """

    def __init__(self, outline: Outline, cfg: schema.RunConfig, world: int, on_cpu: bool, in_flight: int = 1) -> None:
        self.outline, self.cfg, self.world, self.on_cpu, self.in_flight = outline, cfg, world, on_cpu, in_flight
        self.all, self.trained = outline.num_parameters, outline.num_trained  # P, X
        self.ranks = world // (cfg.parallel.pipeline * cfg.parallel.tensor)  # N, with equal parameters
        # What ZeRO leaves a rank: trained parameters of each of its groups, all parameters, and trained ones.
        groups = zero_groups(outline, self.ranks)
        self.own_groups = [-(-trained // over) for _, trained, over in groups]
        self.own_all, self.own_trained = sum(-(-size // over) for size, _, over in groups), sum(self.own_groups)
        self.weight = WIDTHS[cfg.precision.dtype]
        self.is_half = self.weight == 2
        # g, m and s: bytes of an accumulated gradient's element, of a master weight, and of the optimizer's states per
        # trained parameter.
        has_bf16_states = rule_tables.has_bf16_states(cfg)
        self.sums_in_fp32 = cfg.precision.dtype is schema.Dtype.bf16 and not has_bf16_states
        self.grad = 4 if self.sums_in_fp32 or not self.is_half else 2
        self.master, self.states = rule_tables.state_bytes(cfg)
        self.largest = max((math.prod(outline.shapes[name]) for name in outline.trained), default=0)
        self.largest_of_all = max(map(math.prod, outline.shapes.values()))
        self.rows = longest_rows(outline, cfg, on_cpu)
        zero = cfg.zero
        # Elements that stage 3 updates at once: a tile is closed by the parameter with which it reaches its size.
        self.tile = min(self.own_trained, max(zero.sub_group_size, self.part(self.largest)))
        self.offloads = zero.offload_optimizer.device is not schema.Device.none
        # What engine/bf16_adam.py computes at once: five tensors in float32.
        self.chunk = 4 * bf16_chunk_elements(self.own_trained) if has_bf16_states else 0
        recompute = cfg.train.activation_checkpointing
        self.offloads_inputs = recompute.enabled and recompute.cpu_checkpointing and not on_cpu
        copies = 2 if zero.overlap_comm and zero.stage in (1, 2) else 1
        # Elements of the buffers into which gradients are gathered before they are reduced.
        self.bucket = 0 if zero.stage == 0 else min(zero.reduce_bucket_size, self.trained) * copies

    def part(self, elements: int) -> int:
        """Return a rank's share of so many elements."""
        return -(-elements // self.ranks)

    def half_of_largest(self, width: int) -> int:
        """Return half of the bytes of the largest gradient, of `width` bytes per element: an estimate of what there is
        besides full buckets, by which plans come near to what is measured (tests/ranks/test_plan.py).
        """
        return width * self.largest // 2

    def memory(self) -> RankMemory:
        """Return the peak bytes of each phase; a CPU rank's host memory is in `device`."""
        stage = _STAGES[self.cfg.zero.stage](self)
        stage = replace(stage, at_rest=stage.at_rest | self.teacher())
        forward = self.forward(stage)
        moments = (forward, forward | stage.first_gradient, stage.backward, stage.update)
        exported = {"gathered": self.weight * self.largest_of_all} if self.cfg.zero.stage == 3 else {}
        device = {
            "load": stage.load,
            "step": _add_parts(stage.at_rest, max(moments, key=lambda parts: sum(parts.values()))),
            "evaluation": _add_parts(stage.at_rest, self.evaluation()),
            "save": _add_parts(stage.at_rest, self.gathered()),  # a checkpoint's probe is a forward pass
            "export": _add_parts(stage.at_rest, exported),
        }
        if self.outline.teacher and self.cfg.distill.top_k:  # it is freed before the student is loaded
            device = {"teacher": self.teacher(is_ahead=True), **device}
        host = self.host()
        if self.on_cpu:
            return RankMemory(device=self._with_host(device, host), host={})
        return RankMemory(device=device, host=host)

    def _with_host(self, device: dict[str, Parts], host: Parts) -> dict[str, Parts]:
        """Return the bytes of a CPU rank's phases: those of `device`, what loading takes besides, and offloaded states,
        of which before the first step there are only the master weights.
        """
        device = dict(device)
        # DeepSpeed copies weights while the ones that were read, or created in float32, still exist.
        if self.cfg.model.init is schema.Init.random:
            missing = max(0, 4 * self.all - sum(device["load"].values()))
            device["load"] = _add_parts(device["load"], {"weights": missing})
        else:
            device["load"] = device["load"] | {"read": self.weight * self.largest_of_all}  # the tensor that is copied
        loaded = dict(host)
        if "optimizer" in host:
            loaded["optimizer"] = int(host["optimizer"] * self.master / (self.master + self.states))
        return {phase: _add_parts(parts, loaded if phase == "load" else host) for phase, parts in device.items()}

    def teacher(self, is_ahead: bool = False) -> Parts:
        """Return the bytes of distillation's teacher, which only runs forward: its weights (under stage 3 this rank's
        part, and the layers that are gathered), and one layer's states. `is_ahead`: before training, where its scores
        are stored (distill.top_k); else during it. {} for the other of the two, and without a teacher.
        """
        model = self.outline.teacher
        runs_ahead = self.cfg.distill.top_k > 0
        if model is None or runs_ahead != is_ahead:
            return {}
        size, zero = model.num_parameters, self.cfg.zero
        if zero.stage == 3:
            ahead = max(zero.stage3_prefetch_bucket_size, model.largest_layer())
            gathered = min(size, min(size, zero.stage3_max_live_parameters) + min(size, ahead))
            size = gathered + (self.part(size) if zero.offload_param.device is schema.Device.none else 0)
        layer = 4 * model.sizes["inner"] + 4 * model.sizes["hidden"]  # elements of a token's states in one layer
        return {"teacher": self.weight * (size + layer * self.rows.tokens)}

    def update(self) -> Parts:
        """Return the bytes of gradients during an update below ZeRO 3: flattened, and all or a chunk in float32."""
        return {"gradients": self.grad * self.own_trained + (self.chunk or 4 * self.own_trained)}

    def weights(self) -> int:
        """Return the bytes of all weights. QLoRA has the layers' matrices and experts in 4 bits, with 1/64 byte of
        statistics for each number, and expands the experts of one matrix of a layer at a time.
        """
        if self.cfg.tuning.method is not schema.TuningMethod.qlora:
            return self.weight * self.all
        in_4_bits = sum(quantized_sizes(self.outline))
        stacks = (
            math.prod(shape) for name, shape in self.outline.shapes.items() if len(shape) == 3 and is_routed(name)
        )
        return self.weight * (self.all - in_4_bits + max(stacks, default=0)) + in_4_bits // 2 + in_4_bits // 64

    def forward(self, stage: "_StageMemory") -> Parts:
        """Return the bytes at the end of a forward pass, or in stage 3 while layers are gathered, if that is more."""
        parts = self.activations() | {"loss": self.loss()}
        zero = self.cfg.zero
        if zero.stage == 3 and self.all <= zero.stage3_max_live_parameters:
            # All weights are gathered once and stay: nothing is being prefetched at the end.
            while_prefetching, at_end = self.gathered(), self.gathered(ahead=False)
            prefetched = sum(while_prefetching.values()) - sum(at_end.values())
            parts = while_prefetching if prefetched > sum(parts.values()) else parts | at_end
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
        return {"gathered": self.weight * (live + coming)}

    def activations(self) -> Parts:
        """Return the bytes of activations by kind: saved ones, and those of one layer's backward pass."""
        rows, dropout, sizes = self.rows, self.cfg.tuning.dropout, self.outline.sizes
        inner = self.weight * sizes["inner"] * -(-rows.tokens // rows.mlp_pieces)
        routed = expert_activation_bytes(self.outline, rows, self.weight)[1]
        dora_norms = dora_temporary_bytes(self.outline, self.weight)
        num_inner = 4 if rows.mlp_pieces == 1 else 7  # of a piece also the three that it saves (activations.py, SwiGLU)
        computed = {"backward": max(num_inner * inner, routed, dora_norms)}
        if self.cfg.precision.fp8 is not schema.Fp8.none:
            computed["fp8"] = self.scaled()
        if not self.cfg.train.activation_checkpointing.enabled:
            saved = activation_bytes(self.outline, rows, self.weight, dropout)
            return {kind: self.in_flight * size for kind, size in saved.items()} | computed
        last = layer_activation_bytes(self.outline, rows, self.weight, sizes["layers"] - 1, dropout)
        layers = sizes["layers"] * self.in_flight
        inputs_on_device = min(layers, _KEPT_INPUTS) if self.offloads_inputs else layers
        return {"layer inputs": self.layer_input() * inputs_on_device, **last, **computed}

    def layer_input(self) -> int:
        """Return the bytes of the hidden states that a layer takes."""
        return self.weight * self.outline.sizes["hidden"] * self.rows.tokens

    def scaled(self) -> int:
        """Return the bytes of an FP8 product with the largest matrix: both factors in FP8, and the larger one in
        float32, which torch.compile avoids.
        """
        matrices = [shape for name, shape in self.outline.shapes.items() if layer_of(name) >= 0 and len(shape) == 2]
        rows, columns = max(matrices, key=math.prod)
        sizes = rows * columns, self.rows.tokens * max(rows, columns)
        return 5 * max(sizes) + min(sizes)  # 1 + 4 bytes, and 1

    def loss(self, with_gradients: bool = True) -> int:
        """Return the bytes of output layer and loss, with chunks where models/loss.py uses them."""
        rows, (vocab, hidden) = self.rows, self.outline.vocabulary
        # The loss in chunks multiplies with the head's plain weight alone.
        added = "lm_head.lora_A", "lm_head.modules_to_save", TRAINED_ROWS
        has_more = any(part in name for name in self.outline.shapes for part in added)
        if self.cfg.kernels.loss is schema.LossKernel.full or has_more or self.outline.sizes.get("logits_change"):
            # Logits in the model's type and in float32, probabilities, and gradients.
            copies = 8 + (self.weight if self.is_half else 0) + (4 if with_gradients else 0)
            return rows.tokens * (vocab * copies + self.weight * hidden)
        most, copies_of_chunk = CHUNK_BYTES, _CHUNK_COPIES if with_gradients else 2.0  # logits and probabilities
        if self.cfg.task.kind is schema.TaskKind.distill:
            most, copies_of_chunk = CHUNK_BYTES // _DISTILLED_PART, _DISTILLED_COPIES
        chunk = int(copies_of_chunk * min(rows.tokens * vocab * 4, most))
        # The hidden states, and their gradient in float32.
        inputs = chunk + (self.weight + (4 if with_gradients else 0)) * hidden * rows.tokens
        if not (with_gradients and self.outline.trains_head):
            return inputs
        # The head's gradient in float32, and logits of the tokens that are multiplied for it at once (`group_size` in
        # models/loss_kernels.py), if they exceed a chunk. In half precision a slice of the product is added at a time.
        gradient, tokens = 4 * vocab * hidden, min(rows.tokens, 2 * hidden // self.weight)
        logits = tokens * vocab * self.weight if tokens * vocab * 4 > CHUNK_BYTES else 0
        return inputs + gradient + logits + (min(gradient, CHUNK_BYTES) if self.is_half else 0)

    def evaluation(self) -> Parts:
        """Return the bytes of an evaluation: a forward pass over rows as in training, without saved activations, or
        generation of answers if that takes more.
        """
        rows, sizes, evaluate, distill = self.rows, self.outline.sizes, self.cfg.evaluate, self.cfg.distill
        # Of a token the states in one layer, or what is sent to experts if that is more.
        layer = self.weight * (4 * sizes["inner"] + 4 * sizes["hidden"])
        single_token = replace(rows, rows=1, length=1, parts=1)
        layer = max(layer, expert_activation_bytes(self.outline, single_token, self.weight)[1])
        parts = {"activations": layer * rows.tokens, "loss": self.loss(with_gradients=False)}
        generations = []  # (answers at once, tokens of each)
        if evaluate.metrics:
            generations.append((evaluate.batch_size, evaluate.max_new_tokens))
        if distill.on_policy > 0 and not distill.rollouts.url:
            generations.append((distill.rollouts.batch_size, distill.rollouts.max_new_tokens))
        for batch, new in generations:
            tokens = batch * (rows.length + rows.prefix + new)
            answers = {
                "activations": layer * batch * rows.length,
                "loss": 4 * batch * self.outline.vocabulary[0],
                "cache": self.weight * sizes.get("cached", 2 * sizes["keys"]) * sizes["layers"] * tokens,
            }
            parts = max(parts, answers, key=lambda part_sizes: sum(part_sizes.values()))
        return parts | self.gathered()

    def host(self) -> Parts:
        """Return the bytes of host memory for offloaded states, by kind."""
        if not (self.offloads or self.offloads_inputs or self.cfg.zero.offload_param.device is not schema.Device.none):
            return {}
        from toolkit.plan.offloaded import offloaded_bytes

        return offloaded_bytes(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageMemory:
    """Bytes of a ZeRO stage at several points of a run, without activations and gathered layers."""

    load: Parts
    """Before the first step, which creates the optimizer's states."""
    at_rest: Parts
    """Between two steps. The next ones are in addition to it."""
    accumulated: Parts = field(default_factory=dict)
    """In a forward pass from the second micro-batch on."""
    first_gradient: Parts = field(default_factory=dict)
    """With the first gradient, before activations are freed."""
    backward: Parts
    """At the end of the backward pass, when gradients are complete and reduced."""
    update: Parts
    """During the optimizer's update."""


def _stage0(rank: RankPlanner) -> _StageMemory:
    """Without ZeRO a rank has all weights, gradients and optimizer states. In half precision the optimizer also holds
    trained weights in float32 (4 bytes each), and during an update gradients twice, one by one and flattened (8 bytes).
    """
    weight, trained = rank.weight, rank.trained
    optimizer = int(((4 if rank.is_half else 0) + rank.states) * trained)
    at_rest = {"weights": rank.weights(), "optimizer": optimizer}
    return _StageMemory(
        load=at_rest | {"optimizer": optimizer - int(rank.states * trained)},  # the first step creates the states
        at_rest=at_rest,
        accumulated={"gradients": weight * trained},
        backward={"gradients": weight * trained, "buckets": weight * min(trained, _ALL_REDUCE)},
        update={"gradients": weight * trained + (8 * trained if rank.is_half else 0)},
    )


def _stage1(rank: RankPlanner) -> _StageMemory:
    """ZeRO-1: a rank has all weights and gradients, but of master weights and optimizer states its part alone. In bf16
    by DeepSpeed's BF16_Optimizer, which sums all gradients in float32 (4 bytes each) between steps, too.
    """
    weight, trained = rank.weight, rank.trained
    own_gradients, bucket = weight * rank.own_trained, weight * rank.bucket
    at_rest = _at_rest_below_3(rank)
    if rank.sums_in_fp32 and not rank.offloads:
        at_rest |= {"gradients": 4 * trained}
        return _StageMemory(
            load=_before_states(rank, at_rest, is_flattened=False),
            at_rest=at_rest,
            accumulated={"gradients": weight * trained},
            backward={"gradients": weight * trained, "buckets": weight * trained},
            update={"gradients": weight * trained},
        )
    return _StageMemory(
        load=_before_states(rank, at_rest),
        at_rest=at_rest,
        accumulated={"gradients": weight * trained, "buckets": bucket},
        # With copies of this rank's reduced gradients, of which the only rank has none.
        backward={"gradients": weight * trained, "buckets": bucket + own_gradients - rank.part(own_gradients)},
        update={} if rank.offloads else rank.update(),
    )


def _stage2(rank: RankPlanner) -> _StageMemory:
    """ZeRO-2: a rank has all weights, but of gradients, master weights and optimizer states its part alone."""
    cfg, weight, part = rank.cfg, rank.weight, rank.own_trained
    is_bf16, bucket = rank.sums_in_fp32, weight * rank.bucket
    gradients = 0 if rank.offloads else rank.grad * part
    flush = weight * min(rank.trained, cfg.zero.reduce_bucket_size) + rank.half_of_largest(weight)
    backward = {"gradients": gradients, "buckets": bucket + flush}
    if is_bf16 and not rank.offloads and rank.trained > cfg.zero.reduce_bucket_size:
        # A bucket is flattened and sent while the next gradient exists, in bf16 and in float32; a gradient larger than
        # a bucket bypasses them. Inputs of recomputed layers are kept to the end of the pass.
        sent = 0 if rank.largest > cfg.zero.reduce_bucket_size else weight * cfg.zero.reduce_bucket_size
        flush = sent + (weight + 4) * rank.largest
        inputs = rank.activations().get("layer inputs", 0)
        backward |= {"buckets": bucket + flush} | ({"layer inputs": inputs} if inputs else {})
    if not rank.offloads and not is_bf16:  # this micro-batch's and the sum so far; bf16 sums in one buffer
        backward["buckets"] = bucket + max(flush, rank.grad * part + weight * rank.largest)
        if mesh.accumulation(cfg, rank.world) == 1:  # there is no sum so far
            backward["gradients"] = 0
    vocab, hidden = rank.outline.vocabulary
    at_rest = _at_rest_below_3(rank)
    update = {"gradients": 4 * part + rank.half_of_largest(4)} if is_bf16 else rank.update()
    return _StageMemory(
        load=_before_states(rank, at_rest),
        at_rest=at_rest,
        accumulated={"gradients": gradients},
        first_gradient={"loss": weight * vocab * hidden if rank.outline.trains_head else 0, "buckets": bucket},
        backward=backward,
        update={} if rank.offloads else update,
    )


def _stage3(rank: RankPlanner) -> _StageMemory:
    """ZeRO-3: a rank has its part alone of weights, gradients, master weights and optimizer states, and all of small
    weights and of the layers that are gathered.
    """
    zero, weight, part = rank.cfg.zero, rank.weight, rank.own_trained
    sizes = map(math.prod, rank.outline.shapes.values())
    persistent = sum(size for size in sizes if size <= zero.stage3_param_persistence_threshold)
    own_numbers = rank.own_all if zero.offload_param.device is schema.Device.none else 0
    states = (
        {} if rank.offloads else {"optimizer": int((rank.master + rank.states) * part), "gradients": rank.grad * part}
    )
    at_rest = {"weights": weight * (own_numbers + persistent), **states, "buckets": weight * rank.bucket}
    if zero.zero_hpz_partition_size > 1:  # the second copy, split over the ranks of one node
        at_rest["second weights"] = weight * -(-rank.all // zero.zero_hpz_partition_size)
    flush = weight * min(rank.trained, zero.reduce_bucket_size) + rank.half_of_largest(weight)
    return _StageMemory(
        load=_before_states(rank, at_rest, is_flattened=False),
        at_rest=at_rest,
        backward={**rank.gathered(ahead=False), "buckets": flush},
        update={} if rank.offloads else {"gradients": rank.master * rank.tile + rank.chunk},  # as wide as masters
    )


_STAGES = (_stage0, _stage1, _stage2, _stage3)


def _at_rest_below_3(rank: RankPlanner) -> Parts:
    """Return the bytes of stages 1 and 2 between two steps."""
    if not rank.offloads:
        return {"weights": rank.weights(), "optimizer": int((rank.master + rank.states) * rank.own_trained)}
    parts = {"weights": rank.weights(), "buckets": rank.half_of_largest(rank.weight + rank.grad)}
    zenflow = rank.cfg.zero.zenflow
    if zenflow.enabled:  # gradients of the chosen columns on every rank, and two states of the weights' type
        parts["zenflow"] = rank.weight * int(rank.trained * zenflow.topk_ratio) * (1 if zenflow.offload else 3)
    return parts


def _before_states(rank: RankPlanner, at_rest: Parts, is_flattened: bool = True) -> Parts:
    """Return the bytes before the optimizer's states exist. Weights that are flattened are copied before master weights
    are made, so that the larger of both counts.
    """
    if rank.offloads:
        return at_rest
    optimizer = at_rest["optimizer"] - int(rank.states * rank.own_trained)
    excess = max(0, rank.weight * rank.trained - optimizer) if is_flattened else 0
    return at_rest | {"optimizer": optimizer, "weights": at_rest["weights"] + excess}


def _add_parts(first: Parts, second: Parts) -> Parts:
    return dict(Counter(first) + Counter(second))


def quantized_sizes(outline: Outline) -> list[int]:
    """Return the number of elements of each matrix that QLoRA quantizes: frozen ones of layers and of experts."""
    return [
        math.prod(shape)
        for name, shape in outline.shapes.items()
        if len(shape) == 2 + is_routed(name) and layer_of(name) >= 0 and name not in outline.trained
    ]


def heap_bytes(memory: RankMemory) -> int:
    """Return the bytes by which the heap of a CPU rank is larger than its tensors."""
    return int(HEAP_SHARE * sum(size for kind, size in memory.device["step"].items() if kind not in _RESIDENT))


def process_bytes(memory: RankMemory) -> int:
    """Return the bytes of a CPU rank: the process, its tensors, and the rest of the heap."""
    return PROCESS_BYTES + memory.peak(memory.worst) + heap_bytes(memory)


def plan_host(outline: Outline, cfg: schema.RunConfig, machine: Machine, memory: RankMemory) -> dict[str, Parts]:
    """Return the bytes of a node's host memory by kind, in the phases load, step and export; without cached pages of
    the tokenized data, which the system frees if needed.
    """
    ranks, width = machine.ranks, WIDTHS[cfg.precision.dtype]
    always: Parts = {"processes": ranks * (PROCESS_BYTES + (0 if machine.on_cpu else CUDA_BYTES))}
    if cfg.data.num_workers:
        always["loaders"] = ranks * cfg.data.num_workers * WORKER_BYTES
    steps = _add_parts(always, {kind: ranks * size for kind, size in memory.host.items()})
    if machine.on_cpu:
        steps |= {"tensors": ranks * memory.peak("step"), "heap": ranks * heap_bytes(memory)}
    if cfg.checkpoint.asynchronous:
        steps["copies"] = ranks * checkpoint_bytes(outline, cfg) // machine.world_size
    weights = _weights_while_loading(outline, cfg, machine)
    if teacher := outline.teacher:  # which is loaded before the student, or after it
        size = _largest_read(teacher, machine.world_size) if cfg.zero.stage == 3 else teacher.num_parameters
        weights = max(weights, width * size)
    loading = always | {"weights": ranks * weights}
    if machine.on_cpu:
        loading["read"] = ranks * memory.device["load"].get("read", 0)
    exporting = dict(steps)
    if cfg.checkpoint.export:
        exporting["exported"] = export_bytes(outline, cfg)  # on the first rank
        if cfg.checkpoint.verify_export:  # an adapter, or a layer of a model at a time
            exporting["read again"] = min(width * outline.largest_layer(), exporting["exported"])
    return {"load": loading, "step": steps, "export": exporting}


def _weights_while_loading(outline: Outline, cfg: schema.RunConfig, machine: Machine) -> int:
    """Return the bytes of a rank's weights in host memory before they are on its device: as they are created in float32
    or read, of experts its own alone; under ZeRO-3 what is read of them at a time.
    """
    width, model_of_rank = WIDTHS[cfg.precision.dtype], outline
    if cfg.parallel.expert > 1:
        from toolkit.plan.division import expert_part

        model_of_rank = expert_part(outline, cfg.parallel.expert)
    if cfg.model.init is schema.Init.random:
        return 4 * model_of_rank.num_parameters
    if cfg.zero.stage == 3:
        return width * _largest_read(outline, machine.world_size)
    if cfg.tuning.method is not schema.TuningMethod.qlora:
        return width * model_of_rank.num_parameters
    in_4_bits = quantized_sizes(model_of_rank)  # moved one after another; on CPUs they stay, half a byte each
    read = width * (model_of_rank.num_parameters - sum(in_4_bits) + max(in_4_bits))
    return read + (sum(in_4_bits) // 2 if machine.on_cpu else 0)


def _largest_read(outline: Outline, world_size: int) -> int:
    """Return the elements of a model that a rank has at once as ZeRO-3 loads it: its part, or the vocabulary."""
    rows, columns = outline.vocabulary
    return max(rows * columns, outline.num_parameters // world_size)


def checkpoint_bytes(outline: Outline, cfg: schema.RunConfig) -> int:
    """Return the bytes of one checkpoint, of all ranks: master weights of what is trained, and their states."""
    return int(sum(rule_tables.state_bytes(cfg)) * outline.num_trained)


def export_bytes(outline: Outline, cfg: schema.RunConfig) -> int:
    """Return the bytes of the export: the model, or its adapter."""
    is_whole = cfg.tuning.method.value in ("full", "freeze")
    return WIDTHS[cfg.precision.dtype] * (outline.num_parameters if is_whole else outline.num_trained)
