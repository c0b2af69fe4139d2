"""Measure which ZeRO stage and micro-batch train fastest, with DeepSpeed's autotuner.

toolkit autotune [launcher options] recipe=NAME [stages=0,1,2] [micro=1,2,4] [fast=false] [output=DIR] [key=value …]

  launcher options  as for `toolkit launch`, which runs each experiment: six steps, the fourth to sixth timed
  stages=0,1,2      ZeRO stages to try; 0,1,2,3
  micro=1,2,4       micro-batches to try; powers of two up to 16 that divide a rank's rows of a step
  fast=false        also bucket sizes and overlapping of a stage that beats those before it: up to 50 experiments each
  output=DIR        folder of the experiments; run.dir/autotune-RECIPE-…; the same command goes on in it
  key=value         as for `toolkit train`, but zero= and batch.micro_per_gpu=, which are what is sought

The global batch stays the recipe's. What does not run, such as for want of memory, is shown as failed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.cli.compose import compose, one_of
from toolkit.cli.experiments import Found, Search
from toolkit.cli.sweep import refuse_ranks
from toolkit.config.checks import check, micro_sizes
from toolkit.config.layout import layout_of
from toolkit.config.load import Loaded
from toolkit.errors import ConfigError, LaunchError
from toolkit.launch import ancestors, hostfile, resources
from toolkit.launch.sweeps import digest
from toolkit.messages import say, tr
from toolkit.plan.outline import outline_of

_OWN = ("stages", "micro", "fast", "output")
_STAGES = (0, 1, 2, 3)
_MOST = 16
"""Of the micro-batches that are tried unasked."""
_TIMED_TO = 6
"""The step that ends an experiment."""


def run(words: list[str]) -> int:
    """Search."""
    refuse_ranks()
    launcher, options, rest = ancestors.typed(words)
    composed = compose(rest, world_size=None, arguments=_OWN)
    hosts = _hosts(options)
    world_size = sum(map(len, hosts.values()))
    _check(rest, composed.loaded, world_size)
    cfg, given = composed.loaded.cfg, composed.arguments
    stages = _numbers(given, "stages", _STAGES, _STAGES)
    sizes = micro_sizes(cfg, world_size)
    powers = [rows for rows in sizes if rows <= _MOST and rows.bit_count() == 1]
    micro = _numbers(given, "micro", powers, sizes)
    recipe = [word for word in rest if word.partition("=")[0] not in _OWN]
    name = f"autotune-{Path(cfg.recipe).stem}-{digest(sorted([*launcher, *words]))}"
    search = Search(
        cfg=cfg,
        launcher=launcher,
        recipe=recipe,
        hosts=hosts,
        stages=stages,
        micro=micro,
        is_fast=one_of(given, "fast", ("true", "false")) == "true",
        folder=Path(given.get("output") or Path(cfg.run.dir) / name).absolute(),
        outline=outline_of(cfg, say),
    )
    say(tr("Experiments are kept in {folder}.", folder=search.folder))
    from toolkit.cli.autotuner import tune

    return _show(tune(search), search)


def _show(found: Sequence[Found], search: Search) -> int:
    """Print what was measured, and the words for the best; return the exit code."""
    best = max(found, key=lambda one: one.samples_per_s, default=None)
    say("")
    for one in sorted(found, key=lambda one: -one.samples_per_s):
        say(f"{' '.join(one.words)}  {one.told()}")
    if best is None or not best.samples_per_s:
        say(tr("None of them ran."))
        return 1
    say(tr("The fastest: {words}", words=" ".join(best.words)))
    return 0


def _hosts(options: dict[str, str]) -> resources.Resources:
    """Return which GPUs take part."""
    if path := ancestors.hostfile_of(options):
        return resources.used(hostfile.read(Path(path)), options)
    if number := options.get("--num_gpus", ""):
        if not number.isdecimal() or not int(number):
            raise LaunchError(tr("--num_gpus {value} is not a number from 1.", value=number))
        return {"localhost": list(range(int(number)))}
    from deepspeed.accelerator import get_accelerator

    return resources.used({"localhost": get_accelerator().device_count()}, options)


def _check(words: Sequence[str], loaded: Loaded, world_size: int) -> None:
    """Refuse what an experiment could not be made of.

    Raises:
        ConfigError: it is so.
    """
    cfg = loaded.cfg
    for word in words:
        if word.lstrip("+").partition("=")[0] in ("zero", "zero.stage", "batch.micro_per_gpu", "profile.autotuning"):
            raise ConfigError(
                tr("{word}: that is what autotune seeks. stages= and micro= say among what; take it out.", word=word)
            )
    if cfg.deepspeed_json or cfg.plan.auto:
        key = "deepspeed_json" if cfg.deepspeed_json else "plan.auto"
        raise ConfigError(tr("{key} chooses the ZeRO stage itself. Take it out, or do without autotune.", key=key))
    if layout_of(cfg, world_size).model_ranks > 1:
        raise ConfigError(
            tr("autotune was not tried with model parallelism. Use `toolkit sweep` (docs/zero.md), or parallel=none.")
        )
    if cfg.train.max_steps and cfg.train.max_steps < _TIMED_TO:
        raise ConfigError(
            tr(
                "train.max_steps = {steps}: an experiment takes {needed} steps.",
                steps=cfg.train.max_steps,
                needed=_TIMED_TO,
            )
        )
    smallest = replace(cfg, batch=replace(cfg.batch, micro_per_gpu=1))
    check(replace(loaded, cfg=smallest), world_size)


def _numbers(given: dict[str, str], name: str, default: Sequence[int], known: Sequence[int]) -> list[int]:
    """Return a list of numbers that was given, each of them known."""
    if name not in given:
        return list(default)
    words = given[name].split(",")
    wrong = [word for word in words if not word.isdecimal() or int(word) not in known]
    if wrong:
        raise ConfigError(
            tr(
                "{name}: {word} is none of {known}.",
                name=name,
                word=wrong[0],
                known=", ".join(map(str, known)),
            )
        )
    return sorted({int(word) for word in words})
