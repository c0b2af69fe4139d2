"""Whether what a run measures can be written: asked before the first step, and nothing is left behind."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from toolkit.config.preflight import mlflow_folder
from toolkit.config.schema import TrackConfig
from toolkit.errors import TrackError
from toolkit.messages import tr


def check_writable(track: TrackConfig, folder: Path) -> None:
    """See whether metrics.jsonl can be written, and what trackers write into folders of the user's choice.

    Of what lies elsewhere the trackers themselves tell, and end nothing. For rank 0 only.

    Raises:
        TrackError: it cannot.
    """
    _try("run.dir", folder)
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        try:
            open(metrics, "ab").close()
        except OSError as error:
            raise _refused("run.dir", metrics, error) from error
    if track.tensorboard.enabled and track.tensorboard.dir:
        _try("track.tensorboard.dir", Path(track.tensorboard.dir))
    if track.mlflow.enabled:
        uri = track.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri and (place := mlflow_folder(uri)):
            _try("track.mlflow.uri", place)


def _try(key: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
