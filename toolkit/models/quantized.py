"""The error about a directory of quantized weights."""

from pathlib import Path

from toolkit.messages import ModelError, tr

_DEQUANTIZED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""quant_method -> transformers' class (5.23) that dequantizes such weights on a CPU, as was tested."""


def quantization_error(method: str, folder: Path) -> ModelError:
    """Return the error for weights that are quantized by `method`, with what to do instead."""
    kind = _DEQUANTIZED.get(method)
    way = tr("Use the original repository in bf16: tuning=qlora puts it in 4 bits while it is read.")
    if kind is not None:
        way = tr(
            "Use a repository in bf16, or write one with transformers' {kind}(dequantize=True): "
            "docs/models.md#quantized-checkpoints.",
            kind=kind,
        )
    return ModelError(
        "{folder} holds quantized weights ({method} in config.json), which cannot be trained or merged into. {way}",
        folder=folder,
        method=method,
        way=way,
    )
