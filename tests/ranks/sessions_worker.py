"""Run on every rank: several training sessions one after another in one process group, so that a launch is paid once.

Arguments: a JSON file with [{"overrides": [...]}, …]. A case with "died" begins with a run folder as a run leaves it
that died some steps after a checkpoint: {"of": RUN, "step": CHECKPOINT, "as": NAME}. One with "spoil" gets wrong
numbers on the last rank: {"steps": see spoil.py, "note": FILE}; it may end with Diverged, which is noted too. One with
"refused", a file, has to end with an error of ours, and gets it there; "free_bytes" is then what the disk has. With
"room_mib" each rank has so much for the micro-batch that it looks for. "values" replace those of the overrides, so
that many cases are composed once. fp16 is made possible on CPUs, where DeepSpeed refuses it. What is saved
asynchronously is copied as late as can be: when the next update asks for it. Everything else is the product's own code.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from toolkit.config.load import LoadedConfig, load, replace
from toolkit.config.rules import check_rules
from toolkit.launch import environment
from toolkit.messages import set_language


def die(of: str, step: int, folder: str) -> None:
    """Copy a finished run, without what it did after a checkpoint but for the log."""
    shutil.copytree(of, folder)
    (Path(folder) / "DONE").unlink()
    for checkpoint in (Path(folder) / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def copy_late() -> list[int]:
    """Make asynchronous saves copy only when somebody waits for the copies; return a list with the updates that did."""
    from toolkit.checkpoint.state_files import EngineFiles, HostCopies
    from toolkit.train.checkpointer import _Pending

    begin, update, finish, complete = EngineFiles.begin, EngineFiles.wait_for_copies, _Pending.wait, HostCopies.complete
    asked = threading.Event()
    updates: list[int] = []

    def on_begin(files: EngineFiles) -> None:
        asked.clear()
        begin(files)

    def on_update(files: EngineFiles) -> None:
        if not files.copied.is_set():
            updates.append(len(files.copies.waiting))
        asked.set()
        update(files)

    def on_finish(pending: _Pending) -> None:
        asked.set()
        finish(pending)

    def on_complete(copies: HostCopies) -> None:
        assert not copies.waiting or asked.wait(120)
        complete(copies)

    EngineFiles.begin, EngineFiles.wait_for_copies = on_begin, on_update  # type: ignore[method-assign]
    _Pending.wait, HostCopies.complete = on_finish, on_complete  # type: ignore[method-assign]
    return updates


@cache
def composed(overrides: tuple[str, ...]) -> LoadedConfig:
    """Return a config; composing takes longer than many a session."""
    return load(list(overrides))


@contextmanager
def disk_with(free_bytes: int | None) -> Iterator[None]:
    """Let every disk have so much room; None leaves them alone."""
    found = shutil._ntuple_diskusage(total=1, used=1, free=free_bytes or 0)
    with mock.patch("shutil.disk_usage", return_value=found) if free_bytes is not None else nullcontext():
        yield


@contextmanager
def room_for(extra_mib: list[float] | None, rank: int) -> Iterator[None]:
    """Let the search for a micro-batch have so many MiB on each rank, beside what is in use; None leaves it alone."""
    from toolkit.engine.memory import PeakMemory

    def limit(device: Any, max_gib: float) -> int:
        assert extra_mib is not None
        with PeakMemory(device) as memory:
            return memory.restart() + int(extra_mib[rank] * 2**20)

    with mock.patch("toolkit.train.dry_run.limit_bytes", limit) if extra_mib is not None else nullcontext():
        yield


def main() -> None:
    """Run every case."""
    set_language("en")
    words = environment.strip_launcher_arguments(sys.argv[1:])
    cases = json.loads(Path(words[0]).read_text())
    ranks = environment.detect(os.environ)
    environment.apply(ranks, os.environ)

    import torch
    from deepspeed.accelerator import get_accelerator
    from spoil import spoilt

    from toolkit.config import preflight
    from toolkit.distributed import failure, process_group
    from toolkit.messages import Diverged, ToolkitError
    from toolkit.train import checkpointer, run_dir
    from toolkit.train.language_data import load_data
    from toolkit.train.tasks import task_of
    from toolkit.train.trainer import Trainer

    checkpointer._PROBE_S = 60.0  # a probe in every checkpoint, though these follow each other within a second
    updates = copy_late()
    preflight.is_cpu = lambda: False  # fp16 is tried on CPUs here
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    for index, case in enumerate(cases):
        if "died" in case:
            process_group.on_rank0(partial(die, **{"folder" if k == "as" else k: v for k, v in case["died"].items()}))
        values = {key: (value, "the case") for key, value in case.get("values", {}).items()}
        loaded = replace(composed(tuple(case["overrides"])), values)
        check_rules(loaded, ranks.world_size)
        task = task_of(loaded.cfg)
        task.data = load_data(loaded.cfg)
        if index == 0:
            process_group.start(loaded.cfg.distributed)
        spoil = case.get("spoil", {"steps": {}, "note": os.devnull})
        note, is_last = Path(spoil["note"]), ranks.rank == ranks.world_size - 1
        updates.clear()
        try:
            with (
                spoilt(spoil["steps"], is_last, note),
                disk_with(case.get("free_bytes")),
                room_for(case.get("room_mib"), ranks.rank),
            ):
                Trainer(task, loaded.cfg, ranks, time.monotonic()).train_in_group()
            assert "refused" not in case
        except ToolkitError as error:
            if "refused" in case:
                if ranks.rank == 0:
                    Path(case["refused"]).write_text(f"{type(error).__name__}: {error}")
                run_dir.release_run_dir()
                continue
            if not isinstance(error, Diverged) or not spoil["steps"]:
                raise
            run_dir.release_run_dir()
            if is_last:
                with note.open("a", encoding="utf-8") as lines:
                    lines.write(f"Diverged: {error}\n")
        assert all(updates)
        if (
            ranks.rank == 0 and "died" not in case
        ):  # without ZeRO the others save nothing; those that died save at the end
            assert bool(updates) == loaded.cfg.checkpoint.asynchronous
    failure.end_watch()
    process_group.stop()


if __name__ == "__main__":
    main()
