"""Searches for the ZeRO stage and micro-batch that train fastest; its experiments are the runs of a sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from toolkit.arguments import check_parsed, parse
from toolkit.config import mesh, preflight, schema
from toolkit.jobs import sweep as sweeping
from toolkit.jobs.sweep import DONE, SweepDir, SweepJob, SweepPlan
from toolkit.launch import deepspeed, hostfile, processes
from toolkit.messages import ConfigError, Problems, Stopped, say, tr
from toolkit.plan.machine import Machine, this_machine
from toolkit.plan.memory import plan_rank
from toolkit.plan.outline import Outline, outline_of

_OWN = ("stages", "micro", "sweep")
_MOST = 16
"""Of the micro-batches that are tried unasked."""
_BRIEF = (
    *sweeping.BRIEF,
    "train.max_steps=8",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "checkpoint.export=false",
    "evaluate.at_start=false",
    "evaluate.every=0",
)
"""An experiment trains, and is evaluated once at its end, as all runs with validation data are."""


@dataclass(kw_only=True, slots=True)
class AutotuneSearch:
    """What is searched, and what was tried."""

    plan: SweepPlan
    sweep: SweepDir
    configs: dict[tuple[int, int], tuple[list[str], schema.RunConfig]]
    """Stage and micro-batch -> overrides and config of what is tried."""
    rows: int
    """Of a rank in one optimizer step."""
    requests: processes.SignalRequests = field(default_factory=processes.SignalRequests)
    jobs: list[SweepJob] = field(default_factory=list)

    def tokens_per_s(self, stage: int, micro: int) -> float:
        """Train a few steps unless done before; return all ranks' speed, 0 if it failed. Raises Stopped on a signal."""
        words, cfg = self.configs[stage, micro]
        job = self.sweep.add(sweeping.new_job(words, cfg))
        self.jobs.append(job)
        if job.state != DONE:
            say(f"[{len(self.jobs)}/{len(self.configs)}] {' '.join(words)}")
            sweeping.launch(self.plan, self.sweep, job, words, self.requests)
            sweeping.check_stopped(self.sweep, self.requests)
        return self.measured(job)

    def measured(self, job: SweepJob) -> float:
        """Return the tokens per second of a job, 0 if it is not done."""
        return sweeping.read_result(self.sweep.run_dir(job)).tokens_per_s if job.state == DONE else 0.0


def run_autotune(words: list[str]) -> int:
    """Search, and print what was measured and the overrides of the fastest; return the exit code."""
    launcher, options, rest = deepspeed.typed_options(words)
    problems = Problems()
    hosts = problems.attempt(hosts_of, options) or {}
    world_size = sum(map(len, hosts.values()))
    arguments = parse(rest, names=_OWN, problems=problems)
    cfg, given = arguments.loaded.cfg, arguments.values
    recipe = [word for word in rest if word.partition("=")[0] not in _OWN]
    groups = problems.attempt(_groups, cfg) or {}
    stages = problems.attempt(_numbers, given, "stages", list(groups), list(groups)) if groups else None
    problems.apply((_unsuitable,), recipe, cfg)
    smallest = replace(cfg, batch=replace(cfg.batch, micro_per_gpu=1))
    check_parsed(replace(arguments.loaded, cfg=smallest), world_size or None, problems)
    sizes = problems.attempt(mesh.micro_sizes, cfg, world_size) or [] if hosts else []
    powers = [rows for rows in sizes if rows <= _MOST and rows.bit_count() == 1]
    micro = problems.attempt(_numbers, given, "micro", powers, sizes) if sizes else None
    problems.raise_all()
    assert stages is not None and micro is not None
    name = f"autotune-{Path(cfg.recipe).stem}-{sweeping.digest(sorted([*launcher, *recipe]))}"
    own = {"sweep": given.get("sweep") or name}
    plan = SweepPlan(launcher=launcher, options=options, fixed=[*recipe, *_BRIEF], own=own)
    # The machine whose memory decides, if it is one of those that take part, and anybody knows its GPUs.
    takes_part = preflight.device_here() == "cuda" and any(map(hostfile.is_here, hosts))
    machine = this_machine(len(hosts)) if takes_part else None
    configs = _configs(plan, {stage: groups[stage] for stage in stages}, micro, world_size, machine)
    if not configs:
        raise ConfigError(tr("nothing is left to try."))
    from toolkit.jobs.autotuner import tune

    with sweeping.open_sweep(sweeping.sweep_dir(plan, cfg), sweeping.typed_command(words, "autotune")) as sweep:
        search = AutotuneSearch(plan=plan, sweep=sweep, configs=configs, rows=max(sizes))
        say("At most {number} experiments, in {folder}.", number=len(configs), folder=sweep.folder)
        try:
            tune(search)
        except Stopped:
            sweeping.show(sweep, search.jobs)
            raise
        sweeping.show(sweep, search.jobs)
        best = max(search.jobs, key=search.measured, default=None)
        if best is None or not search.measured(best):
            say("None of them ran.")
            return 1
        say("The fastest: {words}", words=" ".join(best.words))
        return 0


