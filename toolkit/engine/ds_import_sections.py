"""The sections of a DeepSpeed JSON that need more than a new name: batch, precision, optimizer, scheduler."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.load import TYPED, LoadedConfig
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import AUTO
from toolkit.engine.ds_config import SCHEDULERS, read_key
from toolkit.errors import ConfigError
from toolkit.messages import tr

REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
_MUON = {"betas": [0.9, 0.95], "eps": 1e-10, "momentum": 0.95}
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8},
    "lion": {"betas": [0.9, 0.99]},
    "muon": _MUON,
    "sgd": {"momentum": 0.0},
    "adagrad": {"eps": 1e-10},
    "adafactor": {},
}
SCHEDULES = {scheduler: schedule.value for schedule, scheduler in SCHEDULERS.items()}
# What DeepSpeed's schedulers take where the file is silent.
WARMUP_DEFAULTS: dict[str, Any] = {
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_lr": 0.0,
    "warmup_min_ratio": 0.0,
    "cos_min_ratio": 0.0001,
}


@dataclass(kw_only=True, slots=True)
class SectionImport:
    """One file on its way into the schema: what it gives, what was taken from it, what there is to say."""

    path: str
    loaded: LoadedConfig
    world_size: int | None
    given: dict[str, Any]
    """Dotted DeepSpeed key -> value, without nulls."""
    where: dict[str, str]
    taken: dict[str, tuple[object, str]] = field(default_factory=dict)
    """Schema key -> (value, place)."""
    strict: bool = False
    """Whether what contradicts the recipe is an error."""
    contradictions: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """What of the recipe the file beats."""
    notes: list[str] = field(default_factory=list)
    noted: set[str] = field(default_factory=set)
    """DeepSpeed keys that the result need not repeat, because a note explains them."""

    def has(self, key: str) -> bool:
        """Say whether the file gives a value of its own, not "auto"."""
        return key in self.given and self.given[key] != "auto"

    def position(self, key: str) -> str:
        """Return "file:line" of a DeepSpeed key, or the file."""
        return self.where.get(key, self.path)

    def origin(self, schema_key: str) -> str:
        """Return where the recipe's value comes from."""
        return self.loaded.where.get(schema_key, tr("schema default"))

    def is_typed(self, schema_key: str) -> bool:
        """Return whether the command line sets a schema key."""
        return self.loaded.layers.get(schema_key, 0) >= TYPED

    def now(self, schema_key: str) -> Any:
        """Return the value of a schema key as it will be."""
        return self.taken[schema_key][0] if schema_key in self.taken else read_key(self.loaded.cfg, schema_key)

    def fail(self, key: str, sentence: str) -> ConfigError:
        """Return the error that points at a key of the file."""
        return ConfigError(f"{self.position(key)}: {sentence}")

    def note(self, key: str, sentence: str, *, dropped: bool = False) -> None:
        """Tell the user something about a key; `dropped` when the result does not repeat it."""
        self.notes.append(f"{self.position(key)}: {sentence}")
        if dropped:
            self.noted.add(key)

    def take(self, schema_key: str, value: Any, key: str) -> None:
        """Set a schema key from a DeepSpeed key: it beats the recipe, and loses to the command line."""
        value = self._typed(schema_key, value, key)
        mine = read_key(self.loaded.cfg, schema_key)
        differs = schema_key in self.loaded.explicit and not equal(mine, value)
        if differs and not self.strict:
            if self.is_typed(schema_key):
                said = tr(
                    "{key} = {theirs} gives way to {schema} = {mine} on the command line.",
                    key=key,
                    theirs=value,
                    schema=schema_key,
                    mine=mine,
                )
                self.note(key, said, dropped=True)
                return
            self.replaced.append(f"{schema_key} = {mine} ({self.origin(schema_key)}) -> {value}")
        elif differs:
            self.contradictions.append(
                tr(
                    "{place}: {key} gives {schema} = {theirs}, but {origin} says {mine}. "
                    'Change one of them, or write "auto" in the JSON to take the recipe\'s.',
                    place=self.position(key),
                    key=key,
                    schema=schema_key,
                    theirs=value,
                    origin=self.origin(schema_key),
                    mine=mine,
                )
            )
        self.taken[schema_key] = (value, self.position(key))

    def _typed(self, schema_key: str, value: Any, key: str) -> Any:
        """Return the value as the schema's type; 1e9 is a whole number, "true" is no boolean."""
        mine = self.loaded.cfg
        for name in schema_key.split("."):
            mine = getattr(mine, name)
        kind: type = {"batch.micro_per_gpu": int, "optim.torch": bool}.get(schema_key, type(mine))
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(mine, Enum):
            members = [member.value for member in type(mine)]
            if value not in members:
                names = ", ".join(members)
                raise self.fail(key, tr("{key} = {value} must be one of {names}.", key=key, value=value, names=names))
        elif type(value) is not kind:
            raise self.fail(
                key, tr("{key} = {value} must be of type {kind}.", key=key, value=repr(value), kind=kind.__name__)
            )
        return value


