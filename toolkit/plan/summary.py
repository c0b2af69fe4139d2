"""A plan as text and as JSON: the recipe's layout, all others, the fastest, and notes on uncertainty. No torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from toolkit.config import mesh
from toolkit.config.dotted_keys import get_value
from toolkit.config.rule_tables import has_bf16_states
from toolkit.config.schema import Device, Fp8, Init, RunConfig, StateDtype
from toolkit.messages import joined, listed, read_table, tr, translated
from toolkit.plan.division import load_of_busiest_rank
from toolkit.plan.kernels import describe_assumed
from toolkit.plan.layouts import Layout, layout_numbers
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.memory import Parts, checkpoint_bytes, export_bytes, longest_rows
from toolkit.plan.model_config import config_of
from toolkit.plan.outline import MIXTURES, Outline, elements_used_by_token, layer_of
from toolkit.plan.search import BEYOND, fastest, layouts as layouts_of, overrides, recommended
from toolkit.plan.speed import Rates
from toolkit.tables import text_table

_SHOWN_IF_NONE_FITS = 3


def plan_lines(
    outline: Outline, machine: Machine, rates: Rates, recipe_layout: Layout, layouts: Sequence[Layout]
) -> list[str]:
    """Return the lines of a plan: the recipe's layout, all layouts, the fastest, the leanest, notes on uncertainty."""
    cfg, best = recipe_layout.cfg, recommended(recipe_layout, layouts)
    if best is None:
        leaner = {"full": ["tuning=lora"], "freeze": ["tuning=lora"], "lora": ["tuning=qlora"]}
        ways = [tr("shorter rows (data.max_length)"), *leaner.get(cfg.tuning.method, []), "zero=stage3_nvme"]
        advice = tr(
            "None fits. What helps: {ways}, or more GPUs (plan again with gpus= or nodes=).", ways=", ".join(ways)
        )
    elif changes := overrides(cfg, best.cfg):
        advice = tr("Recommended: {words}", words=" ".join(changes))
    else:
        advice = tr("Recommended: the recipe as it is.")
    rivals = [layout for layout in layouts if layout.fits and layout.is_offloaded]
    if best and not best.is_offloaded and any(rival.time.seconds < best.time.seconds for rival in rivals):
        advice = joined(advice, tr("(Offloading seems faster by less than these estimates may be wrong.)"))
    divides = any(layout.cfg.parallel.expert > 1 for layout in (recipe_layout, *layouts))
    return [
        _model_line(outline, recipe_layout, machine, cfg.model.name or cfg.model.path),
        *active_parameters_line(outline),
        "",
        tr(
            "The recipe as it is: {layout}, micro-batch {micro}. {fits}",
            layout=recipe_layout.name,
            micro=cfg.batch.micro_per_gpu,
            fits=tr("It fits.") if recipe_layout.fits else tr("It does NOT fit."),
        ),
        *memory_table(recipe_layout),
        "",
        *bytes_table(tr("GiB per node"), recipe_layout.host),
        tr(
            "Disk: {checkpoint} GiB per checkpoint, of which {count} are there at once; {export} GiB for export/.",
            checkpoint=gib(checkpoint_bytes(outline, cfg)),
            count=cfg.checkpoint.keep + 1 if cfg.checkpoint.keep else tr("all"),
            export=gib(export_bytes(outline, cfg)),
        ),
        *([_teacher_scores_line(cfg)] if cfg.distill.top_k else []),
        _time_line(recipe_layout, rates),
        "",
        tr("Layouts with the same global batch of {size} sequences, the fastest first:", size=cfg.batch.global_size),
        *_layout_table(layouts, best),
        "",
        advice,
        *_bf16_states_line(outline, machine, rates, cfg, best),
        *([] if best else _offloaded_inputs_line(outline, machine, rates, cfg)),
        *(
            [*_switched_off_line(cfg, best, layouts), *_tight_memory_line(cfg, best, layouts), _leanest_line(layouts)]
            if best
            else []
        ),
        *(f"  {note}" for note in _notes_on_uncertainty(recipe_layout, machine, rates, divides)),
    ]


