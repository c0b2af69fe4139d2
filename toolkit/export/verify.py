"""Exports and checkpoints, run once: their logits are those of the probe that was saved with them."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit import disk
from toolkit.messages import CheckpointError, ModelError, NotExportable, ProofDiffers, tr
from toolkit.models import probe
from toolkit.models.load import load_model, stream, streamed_model


def verify_logits(folder: Path) -> str:
    """Run a checkpoint's or export's model once on the CPU; return the comparison with its probe. See `verify_model`."""
    from toolkit.export.checkpoint import load_checkpoint
    from toolkit.export.custom import is_custom
    from toolkit.models import adapters

    if adapters.is_original_prefix(folder):
        reason = tr("the layout of the ChatGLM repositories does not say of which model a prefix is")
        return tr("no forward: {reason}", reason=reason)
    if is_custom(folder):
        return tr("no forward: {reason}", reason=tr("it holds a custom model, which its program alone can build"))
    if (folder / "config.json").is_file():
        return verify_model(folder)
    saved = probe.read(folder)
    if (folder / adapters.CONFIG).is_file():
        from toolkit.export.adapter import load_part, part_of_adapter

        model = load_part(part_of_adapter(folder))
    else:
        try:
            model = load_checkpoint(folder)
        except NotExportable as error:
            return tr("no forward: {reason}", reason=error)
    if reason := _nothing_to_compare(saved):
        return reason
    assert saved is not None
    return judge_logits(model, None, probe.capture(model, saved.ids), saved)


def verify_model(folder: Path) -> str:
    """Run the model of a directory once, on the CPU, a layer in memory at a time, and return the comparison with its
    probe as text.

    Raises:
        ProofDiffers: the logits differ by more than rounding was measured to, but by less than damage does.
        CheckpointError: weights are others than were saved; see `probe.WRONG`.
        ModelError: weights are missing, empty or of another shape.
    """
    saved, model = probe.read(folder), streamed_model(folder)
    if reason := _nothing_to_compare(saved):
        deque(stream(folder)[1], maxlen=0)  # no forward pass reads it
        return reason
    assert saved is not None
    return judge_logits(model, folder, run_folder(folder, saved.ids, model), saved)


def _nothing_to_compare(saved: probe.Probe | None) -> str:
    """Return why a model that loads cannot be compared with its probe; "" if it can."""
    if saved is None:
        return tr("it loads; there is no probe to compare its logits with")
    if not saved.logits.isfinite().all():
        return tr("it loads; its logits were NaN or Inf when it was saved: the model had diverged")
    return ""


def run_folder(folder: Path, ids: torch.Tensor, model: PreTrainedModel | None = None) -> probe.Probe:
    """Run a directory's model on ids [R, L], on the CPU, a layer in memory at a time; `model`: streamed already."""
    with suppress(RuntimeError):  # a model that changes its weights in a forward pass
        captured = probe.capture(model or streamed_model(folder), ids)
        if captured.logits.isfinite().all():
            return captured
    return probe.capture(load_model(folder), ids)  # a layer that is used elsewhere too


def judge_logits(model: PreTrainedModel, folder: Path | None, captured: probe.Probe, saved: probe.Probe) -> str:
    """Return a sentence that logits equal those of the save within rounding; raises as `verify_model` if they do not.
    `model` has computed them: with its weights, or streamed from its `folder`.
    """
    difference = probe.difference_of(captured, saved)
    tolerance, wrong = _bounds(model, folder, captured, saved, difference)
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


def _bounds(
    model: PreTrainedModel, folder: Path | None, captured: probe.Probe, saved: probe.Probe, difference: float
) -> tuple[float, float]:
    """Return up to which difference logits count as equal, and from which on the weights as wrong (see `probe.WRONG`):
    the usual bounds, or those measured by running the model once more in another precision. That is done for a `folder`
    in half precision or TF32, where its bounds are often narrower, and for any model whose difference is beyond the
    usual ones, as with very sharp attention; never with experts, whose choice may flip.
    """
    kind = probe.coarser(captured, saved)
    usual = probe.TOLERANCES.get(kind, 0.0), probe.WRONG.get(kind, 0.0)
    narrows = folder is not None and kind != "float32"
    other = probe.other_precision(captured, saved)
    is_settled = not difference or (difference <= usual[0] and not narrows)
    if is_settled or other is None or "expert" in str(model.config.to_dict()):
        return usual
    again = probe.capture(streamed_model(folder, other) if folder else model.to(other), saved.ids)
    rounding = probe.rounding(captured, again, saved)
    if not math.isfinite(rounding):
        return usual
    rounding *= probe.TIMES_IN_FLOAT32 if kind == "float32" else 1.0
    measured = probe.TIMES_ROUNDING * rounding, probe.TIMES_WRONG * rounding
    return measured if narrows else (max(usual[0], measured[0]), max(usual[1], measured[1]))


@contextmanager
def aside_if_wrong(folder: Path) -> Iterator[None]:
    """Rename an export, from export to export.wrong, that turns out not to hold what was trained."""
    try:
        yield
    except ProofDiffers:  # by rounding alone
        raise
    except (CheckpointError, ModelError) as error:
        aside = folder.rename(disk.unused_path(folder.with_name(f"{folder.name}.wrong")))
        raise CheckpointError(
            "{reason}. The export is kept as {folder} for inspection.", reason=str(error).rstrip("."), folder=aside
        ) from error
