"""Rules are checked as for a machine with GPUs; what depends on the device has tests of its own."""

import pytest


@pytest.fixture(autouse=True)
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks' device be a GPU, as far as the config knows."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
