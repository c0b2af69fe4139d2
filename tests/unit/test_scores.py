"""`toolkit eval PATH tasks=… questions=…`: what is passed to lm-evaluation-harness, and what becomes of its results.

CI does not install the harness: a stand-in has its signatures. Where it is installed, its scores and those of its own
command line on the same directory are equal.
"""

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.unit.fake_runs import fake_run
from tests.unit.speaker import SAYS, write_random, write_speaker
from toolkit.cli import main
from toolkit.messages import ConfigError, DataError, ModelError
from toolkit.report.page import make_report
from toolkit.report.scores import tables_of

ROOT = Path(__file__).parents[2]
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install -e '.[eval]'"
)


class TaskManager:
    """As lm_eval.tasks.TaskManager 0.4.13."""

    all_tasks = ("ceval-valid", "ceval-valid_law", "gsm8k", "gsm8k_cot", "offline", "unsafe")

    def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
        self.include_path, self.include_defaults = include_path, include_defaults

    def match_tasks(self, task_list: list[str]) -> list[str]:
        return [name for name in task_list if name in self.all_tasks and self.include_defaults]

    def load(self, task_list: list[str]) -> dict[str, Any]:
        if "offline" in task_list:
            raise ConnectionError("Couldn't reach 'some/data' on the Hub (OfflineModeIsEnabled)")
        return {"tasks": {name: type("Task", (), {"UNSAFE_CODE": name == "unsafe"})() for name in task_list}}


class HFLM:
    """As lm_eval.models.huggingface.HFLM 0.4.13."""

    def __init__(self, pretrained: Any, backend: str, tokenizer: Any, batch_size: int | str) -> None:
        self.pretrained, self.tokenizer = pretrained, tokenizer


calls: list[dict[str, Any]] = []


def simple_evaluate(
    model: HFLM,
    tasks: list[str],
    num_fewshot: int | None,
    batch_size: int | str,
    limit: float | None,
    system_instruction: str | None,
    apply_chat_template: bool,
    fewshot_as_multiturn: bool,
    task_manager: TaskManager,
    confirm_run_unsafe_code: bool,
) -> dict[str, Any]:
    """As lm_eval.simple_evaluate 0.4.13, whose results have this form: a group of two tasks, and a task."""
    calls.append(dict(locals()))
    value = 0.25 * len(calls)
    sample = {"doc_id": 0, "filter": "none", "metrics": ["acc"], "target": 1, "acc": 1.0}
    choices = {"arguments": [("Q", " a"), ("Q", " b")], "filtered_resps": [(-2.0, False), (-1.0, True)]}
    return {
        "results": {
            "ceval": {"alias": "ceval", "acc,none": value, "acc_stderr,none": 0.125},
            "ceval_law": {"alias": "law", "acc,none": value, "acc_stderr,none": 0.1},
            "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"},
        },
        "group_subtasks": {"ceval": ["ceval_law"], "ceval_law": [], "gsm8k": []},
        "n-samples": {"ceval_law": {"original": 9, "effective": 3}, "gsm8k": {"original": 9, "effective": 1319}},
        "samples": {"ceval_law": [sample | choices]},
        "pretty_env_info": "long",
    }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put the stand-in in the harness's place, and return the calls."""
    calls.clear()
    for name, content in {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@needs_harness
def test_the_stand_in_has_the_signatures() -> None:
    import lm_eval
    import lm_eval.tasks
    from lm_eval.models.huggingface import HFLM as RealModel

    for ours, theirs in (
        (simple_evaluate, lm_eval.simple_evaluate),
        (TaskManager, lm_eval.tasks.TaskManager),
        (HFLM, RealModel),
    ):
        assert set(inspect.signature(ours).parameters) <= set(inspect.signature(theirs).parameters)


def test_a_run_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: list[dict[str, Any]]
) -> None:
    base = write_random(tmp_path / "base")
    run = write_run(tmp_path / "run", base)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["track"]["tensorboard"]["enabled"] = True
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    questions = tmp_path / "faq.jsonl"
    asked = [{"prompt": "1", "check": {"exact": SAYS}}, {"prompt": "2", "check": {"contains": "and so on"}}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")

    words = ["tasks=ceval-valid,gsm8k", f"questions={questions}", "compare=base", "limit=3", "num_fewshot=2"]
    words += ["apply_chat_template=true", "batch_size=2", "max_new_tokens=32", "system=Be brief."]
    assert main(["eval", str(run), *words]) == 0
    said = capsys.readouterr().out
    assert f"toolkit report {run}" in said
    table = [line.split() for line in said.splitlines() if line.startswith("  ")]
    assert table[1] == ["ceval", "acc", "3", "0.5000", "±", "0.1250", "0.2500", "±", "0.1250", "-0.2500"]
    assert table[2] == ["gsm8k", "exact_match,strict-match", "1,319", "0.5000", "0.5000", "+0.0000"]
    assert table[3][:4] == ["faq", "passed", "2", "0.0000"] and table[3][-4:] == ["1.0000", "±", "0.0000", "+1.0000"]

    after, before = stand_in
    assert after["model"].tokenizer.chat_template and before["model"].pretrained is not after["model"].pretrained
    passed_on = {name: after[name] for name in after if name not in ("model", "task_manager")}
    assert passed_on == {
        "tasks": ["ceval-valid", "gsm8k"],
        "num_fewshot": 2,
        "batch_size": 2,
        "limit": 3,
        "system_instruction": "Be brief.",
        "apply_chat_template": True,
        "fewshot_as_multiturn": True,
        "confirm_run_unsafe_code": False,
    }
    [record] = (run / "evaluations").glob("scores-*.json")
    values = json.loads(record.read_text(encoding="utf-8"))
    assert (values["step"], values["base"], len(values["harness"])) == (40, str(base), 2)
    rows = [json.loads(line) for line in record.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["model"], row["output"], row["acc"]) for row in rows] == [
        (str(run), " b", 1.0),
        (str(base), " b", 1.0),
    ]
    assert len(list((run / "evaluations").glob("scores-*-faq*.jsonl"))) == 2

    page, _ = make_report([run])
    assert "ceval acc" in (text := page.read_text(encoding="utf-8")) and "0.2500 ± 0.1250" in text
    event_files = list((run / "tensorboard").glob("*"))
    assert any(b"eval/ceval/acc" in file.read_bytes() for file in event_files)