def hosts_of(options: dict[str, str]) -> hostfile.Resources:
    """Return the nodes and GPUs that a launcher's options name; without any, those of this machine."""
    if named := deepspeed.named_hosts(options):
        return named
    from deepspeed.accelerator import get_accelerator

    return hostfile.select_gpus({"localhost": get_accelerator().device_count()}, options)


def _groups(cfg: schema.RunConfig) -> dict[int, str]:
    """Return the config group of each stage that offloads what the recipe offloads; an error if there are none."""
    zero = cfg.zero
    where = (zero.offload_optimizer.device, zero.offload_param.device)
    is_special = zero.zenflow.enabled or zero.offload_optimizer.super_offload or zero.zero_hpz_partition_size > 1
    if is_special or schema.Device.nvme in where or zero.zero_quantized_weights or zero.zero_quantized_gradients:
        raise ConfigError(
            tr(
                "autotune knows plain ZeRO stages and those with optimizer states on the host. Measure this recipe's "
                "with `toolkit sweep` (docs/zero.md)."
            )
        )
    if zero.offload_optimizer.device is schema.Device.cpu:
        return {2: "stage2_offload", 3: "stage3_offload"}
    return {stage: f"stage{stage}" for stage in (0, 1, 2, 3)}


def _unsuitable(recipe: Sequence[str], cfg: schema.RunConfig) -> Iterator[ConfigError]:
    for word in recipe:
        if word.lstrip("+").partition("=")[0] in ("zero", "zero.stage", "batch.micro_per_gpu"):
            yield ConfigError(
                "{word}: that is what autotune seeks. stages= and micro= say among what; take it out.", word=word
            )
    if cfg.deepspeed_json or cfg.plan.auto:
        key = "deepspeed_json" if cfg.deepspeed_json else "plan.auto"
        yield ConfigError("{key} chooses the ZeRO stage itself. Take it out, or do without autotune.", key=key)
    if mesh.model_ranks(cfg) > 1:
        yield ConfigError(
            tr("autotune was not tried with model parallelism. Use `toolkit sweep` (docs/zero.md), or parallel=data.")
        )


def _configs(
    plan: SweepPlan, groups: dict[int, str], micro: Sequence[int], world_size: int, machine: Machine | None
) -> dict[tuple[int, int], tuple[list[str], schema.RunConfig]]:
    """Return what can be tried, and say of the rest why it cannot."""
    found = {}
    outline: Outline | None = None
    for (stage, group), rows in product(groups.items(), micro):
        words = [f"zero={group}", f"batch.micro_per_gpu={rows}"]
        try:
            cfg = plan.compose(words)
        except ConfigError as error:
            say("skipped: {reason}", reason=error)
            continue
        if machine is not None:
            outline = outline or outline_of(cfg)  # the same at every stage
            memory = plan_rank(outline, cfg, world_size)
            if (needed := memory.peak(memory.worst)) > machine.usable_bytes:
                reason = tr(
                    "by plan a rank needs {needed} GiB of {there} GiB",
                    needed=f"{needed / 2**30:.1f}",
                    there=f"{machine.usable_bytes / 2**30:.1f}",
                )
                say(f"{' '.join(words)}  " + tr("skipped: {reason}", reason=reason))
                continue
        found[stage, rows] = words, cfg
    return found


def _numbers(given: dict[str, str], name: str, default: Sequence[int], known: Sequence[int]) -> list[int]:
    """Return a list of numbers that was given, each of them known."""
    if name not in given:
        return list(default)
    words = given[name].split(",")
    wrong = [word for word in words if not word.isdecimal() or int(word) not in known]
    if wrong:
        raise ConfigError(
            "{name}: {word} is none of {known}.", name=name, word=wrong[0], known=", ".join(map(str, known))
        )
    return sorted({int(word) for word in words})
