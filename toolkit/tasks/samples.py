"""Base classes of tasks whose loss is of samples, in place of tokens: figures, columns of a batch, evaluation."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit.config import mesh
from toolkit.config.schema import EVAL_LOSS
from toolkit.messages import tr
from toolkit.models.per_sample import samples_in_rows
from toolkit.models.record import has_adapter
from toolkit.sample_types import Batch
from toolkit.tasks import language, language_batches
from toolkit.train import task


class SampleTask(language.LanguageTask):
    """Trains a model with a loss of each sample."""

    loss_unit = ""

    @property
    def _is_leader(self) -> bool:
        """Whether this rank's values of samples go into sums over all ranks. The ranks of one model (tensor, sequence,
        pipeline) compute the same samples; only one of them, the leader, adds its values, so that none counts twice.
        """
        return mesh.mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank).is_leader

    def prepare_evaluation(self, run: task.RunContext) -> None:
        """Do nothing: the model answers no questions."""

    def _with_any_columns(self, batch: Batch) -> Batch:
        """Return a micro-batch with zeros in the columns of samples that the run's micro-batches have."""
        zeros = torch.zeros(int(samples_in_rows(batch).sum()))
        reference = {"reference": zeros} if self.data.reference else {}
        values = {"value": zeros.clone()} if self.data.train.has_values else {}
        return {**batch, **reference, **values}

    def check_evaluation(self, run: task.RunContext) -> None:
        """Evaluate one batch, and generate two tokens of an answer."""
        if self.has_validation:
            self._evaluate(run.engine, islice(language_batches.evaluation_batches(run.cfg, self.data, run.ranks), 1))
        super().check_evaluation(run)

    def evaluate(self, run: task.RunContext, step: int, alive: Callable[[], None]) -> dict[str, float]:
        """Evaluate the validation data."""
        with language_batches.evaluation_with_progress(run.cfg, self.data, run.ranks, alive) as batches:
            return self._evaluate(run.engine, batches)

    def _evaluate(self, engine: DeepSpeedEngine, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the figures over all ranks' batches. A collective."""
        raise NotImplementedError

    def _baselines(self) -> dict[str, float]:
        return {}

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        [(_, name)] = self.reported  # such a task reports one figure
        losses, figures = (
            language.first_to_last(summary, EVAL_LOSS, ".4f"),
            language.first_to_last(summary, name, ".1%"),
        )
        return [self._result(losses=losses, figures=figures)] if losses else []

    def _result(self, **values: str) -> str:
        """Return the line about the validation: `losses` and the reported `figures`, both as of `first_to_last`."""
        raise NotImplementedError


class ScoreTask(SampleTask):
    """Trains a model that does not generate text."""

    def next_steps(self, run: task.RunContext, answers: list[dict[str, str]]) -> list[str]:
        if not run.cfg.checkpoint.export:
            return super().next_steps(run, answers)
        folder = f"{run.display_folder}/export"
        if has_adapter(run.engine.module):
            command = shlex.join(["toolkit", "export-model", folder, "merge=true", "output=merged"])
            return [tr("The adapter: {folder}", folder=folder), tr("Merge it:  {command}", command=command)]
        return [self._use(folder)]

    def _use(self, folder: str) -> str:
        """Return the line about how to use an exported model that is no adapter."""
        return tr("The model, for AutoModelForSequenceClassification of transformers: {folder}", folder=folder)
