"""A run that ends before a time, `run.deadline`: how many steps fit, as rank 0 measures steps, evaluations and saves.

What it decides is a step to end with. All ranks hear it with the sums of a step, and the schedule reaches its end with
it (schedule.py, `Schedule.fit`). The decisions are kept in deadline.jsonl, so that `toolkit replay` takes them again.
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

FILE, _KEPT = "deadline.jsonl", "deadline.json"
_ENOUGH = 5
"""Steps by which a pace is known; the first of a session, which compiles and allocates, is none of them."""
_WINDOW = 50
"""Steps whose mean is the pace: a rank that is slowed down shows soon, and a hiccup weighs little."""
_BYTES_PER_S = 100e6
"""Of a save and of an export, each read again, until one was measured: a slow disk's."""
_UNKNOWN_EVALUATION = 10
"""Steps that an evaluation is taken for until one was measured."""
_END_S = 20.0
"""What is not measured before: the exported model built again and read. The report may come after the deadline."""
_MARGIN = 1.25
"""Of what is kept for the end: it was measured once, or not at all."""
_HEARD_AFTER = 2
"""Steps after which a decision has reached the learning rate: a run that was cut shorter would end above its schedule's
end. So many are kept for the end too.
"""
_JUMP_S = 5.0
"""Seconds from which on a clock was set, and not only slowed down to be right."""
_TOLD = 0.1
"""Change of the last step, as a share of it, from which it is said again."""


@dataclass(slots=True)
class Costs:
    """Seconds, as far as they are known."""

    step: float = 0.0
    """Mean of the last steps, without evaluations and saves."""
    evaluation: float = 0.0
    pause: float = 0.0
    """For which training waits for a save."""
    save: float = 0.0
    """From the beginning of a save to its checkpoint."""


class Deadline:
    """Decides on rank 0 with which step a run must end to be done before the time `at` (as time.time()), and says so.
    `sizes`: bytes of a checkpoint and of the export (0: none).
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
        self.cfg, self.at, self.folder = cfg, at, folder
        self._offset = time.time() - time.monotonic()
        self.total_steps, self.accumulation = total_steps, accumulation
        self.costs = Costs()
        self.costs.save, self._export_s = (size / _BYTES_PER_S for size in sizes)
        rows = [row for row in run_dir.read_rows(folder / FILE) if row["step"] <= start]
        disk.write_atomically(folder / FILE, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.log = MetricsLog(folder / FILE)
        self.last = total_steps
        if rows:
            self.costs = Costs(**rows[-1]["seconds"])
            if rows[-1]["at"] == at:
                self.last = min(total_steps, rows[-1]["last"])
        self._told: int | None = None
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._is_first = True

    def add_step(self, seconds: float) -> None:
        """Take note of what a step took, without what follows it."""
        if not self._is_first:
            self._steps.append(seconds)
        self._is_first = False
        if len(self._steps) >= _ENOUGH:
            self.costs.step = statistics.fmean(self._steps)

    def end_s(self) -> float:
        """Return the seconds that are kept for what follows the last step."""
        config, costs = self.cfg.evaluate, self.costs
        evaluation_s = costs.evaluation or _UNKNOWN_EVALUATION * costs.step
        # A token of an answer takes a forward pass at most, a third of what a micro-batch takes.
        answers_s = len(config.prompts) * config.max_new_tokens * costs.step / 3 / self.accumulation
        return _END_S + _HEARD_AFTER * costs.step + _MARGIN * (evaluation_s + costs.save + self._export_s + answers_s)

    def decide(self, step: int) -> int:
        """Return the step to end with, as it looks before this step; 0 until enough steps were timed."""
        self._follow_clock()
        if not self.costs.step:
            return 0
        left = self._steps_left(self.at - time.time() - self.end_s())
        last = min(self.total_steps, max(min(self.last, step + _HEARD_AFTER), step - 1 + left))
        # A change of less than a hundredth of what is left is no other plan.
        if self._told is not None and abs(last - self.last) * 100 < self.last - step:
            return self.last
        if last != self.last or self._told is None:
            self.last = last
            self.log.append({"step": step, "last": last, "at": self.at, "seconds": asdict(self.costs)})
            self._tell(step)
        return self.last

    def tell_end(self) -> float:
        """Say how long before the deadline the run has ended; return the seconds, below 0 if it was missed."""
        self._follow_clock()
        spare_s = self.at - time.time()
        if spare_s >= 0:
            say("{spare} before run.deadline.", spare=clock(spare_s))
        else:
            warn("run.deadline was missed by {late}.", late=clock(math.ceil(-spare_s)))
        return round(spare_s, 1)

    def _follow_clock(self) -> None:
        """Warn if the clock was set. A deadline that was typed as a duration is moved by as much, one that was typed as
        a time stays.
        """
        offset = time.time() - time.monotonic()
        jump_s = offset - self._offset
        if abs(jump_s) < _JUMP_S:
            return
        self._offset, typed = offset, self.cfg.run.deadline
        jump, way = clock(abs(jump_s)), tr("forward") if jump_s > 0 else tr("back")
        if rules.is_duration(typed):
            self.at += jump_s
            with suppress(OSError):  # of a disk that is full: the next start takes what was known before
                _keep(self.folder, typed, self.at)
            warn(
                "the clock was set {way} by {jump}. run.deadline = {given} counts on: it is at {at} now.",
                way=way,
                jump=jump,
                given=typed,
                at=f"{datetime.fromtimestamp(self.at):%Y-%m-%d %H:%M}",
            )
        else:
            warn(
                "the clock was set {way} by {jump}. run.deadline = {given} follows it; a duration (2h30m) would not.",
                way=way,
                jump=jump,
                given=typed,
            )

    def _steps_left(self, seconds: float) -> int:
        """Return how many steps fit into so many seconds, with the evaluations and saves between them."""
        config, costs = self.cfg.checkpoint, self.costs
        each_s = costs.step
        if self.cfg.evaluate.every:
            each_s += costs.evaluation / self.cfg.evaluate.every
        if config.every:
            each_s += costs.pause / config.every
        if config.minutes:
            seconds -= costs.pause * (seconds // (60 * config.minutes))
        return max(0, int(seconds / each_s))

    def _tell(self, step: int) -> None:
        """Say how many steps fit, unless that has hardly changed since it was said last."""
        before, left = self._told, self.last - step
        if before is not None and abs(self.last - before) < _TOLD * before:
            return
        self._told = self.last
        at, each_s = f"{datetime.fromtimestamp(self.at):%Y-%m-%d %H:%M}", f"{self.costs.step:.3g}"
        spare_s = self.at - time.time() - self.end_s() - left * self.costs.step
        if self.last == self.total_steps:
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
            last=f"{self.last:,}",
            total=f"{self.total_steps:,}",
            seconds=each_s,
            end=clock(self.end_s()),
            until=f"{datetime.fromtimestamp(time.time() + all_s):%Y-%m-%d %H:%M}",
        )


class DeadlineHook(Hook):
    """Ends a run in time: rank 0 decides, and all ranks hear it with the sums of a step. A collective."""

    def __init__(self, cfg: schema.RunConfig, folder: Path) -> None:
        self.at = process_group.on_rank0(lambda: deadline_of(cfg, folder))
        self.deadline: Deadline | None = None
        """On rank 0 only, once the engine is built."""

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Take up what an earlier start of the run had decided."""
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
        """Let the run end as was decided before."""
        loop.end_at(process_group.on_rank0(lambda: self.deadline.last if self.deadline else 0))

    def before_step(self, step: int, vote: StepVote) -> None:
        """Say which step is the last, as it looks now."""
        if self.deadline:
            vote.last_step = self.deadline.decide(step)

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Follow the pace."""
        if self.deadline:
            self.deadline.add_step(seconds)

    def at_evaluation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Expect the next evaluation to take as long."""
        if self.deadline:
            self.deadline.costs.evaluation = seconds

    def at_save(self, seconds: float) -> None:
        """Expect training to wait for the next save for as long."""
        if self.deadline:
            self.deadline.costs.pause = seconds

    def at_publish(self, seconds: float) -> None:
        """Expect the next save to take as long."""
        if self.deadline:
            self.deadline.costs.save = seconds + self.deadline.costs.pause

    def at_last_step(self) -> None:
        """Write the decisions that a full disk has left in memory."""
        if self.deadline:
            self.deadline.log.finish()

    def before_done(self, summary: dict[str, Any]) -> None:
        """Report how long before the deadline the run has ended."""
        if self.deadline:
            summary["deadline_spare_s"] = self.deadline.tell_end()


