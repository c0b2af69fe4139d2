"""The process that feeds the trackers, beside rank 0: whatever a tracker does, training does not wait for it.

python -m toolkit.track.queue RUN_FOLDER

Reads messages from stdin, one JSON object per line, and answers on stdout with what is to be shown to the user. Each
tracker has a thread and a queue of its own, which knows what it has, what it is sent, and what is said when it fails.
The process ends when stdin does, whatever became of rank 0, and soon.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast

from toolkit.messages import set_language, tr
from toolkit.secrets import hide
from toolkit.track.backends import ANSWERS, EVAL, FAILED, SAMPLES, TRAIN, Backend, Row, TrackedRun
from toolkit.track.metrics import is_evaluation, metric_values

BACKENDS = {
    "tensorboard": ("tensorboard", "TensorboardEvents"),
    "csv": ("csv", "CsvFile"),
    "wandb": ("wandb", "WandbRun"),
    "mlflow": ("mlflow", "MlflowRun"),
    "swanlab": ("swanlab", "SwanlabRun"),
    "trackio": ("trackio", "TrackioRun"),
}
MOST_WAITING = 10_000
"""Messages for a tracker that does not keep up; what comes beyond is left out."""
PAUSES_S = (1.0, 10.0, 60.0, 300.0, 600.0)
"""Between the attempts at one message; then it is left out. When the session ends there is one more attempt at each."""
BEGIN_AGAIN_S = 60.0
"""Between the attempts to begin."""
LOOK_EVERY_S = 0.2
"""Whether the session has ended, when there is nothing else to do."""
RECORD_EVERY_S = 1.0
"""Between two times that the record is written."""
SLOW_S = 60.0
"""An answer that takes longer is told."""


_IMPORTING = threading.Lock()
"""Large libraries that import one another from several threads may see half of one."""


class BackendQueue:
    """A thread that hands on messages in their order.

    Args:
        rows: what metrics.jsonl held when the session began.
        reply: tells the parent: {"say": …} for the user, {"begun": name} when the tracker has answered.
    """

    def __init__(
        self, name: str, run: TrackedRun, rows: Sequence[Mapping[str, Any]], reply: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.name, self.rows, self.reply = name, rows, reply
        self.record = _Record(run.folder / "trackers" / f"{name}.json", run.step)
        self.run = replace(run, id=self.record.id)
        self.messages: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(MOST_WAITING)
        self.ending = threading.Event()
        self.is_done = False
        self.left_out = self._replaying = 0
        self._told: set[str] = set()
        self._status = ""
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def put(self, kind: str, message: dict[str, Any]) -> None:
        """Take a message: a `row`, `answers`, a `summary`, or how far the run has gone `back`."""
        try:
            self.messages.put_nowait((kind, message))
        except queue.Full:
            self.left_out += 1

    def close(self, status: str) -> None:
        """Say how the session ended; what waits is still handed on."""
        self._status = status
        self.ending.set()

    def wait(self, until: float) -> None:
        """Wait for the end, not beyond a time of time.monotonic(), and tell what is missing."""
        self.thread.join(max(0.0, until - time.monotonic()))
        self.record.write()
        missing = self.left_out + (0 if self.is_done else self._replaying + self.messages.unfinished_tasks)
        if missing or not self.is_done:
            self._tell(
                "end",
                tr(
                    "WARNING: {tracker} did not take everything in time (messages left: {count}). metrics.jsonl has it "
                    "all.",
                    tracker=self.name,
                    count=missing,
                ),
            )

    def _work(self) -> None:
        self._replaying = len(self._new(self.rows))
        client = self._begin()
        if client is None:
            return
        self._replay(client)
        while True:
            try:
                kind, message = self.messages.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self.record.write()
                if self.ending.is_set():
                    break
                continue
            self._hand_on(client, kind, message)
            self.messages.task_done()
        self.is_done = self._is_done(lambda: client.end(self._status))

    def _begin(self) -> Backend | None:
        """Begin, again and again, until it succeeds or the session ends."""
        while True:
            try:
                return self._watched(self._begun)
            except Exception as error:  # whatever a library raises
                self._failed(error)
            if self.ending.wait(BEGIN_AGAIN_S):
                return None

    def _begun(self) -> Backend:
        module, kind = BACKENDS[self.name]
        with _IMPORTING:
            client: Backend = getattr(import_module(f"toolkit.track.backends.{module}"), kind)()
        client.begin(self.run)
        self.record.has(client.held())
        if client.redoes:
            self.record.back_to(self.run.step)
        self.record.write()
        self.reply({"begun": self.name})
        return client

    def _replay(self, client: Backend) -> None:
        """Hand on what an earlier session did not hand on any more."""
        rows = self._new(self.rows)
        self._replaying = len(rows)
        for first in range(0, len(rows), client.most_rows):
            some = rows[first : first + client.most_rows]
            self._hand_on_rows(client, some)
            self._replaying -= len(some)

    def _new(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Row]]:
        """Return what the tracker does not have from an earlier attempt at the same step, each with TRAIN or EVAL."""
        last = dict(self.record.steps)
        found: list[tuple[str, Row]] = []
        for row in map(metric_values, rows):
            step, part = int(row["step"]), EVAL if is_evaluation(row) else TRAIN
            if step > last[part]:
                last[part] = step
                found.append((part, (step, {name: value for name, value in row.items() if name != "step"})))
        return found

    def _hand_on_rows(self, client: Backend, rows: Sequence[tuple[str, Row]]) -> None:
        if rows and self._is_done(lambda: client.write([row for _, row in rows]), len(rows)):
            self.record.has({part: step for part, (step, _) in rows})
            self.record.write_now_and_then()

    def _hand_on(self, client: Backend, kind: str, message: dict[str, Any]) -> None:
        step = int(message.get("step", 0))
        if kind == "row":
            self._hand_on_rows(client, self._new([message["row"]]))
        elif kind == "back":
            if client.redoes and self._is_done(lambda: client.take_back(step)):
                self.record.back_to(step)
        elif kind == "answers":
            name = message["name"]
            if step > self.record.steps[name] and self._is_done(lambda: client.answers(step, name, message["answers"])):
                self.record.has({name: step})
                self.record.write_now_and_then()
        elif kind == "summary":
            self._is_done(lambda: client.summary(step, message["values"]))

    def _is_done(self, call: Callable[[], object], count: int = 1) -> bool:
        """Call, several times if it fails; return whether it succeeded, and else count its messages as left out."""
        for pause_s in (*PAUSES_S, 0.0):
            was_ending = self.ending.is_set()
            try:
                self._watched(call)
                return True
            except Exception as error:  # whatever a library raises
                self._failed(error)
            if was_ending:
                break
            self.ending.wait(pause_s)
        self.left_out += count
        return False

    def _watched(self, call: Callable[[], Any]) -> Any:
        """Call, and tell if it takes long."""
        timer = threading.Timer(SLOW_S, self._slow)
        timer.daemon = True
        timer.start()
        try:
            return call()
        finally:
            timer.cancel()

    def _slow(self) -> None:
        self._tell(
            "slow",
            tr(
                "WARNING: {tracker} has not answered for {seconds} s. Training does not wait for it.",
                tracker=self.name,
                seconds=f"{SLOW_S:.0f}",
            ),
        )

    def _failed(self, error: Exception) -> None:
        reason = " ".join((str(error) or type(error).__name__).split()).rstrip(".")
        self._tell(
            "failed",
            tr(
                "WARNING: {tracker} failed: {kind}: {reason}. It is tried again; training goes on, and metrics.jsonl "
                "has everything.",
                tracker=self.name,
                kind=type(error).__name__,
                reason=reason if len(reason) <= 300 else reason[:297] + "...",
            ),
        )

    def _tell(self, what: str, sentence: str) -> None:
        """Tell the user, once for each kind of trouble."""
        if what not in self._told:
            self._told.add(what)
            self.reply({"say": sentence, "failed": self.name})


class _Record:
    """RUN/trackers/NAME.json: the run's id there, and the last steps that it was handed."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self.id = os.urandom(4).hex()
        self.steps = dict.fromkeys((TRAIN, EVAL, ANSWERS, SAMPLES), -1)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            self.id = str(values["id"])
            self.steps = {part: int(values[part]) for part in self.steps}
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def has(self, steps: Mapping[str, int]) -> None:
        """Take note of the last steps."""
        self.steps |= steps

    def back_to(self, step: int) -> None:
        """The steps after this one are handed on again."""
        self.steps = {part: min(last, step) for part, last in self.steps.items()}

    def write_now_and_then(self) -> None:
        """Write it if that was a while ago: for each row it would take longer than the row."""
        if time.monotonic() - self._written_at >= RECORD_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write what is new in it, whichever thread asks; a full disk is no reason to stop."""
        with self._lock, suppress(OSError):
            values = {"id": self.id, **self.steps}
            self._written_at = time.monotonic()
            if values == self._written:
                return
            self.path.parent.mkdir(exist_ok=True)
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
            temporary.replace(self.path)
            self._written = values


KILLED_PATIENCE_S = 5.0
"""Time to end in when rank 0 is gone without a word: its run may be started again at once."""


def main() -> None:
    """Serve one session, to its end."""
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of stdin is the word that counts
    os.nice(5)
    lanes = _serve(folder, _own_stdout())
    with suppress(OSError):
        sys.stderr.flush()
    # Not sys.exit: a library may wait at exit for a server that does not answer.
    os._exit(0 if all(lane.is_done for lane in lanes) else 1)


def _own_stdout() -> TextIO:
    """Return a file for answers; whatever else is printed, by libraries and their processes, goes where stderr goes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr = cast("TextIO", _Hiding(sys.stderr))
    return replies


