"""What saving costs: how long training waits, beside a bare `engine.save_checkpoint` of the same engine, in turns; and
how long loading takes, beside `engine.load_checkpoint`.

An asynchronous save makes training wait twice: until it has begun, and in the next step, whose update waits for what is
not copied yet. Both are counted.

Copies in memory are timed too, on this node and with each rank as a node of its own: how long training waits for one,
when it is whole (and the neighbour has it), and how long a restart takes to have checked and loaded what it resumes
from: the copy, the copy after the first node has lost its memory, and the checkpoint on the disk, of which the system
has then forgotten every byte.
"""

import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from benchmarks.step import build_bare_engine
from toolkit.checkpoint import directory, node_memory
from toolkit.checkpoint.directory import RunState
from toolkit.config.mesh import micro_rows
from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import barrier, gather, on_rank0, rank, world_size
from toolkit.export.model import export_in_background
from toolkit.launch.environment import Ranks
from toolkit.models import probe
from toolkit.models.save import describe
from toolkit.train.checkpointer import Checkpointer, ModelFiles
from toolkit.train.language_data import LanguageData, training_batches
from toolkit.train.language_task import LanguageTask
from toolkit.train.step import StepGuard, train_step

_RESUMES = {
    "resume_copy": "resume",
    "nodes_resume_copy": "nodes_resume",
    "nodes_resume_sent": "nodes_resume",
}
"""What is timed of resuming from copies -> from the disk, in the same turns."""


def compare(cfg: RunConfig, prepared: LanguageData, ranks: Ranks, repeats: int, folder: Path) -> dict[str, Any]:
    """Time the three ways. A collective.

    Args:
        cfg: checked config.
        prepared: tokenizer and stores.
        ranks: who this process is.
        repeats: of each; one more warms up.
        folder: where checkpoints are written; the caller removes it.

    Returns:
        Seconds that training waits, of the bare engine, ours, ours asynchronous and a copy in memory, medians and
        ratios to the bare engine pair by pair; the same of loading; seconds until ours is published, and until the
        neighbour has a copy; of resuming from copies, with ratios to the disk; bytes of both.
    """
    engine = build_bare_engine(cfg, prepared)
    times = cfg.batch.global_size // (micro_rows(cfg) * world_size())
    batches = training_batches(cfg, prepared, ranks, 1)
    window = [next(batches) for _ in range(times)]
    guard = StepGuard(engine, cfg.train)

    def step() -> None:
        train_step(engine, LanguageTask(), window, world_size(), guard)

    step()  # optimizer states exist from here on
    files = describe(engine.module, prepared.encoder) if rank() == 0 else {}
    described = ModelFiles(
        files, probe.ids_of([prepared.train[0][0].tolist()], engine.module.config), export_in_background
    )
    kept = replace(cfg.checkpoint, keep=1, keep_weights=0)
    settings = {
        name: replace(cfg, checkpoint=replace(kept, asynchronous=name == "asynchronous"))
        for name in ("ours", "asynchronous")
    }
    savers = {name: Checkpointer(engine, folder / name, own, described) for name, own in settings.items()}
    seconds, sizes = _in_turns(engine, step, savers, folder, repeats)
    seconds |= _copies(cfg, savers["ours"], repeats, step)
    bare = seconds["bare"]
    return {
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "seconds": {name: [round(one, 4) for one in found] for name, found in seconds.items()},
        **{f"{name}_s": statistics.median(found) for name, found in seconds.items()},
        **{
            f"{name}_ratio": statistics.median(a / b for a, b in zip(seconds[name], bare, strict=True))
            for name in ("ours", "asynchronous", "copy", "nodes_copy")
        },
        **{
            f"{name}_ratio": statistics.median(a / b for a, b in zip(seconds[name], seconds[disk], strict=True))
            for name, disk in _RESUMES.items()
        },
        "load_ratio": statistics.median(a / b for a, b in zip(seconds["load"], seconds["bare_load"], strict=True)),
        "bytes": sizes,
        "repeats": repeats,
    }


