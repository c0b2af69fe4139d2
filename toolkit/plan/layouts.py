"""All layouts of a run on some machines: which fit, which is the fastest; as text and as JSON. No torch."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from toolkit.config import mesh, rule_tables
from toolkit.config.schema import Device, Fp8, Init, RunConfig, get_value
from toolkit.messages import joined, listed, read_table, tr, translated
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.memory import Parts, RankMemory, checkpoint_bytes, export_bytes, longest_rows, plan_host, plan_rank
from toolkit.plan.outline import MIXTURES, Outline, active_line, busiest
from toolkit.plan.speed import Rates, StepTime, step_time
from toolkit.terminal import text_table

LAYOUTS = (
    *((stage, Device.none, Device.none) for stage in (0, 1, 2, 3)),
    *((stage, Device.cpu, Device.none) for stage in (1, 2, 3)),
    (3, Device.cpu, Device.cpu),
)
"""ZeRO stage, where the optimizer's states are, where the parameters are. Never NVMe: it needs a directory."""
MOST_MICRO = 64
_BEYOND = (
    "zero.zero_hpz_partition_size",
    "zero.zero_quantized_weights",
    "zero.zero_quantized_gradients",
    "zero.offload_optimizer.super_offload",
    "zero.zenflow.enabled",
)
"""What goes beyond ZeRO's stages: switched off where it does not go with a choice."""
_CHOSEN = (
    "parallel.expert",
    "zero.stage",
    "zero.offload_optimizer.device",
    "zero.offload_param.device",
    *_BEYOND,
    "zero.overlap_comm",
    "optim.torch",
    "train.activation_checkpointing.enabled",
    "batch.micro_per_gpu",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of a run, and what it needs."""

    cfg: RunConfig
    memory: RankMemory
    host: dict[str, Parts]
    """Bytes of one node by phase and kind."""
    host_peak: int
    time: StepTime
    usable_bytes: int
    fits: bool

    @property
    def peak(self) -> int:
        """Bytes of a rank in the phase that takes most."""
        return self.memory.peak(self.memory.worst)

    @property
    def is_tight(self) -> bool:
        """Whether less than 5 % of the memory stays free, which the plan may be off by."""
        return self.peak > 0.95 * self.usable_bytes

    @property
    def name(self) -> str:
        """The layout in a few letters."""
        zero = self.cfg.zero
        words = [f"ZeRO {zero.stage}"]
        if zero.offload_optimizer.device is not Device.none:
            words.append(tr("optimizer states on {device}", device=zero.offload_optimizer.device.value))
        if zero.offload_param.device is not Device.none:
            words.append(tr("weights on {device}", device=zero.offload_param.device.value))
        if (size := self.cfg.parallel.expert) > 1:
            words.append(tr("experts over {size} ranks", size=size))
        if self.cfg.train.activation_checkpointing.enabled:
            words.append(tr("activation checkpointing"))
        return listed(*words)


def evaluate_layout(outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates) -> Layout:
    """Return the plan of one config. Raises ConfigError where its batch cannot be divided."""
    memory = plan_rank(outline, cfg, machine.world_size, machine.on_cpu)
    host = plan_host(outline, cfg, machine, memory)
    host_peak = max(sum(parts.values()) for parts in host.values())
    fits = memory.peak(memory.worst) <= machine.usable_bytes and host_peak <= (machine.host_bytes or host_peak)
    return Layout(cfg, memory, host, host_peak, step_time(outline, cfg, machine, rates), machine.usable_bytes, fits)


def layouts(
    outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates, experts: Sequence[int] = ()
) -> Iterator[Layout]:
    """Yield all layouts that keep the global batch: stages, offloading, activation checkpointing, micro-batches, and
    over how many ranks experts are divided, of `experts` or of all that is possible.
    """
    sizes = [size for size in mesh.micro_sizes(cfg, machine.world_size) if size <= MOST_MICRO]
    experts = experts or expert_sizes(outline, machine.world_size)
    for expert, (stage, optimizer, parameters), recomputes, micro in product(experts, LAYOUTS, (False, True), sizes):
        other = with_layout(cfg, stage, optimizer, parameters, recomputes, micro)
        other.parallel.expert = expert
        if other.zero.zero_hpz_partition_size > machine.ranks:  # a copy over several nodes would save no traffic
            other.zero.zero_hpz_partition_size = mesh.largest_divisor(machine.world_size, machine.ranks)
        if not _is_contradictory(other):
            yield evaluate_layout(outline, other, machine, rates)


def expert_sizes(outline: Outline, world_size: int) -> list[int]:
    """Return over how many of some ranks the experts of a model can be divided; [1] if its FLOPs are not known."""
    count = outline.sizes["experts"] if "chosen" in outline.sizes else 1
    return [size for size in range(1, math.gcd(count, world_size) + 1) if math.gcd(count, world_size) % size == 0]


def _is_contradictory(cfg: RunConfig, keys: Collection[str] = ()) -> bool:
    """Whether config/rule_tables.py rejects a config; with `keys` whether it rejects these or they are not read."""
    broken = {rule.key for rule in (*rule_tables.INCOMPATIBLE, *rule_tables.INCOMPATIBLE_OF_MODELS) if rule.broken(cfg)}
    broken |= {
        row.key for row in rule_tables.REQUIRES if row.is_on(cfg) and not all(met(cfg) for met in row.needs.values())
    }
    if not keys:
        return bool(broken)
    unread = {key for row in rule_tables.READ_WHEN if not row.is_read(cfg) for key in rule_tables.expand(row.keys)}
    return not (broken | unread).isdisjoint(keys)


def fastest(found: Sequence[Layout]) -> Layout | None:
    """Return the fastest that fits; of equally fast ones (2 %) the simplest that leaves 5 % of the memory free, or
    where none does the simplest.
    """
    fitting = [layout for layout in found if layout.fits]
    if not fitting:
        return None
    best = min(layout.time.seconds for layout in fitting)
    fast = [layout for layout in fitting if layout.time.seconds <= 1.02 * best]
    return next((layout for layout in fast if not layout.is_tight), fast[0])


def with_layout(
    cfg: RunConfig, stage: int, optimizer: Device, parameters: Device, recomputes: bool, micro: int
) -> RunConfig:
    """Return a copy with other choices."""
    other = deepcopy(cfg)
    other.zero.stage = stage
    other.zero.offload_optimizer.device, other.zero.offload_param.device = optimizer, parameters
    if optimizer is not Device.none and rule_tables.OPTIMIZERS[cfg.optim.name].is_adam and cfg.optim.torch is True:
        other.optim.torch = False
    if stage == 0:
        other.zero.overlap_comm = False
    other.train.activation_checkpointing.enabled = recomputes
    other.batch.micro_per_gpu = micro
    for key in _BEYOND:
        if get_value(other, key) and _is_contradictory(other, [key]):
            section, _, name = key.rpartition(".")
            setattr(get_value(other, section), name, get_value(RunConfig(), key))
    return other


def overrides(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the arguments that change one layout of a config to another."""
    words = []
    for key in _CHOSEN:
        old, new = get_value(before, key), get_value(after, key)
        if old != new:
            words.append(f"{key}={new.value if isinstance(new, Device) else str(new).lower()}")
    return words


_kinds = cache(partial(read_table, "plan/kinds.yaml"))


def _table_words() -> dict[str, str]:
    """Return what phases and kinds of memory are called in the user's language."""
    return {kind: translated(text) for kind, text in _kinds().items()}


def gib(size: float) -> str:
    """Return bytes as GiB with as many digits as matter."""
    value = size / GIB
    if 0 < value < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def plan_lines(outline: Outline, machine: Machine, rates: Rates, mine: Layout, found: Sequence[Layout]) -> list[str]:
    """Return a plan as text: the recipe's layout, all layouts, the fastest, the leanest, and what is not known."""
    cfg, best = mine.cfg, fastest(found)
    if best is None:
        advice = tr(
            "None fits. Shorter rows (data.max_length), tuning=lora, zero=stage3_nvme, or more GPUs: plan again with "
            "another gpus= or nodes=."
        )
    elif changes := overrides(cfg, best.cfg):
        advice = tr("The fastest that fits: {words}", words=" ".join(changes))
    else:
        advice = tr("The fastest that fits is the recipe as it is.")
    divides = any(one.cfg.parallel.expert > 1 for one in (mine, *found))
    return [
        _head(outline, mine, machine, cfg.model.name or cfg.model.path),
        *active_line(outline),
        "",
        tr(
            "The recipe as it is: {layout}, micro-batch {micro}. {fits}",
            layout=mine.name,
            micro=cfg.batch.micro_per_gpu,
            fits=tr("It fits.") if mine.fits else tr("It does NOT fit."),
        ),
        *memory_table(mine),
        "",
        *_bytes_table(tr("GiB per node"), mine.host),
        tr(
            "Disk: {checkpoint} GiB per checkpoint, of which {count} are there at once; {export} GiB for export/.",
            checkpoint=gib(checkpoint_bytes(outline, cfg)),
            count=cfg.checkpoint.keep + 1 if cfg.checkpoint.keep else tr("all"),
            export=gib(export_bytes(outline, cfg)),
        ),
        *([_stored_line(cfg)] if cfg.distill.top_k else []),
        _time_line(mine, rates),
        "",
        tr(
            "All layouts with the same global batch of {size} sequences, the fastest first:",
            size=cfg.batch.global_size,
        ),
        *_layout_table(found),
        "",
        advice,
        *([*_kept_line(cfg, best, found), *_tight_line(cfg, best, found), _leanest_line(found)] if best else []),
        *(f"  {note}" for note in _unknown(mine, machine, rates, divides)),
    ]


def _tight_line(cfg: RunConfig, best: Layout, found: Sequence[Layout]) -> list[str]:
    """Return that the fastest layout leaves hardly any memory, if so, and the fastest that leaves some."""
    if not best.is_tight:
        return []
    share = f"{100 * best.peak / best.usable_bytes:.0f}"
    text = tr("It takes {share} % of the memory: a little more than planned, and it runs out.", share=share)
    roomier = fastest([one for one in found if not one.is_tight])
    if roomier is None:
        return [text]
    words = " ".join(overrides(cfg, roomier.cfg)) or tr("the recipe as it is")
    return [joined(text, tr("The fastest that leaves 5 % free: {words}", words=words))]


def _stored_line(cfg: RunConfig) -> str:
    """Return what is stored of a teacher."""
    each = 8 * cfg.distill.top_k + 4
    return tr(
        "Disk: {bytes} bytes for each trained token that has a teacher (distill.top_k), {gib} GiB per million.",
        bytes=each,
        gib=gib(each * 1e6),
    )


def _beyond(cfg: RunConfig) -> set[str]:
    """Return what a config switches on beyond ZeRO's stages."""
    return {key for key in _BEYOND if get_value(cfg, key) != get_value(RunConfig(), key)}


def _kept_line(cfg: RunConfig, best: Layout, found: Sequence[Layout]) -> list[str]:
    """Return the fastest layout with all that was asked beyond ZeRO's stages, where `best` is without some of it."""
    lost = _beyond(cfg) - _beyond(best.cfg)
    if not lost:
        return []
    keys, kept = listed(*sorted(lost)), fastest([one for one in found if _beyond(cfg) <= _beyond(one.cfg)])
    if kept is None:
        return [tr("It switches off {keys}: no layout with it fits.", keys=keys)]
    text = tr(
        "It switches off {keys}, which costs time here. The fastest with it, {seconds} s per step: {words}",
        keys=keys,
        seconds=f"{kept.time.seconds:.3g}",
        words=" ".join(overrides(cfg, kept.cfg)) or tr("the recipe as it is"),
    )
    return [text]


def _leanest_line(found: Sequence[Layout]) -> str:
    fitting = [layout for layout in found if layout.fits]
    leanest = min(fitting, key=lambda layout: (layout.peak, layout.time.seconds))
    return tr(
        "The leanest: {layout}, micro-batch {micro}, {gib} GiB per rank.",
        layout=leanest.name,
        micro=leanest.cfg.batch.micro_per_gpu,
        gib=gib(leanest.peak),
    )


def _unknown(mine: Layout, machine: Machine, rates: Rates, divides: bool) -> list[str]:
    zero, card, dtype = mine.cfg.zero, machine.card, mine.cfg.precision.dtype.value
    is_npu = card is not None and not card.capability
    notes = (
        (is_npu, tr("Training on NPUs is not supported, and what their software takes is not known.")),
        (
            card is not None and not (rates.is_measured or card.flops(dtype)),
            tr("How fast these GPUs compute in {dtype} is not known here, but assumed.", dtype=dtype),
        ),
        (not machine.host_bytes, tr("host_memory= is not given: whether the host's memory is enough is not judged.")),
        (
            mine.cfg.model.init is Init.random,
            tr("The vocabulary of a random model is that of its tokenizer, at most model.shape.vocab_size."),
        ),
        (
            Device.nvme in (zero.offload_optimizer.device, zero.offload_param.device),
            tr("NVMe: the disk's speed is not known, so neither is the time of an update."),
        ),
        (
            divides,
            tr(
                "Divided experts: the memory of a rank that gets {times} times its share of tokens.",
                times=busiest(mine.cfg.model.expert_capacity),
            ),
        ),
        (
            mine.cfg.precision.fp8 is not Fp8.none,
            tr("FP8: times are those of bf16. What it saves is not known without a measurement."),
        ),
        (not rates.is_measured, tr("Times rest on datasheets and assumptions: trust their order, not their digits.")),
        (True, tr("Not counted: pages of the tokenized data (they give way), and other programs.")),
    )
    return [note for is_due, note in notes if is_due]


def plan_json(outline: Outline, machine: Machine, mine: Layout, found: Sequence[Layout]) -> dict[str, Any]:
    """Return a plan's numbers, bytes and seconds."""
    best = fastest(found)
    return {
        "parameters": outline.num_parameters,
        "active_parameters": outline.num_active,
        "trained_parameters": outline.num_trained,
        "machine": {**asdict(machine), "card": machine.card.name if machine.card else None},
        "checkpoint_bytes": checkpoint_bytes(outline, mine.cfg),
        "export_bytes": export_bytes(outline, mine.cfg),
        "recipe": layout_numbers(mine),
        "layouts": [layout_numbers(layout) for layout in found],
        "fastest": overrides(mine.cfg, best.cfg) if best else None,
    }


def _head(outline: Outline, layout: Layout, machine: Machine, name: str) -> str:
    cfg, rows = layout.cfg, longest_rows(outline, layout.cfg)
    return tr(
        "{name}: {trained} of {total} parameters are trained ({method}, {dtype}). Longest micro-batch: {rows} x "
        "{length} tokens, {times} of them per step and rank. Machines: {machine}, {usable} GiB of each for tensors.",
        name=name,
        trained=f"{outline.num_trained:,}",
        total=f"{outline.num_parameters:,}",
        method=cfg.tuning.method.value,
        dtype=cfg.precision.dtype.value,
        rows=rows.rows,
        length=f"{rows.length:,}",
        times=mesh.accumulation(cfg, machine.world_size),
        machine=machine.name,
        usable=gib(machine.usable_bytes),
    )


def memory_table(layout: Layout) -> list[str]:
    """Return the bytes of one rank by kind and phase, in GiB."""
    lines = _bytes_table(tr("GiB per rank"), layout.memory.device)
    if peaks := layout.memory.stages:
        known = ", ".join(gib(peak) for peak in peaks)
        lines.append(tr("The largest stage of the pipeline; all of them: {peaks} GiB.", peaks=known))
    return lines


def _bytes_table(title: str, phases: Mapping[str, Parts]) -> list[str]:
    words = _table_words()
    kinds = [kind for kind in words if any(parts.get(kind) for parts in phases.values())]
    rows = [[words[kind], *(gib(parts.get(kind, 0)) for parts in phases.values())] for kind in kinds]
    rows.append([tr("together"), *(gib(sum(parts.values())) for parts in phases.values())])
    return text_table([title, *(words[phase] for phase in phases)], rows, indent="")


def _time_line(layout: Layout, rates: Rates) -> str:
    time = layout.time
    if not time.is_known:
        return tr(
            "Step: no estimate, as the FLOPs of this mixture of experts are not known here. Known are {kinds}.",
            kinds=", ".join(MIXTURES),
        )
    return tr(
        "Step, estimated: {seconds} s ({compute} s computing, {communication} s communicating{overlapped}, {update} s "
        "updating), {tokens} tokens/s in all on full rows. {how}: {flops} TFLOP/s per rank, {link} GB/s between ranks, "
        "{memory} GB/s of memory.",
        seconds=f"{time.seconds:.3g}",
        compute=f"{time.compute:.3g}",
        communication=f"{time.communication:.3g}",
        overlapped=tr(" behind it") if time.overlapped else "",
        update=f"{time.update:.3g}",
        tokens=f"{time.tokens_per_s:,.0f}",
        how=tr("Measured") if rates.is_measured else tr("Assumed, not measured"),
        flops=f"{rates.flops / 1e12:.3g}",
        link=f"{rates.link / 1e9:.3g}",
        memory=f"{rates.memory / 1e9:.3g}",
    )


def layout_numbers(layout: Layout) -> dict[str, Any]:
    """Return what a layout is and takes, bytes and seconds, for JSON."""
    cfg, time = layout.cfg, layout.time
    return {
        "expert": cfg.parallel.expert,
        "zero_stage": cfg.zero.stage,
        "zero_hpz_partition_size": cfg.zero.zero_hpz_partition_size,
        "offload_optimizer": cfg.zero.offload_optimizer.device.value,
        "offload_param": cfg.zero.offload_param.device.value,
        "activation_checkpointing": cfg.train.activation_checkpointing.enabled,
        "micro_per_gpu": cfg.batch.micro_per_gpu,
        "device_bytes": layout.memory.device,
        "host_bytes": layout.host,
        "usable_bytes": layout.usable_bytes,
        "step_s": time.seconds if time.is_known else None,
        "tokens_per_s": time.tokens_per_s if time.is_known else None,
        "fits": layout.fits,
    }


def _layout_table(found: Sequence[Layout]) -> list[str]:
    """Return of each layout the micro-batch, and division of experts, that is the fastest to fit, or the leanest where
    none fits; the fastest first.
    """
    groups: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in found:
        cfg = layout.cfg
        places = cfg.zero.stage, cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device
        recomputes, divides = cfg.train.activation_checkpointing.enabled, cfg.parallel.expert > 1
        groups.setdefault((*places, recomputes, divides), []).append(layout)
    rows = []
    for layouts in groups.values():
        fitting = [layout for layout in layouts if layout.fits]
        fast = min(fitting, key=lambda one: one.time.seconds, default=None)
        best = fast or min(layouts, key=lambda one: one.peak)
        rows.append((best.name, best))
    rows.sort(key=lambda row: (not row[1].fits, row[1].time.seconds if row[1].fits else row[1].peak))
    return layout_table(tr("layout"), rows)


def layout_table(title: str, layouts: Iterable[tuple[str, Layout]]) -> list[str]:
    """Return layouts, each with a name, as a table."""
    rows = [
        [
            name,
            str(one.cfg.batch.micro_per_gpu),
            gib(one.peak),
            _table_words()[one.memory.worst],
            gib(one.host_peak),
            f"{one.time.seconds:.3g}" if one.time.is_known else "?",
            f"{one.time.tokens_per_s:,.0f}" if one.time.is_known else "?",
            tr("yes") if one.fits else tr("no"),
        ]
        for name, one in layouts
    ]
    heads = [title, tr("micro-batch"), tr("GiB per rank"), tr("when"), tr("GiB per node")]
    return text_table([*heads, tr("s per step"), "tokens/s", tr("fits")], rows, indent="")