def translate_precision(task: SectionImport) -> None:
    """fp16 and bf16 sections become precision.dtype; neither of them means fp32."""
    fp16, bf16 = (task.given.get("fp16.enabled", False), task.given.get("bf16.enabled", False))
    if fp16 is True and bf16 is True:
        raise task.fail("bf16.enabled", tr("fp16 and bf16 are both enabled. Keep one of them."))
    for key, value in (("fp16.enabled", fp16), ("bf16.enabled", bf16)):
        if value not in (True, False, "auto"):
            raise task.fail(key, tr("{key} = {value} must be true or false.", key=key, value=repr(value)))
    if fp16 is True or bf16 is True:
        dtype = "fp16" if fp16 is True else "bf16"
        task.take("precision.dtype", dtype, f"{dtype}.enabled")
    elif "auto" not in (fp16, bf16):
        stated = [key for key in ("fp16.enabled", "bf16.enabled") if key in task.given]
        if stated or "precision.dtype" not in task.loaded.explicit:
            task.take("precision.dtype", "fp32", (stated or ["fp16.enabled"])[0])


def optimizer_defaults(task: SectionImport) -> dict[str, Any]:
    """Return what DeepSpeed's optimizers, or PyTorch's, take where the file is silent; the schema's defaults differ."""
    name = str(task.given.get("optimizer.type", "adam")).lower()
    silent = OPTIMIZER_DEFAULTS.get(name, OPTIMIZER_DEFAULTS["adam"])
    return {f"optimizer.params.{key}": value for key, value in silent.items()} | {"optimizer.params.weight_decay": 0.0}


def translate_optimizer(task: SectionImport) -> None:
    """DeepSpeed's type "Adam" is AdamW unless adam_w_mode is false; PyTorch's own is always its fused one here."""
    key, mode, fused = "optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.fused"
    if not task.has(key):
        return
    name = str(task.given[key]).lower()
    if name in REMOVED_OPTIMIZERS:
        raise task.fail(key, tr("{value} was removed from DeepSpeed. Use AdamW or Adam.", value=task.given[key]))
    names = {kind.ds_type.lower(): (ours.value, kind.ds_type) for ours, kind in OPTIMIZERS.items() if kind.ds_type}
    if name not in names:
        known = ", ".join(shown for _, shown in names.values())
        raise task.fail(key, tr("{value} is not available. There are {names}.", value=task.given[key], names=known))
    plain = name == "adam" and task.given.get(mode) is False
    task.take("optim.name", "adamw" if name == "adam" and not plain else names[name][0], key)
    if name == "adam" and not plain:
        task.note(
            key, tr('"Adam" without "adam_w_mode": false means AdamW in DeepSpeed: optim.name = adamw.'), dropped=True
        )
    if name == "adamw" and task.given.get(mode) is False:
        task.note(mode, tr('"adam_w_mode": false has no effect with type AdamW.'), dropped=True)
    if task.has(fused) and bool(task.given[fused]) != (task.now("optim.torch") is True):
        task.note(fused, tr('"fused" follows "torch_adam": PyTorch\'s Adam is its fused one here.'), dropped=True)
    if name == "muon":
        _translate_muon(task)


