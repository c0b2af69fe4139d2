"""Ranks that were given different things say so before the first step, and none of them waits for ever."""

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from toolkit.config.load import load
from toolkit.config.validate import field_type
from toolkit.distributed import meeting
from toolkit.distributed.meeting import differences
from toolkit.messages import LaunchError
from toolkit.train import consistency

KEY = "hf_" + "a" * 30


def compared(*values: dict[str, str], patience_s: float = 30.0) -> list[str]:
    """Return what each rank is told."""
    store, told = HashStore(), [""] * len(values)

    def rank(number: int) -> None:
        told[number] = differences(store, number, len(values), "alike/0", values[number], timedelta(seconds=patience_s))

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(len(values)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def test_ranks_that_have_the_same_are_told_nothing() -> None:
    same = {"optim.lr": "0.1", "version: torch": "2.13"}
    assert compared(same, dict(same), dict(same)) == ["", "", ""]


def test_each_difference_is_told_once_on_all_ranks() -> None:
    first = {"optim.lr": "0.1", "run.seed": "42", "version: torch": "2.13"}
    told = compared(first, first, {**first, "optim.lr": "0.2"}, {"optim.lr": "0.3", "run.seed": "42", "new": "x" * 500})
    assert len(set(told)) == 1
    _, lr, version, new, _ = told[0].splitlines()
    assert lr.startswith("  optim.lr: 0.1 on rank 0 (") and "), 0.2 on rank 2 (" in lr and "and 1 more ranks" in lr
    assert version.startswith("  version: torch: 2.13 on rank 0 (") and ", missing on rank 3 (" in version
    assert new.startswith("  new: missing on rank 0 (") and len(new) < 250


def test_a_secret_that_one_rank_knows_is_no_difference() -> None:
    assert compared({"key": "https://***@x"}, {"key": "https://me:pass@x"}) == ["", ""]


def test_a_rank_that_does_not_answer_is_named() -> None:
    with pytest.raises(LaunchError, match="no answer from rank 1, 2 when the ranks compared"):
        differences(HashStore(), 0, 3, "alike/0", {}, timedelta(seconds=0.2))


def test_who_waits_for_a_rank_that_fails_asks_its_store_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends with that rank, and PyTorch would print a page of frames."""
    asked: list[str] = []

    class Counting(HashStore):
        def check(self, keys: list[str]) -> bool:
            asked.extend(keys)
            return bool(super().check(keys))

    store = Counting()
    monkeypatch.setattr(meeting, "_met", (store, 0, 2))
    monkeypatch.setattr(meeting, "_HEARD_S", 0.5)
    with pytest.raises(KeyError), meeting.tell_failure():
        raise KeyError
    with pytest.raises(LaunchError, match="no answer from rank 0"):
        differences(store, 1, 2, "alike/0", {}, timedelta(seconds=30))
    assert asked == ["alike/0/first", "ends"]


def test_settings_are_compared_by_key_and_folders_by_what_they_hold(tmp_path: Path) -> None:
    cfg = load(["recipe=quickstart", "run.name=a", f"ds_extra.url=https://me:{KEY}@x"]).cfg
    found = consistency._setting_facts(cfg)
    assert found["optim.lr"] == "0.002"
    assert "data.sources[0].path" in found
    assert "run.name" not in found
    assert KEY not in str(found)
    for name in consistency.MAY_DIFFER:
        assert field_type(name) is not None, name
    seen = []
    for content in (b"one", b"two", b"two"):
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1 << 20) + content)
        (folder / "README.md").write_text(str(len(seen)))
        for hub_id in ("", "a/b"):
            model = replace(cfg.model, path=str(folder), hub_id=hub_id)
            seen.append(consistency._setting_facts(replace(cfg, model=model)))
    files = [one["model.path: files"] for one in seen]
    assert files[0] != files[2] == files[4]
    assert seen[0] != seen[2] != seen[4], "the folder's place counts too"
    assert seen[3] == seen[5], "not that of a cache"


def test_code_and_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[str] = set()
    digest = consistency._files_digest
    monkeypatch.setattr(
        consistency, "_files_digest", lambda found: digest(files.add(one[0].name) or one for one in found)
    )
    found = consistency._code_facts()
    assert {"checkpointer.py", "gpus.yaml", "ds_keys.json"} <= files, "tables too"
    assert {"version: torch", "version: deepspeed", "version: python", "code: toolkit", "device"} <= set(found)


def test_a_process_may_start_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(meeting, "_met", (HashStore(), 0, 2))
    assert [meeting.init_method(timedelta(seconds=1)) for _ in range(2)] == ["met://", "met://"]
