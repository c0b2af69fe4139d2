"""The last proof of a checkpoint or an export: it loads, and gives the logits that it gave when it was saved."""

import math
from collections import deque
from pathlib import Path

from toolkit.export.checkpoint import is_custom, load_checkpoint
from toolkit.export.merge import load_part, part_of_adapter
from toolkit.messages import CheckpointError, NotExportable, ProofDiffers, tr
from toolkit.models import probe
from toolkit.models.adapters import CONFIG, is_original_prefix
from toolkit.models.load import load_model, stream, streamed_model


def verify_logits(folder: Path) -> str:
    """Run the model of a checkpoint or an export once, on the CPU, and return the comparison with its probe as text.

    Raises:
        ProofDiffers: if the logits differ by more than rounding was measured to, but by less than damage does.
        CheckpointError: if weights are missing, empty, of another shape, or others than were saved: see `probe.WRONG`.
        ModelError: the same, of an export.
    """
    if is_original_prefix(folder):
        reason = tr("the layout of the ChatGLM repositories does not say of which model a prefix is")
        return tr("no forward: {reason}", reason=reason)
    if is_custom(folder):
        return tr("no forward: {reason}", reason=tr("it holds a custom model, which its program alone can build"))
    saved = probe.read(folder)
    is_model = (folder / "config.json").is_file()
    if is_model:
        model = streamed_model(folder)
    elif (folder / CONFIG).is_file():
        model = load_part(part_of_adapter(folder))
    else:
        try:
            model = load_checkpoint(folder)
        except NotExportable as error:
            return tr("no forward: {reason}", reason=error)
    if is_model and (saved is None or not saved.logits.isfinite().all()):
        deque(stream(folder)[1], maxlen=0)  # no forward pass reads it
    if saved is None:
        return tr("it loads; there is no probe to compare its logits with")
    if not saved.logits.isfinite().all():
        return tr("it loads; its logits were NaN or Inf when it was saved: the model had diverged")
    found = probe.capture(model, saved.ids)
    if is_model and not found.logits.isfinite().all():  # a layer that is used elsewhere too
        found = probe.capture(load_model(folder), saved.ids)
    difference = probe.difference_of(found, saved)
    tolerance, wrong = _bounds(folder if is_model else None, found, saved, difference)
    if difference <= tolerance:
        return tr(
            "forward: the logits are those of the save (difference {difference} of their spread, tolerance "
            "{tolerance})",
            difference=f"{difference:.1e}",
            tolerance=f"{tolerance:.2g}",
        )
    shown = {"difference": f"{difference:.2g}", "tolerance": f"{tolerance:.2g}"}
    if difference <= wrong:
        raise ProofDiffers(
            "the logits differ from those of the save by {difference} of their spread (tolerance {tolerance})", **shown
        )
    raise CheckpointError(  # nan too
        "other weights than were saved: the logits differ by {difference} of their spread (tolerance {tolerance})",
        **shown,
    )


def _bounds(folder: Path | None, found: probe.Probe, saved: probe.Probe, difference: float) -> tuple[float, float]:
    """Return what a difference may be, and from what on the weights are wrong; see `probe.WRONG`. A directory's model
    in half precision or TF32 runs twice to learn how it rounds, unless it has experts, whose choice may flip.
    """
    kind = probe.coarser(found, saved)
    bounds = probe.TOLERANCES.get(kind, 0.0), probe.WRONG.get(kind, 0.0)
    other = probe.other_precision(found, saved)
    if not difference or folder is None or other is None or "expert" in (folder / "config.json").read_text("utf-8"):
        return bounds
    rounding = probe.rounding(found, probe.capture(streamed_model(folder, other), saved.ids), saved)
    if not math.isfinite(rounding):
        return bounds
    return probe.TIMES_ROUNDING * rounding, probe.TIMES_WRONG * rounding
