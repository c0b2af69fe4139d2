"""A user's DeepSpeed JSON, which replaces the recipe's DeepSpeed settings.

It is read strictly, with the line of each key. What DeepSpeed 0.19.8 ignores is taken out first, and its old names are
replaced; a likely misspelling stays, so that it becomes an error. Each value is translated to the schema's key; what
the schema does not own goes to ds_extra. At the end the JSON that the result makes is compared with the file, so a
setting is either kept, or a note says what became of it.
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
from toolkit.config import dotted_keys, load, mesh, rule_tables, schema
from toolkit.config.files import LARGEST_FILE_BYTES
from toolkit.engine import ds_config
from toolkit.messages import ConfigError, Problems, file_bytes, joined, parsed_json, reason_of, tr, type_name

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTOTP = "tensor_parallel.autotp_size"
"""0 is our 1."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8},
    "lion": {"betas": [0.9, 0.99]},
    "muon": {"betas": [0.9, 0.95], "eps": 1e-10, "momentum": 0.95},
    "sgd": {"momentum": 0.0},
    "adagrad": {"eps": 1e-10},
    "adafactor": {},
}
"""What DeepSpeed's optimizers, or PyTorch's, take where the file is silent; the schema's defaults differ."""
SCHEDULES = {scheduler: schedule.value for schedule, scheduler in ds_config.SCHEDULERS.items()}
WARMUP_DEFAULTS: dict[str, Any] = {
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_lr": 0.0,
    "warmup_min_ratio": 0.0,
    "cos_min_ratio": 0.0001,
}
"""The same of DeepSpeed's schedulers."""
_KNOWN = ("zero_optimization.cpu_offload_use_pin_memory", "scheduler.params.last_batch_iteration")
"""Names that could be taken for misspellings, and that change nothing."""
_LIKELY = 0.8
"""How alike a name must be to a known one to be a misspelling of it."""
_OTHER_TYPES: dict[str, type] = {
    **dict.fromkeys(("fp16.enabled", "bf16.enabled"), bool),
    **dict.fromkeys(("optimizer.type", "scheduler.type", "zero_optimization.zenflow.select_strategy"), str),
    **dict.fromkeys(("optimizer.params.adam_w_mode", "optimizer.params.fused"), bool),
    **dict.fromkeys(("optimizer.params.muon_lr", "scheduler.params.warmup_max_lr"), float),
    **{f"scheduler.params.{name}": float for name in WARMUP_DEFAULTS if name != "warmup_type"},
    "scheduler.params.total_num_steps": int,
    **{key: bool if key.endswith(".enabled") else str for key in ds_config.MONITORS},
}
"""Of the keys that have no equal in the schema."""
_LONGEST_VALUE = 60
"""Characters of a value that a message shows."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]')


@dataclass(kw_only=True, slots=True)
class SectionImport:
    """One file on its way into the schema: what it gives, what was taken from it, what there is to say."""

    path: str
    loaded: load.LoadedConfig
    world_size: int | None
    given: dict[str, Any]
    """Dotted DeepSpeed key -> value, without nulls."""
    where: dict[str, str]
    strict: bool
    """Whether what contradicts the recipe is an error."""
    taken: dict[str, tuple[object, str]] = field(default_factory=dict)
    """Schema key -> (value, position)."""
    contradictions: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """What of the recipe the file beats."""
    notes: list[str] = field(default_factory=list)
    noted: set[str] = field(default_factory=set)
    """DeepSpeed keys that the result need not repeat, because a note explains them."""

    def has(self, key: str) -> bool:
        """Whether the file gives a value of its own, not "auto"."""
        return key in self.given and self.given[key] != "auto"

    def has_section(self, section: str) -> bool:
        """Whether the file has a key or a section, even an empty one."""
        return any(key == section or key.startswith(f"{section}.") for key in self.given)

    def position(self, key: str) -> str:
        """Return "file:line" of a DeepSpeed key, or the file."""
        return self.where.get(key, self.path)

    def origin(self, schema_key: str) -> str:
        """Return where the recipe's value comes from."""
        return self.loaded.where.get(schema_key, tr("schema default"))

    def is_typed(self, schema_key: str) -> bool:
        """Whether the command line sets a schema key."""
        return self.loaded.layers.get(schema_key, 0) >= load.TYPED

    def now(self, schema_key: str) -> Any:
        """Return the value of a schema key as it will be."""
        return (
            self.taken[schema_key][0] if schema_key in self.taken else ds_config.read_key(self.loaded.cfg, schema_key)
        )

    def error(self, key: str, message: str, /, **values: object) -> ConfigError:
        """Return the error that points at a key of the file; the message is a template if it has values."""
        return ConfigError(self._at(key, message, values))

    def note(self, key: str, message: str, /, **values: object) -> None:
        """Tell the user something about a key ("": the file), which the result then need not repeat."""
        self.notes.append(self._at(key, message, values))
        self.noted.add(key)

    def _at(self, key: str, message: str, values: dict[str, object]) -> str:
        return f"{self.position(key)}: {messages.tr(message, **values) if values else messages.translated(message)}"

    def take(self, schema_key: str, value: Any, key: str) -> None:
        """Set a schema key from a DeepSpeed key: it beats the recipe, and loses to the command line."""
        value = self._typed(schema_key, value, key)
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
            elif self.is_typed(schema_key):
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
        self.taken[schema_key] = (value, self.position(key))

    def _typed(self, schema_key: str, value: Any, key: str) -> Any:
        """Return the value as the schema's type; 1e9 is a whole number, "true" is no boolean."""
        ours = dotted_keys.get_value(self.loaded.cfg, schema_key)
        if isinstance(ours, Enum):
            members = [member.value for member in type(ours)]
            if value not in members:
                names = ", ".join(members)
                raise self.error(key, "{key} = {value} must be one of {names}.", key=key, value=value, names=names)
            return value
        kind: type = {"batch.micro_per_gpu": int, "optim.torch": bool}.get(schema_key, type(ours))
        return self.as_type(kind, value, key)

    def as_type(self, kind: type, value: Any, key: str) -> Any:
        """Return a value as a type; an error that points at its key if it is of another."""
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not kind:
            wanted = type_name(kind)
            with suppress(ValueError):  # a number in quotes
                meant = json.loads(value.lower()) if isinstance(value, str) else None
                if type(meant) in (kind, int if kind is float else kind):
                    wanted = joined(wanted, tr("(write {number})", number=str(value).lower()))
            raise self.error(key, "{key} = {value} must be {kind}.", key=key, value=_shown(value), kind=wanted)
        item = str if key == "comms_logger.prof_ops" else (int, float)
        if isinstance(value, list) and not all(isinstance(part, item) and not isinstance(part, bool) for part in value):
            wanted = tr("a list of texts") if item is str else tr("a list of numbers")
            raise self.error(key, "{key} = {value} must be {kind}.", key=key, value=_shown(value), kind=wanted)
        return value


