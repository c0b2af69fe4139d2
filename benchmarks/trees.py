"""Conversations as trees against a copy of the beginning for each sample: tokens, and seconds of an epoch, in turns.

Both sides train the same engine on the same samples, rows of `data.max_length` each; the ratio is taken pair by pair.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encode import joined
from benchmarks.engines import build_engine
from benchmarks.results import append_result, earlier
from toolkit.arguments import parse
from toolkit.config.mesh import Mesh, accumulation
from toolkit.config.schema import RunConfig, SourceConfig
from toolkit.data.prefixes import shared_prefixes
from toolkit.data.sources import read_conversations
from toolkit.data.store import TokenizedCache
from toolkit.distributed.process_group import barrier, world_size
from toolkit.launch.environment import Ranks
from toolkit.sample_types import Batch
from toolkit.tasks.language import LanguageTask
from toolkit.tasks.language_batches import epoch_steps, training_batches
from toolkit.tasks.language_data import LanguageData, build_encoder, load_data_with
from toolkit.train.step import StepGuard, train_step


def compare(cfg: RunConfig, prepared: LanguageData, ranks: Ranks, pairs: int, folder: Path) -> dict[str, Any]:
    """Count tokens and time epochs of both sides. A collective.

    Args:
        cfg: checked config, with `data.packing=packed`.
        prepared: its data.
        ranks: who this process is.
        pairs: interleaved pairs of epochs; one more warms up.
        folder: of the engine's own files.

    Returns:
        Tokens and rows of both sides, in all and by the samples of a conversation; seconds of their epochs.
    """
    data = {"trees": prepared}
    data["copies"] = load_data_with(replace(cfg, data=replace(cfg.data, share_prefixes=False)), prepared.encoder)
    engine = build_engine(cfg, prepared, folder)
    guard, seconds = StepGuard(engine, cfg.train), {side: list[float]() for side in data}
    task, trained = LanguageTask(), {}
    for pair in range(pairs + 1):
        for side in sorted(data, reverse=bool(pair % 2)):
            windows = list(_steps(cfg, data[side], ranks))
            barrier()
            started, trained[side] = time.perf_counter(), 0
            for window in windows:
                trained[side] += train_step(
                    engine, task, window, Mesh(world_size=world_size()), guard
                ).counts.trained_tokens
                guard.check()
            barrier()
            if pair:
                seconds[side].append(time.perf_counter() - started)
    assert trained["trees"] == trained["copies"]
    ratios = [copies / trees for copies, trees in zip(seconds["copies"], seconds["trees"], strict=True)]
    cache, plan = prepared.train, prepared.train_plan
    computed = int(plan.lengths(cache).sum())
    return {
        "samples": len(cache),
        "trained_tokens": cache.num_trained_tokens,
        "copies": {"tokens": cache.num_tokens, "rows": len(data["copies"].train_plan)},
        "trees": {"tokens": computed, "rows": len(plan)},
        "tokens_ratio": cache.num_tokens / computed,
        "by_samples_of_a_conversation": _by_samples(cache, cfg.data.max_length),
        "load_average": os.getloadavg()[0],
        "copies_s": statistics.median(seconds["copies"]),
        "trees_s": statistics.median(seconds["trees"]),
        "seconds_ratio": statistics.median(ratios),
        "seconds_ratios": [round(ratio, 4) for ratio in ratios],
    }


def _steps(cfg: RunConfig, data: LanguageData, ranks: Ranks) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each step of an epoch."""
    steps, times = epoch_steps(cfg, data), accumulation(cfg, world_size())
    batches = training_batches(cfg, data, ranks, steps)
    for _ in range(steps):
        yield list(islice(batches, times))


def _by_samples(cache: TokenizedCache, capacity: int) -> dict[str, dict[str, float]]:
    """Return by how many samples a conversation gives: conversations, tokens of copies and of trees, and the ratio."""
    samples, lengths = np.arange(len(cache)), cache.lengths()
    own = lengths - shared_prefixes(cache, samples, capacity)
    begins = np.flatnonzero(np.diff(cache.rows[cache.members].astype(np.int64), prepend=-1))
    counts = np.diff(begins, append=len(cache))
    found: dict[str, dict[str, float]] = {}
    for count in np.unique(counts).tolist():
        copies, trees = (int(np.add.reduceat(one, begins)[counts == count].sum()) for one in (lengths, own))
        conversations, ratio = int((counts == count).sum()), round(copies / trees, 3)
        found[str(count)] = {"conversations": conversations, "copies": copies, "trees": trees, "ratio": ratio}
    return found


def joined_file(cfg: RunConfig, num_turns: Iterable[int], count: int, file: Path) -> Path:
    """Write so many conversations of each number of turns, joined from the config's data."""
    known = list(read_conversations(cfg.data, Path(cfg.prepare.dir)))
    chats = (one for turns in num_turns for one in joined(known, turns)[:count])
    rows = ({"messages": one.messages, **({"tools": one.tools} if one.tools else {})} for one in chats)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def count(words: list[str]) -> None:
    """Count tokens, without training, of conversations of 2 to 12 turns that are joined from the data's."""
    arguments = parse(words, world_size=1, names=("output",))
    cfg, output = arguments.loaded.cfg, arguments.values.get("output", "")
    before, encoder = earlier(output), build_encoder(cfg)
    with tempfile.TemporaryDirectory() as folder:
        file = joined_file(cfg, range(2, 13), 4, Path(folder) / "joined.jsonl")
        cfg.data.sources, cfg.data.validation, cfg.data.validation_fraction = [SourceConfig(path=str(file))], [], 0.0
        cfg.prepare.dir, cfg.data.max_length = folder, 1 << 20
        found = _by_samples(load_data_with(cfg, encoder).train, cfg.data.max_length)
    command = ["python", "-m", "benchmarks.trees", *words]
    append_result(output, before, command, {"counted": "trees", "by_samples_of_a_conversation": found}, 1)
    for name, figures in found.items():
        print(name, figures)  # noqa: T201


if __name__ == "__main__":
    count(sys.argv[1:])
