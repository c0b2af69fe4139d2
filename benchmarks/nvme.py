"""How fast DeepSpeed's asynchronous input/output reads and writes in a folder, setting by setting."""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from toolkit.config.schema import AioConfig
from toolkit.messages import ConfigError, tr

BLOCK_SIZES = (256 << 10, 1 << 20, 8 << 20)
QUEUE_DEPTHS = (8, 32, 128)
THREADS = (1, 2, 4, 8)
PIECE = 64 << 20
"""A file's bytes are a multiple of it, so that every setting divides them into whole blocks for every thread."""


def pieces(gib: str) -> int:
    """Return the bytes of a file of so many GiB, rounded to a multiple of `PIECE`.

    Raises:
        ConfigError: that is no number above 0.
    """
    try:
        size = float(gib) * 2**30
    except ValueError:
        size = 0
    if not 0 < size < math.inf:
        raise ConfigError(tr("gib = {value} must be a number above 0.", value=gib))
    return max(1, round(size / PIECE)) * PIECE


def settings() -> list[AioConfig]:
    """Return what is tried: DeepSpeed's default first, then all sizes, depths and numbers of threads."""
    tried = [
        AioConfig(block_size=block, queue_depth=depth, intra_op_parallelism=threads)
        for block, depth, threads in itertools.product(BLOCK_SIZES, QUEUE_DEPTHS, THREADS)
    ]
    return [AioConfig(), *(one for one in tried if one != AioConfig())]


def variants(best: AioConfig) -> list[AioConfig]:
    """Return the best with its two switches thrown, which matter less than sizes."""
    return [
        replace(best, single_submit=not best.single_submit),
        replace(best, overlap_events=not best.overlap_events),
    ]


def overrides(best: AioConfig) -> list[str]:
    """Return the words that make a run use these settings; none where they are DeepSpeed's own."""
    default = asdict(AioConfig())
    return [f"zero.aio.{name}={_word(value)}" for name, value in asdict(best).items() if value != default[name]]


def measure(
    folder: Path, num_bytes: int, repeats: int, say: Callable[[str], None], tried: list[AioConfig] | None = None
) -> dict[str, Any]:
    """Write and read a file with each setting, and find the one that does both soonest.

    Args:
        folder: where the file is made and removed: a folder on the NVMe disk.
        num_bytes: of the file; a multiple of 64 MiB.
        repeats: how often; the median counts.
        say: hears each result.
        tried: the settings; None takes `settings` and the variants of the best.

    Returns:
        `best` and `default` with GB/s of reading and writing, all `results`, and the `overrides`.

    Raises:
        ConfigError: the op cannot be built here, or the folder does not take it.
    """
    try:
        aio = AsyncIOBuilder().load(verbose=False)
    except RuntimeError as error:
        refusal = tr("DeepSpeed's async_io cannot be built here: install libaio with its header (libaio-dev).")
        raise ConfigError(refusal) from error
    file = folder / f".bench-nvme-{os.getpid()}.tmp"
    results: list[dict[str, Any]] = []

    def add(setting: AioConfig) -> None:
        results.append(_one(aio, setting, file, num_bytes, repeats))
        say(_line(setting, results[-1]))

    try:
        for setting in settings() if tried is None else tried:
            add(setting)
        if tried is None:
            for setting in variants(_best(results)):
                add(setting)
    except (OSError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            tr("{folder} does not take asynchronous, direct input/output: {reason}.", folder=folder, reason=error)
        ) from error
    finally:
        file.unlink(missing_ok=True)
    best = _best(results)
    return {
        "folder": str(folder),
        "bytes": num_bytes,
        "repeats": repeats,
        "best": next(one for one in results if one["setting"] == asdict(best)),
        "default": results[0],
        "overrides": overrides(best),
        "results": results,
    }


def _one(aio: Any, setting: AioConfig, file: Path, num_bytes: int, repeats: int) -> dict[str, Any]:
    handle = aio.aio_handle(
        setting.block_size,
        setting.queue_depth,
        setting.single_submit,
        setting.overlap_events,
        setting.intra_op_parallelism,
    )
    buffer = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    buffer.fill_(7)
    times: dict[str, list[float]] = {"write": [], "read": []}
    try:
        for _ in range(repeats):
            file.unlink(missing_ok=True)  # overwriting is another thing than writing
            for name, call in (("write", handle.pwrite), ("read", handle.pread)):
                started = time.perf_counter()
                validate, asynchronous = False, True
                if call(buffer, str(file), validate, asynchronous) == -1 or handle.wait() != 1:
                    raise OSError(tr("the {name} failed", name=name))
                times[name].append(time.perf_counter() - started)
    finally:
        handle.free_cpu_locked_tensor(buffer)
    read, write = (statistics.median(times[name]) for name in ("read", "write"))
    return {
        "setting": asdict(setting),
        "read_gb_per_s": round(num_bytes / read / 1e9, 3),
        "write_gb_per_s": round(num_bytes / write / 1e9, 3),
        "seconds": round(read + write, 6),
    }


def _line(setting: AioConfig, found: dict[str, Any]) -> str:
    return tr(
        "block_size {block}, queue_depth {depth}, threads {threads}, single_submit {single}, overlap_events "
        "{overlap}: read {read} GB/s, write {write} GB/s",
        block=setting.block_size,
        depth=setting.queue_depth,
        threads=setting.intra_op_parallelism,
        single=_word(setting.single_submit),
        overlap=_word(setting.overlap_events),
        read=found["read_gb_per_s"],
        write=found["write_gb_per_s"],
    )


def _best(results: list[dict[str, Any]]) -> AioConfig:
    """Return the setting that writes and reads the same bytes soonest, as every update of offloaded states does."""
    return AioConfig(**min(results, key=lambda one: one["seconds"])["setting"])


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
