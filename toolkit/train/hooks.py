"""Hooks: what a config adds around and between the steps of a run, and when it is called."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import RunConfig
from toolkit.data.sampler import Position
from toolkit.launch.environment import Ranks

if TYPE_CHECKING:
    from toolkit.models.router_loss import Routers
    from toolkit.train.loop import TrainLoop
    from toolkit.train.step import StepResult, StepVote
    from toolkit.train.task import FitResult, RunContext, Task
    from toolkit.train.throughput import RankTimes


class Hook:
    """Something that is done alongside training. Trainer and loop call each method of every hook, in the order of the
    list, on all ranks unless it says otherwise; a method that a hook does not override does nothing.
    """

    # Around the steps

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Called once the engine is built, before anything is tried or trained; not in a replay."""

    def at_dry_run(self) -> None:
        """Called once the dry run has passed."""

    def at_start(self, loop: "TrainLoop") -> None:
        """Called when the loop begins, before its first step."""

    def at_last_step(self) -> None:
        """Called after all steps: write what is still in memory, or raise CheckpointError. On rank 0 only."""

    def at_end(self, result: "FitResult", answers: list[dict[str, str]]) -> None:
        """Called once the model is exported; `answers`: those to `evaluate.prompts`."""

    def before_done(self, summary: dict[str, Any]) -> None:
        """Called once the result is printed; may add to `summary`, which is written to DONE. On rank 0 only."""

    def after_done(self) -> None:
        """Called once DONE is written. On rank 0 only."""

    def at_exit(self, error: BaseException | None) -> None:
        """Called when the run has ended, with the error that ended it; `at_start` may not have been called."""

    # A step

    def before_step(self, step: int, vote: "StepVote") -> None:
        """Called once the data of `step` is loaded; may change `vote`, this rank's report to the others."""

    def after_step(self, result: "StepResult", seconds: float) -> None:
        """Called after a step, before logging, evaluation and save; `seconds`: what it took, its data included."""

    def between_steps(self, step: int) -> None:
        """Called once logging, evaluation and save after `step` are done. Not after the last step."""

    def at_pause(self) -> None:
        """Called before an evaluation or a save; until `at_resume`, time is not that of steps."""

    def at_resume(self) -> None:
        """Called after an evaluation or a save."""

    # What follows some steps

    def rank_figures(self) -> Mapping[str, float]:
        """Return this rank's figures since the last log, of the same names on all ranks; see `RankTimes.figures`."""
        return {}

    def at_log(self, step: int, position: Position, times: "RankTimes") -> Mapping[str, float]:
        """Return what to add to the row about the steps since the last log; `position`: where the last one began."""
        return {}

    def after_log(self, times: "RankTimes") -> None:
        """Called once the row about the steps since the last log is written and printed."""

    def at_row(self, row: Mapping[str, object]) -> None:
        """Called with each row written to metrics.jsonl, of steps or of an evaluation. On rank 0 only."""

    def at_evaluation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Called after an evaluation, which took `seconds`, before its row is written."""

    def at_save(self, seconds: float) -> None:
        """Called when a save has begun, for which training waited `seconds`."""

    def at_publish(self, seconds: float) -> None:
        """Called when a checkpoint is published, `seconds` after training continued."""

    def at_rewind(self, step: int) -> None:
        """Called when the run is rewound to `step`: later steps are repeated."""


def hooks_of(cfg: RunConfig, ranks: Ranks, folder: Path) -> list[Hook]:
    """Return the hooks that a config adds to the run in `folder`. A collective; ConfigError if run.deadline is past."""
    hooks: list[Hook] = []
    if cfg.run.deadline:
        from toolkit.train.deadline import DeadlineHook

        hooks.append(DeadlineHook(cfg, folder))
    if cfg.profile.comms.enabled:
        from toolkit.train.collectives import Collectives

        hooks.append(Collectives(folder))
    if cfg.track.enabled:
        from toolkit.train.tracking import Tracking

        hooks.append(Tracking(cfg))
    if cfg.compile.enabled:
        from toolkit.train.compile_check import CompileCheck

        hooks.append(CompileCheck())
    if ranks.world_size > 1:
        from toolkit.train.stragglers import StragglerDetector

        hooks.append(StragglerDetector())
    if cfg.report.enabled and ranks.rank == 0:
        from toolkit.train.report import automatic_report

        hooks.append(automatic_report(cfg, folder))
    return hooks


def hooks_of_model(routers: "Routers | None", folder: Path) -> list[Hook]:
    """Return the hooks that a built model adds: with `routers`, figures of how its experts are used."""
    if routers is None:
        return []
    from toolkit.train.experts import ExpertFigures

    return [ExpertFigures(routers, folder)]


@contextmanager
def running(hooks: Sequence[Hook], run: "RunContext", task: "Task") -> Iterator[None]:
    """Call `at_begin` of all hooks, then run the body; call `at_exit` however it ends."""
    for hook in hooks:
        hook.at_begin(run, task)
    try:
        yield
    except BaseException as error:
        for hook in hooks:
            hook.at_exit(error)
        raise
    for hook in hooks:
        hook.at_exit(None)