def import_json(
    path: str, loaded: load.LoadedConfig, world_size: int | None, *, strict: bool = False
) -> tuple[load.LoadedConfig, list[str]]:
    """Translate a DeepSpeed JSON into the run's settings.
    With `strict`, a file that contradicts the recipe is an error; else it beats the recipe, and loses to the command
    line. Returns the settings, and notes: what "auto" became, what has no effect, what is renamed.
    """
    problems = Problems()
    values, where, ignored = read_json(path, problems)
    task = SectionImport(
        path=path,
        loaded=loaded,
        world_size=world_size,
        given=dict(dotted_keys.leaves(values)),
        where=where,
        strict=strict,
    )
    for key, sentence in ignored.items():
        task.note(key, sentence)
    _check_types(task, problems)
    problems.raise_all()
    _defaults(task)
    for key in task.given:
        if task.has(key) and key in ds_config.SAME and key not in (BATCH, MICRO):  # these need more than a new name
            task.take(ds_config.SAME[key], max(1, task.given[key]) if key == AUTOTP else task.given[key], key)
    for name, ours in mesh.partition_config().items():
        key = f"tensor_parallel.partition_config.{name}"
        if task.has(key) and task.given[key] != ours:
            raise task.error(
                key, "{key}: how parameters are split is fixed here, by their names. Leave it out.", key=key
            )
    for translate in (_batch, _precision, _optimizer, _scheduler, _switches, _monitors):
        translate(task)
    if task.contradictions:
        raise ConfigError("\n".join(task.contradictions))
    extra: dict[str, Any] = {}
    foreign = {
        key: value for key, value in task.given.items() if key not in ds_config.OWNED and key != "steps_per_print"
    }
    for key, value in (dict(dotted_keys.leaves(loaded.cfg.ds_extra)) | foreign).items():
        if value == "auto":
            task.note(key, '{key}: no setting of the recipe can replace "auto": omitted.', key=key)
        elif value != {}:
            dotted_keys.set_leaf(extra, key, value)
    if task.replaced:
        task.notes.append(tr("{path} takes the place of: {keys}.", path=path, keys=", ".join(task.replaced)))
    result = load.replace(loaded, task.taken | ({"ds_extra": (extra, path)} if extra else {}), load.JSON)
    _compare(task, result)
    return result, task.notes


