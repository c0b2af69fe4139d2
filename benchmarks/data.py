"""What a data set costs: tokenising it, keeping it, opening it, planning its rows; each against what it costs at least.

Every measurement runs in a process of its own. The floor of tokenising is the tokenizer library's own batch call on the
same texts with all cores, half of them before ours and half after, so that a machine that gets slower does so for both.
"""

import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encode import fresh, library_calls, texts_of
from benchmarks.processes import children, measure, uss
from benchmarks.rows import rows_file
from toolkit.config.mesh import micro_rows
from toolkit.config.schema import RunConfig, SourceConfig
from toolkit.data.loader import Layout, build_loader
from toolkit.data.packing import pack
from toolkit.data.plans import PackingPlan
from toolkit.data.sampler import Position
from toolkit.data.sources import locate_all, read_conversations
from toolkit.extras.data_report import alike, inspect_files
from toolkit.launch.environment import Ranks
from toolkit.tasks.language_batches import epoch_steps, training_batches
from toolkit.tasks.language_data import build_encoder, load_data_with

FEW = 10_000
"""Rows of the small data set that the large one is compared with."""
WORKERS = (0, 4)
_CALL = 1000
"""Texts in one call of the library."""
_READ_AHEAD = 20 * _CALL
_STEPS = 4
_MIB = 1 << 20


