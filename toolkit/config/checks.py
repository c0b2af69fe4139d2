"""Rules that join several keys. Each message says both values and the mend; a setting without effect is an error."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolkit.config.keys import all_keys
from toolkit.config.load import Loaded
from toolkit.config.schema import (
    Device,
    Dtype,
    Init,
    RowFormat,
    RunConfig,
    ScheduleName,
    SourceConfig,
)
from toolkit.errors import ConfigError
from toolkit.messages import tr

FP16_KNOBS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "auto_cast",
)
STAGE3_KEYS = (
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
)
STAGE12_KEYS = ("allgather_partitions", "allgather_bucket_size", "round_robin_gradients")
ZERO_KEYS = ("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size")
LEAST_LENGTH = 8


def check(loaded: Loaded, world_size: int | None = None, *, files: bool = True) -> None:
    """Apply every rule.

    Args:
        loaded: the config and where its values come from.
        world_size: number of ranks; None leaves out the rules that need it.
        files: whether folders and files that the config names must exist here; False for a config that is only
            exported for another machine.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    for rule in (_numbers, _batch, _length_of_run, _schedule, _zero, _offload, _without_effect, _names):
        rule(loaded)
    if world_size is not None:
        accumulation(loaded.cfg, world_size, _prefix(loaded, "batch.global_size"))
    if files:
        for rule in (_nvme_folders, _model, _sources, _readable):
            rule(loaded)


def accumulation(cfg: RunConfig, world_size: int, prefix: str = "") -> int:
    """Return micro-batches per rank and step: global_size / (micro_per_gpu x ranks).

    Raises:
        ConfigError: it is no whole number; the message names the nearest sizes that work.
    """
    size, micro = cfg.batch.global_size, cfg.batch.micro_per_gpu
    unit = micro * world_size
    if size % unit:
        below, above = size // unit * unit, -(-size // unit) * unit
        choices = tr("Use {below} or {above}.", below=below, above=above) if below else tr("Use {above}.", above=above)
        raise ConfigError(
            prefix
            + tr(
                "batch.global_size = {size} is not a multiple of batch.micro_per_gpu ({micro}) x {ranks} ranks = {unit}.",
                size=size,
                micro=micro,
                ranks=world_size,
                unit=unit,
            )
            + " "
            + choices
        )
    return size // unit


def _prefix(loaded: Loaded, key: str) -> str:
    place = loaded.where.get(key, "")
    return f"{place}: " if place else ""


def _fail(loaded: Loaded, key: str, sentence: str) -> ConfigError:
    return ConfigError(_prefix(loaded, key) + sentence)


def _get(cfg: RunConfig, key: str) -> object:
    value: object = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _numbers(loaded: Loaded) -> None:
    """Ranges of single values."""
    least = {
        "batch.global_size": 1,
        "batch.micro_per_gpu": 1,
        "data.max_length": LEAST_LENGTH,
        "data.max_samples": 0,
        "data.num_workers": 0,
        "train.epochs": 1,
        "train.max_steps": 0,
        "train.gradient_clipping": 0,
        "train.log_every": 1,
        "train.max_skipped_steps": 1,
        "checkpoint.every": 0,
        "checkpoint.keep": 0,
        "evaluate.every": 0,
        "evaluate.max_new_tokens": 1,
        "schedule.warmup_steps": 0,
        "optim.weight_decay": 0,
        "zero.reduce_bucket_size": 1,
        "launch.num_nodes": 0,
        "distributed.timeout_s": 1,
        "precision.loss_scale": 0,
        "precision.initial_scale_power": 0,
        "precision.min_loss_scale": 1,
        "precision.loss_scale_window": 1,
        "precision.hysteresis": 1,
        "run.seed": 0,
        "model.shape.num_layers": 1,
    }
    for key, bound in least.items():
        value = _get(loaded.cfg, key)
        if isinstance(value, (int, float)) and not value >= bound:
            raise _fail(loaded, key, tr("{key} = {value} must be at least {least}.", key=key, value=value, least=bound))
    cfg = loaded.cfg
    if not 0 < cfg.optim.lr < float("inf"):
        raise _fail(loaded, "optim.lr", tr("optim.lr = {value} must be greater than 0.", value=cfg.optim.lr))
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        raise _fail(
            loaded,
            "optim.betas",
            tr("optim.betas = {value} must be two numbers from 0 to below 1.", value=cfg.optim.betas),
        )
    for key in (
        "data.validation_fraction",
        "schedule.warmup_ratio",
        "schedule.min_lr_ratio",
        "schedule.warmup_min_ratio",
    ):
        value = _get(cfg, key)
        assert isinstance(value, float)
        if not 0 <= value < 1:
            raise _fail(loaded, key, tr("{key} = {value} must be from 0 to below 1.", key=key, value=value))
    if not 0 <= cfg.zero.offload_optimizer.ratio <= 1:
        key, value = "zero.offload_optimizer.ratio", cfg.zero.offload_optimizer.ratio
        raise _fail(loaded, key, tr("{key} = {value} must be from 0 to 1.", key=key, value=value))


