"""The report of a run: what it reads, what it makes, and what it leaves alone."""

import json
import math
import os
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_runs import HOSTILE, fake_run, lines, row
from tests.unit.made_processes import make_processes
from toolkit import disk
from toolkit.cli import main
from toolkit.config.schema import Metric
from toolkit.launch.ancestors import typed_command
from toolkit.launch.environment import STATUS_VARIABLE, without_ranks
from toolkit.report import page as page_module, run as run_module
from toolkit.report.figures import NAMES, draw, events_of
from toolkit.report.run import FAILED, RUNNING, UNFINISHED, distinct_names, read_run
from toolkit.train.report import AutomaticReport


class Page(HTMLParser):
    """The elements of a page and its text, as a browser parses it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.inside: list[str] = []
        self.data: dict[str, str] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.inside.append(dict(attrs).get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        name = self.inside[-1] if self.inside else ""
        self.data[name] = self.data.get(name, "") + data


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes seconds: the pictures."""
    monkeypatch.setattr("toolkit.report.page.png", lambda drawing: b"a picture")


def report(*words: str, code: int = 0) -> None:
    assert main(["report", *words]) == code


def test_a_run_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "mine")
    report(str(folder))
    assert capsys.readouterr().out.startswith(f"The report: {folder}/report.html\n")
    page = Page((folder / "report.html").read_text())
    charts = json.loads(page.data["charts"])["specs"]
    expected = {
        "loss",
        "learning-rate",
        "grad-norm",
        "answers",
        "tokens",
        "step-parts",
        "ranks",
        "stragglers",
        "memory",
    }
    assert set(charts) == expected | {"padding", "padding-histogram", "lengths"}
    assert {path.stem for path in (folder / "report").iterdir()} == set(charts)
    for path in (folder / "report").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    for text in ("4.00", "deepspeed --num_gpus 2 run.py recipe=quickstart", "started again after step 20"):
        assert text in page.text, text
    assert "Until it ended at step 40: 40 steps are too few: validation loss 8.00 → 4.00." in page.text
    assert "2.81" in page.text and "from 7.71" in page.text, "the losses of the last step and of the first"
    assert not {"link", "img", "iframe", "object"} & set(page.elements), "nothing is fetched"
    assert "data.max_length: 0.250 s per step, 4,320 tokens/s. Shorter rows take less." in page.text
    assert "weights 1.00, logits and loss 0.500" in page.text
    before = (folder / "report.html").stat().st_ino
    for name in ("step-time.png", "mine.png", "answers-mine.png"):
        (folder / "report" / name).write_bytes(b"of another report, or mine")
    report(str(folder))
    assert (folder / "report.html").stat().st_ino != before
    there = {path.stem for path in (folder / "report").iterdir()}
    assert there == {*charts, "mine", "answers-mine"}, "what it cannot have made stays"
    assert not [path for path in folder.rglob("*.tmp")]


