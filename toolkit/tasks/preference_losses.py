"""Losses of pairs of a chosen and a rejected answer, or of answers marked good or bad, and the rewards in them.

p, r: log-probabilities of an answer by the model and by the reference, the model before training, summed over the
answer's tokens; bars: their means; b: beta; e: label_smoothing; S: log sigmoid; D = (p - r of the chosen) - (p - r of
the rejected). What is added to each, sft_weight x the chosen answer's cross entropy, is a mean over its tokens.

- sigmoid (DPO): -S(b D), equation 7 of Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; with label smoothing
  -(1 - e) S(b D) - e S(-b D) (conservative DPO, equation 9 of the next), and robust: that minus twice the swapped
  term, unbiased, (-(1 - e) S(b D) + e S(-b D)) / (1 - 2e), equation 10 of Chowdhury et al. 2024,
  https://arxiv.org/abs/2403.00409.
- hinge: max(0, 1 - b D), the calibration loss of SLiC-HF, Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with
  DPO's ratios in place of log-probabilities, as TRL and LLaMA-Factory have it.
- ipo: (D - 1 / (2b))^2, equation 17 of Azar et al. 2023, https://arxiv.org/abs/2310.12036, of means over tokens in
  place of sums, as its authors advised (TRL, DPO Trainer, "ipo") and TRL and LLaMA-Factory do.
- simpo: -S(b (bar p chosen - bar p rejected) - gamma), equation 6 of Meng et al. 2024,
  https://arxiv.org/abs/2405.14734.
- orpo: -S(log odds ratio) x b, odds = P / (1 - P) with P = exp(bar p), equations 6 and 7 of Hong et al. 2024,
  https://arxiv.org/abs/2403.07691; b is its lambda.
- cpo: -S(b (p chosen - p rejected)), equation 5 of Xu et al. 2024, https://arxiv.org/abs/2401.08417.
- kto, of single answers: w sigmoid(-b (p - r - K)) of a good one, w sigmoid(-b (K - p + r)) of a bad one, equation 7 of
  Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, as in TRL 1.16.0's KTOTrainer; w: desirable_weight,
  undesirable_weight; K, without gradients: the mean of p - r of questions with others' answers, at least 0.
- reward models: -S(r chosen - r rejected - m) of scores r, equation 1 of Ouyang et al. 2022,
  https://arxiv.org/abs/2203.02155, with the margin m of Touvron et al. 2023 (Llama 2),
  https://arxiv.org/abs/2307.09288. As only differences count, c (r chosen + r rejected)^2 may keep the scores around 0:
  Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244, as TRL has it.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from toolkit.config.schema import PreferenceConfig, PreferenceLoss


class Answers(NamedTuple):
    """One side of some pairs, float32 [n] each."""

    log_probabilities: torch.Tensor
    """Sums over each answer's tokens, nats."""
    tokens: torch.Tensor
    reference: torch.Tensor
    """Log-probabilities by the reference; unused where the loss needs none."""


class PairLosses(NamedTuple):
    """What some pairs give, float32 [n] each."""

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    """Without gradients, like `rejected_rewards`."""
    rejected_rewards: torch.Tensor


def pair_losses(config: PreferenceConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return the loss of each pair, and the rewards of its answers: beta times what the loss compares."""
    kind, beta = config.loss, config.beta
    better, worse = (_compared(config, answers) for answers in (chosen, rejected))
    margin = beta * (better - worse)
    if kind is PreferenceLoss.hinge:
        losses = torch.relu(1 - margin)
    elif kind is PreferenceLoss.ipo:
        losses = (better - worse - 1 / (2 * beta)) ** 2
    elif kind is PreferenceLoss.orpo:
        losses = -beta * logsigmoid(_log_odds(better) - _log_odds(worse))
    else:
        losses = _smoothed(margin - config.gamma, config.label_smoothing, kind is PreferenceLoss.robust)
    if config.sft_weight:
        losses = losses - config.sft_weight * chosen.log_probabilities / chosen.tokens
    return PairLosses(losses, beta * better.detach(), beta * worse.detach())


def answer_losses(
    config: PreferenceConfig, ratios: torch.Tensor, is_good: torch.Tensor, divergence: torch.Tensor
) -> torch.Tensor:
    """Return KTO's losses of answers, float32 [n]; `ratios`: p - r, [n]; `is_good`: bool [n]; `divergence`: K."""
    gains = torch.where(is_good, ratios - divergence, divergence - ratios)
    good = is_good.to(ratios.dtype)
    return (config.desirable_weight * good + config.undesirable_weight * (1 - good)) * torch.sigmoid(
        -config.beta * gains
    )


def _compared(config: PreferenceConfig, answers: Answers) -> torch.Tensor:
    """Return what a loss compares of the two answers: log-probabilities or their ratios, sums or means."""
    values = answers.log_probabilities
    if config.needs_reference:
        values = values - answers.reference
    by_token = config.loss in (PreferenceLoss.ipo, PreferenceLoss.simpo, PreferenceLoss.orpo)
    return values / answers.tokens if by_token else values


def _smoothed(margin: torch.Tensor, swapped: float, is_robust: bool) -> torch.Tensor:
    as_labelled, other_way = (1 - swapped) * logsigmoid(margin), swapped * logsigmoid(-margin)
    if is_robust:
        return (other_way - as_labelled) / (1 - 2 * swapped)
    return -as_labelled - other_way


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) of P = exp(means); an answer that is certain gets that of the nearest below."""
    means = means.clamp(max=-torch.finfo(means.dtype).eps)
    return means - torch.log(-torch.expm1(means))


def reward_losses(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, center: float) -> torch.Tensor:
    """Return the loss of each pair, [n] like the scores and margins; `center`: c."""
    losses = -logsigmoid(chosen - rejected - margins)
    return losses + center * (chosen + rejected) ** 2 if center else losses
