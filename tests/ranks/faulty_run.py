"""run.py with one fault, put in at a chosen rank, step and place, and noted when it happens.

FAULT: JSON with `at` (a place below), `rank`, `step` (from 1; for saves: of the checkpoint), `do` (kill, killall, stop,
hang, fail, tell, term, memory, fill), `note` (file that gets a line when the fault happens), `once` (not again where
the note is there already). `back_at`: the clock goes back a year after this step; `fit`: from the decision of step
`fit_at` on it is so late that so many steps fit before run.deadline; `ballast`: file that fills the disk, gone again
after step `free_at`; `naps`: who sleeps before what: `ranks`, `steps` (first and last, of this life), `before` (data,
step, forward), `seconds`. `flush_s`: seconds by which each flush of a file or folder is slower.
Everything else is the product's own.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FAULT: dict[str, Any] = json.loads(os.environ["FAULT"])
RANK = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def strike() -> None:
    """Do it."""
    with open(FAULT["note"], "a", encoding="utf-8") as note:
        note.write(f"{FAULT['at']} {RANK}\n")
    kind = FAULT["do"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "killall":
        parent = os.getppid()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in [parent, *(int(child) for child in children if int(child) != os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(10_000)
    elif kind == "term":  # twice in a row
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "memory":  # less may be allocated than is allocated already
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used - 1, resource.RLIM_INFINITY))
        torch.empty(1 << 28)
    elif kind == "fill":
        with open(FAULT["ballast"], "wb", buffering=0) as ballast:
            for block in (1 << 20, 1 << 10, 1):
                with contextlib.suppress(OSError):
                    while True:
                        ballast.write(b"x" * block)
    elif kind == "fail":
        raise OSError(28, "No space left on device")
    elif kind == "tell":
        raise RuntimeError(FAULT["tell"])


def before(module: Any, name: str, when: Callable[..., bool]) -> None:
    """Strike before a function of a module, once."""
    real = getattr(module, name)
    struck: list[bool] = []

    def faulty(*arguments: Any, **options: Any) -> Any:
        if not struck and FAULT.get("rank", RANK) == RANK and when(*arguments, **options):
            struck.append(True)
            strike()
        return real(*arguments, **options)

    setattr(module, name, faulty)


def in_step(step: int) -> Callable[..., bool]:
    """Return whether the loop is in a step, by what it tells its watchdog."""
    from toolkit.distributed.watchdog import Watchdog

    entered: list[int] = []
    real = Watchdog.enter

    def enter(watchdog: Any, phase: str, number: int, detail: str = "") -> None:
        real(watchdog, phase, number, detail)
        entered.append(number)

    Watchdog.enter = enter
    return lambda *_, **__: bool(entered) and entered[-1] == step


def after_step(loop: Any, number: int, do: Callable[[], object]) -> None:
    """Do something after the n-th step of this life."""
    real, calls = loop.train_step, itertools.count(1)

    def train_step(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        if next(calls) == number:
            do()
        return result

    loop.train_step = train_step


def slow_down(loop: Any) -> None:
    """Let ranks sleep before they fetch a step's data, before the step, or in its forward pass."""
    from toolkit.tasks import language

    steps = 0  # their data is what they begin with

    def sleepy(place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += place == "data"
            for nap in FAULT["naps"]:
                first, last = nap["steps"]
                if nap["before"] == place and RANK in nap["ranks"] and first <= steps <= last:
                    with open(FAULT["note"], "a", encoding="utf-8") as note:
                        note.write(f"{place} {RANK}\n")
                    time.sleep(nap["seconds"])
            return real(*arguments, **options)

        return function

    loop.islice = sleepy("data", loop.islice)
    loop.train_step = sleepy("step", loop.train_step)
    language.token_loss_sum = sleepy("forward", language.token_loss_sum)


def turn_back_the_clock(loop: Any) -> None:
    """After some step, let this process believe that it is a year earlier."""
    real_time = time.time

    def back() -> None:
        time.time = lambda: real_time() - 365 * 86400
        time.time_ns = lambda: int(time.time() * 1e9)

    after_step(loop, FAULT["back_at"], back)


def make_late(steps: int, number: int) -> None:
    """Before the decision of a step, let it be so late that so many steps fit before the deadline."""
    from toolkit.train import deadline as module
    from toolkit.train.deadline import Deadline

    real_decide = Deadline.decide

    def decide(deadline: Any, step: int) -> int:
        if step == number:
            late_s = deadline.deadline_at - deadline.end_s() - (steps + 0.5) * deadline.costs.step - time.time()
            # Both clocks: of one alone it would have been set.
            later = {name: partial(lambda real: real() + late_s, getattr(time, name)) for name in ("time", "monotonic")}
            module.time = SimpleNamespace(**{**vars(time), **later})
        return real_decide(deadline, step)

    Deadline.decide = decide


def slow_disk(seconds: float) -> None:
    """Let every flush take longer, and note each."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        with open(FAULT["note"], "a", encoding="utf-8") as note:
            note.write("flush\n")
        time.sleep(seconds)
        real(descriptor)

    os.fsync = fsync


def install() -> None:
    """Put the fault in its place."""
    from toolkit.checkpoint import directory, fragments
    from toolkit.train import checkpointer, dry_run, loop

    at, step = FAULT["at"], FAULT.get("step")
    count = 0

    def nth(*arguments: Any, **options: Any) -> bool:
        nonlocal count
        count += 1
        return count == FAULT.get("nth", step)

    def of_step(path: Any) -> bool:
        return f"step-{step}" in str(path)

    if "flush_s" in FAULT:
        slow_disk(FAULT["flush_s"])
    if FAULT.get("once") and Path(FAULT["note"]).exists():
        return
    if "back_at" in FAULT:
        turn_back_the_clock(loop)
    if "naps" in FAULT:
        slow_down(loop)
    if "fit" in FAULT:
        make_late(FAULT["fit"], FAULT["fit_at"])
    if FAULT.get("free_at") and RANK == 0:
        after_step(loop, FAULT["free_at"], lambda: Path(FAULT["ballast"]).unlink())
    if at == "export":
        from toolkit.export import write

        before(write, "write_files", lambda _files, folder, _probed: folder.name == "export")
    elif at == "export.structure":
        from toolkit.export import write

        before(write, "check_structure", lambda *_, **__: True)
    elif at == "each life":  # the step's number, where "step" counts those of this life
        before(loop, "train_step", in_step(step))
    elif at == "step":
        before(loop, "train_step", nth)
    elif at == "save.shard":
        before(fragments, "write", lambda _content, path: of_step(path))
    elif at == "save.random":
        real_begin = checkpointer.Checkpointer.begin

        def begin(saver: Any, state: Any, **options: Any) -> None:
            if nth() and FAULT["rank"] == RANK:
                threading.Timer(FAULT["after_s"], strike).start()
            real_begin(saver, state, **options)

        checkpointer.Checkpointer.begin = begin
    elif at == "save.prove":
        before(directory, "record_file", of_step)
    elif at == "save.manifest":
        before(directory, "write_manifest", lambda folder, *_, **__: of_step(folder))
    elif at == "save.rename":
        before(directory, "publish_checkpoint", lambda temporary, _target: of_step(temporary))
    elif at == "save.latest":
        # After the rename, before `latest` is replaced: at the second flush of the folder that holds the checkpoints.
        real = directory.publish_checkpoint

        def publish(temporary: Path, target: Path) -> None:
            if of_step(target) and FAULT.get("rank", RANK) == RANK:
                before(directory, "flush", lambda path: path == target.parent)
            real(temporary, target)

        directory.publish_checkpoint = publish
    elif at == "rehearsal":
        before(dry_run, "train_step", nth)
    elif at == "rotate":
        before(directory, "remove_old", nth)
    elif at not in ("clock", "slow", "nowhere"):
        raise SystemExit(f"no such place: {at}")


if __name__ == "__main__":
    from toolkit.cli import main

    if FAULT.get("at"):
        install()
    sys.exit(main(["train", *sys.argv[1:]]))
