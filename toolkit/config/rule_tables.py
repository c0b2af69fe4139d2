"""What the settings of a config are to each other, as tables: rules.py applies them.

Optimizers and what each reads; when a key is read; which settings contradict each other or need others. Sentences are
English templates, looked up in locale/zh.yaml; their placeholders are keys.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from toolkit.config.hub import is_hub_name
from toolkit.config.schema import (
    AUTO,
    INDUCTOR,
    STAGE3_KEYS,
    TRACKERS,
    Attention,
    CurriculumShape,
    DecayOf,
    Device,
    Dtype,
    Init,
    OnBadRow,
    OnBadStep,
    OptimConfig,
    OptimizerName,
    Packing,
    RunConfig,
    ScheduleName,
    TuningMethod,
    all_keys,
    get_value,
)

Test = Callable[[RunConfig], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """One of `optim.name`."""

    ds_type: str
    """What DeepSpeed's JSON calls it; "" where it has no name for it."""
    reads: tuple[str, ...]
    """Settings of `optim` that it reads in addition to those that all do."""
    state_bytes: float
    """Bytes that it keeps per trained parameter next to float32 weights. Of Muon the most: with ZeRO-1 and 2 the
    momentum of a step is there twice until the step counts."""
    is_adam: bool = False
    """Whether its states are Adam's, which are all that DeepSpeed's universal checkpoints hold."""
    takes_adam: bool = False
    """Whether DeepSpeed has an Adam of its own for it, or PyTorch's with `optim.torch`."""
    is_known: bool = True
    """Whether DeepSpeed's ZeRO takes it unasked, which concerns those that it has tested."""
    needs_whole: bool = False
    """Whether it needs parameters whole: ZeRO hands an optimizer flat pieces of them."""


