"""Verification of exports and checkpoints: run once, their logits must be those of the probe saved with them."""

import math
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit import disk
from toolkit.messages import CheckpointError, ModelError, NotExportable, ProofDiffers, tr, warn
from toolkit.models import probe
from toolkit.models.load import stream_parameters, streamed_model

_OF_EXPERTS = re.compile(r"\.(experts|router\w*)\.")
"""In the names of parameters of routed experts, stacked or not, and of what chooses them."""


def verify_export(folder: Path) -> None:
    """Compare an export's logits with the run's. Other weights are a CheckpointError; other rounding is a warning."""
    try:
        with aside_if_wrong(folder):
            verify_model(folder)
    except ProofDiffers as error:
        warn(
            "the export does not give the run's logits exactly: {reason}. It is kept in {folder}. Compare "
            "its loss with the run's last validation loss before you use it: toolkit eval.",
            reason=error,
            folder=folder,
        )


def verify_logits(folder: Path) -> str:
    """Run a checkpoint's or export's model once on the CPU; return the comparison with its probe as `verify_model`."""
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
    """Run a directory's model once on the CPU, a layer in memory at a time; return the comparison with its probe.

    Raises:
        ProofDiffers: the logits differ by more than rounding was measured to, but by less than damage does.
        CheckpointError: weights are others than were saved; see `probe.WRONG`.
        ModelError: weights are missing, empty or of another shape.
    """
    saved, model = probe.read(folder), streamed_model(folder)
    if reason := _nothing_to_compare(saved):
        deque(stream_parameters(folder)[1], maxlen=0)  # reads all weights, which no forward pass does here
        return reason
    assert saved is not None
    return judge_logits(model, folder, logits_of_directory(folder, saved.ids, model), saved)


def _nothing_to_compare(saved: probe.Probe | None) -> str:
    """Return why a model that loads cannot be compared with its saved probe; "" if it can."""
    if saved is None:
        return tr("it loads; there is no probe to compare its logits with")
    if not saved.logits.isfinite().all():
        return tr("it loads; its logits were NaN or Inf when it was saved: the model had diverged")
    return ""


def logits_of_directory(folder: Path, ids: torch.Tensor, model: PreTrainedModel | None = None) -> probe.Probe:
    """Return the logits of a directory's model for ids [rows, length], on the CPU: with a layer in memory at a time, or
    with all where that fails or gives NaN or Inf. `model`: the directory's `streamed_model`, None to make it.
    """
    with suppress(RuntimeError):  # of a model that changes its weights in a forward pass
        streamed = probe.capture(model or streamed_model(folder), ids)
        if streamed.logits.isfinite().all():
            return streamed
    from toolkit.models.load_weights import load_model

    return probe.capture(load_model(folder), ids)  # some weights are used outside their layer's call: NaN if streamed


def judge_logits(model: PreTrainedModel, folder: Path | None, captured: probe.Probe, saved: probe.Probe) -> str:
    """Return a sentence that the logits `captured` equal the `saved` ones within rounding, or raise as `verify_model`.
    `model` has computed them: with weights in memory (`folder` None), or streamed from its `folder`.
    """
    difference = probe.difference_of(captured, saved)
    tolerance, wrong_from = _difference_bounds(model, folder, captured, saved, difference)
    if difference <= tolerance:
        return tr(
            "forward: the logits are those of the save (difference {difference} of their spread, tolerance "
            "{tolerance})",
            difference=f"{difference:.1e}",
            tolerance=f"{tolerance:.2g}",
        )
    shown = {"difference": f"{difference:.2g}", "tolerance": f"{tolerance:.2g}"}
    if difference <= wrong_from:
        raise ProofDiffers(
            "the logits differ from those of the save by {difference} of their spread (tolerance {tolerance})", **shown
        )
    raise CheckpointError(  # nan too
        "other weights than were saved: the logits differ by {difference} of their spread (tolerance {tolerance})",
        **shown,
    )


def _difference_bounds(
    model: PreTrainedModel, folder: Path | None, captured: probe.Probe, saved: probe.Probe, difference: float
) -> tuple[float, float]:
    """Return up to which difference logits count as equal, and from which on the weights as wrong (see `probe.WRONG`):
    the usual bounds, or those measured by running the model once more in another precision.
    """
    coarser = probe.coarser_precision(captured, saved)  # such as float16 or tf32
    usual = probe.TOLERANCES.get(coarser, 0.0), probe.WRONG.get(coarser, 0.0)
    # Of a directory in half precision or TF32 the measured bounds are often narrower than the usual ones. Other models
    # are measured if their difference is beyond the usual one, as with very sharp attention.
    is_always_measured = folder is not None and coarser != "float32"
    if not difference or (difference <= usual[0] and not is_always_measured):
        return usual
    other_precision = probe.other_precision(captured, saved)
    has_experts = any(_OF_EXPERTS.search(name) for name, _ in model.named_parameters())
    # In another precision a router may choose other experts, which is no rounding.
    if other_precision is None or has_experts:
        return usual
    converted = streamed_model(folder, other_precision) if folder else model.to(other_precision)
    rounding = probe.rounding_error(captured, probe.capture(converted, saved.ids), saved)
    if not math.isfinite(rounding):
        return usual
    rounding *= probe.TIMES_IN_FLOAT32 if coarser == "float32" else 1.0
    measured = probe.TIMES_ROUNDING * rounding, probe.TIMES_WRONG * rounding
    if is_always_measured:
        return measured
    return max(usual[0], measured[0]), max(usual[1], measured[1])


@contextmanager
def aside_if_wrong(folder: Path) -> Iterator[None]:
    """Rename the export `folder` to FOLDER.wrong if the body finds that it does not hold what was trained."""
    try:
        yield
    except ProofDiffers:  # by rounding alone
        raise
    except (CheckpointError, ModelError) as error:
        renamed = folder.rename(disk.unused_path(folder.with_name(f"{folder.name}.wrong")))
        raise CheckpointError(
            "{reason}. The export is kept as {folder} for inspection.", reason=str(error).rstrip("."), folder=renamed
        ) from error
