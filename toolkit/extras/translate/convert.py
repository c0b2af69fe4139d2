"""From another program's config to a recipe: groups, then what differs from them, each line with its source key."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolkit.config import dotted_keys, files, mesh, rule_tables, rules, schema
from toolkit.config.load import JSON, LoadedConfig, escaped, load, replace, to_plain
from toolkit.config.program_keys import sentence
from toolkit.engine import ds_config, ds_import
from toolkit.extras.translate import programs, read
from toolkit.messages import ConfigError, Problems, did_you_mean, joined, parsed_json, shortened, tr
from toolkit.secrets import hide_all

_LIMITS = frozenset(
    (
        *("schedule_kwargs", "deepspeed", "saving", "keep", "report_to", "adapters", "stage", "evaluation", "warmup"),
        *("quantization", "quantization_ways", "freeze_modules", "max_samples", "lora_target", "lora_target_modules"),
        *("model", "batch", "dataset", "dataset_name", "swift_dataset", "axolotl_datasets", "axolotl_rl", "rlhf_type"),
        *("pref_loss", "trl_reward", "axolotl_plugins", "flash_attn", "template", "loss_scale", "optimizers"),
        "packing",
        *("generation", "demo_evaluation", "combine", "liger_parts", "swanlab_mode", "swift_task"),
    )
)
"""Sentences about what a key cannot say here; where it has been taken over, nothing differs."""
_USED = frozenset(("deepspeed", "dataset_dir", "stage", "optim"))
"""Keys that are read, but not to set one of ours."""

_LONGEST_VALUE = 80
_ALWAYS = ("micro_means", "rank_means", "cutoff_len", "two_lengths")
"""Said of these keys whatever their value is, the default too."""


@dataclass(kw_only=True, slots=True)
class Converted:
    """A recipe translated from another program's config, and what is reported about the translation."""

    text: str
    """The recipe without its header."""
    loaded: LoadedConfig
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
    gaps: list[str] = field(default_factory=list)
    """What was assumed, and what is said in files that are not here."""
    notes: list[str] = field(default_factory=list)
    """What became of the DeepSpeed JSON, and of the data."""


def convert(config: read.ForeignConfig, deepspeed_json: str) -> Converted:
    """Translate a config to a recipe that composes and passes every check that needs no file; ConfigError if that is
    not possible. `deepspeed_json`: path of its DeepSpeed JSON, "" for the one that it names, if any. An error about the
    batch also says that one rank was assumed, if it was: that may be its cause.
    """
    knows_ranks = config.world_size is not None  # else `translate` assumes one
    draft = programs.translate(config)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _write_recipe(config, draft, deepspeed_json, Path(folder))
        except ConfigError as error:
            text = str(error).replace(f"{folder}/", "")  # the user has no such directory
            is_of_assumption = not knows_ranks and "batch." in text
            raise ConfigError(joined(text, draft.gaps[0]) if is_of_assumption else text) from error


