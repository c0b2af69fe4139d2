"""The live view of a run on a terminal: progress, and the figures of its last row and evaluation."""

import time

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from toolkit import terminal
from toolkit.messages import console, tr
from toolkit.track.metrics import Progress, speed_and_memory


def render(progress: Progress) -> Panel:
    """Return the live view as it is now; called several times a second."""
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1, min_width=10)
    for _ in range(2):
        head.add_column(no_wrap=True)
    total, elapsed = max(progress.total_steps, 1), terminal.clock(time.monotonic() - progress.started)
    head.add_row(
        f"[bold]{progress.step:,}[/]/{progress.total_steps:,}",
        ProgressBar(total=total, completed=progress.step),
        f"{progress.step / total:.0%}",
        tr("{elapsed}, ETA {left}", elapsed=elapsed, left=progress.remaining(progress.step)),
    )
    figures = Table.grid(padding=(0, 3))
    for line in _figures(progress):
        figures.add_row("   ".join(f"[dim]{name}[/] {value}" if name else value for name, value in line))
    return Panel(Group(head, figures), title=tr("training"), title_align="left", border_style="dim")


def _figures(progress: Progress) -> list[list[tuple[str, str]]]:
    """Return the live view's lines of (name, value): learning, speed, safety; a name may be ""."""
    row, losses = progress.row, []
    if row:
        losses += [
            (tr("loss"), f"[bold]{row['loss']:.4f}[/]"),
            (tr("learning rate"), f"{row['lr']:.2e}"),
            (tr("gradient norm"), f"{row['grad_norm']:.3f}"),
            (tr("epoch"), f"{row['epoch']:.2f}"),
        ]
    if progress.evaluation:
        value, step = f"{progress.evaluation['eval_loss']:.4f}", int(progress.evaluation["step"])
        losses.insert(1, (tr("validation loss"), tr("{value} (step {step})", value=value, step=f"{step:,}")))
    safety = [(tr("last checkpoint"), progress.checkpoint or tr("none"))]
    if skipped := int(row.get("skipped_steps", 0)):
        safety.append((tr("skipped steps"), f"[yellow]{skipped:,}[/]"))
    if "loss_scale" in row:
        safety.append((tr("loss scale"), f"{row['loss_scale']:g}"))
    if warnings := console.num_warnings - progress.warnings_before:
        safety.append((tr("warnings above"), f"[yellow]{warnings:,}[/]"))
    return [losses, [("", part) for part in speed_and_memory(row)] if row else [], safety]
