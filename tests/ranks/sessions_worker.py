"""Run on every rank: several training sessions one after another in one process group, so that a launch is paid once.

Arguments: a JSON file with [{"overrides": [...]}, …]. A case with "died" begins with a run folder as a run leaves it
that died some steps after a checkpoint: {"of": RUN, "step": CHECKPOINT, "as": NAME}. One with "spoil" gets wrong
numbers on the last rank: {"steps": see spoil.py, "note": FILE}; it may end with Diverged, which is noted too. One with
"refused", a file, has to end with an error of ours, and gets it there; "free_bytes" is then what the disk has. With
"room_mib" each rank has so much for the micro-batch that it looks for. With "echo", a folder, what an engine holds
after it was resumed is written there, as a checkpoint would. "values" replace those of the overrides, so that many
cases are composed once. fp16 is made possible on CPUs, where DeepSpeed refuses it. What is saved asynchronously is
copied as late as can be: when the next update asks for it. Everything else is the product's own code.

A rank alone may go on after a case that fails: "outcome" is the file that gets the traceback then. "facts" is the file
that gets, as JSON, what the engine of a case was made of.
"""

import gc
import json
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from toolkit.config.hub import resolve_model_path
from toolkit.config.load import LoadedConfig, load, replace
from toolkit.config.rules import check_rules
from toolkit.launch import environment
from toolkit.messages import set_language