def _write_recipe(
    config: read.ForeignConfig, draft: programs.RecipeDraft, deepspeed_json: str, folder: Path
) -> Converted:
    """Compose the draft with its DeepSpeed JSON, and write the recipe: the groups that come nearest, and each setting
    in which the config differs from them. `folder`: a temporary directory.
    """
    assert config.world_size is not None  # the batch was computed with it
    notes: list[str] = list(draft.notes)
    has_zero = "zero" in draft.groups  # by the program's own keys; `_named_json` may choose it by a name
    names_deepspeed = config.has("deepspeed") or not {"use_deepspeed", "config_file"}.isdisjoint(config.accelerate)
    path = deepspeed_json or _named_json(config, folder, draft)
    if not path and draft.values.get("optim.name", ("", ""))[0] in ("adafactor", "adagrad"):
        draft.groups.setdefault("zero", "stage0")  # no stage goes with these (config/rules.yaml)
    sections = ds_import.read_json(path, Problems())[0] if path else {}  # `import_json` below tells its problems
    if "optimizer" in sections:
        draft.values.pop("optim.decay", None)  # transformers hands DeepSpeed one list of all parameters
    if "scheduler" in sections:
        draft.values.pop("schedule.name", None)  # transformers does not read its own then
    loaded = _with_values(_compose(folder, draft.groups), config, draft)
    if path:
        loaded, import_notes = ds_import.import_json(path, loaded, config.world_size, strict=True)
        notes += [note.replace(f"{folder}/", "") for note in import_notes]
    elif config.world_size > 1 and not has_zero and not names_deepspeed:
        zero = draft.groups.get("zero", "stage2")
        notes += [tr("No DeepSpeed JSON is named; the recipe has zero={zero}.", zero=zero)]
    rules.check_rules(loaded, config.world_size, files=False)
    loaded = _without_unread(loaded)
    groups = chosen_groups(loaded.cfg) | draft.groups  # what the other program's keys have chosen counts more
    # Our key -> what the comment behind it in the recipe names: keys of the other program, or a line of the JSON.
    origins = {key: source for key, (_, source) in draft.values.items() if source}
    if path:
        from_json = {key: location for key, location in loaded.where.items() if location.startswith(path)}
        origins |= {key: location.replace(f"{folder}/", "") for key, location in from_json.items()}
    differing = _differing(loaded.cfg, _compose(folder, groups).cfg)
    text = recipe_text(groups, list(_lines(differing, "", "", origins)))
    final = _read_again(text, loaded.cfg, config.world_size, folder)
    result = Converted(text=text, loaded=final, world_size=config.world_size, gaps=draft.gaps, notes=notes)
    _sort_keys(config, draft, result)
    return result


def _with_values(base: LoadedConfig, config: read.ForeignConfig, draft: programs.RecipeDraft) -> LoadedConfig:
    """Return `base` with the draft's values, as if a recipe set them; errors about one name the place in `config`."""
    values = {}  # our key -> (value, place)
    for key, (value, source) in draft.values.items():
        first = source.split(", ")[0]
        values[key] = value, f"{config.location(first)} ({first})" if first else config.shown
    loaded = replace(base, values, layer=1)  # 1: a recipe's
    # A default of the other program is nobody's choice: a JSON may say something else.
    loaded.explicit = {key for key, (_, source) in draft.values.items() if source}
    return loaded


def _without_unread(loaded: LoadedConfig) -> LoadedConfig:
    """Return a config in which settings of the DeepSpeed JSON that nothing reads beside the others have their defaults
    again: in a recipe they would be an error. The notes of the import name them.
    """
    unread = {key for row in rule_tables.READ_WHEN if not row.is_read(loaded.cfg) for key in row.settings}
    of_json = {key for key in unread if loaded.layers.get(key) == JSON}
    return replace(loaded, {key: (dotted_keys.get_value(schema.RunConfig(), key), "") for key in of_json})


def _read_again(text: str, cfg: schema.RunConfig, world_size: int, folder: Path) -> LoadedConfig:
    """Return the config of a recipe's text, after a check that it is `cfg`, passes the rules and makes a DeepSpeed
    JSON. `folder`: a temporary directory.
    """
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    final = load([f"recipe={path}"])
    if to_plain(cfg) | {"recipe": ""} != to_plain(final.cfg) | {"recipe": ""}:  # all but the file's name
        raise RuntimeError("the recipe says something else than was translated")
    rules.check_rules(final, world_size, files=False)
    ds_config.build_ds_config(mesh.with_micro_batch(final.cfg), world_size, final.cfg.train.max_steps or None)
    return final


def _compose(folder: Path, groups: dict[str, str]) -> LoadedConfig:
    """Return the config of a recipe that only chooses groups (group -> choice). `folder`: a temporary directory."""
    path = folder / "groups.yaml"
    path.write_text(recipe_text(groups), encoding="utf-8")
    return load([f"recipe={path}"])


