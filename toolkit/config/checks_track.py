"""Rules about `track`: what a tracker needs, before anything is loaded."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import get_value
from toolkit.errors import ConfigError
from toolkit.messages import tr

_NAMED = {"wandb": "project", "mlflow": "experiment", "swanlab": "project", "trackio": "project"}


def check_track(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Refuse names that are empty, and passwords in an address: they come from the environment.

    Yields:
        What does not hold.
    """
    for name in loaded.cfg.track.enabled:
        key = f"track.{name}.{_NAMED[name]}" if name in _NAMED else ""
        if key and not str(get_value(loaded.cfg, key)).strip():
            yield loaded.error(key, tr("{key} must not be empty.", key=key))
    uri = loaded.cfg.track.mlflow.uri
    if "@" in urlsplit(uri).netloc:
        yield loaded.error(
            "track.mlflow.uri",
            tr(
                "track.mlflow.uri holds a user or a password. Take them out and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment."
            ),
        )
