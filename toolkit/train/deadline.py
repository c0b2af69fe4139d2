"""A run that ends before a time, `run.deadline`: how many steps fit, as rank 0 measures steps, evaluations and saves.

Rank 0 decides with which step to end. All ranks learn it with the sums of a step, and the learning-rate schedule ends
with that step (schedule.py, `Schedule.fit`). Decisions are written to deadline.jsonl: `toolkit replay` repeats them.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import disk
from toolkit.config import rules, schema
from toolkit.distributed import process_group
from toolkit.messages import ConfigError, say, tr, warn
from toolkit.terminal import clock
from toolkit.track.metrics import MetricsLog
from toolkit.train import dry_run, run_dir
from toolkit.train.hooks import Hook
from toolkit.train.step import StepResult, StepVote

if TYPE_CHECKING:
    from toolkit.train.loop import TrainLoop
    from toolkit.train.task import RunContext, Task

FILE, _TIME_FILE = "deadline.jsonl", "deadline.json"
_ENOUGH = 5
"""Steps that have to be timed first; the first step of a session, which compiles and allocates, does not count."""
_WINDOW = 50
"""Steps whose mean time counts: a rank that becomes slow shows soon, and a hiccup weighs little."""
_BYTES_PER_S = 100e6
"""Assumed speed of a save or an export, which is read back too, until one was measured: that of a slow disk."""
_UNKNOWN_EVALUATION = 10
"""Steps that an evaluation is assumed to take as long as, until one was measured."""
_END_S = 20.0
"""For what is never measured before: building and reading the exported model. The report may miss the deadline."""
_MARGIN = 1.25
"""Factor on the time reserved for the end, which was measured once or not at all."""
_HEARD_AFTER = 2
"""Steps until a decision has reached the learning rate: a run that ended sooner would end with its rate too high. Their
time is reserved for the end too.
"""
_JUMP_S = 5.0
"""A difference of clocks from which on one was set: NTP slows or speeds them by less."""
_LEAST_CHANGE = 0.1
"""Relative change of the last step from which on it is reported again."""


@dataclass(slots=True)
class Costs:
    """Seconds that parts of the run take, 0 until they are measured or assumed."""

    step: float = 0.0
    """Mean of the last steps, without evaluations and saves."""
    evaluation: float = 0.0
    pause: float = 0.0
    """For which training waits at a save."""
    save: float = 0.0
    """From the beginning of a save to its published checkpoint."""


class Deadline:
    """Decides on rank 0 with which step a run must end to be done before the time `at` (as time.time()), and prints it.
    `folder`: the run directory, whose deadline.jsonl says what an earlier start decided; `start`: the step that the run
    resumes after; `accumulation`: micro-batches of a step; `sizes`: bytes of a checkpoint and of the export (0: none).
    """

    def __init__(
        self,
        cfg: schema.RunConfig,
        folder: Path,
        at: float,
        *,
        total_steps: int,
        start: int,
        accumulation: int,
        sizes: tuple[int, int],
    ) -> None:
        self.cfg, self.deadline_at, self.folder = cfg, at, folder
        self._clock_offset = time.time() - time.monotonic()
        self.total_steps, self.accumulation = total_steps, accumulation
        self.costs = Costs()
        checkpoint_bytes, export_bytes = sizes
        self.costs.save, self._export_s = checkpoint_bytes / _BYTES_PER_S, export_bytes / _BYTES_PER_S
        # Decisions of an earlier start: those of steps that are repeated are taken again.
        rows = [row for row in run_dir.read_rows(folder / FILE) if row["step"] <= start]
        disk.write_atomically(folder / FILE, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.log = MetricsLog(folder / FILE)
        self.end_step = total_steps
        if rows:
            self.costs = Costs(**rows[-1]["seconds"])
            if rows[-1]["at"] == at:  # it was for this deadline
                self.end_step = min(total_steps, rows[-1]["last"])
        self._announced_end: int | None = None
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._is_first = True

    def add_step(self, seconds: float) -> None:
        """Record the seconds of a step, without the evaluation or save that follows it."""
        if not self._is_first:
            self._steps.append(seconds)
        self._is_first = False
        if len(self._steps) >= _ENOUGH:
            self.costs.step = statistics.fmean(self._steps)

    def end_s(self) -> float:
        """Return the seconds to reserve for what follows the last step: evaluation, save, export, answers."""
        config, costs = self.cfg.evaluate, self.costs
        evaluation_s = costs.evaluation or _UNKNOWN_EVALUATION * costs.step
        # A token of an answer takes a forward pass at most, a third of what a micro-batch takes.
        answers_s = len(config.prompts) * config.max_new_tokens * costs.step / 3 / self.accumulation
        return _END_S + _HEARD_AFTER * costs.step + _MARGIN * (evaluation_s + costs.save + self._export_s + answers_s)

    def decide(self, step: int) -> int:
        """Return the step to end the run with, as estimated before `step`; 0 until enough steps were timed."""
        self._follow_clock()
        if not self.costs.step:
            return 0
        left = self._steps_left(self.deadline_at - time.time() - self.end_s())
        # Not before the ranks have learnt of it, unless an earlier decision ends the run sooner.
        earliest, last_that_fits = min(self.end_step, step + _HEARD_AFTER), step - 1 + left
        last = min(self.total_steps, max(earliest, last_that_fits))
        # A change of less than a hundredth of the steps left is ignored.
        if self._announced_end is not None and abs(last - self.end_step) * 100 < self.end_step - step:
            return self.end_step
        if last != self.end_step or self._announced_end is None:
            self.end_step = last
            self.log.append({"step": step, "last": last, "at": self.deadline_at, "seconds": asdict(self.costs)})
            self._announce(step)
        return self.end_step

    def tell_end(self) -> float:
        """Print how long before the deadline the run has ended; return the seconds, below 0 if it was missed."""
        self._follow_clock()
        spare_s = self.deadline_at - time.time()
        if spare_s >= 0:
            say("{spare} before run.deadline.", spare=clock(spare_s))
        else:
            warn("run.deadline was missed by {late}.", late=clock(math.ceil(-spare_s)))
        return round(spare_s, 1)

    def _follow_clock(self) -> None:
        """Warn if the clock was set. A deadline typed as a duration moves by as much, one typed as a time stays."""
        offset = time.time() - time.monotonic()
        jump_s = offset - self._clock_offset
        if abs(jump_s) < _JUMP_S:
            return
        self._clock_offset, typed = offset, self.cfg.run.deadline
        jump, way = clock(abs(jump_s)), tr("forward") if jump_s > 0 else tr("back")
        if rules.is_duration(typed):
            self.deadline_at += jump_s
            with suppress(OSError):  # a full disk: the next start uses the file as it was
                _write_deadline(self.folder, typed, self.deadline_at)
            warn(
                "the clock was set {way} by {jump}. run.deadline = {given} counts on: it is at {at} now.",
                way=way,
                jump=jump,
                given=typed,
                at=f"{datetime.fromtimestamp(self.deadline_at):%Y-%m-%d %H:%M}",
            )
        else:
            warn(
                "the clock was set {way} by {jump}. run.deadline = {given} follows it; a duration (2h30m) would not.",
                way=way,
                jump=jump,
                given=typed,
            )

    def _steps_left(self, seconds: float) -> int:
        """Return how many steps fit into `seconds`, with the evaluations and saves between them."""
        config, costs = self.cfg.checkpoint, self.costs
        each_s = costs.step
        if self.cfg.evaluate.every:
            each_s += costs.evaluation / self.cfg.evaluate.every
        if config.every:
            each_s += costs.pause / config.every
        if config.minutes:  # those by time come as often however many steps fit
            seconds -= costs.pause * (seconds // (60 * config.minutes))
        return max(0, int(seconds / each_s))

    def _announce(self, step: int) -> None:
        """Print how many steps fit, unless that has hardly changed since it was printed last."""
        before, left = self._announced_end, self.end_step - step
        if before is not None and abs(self.end_step - before) < _LEAST_CHANGE * before:
            return
        self._announced_end = self.end_step
        at, each_s = f"{datetime.fromtimestamp(self.deadline_at):%Y-%m-%d %H:%M}", f"{self.costs.step:.3g}"
        spare_s = self.deadline_at - time.time() - self.end_s() - left * self.costs.step
        if self.end_step == self.total_steps:
            say(
                "run.deadline {at}: all {total} steps fit, at {seconds} s each; {spare} to spare.",
                at=at,
                total=f"{self.total_steps:,}",
                seconds=each_s,
                spare=clock(max(0.0, spare_s)),
            )
            return
        all_s = self.end_s() + (self.total_steps - step) * self.costs.step
        warn(
            "run.deadline {at}: {last} of {total} steps fit, at {seconds} s each; {end} are kept for the last "
            "checkpoint, its evaluation and the export. The schedule ends with step {last}. All steps would take until "
            "{until}.",
            at=at,
            last=f"{self.end_step:,}",
            total=f"{self.total_steps:,}",
            seconds=each_s,
            end=clock(self.end_s()),
            until=f"{datetime.fromtimestamp(time.time() + all_s):%Y-%m-%d %H:%M}",
        )


class DeadlineHook(Hook):
    """Ends a run in time: rank 0 decides on the last step, all ranks learn it with the sums of a step. Its constructor
    is a collective.
    """

    def __init__(self, cfg: schema.RunConfig, folder: Path) -> None:
        self.at = process_group.on_rank0(lambda: deadline_of(cfg, folder))
        self.deadline: Deadline | None = None
        """On rank 0 only, once the engine is built."""

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Create the deadline on rank 0, with what an earlier start of the run measured and decided."""
        if run.ranks.rank:
            return
        assert self.at is not None
        self.deadline = Deadline(
            run.cfg,
            run.folder,
            self.at,
            total_steps=run.total_steps,
            start=run.start.step,
            accumulation=run.accumulation,
            sizes=(run.checkpointer.least_bytes(), dry_run.export_bytes(run.engine, run.cfg.checkpoint)),
        )

    def at_start(self, loop: "TrainLoop") -> None:
        """End the run with the step that an earlier start decided on. A collective."""
        # Rank 0, where the function runs, has a deadline since `at_begin`.
        loop.end_at(process_group.on_rank0(lambda: self.deadline.end_step if self.deadline else 0))

    def before_step(self, step: int, vote: StepVote) -> None:
        """Put rank 0's current decision on the last step into its vote."""
        if self.deadline:
            vote.last_step = self.deadline.decide(step)

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Add the step's time to those that the decision is based on."""
        if self.deadline:
            self.deadline.add_step(seconds)

    def at_evaluation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Assume that the next evaluation takes as long."""
        if self.deadline:
            self.deadline.costs.evaluation = seconds

    def at_save(self, seconds: float) -> None:
        """Assume that training waits as long at the next save."""
        if self.deadline:
            self.deadline.costs.pause = seconds

    def at_publish(self, seconds: float) -> None:
        """Assume that the next save takes as long, from its beginning to the published checkpoint."""
        if self.deadline:
            self.deadline.costs.save = seconds + self.deadline.costs.pause

    def at_last_step(self) -> None:
        """Write decisions that are still in memory because the disk was full."""
        if self.deadline:
            self.deadline.log.finish()

    def before_done(self, summary: dict[str, Any]) -> None:
        """Report how long before the deadline the run has ended."""
        if self.deadline:
            summary["deadline_spare_s"] = self.deadline.tell_end()


def deadline_of(cfg: schema.RunConfig, folder: Path) -> float | None:
    """Return `run.deadline` in seconds since the epoch, None if it is not set; ConfigError if it is past. Rank 0 only.
    A duration or a time of day counts from the first start of the run with it, as deadline.json in `folder` (the run's)
    tells.
    """
    if not cfg.run.deadline:
        return None
    file, now = folder / _TIME_FILE, datetime.now()
    row: Mapping[str, Any] = {}
    with suppress(FileNotFoundError, ValueError):
        row = json.loads(file.read_text(encoding="utf-8"))
    if row.get("given") == cfg.run.deadline:
        at = _adjusted_for_clock(row)
    else:
        moment = rules.parse_deadline(cfg.run.deadline, now)
        assert moment is not None  # the check of the config has seen to that
        at = moment.timestamp()
        _write_deadline(folder, cfg.run.deadline, at)
    if at <= time.time():
        raise ConfigError(
            "run.deadline = {given} is past: it was {at}. Name a later one, or run.deadline= for none; what is learned "
            "so far:  toolkit export-model {folder}",
            given=cfg.run.deadline,
            at=f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}",
            folder=folder,
        )
    return at


def _write_deadline(folder: Path, typed: str, at: float) -> None:
    """Write deadline.json: the deadline as typed, as a time, and in seconds since boot, a clock that nobody sets."""
    since_boot = at - time.time() + time.clock_gettime(time.CLOCK_BOOTTIME)
    row = {"given": typed, "at": at, "boot": _boot_id(), "since_boot": since_boot}
    disk.write_atomically(folder / _TIME_FILE, (json.dumps(row) + "\n").encode())


def _adjusted_for_clock(row: Mapping[str, Any]) -> float:
    """Return the deadline (seconds since the epoch) in `row`, the content of deadline.json. Where it was typed as a
    duration, and the clock was set since without a boot of the machine, it is computed from the seconds since boot.
    """
    at, boot = float(row["at"]), _boot_id()
    if not rules.is_duration(row["given"]) or not boot or row.get("boot") != boot:
        return at
    adjusted = time.time() + float(row["since_boot"]) - time.clock_gettime(time.CLOCK_BOOTTIME)
    return at if abs(adjusted - at) < _JUMP_S else adjusted


def _boot_id() -> str:
    """Return Linux's random id of this boot of the machine; "" where there is none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def recorded_last_steps(folder: Path) -> dict[int, int]:
    """Return a run's decisions from deadline.jsonl: step before which one was taken -> the step to end with."""
    return {row["step"]: row["last"] for row in run_dir.read_rows(folder / FILE)}
