"""The figures of docs/proving.md are those of the files that it links."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pages import ROOT

PAGES = ["docs/proving.md", "docs/proving_zh.md"]


def relative(run: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative difference of the toolkit's and the Trainer's losses and norms."""
    pairs = list(zip(run["toolkit"], run["trainer"], strict=True))
    return {name: max(abs(ours[name] / theirs[name] - 1) for ours, theirs in pairs) for name in ("loss", "grad_norm")}


def short(number: float) -> str:
    """Return a number as the page writes it: 1.1e-7."""
    return re.sub(r"e-0", "e-", f"{number:.1e}").replace(".0e", "e")


def of_trainer(record: Any) -> Iterator[list[str]]:
    for run in (record, record["two_ranks_zero3_packed"]):
        yield [short(value) for value in relative(run).values()]


def of_peers(record: Any) -> Iterator[list[str]]:
    runs = {name: [row["real_tokens_per_s"] for row in rows] for name, rows in record[0]["runs"].items()}
    ours = next(rates for name, rates in runs.items() if name.startswith("this toolkit"))
    figures = []
    for program in ("HF Trainer", "LLaMA-Factory"):
        theirs = next(rates for name, rates in runs.items() if name.startswith(program))
        ratios = [rate / other for rate, other in zip(ours, theirs, strict=True)]
        figures += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    yield figures


def of_compiled(record: Any) -> Iterator[list[str]]:
    for machine in record:
        runs = {name: [row["real_tokens_per_s"] for row in rows] for name, rows in machine["runs"].items()}
        theirs = next(rates for name, rates in runs.items() if name.startswith("HF Trainer") and len(rates) == 3)
        figures = []
        for ours in (rates for name, rates in runs.items() if name.startswith("this toolkit")):
            ratios = [rate / other for rate, other in zip(ours, theirs, strict=True)]
            figures += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
        yield figures


def of_types(record: Any) -> Iterator[list[str]]:
    trained = [cells for cells in record[0]["types"].values() if "loss" in cells.get("full", ())]
    losses = [cell["loss"] for cells in trained for cell in cells.values() if "loss" in cell]
    yield [str(len(trained)), f"{max(losses):.0e}".replace("e-0", "e-")]


def of_resumed(record: Any) -> Iterator[list[str]]:
    """Of all resumed steps but those in bf16."""
    runs = [run["resumed"] for name, run in record["runs"].items() if "bf16" not in name]
    steps = [pair for run in runs for pair in zip(run["here"], run["there"], strict=True)]
    yield [short(max(abs(here[name] / there[name] - 1) for here, there in steps)) for name in ("loss", "grad_norm")]


def of_pairs(record: Any) -> Iterator[list[str]]:
    losses = [record[data]["first_loss"] for data in ("ordinary", "long prompts")]
    largest = max(abs(loss[other] / loss["ours"] - 1) for loss in losses for other in ("trl", "llamafactory"))
    yield [f"{largest:.0e}".replace("e-0", "e-")]


def of_combinations(record: Any) -> Iterator[list[str]]:
    cells = record[0]["cells"]
    yield [str(len(cells)), short(max(cells.values()))]


def of_versions(record: Any) -> Iterator[list[str]]:
    """Of single versions whose gradients were compared, or of sets that all checks are about, with their minutes."""
    if "gradients" not in record[0]:
        assert {row["title"] for row in record} == {"oldest", "newest"}
        assert all(check["is_right"] for row in record for check in row["checks"].values())
        yield []
        proved = [row["checks"][name]["seconds"] / 60 for row in record for name in row["checks"] if "zero" in name]
        yield [f"{min(proved):.1f}", f"{max(proved):.1f}"]
        return
    wrong = {row["versions"]["deepspeed"] for row in record if row["gradients"] != "right"}
    right = {row["versions"]["deepspeed"] for row in record if row["gradients"] == "right"}
    assert right == {"0.19.8"} and not right & wrong
    yield sorted(wrong | right)


def of_kills(record: Any) -> Iterator[list[str]]:
    tests = record[0]["faults"]["K5"]["tests"]
    assert record[0]["passed"] and all(test["outcome"] == "passed" for test in tests)
    yield [str(sum(len(test["measured"]["killed"].split(", ")) for test in tests))]


def of_plan(record: Any) -> Iterator[list[str]]:
    cells = [cell for row in record for cell in row.get("cells", {}).values()]
    ratios = [row["memory_ratio"] for row in [*record, *cells] if "memory_ratio" in row]
    ratios += [cell["planned_bytes"]["evaluation"] / cell["measured_bytes"]["evaluation"] for cell in cells]
    yield [f"{round(100 * (1 - min(ratios)))} %", f"{round(100 * (max(ratios) - 1))} %"]


