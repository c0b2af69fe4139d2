"""The loop: steps, and when to log, evaluate, save, go back and stop. What one step does stands in step.py."""

import math
import socket
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.checkpoint.directory import RunState
from toolkit.config.mesh import mesh_of
from toolkit.config.schema import OnBadStep
from toolkit.data.sampler import Position
from toolkit.distributed import failure
from toolkit.distributed.process_group import gather, on_rank0, rank, world_size
from toolkit.distributed.watchdog import DATA, STEP
from toolkit.errors import CheckpointError, Diverged, RunFolderError, Stopped
from toolkit.evaluate.metrics import describe_evaluation
from toolkit.messages import tr
from toolkit.models.regularization import begin_step, dropping_metrics
from toolkit.terminal import phase
from toolkit.track.metrics import MetricsLog
from toolkit.track.progress import Progress
from toolkit.train import bad_steps, folder_lock, run_folder
from toolkit.train.collectives import Collectives
from toolkit.train.guard import Trouble
from toolkit.train.job import Job, Outcome
from toolkit.train.meter import Meter
from toolkit.train.pace import SlowRanks
from toolkit.train.step import StepResult, train_step
from toolkit.train.stop_file import StopFile

MOST_REWINDS = 3
"""Times that a run goes back to one and the same checkpoint."""


def train(job: Job, progress: Progress) -> Outcome:
    """Train. A collective; returns the same on every rank.

    Raises:
        Stopped: a signal came, or a file `stop`; a checkpoint was saved at the step boundary that all ranks agreed on.
        Diverged: a step went wrong and the config says to stop, or there is no way around it, or too many steps in a
            row were skipped.
        CheckpointError: the last checkpoint cannot be saved.
        RunFolderError: the run folder was removed; what could be saved is next to it.
    """
    return _Run(job, progress).train()


