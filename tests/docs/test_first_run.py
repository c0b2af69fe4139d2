"""The page of the first run is followed as a reader would who has a processor and conversations of their own. Its
processes are forks: tests/test_readme.py has the launcher and the command `toolkit`.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from pages import ROOT, blocks, chinese, commands
from ranks import forked, run

from scripts import record_plans

PAGE = ROOT / "docs" / "first_run.md"


@pytest.mark.ranks
def test_a_reader_without_a_gpu_comes_to_a_model(tmp_path: Path) -> None:
    """The recipe, the row and the commands are the page's; the run is called try-1, as there."""
    (recipe,), (row,) = blocks(PAGE, "yaml"), blocks(PAGE, "json")
    (tmp_path / "mine.yaml").write_text(recipe.body, encoding="utf-8")
    rows = [row.body.replace("parcel", f"parcel {number}") for number in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(rows), encoding="utf-8")
    lines = [line for _, line in commands(PAGE)]
    (training,) = [line for line in lines if "model=glm_tiny" in line]
    assert training.startswith("toolkit launch --num_gpus 2 ")
    words = [str(ROOT / "run.py"), *shlex.split(training)[4:]]
    assert run(forked(2, *words, "train.max_steps=2"), cwd=tmp_path).code == 0
    (name,) = re.findall(r"run\.name=(\S+)", training)
    assert (tmp_path / "runs" / name / "DONE").is_file()
    later = [line for line in lines if line.startswith(("toolkit eval", "toolkit export-model"))]
    assert len(later) == 2
    for line in later:
        words = shlex.split(line.replace("runs/mine-1", f"runs/{name}").replace("/models/", f"{tmp_path}/"))
        more = ["evaluate.max_new_tokens=4"] if words[1] == "eval" else []
        finished = run(forked(0, "--module", "toolkit", *words[1:], *more), cwd=tmp_path)
        assert finished.code == 0, f"{line}\n{finished.output[-2000:]}"
    assert json.loads((tmp_path / "mine-1" / "config.json").read_text())["model_type"] == "glm"


@pytest.mark.parametrize("page", [PAGE, chinese(PAGE)], ids=lambda page: page.name)
def test_recipes_for_gpus_need_what_the_plan_computes(page: Path) -> None:
    row = re.compile(r"\| `(\d)(x\d+GB)` \| .* \| `--num_gpus (\d) recipe=(\w+) ?(.*)` \| ([\d.]+) \| ([\d.]+) \|")
    rows = [found.groups() for line in page.read_text(encoding="utf-8").splitlines() if (found := row.fullmatch(line))]
    assert len(rows) == 4
    for number, gpu, ranks, recipe, overrides, device, host in rows:
        card = record_plans.plan(recipe, number + gpu, overrides)
        assert (number, device, host) == (ranks, card.device, card.host)


@pytest.mark.parametrize(("tail", "minutes"), [("", "minutes"), ("_zh", "分钟")])
def test_the_time_of_the_quickstart_is_that_of_the_page_of_installation(tail: str, minutes: str) -> None:
    """It is measured once; other pages repeat the sum, and name no other time of it."""
    table = (ROOT / "docs" / f"installation{tail}.md").read_text(encoding="utf-8")
    (row,) = [line for line in table.splitlines() if "`scripts/quickstart`" in line and minutes in line]
    total, *parts = map(float, re.findall(r"\b\d[\d.]*(?=[ :])", row.partition("（实测")[0].partition(" (measured")[0]))
    assert len(parts) == 2 and total == sum(parts)
    for page in (f"README{tail}.md", f"docs/index{tail}.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.findall(rf"([\d.]+) {minutes}", text) == [f"{total:g}"], page
        assert not re.search("(few|[Tt]hree|Four) minutes|[几两]分钟", text), page
    (training,) = re.findall(r"(\d+) minutes", (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
    assert float(training) == parts[1]
