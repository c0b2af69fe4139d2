"""What a config adds to a run, in which order, and what a run that asks for nothing does not import."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from toolkit.checkpoint.directory import RunState
from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.launch.environment import Ranks
from toolkit.train import hooks, loop
from toolkit.train.hooks import Hook
from toolkit.train.step import StepVote

EVERYTHING = ["run.deadline=2h", "data.curriculum.steps=5", "profile.comms.enabled=true", "track=csv"]
OPTIONAL = ("deadline", "collectives", "tracking", "stragglers", "report", "experts", "replay")
ALSO = ("toolkit.track.queue", "toolkit.track.backends", "toolkit.report.run")


def ranks_of(world_size: int, rank: int = 0) -> Ranks:
    return Ranks(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, launcher="test")


@pytest.mark.parametrize(
    ("words", "world_size", "rank", "names"),
    [
        (["report.enabled=false"], 1, 0, []),
        ([], 1, 0, ["AutomaticReport"]),
        ([], 2, 1, ["StragglerDetector"]),
        (
            EVERYTHING,
            2,
            0,
            ["DeadlineHook", "Collectives", "Tracking", "StragglerDetector", "AutomaticReport"],
        ),
    ],
)
def test_a_config_adds_what_it_asks_for(
    words: list[str], world_size: int, rank: int, names: list[str], tmp_path: Path
) -> None:
    cfg = load(["recipe=quickstart", *words]).cfg
    assert [type(hook).__name__ for hook in hooks.hooks_of(cfg, ranks_of(world_size, rank), tmp_path)] == names


def test_a_run_imports_no_hook_that_it_does_not_ask_for(tmp_path: Path) -> None:
    names = [f"toolkit.train.{name}" for name in OPTIONAL] + list(ALSO)
    code = (
        "import sys\nfrom pathlib import Path\nfrom toolkit.config.load import load\n"
        "from toolkit.launch.environment import detect\n"
        "from toolkit.tasks import language\nfrom toolkit.train import hooks, trainer\n"
        "cfg = load(['recipe=quickstart', 'report.enabled=false']).cfg\n"
        f"assert not hooks.hooks_of(cfg, detect({{}}), Path({str(tmp_path)!r}))\n"
        f"sys.exit(', '.join(name for name in {names!r} if name in sys.modules) or 0)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr


def test_hooks_hear_of_the_end_however_it_comes() -> None:
    heard: list[Any] = []

    class Listener(Hook):
        def at_begin(self, run: Any, task: Any) -> None:
            heard.append("begin")

        def at_exit(self, error: BaseException | None) -> None:
            heard.append(error)

    nothing: Any = SimpleNamespace()
    with hooks.running([Listener(), Listener()], nothing, nothing):
        pass
    assert heard == ["begin", "begin", None, None]
    problem = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), hooks.running([Listener()], nothing, nothing):
        raise problem
    assert heard[-2:] == ["begin", problem]


def test_votes_add_up_by_name() -> None:
    votes = [
        StepVote(stops=1, save_verified=1, last_step=70),
        StepVote(save_verified=1, lost_run_dir=1),
        StepVote(save_due=1),
    ]
    sums = [sum(numbers) for numbers in zip(*(vote.pack() for vote in votes), strict=True)]
    assert StepVote.unpack(sums) == StepVote(stops=1, save_verified=2, lost_run_dir=1, save_due=1, last_step=70)


def test_nothing_keeps_a_loop_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay drops its loop before the data ends; the batches' threads, which wait for it, would never end."""
    start = Mock(epoch=0, row=0, step=3, trained_tokens=0, total_tokens=0, evaluations=[], spec=RunState)
    monkeypatch.setattr(loop, "replace", lambda state, **changes: state)
    run: Any = Mock(cfg=RunConfig(), folder=tmp_path, hooks=[Hook()], start=start, total_steps=9)
    gc.disable()
    try:
        ended = weakref.ref(loop.TrainLoop(Mock(), run, Mock(), Mock()))
        assert ended() is None
    finally:
        gc.enable()
