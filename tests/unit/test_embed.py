"""Embeddings: the loss by its formula, poolings, rows of two texts, and configs that cannot be."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.unit.data_tools import ByteEncoder, run_config, text_of, write_rows
from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.config.schema import Packing, Pooling, RowFormat, TaskKind, TooLong
from toolkit.data import preview
from toolkit.data.labeled_formats import TextPairReader
from toolkit.data.loader import collate
from toolkit.data.packing import plan_sequences
from toolkit.data.tokenize import build_caches
from toolkit.messages import ConfigError, DataError, RowError
from toolkit.tasks import embed


@pytest.mark.parametrize("size", [2, 5])
def test_the_loss_is_that_of_the_paper(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's own float64; queries a few at once. Texts are pairs, or each pair has three negatives."""
    monkeypatch.setattr(embed, "_ROWS", 2)
    draw = torch.Generator().manual_seed(1)
    texts = torch.randn(5 * size, 3, generator=draw, dtype=torch.float64)
    texts = (texts / texts.norm(dim=1, keepdim=True)).requires_grad_(True)
    found = embed.pair_losses(texts, 0.1, size)
    rows = texts.tolist()
    others = [place for place in range(len(rows)) if place % size]
    similar = [
        {j: sum(a * b for a, b in zip(rows[i], rows[j], strict=True)) / 0.1 for j in others}
        for i in range(0, len(rows), size)
    ]
    expected = [math.log(sum(map(math.exp, row.values()))) - row[size * i + 1] for i, row in enumerate(similar)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    [slopes] = torch.autograd.grad(found.sum(), texts)
    shares = {j: math.exp(value) / sum(map(math.exp, similar[0].values())) for j, value in similar[0].items()}
    slope = sum((shares[j] - (j == 1)) * rows[j][0] for j in others) / 0.1
    assert float(slopes[0, 0]) == pytest.approx(slope, rel=1e-10)
    places = [1 + sum(value > row[size * i + 1] for value in row.values()) for i, row in enumerate(similar)]
    assert embed.ranks_of(texts.detach(), size).tolist() == places and len(set(places)) > 1


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("kind", ["GlmConfig", "Qwen3Config"])
def test_embeddings_are_the_states_of_transformers(kind: str, pooling: Pooling) -> None:
    """Padded beside others; of length 1, with gradients in every layer."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES))
    samples = [torch.randint(8, 128, (size,)) for size in (5, 1, 9)]
    marks = [torch.arange(len(ids)) == len(ids) - 1 for ids in samples]
    batch = collate([[(ids.numpy(), mark.numpy())] for ids, mark in zip(samples, marks, strict=True)], 0)
    found = embed.embeddings(model, batch, pooling)
    for ids, vector in zip(samples, found, strict=True):
        states = model.base_model(input_ids=ids[None]).last_hidden_state[0]
        expected = states[-1] if pooling is Pooling.last else states.mean(dim=0)
        assert torch.allclose(vector, expected / expected.norm(), atol=1e-5)
    found[:, 0].sum().backward()
    assert all(one.grad is not None for one in model.parameters())
    assert not model.get_output_embeddings().weight.grad.any()


def test_rows_are_two_texts(tmp_path: Path) -> None:
    row = {"query": "q", "positive": "pp"}
    assert [one.messages[0]["content"] for one in TextPairReader({}).read_all(row)] == ["q", "pp"]
    renamed = TextPairReader({"query": "a", "positive": "b"}).read_all({"a": "q", "b": "pp"})
    assert renamed == TextPairReader({}).read_all(row)
    assert TextPairReader({}).unused({**row, "negative": "n"}) == ["negative"]
    for negatives in (["n", "m"], '["n", "m"]'):
        read = TextPairReader({}).read_all({**row, "negatives": negatives})
        assert [one.messages[0]["content"] for one in read] == ["q", "pp", "n", "m"]
    assert len(TextPairReader({"negatives": "negative"}).read_all({**row, "negative": "n"})) == 3
    for wrong, why in (
        ({**row, "negatives": 3}, "'negatives' is 3, neither a list of texts nor a text"),
        ({**row, "negatives": ["n", 3]}, r"'negatives\[1\]' is 3, not a text"),
        ({**row, "negatives": [""]}, r"'negatives\[0\]' is empty"),
        ({**row, "negatives": ["n", "pp"]}, "'negatives' holds the positive itself"),
        ({"query": "q"}, "no key 'positive'"),
        ({**row, "query": " "}, "is empty"),
        ({**row, "query": 1}, "'query'"),
    ):
        with pytest.raises(RowError, match=why):
            TextPairReader({}).read_all(wrong)
    config = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", [row, {"query": "x", "positive": "x"}]))
    config.data.sources[0].format = RowFormat.embed
    train, _, report = build_caches(config, ByteEncoder())
    assert [text_of(train[number][0]) for number in range(len(train))] == ["q", "pp"]
    assert report.dropped == {"both texts are the same": 1}


def test_negatives_are_read_as_many_as_are_wanted(tmp_path: Path) -> None:
    """All texts of a row share a row of the plan; where one is too long none is left."""
    rows = [
        {"query": f"q{n}", "positive": f"p{n}", "negatives": [f"{n}{letter}" for letter in "abc"]} for n in range(4)
    ]
    rows[2]["negatives"] = ["x", "y" * 40, "z"]
    config = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    config.data.max_length, config.data.too_long = 16, TooLong.drop
    config.data.sources[0].format, config.task.kind = RowFormat.embed, TaskKind.embed
    for wanted, unused in ((0, ["negatives"]), (2, [])):
        config.embed.negatives = wanted
        train, _, report = build_caches(config, ByteEncoder())
        kept = (0, 1, 2, 3) if wanted == 0 else (0, 1, 3)
        expected = [[f"q{n}", f"p{n}", f"{n}a", f"{n}b"][: 2 + wanted] for n in kept]
        plan = plan_sequences(
            train,
            Packing.none,
            max_length=16,
            micro_per_gpu=1,
            seed=3,
            sources=[],
            size=2 + wanted,
            cache_dir=tmp_path / "cache",
        )
        assert [[text_of(train[number][0]) for number in plan[row]] for row in range(len(plan))] == expected
        assert report.unused == unused
        roles = [preview._label(config, train, number) for number in plan[1]]
        assert roles == [", the query", ", the positive", ", a negative", ", a negative"][: 2 + wanted]
    config.embed.negatives = 4
    with pytest.raises(DataError, match=r"d.jsonl:1: it has 3 negatives, fewer than embed.negatives = 4"):
        build_caches(config, ByteEncoder())


def test_what_follows_from_the_task() -> None:
    cfg = load(["recipe=qwen3_embed_lora"]).cfg
    assert {one.format for one in cfg.data.sources} == {RowFormat.embed}
    check_rules(load(["recipe=qwen3_embed_lora", "evaluate.keep_best=eval_mrr", "data.too_long=truncate"]), files=False)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["embed.temperature=0.1"], "embed.temperature = 0.1 has no effect: task.kind is language"),
        (["embed.negatives=2"], "embed.negatives = 2 has no effect: task.kind is language"),
        (["task=embed", "embed.temperature=0"], "embed.temperature = 0.0 must be above 0"),
        (["task=embed", "data.packing=packed"], "pairs are not packed"),
        (["task=embed", "tuning=lora", "tuning.dropout=0.1"], "a step embeds its texts twice"),
        (["task=embed", "evaluate.keep_best=eval_mr"], "Did you mean 'eval_mrr'"),
        (["data.sources=[{path: a.jsonl, format: embed}]"], "needs task=embed"),
    ],
)
def test_configs_that_cannot_be(words: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_rules(load(["recipe=glm4_9b", *words]), files=False)
    assert wrong in str(error.value)
