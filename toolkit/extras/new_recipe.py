"""`toolkit new`: looks at the data, plans each fine-tuning method on the GPUs, and writes a recipe of one that fits."""

import bisect
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from toolkit.arguments import parse_checked
from toolkit.command_line import positive_int
from toolkit.config import files, hub, load, mesh, schema
from toolkit.config.context_length import position_limit
from toolkit.config.dotted_keys import set_leaf
from toolkit.config.schema import Init, OnBadRow, RowFormat, RunConfig, TooLong, TuningMethod
from toolkit.data.first_rows import (
    BYTES_PER_TOKEN,
    check_sources,
    estimated_samples,
    formats_and_sizes,
    tokenize_first_rows,
)
from toolkit.data.tokenize import percent
from toolkit.extras.translate.convert import inline
from toolkit.messages import ConfigError, ModelError, Problems, did_you_mean, joined, tr, warn
from toolkit.plan import speed
from toolkit.plan.layouts import Layout
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import GIB, Machine, find_gpu
from toolkit.plan.model_config import config_of
from toolkit.plan.planned_machine import parse_machine, this_machine
from toolkit.plan.search import fastest, layouts, overrides
from toolkit.plan.summary import gib
from toolkit.train.schedule import FEWEST_STEPS

METHODS = (TuningMethod.full, TuningMethod.lora, TuningMethod.qlora)
"""The first that fits on the GPUs alone is chosen, else the first that fits with offloading."""
_LEAST_LENGTH, _TEXT_LENGTH = 256, 2048
"""Shortest `data.max_length` that is tried, and that of plain texts, which are split."""
_CAUTIOUS_BYTES = 3
"""Bytes per token assumed of the longest row without a tokenizer: with `BYTES_PER_TOKEN`, the mean, it might be cut."""
_LONGER = 0.005
"""Share of the first rows that may be longer than the chosen length, so that no single row decides it."""
_UNBOUNDED = 1 << 24
"""`data.max_length` for counting tokens: longer than any sample."""
_MOST_EPOCHS = 20
"""Most passes over few samples, for a run of `FEWEST_STEPS` steps."""
_SAMPLES = 16
"""Least `batch.global_size`, as in the recipe chatglm."""

Arguments = Mapping[str, str]
"""The arguments of `toolkit new`: model, data, gpus, nodes, host_memory, columns, max_length."""


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """The fastest layout of a fine-tuning method that fits in memory, or the smallest if none does."""

    method: TuningMethod
    layout: Layout
    machine: Machine


def check_model(arguments: Arguments) -> None:
    """Raise a ConfigError if the argument `model` names none."""
    model, names = arguments["model"], load.group_choices()["model"]
    if model not in names and not Path(model).is_dir() and not files.is_hub_name(model):
        sentence = tr(
            "model = {model} is no name of `toolkit models`, no directory here and not owner/name on Hugging Face.",
            model=model,
        )
        raise ConfigError(joined(sentence, did_you_mean(model, names)))


def check_data(arguments: Arguments) -> None:
    """Raise a ConfigError if the argument `data` names no group, and no file that can be read here or from afar."""
    data, columns = arguments["data"], _columns(arguments)
    if data not in load.group_choices()["data"] and isinstance(columns, dict):  # others: `data_facts` tells
        problems = Problems()
        source = schema.SourceConfig(path=data, columns=columns)
        check_sources(schema.DataConfig(sources=[source]), (), problems)
        problems.raise_all()


def _columns(arguments: Arguments) -> Any:
    """Return the argument `columns`, a map of our names to the file's, or what was typed in its place."""
    return files.parse(f"columns: {arguments.get('columns', '{}')}", "columns=").values["columns"]


