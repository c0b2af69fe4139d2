"""The report of real runs: made while one goes on and at its end, and after a crash; what a run records for it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import deepspeed, forked, run
from shared import FAULTY, faulty_words, rows_of

from toolkit.cli import main


@pytest.mark.parametrize("launch", [forked, pytest.param(deepspeed, marks=pytest.mark.nightly)])
def test_a_run_that_is_killed_and_goes_on(launch: Callable[..., list[str]], rows_file: Path, tmp_path: Path) -> None:
    words = faulty_words(rows_file, tmp_path, "run", "report.enabled=true", "report.every=3", "evaluate.every=4")
    folder = tmp_path / "runs" / "run"
    fault = {"at": "step", "rank": 1, "step": 6, "do": "kill", "note": str(tmp_path / "note")}
    killed = run(forked(2, FAULTY, *words), cwd=tmp_path, FAULT=json.dumps(fault))
    assert not (folder / "DONE").exists(), killed.output[-2000:]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "loss": 1.')
    page = folder / "report.html"
    assert main(["report", str(folder), f"output={tmp_path}/crashed.html"]) == 0
    assert (
        ">failed<" in (tmp_path / "crashed.html").read_text()
        or ">stopped, unfinished<" in (tmp_path / "crashed.html").read_text()
    )

    command = launch(2, FAULTY, *words)
    finished = run(command, cwd=tmp_path, FAULT="{}")
    assert finished.code == 0, finished.output[-4000:]
    assert f"The report: {page}\n" in finished.output
    assert finished.output.index("The report: ") > finished.output.index("Everything is in ")
    text, printed = page.read_text(), finished.output.splitlines()
    assert printed[printed.index(f"The report: {page}") - 1] == "8 steps are too few to judge."
    assert "8 steps are too few: validation loss " in text
    assert ">finished<" in text and "started again after step " in text
    assert (folder / "report" / "loss.png").stat().st_size > 10_000

    starts = [json.loads(line) for line in (folder / "logs" / "starts.jsonl").read_text().splitlines()]
    assert [start["world_size"] for start in starts] == [2, 2]
    if launch is deepspeed:
        assert starts[1]["command"] == ["deepspeed", *command[1:]]
    assert len(json.loads((folder / "environment.json").read_text())["hosts"]) == 2
    card = json.loads((folder / "data.json").read_text())
    assert card["total_steps"] == 8
    for split in card["splits"].values():
        assert sum(split["counts"]) == split["samples"] > 0 and split["edges"][-1] >= split["longest"]
    for row in rows_of(folder):
        if "loss" in row:
            assert 0 < row["fastest_rank_s"] <= row["median_rank_s"] <= row["slowest_rank_s"]
            assert row["time"] > 1.7e9
