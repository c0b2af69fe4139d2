"""The last proof of a checkpoint or an export: it loads, and gives the logits that it gave when it was saved."""

import math
from collections import deque
from pathlib import Path

from toolkit.errors import CheckpointError, NotExportable, ProofDiffers
from toolkit.export.checkpoint import load_checkpoint
from toolkit.export.own import is_own
from toolkit.export.tuned import loaded, part_of_adapter
from toolkit.messages import tr
from toolkit.models import probe
from toolkit.models.load import load_model, stream
from toolkit.models.streamed import streamed_model
from toolkit.models.tuning.adapter import CONFIG, is_original_prefix


def run_forward(folder: Path) -> str:
    """Run the model of a checkpoint or an export once, on the CPU, in the precision of its weights.

    Memory holds one layer of a model folder, and the weights once of a checkpoint or of an adapter with its base.

    Args:
        folder: one whose files are what the manifest says.

    Returns:
        What was found, for the user.

    Raises:
        ProofDiffers: the logits differ by more than rounding, but by no more than `probe.WRONG`.
        CheckpointError: weights are missing, empty, of another shape, or others than were saved.
        ModelError: the same, of an export.
    """
    if is_original_prefix(folder):
        reason = tr("the layout of the ChatGLM repositories does not say of which model a prefix is")
        return tr("no forward: {reason}", reason=reason)
    if is_own(folder):
        return tr("no forward: {reason}", reason=tr("it holds a model of one's own, which its program alone can build"))
    saved = probe.read(folder)
    if (folder / "config.json").is_file():
        model = streamed_model(folder)
    elif (folder / CONFIG).is_file():
        model = loaded(part_of_adapter(folder))
    else:
        try:
            model = load_checkpoint(folder)
        except NotExportable as error:
            return tr("no forward: {reason}", reason=error)
    if (folder / "config.json").is_file() and (saved is None or not saved.logits.isfinite().all()):
        deque(stream(folder)[1], maxlen=0)  # no forward pass reads it
    if saved is None:
        return tr("it loads; there is no probe to compare its logits with")
    if not saved.logits.isfinite().all():
        return tr("it loads; its logits were no numbers when it was saved: the model had diverged")
    difference, tolerance = probe.compare(model, saved)
    if math.isnan(difference) and (folder / "config.json").is_file():  # a layer that is used elsewhere too
        difference, tolerance = probe.compare(load_model(folder), saved)
    _judge(difference, tolerance)
    return tr(
        "forward: the logits are those of the save (difference {difference} of their spread, tolerance {tolerance})",
        difference=f"{difference:.1e}",
        tolerance=tolerance,
    )


def _judge(difference: float, tolerance: float) -> None:
    """Raise what a difference beyond the tolerance means; see `run_forward`."""
    if difference <= tolerance:
        return
    shown = f"{difference:.2g}"
    if difference <= max(probe.WRONG, tolerance):
        raise ProofDiffers(
            tr(
                "the logits differ from those of the save by {difference} of their spread (tolerance {tolerance})",
                difference=shown,
                tolerance=tolerance,
            )
        )
    raise CheckpointError(  # nan too
        tr(
            "other weights than were saved: the logits differ by {difference} of their spread (tolerance {tolerance})",
            difference=shown,
            tolerance=tolerance,
        )
    )
