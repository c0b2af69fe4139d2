"""From another program's config to a recipe: translate, compose, check, write down."""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.checks import check, settled
from toolkit.config.load import Loaded, load, plain, replace
from toolkit.config.suggest import did_you_mean
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.ds_import import import_json
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr
from toolkit.secrets import hide_all
from toolkit.translate.chatglm import translate_chatglm
from toolkit.translate.factory import translate_factory
from toolkit.translate.given import Draft, Given, copy_plain
from toolkit.translate.key import sentence
from toolkit.translate.reading import CHATGLM_NAME, FACTORY_NAME
from toolkit.translate.trainer import translate_evaluation, translate_model, translate_trainer
from toolkit.translate.write import chosen_groups, recipe_text

_LIMITS = frozenset(
    [
        "epochs",
        "schedule_kwargs",
        "deepspeed",
        "saving",
        "keep",
        "report_to",
        "adapters",
        "stage",
        "quantization",
        "freeze_modules",
        "max_samples",
        "val_size",
        "lora_target",
    ]
)
"""Sentences about what a key cannot say here; where it has been taken over, nothing differs."""
_USED = frozenset(("deepspeed", "dataset_dir", "stage"))
"""Keys that are read, but not to set one of ours."""
_ALWAYS = ("batch", "cutoff_len", "two_lengths")
"""Said of these keys whatever their value is, the default too."""


@dataclass(kw_only=True, slots=True)
class Converted:
    """A recipe, and what there is to say about how it came about."""

    text: str
    """The recipe without its header."""
    loaded: Loaded
    """The recipe, composed and checked."""
    world_size: int
    """Ranks that the other program was started on."""
    differs: list[str] = field(default_factory=list)
    """Keys that mean something else here."""
    lost: list[str] = field(default_factory=list)
    """Keys without counterpart."""
    needless: list[str] = field(default_factory=list)
    """Keys without counterpart that change nothing of what is trained."""
    unknown: list[str] = field(default_factory=list)
    """Keys that the other program does not know either."""
    notes: list[str] = field(default_factory=list)
    """What became of the DeepSpeed JSON, and what is missing."""


def convert(given: Given, deepspeed_json: str) -> Converted:
    """Translate a config into a recipe that composes and passes every check that needs no file.

    Args:
        given: the config.
        deepspeed_json: a DeepSpeed JSON that is given beside it; "" takes the one that it names.

    Raises:
        ConfigError: it contradicts itself, has no counterpart, or cannot be.
    """
    draft = Draft()
    copy_plain(given, draft)
    translate_trainer(given, draft)
    if given.program == FACTORY_NAME:
        translate_factory(given, draft)
    elif given.program == CHATGLM_NAME:
        translate_chatglm(given, draft)
    else:
        translate_model(given, draft)
        draft.put("data.validation_fraction", 0.0)
        translate_evaluation(given, draft, has_validation=False)
        draft.notes.append(tr("Training data are not named there: write data.sources (docs/data.md)."))
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _finish(given, draft, deepspeed_json, Path(folder))
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/", "")) from error


def _finish(given: Given, draft: Draft, deepspeed_json: str, folder: Path) -> Converted:
    """Compose, import the JSON, write the recipe, read it again, check it."""
    assert given.world_size is not None  # the batch was computed with it
    base = _compose(folder, draft.groups)
    values = {key: (value, _place(given, source)) for key, (value, source) in draft.values.items()}
    loaded = replace(base, values, layer=1)  # as a recipe's
    # A default of the other program is nobody's choice: a JSON may say something else.
    loaded.explicit = {key for key, (_, source) in draft.values.items() if source}
    notes: list[str] = list(draft.notes)
    if path := deepspeed_json or _named_json(given, folder, notes):
        loaded, told = import_json(path, loaded, given.world_size, strict=True)
        notes += [note.replace(f"{folder}/", "") for note in told]
    elif not given.has("deepspeed"):
        notes.append(tr("No DeepSpeed JSON is named, so nothing is split there; the recipe has zero=stage2."))
    check(loaded, given.world_size, files=False)  # its messages say where the other program's config says so
    groups = chosen_groups(loaded.cfg) | draft.groups
    origins = {key: source for key, (_, source) in draft.values.items() if source}
    if path:
        told_by = {key: place for key, place in loaded.where.items() if place.startswith(path)}
        origins |= {key: place.replace(f"{folder}/", "") for key, place in told_by.items()}
    text = recipe_text(loaded.cfg, _compose(folder, groups).cfg, groups, origins)
    again = folder / "recipe.yaml"
    again.write_text(text, encoding="utf-8")
    final = load([f"recipe={again}"])
    expected, found = plain(loaded.cfg), plain(final.cfg)
    if expected | {"recipe": ""} != found | {"recipe": ""}:
        raise RuntimeError("the recipe says something else than was translated")
    check(final, given.world_size, files=False)
    build_ds_config(settled(final.cfg), given.world_size, final.cfg.train.max_steps or None)
    result = Converted(text=text, loaded=final, world_size=given.world_size, notes=notes)
    _report(given, draft, result)
    return result


