"""Somebody's DeepSpeed JSON, taken instead of the recipe's DeepSpeed settings.

It is read strictly, with the line of each key. What DeepSpeed 0.19.8 ignores is taken out first, and its old names are
replaced; a likely misspelling stays, so that it becomes an error. Each value is translated to the schema's key; what
the schema does not own goes to ds_extra. At the end the JSON that the result makes is held against the file, so a
setting is either kept, or a note says what became of it.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from toolkit.config.load import JSON, LoadedConfig, replace
from toolkit.config.mesh import micro_rows, model_ranks, partition_config, with_micro_batch
from toolkit.config.schema import AUTO, RunConfig
from toolkit.engine.ds_config import OWNED, SAME, build_ds_config, read_key
from toolkit.engine.ds_import_sections import (
    SectionImport,
    equal,
    optimizer_defaults,
    translate_activation_checkpointing,
    translate_batch,
    translate_monitors,
    translate_optimizer,
    translate_precision,
    translate_scheduler,
    translate_steps_per_print,
    translate_zenflow,
)
from toolkit.engine.ds_keys import INSTEAD, KEYS, REMOVED, RENAMED, dotted_keys, name_problems
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.outside import reason_of
from toolkit.problems import raise_all
from toolkit.tables import leaves, set_leaf

AUTOTP = "tensor_parallel.autotp_size"
ELSEWHERE = ("train_batch_size", "train_micro_batch_size_per_gpu", AUTOTP)
"""Keys that need more than a new name."""


def import_json(
    path: str, loaded: LoadedConfig, world_size: int | None, *, strict: bool = False
) -> tuple[LoadedConfig, list[str]]:
    """Translate a DeepSpeed JSON into the run's settings.

    With `strict`, a file that contradicts the recipe is an error; else it beats the recipe, and loses to the command
    line. Returns the settings, and notes: what "auto" became, what has no effect, what is renamed.
    """
    values, where, ignored = read_json(path)
    task = SectionImport(
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


def _defaults(task: SectionImport, values: dict[str, Any]) -> None:
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


def _tensor(task: SectionImport) -> None:
    """Take the number of ranks that split layers; DeepSpeed's 0 is our 1."""
    if task.has(AUTOTP):
        task.take(SAME[AUTOTP], max(1, task.given[AUTOTP]), AUTOTP)
    for name, ours in partition_config().items():
        key = f"tensor_parallel.partition_config.{name}"
        if task.has(key) and task.given[key] != ours:
            raise task.fail(
                key, tr("{key}: how parameters are split is fixed here, by their names. Leave it out.", key=key)
            )


def _extra(task: SectionImport) -> dict[str, Any]:
    """Return the recipe's ds_extra with everything of the file that the schema does not own."""
    merged: dict[str, Any] = {}
    foreign = {key: value for key, value in task.given.items() if key not in OWNED and key != "steps_per_print"}
    for key, value in (dict(leaves(task.loaded.cfg.ds_extra)) | foreign).items():
        if value == "auto":
            task.note(key, tr('{key}: no setting of the recipe can replace "auto": left out.', key=key), dropped=True)
            continue
        if value != {}:
            set_leaf(merged, key, value)
    return merged


def _compare(task: SectionImport, result: LoadedConfig) -> list[str]:
    """Hold the JSON that the result makes against the file; say what "auto" became and what falls away."""
    cfg = with_micro_batch(result.cfg)
    ranks = task.world_size or max(1, cfg.batch.global_size // micro_rows(cfg)) * model_ranks(cfg)
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
                    place=task.position(key),
                    key=key,
                    value=shown,
                    schema=schema_key,
                    origin=task.origin(schema_key),
                )
            )
        elif key not in made and key in OWNED:
            idle.append(key)
        elif not equal(made.get(key), value):
            raise AssertionError(f"{task.position(key)}: {key} = {value!r} became {made.get(key)!r}")
    if idle:
        keys = ", ".join(idle)
        notes.append(tr("{path}: no effect beside the other settings: {keys}.", path=task.path, keys=keys))
    return notes


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]')


