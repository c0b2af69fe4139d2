"""Unit tests build many small stores; none shares its lock file with another machine."""

import pytest

from toolkit.distributed import file_lock


@pytest.fixture(autouse=True)
def quick_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for signatures of other machines."""
    monkeypatch.setattr(file_lock, "_CLAIM_S", 0.0)