def _in_turns(
    engine: DeepSpeedEngine, step: Callable[[], None], savers: dict[str, Checkpointer], folder: Path, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each save, and the bytes of a checkpoint (rank 0 only), by name."""
    seconds: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for turn in range(repeats + 1):
        for name in ("bare", "ours", "asynchronous"):
            if rank() == 0:
                os.sync()  # what the one before left unwritten is not this one's to wait for
            barrier()
            started = time.perf_counter()
            if name == "bare":
                engine.checkpoint_engine = TorchCheckpointEngine()
                engine.save_checkpoint(str(folder / "bare"), tag=f"t{turn}", save_latest=False)
            else:
                savers[name].begin(RunState(step=turn))
            barrier()
            took = {name: time.perf_counter() - started}
            if name == "asynchronous":
                took["step_beside"] = _timed(step)
                took[name] += max(gather(savers[name].files.waited_s))
            if name != "bare":
                savers[name].finish()
            if name == "ours":
                took["published"] = time.perf_counter() - started
                took["step"] = _timed(step)
            for what, one in took.items() if turn else ():
                seconds[what].append(one)
            written = folder / "bare" / f"t{turn}" if name == "bare" else savers[name].newest
            assert written is not None
            if turn and name != "asynchronous":
                what = "load" if name == "ours" else "bare_load"
                seconds[what].append(_timed(partial(_load, engine, savers.get(name), written)))
            if rank() == 0:
                sizes[name] = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
                if name == "bare":
                    shutil.rmtree(written)
            barrier()
    return seconds, sizes


@contextmanager
def _a_node_each() -> Iterator[None]:
    """Let each rank be a node: with memory of its own, which its neighbour does not see."""
    place = node_memory.SHM / f"toolkit-bench-node-{rank()}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    with mock.patch.object(node_memory, "SHM", place):
        yield
    shutil.rmtree(place)


def _copies(cfg: RunConfig, on_disk: Checkpointer, repeats: int, step: Callable[[], None]) -> dict[str, list[float]]:
    """Return the seconds of `_copy_in_turns`, and those of made-up nodes under names that begin with nodes_."""
    seconds = {}
    folder = on_disk.folder.parent
    for name, made_up in (("", nullcontext()), ("nodes_", _a_node_each())):
        with made_up:
            copies = node_memory.Copies(f"toolkit-bench-{folder.name}", timedelta(seconds=cfg.distributed.timeout_s))
            place = folder / f"{name}copied" / "checkpoints"
            saver = Checkpointer(on_disk.engine, place, cfg, on_disk.described, copies)
            for what, found in _copy_in_turns(on_disk, saver, repeats, step).items():
                seconds[name + what] = found
            copies.close()
    return seconds


def _copy_in_turns(
    on_disk: Checkpointer, saver: Checkpointer, repeats: int, step: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the seconds of copies in memory, and of what a restart reads, by name."""
    seconds: dict[str, list[float]] = defaultdict(list)
    assert saver.copies is not None and saver.makes_copies
    on_rank0(lambda: (saver.folder.parent / "logs").mkdir(parents=True))
    for turn in range(1, repeats + 2):
        barrier()
        started = time.perf_counter()
        saver.copy(RunState(step=turn))
        barrier()
        took = {"copy": time.perf_counter() - started}
        saver.finish()
        took["copied"] = time.perf_counter() - started
        step()
        took["resume_copy"] = _timed(partial(_resume_copy, saver, turn))
        if len(saver.copies.nodes) > 1:
            if rank() == 0:
                shutil.rmtree(saver.copies.folder)
            barrier()
            took["resume_sent"] = _timed(partial(_resume_copy, saver, turn))
        on_disk.begin(RunState(step=turn))
        on_disk.finish()
        for path in on_disk.folder.rglob("*.safetensors"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        barrier()
        took["resume"] = _timed(partial(_resume, on_disk))
        for what, one in took.items() if turn > 1 else ():
            seconds[what].append(one)
    return seconds


def _resume_copy(saver: Checkpointer, turn: int) -> None:
    assert saver.copies is not None
    found = saver.copies.recover(turn - 1, turn)
    assert found is not None and not saver.complete(found)
    saver.load(found)


def _resume(saver: Checkpointer) -> None:
    found = on_rank0(lambda: directory.newest_complete(saver.folder))
    assert found is not None
    saver.load(found)


def _load(engine: DeepSpeedEngine, saver: Checkpointer | None, checkpoint: Path) -> None:
    if saver is None:
        engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    else:
        saver.load(checkpoint)


def _timed(do: Callable[[], None]) -> float:
    started = time.perf_counter()
    do()
    barrier()
    return time.perf_counter() - started