class _Hiding:
    """A stream that leaves out secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without them."""
        return self._stream.write(hide(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _serve(folder: Path, replies: TextIO) -> list[BackendQueue]:
    lock = threading.Lock()

    def reply(message: Mapping[str, Any]) -> None:
        with lock, suppress(OSError):
            replies.write(json.dumps(message) + "\n")
            replies.flush()

    lanes: list[BackendQueue] = []
    status, patience_s = FAILED, KILLED_PATIENCE_S
    for line in sys.stdin:
        try:
            message = json.loads(line)
        except ValueError:  # half a line: rank 0 died while it wrote
            break
        kind = message.pop("kind")
        if kind == "begin":
            lanes = _begin(folder, message, reply)
        elif kind == "end":
            status, patience_s = message["status"], message["patience_s"]
            break
        else:
            for lane in lanes:
                lane.put(kind, message)
    until = time.monotonic() + patience_s
    for lane in lanes:
        lane.close(status)
    for lane in lanes:
        lane.wait(until)
    return lanes


def _begin(folder: Path, message: dict[str, Any], reply: Callable[[Mapping[str, Any]], None]) -> list[BackendQueue]:
    set_language(message["language"])
    lanes = []
    rows = _rows_so_far(folder, message["metrics_bytes"])
    for name, settings in message["trackers"].items():
        run = TrackedRun(
            name=folder.name,
            id="",
            folder=folder,
            settings=settings,
            hyperparameters=message["hyperparameters"],
            texts=message["texts"],
            step=message["step"],
        )
        lanes.append(BackendQueue(name, run, rows, reply))
    return lanes


def _rows_so_far(folder: Path, length: int) -> list[dict[str, Any]]:
    """Return the rows that metrics.jsonl had when the session began."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            return [json.loads(line) for line in file.read(length).splitlines()]
    except (OSError, ValueError):
        return []


if __name__ == "__main__":
    main()
