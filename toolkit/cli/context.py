"""What the parts of a training session share."""

from dataclasses import dataclass
from pathlib import Path

from deepspeed import DeepSpeedEngine

from toolkit.config.schema import RunConfig
from toolkit.engine.ds_config import DsConfig
from toolkit.evaluate.answers import ValidationQuestion
from toolkit.launch.environment import Ranks
from toolkit.report.automatic import AutomaticReport
from toolkit.track.trackers import Trackers
from toolkit.train.checkpoint import Described
from toolkit.train.guard import Guard
from toolkit.train.prepared import Prepared


@dataclass(kw_only=True, slots=True)
class AnySession:
    """What stays the same for a whole session, whatever is trained."""

    cfg: RunConfig
    """The config."""
    ranks: Ranks
    """Who this process is."""
    folder: Path
    """The run folder."""
    ds: DsConfig
    """What DeepSpeed receives."""
    engine: DeepSpeedEngine
    """The engine."""
    guard: Guard
    """Judges its steps."""
    described: Described
    """What checkpoints and export hold of the model beside its weights."""
    trackers: Trackers
    """What records the run beside metrics.jsonl."""
    started: float
    """time.monotonic() when the command was started, with its launcher."""
    reporter: AutomaticReport | None = None
    """Makes the run's report; on rank 0 alone, and not where none is wanted."""

    @property
    def display_folder(self) -> str:
        """Return the run folder as a user would type it from here."""
        here = Path.cwd()
        return str(self.folder.relative_to(here)) if self.folder.is_relative_to(here) else str(self.folder)


@dataclass(kw_only=True, slots=True)
class Session(AnySession):
    """What stays the same for a session that trains a language model."""

    prepared: Prepared
    """Tokenizer and stores."""
    questions: list[ValidationQuestion]
    """What the model is asked at each evaluation."""