def _named_json(config: read.ForeignConfig, folder: Path, draft: programs.RecipeDraft) -> str:
    """Return the path of the DeepSpeed JSON that the config names or contains, which is then written to `folder`; "" if
    there is none. The name of a file that is missing says the stage, as in ds_z3_offload_config.json.
    """
    named = config.get("deepspeed")
    if isinstance(named, str) and named.lstrip().startswith("{"):
        try:
            named = parsed_json(named)
        except ValueError as error:
            location = config.location("deepspeed")
            raise ConfigError("{place}: deepspeed is no JSON: {reason}", place=location, reason=error) from error
    if isinstance(named, dict):
        path = folder / "deepspeed"
        path.write_text(json.dumps(named, indent=1), encoding="utf-8")
        return str(path)
    if named:
        if (json_file := config.find(str(named))).is_file():
            return str(json_file)
        zero = _stage_of_name(Path(str(named)).name, draft.values.get("tuning.method", ("",))[0] == "qlora")
        if zero:
            draft.groups.setdefault("zero", zero)
        draft.gaps.append(
            tr(
                "deepspeed = {file} is not here: the recipe has zero={zero}{by_name}. Run this again where it is, "
                "or put the file next to the config.",
                file=named,
                zero=draft.groups.get("zero", "stage2"),
                by_name=tr(", as its name says") if draft.groups.get("zero") == zero else "",
            )
        )
    return ""


def _stage_of_name(name: str, is_qlora: bool) -> str:
    """Return the choice of the group zero that a DeepSpeed JSON's name stands for, "" for none:
    ds_z3_offload_config.json -> stage3_offload. With QLoRA at most stage2, without offload.
    """
    match = re.search(r"(?:z|zero|stage)[_-]?([0-3])(?![0-9])", name.lower())
    if not match:
        return ""
    stage = min(int(match[1]), 2 if is_qlora else 3)
    is_offloaded = stage > 1 and "offload" in name.lower() and not is_qlora
    return f"stage{stage}{'_offload' if is_offloaded else ''}"


