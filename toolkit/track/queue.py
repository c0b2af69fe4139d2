"""`Trackers`, with which rank 0 sends records without waiting, and the child process that feeds the trackers:
`-m toolkit.track.queue RUN_FOLDER`.

The process reads messages from stdin, a JSON object per line, and answers on stdout with what is shown to the user.
Each tracker has its own thread and queue. The process ends soon after stdin does, whatever became of rank 0.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TextIO, cast

from toolkit import children, disk, secrets
from toolkit.launch.environment import without_ranks
from toolkit.messages import current_language, set_language, tr, warn
from toolkit.track.backends import ANSWERS, BACKENDS, EVAL, FAILED, FINISHED, SAMPLES, TRAIN, Backend, Row, TrackedRun
from toolkit.track.metrics import is_evaluation, metric_values

MOST_WAITING_BYTES = 8 << 20
"""Size of the messages that may wait for the process to read them."""
MOST_ANSWERS = 20
"""Answers of an evaluation that trackers get."""
TEXTS = ("config.yaml", "ds_config.json", "environment.json")
"""Files of the run directory that trackers get."""


class Trackers:
    """Sends what a run records to the process that feeds its trackers, and never waits for it. On all ranks but 0, and
    in runs without trackers, it has no process and does nothing.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting, self._heard = bytearray(), bytearray()
        """Messages not written to the process yet, and its output up to the last whole line."""
        self._silent: set[str] = set()
        """Trackers that have not answered yet."""
        self._is_full = self._is_ending = False

    @property
    def is_on(self) -> bool:
        """Whether there are trackers to send to."""
        return self._process is not None

    def begin(
        self, folder: Path, trackers: Mapping[str, Mapping[str, Any]], hyperparameters: Mapping[str, Any], step: int
    ) -> None:
        """Start the process that feeds `trackers` (name -> settings); wait for nothing. `step`: the last one done."""
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
                os.set_blocking(pipe.fileno(), False)  # a full or an empty pipe must not hold the training up
            files = [folder / name for name in TEXTS if (folder / name).exists()]
            texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in files}
            length = metrics.stat().st_size if metrics.exists() else 0  # rows of earlier sessions; later ones are sent
        except OSError as error:
            self._give_up(error.strerror or str(error))
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
        """Wait up to `patience_s` until every tracker has begun or failed; warn of those that have not answered."""
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
        """Send a row of metrics.jsonl."""
        self._send("row", row=row)

    def back_to(self, step: int) -> None:
        """Let trackers drop the rows after `step`: the run was rewound to it."""
        self._send("back", step=step)

    def answers(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send at most MOST_ANSWERS of the model's answers (rows of a file of answers); `name`: ANSWERS or SAMPLES."""
        # Key of a row -> key that is sent: the model's answer is `output` in one kind of file, `answer` in the other.
        names = {"prompt": "prompt", "output": "answer", "answer": "answer", "reference": "reference"}
        every = max(1, -(-len(rows) // MOST_ANSWERS))  # rounded up: spread over all rows
        answers = [{names[name]: str(value) for name, value in row.items() if name in names} for row in rows[::every]]
        if answers:
            self._send("answers", step=step, name=name, answers=answers)

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Send figures of the whole run."""
        self._send("summary", step=step, values=values)

    def end(self, status: str) -> None:
        """Tell the process that the run has ended: FINISHED, STOPPED or FAILED. Only of a finished run wait, up to
        `patience_s`, until everything is delivered: else this process may have to end at once, and the other goes on.
        """
        process = self._process
        if process is None:  # no trackers, or their process was given up
            return
        self._is_ending = True  # from now on the process may close its output
        patience_s = self.patience_s
        if status == FAILED:  # the run may be restarted at once, under the same id at the trackers
            patience_s = min(patience_s, KILLED_PATIENCE_S)
        self._send("end", status=status, patience_s=patience_s)
        if status == FINISHED:
            self._print_until_ended(process, patience_s + 2)  # the process itself stops after `patience_s`
        self._exchange(wait_s=0.0)  # prints its last warnings
        self._forget_process()

    def _print_until_ended(self, process: "subprocess.Popen[bytes]", limit_s: float) -> None:
        """Print the process's warnings until it has ended; after `limit_s` kill it, with what it started."""
        until = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < until:
            self._exchange(wait_s=0.1)
            if self._process is None:  # `_exchange` has given the process up, as it takes no messages any more
                break
        if process.poll() is None:
            with suppress(OSError):  # it leads a process group of its own
                os.killpg(process.pid, signal.SIGKILL)
            self._give_up(tr("no answer"))

    def _send(self, kind: str, **values: Any) -> None:
        """Queue a message without secrets and send what the process takes; warn once if it takes nothing any more."""
        if self._process is None:
            return
        line = json.dumps(secrets.hide_all({"kind": kind, **values})).encode() + b"\n"
        if len(self._waiting) + len(line) <= MOST_WAITING_BYTES:
            self._waiting += line
        elif not self._is_full:
            self._is_full = True
            warn("the trackers take nothing any more. metrics.jsonl has it all.")
        self._exchange(wait_s=0.0)

    def _exchange(self, wait_s: float) -> None:
        """Write what the process takes of the waiting messages, and print its warnings; wait up to `wait_s` for one.
        Give the process up if it has ended.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        try:
            while self._waiting:
                written = os.write(process.stdin.fileno(), self._waiting[: 1 << 16])
                del self._waiting[:written]
        except BlockingIOError:  # the pipe is full: the rest waits
            pass
        except OSError:  # the process reads no more
            if process.poll() is None:
                process.kill()
            self._give_up(tr("the process has ended, see logs/trackers.log"))
            return
        self._read_answers(process.stdout, wait_s)

    def _read_answers(self, output: IO[bytes], wait_s: float) -> None:
        """Read the process's `output`: print its warnings, and note which trackers have begun or failed."""
        answers = select.poll()  # select.select takes no file numbers from 1024 on
        answers.register(output, select.POLLIN)
        answers.poll(1000 * wait_s)
        with suppress(BlockingIOError):
            while chunk := os.read(output.fileno(), 1 << 16):
                self._heard += chunk
            if not self._is_ending:  # an empty read: the process has closed its output
                self._give_up(tr("the process has ended, see logs/trackers.log"))
        *lines, unfinished_line = self._heard.split(b"\n")
        self._heard = bytearray(unfinished_line)
        for line in lines:
            answer = json.loads(line)
            self._silent -= {answer.get("begun"), answer.get("failed")}
            if "warning" in answer:
                warn(answer["warning"])

    def _forget_process(self) -> None:
        """Close the pipes to the process and forget it."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
        self._process = None

    def _give_up(self, reason: str) -> None:
        """Give up the process and warn why."""
        self._forget_process()
        warn("trackers: {reason}. Training continues; metrics.jsonl has everything.", reason=reason)


MOST_WAITING = 10_000
"""Messages for a tracker that does not keep up; what comes beyond is dropped."""
PAUSES_S = (1.0, 10.0, 60.0, 300.0, 600.0)
"""Between the attempts at one message; then it is dropped. When the session ends there is one more attempt at each."""
BEGIN_AGAIN_S = 60.0
"""Between the attempts to begin a run at a tracker."""
LOOK_EVERY_S = 0.2
"""Between two checks whether the session has ended, while no message comes."""
RECORD_EVERY_S = 1.0
"""Between two writes of the record, which take longer than delivering a row."""
SLOW_S = 60.0

_IMPORTING = threading.Lock()
"""Several threads that import large libraries at once may see half-imported modules."""


class BackendQueue:
    """A thread that delivers to one tracker, in order. `rows`: metrics.jsonl when the session began; `reply` tells the
    parent {"warning": …} for the user or {"begun": name} when the tracker has answered.
    """

    backend: Backend

    def __init__(
        self, name: str, run: TrackedRun, rows: Sequence[Mapping[str, Any]], reply: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.name, self.rows, self.reply = name, rows, reply
        self.record = _Record(run.folder / "trackers" / f"{name}.json")
        self.run = replace(run, id=self.record.id)
        self.messages: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(MOST_WAITING)
        self.ending = threading.Event()
        self.is_done = False
        self.dropped = self._replaying = 0
        """Messages given up, and rows of before this session that are still to be delivered."""
        self._warned: set[str] = set()
        self._status = ""
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def put(self, kind: str, message: dict[str, Any]) -> None:
        """Queue a message of kind row, answers, summary or back (rewound to a step); drop it if the queue is full."""
        try:
            self.messages.put_nowait((kind, message))
        except queue.Full:
            self.dropped += 1

    def close(self, status: str) -> None:
        """Tell the thread how the session ended, and return at once; messages that wait are still delivered."""
        self._status = status
        self.ending.set()

    def wait(self, until: float) -> None:
        """Wait for the thread until a time of time.monotonic(), and warn if messages are missing."""
        self.thread.join(max(0.0, until - time.monotonic()))
        self.record.write()
        missing = self.dropped
        if not self.is_done:
            missing += self._replaying + self.messages.unfinished_tasks
        if missing or not self.is_done:
            self._warn_once(
                "end",
                tr(
                    "{tracker} did not take everything in time (messages left: {count}). metrics.jsonl has it all.",
                    tracker=self.name,
                    count=missing,
                ),
            )

    def _work(self) -> None:
        """Begin, deliver the rows that an earlier session has not, then messages to the end: what the thread does."""
        self._replaying = len(self._missing(self.rows))  # as far as is known before it begins: `wait` may read it now
        while not self._attempt(self._begin):
            if self.ending.wait(BEGIN_AGAIN_S):
                return
        rows = self._missing(self.rows)  # again: `_begin` learnt which steps the tracker has
        self._replaying = len(rows)
        for first in range(0, len(rows), self.backend.most_rows):
            batch = rows[first : first + self.backend.most_rows]
            self._deliver_rows(batch)
            self._replaying -= len(batch)
        while True:
            try:
                kind, message = self.messages.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self.record.write()
                if self.ending.is_set():
                    break
                continue
            self._deliver(kind, message)
            self.messages.task_done()
        self.is_done = self._deliver_with_retries(lambda: self.backend.end(self._status))

    def _begin(self) -> None:
        """Create the tracker and begin the run there; note which steps it already has."""
        with _IMPORTING:
            backend = BACKENDS[self.name]()
        backend.begin(self.run)
        self.record.steps |= backend.held()
        if backend.redoes:
            self.record.back_to(self.run.step)
        self.record.write()
        self.backend = backend
        self.reply({"begun": self.name})

    def _missing(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Row]]:
        """Return (TRAIN or EVAL, row) of each row whose step the tracker does not have from an earlier session."""
        last = dict(self.record.steps)
        rows_of_parts: list[tuple[str, Row]] = []
        for row in map(metric_values, rows):
            step, part = int(row["step"]), EVAL if is_evaluation(row) else TRAIN
            if step > last[part]:
                last[part] = step
                rows_of_parts.append((part, (step, {name: value for name, value in row.items() if name != "step"})))
        return rows_of_parts

    def _deliver(self, kind: str, message: dict[str, Any]) -> None:
        """Deliver one message, of a kind as in `put`, to the tracker, unless it has it from an earlier session."""
        step = int(message.get("step", 0))
        if kind == "row":
            self._deliver_rows(self._missing([message["row"]]))
        elif kind == "back":
            # A backend that cannot take rows back (not `redoes`) keeps them; `_missing` drops those that come again.
            if self.backend.redoes and self._deliver_with_retries(lambda: self.backend.take_back(step)):
                self.record.back_to(step)
        elif kind == "answers":
            name, answers = message["name"], message["answers"]
            if step > self.record.steps[name]:
                self._deliver_with_retries(lambda: self.backend.answers(step, name, answers), {name: step})
        elif kind == "summary":
            self._deliver_with_retries(lambda: self.backend.summary(step, message["values"]))

    def _deliver_rows(self, rows: Sequence[tuple[str, Row]]) -> None:
        """Deliver rows, each with TRAIN or EVAL, in one call."""
        if rows:
            steps = {part: step for part, (step, _) in rows}
            self._deliver_with_retries(lambda: self.backend.write([row for _, row in rows]), steps, len(rows))

    def _deliver_with_retries(
        self, deliver: Callable[[], object], steps: Mapping[str, int] | None = None, count: int = 1
    ) -> bool:
        """Call `deliver` until it succeeds, then record `steps` (TRAIN, EVAL, … -> last step) as delivered; return
        whether it did. After the last retry drop its `count` messages.
        """
        for pause_s in (*PAUSES_S, 0.0):
            is_last = self.ending.is_set()  # which also ends a pause
            if self._attempt(deliver):
                if steps:
                    self.record.steps |= steps
                    self.record.write(RECORD_EVERY_S)
                return True
            if is_last:
                break
            self.ending.wait(pause_s)
        self.dropped += count
        return False

    def _attempt(self, call: Callable[[], object]) -> bool:
        """Return whether a call to the tracker succeeds; warn once if it fails, once if it is slower than SLOW_S."""
        slow = tr(
            "{tracker} has not answered for {seconds} s. Training does not wait for it.",
            tracker=self.name,
            seconds=f"{SLOW_S:.0f}",
        )
        timer = threading.Timer(SLOW_S, self._warn_once, ("slow", slow))
        timer.daemon = True
        timer.start()
        try:
            call()
        except Exception as error:  # whatever a library raises
            reason = " ".join((str(error) or type(error).__name__).split()).rstrip(".")
            failed = tr(
                "{tracker} failed: {kind}: {reason}. It is retried; training continues, and metrics.jsonl has "
                "everything.",
                tracker=self.name,
                kind=type(error).__name__,
                reason=reason if len(reason) <= 300 else reason[:297] + "...",
            )
            self._warn_once("failed", failed)
            return False
        finally:
            timer.cancel()
        return True

    def _warn_once(self, what: str, sentence: str) -> None:
        """Report a warning to the user, once of each kind `what`."""
        if what not in self._warned:
            self._warned.add(what)
            self.reply({"warning": sentence, "failed": self.name})


class _Record:
    """RUN/trackers/NAME.json: the run's id at a tracker, and the last steps of each part that were delivered to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self.id = os.urandom(4).hex()
        self.steps = dict.fromkeys((TRAIN, EVAL, ANSWERS, SAMPLES), -1)
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads(path.read_text(encoding="utf-8"))
            self.id = str(values["id"])
            self.steps = {part: int(values[part]) for part in self.steps}

    def back_to(self, step: int) -> None:
        """Note that the steps after this one will be delivered again."""
        self.steps = {part: min(last, step) for part, last in self.steps.items()}

    def write(self, every_s: float = 0.0) -> None:
        """Write the record if it has changed and the last write was `every_s` seconds ago; a full disk is ignored."""
        if time.monotonic() - self._written_at < every_s:
            return
        with self._lock, suppress(OSError):
            values = {"id": self.id, **self.steps}
            self._written_at = time.monotonic()
            if values == self._written:
                return
            self.path.parent.mkdir(exist_ok=True)
            disk.write_atomically(self.path, json.dumps(values).encode() + b"\n")
            self._written = values


KILLED_PATIENCE_S = 5.0
"""Seconds that trackers get to end if rank 0 was killed: its run may be restarted at once."""


class _Hiding:
    """A text stream that masks secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text with its secrets masked."""
        return self._stream.write(secrets.hide(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    """Feed the trackers of one session of a run: the process that `Trackers.begin` starts."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of stdin is what ends this process
    os.nice(5)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")  # the pipe to rank 0, for answers alone
    os.dup2(2, 1)  # whatever else is printed, by libraries and their processes, goes where stderr goes
    sys.stdout = sys.stderr = cast("TextIO", _Hiding(sys.stderr))
    queues = _deliver_session(Path(sys.argv[1]), replies)
    with suppress(OSError):
        sys.stderr.flush()
    # Not sys.exit: a library may wait at exit for a server that does not answer.
    os._exit(0 if all(queue.is_done for queue in queues) else 1)


def _deliver_session(folder: Path, replies: TextIO) -> list[BackendQueue]:
    """Hand rank 0's messages, which come from stdin, to a queue per tracker until the session ends; then wait, as long
    as the last message says, until all is delivered. Return the queues.
    """
    lock = threading.Lock()

    def reply(message: Mapping[str, Any]) -> None:
        """Write an answer for the parent; called by several threads."""
        with lock, suppress(OSError):
            replies.write(json.dumps(message) + "\n")
            replies.flush()

    queues: list[BackendQueue] = []
    status, patience_s = FAILED, KILLED_PATIENCE_S  # if stdin ends without an "end": rank 0 was killed
    for line in sys.stdin:
        try:
            message = json.loads(line)
        except ValueError:  # half a line: rank 0 died while it wrote
            break
        kind = message.pop("kind")
        if kind == "begin":
            queues += _new_queues(folder, message, reply)
        elif kind == "end":
            status, patience_s = message["status"], message["patience_s"]
            break
        else:
            for queue in queues:
                queue.put(kind, message)
    until = time.monotonic() + patience_s
    for queue in queues:
        queue.close(status)
    for queue in queues:
        queue.wait(until)
    return queues


def _new_queues(
    folder: Path, message: Mapping[str, Any], reply: Callable[[Mapping[str, Any]], None]
) -> list[BackendQueue]:
    """Begin a session by its first message, that of `Trackers.begin`: return a queue, which runs, for each tracker."""
    set_language(message["language"])
    rows: list[dict[str, Any]] = []  # of earlier sessions
    with suppress(OSError, ValueError), open(folder / "metrics.jsonl", "rb") as file:
        rows = [json.loads(row) for row in file.read(message["metrics_bytes"]).splitlines()]
    of_run = {name: message[name] for name in ("hyperparameters", "texts", "step")}
    queues = []
    for name, settings in message["trackers"].items():
        run = TrackedRun(name=folder.name, id="", folder=folder, settings=settings, **of_run)  # the queue sets the id
        queues.append(BackendQueue(name, run, rows, reply))
    return queues


if __name__ == "__main__":
    main()
