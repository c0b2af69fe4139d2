"""The loop: steps, and when to log, evaluate, save, rewind and stop. What one step does is in step.py."""

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from toolkit import disk, terminal
from toolkit.checkpoint import directory
from toolkit.config import mesh, schema
from toolkit.data.sampler import Position
from toolkit.distributed import failure, process_group
from toolkit.evaluate.metrics import describe_evaluation
from toolkit.messages import CheckpointError, Diverged, RunFolderError, Stopped, say, tr, warn
from toolkit.track.metrics import MetricsLog, Progress
from toolkit.train import run_dir, tracking
from toolkit.train.checkpointer import resume_from, trim_metrics
from toolkit.train.step import Anomaly, StepResult, StragglerDetector, record_bad_step, train_step
from toolkit.train.task import FitResult, RunContext, Task

MOST_REWINDS = 3
"""Times that a run rewinds to one and the same checkpoint."""
_LOOK_EVERY_S = 1.0
"""For the file `stop`, as the run directory may be on a file server."""


class TrainLoop:
    """Does all steps; attributes are the state between two. Methods are collectives, `begin_report` for rank 0 only."""

    def __init__(
        self,
        task: Task,
        run: RunContext,
        baseline: tracking.Baseline,
        progress: Progress,
        begin_report: Callable[[], object],
    ) -> None:
        self.task, self.run, self.baseline = task, run, baseline
        self.progress, self.begin_report = progress, begin_report
        self.cfg, self.engine, self.guard, self.checkpointer = run.cfg, run.engine, run.guard, run.checkpointer
        self.watchdog, self.deadline = run.watchdog, run.deadline
        self.total_steps = run.total_steps
        """The step that ends the run: earlier than planned where `run.deadline` leaves no time for more."""
        self.copies = mesh.mesh_of(run.cfg, process_group.world_size()).copies, run.cfg.parallel.sequence
        self.slow_ranks = StragglerDetector(process_group.gather(socket.gethostname()))
        self.stop_file, self.is_stop_file_found, self.next_look = run.folder / run_dir.STOP, False, 0.0
        self.collectives = tracking.Collectives()
        self.metrics = MetricsLog(run.folder / "metrics.jsonl", run.trackers.row)
        self.steps, self.steps_s = 0, 0.0
        self.rewound_to: Counter[Path] = Counter()
        self.postponed = False
        """Whether a checkpoint is due as soon as a step is good again."""
        self.saved_at = time.monotonic()
        self.begin_at(run.start, Position(run.start.epoch, run.start.row))
        if self.cfg.run.deadline:
            self._end_at(process_group.on_rank0(lambda: self.deadline and self.deadline.last) or self.total_steps)

    def begin_at(self, state: directory.RunState, place: Position) -> None:
        """Continue after the step of a state, with the data from a place on."""
        self.state = replace(state, evaluations=list(state.evaluations))
        self.step, self.place, self.began = state.step, place, place
        counted = state.trained_tokens, state.total_tokens
        self.meter = tracking.ThroughputMeter(
            self.engine, self.baseline, *counted, self.task.unit, self.collectives, self.task.counted
        )
        self.guard.restart(state.losses, state.grad_norms, state.skips_in_a_row)
        self.batches = self.task.batches(place, self.run.total_steps - state.step)  # or fewer of them

    def train(self) -> FitResult:
        """Do all steps; return the same on every rank. Raises Stopped (all ranks saved the same step), Diverged,
        CheckpointError (the last checkpoint), RunFolderError (directory removed; what could be saved is next to it).
        """
        self.engine.train()
        # At step 0, or of a checkpoint that was saved by a run which was stopped before it could evaluate.
        if self._evaluates() and all(int(row["step"]) != self.step for row in self.state.evaluations):
            self.meter.pause()
            self._evaluate()
            self.meter.resume()
        self.progress.start()
        failure.defer_signals()
        while self.step < self.total_steps:
            self._take_step()
        if process_group.on_rank0(lambda: run_dir.is_lost(now=True)):
            raise self._lost()
        process_group.on_rank0(self._finish_logs)
        evaluations = self.state.evaluations if self.task.has_validation else []
        self.guard.check_end(evaluations[-1]["eval_loss"] if evaluations else None)
        self.watchdog.enter(failure.END, self.step)
        failure.act_on_signals_at_once()
        skipped_steps = self.engine.skipped_steps
        return FitResult(state=self._state(), skipped_steps=skipped_steps, steps=self.steps, steps_s=self.steps_s)

    def replay(self, step: int, ends: Mapping[int, int]) -> list[StepResult]:
        """Do the steps up to one, without logging, evaluating and saving; return what each did. `ends`: of a run with a
        deadline, the step to end with, by the step in which that was decided.
        """
        end = max((one for one in ends.items() if one[0] <= self.step), default=(0, self.total_steps))[1]
        self._end_at(end)
        self.engine.train()
        self.progress.start()
        results = []
        while self.step < step:
            results.append(self._compute_step()[0])
            self._end_at(end := ends.get(self.step, end))
            self.guard.check()
        self.watchdog.enter(failure.END, self.step)
        return results

    def _compute_step(self) -> tuple[StepResult, float]:
        """Do a step, and move on in the data; return what it did, and its learning rate."""
        run, task = self.run, self.task
        self.step += 1
        lr = float(self.engine.get_lr()[0])
        asked = time.perf_counter()
        self.watchdog.enter(failure.DATA, self.step)
        window = list(islice(self.batches, run.accumulation))
        self.meter.data_wait_s += time.perf_counter() - asked
        if process_group.rank() == 0 and not self.is_stop_file_found and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + _LOOK_EVERY_S
            with suppress(OSError):  # a file server that does not answer
                self.is_stop_file_found = self.stop_file.exists()
        stops = bool(failure.received_signal()) or self.is_stop_file_found
        # A save that failed is tried again after a tenth of the time.
        patience_s = 60 * self.cfg.checkpoint.minutes / (10 if self.checkpointer.failed else 1)
        is_time = process_group.rank() == 0 and 0 < patience_s <= time.monotonic() - self.saved_at
        end = self.deadline.decide(self.step) if self.deadline else 0
        votes = (stops, self.checkpointer.is_proven(), run_dir.is_lost(), is_time, end)
        self.watchdog.enter(failure.STEP, self.step, f"rows x tokens: {[task.shape(batch) for batch in window]}")
        result = train_step(self.engine, task, window, process_group.world_size(), self.guard, votes, *self.copies)
        self.began, self.place = self.place, task.next_position(self.place)
        self.meter.add(result)
        self.progress.advance()
        if end := result.votes[4]:
            self._end_at(end)
        if self.deadline:
            self.deadline.add_step(time.perf_counter() - asked)
        return result, lr

    def _end_at(self, step: int) -> None:
        """Let the run and its schedule end with a step; the next one is the first that takes it into account."""
        self.total_steps = self.progress.total_steps = step
        self.engine.lr_scheduler.fit(None if step == self.run.total_steps else step - self.step)

    def _finish_logs(self) -> None:
        self.metrics.finish()
        if self.deadline:
            self.deadline.log.finish()

    def _take_step(self) -> None:
        result, lr = self._compute_step()
        if result.votes[2]:
            raise self._lost()
        if result.votes[1] == process_group.world_size():
            self._publish_in_step()
        trouble = self.guard.check()
        if not trouble and not self.guard.skips_in_a_row:
            self.checkpointer.see_good_step()
        if trouble and self._is_rewound(trouble, result, lr):
            return
        self._step_done(result.votes[0] > 0, result.votes[3] > 0, lr, log=trouble is not None)
        self.guard.check_patience(self.step)

    def _step_done(self, stops: bool, is_time: bool, lr: float, log: bool) -> None:
        """Do what is due after a step: log, evaluate, save, report, stop."""
        step, last = self.step, self.step == self.total_steps
        saves, evaluates = self._saves(stops, is_time, last), self._evaluates() and not stops
        if log or saves or evaluates or last or step == 1 or step % self.cfg.train.log_every == 0:
            self._log(lr)
        self.meter.pause()
        if evaluates:
            self._evaluate()
        if saves or last:
            self._checkpoint(saves, last, waits=stops or last)
        if _due(step, self.cfg.report.every) and not last:
            self.begin_report()
        self.meter.resume()
        if stops:
            by_file = ""
            if self.is_stop_file_found:
                self.stop_file.unlink(missing_ok=True)  # it has been obeyed, or the run could never be resumed
                by_file = tr("the file 'stop'")
            raise Stopped(
                "stopped by {signal} after step {step} of {total}, as all ranks agreed. Saved: {checkpoint}. There is "
                "no DONE marker: the run is unfinished. With a run.name the same command resumes it.",
                signal=by_file or failure.received_signal() or tr("a signal to another rank"),
                step=step,
                total=self.total_steps,
                checkpoint=self.checkpointer.newest,
            )

    def _saves(self, stops: bool, is_time: bool, last: bool) -> bool:
        """Whether a checkpoint is saved after this step; one that is due after a bad loss is postponed."""
        config, saver = self.cfg.checkpoint, self.checkpointer
        retries = saver.failed and _due(self.step, min(config.every, max(1, config.every // 10)))  # ten times as often
        due = _due(self.step, config.every) or is_time or (last and config.at_end) or retries or self.postponed
        # The loss of the step after an update is what shows whether the update has spoilt the weights.
        self.postponed = due and (self.guard.is_spoilt if last else self.guard.has_bad_loss)
        return stops or (due and not self.postponed)

    def _checkpoint(self, saves: bool, last: bool, waits: bool) -> None:
        """Save, if it is due, and publish what is written: at once where no step follows, else beside training."""
        self.watchdog.enter("checkpoint", self.step)
        if saves:
            began = time.monotonic()
            with terminal.phase(tr("Saving the checkpoint of step {step}", step=self.step)):
                self.checkpointer.begin(self._state(), is_last=last)
            self.saved_at = time.monotonic()
            if self.deadline:
                self.deadline.costs.pause = self.saved_at - began
        if not waits:
            return
        with terminal.phase(tr("Proving the checkpoint of step {step}", step=self.step)):
            self._publish()
        if saves and self.checkpointer.failed:
            if not self.checkpointer.ruin:
                raise CheckpointError(tr("the last checkpoint could not be saved; see the warning above."))
            raise Diverged(
                "after step {step} {reason}, and nothing is saved. Lower optim.lr, or use precision=bf16 or "
                "precision=fp32. The last checkpoint is {checkpoint}.",
                step=self.step,
                reason=self.checkpointer.ruin,
                checkpoint=self.checkpointer.good or self.checkpointer.newest or tr("none"),
            )

    def _is_rewound(self, trouble: Anomaly, result: StepResult, lr: float) -> bool:
        """Warn of a step that went wrong, and do as the config says; return whether the run was rewound."""
        self.state.bad_steps += 1
        file = disk.unused_path(self.run.folder / "logs" / f"bad-step-{self.step}.jsonl")
        what = record_bad_step(file, self.step, trouble, result, lambda: self.task.samples_at(self.began))
        warn(
            "{what}. It did not change the weights. See the samples of this step:  toolkit show {file}",
            what=what,
            file=file,
        )
        policy = self.cfg.train.on_bad_step
        if policy is schema.OnBadStep.skip:
            return False
        self._log(lr)
        if policy is schema.OnBadStep.stop:
            raise Diverged(
                "{what}. train.on_bad_step=skip continues without such steps, rewind resumes the last checkpoint and "
                "skips their data. The last checkpoint is {checkpoint}.",
                what=what,
                checkpoint=self.checkpointer.newest or tr("none"),
            )
        self._rewind(what)
        return True

    def _rewind(self, what: str) -> None:
        self.watchdog.enter("rewind", self.step)
        self._publish_in_step()
        good, checkpoint = self.checkpointer.good, self.checkpointer.newest
        if checkpoint is not None and good is not None and good != checkpoint and self.rewound_to[checkpoint]:
            # No good step has followed it, and going back to it did not help: its weights may be the trouble.
            checkpoint = good
            process_group.on_rank0(lambda: directory.move_aside_after(good))
        if checkpoint is None:
            raise Diverged(
                "{what}; there is no checkpoint to go back to: set checkpoint.every or checkpoint.minutes.", what=what
            )
        self.rewound_to[checkpoint] += 1
        if self.rewound_to[checkpoint] > MOST_REWINDS:
            raise Diverged(
                "{what}; rewinding to {checkpoint} did not help ({count} times).",
                what=what,
                checkpoint=checkpoint,
                count=MOST_REWINDS,
            )
        self.metrics.forget()
        bad_steps, rewinds = self.state.bad_steps, self.state.rewinds + 1
        run, saved = self.run, directory.read_run_state(checkpoint)
        state = replace(saved, config=run.start.config, bad_steps=bad_steps, rewinds=rewinds)
        is_own = checkpoint.parent.parent == run.folder  # or the one that the run began with
        process_group.on_rank0(lambda: trim_metrics(run.folder, state.metrics_bytes if is_own else 0))
        resume_from(self.checkpointer, checkpoint, state, run.ranks, self.cfg)
        self.progress.back_to(state.step)
        run.trackers.back_to(state.step)
        say(
            "Rewound to step {step}; the data of the steps up to {bad} is skipped.",
            step=state.step,
            bad=self.step,
        )
        self.begin_at(state, self.place)

    def _log(self, lr: float) -> None:
        pace = self.meter.pace()
        self.steps += pace.steps
        self.steps_s += pace.seconds
        routers, loads = self.task.routers(self.engine), self.meter.expert_loads
        row = self.meter.row(self.step, self.step / self.task.steps_per_epoch, lr, pace)
        row |= {"bad_steps": self.state.bad_steps, "rewinds": self.state.rewinds}
        row |= self.task.order_metrics(self.began)
        row |= tracking.expert_metrics(routers, loads, self.step, self.run.folder)
        if process_group.rank() == 0:
            self.metrics.append(row)
            if self.collectives.is_on:
                self.collectives.write(self.run.folder)
        self.progress.show(row)
        if slow := self.slow_ranks.see(pace):
            warn(slow)
        if math.isnan(self.state.first_loss):
            self.state.first_loss = row["loss"]
        self.state.last_loss = row["loss"]

    def _evaluates(self) -> bool:
        if not self.task.has_validation or not self.step:
            return self.task.has_validation and self.cfg.evaluate.at_start
        return _due(self.step, self.cfg.evaluate.every) or self.step == self.total_steps

    def _evaluate(self) -> None:
        step, watchdog, began = self.step, self.watchdog, time.monotonic()
        watchdog.enter("evaluation", step)
        figures = self.task.evaluate(self.run, step, lambda: watchdog.enter("evaluation", step))
        if self.deadline:
            self.deadline.costs.evaluation = time.monotonic() - began
        row: dict[str, float] = {"step": step, **figures}
        self.state.evaluations.append(row)
        self.progress.note(evaluation=row)
        if process_group.rank() == 0:
            self.metrics.append(row)
        for line in describe_evaluation(row):
            say(line)

    def _state(self) -> directory.RunState:
        metrics = self.metrics.file
        return replace(
            self.state,
            step=self.step,
            epoch=self.place.epoch,
            row=self.place.row,
            trained_tokens=self.meter.trained_tokens_so_far,
            total_tokens=self.meter.total_tokens_so_far,
            skips_in_a_row=self.guard.skips_in_a_row,
            losses=list(self.guard.losses),
            grad_norms=list(self.guard.grad_norms),
            metrics_bytes=metrics.stat().st_size if metrics.exists() else 0,
        )

    def _publish_in_step(self) -> None:
        """Publish the checkpoint that all ranks have proven; the step's time does not include that."""
        self.watchdog.enter("checkpoint", self.step)
        self.meter.pause()
        self._publish()
        self.meter.resume()

    def _publish(self) -> None:
        self.checkpointer.finish()
        if self.deadline:
            self.deadline.costs.save = time.monotonic() - self.saved_at + self.deadline.costs.pause
        self.progress.note(checkpoint=self.checkpointer.newest)

    def _lost(self) -> RunFolderError:
        """Save what the run has learned next to its directory, which is gone; return the error that ends the run."""
        checkpointer, folder = self.checkpointer, self.run.folder
        self.watchdog.enter("checkpoint", self.step)
        place = process_group.on_rank0(lambda: run_dir.rescue(folder))
        failure.watch_failures(place)
        checkpointer.folder = place / "checkpoints"
        checkpointer.begin(self._state())
        checkpointer.finish()
        what = run_dir.lost_text(folder)
        if checkpointer.failed:
            return RunFolderError(what)
        return RunFolderError(
            "{what} The state after step {step} is saved: resume={checkpoint} continues from it.",
            what=what,
            step=self.step,
            checkpoint=checkpointer.newest,
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
