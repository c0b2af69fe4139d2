"""What a checkpoint knows of the run beside the engine: where it is, what it was made of. Plain JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.messages import tr

STATE = "state.json"


@dataclass(kw_only=True, slots=True)
class RunState:
    """Everything the next step depends on that is not in the engine or in a random generator."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes over the data that are complete."""
    row: int = 0
    """Rows of this pass that are done, over all ranks."""
    trained_tokens: int = 0
    """Tokens whose loss counted so far."""
    total_tokens: int = 0
    """Tokens so far, padding left out."""
    first_loss: float | None = None
    """Training loss of the first step, nats per token."""
    last_loss: float | None = None
    """Training loss of the last logged step."""
    skips_in_a_row: int = 0
    """Steps skipped just before."""
    bad_steps: int = 0
    """Steps whose numbers went wrong."""
    rewinds: int = 0
    """Times that the run went back to a checkpoint for them."""
    losses: list[float] = field(default_factory=list)
    """Of the last good steps, by which spikes are known."""
    grad_norms: list[float] = field(default_factory=list)
    """Of the last good steps."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Each evaluation with its step."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl: what follows belongs to steps that are done again."""
    world_size: int = 0
    """Ranks that saved it."""
    data: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the stores and the way their rows were planned."""
    config: dict[str, Any] = field(default_factory=dict)
    """The whole resolved config."""
    versions: dict[str, Any] = field(default_factory=dict)
    """Packages and commit."""

    def write(self, folder: Path) -> Path:
        """Write it into a checkpoint and return the file.

        Raises:
            OSError: it cannot be written.
        """
        path = folder / STATE
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def read(folder: Path) -> RunState:
    """Return the state in a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return RunState(**found)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            tr("{file} cannot be read: {reason}.", file=folder / STATE, reason=str(error).splitlines()[0])
        ) from None
