"""Make a report: read the runs, write the page and the pictures."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.disk import grant, refuse_links
from toolkit.errors import ConfigError, TrackError
from toolkit.messages import current_language, set_language, tr
from toolkit.report import fonts, page
from toolkit.report.automatic import PAGE
from toolkit.report.drawings import NAMES, draw
from toolkit.report.folder import Run, read_run, told_apart
from toolkit.report.sweeps import unfolded

COMPARISON = "comparison.html"
_HEAD_BYTES = 2048


def make(paths: Sequence[Path], output: Path | None = None) -> tuple[Path, Path]:
    """Make a report of one run, or of several in one picture.

    Args:
        paths: folders of runs, or of sweeps, of which all runs are taken that have metrics.
        output: the page; None is report.html in the one folder, for several comparison.html here.

    Returns:
        The page; the folder of the pictures.

    Raises:
        RunFolderError: a folder is no run's, and no sweep's with metrics.
        ConfigError: a run is named twice, or something else is where the report is to be.
        TrackError: the report cannot be written.
    """
    folders = unfolded(paths)
    real = [path.resolve() for path in folders]
    if twice := [str(path) for path, one in zip(folders, real, strict=True) if real.count(one) > 1]:
        raise ConfigError(tr("{runs}: these are the same run. Name each once.", runs=", ".join(twice)))
    runs = [read_run(path) for path in real]
    told_apart(runs)
    if output is None:
        output = paths[0].resolve() / PAGE if len(paths) == 1 else Path(COMPARISON)
    output = output.absolute()
    images = output.with_suffix("")
    _check(output, images)
    try:
        _write(runs, output, images)
    except OSError as error:
        raise TrackError(
            tr(
                "the report {file} cannot be written: {reason}. Choose another place with output=FILE.html.",
                file=error.filename or output,
                reason=error.strerror or error,
            )
        ) from error
    return output, images


def _check(output: Path, images: Path) -> None:
    """Refuse to write over what is no report.

    Raises:
        ConfigError: something else is there.
    """
    if output.suffix != ".html":
        raise ConfigError(tr("output = {file} must end in .html.", file=output))
    is_ours = _is_report(output)
    if os.path.lexists(output) and not is_ours:
        raise ConfigError(
            tr("{file} is there already and is no report; it is not touched. Choose another output.", file=output)
        )
    if os.path.lexists(images) and not is_ours and not (images.is_dir() and not any(images.iterdir())):
        raise ConfigError(
            tr(
                "{folder} is there already and is not of a report; it is not touched. Choose another output.",
                folder=images,
            )
        )
    refuse_links(images, ConfigError)


def _is_report(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return page.GENERATOR.encode() in file.read(_HEAD_BYTES)
    return False


def _write(runs: Sequence[Run], output: Path, images: Path) -> None:
    drawings = draw(runs)
    _replace(output, page.render(runs, drawings, images.name).encode("utf-8", errors="backslashreplace"))
    language = current_language()
    if language == "zh" and not fonts.has_chinese():  # the letters would be boxes
        set_language("en")
        drawings = draw(runs)
    try:
        images.mkdir(exist_ok=True)
        names = set()
        for drawing in (one for of_section in drawings.values() for one in of_section):
            names.add(f"{drawing.name}.png")
            _replace(images / f"{drawing.name}.png", page.png(drawing))
    finally:
        set_language(language)
    for name in {f"{name}.png" for name in NAMES} - names:  # of a report with other charts
        (images / name).unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        grant(Path(name))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