def compare(cfg: RunConfig, rows: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything for one recipe.

    Args:
        cfg: its model, batch and data sections are used, with rows of ours in place of its sources.
        rows: of the large data set.
        folder: kept: the rows. Everything else in it is removed at the end.
        say: receives what is being done.

    Returns:
        The measurements; memory in MiB.
    """
    work = folder / f"work-{os.getpid()}"
    try:
        say(f"Making {rows:,} rows")
        few, many = (_config(cfg, rows_file(folder, count), work / str(count)) for count in (FEW, rows))
        # One tokenizer for both: fitted to the small one if the recipe's is fitted to its data.
        tokenizer = build_encoder(few).tokenizer
        few.model.tokenizer = many.model.tokenizer = cfg.model.tokenizer or str(tokenizer.name_or_path)
        result: dict[str, Any] = {"rows": rows, "vocab_size": len(tokenizer)}
        result.update(_tokenising(few, many, rows, say))
        result["opening"] = [
            _opening(few if count == FEW else many, count, num_workers, say)
            for count in (FEW, rows)
            for num_workers in WORKERS
        ]
        say("Planning rows of 2,048 tokens")
        result["packing"] = measure(plan_log_normal, rows).result
        return result
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _config(cfg: RunConfig, file: Path, folder: Path) -> RunConfig:
    """Return the recipe with another data set."""
    cfg = deepcopy(cfg)
    cfg.data.sources, cfg.data.validation = [SourceConfig(path=str(file.absolute()))], []
    cfg.data.validation_fraction, cfg.data.max_samples = 0.0, 0
    cfg.prepare.dir, cfg.prepare.shard = str(folder.absolute()), ""
    return cfg


def _tokenising(few: RunConfig, many: RunConfig, rows: int, say: Callable[[str], None]) -> dict[str, Any]:
    measure(prepare_alone, few)
    say("Tokenising with the library alone, first half")
    floors = [measure(library_alone, many, 0, rows // 2).result]
    say("Preparing")
    made = measure(prepare_alone, many)
    say("Tokenising with the library alone, second half")
    floors.append(measure(library_alone, many, rows // 2, rows).result)
    floor, fast = (sum(half[name] for half in floors) for name in ("seconds", "fast_seconds"))
    say("Looking for duplicates and leftovers")
    looked = measure(inspect_alone, many)
    tokens = made.result["tokens"]
    return {
        "tokens": tokens,
        "tokens_per_row": tokens / rows,
        "prepare_s": made.seconds,
        "prepare_tokens_per_s": tokens / made.seconds,
        "encode_batch_s": floor,
        "encode_batch_fast_s": fast,
        "speed_to_encode_batch": floor / made.seconds,
        "speed_to_encode_batch_fast": fast / made.seconds,
        "peak_pss_mib": made.peak_pss / _MIB,
        "inspect_s": looked.seconds,
        "inspect_rows_per_s": rows / looked.seconds,
        "inspect_to_prepare": looked.seconds / made.seconds,
        "inspect_peak_pss_mib": looked.peak_pss / _MIB,
        "store_bytes_per_token": made.result["bytes"] / tokens,
    }


def prepare_alone(cfg: RunConfig) -> dict[str, int]:
    """Tokenise the data set; return tokens and the store's bytes."""
    report = load_data_with(cfg, build_encoder(cfg)).report
    size = sum(file.stat().st_size for file in Path(report.folder).iterdir())
    return {"tokens": report.tokens, "bytes": size}


def inspect_alone(cfg: RunConfig) -> dict[str, int]:
    """Do what `toolkit data-report` does with the rows; return how many are there twice, or nearly."""
    equal, near = alike(inspect_files(locate_all(cfg.data, Path(cfg.prepare.dir))))
    return {"equal": equal.count, "near": near.count}


def library_alone(cfg: RunConfig, start: int, stop: int) -> dict[str, float]:
    """Return the seconds that the tokenizer's library takes for the texts of some rows, with and without offsets."""
    encoder = build_encoder(cfg)
    conversations = read_conversations(cfg.data, Path(cfg.prepare.dir))
    texts = chain.from_iterable(
        texts_of(encoder, one.messages, one.tools) for one in islice(conversations, start, stop)
    )
    library, fast_library = library_calls(encoder)
    seconds = fast_seconds = 0.0
    while part := list(islice(texts, _READ_AHEAD)):
        again = [fresh(text) for text in part]
        seconds += _time(library, part)
        fast_seconds += _time(fast_library, again)
    return {"seconds": seconds, "fast_seconds": fast_seconds}


def _time(call: Callable[[list[str]], Any], texts: list[str]) -> float:
    started = time.perf_counter()
    for place in range(0, len(texts), _CALL):
        call(texts[place : place + _CALL])
    return time.perf_counter() - started


def _opening(cfg: RunConfig, rows: int, num_workers: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what the store costs a rank beside a loader that has nothing to open."""
    say(f"Opening {rows:,} rows with {num_workers} workers")
    cfg.data.num_workers = num_workers
    empty, full = measure(open_nothing, cfg).result, measure(open_store, cfg).result
    return {
        "rows": rows,
        "num_workers": num_workers,
        "open_s": full["open_s"],
        "first_batch_s": full["first_batch_s"],
        "empty_first_batch_s": empty["first_batch_s"],
        "uss_over_empty_mib": (full["uss"] - empty["uss"]) / _MIB,
        "worker_uss_over_empty_mib": (full["worker_uss"] - empty["worker_uss"]) / _MIB,
    }


def open_store(cfg: RunConfig) -> dict[str, float]:
    """Do what a rank does: find the store, read on from the middle of an epoch; return seconds and bytes."""
    encoder = build_encoder(cfg)
    _quiet()
    gc.collect()
    started = time.monotonic()
    prepared = load_data_with(cfg, encoder)
    opened = time.monotonic() - started
    assert not prepared.report.built
    steps = epoch_steps(cfg, prepared)
    middle = Position(0, steps // 2 * cfg.batch.global_size)
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")
    batches = training_batches(cfg, prepared, ranks, steps, middle)
    return {"open_s": opened, **_read_on(cfg, batches, started)}


def open_nothing(cfg: RunConfig) -> dict[str, float]:
    """Do the same with a loader of samples that are made when asked for."""
    build_encoder(cfg)
    _quiet()
    gc.collect()
    started = time.monotonic()
    nothing: Any = _Nothing()
    micro_batches = [[0] * micro_rows(cfg)] * 10_000
    loader = build_loader(
        nothing, PackingPlan(64), micro_batches, 0, Layout.alone, seed=0, num_workers=cfg.data.num_workers
    )
    return _read_on(cfg, iter(loader), started)


class _Nothing:
    """A store whose samples cost nothing to keep."""

    def __getitem__(self, index: int) -> Any:
        return np.zeros(100, np.uint16), np.ones(100, np.bool_)


def _quiet() -> None:
    """Leave out torch's advice on the number of workers: it is ours here."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def _read_on(cfg: RunConfig, batches: Iterator[Any], started: float) -> dict[str, float]:
    next(batches)
    first = time.monotonic() - started
    for _ in islice(batches, _STEPS * cfg.batch.global_size // micro_rows(cfg)):
        pass
    workers = [uss(pid) for pid in children(os.getpid())]
    return {"first_batch_s": first, "uss": uss(os.getpid()), "worker_uss": max(workers, default=0)}


def plan_log_normal(samples: int) -> dict[str, float]:
    """Pack samples of log-normal length, median 120, into rows of 2,048 tokens; return seconds and the share filled."""
    lengths = np.random.default_rng(0).lognormal(np.log(120), 0.67, samples).astype(np.int64).clip(2, 2048)
    started = time.monotonic()
    rows = pack(lengths, 2048)
    seconds = time.monotonic() - started
    return {"samples": samples, "seconds": seconds, "filled": float(lengths.sum() / ((rows.max() + 1) * 2048))}
