"""Locks of builds that died: told, not waited for."""

import os
import re
import time
from pathlib import Path

import pytest

from toolkit.config.native_ops import check_build_locks, extensions_dir
from toolkit.messages import LaunchError


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