def _translate_muon(task: SectionImport) -> None:
    """Muon's own rate beats lr, which is Adam's then; ZeRO-3 has no reduce-scatter for it."""
    own, adam, scatter = "optimizer.params.muon_lr", "optimizer.params.adam_lr", "zero_optimization.reduce_scatter"
    if task.has(own):
        others = task.given.get(adam, task.now("optim.lr"))
        task.take("optim.lr", task.given[own], own)
        if not equal(others, task.given[own]):
            task.take("optim.adam_lr", others, adam)
        task.noted |= {own, adam, "optimizer.params.lr"}
    if task.given.get(scatter) is True and task.now("zero.stage") == 3:
        task.note(scatter, tr("reduce_scatter is off: Muon needs whole gradients under ZeRO-3."), dropped=True)


def translate_scheduler(task: SectionImport) -> None:
    """The three warm-up schedulers have equals here; what they leave out is DeepSpeed's default, not ours."""
    key = "scheduler.type"
    if not task.has(key):
        return
    name = str(task.given[key])
    if name not in SCHEDULES:
        raise task.fail(
            key, tr("scheduler {value} is not available. There are {names}.", value=name, names=", ".join(SCHEDULES))
        )
    task.take("schedule.name", SCHEDULES[name], key)
    cosine = name == "WarmupCosineLR"
    rate = task.now("optim.lr")
    _peak(task, name, rate)
    lowest, lowest_key = _param(task, "warmup_min_ratio" if cosine else "warmup_min_lr")
    if lowest is not None:
        task.take("schedule.warmup_min_ratio", float(lowest) if cosine else lowest / (rate or 1.0), lowest_key)
    if lowest and name == "WarmupDecayLR":
        task.note(
            lowest_key,
            tr(
                "DeepSpeed's WarmupDecayLR falls to warmup_min_lr = {rate}; here the learning rate falls to 0.",
                rate=lowest,
            ),
        )
    if cosine:
        floor, floor_key = _param(task, "cos_min_ratio")
        if floor is not None:
            task.take("schedule.min_lr_ratio", floor, floor_key)
    kind, kind_key = _param(task, "warmup_type")
    if kind not in (None, "log", "linear"):  # deepspeed/runtime/lr_schedules.py warns, and takes log
        task.note(kind_key, tr("DeepSpeed has no warmup_type {kind} and takes log.", kind=repr(kind)), dropped=True)
        kind = "log"
    if kind is not None:
        task.take("schedule.warmup_type", kind, kind_key)
    steps, steps_key = _param(task, "warmup_num_steps")
    total = task.given.get("scheduler.params.total_num_steps") or task.now("train.max_steps")
    as_ratio = isinstance(total, int) and math.ceil(round(task.now("schedule.warmup_ratio") * total, 6)) == steps
    if steps is not None and not as_ratio:  # the recipe's fraction may say the same in other words
        task.take("schedule.warmup_steps", steps, steps_key)
        task.take("schedule.warmup_ratio", 0.0, steps_key)
    if task.has("scheduler.params.total_num_steps") and name != "WarmupLR":
        task.take("train.max_steps", task.given["scheduler.params.total_num_steps"], "scheduler.params.total_num_steps")


def _param(task: SectionImport, name: str) -> tuple[Any, str]:
    """Return a scheduler parameter, or DeepSpeed's default for it, or None for "auto"; and the key to point at."""
    key = f"scheduler.params.{name}"
    if task.given.get(key) == "auto":
        return None, key
    value = task.given.get(key, WARMUP_DEFAULTS[name])
    if name != "warmup_type" and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise task.fail(key, tr("{key} = {value} must be a number.", key=key, value=repr(value)))
    return value, key