def _tight_memory_line(cfg: RunConfig, best: Layout, layouts: Sequence[Layout]) -> list[str]:
    """Return a line, in a list, if `best` leaves less than 5 % of the memory, or a faster layout does."""
    tightest = best if best.is_tight else fastest(layouts, tight=True)
    if tightest is None or not tightest.is_tight:
        return []
    share = f"{100 * tightest.peak / tightest.usable_bytes:.0f}"
    if tightest is best:
        return [tr("It takes {share} % of the memory: a little more than planned, and it runs out.", share=share)]
    return [
        tr(
            "Faster, {seconds} s per step, but with {share} % of the memory a little more than planned runs out: "
            "{words}",
            seconds=f"{tightest.time.seconds:.3g}",
            share=share,
            words=" ".join(overrides(cfg, tightest.cfg)) or tr("the recipe as it is"),
        )
    ]


def _bf16_states_line(
    outline: Outline, machine: Machine, rates: Rates, cfg: RunConfig, best: Layout | None
) -> list[str]:
    """Return a line, in a list, about the fastest layout with states in bf16, if there is one and it is faster; [] if
    one with states in float32 fits without offloading them.
    """
    fits_without = best is not None and best.cfg.zero.offload_optimizer.device is Device.none
    if has_bf16_states(cfg) or fits_without:
        return []
    leaner = deepcopy(cfg)
    leaner.precision.optimizer_states = StateDtype.bf16
    fast = fastest(list(layouts_of(outline, leaner, machine, rates)))
    if fast is None or not has_bf16_states(fast.cfg) or (best and fast.time.seconds >= best.time.seconds):
        return []
    return [
        tr(
            "With optimizer states in bf16, rounded at each step (docs/optimizers.md), {seconds} s per step: {words}",
            seconds=f"{fast.time.seconds:.3g}",
            words=" ".join(overrides(cfg, fast.cfg)),
        )
    ]


def _offloaded_inputs_line(outline: Outline, machine: Machine, rates: Rates, cfg: RunConfig) -> list[str]:
    """Return a line, in a list, about the fastest layout that keeps the inputs of recomputed layers in host memory, for
    a config of which no layout fits; [] if it does that already, or it does not help.
    """
    if cfg.train.activation_checkpointing.cpu_checkpointing or machine.on_cpu:
        return []
    leaner = deepcopy(cfg)
    leaner.train.activation_checkpointing.cpu_checkpointing = True
    fast = fastest(list(layouts_of(outline, leaner, machine, rates)))
    if fast is None:
        return []
    return [
        tr(
            "With the inputs of recomputed layers in host memory, {seconds} s per step: {words}",
            seconds=f"{fast.time.seconds:.3g}",
            words=" ".join(overrides(cfg, fast.cfg)),
        )
    ]


def _teacher_scores_line(cfg: RunConfig) -> str:
    """Return a line about the disk space of the teacher's stored scores."""
    each = 8 * cfg.distill.top_k + 4  # K ids and K + 1 log-probabilities of four bytes
    return tr(
        "Disk: {bytes} bytes for each trained token that has a teacher (distill.top_k), {gib} GiB per million.",
        bytes=each,
        gib=gib(each * 1e6),
    )


def _features_beyond_zero(cfg: RunConfig) -> set[str]:
    """Return the keys in BEYOND that a config switches on."""
    return {key for key in BEYOND if get_value(cfg, key) != get_value(RunConfig(), key)}


def _switched_off_line(cfg: RunConfig, best: Layout, layouts: Sequence[Layout]) -> list[str]:
    """Return a line, in a list, if `best` switches off features in BEYOND, with the fastest layout that has all."""
    lost = _features_beyond_zero(cfg) - _features_beyond_zero(best.cfg)
    if not lost:
        return []
    keys = listed(*sorted(lost))
    having_all = [layout for layout in layouts if _features_beyond_zero(cfg) <= _features_beyond_zero(layout.cfg)]
    with_all = fastest(having_all)
    if with_all is None:
        return [tr("It switches off {keys}: no layout with it fits.", keys=keys)]
    text = tr(
        "It switches off {keys}, which costs time here. The fastest with it, {seconds} s per step: {words}",
        keys=keys,
        seconds=f"{with_all.time.seconds:.3g}",
        words=" ".join(overrides(cfg, with_all.cfg)) or tr("the recipe as it is"),
    )
    return [text]


