"""Reward models: a score of conversations that is higher for the chosen answer of a pair (models/reward.py).

Pairs are read, shared out and counted as those of preferences; the head is that of transformers' sequence classifiers.
"""

import shlex
from typing import Any

import torch

from toolkit.messages import tr
from toolkit.models import classifier
from toolkit.models.adapters import has_adapter
from toolkit.models.reward import reward_losses
from toolkit.train import language_data
from toolkit.train.preference_task import FIGURES, PreferenceTask
from toolkit.train.task import RunContext


class RewardTask(PreferenceTask):
    """Trains a model to score conversations, on pairs of answers."""

    names = FIGURES[:4]

    def _pairs(self, engine: Any, batch: language_data.Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the losses of a micro-batch's pairs, and the sums of their figures."""
        scores = classifier.scores(engine, batch)[:, 0]
        end = 2 * self.count(batch)
        chosen, rejected = scores[0:end:2], scores[1:end:2]
        margins = batch["value"].to(scores)[0:end:2]
        losses = reward_losses(chosen, rejected, margins, self.cfg.task.center)
        given = chosen.detach(), rejected.detach()
        gains = given[0] - given[1]
        figures = (*given, gains, (gains > 0).float())
        # Of no pairs it is 0 and has gradients all the same, which the other ranks wait for.
        loss = losses.sum() if end else 0 * scores.sum()
        return loss, {name: value.sum() for name, value in zip(self.names, figures, strict=True)}

    def next_steps(self, run: RunContext, samples: list[dict[str, str]]) -> list[str]:
        if not run.cfg.checkpoint.export:
            return super().next_steps(run, samples)
        folder = f"{run.display_folder}/export"
        if has_adapter(run.engine.module):
            command = shlex.join(["toolkit", "export-model", folder, "merge=true", "output=merged"])
            return [tr("The adapter: {folder}", folder=folder), tr("Merge it:  {command}", command=command)]
        return [tr("The model, for AutoModelForSequenceClassification of transformers: {folder}", folder=folder)]
