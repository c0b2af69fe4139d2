"""Folders for what a run measures that cannot be written to."""

from pathlib import Path

import pytest

from toolkit.config.schema import TrackConfig
from toolkit.messages import TrackError
from toolkit.train.dry_run import check_writable


def test_a_folder_of_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands in the way of each."""
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    place = str(in_the_way / "folder")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track = TrackConfig()
    track.tensorboard.dir = track.mlflow.uri = place
    check_writable(track, tmp_path)
    track.mlflow.enabled = True
    with pytest.raises(TrackError, match=f"track.mlflow.uri: cannot write to {place}: Not a directory. Choose another"):
        check_writable(track, tmp_path)
    track.tensorboard.enabled = True
    with pytest.raises(TrackError, match=f"track.tensorboard.dir: cannot write to {place}: Not a directory"):
        check_writable(track, tmp_path)
    track.tensorboard.dir, track.mlflow.uri = str(tmp_path / "new"), "http://127.0.0.1:9"
    check_writable(track, tmp_path)
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrackError, match=r"run.dir: cannot write to .*metrics.jsonl: Is a directory"):
        check_writable(track, tmp_path)
