"""Locks of builds that died: told, not waited for."""

import os
import re
import time
from pathlib import Path

import pytest

from toolkit.config import native_ops
from toolkit.config.native_ops import check_build_locks, extensions_dir
from toolkit.messages import LaunchError


@pytest.fixture(autouse=True)
def polling_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch whose builder waits for the end of a file, as those up to 2.13 do."""
    monkeypatch.setattr(
        native_ops, "torch_file", lambda name: "baton = FileBaton(os.path.join(build_directory, 'lock'))"
    )


def lock(root: Path, age_s: float) -> Path:
    """Make a lock of an age and return it."""
    path = root / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.mark.fault("H4")
def test_a_lock_that_nobody_holds_is_told(tmp_path: Path) -> None:
    path = lock(tmp_path, 2000)
    with pytest.raises(LaunchError, match=rf"{path} was left 33 minutes ago .* rm {path}"):
        check_build_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert path.exists()
    path.unlink()
    check_build_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})


def test_the_default_place_is_searched(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = lock(extensions_dir(environ), 2000)
    assert path.is_relative_to(tmp_path / "torch_extensions")
    with pytest.raises(LaunchError, match=re.escape(str(path))):
        check_build_locks(environ)


def test_a_build_in_progress_is_left_alone(tmp_path: Path) -> None:
    path = lock(tmp_path, 2000)
    builder = tmp_path / "proc" / "1234"
    builder.mkdir(parents=True)
    (builder / "cwd").symlink_to(path.parent)
    check_build_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, proc=tmp_path / "proc")
    os.utime(path)
    check_build_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})


def test_a_file_that_pytorch_locks_and_leaves_is_no_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since torch 2.14 each build leaves its file there, which nothing waits for."""
    monkeypatch.setattr(native_ops, "torch_file", lambda name: "with FileLock(os.path.join(build_directory, 'lock')):")
    lock(tmp_path, 2000)
    check_build_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})


def test_the_builder_of_the_installed_pytorch_is_known() -> None:
    """One of both ways: a third would have to be looked at."""
    from toolkit.config.devices import torch_file

    source = torch_file("torch/utils/cpp_extension.py")
    assert ("FileBaton(" in source) != ("FileLock(os.path.join(build_directory, 'lock'))" in source)