OPTIMIZERS = {
    OptimizerName.adamw: OptimizerTraits(
        ds_type="AdamW", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    OptimizerName.adam: OptimizerTraits(
        ds_type="Adam", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    # Two numbers of 8 bits, and for each 256 of them a float32 scale (bitsandbytes 0.50, optim/optimizer.py).
    OptimizerName.adamw_8bit: OptimizerTraits(ds_type="", reads=("betas", "eps"), state_bytes=2.04, is_known=False),
    OptimizerName.muon: OptimizerTraits(
        ds_type="Muon", reads=("betas", "eps", "momentum", "adam_lr"), state_bytes=8, takes_adam=True, is_known=False
    ),
    OptimizerName.lion: OptimizerTraits(ds_type="Lion", reads=("betas",), state_bytes=4),
    # A row and a column for each matrix.
    OptimizerName.adafactor: OptimizerTraits(
        ds_type="Adafactor", reads=(), state_bytes=0.1, is_known=False, needs_whole=True
    ),
    OptimizerName.sgd: OptimizerTraits(ds_type="SGD", reads=("momentum",), state_bytes=4, is_known=False),
    OptimizerName.adagrad: OptimizerTraits(ds_type="Adagrad", reads=("eps",), state_bytes=4, needs_whole=True),
}
SOMETIMES_READ = ("betas", "eps", "momentum", "adam_lr")
"""Settings that not every optimizer reads."""

GROUPING = ("optim.decay", "optim.layer_lr_decay", "optim.adam_lr")
"""Keys that make several groups of parameters."""


def is_client(optim: OptimConfig) -> bool:
    """Whether the optimizer is made here and handed to DeepSpeed, which else makes its own by name."""
    return optim.name is OptimizerName.adamw_8bit or (optim.name is OptimizerName.lion and optim.torch is True)


def is_grouped(optim: OptimConfig) -> bool:
    """Whether parameters differ in learning rate or weight decay."""
    return optim.decay.value != "all" or optim.layer_lr_decay != 1 or bool(optim.adam_lr)


class Rule(NamedTuple):
    """A sentence about settings that contradict each other, with placeholders that are keys: {zero.stage}."""

    key: str
    """The key that the error is about, {value} in the sentence."""
    broken: Test
    sentence: str
    reason: str = ""
    """{reason} in the sentence."""


class ReadWhen(NamedTuple):
    """Keys that some configurations do not read: a changed value without effect is an error, never silence."""

    keys: str
    """Keys and patterns."""
    owners: str
    """Keys that decide it; "KEY is VALUE" is the reason where none is given."""
    read: tuple[object, ...] | Test = ()
    """The owner's values with which the keys are read, or a test; (): what is neither 0, empty nor false."""
    reason: str = ""

    def is_read(self, cfg: RunConfig) -> bool:
        """Return whether a configuration reads the keys."""
        if callable(self.read):
            return bool(self.read(cfg))
        value = get_value(cfg, self.owners)
        return value in self.read if self.read else bool(value)


@cache
def expand(patterns: str) -> tuple[str, ...]:
    """Return the keys of the schema that match patterns."""
    return tuple(key for pattern in patterns.split() for key in all_keys() if fnmatchcase(key, pattern))


_LORA = (TuningMethod.lora, TuningMethod.qlora)
_ADAPTER = {
    "rank": _LORA,
    "alpha": _LORA,
    "rslora": _LORA,
    "dora": _LORA,
    "target_modules": _LORA,
    "save_modules": _LORA,
    "num_tokens": (TuningMethod.ptuning_v2, TuningMethod.prompt),
    "projection": (TuningMethod.ptuning_v2,),
    "init_text": (TuningMethod.prompt,),
}
"""What an adapter is, and which methods read it."""
_TUNING = _ADAPTER | {
    "adapter": (*_LORA, TuningMethod.ptuning_v2, TuningMethod.prompt),
    "dropout": (*_LORA, TuningMethod.ptuning_v2),
    "last_layers": (TuningMethod.freeze,),
    "patterns": (TuningMethod.freeze,),
}
_NVME = "nvme_path buffer_count buffer_size max_in_cpu fast_init pipeline_read pipeline_write"


def _of(section: str, names: Iterable[str]) -> str:
    return " ".join(f"{section}.{name}" for name in names)


READ_WHEN: tuple[ReadWhen, ...] = (
    ReadWhen(
        "precision.*loss_scale* precision.initial_scale_power precision.*hysteresis precision.auto_cast",
        "precision.dtype",
        (Dtype.fp16,),
        "precision.dtype is {precision.dtype}, not fp16",
    ),
    ReadWhen(
        "precision.initial_scale_power precision.loss_scale_window precision.*hysteresis precision.min_loss_scale",
        "precision.loss_scale",
        (0,),
        "precision.loss_scale = {precision.loss_scale} is fixed",
    ),
    ReadWhen("precision.tf32", "precision.dtype", (Dtype.fp32,), "precision.dtype is {precision.dtype}, not fp32"),
    ReadWhen(_of("zero", STAGE3_KEYS), "zero.stage", (3,)),
    ReadWhen("zero.allgather_* zero.round_robin_gradients", "zero.stage", (1, 2)),
    ReadWhen("zero.contiguous_gradients zero.overlap_comm zero.reduce_*", "zero.stage", (1, 2, 3)),
    *(
        row
        for section in ("zero.offload_optimizer", "zero.offload_param")
        for row in (
            ReadWhen(f"{section}.*", f"{section}.device", (Device.cpu, Device.nvme)),
            # The optimizer's path may name the place of the parameters too (conf/zero/stage3_nvme.yaml).
            ReadWhen(_of(section, _NVME.split()), f"{section}.device", (Device.nvme, Device.none)),
        )
    ),
    ReadWhen("zero.offload_optimizer.ratio", "zero.stage", (3,)),
    ReadWhen("zero.offload_optimizer.cpuadam_cores_perc", "zero.offload_optimizer.super_offload"),
    ReadWhen("zero.zenflow.*", "zero.zenflow.enabled"),
    ReadWhen("zero.zenflow.pt_reserved_cores_perc", "zero.zenflow.overlap_step"),
    ReadWhen(
        "zero.aio.*",
        "zero.offload_optimizer.device",
        lambda c: Device.nvme in (c.zero.offload_optimizer.device, c.zero.offload_param.device),
        "nothing is offloaded to nvme",
    ),
    ReadWhen("train.activation_checkpointing.*", "train.activation_checkpointing.enabled"),
    ReadWhen("compile.*", "compile.enabled"),
    ReadWhen("compile.mode", "compile.backend", (INDUCTOR,), "compile.backend is {compile.backend}, not inductor"),
    *(
        ReadWhen(f"optim.{name}", "optim.name", tuple(key for key, one in OPTIMIZERS.items() if name in one.reads))
        for name in SOMETIMES_READ
    ),
    ReadWhen("optim.decay", "optim.weight_decay", (), "optim.weight_decay is 0"),
    ReadWhen(
        "schedule.min_lr_ratio", "schedule.name", (ScheduleName.cosine, ScheduleName.polynomial, ScheduleName.wsd)
    ),
    ReadWhen(
        "schedule.warmup_type", "schedule.name", (ScheduleName.constant, ScheduleName.linear, ScheduleName.cosine)
    ),
    ReadWhen("schedule.power", "schedule.name", (ScheduleName.polynomial,)),
    ReadWhen("schedule.timescale", "schedule.name", (ScheduleName.inverse_sqrt,)),
    ReadWhen("schedule.decay_*", "schedule.name", (ScheduleName.wsd,)),
    ReadWhen("schedule.decay_ratio", "schedule.decay_steps", (0,), "schedule.decay_steps is given"),
    ReadWhen(
        "schedule.warmup_type schedule.warmup_min_ratio",
        "schedule.warmup_steps schedule.warmup_ratio",
        lambda c: c.schedule.warmup_steps or c.schedule.warmup_ratio,
        "there is no warm-up",
    ),
    ReadWhen(
        "data.max_bad_fraction", "data.on_bad_row", (OnBadRow.skip,), "data.on_bad_row is {data.on_bad_row}, not skip"
    ),
    ReadWhen("data.packing_window", "data.packing", (Packing.packed,), "data.packing is {data.packing}, not packed"),
    ReadWhen("data.curriculum.*", "data.curriculum.steps"),
    ReadWhen(
        "data.curriculum.levels",
        "data.curriculum.shape",
        (CurriculumShape.discrete,),
        "data.curriculum.shape is {data.curriculum.shape}, not discrete",
    ),
    ReadWhen("data.validation_fraction", "data.validation", ([],), "data.validation is given"),
    ReadWhen("train.random_ltd.*", "train.random_ltd.steps"),
    *(ReadWhen(f"tuning.{name}", "tuning.method", methods) for name, methods in _TUNING.items()),
    ReadWhen(_of("tuning", _ADAPTER), "tuning.adapter", ("",), "tuning.adapter decides it"),
    ReadWhen(
        "tuning.dropout",
        "tuning.adapter",
        lambda c: not c.tuning.adapter or c.tuning.method not in _LORA,
        "tuning.adapter decides it",
    ),
    ReadWhen(
        "evaluate.metrics evaluate.keep_best",
        "data.validation data.validation_fraction",
        lambda c: c.data.validation or c.data.validation_fraction,
        "there is no validation data",
    ),
    ReadWhen(
        "evaluate.keep_best",
        "checkpoint.keep",
        lambda c: c.checkpoint.keep or c.checkpoint.max_gib,
        "all checkpoints are kept",
    ),
    ReadWhen(
        "evaluate.max_answers evaluate.batch_size evaluate.temperature evaluate.top_* evaluate.seed",
        "evaluate.metrics",
        (),
        "evaluate.metrics is empty",
    ),
    ReadWhen(
        "evaluate.top_* evaluate.seed", "evaluate.temperature", (), "evaluate.temperature is 0, so nothing is drawn"
    ),
    ReadWhen("checkpoint.keep_weights", "checkpoint.keep", (), "all checkpoints are kept"),
    ReadWhen("checkpoint.verify_export", "checkpoint.export"),
    ReadWhen("track.patience_s", "track", lambda c: c.track.enabled, "no tracker is enabled"),
    *(
        ReadWhen(f"{section}.*", f"{section}.enabled")
        for section in (*(f"track.{name}" for name in TRACKERS), "report", "profile.flops", "profile.comms")
    ),
    ReadWhen("profile.comms.prof_ops", "profile.comms.prof_all", (False,)),
    ReadWhen("model.path model.revision model.trust_remote_code model.router_loss", "model.init", (Init.pretrained,)),
    ReadWhen("model.revision", "model.path", lambda c: is_hub_name(c.model.path), "model.path is a folder"),
    ReadWhen("model.shape.*", "model.init", (Init.random,)),
)

RANGES: tuple[Rule, ...] = (
    Rule(
        "optim.betas",
        lambda c: len(c.optim.betas) != 2 or not all(0 <= beta < 1 for beta in c.optim.betas),
        "optim.betas = {value} must be two numbers from 0 to below 1.",
    ),
    Rule(
        "schedule.warmup_min_ratio",
        lambda c: not 0 <= c.schedule.warmup_min_ratio < 1 and c.schedule.warmup_min_ratio != -1,
        "schedule.warmup_min_ratio = {value} must be from 0 to below 1.",
    ),
    Rule(
        "batch.micro_per_gpu",  # a text through a reference to another key
        lambda c: isinstance(c.batch.micro_per_gpu, str) and c.batch.micro_per_gpu != AUTO,
        "batch.micro_per_gpu = {value} must be a whole number or auto.",
    ),
    Rule("zero.stage", lambda c: c.zero.stage not in (0, 1, 2, 3), "zero.stage = {value} must be 0, 1, 2 or 3."),
    Rule("language", lambda c: c.language not in ("", "en", "zh"), "language = {value} must be en, zh or empty."),
    Rule(
        "run.name",
        lambda c: (
            c.run.name
            and (
                Path(c.run.name).name != c.run.name
                or not re.match(r"[^.-]", c.run.name)
                or not c.run.name.isprintable()
            )
        ),
        "run.name = {value} must be a plain folder name; the folder around it is run.dir.",
    ),
    Rule(
        "prepare.shard",
        lambda c: c.prepare.shard and not _is_part(c.prepare.shard),
        "prepare.shard = {value} must be i/n, such as 1/4 to 4/4 for four machines.",
    ),
)
"""What single values must be, beyond the bounds at their fields."""


def _is_part(shard: str) -> bool:
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    return found is not None and 0 < int(found[1]) <= int(found[2])


def _beside(setting: str, sentence: str, *rows: tuple[str, Test, str]) -> tuple[Rule, ...]:
    """Return the rules about what is incompatible with a setting above 1: the key told, when, and why."""

    def both(broken: Test) -> Test:
        return lambda c: int(str(get_value(c, setting))) > 1 and broken(c)

    return tuple(Rule(key, both(broken), sentence, reason) for key, broken, reason in rows)


def _cannot_be(setting: str, *rows: tuple[Test, str]) -> tuple[Rule, ...]:
    """Return the rules about a setting above 1: when it cannot be, and why."""
    return _beside(setting, "{key} = {value} cannot be: {reason}.", *((setting, test, why) for test, why in rows))


_ONE, _OFF = "it was not tried. Set it to 1.", "it was not tried. Set it to false."
_ANSWERS = "the layers that an answer needs are on several ranks. Ask the model after the run: toolkit generate."
_PARTITION = "train.activation_checkpointing.partition_activations"
_NO_PARTITION = f"{_PARTITION} = true has no effect beside it. Set it to false"
_PROMPTS = (TuningMethod.ptuning_v2, TuningMethod.prompt)
_WHOLE_LAYERS = (TuningMethod.full, TuningMethod.freeze)
PARALLEL = ("parallel.tensor", "parallel.sequence", "parallel.pipeline")

INCOMPATIBLE: tuple[Rule, ...] = (
    Rule(
        "schedule.warmup_steps",
        lambda c: 0 < c.train.max_steps < c.schedule.warmup_steps,
        "schedule.warmup_steps = {value} is more than train.max_steps = {train.max_steps}: the run would end while "
        "the learning rate still rises.",
    ),
    Rule(
        "zero.offload_param.device",
        lambda c: c.zero.offload_param.device is not Device.none and c.zero.stage != 3,
        "zero.offload_param.device = {value} needs zero.stage = 3, but it is {zero.stage}. Use zero.stage=3, or "
        "zero.offload_param.device=none.",
    ),
    Rule(
        "zero.offload_optimizer.device",
        lambda c: c.zero.offload_optimizer.device is not Device.none and not c.zero.stage,
        "zero.offload_optimizer.device = {value} needs zero.stage 1, 2 or 3, but it is 0.",
    ),
    Rule(
        "zero.offload_optimizer.device",
        lambda c: c.zero.offload_optimizer.device is Device.nvme and c.zero.stage in (1, 2),
        "zero.offload_optimizer.device = nvme needs zero.stage = 3, but it is {zero.stage}. Use cpu.",
    ),
    Rule(
        "checkpoint.keep_weights",
        lambda c: c.zero.offload_optimizer.device is Device.nvme and c.checkpoint.keep_weights,
        "checkpoint.keep_weights = {value} cannot be: the weights of a run whose optimizer is offloaded to NVMe cannot "
        "be taken from its checkpoints. Set it to 0.",
    ),
    Rule(
        "train.activation_checkpointing.contiguous_memory_optimization",
        lambda c: (
            c.train.activation_checkpointing.contiguous_memory_optimization
            and not (
                c.train.activation_checkpointing.partition_activations
                and c.train.activation_checkpointing.number_checkpoints
            )
        ),
        "{key} = true needs partition_activations = true (it is "
        "{train.activation_checkpointing.partition_activations}) and number_checkpoints, the number of layers (it is "
        "{train.activation_checkpointing.number_checkpoints}).",
    ),
    Rule(
        "compile.deepcompile",
        lambda c: c.compile.deepcompile and not c.zero.stage,
        "compile.deepcompile = true needs zero.stage 1, 2 or 3, but it is 0.",
    ),
    Rule(
        "compile.deepcompile",
        lambda c: c.compile.deepcompile and c.compile.backend not in (INDUCTOR, "eager"),
        "compile.deepcompile = true needs compile.backend = inductor, but it is {compile.backend}.",
    ),
    Rule(
        "profile.flops.profile_step",  # a profile of a step that never comes would be missed at the end only
        lambda c: c.profile.flops.enabled and 0 < c.train.max_steps <= c.profile.flops.profile_step,
        "profile.flops.profile_step = {value} must be less than train.max_steps = {train.max_steps}.",
    ),
    Rule(
        "data.curriculum.start_length",
        lambda c: c.data.curriculum.steps and c.data.curriculum.start_length >= c.data.max_length,
        "data.curriculum.start_length = {value} must be less than data.max_length = {data.max_length}.",
    ),
    # Each rank draws its own noise, so ranks that share sequences would disagree about it.
    *(
        rule
        for name in PARALLEL
        for rule in _beside(
            name,
            f"train.neftune_alpha cannot be used with {name} = {{{name}}}: each rank draws its own "
            "noise, and these ranks share rows. Set train.neftune_alpha=0.",
            ("train.neftune_alpha", lambda c: c.train.neftune_alpha, ""),
        )
    ),
    *_beside(
        "parallel.pipeline",
        "{key} = {value} cannot be together with parallel.pipeline = {parallel.pipeline}: {reason}",
        (
            "zero.stage",
            lambda c: c.zero.stage > 1,
            "DeepSpeed's pipelines know stages 0 and 1. Use zero=stage1, or zero=stage3 without parallel=pipeline.",
        ),
        (
            "zero.offload_optimizer.device",
            lambda c: c.zero.offload_optimizer.device is not Device.none,
            "it was not tried. Use none, or zero=stage2_offload without parallel=pipeline.",
        ),
        (
            "precision.dtype",
            lambda c: c.precision.dtype is Dtype.fp16,
            "an overflow on one stage would have to be known to all. Use precision=bf16 or precision=fp32.",
        ),
        (
            "zero.stage",
            lambda c: c.precision.dtype is Dtype.bf16 and not c.zero.stage,
            "in bf16 gradients would be added up in bf16. Use zero=stage1, which adds them up in fp32.",
        ),
        (
            "tuning.method",
            lambda c: c.tuning.method is not TuningMethod.full,
            "stages train all parameters of their layers. Use tuning=full, or leave parallel=pipeline out.",
        ),
        ("evaluate.metrics", lambda c: c.evaluate.metrics, _ANSWERS),
        ("evaluate.prompts", lambda c: c.evaluate.prompts, _ANSWERS),
        ("parallel.tensor", lambda c: c.parallel.tensor > 1, _ONE),
        ("parallel.sequence", lambda c: c.parallel.sequence > 1, _ONE),
        (
            "batch.micro_per_gpu",
            lambda c: c.batch.micro_per_gpu == AUTO,
            "how much of a model a rank holds depends on its stage. Give a number.",
        ),
        ("plan.auto", lambda c: c.plan.auto, _OFF),
        ("kernels.mlp_pieces", lambda c: c.kernels.mlp_pieces > 1, _ONE),
        ("compile.enabled", lambda c: c.compile.enabled, _OFF),
        ("profile.flops.enabled", lambda c: c.profile.flops.enabled, _OFF),
        (_PARTITION, lambda c: c.train.activation_checkpointing.enabled and get_value(c, _PARTITION), _OFF),
    ),
    *_cannot_be(
        "kernels.mlp_pieces",
        (lambda c: c.compile.enabled, "layers in pieces cannot be compiled. Set compile.enabled=false"),
        (
            lambda c: c.tuning.dropout and c.tuning.method in _LORA,
            "each piece is computed twice, and tuning.dropout = {tuning.dropout} would drop something else the second "
            "time. Set it to 0",
        ),
    ),
    *_cannot_be(
        "parallel.sequence",
        (
            lambda c: c.parallel.tensor > 1 or c.parallel.pipeline > 1,
            "the ranks of one model share either rows (sequence), matrices (tensor) or layers (pipeline)",
        ),
        (
            lambda c: c.tuning.method in _PROMPTS,
            "what tuning={tuning.method} learns stands before a row, and would stand before each part of it. Use "
            "tuning=lora",
        ),
        (
            lambda c: c.model.attention is not Attention.auto,
            "model.attention = {model.attention} is computed on one rank. Leave it at auto",
        ),
        (lambda c: get_value(c, _PARTITION), _NO_PARTITION),
        (
            lambda c: c.compile.enabled,
            "what ranks exchange within attention cannot be compiled. Set compile.enabled=false",
        ),
    ),
    *_cannot_be(
        "parallel.tensor",
        (
            lambda c: c.zero.stage == 3,
            "zero.stage = 3 is not supported beside it. Use zero=stage1 or zero=stage2, or parallel.tensor=1",
        ),
        (lambda c: c.zero.zenflow.enabled, "zero.zenflow.enabled = true is not supported beside it. Set it to false"),
        (
            lambda c: c.tuning.method not in _WHOLE_LAYERS,
            "tuning.method = {tuning.method} adds parameters that are not split with the layers that they belong to. "
            "Use tuning=full or tuning=freeze, or parallel.tensor=1",
        ),
        (
            lambda c: c.optim.name is OptimizerName.adafactor,
            "optim.name = adafactor keeps a row and a column for each whole matrix, and ranks have parts. Use "
            "optim=adamw",
        ),
        (lambda c: get_value(c, _PARTITION), _NO_PARTITION),
        (lambda c: c.compile.enabled, "compile.enabled = true is not supported beside it. Set it to false"),
        (
            lambda c: c.plan.auto,
            "plan.auto = true looks for ZeRO's stages, also those that do not go together with it. Set it to false",
        ),
    ),
    Rule(
        "zero.zenflow.enabled",
        lambda c: c.zero.zenflow.enabled and c.zero.stage == 3,
        "zero.zenflow.enabled = true and zero.stage = 3 do not go together: ZenFlow turns whole weights before it "
        "splits them, and here they are split as they are read. Use zero.stage=2.",
    ),
    Rule(
        "zero.zenflow.select_interval",
        lambda c: c.zero.zenflow.enabled and c.zero.zenflow.select_interval % c.zero.zenflow.update_interval,
        "zero.zenflow.select_interval = {value} must be a multiple of zero.zenflow.update_interval = "
        "{zero.zenflow.update_interval}.",
    ),
    Rule(
        "optim.layer_lr_decay",
        lambda c: c.optim.layer_lr_decay != 1 and c.tuning.method in _PROMPTS,
        "optim.layer_lr_decay = {value} needs layers to train, and tuning.method = {tuning.method} trains none.",
    ),
    Rule(  # measured, see docs/optimizers.md
        "optim.name",
        lambda c: c.optim.name is OptimizerName.adafactor and c.zero.stage,
        "optim.name = adafactor and zero.stage = {zero.stage} do not go together: it factors matrices, and ZeRO hands "
        "it flat pieces of them, from which every stage and number of ranks computes something else. Use zero=stage0, "
        "or optim=adamw_8bit.",
    ),
    Rule(
        "optim.name",
        lambda c: c.optim.name is OptimizerName.adagrad and c.zero.stage,
        "optim.name = adagrad and zero.stage = {zero.stage} do not go together: DeepSpeed builds it anew, and the "
        "schedule and parameter groups are lost. Use zero=stage0, or optim=adamw.",
    ),
    Rule(
        "optim.name",
        lambda c: c.optim.name is OptimizerName.muon and c.tuning.method in _PROMPTS,
        "optim.name = muon needs matrices of layers to train, and tuning.method = {tuning.method} trains none. Use "
        "optim=adamw.",
    ),
    Rule(
        "train.gradient_clipping",
        lambda c: c.optim.name is OptimizerName.muon and c.train.gradient_clipping,
        "train.gradient_clipping = {value} and optim.name = muon do not go together: under most ZeRO stages DeepSpeed "
        "would clip Muon's updates, which all have the same size, to next to nothing. Set train.gradient_clipping=0.",
    ),
    Rule(
        "optim.name",
        lambda c: (
            c.optim.name is OptimizerName.muon
            and Device.nvme in (c.zero.offload_optimizer.device, c.zero.offload_param.device)
        ),
        "optim.name = muon and offloading to NVMe are untested together. Offload to cpu, or use optim=adamw.",
    ),
    Rule(
        "schedule.decay_steps",
        lambda c: (
            c.schedule.name is ScheduleName.wsd
            and 0 < c.train.max_steps < c.schedule.warmup_steps + c.schedule.decay_steps
        ),
        "schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_steps = {value} are more together than "
        "train.max_steps = {train.max_steps}.",
    ),
    *(
        Rule(
            key,
            lambda c, key=key, name=name: name in c.track.enabled and not str(get_value(c, key)).strip(),  # type: ignore[misc]
            "{key} must not be empty.",
        )
        for name, key in (
            ("wandb", "track.wandb.project"),
            ("mlflow", "track.mlflow.experiment"),
            ("swanlab", "track.swanlab.project"),
            ("trackio", "track.trackio.project"),
        )
    ),
    Rule(
        "track.mlflow.uri",
        lambda c: "@" in urlsplit(c.track.mlflow.uri).netloc,
        "track.mlflow.uri holds a user or a password. Take them out and set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD in the environment.",
    ),
)
"""Settings that contradict each other in any program."""


def _runs_code(cfg: RunConfig) -> bool:
    return cfg.model.trust_remote_code and cfg.model.init is not Init.random


INCOMPATIBLE_OF_MODELS: tuple[Rule, ...] = (
    Rule(  # a mistyped folder must not run a stranger's code, nor a branch what is pushed to it after one has read it
        "model.revision",
        lambda c: _runs_code(c) and is_hub_name(c.model.path) and not re.fullmatch("[0-9a-f]{40}", c.model.revision),
        "model.trust_remote_code = true and model.path = {model.path}, which is no folder here but a name on Hugging "
        "Face, needs the commit that you have read: model.revision=COMMIT, all 40 digits.",
    ),
    Rule(
        "checkpoint.keep_weights",
        lambda c: _runs_code(c) and c.checkpoint.keep_weights,
        "checkpoint.keep_weights = {value} and model.trust_remote_code = true do not go together: exports of old "
        "checkpoints run no code of a model's own. Set it to 0.",
    ),
    Rule(
        "tuning.last_layers",
        lambda c: c.tuning.method is TuningMethod.freeze and not (c.tuning.last_layers or c.tuning.patterns),
        "tuning.method = freeze trains nothing: set tuning.last_layers or tuning.patterns.",
    ),
    Rule(
        "tuning.method",
        lambda c: c.zero.stage == 3 and c.tuning.method is TuningMethod.qlora,
        "tuning.method = qlora and zero.stage = 3 do not go together: ZeRO-3 cuts weights into flat pieces of the "
        "training precision and gathers them again, by which numbers of 4 bits lose what they mean. Use zero=stage2, "
        "or tuning=lora.",
    ),
    # peft 0.21, tuners/lora/dora.py: `lora_A.weight.shape[1]` of a weight that is not gathered (IndexError, measured).
    Rule(
        "tuning.dora",
        lambda c: c.zero.stage == 3 and c.tuning.dora,
        "tuning.dora = true and zero.stage = 3 do not go together: DoRA measures whole weights, also where ZeRO-3 has "
        "not gathered them. Use zero=stage2, or leave dora out.",
    ),
)
"""Settings of a language model that contradict each other."""

_OF_CUSTOM_MODELS = "{key} = {value}: which parameters of a custom model are layers, embeddings or output is not "
INCOMPATIBLE_WITH_CUSTOM_MODELS: tuple[Rule, ...] = (
    *(
        rule
        for name in PARALLEL
        for rule in _beside(
            name,
            "{key} = {value}: how to split a custom model is not known; its ranks share the data. Set it to 1; "
            "zero=stage3 splits the parameters of any model.",
            (name, lambda c: True, ""),
        )
    ),
    *(
        Rule(
            key,
            lambda c, key=key: get_value(c, key) in (AUTO, True) and isinstance(get_value(c, key), (str, bool)),  # type: ignore[misc]
            "{key} = {value}: nobody knows what a custom model takes. Give batch.micro_per_gpu a number, and "
            "choose zero= yourself.",
        )
        for key in ("batch.micro_per_gpu", "plan.auto")
    ),
    Rule(
        "optim.decay", lambda c: c.optim.decay is DecayOf.hidden, _OF_CUSTOM_MODELS + "known. Possible: all, matrices."
    ),
    Rule("optim.layer_lr_decay", lambda c: c.optim.layer_lr_decay != 1, _OF_CUSTOM_MODELS + "known. Possible: 1."),
    Rule(
        "evaluate.keep_best",
        lambda c: c.evaluate.keep_best and not re.fullmatch(r"eval_\w+", c.evaluate.keep_best),
        "evaluate.keep_best = {value} must be eval_loss, or eval_ and the name of a metric.",
    ),
)
"""What needs to know the model, in a program that brings its own."""

_CUSTOM_MODELS_READ = "data.num_workers evaluate.every evaluate.at_start evaluate.keep_best"
READ_BY_LANGUAGE_MODELS = ReadWhen(
    " ".join(
        key
        for key in expand(
            "model.* tuning.* data.* prepare.* kernels.* evaluate.* train.activation_checkpointing.* "
            "train.neftune_alpha train.random_ltd.*"
        )
        if key not in _CUSTOM_MODELS_READ.split()
    ),
    "",
    lambda c: False,
    "the program brings its own model, data and loss",
)
READ_WITH_VALIDATION = ReadWhen(
    "evaluate.every evaluate.at_start evaluate.keep_best", "", lambda c: False, "the program gives no validation="
)


def updates_early(cfg: RunConfig) -> str:
    """Return the key by which weights change while gradients still come, before a step can be judged; "" if none."""
    if cfg.zero.zenflow.enabled:
        return "zero.zenflow.enabled"
    if cfg.zero.offload_optimizer.super_offload and not cfg.train.gradient_clipping:
        return "zero.offload_optimizer.super_offload"
    return ""


_UPDATES_ADAMW: dict[str, Test] = {
    "optim.name=adamw": lambda c: c.optim.name is OptimizerName.adamw,
    "optim.torch=false": lambda c: c.optim.torch is not True,
    "run.max_restarts=0": lambda c: c.run.max_restarts == 0,
    "plan.auto=false": lambda c: not c.plan.auto,
    "train.rehearse=false": lambda c: not (updates_early(c) and c.train.rehearse),
    "train.on_bad_step=stop": lambda c: not updates_early(c) or c.train.on_bad_step is OnBadStep.stop,
    "train.max_grad_norm_ratio=0": lambda c: not updates_early(c) or c.train.max_grad_norm_ratio == 0,
    "batch.micro_per_gpu=1": lambda c: not updates_early(c) or c.batch.micro_per_gpu != AUTO,
    "train.on_bad_step=skip": lambda c: updates_early(c) or c.train.on_bad_step is not OnBadStep.rewind,
}
"""What cannot be where weights change before a step is judged, and where states are not saved."""
REQUIRES: dict[str, tuple[Test, dict[str, Test]]] = {
    "zero.zero_hpz_partition_size": (
        lambda c: c.zero.zero_hpz_partition_size > 1,
        {"zero.offload_param.device=none": lambda c: c.zero.offload_param.device is Device.none},
    ),
    "zero.zero_quantized_gradients": (
        # 0.19.8, csrc/quantization/pt_binding.cpp: ds_swizzle_quant reads whatever it gets as __half.
        lambda c: c.zero.zero_quantized_gradients,
        {
            "precision=fp16": lambda c: c.precision.dtype is Dtype.fp16,
            "zero.reduce_scatter=true": lambda c: c.zero.reduce_scatter,
        },
    ),
    "compile.deepcompile": (
        # Its graph has gathers and reductions of its own (0.19.8, compile/init_z3.py), which know none of these.
        lambda c: c.compile.deepcompile,
        {
            "zero.zero_hpz_partition_size=1": lambda c: c.zero.zero_hpz_partition_size == 1,
            "zero.zero_quantized_weights=false": lambda c: not c.zero.zero_quantized_weights,
            "zero.zero_quantized_gradients=false": lambda c: not c.zero.zero_quantized_gradients,
            "zero.offload_param.device=cpu": lambda c: c.zero.offload_param.device is not Device.nvme,
            "zero.offload_optimizer.super_offload=false": lambda c: not c.zero.offload_optimizer.super_offload,
            "zero.zenflow.enabled=false": lambda c: not c.zero.zenflow.enabled,
        },
    ),
    "zero.offload_optimizer.super_offload": (
        # Its process has a DeepSpeedCPUAdam that knows AdamW only (0.19.8, superoffload_utils.py).
        lambda c: c.zero.offload_optimizer.super_offload,
        {
            "zero.stage=3": lambda c: c.zero.stage == 3,
            "zero.offload_optimizer.device=cpu": lambda c: c.zero.offload_optimizer.device is Device.cpu,
            # Without clipping it updates before the loss scale is divided out (0.19.8, superoffload_stage3.py).
            "precision=bf16": lambda c: c.precision.dtype is not Dtype.fp16 or c.train.gradient_clipping > 0,
            **_UPDATES_ADAMW,
        },
    ),
    "zero.zenflow.enabled": (
        lambda c: c.zero.zenflow.enabled,
        {
            "zero.stage=2": lambda c: c.zero.stage,
            "zero.offload_optimizer.device=cpu": lambda c: c.zero.offload_optimizer.device is Device.cpu,
            "zero.reduce_scatter=true": lambda c: c.zero.reduce_scatter,
            "zero.contiguous_gradients=true": lambda c: c.zero.contiguous_gradients,
            "zero.overlap_comm=true": lambda c: c.zero.overlap_comm or not c.zero.zenflow.offload,
            "precision=bf16": lambda c: c.precision.dtype is not Dtype.fp16,  # selected gradients keep the loss scale
            **_UPDATES_ADAMW,
        },
    ),
}
"""A setting of ZeRO++, ZenFlow, SuperOffload or DeepCompile (docs/zero.md) -> when it is on, and what it needs then."""
UNTESTED: dict[str, Test] = {
    "parallel.pipeline": lambda c: c.parallel.pipeline > 1,
    "zero.zenflow.enabled": lambda c: c.zero.zenflow.enabled,
    "zero.offload_optimizer.super_offload": lambda c: c.zero.offload_optimizer.super_offload,
}
"""What has not been tried with groups of parameters, nor with optimizers other than DeepSpeed's and PyTorch's own."""
UNTESTED_WITH_MUON: dict[str, Test] = {
    "parallel.tensor": lambda c: c.parallel.tensor > 1,
    "parallel.sequence": lambda c: c.parallel.sequence > 1,
    "zero.zero_hpz_partition_size": lambda c: c.zero.zero_hpz_partition_size > 1,
}
"""What has not been tried with Muon either."""


def sentences() -> Iterator[str]:
    """Yield the English templates of all tables, for the test of their Chinese."""
    for row in (*READ_WHEN, READ_BY_LANGUAGE_MODELS, READ_WITH_VALIDATION):
        yield row.reason
    for rule in (*RANGES, *INCOMPATIBLE, *INCOMPATIBLE_OF_MODELS, *INCOMPATIBLE_WITH_CUSTOM_MODELS):
        yield from (rule.sentence, rule.reason)
