"""What rank 0 shows while training: a live view on a terminal, plain lines elsewhere; the same metrics in both."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import terminal
from toolkit.messages import console, say, tr
from toolkit.plan.machine import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType


WORTH_TELLING = 0.05
"""Share of time, or of tokens, that is mentioned; the others are left to metrics.jsonl."""


def speed(row: Mapping[str, float]) -> list[str]:
    """Return what a row says of speed."""
    units = ("tokens", "samples")
    parts = [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in units if f"{unit}_per_s" in row]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.0%}")
    elif row.get("mfu_matmul", math.inf) <= 1:  # more says that the machine was busier when the product was measured
        parts.append(tr("{share} of matmul", share=f"{row['mfu_matmul']:.0%}"))
    if row.get("data_wait_fraction", 0) >= WORTH_TELLING:
        parts.append(tr("waits {share} for data", share=f"{row['data_wait_fraction']:.0%}"))
    if row.get("padding_fraction", 0) >= WORTH_TELLING:
        parts.append(tr("{share} padding", share=f"{row['padding_fraction']:.0%}"))
    if "communication_fraction" in row:
        parts.append(tr("{share} communication", share=f"{row['communication_fraction']:.0%}"))
    return parts


def memory(row: Mapping[str, float]) -> list[str]:
    """Return what a row says of memory, beside the plan where there is one."""
    peak = row.get("device_memory_peak_bytes", row.get("host_memory_peak_bytes"))
    if not peak:
        return []
    if "planned_memory_bytes" not in row:
        return [tr("memory {peak} GiB", peak=f"{peak / GIB:.1f}")]
    planned = row["planned_memory_bytes"] / GIB
    return [tr("memory {peak} of {planned} GiB planned", peak=f"{peak / GIB:.1f}", planned=f"{planned:.1f}")]


def clock(seconds: float) -> str:
    """Return hours:minutes:seconds."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


@dataclass(slots=True)
class LiveView:
    """What is known of a run; `render` is asked anew several times a second."""

    total_steps: int
    """Optimizer steps of the run."""
    step: int
    """Steps done."""
    row: dict[str, float] = field(default_factory=dict)
    """The last row of metrics.jsonl with a training loss."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The last row of an evaluation."""
    checkpoint: str = ""
    """Name of the last checkpoint that was published."""
    warnings: int = 0
    """Warnings so far; they stand above."""
    elapsed_s: float = 0.0
    """Since the first step of this session."""
    remaining_s: float | None = None
    """Estimate; None before a step is done."""

    def render(self) -> "RenderableType":
        """Return the view as it is now."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1, min_width=10)
        for _ in range(2):
            head.add_column(no_wrap=True)
        left = "?" if self.remaining_s is None else clock(self.remaining_s)
        head.add_row(
            f"[bold]{self.step:,}[/]/{self.total_steps:,}",
            ProgressBar(total=max(self.total_steps, 1), completed=self.step),
            f"{self.step / max(self.total_steps, 1):.0%}",
            tr("{elapsed}, ETA {left}", elapsed=clock(self.elapsed_s), left=left),
        )
        figures = Table.grid(padding=(0, 3))
        for line in (self._loss(), self._speed(), self._safety()):
            figures.add_row("   ".join(f"[dim]{name}[/] {value}" if name else value for name, value in line))
        return Panel(Group(head, figures), title=tr("training"), title_align="left", border_style="dim")

    def _loss(self) -> list[tuple[str, str]]:
        row, found = self.row, []
        if row:
            found += [
                (tr("loss"), f"[bold]{row['loss']:.4f}[/]"),
                (tr("learning rate"), f"{row['lr']:.2e}"),
                (tr("gradient norm"), f"{row['grad_norm']:.3f}"),
                (tr("epoch"), f"{row['epoch']:.2f}"),
            ]
        if self.evaluation:
            value, step = f"{self.evaluation['eval_loss']:.4f}", int(self.evaluation["step"])
            found.insert(1, (tr("validation loss"), tr("{value} (step {step})", value=value, step=f"{step:,}")))
        return found

    def _speed(self) -> list[tuple[str, str]]:
        return [("", part) for part in [*speed(self.row), *memory(self.row)]]

    def _safety(self) -> list[tuple[str, str]]:
        found = [(tr("last checkpoint"), self.checkpoint or tr("none"))]
        if skipped := int(self.row.get("skipped_steps", 0)):
            found.append((tr("skipped steps"), f"[yellow]{skipped:,}[/]"))
        if "loss_scale" in self.row:
            found.append((tr("loss scale"), f"{self.row['loss_scale']:g}"))
        if self.warnings:
            found.append((tr("warnings above"), f"[yellow]{self.warnings:,}[/]"))
        return found


class Progress:
    """How far a run is. Ranks other than 0 show none (`shown=False`)."""

    def __init__(
        self, total_steps: int, shown: bool, done: int = 0, on_first_step: Callable[[], None] = lambda: None
    ) -> None:
        """Make ready; nothing is shown before `start`."""
        self.shown, self.done = shown, done
        self.on_first_step: Callable[[], None] | None = on_first_step if shown else None
        self.view = LiveView(total_steps, done)
        self.started, self.warnings_before = time.monotonic(), console.num_warnings
        self.is_live = shown and terminal.is_live()
        self._stack = ExitStack()

    def start(self) -> None:
        """The first step of this session begins."""
        self.started = time.monotonic()
        if self.is_live:
            self._stack.enter_context(terminal.showing(self._render))

    def advance(self) -> None:
        """One step is done."""
        if self.on_first_step:
            self.on_first_step()
            self.on_first_step = None
        self.view.step += 1

    def back_to(self, step: int) -> None:
        """The steps after this one are done again; what they took says nothing of those to come."""
        self.view.step = self.done = step
        self.started = time.monotonic()

    def show(self, row: dict[str, float]) -> None:
        """Show a logged step."""
        if not self.shown:
            return
        self.view.row = row
        if self.is_live:
            return
        figures = "loss {loss:.4f}  lr {lr:.2e}  grad-norm {grad_norm:.3f}".format(**row)
        figures += "".join(f"  {part}" for part in [*speed(row), *memory(row)])
        if row.get("skipped_steps"):
            figures += "  " + tr("skipped {count}", count=int(row["skipped_steps"]))
        if "loss_scale" in row:
            figures += f"  loss scale {row['loss_scale']:g}"
        step = int(row["step"])
        remaining_s = self._remaining_s(step)
        left = "?" if remaining_s is None else clock(remaining_s)
        say(f"step {step}/{self.view.total_steps}  {figures}  ETA {left}")

    def note(self, evaluation: dict[str, float] | None = None, checkpoint: Path | None = None) -> None:
        """Keep for the live view what is told in lines of its own."""
        if evaluation is not None:
            self.view.evaluation = evaluation
        if checkpoint is not None:
            self.view.checkpoint = checkpoint.name

    def close(self) -> None:
        """Take the live view away."""
        self._stack.close()

    def _remaining_s(self, step: int) -> float | None:
        done = step - self.done
        return (time.monotonic() - self.started) / done * (self.view.total_steps - step) if done > 0 else None

    def _render(self) -> object:
        self.view.warnings = console.num_warnings - self.warnings_before
        self.view.elapsed_s = time.monotonic() - self.started
        self.view.remaining_s = self._remaining_s(self.view.step)
        return self.view.render()
