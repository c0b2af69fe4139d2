"""What rank 0 shows while training: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from toolkit.messages import tr

WORTH_TELLING = 0.05
"""Share of time, or of tokens, that a line mentions."""
_GIB = 1 << 30


class Progress:
    """One line of live state. Ranks other than 0 make none (`shown=False`)."""

    def __init__(
        self, total_steps: int, shown: bool, done: int = 0, on_first_step: Callable[[], None] = lambda: None
    ) -> None:
        """Start.

        Args:
            total_steps: optimizer steps of the run.
            shown: whether this rank speaks.
            done: steps that an earlier session has done.
            on_first_step: called once this session has done a step, on the rank that speaks.
        """
        self.total_steps = total_steps
        self.shown = shown
        self.done = done
        self.on_first_step: Callable[[], None] | None = on_first_step if shown else None
        self.started = time.monotonic()
        with_bar = shown and sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=done, unit="step", dynamic_ncols=True) if with_bar else None

    def advance(self) -> None:
        """One step is done."""
        if self.on_first_step:
            self.on_first_step()
            self.on_first_step = None
        if self.bar is not None:
            self.bar.update(1)

    def back_to(self, step: int) -> None:
        """The steps after this one are done again."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def show(self, row: dict[str, float]) -> None:
        """Show a logged step."""
        if not self.shown:
            return
        figures = "loss {loss:.4f}  lr {lr:.2e}  grad-norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s".format(**row)
        figures += "".join(f"  {part}" for part in _speed(row))
        if row.get("skipped_steps"):
            figures += "  " + tr("skipped {count}", count=int(row["skipped_steps"]))
        if "loss_scale" in row:
            figures += f"  loss scale {row['loss_scale']:g}"
        if self.bar is not None:
            self.bar.set_postfix_str(figures)
            return
        step = int(row["step"])
        remaining_s = (time.monotonic() - self.started) / max(step - self.done, 1) * (self.total_steps - step)
        self.say(f"step {step}/{self.total_steps}  {figures}  ETA {_clock(remaining_s)}")

    def say(self, line: str) -> None:
        """Write a line beside the bar."""
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.write(line, file=sys.stdout)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()


def _speed(row: dict[str, float]) -> list[str]:
    """Return what a line says of speed and memory; what costs next to nothing is left to metrics.jsonl."""
    parts = []
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.0%}")
    elif "mfu_matmul" in row:
        parts.append(tr("{share} of matmul", share=f"{row['mfu_matmul']:.0%}"))
    if row.get("data_wait_fraction", 0) >= WORTH_TELLING:
        parts.append(tr("waits {share} for data", share=f"{row['data_wait_fraction']:.0%}"))
    if row.get("padding_fraction", 0) >= WORTH_TELLING:
        parts.append(tr("{share} padding", share=f"{row['padding_fraction']:.0%}"))
    if "communication_fraction" in row:
        parts.append(tr("{share} communication", share=f"{row['communication_fraction']:.0%}"))
    peak = row.get("device_memory_peak_bytes", row.get("host_memory_peak_bytes"))
    if peak and "planned_memory_bytes" in row:
        planned = row["planned_memory_bytes"] / _GIB
        parts.append(tr("memory {peak} of {planned} GiB planned", peak=f"{peak / _GIB:.1f}", planned=f"{planned:.1f}"))
    elif peak:
        parts.append(tr("memory {peak} GiB", peak=f"{peak / _GIB:.1f}"))
    return parts


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