def test_errors_come_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: list[dict[str, Any]]
) -> None:
    model = tmp_path / "model"
    model.mkdir()

    def error(*words: str) -> str:
        assert main(["eval", str(model), *words]) == 2
        return capsys.readouterr().err

    assert "Nearest: ceval-valid, ceval-valid_law" in error("tasks=ceval")
    assert "Nearest: gsm8k" in error("tasks=gsmk8")
    assert "some/data" in (said := error("tasks=offline")) and "datasets" in said and "docs/evaluation.md" in said
    assert len(said.splitlines()) <= 2
    assert "allow_code=true" in error("tasks=unsafe")
    assert "include_path" in error("tasks=gsm8k", f"include_path={tmp_path / 'none'}")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "task.yaml").write_text("task: own\ndoc_to_text: !function f.g\n")
    assert "!function" in error("tasks=gsm8k", f"include_path={tmp_path / 'own'}")
    assert "tasks=" in error("questions=x", "limit=3")
    assert "tasks=… or questions=FILE" in error()
    (tmp_path / "q.jsonl").write_text('{"prompt": "1"}\n')
    assert "no row has a check" in error(f"questions={tmp_path / 'q.jsonl'}")
    (tmp_path / "q.jsonl").write_text(
        '{"prompt": "1", "check": {"exact": "1"}}\n{"prompt": "2", "check": {"regx": "2"}}\n'
    )
    assert "q.jsonl:2: check has no 'regx'" in error(f"questions={tmp_path / 'q.jsonl'}")
    (model / "config.json").write_text("{}")
    assert "compare=DIR" in error("tasks=gsm8k", "compare=base")
    assert not stand_in


def write_run(folder: Path, base: Path) -> Path:
    """Write a run with an export that was trained from `base`."""
    run = fake_run(folder, 40)
    write_speaker(run / "export")
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["model"]["path"] = str(base)
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return run


def write_questions(file: Path, *prompts: str) -> Path:
    """Write questions with a check each."""
    rows = [{"prompt": prompt, "check": {"contains": "and so on"}} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_errors_of_the_base_come_before_the_first_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: list[dict[str, Any]]
) -> None:
    base = write_random(tmp_path / "base")
    run, questions = write_run(tmp_path / "run", base), write_questions(tmp_path / "faq.jsonl", "1", "2 " * 150)

    def error(*words: str) -> str:
        assert main(["eval", str(run), "compare=base", *words]) == 2
        assert not stand_in and not list((run / "evaluations").glob("scores-*"))
        return capsys.readouterr().err

    def without(file: str, *words: str) -> str:
        content = (base / file).read_bytes()
        (base / file).unlink()
        said = error(*words)
        (base / file).write_bytes(content)
        return said

    assert f"The tokenizer '{base}' has no chat template" in without("chat_template.jinja", "tasks=gsm8k")
    assert str(base) in without("tokenizer.json", "tasks=gsm8k")
    assert str(base) in without("model.safetensors", "tasks=gsm8k")
    said = error(f"questions={questions}", "max_new_tokens=300")
    assert f"{base} cannot be asked any question of {questions}: a prompt of" in said and ".." not in said

    assert main(["eval", str(run), "compare=base", f"questions={questions}", "max_new_tokens=8"]) == 0
    assert f"{base} cannot be asked 1 of 2 questions of {questions}" in capsys.readouterr().out


