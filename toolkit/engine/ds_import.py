"""Import of a user's DeepSpeed JSON, which replaces the recipe's DeepSpeed settings.

Keys that DeepSpeed 0.19.8 ignores are removed first, and old names are replaced; a likely misspelling stays, so that it
becomes an error with its line. Each value is assigned to the schema's key for it, else to ds_extra. At the end the JSON
that the result makes is compared with the file: each setting is in effect, or a note explains why not.
"""

import difflib
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from toolkit import messages
from toolkit.config import dotted_keys, load, mesh, rule_tables, schema, tensor_split
from toolkit.config.files import LARGEST_FILE_BYTES
from toolkit.engine import ds_config, ds_keys
from toolkit.messages import ConfigError, Problems, file_bytes, joined, parsed_json, reason_of, tr, type_name

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTOTP = "tensor_parallel.autotp_size"
"""0 in DeepSpeed, where layers are not split, is 1 in the schema."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8},
    "lion": {"betas": [0.9, 0.99]},
    "muon": {"betas": [0.9, 0.95], "eps": 1e-10, "momentum": 0.95},
    "sgd": {"momentum": 0.0},
    "adagrad": {"eps": 1e-10},
    "adafactor": {},
}
"""Defaults of DeepSpeed's and PyTorch's optimizers, for parameters that a file omits; the schema's differ."""
SCHEDULES = {scheduler: schedule.value for schedule, scheduler in ds_config.SCHEDULERS.items()}
WARMUP_DEFAULTS: dict[str, Any] = {
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_lr": 0.0,
    "warmup_min_ratio": 0.0,
    "cos_min_ratio": 0.0001,
}
"""Defaults of DeepSpeed's schedulers."""
_HARMLESS = (
    "zero_optimization.cpu_offload_use_pin_memory",
    "scheduler.params.last_batch_iteration",
    "comms_config",
    "data_efficiency",
)
"""Keys without effect, in files for DeepSpeed nevertheless."""
_SIMILARITY = 0.8
"""From this similarity on (difflib) an unknown name is a misspelling."""
_DERIVED_TYPES: dict[str, type] = {
    **dict.fromkeys(("fp16.enabled", "bf16.enabled", "torch_autocast.enabled"), bool),
    **dict.fromkeys(("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"), bool),
    "torch_autocast.dtype": str,
    **dict.fromkeys(("optimizer.type", "scheduler.type", "zero_optimization.zenflow.select_strategy"), str),
    **dict.fromkeys(("optimizer.params.adam_w_mode", "optimizer.params.fused"), bool),
    **dict.fromkeys(("optimizer.params.muon_lr", "scheduler.params.warmup_max_lr"), float),
    **{f"scheduler.params.{name}": float for name in WARMUP_DEFAULTS if name != "warmup_type"},
    "scheduler.params.total_num_steps": int,
    **{key: bool if key.endswith(".enabled") else str for key in ds_config.MONITORS},
}
"""Types of the DeepSpeed keys that are not in `ds_config.SAME`."""
_AUTOCAST_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
"""DeepSpeed's names of types (0.19.8, runtime/config.py, DtypeEnum) -> values of precision.dtype."""
_LONGEST_VALUE = 60
"""Characters of a value that a message quotes."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]')


@dataclass(kw_only=True, slots=True)
class DsImport:
    """A DeepSpeed JSON during import: its values, the settings made of them, and the notes to print."""

    path: str
    loaded: load.LoadedConfig
    world_size: int | None
    values: dict[str, Any]
    """Dotted DeepSpeed key -> value, without nulls."""
    where: dict[str, str]
    """Dotted DeepSpeed key -> "file:line"."""
    strict: bool
    """Whether a value that contradicts the recipe is an error."""
    settings: dict[str, tuple[object, str]] = field(default_factory=dict)
    """Schema key -> (new value, position)."""
    contradictions: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """Settings of the recipe that the file replaces."""
    notes: list[str] = field(default_factory=list)
    explained: set[str] = field(default_factory=set)
    """DeepSpeed keys that the result's JSON may lack, because a note explains them."""

    def has(self, key: str) -> bool:
        """Whether the file sets a key to something else than "auto"."""
        return key in self.values and self.values[key] != "auto"

    def has_section(self, section: str) -> bool:
        """Whether the file has a key or a section, even an empty one."""
        return any(key == section or key.startswith(f"{section}.") for key in self.values)

    def position(self, key: str) -> str:
        """Return "file:line" of a DeepSpeed key, or the file."""
        return self.where.get(key, self.path)

    def origin(self, schema_key: str) -> str:
        """Return where the value of a schema key comes from: "file:line", the command line or a default."""
        return self.loaded.where.get(schema_key, tr("schema default"))

    def is_on_command_line(self, schema_key: str) -> bool:
        """Whether the command line sets a schema key."""
        return self.loaded.layers.get(schema_key, 0) >= load.TYPED

    def current(self, schema_key: str) -> Any:
        """Return the value of a schema key: the one assigned from the file, else the recipe's."""
        if schema_key in self.settings:
            return self.settings[schema_key][0]
        return ds_config.read_key(self.loaded.cfg, schema_key)

    def error(self, key: str, message: str, /, **values: object) -> ConfigError:
        """Return an error about a key, with its line; with values the message is a template."""
        return ConfigError(self._at(key, message, values))

    def note(self, key: str, message: str, /, **values: object) -> None:
        """Add a note about a key ("": the file), and take the key out of the comparison at the end."""
        self.notes.append(self._at(key, message, values))
        self.explained.add(key)

    def _at(self, key: str, message: str, values: dict[str, object]) -> str:
        """Return a message after the position of its key."""
        return f"{self.position(key)}: {messages.tr(message, **values) if values else messages.translated(message)}"

    def assign(self, schema_key: str, value: Any, key: str) -> None:
        """Set a schema key to the `value` of a DeepSpeed key, which overrides the recipe, but not the command line.
        With `strict`, a value that is not the recipe's is also added to `contradictions`.
        """
        value = self._as_schema_type(schema_key, value, key)
        ours = ds_config.read_key(self.loaded.cfg, schema_key)
        if schema_key in self.loaded.explicit and not equal(ours, value):
            if self.strict:
                self.contradictions.append(
                    tr(
                        "{place}: {key} gives {schema} = {theirs}, but {origin} says {mine}. "
                        'Change one of them, or write "auto" in the JSON to take the recipe\'s.',
                        place=self.position(key),
                        key=key,
                        schema=schema_key,
                        theirs=value,
                        origin=self.origin(schema_key),
                        mine=ours,
                    )
                )
            elif self.is_on_command_line(schema_key):
                self.note(
                    key,
                    "{key} = {theirs} gives way to {schema} = {mine} on the command line.",
                    key=key,
                    theirs=value,
                    schema=schema_key,
                    mine=ours,
                )
                return
            else:
                self.replaced.append(f"{schema_key} = {ours} ({self.origin(schema_key)}) -> {value}")
        self.settings[schema_key] = (value, self.position(key))

    def _as_schema_type(self, schema_key: str, value: Any, key: str) -> Any:
        """Return a value in the type of its schema key: 1e9 as an int, but "true" is no bool. ConfigError if it has
        another type, or is no member of the key's enum.
        """
        ours = dotted_keys.get_value(self.loaded.cfg, schema_key)
        if isinstance(ours, Enum):
            members = [member.value for member in type(ours)]
            if value not in members:
                names = ", ".join(members)
                raise self.error(key, "{key} = {value} must be one of {names}.", key=key, value=value, names=names)
            return value
        # The recipe may have "auto" in these two, whose type says nothing about the file's.
        kind: type = {"batch.micro_per_gpu": int, "optim.torch": bool}.get(schema_key, type(ours))
        return self.as_type(kind, value, key)

    def as_type(self, kind: type, value: Any, key: str) -> Any:
        """Return a value as an int, float, bool, str or list; whole floats and ints are converted into each other.
        ConfigError, with the line of its key, if it is of another type, or a list of other items than the key takes.
        """
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not kind:
            expected_type = type_name(kind)
            accepted = (int, float) if kind is float else (kind,)
            with suppress(ValueError):  # of a number, true or false in quotes, what to write: "3" -> 3, "True" -> true
                if isinstance(value, str) and type(json.loads(value.lower())) in accepted:
                    expected_type = joined(expected_type, tr("(write {number})", number=str(value).lower()))
            raise self.error(key, "{key} = {value} must be {kind}.", key=key, value=_shown(value), kind=expected_type)
        item_type = str if key == "comms_logger.prof_ops" else (int, float)  # of a list
        if isinstance(value, list) and any(isinstance(part, bool) or not isinstance(part, item_type) for part in value):
            expected_type = tr("a list of texts") if item_type is str else tr("a list of numbers")
            raise self.error(key, "{key} = {value} must be {kind}.", key=key, value=_shown(value), kind=expected_type)
        return value


