"""An evaluation in one process: exact losses, the same answers however they are shared out, and what may fail."""

import json
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.data.loader import collate
from toolkit.data.packing import evaluated_samples
from toolkit.data.sampler import sequential
from toolkit.evaluate import metrics, questions
from toolkit.evaluate.generate import Sampling, decode_answer, generate
from toolkit.launch.environment import Ranks
from toolkit.messages import DataError, ModelError
from toolkit.models.load import create_model
from toolkit.models.loss import num_trained_tokens, token_loss_sum
from toolkit.secrets import hide
from toolkit.tasks import language_batches
from toolkit.tasks.language_batches import rows_per_step
from toolkit.tasks.language_data import LanguageData, load_data
from toolkit.tasks.language_evaluation import Evaluation, choose_prompts

WORDS = ["red", "green", "blue", "apple", "pear", "runs", "walks", "sleeps", "quickly", "today", "tomorrow", "never"]
ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of questions, one of texts; and one to train on, whose rows are others."""
    draw, folder = random.Random(3), tmp_path_factory.mktemp("data")
    for name, count in (("one", 9), ("two", 14), ("texts", 3), ("train", 14)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                prompt, response = (" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(2))
                row = {"text": response} if name == "texts" else {"prompt": prompt, "response": response}
                file.write(json.dumps(row) + "\n")
    return folder


Made = Callable[..., tuple[Evaluation, list[str]]]


@pytest.fixture
def make(folder: Path, said: list[str]) -> Made:
    """Return a function that makes an evaluation from overrides, and the list of what it says."""

    def made(*words: str) -> tuple[Evaluation, list[str]]:
        cfg, prepared = read(folder, *words)
        said.clear()
        model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed).eval()
        evaluation = Evaluation(
            cfg=cfg,
            data=prepared,
            ranks=ALONE,
            questions=choose_prompts(cfg, prepared),
            model=model,
        )
        return evaluation, said

    return made


def read(folder: Path, *words: str) -> tuple[RunConfig, LanguageData]:
    """Return a config and its data."""
    validation = ",".join(f"{{path: {folder}/{name}.jsonl}}" for name in ("one", "two", "texts"))
    cfg = load(
        [
            *("recipe=quickstart", "model=glm_tiny", f"data.sources=[{{path: {folder}/train.jsonl}}]"),
            *(f"prepare.dir={folder}/cache", f"data.validation=[{validation}]", "batch.global_size=12"),
            *("batch.micro_per_gpu=3", "evaluate.max_new_tokens=10", "evaluate.batch_size=4", *words),
        ]
    ).cfg
    return cfg, load_data(cfg)


ALL = "evaluate.metrics=[bleu,chrf,rouge_1,rouge_2,rouge_l,exact_match,distinct_1,distinct_2,length]"


@pytest.mark.parametrize("most", [0, 7])
@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
def test_loss_is_that_of_all_tokens_of_each_source(packing: str, most: int, make: Made, tmp_path: Path) -> None:
    evaluation, _ = make(f"data.packing={packing}", "data.max_length=64", f"evaluate.max_samples={most}")
    found = evaluation.run(tmp_path / "x.jsonl")
    store = evaluation.data.validation
    assert store is not None
    sums: dict[str, list[float]] = {}
    taken = evaluated_samples(store, most)
    assert len(taken) == (most or len(store))
    for sample in taken:
        batch = collate([[store[sample]]], 0)
        with torch.no_grad():
            loss = float(token_loss_sum(evaluation.model, batch))
        for name in ("", store.where(sample).rpartition(":")[0]):
            total = sums.setdefault(name, [0.0, 0])
            total[0], total[1] = total[0] + loss, total[1] + num_trained_tokens(batch)
    loss, tokens = sums.pop("")
    assert (len(store), found["eval_tokens"]) == (26, tokens)
    assert found["eval_loss"] == pytest.approx(loss / tokens, abs=1e-6)
    assert {name.partition("/")[2] for name in found if "/" in name} == set(sums)
    for name, (part, count) in sums.items():
        assert found[f"eval_loss/{name}"] == pytest.approx(part / count, abs=1e-6)
    assert not (tmp_path / "x.jsonl").exists(), "no answers were asked for"


def test_every_answer_is_kept_with_its_scores(make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "tomorrow")
    evaluation, said = make(ALL, "evaluate.max_samples=0")
    before = torch.get_rng_state(), random.getstate()
    own = evaluation.model.generation_config
    found = evaluation.run(tmp_path / "a" / "x.jsonl")
    assert said == [
        "evaluate.metrics: 3 of 26 validation samples are plain texts or pieces without a question, and are not "
        "answered."
    ]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert evaluation.model.generation_config is own
    rows = [json.loads(line) for line in (tmp_path / "a" / "x.jsonl").read_text().splitlines()]
    assert len(rows) == found["eval_answers"] == 23
    assert {Path(row["source"]).name for row in rows} == {"one.jsonl", "two.jsonl"}
    assert sum("***" in row["prompt"] + row["reference"] for row in rows) > 3
    assert "tomorrow" not in (tmp_path / "a" / "x.jsonl").read_text()
    for name in ("rouge_1", "rouge_2", "rouge_l", "exact_match", "length"):
        assert found[f"eval_{name}"] == pytest.approx(sum(row[name] for row in rows) / 23)
        for source in {row["source"] for row in rows}:
            mine = [row[name] for row in rows if row["source"] == source]
            assert found[f"eval_{name}/{source}"] == pytest.approx(sum(mine) / len(mine))
    assert any(row["output"] for row in rows) and found["eval_tokens_per_s"] > 0
    whole = json.loads((tmp_path / "a" / "x.json").read_text())
    assert whole["figures"] == json.loads(json.dumps(found))
    assert "tok:13a" in whole["signatures"]["bleu"] and whole["failures"] == {}
    # The same as one prompt after another, without padding.
    for row, question in zip(rows, evaluation.questions, strict=True):
        [ids] = generate(evaluation.model, evaluation.data.encoder, [question.prompt], evaluation._sampling(), CPU)
        assert len(ids) == row["output_tokens"]
        assert hide(decode_answer(evaluation.data.encoder, ids)) == row["output"]


def test_what_is_drawn_is_the_same_on_any_number_of_ranks(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation, _ = make("evaluate.metrics=[length]", "evaluate.temperature=1.5", "evaluate.seed=7")
    prompts = [question.prompt for question in evaluation.questions]

    def drawn(num_ranks: int, seed: int = 7) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        monkeypatch.setattr(questions, "world_size", lambda: num_ranks)
        turns = []
        for rank in range(num_ranks):
            monkeypatch.setattr(questions, "rank", lambda rank=rank: rank)
            count: list[None] = []
            own = questions.generate_all(
                evaluation.model,
                evaluation.data.encoder,
                prompts,
                Sampling(max_new_tokens=10, temperature=1.5, seed=seed),
                4,
                CPU,
                in_step=False,
                alive=lambda count=count: count.append(None),
            ).ids
            assert not set(found) & set(own)
            found |= own
            turns.append(len(count))
        assert len(set(turns)) == 1, "as many on every rank"
        return found

    alone = drawn(1)
    assert sorted(alone) == list(range(23))
    assert drawn(2) == drawn(3) == drawn(8) == alone
    assert drawn(1, seed=8) != alone


def test_the_models_own_generation_config_has_no_say(
    make: Made, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    evaluation, _ = make(ALL)
    model: Any = evaluation.model
    prompts = [question.prompt for question in evaluation.questions[:3]]

    def asked() -> list[list[int]]:
        return generate(model, evaluation.data.encoder, prompts, Sampling(max_new_tokens=6), CPU)

    wanted = asked()
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=3, top_p=0.5, temperature=9.0, repetition_penalty=5.0, min_new_tokens=9, num_beams=2
    )
    assert asked() == wanted
    assert model.generation_config.num_beams == 2
    assert [one for one in caplog.records if one.name != "toolkit"] == [], (
        "transformers warns of settings that have no effect"
    )


def test_whatever_fails_is_told_and_ends_nothing(make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation, said = make(ALL, "evaluate.max_samples=20")
    real, calls = generate, []

    def spoilt(model: PreTrainedModel, encoder: Any, prompts: Any, *rest: Any, **options: Any) -> list[list[int]]:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise RuntimeError("out of memory\nand more")
        return real(model, encoder, prompts, *rest, **options)

    def broken(*_: Any, **__: Any) -> metrics.Scores:
        raise ZeroDivisionError("none")

    monkeypatch.setattr(questions, "generate", spoilt)
    monkeypatch.setitem(metrics._METRICS, metrics.Metric.chrf, broken)
    (tmp_path / "file").write_text("")
    said.clear()
    found = evaluation.run(tmp_path / "file" / "x.jsonl")
    count = len(evaluation.questions)
    assert found["eval_answers"] == count - 4
    assert "eval_bleu" in found and "eval_chrf" not in found and found["eval_loss"] > 0
    assert said == [
        f"WARNING: 4 of {count} validation samples could not be answered: RuntimeError: out of memory.",
        "WARNING: the metric chrf failed and is skipped: ZeroDivisionError: none.",
        f"WARNING: {tmp_path}/file/x.jsonl cannot be written: File exists.",
    ]
    monkeypatch.setattr(questions, "generate", broken)
    assert set(evaluation.run(tmp_path / "x.jsonl")) >= {"eval_loss", "eval_perplexity", "eval_tokens"}
    assert said[-1].endswith(f"{count} of {count} validation samples could not be answered: ZeroDivisionError: none.")


def test_prompts_that_are_too_long_are_left_out(make: Made) -> None:
    evaluation, said = make(ALL, "model.shape.max_positions=22", "evaluate.max_samples=0")
    said.clear()
    evaluation.drop_too_long()
    assert 0 < len(evaluation.questions) < 23
    assert all(len(question.prompt) <= 12 for question in evaluation.questions)
    assert said == [
        f"evaluate.max_new_tokens = 10: with {23 - len(evaluation.questions)} of 23 validation prompts that is more "
        "than the 22 positions of the model. They are not answered."
    ]
    evaluation, _ = make(ALL, "model.shape.max_positions=12")
    with pytest.raises(ModelError, match=r"more than the 12 positions of the model\. Set it lower\."):
        evaluation.drop_too_long()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
def test_ranks_share_the_same_samples(
    packing: str, ranks: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, prepared = read(folder, f"data.packing={packing}", "data.max_length=64", "evaluate.max_samples=7")
    assert prepared.validation is not None and prepared.validation_plan is not None
    wanted = evaluated_samples(prepared.validation, 7).tolist()
    plan, found = prepared.validation_plan, []
    for rank in range(ranks):
        for rows in sequential(len(plan), rows_per_step(cfg, prepared.packing)[1], rank, ranks):
            found += [sample for row in rows for sample in plan[row]]
    assert sorted(found) == wanted
    load_data(cfg)
    assert "Evaluations take 7 of 26 validation samples" in capsys.readouterr().out


def test_samples_are_spread_over_the_split(make: Made) -> None:
    evaluation, _ = make(ALL, "evaluate.max_samples=5")
    assert [question.where.rpartition("/")[2] for question in evaluation.questions] == [
        "one.jsonl:1",
        "one.jsonl:6",
        "two.jsonl:2",
        "two.jsonl:7",
        "two.jsonl:12",
    ]


def test_nothing_to_evaluate_is_told_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    texts = f"data.validation=[{{path: {folder}/texts.jsonl}}]"
    with pytest.raises(DataError, match="none of 3 validation samples has a question and an answer"):
        choose_prompts(*read(folder, texts, ALL))
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "a", "response": "b"}\n')
    words = [f"data.sources=[{{path: {one}}}]", "data.validation=[]", "data.validation_fraction=0.5"]
    with pytest.raises(DataError, match=r"the validation split is empty: .* \(it is 0\.5\)\."):
        choose_prompts(*read(folder, *words, "evaluate.keep_best=eval_loss"))
    assert choose_prompts(*read(folder, *words)) == []


def test_its_batches_come_from_page_locked_memory_ahead_of_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of training do: a stand-in for a GPU counts what is pinned, and where."""
    pinned: list[str] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    cfg, prepared = read(folder)
    plain = list(language_batches.evaluation_batches(cfg, prepared, ALONE))
    assert len(plain) > 1 and not pinned
    npu = SimpleNamespace(device_name=lambda: "npu", current_device=lambda: 0, set_device=lambda device: None)
    monkeypatch.setattr(language_batches, "get_accelerator", lambda: npu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    found = list(language_batches.evaluation_batches(cfg, prepared, ALONE))
    assert len(pinned) == sum(map(len, found)) and all(name.startswith("batches") for name in pinned)
    for one, other in zip(plain, found, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
