"""What rank 0 records and prints while training: metrics.jsonl (docs/tracking.md), and progress on a terminal."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from toolkit import terminal
from toolkit.messages import CheckpointError, console, say, tr, warn
from toolkit.plan.machine import GIB


def append_rows(file: Path, content: bytes) -> None:
    """Append all of `content` or nothing: on an OSError the file is as it was, as readers reject half a row."""
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
    logged = hf_name(name)
    return f"eval/{logged.removeprefix(_EVALUATION)}" if logged.startswith(_EVALUATION) else f"train/{logged}"


def is_evaluation(row: Mapping[str, object]) -> bool:
    """Whether a row of metrics.jsonl is of an evaluation, not of a logged step."""
    return "eval_loss" in row


def metric_values(row: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a row, also those that it holds as texts, as JSON lacks them: "nan" and "inf"."""
    values = {}
    for name, value in row.items():
        with suppress(TypeError, ValueError):
            values[name] = float(value)  # type: ignore[arg-type]
    return values


class MetricsLog:
    """Appends rows to a JSONL file and hands each to `on_row`; on a full disk they wait in memory. For rank 0 only."""

    def __init__(self, file: Path, on_row: Callable[[Mapping[str, object]], None] = lambda row: None) -> None:
        self.file, self.on_row = file, on_row
        self._waiting: list[str] = []

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row; non-finite numbers as strings ("nan", "inf"), which JSON lacks and strict readers reject."""
        clean = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        is_warned = bool(self._waiting)  # when the first of the waiting rows could not be written
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
        self.on_row(row)

    def forget(self) -> None:
        """Drop the rows that wait in memory: the run was rewound to before them."""
        self._waiting.clear()

    def finish(self) -> None:
        """Write the rows that still wait in memory, or raise CheckpointError."""
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
        """Append the waiting rows to the file; an OSError leaves them waiting."""
        if self._waiting:
            append_rows(self.file, "".join(self._waiting).encode())
            self._waiting.clear()


WORTH_SHOWING = 0.05
"""Share of time, or of tokens, from which on it is printed; a smaller one is only in metrics.jsonl."""


def speed_and_memory(row: dict[str, float]) -> list[str]:
    """Return the parts of the printed line about speed, waiting and memory, of a row of metrics.jsonl."""
    units = ("tokens", "samples")
    parts = [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in units if f"{unit}_per_s" in row]
    is_gpu = "device_memory_peak_bytes" in row
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.0%}")
    elif is_gpu and row.get("mfu_matmul", math.inf) <= 1:
        # A share of the speed measured at the start; above 1 the GPU was busier then, and it says nothing.
        parts.append(tr("{share} of matmul", share=f"{row['mfu_matmul']:.0%}"))
    if row.get("data_wait_fraction", 0) >= WORTH_SHOWING:
        parts.append(tr("waits {share} for data", share=f"{row['data_wait_fraction']:.0%}"))
    if row.get("padding_fraction", 0) >= WORTH_SHOWING:
        parts.append(tr("{share} padding", share=f"{row['padding_fraction']:.0%}"))
    if "communication_fraction" in row:
        parts.append(tr("{share} communication", share=f"{row['communication_fraction']:.0%}"))
    peak = row.get("device_memory_peak_bytes", row.get("host_memory_peak_bytes", 0)) / GIB
    planned = row.get("planned_memory_bytes", 0) / GIB
    memory = tr("{peak} of {planned} GiB planned", peak=f"{peak:.1f}", planned=f"{planned:.1f}") if planned else ""
    memory = memory or f"{peak:.1f} GiB"
    parts.append(tr("memory {size}", size=memory) if is_gpu else tr("process memory {size}", size=memory))
    return parts


class Progress:
    """Prints a run's progress, live or in lines; nothing with `shown=False`. `done`: steps before this session."""

    def __init__(
        self, total_steps: int, shown: bool, done: int = 0, on_first_step: Callable[[], None] = lambda: None
    ) -> None:
        self.total_steps, self.shown = total_steps, shown
        self.step = self.done = done
        self.on_first_step: Callable[[], None] | None = on_first_step if shown else None
        self.row: dict[str, float] = {}
        """The last row of metrics.jsonl with a training loss."""
        self.evaluation: dict[str, float] = {}
        self.checkpoint = ""
        self.started, self.warnings_before = time.monotonic(), console.num_warnings
        self.is_live = shown and terminal.is_live()
        self._stack = ExitStack()

    def start(self) -> None:
        """Begin to count time and to show the live view: called before the session's first step."""
        self.started = time.monotonic()
        if self.is_live:
            from toolkit.live_view import showing
            from toolkit.track import progress_view

            self._stack.enter_context(showing(lambda: progress_view.render(self)))

    def advance(self) -> None:
        """Count one step, at the first one calling `on_first_step`."""
        if self.on_first_step:
            self.on_first_step()
            self.on_first_step = None
        self.step += 1

    def back_to(self, step: int) -> None:
        """Go back to `step` after a rewind; the time of the steps so far no longer counts for the estimate."""
        self.step = self.done = step
        self.started = time.monotonic()

    def show(self, row: dict[str, float]) -> None:
        """Print a row of metrics.jsonl about steps, or show it in the live view."""
        if not self.shown:
            return
        self.row = row
        if self.is_live:
            return
        parts = ["loss {loss:.4f}  lr {lr:.2e}  grad-norm {grad_norm:.3f}".format(**row), *speed_and_memory(row)]
        if row.get("skipped_steps"):
            parts.append(tr("skipped {count}", count=int(row["skipped_steps"])))
        if "loss_scale" in row:
            parts.append(f"loss scale {row['loss_scale']:g}")
        step = int(row["step"])
        say(f"step {step}/{self.total_steps}  {'  '.join(parts)}  ETA {self.remaining(step)}")

    def note(self, evaluation: dict[str, float] | None = None, checkpoint: Path | None = None) -> None:
        """Show in the live view the last evaluation or checkpoint, which are also printed as lines."""
        if evaluation is not None:
            self.evaluation = evaluation
        if checkpoint is not None:
            self.checkpoint = checkpoint.name

    def close(self) -> None:
        """Remove the live view."""
        self._stack.close()

    def remaining(self, step: int) -> str:
        """Return the estimated time left after a step, as text; "?" before the first."""
        done = step - self.done
        return terminal.clock((time.monotonic() - self.started) / done * (self.total_steps - step)) if done > 0 else "?"
