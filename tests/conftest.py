"""Shared by all tests: English messages, no network, and a way to launch real ranks."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit import secrets, terminal
from toolkit.messages import set_language

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options for the fault battery."""
    parser.addoption("--nightly", action="store_true", help="also the tests that take minutes each")
    parser.addoption("--faults", default="", help="only the faults with these identifiers, such as 'K1 K2'")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, and say in reports which fault a test puts in."""
    wanted = set(config.getoption("--faults").split())
    kept, left_out = [], []
    for item in items:
        faults = [name for mark in item.iter_markers("fault") for name in mark.args]
        if faults:
            item.user_properties.append(("fault", " ".join(faults)))
            text = getattr(getattr(item, "function", None), "__doc__", None) or ""
            item.user_properties.append(("text", text.split("\n")[0]))
        is_nightly = item.get_closest_marker("nightly") and not config.getoption("--nightly")
        (left_out if is_nightly or (wanted and not wanted & set(faults)) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """Pin the language of messages."""
    set_language("en")
    yield
    set_language("en")


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Leave variables, secrets and display as they were: commands that are called in this process change them."""
    environment, learned = dict(os.environ), set(secrets._learned)
    display, is_session = terminal._display, terminal._is_session
    yield
    terminal._display, terminal._is_session = display, is_session
    os.environ.clear()
    os.environ.update(environment)
    secrets._learned.clear()
    secrets._learned.update(learned)


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of the size that the test's parameter says, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
