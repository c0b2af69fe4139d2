"""Loss and perplexity of the validation split, exact over all its tokens.

Beside them what a model that only counts would reach on it: the yardstick for "has it learnt anything".
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toolkit.config.schema import EVAL_LOSS
from toolkit.data.store import TokenizedCache
from toolkit.distributed.process_group import sum_over_ranks
from toolkit.models.loss import token_losses
from toolkit.models.pipeline import evaluate_window, is_pipeline


def evaluate_loss(
    model: DeepSpeedEngine | PreTrainedModel,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    names: Sequence[str],
    device: torch.device,
    copies: int = 1,
) -> dict[str, float]:
    """Evaluate a model as it is. A collective.

    Args:
        model: the engine, or the model without one; left in its mode.
        micro_batches: this rank's part of the split, CPU tensors `[B, S]`; as many on every rank, fillers included.
            `sources` has the source number of each trained token.
        names: of the sources, by number.
        device: where the model computes.
        copies: how many ranks have the same sequences.

    Returns:
        As in metrics.jsonl: `eval_loss` in nats per trained token, `eval_perplexity`, `eval_tokens`, the trained
        tokens; if the split has several sources also `eval_loss/SOURCE`.
    """
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    was_training = getattr(model, "module", model).training
    model.eval()
    for batch, by_place in _losses(model, micro_batches):
        # A token's loss stands before it.
        losses = by_place.flatten()[batch["places"] - 1]
        for number in batch["sources"].unique().tolist():
            mine = batch["sources"] == number
            sums[number, 0] += losses[mine].sum(dtype=torch.float64)
            sums[number, 1] += mine.sum()
    model.train(was_training)
    totals = sum_over_ranks(sums.flatten(), device).view(-1, 2) / copies
    by_name: dict[str, torch.Tensor] = {}
    for name, total in zip(names, totals, strict=True):
        by_name[name] = by_name.get(name, 0) + total
    loss, tokens = (float(value) for value in totals.sum(dim=0))
    found = {EVAL_LOSS: loss / tokens, "eval_perplexity": perplexity(loss / tokens), "eval_tokens": int(tokens)}
    parts = {name: float(total[0] / total[1]) for name, total in sorted(by_name.items()) if total[1]}
    if len(parts) > 1:
        found |= {f"{EVAL_LOSS}/{name}": part for name, part in parts.items()}
    return found


def _losses(
    model: DeepSpeedEngine | PreTrainedModel, micro_batches: Iterable[dict[str, torch.Tensor]]
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield micro-batches and the losses of their tokens `[B, S]`, on the CPU; a pipeline's on its last stage alone."""
    if not is_pipeline(model):
        for batch in micro_batches:
            yield batch, token_losses(model, batch).cpu()
        return
    remaining = iter(micro_batches)
    while window := list(islice(remaining, 2 * model.num_stages)):  # so many that most stages have something to do
        found = evaluate_window(model, window, lambda stage, batch: token_losses(stage, batch).cpu())
        yield from zip(window, found, strict=False)


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True, slots=True)
class NgramBaselines:
    """Mean validation losses in nats per trained token."""

    unigram: float
    bigram: float


def ngram_baselines(
    train: TokenizedCache, validation: TokenizedCache, vocab_size: int, samples: NDArray[Any] | None = None
) -> NgramBaselines:
    """Fit a unigram and a bigram model to the trained tokens of one split and measure them on the other's.

    Unigram: counts plus one. Bigram: Witten-Bell, P(w|h) = (c(h,w) + t(h) P(w)) / (c(h) + t(h)) with t(h) the number
    of different tokens seen after h and P the unigram; an h never seen leaves the unigram. The token before the first
    trained one is its context. Memory and time grow with the number of trained tokens (1 million: about a second).

    Args:
        train: split that is counted.
        validation: split that is measured.
        vocab_size: every id is below it.
        samples: those of the validation split that are measured; None takes all.
    """
    before, token = _pairs(train)
    probability = (np.bincount(token, minlength=vocab_size) + 1.0) / (len(token) + vocab_size)

    bigrams, bigram_counts = np.unique(before * vocab_size + token, return_counts=True)
    seen = np.bincount(before, minlength=vocab_size)
    followers = np.bincount(bigrams // vocab_size, minlength=vocab_size)

    before, token = _pairs(validation, samples)
    code = before * vocab_size + token
    place = np.minimum(np.searchsorted(bigrams, code), len(bigrams) - 1)
    count = np.where(bigrams[place] == code, bigram_counts[place], 0)
    total = np.maximum(seen[before] + followers[before], 1)
    unseen_weight = np.where(seen[before] > 0, followers[before] / total, 1.0)
    bigram_probability = count / total + unseen_weight * probability[token]
    return NgramBaselines(
        unigram=float(-np.log(probability[token]).mean()),
        bigram=float(-np.log(bigram_probability).mean()),
    )


def _pairs(store: TokenizedCache, samples: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the token before each trained one, and the trained one, int64 each."""
    positions = _trained_positions(store, samples)
    ids = store.read_ids(0, int(store.offsets[-1]))
    return ids[positions - 1].astype(np.int64), ids[positions].astype(np.int64)


def _trained_positions(store: TokenizedCache, samples: NDArray[Any] | None) -> NDArray[np.int64]:
    """Return the positions in `ids` of the tokens of this split that the loss covers, ascending."""
    member = np.zeros(len(store.offsets) - 1, dtype=np.bool_)
    member[store.members if samples is None else store.members[samples]] = True
    positions = np.flatnonzero(store.read_trained(0, int(store.offsets[-1])))
    return positions[member[np.searchsorted(store.offsets, positions, side="right") - 1]]