def import_json(
    path: str, loaded: load.LoadedConfig, world_size: int | None, *, strict: bool = False
) -> tuple[load.LoadedConfig, list[str]]:
    """Return a run's config with the settings of a DeepSpeed JSON, and notes: what "auto" became, what has no effect or
    an old name. The file overrides the recipe, but not the command line; with `strict` a contradiction between file and
    recipe is an error. `world_size`: number of ranks, None if it is not known.
    """
    problems = Problems()
    tree, where, ignored = read_json(path, problems)
    ds = DsImport(
        path=path,
        loaded=loaded,
        world_size=world_size,
        values=dict(dotted_keys.leaves(tree)),
        where=where,
        strict=strict,
    )
    for key, sentence in ignored.items():
        ds.note(key, sentence)
    _check_types(ds, problems)
    problems.raise_all()
    _apply_deepspeed_defaults(ds)
    for key in ds.values:
        if ds.has(key) and key in ds_config.SAME and key not in (BATCH, MICRO):  # for these see `_import_batch`
            value = max(1, ds.values[key]) if key == AUTOTP else ds.values[key]
            ds.assign(ds_config.SAME[key], value, key)
    for name, ours in tensor_split.partition_config().items():
        key = f"tensor_parallel.partition_config.{name}"
        if ds.has(key) and ds.values[key] != ours:
            raise ds.error(key, "{key}: how parameters are split is fixed here, by their names. Leave it out.", key=key)
    _import_batch(ds)
    _import_precision(ds)
    _import_optimizer(ds)
    _import_scheduler(ds)
    _import_switches(ds)
    _import_monitors(ds)
    if ds.contradictions:
        raise ConfigError("\n".join(ds.contradictions))
    extra = _extra_settings(ds)
    if ds.replaced:
        ds.notes.append(tr("{path} takes the place of: {keys}.", path=path, keys=", ".join(ds.replaced)))
    result = load.replace(loaded, ds.settings | ({"ds_extra": (extra, path)} if extra else {}), load.JSON)
    _check_round_trip(ds, result)
    return result, ds.notes


