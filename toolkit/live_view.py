"""The live view of a terminal: what is shown at its bottom, with lines that are printed above it. It needs rich."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress as parts
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from toolkit import messages, terminal
from toolkit.messages import write_to_stdout

_shown: list[Callable[[], Any]] = []


def _write_above(line: str) -> None:
    """Write a line above the live view; the terminal wraps it, so that it can be copied whole."""
    live = terminal.live
    if live is None:  # it has just ended, in another thread
        write_to_stdout(line)
        return
    with live._lock:  # else its thread may draw between what erases a view and what draws it again (rich 15.0)
        live.console.print(Text(line), soft_wrap=True)


@contextmanager
def showing(view: Callable[[], Any]) -> Iterator[None]:
    """Keep a view at the bottom of the terminal; lines that are printed go above it.
    `view` returns what rich shows; it is called several times a second.
    """
    _shown.append(view)
    _follow()
    try:
        yield
    finally:
        _shown.remove(view)
        _follow()


def _rendered(view: Callable[[], Any]) -> Any:
    """Return what a view shows; what goes wrong in it must not end a run."""
    try:
        return view()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _follow() -> None:
    """Start the live view if there is something to show and it does not run, or stop it if there is nothing more."""
    if _shown and terminal.live is None:
        terminal.live = Live(
            get_renderable=lambda: Group(*map(_rendered, _shown)),
            # `display=live` also where rich itself would not see a terminal.
            console=Console(file=terminal.stream(), force_terminal=True),
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # a file that gets stderr goes on getting it
        )
        terminal.live.start()
        messages.console.write = _write_above
    elif not _shown and terminal.live is not None:
        messages.console.write = write_to_stdout
        live, terminal.live = terminal.live, None
        live.stop()


@contextmanager
def progress_bar(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of a `phase` in the live view at the bottom of the terminal."""
    count = (
        (parts.DownloadColumn(),) if unit == terminal.BYTES else (parts.MofNCompleteColumn(), parts.TextColumn(unit))
    )
    counted = (parts.BarColumn(), *count, parts.TimeRemainingColumn()) if total else ()
    title_column = parts.TextColumn("{task.description}")
    progress = parts.Progress(parts.SpinnerColumn(), title_column, *counted, parts.TimeElapsedColumn())
    # As markup, as rich would take brackets in a title for styles; None: how much there is, is unknown.
    task = progress.add_task(Text(title).markup, total=total or None)
    with showing(progress.get_renderable):
        yield lambda more: progress.update(task, advance=more)