def _batch(loaded: Loaded) -> None:
    batch = loaded.cfg.batch
    if batch.global_size % batch.micro_per_gpu:
        accumulation(loaded.cfg, 1, _prefix(loaded, "batch.global_size"))


def _length_of_run(loaded: Loaded) -> None:
    train = loaded.cfg.train
    if (
        train.max_steps
        and train.epochs != 1
        and "train.epochs" in loaded.explicit
        and "train.max_steps" in loaded.explicit
    ):
        both_from_one = loaded.where["train.max_steps"].split(":")[0] == loaded.where["train.epochs"].split(":")[0]
        if both_from_one:
            raise _fail(
                loaded,
                "train.max_steps",
                tr(
                    "train.max_steps = {steps} and train.epochs = {epochs} are both given: keep one of them.",
                    steps=train.max_steps,
                    epochs=train.epochs,
                ),
            )


def _schedule(loaded: Loaded) -> None:
    schedule = loaded.cfg.schedule
    if schedule.warmup_steps and schedule.warmup_ratio:
        both_from_one = (
            loaded.where.get("schedule.warmup_steps", "").split(":")[0]
            == loaded.where.get("schedule.warmup_ratio", "").split(":")[0]
        )
        raise _fail(
            loaded,
            "schedule.warmup_steps",
            tr(
                "schedule.warmup_steps = {steps} and schedule.warmup_ratio = {ratio} are both given: keep one of them.",
                steps=schedule.warmup_steps,
                ratio=schedule.warmup_ratio,
            )
            + ("" if both_from_one else " " + tr("Set the other to 0.")),
        )
    if loaded.cfg.train.max_steps and schedule.warmup_steps > loaded.cfg.train.max_steps:
        raise _fail(
            loaded,
            "schedule.warmup_steps",
            tr(
                "schedule.warmup_steps = {warmup} is more than train.max_steps = {steps}: the run would end while the "
                "learning rate still rises.",
                warmup=schedule.warmup_steps,
                steps=loaded.cfg.train.max_steps,
            ),
        )


def _zero(loaded: Loaded) -> None:
    stage = loaded.cfg.zero.stage
    if stage not in (0, 1, 2, 3):
        raise _fail(loaded, "zero.stage", tr("zero.stage = {stage} must be 0, 1, 2 or 3.", stage=stage))


def _offload(loaded: Loaded) -> None:
    zero = loaded.cfg.zero
    optimizer, param = zero.offload_optimizer.device, zero.offload_param.device
    if param is not Device.none and zero.stage != 3:
        key = "zero.offload_param.device"
        mend = tr("Use zero.stage=3, or zero.offload_param.device=none.")
        raise _fail(
            loaded,
            key,
            tr(
                "{key} = {device} needs zero.stage = 3, but it is {stage}.",
                key=key,
                device=param.value,
                stage=zero.stage,
            )
            + " "
            + mend,
        )
    if optimizer is not Device.none and zero.stage == 0:
        key = "zero.offload_optimizer.device"
        raise _fail(
            loaded,
            key,
            tr("{key} = {device} needs zero.stage 1, 2 or 3, but it is 0.", key=key, device=optimizer.value),
        )
    if optimizer is Device.nvme and zero.stage != 3:
        key = "zero.offload_optimizer.device"
        raise _fail(
            loaded,
            key,
            tr("{key} = nvme needs zero.stage = 3, but it is {stage}. Use cpu.", key=key, stage=zero.stage),
        )
    checkpointing = loaded.cfg.train.activation_checkpointing
    if checkpointing.contiguous_memory_optimization and not (
        checkpointing.partition_activations and checkpointing.number_checkpoints
    ):
        key = "train.activation_checkpointing.contiguous_memory_optimization"
        raise _fail(
            loaded,
            key,
            tr(
                "{key} = true needs partition_activations = true (it is {partition}) and number_checkpoints, the number "
                "of layers (it is {number}).",
                key=key,
                partition=str(checkpointing.partition_activations).lower(),
                number=checkpointing.number_checkpoints,
            ),
        )


