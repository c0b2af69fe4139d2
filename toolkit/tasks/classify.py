"""Classification: the cross entropy of a sample's label, by the scores at its last token (models/classifier.py)."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch.nn import functional

from toolkit.config import schema
from toolkit.distributed import process_group
from toolkit.evaluate.loss import SAMPLES
from toolkit.messages import tr
from toolkit.models import classifier, probe, stages
from toolkit.sample_types import Batch
from toolkit.tasks import samples


class ClassifyTask(samples.ScoreTask):
    """Trains a model to classify texts and conversations."""

    counted = "labels"
    names = ("accuracy",)
    reported = ((schema.EVAL_LABELS[0], schema.EVAL_LABELS[0]),)

    def count_losses(self, batch: Batch) -> int:
        """Return the number of samples, 0 for the filler row of an empty micro-batch."""
        return len(batch["value"])

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross entropies of samples' labels, nats."""
        scores, labels = self._scores(engine, batch)
        right = (scores.detach().argmax(dim=1)[: len(labels)] == labels).sum()  # cut: without a filler's scores
        self._add({"accuracy": torch.stack((right, right.new_full((), len(labels)))).float()})
        # Without samples the loss is 0, but has gradients, for which other ranks wait.
        return functional.cross_entropy(scores, labels, reduction="sum") if len(labels) else 0 * scores.sum()

    def _scores(self, engine: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a micro-batch's samples, float32 [N, labels], and the numbers of their labels, int64
        [N]. For an empty one there are no labels, but the filler's scores, from which the loss gets gradients.
        """
        labels = batch["value"].to(engine.device, non_blocking=True).long()
        scores = classifier.scores(engine, batch)
        return scores[: len(labels)] if len(labels) else scores, labels

    def _evaluate(self, engine: DeepSpeedEngine, batches: Iterable[Batch]) -> dict[str, float]:
        """Return mean loss (nats per sample), accuracy and macro F1 over the batches of all ranks. A collective."""
        num_labels = len(self.data.report.labels)
        loss_sum = torch.zeros(1, dtype=torch.float64)
        confusion = torch.zeros(num_labels, num_labels, dtype=torch.float64)  # [labels, predictions]
        with probe.evaluating(engine):
            for _, (scores, labels) in stages.measure_each(engine, batches, self._scores):
                if len(labels) and self._is_leader:  # other ranks of its model have the same scores
                    loss_sum += functional.cross_entropy(scores, labels, reduction="sum").cpu()
                    cells = labels * num_labels + scores.argmax(dim=1)  # indices into the flattened matrix
                    confusion += torch.bincount(cells.cpu(), minlength=num_labels**2).view_as(confusion)
        sums = torch.cat((loss_sum, confusion.flatten()))
        total, *counts = process_group.sum_over_ranks(sums, engine.device).tolist()
        return {schema.EVAL_LOSS: total / sum(counts)} | figures_of(torch.tensor(counts).view_as(confusion))

    def _result(self, **values: str) -> str:
        return tr("Validation loss {losses}, accuracy {figures}.", **values)


def figures_of(confusion: torch.Tensor) -> dict[str, float]:
    """Return samples, accuracy and macro F1 of a confusion matrix, [labels, predictions]. A label's F1 is
    2 x right / (labelled + predicted); macro F1 is their mean over the labels that occur among labels or predictions.
    """
    right, labelled, predicted = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
    occurs = (labelled + predicted) > 0
    accuracy, f1 = schema.EVAL_LABELS
    return {
        SAMPLES: int(confusion.sum()),
        accuracy: float(right.sum() / confusion.sum()),
        f1: float((2 * right[occurs] / (labelled + predicted)[occurs]).mean()),
    }
