"""Every layout at every ZeRO stage with every method trains as a plain loop does, or is rejected."""

import json
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from combinations import OTHERS, TUNINGS, Cell, cells
from ranks import forked, run
from shared import WORKER, eval_losses, losses, plain_loop, tiny
from test_trajectory import TOLERANCE, furthest

from benchmarks.results import append_result, earlier

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]  # the runs that its tests share
STEPS = 6
HAS_4_BITS = find_spec("bitsandbytes") is not None
TRIED = [cell for cell in cells() if not cell.refusals() and (HAS_4_BITS or cell.tuning != "qlora")]


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[Cell]:
    """Those of the tests that run; all but with -k."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return [cell for cell in TRIED if any(params.get("cell") is cell for params in calls)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, chosen: list[Cell]) -> Path:
    """Run each; one process cannot build an engine that splits less after one that splits."""
    folder = tmp_path_factory.mktemp("combinations")
    starts: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in chosen:
        starts[cell.layout, cell.ranks].append(cell)
    for (_, ranks), some in starts.items():
        own = [f"train.max_steps={STEPS}", "checkpoint.export=false", "checkpoint.every=0"]
        cases = [{"overrides": tiny(rows_file, folder, cell.name, *own, *cell.words)} for cell in some]
        (folder / "cases.json").write_text(json.dumps(cases))
        finished = run([*forked(ranks, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=900)
        assert finished.code == 0, finished.output[-6000:]
    return folder


@pytest.fixture(scope="module")
def found(runs: Path, rows_file: Path, chosen: list[Cell], request: pytest.FixtureRequest) -> dict[Cell, float]:
    """The largest difference of a run's losses, of training and validation, to the plain loop's."""

    @cache
    def reference(what: tuple[str, ...]) -> tuple[list[float], list[float]]:
        steady = next(word for word in TRIED[0].words if word.startswith("optim.eps"))
        return plain_loop(tiny(rows_file, runs, "reference", f"train.max_steps={STEPS}", steady, *what), STEPS)

    differences = {
        cell: max(
            furthest(losses(runs / "runs" / cell.name), reference(cell.what)[0]),
            furthest(eval_losses(runs / "runs" / cell.name), reference(cell.what)[1]),
        )
        for cell in chosen
    }
    for what in {cell.what for cell in chosen}:
        assert reference(what)[0][0] - reference(what)[0][-1] > 0.01, "losses that do not move prove nothing"
    if output := request.config.getoption("--record-combinations"):
        figures = {"measured": "combinations", "cells": {cell.name: value for cell, value in differences.items()}}
        command = ["scripts/test", "--tier=all", "tests/ranks/test_combinations.py", "--record-combinations", "FILE"]
        command += ["-k", request.config.option.keyword] if request.config.option.keyword else []
        append_result(output, earlier(output), command, figures, max(cell.ranks for cell in chosen))
    return differences


def test_each_is_met() -> None:
    assert {cell.tuning for cell in TRIED} | {"qlora"} == set(TUNINGS)
    assert {cell.other for cell in TRIED} == {"", *OTHERS}
    assert {cell.ranks for cell in TRIED} == {2, 4, 8}


@pytest.mark.parametrize("cell", TRIED, ids=lambda cell: cell.name)
def test_losses_are_those_of_a_plain_loop(cell: Cell, found: dict[Cell, float]) -> None:
    assert found[cell] < TOLERANCE