def _check_types(task: SectionImport, problems: Problems) -> None:
    """Report every value of a wrong type: what it means together with others is looked at once all are right."""
    for key in filter(task.has, task.given):
        value, ours = task.given[key], ds_config.SAME.get(key, "")
        if key in (BATCH, MICRO, STEPS):
            if type(value) not in (int, float) or value != int(value) or value < 1:
                shown = _shown(value)
                wrong = task.error(key, "{key} = {value} must be a whole number of at least 1.", key=key, value=shown)
                problems.add(wrong)
        elif ours and not (key == AUTOTP and value == 0):
            problems.attempt(task._typed, ours, value, key)
        elif key in _OTHER_TYPES:
            problems.attempt(task.as_type, _OTHER_TYPES[key], value, key)


def _shown(value: Any) -> str:
    """Return a value as its file has it."""
    return messages.shortened(json.dumps(value), _LONGEST_VALUE)


def _defaults(task: SectionImport) -> None:
    """Where the file is silent, DeepSpeed's own defaults hold, except for keys that the recipe sets explicitly."""
    plain, stage = schema.RunConfig(), task.given.get("zero_optimization.stage", 0)
    silent = {
        key: ds_config.read_key(plain, ours)
        for key, ours in ds_config.SAME.items()
        if ours.startswith(("zero.", "precision."))
    }
    silent |= {"zero_optimization.stage": 0, "zero_optimization.overlap_comm": stage == 3}
    if task.has_section("optimizer"):
        name = str(task.given.get("optimizer.type", "adam")).lower()
        params = {**OPTIMIZER_DEFAULTS.get(name, OPTIMIZER_DEFAULTS["adam"]), "weight_decay": 0.0}
        silent |= {f"optimizer.params.{key}": value for key, value in params.items()}
    silent = {ds_config.SAME[key]: value for key, value in silent.items() if key not in task.given}
    changed = {
        ours: value
        for ours, value in silent.items()
        if ours not in task.loaded.explicit and ds_config.read_key(task.loaded.cfg, ours) != value
    }
    task.taken |= {ours: (value, task.path) for ours, value in changed.items()}
    if changed:
        task.note(
            "",
            "what it does not name is as in DeepSpeed: {changed}.",
            changed=", ".join(f"{ours} = {value}" for ours, value in changed.items()),
        )
    for key, schema_key in (("gradient_clipping", "train.gradient_clipping"), ("scheduler", "schedule.name")):
        if not task.has_section(key):
            task.note(
                "",
                "{key} is not given; used is {schema} = {value} ({origin}).",
                key=key,
                schema=schema_key,
                value=ds_config.read_key(task.loaded.cfg, schema_key),
                origin=task.origin(schema_key),
            )


