"""Fixtures of this folder."""

from collections.abc import Iterator

import pytest
from cluster import HOSTS, Cluster, down, up
from shared import rows_file, straight  # noqa: F401


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, see scripts/fake_cluster; skipped, with the reason, where they may not be made."""
    found, reason = up(tmp_path_factory.mktemp("cluster") / "fake", len(HOSTS))
    if found is None:
        pytest.skip(reason)
    yield found
    down(found)
