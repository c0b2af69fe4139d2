"""Rules about `track`: what a tracker needs, before anything is loaded."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from toolkit.config.load import Loaded
from toolkit.config.places import fail, value_of
from toolkit.config.schema import TRACKERS, RunConfig
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.problems import raise_all

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "swanlab": "swanlab",
    "trackio": "trackio",
}
"""Tracker, which is also the name of its module -> what pip installs. A CSV file needs none."""
_NAMED = {"wandb": "project", "mlflow": "experiment", "swanlab": "project", "trackio": "project"}


def enabled_trackers(cfg: RunConfig) -> list[str]:
    """Return the trackers that are switched on."""
    return [name for name in TRACKERS if value_of(cfg, f"track.{name}.enabled")]


def check_track(loaded: Loaded) -> Iterator[ConfigError]:
    """Refuse names that are empty, and passwords in an address: they come from the environment.

    Yields:
        What does not hold.
    """
    for name in enabled_trackers(loaded.cfg):
        key = f"track.{name}.{_NAMED[name]}" if name in _NAMED else ""
        if key and not str(value_of(loaded.cfg, key)).strip():
            yield fail(loaded, key, tr("{key} must not be empty.", key=key))
    uri = loaded.cfg.track.mlflow.uri
    if "@" in urlsplit(uri).netloc:
        yield fail(
            loaded,
            "track.mlflow.uri",
            tr(
                "track.mlflow.uri holds a user or a password. Take them out and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment."
            ),
        )


def check_track_here(loaded: Loaded) -> None:
    """Refuse a tracker whose package is not installed on this machine. For rank 0 only: no other rank needs it.

    Raises:
        ConfigError: all such.
    """
    raise_all(
        fail(
            loaded,
            f"track.{name}.enabled",
            tr(
                "track.{name} needs the package {name}, which is not installed:  pip install {package}",
                name=name,
                package=PACKAGES[name],
            ),
        )
        for name in enabled_trackers(loaded.cfg)
        if name in PACKAGES and not _is_installed(name)
    )


def mlflow_folder(uri: str) -> Path | None:
    """Return the folder that an MLflow address means; None for a server or a database."""
    parts = urlsplit(uri)
    return Path(parts.path if parts.scheme == "file" else uri) if parts.scheme in ("", "file") else None


def _is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder of its name, as wandb leaves one, is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
