"""Directories of quantized weights: which kind a directory holds, and what to do with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.schema import Dtype
from toolkit.messages import ModelError, json_object, say, tr
from toolkit.models.directory import (
    MODELOPT_FILE,
    QUANTIZATION_KEYS,
    is_quantized,
    is_trusted,
    quantization_settings,
    read_json_or_empty,
)

READABLE = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors")
"""Values of quant_method of which `toolkit export-model` writes a copy in 16 bits."""
_FORMATS = {
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("gemm",),
    "compressed-tensors": (
        *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
    ),
}
"""quant_method -> the packings that are read, the default first."""


def drop_settings(config: Any) -> None:
    """Delete from transformers' config of a model, and of its text model, how the weights are quantized."""
    for section in (config, config.get_text_config()):
        for key in QUANTIZATION_KEYS:
            if hasattr(section, key):
                delattr(section, key)


def method_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Return how a directory's weights are quantized, such as gptq; "" if they are not. `config`: its config.json."""
    if settings := quantization_settings(config):
        return _method(settings)
    return _modelopt(folder) if (folder / MODELOPT_FILE).is_file() else ""


def format_of(settings: Mapping[str, Any]) -> str:
    """Return the packing that a quantization_config names, or its method's default; "" if its method has only one."""
    method = _method(settings)
    if method == "awq" and settings.get("backend") == "llm-awq":  # a packing of its own, whatever `version` says
        return "llm-awq"
    for key in ("version", "format") if method == "awq" else ("checkpoint_format", "format"):
        if settings.get(key):
            return str(settings[key]).lower()
    return _FORMATS[method][0] if method in _FORMATS else ""


def is_readable(settings: Mapping[str, Any]) -> bool:
    """Whether a copy in 16 bits can be written of weights with this quantization_config."""
    method = _method(settings)
    if method not in READABLE:
        return False
    return method not in _FORMATS or format_of(settings) in _FORMATS[method]


def is_read_in_16_bits(folder: Path) -> bool:
    """Whether a directory's weights are quantized, and matrices are made of them as they are read. Those of a model
    whose code is its own are not: it may build their layers by itself.
    """
    return is_readable(quantization_settings(read_json_or_empty(folder / "config.json"))) and not is_trusted(folder)


def check_readable(path: str | Path) -> None:
    """Raise ModelError for a directory of quantized weights that are not read in 16 bits."""
    folder = Path(path)
    if is_quantized(folder) and not is_read_in_16_bits(folder):
        raise quantization_error(read_json_or_empty(folder / "config.json"), folder)


def report(folder: Path, dtype: Dtype) -> None:
    """Report in which precision the quantized weights of a directory are read."""
    if is_read_in_16_bits(folder):
        method = method_of(folder, read_json_or_empty(folder / "config.json"))
        say("Quantized weights ({method}) are read in {dtype}. An export has none.", method=method, dtype=dtype.value)


def quantization_error(config: Mapping[str, Any], folder: Path) -> ModelError:
    """Return the error for a directory of quantized weights, with what to do instead. `config`: its config.json."""
    settings = quantization_settings(config)
    advice = tr("Use the original repository in bf16: tuning=qlora puts it in 4 bits while it is read.")
    if is_readable(settings):
        advice = tr(
            "Write a copy in 16 bits and train that, with tuning=qlora if it is too large:  toolkit export-model "
            "{folder} dtype=bf16 output=DIR",
            folder=folder,
        )
    return ModelError(
        "{folder} holds quantized weights ({method} in {file}), which cannot be trained or merged into. {way} "
        "(docs/models.md#quantized-checkpoints)",
        folder=folder,
        method=method_of(folder, config),
        file="config.json" if settings else MODELOPT_FILE,
        way=advice,
    )


def _method(settings: Mapping[str, Any]) -> str:
    """Return the quant_method of a quantization_config, "?" if it names none; ModelOpt's with its algorithm."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):  # its older files have no quant_method
        return "bitsandbytes"
    if settings.keys() >= {"bits", "group_size"} and "quant_method" not in settings:
        return "mlx"
    return " ".join(str(settings[key]) for key in ("quant_method", "quant_algo") if settings.get(key)) or "?"


def _modelopt(folder: Path) -> str:
    """Return method and algorithm of `MODELOPT_FILE`, such as modelopt NVFP4."""
    settings = json_object(folder / MODELOPT_FILE, ModelError).get("quantization")
    algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    return f"modelopt {algorithm or ''}".strip()