def _peak(task: SectionImport, name: str, rate: float) -> None:
    """A schedule that warms up to another rate than the optimizer's has no counterpart here."""
    key = "scheduler.params.warmup_max_lr"
    if name == "WarmupCosineLR" or task.given.get(key) == "auto":
        return
    if task.has(key) and "optimizer.params.lr" not in task.given and not task.strict:
        task.take("optim.lr", task.given[key], key)
        return
    if task.is_typed("optim.lr"):
        task.noted.add(key)
        return
    peak = task.given.get(key, 0.001 if name == "WarmupDecayLR" else rate)
    if not equal(peak, rate):
        raise task.fail(
            key,
            tr(
                "{name} warms up to warmup_max_lr = {peak}, but the optimizer's lr is {rate}. Make them equal "
                "(without warmup_max_lr, DeepSpeed's WarmupDecayLR takes 0.001).",
                name=name,
                peak=peak,
                rate=rate,
            ),
        )


def translate_activation_checkpointing(task: SectionImport, values: dict[str, Any]) -> None:
    """A section that is present switches it on; DeepSpeed's own section has no such key."""
    section = "activation_checkpointing"
    if section not in values:
        return
    task.take("train.activation_checkpointing.enabled", True, section)
    if task.given.get(f"{section}.partition_activations") is True:
        task.note(
            f"{section}.partition_activations",
            tr("partition_activations has no effect: there is no model parallelism."),
        )
    if task.given.get(f"{section}.cpu_checkpointing") is True:
        task.note(
            f"{section}.cpu_checkpointing",
            tr("cpu_checkpointing moves the kept activations to host memory; on CPU ranks it has no effect."),
        )


def translate_zenflow(task: SectionImport, values: dict[str, Any]) -> None:
    """A section that is present switches it on; of its two ways to count only steps are possible here."""
    key = "zero_optimization.zenflow"
    if not isinstance(values.get("zero_optimization"), dict) or "zenflow" not in values["zero_optimization"]:
        return
    task.take("zero.zenflow.enabled", True, key)
    strategy = f"{key}.select_strategy"
    if task.has(strategy) and task.given[strategy] != "step":
        raise task.fail(
            strategy,
            tr(
                "{key} = {value} counts by a data loader that DeepSpeed does not have here. Write step, and steps as "
                "select_interval.",
                key=strategy,
                value=task.given[strategy],
            ),
        )


def translate_steps_per_print(task: SectionImport) -> None:
    """DeepSpeed's progress lines stay off."""
    if "steps_per_print" in task.given:
        task.note(
            "steps_per_print",
            tr("steps_per_print has no effect; the progress lines are ours, see train.log_every."),
            dropped=True,
        )


def translate_monitors(task: SectionImport) -> None:
    """DeepSpeed's monitors stay off: what they were asked to write our own trackers write, to the same places."""
    monitors = {"tensorboard": "tensorboard", "csv_monitor": "csv", "wandb": "wandb"}
    names = {"wandb.project": "project", "wandb.group": "group", "wandb.team": "entity"}
    for section, tracker in monitors.items():
        switch, output, job = (f"{section}.{name}" for name in ("enabled", "output_path", "job_name"))
        task.noted |= {key for key in task.given if key.startswith(f"{section}.")}
        if not task.has(switch) or task.given[switch] is False:
            continue
        task.take(f"track.{tracker}.enabled", task.given[switch], switch)
        task.note(
            switch,
            tr(
                "DeepSpeed's monitor stays off: track.{tracker} writes in its place (docs/tracking.md).",
                tracker=tracker,
            ),
        )
        for key, name in names.items():
            if key.startswith(f"{section}.") and task.has(key):
                task.take(f"track.{tracker}.{name}", task.given[key], key)
        if tracker == "tensorboard" and task.given.get(output):
            folder = f"{task.given[output]}/{task.given.get(job, 'DeepSpeedJobName')}"
            task.take("track.tensorboard.dir", folder, output)
        elif tracker == "csv" and (output in task.given or job in task.given):
            key = output if output in task.given else job
            task.note(key, tr("{key} has no effect: metrics.csv is written into the run folder.", key=key))