def of_gpu_first(record: Any) -> Iterator[list[str]]:
    """Of the record that has the stages of tests."""
    (stages,) = [row["stages"] for row in record if "tests" in row.get("stages", ())]
    figures = [stages[name]["figures"] for name in ("kernels", "tests")]
    yield [f"{sum(len(figure[kind]) for figure in figures)}" for kind in ("passed", "failed")]


def of_gpu(record: Any) -> Iterator[list[str]]:
    parts = [part for row in record for part in row["parts"].values() if "planned_memory_bytes" in part]
    ratios = [part["planned_memory_bytes"] / part["device_memory_peak_bytes"] for part in parts]
    yield [f"{100 * (1 - min(ratios)):.1f} %", f"{100 * (max(ratios) - 1):.1f} %"]


FIGURES = {
    "2026-11-28-trainer.json": of_trainer,
    "2026-11-29-real-peers.json": of_peers,
    "2026-11-30-compiled.json": of_compiled,
    "2026-11-30-resumed.json": of_resumed,
    "2026-11-28-types.json": of_types,
    "2026-11-25-pairs.json": of_pairs,
    "2026-11-26-combinations.json": of_combinations,
    "2026-11-25-versions.json": of_versions,
    "2026-11-27-versions.json": of_versions,
    "2026-11-27-kills.json": of_kills,
    "2026-11-22-plan.json": of_plan,
    "2026-11-29-gpu-first.json": of_gpu_first,
    "2026-11-29-gpu.json": of_gpu,
}


@pytest.mark.parametrize("page", ["docs/planning.md", "docs/planning_zh.md"])
def test_the_page_of_planning_has_the_figures_of_the_gpu(page: str) -> None:
    record = json.loads((ROOT / "benchmarks" / "2026-11-29-gpu.json").read_text(encoding="utf-8"))
    (line,) = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "6B" in line]
    assert [figure for figures in of_gpu(record) for figure in figures if figure not in line] == []


@pytest.mark.parametrize("page", ["docs/coming_from.md", "docs/coming_from_zh.md"])
def test_the_page_on_other_programs_has_the_figures_of_resumed_runs(page: str) -> None:
    record = json.loads((ROOT / "benchmarks" / "2026-11-30-resumed.json").read_text(encoding="utf-8"))
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [
        line
        for line in lines
        if line.startswith(("| LLaMA-Factory", "| axolotl", "| ms-swift")) and line.count(" | ") == 4
    ]
    firsts = [(run["resumed"]["there"][0], run["resumed"]["here"][0]) for run in record["runs"].values()]
    for row, (there, here) in zip(rows, firsts, strict=True):
        cells = [
            f"{side[name]:.{digits}f}" for name, digits in (("loss", 7), ("grad_norm", 6)) for side in (there, here)
        ]
        assert row.strip("| ").split(" | ")[1:] == cells
    started = [run["from_the_start"] for run in record["runs"].values() if "from_the_start" in run]
    losses = [abs(h["loss"] / t["loss"] - 1) for run in started for h, t in zip(run["here"], run["there"], strict=True)]
    unchanged = record["template_as_it_is"]
    shown = [short(max(losses)), *(f"{unchanged[side][0]['loss']:.3f}" for side in ("there", "here"))]
    assert [figure for figure in shown if figure not in "\n".join(lines)] == []


@pytest.mark.parametrize("page", PAGES)
def test_as_many_rows_have_real_weights_as_the_page_says(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    compared = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")]
    assert sum("Trainer" in cell for cell in compared) == 5
    assert "five rows that compare with Trainer" in text or "与 Trainer 对比的五行" in text


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_readme_has_the_figure_of_the_real_model(page: str) -> None:
    record = json.loads((ROOT / "benchmarks" / "2026-11-28-trainer.json").read_text(encoding="utf-8"))
    (line,) = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "docs/proving" in line]
    assert short(relative(record)["loss"]) in line


@pytest.mark.parametrize("page", PAGES)
def test_each_file_that_is_linked_has_the_figures(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    linked = {name for line in lines for name in re.findall(r"benchmarks/([\w-]+\.json)", line)}
    assert linked == set(FIGURES)
    for name in linked:
        record = json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))
        rows = [line for line in lines if f"/{name})" in line]
        for row, figures in zip(rows, FIGURES[name](record), strict=True):
            assert [figure for figure in figures if figure not in row] == [], row