def test_the_scores_of_a_model_survive_a_failure_of_the_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.extras import scores

    base = write_random(tmp_path / "base")
    run, questions = write_run(tmp_path / "run", base), write_questions(tmp_path / "faq.jsonl", "1")
    load_any = scores.load_any

    def load(path: str, **arguments: Any) -> Any:
        if path == str(base):
            raise ModelError("the file system is gone")
        return load_any(path, **arguments)

    monkeypatch.setattr(scores, "load_any", load)
    assert main(["eval", str(run), "tasks=gsm8k", f"questions={questions}", "compare=base", "max_new_tokens=32"]) == 2
    said, error = capsys.readouterr()
    [record] = (run / "evaluations").glob("scores-*.json")
    values = json.loads(record.read_text(encoding="utf-8"))
    assert [score["value"] for score in values["scores"]] == [0.25, 0.5, 1.0] and values["base"] == ""
    assert record.with_suffix(".jsonl").is_file() and str(record) in said and "faq passed" in said
    assert "the file system is gone" in error


def test_without_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert main(["eval", str(tmp_path), "tasks=gsm8k"]) == 2
    assert "pip install -c constraints.txt -e '.[eval]'" in capsys.readouterr().err


def test_a_tokenizer_that_ends_a_text_is_rejected(stand_in: list[dict[str, Any]]) -> None:
    from toolkit.extras import harness

    tokenizer = SimpleNamespace(chat_template="", encode=lambda text: [5, 1], all_special_ids=[1])
    options = harness.HarnessOptions(tasks=("gsm8k",))
    with pytest.raises(ModelError, match="special tokens behind a text"):
        harness.check_tokenizer(tokenizer, options)


def write_tasks(folder: Path) -> Path:
    """Write a task of choices and one of generated answers, with their data; return the directory of task files."""
    (folder / "tasks").mkdir(parents=True)
    data = folder / "data.jsonl"
    rows = [{"q": f"What is {n} + 1?", "choices": [f"{n}", f"{n + 1}", "no"], "answer": 1} for n in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choice = {"task": "own_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    answer = {"task": "own_answer", "output_type": "generate_until", "doc_to_target": "and so on"}
    answer |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "bleu"}]}
    for task in (choice, answer):
        (folder / "tasks" / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task), encoding="utf-8")
    return folder / "tasks"


@pytest.mark.parametrize(
    "broken", [{"value": None}, {"samples": None}, {"base": None}, {"error": "small"}, {"value": True}]
)
def test_a_report_skips_scores_that_are_none(broken: dict[str, Any]) -> None:
    score = {"task": "gsm8k", "metric": "exact_match", "value": 0.5, "samples": 10, "error": None}
    run: Any = SimpleNamespace(name="a", scores=[{"scores": [score, score | broken]}])
    [(_, _, rows)] = tables_of([run])
    assert rows == [["gsm8k exact_match", "10", "0.5000"]]


@needs_harness
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("template", [False, True])
def test_the_scores_are_those_of_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tasks = write_random(tmp_path / "model"), write_tasks(tmp_path / "own")
    words = [f"apply_chat_template={str(template).lower()}", f"output={tmp_path / 'ours.jsonl'}", "limit=7"]
    assert main(["eval", str(model), "tasks=own_*", f"include_path={tasks}", "batch_size=2", *words]) == 0
    ours = json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))["harness"][0]["results"]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model}"]
    command += ["--tasks", "own_*", "--include_path", str(tasks), "--device", "cpu", "--batch_size", "2"]
    command += ["--limit", "7", "--output_path", str(tmp_path / "theirs"), *["--apply_chat_template"][: int(template)]]
    subprocess.run(command, check=True, cwd=tmp_path)
    [file] = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert set(ours) == {"own_choice", "own_answer"} and ours == theirs


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_what_the_harness_itself_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.extras import harness

    tasks = write_tasks(tmp_path / "own")
    (tmp_path / "own" / "data.jsonl").unlink()
    with pytest.raises(DataError, match="own_choice"):
        harness.load_tasks(harness.HarnessOptions(tasks=("own_choice",), include_path=str(tasks)))
    with pytest.raises(ConfigError, match="own_choice"):
        harness.load_tasks(harness.HarnessOptions(tasks=("own_choise",), include_path=str(tasks)))


def test_the_answer_of_each_kind_of_question() -> None:
    """Choices after the prompt, choices within it (Winogrande), acc_mutual_info's requests without a prompt, text."""
    from toolkit.extras import harness

    cases = [
        ([("2+2=", " 3"), ("2+2=", " 4")], [(-5.0, False), (-1.0, True)], "2+2=", " 4"),
        ([("Sarah", " was fine."), ("Maria", " was fine.")], [(-5.0, False), (-1.0, True)], "Maria", "Maria was fine."),
        (
            [("2+2=", " 3"), ("2+2=", " 4"), ("", " 3"), ("", " 4")],
            [(-5.0, False), (-2.0, True), (-1.0, False), (-9.0, False)],
            "2+2=",
            " 4",
        ),
        ([("Say hi.", {"until": ["\n"]})], ["hi"], "Say hi.", "hi"),
        ([("Rain is", " wet.")], [(-0.5, True)], "Rain is", -0.5),
    ]
    for arguments, answers, prompt, output in cases:
        sample = {"doc_id": 0, "arguments": arguments, "filtered_resps": answers, "filter": "none", "target": ""}
        [row] = harness.sample_rows({"samples": {"t": [sample | {"metrics": []}]}})
        assert (row["prompt"], row["output"]) == (prompt, output)
