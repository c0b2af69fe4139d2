"""Losses of a student that learns from a teacher's distributions, a chunk of tokens at a time: no [T, V] is kept.

T tokens, V vocabulary, p and q the distributions of teacher and student at a token, softmax(logits / temperature). The
loss of a token is (1 - weight) x its label's cross entropy + weight x temperature^2 x the divergence:

- forward_kl: sum p (log p - log q), equation 1 of Hinton et al. 2015, https://arxiv.org/abs/1503.02531 (where the cross
  entropy stands, which differs by a constant); temperature^2 as its section 2 says.
- reverse_kl: sum q (log q - log p), as in MiniLLM, Gu et al. 2023, https://arxiv.org/abs/2306.08543.
- jsd: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, equation 1 of Agarwal et al. 2023 (GKD),
  https://arxiv.org/abs/2306.13649.

Of a teacher that was stored, p and q are distributions over its K likeliest tokens and one more place that holds all
others together: at temperature 1 their divergence is at most that over the vocabulary (grouping loses information), and
the same where K is V. Another temperature is applied to these K + 1 masses.
"""

import math
from typing import Any, NamedTuple

import torch

from toolkit.config.schema import DistillConfig, DistillLoss
from toolkit.models.loss_kernels import LossGradients, Scores, chunk_rows

_COPIES = 4
"""Factor by which chunks are smaller than those of the cross entropy: logits, logarithms and probabilities of two
models take 12 times a chunk's bytes at once (measured), which plan/memory.py counts.
"""


class StoredScores(NamedTuple):
    """A teacher's stored scores of T tokens."""

    ids: torch.Tensor
    """The K likeliest tokens, int64 [T, K]."""
    logs: torch.Tensor
    """Their log-probabilities at temperature 1, and of all others together, float32 [T, K + 1]."""


class Distilled(NamedTuple):
    """Losses of some tokens, float32."""

    loss: torch.Tensor
    """Sum of their losses, with gradients."""
    cross_entropies: torch.Tensor
    """Of each label, nats, [T]."""
    divergences: torch.Tensor
    """Of each token that has a teacher, nats, [N]."""


def distilled(
    student: Scores,
    targets: torch.Tensor,
    teacher: Scores | StoredScores,
    vocabulary: int,
    config: DistillConfig,
    own: torch.Tensor | None = None,
) -> Distilled:
    """Return the losses of tokens of which the first N have a teacher; the others are trained on their labels alone.
    Logits beyond `vocabulary`, by which embeddings are padded, are not in divergences. Differentiable once, in the
    tensors of the student's scores. `own`, bool [N]: tokens that the student wrote, which are no labels: their weight
    is 1.
    """
    if not torch.is_grad_enabled():  # `ctx.needs_input_grad` says True all the same: gradients would be computed
        weight, bias = (tensor if tensor is None else tensor.detach() for tensor in student[1:])
        student = Scores(student.states.detach(), weight, bias)
    # The weight of each taught token's divergence; its label's cross entropy has the rest.
    shares = student.states.new_full((len(teacher[0]),), config.weight, dtype=torch.float32)
    shares = shares if own is None else shares.masked_fill(own, 1.0)
    return Distilled(*_Distilled.apply(*student, targets, teacher, vocabulary, config, shares))


def store(scores: Scores, vocabulary: int, count: int) -> StoredScores:
    """Return the `count` likeliest tokens at each of T tokens, with their log-probabilities and that of all others."""
    states, size = scores.states, chunk_rows(vocabulary)
    ids, logs = [states.new_zeros(0, count, dtype=torch.int64)], [states.new_zeros(0, count + 1, dtype=torch.float32)]
    for begin in range(0, len(states), size):
        all_logs = scores.logits(slice(begin, begin + size))[:, :vocabulary].log_softmax(1)
        ids.append(all_logs.topk(count, dim=1).indices)
        logs.append(_with_others_grouped(all_logs, ids[-1]))
    return StoredScores(torch.cat(ids), torch.cat(logs))


