"""Optional packages whose kernels transformers calls in layers other than attention, if installed. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from toolkit.messages import joined, tr


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the layers of some types of models use."""

    layers: str
    """Kind of layer, by its name in papers."""
    packages: tuple[str, ...]
    """Names to import."""
    types: tuple[str, ...]
    """Their `model_type`, that of a text model without _text."""
    packs: bool = False
    """Whether the kernels are told where the samples of packed rows begin; see toolkit/models/delta_layers.py."""


TABLE = (
    Kernels(
        "gated delta rule",
        ("fla", "causal_conv1d"),
        ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"),
        packs=True,
    ),
    Kernels("gated delta rule", ("fla", "causal_conv1d"), ("lara_mini",)),
    Kernels("Kimi delta attention", ("fla", "causal_conv1d"), ("bailing_hybrid", "glm5_next", "kimi_linear")),
    Kernels("Mamba", ("mamba_ssm", "causal_conv1d"), ("falcon_mamba", "jamba", "mamba", "zamba")),
    Kernels(
        "Mamba-2",
        ("mamba_ssm", "causal_conv1d"),
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
    ),
    Kernels(
        "short convolution", ("causal_conv1d",), ("inkling", "inkling2", "inkling2_loop", "lfm2", "lfm2_moe", "lfm3")
    ),
)
"""As in transformers 5.24; a test compares it with the sources of the installed version."""
DISTRIBUTIONS = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}
"""Name to import -> name to install."""


def kernels_of(config: Mapping[str, Any]) -> Kernels | None:
    """Return what the layers of a config.json's text model use; None if none of its layers uses such packages."""
    text = config.get("text_config")
    model_type = str((text if isinstance(text, dict) else config).get("model_type") or config.get("model_type"))
    return next((kernels for kernels in TABLE if model_type.removesuffix("_text") in kernels.types), None)


def missing(kernels: Kernels) -> list[str]:
    """Return the packages, by the names to install, that are not installed here. None of them is imported."""
    return [DISTRIBUTIONS[name] for name in kernels.packages if find_spec(name) is None]


def describe_missing(config: Mapping[str, Any]) -> str:
    """Return a sentence about the packages that a model's layers would use and that are not installed; "" if none."""
    kernels = kernels_of(config)
    if kernels is None or not (names := missing(kernels)):
        return ""
    text = tr(
        "Without {packages} its {layers} layers run in plain PyTorch: correct, but slow. On GPUs: pip install "
        "--no-build-isolation {packages}",
        layers=kernels.layers,
        packages=" ".join(names),
    )
    return joined(text, tr("Samples can then be packed.")) if kernels.packs else text


def describe_assumed(config: Mapping[str, Any]) -> str:
    """Return a sentence about the packages that a plan's times assume; "" if a model's layers use none."""
    if (kernels := kernels_of(config)) is None:
        return ""
    return tr(
        "{layers} layers: times assume the kernels of {packages}, memory is that without them, which is more.",
        layers=kernels.layers,
        packages=" ".join(DISTRIBUTIONS[name] for name in kernels.packages),
    )
