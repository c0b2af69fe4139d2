"""Checkpoints on disk: whole or passed over, never half-made, never a way out of their folder, never code."""

import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from toolkit import disk, messages
from toolkit.checkpoint import directory, engine_state, fragment_reader, fragments, intact, restore, state_files
from toolkit.checkpoint.directory import RunState, record_file, write_manifest
from toolkit.checkpoint.fragments import Fragment
from toolkit.checkpoint.intact import manifest_problems, read_run_state as read_state
from toolkit.checkpoint.state_files import Files, HostCopies
from toolkit.cli import main
from toolkit.config import paths
from toolkit.config.dotted_keys import influence_of
from toolkit.config.load import load, to_dict
from toolkit.config.schema import FREE, CheckpointConfig, Influence, RunConfig
from toolkit.distributed import process_group
from toolkit.engine.parameters import has_finite_states
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, RunFolderError
from toolkit.train import changes, checkpointer, resume, rotation as rotation_module, run_dir, run_lock
from toolkit.train.checkpointer import Checkpointer, _Pending
from toolkit.train.rotation import Rotation
from toolkit.train.saving import Saving


def checkpoint(folder: Path, step: int) -> Path:
    """Make a small checkpoint under its name."""
    made = folder / directory.checkpoint_name(step)
    made.mkdir(parents=True)
    torch.save({"weights": torch.arange(1000.0), "step": step}, made / "model.pt")
    RunState(step=step).write(made)
    write_manifest(made, {path.name: record_file(path) for path in sorted(made.iterdir())}, {"step": step})
    return made


def test_a_whole_one_has_no_problems(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 3)
    assert manifest_problems(made) == []
    assert read_state(made).step == 3


@pytest.mark.fault("C2")
@pytest.mark.parametrize("file", ["model.pt", "state.json"])
def test_every_flipped_bit_is_found(tmp_path: Path, file: str) -> None:
    path = checkpoint(tmp_path, 3) / file
    whole = path.read_bytes()
    for place in random.Random(1).sample(range(len(whole)), 20):
        content = bytearray(whole)
        content[place] ^= 1 << (place % 8)
        path.write_bytes(content)
        assert manifest_problems(path.parent) == [f"{file}: its content is not what was written"], place
    path.write_bytes(whole)
    assert manifest_problems(path.parent) == []


@pytest.mark.fault("C1")
@pytest.mark.parametrize("size", [0, 100])
def test_cut_off_and_missing_files_are_found(tmp_path: Path, size: int) -> None:
    path = checkpoint(tmp_path, 3) / "model.pt"
    whole = path.stat().st_size
    os.truncate(path, size)
    assert manifest_problems(path.parent) == [f"model.pt: {size} bytes instead of {whole}"]
    path.unlink()
    assert manifest_problems(path.parent) == ["model.pt: No such file or directory"]


def test_foreign_files_are_found(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 3)
    (made / "notes.md").write_text("nobody loads this")
    assert manifest_problems(made) == []
    torch.save({}, made / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert manifest_problems(made) == ["zero_pp_rank_0_mp_rank_00_optim_states.pt: the manifest does not know it"]


@pytest.mark.fault("C3", "S1")
@pytest.mark.parametrize("name", ["../model.pt", "/etc/passwd", "a/../../model.pt", "", "linked.pt", "away/model.pt"])
def test_no_path_leads_out(tmp_path: Path, name: str) -> None:
    made, outside = checkpoint(tmp_path, 3), checkpoint(tmp_path, 4)
    (made / "linked.pt").symlink_to(outside / "model.pt")
    (made / "away").symlink_to(outside)
    found = json.loads((made / "manifest.json").read_text())
    found["files"][name] = found["files"]["model.pt"]
    (made / "manifest.json").write_text(json.dumps(found))
    assert f"{name}: this path leads out of the checkpoint" in manifest_problems(made)


@pytest.mark.fault("C3")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"format": "2", "files": {}}', '{"files": {"a": 1}}'])
def test_a_broken_manifest_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    made = checkpoint(tmp_path, 3)
    (made / "manifest.json").write_text(text)
    assert len(manifest_problems(made)) >= 1
    (made / "manifest.json").unlink()
    assert manifest_problems(made) == [f"{made} is not a complete checkpoint: No such file or directory."]


def test_the_newest_whole_one_is_found(tmp_path: Path, said: list[str]) -> None:
    for step in (2, 10, 9):
        checkpoint(tmp_path, step)
    os.utime(tmp_path / "step-2", (2e9, 2e9))  # a clock that jumped
    (tmp_path / "step-11.tmp").mkdir()
    (tmp_path / "step-x").mkdir()
    assert intact.newest_intact(tmp_path) == tmp_path / "step-10"
    assert not said
    os.truncate(tmp_path / "step-10" / "model.pt", 50)
    (tmp_path / "step-9" / "manifest.json").unlink()
    assert intact.newest_intact(tmp_path) == tmp_path / "step-2"
    assert [line.split(" is damaged")[0] for line in said] == [
        f"WARNING: the checkpoint {tmp_path}/step-10",
        f"WARNING: the checkpoint {tmp_path}/step-9",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step-2", "step-9.damaged", "step-10.damaged", "step-11.tmp", "step-x")
    }
    assert intact.newest_intact(tmp_path / "nowhere") is None


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 99) -> None:
    """Let a file fail with an error so many times."""
    opened, left = io.open, [times]

    def closed(file: Any, *args: Any, **options: Any) -> Any:
        if str(file).endswith(name) and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return opened(file, *args, **options)

    monkeypatch.setattr(io, "open", closed)
    monkeypatch.setattr("builtins.open", closed)


@pytest.mark.parametrize("denied", ["manifest.json", "model.pt"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_a_checkpoint_that_may_not_be_read_is_not_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, denied: str, said: list[str]
) -> None:
    """Another user's, or one whose file server does not answer, may be whole: to rename it would hide it."""
    made = checkpoint(tmp_path, 4)
    unreadable(monkeypatch, denied, code)
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        intact.newest_intact(tmp_path)
    assert raised.value.filename == str(made / denied)
    with pytest.raises(CheckpointError, match=os.strerror(code)):  # told without a traceback
        process_group.on_rank0(lambda: intact.newest_intact(tmp_path))
    assert made.is_dir() and not said


@pytest.mark.parametrize("denied", ["manifest.json", "model.pt"])
@pytest.mark.parametrize(("times", "found"), [(1, "step-4"), (99, "step-3")])
def test_a_file_that_cannot_be_read_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str, times: int, found: str
) -> None:
    """A server's client that was put out gives the error of a bad sector, which nobody need wait for."""
    monkeypatch.setattr(intact, "_PAUSE_S", 0.0)
    for step in (3, 4):
        checkpoint(tmp_path, step)
    unreadable(monkeypatch, f"step-4/{denied}", errno.EIO, times)
    assert intact.newest_intact(tmp_path) == tmp_path / found
    assert (tmp_path / "step-4").is_dir() == (times == 1)


