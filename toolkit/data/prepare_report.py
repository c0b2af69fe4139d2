"""What became of the rows of a recipe's sources, in numbers and first examples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.parts import EXAMPLES
from toolkit.data.store import Index
from toolkit.messages import tr


@dataclass(slots=True)
class PrepareReport:
    """What became of the rows; kept in the manifest, so that a later run can show it too."""

    rows_read: int = 0
    """Rows of training and validation files together, blank lines excepted."""
    train_samples: int = 0
    validation_samples: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows of which nothing, or not all, was used, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """For each reason the first few places, "file:line"; for unusable rows with what is wrong."""
    bad_rows: int = 0
    """Rows that could not be used; all are listed in bad_rows.jsonl of the store."""
    truncated: int = 0
    """Samples that lost their oldest turns (a plain text: its end)."""
    split: int = 0
    """Conversations that became several samples for their length."""
    systems: int = 0
    """Rows whose system message was left out because the model's format has no place for it."""
    unused: list[str] = field(default_factory=list)
    """Columns that were not read."""
    message_keys: dict[str, int] = field(default_factory=dict)
    """Keys of messages that were not read, and in how many messages."""
    repeated: int = 0
    """Training rows that give the same samples as an earlier training row."""
    repeated_examples: list[str] = field(default_factory=list)
    """The first few, "file:line = file:line"."""
    leaked: int = 0
    """Validation rows that give the same samples as a training row."""
    leaked_examples: list[str] = field(default_factory=list)
    """The first few, "file:line = file:line"."""
    tokens: int = 0
    """Tokens in the training split."""
    trained_tokens: int = 0
    """Tokens in the training split that the loss covers."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """For each source: name, split, rows, samples, tokens, trained_tokens."""
    seconds: float = 0.0
    """Time the build took; of the earlier build if the store is reused."""
    parts_kept: int = 0
    """Parts of an interrupted build that were used."""
    built: bool = False
    """Whether this process built the store."""
    is_new: bool = False
    """Whether the store was built since this process began, by whichever rank."""
    folder: str = ""
    """The store."""

    def count_equal(
        self, index: Index, first: NDArray[np.int64], training: NDArray[np.int64], paths: Sequence[Path]
    ) -> None:
        """Count the rows that are there twice.

        Args:
            index: of the store, training files before validation files.
            first: of each used row the first one that is equal, see `duplicates.first_equal`.
            training: samples of the training split.
            paths: of the files, by their numbers.
        """
        rows = index.used_rows()
        is_training = np.zeros(len(first), dtype=np.bool_)
        is_training[rows[training]] = True
        sample_of = np.flatnonzero(np.diff(rows, prepend=-1))

        def where(row: int) -> str:
            sample = sample_of[row]
            return f"{paths[index.files[sample]]}:{index.lines[sample]}"

        def examples(found: NDArray[np.int64]) -> list[str]:
            return [f"{where(row)} = {where(first[row])}" for row in found[:EXAMPLES]]

        # Training files are read first, so the first of equal rows is a training row if any of them is.
        repeated = np.flatnonzero(is_training & (first != np.arange(len(first))))
        leaked = np.flatnonzero(~is_training & is_training[first])
        self.repeated, self.repeated_examples = len(repeated), examples(repeated)
        self.leaked, self.leaked_examples = len(leaked), examples(leaked)

    def duplicates(self) -> str:
        """Return how many rows are there twice, in one sentence; "" if none is."""
        if not self.repeated and not self.leaked:
            return ""
        return tr(
            "Duplicates: {training} training rows; {validation} validation rows that are also training rows.",
            training=f"{self.repeated:,}",
            validation=f"{self.leaked:,}",
        )

    def duplicate_lines(self) -> list[str]:
        """Return the same with the first places, a line for each split; [] if there is none."""
        lines = []
        if self.repeated:
            lines.append(
                tr(
                    "Duplicates: {count} training rows are equal to an earlier one and are trained again. First: "
                    "{examples}",
                    count=f"{self.repeated:,}",
                    examples="; ".join(self.repeated_examples),
                )
            )
        if self.leaked:
            lines.append(
                tr(
                    "WARNING: {count} validation rows are also training rows: the validation loss will be too low. "
                    "Remove them from one of the two. First: {examples}",
                    count=f"{self.leaked:,}",
                    examples="; ".join(self.leaked_examples),
                )
            )
        return lines
