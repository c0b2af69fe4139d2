"""Classifiers: rows with labels, their numbers, scores of packed samples, figures, and configs that cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.unit.data_tools import END, ByteEncoder, run_config, text_of, write_rows
from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.config.schema import Attention, OnBadRow, RowFormat, RunConfig, TaskKind, TooLong
from toolkit.data.labeled_formats import ClassReader
from toolkit.data.loader import collate
from toolkit.data.tokenize import build_caches
from toolkit.messages import ConfigError, DataError, ModelError, RowError
from toolkit.models import classifier
from toolkit.models.attention import choose_attention
from toolkit.models.classifier import Head, with_head
from toolkit.plan.lookup import outline_of
from toolkit.tasks.classify import figures_of

ASKED = [{"role": "user", "content": "q"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "a"}]


def config_of(folder: Path, rows: list[Any], labels: tuple[str, ...] = ()) -> RunConfig:
    config = run_config(folder, write_rows(folder / "d.jsonl", rows))
    config.data.sources[0].format, config.task.kind = RowFormat.classify, TaskKind.classify
    config.classify.labels = list(labels)
    return config


@pytest.mark.parametrize(
    ("row", "label", "said"),
    [
        ({"text": "t", "label": " b "}, "b", ["t"]),
        ({"messages": ASKED, "label": 3}, "3", ["q"]),
        ({"messages": ANSWERED, "label": True}, "true", ["q", "a"]),
        ({"instruction": "i", "input": "x", "label": False}, "false", ["i\nx"]),
        ({"prompt": "p", "response": "r", "label": 1.5}, "1.5", ["p", "r"]),
    ],
)
def test_rows_have_a_label(row: dict[str, Any], label: str, said: list[str]) -> None:
    (found,) = ClassReader({}).read_all(row)
    assert found.label == label and [message["content"] for message in found.messages] == said
    assert ClassReader({}).unused({**row, "id": 3}) == ["id"]


def test_columns_and_what_is_no_label() -> None:
    (found,) = ClassReader({"text": "review", "label": "stars"}).read_all({"review": "t", "stars": 5})
    assert found.label == "5"
    for wrong, why in (
        ({}, "'label'"),
        ({"label": ""}, "is empty"),
        ({"label": None}, "not a label"),
        ({"label": ["a"]}, "a list"),
    ):
        with pytest.raises(RowError, match=why):
            ClassReader({}).read_all({"text": "t", **wrong})


def test_labels_get_numbers_in_their_order(tmp_path: Path) -> None:
    """Sorted, numbers by their size. Marked is the last token, of questions where an answer would begin."""
    rows = [{"text": "tt", "label": "10"}, {"messages": ASKED, "label": "x"}, {"messages": ANSWERED, "label": 9}]
    train, _, report = build_caches(config_of(tmp_path, [*rows, {"text": "u", "label": "x"}]), ByteEncoder())
    values = train.values(range(4))
    assert list(report.labels.items()) == [("9", 1), ("10", 1), ("x", 2)]
    assert values is not None and values.tolist() == [1, 2, 0, 2]
    samples = [train[number] for number in range(4)]
    assert [text_of(ids) for ids, _ in samples] == ["tt", "q:", "qa$", "u"]
    assert [trained.tolist() for _, trained in samples] == [[False, True], [False, True], [False, False, True], [True]]
    named = config_of(tmp_path, rows, ("x", "9", "10", "y"))
    train, _, report = build_caches(named, ByteEncoder())
    values = train.values(range(3))
    assert values is not None and values.tolist() == [2, 0, 1] and report.labels == {"x": 1, "9": 1, "10": 1, "y": 0}


def test_rows_without_a_known_label_are_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c"}, {"text": "d", "label": "z"}]
    with pytest.raises(DataError, match=r"d\.jsonl:3: no key 'label'; the row has 'text'"):
        build_caches(config_of(tmp_path, rows), ByteEncoder())
    known = config_of(tmp_path, [*rows[:2], rows[3]], ("x", "y"))
    with pytest.raises(DataError, match=r"d\.jsonl:3: the label 'z' is none of classify\.labels \(x, y\)"):
        build_caches(known, ByteEncoder())
    known.data.on_bad_row, known.data.max_bad_fraction = OnBadRow.skip, 1.0
    train, _, report = build_caches(known, ByteEncoder())
    assert len(train) == 2 and report.bad_rows == 1
    with pytest.raises(DataError, match="all rows have the label 'x': there is nothing to tell apart"):
        build_caches(config_of(tmp_path, rows[:1]), ByteEncoder())


def test_long_samples_keep_their_beginning(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"text": "a" * 30, "label": "x"}, {"text": "bbb", "label": "y"}])
    config.data.max_length, config.data.too_long = 8, TooLong.truncate
    train, _, report = build_caches(config, ByteEncoder())
    assert [text_of(train[0][0]), text_of(train[1][0])] == ["a" * 8, "bbb"] and report.truncated == 1
    assert train[0][1].tolist() == [False] * 7 + [True]


@pytest.mark.parametrize("kind", ["GlmConfig", "Qwen3Config"])
def test_packed_samples_have_the_scores_and_gradients_of_separate_ones(kind: str) -> None:
    """Where each ends, also behind padding tokens of its own; those of single tokens too."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES)).double()
    model = with_head(model, Head(("a", "b", "c"), pad_token_id=7), seed=3)
    draw = torch.Generator().manual_seed(2)
    samples = [torch.randint(8, 128, (size,), generator=draw).numpy() for size in (5, 1, 9, 3, 4)]
    samples[2][-2:] = 7  # its own end, where a tokenizer pads with it
    listed = [(ids, torch.zeros(len(ids), dtype=torch.bool).numpy()) for ids in samples]
    choose_attention(model, Attention.auto, True, torch.float64)
    weights = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float32) * torch.arange(1, 6)[:, None]
    found = []
    for rows, packed in (([[one] for one in listed], False), ([listed[:3], listed[3:]], True)):
        scores = classifier.scores(model, collate(rows, 7, packed=packed))
        model.zero_grad()
        (scores * weights).sum().backward()
        found.append(
            (scores, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        )
    (alone, slopes), (packed_scores, packed_slopes) = found
    assert alone.shape == (5, 3) and torch.allclose(alone, packed_scores, atol=1e-6)
    assert slopes.keys() == packed_slopes.keys()
    for name, slope in slopes.items():
        assert torch.allclose(slope, packed_slopes[name], atol=1e-5 * float(slope.abs().max()) + 1e-12), name
    tokens = classifier.token_scores(model, collate([listed[:3], listed[3:]], 7, packed=True))
    assert torch.allclose(tokens[0, 4], alone[0], atol=1e-6)


def test_figures_are_those_of_their_definition() -> None:
    """Of 10 samples, wanted [rows] and given [columns]; the last label is in none of them."""
    pairs = torch.tensor([[4, 1, 0, 0], [2, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    figures = figures_of(pairs)
    f1 = [2 * 4 / (5 + 6), 2 * 1 / (3 + 4), 0.0]
    assert figures == {"eval_samples": 10, "eval_accuracy": 0.5, "eval_macro_f1": pytest.approx(sum(f1) / 3)}


def test_a_classifier_keeps_its_head_and_the_order_of_its_labels() -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES))
    model = with_head(model, Head(("a", "b"), 0), seed=3)
    weight = model.score.weight.clone()
    assert with_head(model, Head(("c", "d"), 0), seed=4) is model and torch.equal(model.score.weight, weight)
    assert model.config.label2id == {"c": 0, "d": 1}
    with pytest.raises(ModelError, match=r"are of c,d, in this order\. Name the labels so: classify\.labels=\[c,d\]"):
        with_head(model, Head(("d", "c"), 0), seed=4)


def test_models_whose_classifier_has_another_head_are_rejected() -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.BertConfig(is_decoder=True, num_attention_heads=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="transformers has no sequence classifier of BertLMHeadModel"):
        with_head(model, Head(("a", "b"), 0), seed=3)


def test_what_follows_from_the_task() -> None:
    cfg = load(["recipe=qwen3_classify_lora", "classify.labels=[a,b,c]"]).cfg
    assert {one.format for one in cfg.data.sources} == {RowFormat.classify} and END
    outline = outline_of(cfg)
    assert outline.shapes["score.modules_to_save.default.weight"] == (3, 4096)
    check_rules(
        load(["recipe=qwen3_classify_lora", "data.packing=packed", "evaluate.keep_best=eval_macro_f1"]), files=False
    )


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["classify.labels=[a]"], "classify.labels = [a] has no effect: task.kind is language"),
        (["task=classify", "data.too_long=split"], "a label is of a whole sequence"),
        (["task=classify", "tuning=ptuning_v2"], "no other program reads such a score"),
        (["task=classify", "evaluate.keep_best=eval_acuracy"], "Did you mean 'eval_accuracy'"),
        (
            ["task=classify", "data.sources=[{path: a.jsonl, format: text}]"],
            "text is not the format that task=classify",
        ),
        (["data.sources=[{path: a.jsonl, format: classify}]"], "needs task=classify"),
    ],
)
def test_configs_that_cannot_be(words: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_rules(load(["recipe=glm4_9b", *words]), files=False)
    assert wrong in str(error.value)