def test_publishing_names_the_newest_and_removes_the_oldest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made = checkpoint(tmp_path / "elsewhere", step)
        temporary = tmp_path / f"step-{step}.tmp"
        made.rename(temporary)
        directory.publish_checkpoint(temporary, tmp_path / f"step-{step}")
        assert (tmp_path / "latest").read_text() == f"step-{step}\n"
        directory.remove_old(tmp_path, 2, also={tmp_path / "step-1"} if step == 3 else ())
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-3", "step-2", "step-1"]
    directory.remove_old(tmp_path, 1)
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-3"]
    directory.remove_old(tmp_path, 0)
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-3"]
    # A step that was there already is kept beside.
    checkpoint(tmp_path / "elsewhere", 3).rename(tmp_path / "step-3.tmp")
    directory.publish_checkpoint(tmp_path / "step-3.tmp", tmp_path / "step-3")
    assert (tmp_path / "step-3.replaced").is_dir()
    (tmp_path / "step-9.tmp").mkdir()
    intact.discard_unfinished(tmp_path)
    assert (tmp_path / "step-9.tmp.trash").is_dir()
    directory.empty_trash(tmp_path)
    assert not [*tmp_path.glob("*.tmp"), *tmp_path.glob("*.trash")]


def test_a_budget_removes_the_oldest_but_never_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    size = sum(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
    directory.remove_old(tmp_path, 0, also={tmp_path / "step-1"}, most_bytes=2.5 * size)
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-4", "step-3", "step-1"]
    directory.remove_old(tmp_path, 0, most_bytes=1)
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-4"]


def names(folder: Path) -> list[str]:
    """Return what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_weights_alone_are_no_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint(tmp_path, step)
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").rename(tmp_path / f"step-{step}-weights")
    (tmp_path / "step-x-weights").mkdir()
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-10"]
    assert [path.name for path in directory.weights_only(tmp_path)] == [
        "step-3-weights",
        "step-2-weights",
        "step-1-weights",
    ]
    assert intact.newest_intact(tmp_path) == tmp_path / "step-10"
    (tmp_path / ".step-4-weights.abc.tmp").mkdir()
    intact.discard_unfinished(tmp_path)
    directory.empty_trash(tmp_path)
    assert not list(tmp_path.glob(".step-4-weights*"))
    size = sum(path.stat().st_size for path in (tmp_path / "step-10").iterdir())
    directory.remove_old(tmp_path, 1)
    assert len(names(tmp_path)) == 5, "0 makes none and removes none"
    directory.remove_old(tmp_path, 1, most_bytes=3.5 * size)
    assert names(tmp_path) == ["step-10", "step-2-weights", "step-3-weights", "step-x-weights"]
    directory.remove_old(tmp_path, 1, keep_weights=1)
    assert names(tmp_path) == ["step-10", "step-3-weights", "step-x-weights"]
    directory.remove_old(tmp_path, 1, most_bytes=1)
    assert names(tmp_path) == ["step-10", "step-x-weights"]


@pytest.mark.parametrize(("keep", "left"), [(-1, [1, 2, 3]), (1, [3]), (2, [2, 3])])
def test_only_weights_stay_of_what_goes(
    keep: int, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 3, 10):
        checkpoint(tmp_path, step)
    (tmp_path / "step-1-weights").mkdir()
    made: list[str] = []

    def export(source: Path, target: Path) -> None:
        assert source.is_dir(), "it goes only afterwards"
        made.append(source.name)
        target.mkdir()

    monkeypatch.setattr(rotation_module, "export_in_background", export)
    rotation = Rotation(tmp_path, CheckpointConfig(keep=1, keep_weights=keep))
    rotation.request([])
    assert not rotation.is_busy(30)
    assert made == [f"step-{step}" for step in (2, 3) if step in left]
    assert names(tmp_path) == sorted([*(f"step-{step}-weights" for step in left), "step-10"])


def test_without_room_for_its_weights_a_checkpoint_stays(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)

    def export(source: Path, target: Path) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(rotation_module, "export_in_background", export)
    rotation = Rotation(tmp_path, CheckpointConfig(keep=1, keep_weights=1))
    rotation.request([])
    assert not rotation.is_busy(30)
    assert names(tmp_path) == ["step-2", "step-3"], "of the older one nothing is wanted"
    assert said == [
        "WARNING: the weights of the checkpoint step-2 could not be exported: No space left on device. The "
        "checkpoint is kept, and the export is retried at the next save."
    ]


def test_what_cannot_be_removed_keeps_nothing_else_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """A file that another process holds open on NFS, or that may not be deleted: once, or in the trash for ever."""
    for step in (2, 3, 4):
        checkpoint(tmp_path, step)
    (tmp_path / "step-1.trash").mkdir()
    real, stuck = shutil.rmtree, ["step-1.trash", "step-3.trash"]

    def rmtree(path: Path) -> None:
        if path.name in stuck:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        real(path)

    monkeypatch.setattr(directory.shutil, "rmtree", rmtree)
    rotation = Rotation(tmp_path, CheckpointConfig(keep=1))
    for left in (["step-1.trash", "step-3.trash", "step-4"], ["step-1.trash", "step-4"]):
        rotation.request([])
        assert not rotation.is_busy(30)
        assert names(tmp_path) == left
        stuck.pop()
    assert said == ["WARNING: older checkpoints could not be removed: Directory not empty."] * 2


def saver_in(folder: Path, config: CheckpointConfig) -> Checkpointer:
    """Return a saver without an engine."""
    saver = Checkpointer.__new__(Checkpointer)
    saver.folder, saver.config, saver.keep_best = folder, config, ""
    saver.newest = saver.good = saver._pending = saver._rated = None
    saver.failed, saver.no_step_follows, saver.ruin = False, False, ""
    saver._last_bytes, saver._probe_s, saver._probed_at, saver.patience_s = 1, 0.0, 0.0, 30.0
    saver._rotation = Rotation(folder, config)
    return saver


def save(saver: Checkpointer, step: int) -> None:
    """Begin a save, and let it be proven."""
    saver.finish()
    folder = saver.folder / f"step-{step}.tmp"
    folder.mkdir()
    pending = _Pending(step, folder, Files(), [])
    pending.other_files.append(RunState(step=step).write(folder))
    pending.thread.start()
    pending.wait()
    saver._pending = pending


def test_a_save_never_waits_for_what_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """And what is half removed when a process dies is no checkpoint: the next start removes the rest."""
    begun, may_go_on, real = threading.Event(), threading.Event(), shutil.rmtree

    def slow(path: Path, *more: Any) -> None:
        next(file for file in Path(path).iterdir() if file.name != directory.MANIFEST).unlink()
        begun.set()
        assert may_go_on.wait(60)
        real(path)

    saver = saver_in(tmp_path, CheckpointConfig(keep=1))
    for step in (1, 2):
        save(saver, step)
        saver.note_good_step()
        saver.finish()
        monkeypatch.setattr(directory.shutil, "rmtree", slow)
    assert begun.wait(30)
    save(saver, 3)
    saver.note_good_step()
    saver.finish()
    assert saver._rotation.is_busy()
    assert [path.name for path in directory.published_checkpoints(tmp_path)] == ["step-3", "step-2"]
    assert (tmp_path / "step-1.trash").is_dir()
    assert intact.newest_intact(tmp_path) == tmp_path / "step-3"

    again = Rotation(tmp_path, CheckpointConfig(keep=1))
    monkeypatch.setattr(directory.shutil, "rmtree", real)
    again.request()
    assert not again.is_busy(30)
    assert names(tmp_path) == ["good", "latest", "step-2", "step-3"], "as another process would"
    (tmp_path / "step-1.trash").mkdir()  # for the first one, which still removes it
    may_go_on.set()
    assert not saver._rotation.is_busy(30)
    assert names(tmp_path) == ["good", "latest", "step-3"]
    assert not said


def test_a_checkpoint_goes_only_after_a_good_step_followed_a_newer_one(tmp_path: Path) -> None:
    """With keep=1 there are two until then; and an evaluation of its step says as much."""
    saver = saver_in(tmp_path, CheckpointConfig(keep=1))

    def kept() -> list[str]:
        assert not saver._rotation.is_busy(30)
        return [path.name for path in directory.published_checkpoints(tmp_path)]

    save(saver, 1)
    saver.note_good_step()
    save(saver, 2)
    saver.finish()  # no step has followed, or bad ones alone
    assert kept() == ["step-2", "step-1"]
    save(saver, 3)
    saver.finish()
    assert kept() == ["step-3", "step-1"], "the one in between is good for nothing"
    saver.note_good_step()
    assert kept() == ["step-3"]
    assert saver.good == tmp_path / "step-3"


def test_a_resumed_run_knows_the_checkpoint_that_a_good_step_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_files_of", mock.Mock())
    engine = mock.Mock(module=torch.nn.Linear(1, 1))

    def resumed() -> Path | None:
        return Checkpointer(engine, tmp_path, RunConfig(checkpoint=CheckpointConfig(keep=1)), mock.Mock()).good

    assert resumed() is None
    saver = saver_in(tmp_path, CheckpointConfig(keep=1))
    for step in (1, 2):
        save(saver, step)
        if step == 1:
            saver.note_good_step()
    saver.finish()  # and bad steps alone followed it, until the process was killed
    assert resumed() == tmp_path / "step-1"
    saver.note_good_step()
    assert resumed() == tmp_path / "step-2"
    intact.move_aside_after(tmp_path / "step-1")
    assert resumed() is None


def optimizer_with(value: float) -> torch.optim.Optimizer:
    """Return an optimizer that has made a step, with a value among its states."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"][1:] = value
    return optimizer


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_states_that_are_no_numbers_are_neither_saved_nor_resumed(
    value: float, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_in(tmp_path, CheckpointConfig())
    saver.described = mock.Mock(probe_ids=None)
    saver.engine = mock.Mock(basic_optimizer=optimizer_with(value), optimizer=None)
    saver.begin(RunState(step=3))
    assert saver.failed
    assert not list(tmp_path.iterdir())
    assert next(line for line in said if "step-3" in line).startswith(
        "WARNING: the checkpoint step-3 could not be saved: the optimizer's states hold NaN or Inf on rank 0. Earlier"
    )
    saved = tmp_path / "step-2"
    saved.mkdir()
    (saved / "engine.json").write_text("{}")
    fragments.write(fragments.content_of([fragment("a", torch.ones(6))]), saved / fragments.file_name(0))
    saver._held = mock.Mock()
    monkeypatch.setattr(restore, "restore", mock.Mock())
    monkeypatch.setattr(restore, "restore_counts", mock.Mock())
    with pytest.raises(
        CheckpointError, match=r"step-2 cannot be resumed: the optimizer's states hold NaN or Inf on ra"
    ):
        saver.load(tmp_path / "step-2")
    saver.engine.basic_optimizer = optimizer_with(3e38)  # two of them have a sum that is none
    assert has_finite_states(saver.engine)
    saver.load(tmp_path / "step-2")
    saver.engine.optimizer = mock.Mock(backup_optimizer=optimizer_with(value))
    assert not has_finite_states(saver.engine), "of what is updated on the GPU while the rest is offloaded"


def test_a_save_of_ruined_weights_is_rejected(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    saver = saver_in(tmp_path, CheckpointConfig())
    saver.described = mock.Mock(probe_ids=torch.zeros(1, 2))
    saver.engine = mock.Mock()
    saver._probe = lambda: mock.Mock(logits=torch.tensor([1.0, math.nan]))  # type: ignore[method-assign]
    saver.begin(RunState(step=3))
    assert saver.failed and "logits that are NaN" in saver.ruin
    assert not list(tmp_path.iterdir())
    assert said == [
        "WARNING: the checkpoint step-3 could not be saved: the weights give logits that are NaN or Inf, an update has "
        "ruined them. Earlier ones are untouched, and training continues. It is retried soon."
    ]


@pytest.mark.parametrize("is_rescued", [False, True])
def test_the_last_save_is_not_said_to_be_retried(
    is_rescued: bool, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_in(tmp_path / "checkpoints", CheckpointConfig())
    monkeypatch.setattr(saver, "_make_room", lambda _: "Read-only file system")
    saver.described = mock.Mock(probe_ids=None)
    run = mock.Mock(checkpointer=saver, folder=tmp_path / "run", hooks=[], cfg=mock.Mock(checkpoint=saver.config))
    monkeypatch.setattr("toolkit.distributed.failure.watch_failures", lambda _: None)
    saving = Saving(run, mock.Mock())
    if is_rescued:
        error = saving.rescue(RunState(step=3))
        assert "is saved" not in str(error)
    else:
        saver.no_step_follows = True  # as the loop sets it
        saving.save(RunState(step=3), last=True)
        with pytest.raises(CheckpointError, match=r"could not be saved; see the warning above\. Earlier ones are unt"):
            saving.publish_last(3, is_saved=True)
    assert said[0] == "WARNING: the checkpoint step-3 could not be saved: Read-only file system."


def test_what_was_written_is_proven(tmp_path: Path) -> None:
    path = tmp_path / fragments.file_name(0)
    fragments.write(fragments.content_of([fragment("a", torch.arange(6.0)), fragment("b", torch.arange(6.0))]), path)
    whole = path.read_bytes()
    expected = directory.FileRecord(len(whole), hashlib.sha256(whole).hexdigest())
    assert record_file(path) == expected
    data = directory.read_header(path)[1]
    for place in (data, data + 47, data + 50, 3, 30):  # the tensors, their checksums, the header
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(OSError, match=re.escape(path.name)):
            record_file(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=re.escape(path.name)):
        record_file(path)


def test_a_saved_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its checksums and its hash; a file server feels that with each save."""
    path, read = tmp_path / fragments.file_name(0), [0]
    fragments.write(fragments.content_of([fragment("a", torch.arange(500_000.0))]), path)

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            size = super().readinto(buffer)
            read[0] += size or 0
            return size

    monkeypatch.setattr(directory, "open", lambda file, mode: io.BufferedReader(Counted(file, mode)), raising=False)
    record_file(path)
    assert 1 <= read[0] / path.stat().st_size < 1.1


def fragment(name: str, value: torch.Tensor, place: int = 0, **states: torch.Tensor) -> Fragment:
    """Return a stretch of a parameter of six numbers in two rows, with an Adam's count."""
    return Fragment(name, (2, 3), place, torch.bfloat16, values={"weight": value, **states}, numbers={"step": 7.0})


def test_whoever_reads_takes_what_it_needs_from_all_ranks(tmp_path: Path) -> None:
    whole, moment = torch.arange(6.0), torch.arange(6.0) / 3
    for rank, (begin, end) in enumerate([(0, 4), (4, 6)]):
        one = fragment("a.weight", whole[begin:end], begin, exp_avg=moment[begin:end])
        fragments.write(fragments.content_of([one]), tmp_path / fragments.file_name(rank))
    found = fragment_reader.Fragments(tmp_path)
    assert found.names == ["a.weight"]
    assert (found.states("a.weight"), found.numbers("a.weight")) == ({"exp_avg"}, {"step": 7.0})
    assert found.read("a.weight", "exp_avg", 3, 2).equal(moment[3:5]), "over the end of a file"
    assert found.whole("a.weight").equal(whole.view(2, 3))
    [(name, value)] = fragment_reader.iter_weights(tmp_path)
    assert name == "a.weight" and value.equal(whole.view(2, 3).bfloat16())
    assert load_file(tmp_path / fragments.file_name(0))["exp_avg:a.weight"].equal(moment[:4]), "safetensors reads it"
    (tmp_path / fragments.file_name(1)).unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks numbers 4 to 5 of a\.weight \(weight\): the file of a rank is missing"
    ):
        fragment_reader.Fragments(tmp_path).whole("a.weight")


@pytest.mark.parametrize(("counts", "expected"), [((0, 0, 7), (7, 7, 7)), ((2, 5), (2, 5)), ((0, 0), (0, 0))])
def test_moments_of_no_step_had_as_many_as_others(
    counts: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    """As checkpoints have them of DeepSpeed's FusedAdam without ZeRO, which counts for one parameter of a group."""
    for rank, count in enumerate(counts):
        stretch = fragment(f"{rank}.weight", torch.ones(6), exp_avg=torch.ones(6))
        stretch.numbers = {"step": float(count)}
        fragments.write(fragments.content_of([stretch]), tmp_path / fragments.file_name(rank))
    saved = fragment_reader.Fragments(tmp_path)
    assert tuple(saved.numbers(name)["step"] for name in saved.names) == expected
    assert saved.numbers("not there") == {}


@pytest.mark.parametrize(
    ("name", "shape"), [("l.q_proj.weight", (4, 3)), ("l.gate_up_proj.weight", (8, 3)), ("l.o_proj.weight", (3, 4))]
)
def test_parts_of_layers_become_other_parts(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Rows, two matrices above each other, and columns: saved by two ranks, read by four and by one."""
    whole = torch.arange(float(math.prod(shape))).view(shape)
    for rank in range(2):
        mine = process_group.take_part(name, whole, rank, 2).reshape(-1)
        one = Fragment(name, shape, 0, torch.float32, (rank, 2), {"weight": mine})
        fragments.write(fragments.content_of([one]), tmp_path / fragments.file_name(rank))
    found = fragment_reader.Fragments(tmp_path)
    assert found.whole(name).equal(whole)
    parts = [process_group.take_part(name, whole, number, 4) for number in range(4)]
    assert process_group.join_parts(name, parts).equal(whole)
    for number, part in enumerate(parts):
        assert found.read(name, "weight", 1, part.numel() - 1, (number, 4)).equal(part.reshape(-1)[1:])


@pytest.mark.parametrize(("length", "ranks"), [(7, 2), (64, 4), (3, 4)])
def test_what_all_ranks_have_is_written_once_and_whole(length: int, ranks: int) -> None:
    """Whatever the length: without ZeRO each rank writes a share."""
    piece = engine_state.Piece(torch.nn.Parameter(torch.empty(length)), 5, 9, length)
    shares = [engine_state._rank_share(piece, rank, ranks) for rank in range(ranks)]
    written = [number for share in shares for number in range(share.position, share.position + share.length)]
    assert written == [*range(5, 5 + length)]
    assert all(share.offset - share.position == 4 for share in shares)


def test_turned_matrices_are_read_either_way(tmp_path: Path) -> None:
    whole = torch.arange(6.0).view(2, 3)
    turned = whole.t().reshape(-1)
    for rank, (begin, end) in enumerate([(0, 3), (3, 6)]):
        one = fragment("a.weight", turned[begin:end], begin)
        one.turned = True
        fragments.write(fragments.content_of([one]), tmp_path / fragments.file_name(rank))
    found = fragment_reader.Fragments(tmp_path)
    assert found.whole("a.weight").equal(whole) and found.whole("a.weight").is_contiguous()
    assert found.read("a.weight", "weight", 1, 3).equal(whole.reshape(-1)[1:4])
    assert found.read("a.weight", "weight", 1, 3, turned=True).equal(turned[1:4])
    fragments.write(fragments.content_of([fragment("a.weight", whole.reshape(-1))]), tmp_path / fragments.file_name(0))
    (tmp_path / fragments.file_name(1)).unlink()
    assert fragment_reader.Fragments(tmp_path).read("a.weight", "weight", 1, 3, turned=True).equal(turned[1:4])


def test_scales_are_those_of_each_number_s_block(tmp_path: Path) -> None:
    """A stretch begins and ends within blocks, and holds a scale for each that it is in."""
    scales, size = torch.tensor([1.0, 2.0, 3.0, 4.0]), 4 * fragments.BLOCK - 30
    each = scales.repeat_interleave(fragments.BLOCK)[20:]
    for rank, (begin, end) in enumerate([(0, 300), (300, size)]):
        block, phase = divmod(20 + begin, fragments.BLOCK)
        one = Fragment(
            "a.weight", (size,), begin, torch.float32, values={"weight": torch.zeros(end - begin)}, phase=phase
        )
        one.scales = {"absmax": scales[block : -(-(20 + end) // fragments.BLOCK)]}
        fragments.write(fragments.content_of([one]), tmp_path / fragments.file_name(rank))
    found = fragment_reader.Fragments(tmp_path)
    assert found.whole("a.weight", "absmax").equal(each[:size])
    assert found.read("a.weight", "absmax", 200, 600).equal(each[200:800])


def test_what_adafactor_has_of_one_row_is_no_number() -> None:
    tensor = torch.ones(1, 8)
    row, column = torch.ones(1, 1), torch.ones(1, 8)
    states = {"step": torch.tensor(3.0), "row_var": row, "col_var": column}
    flat = engine_state.FlatTensor(tensor, SimpleNamespace(state={tensor: states}), [])  # type: ignore[arg-type]
    assert engine_state._classify_states(flat, is_factored=True) == (
        {},
        {"step": 3.0},
        {"row_var": row, "col_var": column},
    )


def test_states_by_rank_of_an_earlier_version_are_not_passed_over(tmp_path: Path) -> None:
    one = Fragment("flat 0", (), 0, torch.float32, bound={"state1": torch.ones(4)})
    fragments.write(fragments.content_of([one]), tmp_path / fragments.file_name(0))
    with pytest.raises(CheckpointError, match=r"fragments-00000\.safetensors cannot be read: 'weight:flat 0'"):
        fragment_reader.Fragments(tmp_path)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint32, torch.bool, torch.int64])
def test_a_buffer_of_any_type_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """As a custom model may have them: rotary frequencies as complex numbers, scales of 8 bits."""
    value = torch.tensor([0, 1, 1]).to(dtype)
    one = Fragment("buffer", (3,), 0, dtype, values={"weight": value})
    fragments.write(fragments.content_of([one]), tmp_path / fragments.file_name(0))
    [(_, found)] = fragment_reader.iter_weights(tmp_path)
    assert found.dtype is dtype and found.view(torch.uint8).equal(value.view(torch.uint8))


@pytest.mark.fault("C2")
def test_damage_is_named_by_parameter(tmp_path: Path) -> None:
    path = tmp_path / fragments.file_name(0)
    content = fragments.content_of([fragment(name, torch.arange(6.0)) for name in ("a.weight", "b.weight")])
    fragments.write(content, path)
    record = directory.record_file(path)
    directory.write_manifest(tmp_path, {path.name: record}, {})
    assert not manifest_problems(tmp_path)
    data = bytearray(path.read_bytes())
    data[directory.read_header(path)[1] + 30] ^= 1  # 24 bytes are a's
    path.write_bytes(data)
    assert manifest_problems(tmp_path) == [f"{path.name}: its content is not what was written (weight:b.weight)"]
    with pytest.raises(OSError, match=r"weight:b\.weight"):
        directory.record_file(path)


@pytest.mark.fault("S1")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"[]" * 9,
        struct.pack("<Q", 4) + b"{}  " + b"x" * 9,
        pickle.dumps({"a": 1}),
        *(
            struct.pack("<Q", len(text)) + text + b"x" * 99
            for text in (
                b'{"__metadata__": {"fragments": "{}"}, "weight:a": {"dtype": "F32", "data_offsets": [0, 16]}}',
                b'{"__metadata__": {"fragments": "[3]"}, "weight:a": {"dtype": "F32", "data_offsets": [0]}}',
            )
        ),
    ],
)
def test_no_fragments_are_an_error(content: bytes, tmp_path: Path) -> None:
    """Whatever stands there: JSON and numbers are all that is read of it."""
    (tmp_path / fragments.file_name(0)).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"fragments-00000\.safetensors cannot be read: "):
        fragment_reader.Fragments(tmp_path)


def content(*values: torch.Tensor) -> fragments.Content:
    """Return what a file will hold of some tensors."""
    return fragments.Content({str(number): value for number, value in enumerate(values)}, {})


def test_errors_of_writing_are_kept(tmp_path: Path) -> None:
    files = state_files.Files()
    files.save(content(torch.ones(3)), tmp_path / "a")
    assert files.written == [tmp_path / "a"]
    files.save(content(torch.ones(3)), tmp_path / "no such folder" / "b")
    assert files.failure
    files.save(content(torch.ones(3)), tmp_path / "c")
    assert not (tmp_path / "c").exists(), "after a failure nothing more is written"
    files.begin()
    assert not files.failure
    assert not files.written


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    state_files.seed_all(5)
    random.gauss(0, 1), np.random.normal(), torch.rand(3)
    state_files.save_generators(tmp_path / "r.safetensors")

    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.randint(99), torch.rand(2).tolist()]

    first = draw()
    assert draw() != first
    state_files.load_generators(tmp_path / "r.safetensors")
    assert draw() == first
    state_files.seed_all(5)
    before = draw()
    state_files.seed_all(6)
    assert all(a != b for a, b in zip(before, draw(), strict=True))


def test_verifying_files_needs_no_torch(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 3)
    code = (
        "import sys\nfrom toolkit.cli import main\n"
        f"assert main(['verify', {str(made)!r}, 'forward=no']) == 0\n"
        f"open({str(made / 'state.json')!r}, 'a').write(' ')\n"
        f"assert main(['verify', {str(made)!r}, 'forward=no']) == 74\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr


CONFIG = {"run": {"seed": 1, "name": "a"}, "optim": {"lr": 0.1}, "zero": {"stage": 2}, "data": {"sources": ["x"]}}


def test_long_values_are_shown_where_they_differ() -> None:
    shared = "/data/" + "a" * 200
    before, now = ({"model": {"path": f"{shared}/{end}"}, "tuning": {"method": "full"}} for end in ("v1/m", "v2/m"))
    (line,) = changes.check_changes(before, now, {}, {}, ["model.path"])
    assert line == f"  model.path: …{'a' * 38}/v1/m -> …{'a' * 38}/v2/m"
    assert messages.shortened_alike("x" * 99, "y", 80) == ("x" * 80 + "…", "y")
    assert messages.shortened_alike("x" * 99, "x" * 98, 80) == ("…" + "x" * 41, "…" + "x" * 40)


def test_changes_that_move_work_about_are_told() -> None:
    now = {"run": {"seed": 1, "name": "b"}, "optim": {"lr": 0.1}, "zero": {"stage": 2}, "data": {"sources": ["y"]}}
    lines = changes.check_changes(CONFIG, now, {"store": "s"}, {"store": "s"}, [])
    assert lines == ["  run.name: a -> b", "  data.sources: ['x'] -> ['y']"]
    assert changes.check_changes(CONFIG, CONFIG, {}, {}, []) == []


def test_a_key_that_has_been_removed_is_told_where_it_was_used() -> None:
    off, on = (CONFIG | {"checkpoint": {"memory_every": steps}} for steps in (0, 5))
    assert changes.check_changes(off, CONFIG, {}, {}, []) == []
    assert changes.check_changes(on, CONFIG, {}, {}, []) == ["  checkpoint.memory_every: 5 -> None"]
    ltd = {"start_share": 0.5, "first_layers": 1, "last_layers": 1}
    off, on = (CONFIG | {"train": {"random_ltd": {"steps": steps, **ltd}}} for steps in (0, 9))
    assert changes.check_changes(off, CONFIG, {}, {}, []) == []
    with pytest.raises(ConfigError, match=r"something else:\n  train.random_ltd.steps: 9 -> None\n"):
        changes.check_changes(on, CONFIG, {}, {}, [])
    assert len(changes.check_changes(on, CONFIG, {}, {}, ["train.random_ltd"])) == 1


@pytest.mark.fault("R2")
def test_changes_that_change_the_mathematics_are_refused() -> None:
    now = {**CONFIG, "optim": {"lr": 0.2}, "run": {"seed": 2, "name": "a"}}
    with pytest.raises(ConfigError) as error:
        changes.check_changes(CONFIG, now, {"store": "s"}, {"store": "t"}, [])
    assert str(error.value) == (
        "the checkpoint belongs to a run that computes something else:\n"
        "  run.seed: 1 -> 2\n  optim.lr: 0.1 -> 0.2\n  the prepared data: store is another one\n"
        "Undo this, or allow it: checkpoint.allow_changes=[run.seed,optim.lr,data]; or start over under another "
        "run.name."
    )
    lines = changes.check_changes(CONFIG, now, {"store": "s"}, {"store": "t"}, ["run.seed", "optim", "data"])
    assert len(lines) == 3
    with pytest.raises(ConfigError):
        changes.check_changes(CONFIG, {**CONFIG, "new": 1}, {}, {}, [])


@pytest.mark.fault("R2")
def test_another_tokenizer_is_refused_by_its_name_even_if_the_samples_are_the_same() -> None:
    """Unless the checkpoint is of a version that noted none."""
    before = {"store": "s", "tokenizer: vocabulary": "v", "tokenizer: chat template": "t"}
    now = {**before, "tokenizer: vocabulary": "w"}
    text = "  the tokenizer: another vocabulary than in the checkpoint's model/, which model.tokenizer may name"
    with pytest.raises(ConfigError) as error:
        changes.check_changes(CONFIG, CONFIG, before, now, ["data"])
    assert text in str(error.value) and "checkpoint.allow_changes=[model.tokenizer]" in str(error.value)
    assert changes.check_changes(CONFIG, CONFIG, before, now, ["model"]) == [text]
    assert changes.check_changes(CONFIG, CONFIG, {"store": "s"}, now, []) == []


def test_the_base_of_a_tuned_run_may_have_moved() -> None:
    """That it is the same one is told by its numbers, when it is loaded; with all of it trained, nothing tells."""
    old, new = {**CONFIG, "model": {"path": "/old"}}, {**CONFIG, "model": {"path": "/new"}}
    lora, full = {"tuning": {"method": "lora"}}, {"tuning": {"method": "full"}}
    assert changes.check_changes(old | lora, new | lora, {}, {}, []) == ["  model.path: /old -> /new"]
    with pytest.raises(ConfigError, match=r"allow_changes=\[model.path\]"):
        changes.check_changes(old | full, new | full, {}, {}, [])


def test_what_is_trained_never_changes() -> None:
    """A checkpoint holds the trained parameters alone. One of a version without a key says nothing about it."""
    before, now = ({**CONFIG, "tuning": {"method": "lora", "rank": rank}} for rank in (8, 4))
    with pytest.raises(ConfigError, match=r"trains other parameters:\n  tuning.rank: 8 -> 4\nUndo this, or start over"):
        changes.check_changes(before, now, {}, {}, ["tuning"])
    older = {**CONFIG, "tuning": {"method": "lora"}}
    assert changes.check_changes(older, now, {}, {}, ["tuning"]) == ["  tuning.rank: None -> 4"]
    newer = {**older, "tuning": {"method": "lora", "init": "default"}}
    assert changes.check_changes(older, newer, {}, {}, []) == []
    newer["tuning"]["init"] = "pissa"
    with pytest.raises(ConfigError, match=r"tuning.init: None -> pissa"):
        changes.check_changes(older, newer, {}, {}, [])


def test_a_run_older_than_a_key_did_what_its_default_says() -> None:
    now = json.loads(json.dumps(to_dict(RunConfig())))
    before = json.loads(json.dumps(now))
    del before["parallel"], before["optim"]["decay"], before["train"]["neftune_alpha"]
    assert changes.check_changes(before, now, {}, {}, []) == []
    now["train"]["neftune_alpha"] = 5.0
    with pytest.raises(ConfigError, match=r"train.neftune_alpha: 0.0 -> 5.0"):
        changes.check_changes(before, now, {}, {}, [])


def test_every_key_says_what_it_influences_or_cannot_change() -> None:
    """All keys are walked: without metadata, in a section without any, or unknown to the schema, a key decides."""
    from toolkit.config.dotted_keys import all_keys

    def declared(kind: Any) -> Iterator[tuple[str, Any]]:
        for item in dataclasses.fields(kind):
            yield item.name, item.metadata.get("influence")

    free = {key for key in all_keys() if influence_of(key, RunConfig) is Influence.free}
    marked = {name for name, influence in declared(RunConfig) if influence}
    assert {key.partition(".")[0] for key in free} - marked == {
        *("run", "model", "data", "batch", "optim", "parallel", "train", "distill")
    }, "of these sections single keys are free"
    for key in ("run.display", "run.name", "evaluate.every", "zero.stage", "distributed.timeout_s", "model.hub_id"):
        assert changes.is_allowed_change(key), key
    for key in ("optim.lr", "run.seed", "batch.global_size", "model.path", "data.max_length", "train.epochs"):
        assert influence_of(key, RunConfig) is Influence.result, key
    assert influence_of("tuning.rank", RunConfig) is Influence.trained
    assert influence_of("data.sources", RunConfig) is Influence.content
    assert influence_of("launch.env.NCCL_DEBUG", RunConfig) is Influence.free

    @dataclasses.dataclass
    class Section:
        new: int = 1

    @dataclasses.dataclass
    class Config:
        strict: Section = dataclasses.field(default_factory=Section)
        free: Section = dataclasses.field(default_factory=Section, metadata=FREE)
        new: int = 1

    wanted = {"new": Influence.result, "strict.new": Influence.result, "free.new": Influence.free}
    assert {key: influence_of(key, Config) for key in wanted} == wanted
    assert influence_of("free.gone", Config) is influence_of("gone.new", Config) is Influence.result


def test_the_display_of_a_run_may_change() -> None:
    now = json.loads(json.dumps(to_dict(RunConfig())))
    now["run"]["display"], now["deepspeed_json"] = "plain", "other.json"
    before = json.loads(json.dumps(to_dict(RunConfig())))
    assert sorted(changes.check_changes(before, now, {}, {}, [])) == [
        "  deepspeed_json:  -> other.json",
        "  run.display: auto -> plain",
    ]


@pytest.mark.fault("K4")
def test_nothing_is_named_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power loss needs: every file flushed, then the folder, then its name, then `latest`."""
    order: list[str] = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(descriptor: int) -> None:
        order.append("flush " + os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}/"))
        real_fsync(descriptor)

    def named(kind: str, real: Any) -> Any:
        def function(source: Any, target: Any) -> None:
            order.append(f"{kind} {Path(target).name}")
            real(source, target)

        return function

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", named("name", real_rename))
    monkeypatch.setattr(os, "replace", named("name", real_replace))
    folder = tmp_path / "step-3.tmp"
    folder.mkdir()
    saver = saver_in(tmp_path, CheckpointConfig())
    pending = _Pending(3, folder, Files(), [])
    torch.save({"weights": torch.arange(10.0)}, folder / "model.pt")
    pending.files.written.append(folder / "model.pt")
    pending.other_files.append(RunState(step=3).write(folder))
    pending._prove()
    assert not pending.failure
    saver._publish(pending, tmp_path / "step-3", pending.records)
    assert order == [
        "flush step-3.tmp/model.pt",
        "flush step-3.tmp/state.json",
        "flush step-3.tmp/manifest.json",
        "flush step-3.tmp",
        "name step-3",
        f"flush {tmp_path}",
        "flush latest.tmp",
        "name latest",
        f"flush {tmp_path}",
    ]


@pytest.mark.fault("K2")
def test_the_rows_until_a_save_are_on_the_disk_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run that goes on after a loss of power has no rows of its first steps."""
    flushed: list[Path] = []
    monkeypatch.setattr(disk, "flush", flushed.append)
    folder = tmp_path / "checkpoints" / "step-3.tmp"
    folder.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    pending = _Pending(3, folder, Files(), [])
    pending._prove()
    assert not pending.failure and flushed == [tmp_path / "metrics.jsonl", tmp_path]


def test_copies_are_taken_later_and_their_memory_is_used_again(tmp_path: Path) -> None:
    files = Files(asynchronous=True)
    weight, scale = torch.ones(4), torch.tensor(2.0)
    files.begin()
    files.save(content(weight, weight, scale), tmp_path / "a")
    assert not files.copied.is_set()
    assert not list(tmp_path.iterdir())
    weight.fill_(3.0)
    scale.zero_()
    files.write()
    files.wait_for_copies()
    found = load_file(tmp_path / "a")
    assert (found["0"].tolist(), found["1"].tolist()) == ([3.0] * 4, [3.0] * 4), "an update waits for the copies"
    assert found["2"].item() == 2.0, "one number at once"
    held = [tensor.data_ptr() for tensor in files.copies.buffers]
    assert len(held) == 1
    files.begin()
    files.save(content(weight), tmp_path / "b")
    files.write()
    assert [tensor.data_ptr() for tensor in files.copies.buffers] == held


def test_with_states_that_move_everything_is_copied_at_once(tmp_path: Path) -> None:
    files = Files(asynchronous=True, copies_at_once=True)
    weight = torch.ones(4)
    files.begin()
    files.save(content(weight), tmp_path / "a")
    weight.zero_()
    files.write()
    assert load_file(tmp_path / "a")["0"].tolist() == [1.0] * 4


def test_every_optimizer_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 has a second one for what it updates on the GPU, first of all, if the rest is offloaded."""
    engine = mock.Mock(basic_optimizer=optimizer_with(1.0), zenflow=False)
    engine.optimizer.backup_optimizer = optimizer_with(1.0)
    engine.zero_nvme_offload_optimizer.return_value = engine.super_offload.return_value = False
    files, waits = checkpointer._files_of(engine, True), list[str]()
    monkeypatch.setattr(files, "wait_for_copies", lambda: waits.append("waited"))
    for number, optimizer in enumerate((engine.optimizer.backup_optimizer, engine.basic_optimizer), 1):
        optimizer.step()
        assert len(waits) == number


class Gpu:
    """An accelerator with a stream of its own that counts what is page-locked, in a list of what happens."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.of_thread = threading.local()

    def is_synchronized_device(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def Stream(self) -> "Gpu":
        return self

    def current_device(self) -> int:
        return getattr(self.of_thread, "device", 0)

    def set_device(self, number: int) -> None:
        self.of_thread.device = number

    def current_stream(self) -> str:
        return "main"

    def wait_stream(self, other: str) -> None:
        self.happened.append(f"wait for {other}")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.happened.append(f"on {self.current_device()}")
        yield

    def synchronize(self) -> None:
        self.happened.append("synchronize")

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self.happened.append(f"pin {tensor.nbytes}")
        return tensor


def test_copies_of_a_gpu_are_page_locked_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch locks powers of two; the rest is copied to memory that the system may move."""
    gpu = Gpu()
    monkeypatch.setattr(state_files, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(state_files.psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * 5000))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    copies = HostCopies()
    for size in (600, 1024, 200, 100):
        assert copies._buffer(torch.empty(size, device="meta")).device.type == "cpu"
    copies._buffer(torch.empty(8))  # an offloaded state
    assert gpu.happened == ["pin 2400", "pin 400"], "5000 bytes for each of two ranks"
    source, target, gpu.happened = torch.ones(4), torch.zeros(4), []
    copies.waiting = {(1,): (source, target)}
    copies.complete()
    assert (target.tolist(), gpu.happened) == ([1.0] * 4, ["on 0", "synchronize"])


def test_copies_are_made_on_the_rank_s_gpu_after_all_that_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on GPU 0: there each rank's would make a context, of half a GiB, until the run ends."""
    gpu = Gpu()
    monkeypatch.setattr(state_files, "get_accelerator", lambda: gpu)
    gpu.set_device(3)
    files = Files(asynchronous=True)
    files.begin()
    for name in "ab":
        gpu.happened.append(f"gather {name}")
        files.save(content(torch.ones(4)), tmp_path / name)
    writer = threading.Thread(target=files.write)
    writer.start()
    writer.join(60)
    assert gpu.happened == ["gather a", "wait for main", "gather b", "wait for main", "on 3", "synchronize"]


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_count_of_steps_is_where_the_optimizer_reads_it(fused: bool, device: str) -> None:
    """PyTorch's fused kernel takes its address for one of the GPU's; "meta" stands for a GPU here."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    flat = engine_state.FlatTensor(torch.ones(6, device="meta"), optimizer, [engine_state.Piece(parameter, 0, 0, 6)])
    found = mock.Mock(facts={}, **{"read.return_value": torch.ones(6), "states.return_value": set()})
    found.numbers.return_value = {"step": 7.0}
    restore._restore_piece(flat, flat.pieces[0], "w", found, is_factored=False)
    step = flat.state["step"]
    assert (step.device.type, step.dtype, step.shape) == (device, torch.float32, ())


def test_a_copy_that_fails_costs_the_checkpoint_and_keeps_no_update_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(asynchronous=True)
    files.begin()
    files.save(content(torch.ones(4)), tmp_path / "a")

    def fail(copies: object) -> None:
        raise MemoryError

    monkeypatch.setattr("toolkit.checkpoint.state_files.HostCopies.complete", fail)
    pending = _Pending(3, tmp_path, files, [])
    pending.thread.start()
    files.wait_for_copies()
    pending.wait()
    assert pending.failure == "MemoryError: "
    assert not pending.records


def test_generators_that_cannot_be_written_cost_the_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous save writes nothing before them: a full disk shows here first."""
    saver = saver_in(tmp_path, CheckpointConfig())
    saver.files, saver.engine, saver._held = Files(asynchronous=True), mock.Mock(), mock.Mock()
    monkeypatch.setattr(checkpointer.engine_state, "contents", lambda engine, held: [])
    saver._write(tmp_path / "no such folder", RunState(step=3), None)
    assert saver._pending is not None
    assert saver._pending.failure == "No such file or directory"


def test_a_slow_probe_is_not_taken_at_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("toolkit.train.checkpointer.time.monotonic", lambda: clock[0])
    saver = Checkpointer.__new__(Checkpointer)
    saver.described = mock.Mock(probe_ids=[1])
    saver._probe_s, saver._probed_at = 0.0, 0.0
    assert saver._may_probe()
    saver._probe_s, saver._probed_at = 0.019, 1000.0
    assert saver._may_probe(), "a quick one always"
    saver._probe_s = 3.0
    assert not saver._may_probe()
    clock[0] += 299
    assert not saver._may_probe()
    clock[0] += 2
    assert saver._may_probe(), "1 % of the time since"


def test_going_back_in_a_run_puts_aside_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Rotation and the next start go by step: what another way has saved later must not count any more."""
    cfg = RunConfig()
    cfg.run.dir, cfg.run.name = str(tmp_path), "mine"
    run_dir.choose_run_dir(cfg)
    run_lock.release_run_dir()
    run = tmp_path / "mine"
    for step in (2, 4, 6):
        checkpoint(run / "checkpoints", step)
    for name in ("export", ".export.abc.tmp", "checkpoints/step-6-weights"):
        (run / name).mkdir()
    (run / "FAILED").touch()
    cfg.resume = str(run / "checkpoints" / "step-2")
    assert run_dir.choose_run_dir(cfg) == run_dir.RunSource(run, run / "checkpoints" / "step-2")
    run_dir.set_aside_settings(run)  # as the trainer does once it has accepted the config
    run_lock.release_run_dir()
    directory.empty_trash(run / "checkpoints")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-2",
        "step-4.replaced",
        "step-6-weights.replaced",
        "step-6.replaced",
    ]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "export.replaced", "logs", "run.lock"]
    assert (run / "logs" / "FAILED").exists()
    assert not said
    checkpoint(run / "checkpoints", 3)  # and a scheduler starts the same command again
    assert run_dir.choose_run_dir(cfg).checkpoint == run / "checkpoints" / "step-3"
    run_lock.release_run_dir()
    assert said == [
        f"{run} has been started by this command before: it is resumed. To start from {cfg.resume} again, choose "
        "another run.name."
    ]
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=1e-5))  # or edited in its recipe
    assert run_dir.choose_run_dir(cfg).checkpoint == run / "checkpoints" / "step-2"
    run_lock.release_run_dir()
    assert (run / "checkpoints" / "step-3.replaced").is_dir(), "another command means it"
    cfg.resume = "auto"
    assert run_dir.choose_run_dir(cfg).checkpoint == run / "checkpoints" / "step-2"
    run_lock.release_run_dir()


def test_a_run_that_began_in_another_ones_checkpoint_is_resumed_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = RunConfig()
    cfg.run.dir, cfg.run.name, cfg.resume = str(tmp_path), "mine", str(tmp_path / "old")
    old, run = checkpoint(tmp_path / "old" / "checkpoints", 2), tmp_path / "mine"

    def begin(*options: str) -> run_dir.RunSource:
        words = ["toolkit", "launch", *options, "run.name=mine", f"resume={cfg.resume}"]
        monkeypatch.setattr(run_dir.ancestors, "typed_command", lambda: words)
        try:
            return run_dir.choose_run_dir(cfg)
        finally:
            run_lock.release_run_dir()

    assert begin() == begin() == begin("--master_port=29501") == run_dir.RunSource(run, old)
    mine = checkpoint(run / "checkpoints", 3)
    shutil.rmtree(tmp_path / "old")
    assert begin() == run_dir.RunSource(run, mine)
    words = ["recipe=quickstart", f"run.dir={tmp_path}", "run.name=mine", f"resume={old}"]
    assert not [*paths._resume(load(words))]
    (run / "DONE").touch()
    with pytest.raises(
        RunFolderError, match=r"has finished already \(DONE\), without an export.*export-model .*/mine$"
    ):
        begin()
    (run / "export").mkdir()
    with pytest.raises(RunFolderError, match=r"has finished already.*, set model\.path=.*/export as well\."):
        begin()
    (run / "export" / "adapter_config.json").touch()
    with pytest.raises(RunFolderError, match=r"has finished already.*, set tuning\.adapter=.*/export as well\."):
        begin()


def test_a_run_that_begins_anew_has_a_base_of_its_own(tmp_path: Path) -> None:
    """The random model that a start left may be of another seed or shape; a checkpoint stands on it."""
    cfg = RunConfig()
    cfg.run.dir, cfg.run.name = str(tmp_path), "mine"
    run_dir.choose_run_dir(cfg)
    run_lock.release_run_dir()
    run = tmp_path / "mine"
    for name in ("base", ".base.abc.tmp"):
        (run / name).mkdir()
    run_dir.choose_run_dir(cfg)
    run_lock.release_run_dir()
    assert sorted(path.name for path in run.iterdir()) == ["base.replaced", "logs", "run.lock"]
    (run / "base").mkdir()
    checkpoint(run / "checkpoints", 2)
    run_dir.choose_run_dir(cfg)
    run_lock.release_run_dir()
    assert (run / "base").is_dir()


def test_an_adapter_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "run" / "checkpoints", 3)
    (made / "adapter_config.json").touch()
    cfg = RunConfig(resume=str(made))
    with pytest.raises(ConfigError, match=rf"resume = {made} is a model or an adapter alone.*tuning\.adapter={made}"):
        run_dir.choose_run_dir(cfg)


def test_links_and_files_that_would_be_loaded_are_foreign(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 3)
    for name in ("chat_template.jinja", "modeling_x.py", "merges.txt"):
        (made / name).touch()
    (made / "notes.md").symlink_to("/etc/passwd")
    found = "; ".join(manifest_problems(made))
    for name in ("chat_template.jinja", "modeling_x.py", "merges.txt", "notes.md"):
        assert f"{name}: the manifest does not know it" in found


def test_whatever_a_proof_raises_nothing_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step-3.tmp"
    folder.mkdir()
    pending = _Pending(3, folder, Files(), [])
    pending.other_files.append(RunState(step=3).write(folder))

    def fail(path: Path) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(directory, "record_file", fail)
    pending._prove()
    assert pending.failure == "MemoryError: no room"


@pytest.mark.parametrize(
    ("keep_best", "values", "best"),
    [
        ("eval_loss", [math.nan, 1.0, 2.0], 4),
        ("eval_kl", [0.3, 0.1, 0.2], 4),
        ("eval_rouge_l", [10.0, 30.0, 20.0], 4),
        ("eval_rouge_l", [0.0, 0.0, 0.0], 2),
        ("eval_rouge_l", [None, 5.0, 5.0], 4),
        ("eval_rouge_l", [None, None, None], None),
        ("", [1.0, 2.0, 3.0], None),
    ],
)
def test_the_best_checkpoint(keep_best: str, values: list[float | None], best: int | None, tmp_path: Path) -> None:
    """By the lowest loss or divergence, or the highest of a metric, which may be missing or no number; the first of
    equal ones."""
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    saver = Checkpointer.__new__(Checkpointer)
    saver.folder, saver.keep_best = tmp_path, keep_best
    ignored = -9e9 if keep_best in ("eval_loss", "eval_kl") else 9e9
    rows = [
        {"step": step} | ({} if value is None else {keep_best or "eval_loss": value})
        for step, value in zip((0, 2, 4, 6), [ignored, *values], strict=True)
    ]
    found = saver._best(rows)
    assert found == ([] if best is None else [tmp_path / f"step-{best}"])


def test_a_checkpoint_without_its_manifest_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = checkpoint(tmp_path, 3)
    (made / directory.MANIFEST).unlink()
    assert main(["verify", str(made), "forward=no"]) == 74
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nosuch"), "forward=no"]) == 2


def test_ranks_of_one_model_draw_the_same_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of what each has whole; the generators' files are of ranks that had rows of their own."""
    cfg, seeds = RunConfig(), []
    RunState(step=3, world_size=4, config=to_dict(cfg)).write(tmp_path)
    cfg.parallel.tensor = 2
    monkeypatch.setattr(state_files, "seed_all", seeds.append)
    for rank in range(4):
        saver: Any = SimpleNamespace(load=lambda _: None)
        resume.resume_from(saver, tmp_path, RunState(step=3), Ranks(rank, rank, 4, 4, "single"), cfg)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
