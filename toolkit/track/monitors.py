"""Whether what a run measures can be written: asked before the first step, without writing anything."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from toolkit.errors import TrackError
from toolkit.messages import tr


def try_monitors(monitor: Any, metrics: Path) -> None:
    """See whether DeepSpeed's monitors and metrics.jsonl can be written to. For rank 0 only.

    Args:
        monitor: of the engine.
        metrics: the file metrics.jsonl of the run.

    Raises:
        TrackError: one cannot.
    """
    _try("run.dir", metrics.parent)
    if metrics.exists():
        try:
            open(metrics, "ab").close()
        except OSError as error:
            raise _refused("run.dir", metrics, error) from error
    if monitor.csv_monitor is not None:
        _try("track.csv.output_path", Path(monitor.csv_monitor.log_dir))
    if monitor.tb_monitor is not None:
        folder = Path(monitor.tb_monitor.summary_writer.log_dir)
        _try("track.tensorboard.output_path", folder)
        try:
            monitor.tb_monitor.flush()
        except OSError as error:
            raise _refused("track.tensorboard.output_path", folder, error) from error


def _try(key: str, folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise _refused(key, folder, error) from error


def _refused(key: str, path: Path, error: OSError) -> TrackError:
    return TrackError(
        tr(
            "{key}: cannot write to {folder}: {reason}. Choose another place.",
            key=key,
            folder=path,
            reason=error.strerror or error,
        )
    )