def _compose(folder: Path, groups: dict[str, str]) -> Loaded:
    """Return the config of nothing but groups."""
    path = folder / "groups.yaml"
    path.write_text(recipe_text(None, None, groups, {}), encoding="utf-8")
    return load([f"recipe={path}"])


def _place(given: Given, source: str) -> str:
    """Return where the first of the keys that a value comes from stands."""
    first = source.split(", ")[0]
    return f"{given.place(first)} ({first})" if first else given.shown


def _named_json(given: Given, folder: Path, notes: list[str]) -> str:
    """Return the path of the JSON that the config names or holds; "" without one."""
    named = given.get("deepspeed")
    if isinstance(named, str) and named.lstrip().startswith("{"):
        try:
            named = json.loads(named)
        except json.JSONDecodeError as error:
            place = given.place("deepspeed")
            raise ConfigError(tr("{place}: deepspeed is no JSON: {reason}", place=place, reason=error)) from error
    if isinstance(named, dict):
        path = folder / "deepspeed"
        path.write_text(json.dumps(named, indent=1), encoding="utf-8")
        return str(path)
    if named:
        found = next((path for path in (Path(named), given.folder / named) if path.is_file()), None)
        if found:
            return str(found)
        notes.append(
            tr(
                "deepspeed = {file} is not here: the recipe has zero=stage2, whatever it says. Run this again where it "
                "is, or give the file beside the config.",
                file=named,
            )
        )
    return ""


def _report(given: Given, draft: Draft, result: Converted) -> None:
    """Sort every key that is given, and is not taken over as it is, under what there is to say about it."""
    shown = hide_all(given.values)
    differs: dict[str, list[str]] = {}
    needless: dict[str, list[str]] = {}
    used = {name for _, source in draft.values.values() for name in source.split(", ")} | _USED
    for name, value in given.values.items():
        key = given.keys.get(name)
        if key is None:
            result.unknown.append(joined(f"{given.place(name)}: {name}.", did_you_mean(name, given.keys)))
        elif name in draft.lost or (_is_default(value, key.default) and key.says not in _ALWAYS):
            continue
        elif key.to and key.says and key.says not in _LIMITS:
            differs.setdefault(sentence(key.says), []).append(name)
        elif key.to and name not in used:
            reason = tr("has no effect there beside the other settings")
            needless.setdefault(reason, []).append(f"{name} = {shown[name]}")
        elif not key.to and key.is_harmless:
            needless.setdefault(sentence(key.says), []).append(f"{name} = {shown[name]}")
        elif not key.to:
            result.lost.append(f"{name} = {shown[name]}: {sentence(key.says)}")
    for name, reason in draft.lost.items():
        result.lost.append(f"{name} = {shown[name]}: {reason}" if name in shown else f"{name}: {reason}")
    result.differs = [f"{', '.join(names)}: {text}" for text, names in differs.items()]
    result.needless = [f"{', '.join(names)}: {text}" for text, names in needless.items()]


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value says what the program does anyway; empty lists, texts and false are no value."""
    empty = (None, False, "", "none", "no")
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if str(value).lower() == str(default).lower():
        return True
    return (value in empty or value in ([], {})) and default in (*empty, [])