def _leanest_line(layouts: Sequence[Layout]) -> str:
    """Return a line about the layout that takes the least memory."""
    fitting = [layout for layout in layouts if layout.fits]
    leanest = min(fitting, key=lambda layout: (layout.peak, layout.time.seconds))
    return tr(
        "The leanest: {layout}, micro-batch {micro}, {gib} GiB per rank.",
        layout=leanest.name,
        micro=leanest.cfg.batch.micro_per_gpu,
        gib=gib(leanest.peak),
    )


def _notes_on_uncertainty(recipe_layout: Layout, machine: Machine, rates: Rates, divides: bool) -> list[str]:
    """Return notes on what the plan assumes or does not know; `divides`: whether a layout divides experts."""
    zero, card, dtype = recipe_layout.cfg.zero, machine.card, recipe_layout.cfg.precision.dtype.value
    is_npu = card is not None and not card.capability
    assumed = "" if recipe_layout.cfg.model.init is Init.random else describe_assumed(config_of(recipe_layout.cfg))
    notes = (
        (is_npu, tr("Training on NPUs is not supported, and what their software takes is not known.")),
        (
            card is not None and not (rates.is_measured or card.flops(dtype)),
            tr("How fast these GPUs compute in {dtype} is not known here, but assumed.", dtype=dtype),
        ),
        (not machine.host_bytes, tr("host_memory= is not given: whether the host's memory is enough is not judged.")),
        (
            recipe_layout.cfg.model.init is Init.random,
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
                times=load_of_busiest_rank(recipe_layout.cfg.model.expert_capacity),
            ),
        ),
        (
            recipe_layout.cfg.precision.fp8 is not Fp8.none,
            tr("FP8: times are those of bf16. What it saves is not known without a measurement."),
        ),
        (assumed != "", assumed),
        (not rates.is_measured, tr("Times rest on datasheets and assumptions: trust their order, not their digits.")),
        (True, tr("Not counted: pages of the tokenized data (they give way), and other programs.")),
    )
    return [note for is_due, note in notes if is_due]


def plan_json(outline: Outline, machine: Machine, recipe_layout: Layout, layouts: Sequence[Layout]) -> dict[str, Any]:
    """Return the numbers of a plan, in bytes and seconds."""
    best = fastest(layouts)
    return {
        "parameters": outline.num_parameters,
        "active_parameters": outline.num_active,
        "trained_parameters": outline.num_trained,
        "machine": {**asdict(machine), "card": machine.card.name if machine.card else None},
        "checkpoint_bytes": checkpoint_bytes(outline, recipe_layout.cfg),
        "export_bytes": export_bytes(outline, recipe_layout.cfg),
        "recipe": layout_numbers(recipe_layout),
        "layouts": [layout_numbers(layout) for layout in layouts],
        "fastest": overrides(recipe_layout.cfg, best.cfg) if best else None,
    }


def _model_line(outline: Outline, layout: Layout, machine: Machine, name: str) -> str:
    """Return the line on the model `name`: what is trained, the longest micro-batch, the machines."""
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


def _time_line(layout: Layout, rates: Rates) -> str:
    """Return the line on the seconds of a step, and by which rates they are estimated."""
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