def data_facts(arguments: Arguments) -> dict[str, Any]:
    """Return what the recipe's template needs to know of model and data: groups, sources, lengths, formats, counts of
    the first rows. ConfigError for a wrong model, data or length.
    """
    check_model(arguments)
    groups, model, data = load.group_choices(), arguments["model"], arguments["data"]
    is_group = model in groups["model"]
    columns = _columns(arguments)
    if columns and data in groups["data"]:
        raise ConfigError(
            "columns = {columns} is for data=PATH: the group {data} names its own.", columns=columns, data=data
        )
    source = {"path": data, "columns": columns} if columns else {"path": data}
    # The recipe's template takes a model and data by group, or by path.
    facts = {
        "group": model if is_group else "hf",
        "path": "" if is_group else model,
        "data_group": data if data in groups["data"] else "",
        "sources": [] if data in groups["data"] else [source],
        "max_length": _LEAST_LENGTH,
    }
    problems, loaded = Problems(), _compose(facts)
    check_sources(loaded.cfg.data, (), problems)
    problems.raise_all()
    formats, sizes = formats_and_sizes(loaded.cfg.data)
    if not sizes:
        raise ConfigError("data = {data}: no rows to look at. Name a file, a directory or a pattern.", data=data)
    is_text = formats == [RowFormat.text]
    cfg = _planned(loaded).cfg
    lengths = _token_counts(cfg)
    needed = _TEXT_LENGTH if is_text else _needed_length(lengths, sizes)
    limit = cfg.model.shape.max_positions if cfg.model.init is Init.random else position_limit(config_of(cfg))
    length = positive_int(dict(arguments), "max_length") or min(needed, limit or needed)
    if limit and length > limit:
        raise ConfigError("max_length = {length}: the model has {limit} positions.", length=length, limit=limit)
    counts = lengths or [size // BYTES_PER_TOKEN for size in sizes]
    num_longer = len(counts) - bisect.bisect_right(counts, length)
    return facts | {
        "is_text": is_text,
        "formats": ", ".join(formats),
        "is_counted": bool(lengths),
        "median": f"{counts[len(counts) // 2]:,}",
        "longest": f"{counts[-1]:,}",
        "max_length": length,
        "rows_seen": f"{len(counts):,}",
        "rows_longer": num_longer,
        "longer_percent": percent(num_longer / len(counts)),
        "name": cfg.model.name or model,
    }


def _needed_length(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the least power of two above the tokens that all but a few rows have at most. `lengths`: tokens of the
    first rows, ascending; [] if they could not be counted: then the largest of `sizes`, in bytes, decides.
    """
    if lengths:
        covered: float = lengths[math.ceil(len(lengths) * (1 - _LONGER)) - 1]
    else:
        covered = sizes[-1] / _CAUTIOUS_BYTES
    return max(_LEAST_LENGTH, 2 ** math.ceil(math.log2(covered + 1)))


def _token_counts(cfg: RunConfig) -> list[int]:
    """Return the token counts of the data's first samples, ascending; [] if no tokenizer on this disk can encode them.
    Warns of what the recipe can mend; raises what `toolkit check` does for a model that cannot be trained.
    """
    if not Path(cfg.model.path or "-").is_dir():  # before slow imports; Path("") would be the current directory
        return []
    from toolkit.models.tokenizer_files import local_encoder
    from toolkit.tasks.registry import task_of

    encoder, counts = None, list[int]()
    try:
        encoder = local_encoder(cfg.model)
    except ModelError as error:
        warn(str(error))
    task_of(cfg).check(cfg, encoder and encoder.tokenizer)
    if encoder:
        uncut = replace(cfg.data, max_length=_UNBOUNDED, too_long=TooLong.drop, on_bad_row=OnBadRow.skip)
        report, counts = tokenize_first_rows(replace(cfg, data=uncut), encoder)
        if report.bad_rows:
            warn(report.examples[tr("cannot be used")][0])
    return counts


def plan_methods(
    arguments: Arguments, facts: Mapping[str, Any], methods: Sequence[TuningMethod], samples: int = _SAMPLES
) -> Iterator[MethodPlan]:
    """Yield the plan of each method that these GPUs support, with at least `samples` samples per optimizer step. CPUs
    are not planned with QLoRA.
    """
    machine = machine_of(arguments)
    precision = _precision_on(machine)
    for method in methods:
        if method is TuningMethod.qlora and machine.on_cpu:
            continue
        global_size = -(-samples // machine.world_size) * machine.world_size  # the next multiple of the ranks
        method_facts = {"method": method.value, "dtype": precision, "global_size": global_size}
        cfg = mesh.with_micro_batch(_planned(_compose({**facts, **method_facts})).cfg)
        outline = outline_of(cfg)
        planned = list(layouts(outline, cfg, machine, speed.rates_of(cfg, machine, outline)))
        on_gpus = [layout for layout in planned if not layout.is_offloaded]
        if not machine.host_bytes:  # offloading is planned where the host's memory is known
            planned = on_gpus
        smallest = min(planned, key=lambda layout: layout.peak)
        yield MethodPlan(method, fastest(on_gpus) or fastest(planned) or smallest, machine)


def _precision_on(machine: Machine) -> str:
    """Return the precision of a new recipe: bf16, but fp16 on GPUs that have no bf16, and fp32 on CPUs."""
    if machine.on_cpu:
        return "fp32"
    return "fp16" if machine.card and machine.card.lacks_bf16 else "bf16"


def gpus_here() -> dict[str, str]:
    """Return the arguments gpus and host_memory that stand for this machine, such as 2xH100 or, of a card that is not
    in the list, 2x24564MB; {} without an NVIDIA GPU.
    """
    here = this_machine()
    if here is None:
        return {}
    listed = here.card and find_gpu(here.card.name)
    card = listed.name if listed else f"{here.memory_bytes // 2**20}MB"
    return {"gpus": f"{here.ranks}x{card}", "host_memory": f"{here.host_bytes // GIB}GB"}


def machine_of(arguments: Arguments) -> Machine:
    """Return the nodes to plan for, by the arguments gpus, nodes and host_memory."""
    return parse_machine(
        arguments["gpus"], positive_int(dict(arguments), "nodes") or 1, arguments.get("host_memory", "")
    )


def choose(plans: Sequence[MethodPlan]) -> MethodPlan | None:
    """Return the first plan that fits on GPUs alone, else the first that fits offloaded; None if nothing fits."""
    fitting = (plan for plan in plans if plan.layout.fits)
    return min(fitting, key=lambda plan: plan.layout.is_offloaded, default=None)  # False is less than True


def remedies(arguments: Arguments, facts: Mapping[str, Any], methods: Sequence[TuningMethod]) -> list[str]:
    """Return changed arguments, such as "gpus=4x80GB (lora)", with which that method fits: of max_length, host_memory,
    gpus and nodes each the smallest change that is enough for one.
    """
    ranks, card = machine_of(arguments).ranks, re.sub(r"^\d+\s*[xX*×]", "", arguments["gpus"])  # 4x80GB: 4, 80GB
    nodes, length = int(arguments.get("nodes", 1)), int(facts["max_length"])
    attempts = (  # by argument, the smallest change first
        [("max_length", str(length >> half)) for half in range(1, 16) if length >> half >= _LEAST_LENGTH],
        [("host_memory", f"{size}GB") for size in (128, 256, 512, 1024, 2048) if not arguments.get("host_memory")],
        [("gpus", f"{more}x{card.strip()}") for more in (2, 4, 8) if more > ranks],
        [("nodes", str(nodes * factor)) for factor in (2, 4, 8)],
    )
    fitting = []
    for values in attempts:
        for name, value in values:
            changed_facts = {"max_length": int(value)} if name == "max_length" else {}
            plans = plan_methods({**arguments, name: value}, {**facts, **changed_facts}, methods, samples=1)
            if plan := choose(list(plans)):
                fitting.append(f"{name}={value} ({plan.method.value})")
                break
    return fitting


def recipe_text(facts: Mapping[str, Any], plan: MethodPlan, commands: Sequence[str]) -> str:
    """Return the YAML text of a plan's recipe, after a check that it composes to the planned config. `commands`: those
    that its comment tells the user to run.
    """
    cfg, layout = plan.layout.cfg, plan.layout
    settings: dict[str, Any] = {"zero": {"stage": cfg.zero.stage}}
    for word in overrides(RunConfig(), cfg):  # where the plan differs from the defaults
        key, _, value = word.partition("=")
        set_leaf(settings, key, yaml.safe_load(value))
    estimate = estimated_samples(cfg.data, 10**12)  # None if an epoch has more than can be counted in a second
    samples, sequences = estimate or (0, 0)
    epoch_steps, epochs = math.ceil(sequences / cfg.batch.global_size), int(cfg.train.epochs)
    if epoch_steps:  # of few samples more passes
        epochs = max(epochs, min(_MOST_EPOCHS, math.ceil(FEWEST_STEPS / epoch_steps)))
    plan_facts = {
        "method": plan.method.value,
        "dtype": cfg.precision.dtype.value,
        "global_size": cfg.batch.global_size,
        "micro": cfg.batch.micro_per_gpu,
        "settings": settings,
        "machine": plan.machine.name,
        "device": gib(layout.peak),
        "host": gib(layout.host_peak),
        "rows": f"{samples:,}" if estimate else "",
        "epochs": epochs,
        "steps": epochs * epoch_steps,
        "commands": commands,
    }
    all_facts = {**facts, **plan_facts}
    assert not overrides(cfg, mesh.with_micro_batch(_compose(all_facts).cfg)), "the recipe is not what was planned"
    return _rendered(all_facts)


def _rendered(facts: Mapping[str, Any]) -> str:
    """Return the recipe's template filled in with facts, and with usual values for those that are missing."""
    method = facts.get("method", TuningMethod.full.value)
    environment = jinja2.Environment(keep_trailing_newline=True)  # noqa: S701  # YAML, whose values `inline` quotes
    environment.filters["yaml"] = inline
    template = (resources.files("toolkit.extras") / "new_recipe.yaml.j2").read_text(encoding="utf-8")
    usual = {"method": method, "dtype": "bf16", "global_size": _SAMPLES, "micro": 1, "settings": {"zero": {"stage": 2}}}
    rate = f"{schema.LEARNING_RATES[TuningMethod(method)]:.1e}".replace("e-0", "e-")  # 1.0e-5 instead of 1.0e-05
    return environment.from_string(template).render({**usual, "lr": rate, **facts})


def _compose(facts: Mapping[str, Any]) -> load.LoadedConfig:
    """Return the checked config of the recipe with these facts; errors do not name its temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(_rendered(facts), encoding="utf-8")
        try:
            loaded = parse_checked([f"recipe={path}"], files=False).loaded
        except ConfigError as error:
            raise ConfigError(re.sub(rf"{re.escape(str(path))}(:\d+)?: ", "", str(error))) from error
    loaded.where.clear()  # no message names this file
    return loaded


def _planned(loaded: load.LoadedConfig) -> load.LoadedConfig:
    """Return a config whose model has its config.json on this disk, fetched if need be, or known sizes."""
    is_unknown = hub.needs_lookup(loaded.cfg.model)
    return hub.resolve_model_path(loaded, config_only=True) if is_unknown else loaded
