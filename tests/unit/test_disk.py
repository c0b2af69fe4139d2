"""Files with the user's umask, and no writing through somebody else's links."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.disk import check_no_symlinks, set_permissions, umask
from toolkit.messages import DataError, RunFolderError
from toolkit.tasks.language_data import build_encoder
from toolkit.train.run_dir import choose_run_dir
from toolkit.train.run_lock import release_run_dir

SOMEBODY = 12345


@pytest.fixture(params=["me", "another user"])
def link_owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Links belong to this user, or to another: given away where we are root, else by being somebody else ourselves."""
    mine = os.getuid()
    owner = mine if request.param == "me" else SOMEBODY
    if owner != mine and mine:
        monkeypatch.setattr(os, "getuid", lambda: SOMEBODY)
        owner = mine
    yield owner
    release_run_dir()


def is_foreign(owner: int) -> bool:
    """Whether somebody else's links are to be refused."""
    return owner not in (0, os.getuid())


def link(path: Path, target: Path, owner: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    if owner != path.lstat().st_uid:
        os.lchown(path, owner, -1)


def config(folder: Path) -> RunConfig:
    overrides = ["recipe=quickstart", f"run.dir={folder}/runs", "run.name=mine", f"prepare.dir={folder}/cache"]
    return load([*overrides, "checkpoint.every=1"]).cfg


LINKS = ["run.lock", "metrics.jsonl", "stop", "logs/rank_0.log", "checkpoints/latest", "checkpoints/latest.tmp", "logs"]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_folder_with_a_link(name: str, link_owner: int, tmp_path: Path) -> None:
    cfg, folder, treasure = config(tmp_path), tmp_path / "runs" / "mine", tmp_path / "treasure"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    treasure.mkdir() if name == "logs" else treasure.write_text("mine")
    link(folder / name, treasure, link_owner)
    if is_foreign(link_owner):
        with pytest.raises(RunFolderError) as caught:
            choose_run_dir(cfg)
        assert str(caught.value).startswith(f"{folder / name} is a symbolic link that belongs to ")
        assert f" would change {treasure}. Remove it" in str(caught.value)
        assert treasure.is_dir() or treasure.read_text() == "mine"
        assert not (folder / "logs" / "starts.jsonl").exists()
    else:
        assert choose_run_dir(cfg).folder == folder


@pytest.mark.parametrize("name", ["runs", "runs/mine"])
def test_a_place_for_runs_that_is_a_link(name: str, link_owner: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link(tmp_path / name, tmp_path / "elsewhere", link_owner)
    if is_foreign(link_owner):
        with pytest.raises(RunFolderError, match="is a symbolic link that belongs to"):
            choose_run_dir(config(tmp_path))
        assert not list((tmp_path / "elsewhere").iterdir())
    elif name == "runs":
        assert choose_run_dir(config(tmp_path)).folder == tmp_path / "runs" / "mine"


@pytest.mark.parametrize("name", ["cache", "cache/stores", "cache/stores/x.lock", "cache/bad_rows.jsonl"])
def test_prepared_data_behind_a_link(name: str, link_owner: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link(tmp_path / name, tmp_path / "elsewhere", link_owner)
    link(tmp_path / "cache" / "not-ours", tmp_path / "elsewhere", link_owner)
    if is_foreign(link_owner):
        with pytest.raises(DataError, match="is a symbolic link that belongs to"):
            build_encoder(config(tmp_path))
        assert name == "cache" or not list((tmp_path / "elsewhere").iterdir())
    else:
        check_no_symlinks(tmp_path / "cache", DataError)


@pytest.fixture(params=[0o002, 0o027, 0o077])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_private_files_get_what_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    assert umask() == mask
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "folder").chmod(0o2700)
    (tmp_path / "file").touch(mode=0o600)
    for path in (tmp_path / "folder", tmp_path / "file"):
        set_permissions(path)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o2777 & ~mask
