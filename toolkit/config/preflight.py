"""Rules about what a config names outside of it (files, packages, devices, models), tried before anything is loaded.

Also DeepSpeed's compiled ops: which a config needs, which are built, and what this machine lacks to build the others.
They are compiled at first use, in one to three minutes, by a compiler that not every machine has. So `optim.torch =
auto` chooses PyTorch's own Adam where DeepSpeed's would gain nothing or cannot be built. Imports neither torch nor
deepspeed. A build that is killed leaves a lock behind, and every later run would wait for it for ever, in silence.
"""

import dataclasses
import hashlib
import importlib.util
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.config import files, schema, validate
from toolkit.config.load import LoadedConfig, as_typed, replace
from toolkit.disk import matching, try_lock
from toolkit.messages import ConfigError, LaunchError, did_you_mean, file_bytes, joined, parsed_json, raise_all, say, tr


def _nvme_folders(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """An nvme path must be a folder that can be written to, found out by writing."""
    for section in ("zero.offload_optimizer", "zero.offload_param"):
        if schema.get_value(loaded.cfg, f"{section}.device") is not schema.Device.nvme:
            continue
        key = f"{section}.nvme_path"
        path = str(schema.get_value(loaded.cfg, key))
        if not path:
            yield loaded.error(f"{section}.device", "{key} = nvme needs {path}=FOLDER on the NVMe disk.", path=key)
            continue
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            yield loaded.error(
                key, "{key} = {value} is not a directory that can be written to: {reason}.", reason=error.strerror
            )


def _model(loaded: LoadedConfig) -> Iterator[ConfigError]:
    model = loaded.cfg.model
    is_read = model.init is not schema.Init.random
    if is_read and not model.path:
        yield loaded.error(
            "model.path", "model.path is empty: set model.path=DIR to a directory with a model in transformers' layout."
        )
    elif is_read and not os.path.isdir(model.path) and not files.is_hub_name(model.path):
        yield loaded.error(
            "model.path",
            "model.path = {value} is not a directory here. It must be the directory that holds "
            "config.json and the weights, or owner/name on Hugging Face.",
        )
    teacher = loaded.cfg.distill.teacher
    if teacher and not os.path.isdir(teacher) and not files.is_hub_name(teacher):
        yield loaded.error(
            "distill.teacher",
            "{key} = {value} is not a directory here. It must be the directory that holds config.json and the weights, "
            "or owner/name on Hugging Face.",
        )
    for key in ("model.tokenizer", "model.chat_template"):
        path = str(schema.get_value(loaded.cfg, key))
        if path and not os.path.exists(files.located(path)):
            yield loaded.error(key, "{key} = {value} does not exist.")


def _sources(loaded: LoadedConfig) -> Iterator[ConfigError]:
    data = loaded.cfg.data
    if not data.sources:
        sentence = tr("data.sources is empty: add 'data.sources=[{{path: FILE.jsonl}}]', or data=examples to try.")
        yield loaded.about("data.sources", sentence)
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            for sentence in _wrong_source(source, f"{name}[{index}]"):
                yield validate.about(loaded.position(name) + sentence, f"{name}[{index}]")


def _wrong_source(source: schema.SourceConfig, place: str) -> Iterator[str]:
    if source.format is schema.RowFormat.docstrings:
        for name in ("path", "hub", "split", "columns"):
            value = getattr(source, name)
            if value and (name, value) != ("split", "train"):
                key, shown = f"{place}.{name}", as_typed(value)
                yield tr("{key} = {path} has no effect with format docstrings. Remove it.", key=key, path=shown)
    elif bool(source.path) == bool(source.hub):
        yield tr(
            "{place} needs one of path (a file, directory or pattern) and hub (a name on Hugging Face).", place=place
        )
    elif source.path and not os.path.exists(files.located(source.path)) and not matching(source.path):
        key, folder = f"{place}.path", Path.cwd()
        yield tr(
            "{key} = {path}: there is no such file (looked in {folder}).", key=key, path=source.path, folder=folder
        )
    elif source.path and source.split != "train" and not os.path.isfile(Path(source.path, "dataset_dict.json")):
        yield tr(
            "{place}.split = {split} has an effect with hub and directories of several splits (dataset_dict.json) "
            "only. Remove it; where files are named by their split, give a pattern as path: data/{split}-*.parquet.",
            place=place,
            split=source.split,
        )
    for key in ("subset", "revision"):
        if getattr(source, key) and not source.hub:
            yield tr("{place}.{key} has an effect with hub only. Remove it.", place=place, key=key)
    if sentence := check_columns(source, place):
        yield sentence
    if not 0 < source.weight < math.inf:
        yield tr(
            "{place}.weight = {weight} must be above 0; remove the source instead.", place=place, weight=source.weight
        )


def check_columns(source: schema.SourceConfig, place: str) -> str:
    """Return what is wrong with a source's `columns`: a name that its format does not read; "" if nothing is."""
    fields = schema.ROW_FIELDS.get(source.format) or tuple(chain.from_iterable(schema.ROW_FIELDS.values()))
    for column in source.columns:
        if column not in fields:
            sentence = tr("{place}.columns: no format reads '{column}'.", place=place, column=column)
            return joined(sentence, did_you_mean(str(column), fields))
    return ""


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _run_dir(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """The run folder's parent must be writable, found out before anything is loaded."""
    existing = _existing(Path(loaded.cfg.run.dir).absolute())
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        yield loaded.error("run.dir", "run.dir = {value}: {folder} cannot be written to.", folder=existing)


def _prepare_dir(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Tokenized data must be readable, and where there are none yet, their folder writable."""
    stores = Path(loaded.cfg.prepare.dir).absolute() / "stores"
    existing = _existing(stores)
    wanted = os.R_OK | os.X_OK | (0 if existing == stores else os.W_OK)
    if not existing.is_dir() or not os.access(existing, wanted):
        yield loaded.error(
            "prepare.dir", "prepare.dir = {value}: {folder} cannot be used by this user.", folder=existing
        )


def _resume(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A path to resume from must hold a checkpoint; whether it is intact is found out by reading it."""
    resume = loaded.cfg.resume
    if resume in ("auto", "must", "never"):
        return
    path, run = Path(resume), loaded.cfg.run
    if run.name and os.path.isfile(Path(run.dir) / run.name / "logs" / "starts.jsonl"):
        return  # what its last start has resumed need not be there any more, see run_dir.py
    if any(os.path.isfile(path / name) for name in ("config.json", "adapter_config.json")):
        yield loaded.error(
            "resume",
            "resume = {path} is a model or an adapter alone, without what training needs to resume. Query it "
            "(toolkit generate {path}), or start another training from it: model.path={path}, of an adapter "
            "tuning.adapter={path}.",
            path=path,
        )
    elif not (os.path.isfile(path / "manifest.json") or any((path / "checkpoints").glob("step-*"))):
        yield loaded.error(
            "resume",
            "resume = {path} is not auto, must or never, nor a checkpoint or a run directory with one.",
            path=path,
        )


def _packages(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """What the metrics of the ChatGLM repositories need is no part of this package: it is old, and few need it."""
    wanted = [metric.value for metric in loaded.cfg.evaluate.metrics if metric.value.startswith("chatglm_")]
    packages = {"jieba": "jieba", "rouge_chinese": "rouge-chinese", "nltk": "nltk"}
    missing = [package for name, package in packages.items() if wanted and importlib.util.find_spec(name) is None]
    if missing:
        yield loaded.error(
            "evaluate.metrics",
            "evaluate.metrics: {metrics} needs what is not installed: pip install {packages}",
            metrics=", ".join(wanted),
            packages=" ".join(missing),
        )


CUSTOM_FILES = (_nvme_folders, _run_dir, _resume)
"""Rules about files and directories for a program that brings its own model and data."""


_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
# These scale whatever positions the model had before; the others (llama3, longrope) come with the scaled number.
_SCALES = ("linear", "dynamic", "ntk", "yarn")
# Published with linear scaling and the scaled number.
_IS_COUNTED = ("gemma3", "gemma3_text", "glm")
_LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm", "biogpt", "mpt")
_EXAMPLE = '"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": %d}'


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a config.json's model has positions for, scaled ones too; None without a limit."""
    if "position_encoding_2d" in config:
        return _number(config, "max_sequence_length")
    if "padded_vocab_size" in config:  # official ChatGLM2 and later: rope_ratio is counted in
        return _number(config, "seq_length")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    own = next((found for key in _KEYS if (found := _number(config, key))), None)
    if own is None or config.get("alibi"):
        return None
    limits = [own]
    for given in (config.get("rope_scaling"), config.get("rope_parameters")):
        # Some models have a scaling for each kind of layer.
        for scaling in [given, *given.values()] if isinstance(given, Mapping) else []:
            if isinstance(scaling, Mapping):
                kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
                is_counted = kind == "linear" and config.get("model_type") in _IS_COUNTED
                if kind in _SCALES and isinstance(factor, (int, float)) and 0 < factor < 2**20 and not is_counted:
                    limits.append(int((_number(scaling, "original_max_position_embeddings") or own) * factor))
    return max(limits)


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63 else None


def check_positions(loaded: LoadedConfig) -> None:
    """Raise ConfigError if a sample could be longer than the model, where it is on this disk, has positions."""
    cfg = loaded.cfg
    config: Any = {}
    if cfg.model.init is schema.Init.random:
        limit: int | None = cfg.model.shape.max_positions
    else:
        file = Path(cfg.model.path) / "config.json"
        try:
            config = parsed_json(file_bytes(file))
        except (OSError, ValueError):  # reported by what loads the model
            return
        limit = position_limit(config) if isinstance(config, dict) else None
    learned = cfg.tuning.num_tokens if cfg.tuning.method is schema.TuningMethod.prompt else 0
    if limit is None or cfg.data.max_length + learned <= limit:
        return
    if cfg.model.init is schema.Init.random:
        remedy = tr("or raise model.shape.max_positions")
    elif "position_encoding_2d" in config or "padded_vocab_size" in config:
        remedy = tr(
            "or train the variant for long texts, such as chatglm3-6b-32k, chatglm3-6b-128k or glm-4-9b-chat-1m"
        )
    elif config.get("model_type") in _LEARNED:
        remedy = tr("or train a model with more positions: this one has learned an embedding for each")
    else:
        remedy = tr(
            "train the variant of the model for long texts, or extend its positions by rope_scaling in its "
            "config.json: {example}",
            example=_EXAMPLE % limit,
        )
    of_prompt = f"data.max_length + tuning.num_tokens = {cfg.data.max_length} + {learned}"
    raise loaded.error(
        "data.max_length",
        "{length}: more than the {limit} positions that the model has. Set data.max_length={left} (longer samples: "
        "data.too_long), {remedy}.",
        length=of_prompt if learned else f"data.max_length = {cfg.data.max_length}",
        limit=limit,
        left=limit - learned,
        remedy=remedy,
    )


_OTHER_TOOLS = ("rocm-smi", "amd-smi", "npu-smi", "hl-smi", "xpu-smi", "cnmon", "mthreads-gmi")
"""Programs that come with the drivers of AMD, Ascend, Gaudi, Intel, Cambricon and Moore Threads."""


def is_cpu() -> bool:
    """Return whether ranks on this machine compute on its processors: DeepSpeed was told so, or finds nothing else."""
    is_told = bool(os.environ.get("DS_ACCELERATOR"))
    return device_here() == "cpu" and (is_told or not any(map(shutil.which, _OTHER_TOOLS)))


def _has_fp16(cpuinfo: Path) -> bool:
    """Return whether oneDNN computes in fp16 on these processors, which DeepSpeed asks; true where it is unknown.

    oneDNN 3 has it for the instruction sets avx512_core_fp16 and avx2_vnni_2, of which avx_ne_convert is part.
    """
    if platform.machine() != "x86_64" or not cpuinfo.is_file():
        return True
    return bool(re.search(r"\b(avx512_fp16|avx_ne_convert)\b", cpuinfo.read_text(errors="replace")))


PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "swanlab": "swanlab",
    "trackio": "trackio",
}
"""Tracker, which is also the name of its module -> what pip installs. A CSV file needs none."""


def check_track_here(loaded: LoadedConfig) -> None:
    """Raise ConfigError for trackers whose package is not installed here, and for DeepSpeed's own of Comet. For rank 0
    only: no other rank needs them.
    """
    wanted = {f"track.{name}": (name, PACKAGES[name]) for name in loaded.cfg.track.enabled if name in PACKAGES}
    comet = loaded.cfg.ds_extra.get("comet")
    if isinstance(comet, dict) and comet.get("enabled"):
        wanted["ds_extra.comet"] = ("comet_ml", "comet-ml")
    raise_all(
        loaded.error(
            f"{section}.enabled",
            "{section} needs the package {name}, which is not installed:  pip install {package}",
            section=section,
            name=name,
            package=package,
        )
        for section, (name, package) in wanted.items()
        if not getattr(importlib.util.find_spec(name), "origin", None)  # wandb leaves a directory
    )


def mlflow_folder(uri: str) -> Path | None:
    """Return the folder that an MLflow address means; None for a server or a database."""
    parts = urlsplit(uri)
    return Path(parts.path if parts.scheme == "file" else uri) if parts.scheme in ("", "file") else None


def _tuning(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Check the adapter's directory, and what QLoRA needs of this machine."""
    tuning = loaded.cfg.tuning
    if tuning.adapter and not os.path.isdir(tuning.adapter):
        yield loaded.error("tuning.adapter", "tuning.adapter = {value} is not a directory here.")
    if tuning.method is not schema.TuningMethod.qlora:
        return
    has_package = importlib.util.find_spec("bitsandbytes") is not None
    if not has_package or not (is_cpu() or shutil.which("nvidia-smi")):
        yield loaded.error(
            "tuning.method",
            "tuning.method = qlora needs {missing}, which is not here. Use tuning=lora.",
            missing=tr("an NVIDIA GPU") if has_package else tr("the package bitsandbytes (pip install bitsandbytes)"),
        )


FILES = (*CUSTOM_FILES, _prepare_dir, _model, _sources, _packages, _tuning)
"""The same for a language model."""


_GPU_ONLY = ("zero.zero_quantized_weights", "zero.zero_quantized_gradients", "zero.offload_optimizer.super_offload")


def check_devices(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Check that the ranks' device computes in the precision of the run, and what works on NVIDIA GPUs alone."""
    # DeepSpeed 0.19.8, runtime/engine.py: "Type fp16 is not supported on your device" once the model is built.
    if loaded.cfg.precision.dtype is schema.Dtype.fp16 and is_cpu() and not _has_fp16(Path("/proc/cpuinfo")):
        yield loaded.error(
            "precision.dtype",
            "precision.dtype = fp16 needs a GPU: the ranks here run on CPUs that do not compute in "
            "fp16. Use precision=bf16 or precision=fp32. To check a recipe for other nodes, set "
            "DS_ACCELERATOR=cuda.",
        )
    for key in _GPU_ONLY:
        if schema.get_value(loaded.cfg, key) and (is_cpu() or shutil.which("nvidia-smi") is None):
            yield loaded.error(key, "{key} = true needs NVIDIA GPUs, and there are none here. Set it to false.")
    kernels, reason = loaded.cfg.kernels, without_liger(not is_cpu() and shutil.which("nvidia-smi") is not None)
    if reason and kernels.loss is schema.LossKernel.liger:
        yield loaded.error("kernels.loss", "kernels.loss = liger: {reason}", reason=reason)
    if reason and kernels.liger is schema.When.always:
        yield loaded.error("kernels.liger", "kernels.liger = always: {reason}", reason=reason)
    if loaded.cfg.optim.name is schema.OptimizerName.adamw_8bit and importlib.util.find_spec("bitsandbytes") is None:
        yield loaded.error(
            "optim.name",
            "optim.name = adamw_8bit needs the package bitsandbytes, which is not installed:  pip install bitsandbytes",
        )


def without_liger(on_gpu: bool) -> str:
    """Return why liger's kernels cannot be used; "" if they can, with models that they know."""
    if not on_gpu:
        return tr("there is no GPU")
    has_package = importlib.util.find_spec("liger_kernel") is not None
    return "" if has_package else tr("the package liger-kernel is not installed (pip install liger-kernel)")


_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "*.safetensors")
_NOT = ["*/*", "consolidated*"]
"""Files in folders, and the weights a second time in their makers' own layout: nothing reads them."""
_POLL_S = 0.2


def needs_lookup(model: schema.ModelConfig) -> bool:
    """Whether only Hugging Face, or its cache, knows a model's sizes."""
    is_published = bool(model.published) and model.path == model.hub_id
    return model.init is not schema.Init.random and files.is_hub_name(model.path) and not is_published


def resolve_model_path(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
    """Return a config whose `model.path` is a directory: a snapshot in the cache, downloaded if it is not there.

    One process of a machine downloads; the others wait. Hugging Face's HF_* variables apply: with HF_HUB_OFFLINE=1
    nothing but the cache is looked at. With `config_only` config.json is enough, and the Python files if it names any.
    A ConfigError if there is no such model, it is not for everybody, or neither cache nor network has it.
    """
    is_random = loaded.cfg.model.init is schema.Init.random
    return loaded if is_random else _resolve(loaded, "model.path", "model.revision", config_only)


def resolve_teacher(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
    """Return a config whose `distill.teacher` is a directory, as `resolve_model_path` does of the model."""
    return _resolve(loaded, "distill.teacher", "distill.teacher_revision", config_only)


def _resolve(loaded: LoadedConfig, key: str, revision_key: str, config_only: bool) -> LoadedConfig:
    name, revision = (str(schema.get_value(loaded.cfg, one)) for one in (key, revision_key))
    if not files.is_hub_name(name):
        return loaded
    is_model, modelscope_id = key == "model.path", loaded.cfg.model.modelscope_id
    try:
        folder = _config_folder(name, revision) if config_only else _once_per_machine(name, revision)
    except Exception as error:
        reason = _reason(name, revision, error).replace("model.path", key).replace("model.revision", revision_key)
        if is_model and modelscope_id:
            ways = tr(
                "Or `modelscope download --model {name} --local_dir DIR`, then model.path=DIR. To try the recipe "
                "without weights: model=glm_tiny.",
                name=modelscope_id,
            )
            reason = joined(reason, ways)
        raise loaded.about(key, reason) from error
    place = tr("{name} on Hugging Face", name=name)
    values = {key: folder, revision_key: ""} | ({"model.hub_id": name} if is_model else {})
    return replace(loaded, {one: (value, place) for one, value in values.items()})


def _config_folder(name: str, revision: str) -> str:
    import huggingface_hub as hub

    file = hub.try_to_load_from_cache(name, "config.json", revision=revision or None)
    if not isinstance(file, str):
        file = hub.hf_hub_download(name, "config.json", revision=revision or None)
    folder = Path(file).parent
    if '"auto_map"' in Path(file).read_text(encoding="utf-8") and not any(folder.glob("*.py")):
        wanted = ["config.json", "*.py"]
        return str(hub.snapshot_download(name, revision=revision or None, allow_patterns=wanted, ignore_patterns=_NOT))
    return str(folder)


def _once_per_machine(name: str, revision: str) -> str:
    """Take a snapshot in one process after another; of those that one launcher started the first alone downloads."""
    from huggingface_hub import constants, snapshot_download

    def snapshot(is_first: bool) -> str:
        if is_first and not constants.HF_HUB_OFFLINE:
            say(
                "Looking for {name} on Hugging Face; what is not in {cache} yet is downloaded.",
                name=name,
                cache=constants.HF_HUB_CACHE,
            )
        is_local = constants.HF_HUB_OFFLINE or not is_first
        get = partial(snapshot_download, name, revision=revision or None, local_files_only=is_local)
        folder = Path(get(allow_patterns=list(_FILES), ignore_patterns=_NOT))
        if not any(folder.glob("*.safetensors")):  # the official ChatGLM repositories
            get(allow_patterns=[*_FILES, "pytorch_model*.bin"], ignore_patterns=_NOT)
        return str(folder)

    if constants.HF_HUB_OFFLINE or os.environ.get("WORLD_SIZE", "1") == "1":
        return snapshot(True)
    file = Path(constants.HF_HUB_CACHE) / ".locks" / f"models--{name.replace('/', '--')}.toolkit"
    launch = f"{os.getppid()} {os.environ.get('MASTER_PORT', '')} {revision}"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        while not try_lock(lock)[0]:
            time.sleep(_POLL_S)
        lock.seek(0)
        folder = snapshot(lock.read() != launch)
        lock.truncate(0)
        lock.write(launch)
    return folder


def _reason(name: str, revision: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    of_revision = tr("{name} at revision {revision}", name=name, revision=revision) if revision else name
    if isinstance(error, errors.GatedRepoError):
        return tr(
            "model.path = {name}: its authors give it to whom they have agreed with only. Accept the terms at "
            "https://huggingface.co/{name} and log in (`hf auth login`, or the variable HF_TOKEN).",
            name=name,
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return tr(
            "model.revision = {revision}: {name} has no such commit, branch or tag.", revision=revision, name=name
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return tr(
            "model.path = {name} is neither a directory here nor a model on Hugging Face (or a private "
            "one: log in with `hf auth login`, or the variable HF_TOKEN).",
            name=name,
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return tr("model.path = {name} holds no config.json: it is not a model of transformers.", name=of_revision)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return tr(
            "model.path = {name} is neither a directory here nor in the cache ({cache}), and Hugging Face cannot be "
            "reached{offline}. Where there is a network: `hf download {repository}`, then copy the cache (HF_HOME) or "
            "set model.path=DIR.",
            name=of_revision,
            cache=constants.HF_HUB_CACHE,
            repository=name,
            offline=" (HF_HUB_OFFLINE=1)" if constants.HF_HUB_OFFLINE else "",
        )
    return tr(
        "model.path = {name} cannot be had from Hugging Face: {reason}",
        name=of_revision,
        reason=f"{type(error).__name__}: {first}",
    )


_KINDS = {schema.OptimizerName.adamw: "adam", schema.OptimizerName.adam: "adam", schema.OptimizerName.muon: "adam"}
_KINDS[schema.OptimizerName.lion] = "lion"
"""Optimizers that DeepSpeed has ops for; of Muon the Adam beside it."""


def device_here(environ: Mapping[str, str] = os.environ) -> str:
    """Return what DeepSpeed will train on here, found without torch: DS_ACCELERATOR, or cuda, or cpu."""
    if named := environ.get("DS_ACCELERATOR"):
        return named
    is_hidden = environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    has_gpu = bool(shutil.which("nvidia-smi")) or any(Path("/dev").glob("nvidia[0-9]*"))
    return "cuda" if has_gpu and not is_hidden else "cpu"


def with_optimizer(cfg: schema.RunConfig, environ: Mapping[str, str] = os.environ) -> tuple[schema.RunConfig, str]:
    """Return a config whose `optim.torch` is true or false, and why auto is that here; "" where it was given."""
    if cfg.optim.torch != schema.AUTO:
        return cfg, ""
    kind, is_torch = device_here(environ), False
    if cfg.optim.name not in _KINDS:
        reason = tr("{name} is neither's", name=cfg.optim.name.value)
    elif cfg.zero.offload_optimizer.device is not schema.Device.none:
        reason = tr("the optimizer is offloaded")
    elif kind == "cpu":
        is_torch, reason = True, tr("no GPU here")
    else:
        op = _optimizer_op(cfg, kind)
        tools = lacking_tools([op], environ) if kind == "cuda" and not built_ops([op], environ) else []
        reason = tr("{tools} not found here", tools=", ".join(tools)) if tools else tr("there is a GPU and a compiler")
        is_torch = bool(tools)
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, torch=is_torch)), reason


def _optimizer_op(cfg: schema.RunConfig, kind: str) -> str:
    on_gpu = cfg.zero.offload_optimizer.device is schema.Device.none and kind != "cpu"
    return f"{'fused' if on_gpu else 'cpu'}_{_KINDS[cfg.optim.name]}"


def needed_ops(cfg: schema.RunConfig, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ops that DeepSpeed uses for a recipe, by the names under which it builds them."""
    cfg, _ = with_optimizer(cfg, environ)
    offloads = {cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device}
    kind, found = device_here(environ), []
    if not cfg.optim.torch and cfg.optim.name in _KINDS:
        found.append(_optimizer_op(cfg, kind))
    if schema.Device.nvme in offloads:
        found.append("async_io")
    if cfg.distributed.cpu_shared_memory and kind == "cpu":
        found.append("deepspeed_shm_comm")
    if kind == "cuda":
        quantizes = cfg.zero.zero_quantized_weights or cfg.zero.zero_quantized_gradients
        has_gds = schema.Device.nvme in offloads and cfg.zero.aio.use_gds
        found += ["gds"] * has_gds + ["quantizer"] * quantizes + ["dc"] * cfg.compile.deepcompile
    return found


def built_ops(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return those that are compiled already, with DeepSpeed's installation or by an earlier run."""
    shipped, root = set[str](), extensions_dir(environ)
    with suppress(OSError, metadata.PackageNotFoundError):  # importing DeepSpeed, which knows it, takes seconds
        file = metadata.distribution("deepspeed").locate_file("deepspeed/git_version_info_installed.py")
        shipped.update(re.findall(r"'(\w+)': True", Path(str(file)).read_text(encoding="utf-8")))
    return [name for name in names if name in shipped or (root / name / f"{name}.so").exists()]


def extensions_dir(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> Path:
    """Return where ops are built, one directory each: TORCH_EXTENSIONS_DIR, or one in the user's cache for this Python,
    PyTorch, CUDA, C library, CPU and GPUs. Nodes share home directories, and ops are compiled for one node's CPU and
    GPU; PyTorch's default tells Python and CUDA alone apart (torch 2.13, cpp_extension.py, _get_build_directory).
    """
    if named := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    torch, cuda = "", ""
    with suppress(OSError, metadata.PackageNotFoundError):
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
        torch, cuda = (
            "".join(re.findall(rf"^{name}\b.*= '(.+)'", text, re.MULTILINE)) for name in ("__version__", "(?:cuda|hip)")
        )
    chips = [platform.machine(), *platform.libc_ver()]
    with suppress(OSError):  # Linux alone has it; flags on x86, Features on ARM
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        chips.append(next((line for line in lines if line.startswith(("flags", "Features"))), ""))
    for file in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            found = re.search(r"Model:\s*(.+)", file.read_text(encoding="utf-8", errors="replace"))
            chips += [found[1]] if found and found[1] not in chips else []
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256("\n".join(chips).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return cache / "torch_extensions" / f"{python}-torch{torch}-cuda{cuda or 'none'}-{digest}"


def _cuda_home(environ: Mapping[str, str]) -> Path:
    """Return where PyTorch expects nvcc and its headers (torch 2.13, cpp_extension.py, _find_cuda_home)."""
    nvcc = shutil.which("nvcc")
    usual = Path(nvcc).parent.parent if nvcc else "/usr/local/cuda"
    return Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or usual)


_CUDA_HEADERS = ("cuda_runtime.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")
"""Those that ATen/cuda/CUDAContext.h includes (torch 2.13)."""
_HEADERS = {
    **dict.fromkeys(("fused_adam", "fused_lion", "quantizer"), _CUDA_HEADERS),
    "dc": (*_CUDA_HEADERS, "nccl.h"),
    "gds": ("cuda_runtime.h", "cufile.h"),
}
"""Op for GPUs -> headers outside of DeepSpeed and PyTorch that its sources include (0.19.8)."""


def _include_folders(environ: Mapping[str, str]) -> list[str]:
    named = ":".join(environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")).split(":")
    return [*filter(None, named), "/usr/local/include", "/usr/include"]


def _missing_headers(ops: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return which headers a build of ops for GPUs does not find, and where it looks (torch 2.13, cpp_extension.py,
    include_paths): not in NVIDIA's wheels. "" if it finds all.
    """
    home = _cuda_home(environ)
    folders = [str(home / "include"), *filter(None, [environ.get("CUDA_INC_PATH")]), *_include_folders(environ)]
    if all(op.startswith("fused_") for op in ops):  # of nvcc alone, which looks beside itself, too (nvcc.profile)
        beside = (home / "bin/nvcc").resolve().parent.parent
        folders[1:1] = map(str, [beside / "include", *beside.glob("targets/*/include")])
    headers = dict.fromkeys(header for op in ops for header in _HEADERS[op])
    missing = [header for header in headers if not any(Path(folder, header).exists() for folder in folders)]
    looked = ", ".join(dict.fromkeys(folders))
    return tr("{headers} (looked in {folders})", headers=", ".join(missing), folders=looked) if missing else ""


def lacking_tools(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what building some ops needs and this machine does not have."""
    return [name for name, is_found in tools_for(names, environ).items() if not is_found] if names else []


def tools_for(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Return what building some ops needs, and whether this machine has it."""
    has = {
        "g++": shutil.which(environ.get("CXX", "g++")),
        "ninja": shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists(),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    if "async_io" in names:
        has["libaio.h"] = any(Path(folder, "libaio.h").exists() for folder in _include_folders(environ))
    if on_gpu := [name for name in names if name in _HEADERS]:
        has["nvcc"] = (_cuda_home(environ) / "bin/nvcc").exists()
        if has["nvcc"] and (missing := _missing_headers(on_gpu, environ)):
            has[missing] = False
    return {name: bool(found) for name, found in has.items()}


def how_to_install(tools: Iterable[str]) -> str:
    """Return what to type, or to get, for tools of `lacking`."""
    commands = {
        "g++": "apt install g++",
        "ninja": "pip install ninja",
        "Python.h": "apt install python3-dev",
        "libaio.h": "apt install libaio-dev",
        "nvcc": tr("the CUDA toolkit of torch.version.cuda, with CUDA_HOME set"),
    }
    headers = tr("all of nvcc's CUDA toolkit, or CPATH=DIRECTORY of these headers")
    return "; ".join(commands.get(tool, headers) for tool in tools)


def check_compiler(loaded: LoadedConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Check that what DeepSpeed has to compile for a recipe can be compiled here; if not, say what to install."""
    names = needed_ops(loaded.cfg, environ)
    built = built_ops(names, environ)
    missing = [name for name in names if name not in built and lacking_tools([name], environ)]
    if not missing:
        return
    raise loaded.error(
        _WITHOUT.get(missing[0], ("optim.torch",))[0],
        "DeepSpeed has to compile {ops} for this recipe, and {tools} is missing on this machine. Install it "
        "({commands}), or set {other}.",
        ops=", ".join(missing),
        tools=", ".join(tools := lacking_tools(missing, environ)),
        commands=how_to_install(tools),
        other=without_ops(missing),
    )


_WITHOUT = {
    "async_io": ("zero.offload_optimizer.device", "zero=stage3_offload"),
    "deepspeed_shm_comm": ("distributed.cpu_shared_memory", "distributed.cpu_shared_memory=false"),
    "quantizer": (
        "zero.zero_quantized_weights",
        "zero.zero_quantized_weights=false zero.zero_quantized_gradients=false",
    ),
    "dc": ("compile.deepcompile", "compile.deepcompile=false"),
    "gds": ("zero.aio.use_gds", "zero.aio.use_gds=false"),
}
"""Op -> the key that needs it, and what to set in order to do without; of the others optim.torch."""


def without_ops(names: Iterable[str]) -> str:
    """Return what to set in order to do without some ops."""
    return " ".join(dict.fromkeys(_WITHOUT.get(name, ("", "optim.torch=true"))[1] for name in names))


def check_packages(name: str = "deepspeed-finetuning-toolkit") -> None:
    """Check that packages are installed in versions that this toolkit knows: its workarounds reach into DeepSpeed, and
    earlier versions computed wrong gradients in silence (0.18.3 to 0.19.3, DeepSpeed issue 8224).

    A checkout that is on the path without being installed says nothing of versions. Raises LaunchError.
    """
    from packaging.requirements import Requirement

    wrong = []
    with suppress(metadata.PackageNotFoundError):
        for wanted in map(Requirement, metadata.requires(name) or ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            try:
                found = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                wrong.append(tr("{package} (not installed)", package=wanted))
                continue
            if not wanted.specifier.contains(found, prereleases=True):
                wrong.append(f"{wanted} ({found})")
    if wrong:
        raise LaunchError(
            "This toolkit needs other packages than are installed: {packages}. Install them: "
            "`pip install -c constraints.txt -e .` in its checkout.",
            packages=", ".join(wrong),
        )


OPS = (
    *("fused_adam", "fused_lion", "cpu_adam", "cpu_lion", "async_io", "gds", "quantizer", "dc"),
    *("deepspeed_shm_comm", "deepspeed_ccl_comm", "utils"),
)
"""Names under which DeepSpeed 0.19.8 builds what a run may use."""
YOUNG_S = 120.0
"""Where something was written so recently somebody may be building: here, or on a machine that shares the folder."""


def check_build_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> None:
    """Refuse to start beside a lock that nobody holds.

    PyTorch's builder makes a file `lock` and polls for its end without a limit (torch 2.13, utils/file_baton.py). While
    it works, ninja and the compiler have the build's folder as their working folder.
    """
    for lock, age_s in stale_build_locks(environ, proc):
        raise LaunchError(
            "{lock} was left {minutes} minutes ago by a build that did not come to its end, and no "
            "process on this machine is building there now: this run would wait for it for ever. "
            "Remove it:  rm {lock}",
            lock=lock,
            minutes=f"{age_s / 60:,.0f}",
        )


def stale_build_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Iterator[tuple[Path, float]]:
    """Yield the locks that nobody holds, and the seconds since anything happened beside them."""
    for lock in (extensions_dir(environ) / name / "lock" for name in OPS):
        try:
            # Another machine may be building in a folder that is shared: then something in it is new.
            age_s = time.time() - max(path.stat().st_mtime for path in (lock, *lock.parent.iterdir()))
        except OSError:  # there is none, or it has just been released
            continue
        if age_s <= YOUNG_S:
            continue
        builds = set[Path]()
        for process in proc.glob("[0-9]*"):
            with suppress(OSError):  # gone, or somebody else's
                builds.add((process / "cwd").readlink())
        if lock.parent.resolve() not in builds:
            yield lock, age_s
