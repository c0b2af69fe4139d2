#!/usr/bin/env python3
"""Measure the memory of a stream (`data.streaming`): one rank that reads, tokenizes and packs, without a model.

scripts/stream_memory.py make DIR               writes small.jsonl (64 MiB), large.jsonl (2.1 GiB) and groups.parquet
scripts/stream_memory.py FILE|URL TOKENIZER [lanes] [seconds]   prints what is read, and MiB before and at most
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from toolkit.config.load import load
from toolkit.data import sources, stream
from toolkit.tasks import language_data

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def make(folder: Path) -> None:
    """Write texts of 50 to 800 random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20000)]
    rows = [{"text": " ".join(draw.choices(words, k=draw.randint(50, 800)))} for _ in range(4000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name, times in (("small", 6), ("large", 200)):
        with (folder / f"{name}.jsonl").open("wb") as file:
            for _ in range(times):
                file.write(lines)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.parquet.ParquetWriter(folder / "groups.parquet", table.schema, compression="zstd") as writer:
        for _ in range(80):
            writer.write_table(pyarrow.concat_tables([table] * 2), row_group_size=8000)


def resident_mib() -> float:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB


def measure(path: str, tokenizer: str, lanes: int, seconds: float) -> dict[str, Any]:
    """Read a stream for some seconds after its first step; return figures."""
    overrides = [f"data.path={path}", f"model.tokenizer={tokenizer}", f"batch.global_size={lanes}"]
    fixed = ["data.streaming=true", "data.validation_fraction=0", "data.packing=packed", "data.max_length=4096"]
    cfg = load(["recipe=quickstart", *fixed, *overrides]).cfg
    encoder = language_data.build_encoder(cfg)
    before = highest = resident_mib()
    data = stream.Stream(cfg, encoder, sources.locate_all(cfg.data, Path(cfg.prepare.dir)))
    began = time.monotonic()
    per_epoch = data.steps_per_epoch
    estimate_s, began, until, steps, tokens, first_s = time.monotonic() - began, time.monotonic(), 0.0, 0, 0, 0.0
    for sequences, _ in data.steps(0, {lane: data.position_of(lane, {}) for lane in range(lanes)}):
        highest, until = max(highest, resident_mib()), until or time.monotonic() + seconds
        first_s = first_s or time.monotonic() - began
        steps += 1
        tokens += sum(len(sample.ids) for samples in sequences for sample in samples)
        if time.monotonic() > until:
            break
    return {
        "file": Path(path).name,
        "is_url": "://" in path,
        "mib": round(sum(map(sum, data.sizes)) / 2**20),
        "lanes": lanes,
        "estimate_s": round(estimate_s, 1),
        "steps_per_epoch": per_epoch,
        "first_step_s": round(first_s, 1),
        "steps": steps,
        "tokens": tokens,
        "mib_before": round(before),
        "mib_of_stream": round(highest - before),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="make|FILE|URL", help="make: write the files")
    parser.add_argument("target", metavar="DIR|TOKENIZER", help="where to write them, or the tokenizer's directory")
    parser.add_argument("lanes", nargs="?", type=int, default=32, help="default: 32")
    parser.add_argument("seconds", nargs="?", type=float, default=20, help="default: 20")
    arguments = parser.parse_args()
    if arguments.source == "make":
        make(Path(arguments.target))
    else:
        print(json.dumps(measure(arguments.source, arguments.target, arguments.lanes, arguments.seconds)))