def _extra_settings(ds: DsImport) -> dict[str, Any]:
    """Return the new `ds_extra`: the recipe's, and over it what the file sets that the schema has no key for. What is
    "auto" is left out with a note, and empty sections silently.
    """
    settings = dict(dotted_keys.leaves(ds.loaded.cfg.ds_extra))
    owned = {*ds_config.OWNED, "steps_per_print"}
    settings |= {key: value for key, value in ds.values.items() if key not in owned}
    extra: dict[str, Any] = {}
    for key, value in settings.items():
        if value == "auto":
            ds.note(key, '{key}: no setting of the recipe can replace "auto": omitted.', key=key)
        elif value != {}:
            dotted_keys.set_leaf(extra, key, value)
    return extra


def _check_types(ds: DsImport, problems: Problems) -> None:
    """Add an error to `problems` for each value of a wrong type, before values are compared with each other."""
    for key in filter(ds.has, ds.values):
        value, ours = ds.values[key], ds_config.SAME.get(key, "")
        if key in (BATCH, MICRO, STEPS):
            if type(value) not in (int, float) or value != int(value) or value < 1:
                shown = _shown(value)
                wrong = ds.error(key, "{key} = {value} must be a whole number of at least 1.", key=key, value=shown)
                problems.add(wrong)
        elif ours and not (key == AUTOTP and value == 0):
            problems.attempt(ds._as_schema_type, ours, value, key)
        elif key in _DERIVED_TYPES:
            problems.attempt(ds.as_type, _DERIVED_TYPES[key], value, key)


def _shown(value: Any) -> str:
    """Return a value as JSON, cut to `_LONGEST_VALUE` characters."""
    return messages.shortened(json.dumps(value), _LONGEST_VALUE)


def _apply_deepspeed_defaults(ds: DsImport) -> None:
    """Set keys that the file omits to DeepSpeed's defaults, unless the recipe sets them; note which, and what of the
    recipe stays in effect.
    """
    default_config, stage = schema.RunConfig(), ds.values.get("zero_optimization.stage", 0)
    defaults = {
        key: ds_config.read_key(default_config, ours)
        for key, ours in ds_config.SAME.items()
        if ours.startswith(("zero.", "precision."))
    }
    defaults |= {"zero_optimization.stage": 0, "zero_optimization.overlap_comm": stage == 3}  # not as the schema's
    if ds.has_section("optimizer"):
        name = str(ds.values.get("optimizer.type", "adam")).lower()
        params = {**OPTIMIZER_DEFAULTS.get(name, OPTIMIZER_DEFAULTS["adam"]), "weight_decay": 0.0}
        defaults |= {f"optimizer.params.{key}": value for key, value in params.items()}
    omitted = {ds_config.SAME[key]: value for key, value in defaults.items() if key not in ds.values}
    changed = {
        ours: value
        for ours, value in omitted.items()
        if ours not in ds.loaded.explicit and ds_config.read_key(ds.loaded.cfg, ours) != value
    }
    ds.settings |= {ours: (value, ds.path) for ours, value in changed.items()}
    if changed:
        ds.note(
            "",
            "what it does not name is as in DeepSpeed: {changed}.",
            changed=", ".join(f"{ours} = {value}" for ours, value in changed.items()),
        )
    for key, schema_key in (("gradient_clipping", "train.gradient_clipping"), ("scheduler", "schedule.name")):
        if not ds.has_section(key):
            ds.note(
                "",
                "{key} is not given; used is {schema} = {value} ({origin}).",
                key=key,
                schema=schema_key,
                value=ds_config.read_key(ds.loaded.cfg, schema_key),
                origin=ds.origin(schema_key),
            )