def die(of: str, step: int, folder: str) -> None:
    """Copy a finished run, without what it did after a checkpoint but for the log."""
    # Other ranks may still be leaving: these come and go until the next run begins.
    shutil.copytree(of, folder, ignore=shutil.ignore_patterns(".heartbeat-*", ".rank-*"))
    (Path(folder) / "DONE").unlink()
    for checkpoint in (Path(folder) / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def copy_late() -> list[int]:
    """Make asynchronous saves copy only when somebody waits for the copies; return a list with the updates that did."""
    from toolkit.checkpoint.state_files import Files, HostCopies
    from toolkit.train.checkpointer import _Pending

    begin, update, finish, complete = Files.begin, Files.wait_for_copies, _Pending.wait, HostCopies.complete
    asked = threading.Event()
    updates: list[int] = []

    def on_begin(files: Files) -> None:
        asked.clear()
        if files.copies_at_once:  # nobody waits for anything
            asked.set()
        begin(files)

    def on_update(files: Files) -> None:
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

    Files.begin, Files.wait_for_copies = on_begin, on_update  # type: ignore[method-assign]
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

    with mock.patch("toolkit.train.auto_layout.limit_bytes", limit) if extra_mib is not None else nullcontext():
        yield


def facts_of(engine: Any) -> dict[str, Any]:
    """Return what an engine is made of, the graphs that were compiled, and the memory that it has taken of a GPU."""
    import torch
    from deepspeed.runtime.activation_checkpointing import checkpointing

    optimizer = engine.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or getattr(
        optimizer, "single_partition_of_fp32_groups", []
    )
    # What crosses the bus: at stage 3 gradients, whose masters DeepSpeed 0.19.8 leaves pageable.
    crossing = [optimizer.grad_partitions_flat_buffer] if hasattr(optimizer, "grad_partitions_flat_buffer") else masters
    on_gpu = engine.device.type == "cuda"
    return {
        "device": engine.device.type,
        "dtype": str(next(engine.module.parameters()).dtype),
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "masters_on": sorted({one.device.type for one in masters}),
        "page_locked": on_gpu and bool(masters) and all(one.is_pinned() for one in crossing),
        "attention": getattr(engine.module, "stage", engine.module).config._attn_implementation,
        "kept_on_host": len(getattr(checkpointing._cpu_offload_engine, "_tracker", ())),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


@contextmanager
def counting_waits() -> Iterator[list[int]]:
    """Note in a list, for each step, how often the host waited for its GPU; without a GPU nothing is noted."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from toolkit.train import loop

    found: list[int] = []
    real = loop.train_step

    def train_step(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return real(*arguments, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                found.append(sum("synchronizing CUDA operation" in str(one.message) for one in caught))

    on_gpu = get_accelerator().device_name() == "cuda"
    with mock.patch.object(loop, "train_step", train_step) if on_gpu else nullcontext():
        yield found


@contextmanager
def echoing(folder: str | None) -> Iterator[None]:
    """Write what was loaded back into a folder, before anything is computed with it."""
    from toolkit.checkpoint import engine_state, fragments
    from toolkit.distributed import process_group
    from toolkit.train.checkpointer import Checkpointer

    real = Checkpointer.load

    def load_and_tell(saver: Checkpointer, checkpoint: Path) -> None:
        real(saver, checkpoint)
        assert folder is not None
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(engine_state.contents(saver.engine, saver._held)):
            fragments.write(content, Path(folder) / fragments.file_name(process_group.rank(), number))

    with mock.patch.object(Checkpointer, "load", load_and_tell) if folder else nullcontext():
        yield


def run_case(case: dict[str, Any], loaded: LoadedConfig, ranks: environment.Ranks, updates: list[int]) -> None:
    """Train one case in the process group."""
    import torch._dynamo
    from spoil import spoilt

    from toolkit.messages import Diverged, ToolkitError
    from toolkit.tasks.language_data import build_encoder, load_data
    from toolkit.tasks.registry import task_of
    from toolkit.train import run_lock
    from toolkit.train.trainer import Trainer

    if "facts" in case:
        torch._dynamo.utils.counters.clear()
    task = task_of(loaded.cfg)
    encoder = build_encoder(loaded.cfg)
    if loaded.cfg.data.streaming:
        task.load_data(loaded.cfg, ranks)
    else:
        task.data = load_data(loaded.cfg, encoder)
    spoil = case.get("spoil", {"steps": {}, "note": os.devnull})
    note, is_last = Path(spoil["note"]), ranks.rank == ranks.world_size - 1
    updates.clear()
    trainer = Trainer(task, loaded.cfg, ranks, time.monotonic())
    try:
        task.check(loaded.cfg, encoder.tokenizer)  # as a run does before it tokenizes
        with (
            spoilt(spoil["steps"], is_last, note),
            disk_with(case.get("free_bytes")),
            room_for(case.get("room_mib"), ranks.rank),
            echoing(case.get("echo")),
            counting_waits() if "facts" in case else nullcontext([]) as waits,
        ):
            trainer.train_in_group()
        assert "refused" not in case
    except ToolkitError as error:
        if "refused" in case:
            if ranks.rank == 0:
                Path(case["refused"]).write_text(f"{type(error).__name__}: {error}")
            run_lock.release_run_dir()
            return
        if not isinstance(error, Diverged) or not spoil["steps"]:
            raise
        run_lock.release_run_dir()
        if is_last:
            with note.open("a", encoding="utf-8") as lines:
                lines.write(f"Diverged: {error}\n")
    if "facts" in case and ranks.rank == 0:
        Path(case["facts"]).write_text(json.dumps({**facts_of(trainer.run.engine), "waits": waits}))
    assert all(updates)
    if ranks.rank == 0 and "died" not in case:  # without ZeRO the others save nothing; those that died save at the end
        is_early = loaded.cfg.optim.name.value == "muon"  # all is copied at once
        assert bool(updates) == (loaded.cfg.checkpoint.asynchronous and not is_early)


def main() -> None:
    """Run every case."""
    set_language("en")
    words = environment.strip_launcher_arguments(sys.argv[1:])
    cases = json.loads(Path(words[0]).read_text())
    ranks = environment.detect(os.environ)
    environment.set_rank_variables(ranks, os.environ)

    import torch
    from deepspeed.accelerator import get_accelerator

    from toolkit.config import requirements
    from toolkit.distributed import failure, process_group
    from toolkit.train import baseline, checkpointer, run_dir, run_lock, trainer  # noqa: F401  # run_case uses them

    gc.freeze()  # what was imported stays: no session looks through it again
    checkpointer._PROBE_S = 60.0  # a probe in every checkpoint, though these follow each other within a second
    baseline._CPU_S, baseline._CPU_SIZES = 0.0, (96,)  # one small matrix product: no one reads the speed
    updates = copy_late()
    torch._dynamo.config.disable = (
        os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    )  # read at import, which a fork has behind it
    requirements._has_fp16 = lambda _: True  # fp16 is tried on CPUs here
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    for index, case in enumerate(cases):
        if "died" in case:
            process_group.on_rank0(partial(die, **{"folder" if k == "as" else k: v for k, v in case["died"].items()}))
        values = {key: (value, "the case") for key, value in case.get("values", {}).items()}
        loaded = replace(composed(tuple(case["overrides"])), values)
        if index == 0:
            process_group.start(loaded.cfg.distributed)
        try:
            check_rules(loaded, ranks.world_size)
            loaded = resolve_model_path(loaded) if loaded.cfg.model.add_tokens else loaded
            run_case(case, loaded, ranks, updates)
        except Exception:
            if "outcome" not in case:
                raise
            Path(case["outcome"]).write_text(traceback.format_exc())
            run_lock.release_run_dir()
    failure.end_watch()
    process_group.stop()


if __name__ == "__main__":
    main()
