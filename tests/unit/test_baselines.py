"""The n-gram baselines against the formulas written out token by token."""

import math
import random
from collections import Counter
from pathlib import Path

from tests.unit.data_tools import ByteEncoder, run_config, write_rows
from toolkit.data.store import TokenizedCache
from toolkit.data.tokenize import build_caches
from toolkit.evaluate.loss import ngram_baselines

VOCAB = 258


def trained_pairs(store: TokenizedCache) -> list[tuple[int, int]]:
    found = []
    for index in range(len(store)):
        ids, trained = store[index]
        found += [(int(ids[at - 1]), int(ids[at])) for at in range(len(ids)) if trained[at]]
    return found


def by_formula(train: TokenizedCache, validation: TokenizedCache) -> tuple[float, float]:
    pairs = trained_pairs(train)
    tokens, both = Counter(token for _, token in pairs), Counter(pairs)
    histories = Counter(before for before, _ in pairs)
    followers = Counter(before for before, _ in both)
    losses = []
    for before, token in trained_pairs(validation):
        unigram = (tokens[token] + 1) / (len(pairs) + VOCAB)
        bigram = unigram
        if histories[before]:
            bigram = (both[before, token] + followers[before] * unigram) / (histories[before] + followers[before])
        losses.append((-math.log(unigram), -math.log(bigram)))
    return sum(loss for loss, _ in losses) / len(losses), sum(loss for _, loss in losses) / len(losses)


def test_against_the_formula(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [
        {"prompt": rng.choice("xyz"), "response": "".join(rng.choices("abcde", [9, 5, 3, 2, 1], k=rng.randint(1, 12)))}
        for _ in range(80)
    ]
    # Only validation could hold these if chosen; either way histories and tokens never seen are covered below.
    rows += [{"prompt": chr(200 + number), "response": chr(300 + number)} for number in range(20)]
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    cfg.data.validation_fraction = 0.3
    train, validation, _ = build_caches(cfg, ByteEncoder())
    assert validation is not None
    assert {token for _, token in trained_pairs(validation)} - {token for _, token in trained_pairs(train)}
    found_unigram, found_bigram = ngram_baselines(train, validation, VOCAB)
    unigram, bigram = by_formula(train, validation)
    assert math.isclose(found_unigram, unigram, rel_tol=1e-12)
    assert math.isclose(found_bigram, bigram, rel_tol=1e-12)
    assert found_bigram < found_unigram