def _check_round_trip(ds: DsImport, result: load.LoadedConfig) -> None:
    """Compare the file with the JSON that the resulting config makes: note what "auto" became and what has no effect;
    AssertionError if anything else differs.
    """
    cfg = mesh.with_micro_batch(result.cfg)
    # Of an unknown number of ranks, as many as compute the global batch without accumulation.
    ranks = ds.world_size or max(1, cfg.batch.global_size // mesh.micro_rows(cfg)) * mesh.model_ranks(cfg)
    ours = dict(dotted_keys.leaves(ds_config.build_ds_config(cfg, ranks).values))
    if cfg is not result.cfg:  # its micro-batch is auto: a run determines it, and with it the accumulation
        ours |= dict.fromkeys((MICRO, STEPS), schema.AUTO)
    # If the number of steps depends on the data, any number shows the scheduler's settings.
    any_steps = cfg.train.max_steps or 10**9
    rebuilt = dict(dotted_keys.leaves(ds_config.build_ds_config(cfg, ranks, any_steps).values)) | ours
    without_effect = []
    for key, value in ds.values.items():
        if value == {} or key in ds.explained or (key == STEPS and ds.world_size is None):
            continue
        if value == "auto":
            _note_auto(ds, key, ours, result.cfg)
        elif key not in rebuilt and key in ds_config.OWNED:
            without_effect.append(key)
        elif not equal(rebuilt.get(key), value):
            raise AssertionError(f"{ds.position(key)}: {key} = {value!r} became {rebuilt.get(key)!r}")
    if without_effect:
        ds.note("", "no effect with the other settings: {keys}.", keys=", ".join(without_effect))


def _note_auto(ds: DsImport, key: str, ours: dict[str, Any], cfg: schema.RunConfig) -> None:
    """Note what the "auto" of a DeepSpeed key became: its value in `ours`, the resulting JSON (dotted key -> value), or
    in the resulting config.
    """
    schema_key = ds_config.OWNED.get(key, f"ds_extra.{key}")
    value = ours.get(key, ds_config.read_key(cfg, schema_key))
    if schema_key == "schedule.warmup_steps" and not value and cfg.schedule.warmup_ratio:
        schema_key, value = "schedule.warmup_ratio", cfg.schedule.warmup_ratio
    if schema_key == "train.max_steps" and not value:
        value = tr("as many as the data gives")
    ds.note(
        key,
        "{key}: auto -> {value} ({schema}, {origin})",
        key=key,
        value=value,
        schema=schema_key,
        origin=ds.origin(schema_key),
    )


def equal(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: numbers up to rounding, so that 1 is 1.0, but not true."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)) and bool not in (type(left), type(right)):
        return abs(left - right) <= 1e-12 * max(abs(left), abs(right))
    return bool(left == right)


def _import_batch(ds: DsImport) -> None:
    """Import micro-batch, global batch and accumulation steps. Any two of them determine the third: global = micro x
    steps x data-parallel ranks. Of what the file omits, the recipe's value is adapted. ConfigError if they contradict
    each other, or with `strict` if the number of ranks that decides is unknown.
    """
    if ds.has(MICRO):
        ds.assign("batch.micro_per_gpu", ds.values[MICRO], MICRO)
    if ds.has(BATCH):
        ds.assign("batch.global_size", ds.values[BATCH], BATCH)
    model_ranks = math.prod(ds.current(f"parallel.{name}") for name in ("tensor", "sequence", "pipeline"))
    data_ranks = max(1, (ds.world_size or 1) // max(1, model_ranks))  # data-parallel ranks
    size, rows = ds.current("batch.global_size"), ds.current("batch.micro_per_gpu")
    if not ds.has(STEPS) and not ds.strict and rows != schema.AUTO and size % (rows * data_ranks):
        # If the file gives one of the two sizes, the recipe's other one is adapted to it.
        is_free = {key: not ds.has(key) and not ds.is_on_command_line(ds_config.SAME[key]) for key in (BATCH, MICRO)}
        if ds.has(MICRO) and is_free[BATCH]:
            ds.assign("batch.global_size", rows * data_ranks, MICRO)  # as DeepSpeed, which then accumulates nothing
        elif ds.has(BATCH) and is_free[MICRO] and size % data_ranks == 0:
            ds.assign("batch.micro_per_gpu", math.gcd(size // data_ranks, rows), BATCH)  # a divisor of both
    if not ds.has(STEPS):
        return
    if ds.world_size is not None:
        _import_accumulation(ds, ds.values[STEPS], data_ranks)
    elif not (ds.has(BATCH) and ds.has(MICRO)):
        ds.note(
            STEPS,
            "{key} = {value} says nothing without the number of ranks: give world_size=N. Taken is "
            "batch.global_size = {size}.",
            key=STEPS,
            value=ds.values[STEPS],
            size=ds.current("batch.global_size"),
        )
        if ds.strict:
            raise ConfigError(ds.notes[-1])


def _import_accumulation(ds: DsImport, steps: int, data_ranks: int) -> None:
    """Compute the batch size that the file omits from its accumulation `steps` and the number of data-parallel ranks;
    ConfigError if its sizes contradict each other.
    """
    if ds.current("batch.micro_per_gpu") == schema.AUTO:
        raise ds.error(
            STEPS,
            "{key} = {value} cannot be with batch.micro_per_gpu = auto, which decides about it. Leave it out.",
            key=STEPS,
            value=steps,
        )
    if ds.is_on_command_line("batch.global_size") or (ds.has(BATCH) and ds.is_on_command_line("batch.micro_per_gpu")):
        ds.note(STEPS, "{key} = {value} gives way to the batch sizes of the command line.", key=STEPS, value=steps)
        return
    expected = steps * data_ranks * ds.current("batch.micro_per_gpu")
    is_free = "batch.micro_per_gpu" not in ds.loaded.explicit or not ds.strict
    if not ds.has(BATCH):
        ds.assign("batch.global_size", int(expected), STEPS)
    elif not ds.has(MICRO) and is_free:
        ds.assign("batch.micro_per_gpu", ds.values[BATCH] // (steps * data_ranks) or 1, STEPS)
        expected = steps * data_ranks * ds.current("batch.micro_per_gpu")
    if ds.current("batch.global_size") != expected and not ds.contradictions:
        raise ds.error(
            BATCH,
            "train_batch_size = {total} is not train_micro_batch_size_per_gpu {micro} x "
            "gradient_accumulation_steps {steps} x {ranks} ranks = {expected}.",
            total=ds.current("batch.global_size"),
            micro=ds.current("batch.micro_per_gpu"),
            steps=steps,
            ranks=data_ranks,
            expected=expected,
        )


def _import_precision(ds: DsImport) -> None:
    """Import the sections fp16, bf16 and torch_autocast as precision.dtype. Without any of them it is fp32, unless the
    recipe or the command line chose one; "auto" leaves the recipe's.
    """
    switches = ("fp16.enabled", "bf16.enabled")
    fp16, bf16 = (ds.values.get(key, False) for key in switches)  # true, false or "auto"
    uses_autocast = ds.values.get("torch_autocast.enabled") is True
    if fp16 is True and bf16 is True:
        raise ds.error("bf16.enabled", "fp16 and bf16 are both enabled. Keep one of them.")
    if fp16 is True:
        ds.assign("precision.dtype", "fp16", "fp16.enabled")
    elif bf16 is True:
        ds.assign("precision.dtype", "bf16", "bf16.enabled")
    elif uses_autocast:
        name = ds.values.get("torch_autocast.dtype", "bfloat16").removeprefix("torch.").lower()
        ds.assign("precision.dtype", _AUTOCAST_DTYPES.get(name, name), "torch_autocast.dtype")
    elif "auto" not in (fp16, bf16):
        switched_off = [key for key in switches if key in ds.values]
        if switched_off:
            ds.assign("precision.dtype", "fp32", switched_off[0])
        elif "precision.dtype" not in ds.loaded.explicit:
            ds.assign("precision.dtype", "fp32", "fp16.enabled")  # DeepSpeed's default is false
    # The note says what becomes of these keys; without it they are switched off.
    ds.explained |= {key for key in ds.values if key.startswith("torch_autocast.")}
    if uses_autocast:
        ds.note(
            "torch_autocast.enabled",
            "torch_autocast is not used. In its place is precision.dtype = {dtype}: products in the same precision, "
            "weights in it too, and their fp32 masters in the optimizer (docs/deepspeed.md).",
            dtype=ds.current("precision.dtype"),
        )
    _import_bf16_states(ds)


def _import_bf16_states(ds: DsImport) -> None:
    """Import master weights and optimizer states in bf16; offloaded ones become fp32, as DeepSpeed's Adam on the CPU
    would round them to nearest.
    """
    weights, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    has_weights, has_states = ds.values.get(weights) is True, ds.values.get(states) is True
    ds.explained |= {weights, states}
    if not (has_weights or has_states):
        return
    is_offloaded = ds.current("zero.offload_optimizer.device") != "none"
    if is_offloaded and has_weights:
        ds.note(
            weights,
            "master weights and optimizer states stay in fp32: in bf16, DeepSpeed's Adam on the CPU would lose most "
            "updates by rounding (docs/optimizers.md).",
        )
    elif has_weights != has_states:  # as DeepSpeed asks for (0.19.8, base_optimizer.py, _configure_master_weights)
        raise ds.error(
            weights if has_weights else states,
            "bf16_master_weights_and_grads and bf16_optimizer_states need each other. Set both to true, or leave both "
            "out.",
        )
    else:
        ds.assign("precision.optimizer_states", "bf16", states)


def _import_optimizer(ds: DsImport) -> None:
    """Import the optimizer. DeepSpeed's "Adam" is AdamW unless adam_w_mode is false; PyTorch's Adam is always fused."""
    key, mode, fused = "optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.fused"
    if not ds.has(key):
        return
    name = str(ds.values[key]).lower()
    if name in REMOVED_OPTIMIZERS:
        raise ds.error(key, "{value} was removed from DeepSpeed. Use AdamW or Adam.", value=ds.values[key])
    available = {kind.ds_type.lower(): ours for ours, kind in rule_tables.OPTIMIZERS.items() if kind.ds_type}
    if name not in available:
        shown_names = ", ".join(rule_tables.OPTIMIZERS[ours].ds_type for ours in available.values())
        raise ds.error(key, "{value} is not available. There are {names}.", value=ds.values[key], names=shown_names)
    # DeepSpeed does not tell upper case from lower.
    ds.values[key] = rule_tables.OPTIMIZERS[available[name]].ds_type
    is_adamw = name == "adam" and ds.values.get(mode) is not False
    ds.assign("optim.name", "adamw" if is_adamw else available[name].value, key)
    if is_adamw:
        ds.note(key, '"Adam" without "adam_w_mode": false means AdamW in DeepSpeed: optim.name = adamw.')
    if name == "adamw" and ds.values.get(mode) is False:
        ds.note(mode, '"adam_w_mode": false has no effect with type AdamW.')
    if ds.has(fused) and bool(ds.values[fused]) != (ds.current("optim.torch") is True):
        ds.note(fused, '"fused" follows "torch_adam": PyTorch\'s Adam is its fused one here.')
    if name == "muon":
        _import_muon(ds)


def _import_muon(ds: DsImport) -> None:
    """Import Muon's two learning rates: of matrices (muon_lr, or lr without it), and of what Adam updates (adam_lr, or
    lr). Note that ZeRO-3 has no reduce-scatter for Muon.
    """
    muon_lr, adam_lr = "optimizer.params.muon_lr", "optimizer.params.adam_lr"
    scatter = "zero_optimization.reduce_scatter"
    if ds.has(muon_lr):
        adams_rate = ds.values.get(adam_lr, ds.current("optim.lr"))
        ds.assign("optim.lr", ds.values[muon_lr], muon_lr)
        if not equal(adams_rate, ds.values[muon_lr]):
            ds.assign("optim.adam_lr", adams_rate, adam_lr)
        ds.explained |= {muon_lr, adam_lr, "optimizer.params.lr"}
    if ds.values.get(scatter) is True and ds.current("zero.stage") == 3:
        ds.note(scatter, "reduce_scatter is off: Muon needs whole gradients under ZeRO-3.")


def _import_scheduler(ds: DsImport) -> None:
    """Import one of the three warm-up schedulers; parameters that the file omits have DeepSpeed's defaults."""
    key, total_key = "scheduler.type", "scheduler.params.total_num_steps"
    if not ds.has(key):
        return
    name = str(ds.values[key])
    if name not in SCHEDULES:
        shown_names = ", ".join(SCHEDULES)
        raise ds.error(key, "scheduler {value} is not available. There are {names}.", value=name, names=shown_names)
    ds.assign("schedule.name", SCHEDULES[name], key)
    rate = ds.current("optim.lr")
    _check_peak_rate(ds, name, rate)
    if name == "WarmupCosineLR":  # gives rates as fractions of the peak rate, as the schema does
        for parameter, schema_key in (("warmup_min_ratio", "warmup_min_ratio"), ("cos_min_ratio", "min_lr_ratio")):
            value, value_key = _scheduler_parameter(ds, parameter)
            if value is not None:
                ds.assign(f"schedule.{schema_key}", float(value), value_key)
    else:
        lowest, lowest_key = _scheduler_parameter(ds, "warmup_min_lr")
        if lowest is not None:
            ds.assign("schedule.warmup_min_ratio", lowest / (rate or 1.0), lowest_key)
        if lowest and name == "WarmupDecayLR":
            ds.note(
                lowest_key,
                "DeepSpeed's WarmupDecayLR falls to warmup_min_lr = {rate}; here the learning rate falls to 0.",
                rate=lowest,
            )
    _import_warmup(ds)
    if ds.has(total_key) and name != "WarmupLR":
        ds.assign("train.max_steps", ds.values[total_key], total_key)


def _import_warmup(ds: DsImport) -> None:
    """Import type and steps of the warm-up; the recipe's `warmup_ratio` stays if it gives as many steps, else is 0."""
    kind, kind_key = _scheduler_parameter(ds, "warmup_type")
    if kind not in (None, "log", "linear"):  # deepspeed/runtime/lr_schedules.py warns, and takes log
        ds.note(kind_key, "DeepSpeed has no warmup_type {kind} and takes log.", kind=repr(kind))
        kind = "log"
    if kind is not None:
        ds.assign("schedule.warmup_type", kind, kind_key)
    steps, steps_key = _scheduler_parameter(ds, "warmup_num_steps")
    total = ds.values.get("scheduler.params.total_num_steps") or ds.current("train.max_steps")
    ratio = ds.current("schedule.warmup_ratio")
    is_ratio = isinstance(total, int) and total > 0 and ds_config.ratio_of_steps(ratio, total) == steps
    if steps is not None and not is_ratio:
        ds.assign("schedule.warmup_steps", steps, steps_key)
        ds.assign("schedule.warmup_ratio", 0.0, steps_key)


def _scheduler_parameter(ds: DsImport, name: str) -> tuple[Any, str]:
    """Return the value of a scheduler parameter (DeepSpeed's default if the file omits it, None if it is "auto"), and
    its dotted key for messages.
    """
    key = f"scheduler.params.{name}"
    value = ds.values.get(key, WARMUP_DEFAULTS[name])
    return None if value == "auto" else value, key


def _check_peak_rate(ds: DsImport, name: str, rate: float) -> None:
    """Raise ConfigError if the scheduler `name` warms up to another learning rate than the optimizer's `rate`. If the
    file gives the peak alone, and `strict` is off, it becomes `optim.lr` instead.
    """
    key = "scheduler.params.warmup_max_lr"
    peak = ds.values.get(key, 0.001 if name == "WarmupDecayLR" else rate)  # DeepSpeed's defaults
    if name == "WarmupCosineLR" or peak == "auto":
        return
    if ds.has(key) and "optimizer.params.lr" not in ds.values and not ds.strict:
        ds.assign("optim.lr", peak, key)
    elif ds.is_on_command_line("optim.lr"):  # which the schedule then warms up to
        ds.explained.add(key)
    elif not equal(peak, rate):
        raise ds.error(
            key,
            "{name} warms up to warmup_max_lr = {peak}, but the optimizer's lr is {rate}. Make them equal "
            "(without warmup_max_lr, DeepSpeed's WarmupDecayLR takes 0.001).",
            name=name,
            peak=peak,
            rate=rate,
        )


def _import_switches(ds: DsImport) -> None:
    """Import sections whose presence switches them on, and note keys that have no effect."""
    recomputation, zenflow = "activation_checkpointing", "zero_optimization.zenflow"
    if ds.has_section(recomputation):
        if not ds.current("train.activation_checkpointing.enabled"):
            ds.note(recomputation, "the section turns recomputation on: train.activation_checkpointing.enabled = true.")
        ds.assign("train.activation_checkpointing.enabled", True, recomputation)
    if ds.values.get(f"{recomputation}.partition_activations") is True:
        ds.note(
            f"{recomputation}.partition_activations",
            "partition_activations has no effect: there is no model parallelism.",
        )
    if ds.values.get(f"{recomputation}.cpu_checkpointing") is True:
        ds.note(
            f"{recomputation}.cpu_checkpointing",
            "cpu_checkpointing moves the kept activations to host memory; on CPU ranks it has no effect.",
        )
    ineffective = {
        "zero_optimization.allgather_partitions": False,
        "zero_optimization.offload_optimizer.fast_init": True,
    }
    for key, value in ineffective.items():
        if ds.values.get(key) is value:
            ds.note(key, "{key} has no effect: DeepSpeed 0.19.8 does not read it.", key=key)
    if ds.has_section(zenflow):
        ds.assign("zero.zenflow.enabled", True, zenflow)
    strategy = f"{zenflow}.select_strategy"
    if ds.has(strategy) and ds.values[strategy] != "step":
        raise ds.error(
            strategy,
            "{key} = {value} counts by a data loader that DeepSpeed does not have here. Write step, and steps as "
            "select_interval.",
            key=strategy,
            value=ds.values[strategy],
        )
    if "steps_per_print" in ds.values:
        ds.note("steps_per_print", "steps_per_print has no effect; the progress lines are ours, see train.log_every.")


def _import_monitors(ds: DsImport) -> None:
    """Turn on the toolkit's trackers in place of DeepSpeed's monitors, which stay off; they write to the same paths."""
    for section, tracker in {"tensorboard": "tensorboard", "csv_monitor": "csv", "wandb": "wandb"}.items():
        switch, output, job = f"{section}.enabled", f"{section}.output_path", f"{section}.job_name"
        ds.explained |= {key for key in ds.values if key.startswith(f"{section}.")}
        if not ds.has(switch) or ds.values[switch] is False:
            continue
        ds.assign(f"track.{tracker}.enabled", ds.values[switch], switch)
        ds.note(
            switch,
            "DeepSpeed's monitor stays off: track.{tracker} writes in its place (docs/tracking.md).",
            tracker=tracker,
        )
        if tracker == "wandb":
            for key in filter(ds.has, ("wandb.project", "wandb.group", "wandb.team")):
                ds.assign(ds_config.MONITORS[key], ds.values[key], key)
        elif tracker == "tensorboard" and ds.values.get(output):
            folder = f"{ds.values[output]}/{ds.values.get(job, 'DeepSpeedJobName')}"
            ds.assign("track.tensorboard.dir", folder, output)
        elif tracker == "csv" and (output in ds.values or job in ds.values):
            key = output if output in ds.values else job
            ds.note(key, "{key} has no effect: metrics.csv is written into the run directory.", key=key)


def read_json(path: str, problems: Problems) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Read a DeepSpeed JSON, without the keys that DeepSpeed ignores. Unknown keys are added to `problems`.

    Returns:
        The nested dictionary without nulls, which mean "not given"; dotted key -> "file:line"; and dotted key -> a
        sentence, of each key that DeepSpeed ignores or has renamed.

    Raises:
        ConfigError: the file cannot be read, is no JSON object, has a key twice, or no key of DeepSpeed's at all.
    """
    try:
        text = file_bytes(Path(path), LARGEST_FILE_BYTES).decode("utf-8-sig")
        values = _without_nulls(parsed_json(text))
    except OSError as error:
        raise ConfigError(
            "deepspeed_json = {path} cannot be read: {reason}", path=path, reason=reason_of(error)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("{file}: {reason}", file=path, reason=reason_of(error)) from error
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
    where, notes = _lines_of_keys(text, path), dict[str, str]()
    names = list(values)
    values = _without_ignored(values, ds_keys.KEYS, "", where, notes)
    if names and not values and not any(name in ds_keys.RENAMED or _is_harmless(name, name) for name in names):
        raise ConfigError("{path}: none of its keys is DeepSpeed's; the first is '{key}'.", path=path, key=names[0])
    for key in ds_keys.wrong_keys(values):
        problems.add_lazily(lambda key: ConfigError(f"{where.get(key, path)}: {ds_keys.key_problem(key)}"), key)
    return values, where, notes


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the nulls in its objects; ValueError for an infinite number."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(tr("{value} is no number", value="Infinity"))
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _lines_of_keys(text: str, path: str) -> dict[str, str]:
    """Return dotted key -> "file:line" for the keys of valid JSON, except in lists; ConfigError for a duplicate. The
    text is split into strings and punctuation, as Python's parser tells no lines.
    """
    where: dict[str, str] = {}
    prefixes: list[str | None] = []  # of the keys in each open object, such as "fp16."; None inside a list
    key = string = ""  # the last key, with its prefix; the last string, which is a key if ":" follows
    for token in _TOKEN.finditer(text):
        mark = token.group()
        prefix = prefixes[-1] if prefixes else ""
        if mark == "{" and prefix is not None:
            prefixes.append(f"{key}." if key else "")  # "" in the outermost object
        elif mark in "{[":
            prefixes.append(None)
        elif mark in "}]":
            prefixes.pop()
        elif mark == ":" and prefix is not None:
            key = prefix + json.loads(string)
            position = f"{path}:{text.count(chr(10), 0, token.start()) + 1}"
            if key in where:
                raise ConfigError(
                    "{place}: '{key}' stands twice, first at {first}.", place=position, key=key, first=where[key]
                )
            where[key] = position
        elif mark not in ":,":  # a string, in its quotes
            string = mark
    return where


def _without_ignored(
    section: dict[str, Any], keys: dict[str, Any], prefix: str, where: dict[str, str], notes: dict[str, str]
) -> dict[str, Any]:
    """Return a section of a DeepSpeed JSON without the keys that DeepSpeed ignores, and with today's names.

    `keys`: those that the section may have, as in `ds_keys.KEYS`; `prefix`: what precedes them, such as "fp16.". Adds
    the lines of renamed keys to `where` (dotted key -> "file:line"), and sentences about what became of keys to `notes`
    (dotted key -> sentence).
    """
    result: dict[str, Any] = {}
    is_disabled = bool(prefix) and section.get("enabled") is False
    for name, value in section.items():
        key = prefix + name
        today = ds_keys.RENAMED.get(key, "")
        if is_disabled and name != "enabled":
            notes[prefix.rstrip(".")] = tr("{key} is disabled: its other keys have no effect.", key=prefix.rstrip("."))
        elif today and " or " not in today:  # with a choice of new names it is an error, see `key_problem`
            name_today, shown = today.removeprefix(prefix), today
            for path, line in list(where.items()):  # of the key, and of those below it
                if path.startswith(key):
                    where.setdefault(today + path.removeprefix(key), line)
            if name.startswith("cpu_offload"):  # a switch, and today a section: true -> {"device": "cpu"}
                shown = f"{today}.device = {'cpu' if value is True else 'none'}"
                value = {"device": "cpu"} if value is True else None
            elif isinstance(value, dict):
                value = _without_ignored(value, keys[name_today], f"{today}.", where, notes)
            if value is not None:
                result.setdefault(name_today, value)  # a key with the name of today takes precedence
            notes[key] = tr("{key} is an old name, read as {today}.", key=key, today=shown)
        elif key == "data_efficiency" and isinstance(value, dict) and value.get("enabled") is False:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)  # an enabled one is an error, see `key_problem`
        elif name in keys and isinstance(value, dict) and keys[name]:
            result[name] = _without_ignored(value, keys[name], f"{key}.", where, notes)
        elif name in keys or not _is_ignored(key, name, keys):
            result[name] = value
        elif key in ds_keys.INSTEAD:
            notes[key] = tr(
                "DeepSpeed ignores {key}; {schema} does what it did.", key=key, schema=ds_keys.INSTEAD[key][0]
            )
        else:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)
    return result


def _is_harmless(key: str, name: str) -> bool:
    """Whether a key that DeepSpeed does not know belongs in its files: a comment, or a removed feature. `name`: the
    last part of the dotted `key`.
    """
    return (
        key in {*ds_keys.REMOVED, *ds_keys.INSTEAD, *_HARMLESS}
        or name.startswith(("_", "#", "//"))
        or name.lower().startswith("comment")
    )


def _is_ignored(key: str, name: str, keys: dict[str, Any]) -> bool:
    """Whether an unknown key can be left out: a comment, a removed feature or another program's key. False for what is
    probably misspelt or in the wrong section. `name`: the last part of the dotted `key`; `keys`: those that its section
    may have.
    """
    if _is_harmless(key, name):
        return True
    known_names = {other.rpartition(".")[2] for other in ds_keys.json_keys()}
    is_misplaced = name == "learning_rate" or name in known_names or key in ds_keys.ELSEWHERE
    is_close = bool(difflib.get_close_matches(name, list(keys), n=1, cutoff=_SIMILARITY))
    shares_start = any(other.startswith(f"{name}_") or name.startswith(f"{other}_") for other in keys)
    return not (is_misplaced or is_close or shares_start)
