"""Reward models: they learn from pairs of answers to score the chosen answer higher.

The loss is -S(r chosen - r rejected - m) of scores r, S the log sigmoid: equation 1 of Ouyang et al. 2022,
https://arxiv.org/abs/2203.02155, with the margin m of Touvron et al. 2023 (Llama 2), https://arxiv.org/abs/2307.09288.
As only differences count, c (r chosen + r rejected)^2 may keep the scores around 0: Eisenstein et al. 2023,
https://arxiv.org/abs/2312.09244, as TRL has it.
"""

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from toolkit.models import classifier
from toolkit.sample_types import Batch
from toolkit.tasks import samples
from toolkit.tasks.preference import FIGURES, PreferenceTask


def reward_losses(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, center: float) -> torch.Tensor:
    """Return the loss of each pair, [n] like the scores and margins; `center`: c."""
    losses = -logsigmoid(chosen - rejected - margins)
    return losses + center * (chosen + rejected) ** 2 if center else losses


class RewardTask(PreferenceTask, samples.ScoreTask):
    """Trains a model to score conversations, on pairs of answers."""

    names = FIGURES[:4]

    def _pairs(self, engine: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the losses of a micro-batch's pairs, and the sums of their figures."""
        scores = classifier.scores(engine, batch)[:, 0]
        end = 2 * self.count_losses(batch)
        chosen, rejected = scores[0:end:2], scores[1:end:2]
        margins = batch["value"].to(scores)[0:end:2]
        losses = reward_losses(chosen, rejected, margins, self.cfg.task.center)
        chosen_rewards, rejected_rewards = chosen.detach(), rejected.detach()
        gains = chosen_rewards - rejected_rewards
        figures = (chosen_rewards, rejected_rewards, gains, (gains > 0).float())  # in the order of `names`
        # Without pairs the loss is 0, but has gradients, for which other ranks wait.
        loss = losses.sum() if end else 0 * scores.sum()
        return loss, {name: value.sum() for name, value in zip(self.names, figures, strict=True)}
