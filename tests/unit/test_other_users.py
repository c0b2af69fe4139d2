"""What is told of files of another user: a shared cache, ops, runs. Root may do all, so that is acted."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import paths
from toolkit.config.load import load
from toolkit.data.preview import BRACKETS, bad_step_lines
from toolkit.engine import ops
from toolkit.export.write import cannot_write
from toolkit.messages import LaunchError
from toolkit.train import settle


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path, denied: int) -> None:
    """Let this user not have these rights to a folder and what is below it."""
    real = os.access

    def access(path: Any, mode: int, **options: Any) -> bool:
        is_below = Path(path).is_relative_to(folder)
        return not (is_below and mode & denied) and real(path, mode, **options)

    monkeypatch.setattr(os, "access", access)


def refusals(cache: Path) -> list[str]:
    loaded = load(["recipe=quickstart", f"prepare.dir={cache}"])
    return [str(error) for error in paths._prepare_dir(loaded)]


def test_a_cache_that_may_only_be_read_is_used_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusals(tmp_path / "new" / "cache") == []
    forbid(monkeypatch, tmp_path, os.W_OK)
    [told] = refusals(tmp_path / "cache")
    assert f"prepare.dir = {tmp_path}/cache: {tmp_path} cannot be used by this user." in told
    (tmp_path / "cache" / "stores").mkdir(parents=True)
    assert refusals(tmp_path / "cache") == []
    forbid(monkeypatch, tmp_path / "cache", os.R_OK)
    assert refusals(tmp_path / "cache")


def test_a_source_that_cannot_be_read_is_not_an_export_that_cannot_be_written(tmp_path: Path) -> None:
    def told(file: Path) -> str:
        return str(cannot_write(tmp_path / "out", PermissionError(errno.EACCES, "Permission denied", str(file))))

    assert told(tmp_path / "run" / "config.json").startswith(f"{tmp_path}/run/config.json: Permission denied. ")
    for mine in (tmp_path / "out" / "a", tmp_path / ".out.abc.tmp" / "a"):
        assert told(mine).startswith(f"cannot write the export to {tmp_path}/out: ")


def test_samples_that_cannot_be_read_are_no_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bad-step-1.jsonl"
    file.write_text("{}\n")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError):
        bad_step_lines(file, 1, BRACKETS)


def test_a_folder_of_ops_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(settle.process_group, "gather", lambda reason: [reason])
    monkeypatch.setattr(ops, "load_ops", lambda names: "cpu_adam: [Errno 13] Permission denied")
    forbid(monkeypatch, tmp_path, os.W_OK)
    cfg = load(["recipe=quickstart", "zero=stage2_offload", "optim.torch=false"]).cfg
    with pytest.raises(LaunchError, match="TORCH_EXTENSIONS_DIR name a directory of yours") as error:
        settle.build_ops(cfg, cfg)
    assert "apt install" not in str(error.value) and str(tmp_path) in str(error.value)
