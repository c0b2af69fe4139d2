"""After which steps a checkpoint is saved, and its save and publication alongside training."""

import time

from toolkit import terminal
from toolkit.checkpoint.directory import RunState
from toolkit.distributed import failure, process_group
from toolkit.messages import CheckpointError, Diverged, RunFolderError, tr
from toolkit.track.metrics import Progress
from toolkit.train import run_dir, run_lock
from toolkit.train.task import RunContext


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0


class Saving:
    """Saves and publishes the checkpoints of a run. A method that is a collective says so."""

    def __init__(self, run: RunContext, progress: Progress) -> None:
        self.config, self.checkpointer, self.guard = run.cfg.checkpoint, run.checkpointer, run.guard
        self.folder, self.watchdog, self.hooks, self.progress = run.folder, run.watchdog, run.hooks, progress
        self.is_postponed = False
        """Whether a checkpoint is due as soon as a step is good again."""
        self.saved_at = time.monotonic()

    def is_time(self, now: float) -> bool:
        """Whether `checkpoint.minutes` have passed since the last save at `now`, a time of time.monotonic()."""
        # A save that failed is tried again after a tenth of the time.
        patience_s = 60 * self.config.minutes / (10 if self.checkpointer.failed else 1)
        return 0 < patience_s <= now - self.saved_at

    def decide(self, step: int, stops: bool, is_time: bool, last: bool) -> bool:
        """Return whether to save after `step`: because the run `stops`, or a save is due by steps, time (`is_time`) or
        end (`last`), or the last one failed or was postponed. After a bad loss, which may mean ruined weights, what is
        due is postponed to the next good step (`is_postponed`); after the last step only after two bad losses in a row.
        """
        every = self.config.every
        # A save that failed is retried ten times as often, but not at all if `every` is 0.
        retries = self.checkpointer.failed and is_due(step, min(every, max(1, every // 10)))
        due = is_due(step, every) or is_time or (last and self.config.at_end) or retries or self.is_postponed
        self.is_postponed = due and (self.guard.has_ruined_weights if last else self.guard.has_bad_loss)
        return stops or (due and not self.is_postponed)

    def save(self, state: RunState, last: bool) -> None:
        """Begin to save a checkpoint; its files are written and verified alongside training. A collective."""
        began = time.monotonic()
        with terminal.phase(tr("Saving the checkpoint of step {step}", step=state.step)):
            self.checkpointer.begin(state, is_last=last)
        self.saved_at = time.monotonic()
        for hook in self.hooks:
            hook.at_save(self.saved_at - began)

    def publish(self) -> None:
        """Publish the checkpoint whose save has begun, once all ranks have verified its files. A collective."""
        self.checkpointer.finish()
        for hook in self.hooks:
            hook.at_publish(time.monotonic() - self.saved_at)
        self.progress.note(checkpoint=self.checkpointer.newest)

    def publish_last(self, step: int, is_saved: bool) -> None:
        """Publish at once, as the run ends. If a save of this step was begun (`is_saved`) and has failed, raise
        Diverged where its numbers were NaN or Inf, else CheckpointError. A collective.
        """
        with terminal.phase(tr("Proving the checkpoint of step {step}", step=step)):
            self.publish()
        if not is_saved or not self.checkpointer.failed:
            return
        if self.checkpointer.ruin:
            raise Diverged(
                "after step {step} {reason}, and nothing is saved. Lower optim.lr, or use precision=bf16 or "
                "precision=fp32. The last checkpoint is {checkpoint}.",
                step=step,
                reason=self.checkpointer.ruin,
                checkpoint=self.checkpointer.good or self.checkpointer.newest or tr("none"),
            )
        reason = tr("the last checkpoint could not be saved; see the warning above. Earlier ones are untouched.")
        raise CheckpointError(reason)

    def rescue(self, state: RunState) -> RunFolderError:
        """Save the state next to the run directory, which is gone; return the error that ends the run. A collective."""
        checkpointer, folder = self.checkpointer, self.folder
        self.watchdog.enter("checkpoint", state.step)
        rescued = process_group.on_rank0(lambda: run_dir.rescue(folder))
        failure.watch_failures(rescued)
        checkpointer.folder, checkpointer.no_step_follows = rescued / "checkpoints", True
        checkpointer.begin(state)
        checkpointer.finish()
        what = run_lock.lost_text(folder)
        if checkpointer.failed:
            return RunFolderError(what)
        return RunFolderError(
            "{what} The state after step {step} is saved: resume={checkpoint} continues from it.",
            what=what,
            step=state.step,
            checkpoint=checkpointer.newest,
        )
