"""Estimate GPU memory and time before anything is loaded: which layouts fit, and the overrides to set them.

toolkit plan recipe=NAME [gpus=8x80GB] [nodes=2] [host_memory=1TB] [calibrate=true] [trace=true] [output=FILE]
             [key=value …]

  gpus=8x80GB      GPUs of one node: their memory, or their name (8xA100-80GB, 4xH100), or 2xcpu;
                   default: those of this node, or 8x80GB without any
  nodes=2          identical nodes; default 1
  host_memory=1TB  memory of one node; without it host memory is shown but not checked
  calibrate=true   measure the speed of this node for a few seconds; kept in prepare.dir/plan
  trace=true       also run two steps of the real model in DeepSpeed's engine, on tensors that hold no data: prints
                   their memory next to the plan's, the collectives, and where the host waits for the GPU. Needs no
                   GPU; takes a minute
  output=FILE      the plan as JSON

Nothing is loaded: model.path needs config.json alone, and the models of `toolkit models` not even that. GB and TB are
powers of 1024, as memory is sold. A plan of which nothing fits ends with 0 too: scripts read output=FILE.
"""

import json
from importlib import import_module
from pathlib import Path

from toolkit.arguments import check_parsed, parse
from toolkit.command_line import check_output, one_of, write_output
from toolkit.config import files, load, mesh
from toolkit.config.context_length import check_positions
from toolkit.config.dotted_keys import get_value
from toolkit.config.hub import needs_lookup, resolve_model_path, resolve_teacher
from toolkit.config.other_model import warn_of_another_model
from toolkit.config.schema import AUTO
from toolkit.jobs import check
from toolkit.messages import ModelError, Problems, say, warn
from toolkit.models.quantized import check_readable
from toolkit.plan import calibration, speed
from toolkit.plan.layouts import evaluate_layout
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import Machine
from toolkit.plan.model_config import published_models
from toolkit.plan.search import layouts
from toolkit.plan.summary import plan_json, plan_lines

TRACING = "toolkit.extras.trace"
OWN = ("gpus", "nodes", "host_memory", "calibrate", "trace", "output")


def run(words: list[str]) -> None:
    """Print the plan; with `calibrate=true` after measuring this machine, with `trace=true` next to a traced step."""
    loaded, settings, machine = _checked(words)
    adds_tokens = loaded.cfg.model.add_tokens and Path(loaded.cfg.model.path).is_dir()
    if needs_lookup(loaded.cfg.model) or adds_tokens:  # config.json is downloaded, or copied with room for them
        loaded = resolve_model_path(loaded, config_only=True)
    check_positions(loaded)
    warn_of_another_model(loaded.cfg.model)
    if loaded.cfg.model.path:
        try:
            check_readable(loaded.cfg.model.path)
        except ModelError as error:  # quantized weights: it says to train a model in 16 bits instead
            warn("{reason} This is the plan of such a copy.", reason=error)
    if loaded.cfg.distill.teacher not in published_models("hub_id"):  # their sizes are known without a config.json
        loaded = resolve_teacher(loaded, config_only=True)
    cfg = mesh.with_micro_batch(loaded.cfg)
    outline = outline_of(cfg)
    if settings.get("calibrate") == "true":
        calibration.calibrate(cfg, machine, outline)
    rates = speed.rates_of(cfg, machine, outline)
    layout = evaluate_layout(outline, cfg, machine, rates)
    other_layouts = list(layouts(outline, cfg, machine, rates))
    for line in plan_lines(outline, machine, rates, layout, other_layouts):
        say(line)
    traced = None
    if settings.get("trace") == "true":
        recipe = [word for word in words if word.partition("=")[0] not in OWN]
        # The directory that the config was found in, where there is one.
        found_at = [f"model.path={files.quoted(Path(cfg.model.path))}"] if cfg.model.path else []
        tracing = import_module(TRACING)
        traced = tracing.report(tracing.trace([*recipe, *found_at], machine), layout)
    if settings.get("output"):
        result = plan_json(outline, machine, layout, other_layouts) | ({"trace": traced} if traced else {})
        write_output(settings, json.dumps(result, indent=2) + "\n")


def _checked(words: list[str]) -> tuple[load.LoadedConfig, dict[str, str], Machine]:
    """Return the checked config, the command's own arguments and the machine to plan for."""
    problems = Problems()
    arguments = parse(words, names=OWN, problems=problems)
    settings = arguments.values
    problems.attempt(check_output, settings)
    for name in ("calibrate", "trace"):
        problems.attempt(one_of, settings, name, ("false", "true"))
    machine = problems.attempt(check.machine_for, settings, arguments.loaded.cfg)
    loaded = arguments.loaded if machine is None else _with_fitting_batch(arguments.loaded, machine.world_size)
    if settings.get("trace") == "true":
        problems.attempt(import_module(TRACING).check_traceable, arguments.loaded.cfg, machine)
    check_parsed(loaded, machine.world_size if machine else None, problems, files=False)
    problems.raise_all()
    assert machine is not None
    return loaded, settings, machine


def _with_fitting_batch(loaded: load.LoadedConfig, world_size: int) -> load.LoadedConfig:
    """Return the config with the nearest batch that these ranks can share, and report it: a recipe's batch is made for
    another number of ranks. Unchanged where the batch is found otherwise, or the model cannot be divided over them.
    """
    batch = loaded.cfg.batch
    is_found_later = batch.micro_per_gpu == AUTO or bool(batch.world_sizes)  # by trying; for several numbers of ranks
    is_model_indivisible = world_size % mesh.model_ranks(loaded.cfg) != 0  # which `check_parsed` reports
    if is_found_later or is_model_indivisible:
        return loaded
    size, micro = mesh.fitting_batch(loaded.cfg, world_size)
    if (size, micro) == (batch.global_size, batch.micro_per_gpu):
        return loaded
    fitting = {"batch.global_size": size, "batch.micro_per_gpu": micro}
    changed = {key: value for key, value in fitting.items() if value != get_value(loaded.cfg, key)}
    words = " ".join(f"{key}={value}" for key, value in changed.items())
    say("The recipe's batch cannot be shared by {ranks} ranks: planned with {words}.", ranks=world_size, words=words)
    return load.replace(loaded, {key: (value, "toolkit plan") for key, value in changed.items()})