def _sort_keys(config: read.ForeignConfig, draft: programs.RecipeDraft, result: Converted) -> None:
    """Sort every key that is not translated as it is into lists of `result`: differs, lost, needless, unknown. Keys
    with the same sentence share a line: "KEY, KEY: SENTENCE".
    """
    shown = {
        name: shortened(" ".join(str(value).split()), _LONGEST_VALUE) for name, value in hide_all(config.values).items()
    }
    differs: dict[str, list[str]] = {}  # sentence -> keys that it is about, as all of them
    needless: dict[str, list[str]] = {}
    lost: dict[str, list[str]] = {}
    used = {name for _, source in draft.values.values() for name in source.split(", ")} | _USED
    used |= {note.partition(" = ")[0] for note in (*draft.notes, *draft.gaps)}  # which begin with KEY = VALUE
    for name, value in config.values.items():
        key, spelled = config.keys.get(name), config.spelling(name)
        if key is None:
            result.unknown.append(joined(f"{config.location(name)}: {name}.", did_you_mean(name, config.keys)))
            continue
        is_default = _is_default(value, key.default) and key.says not in _ALWAYS
        if is_default or name in draft.lost:  # those of `lost` follow below
            continue
        is_limit, key_and_value = key.says in _LIMITS, f"{spelled} = {shown[name]}"
        if not key.to:
            without_counterpart = needless if key.is_harmless else lost
            without_counterpart.setdefault(sentence(key.says), []).append(key_and_value)
        elif key.says and not is_limit:  # translated to what means something else
            differs.setdefault(sentence(key.says), []).append(spelled)
        elif not {name, spelled} & used:  # it has a counterpart, which this config does not need
            reason = sentence(key.says) if is_limit else tr("has no effect there with the other settings")
            needless.setdefault(reason, []).append(key_and_value)
    for name, reason in draft.lost.items():
        spelled = config.spelling(name)
        lost.setdefault(reason, []).append(f"{spelled} = {shown[name]}" if name in shown else spelled)
    for lines, names_by_text in ((result.differs, differs), (result.lost, lost), (result.needless, needless)):
        lines += [f"{', '.join(names)}: {text}" for text, names in names_by_text.items()]


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value is the program's default anyway: equal as a number or text (a list of one counts as its item, and
    letters' case does not matter), or both are unset, which None, false, 0, "", none, no and empty lists are.
    """
    empty = (None, False, "", "none", "no")
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    are_numbers = all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in (value, default))
    if (are_numbers and value == default) or str(value).lower() == str(default).lower():
        return True
    return (value in empty or value in ([], {})) and default in (*empty, [])


_INDENT = "  "


def chosen_groups(cfg: schema.RunConfig) -> dict[str, str]:
    """Return group -> choice of those that set what a config has, without the groups whose default choice does: with
    LoRA and ZeRO-3 on CPUs {"tuning": "lora", "zero": "stage3_offload"}.
    """
    stage, optimizer = cfg.zero.stage, cfg.zero.offload_optimizer.device
    offload = ""
    if stage == 3 and optimizer is cfg.zero.offload_param.device and optimizer is not schema.Device.none:
        offload = "_nvme" if optimizer is schema.Device.nvme else "_offload"
    elif stage == 2 and optimizer is schema.Device.cpu:
        offload = "_offload"
    groups = {  # group -> (choice, the default one)
        "tuning": (cfg.tuning.method.value, schema.TuningMethod.full.value),
        "optim": (cfg.optim.name.value, schema.OptimizerName.adamw.value),
        "schedule": (cfg.schedule.name.value, schema.ScheduleName.cosine.value),
        "precision": (cfg.precision.dtype.value, "bf16"),
        "zero": (f"stage{stage}{offload}", "stage2"),
    }
    return {name: choice for name, (choice, default) in groups.items() if choice != default}


def recipe_text(groups: Mapping[str, str], body: Sequence[str] = ()) -> str:
    """Return a recipe's YAML text of groups (group -> choice) and lines that set single keys."""
    lines = ["# @package _global_", "defaults:"]
    lines += [f"  - override /{group}: {choice}" for group, choice in sorted(groups.items())]
    lines += ["  - _self_", *(["", *body] if body else [])]
    return "\n".join(lines) + "\n"


def _differing(cfg: Any, base: Any) -> dict[str, Any]:
    """Return the fields in which two configs differ, nested by section; without the recipe's name."""
    differing: dict[str, Any] = {}
    for item in dataclasses.fields(cfg):
        value, base_value = getattr(cfg, item.name), getattr(base, item.name)
        if dataclasses.is_dataclass(value):
            if inner := _differing(value, base_value):
                differing[item.name] = inner
        elif value != base_value and not (isinstance(cfg, schema.RunConfig) and item.name == "recipe"):
            differing[item.name] = value
    return differing


def _lines(tree: Mapping[str, Any], path: str, indent: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the YAML lines of nested settings, each with a comment that names its origin (dotted key -> source), if it
    has one. `path`: dotted key of the section that they are in, "" for none.
    """
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        comment = f"  # {origins[key]}" if key in origins else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:{comment}"
            yield from _lines(value, key, indent + _INDENT, origins)
        elif isinstance(value, list) and value and isinstance(value[0], schema.SourceConfig):
            yield f"{indent}{name}:{comment}"
            for source in value:
                differing = _differing(source, schema.SourceConfig())
                fields = {field: to_plain(setting) for field, setting in differing.items()}
                yield f"{indent}{_INDENT}- {inline(fields)}"
        else:
            yield f"{indent}{name}: {inline(to_plain(value))}{comment}"


def inline(value: Any) -> str:
    """Return a value as one line of YAML, which parses to the same value. It is written as a list of one, as a lone
    text would get a line "..." behind it.
    """
    text = yaml.safe_dump([escaped(value)], default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    text = text.strip()[1:-1]  # without the brackets of the list
    is_read_back = files.parse(f"x: {text}", "").values["x"] == escaped(value)
    return text if is_read_back else json.dumps(escaped(value))  # JSON is YAML too
