"""The live view of a training run on a terminal."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.messages import tr
from toolkit.track.figures import clock, memory, speed

if TYPE_CHECKING:
    from rich.console import RenderableType


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