class _Run:
    """The loop's state between two steps."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress, self.cfg, self.engine = job, progress, job.cfg, job.engine
        self.guard = job.guard
        self.copies = mesh_of(job.cfg, world_size()).copies
        self.slow_ranks = SlowRanks(gather(socket.gethostname()))
        self.stop_file = StopFile(job.folder)
        self.collectives = Collectives()
        self.metrics = MetricsLog(job.folder / "metrics.jsonl", progress.say, job.trackers.row)
        self.outcome = Outcome(bad_steps=job.start.bad_steps, rewinds=job.start.rewinds, checkpoint=job.saver.newest)
        self.rewound_to: Counter[Path] = Counter()
        self.postponed = False
        """Whether a checkpoint is due as soon as a step is good again."""
        self.begin_at(job.start, Position(job.start.epoch, job.start.row))

    def begin_at(self, state: RunState, place: Position) -> None:
        """Go on after the step of a state, with the data at a place."""
        self.step, self.place, self.began = state.step, place, place
        counted = state.trained_tokens, state.total_tokens
        self.meter = Meter(self.engine, self.job.account, *counted, self.job.objective.unit, self.collectives)
        self.guard.restart(state.losses, state.grad_norms, state.skips_in_a_row)
        self.outcome.evaluations = list(state.evaluations)
        self.outcome.first_loss = math.nan if state.first_loss is None else state.first_loss
        self.outcome.last_loss = math.nan if state.last_loss is None else state.last_loss
        self.batches = self.job.batches_from(place, self.job.total_steps - state.step)

    def train(self) -> Outcome:
        """Do all steps."""
        self.engine.train()
        # At step 0, or of a checkpoint that was saved by a run which was stopped before it could evaluate.
        if self._evaluates() and all(int(row["step"]) != self.step for row in self.outcome.evaluations):
            self.meter.pause()
            self._evaluate()
            self.meter.resume()
        self.progress.start()
        failure.defer_signals()
        while self.step < self.job.total_steps:
            self._take_step()
        if on_rank0(lambda: folder_lock.is_lost(now=True)):
            raise self._lost()
        on_rank0(self.metrics.finish)
        evaluations = self.outcome.evaluations if self.job.evaluate else []
        self.guard.check_end(evaluations[-1]["eval_loss"] if evaluations else None)
        self.job.watchdog.enter("", self.step)
        failure.act_on_signals_at_once()
        self.outcome.trained_tokens = self.meter.trained_tokens_so_far
        self.outcome.total_tokens = self.meter.total_tokens_so_far
        self.outcome.skipped_steps = self.engine.skipped_steps
        self.outcome.state = self._state()
        return self.outcome

    def _take_step(self) -> None:
        job, saver = self.job, self.job.saver
        self.step += 1
        lr = float(self.engine.get_lr()[0])
        asked = time.perf_counter()
        job.watchdog.enter(DATA, self.step)
        window = list(islice(self.batches, job.accumulation))
        self.meter.data_wait_s += time.perf_counter() - asked
        stops = bool(failure.received_signal()) or self.stop_file.is_there()
        votes = (stops, saver.is_proven(), folder_lock.is_lost())
        job.watchdog.enter(STEP, self.step, f"rows x tokens: {[job.objective.shape(batch) for batch in window]}")
        begin_step(self.engine.module, self.step)
        result = train_step(self.engine, window, world_size(), self.guard, votes, self.copies, job.objective)
        self.began, self.place = self.place, job.position_after(self.place)
        self.meter.add(result)
        self.progress.advance()
        if result.votes[2]:
            raise self._lost()
        if result.votes[1] == world_size():
            self._publish()
        trouble = self.guard.check()
        if not trouble and not self.guard.skips_in_a_row:
            job.saver.see_good_step()
        if trouble and self._is_rewound(trouble, result, lr):
            return
        self._step_done(result.votes[0] > 0, lr, log=trouble is not None)
        self.guard.check_patience(self.step)

    def _step_done(self, stops: bool, lr: float, log: bool) -> None:
        """Do what is due after a step."""
        cfg, job, step = self.cfg, self.job, self.step
        last = step == job.total_steps
        save = _due(step, cfg.checkpoint.every) or (last and cfg.checkpoint.at_end) or self._again() or self.postponed
        # The loss of the step after an update is what shows whether the update has spoilt the weights.
        self.postponed = save and (self.guard.is_spoilt if last else self.guard.has_bad_loss)
        save = stops or (save and not self.postponed)
        evaluate = self._evaluates() and not stops
        if log or save or evaluate or last or step == 1 or step % cfg.train.log_every == 0:
            self._log(lr)
        self.meter.pause()
        if evaluate:
            self._evaluate()
        if save or last:
            job.watchdog.enter("checkpoint", step)
        if save:
            with self._phase(tr("Saving the checkpoint of step {step}", step=step)):
                job.saver.begin(self._state(), is_last=last)
        if (stops and save) or last:
            with self._phase(tr("Proving the checkpoint of step {step}", step=step)):
                self._published()
            if save and job.saver.failed:
                raise self._unsaved()
        if _due(step, cfg.report.every) and not last:
            job.begin_report()
        self.meter.resume()
        if stops:
            raise self._stopped()

    def _unsaved(self) -> Diverged | CheckpointError:
        if not self.job.saver.ruin:
            return CheckpointError(tr("the last checkpoint could not be saved; the reason is told above."))
        return Diverged(
            tr(
                "after step {step} {reason}, and nothing is saved. Lower optim.lr, or use precision=bf16 or "
                "precision=fp32. The last checkpoint is {checkpoint}.",
                step=self.step,
                reason=self.job.saver.ruin,
                checkpoint=self.job.saver.good or self.outcome.checkpoint or tr("none"),
            )
        )

    def _is_rewound(self, trouble: Trouble, result: StepResult, lr: float) -> bool:
        """Tell of a step that went wrong, and do as the config says; return whether the run went back."""
        self.outcome.bad_steps += 1
        what, file = bad_steps.record(
            self.job.folder, self.step, trouble, result, lambda: self.job.samples_at(self.began)
        )
        self.progress.say(
            tr(
                "WARNING: {what}. It did not change the weights. See the samples of this step:  toolkit show {file}",
                what=what,
                file=file,
            )
        )
        policy = self.cfg.train.on_bad_step
        if policy is OnBadStep.skip:
            return False
        self._log(lr)
        if policy is OnBadStep.stop:
            raise Diverged(
                tr(
                    "{what}. train.on_bad_step=skip goes on without such steps, rewind goes back to the last "
                    "checkpoint and around them. The last checkpoint is {checkpoint}.",
                    what=what,
                    checkpoint=self.outcome.checkpoint or tr("none"),
                )
            )
        self._rewind(what)
        return True

    def _rewind(self, what: str) -> None:
        self.job.watchdog.enter("rewind", self.step)
        self._publish()
        good, checkpoint = self.job.saver.good, self.outcome.checkpoint
        if checkpoint is not None and good is not None and good != checkpoint and self.rewound_to[checkpoint]:
            # No good step has followed it, and going back to it did not help: its weights may be the trouble.
            checkpoint = good
            on_rank0(lambda: directory.move_aside_after(good))
        if checkpoint is None:
            raise Diverged(tr("{what}; there is no checkpoint to go back to: set checkpoint.every.", what=what))
        self.rewound_to[checkpoint] += 1
        if self.rewound_to[checkpoint] > MOST_REWINDS:
            raise Diverged(
                tr(
                    "{what}; going back to {checkpoint} has been of no use {count} times.",
                    what=what,
                    checkpoint=checkpoint,
                    count=MOST_REWINDS,
                )
            )
        self.metrics.forget()
        state = self.job.go_back(checkpoint)
        self.outcome.rewinds += 1
        self.progress.back_to(state.step)
        self.job.trackers.back_to(state.step)
        self.progress.say(
            tr(
                "Went back to step {step}; the data of the steps up to {bad} is passed over.",
                step=state.step,
                bad=self.step,
            )
        )
        self.begin_at(state, self.place)

    def _log(self, lr: float) -> None:
        pace = self.meter.pace()
        self.outcome.steps += pace.steps
        self.outcome.steps_s += pace.seconds
        row = self.meter.row(self.step, self.step / self.job.steps_per_epoch, lr, pace)
        row |= {"bad_steps": self.outcome.bad_steps, "rewinds": self.outcome.rewinds}
        row |= self.job.figures_at(self.began) | dropping_metrics(self.engine.module)
        if rank() == 0:
            self.metrics.append(row)
            if self.collectives.is_on:
                self.collectives.write(self.job.folder)
        self.progress.show(row)
        if slow := self.slow_ranks.see(pace):
            self.progress.say(slow)
        if math.isnan(self.outcome.first_loss):
            self.outcome.first_loss = row["loss"]
        self.outcome.last_loss = row["loss"]

    def _evaluates(self) -> bool:
        """Whether there is an evaluation at the present step."""
        if self.job.evaluate is None or not self.step:
            return self.job.evaluate is not None and self.cfg.evaluate.at_start
        return _due(self.step, self.cfg.evaluate.every) or self.step == self.job.total_steps

    def _evaluate(self) -> None:
        assert self.job.evaluate is not None
        step, watchdog = self.step, self.job.watchdog
        watchdog.enter("evaluation", step)
        row: dict[str, float] = {"step": step, **self.job.evaluate(step, lambda: watchdog.enter("evaluation", step))}
        self.outcome.evaluations.append(row)
        self.progress.note(evaluation=row)
        if rank() == 0:
            self.metrics.append(row)
        for line in describe_evaluation(row):
            self.progress.say(line)

    def _again(self) -> bool:
        """Whether a save that failed is due again: ten times as often as saves are."""
        return self.job.saver.failed and self.step % max(1, self.cfg.checkpoint.every // 10) == 0

    def _state(self) -> RunState:
        metrics, outcome = self.metrics.file, self.outcome
        return replace(
            self.job.start,
            step=self.step,
            epoch=self.place.epoch,
            row=self.place.row,
            trained_tokens=self.meter.trained_tokens_so_far,
            total_tokens=self.meter.total_tokens_so_far,
            first_loss=outcome.first_loss,
            last_loss=outcome.last_loss,
            skips_in_a_row=self.guard.skips_in_a_row,
            bad_steps=outcome.bad_steps,
            rewinds=outcome.rewinds,
            losses=list(self.guard.losses),
            grad_norms=list(self.guard.grad_norms),
            evaluations=outcome.evaluations,
            metrics_bytes=metrics.stat().st_size if metrics.exists() else 0,
        )

    def _publish(self) -> None:
        """Publish the checkpoint that all ranks have proven."""
        self.job.watchdog.enter("checkpoint", self.step)
        self.meter.pause()
        self._published()
        self.meter.resume()

    def _published(self) -> None:
        self.job.saver.finish()
        self.outcome.checkpoint = self.job.saver.newest
        self.progress.note(checkpoint=self.outcome.checkpoint)

    def _lost(self) -> RunFolderError:
        """Save what the run has learned next to its folder, which is gone; return the error that ends the run."""
        job, saver = self.job, self.job.saver
        job.watchdog.enter("checkpoint", self.step)
        place = on_rank0(lambda: run_folder.rescue(job.folder))
        failure.watch_failures(place)
        saver.folder = place / "checkpoints"
        saver.begin(self._state())
        saver.finish()
        what = folder_lock.lost_text(job.folder)
        if saver.failed:
            return RunFolderError(what)
        return RunFolderError(
            tr(
                "{what} The state after step {step} is saved: resume={checkpoint} continues from it.",
                what=what,
                step=self.step,
                checkpoint=saver.newest,
            )
        )

    def _phase(self, title: str) -> AbstractContextManager[object]:
        return phase(title, speaks=rank() == 0)

    def _stopped(self) -> Stopped:
        self.stop_file.remove()
        by_file = tr("the file 'stop'") if self.stop_file.found else ""
        return Stopped(
            tr(
                "stopped by {signal} after step {step} of {total}, as all ranks agreed. Saved: {checkpoint}. "
                "There is no DONE marker: the run is unfinished. With a run.name the same command goes on with it.",
                signal=by_file or failure.received_signal() or tr("a signal to another rank"),
                step=self.step,
                total=self.job.total_steps,
                checkpoint=self.outcome.checkpoint,
            )
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
