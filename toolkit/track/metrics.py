"""metrics.jsonl: one object per logged step or evaluation, added whole or not at all; names are in docs/tracking.md."""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from toolkit.messages import CheckpointError, warn


def append_rows(file: Path, content: bytes) -> None:
    """Append all of it to a file, or nothing, as no reader takes half a row: on an OSError the file is as it was."""
    with file.open("ab", buffering=0) as handle:
        before = os.fstat(handle.fileno()).st_size
        written = 0
        try:
            while written < len(content):
                written += handle.write(content[written:])
        except OSError:
            os.ftruncate(handle.fileno(), before)
            raise


_HF_NAMES = {"step": "global_step", "lr": "learning_rate", "total_tokens": "num_input_tokens_seen"}
_EVALUATION = "eval_"


def hf_name(name: str) -> str:
    """Return what transformers' Trainer calls a metric, as it stands in its logs."""
    return _HF_NAMES.get(name, name)


def tracked_name(name: str) -> str:
    """Return the name under which transformers' integrations of TensorBoard, wandb, SwanLab and Trackio log it."""
    hf = hf_name(name)
    return f"eval/{hf.removeprefix(_EVALUATION)}" if hf.startswith(_EVALUATION) else f"train/{hf}"


def is_evaluation(row: Mapping[str, object]) -> bool:
    """Whether a row of metrics.jsonl is of an evaluation, not of a logged step."""
    return "eval_loss" in row


def metric_values(row: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a row; "nan" and "inf" are numbers that JSON does not have."""
    found = {}
    for name, value in row.items():
        with suppress(TypeError, ValueError):
            found[name] = float(value)  # type: ignore[arg-type]
    return found


class MetricsLog:
    """Appends rows to a run's metrics.jsonl; on a full disk they wait in memory. For rank 0 only."""

    def __init__(self, file: Path, hand_on: Callable[[Mapping[str, object]], None] = lambda row: None) -> None:
        self.file, self.hand_on = file, hand_on
        self._waiting: list[str] = []

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row; non-finite numbers as strings ("nan", "inf"), which JSON lacks and strict readers reject."""
        clean = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        is_warned = bool(self._waiting)
        self._waiting.append(json.dumps(clean, ensure_ascii=False) + "\n")
        try:
            self._write()
        except OSError as error:
            if not is_warned:
                warn(
                    "{file} cannot be written: {reason}. Training continues; rows are kept in memory until there is "
                    "room.",
                    file=self.file,
                    reason=error.strerror or error,
                )
        self.hand_on(row)

    def forget(self) -> None:
        """Drop the rows that wait: the run has gone back to before them."""
        self._waiting.clear()

    def finish(self) -> None:
        """Write what still waits, or raise CheckpointError."""
        try:
            self._write()
        except OSError as error:
            raise CheckpointError(
                "{file} cannot be written: {reason}. The last {count} rows are lost.",
                file=self.file,
                reason=error.strerror or error,
                count=len(self._waiting),
            ) from error

    def _write(self) -> None:
        if self._waiting:
            append_rows(self.file, "".join(self._waiting).encode())
            self._waiting.clear()