def test_a_page_has_its_charts_without_what_draws_the_pictures(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake_run(tmp_path / "mine")
    said = "No pictures of its charts: they need a package.  pip install vl-convert-python\n"
    report(str(folder))
    page, pictures = (folder / "report.html").read_text(), list((folder / "report").iterdir())
    assert said not in capsys.readouterr().out and pictures
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    report(str(folder))
    told = capsys.readouterr().out
    assert said in told and "as pictures" not in told
    assert not list((folder / "report").iterdir()), "those of the report before would be out of date"
    without = (folder / "report.html").read_text()
    charts, others = (json.loads(Page(text).data["charts"])["specs"] for text in (page, without))
    assert set(charts) == set(others) == {path.stem for path in pictures}
    assert "window.vegaEmbed" in without, "what draws them in the browser is in the page"
    report(str(folder), f"output={tmp_path}/other.html")
    assert not (tmp_path / "other").exists()


def test_the_library_of_the_page_is_that_of_the_packages() -> None:
    from bundle_vega import TARGET, bundle

    stored, made = TARGET.read_text(encoding="utf-8"), bundle()
    if (head := made.partition("\n")[0]) != stored.partition("\n")[0]:
        pytest.skip(f"other packages are installed: {head}")
    assert stored == made, "python scripts/bundle_vega.py"


def test_ngram_baselines_are_lines_of_the_loss_chart(quick: None, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "mine")
    (folder / "DONE").write_text(json.dumps({"unigram_loss": 6.25, "bigram_loss": "damaged", "steps": 40}))
    report(str(folder))
    chart = json.dumps(json.loads(Page((folder / "report.html").read_text()).data["charts"])["specs"]["loss"])
    assert '"y": 6.25' in chart and "damaged" not in chart


def test_a_smoothed_curve_neither_leads_nor_lags(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "mine", 200)
    lines(folder / "metrics.jsonl", [row(step, loss=500.0 - step) for step in range(1, 201)])
    [drawing] = draw([read_run(folder)])["learning"][:1]
    [values, *_] = drawing.definition.to_dict()["datasets"].values()
    smoothed = [(one["x"], one["y"]) for one in values if one["s"] == "training, smoothed"]
    assert smoothed == [(step, 500.0 - step) for step in range(1, 201)]
    assert drawing.note == "Pale: values as logged. Smoothed: the mean of 11 points, centred."


def test_parts_of_a_step_are_shares_the_largest_first(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "mine")
    drawing = next(one for one in draw([read_run(folder)])["speed"] if one.name == "step-parts")
    [values] = drawing.definition.to_dict()["datasets"].values()
    assert [one["text"] for one in values] == [
        "backward pass, gradient reduction, optimizer: 40.0 %",
        "forward pass: 38.0 %",
        "waiting for the slowest rank: 20.0 %",
        "waiting for data: 2.00 %",
    ]
    rows = [{"step": step, "step_s": 0.5, "data_wait_s": 0.01} for step in (1, 2)]
    lines(folder / "metrics.jsonl", rows)
    drawing = next(one for one in draw([read_run(folder)])["speed"] if one.name == "step-parts")
    [values] = drawing.definition.to_dict()["datasets"].values()
    assert [one["text"] for one in values] == ["forward, backward, optimizer: 98.0 %", "waiting for data: 2.00 %"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.101315, "0.101"),
        (7.6583, "7.66"),
        (999.6, "1,000"),
        (2137.4, "2,140"),
        (0, "0.00"),
        (-0.5, "-0.500"),
        (2e-5, "2.00e-05"),
    ],
)
def test_measured_numbers_have_three_digits(value: float, text: str) -> None:
    assert run_module.digits(value) == text


def test_text_stays_text(quick: None, tmp_path: Path) -> None:
    plain, hostile = fake_run(tmp_path / "plain"), fake_run(tmp_path / "hostile", text=HOSTILE)
    (hostile / "FAILED").write_text(HOSTILE)
    lines(hostile / "logs" / "bad-step-7.jsonl", [{"step": 7, "text": HOSTILE}])
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(41, bad_steps=1, skipped_steps=1)) + "\n")
    report(str(plain))
    report(str(hostile))
    pages = [Page((folder / "report.html").read_text()) for folder in (plain, hostile)]
    assert pages[1].text.count("{{7*7}}") > 20
    for page in pages:
        assert page.elements.count("script") == 3 and "img" not in page.elements
    assert pages[1].text.count("</script><script>document.title") > 20
    assert "\u202e" not in pages[1].text and "\\u202e" in pages[1].text
    spec = json.loads(pages[1].data["charts"])["specs"]
    assert "</script>" in json.dumps(spec), "also in the charts' own data"


def test_a_file_cut_anywhere_is_read(tmp_path: Path) -> None:
    whole = "".join(json.dumps(row(step)) + "\n" for step in range(1, 11)).encode()
    file = tmp_path / "metrics.jsonl"
    for end in range(len(whole) - 600, len(whole), 7):
        file.write_bytes(whole[:end])
        found = run_module.read_history(file)
        complete = whole[:end].count(b"\n") + (whole[:end].endswith(b"}"))
        assert found.training.rows == complete and found.unreadable == (1 if whole[:end].split(b"\n")[-1] else 0) - (
            whole[:end].endswith(b"}")
        )


