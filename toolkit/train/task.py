"""What a run learns: the task that Trainer, loop and step are handed, and what they hand each other."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit.checkpoint.directory import RunState
from toolkit.config.schema import RunConfig
from toolkit.data.sampler import Position
from toolkit.distributed.watchdog import Watchdog
from toolkit.engine import ds_config
from toolkit.launch.environment import Ranks
from toolkit.train import run_dir
from toolkit.train.checkpointer import Checkpointer
from toolkit.train.hooks import Hook
from toolkit.train.schedule import Epoch
from toolkit.train.step import Samples, StepGuard, TokenCounts

if TYPE_CHECKING:
    from toolkit.models.router_loss import Routers


TOKENS, SAMPLES = "tokens", "samples"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a checkpoint holds of the model next to the engine's files."""

    files: Mapping[str, bytes]
    """Of `toolkit.models.save.non_weight_files`; rank 0 alone has them."""
    probe_ids: torch.Tensor | None
    """Token ids of `toolkit.models.probe`, the same on every rank; None for a custom model with inputs of its own."""
    holds_frozen: bool = False
    """Whether checkpoints hold frozen weights too: those of a custom model are nowhere else."""


@dataclass(kw_only=True, slots=True)
class FitResult:
    """What the loop achieved."""

    state: RunState
    """Of the run's end."""
    skipped_steps: int
    """Steps without an update: gradients overflowed, or the step went wrong."""
    steps: int
    """Steps that this process did, those done again after a rewind included."""
    steps_s: float
    """Seconds that they took: without evaluation, saving and what comes before the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """A run whose engine is built: what stays the same until its end."""

    cfg: RunConfig
    """Settled: nothing in it is `auto` any more."""
    ranks: Ranks
    folder: Path
    ds: ds_config.DsConfig
    engine: DeepSpeedEngine
    guard: StepGuard
    files: ModelFiles
    """Of `Task.model_files`, made in `Trainer.build`: config, tokenizer and adapter settings that exports get."""
    checkpointer: Checkpointer
    start: RunState
    """Where the run begins, and what is the same in all its checkpoints."""
    hooks: list[Hook]
    """What config and model add to the run, in the order in which they are called."""
    watchdog: Watchdog
    total_steps: int
    """At most: a hook may end the run earlier."""
    accumulation: int
    started: float
    """time.monotonic() when the command was started, with its launcher."""

    @property
    def display_folder(self) -> str:
        """Return the run directory as a user would type it from here."""
        here = Path.cwd()
        return str(self.folder.relative_to(here)) if self.folder.is_relative_to(here) else str(self.folder)


class Task(ABC):
    """What a run learns, and from what: language modelling or a custom model. Created without its data; the Trainer
    calls the methods in this order, on every rank unless they say otherwise.
    """

    unit = TOKENS
    """What speed is counted in: TOKENS or SAMPLES."""
    loss_unit = ""
    """What the loss is counted in, such as nats/token; "" where only the task knows."""
    counted = ""
    """What a step's loss is the mean of, as metrics.jsonl names it; "" where that is what `unit` says."""
    memory_sections: tuple[str, ...] = ("",)
    """Beginnings of the config's keys in which something that takes less memory can be set."""
    steps_per_epoch: int
    """Optimizer steps of a pass over the training data, once the config is settled; of an endless stream, the run's."""
    total_steps: int
    """Optimizer steps of the run, once the config is settled."""
    epoch: Epoch | None
    """Size of a pass over the data, once the config is settled; None if it is not known."""
    identity: dict[str, str]
    """What is the same if a run learns from the same data in the same sequences."""
    has_validation: bool
    vocab_size: int | None = None
    """Tokens of the vocabulary, with which memory is planned; None: the model is not known to the plan."""

    # Data

    def load_data(self, cfg: RunConfig, ranks: Ranks) -> None:  # noqa: B027  # not every task has such data
        """Read and prepare what takes long. Before the process group exists, so that no collective can time out."""

    @abstractmethod
    def begin(self, cfg: RunConfig, ranks: Ranks) -> None:
        """Get ready for a run in the process group that is there; seed random generators."""

    @abstractmethod
    def settle(self, cfg: RunConfig) -> None:
        """Take the config whose layout and micro-batch are decided."""

    @abstractmethod
    def data_summary(self) -> dict[str, Any]:
        """Return what is learned from, in numbers, for trackers."""

    @abstractmethod
    def data_card(self) -> dict[str, Any]:
        """Return what data.json tells the report of the data. For rank 0 only."""

    @abstractmethod
    def batches(self, position: Position, num_steps: int) -> Iterator[Any]:
        """Return this rank's micro-batches from a position on, `accumulation` of them for each of so many steps."""

    @abstractmethod
    def next_position(self, position: Position) -> Position:
        """Return the position in the training data after the step that begins at one."""

    def stream_state(self, position: Position) -> dict[str, Any]:
        """Return what a checkpoint at a position holds of data that cannot be reached by its numbers. A collective."""
        return {}

    def order_metrics(self, position: Position) -> dict[str, float]:
        """Return what metrics.jsonl says of how the step that begins at a position takes its data."""
        return {}

    @abstractmethod
    def describe_samples_at(self, position: Position) -> Samples:
        """Return the samples of the step that begins at a position, as `toolkit show` prints them."""

    # Model

    def check_checkpoint(self, checkpoint: Path) -> None:  # noqa: B027  # resuming compares the settings anyway
        """Reject a checkpoint of another model with a ConfigError. For rank 0 only."""

    @abstractmethod
    def build_model(self, ds: ds_config.DsConfig, source: run_dir.RunSource) -> torch.nn.Module:
        """Return the module that the Trainer hands to DeepSpeed. A collective."""

    def engine_built(  # noqa: B027  # not every task has something to check or to compute then
        self, engine: DeepSpeedEngine, ds: ds_config.DsConfig, source: run_dir.RunSource
    ) -> None:
        """Check the engine, and compute what needs the weights before training or a checkpoint. A collective."""

    @abstractmethod
    def model_files(self, engine: DeepSpeedEngine) -> ModelFiles:
        """Return what checkpoints hold of the model. A collective."""

    def prepare_evaluation(self, run: RunContext) -> None:  # noqa: B027  # not every task needs the engine for it
        """Get ready to evaluate the model of the engine. A collective."""

    @abstractmethod
    def start_lines(self, run: RunContext) -> str:
        """Return what is said of model and data before the first step. A collective."""

    # Dry run

    @abstractmethod
    def longest_batch(self, position: Position) -> tuple[Any, str]:
        """Return the micro-batch that a dry run tries, and what it is called; a run would begin at the position."""

    def larger_batch(self, rows: int, share: float) -> Any:
        """Return a micro-batch of so many of the longest rows, of which a share of the tokens is kept."""
        raise NotImplementedError

    @abstractmethod
    def check_evaluation(self, run: RunContext) -> None:
        """Evaluate a little, so that what fails does so before the first step. A collective without a trace."""

    # Steps

    @abstractmethod
    def count_losses(self, batch: Any) -> int:
        """Return of how many a micro-batch's loss is the sum: trained tokens, samples, or what the task learns from."""

    @abstractmethod
    def token_counts(self, batches: list[Any]) -> TokenCounts:
        """Return the tokens of a rank's micro-batches of a step."""

    @abstractmethod
    def shape(self, batch: Any) -> tuple[int, ...]:
        """Return the size of a micro-batch, to be named where a step hangs."""

    def prepare_step(self, engine: Any, batches: list[Any]) -> None:  # noqa: B027  # few losses need it
        """Compute what the losses of a step's micro-batches need of all of them. A collective."""

    @abstractmethod
    def loss_sum(self, engine: Any, batch: Any) -> torch.Tensor:
        """Run a micro-batch forward; return the sum of its losses, a float32 scalar on the engine's device."""

    def take_figures(self) -> dict[str, torch.Tensor]:
        """Return sums over this rank's micro-batches since the last call, and over how many, [2] each, by the names
        that their means have in metrics.jsonl; the same names on every rank.
        """
        return {}

    def routers(self, engine: DeepSpeedEngine) -> "Routers | None":
        """Return what adds a load-balancing loss to each micro-batch's and counts experts' tokens; None without any."""
        return None

    @abstractmethod
    def evaluate(self, run: RunContext, step: int, alive: Callable[[], None]) -> dict[str, float]:
        """Evaluate after a step: `eval_loss` and more, the same on every rank; `alive` is called now and then."""

    def answer_before(self, run: RunContext) -> None:  # noqa: B027  # only language models answer
        """Let the model answer before the first step what `answers` asks again after the last. A collective."""

    # End

    def answers(self, run: RunContext) -> list[dict[str, str]]:
        """Return, on rank 0, answers of the trained model as samples.jsonl holds them: `prompt`, `answer`, and `before`
        where it was asked before training too. A collective.
        """
        return []

    @abstractmethod
    def check_export(self, run: RunContext) -> None:
        """Raise ModelError, before the first step, if `export` could not write or read back the model. A collective."""

    @abstractmethod
    def export(self, run: RunContext, result: FitResult) -> None:
        """Write export/ and prove it. A collective."""

    @abstractmethod
    def summary(self, run: RunContext, result: FitResult) -> dict[str, Any]:
        """Return what DONE says next to steps, losses and seconds: parameters, tokens, evaluations."""

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Return what is printed of what was learned. For rank 0 only."""
        return []

    @abstractmethod
    def next_steps(self, run: RunContext, answers: list[dict[str, str]]) -> list[str]:
        """Return what can be done with the result. For rank 0 only."""
