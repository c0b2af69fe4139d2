"""Places between the steps of a run at which more can be done, and what a config adds there."""

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
    """What is done beside training. Trainer and loop call each place of every hook, in the order of the list; a place
    does nothing where a hook does not define it. It is called on all ranks, unless it says otherwise.
    """

    # Around the steps

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """The engine is built, and nothing has been tried or trained. A replay does not call it."""

    def at_dry_run(self) -> None:
        """The dry run has passed."""

    def at_start(self, loop: "TrainLoop") -> None:
        """The loop begins; no step is done yet."""

    def at_last_step(self) -> None:
        """All steps are done: write what still waits, or raise CheckpointError. On rank 0 only."""

    def at_end(self, result: "FitResult", samples: list[dict[str, str]]) -> None:
        """The model has answered and is exported."""

    def before_done(self, summary: dict[str, Any]) -> None:
        """The result has been printed; `summary`, which goes into DONE, may be added to. On rank 0 only."""

    def after_done(self) -> None:
        """DONE is written. On rank 0 only."""

    def at_exit(self, error: BaseException | None) -> None:
        """The run has ended, by an error or without one; `at_start` may not have been called."""

    # A step

    def before_step(self, step: int, vote: "StepVote") -> None:
        """The data of a step is there; `vote`, this rank's, may be changed."""

    def after_step(self, result: "StepResult", seconds: float) -> None:
        """A step is done, and nothing that follows it yet; `seconds`: what it took, its data included."""

    def between_steps(self, step: int) -> None:
        """What follows a step is done: logging, evaluation, save. Not after the last step."""

    def at_pause(self) -> None:
        """What is done until `at_resume` is no part of training: evaluation, saving."""

    def at_resume(self) -> None:
        """Training continues."""

    # What follows some steps

    def rank_figures(self) -> Mapping[str, float]:
        """Return this rank's figures since the last log, the same names on all; `at_log` gets those of every rank."""
        return {}

    def at_log(self, step: int, position: Position, times: "RankTimes") -> Mapping[str, float]:
        """Return what metrics.jsonl shall say of the steps since the last log, up to the one that began at a place in
        the data.
        """
        return {}

    def after_log(self, times: "RankTimes") -> None:
        """The steps since the last log are written and shown."""

    def at_row(self, row: Mapping[str, object]) -> None:
        """A row was written to metrics.jsonl, of steps or of an evaluation. On rank 0 only."""

    def at_evaluation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """An evaluation is done, and took so long; its row is not written yet."""

    def at_save(self, seconds: float) -> None:
        """A save has begun, and training waited so many seconds for it."""

    def at_publish(self, seconds: float) -> None:
        """A checkpoint is complete so many seconds after training continued."""

    def at_rewind(self, step: int) -> None:
        """The run is rewound to a step."""


def hooks_of(cfg: RunConfig, ranks: Ranks, folder: Path) -> list[Hook]:
    """Return what a config adds to the run in a directory. A collective; ConfigError if `run.deadline` is past."""
    hooks: list[Hook] = []
    if cfg.run.deadline:
        from toolkit.train.deadline import DeadlineHook

        hooks.append(DeadlineHook(cfg, folder))
    if cfg.data.curriculum.steps or any(source.weights for source in cfg.data.sources):
        from toolkit.train.order import OrderFigures

        hooks.append(OrderFigures())
    if cfg.profile.comms.enabled:
        from toolkit.train.collectives import Collectives

        hooks.append(Collectives(folder))
    if cfg.track.enabled:
        from toolkit.train.tracking import Tracking

        hooks.append(Tracking(cfg))
    if ranks.world_size > 1:
        from toolkit.train.stragglers import StragglerDetector

        hooks.append(StragglerDetector())
    if cfg.report.enabled and ranks.rank == 0:
        from toolkit.train.report import automatic_report

        hooks.append(automatic_report(cfg, folder))
    return hooks


def hooks_of_model(routers: "Routers | None", folder: Path) -> list[Hook]:
    """Return what a model adds, once it is built: figures of a mixture's experts."""
    if routers is None:
        return []
    from toolkit.train.experts import ExpertFigures

    return [ExpertFigures(routers, folder)]


@contextmanager
def running(hooks: Sequence[Hook], run: "RunContext", task: "Task") -> Iterator[None]:
    """Call `at_begin` of all hooks, and `at_exit` however the run ends."""
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
