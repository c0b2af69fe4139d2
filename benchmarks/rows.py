"""Rows of chat data made from a seed: Chinese and English, as long as conversations are. For benchmarks alone."""

import json
import os
from functools import lru_cache
from itertools import cycle
from pathlib import Path

import numpy as np

from toolkit.children import workers

MEDIAN_WORDS, SIGMA = 92, 0.67
"""Of the log-normal number of words in a row; about 120 tokens with a vocabulary of 16,384 fitted to the rows."""
_CHUNK = 10_000
_MOST_WORDS = 600
_NUM_WORDS = 30_000
_CHINESE_SHARE = 0.6


def rows_file(folder: Path, count: int, seed: int = 0) -> Path:
    """Return a JSONL file (keys prompt, response) of so many rows, written now if it is not there.

    Args:
        folder: where it is kept.
        count: rows.
        seed: the same seed gives the same bytes.
    """
    file = folder / f"rows-{count}-{seed}.jsonl"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    building = file.with_suffix(f".{os.getpid()}")
    jobs = [(seed, start, min(_CHUNK, count - start)) for start in range(0, count, _CHUNK)]
    with open(building, "wb") as out, workers(os.cpu_count() or 1) as pool:
        for part in pool.map(_part, jobs):
            out.write(part)
    building.replace(file)
    return file


@lru_cache(maxsize=1)
def _words() -> tuple[list[list[str]], np.ndarray]:
    """Return Chinese and English words, the commonest first, and how likely a word is to be among the first n."""
    random = np.random.default_rng(20)
    # Level 1 of GB 2312: the 3,755 commonest characters.
    codes = [bytes([high, low]) for high in range(0xB0, 0xD8) for low in range(0xA1, 0xFF)]
    characters = [code.decode("gb2312", "ignore") for code in codes]
    characters = [character for character in characters if character]
    random.shuffle(characters)
    commonness = 1 / np.arange(2, len(characters) + 2) ** 0.7
    sizes = random.choice([1, 2, 3, 4], _NUM_WORDS, p=[0.2, 0.6, 0.1, 0.1])
    picks = random.choice(len(characters), int(sizes.sum()), p=commonness / commonness.sum())
    ends = np.cumsum(sizes)
    chinese = [
        "".join(characters[pick] for pick in picks[end - size : end]) for end, size in zip(ends, sizes, strict=True)
    ]
    consonants, vowels = ["st", "tr", "ch", "sh", *"bcdfghklmnprstvw"], ["ea", "io", *"aeiou"]
    english = [
        "".join(
            consonants[random.integers(len(consonants))] + vowels[random.integers(len(vowels))] for _ in range(count)
        )
        for count in random.choice([1, 2, 3, 4], _NUM_WORDS, p=[0.35, 0.4, 0.2, 0.05])
    ]
    zipf = np.cumsum(1 / np.arange(1, _NUM_WORDS + 1))
    return [chinese, english], zipf / zipf[-1]


def _part(job: tuple[int, int, int]) -> bytes:
    seed, start, count = job
    random = np.random.default_rng([seed, start])
    (chinese, english), likely = _words()
    sizes = np.clip(random.lognormal(np.log(MEDIAN_WORDS), SIGMA, count), 6, _MOST_WORDS).astype(int)
    picks = np.searchsorted(likely, random.random(int(sizes.sum()))).tolist()
    # Where sentences end and which language they are in: one long list of each, gone around again and again.
    clauses = cycle(random.integers(3, 12, 9973).tolist())
    languages = cycle((random.random(9967) < _CHINESE_SHARE).tolist())
    lines, at = [], 0
    for size in sizes.tolist():
        row = picks[at : at + size]
        at += size
        texts = []
        for words in (row[: size // 3], row[size // 3 :]):
            text, place = [], 0
            while place < len(words):
                clause = words[place : place + next(clauses)]
                place += len(clause)
                if next(languages):
                    text.append("".join([chinese[word] for word in clause]) + "，")
                else:
                    text.append(" ".join([english[word] for word in clause]) + ". ")
            texts.append("".join(text).strip())
        lines.append(json.dumps({"prompt": texts[0], "response": texts[1]}, ensure_ascii=False) + "\n")
    return "".join(lines).encode()
