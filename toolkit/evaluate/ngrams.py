"""Losses of n-gram models, as a baseline for a model's validation loss."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.store import TokenizedCache


def ngram_baselines(
    train: TokenizedCache, validation: TokenizedCache, vocab_size: int, samples: NDArray[Any] | None = None
) -> tuple[float, float]:
    """Fit a unigram and a bigram model to the trained tokens of one split; return its losses on the other's.

    Unigram: counts plus one. Bigram: Witten-Bell, P(w|h) = (c(h,w) + t(h) P(w)) / (c(h) + t(h)) with t(h) the number of
    different tokens seen after h and P the unigram, which an h never seen leaves. 1 million tokens take about a second.
    Losses are means in nats per trained token; `samples` of the validation split are measured, None takes all.
    """
    before, token = _pairs(train)
    probability = (np.bincount(token, minlength=vocab_size) + 1.0) / (len(token) + vocab_size)

    bigrams, bigram_counts = np.unique(before * vocab_size + token, return_counts=True)
    seen = np.bincount(before, minlength=vocab_size)
    followers = np.bincount(bigrams // vocab_size, minlength=vocab_size)

    before, token = _pairs(validation, samples)
    code = before * vocab_size + token
    index = np.minimum(np.searchsorted(bigrams, code), len(bigrams) - 1)
    count = np.where(bigrams[index] == code, bigram_counts[index], 0)
    total = np.maximum(seen[before] + followers[before], 1)
    unseen_weight = np.where(seen[before] > 0, followers[before] / total, 1.0)
    bigram_probability = count / total + unseen_weight * probability[token]
    return float(-np.log(probability[token]).mean()), float(-np.log(bigram_probability).mean())


def _pairs(store: TokenizedCache, samples: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the preceding token and the token of each trained position of a split, int64 [T] each."""
    member = np.zeros(len(store.offsets) - 1, dtype=np.bool_)
    member[store.members if samples is None else store.members[samples]] = True
    end = int(store.offsets[-1])
    positions = np.flatnonzero(store.read_trained(0, end))
    positions = positions[member[np.searchsorted(store.offsets, positions, side="right") - 1]]
    ids = store.read_ids(0, end)
    return ids[positions - 1].astype(np.int64), ids[positions].astype(np.int64)
