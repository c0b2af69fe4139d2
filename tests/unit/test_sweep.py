"""`toolkit sweep` with a script in the place of the launcher: grammar, names, going on, signals, the search."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import _dispatch
from toolkit.config.load import load
from toolkit.config.sweep_axes import grid, split_axes
from toolkit.extras import sweep as sweeps
from toolkit.extras.cli import sweep
from toolkit.extras.sweep import read_result
from toolkit.launch.processes import SIGNALS
from toolkit.messages import ConfigError, DataError, LaunchError, Problems

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, str(ROOT / "tests" / "unit" / "fake_launch.py")]
RECIPE = ["--num_gpus=2", "recipe=quickstart", "model=glm_tiny"]


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps, "LAUNCH", FAKE)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def calls() -> list[str]:
    """Return the names of the runs that were launched since the last look."""
    path = Path("runs/calls.txt")
    names = [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def states(name: str = "s") -> dict[str, tuple[str, Any]]:
    jobs = json.loads(Path("runs", name, "sweep.json").read_text())["jobs"]
    return {job["name"]: (job["state"], job["exit_code"]) for job in jobs}


GRIDS: dict[str, tuple[list[str], list[list[str]]]] = {
    "commas": (
        ["run.seed=1,2", "zero=stage2,stage3"],
        [["1", "stage2"], ["1", "stage3"], ["2", "stage2"], ["2", "stage3"]],
    ),
    "floats": (["optim.lr=1e-5,2e-5"], [["1e-05"], ["2e-05"]]),
    "choice": (["zero=choice(stage1,stage3)"], [["stage1"], ["stage3"]]),
    "range": (["run.seed=range(1,6,2)"], [["1"], ["3"], ["5"]]),
    "float range": (["optim.lr=range(0.5,1.6,0.5)"], [["0.5"], ["1.0"], ["1.5"]]),
    "sorted": (["run.seed=sort(3,1,2)"], [["1"], ["2"], ["3"]]),
    "glob": (["zero=glob(stage2*)"], [["stage2"], ["stage2_offload"], ["stage2_zenflow"]]),
    "glob without": (["recipe=glob(zero*,exclude=zero3*)"], [["zero1"], ["zero2_offload"]]),
    "lists": (["tuning.target_modules=[q_proj],[q_proj,v_proj]"], [["[q_proj]"], ["[q_proj,v_proj]"]]),
    "quoted": (["run.name='a b',c"], [["'a b'"], ["c"]]),
    "twice the same": (["run.seed=1,2,1"], [["1"], ["2"]]),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grammar(name: str) -> None:
    words, expected = GRIDS[name]
    fixed, axes = split_axes([*words, "train.epochs=2", "optim.betas=[0.9,0.95]"])
    assert fixed == ["train.epochs=2", "optim.betas=[0.9,0.95]"]
    assert [[word.partition("=")[2] for word in job] for job in grid(axes)] == expected


def test_intervals() -> None:
    _, [plain, log, whole] = split_axes(["a=interval(0,1)", "b=tag(log,interval(1e-5,1e-3))", "c=int(interval(1,8))"])
    assert (plain.low, plain.high, plain.is_log, plain.is_whole) == (0, 1, False, False)
    assert (log.is_log, log.ends()) == (True, ["1e-05", "0.001"])
    assert (whole.is_whole, whole.ends()) == (True, ["1", "8"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lr=interval(1,0)", "to a larger one"),
        ("optim.lr=tag(log,interval(0,1))", "above 0"),
        ("optim.lr=shuffle(1,2)", "Leave shuffle() out"),
        ("zero=glob(stage9*)", "names no value"),
        ("optim.lr=1,(", "cannot read 'optim.lr=1,('"),
    ],
)
def test_bad_grammar(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_axes([word])
    assert message in str(caught.value)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame-open-1234")
    jobs = [
        ["optim.lr=1e-05", "zero=stage2"],
        ["model.path=/models/very/deep/chatglm3-6b"],
        ["tuning.target_modules=[q_proj,v_proj]"],
        ["tuning.target_modules=[q_proj v_proj]"],
        ["+ds_extra.x.api_key=verysecretvalue"],
        ["run.note=sesame-open-1234"],
        [f"a.long_key_{place}=some_long_value" for place in range(9)],
    ]
    names = [sweeps.job_name(job) for job in jobs]
    assert names[0] == "lr-1e-05_zero-stage2"
    assert names[1].startswith("path-chatglm3-6b-")
    assert names[2] != names[3]
    assert not [name for name in names if "secret" in name or "sesame" in name]
    assert all(len(name) <= 60 and name == Path(name).name for name in names)
    alike = [["a=b-c"], ["a=b_c"], ["a=b c"], ["a=x_b-y", "b=z"], ["a=x", "b=y_b-z"]]
    assert len({sweeps.job_name(job) for job in alike}) == len(alike)
    assert sweeps.job_name(["zero=stage3_offload"]) == "zero-stage3_offload"


def test_all_run_and_none_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RECIPE, "optim.lr=0.1,0.2", "zero=stage1,stage2", "sweep=s"]
    assert sweep.run(words) == 0
    assert calls() == ["lr-0.1_zero-stage1", "lr-0.1_zero-stage2", "lr-0.2_zero-stage1", "lr-0.2_zero-stage2"]
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "optim.lr=0.2 zero=stage1" in line)
    assert row.split()[2:] == ["done", "0", "3.0000", "1.1000", "150", "lr-0.2_zero-stage1"]
    assert sweep.run(words) == 0
    assert calls() == []
    said = capsys.readouterr().out
    assert "done already" in said
    assert (
        said.splitlines()[-1] == f"To compare the runs in a page of charts:  toolkit report {Path('runs/s').resolve()}"
    )
    # More values go on with the same sweep.
    assert sweep.run([*RECIPE, "optim.lr=0.1,0.2,0.3", "zero=stage1,stage2", "sweep=s"]) == 0
    assert calls() == ["lr-0.3_zero-stage1", "lr-0.3_zero-stage2"]


def test_failures_are_kept_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    Path("runs/lr-0.1.do").write_text("1")
    Path("runs/lr-0.2.do").write_text("70")
    words = [*RECIPE, "optim.lr=0.1,0.2,0.3", "sweep=s"]
    assert sweep.run(words) == 1
    assert states() == {"lr-0.1": ("failed", 1), "lr-0.2": ("diverged", 70), "lr-0.3": ("done", 0)}
    said = capsys.readouterr().out
    assert "lr-0.1: exit code 1 broken on purpose" in said
    assert "tried again by the same command:  toolkit sweep --num_gpus=2" in said
    calls()
    Path("runs/lr-0.1.do").unlink()
    assert sweep.run(words) == 1
    assert calls() == ["lr-0.1"]  # what diverged would again
    assert Path("runs/s/lr-0.1/step").read_text() == "4"  # went on
    assert states()["lr-0.1"] == ("done", 0)
    for file in Path("runs/s/lr-0.2").iterdir():
        file.unlink()
    Path("runs/s/lr-0.2").rmdir()
    Path("runs/lr-0.2.do").unlink()
    assert sweep.run(words) == 0
    assert calls() == ["lr-0.2"]


def test_a_sweep_that_died_goes_on() -> None:
    words = [*RECIPE, "optim.lr=0.1,0.2", "sweep=s"]
    assert sweep.run(words) == 0
    calls()
    file = Path("runs/s/sweep.json")
    values = json.loads(file.read_text())
    values["jobs"][1] |= {"state": "running", "exit_code": None}
    file.write_text(json.dumps(values))
    Path("runs/s/lr-0.2/DONE").unlink()
    assert sweep.run(words) == 0
    assert calls() == ["lr-0.2"]


def test_a_changed_recipe_is_another_sweep(tmp_path: Path) -> None:
    Path("mine.yaml").write_text("# @package _global_\ndefaults: [quickstart, _self_]\ntrain: {epochs: 2}\n")
    words = ["recipe=mine.yaml", "optim.lr=0.1,0.2", "sweep=s"]
    assert sweep.run(words) == 0
    Path("mine.yaml").write_text("# @package _global_\ndefaults: [quickstart, _self_]\ntrain: {epochs: 3}\n")
    with pytest.raises(LaunchError, match=r"lr-0\.1 of this sweep began with other settings"):
        sweep.run(words)


def test_another_language_is_the_same_sweep() -> None:
    words = [*RECIPE, "optim.lr=0.1,0.2", "sweep=s"]
    assert sweep.run([*words, "language=en"]) == 0
    calls()
    assert sweep.run([*words, "language=zh"]) == 0
    assert calls() == []


def test_nothing_starts_when_one_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep.run([*RECIPE, "zero=stage1,stage3", "zero.allgather_bucket_size=7"])
    assert str(caught.value).startswith("zero=stage3: ") and "has no effect" in str(caught.value)
    assert not Path("runs").exists()


def test_what_is_wrong_with_some_runs_names_the_first_of_them() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep.run([*RECIPE, "train.log_every=1,0", "zero=stage1,stage3", "optim.lr=-1", "optim.eps=-1"])
    first, *others = [str(error) for error in caught.value.parts]
    assert "optim.lr = -1.0 must" in first and others[0].startswith("command line: optim.eps = -1.0 must")
    assert len(others) == 2
    assert others[1].startswith("train.log_every=0 zero=stage1: command line: train.log_every = 0 must be at least 1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1e-3"], "nothing is swept"),
        (["optim.lr=1,2", "run.name=x"], "sweep=NAME names the sweep"),
        (["run.name=x,y"], "sweep=NAME names the sweep"),
        (["run.dir=x,y"], "one directory for the whole sweep"),
        (["optim.lr=1,2", "optim.lr=3,4"], "optim.lr names several values twice"),
        (["run.seed=range(0,100)"], "these are 100 runs. Add max_jobs=100"),
        (["optim.lr=1,2", "sweep=../x"], "must be a plain directory name"),
        (["optim.lr=interval(0.1,1)"], "needs trials=N metric=NAME"),
        (["optim.lr=1,2", "metric=eval_loss"], "no effect without trials=N"),
        (["optim.lr=0.1,0.2", "trials=3", "metric=evalloss"], "Did you mean 'eval_loss'?"),
        (["optim.rl=1,2"], "unknown key 'optim.rl'. Did you mean 'optim.lr'?"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep.run([*RECIPE, *words])
    assert message in str(caught.value)
    assert not Path("runs").exists()


def test_refused_folders() -> None:
    Path("runs/s").mkdir(parents=True)
    Path("runs/s/mine.txt").touch()
    words = [*RECIPE, "optim.lr=0.1,0.2", "sweep=s"]
    with pytest.raises(LaunchError, match="is no sweep"):
        sweep.run(words)
    Path("runs/s/sweep.json").write_text("{")
    with pytest.raises(DataError, match=r"sweep\.json cannot be read"):
        sweep.run(words)
    Path("runs/s/sweep.json").unlink()
    Path("runs/s/mine.txt").unlink()
    with sweeps.open_sweep(Path("runs/s"), ""), pytest.raises(LaunchError, match="another process"):
        sweep.run(words)


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOLCK, "WARNING: the disk of"), (errno.EIO, "Input/output error")]
)
def test_a_disk_without_locks(
    number: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: Any, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("toolkit.disk.fcntl.flock", refuse)
    words = [*RECIPE, "optim.lr=0.1,0.2", "sweep=s"]
    if number == errno.ENOLCK:
        assert sweep.run(words) == 0 and len(calls()) == 2
        assert message in capsys.readouterr().out
    else:
        with pytest.raises(LaunchError, match=message):
            sweep.run(words)


def test_under_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("CROSS_SIZE", "1")):
        monkeypatch.setenv(name, value)
    for words in (["sweep"], ["train", "--multirun"]):
        with pytest.raises(LaunchError, match="type it once, without deepspeed"):
            _dispatch([*words, *RECIPE[1:], "optim.lr=1,2"])
    assert not Path("runs").exists()


def test_multirun_is_a_sweep() -> None:
    assert _dispatch(["train", "-m", *RECIPE[1:], "optim.lr=0.1,0.2", "sweep=s"]) == 0
    assert calls() == ["lr-0.1", "lr-0.2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_run_and_stops_the_sweep(number: signal.Signals) -> None:
    Path("runs").mkdir()
    Path("runs/lr-0.1.do").write_text("wait")
    imports = "import sys; from toolkit.cli import main; from toolkit.extras import sweep"
    code = f"{imports}; sweep.LAUNCH = {FAKE!r}; sys.exit(main(sys.argv[1:]))"
    words = ["sweep", *RECIPE, "optim.lr=0.1,0.2", "sweep=s"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=-1, stderr=subprocess.STDOUT, text=True, env=env
    )
    try:
        until = time.monotonic() + 60
        while not Path("runs/s/lr-0.1/ready").exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert f"the sweep was stopped by {number.name}. The same command resumes it:  toolkit sweep" in output
    assert states() == {"lr-0.1": ("stopped", 75), "lr-0.2": ("waiting", None)}
    assert calls() == ["lr-0.1"]
    Path("runs/lr-0.1.do").unlink()
    assert sweep.run(words[1:]) == 0
    assert calls() == ["lr-0.1", "lr-0.2"]


def test_secrets_stay_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RECIPE, "optim.lr=0.1,0.2", "sweep=s", "+ds_extra.comet.api_key=verysecretvalue"]
    assert sweep.run(words) == 0
    written = [path.read_text() for path in Path("runs").rglob("sweep.json")]
    assert written and "verysecretvalue" not in "".join(written) + capsys.readouterr().out


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    words = [*RECIPE, "optim.lr=interval(0.01,1)", "zero=stage1,stage2", "metric=eval_loss", "sweep=s"]
    assert sweep.run([*words, "trials=3"]) == 0
    assert calls() == ["trial-000", "trial-001", "trial-002"]
    said = capsys.readouterr().out
    values = [read_result(Path("runs/s", f"trial-00{place}")).best for place in range(3)]
    assert f"Best: eval_loss = {min(values):.4f}, trial-00{values.index(min(values))}:" in said
    # The same command has nothing to do; more trials go on, and one that was left open comes first.
    assert sweep.run([*words, "trials=3"]) == 0
    assert calls() == []
    Path("runs/trial-003.do").write_text("75")
    assert sweep.run([*words, "trials=4"]) == 1
    assert states()["trial-003"] == ("stopped", 75)
    Path("runs/trial-003.do").unlink()
    Path("runs/trial-004.do").write_text("1")
    calls()
    assert sweep.run([*words, "trials=5"]) == 0
    assert calls() == ["trial-003", "trial-004"]
    assert states()["trial-003"] == ("done", 0) and states()["trial-004"] == ("failed", 1)


@pytest.mark.parametrize("special", ["task=classify", "preference=dpo", "task=distill", "task=language"])
def test_a_search_goes_by_what_the_task_writes(special: str) -> None:
    problems = Problems()
    plan = sweeps.parse_sweep([*RECIPE, special, "optim.lr=0.1,0.2", "metric=eval_perplexity"], problems)
    problems.raise_all()
    cfg = load([special, "recipe=quickstart", "data.validation_fraction=0.1"], problems=problems).cfg
    if special in ("task=distill", "task=language"):
        assert sweeps._chosen_metric(plan, cfg) == "eval_perplexity"
    else:
        with pytest.raises(ConfigError, match="metric = eval_perplexity is none of loss, eval_loss"):
            sweeps._chosen_metric(plan, cfg)


def test_a_trial_that_does_not_compose_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    optuna = pytest.importorskip("optuna")
    # Both ends compose, the value between them does not.
    words = [*RECIPE, "schedule.warmup_steps=0,99,1", "train.max_steps=9", "metric=eval_loss", "sweep=s"]
    code = sweep.run([*words, "trials=9"])
    said = capsys.readouterr().out
    left_out = [name for name, state in states().items() if state == ("failed", 2)]
    assert code == 0 and 0 < len(left_out) < 9
    assert "9] skipped: schedule.warmup_steps=99: " in said and "is more than train.max_steps = 9" in said
    assert calls() == [name for name in states() if name not in left_out]
    assert len(states()) == 9 and not [name for name in left_out if Path("runs/s", name).exists()]
    # So is one that was begun before this was known, and one whose values were not all drawn.
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend("runs/s/optuna.log"))
    study = optuna.load_study(study_name="sweep", storage=storage)
    values = optuna.distributions.CategoricalDistribution(["0", "99", "1"])
    study.enqueue_trial({"schedule.warmup_steps": "99"})
    study.ask({"schedule.warmup_steps": values})
    study.enqueue_trial({})
    study.ask()
    assert sweep.run([*words, "trials=11"]) == 0
    assert states()["trial-009"] == ("failed", 2) and calls() == []
    assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,))


def test_another_search_of_the_same_name_is_refused() -> None:
    pytest.importorskip("optuna")
    Path("runs").mkdir()
    Path("runs/trial-000.do").write_text("75")
    rate = "optim.lr=interval(0.01,1)"
    first = [*RECIPE, rate, "metric=eval_loss", "trials=1", "sweep=s"]
    assert sweep.run(first) == 1
    before = Path("runs/s/sweep.json").read_text()
    for words, message in (
        ([rate, "metric=loss"], f"and that cannot become metric=loss {rate}."),
        (
            ["optim.lr=interval(0.01,2)", "metric=eval_loss"],
            f"with metric=eval_loss {rate}, and that cannot",
        ),
        (["optim.lr=0.1,0.2", "metric=eval_loss"], "cannot become metric=eval_loss optim.lr=0.1,0.2."),
        ([rate, "zero=stage1,stage2", "metric=eval_loss"], "zero=stage1,stage2. Type the metric and the values"),
        (["zero=stage1,stage2", "metric=eval_loss"], "cannot become metric=eval_loss zero=stage1,stage2"),
        ([rate, "metric=eval_loss", "run.seed=5"], "began with other settings"),
    ):
        with pytest.raises(ConfigError) as caught:
            sweep.run([*RECIPE, *words, "trials=2", "sweep=s"])
        assert message in str(caught.value) and "another sweep=NAME" in str(caught.value)
        assert Path("runs/s/sweep.json").read_text() == before
    Path("runs/trial-000.do").unlink()
    assert sweep.run(first) == 0
    assert states() == {"trial-000": ("done", 0)}


def test_a_trial_is_judged_by_its_best_evaluation(tmp_path: Path) -> None:
    rows = [
        {"step": step, "eval_loss": loss, "eval_bleu": bleu} for step, loss, bleu in ((0, 3, 1), (1, 1, 5), (2, 2, 4))
    ]
    rows.append({"step": 3, "eval_loss": "nan", "eval_bleu": "nan"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_result(tmp_path).best == 1 and read_result(tmp_path, "eval_bleu").best == 5