class _Distilled(torch.autograd.Function):
    """The fields of `Distilled`; the gradient of the loss is computed with it, a chunk of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        teacher: Scores | StoredScores,
        vocabulary: int,
        config: DistillConfig,
        shares: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        student, num_taught = Scores(states, weight, bias), len(teacher[0])
        total = states.new_zeros((), dtype=torch.float32)
        cross_entropies = states.new_empty(len(states), dtype=torch.float32)
        divergences = states.new_empty(num_taught, dtype=torch.float32)

        def of_logits(part: slice) -> torch.Tensor:
            """Add the losses of a slice of tokens to the results; return their gradients by the logits [n, V]. Taught
            tokens are the first of all: of a slice the first `count`.
            """
            logits, label_ids = student.logits(part), targets[part, None]
            log_probabilities = logits.log_softmax(1)
            cross_entropies[part] = -log_probabilities.gather(1, label_ids)[:, 0]
            gradient = log_probabilities.exp_()  # of the cross entropy: probabilities, less 1 at the label
            gradient.scatter_(1, label_ids, gradient.gather(1, label_ids) - 1)
            taught_part = slice(part.start, min(part.stop, num_taught))
            count = max(0, taught_part.stop - taught_part.start)
            if not count:
                total.add_(cross_entropies[part].sum())
                return gradient
            divergence_of_tokens, of_divergence = _divergences_with_gradients(
                logits[:count, :vocabulary], teacher, taught_part, config
            )
            divergences[taught_part] = divergence_of_tokens
            share = shares[taught_part]
            total.add_(((1 - share) * cross_entropies[taught_part]).sum() + cross_entropies[part][count:].sum())
            total.add_(config.temperature**2 * (share * divergence_of_tokens).sum())
            gradient[:count] *= (1 - share)[:, None]
            # temperature^2 of the loss x 1 / temperature, which `of_divergence` lacks.
            gradient[:count, :vocabulary].addcmul_(of_divergence, share[:, None], value=config.temperature)
            return gradient

        needs, size = ctx.needs_input_grad, chunk_rows(_COPIES * student.vocabulary)
        if any(needs):
            ctx.gradients = (LossGradients(student, needs, of_logits, size),)
        else:
            for begin in range(0, len(states), size):
                of_logits(slice(begin, min(begin + size, len(states))))
        ctx.mark_non_differentiable(cross_entropies, divergences)
        return total, cross_entropies, divergences

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradients,), ctx.gradients = ctx.gradients, None  # `times` changes them in place: a second backward must fail
        return (*gradients.times(outer[0]), None, None, None, None, None)


def _divergences_with_gradients(
    logits: torch.Tensor, teacher: Scores | StoredScores, part: slice, config: DistillConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return divergences [n] at the temperature, and their gradients by the student's logits / temperature, float32
    [n, V]. `part`: which tokens of the teacher's the logits are of.
    """
    if isinstance(teacher, Scores):
        log_p = (teacher.logits(part)[:, : logits.size(1)] / config.temperature).log_softmax(1)
        return divergence(log_p, (logits / config.temperature).log_softmax(1), config)
    ids = teacher.ids[part]
    masses = _with_others_grouped(logits, ids)
    log_p = (teacher.logs[part] / config.temperature).log_softmax(1)
    divergences, of_masses = divergence(log_p, (masses / config.temperature).log_softmax(1), config)
    # A grouped logit's gradient is its share of the group's.
    gradient = (logits - masses[:, -1:]).exp_().mul_(of_masses[:, -1:])
    return divergences, gradient.scatter_(1, ids, of_masses[:, :-1])


def _with_others_grouped(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tokens `ids` [n, K], of logits [n, V], and the log-sum-exp of all others: [n, K + 1]."""
    others = logits.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat((logits.gather(1, ids), others), dim=1)


def divergence(log_p: torch.Tensor, log_q: torch.Tensor, config: DistillConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence [n] of p (teacher) and q (student), given as log-probabilities [n, K], by the module's
    formulas; and its gradient by the logits of q, [n, K].
    """
    p, q = log_p.exp(), log_q.exp()
    if config.loss is DistillLoss.forward_kl:
        return _times(p, log_p - log_q).sum(1), q - p
    share, log_m = 1.0, log_p  # reverse_kl is jsd's term of q with p for m
    if config.loss is DistillLoss.jsd:
        share = 1 - config.beta
        log_m = torch.logaddexp(log_p + math.log(config.beta), log_q + math.log(share))
    parts = share * _times(q, log_q - log_m)
    of_q = parts.sum(1, keepdim=True)
    divergences = of_q[:, 0]
    if config.loss is DistillLoss.jsd:
        divergences = divergences + config.beta * _times(p, log_p - log_m).sum(1)
    # Through the softmax: q dD/dq - q sum(q dD/dq). `parts` is q dD/dq but for a constant, which cancels there.
    return divergences, parts - q * of_q


def _times(masses: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return products, 0 where there is no mass, whatever the value."""
    return torch.where(masses > 0, masses * values, 0.0)
