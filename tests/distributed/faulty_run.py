"""run.py with one fault, put in at a chosen rank, step and place, and noted when it happens.

FAULT: JSON with `at` (a place below), `rank`, `step` (from 1; for saves: of the checkpoint), `do` (kill, killall, stop,
hang, fail, tell), `note` (file that gets a line when the fault happens), `once` (not again where the note is there
already). Everything else is the product's own.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT: dict[str, Any] = json.loads(os.environ["FAULT"])
RANK = int(os.environ.get("RANK", "0"))


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
    return lambda *_: bool(entered) and entered[-1] == step


def install() -> None:
    """Put the fault in its place."""
    from toolkit.checkpoint import engine_files, folders, manifest
    from toolkit.train import loop

    at, step = FAULT["at"], FAULT["step"]
    count = 0

    def nth(*arguments: Any, **options: Any) -> bool:
        nonlocal count
        count += 1
        return count == FAULT.get("nth", step)

    def of_step(path: Any) -> bool:
        return f"step-{step}" in str(path)

    if FAULT.get("once") and Path(FAULT["note"]).exists():
        return
    if at == "each life":  # the step's number, where "step" counts those of this life
        before(loop, "train_step", in_step(step))
    elif at == "step":
        before(loop, "train_step", nth)
    elif at == "save.shard":
        before(engine_files.torch, "save", lambda _state, path: of_step(path))
    elif at == "save.prove":
        before(manifest, "prove", of_step)
    elif at == "save.manifest":
        before(manifest, "write", lambda folder, *_: of_step(folder))
    elif at == "save.rename":
        before(folders, "publish", lambda temporary, _target: of_step(temporary))
    elif at == "save.latest":
        # After the rename, before `latest` is replaced: at the second flush of the folder that holds the checkpoints.
        real = folders.publish

        def publish(temporary: Path, target: Path) -> None:
            if of_step(target) and FAULT.get("rank", RANK) == RANK:
                before(folders, "flush", lambda path: path == target.parent)
            real(temporary, target)

        folders.publish = publish
    elif at == "rotate":
        before(folders, "remove_old", nth)
    else:
        raise SystemExit(f"no such place: {at}")


if __name__ == "__main__":
    from toolkit.cli import main

    if FAULT.get("at"):
        install()
    sys.exit(main(["train", *sys.argv[1:]]))