def _compare(task: SectionImport, result: load.LoadedConfig) -> None:
    """Compare the JSON that the result makes with the file; note what "auto" became and what has no effect."""
    cfg = mesh.with_micro_batch(result.cfg)
    ranks = task.world_size or max(1, cfg.batch.global_size // mesh.micro_rows(cfg)) * mesh.model_ranks(cfg)
    ours = dict(dotted_keys.leaves(ds_config.build_ds_config(cfg, ranks).values))
    if cfg is not result.cfg:  # both are found by training
        ours |= dict.fromkeys((MICRO, STEPS), schema.AUTO)
    # Where the data decides how many steps there are, a scheduler has its settings all the same.
    any_steps = cfg.train.max_steps or 10**9
    made = dict(dotted_keys.leaves(ds_config.build_ds_config(cfg, ranks, any_steps).values)) | ours
    idle = []
    for key, value in task.given.items():
        if value == {} or key in task.noted or (key == STEPS and task.world_size is None):
            continue
        schema_key = ds_config.OWNED.get(key, f"ds_extra.{key}")
        if value == "auto":
            shown = ours.get(key, ds_config.read_key(result.cfg, schema_key))
            if schema_key == "schedule.warmup_steps" and not shown and cfg.schedule.warmup_ratio:
                schema_key, shown = "schedule.warmup_ratio", cfg.schedule.warmup_ratio
            if schema_key == "train.max_steps" and not shown:
                shown = tr("as many as the data gives")
            task.note(
                key,
                "{key}: auto -> {value} ({schema}, {origin})",
                key=key,
                value=shown,
                schema=schema_key,
                origin=task.origin(schema_key),
            )
        elif key not in made and key in ds_config.OWNED:
            idle.append(key)
        elif not equal(made.get(key), value):
            raise AssertionError(f"{task.position(key)}: {key} = {value!r} became {made.get(key)!r}")
    if idle:
        task.note("", "no effect with the other settings: {keys}.", keys=", ".join(idle))


def equal(left: Any, right: Any) -> bool:
    """Whether values of two JSONs mean the same: numbers up to rounding, 1 and 1.0, but not 1 and true."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)) and bool not in (type(left), type(right)):
        return abs(left - right) <= 1e-12 * max(abs(left), abs(right))
    return bool(left == right)


def _batch(task: SectionImport) -> None:
    """Two of the three sizes determine the third, once the number of ranks is known."""
    if task.has(MICRO):
        task.take("batch.micro_per_gpu", task.given[MICRO], MICRO)
    if task.has(BATCH):
        task.take("batch.global_size", task.given[BATCH], BATCH)
    of_model = math.prod(task.now(f"parallel.{name}") for name in ("tensor", "sequence", "pipeline"))
    shares = (task.world_size or 1) // max(1, of_model) or 1  # ranks whose rows differ
    size, rows = task.now("batch.global_size"), task.now("batch.micro_per_gpu")
    if not task.has(STEPS) and not task.strict and rows != schema.AUTO and size % (rows * shares):
        # Where the file gives one of two sizes, the recipe's other one has to fit to it.
        is_free = {key: not task.has(key) and not task.is_typed(ds_config.SAME[key]) for key in (BATCH, MICRO)}
        if task.has(MICRO) and is_free[BATCH]:
            task.take("batch.global_size", rows * shares, MICRO)  # as DeepSpeed, which then accumulates nothing
        elif task.has(BATCH) and is_free[MICRO] and size % shares == 0:
            task.take("batch.micro_per_gpu", math.gcd(size // shares, rows), BATCH)
    if not task.has(STEPS):
        return
    if task.world_size is not None:
        _accumulate(task, task.given[STEPS], shares)
    elif not (task.has(BATCH) and task.has(MICRO)):
        task.note(
            STEPS,
            "{key} = {value} says nothing without the number of ranks: give world_size=N. Taken is "
            "batch.global_size = {size}.",
            key=STEPS,
            value=task.given[STEPS],
            size=task.now("batch.global_size"),
        )
        if task.strict:
            raise ConfigError(task.notes[-1])


def _accumulate(task: SectionImport, times: int, shares: int) -> None:
    """Take the size that the file leaves open from its accumulation, or compare its sizes with each other."""
    if task.now("batch.micro_per_gpu") == schema.AUTO:
        raise task.error(
            STEPS,
            "{key} = {value} cannot be with batch.micro_per_gpu = auto, which decides about it. Leave it out.",
            key=STEPS,
            value=times,
        )
    if task.is_typed("batch.global_size") or (task.has(BATCH) and task.is_typed("batch.micro_per_gpu")):
        task.note(STEPS, "{key} = {value} gives way to the batch sizes of the command line.", key=STEPS, value=times)
        return
    expected = times * shares * task.now("batch.micro_per_gpu")
    is_free = "batch.micro_per_gpu" not in task.loaded.explicit or not task.strict
    if not task.has(BATCH):
        task.take("batch.global_size", int(expected), STEPS)
    elif not task.has(MICRO) and is_free:
        task.take("batch.micro_per_gpu", task.given[BATCH] // (times * shares) or 1, STEPS)
        expected = times * shares * task.now("batch.micro_per_gpu")
    if task.now("batch.global_size") != expected and not task.contradictions:
        raise task.error(
            BATCH,
            "train_batch_size = {total} is not train_micro_batch_size_per_gpu {micro} x "
            "gradient_accumulation_steps {steps} x {ranks} ranks = {expected}.",
            total=task.now("batch.global_size"),
            micro=task.now("batch.micro_per_gpu"),
            steps=times,
            ranks=shares,
            expected=expected,
        )


def _precision(task: SectionImport) -> None:
    """fp16 and bf16 sections become precision.dtype; neither of them means fp32."""
    switches = {f"{dtype}.enabled": task.given.get(f"{dtype}.enabled", False) for dtype in ("fp16", "bf16")}
    enabled = [key for key, value in switches.items() if value is True]
    if len(enabled) > 1:
        raise task.error("bf16.enabled", "fp16 and bf16 are both enabled. Keep one of them.")
    if enabled:
        task.take("precision.dtype", enabled[0].partition(".")[0], enabled[0])
    elif "auto" not in switches.values():
        stated = [key for key in switches if key in task.given]
        if stated or "precision.dtype" not in task.loaded.explicit:
            task.take("precision.dtype", "fp32", (stated or ["fp16.enabled"])[0])


def _optimizer(task: SectionImport) -> None:
    """DeepSpeed's type "Adam" is AdamW unless adam_w_mode is false; PyTorch's own is always its fused one here."""
    key, mode, fused = "optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.fused"
    if not task.has(key):
        return
    name = str(task.given[key]).lower()
    if name in REMOVED_OPTIMIZERS:
        raise task.error(key, "{value} was removed from DeepSpeed. Use AdamW or Adam.", value=task.given[key])
    names = {
        kind.ds_type.lower(): (ours.value, kind.ds_type)
        for ours, kind in rule_tables.OPTIMIZERS.items()
        if kind.ds_type
    }
    if name not in names:
        shown_names = ", ".join(shown for _, shown in names.values())
        raise task.error(key, "{value} is not available. There are {names}.", value=task.given[key], names=shown_names)
    task.given[key] = names[name][1]  # DeepSpeed does not tell upper case from lower
    is_adamw = name == "adam" and task.given.get(mode) is not False
    task.take("optim.name", "adamw" if is_adamw else names[name][0], key)
    if is_adamw:
        task.note(key, '"Adam" without "adam_w_mode": false means AdamW in DeepSpeed: optim.name = adamw.')
    if name == "adamw" and task.given.get(mode) is False:
        task.note(mode, '"adam_w_mode": false has no effect with type AdamW.')
    if task.has(fused) and bool(task.given[fused]) != (task.now("optim.torch") is True):
        task.note(fused, '"fused" follows "torch_adam": PyTorch\'s Adam is its fused one here.')
    if name != "muon":
        return
    # Muon's own rate beats lr, which is Adam's then; ZeRO-3 has no reduce-scatter for it.
    muon_lr, adam_lr, scatter = (
        "optimizer.params.muon_lr",
        "optimizer.params.adam_lr",
        "zero_optimization.reduce_scatter",
    )
    if task.has(muon_lr):
        others = task.given.get(adam_lr, task.now("optim.lr"))
        task.take("optim.lr", task.given[muon_lr], muon_lr)
        if not equal(others, task.given[muon_lr]):
            task.take("optim.adam_lr", others, adam_lr)
        task.noted |= {muon_lr, adam_lr, "optimizer.params.lr"}
    if task.given.get(scatter) is True and task.now("zero.stage") == 3:
        task.note(scatter, "reduce_scatter is off: Muon needs whole gradients under ZeRO-3.")


def _scheduler(task: SectionImport) -> None:
    """The three warm-up schedulers have equals here; what they leave out is DeepSpeed's default, not ours."""
    key, total_key = "scheduler.type", "scheduler.params.total_num_steps"
    if not task.has(key):
        return
    name = str(task.given[key])
    if name not in SCHEDULES:
        shown_names = ", ".join(SCHEDULES)
        raise task.error(key, "scheduler {value} is not available. There are {names}.", value=name, names=shown_names)
    task.take("schedule.name", SCHEDULES[name], key)
    is_cosine, rate = name == "WarmupCosineLR", task.now("optim.lr")
    _peak(task, name, rate)
    lowest, lowest_key = _parameter(task, "warmup_min_ratio" if is_cosine else "warmup_min_lr")
    if lowest is not None:
        task.take("schedule.warmup_min_ratio", float(lowest) if is_cosine else lowest / (rate or 1.0), lowest_key)
    if lowest and name == "WarmupDecayLR":
        task.note(
            lowest_key,
            "DeepSpeed's WarmupDecayLR falls to warmup_min_lr = {rate}; here the learning rate falls to 0.",
            rate=lowest,
        )
    floor, floor_key = _parameter(task, "cos_min_ratio") if is_cosine else (None, "")
    if floor is not None:
        task.take("schedule.min_lr_ratio", floor, floor_key)
    kind, kind_key = _parameter(task, "warmup_type")
    if kind not in (None, "log", "linear"):  # deepspeed/runtime/lr_schedules.py warns, and takes log
        task.note(kind_key, "DeepSpeed has no warmup_type {kind} and takes log.", kind=repr(kind))
        kind = "log"
    if kind is not None:
        task.take("schedule.warmup_type", kind, kind_key)
    steps, steps_key = _parameter(task, "warmup_num_steps")
    total = task.given.get(total_key) or task.now("train.max_steps")
    ratio = task.now("schedule.warmup_ratio")
    is_ratio = isinstance(total, int) and total > 0 and math.ceil(round(ratio * total, 6)) == steps
    if steps is not None and not is_ratio:  # the recipe's fraction may say the same in other words
        task.take("schedule.warmup_steps", steps, steps_key)
        task.take("schedule.warmup_ratio", 0.0, steps_key)
    if task.has(total_key) and name != "WarmupLR":
        task.take("train.max_steps", task.given[total_key], total_key)


def _parameter(task: SectionImport, name: str) -> tuple[Any, str]:
    """Return a scheduler parameter, or DeepSpeed's default for it, or None for "auto"; and the key to point at."""
    key = f"scheduler.params.{name}"
    value = task.given.get(key, WARMUP_DEFAULTS[name])
    if value == "auto":
        return None, key
    return value, key


def _peak(task: SectionImport, name: str, rate: float) -> None:
    """A schedule that warms up to another rate than the optimizer's has no counterpart here."""
    key = "scheduler.params.warmup_max_lr"
    peak = task.given.get(key, 0.001 if name == "WarmupDecayLR" else rate)
    if name == "WarmupCosineLR" or peak == "auto":
        return
    if task.has(key) and "optimizer.params.lr" not in task.given and not task.strict:
        task.take("optim.lr", peak, key)
    elif task.is_typed("optim.lr"):
        task.noted.add(key)
    elif not equal(peak, rate):
        raise task.error(
            key,
            "{name} warms up to warmup_max_lr = {peak}, but the optimizer's lr is {rate}. Make them equal "
            "(without warmup_max_lr, DeepSpeed's WarmupDecayLR takes 0.001).",
            name=name,
            peak=peak,
            rate=rate,
        )


def _switches(task: SectionImport) -> None:
    """Sections that are on where they are present, and keys that have no effect here."""
    recomputation, zenflow = "activation_checkpointing", "zero_optimization.zenflow"
    if task.has_section(recomputation):
        if not task.now("train.activation_checkpointing.enabled"):
            task.note(
                recomputation, "the section turns recomputation on: train.activation_checkpointing.enabled = true."
            )
        task.take("train.activation_checkpointing.enabled", True, recomputation)
    if task.given.get(f"{recomputation}.partition_activations") is True:
        task.note(
            f"{recomputation}.partition_activations",
            "partition_activations has no effect: there is no model parallelism.",
        )
    if task.given.get(f"{recomputation}.cpu_checkpointing") is True:
        task.note(
            f"{recomputation}.cpu_checkpointing",
            "cpu_checkpointing moves the kept activations to host memory; on CPU ranks it has no effect.",
        )
    unread = {"zero_optimization.allgather_partitions": False, "zero_optimization.offload_optimizer.fast_init": True}
    for key, value in unread.items():
        if task.given.get(key) is value:
            task.note(key, "{key} has no effect: DeepSpeed 0.19.8 does not read it.", key=key)
    if task.has_section(zenflow):
        task.take("zero.zenflow.enabled", True, zenflow)
    strategy = f"{zenflow}.select_strategy"
    if task.has(strategy) and task.given[strategy] != "step":
        raise task.error(
            strategy,
            "{key} = {value} counts by a data loader that DeepSpeed does not have here. Write step, and steps as "
            "select_interval.",
            key=strategy,
            value=task.given[strategy],
        )
    if "steps_per_print" in task.given:
        task.note("steps_per_print", "steps_per_print has no effect; the progress lines are ours, see train.log_every.")


def _monitors(task: SectionImport) -> None:
    """DeepSpeed's monitors stay off: what they were asked to write our own trackers write, to the same places."""
    names = {"wandb.project": "project", "wandb.group": "group", "wandb.team": "entity"}
    for section, tracker in {"tensorboard": "tensorboard", "csv_monitor": "csv", "wandb": "wandb"}.items():
        switch, output, job = (f"{section}.{name}" for name in ("enabled", "output_path", "job_name"))
        task.noted |= {key for key in task.given if key.startswith(f"{section}.")}
        if not task.has(switch) or task.given[switch] is False:
            continue
        task.take(f"track.{tracker}.enabled", task.given[switch], switch)
        task.note(
            switch,
            "DeepSpeed's monitor stays off: track.{tracker} writes in its place (docs/tracking.md).",
            tracker=tracker,
        )
        for key, name in names.items():
            if key.startswith(f"{section}.") and task.has(key):
                task.take(f"track.{tracker}.{name}", task.given[key], key)
        if tracker == "tensorboard" and task.given.get(output):
            folder = f"{task.given[output]}/{task.given.get(job, 'DeepSpeedJobName')}"
            task.take("track.tensorboard.dir", folder, output)
        elif tracker == "csv" and (output in task.given or job in task.given):
            key = output if output in task.given else job
            task.note(key, "{key} has no effect: metrics.csv is written into the run directory.", key=key)


def read_json(path: str, problems: Problems) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Read a DeepSpeed JSON; what DeepSpeed ignores in it is left out. `problems` receives names that it does not know.
    Returns the nested dictionary without nulls (which mean "not given"); dotted key -> "file:line"; and dotted key -> a
    sentence about what DeepSpeed ignores or has renamed.
    """
    try:
        text = file_bytes(Path(path), LARGEST_FILE_BYTES).decode("utf-8-sig")
        values = _without_nulls(parsed_json(text))
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
    where, notes = _lines_of_keys(text, path), dict[str, str]()
    values = _without_ignored(values, ds_config.KEYS, "", where, notes)
    for key in ds_config.wrong_names(values):
        problems.add_made(lambda key: ConfigError(f"{where.get(key, path)}: {ds_config.wrong_name(key)}"), key)
    return values, where, notes


def _without_nulls(value: Any) -> Any:
    """Return what a DeepSpeed JSON gives; ValueError for an infinite number, which no key takes."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(tr("{value} is no number", value="Infinity"))
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _lines_of_keys(text: str, path: str) -> dict[str, str]:
    """Return dotted key -> "file:line" of valid JSON, not inside lists; an error for a key twice in an object."""
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
            position = f"{path}:{text.count(chr(10), 0, token.start()) + 1}"
            if here in where:
                raise ConfigError(
                    "{place}: '{key}' stands twice, first at {first}.", place=position, key=here, first=where[here]
                )
            where[here] = position
        elif mark not in ":,":
            word = mark
    return where


def _without_ignored(
    section: dict[str, Any], keys: dict[str, Any], prefix: str, where: dict[str, str], notes: dict[str, str]
) -> dict[str, Any]:
    """Return a section of a DeepSpeed JSON without what DeepSpeed ignores in it, and with today's names.
    `where` (dotted key -> "file:line") receives the lines of renamed keys, `notes` (dotted key -> sentence) what became
    of keys.
    """
    used: dict[str, Any] = {}
    is_disabled = bool(prefix) and section.get("enabled") is False
    for name, value in section.items():
        key = prefix + name
        if is_disabled and name != "enabled":
            notes[prefix.rstrip(".")] = tr("{key} is disabled: its other keys have no effect.", key=prefix.rstrip("."))
        elif " or " not in ds_config.RENAMED.get(key, " or "):
            today = shown = ds_config.RENAMED[key]
            short, new = today.removeprefix(prefix), value
            for path, line in list(where.items()):
                if path.startswith(key):
                    where.setdefault(today + path.removeprefix(key), line)
            if name.startswith("cpu_offload"):  # a switch, and a section today
                new = {"device": "cpu"} if value is True else None
                shown = f"{today}.device = {'cpu' if value is True else 'none'}"
            elif isinstance(value, dict):
                new = _without_ignored(value, keys[short], f"{today}.", where, notes)
            if new is not None:
                used.setdefault(short, new)
            notes[key] = tr("{key} is an old name, read as {today}.", key=key, today=shown)
        elif key == "data_efficiency" and isinstance(value, dict) and value.get("enabled") is False:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)  # known to it, and not used here if it is on
        elif name in keys and isinstance(value, dict) and keys[name]:
            used[name] = _without_ignored(value, keys[name], f"{key}.", where, notes)
        elif name in keys or not _is_ignored(key, name, keys):
            used[name] = value
        elif key in ds_config.INSTEAD:
            notes[key] = tr(
                "DeepSpeed ignores {key}; {schema} does what it did.", key=key, schema=ds_config.INSTEAD[key][0]
            )
        else:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)
    return used


def _is_ignored(key: str, name: str, keys: dict[str, Any]) -> bool:
    """Whether an unknown name is no more than that: a comment, a removed feature, what others read."""
    if (
        key in ds_config.REMOVED
        or key in _KNOWN
        or name.startswith(("_", "#", "//"))
        or name.lower().startswith("comment")
    ):
        return True
    elsewhere = {other.rpartition(".")[2] for other in ds_config.json_keys()}
    close = difflib.get_close_matches(name, list(keys), n=1, cutoff=_LIKELY)
    begins = any(other.startswith(f"{name}_") or name.startswith(f"{other}_") for other in keys)
    return name not in elsewhere and name != "learning_rate" and not close and not begins
