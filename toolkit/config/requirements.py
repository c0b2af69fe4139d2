"""What a config needs of this machine besides files: a device that computes as it says, and installed packages."""

import importlib.util
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from toolkit.config import dotted_keys, schema
from toolkit.config.devices import is_cpu, is_cpu_by_default, is_rocm, torch_build
from toolkit.config.load import LoadedConfig
from toolkit.messages import ConfigError, LaunchError, raise_all, tr, warn

DISTRIBUTION = "exacttune"
"""The name of this package on an index: what `pip` installs, and whose metadata name the packages that it needs."""


def _has_fp16(cpuinfo: Path) -> bool:
    """Return whether oneDNN computes in fp16 on these processors, which DeepSpeed asks; true where it is unknown.

    oneDNN 3 has it for the instruction sets avx512_core_fp16 and avx2_vnni_2, of which avx_ne_convert is part.
    """
    if platform.machine() != "x86_64" or not cpuinfo.is_file():
        return True
    return bool(re.search(r"\b(avx512_fp16|avx_ne_convert)\b", cpuinfo.read_text(errors="replace")))


def warn_without_gpu(model: schema.ModelConfig) -> None:
    """Warn if a published model is to be trained on processors only because no GPU is found."""
    if model.init is schema.Init.pretrained and is_cpu_by_default():
        warn(
            "no GPU is found, so this trains on CPUs. A GPU must be listed by nvidia-smi, and PyTorch be a build for "
            "it (here {version}). If CPUs are meant: export DS_ACCELERATOR=cpu",
            version=torch_build("__version__"),
        )


_GPU_ONLY = ("zero.zero_quantized_weights", "zero.zero_quantized_gradients", "zero.offload_optimizer.super_offload")


def check_devices(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each setting that the device or the packages here do not support: fp16 on CPUs, what needs
    NVIDIA GPUs, Liger's kernels, 8-bit optimizers.
    """
    # DeepSpeed 0.19.8, runtime/engine.py: "Type fp16 is not supported on your device" once the model is built.
    if loaded.cfg.precision.dtype is schema.Dtype.fp16 and is_cpu() and not _has_fp16(Path("/proc/cpuinfo")):
        yield loaded.error(
            "precision.dtype",
            "precision.dtype = fp16 needs a GPU: the ranks here run on CPUs that do not compute in fp16. Use "
            "precision=bf16 or precision=fp32. To check a recipe for other nodes, set DS_ACCELERATOR=cuda.",
        )
    if loaded.cfg.precision.fp8 is not schema.Fp8.none and is_cpu():
        warn(
            "precision.fp8 = {value}: CPUs have no FP8 products, and a step of a real model takes minutes. Use "
            "precision=bf16. To check a recipe for other nodes, set DS_ACCELERATOR=cuda.",
            value=loaded.cfg.precision.fp8.value,
        )
    for key in _GPU_ONLY:
        if dotted_keys.get_value(loaded.cfg, key) and (is_cpu() or shutil.which("nvidia-smi") is None):
            yield loaded.error(key, "{key} = true needs NVIDIA GPUs, and there are none here. Set it to false.")
    has_gpu = not is_cpu() and (shutil.which("nvidia-smi") is not None or is_rocm())
    kernels, reason = loaded.cfg.kernels, reason_not_to_use_liger(has_gpu)
    if reason and kernels.loss is schema.LossKernel.liger:
        yield loaded.error("kernels.loss", "kernels.loss = liger: {reason}", reason=reason)
    if reason and kernels.liger is schema.When.always:
        yield loaded.error("kernels.liger", "kernels.liger = always: {reason}", reason=reason)
    if loaded.cfg.optim.name is schema.OptimizerName.adamw_8bit and importlib.util.find_spec("bitsandbytes") is None:
        yield loaded.error(
            "optim.name",
            "optim.name = adamw_8bit needs the package bitsandbytes, which is not installed:  pip install bitsandbytes",
        )


def reason_not_to_use_liger(on_gpu: bool) -> str:
    """Return why liger's kernels cannot be used; "" if they can, with models that they know."""
    if not on_gpu:
        return tr("there is no GPU")
    has_package = importlib.util.find_spec("liger_kernel") is not None
    return "" if has_package else tr("the package liger-kernel is not installed (pip install liger-kernel)")


def _check_metric_packages(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if packages are missing that the metrics of the ChatGLM repositories need: old ones, which are no
    dependencies as few runs need them.
    """
    wanted = [metric.value for metric in loaded.cfg.evaluate.metrics if metric.value.startswith("chatglm_")]
    if not wanted:
        return
    packages = {"jieba": "jieba", "rouge_chinese": "rouge-chinese", "nltk": "nltk"}  # name to import -> to install
    missing = [package for name, package in packages.items() if importlib.util.find_spec(name) is None]
    if missing:
        yield loaded.error(
            "evaluate.metrics",
            "evaluate.metrics: {metrics} needs what is not installed: pip install {packages}",
            metrics=", ".join(wanted),
            packages=" ".join(missing),
        )


def _check_qlora(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if QLoRA cannot be done here, see `reason_not_to_use_qlora`."""
    if loaded.cfg.tuning.method is schema.TuningMethod.qlora and (reason := reason_not_to_use_qlora()):
        yield loaded.error("tuning.method", reason)


def reason_not_to_use_qlora() -> str:
    """Return why QLoRA cannot be done here; "" if it can."""
    has_package = importlib.util.find_spec("bitsandbytes") is not None
    if has_package and (is_cpu() or shutil.which("nvidia-smi")):
        return ""
    missing = tr("an NVIDIA GPU") if has_package else tr("the package bitsandbytes (pip install bitsandbytes)")
    return tr("tuning.method = qlora needs {missing}, which is not here. Use tuning=lora.", missing=missing)


RULES = (_check_metric_packages, _check_qlora)
"""Rules about packages and devices that a method or a metric of a language model needs."""


def check_tracker_packages(loaded: LoadedConfig) -> None:
    """Raise ConfigError for trackers whose package is not installed here, and for DeepSpeed's own of Comet. For rank 0
    only: no other rank needs them.
    """
    packages = schema.TRACKER_PACKAGES
    wanted = {f"track.{name}": (name, packages[name]) for name in loaded.cfg.track.enabled if name in packages}
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
        if not getattr(importlib.util.find_spec(name), "origin", None)  # the directory wandb/ of a run has no origin
    )


def check_packages(name: str = DISTRIBUTION) -> None:
    """Check that packages are installed in versions that this toolkit knows: its workarounds reach into DeepSpeed, and
    earlier versions computed wrong gradients in silence (measured ones: benchmarks/README.md; DeepSpeed issue 8224). A
    checkout that is on the path without being installed says nothing of versions. Raises LaunchError.
    """
    from packaging.requirements import Requirement

    wrong = []
    with suppress(metadata.PackageNotFoundError):
        for wanted in map(Requirement, metadata.requires(name) or ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):  # of another system or an extra
                continue
            try:
                installed = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                wrong.append(tr("{package} (not installed)", package=wanted))
                continue
            if not wanted.specifier.contains(installed, prereleases=True):
                wrong.append(f"{wanted} ({installed})")
    if wrong:
        raise LaunchError(
            "This toolkit needs other packages than are installed: {packages}. Install them: "
            "`pip install -c constraints.txt -e .` in its checkout.",
            packages=", ".join(wrong),
        )