def _layout_table(all_layouts: Sequence[Layout], best: Layout | None) -> list[str]:
    """Return a table with a line for each combination of stage, offloading, recomputation and whether experts are
    divided: `best`, or its fastest layout that fits. The fastest comes first. Without `best` those that come nearest to
    fitting; the number of the others follows.
    """
    groups: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in all_layouts:
        cfg = layout.cfg
        zero = cfg.zero.stage, cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device
        recomputes, divides = cfg.train.activation_checkpointing.enabled, cfg.parallel.expert > 1
        groups.setdefault((*zero, recomputes, divides), []).append(layout)
    of_groups = []  # the one that may be shown of each group
    for layouts in groups.values():
        fitting = [layout for layout in layouts if layout.fits]
        fast = min(fitting, key=lambda candidate: candidate.time.seconds, default=None)
        is_best = best is not None and best.cfg in [layout.cfg for layout in layouts]
        of_groups.append((best if is_best else fast) or min(layouts, key=lambda candidate: candidate.peak))
    shown = sorted((layout for layout in of_groups if layout.fits), key=lambda layout: layout.time.seconds)
    shown = shown or sorted(of_groups, key=lambda layout: layout.peak)[:_SHOWN_IF_NONE_FITS]
    table = layout_table(tr("layout"), [(layout.name, layout) for layout in shown], best)
    if num_left_out := len(of_groups) - len(shown):
        table.append(tr("{count} more do not fit.", count=num_left_out))
    return table


def layout_table(title: str, layouts: Iterable[tuple[str, Layout]], best: Layout | None = None) -> list[str]:
    """Return layouts, each with a name, as a table; `best`: the one that is recommended."""
    rows = [
        [
            name,
            str(layout.cfg.batch.micro_per_gpu),
            gib(layout.peak),
            kind_names()[layout.memory.worst],
            gib(layout.host_peak),
            f"{layout.time.seconds:.3g}" if layout.time.is_known else "?",
            f"{layout.time.tokens_per_s:,.0f}" if layout.time.is_known else "?",
            tr("recommended") if layout is best else tr("yes") if layout.fits else tr("no"),
        ]
        for name, layout in layouts
    ]
    heads = [title, tr("micro-batch"), tr("GiB per rank"), tr("when"), tr("GiB per node")]
    return text_table([*heads, tr("s per step"), "tokens/s", tr("fits")], rows, indent="")


def active_parameters_line(outline: Outline) -> list[str]:
    """Return a line about active parameters in a list, [] if the model has no experts, or they are not known."""
    sizes, shapes = outline.sizes, outline.shapes
    if "chosen" not in sizes:
        return []
    inner = sum(
        elements_used_by_token(name, math.prod(shape), sizes) for name, shape in shapes.items() if layer_of(name) >= 0
    )
    text = tr(
        "Mixture of experts: {active} of {total} parameters are active per token, {inner} of those in layers ({chosen} "
        "of {count} routed experts in each).",
        active=f"{outline.num_active:,}",
        total=f"{outline.num_parameters:,}",
        inner=f"{inner:,}",
        chosen=sizes["chosen"],
        count=sizes["experts"],
    )
    return [text]


def memory_table(layout: Layout) -> list[str]:
    """Return the bytes of one rank by kind and phase, in GiB."""
    lines = bytes_table(tr("GiB per rank"), layout.memory.device)
    if peaks := layout.memory.stages:
        shown = ", ".join(gib(peak) for peak in peaks)
        lines.append(tr("The largest stage of the pipeline; all of them: {peaks} GiB.", peaks=shown))
    return lines


def bytes_table(title: str, phases: Mapping[str, Parts]) -> list[str]:
    """Return bytes by kind and phase as a table, in GiB."""
    words = kind_names()
    kinds = [kind for kind in words if any(parts.get(kind) for parts in phases.values())]
    rows = [[words[kind], *(gib(parts.get(kind, 0)) for parts in phases.values())] for kind in kinds]
    rows.append([tr("together"), *(gib(sum(parts.values())) for parts in phases.values())])
    return text_table([title, *(words[phase] for phase in phases)], rows, indent="")


_kinds = cache(partial(read_table, "plan/kinds.yaml"))


def kind_names() -> dict[str, str]:
    """Return phase or kind of memory -> its name in the user's language."""
    return {kind: translated(text) for kind, text in _kinds().items()}


def gib(size: float) -> str:
    """Return bytes in GiB with three significant digits, or four decimals below 0.1."""
    value = size / GIB
    if 0 < value < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