def _without_effect(loaded: Loaded) -> None:
    """Refuse any key that was changed but is not read in this configuration."""
    default = RunConfig()
    for key, reason in _unread(loaded.cfg):
        value = _get(loaded.cfg, key)
        if value != _get(default, key) and key in loaded.where:
            shown = value.value if isinstance(value, (Device, Dtype)) else value
            raise _fail(
                loaded,
                key,
                tr("{key} = {value} has no effect: {reason}. Remove it.", key=key, value=shown, reason=reason),
            )


def _unread(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that this configuration does not read, and why."""
    zero, train, schedule = cfg.zero, cfg.train, cfg.schedule
    if cfg.precision.dtype is not Dtype.fp16:
        reason = tr("precision.dtype is {dtype}, not fp16", dtype=cfg.precision.dtype.value)
        yield from ((f"precision.{name}", reason) for name in FP16_KNOBS)
    elif cfg.precision.loss_scale:
        reason = tr("precision.loss_scale = {scale} is fixed", scale=cfg.precision.loss_scale)
        yield from ((f"precision.{name}", reason) for name in FP16_KNOBS[1:-1])
    stage = tr("zero.stage is {stage}", stage=zero.stage)
    if zero.stage != 3:
        yield from ((f"zero.{name}", stage) for name in STAGE3_KEYS)
    if zero.stage not in (1, 2):
        yield from ((f"zero.{name}", stage) for name in STAGE12_KEYS)
    if zero.stage == 0:
        yield from ((f"zero.{name}", stage) for name in ZERO_KEYS)
    yield from _unread_offload(cfg)
    if not train.activation_checkpointing.enabled:
        reason = tr("train.activation_checkpointing.enabled is false")
        for key in all_keys():
            if key.startswith("train.activation_checkpointing.") and not key.endswith(".enabled"):
                yield key, reason
    if schedule.name is not ScheduleName.cosine:
        yield "schedule.min_lr_ratio", tr("schedule.name is {name}, not cosine", name=schedule.name.value)
    if not (schedule.warmup_steps or schedule.warmup_ratio):
        reason = tr("there is no warm-up")
        yield from ((f"schedule.{name}", reason) for name in ("warmup_type", "warmup_min_ratio"))
    if cfg.profile.comms.prof_all:
        yield "profile.comms.prof_ops", tr("profile.comms.prof_all is true")
    if cfg.model.init is Init.random:
        yield "model.path", tr("model.init is random")
    else:
        for key in all_keys():
            if key.startswith("model.shape."):
                yield key, tr("model.init is pretrained")


def _unread_offload(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    for name in ("offload_optimizer", "offload_param"):
        section = f"zero.{name}"
        device = getattr(cfg.zero, name).device
        reason = tr("{section}.device is {device}", section=section, device=device.value)
        nvme_only = {
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "pipeline_read",
            "pipeline_write",
        }
        for key in all_keys():
            last = key.rpartition(".")[2]
            if not key.startswith(f"{section}.") or last == "device":
                continue
            # The optimizer's path may name the place of the parameters too (conf/zero/stage3_nvme.yaml).
            if device is Device.none or (device is Device.cpu and last in nvme_only):
                yield key, reason
    ratio = cfg.zero.offload_optimizer
    if ratio.device is Device.cpu and cfg.zero.stage != 3:
        yield "zero.offload_optimizer.ratio", tr("zero.stage is {stage}", stage=cfg.zero.stage)
    if Device.nvme not in (cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device):
        for key in all_keys():
            if key.startswith("zero.aio."):
                yield key, tr("nothing is offloaded to nvme")


def _names(loaded: Loaded) -> None:
    cfg = loaded.cfg
    if cfg.language not in ("", "en", "zh"):
        raise _fail(loaded, "language", tr("language = {value} must be en, zh or empty.", value=cfg.language))
    name = cfg.run.name
    if name and (Path(name).name != name or name.startswith((".", "-"))):
        raise _fail(
            loaded,
            "run.name",
            tr("run.name = {name} must be a plain folder name; the folder around it is run.dir.", name=name),
        )


def _nvme_folders(loaded: Loaded) -> None:
    """An nvme path must be a folder that can be written to, found out by writing."""
    for section in ("zero.offload_optimizer", "zero.offload_param"):
        if _get(loaded.cfg, f"{section}.device") is not Device.nvme:
            continue
        key = f"{section}.nvme_path"
        path = str(_get(loaded.cfg, key))
        if not path:
            raise _fail(
                loaded,
                f"{section}.device",
                tr("{section}.device = nvme needs {key}=FOLDER on the NVMe disk.", section=section, key=key),
            )
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise _fail(
                loaded,
                key,
                tr(
                    "{key} = {path} is not a folder that can be written to: {reason}.",
                    key=key,
                    path=path,
                    reason=error.strerror,
                ),
            ) from error


def _model(loaded: Loaded) -> None:
    model = loaded.cfg.model
    if model.init is Init.random:
        shape = model.shape
        if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
            raise _fail(
                loaded,
                "model.shape.num_heads",
                tr(
                    "model.shape: hidden_size {hidden} must be a multiple of num_heads {heads}, and that of num_kv_heads "
                    "{kv_heads}.",
                    hidden=shape.hidden_size,
                    heads=shape.num_heads,
                    kv_heads=shape.num_kv_heads,
                ),
            )
    elif not model.path:
        raise _fail(loaded, "model.path", _how_to_get(loaded.cfg))
    elif not Path(model.path).is_dir():
        sentence = tr("model.path = {path} is not a folder here.", path=model.path)
        raise _fail(loaded, "model.path", sentence + " " + _download_hint(model.path))
    for key in ("model.tokenizer", "model.chat_template"):
        path = str(_get(loaded.cfg, key))
        if path and not Path(path).exists():
            raise _fail(loaded, key, tr("{key} = {path} does not exist.", key=key, path=path))


def _how_to_get(cfg: RunConfig) -> str:
    if not cfg.model.hub_id:
        return tr("model.path is empty: set model.path=DIR to a folder with a model in transformers' layout.")
    return tr(
        "the weights of {name} are not there: model.path is empty. Get them with `hf download {hub_id} --local-dir DIR` "
        "(Hugging Face) or `modelscope download --model {modelscope_id} --local_dir DIR` (ModelScope), then add "
        "model.path=DIR. To try the recipe without weights: model=glm_tiny.",
        name=cfg.model.name,
        hub_id=cfg.model.hub_id,
        modelscope_id=cfg.model.modelscope_id,
    )


def _download_hint(path: str) -> str:
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return tr(
            "It looks like a hub name: get it with `hf download {path} --local-dir DIR` and set model.path=DIR.",
            path=path,
        )
    return tr("Nothing is downloaded by itself: it must be the folder that holds config.json and the weights.")


def _sources(loaded: Loaded) -> None:
    data = loaded.cfg.data
    if not data.sources:
        raise _fail(
            loaded,
            "data.sources",
            tr("data.sources is empty: add 'data.sources=[{{path: FILE.jsonl}}]', or data=docstrings to try."),
        )
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            _source(loaded, name, index, source)


def _source(loaded: Loaded, name: str, index: int, source: SourceConfig) -> None:
    key = f"{name}[{index}].path"
    if source.format is RowFormat.docstrings:
        if source.path:
            raise _fail(
                loaded,
                name,
                tr("{key} = {path} has no effect with format docstrings. Remove it.", key=key, path=source.path),
            )
    elif not source.path:
        raise _fail(loaded, name, tr("{key} is empty: name a .json or .jsonl file.", key=key))
    elif not Path(source.path).is_file():
        raise _fail(
            loaded,
            name,
            tr(
                "{key} = {path}: there is no such file (looked in {folder}).",
                key=key,
                path=source.path,
                folder=Path.cwd(),
            ),
        )


def _readable(loaded: Loaded) -> None:
    """The run folder's parent must be writable, found out before anything is loaded."""
    existing = Path(loaded.cfg.run.dir).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise _fail(
            loaded,
            "run.dir",
            tr("run.dir = {dir}: {folder} cannot be written to.", dir=loaded.cfg.run.dir, folder=existing),
        )
