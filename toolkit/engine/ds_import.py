"""Somebody's DeepSpeed JSON, taken instead of the recipe's DeepSpeed settings.

Each value is translated to the schema's key; what the schema does not own goes to ds_extra. At the end the JSON that
the result makes is held against the file, so a setting is either kept, or a note says what became of it.
"""

from typing import Any

from toolkit.config.checks import micro_rows, settled
from toolkit.config.load import JSON, Loaded, replace
from toolkit.config.schema import AUTO, RunConfig
from toolkit.config.tensor import partition_config
from toolkit.engine.ds_batch import translate_batch
from toolkit.engine.ds_config import OWNED, SAME, build_ds_config, leaves, read_key
from toolkit.engine.ds_json import read_json
from toolkit.engine.ds_translate import (
    Translation,
    equal,
    optimizer_defaults,
    translate_activation_checkpointing,
    translate_monitors,
    translate_optimizer,
    translate_precision,
    translate_scheduler,
    translate_steps_per_print,
    translate_zenflow,
)
from toolkit.errors import ConfigError
from toolkit.messages import tr

AUTOTP = "tensor_parallel.autotp_size"
ELSEWHERE = ("train_batch_size", "train_micro_batch_size_per_gpu", AUTOTP)
"""Keys that need more than a new name."""


def import_json(path: str, loaded: Loaded, world_size: int | None, *, strict: bool = False) -> tuple[Loaded, list[str]]:
    """Translate a DeepSpeed JSON into the run's settings.

    Args:
        path: the JSON file.
        loaded: the recipe.
        world_size: ranks over all nodes; None when unknown.
        strict: whether a file that contradicts the recipe is an error; else it beats the recipe, and loses to the
            command line.

    Returns:
        The settings with the file's values in them, and notes: what "auto" became, what has no effect, what is renamed.

    Raises:
        ConfigError: the file cannot be read or names unknown keys, has no counterpart here, or contradicts the recipe.
    """
    values, where, ignored = read_json(path)
    task = Translation(
        path=path, loaded=loaded, world_size=world_size, given=dict(leaves(values)), where=where, strict=strict
    )
    for key, sentence in ignored.items():
        task.note(key, sentence)
    _defaults(task, values)
    for key in task.given:
        if task.has(key) and key in SAME and key not in ELSEWHERE:
            task.take(SAME[key], task.given[key], key)
    _tensor(task)
    translate_batch(task)
    translate_precision(task)
    translate_optimizer(task)
    translate_scheduler(task)
    translate_activation_checkpointing(task, values)
    translate_zenflow(task, values)
    translate_steps_per_print(task)
    translate_monitors(task)
    if task.contradictions:
        raise ConfigError("\n".join(task.contradictions))
    extra = _extra(task)
    if task.replaced:
        task.notes.append(tr("{path} takes the place of: {keys}.", path=path, keys=", ".join(task.replaced)))
    result = replace(loaded, task.taken | ({"ds_extra": (extra, path)} if extra else {}), JSON)
    return result, task.notes + _compare(task, result)


def _defaults(task: Translation, values: dict[str, Any]) -> None:
    """Where the file is silent, DeepSpeed's own defaults hold, except for keys that the recipe sets explicitly."""
    plain, stage = RunConfig(), task.given.get("zero_optimization.stage", 0)
    silent = {key: read_key(plain, ours) for key, ours in SAME.items() if ours.startswith(("zero.", "precision."))}
    silent |= {"zero_optimization.stage": 0, "zero_optimization.overlap_comm": stage == 3}
    if "optimizer" in values:
        silent |= optimizer_defaults(task)
    changed = []
    for key, value in silent.items():
        ours = SAME[key]
        if key in task.given or ours in task.loaded.explicit or read_key(task.loaded.cfg, ours) == value:
            continue
        changed.append(f"{ours} = {value}")
        task.taken[ours] = (value, task.path)
    if changed:
        task.notes.append(
            tr(
                "{path}: what it does not name is as in DeepSpeed: {changed}.",
                path=task.path,
                changed=", ".join(changed),
            )
        )
    for key, schema_key in (("gradient_clipping", "train.gradient_clipping"), ("scheduler", "schedule.name")):
        if key not in values:
            task.notes.append(
                tr(
                    "{path}: {key} is not given; used is {schema} = {value} ({origin}).",
                    path=task.path,
                    key=key,
                    schema=schema_key,
                    value=read_key(task.loaded.cfg, schema_key),
                    origin=task.origin(schema_key),
                )
            )


def _tensor(task: Translation) -> None:
    """Take the number of ranks that split layers; DeepSpeed's 0 is our 1.

    Raises:
        ConfigError: the file splits otherwise.
    """
    if task.has(AUTOTP):
        task.take(SAME[AUTOTP], max(1, task.given[AUTOTP]), AUTOTP)
    for name, ours in partition_config().items():
        key = f"tensor_parallel.partition_config.{name}"
        if task.has(key) and task.given[key] != ours:
            raise task.fail(
                key, tr("{key}: how parameters are split is fixed here, by their names. Leave it out.", key=key)
            )


def _extra(task: Translation) -> dict[str, Any]:
    """Return the recipe's ds_extra with everything of the file that the schema does not own."""
    merged: dict[str, Any] = {}
    foreign = {key: value for key, value in task.given.items() if key not in OWNED and key != "steps_per_print"}
    for key, value in (dict(leaves(task.loaded.cfg.ds_extra)) | foreign).items():
        if value == "auto":
            task.note(key, tr('{key}: no setting of the recipe can replace "auto": left out.', key=key), dropped=True)
            continue
        if value == {}:
            continue
        *parents, name = key.split(".")
        section = merged
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return merged


def _compare(task: Translation, result: Loaded) -> list[str]:
    """Hold the JSON that the result makes against the file; say what "auto" became and what falls away."""
    cfg = settled(result.cfg)
    ranks = task.world_size or max(1, cfg.batch.global_size // micro_rows(cfg)) * cfg.parallel.tensor
    made = dict(leaves(build_ds_config(cfg, ranks).values))
    if cfg is not result.cfg:  # both are found by training
        made |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
    notes, idle = [], []
    for key, value in task.given.items():
        if value == {} or key in task.noted or (key == "gradient_accumulation_steps" and task.world_size is None):
            continue
        schema_key = OWNED.get(key, f"ds_extra.{key}")
        if value == "auto":
            shown = made.get(key, read_key(result.cfg, schema_key))
            if schema_key == "train.max_steps" and not shown:
                shown = tr("as many as the data gives")
            notes.append(
                tr(
                    "{place}: {key}: auto -> {value} ({schema}, {origin})",
                    place=task.place(key),
                    key=key,
                    value=shown,
                    schema=schema_key,
                    origin=task.origin(schema_key),
                )
            )
        elif key not in made and key in OWNED:
            idle.append(key)
        elif not equal(made.get(key), value):
            raise AssertionError(f"{task.place(key)}: {key} = {value!r} became {made.get(key)!r}")
    if idle:
        keys = ", ".join(idle)
        notes.append(tr("{path}: no effect beside the other settings: {keys}.", path=task.path, keys=keys))
    return notes