def deadline_of(cfg: schema.RunConfig, folder: Path) -> float | None:
    """Return the time of `run.deadline` in seconds since the epoch; None without one. For rank 0 only.
    What a duration or a time of day means is decided when a run first begins with it, and kept in its directory.
    ConfigError if it is past.
    """
    if not cfg.run.deadline:
        return None
    file, now = folder / _KEPT, datetime.now()
    row: Mapping[str, Any] = {}
    with suppress(FileNotFoundError, ValueError):
        row = json.loads(file.read_text(encoding="utf-8"))
    if row.get("given") == cfg.run.deadline:
        at = _at_now(row)
    else:
        moment = rules.parse_deadline(cfg.run.deadline, now)
        assert moment is not None  # the check of the config has seen to that
        at = moment.timestamp()
        _keep(folder, cfg.run.deadline, at)
    if at <= time.time():
        raise ConfigError(
            "run.deadline = {given} is past: it was {at}. Name a later one, or run.deadline= for none; what is learned "
            "so far:  toolkit export-model {folder}",
            given=cfg.run.deadline,
            at=f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}",
            folder=folder,
        )
    return at


def _keep(folder: Path, typed: str, at: float) -> None:
    """Write down when a deadline is; also by the clock that counts since the machine's start, which nobody sets."""
    since = at - time.time() + time.clock_gettime(time.CLOCK_BOOTTIME)
    row = {"given": typed, "at": at, "boot": _boot(), "since_boot": since}
    disk.write_atomically(folder / _KEPT, (json.dumps(row) + "\n").encode())


def _at_now(row: Mapping[str, Any]) -> float:
    """Return the kept time; of a duration as the clock is now, where it was set since, on a machine that stayed on."""
    at, boot = float(row["at"]), _boot()
    if not rules.is_duration(row["given"]) or not boot or row.get("boot") != boot:
        return at
    now = time.time() + float(row["since_boot"]) - time.clock_gettime(time.CLOCK_BOOTTIME)
    return at if abs(now - at) < _JUMP_S else now


def _boot() -> str:
    """Return what tells a start of this machine from others; "" where nothing does."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def recorded(folder: Path) -> dict[int, int]:
    """Return the decisions of a run: the step to end with, by the step before which it was decided."""
    return {row["step"]: row["last"] for row in run_dir.read_rows(folder / FILE)}
