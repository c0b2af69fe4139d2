"""What saving costs: how long training waits, beside a bare `engine.save_checkpoint` of the same engine, in turns; and
how long loading takes, beside `engine.load_checkpoint`.

An asynchronous save makes training wait twice: until it has begun, and in the next step, whose update waits for what is
not copied yet. Both are counted.
"""

import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from benchmarks.step import build_bare_engine
from toolkit.checkpoint.directory import RunState
from toolkit.config.mesh import Mesh, micro_rows
from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import barrier, gather, rank, world_size
from toolkit.launch.environment import Ranks
from toolkit.models import probe
from toolkit.models.save import non_weight_files
from toolkit.tasks.language import LanguageTask
from toolkit.tasks.language_batches import training_batches
from toolkit.tasks.language_data import LanguageData
from toolkit.train.checkpointer import Checkpointer
from toolkit.train.step import StepGuard, train_step
from toolkit.train.task import ModelFiles


def compare(cfg: RunConfig, prepared: LanguageData, ranks: Ranks, repeats: int, folder: Path) -> dict[str, Any]:
    """Time the three ways. A collective.

    Args:
        cfg: checked config.
        prepared: tokenizer and stores.
        ranks: who this process is.
        repeats: of each; one more warms up.
        folder: where checkpoints are written; the caller removes it.

    Returns:
        Seconds that training waits, of the bare engine, ours and ours asynchronous, medians and ratios to the bare
        engine pair by pair; the same of loading; seconds until ours is published; bytes of both.
    """
    engine = build_bare_engine(cfg, prepared)
    times = cfg.batch.global_size // (micro_rows(cfg) * world_size())
    batches = training_batches(cfg, prepared, ranks, 1)
    window = [next(batches) for _ in range(times)]
    guard = StepGuard(engine, cfg.train)

    def step() -> None:
        train_step(engine, LanguageTask(), window, Mesh(world_size=world_size()), guard)

    step()  # optimizer states exist from here on
    files = non_weight_files(engine.module, prepared.encoder) if rank() == 0 else {}
    described = ModelFiles(files, probe.probe_ids([prepared.train[0][0].tolist()], engine.module.config))
    kept = replace(cfg.checkpoint, keep=1, keep_weights=0)
    settings = {
        name: replace(cfg, checkpoint=replace(kept, asynchronous=name == "asynchronous"))
        for name in ("ours", "asynchronous")
    }
    savers = {name: Checkpointer(engine, folder / name, own, described) for name, own in settings.items()}
    seconds, sizes = _in_turns(engine, step, savers, folder, repeats)
    bare = seconds["bare"]
    return {
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "seconds": {name: [round(one, 4) for one in found] for name, found in seconds.items()},
        **{f"{name}_s": statistics.median(found) for name, found in seconds.items()},
        **{
            f"{name}_ratio": statistics.median(a / b for a, b in zip(seconds[name], bare, strict=True))
            for name in ("ours", "asynchronous")
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