def test_what_is_no_number_is_an_event(tmp_path: Path) -> None:
    found = [row(1), row(2, loss="nan", grad_norm="inf"), row(3, bad_steps=1, skipped_steps=1), row(4, bad_steps=1)]
    strange = {"loss": None, "lr": "what", "step_s": 10**400, "tokens_per_s": True}
    found += [{**row(5, bad_steps=1, rewinds=1), **strange}]
    found += [{"step": "x"}, {"eval_loss": 3.0}, {"step": 5, "eval_loss": "nan"}]
    lines(tmp_path / "metrics.jsonl", [*found, [1], 7])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe not text\n" + b"[" * 100_000 + b"\n" + b" " * disk.LONGEST_LINE + b"{}\n")
    history = run_module.read_history(tmp_path / "metrics.jsonl")
    assert [(step, name) for name, step, _ in history.events] == [
        *((2, "grad_norm"), (2, "loss"), (3, "bad_steps"), (3, "skipped_steps")),
        *((5, "eval_loss"), (5, "rewinds")),
    ]
    assert history.unreadable == 7
    assert [step for step, _ in history.training.series("loss")] == [1, 3, 4]
    assert history.training.last("step_s") == 0.5
    run = read_run(tmp_path)
    kinds = ["NaN or Inf", "NaN or Inf", "bad step", "NaN or Inf", "rewind"]
    assert [event.kind for event in events_of(run)] == kinds
    assert all(math.isfinite(point.mean) for _, point in history.training.series("loss"))
    assert "loss" in [drawing.name for drawing in draw([run])["learning"]]


def test_a_bad_step_is_shown_where_it_was(tmp_path: Path) -> None:
    """The row of a step that a run went back from is gone; its file stays."""
    rows = [row(step, bad_steps=int(step > 100), rewinds=int(step > 100)) for step in range(1, 200)]
    lines(tmp_path / "metrics.jsonl", rows)
    lines(tmp_path / "logs" / "bad-step-150.jsonl", [{"step": 150, "text": "the loss is NaN"}, {"step": 150}])
    found = [(event.step, event.kind, event.text) for event in events_of(read_run(tmp_path))]
    assert found == [(101, "rewind", "went back to a checkpoint"), (150, "bad step", "the loss is NaN")]
    # It goes wrong again, with other data; of two more a full disk kept no file.
    lines(tmp_path / "logs" / "bad-step-150-2.jsonl", [{"step": 150, "text": "a spike"}])
    lines(tmp_path / "metrics.jsonl", [*rows, row(200, bad_steps=4, rewinds=1)])
    found = [(event.step, event.text) for event in events_of(read_run(tmp_path)) if event.kind == "bad step"]
    assert found == [(150, "a spike"), (150, "the loss is NaN"), (200, "steps with NaN or Inf, or a spike: 2")]


def test_a_run_from_another_ones_checkpoint_begins_there(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines(tmp_path / "logs" / "starts.jsonl", [{"from_step": 5000}])
    rows = [row(step, step_s=1.0, skipped_steps=3, bad_steps=2, rewinds=1) for step in range(5010, 5101, 10)]
    lines(tmp_path / "metrics.jsonl", rows)
    history = read_run(tmp_path).history
    assert history.seconds == 100 and history.events == []
    lines(tmp_path / "metrics.jsonl", [*rows, row(5110, step_s=1.0, skipped_steps=4, bad_steps=2, rewinds=1)])
    assert read_run(tmp_path).history.events == [("skipped_steps", 5110, 1)]


def test_many_rows_become_few_points_and_spikes_stay(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    line = json.dumps(row(0, loss=2.0)).replace('"step": 0', '"step": %d')
    with file.open("w") as out:
        for step in range(1, 30_001):
            out.write((line % step).replace('"loss": 2.0', '"loss": 77.0' if step == 12_345 else '"loss": 2.0') + "\n")
            if step % 10 == 0:
                out.write(f'{{"step": {step}, "eval_loss": {5 if step != 20_000 else 1}}}\n')
    history = run_module.read_history(file)
    found = history.training.series("loss")
    assert run_module.LIMIT <= len(found) < 2 * run_module.LIMIT and history.training.width == 64
    assert [step for step, point in found if point.most == 77] == [next(step for step, _ in found if step >= 12_345)]
    assert sum(point.mean * 64 for _, point in found[:-1]) == pytest.approx(2 * 64 * (len(found) - 1) + 75)
    assert found[-1][0] == 30_000 and history.seconds == pytest.approx(15_000)
    assert history.best == (1, 20_000) and len(history.evaluations) < 2 * run_module.LIMIT
    assert history.evaluations[-1]["step"] == 30_000


def test_a_large_file_of_answers_is_read_at_its_beginning(tmp_path: Path) -> None:
    text = "x" * 10_000
    for step in range(12):
        one = json.dumps({"where": "f:1", "prompt": "p", "output": text, "reference": "r"})
        with (tmp_path / f"step-{step}.jsonl").open("w") as file:
            file.writelines(f"{one}\n" for _ in range(run_module.LINES))
            file.truncate(10**9)  # a million more, as far as the size says
    (tmp_path / "step-x.jsonl").write_text("of somebody else")
    began = time.process_time()
    found = run_module.read_answers(tmp_path)
    assert time.process_time() - began < 2
    assert found.steps == [0, 3, 6, 8, 11] and found.evaluations == 12
    assert len(found.samples[0].answers[11]) == run_module.LETTERS + 1


def test_runs_of_one_name_are_told_apart(quick: None, tmp_path: Path) -> None:
    folders = [fake_run(tmp_path / parent / "same") for parent in ("a", "b")]
    other = fake_run(tmp_path / "other", 40, "optim.lr=0.5")
    runs = [read_run(folder) for folder in (*folders, other)]
    distinct_names(runs)
    assert [run.name for run in runs] == ["a/same", "b/same", "other"]
    assert [(one.key, one.values) for one in page_module.differences_between(runs)] == [
        ("optim.lr", ["0.002", "0.002", "0.5"])
    ]
    page = tmp_path / "all.html"
    report(*map(str, (*folders, other)), f"output={page}", "language=zh")
    text = Page(page.read_text()).text
    assert "3 次训练的对比" in text and "a/same · 训练（平滑）" not in text and "b/same" in text
    assert (tmp_path / "all" / "loss.png").is_file()


def test_every_chart_is_known_by_name(tmp_path: Path) -> None:
    folders = [fake_run(tmp_path / name) for name in ("a", "b")]
    rewards = {f"rewards/{name}": 0.1 for name in ("chosen", "rejected", "margins", "accuracies")}
    taught = {"loss_scale": 2.0, "distill/kl": 0.3, "expert_load_max": 1.5, **rewards}
    taught |= {"router_entropy": 0.9, "expert_dropped": 0.01}
    scores = {"eval_loss": 1.0, "eval_general_loss": 1.5, **{f"eval_{metric.value}": 0.5 for metric in Metric}}
    for folder in folders:
        (folder / "experts.json").write_text(json.dumps({"step": 42, "loads": {"1": [2, 2]}}))
        with (folder / "metrics.jsonl").open("a") as file:
            for step in (41, 42):
                file.write(json.dumps(row(step, **taught)) + "\n" + json.dumps({"step": step, **scores}) + "\n")
    runs = [read_run(folder) for folder in folders]
    distinct_names(runs)
    drawn = {one.name for some in (runs, runs[:1]) for section in draw(some).values() for one in section}
    assert drawn == NAMES


def test_pairs_have_charts_of_rewards_and_of_the_reference(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "pairs")
    figures = {f"rewards/{name}": 0.1 for name in ("chosen", "rejected", "margins", "accuracies")} | {"kl": -0.3}
    evaluated = {"eval_loss": 1.0, "eval_pairs": 7, "eval_kl": 0.2, "eval_rewards/accuracies": 0.9}
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (41, 42):
            file.write(json.dumps(row(step, **figures)) + "\n" + json.dumps({"step": step, **evaluated}) + "\n")
    drawn = {one.name: one for one in draw([read_run(folder)])["learning"]}
    assert drawn["divergence"].title == "Divergence from the reference"
    found = {name: json.dumps(one.definition.to_dict()) for name, one in drawn.items()}
    assert '"s": "bleu"' in found["answers"] and not any(f'"s": "{one}"' in found["answers"] for one in ("kl", "pairs"))
    assert '"y": -0.3' in found["divergence"] and '"y": 0.2' in found["divergence"]
    assert all(f'"s": "{name}"' in found["rewards"] for name in ("chosen", "rejected", "margins"))
    assert '"y": 0.9' in found["reward-accuracy"]


def test_experts_loads_are_a_heat_map(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "mixture", 3)
    damaged = {"2": [1, "x"], "3": None, "4": [], "5": [0, 0], "6": [-1, 2], "7": [True, 2]}
    loads = {"1": [6, 2, 0, 4], HOSTILE: [1, 1, 1, 1], **damaged}
    (folder / "experts.json").write_text(json.dumps({"step": 3, "loads": loads}))
    report(str(folder))
    page = Page((folder / "report.html").read_text())
    chart = json.loads(page.data["charts"])["specs"]["experts"]
    rows = {one["row"]: one["v"] for one in next(iter(chart["datasets"].values()))}
    assert rows.pop("1") == [2, 0.66667, 0, 1.3333] and list(rows.values()) == [[1, 1, 1, 1]]
    assert "up to step 3" in page.text and not {"img"} & set(page.elements)
    assert (folder / "report" / "experts.png").stat().st_size > 10_000
    for broken in ("[]", "{", '{"loads": 3}', json.dumps({"loads": {str(one): [1] * 2**10 for one in range(65)}})):
        (folder / "experts.json").write_text(broken)
        assert "experts" not in {one.name for one in draw([read_run(folder)])["learning"]}, broken[:20]


def test_a_sweep_is_compared(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = tmp_path / "swept"
    swept.mkdir()
    (swept / "sweep.json").write_text("{")  # is not read
    report(str(swept), code=2)
    assert f"{swept}: no run of this sweep has metrics yet." in capsys.readouterr().err
    folders = [fake_run(swept / f"lr-{lr}", 40, f"optim.lr={lr}") for lr in (0.1, 0.2)]
    (swept / "lr-0.3").mkdir()
    (swept / "lr-0.4").mkdir()
    (swept / "lr-0.4" / "metrics.jsonl").touch()
    for _ in range(2):  # the pictures of the first are no run
        report(str(swept))
        assert capsys.readouterr().out.startswith(f"The report: {swept}/report.html\n")
    text = Page((swept / "report.html").read_text()).text
    assert "2 runs compared" in text and "lr-0.1" in text and "lr-0.2" in text and "lr-0.3" not in text
    assert (swept / "report" / "loss.png").is_file()
    other = fake_run(tmp_path / "other", 3)
    report(str(swept), str(other), f"output={tmp_path}/all.html")
    assert "3 runs compared" in (tmp_path / "all.html").read_text()
    report(str(swept), str(folders[0]), code=2)
    assert "these are the same run" in capsys.readouterr().err
    shutil.rmtree(folders[1])
    report(str(swept))
    assert "lr-0.2" not in (swept / "report.html").read_text() and not (folders[0] / "report.html").exists()


@pytest.mark.parametrize(
    ("hosts", "start"),
    [
        (["a"] * 8, "deepspeed --num_gpus 8 run.py"),
        (["a"] * 4 + ["b"] * 4, "toolkit launch hostfile=hostfile"),
        (["a"], "python run.py"),
    ],
)
def test_do_it_again(hosts: list[str], start: str, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 3)
    (folder / "environment.json").write_text(json.dumps({"world_size": len(hosts), "hosts": hosts}))
    assert page_module.commands(read_run(folder))[-1][1] == f"{start} recipe={folder}/config.yaml run.name=NAME"


def test_a_run_is_compared_with_its_recipe(tmp_path: Path) -> None:
    run = read_run(fake_run(tmp_path / "run", 3, "optim.lr=0.5"))
    changed, has_recipe = page_module.differences_of_run(run)
    assert has_recipe
    assert [one.key for one in changed if one.is_new] == ["optim.lr", "train.max_steps", "evaluate.prompts"]
    assert next(one.values for one in changed if one.key == "optim.lr") == ["0.5", "0.002", "2.0e-05"]
    run.config["recipe"] = "gone"
    changed, has_recipe = page_module.differences_of_run(run)
    assert not has_recipe and "train.max_steps" in {one.key for one in changed}


def test_each_setting_of_a_data_source_has_a_row(tmp_path: Path) -> None:
    run = read_run(fake_run(tmp_path / "run", 3, "data.sources=[{path: a.jsonl, columns: {prompt: q}, weight: 2}]"))
    changed, _ = page_module.differences_of_run(run)
    assert {one.key: list(one.values) for one in changed if one.key.startswith("data.sources")} == {
        "data.sources[0].path": ["a.jsonl", "—", "—"],
        "data.sources[0].columns.prompt": ["q", "—", "—"],
        "data.sources[0].weight": ["2.0", "—", "—"],
        "data.sources[0].format": ["—", "docstrings", "—"],
    }


def test_a_custom_model_is_paced_in_samples(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "own", 3)
    (folder / "data.json").write_text('{"program": "own.py", "model": "Net"}')
    lines(folder / "metrics.jsonl", [{"step": step, "samples_per_s": 40.0, "step_s": 0.5} for step in (1, 2)])
    table = page_module.overview([read_run(folder)])
    assert dict(zip(table.heads, table.rows[0], strict=True))["per second"] == "40.0 samples"
    assert "token" not in " ".join([*table.heads, *table.rows[0]])


def write_lock(folder: Path, pid: int, host: str, since: float | None = None) -> None:
    """Sign a run's lock as its rank 0 does."""
    signed = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(since))
    (folder / "run.lock").write_text(json.dumps({"pid": pid, "host": host, "since": signed}))


def test_a_run_is_running_as_long_as_its_process_is_there(tmp_path: Path) -> None:
    folder, here = fake_run(tmp_path / "run", 3), os.uname().nodename
    write_lock(folder, os.getpid(), here, since=1_577_836_800.0)
    assert read_run(folder).status == UNFINISHED, "this process has only got the number"
    beat = folder / "logs" / "heartbeat-rank-0.json"
    beat.touch()
    write_lock(folder, 2**30, here)
    assert read_run(folder).status == UNFINISHED
    write_lock(folder, 2**30, "another-node")
    assert read_run(folder).status == RUNNING
    os.utime(beat, (time.time() - 600, time.time() - 600))
    assert read_run(folder).status == UNFINISHED
    beat.unlink()
    assert read_run(folder).status == UNFINISHED
    for text in ('{"pid": null, "host": 3}', json.dumps({"pid": "x", "host": here, "since": 4}), "[]"):
        (folder / "run.lock").write_text(text)
        assert read_run(folder).status == UNFINISHED


def test_an_empty_run_and_a_copy(quick: None, tmp_path: Path) -> None:
    died = tmp_path / "died"
    lines(died / "logs" / "starts.jsonl", [{"time": "x", "from_step": "y", "command": 3}, {}, {"from_step": True}])
    report(str(died))
    assert "No step has been logged yet." in (died / "report.html").read_text()
    assert read_run(died).status == UNFINISHED
    write_lock(died, os.getpid(), os.uname().nodename)
    assert read_run(died).status == RUNNING
    (died / "FAILED").write_text("rank 0\nboom")
    assert read_run(died).status == FAILED
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(fake_run(tmp_path / "run"), copy)
    (copy / "config.yaml").write_text("- no\n- mapping\n")
    (copy / "plan.json").write_text("{")
    (copy / "environment.json").write_bytes(b"\xff")
    (copy / "data.json").write_text(
        '{"splits": {"train": {"edges": [1], "counts": "x"}}, "sources": [3], "dropped": 4}'
    )
    report(str(copy), f"output={tmp_path}/copied.html")
    assert "copy" in Page((tmp_path / "copied.html").read_text()).text


def test_nothing_else_is_touched(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "run", 3)
    (tmp_path / "notes.html").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "loss.png").write_text("mine")
    cases = {
        str(tmp_path / "nothing"): "there is no directory",
        f"{folder} {folder}/../run": "these are the same run. Name each once.",
        f"{folder} output={tmp_path}/notes.html": "already exists and is not a report; it is not touched",
        f"{folder} output={tmp_path}/mine.html": "already exists and is not of a report; it is not touched",
        f"{folder} output={tmp_path}/report.txt": "must end in .html",
        f"{folder} --open": "unknown option --open",
        f"{folder} language=fr": "language = fr must be",
        "": "which run? toolkit report runs/NAME",
    }
    for words, message in cases.items():
        report(*words.split(), code=2)
        assert message in capsys.readouterr().err, words
    report(str(folder), f"output={tmp_path}/notes.html/deeper.html", code=74)
    assert "cannot be written: Not a directory. Choose another place" in capsys.readouterr().err
    assert (tmp_path / "notes.html").read_text() == (tmp_path / "mine" / "loss.png").read_text() == "mine"
    assert not (folder / "report.html").exists()


def test_the_automatic_report_never_harms(tmp_path: Path, said: list[str]) -> None:
    folder, told = fake_run(tmp_path / "run", 3), tmp_path / "told"
    told.touch()
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", STATUS_VARIABLE: str(told)}
    environ = without_ranks({**os.environ, "LANG": "C.UTF-8", **rank})
    reporter = AutomaticReport(folder, environ, patience_s=240)
    reporter.begin()
    reporter.begin()
    reporter.after_done()
    verdict = "Until it ended at step 3: One evaluation is too few to judge: validation loss 8.00 at step 0."
    assert said == [verdict, f"The report: {folder}/report.html"]
    del said[0]
    (folder / "report.html").write_text("somebody's own")
    reporter.finish()
    assert (
        said[1].startswith("WARNING: the report could not be made: ConfigError: ")
        and f"toolkit report {folder}" in said[1]
    )
    assert (folder / "report.html").read_text() == "somebody's own"
    assert told.read_text() == "", "its exit code is not the run's"
    slow = AutomaticReport(folder, os.environ, patience_s=0.05)
    slow.finish()
    assert "it is not ready after 0.05 s" in said[2] and slow._process is not None and slow._process.poll() is not None
    shutil.rmtree(folder)
    slow.begin()
    slow.finish()
    assert "No such file or directory" in said[3] and len(said) == 4


def test_boxes_are_known(tmp_path: Path) -> None:
    assert not page_module.has_chinese([str(tmp_path), "/nowhere"])
    (tmp_path / "NotoSansCJK-Regular.ttc").touch()
    assert page_module.has_chinese([str(tmp_path)])


def test_pictures_are_english_without_chinese_letters(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[Any] = []
    monkeypatch.setattr("toolkit.report.page.has_chinese", lambda: False)
    monkeypatch.setattr("toolkit.report.page.png", lambda drawing: titles.append(drawing.title) or b"picture")
    folder = fake_run(tmp_path / "run", 3)
    report(str(folder), "language=zh")
    assert "Loss" in titles and all(title.isascii() for title in titles)
    assert "学习率" in (folder / "report.html").read_text()


def test_the_command_is_as_it_was_typed_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["deepspeed", "--num_gpus", "2", "run.py", "recipe=x"]
    ours = ["python3", "run.py", "--local_rank=0"]
    make_processes(
        monkeypatch, ours, ["python3", "-m", "deepspeed.launcher.launch"], ["python3", "/x/deepspeed", *typed[1:]]
    )
    assert typed_command(ours) == typed
    make_processes(monkeypatch, ours, ["/x/python", "-u", "/x/toolkit", "launch", "recipe=x"], ["bash"])
    assert typed_command(ours) == ["toolkit", "launch", "recipe=x"]
    words = [
        "run.py",
        "--local_rank=0",
        "recipe=x",
        "ds_extra.comet.api_key=abcdefghijk",
        "launch.env.HF_TOKEN=qwertyuiop",
    ]
    make_processes(monkeypatch, ours, ["bash"], ["bash"])
    assert typed_command([*words, "evaluate.max_new_tokens=24"]) == [
        *("python", "run.py", "recipe=x"),
        *("ds_extra.comet.api_key=***", "launch.env.HF_TOKEN=***", "evaluate.max_new_tokens=24"),
    ]


def test_collectives_are_shown_the_longest_first(tmp_path: Path, quick: None) -> None:
    folder = fake_run(tmp_path / "run")
    assert page_module.collectives(read_run(folder)) is None
    found = [
        {"operation": "all_reduce", "calls": 4, "bytes": 2**22, "seconds": 0.5},
        {"operation": "all_gather", "calls": 1000, "bytes": 2**31, "seconds": 2.0},
        {"operation": "barrier", "calls": 1, "bytes": 0, "seconds": 0},
        {"operation": "broken", "calls": "many", "bytes": 1, "seconds": 1},
        "no operation",
    ]
    (folder / "collectives.json").write_text(json.dumps({"operations": found}))
    table = page_module.collectives(read_run(folder))
    assert table is not None
    assert [list(row) for row in table.rows] == [
        ["all_gather", "1,000", "2.05", "2.00", "2.00", "1.07"],
        ["all_reduce", "4", "1.00", "0.00391", "0.500", "0.00839"],
        ["barrier", "1", "0.00", "0.00", "0.00", "—"],
    ]
    report(str(folder))
    assert "Communication of rank 0" in (folder / "report.html").read_text()
