"""A run that cannot learn is reported before it starts, with overrides that mend it."""

import json
import re
from pathlib import Path

import pytest

from toolkit.cli import main as toolkit_main
from toolkit.config.load import load
from toolkit.config.schema import Packing, RunConfig
from toolkit.data.first_rows import estimated_samples
from toolkit.train.schedule import FEWEST_STEPS, Epoch, warn_of_short_run


def config(*overrides: str) -> RunConfig:
    return load(["recipe=chatglm", "model=glm_tiny", "train.epochs=1", *overrides]).cfg


def steps_of(line: str) -> dict[str, int]:
    """Return the overrides that a warning names, and the steps that it promises."""
    return {word: int(steps) for word, steps in re.findall(r"(?:: |; )([a-z][\w.= ]*?) \((\d+) steps\)", line)}


def test_a_packed_run_of_a_few_steps_names_what_to_change(said: list[str]) -> None:
    cfg = config("data.packing=packed", "batch.global_size=8")
    warn_of_short_run(cfg, Epoch(samples=285, sequences=4, per_step=8), 1, 2)
    line = said.pop()
    assert "too few optimizer steps to learn much: 1 (285 samples in 4 sequences" in line
    assert steps_of(line) == {"data.packing=none train.epochs=2": 72, "train.epochs=50": 50}


def test_each_override_does_what_is_promised(said: list[str]) -> None:
    cfg = config("batch.global_size=32")
    warn_of_short_run(cfg, Epoch(samples=285, sequences=285, per_step=32), 9, 2)
    line = said.pop()
    ways = steps_of(line)
    assert set(ways) == {"batch.global_size=4", "train.epochs=6"}
    for override, promised in ways.items():
        changed = config("batch.global_size=32", override)
        assert changed.train.epochs * -(-285 // changed.batch.global_size) == promised >= FEWEST_STEPS


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1_000_000_000, 999_999_937, 48, 8])
@pytest.mark.parametrize("epochs", [1, 7, 49, 60])
def test_the_largest_batch_of_enough_steps_is_found_at_once(size: int, epochs: int, said: list[str]) -> None:
    cfg = config(f"batch.global_size={size}", f"train.epochs={epochs}")
    warn_of_short_run(cfg, Epoch(samples=100, sequences=100, per_step=size), 1, 2)
    named = steps_of(said.pop())
    enough = [n for n in range(2, min(size, 200), 2) if -(-100 // n) * epochs >= FEWEST_STEPS]
    largest = (size - 1) // 2 * 2 if epochs >= FEWEST_STEPS else max(enough)
    assert [word for word in named if word.startswith("batch")] == [f"batch.global_size={largest}"]


@pytest.mark.parametrize("overrides", [[], ["data.packing=packed"], ["data.packing=grouped"]])
def test_a_run_of_enough_steps_is_not_reported(overrides: list[str], said: list[str]) -> None:
    warn_of_short_run(config(*overrides), Epoch(samples=9000, sequences=800, per_step=16), 50, 2)
    assert said == []


def test_steps_at_a_rate_of_zero_are_reported(said: list[str]) -> None:
    for schedule in ("cosine", "linear", "wsd"):
        warn_of_short_run(config(f"schedule={schedule}", "schedule.warmup_min_ratio=0"), None, 100, 2)
        line = said.pop()
        assert "schedule.warmup_min_ratio=-1" in line
        warn_of_short_run(config(f"schedule={schedule}"), None, 100, 2)
        assert said == []


def test_steps_that_were_asked_for(said: list[str]) -> None:
    warn_of_short_run(config("train.max_steps=20"), None, 20, 2)
    line = said.pop()
    assert line.startswith("train.max_steps = 20")


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"Where is {i}?"}, {"role": "assistant", "content": f"In hall {i}."}]}
        for i in range(300)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_rows_are_counted_up_to_what_matters(few: Path) -> None:
    data = config("data=chat.jsonl").data
    assert estimated_samples(data, 1000) == (285, 285)
    assert estimated_samples(data, 200) is None
    data.packing = Packing.packed
    samples, sequences = estimated_samples(data, 1000) or (0, 0)
    assert samples == 285 and 2 <= sequences <= 6
    data.max_samples = 100
    assert (estimated_samples(data, 1000) or (0, 0))[0] == 95
    data.sources[0].max_samples = 60
    assert (estimated_samples(data, 1000) or (0, 0))[0] == 57
    data.validation_rows = 20
    assert (estimated_samples(data, 1000) or (0, 0))[0] == 40


def test_check_reports_it_and_recipes_of_small_data_sets_have_enough_steps(
    few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "recipe=chatglm", "model=glm_tiny", "data=chat.jsonl", "world_size=2"]
    assert toolkit_main(words) == 0
    assert "too few" not in capsys.readouterr().out
    assert toolkit_main([*words, "data.packing=packed", "train.epochs=1"]) == 0
    assert "too few optimizer steps to learn much: 1 (285 samples" in capsys.readouterr().out
    assert toolkit_main(["check", "recipe=chatglm", "model=glm_tiny", "world_size=16"]) == 0
    out = capsys.readouterr().out
    assert "too few" not in out and out.splitlines()[-1].startswith("EXAMPLE DATA")
