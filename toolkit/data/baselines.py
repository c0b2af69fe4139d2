"""What a model that only counts would reach on the validation split: the yardstick for "has it learnt anything"."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.store import Store


@dataclass(frozen=True, slots=True)
class Baselines:
    """Mean validation losses in nats per trained token."""

    unigram: float
    bigram: float


def ngram_baselines(train: Store, validation: Store, vocab_size: int, samples: NDArray[Any] | None = None) -> Baselines:
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
    return Baselines(
        unigram=float(-np.log(probability[token]).mean()),
        bigram=float(-np.log(bigram_probability).mean()),
    )


def _pairs(store: Store, samples: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the token before each trained one, and the trained one, int64 each."""
    positions = _trained_positions(store, samples)
    ids = store.read_ids(0, int(store.offsets[-1]))
    return ids[positions - 1].astype(np.int64), ids[positions].astype(np.int64)


def _trained_positions(store: Store, samples: NDArray[Any] | None) -> NDArray[np.int64]:
    """Return the positions in `ids` of the tokens of this split that the loss covers, ascending."""
    member = np.zeros(len(store.offsets) - 1, dtype=np.bool_)
    member[store.members if samples is None else store.members[samples]] = True
    positions = np.flatnonzero(store.read_trained(0, int(store.offsets[-1])))
    return positions[member[np.searchsorted(store.offsets, positions, side="right") - 1]]