def read_json(path: str) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Read a DeepSpeed JSON; what DeepSpeed ignores in it is left out.

    Returns the nested dictionary without nulls (which mean "not given"); dotted key -> "file:line"; and dotted key -> a
    sentence about what DeepSpeed ignores or has renamed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        values = json.loads(text)
    except OSError as error:
        raise ConfigError(
            "deepspeed_json = {path} cannot be read: {reason}", path=path, reason=error.strerror or error
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("{path} is not UTF-8 (byte {position}).", path=path, position=error.start) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            "{path}:{line}:{column}: this is not JSON: {reason}",
            path=path,
            line=error.lineno,
            column=error.colno,
            reason=error.msg,
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("{path} is not JSON: {reason}", path=path, reason=reason_of(error)) from error
    if not isinstance(values, dict):
        raise ConfigError("{path}: a DeepSpeed JSON must be an object, {{...}}.", path=path)
    where = _lines_of_keys(text, path)
    values, ignored = without_ignored(_without_nulls(values), where)
    problems = name_problems(values)
    raise_all(ConfigError(f"{where.get(key, path)}: {sentence}") for key, sentence in problems.items())
    return values, where, ignored


def _lines_of_keys(text: str, path: str) -> dict[str, str]:
    """Return dotted key -> "file:line" of valid JSON, and refuse a key that stands twice in one object.

    The standard parser tells no positions and takes the last of two equal keys. Objects inside lists are not entered.
    """
    where: dict[str, str] = {}
    opened: list[str | None] = []  # the prefix of each open object; None inside lists
    here, word = "", ""
    for token in _TOKEN.finditer(text):
        mark = token.group()
        inside = opened[-1] if opened else ""
        if mark == "{":
            opened.append(None if inside is None else here and f"{here}.")
        elif mark == "[":
            opened.append(None)
        elif mark in "}]":
            opened.pop()
        elif mark == ":" and inside is not None:
            here = inside + json.loads(word)
            place = f"{path}:{text.count(chr(10), 0, token.start()) + 1}"
            if here in where:
                raise ConfigError(
                    "{place}: '{key}' stands twice, first at {first}.", place=place, key=here, first=where[here]
                )
            where[here] = place
        elif mark not in ":,":
            word = mark
    return where


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in section.items()
        if value is not None
    }


_OFFLOADS = {
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_param": "offload_param",
}
"""Switches of old versions -> the section that took their place."""
_KNOWN = ("zero_optimization.cpu_offload_use_pin_memory", "scheduler.params.last_batch_iteration")
"""Names that could be taken for misspellings, and that change nothing."""
_LIKELY = 0.8
"""How alike a name must be to a known one to be a misspelling of it."""


def without_ignored(values: dict[str, Any], where: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a DeepSpeed JSON without what DeepSpeed ignores in it, and with today's names.

    `where` (dotted key -> "file:line") receives the lines of renamed keys. Also returns dotted key -> what became of
    it.
    """
    notes: dict[str, str] = {}
    return _without_ignored_in(values, KEYS, "", where, notes), notes


def _without_ignored_in(
    section: dict[str, Any], known: dict[str, Any], prefix: str, where: dict[str, str], notes: dict[str, str]
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    is_disabled = bool(prefix) and section.get("enabled") is False
    for name, value in section.items():
        key = prefix + name
        if is_disabled and name != "enabled":
            notes[prefix.rstrip(".")] = tr("{key} is disabled: its other keys have no effect.", key=prefix.rstrip("."))
        elif key in _OFFLOADS:
            if value is True:
                kept.setdefault(_OFFLOADS[key], {"device": "cpu"})
            notes[key] = tr(
                "{key} is an old name, read as {today}.",
                key=key,
                today=f"{prefix}{_OFFLOADS[key]}.device = {'cpu' if value is True else 'none'}",
            )
        elif key in RENAMED and " or " not in RENAMED[key]:
            today = RENAMED[key]
            notes[key] = tr("{key} is an old name, read as {today}.", key=key, today=today)
            where.update(
                {today + place.removeprefix(key): line for place, line in list(where.items()) if place.startswith(key)}
            )
            short = today.removeprefix(prefix)
            kept.setdefault(
                short,
                value
                if not isinstance(value, dict)
                else _without_ignored_in(value, known[short], f"{today}.", where, notes),
            )
        elif key == "data_efficiency" and isinstance(value, dict) and value.get("enabled") is False:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)  # known to it, and not used here if it is on
        elif name in known and isinstance(value, dict) and known[name]:
            kept[name] = _without_ignored_in(value, known[name], f"{key}.", where, notes)
        elif name in known or not _is_ignored(key, name, known):
            kept[name] = value
        elif key in INSTEAD:
            notes[key] = tr("DeepSpeed ignores {key}; {schema} does what it did.", key=key, schema=INSTEAD[key][0])
        else:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)
    return kept


def _is_ignored(key: str, name: str, known: dict[str, Any]) -> bool:
    """Return whether an unknown name is no more than that: a comment, a removed feature, what others read."""
    if key in REMOVED or key in _KNOWN or name.startswith(("_", "#", "//")) or name.lower().startswith("comment"):
        return True
    elsewhere = {other.rpartition(".")[2] for other in dotted_keys()}
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=_LIKELY)
    begins = any(other.startswith(f"{name}_") or name.startswith(f"{other}_") for other in known)
    return name not in elsewhere and name != "learning_rate" and not close and not begins