def equal(left: Any, right: Any) -> bool:
    """Compare values of two JSONs; 1, 1.0 and a product of ratios that rounds to it are one number, true is none."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)) and bool not in (type(left), type(right)):
        return abs(left - right) <= 1e-12 * max(abs(left), abs(right))
    return bool(left == right)


def translate_batch(task: SectionImport) -> None:
    """Two of the three sizes determine the third, once the number of ranks is known."""
    total, micro, steps = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key in (total, micro, steps):
        size = task.given.get(key, 1)
        if size != "auto" and (type(size) not in (int, float) or size != int(size) or size < 1):
            raise task.fail(key, tr("{key} = {value} must be a whole number of at least 1.", key=key, value=repr(size)))
    if task.has(micro):
        task.take("batch.micro_per_gpu", task.given[micro], micro)
    if task.has(total):
        task.take("batch.global_size", task.given[total], total)
    if not task.has(steps):
        if not task.strict:
            _fit_batch(task, total, micro)
        return
    if task.world_size is None:
        if not (task.has(total) and task.has(micro)):
            said = tr(
                "{key} = {value} says nothing without the number of ranks: give world_size=N. Taken is "
                "batch.global_size = {size}.",
                key=steps,
                value=task.given[steps],
                size=task.now("batch.global_size"),
            )
            if task.strict:
                raise task.fail(steps, said)
            task.note(steps, said, dropped=True)
        return
    if task.now("batch.micro_per_gpu") == AUTO:
        raise task.fail(
            steps,
            tr(
                "{key} = {value} cannot be with batch.micro_per_gpu = auto, which decides about it. Leave it out.",
                key=steps,
                value=task.given[steps],
            ),
        )
    _accumulate(task, total, micro, steps)


def _shares(task: SectionImport) -> int:
    """Return the ranks whose rows differ; 1 where nothing is known of ranks."""
    of_model = math.prod(task.now(f"parallel.{name}") for name in ("tensor", "sequence", "pipeline"))
    return (task.world_size or 1) // max(1, of_model) or 1


def _fit_batch(task: SectionImport, total: str, micro: str) -> None:
    """Where the file gives one of two sizes, let the recipe's other one fit to it."""
    size, rows, shares = task.now("batch.global_size"), task.now("batch.micro_per_gpu"), _shares(task)
    if rows == AUTO or size % (rows * shares) == 0:
        return
    if task.has(micro) and not task.has(total) and not task.is_typed("batch.global_size"):
        task.take("batch.global_size", rows * shares, micro)  # as DeepSpeed, which then accumulates nothing
    elif task.has(total) and not task.has(micro) and size % shares == 0 and not task.is_typed("batch.micro_per_gpu"):
        task.take("batch.micro_per_gpu", math.gcd(size // shares, rows), total)


def _accumulate(task: SectionImport, total: str, micro: str, steps: str) -> None:
    """Take the size that the file leaves open from its accumulation, or hold its sizes against each other."""
    times, shares = task.given[steps], _shares(task)
    if task.is_typed("batch.global_size") or (task.has(total) and task.is_typed("batch.micro_per_gpu")):
        said = tr("{key} = {value} gives way to the batch sizes of the command line.", key=steps, value=times)
        task.note(steps, said, dropped=True)
        return
    expected = times * shares * task.now("batch.micro_per_gpu")
    is_free = "batch.micro_per_gpu" not in task.loaded.explicit or not task.strict
    if not task.has(total):
        task.take("batch.global_size", int(expected), steps)
    elif not task.has(micro) and is_free:
        task.take("batch.micro_per_gpu", task.given[total] // (times * shares) or 1, steps)
        expected = times * shares * task.now("batch.micro_per_gpu")
    if task.now("batch.global_size") != expected and not task.contradictions:
        raise task.fail(
            total,
            tr(
                "train_batch_size = {total} is not train_micro_batch_size_per_gpu {micro} x "
                "gradient_accumulation_steps {steps} x {ranks} ranks = {expected}.",
                total=task.now("batch.global_size"),
                micro=task.now("batch.micro_per_gpu"),
                steps=times,
                ranks=shares,
                expected=expected,
            ),
        )
