"""Which ops DeepSpeed has to compile, what that needs, and what `optim.torch = auto` makes of it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.config import preflight
from toolkit.config.load import load
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import ConfigError
from toolkit.train import startup, trainer
from toolkit.train.run_dir import RunSource

GPU = {"DS_ACCELERATOR": "cuda", "TORCH_EXTENSIONS_DIR": "/nowhere"}
CPU = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": "/nowhere"}
AUTO = ["recipe=quickstart", "optim.torch=auto"]
CASES = [
    (GPU, [], [], False, "there is a GPU and a compiler"),
    (GPU, [], ["nvcc"], True, "nvcc not found here"),
    (CPU, [], [], True, "no GPU here"),
    (CPU, [], ["g++"], True, "no GPU here"),
    (CPU, ["optim=lion"], [], True, "no GPU here"),
    (GPU, ["zero=stage2_offload"], ["nvcc"], False, "the optimizer is offloaded"),
    (GPU, ["optim=adamw", "optim.torch=true"], [], True, ""),
    (CPU, ["optim=adamw", "optim.torch=false"], ["g++"], False, ""),
]


@pytest.mark.parametrize(("environ", "words", "lacking", "expected", "reason"), CASES)
def test_auto(
    environ: dict[str, str],
    words: list[str],
    lacking: list[str],
    expected: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "lacking_tools", lambda names, environ: lacking)
    cfg, why = preflight.with_optimizer(load([*AUTO, *words]).cfg, environ)
    assert (cfg.optim.torch, why) == (expected, reason)


def test_an_op_that_is_built_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "lacking_tools", lambda names, environ: ["nvcc"] if names else [])
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam" / "fused_adam.so").touch()
    environ = {**GPU, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    loaded = load(AUTO)
    assert preflight.with_optimizer(loaded.cfg, environ)[0].optim.torch is False
    preflight.check_compiler(loaded, environ)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["optim.torch=false"],
            r"compile cpu_adam .* g\+\+ is missing .* \(apt install g\+\+\), or set optim.torch=true",
        ),
        (["zero=stage2_offload"], "compile cpu_adam .* or set optim.torch=true"),
    ],
)
def test_a_compiler_that_is_missing_is_told_before_anything_is_loaded(words: list[str], told: str) -> None:
    environ = {**CPU, "CXX": "no-such-compiler"}
    preflight.check_compiler(load(AUTO), environ)
    with pytest.raises(ConfigError, match=told):
        preflight.check_compiler(load([*AUTO, *words]), environ)


def test_the_choice_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ds = build_ds_config(load(AUTO).cfg, 1, 10)
    assert ds.values["optimizer"]["params"]["torch_adam"] is True
    assert ds.why["optimizer.params.torch_adam"] == "= optim.torch: auto, no GPU here"


BUILDS = """
import os, sys
from toolkit.launch.processes import tie_builds
tie_builds()
from torch.utils import cpp_extension
cpp_extension.subprocess.run(["sh", "-c", "echo $$ > " + sys.argv[1] + "; exec sleep 300"])
"""


def test_a_build_ends_with_the_rank_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    builder = subprocess.Popen([sys.executable, "-c", BUILDS, str(file)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 120
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < until
        time.sleep(0.05)
    builder.kill()
    builder.wait()
    while Path(f"/proc/{file.read_text().strip()}").exists():
        assert time.monotonic() < until, os.kill(int(file.read_text()), 9)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("others", "before", "expected"),
    [
        ([(False, "a GPU")], None, False),
        ([(False, "a GPU"), (True, "nvcc not found")], None, True),  # one node without a compiler decides for all
        ([(False, "a GPU")], True, True),
        ([(True, "no GPU")], False, True),
    ],
)
def test_all_ranks_and_sessions_take_the_same(
    others: list[tuple[bool, str]], before: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.process_group, "gather", lambda value: others)
    state = SimpleNamespace(config={"optim": {"torch": before}})
    monkeypatch.setattr(trainer.directory, "read_run_state", lambda checkpoint: state)
    source = RunSource(Path("run"), None if before is None else Path("step-1"))
    cfg = trainer._with_optimizer(load(AUTO).cfg, source)
    assert cfg.optim.torch is expected


def test_what_is_missing_here_is_told_with_what_is_wrong_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(what: str) -> Callable[[object], None]:
        def check(loaded: object) -> None:
            raise ConfigError(what)

        return check

    monkeypatch.setattr(startup, "check_compiler", missing("no compiler"))
    monkeypatch.setattr(startup, "check_track_here", missing("no tracker"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError) as told:
        startup.make_ready(["recipe=quickstart", "schedule.warmup_steps=-3"])
    assert all(text in str(told.value) for text in ("schedule.warmup_steps", "no compiler", "no tracker"))
