"""The loss of reward models.

-S(r chosen - r rejected - m): the Bradley-Terry model of comparisons as in equation 1 of Ouyang et al. 2022,
https://arxiv.org/abs/2203.02155, with the margin m of Touvron et al. 2023 (Llama 2), https://arxiv.org/abs/2307.09288.
S: log sigmoid. As only differences count, c (r chosen + r rejected)^2 may keep the scores around 0: Eisenstein et al.
2023, https://arxiv.org/abs/2312.09244, as TRL has it.
"""

import torch
from torch.nn.functional import logsigmoid


def reward_losses(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, center: float) -> torch.Tensor:
    """Return the loss of each pair, [n] like the scores and margins; `center`: c."""
    losses = -logsigmoid(chosen - rejected - margins)
    return losses + center * (chosen + rejected) ** 2 if center else losses
