"""A loaded model against the probe of a save."""

from transformers import PreTrainedModel

from toolkit.models.probe import TOLERANCES, Probe, capture, coarser_precision, difference_of


def compare(model: PreTrainedModel, probe: Probe) -> tuple[float, float]:
    """Run a model on the ids of a probe; return the difference, see `difference_of`, and how large it may be."""
    found = capture(model, probe.ids)
    return difference_of(found, probe), TOLERANCES.get(coarser_precision(found, probe), 0.0)
