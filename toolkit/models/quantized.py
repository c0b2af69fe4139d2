"""What to do about a directory whose weights are quantised: they are not trained as they are."""

from pathlib import Path

from toolkit.messages import ModelError, tr

_DEQUANTIZED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""quant_method -> the class of transformers (5.23) that makes 16 bits of such weights on a CPU, as was tried."""


def error_of(method: str, folder: Path) -> ModelError:
    """Return the error about a directory of weights that are quantised by a method, with the way that remains."""
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
