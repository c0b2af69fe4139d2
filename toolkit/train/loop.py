"""The loop: steps, and when to log, evaluate, save, rewind and stop. What one step does is in step.py."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.config import mesh, schema
from toolkit.data.sampler import Position
from toolkit.distributed import process_group, signals, watchdog
from toolkit.evaluate.loss import describe_evaluation
from toolkit.messages import Stopped, say, tr
from toolkit.track.metrics import MetricsLog, Progress
from toolkit.train import run_dir, run_lock
from toolkit.train.baseline import Baseline
from toolkit.train.hooks import Hook
from toolkit.train.saving import Saving, is_due
from toolkit.train.step import Anomaly, StepResult, StepVote, train_step
from toolkit.train.task import FitResult, RunContext, Task
from toolkit.train.throughput import ThroughputMeter


class TrainLoop:
    """Does all steps of a run; its attributes are the state between two steps. All ranks call its methods together."""

    def __init__(self, task: Task, run: RunContext, baseline: Baseline, progress: Progress) -> None:
        self.task, self.run, self.baseline, self.progress = task, run, baseline, progress
        # Parts of `run`, under shorter names.
        self.cfg, self.engine, self.guard, self.checkpointer = run.cfg, run.engine, run.guard, run.checkpointer
        self.watchdog, self.hooks = run.watchdog, run.hooks
        self.total_steps = run.total_steps
        """The step that ends the run: earlier than planned where a hook decides so."""
        self.mesh = mesh.mesh_of(run.cfg, process_group.world_size())
        self.stop_file = run_dir.StopFile(run.folder)
        # Not a method of the loop: the cycle of references would keep its batches, and their threads, after the run.
        self.metrics = MetricsLog(run.folder / "metrics.jsonl", partial(_log_to, run.hooks))
        self.steps, self.steps_s = 0, 0.0
        """Steps that this process has done and logged, and the seconds that they took."""
        self.rewinds: Counter[Path] = Counter()
        """Rewinds to each checkpoint."""
        self.saving = Saving(run, progress)
        self.begin_at(run.start, Position(run.start.epoch, run.start.row))

    def begin_at(self, state: directory.RunState, position: Position) -> None:
        """Continue after `state.step` with the data from `position` on, at the start of a run or after a rewind."""
        self.state = replace(state, evaluations=list(state.evaluations))
        self.step = state.step
        self.position = self.step_position = position
        """Where in the data the next step begins, and where the last one began."""
        tokens_so_far = state.trained_tokens, state.total_tokens
        self.meter = ThroughputMeter(self.engine, self.baseline, *tokens_so_far, self.task.unit, self.task.counted)
        self.guard.restart(state.losses, state.grad_norms, state.skips_in_a_row)
        self.batches = self.task.batches(position, self.run.total_steps - state.step)  # `end_at` may leave some unused

    def end_at(self, step: int) -> None:
        """Let the run and its learning-rate schedule end with `step`; takes effect from the next step on."""
        self.total_steps = self.progress.total_steps = step
        steps_left = None if step == self.run.total_steps else step - self.step  # None: the schedule as planned
        self.engine.lr_scheduler.fit(steps_left)

    def train(self) -> FitResult:
        """Do all steps; return the same on every rank. Raises Stopped (all ranks saved the same step), Diverged,
        CheckpointError (the last checkpoint), RunFolderError (directory removed; what could be saved is next to it).
        """
        for hook in self.hooks:
            hook.at_start(self)
        self.engine.train()
        # Step 0 is evaluated here, and the step of a checkpoint whose run was stopped before it could evaluate.
        if self._evaluates() and all(int(row["step"]) != self.step for row in self.state.evaluations):
            with self._paused():
                self._evaluate()
        self.progress.start()
        signals.defer_signals()
        while self.step < self.total_steps:
            self._take_step()
        if process_group.on_rank0(lambda: run_lock.is_lost(now=True)):
            raise self.saving.rescue(self._state())
        process_group.on_rank0(self._finish_logs)
        evaluations = self.state.evaluations if self.task.has_validation else []
        self.guard.check_end(evaluations[-1]["eval_loss"] if evaluations else None)
        self.watchdog.enter(watchdog.END, self.step)
        signals.act_on_signals_at_once()
        skipped_steps = self.engine.skipped_steps
        return FitResult(state=self._state(), skipped_steps=skipped_steps, steps=self.steps, steps_s=self.steps_s)

    def compute_step(self) -> tuple[StepResult, float]:
        """Do the next optimizer step without judging its outcome; return its result and its learning rate."""
        self.step += 1
        lr = float(self.engine.get_lr()[0])
        began = time.perf_counter()
        self.watchdog.enter(watchdog.DATA, self.step)
        window = list(islice(self.batches, self.run.accumulation))
        self.meter.data_wait_s += time.perf_counter() - began
        vote = self._vote()
        self.watchdog.enter(watchdog.STEP, self.step, f"rows x tokens: {[self.task.shape(batch) for batch in window]}")
        result = train_step(self.engine, self.task, window, self.mesh, self.guard, vote)
        self.step_position, self.position = self.position, self.task.next_position(self.position)
        self.meter.add(result)
        self.progress.advance()
        if result.vote.last_step:
            self.end_at(result.vote.last_step)
        seconds = time.perf_counter() - began
        for hook in self.hooks:
            hook.after_step(result, seconds)
        return result, lr

    def _vote(self) -> StepVote:
        """Return what this rank reports to the others with the next step's counts: stop, saves, lost directory."""
        is_first_rank, now = process_group.rank() == 0, time.monotonic()
        if is_first_rank:
            self.stop_file.look(now)
        vote = StepVote(
            stops=int(bool(signals.received_signal()) or self.stop_file.is_found),
            save_verified=int(self.checkpointer.is_save_verified()),
            lost_run_dir=int(run_lock.is_lost()),
            save_due=int(is_first_rank and self.saving.is_time(now)),
        )
        for hook in self.hooks:
            hook.before_step(self.step, vote)
        return vote

    def _take_step(self) -> None:
        """Do a step and what the ranks' vote and its outcome ask for: publish, rewind, log, evaluate, save, stop."""
        result, lr = self.compute_step()
        vote = result.vote
        if vote.lost_run_dir:
            raise self.saving.rescue(self._state())
        if vote.save_verified == process_group.world_size():
            self._publish_in_step()
        anomaly = self.guard.check()
        if not anomaly and not self.guard.skips_in_a_row:
            self.checkpointer.note_good_step()
        if anomaly and self._rewind_after(anomaly, result, lr):
            return
        self._do_what_is_due(vote.stops > 0, vote.save_due > 0, lr, log=anomaly is not None)
        self.guard.check_patience(self.step)

    def _do_what_is_due(self, stops: bool, is_time: bool, lr: float, log: bool) -> None:
        """Do what is due after a step: log, evaluate, save, stop (raises Stopped). `stops`: whether a rank was told to
        stop; `is_time`: whether `checkpoint.minutes` have passed; `lr`: the step's; `log`: whether to log in any case.
        """
        step, is_last = self.step, self.step == self.total_steps
        saves = self.saving.decide(step, stops, is_time, is_last)
        evaluates = self._evaluates() and not stops
        if log or saves or evaluates or is_last or step == 1 or step % self.cfg.train.log_every == 0:
            self._log(lr)
        with self._paused():
            if evaluates:
                self._evaluate()
            if saves or is_last:
                self.watchdog.enter("checkpoint", step)
            self.checkpointer.no_step_follows = stops or is_last
            if saves:
                self.saving.save(self._state(), is_last)
            if stops or is_last:
                self.saving.publish_last(step, saves)
            if not is_last:
                for hook in self.hooks:
                    hook.between_steps(step)
        if stops:
            raise self._stopped()

    def _stopped(self) -> Stopped:
        """Return the error that ends a stopped run; remove the file `stop`, which would stop it again when resumed."""
        by_file = tr("the file 'stop'") if self.stop_file.is_found else ""
        self.stop_file.obey()
        return Stopped(
            "stopped by {signal} after step {step} of {total}, as all ranks agreed. Saved: {checkpoint}. There is no "
            "DONE marker: the run is unfinished. With a run.name the same command resumes it.",
            signal=by_file or signals.received_signal() or tr("a signal to another rank"),
            step=self.step,
            total=self.total_steps,
            checkpoint=self.checkpointer.newest,
        )

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Exclude the body, an evaluation or a save, from the time that steps take."""
        for hook in self.hooks:
            hook.at_pause()
        self.meter.pause()
        yield
        self.meter.resume()
        for hook in self.hooks:
            hook.at_resume()

    def _log(self, lr: float) -> None:
        """Append a row on the steps since the last row to metrics.jsonl; print it. A collective. `lr`: of this step."""
        own_figures: dict[str, float] = {}
        for hook in self.hooks:
            own_figures |= hook.rank_figures()
        times = self.meter.pace(own_figures)  # of all ranks
        self.steps += times.steps
        self.steps_s += times.seconds
        row = self.meter.row(self.step, self.step / self.task.steps_per_epoch, lr, times)
        row |= {"bad_steps": self.state.bad_steps, "rewinds": self.state.rewinds}
        row |= self.task.order_metrics(self.step_position)
        for hook in self.hooks:
            row |= hook.at_log(self.step, self.step_position, times)
        if process_group.rank() == 0:
            self.metrics.append(row)
        self.progress.show(row)
        for hook in self.hooks:
            hook.after_log(times)
        if math.isnan(self.state.first_loss):  # none yet that was a number
            self.state.first_loss = row["loss"]
        self.state.last_loss = row["loss"]

    def _finish_logs(self) -> None:
        """Write what still waits for room on the disk, or raise CheckpointError. For rank 0 only."""
        self.metrics.finish()
        for hook in self.hooks:
            hook.at_last_step()

    def _evaluates(self) -> bool:
        """Whether the task is evaluated after this step, or at step 0 before the first."""
        if not self.task.has_validation:
            return False
        if not self.step:
            return self.cfg.evaluate.at_start
        return is_due(self.step, self.cfg.evaluate.every) or self.step == self.total_steps

    def _evaluate(self) -> None:
        """Evaluate the task, record the figures in state, metrics.jsonl and hooks, and print them."""
        step, began, show_alive = self.step, time.monotonic(), partial(self.watchdog.enter, "evaluation", self.step)
        show_alive()
        figures = self.task.evaluate(self.run, step, show_alive)
        seconds = time.monotonic() - began
        for hook in self.hooks:
            hook.at_evaluation(step, figures, seconds)
        row: dict[str, float] = {"step": step, **figures}
        self.state.evaluations.append(row)
        self.progress.note(evaluation=row)
        if process_group.rank() == 0:
            self.metrics.append(row)
        for line in describe_evaluation(row):
            say(line)

    def _publish_in_step(self) -> None:
        """Publish the checkpoint that all ranks have verified, outside of the steps' time."""
        self.watchdog.enter("checkpoint", self.step)
        with self._paused():
            self.saving.publish()

    def _rewind_after(self, anomaly: Anomaly, result: StepResult, lr: float) -> bool:
        """Warn of the bad step just done, and do what `train.on_bad_step` says; return whether the run was rewound.
        With `stop`, or if no checkpoint helps, Diverged is raised. `lr`: the step's, for the log.
        """
        from toolkit.train import bad_steps

        self.state.bad_steps += 1
        logs, samples = self.run.folder / "logs", lambda: self.task.describe_samples_at(self.step_position)
        what = bad_steps.warn_of_bad_step(logs, self.step, anomaly, result, samples)
        if self.cfg.train.on_bad_step is schema.OnBadStep.skip:
            return False
        self._log(lr)
        if self.cfg.train.on_bad_step is schema.OnBadStep.stop:
            raise bad_steps.stopped_error(self.checkpointer, what)
        self.watchdog.enter("rewind", self.step)
        self._publish_in_step()
        state = bad_steps.rewind(self.run, self.state, self.rewinds, what)
        self.metrics.forget()
        self.progress.back_to(state.step)
        for hook in self.hooks:
            hook.at_rewind(state.step)
        say("Rewound to step {step}; the data of the steps up to {bad} is skipped.", step=state.step, bad=self.step)
        self.begin_at(state, self.position)  # not back in the data: after the batches of the bad step
        return True

    def _state(self) -> directory.RunState:
        """Return the run's state after the last step, as a checkpoint saves it."""
        metrics = self.metrics.file
        return replace(
            self.state,
            step=self.step,
            epoch=self.position.epoch,
            row=self.position.row,
            stream=self.task.stream_state(self.position),
            trained_tokens=self.meter.trained_tokens_so_far,
            total_tokens=self.meter.total_tokens_so_far,
            skips_in_a_row=self.guard.skips_in_a_row,
            losses=list(self.guard.losses),
            grad_norms=list(self.guard.grad_norms),
            metrics_bytes=metrics.stat().st_size if metrics.exists() else 0,
        )


def _log_to(hooks: Sequence[Hook], row: Mapping[str, object]) -> None:
    """Hand a row of metrics.jsonl to all hooks."""
    for hook in hooks:
        hook.at_row(row)
