"""The trackers as rank 0 sees them, which never waits for what it sends them. The work is done in queue.py."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.launch.environment import without_ranks
from toolkit.messages import current_language, tr, warn
from toolkit.secrets import hide_all
from toolkit.track.backends import FAILED, FINISHED
from toolkit.track.queue import KILLED_PATIENCE_S

MOST_WAITING_BYTES = 8 << 20
"""Messages that wait for a process that does not read them."""
MOST_ANSWERS = 20
"""Of an evaluation, that trackers get."""
TEXTS = ("config.yaml", "ds_config.json", "environment.json")
"""Of the run folder, that trackers get."""


class Trackers:
    """Hands on what a run records. One without trackers does nothing, as on all ranks but the first."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting, self._heard = bytearray(), bytearray()
        self._silent: set[str] = set()
        self._is_full = self._is_ending = False

    @property
    def is_on(self) -> bool:
        """Whether there is anyone to hand things on to."""
        return self._process is not None

    def begin(
        self,
        folder: Path,
        trackers: Mapping[str, Mapping[str, Any]],
        hyperparameters: Mapping[str, Any],
        step: int,
    ) -> None:
        """Start the process and let it begin; wait for nothing."""
        if not trackers:
            return
        metrics = folder / "metrics.jsonl"
        try:
            with open(folder / "logs" / "trackers.log", "ab") as log:
                self._process = children.start(
                    [sys.executable, "-m", "toolkit.track.queue", str(folder)],
                    ends_with_input=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=without_ranks(),
                    start_new_session=True,
                )
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
            files = [folder / name for name in TEXTS if (folder / name).exists()]
            texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in files}
            length = metrics.stat().st_size if metrics.exists() else 0
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._silent = set(trackers)
        self._send(
            "begin",
            language=current_language(),
            trackers=trackers,
            hyperparameters=hyperparameters,
            texts=texts,
            step=step,
            metrics_bytes=length,
        )

    def wait_begun(self) -> None:
        """Wait a while until each has begun, or has failed; say which has not."""
        until = time.monotonic() + self.patience_s
        while self._silent and self._process is not None and time.monotonic() < until:
            self._exchange(wait_s=0.1)
        if self._silent and self._process is not None:
            warn(
                "no answer from {trackers} for {seconds} s. Training begins; what there is to record waits.",
                trackers=", ".join(sorted(self._silent)),
                seconds=f"{self.patience_s:g}",
            )

    def row(self, row: Mapping[str, object]) -> None:
        """Hand on a row of metrics.jsonl."""
        self._send("row", row=row)

    def back_to(self, step: int) -> None:
        """Drop the rows after a step: the run has gone back to it."""
        self._send("back", step=step)

    def answers(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand on some of what the model answered."""
        names = {"prompt": "prompt", "output": "answer", "answer": "answer", "reference": "reference"}
        some = rows[:: max(1, -(-len(rows) // MOST_ANSWERS))]
        answers = [{names[name]: str(value) for name, value in row.items() if name in names} for row in some]
        if answers:
            self._send("answers", step=step, name=name, answers=answers)

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Hand on figures of the whole run."""
        self._send("summary", step=step, values=values)

    def end(self, status: str) -> None:
        """Let the trackers end. Only a run that has finished waits for that, no longer than `patience_s`."""
        process, is_finished = self._process, status == FINISHED
        if process is None:
            return
        self._is_ending = True
        patience_s = min(self.patience_s, KILLED_PATIENCE_S) if status == FAILED else self.patience_s
        self._send("end", status=status, patience_s=patience_s)
        until = time.monotonic() + patience_s + 2
        while is_finished and process.poll() is None and self._process is not None and time.monotonic() < until:
            self._exchange(wait_s=0.1)
        if is_finished and process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            self._lose(tr("no answer"))
        self._exchange(wait_s=0.0)
        self._leave()

    def _send(self, kind: str, **values: Any) -> None:
        if self._process is None:
            return
        line = json.dumps(hide_all({"kind": kind, **values})).encode() + b"\n"
        if len(self._waiting) + len(line) <= MOST_WAITING_BYTES:
            self._waiting += line
        elif not self._is_full:
            self._is_full = True
            warn("the trackers take nothing any more. metrics.jsonl has it all.")
        self._exchange(wait_s=0.0)

    def _exchange(self, wait_s: float) -> None:
        """Write what can be written and say what there is to say."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        try:
            while self._waiting:
                written = os.write(process.stdin.fileno(), self._waiting[: 1 << 16])
                del self._waiting[:written]
        except BlockingIOError:
            pass
        except OSError:
            if process.poll() is None:
                process.kill()
            self._lose(tr("the process has ended, see logs/trackers.log"))
            return
        answers = select.poll()  # select.select takes no file numbers from 1024 on
        answers.register(process.stdout, select.POLLIN)
        answers.poll(1000 * wait_s)
        with suppress(BlockingIOError):
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                self._heard += chunk
            if not self._is_ending:  # the end of its file
                self._lose(tr("the process has ended, see logs/trackers.log"))
        *lines, rest = self._heard.split(b"\n")
        self._heard = bytearray(rest)
        for line in lines:
            answer = json.loads(line)
            self._silent -= {answer.get("begun"), answer.get("failed")}
            if "warning" in answer:
                warn(answer["warning"])

    def _leave(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
        self._process = None

    def _lose(self, reason: str) -> None:
        self._leave()
        warn("trackers: {reason}. Training continues; metrics.jsonl has everything.", reason=reason)
