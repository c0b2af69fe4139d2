"""What rank 0 shows while training: a live view on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from toolkit import terminal
from toolkit.messages import tr
from toolkit.track.figures import clock, memory, speed
from toolkit.track.live_view import LiveView

_WARNING = ("WARNING:", "警告：")


class Progress:
    """How far a run is. Ranks other than 0 show none (`shown=False`)."""

    def __init__(
        self, total_steps: int, shown: bool, done: int = 0, on_first_step: Callable[[], None] = lambda: None
    ) -> None:
        """Make ready; nothing is shown before `start`.

        Args:
            total_steps: optimizer steps of the run.
            shown: whether this rank speaks.
            done: steps that an earlier session has done.
            on_first_step: called once this session has done a step, on the rank that speaks.
        """
        self.shown, self.done = shown, done
        self.on_first_step: Callable[[], None] | None = on_first_step if shown else None
        self.view = LiveView(total_steps, done)
        self.started = time.monotonic()
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
        terminal.print_line(f"step {step}/{self.view.total_steps}  {figures}  ETA {left}")

    def note(self, evaluation: dict[str, float] | None = None, checkpoint: Path | None = None) -> None:
        """Keep for the live view what is told in lines of its own.

        Args:
            evaluation: the row of an evaluation.
            checkpoint: the last checkpoint that was published.
        """
        if evaluation is not None:
            self.view.evaluation = evaluation
        if checkpoint is not None:
            self.view.checkpoint = checkpoint.name

    def say(self, line: str) -> None:
        """Write a line; on a terminal above the live view."""
        if self.shown:
            self.view.warnings += line.startswith(_WARNING)
            terminal.print_line(line)

    def close(self) -> None:
        """Take the live view away."""
        self._stack.close()

    def _remaining_s(self, step: int) -> float | None:
        done = step - self.done
        return (time.monotonic() - self.started) / done * (self.view.total_steps - step) if done > 0 else None

    def _render(self) -> object:
        self.view.elapsed_s = time.monotonic() - self.started
        self.view.remaining_s = self._remaining_s(self.view.step)
        return self.view.render()
