"""Programs on several ranks of this machine: started, watched from outside, ended."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from toolkit.bench.processes import children
from toolkit.children import start_tree
from toolkit.distributed.process_group import remove_shared_memory
from toolkit.errors import LaunchError
from toolkit.launch.environment import free_port
from toolkit.messages import tr

LIMIT_S = 3600.0


class Launch:
    """A program that runs until it ends by itself, or until the `with` block does.

    Args:
        words: the program and its words, as DeepSpeed's launcher takes them.
        ranks: on this machine.
        launcher: Python module that starts the ranks.
    """

    def __init__(
        self, words: Sequence[str], ranks: int, launcher: Sequence[str] = ("deepspeed.launcher.runner",)
    ) -> None:
        self.num_ranks, self.port = ranks, free_port()
        self.file = tempfile.NamedTemporaryFile()
        options = ["--num_gpus", str(ranks), "--master_port", str(self.port)]
        self.started = time.perf_counter()
        self.process = start_tree(
            [sys.executable, "-m", *launcher, *options, *words], stdout=self.file, stderr=self.file
        )

    def __enter__(self) -> "Launch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [self.process.pid, *children(self.process.pid)] if self.process.poll() is None else []
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait()
        self.file.close()
        for rank in range(self.num_ranks):
            remove_shared_memory(rank, str(self.port))

    def output(self) -> str:
        """Return what the program has printed so far."""
        return Path(self.file.name).read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait until something is so; return the seconds since the start.

        Raises:
            LaunchError: the program ended before, or has taken an hour.
        """
        while not condition():
            if self.process.poll() is not None or time.perf_counter() - self.started > LIMIT_S:
                raise self._failure()
            time.sleep(0.005)
        return round(time.perf_counter() - self.started, 3)

    def wait(self) -> None:
        """Wait for the program's end.

        Raises:
            LaunchError: it failed.
        """
        self.until(lambda: self.process.poll() is not None)
        if self.process.returncode:
            raise self._failure()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in their order."""
        found: dict[int, int] = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                environ = psutil.Process(pid).environ()
                if environ.get("MASTER_PORT") == str(self.port) and "RANK" in environ:
                    found.setdefault(int(environ["RANK"]), pid)  # what a rank starts comes after it
        return [found[rank] for rank in sorted(found)]

    def _failure(self) -> LaunchError:
        last = "\n".join(self.output().splitlines()[-20:])
        return LaunchError(tr("the launch to be measured has failed:\n{output}", output=last))
