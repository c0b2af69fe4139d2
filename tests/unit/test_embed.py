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
from toolkit.config.schema import Pooling, RowFormat
from toolkit.data.formats import TextPairReader
from toolkit.data.loader import collate
from toolkit.data.tokenize import build_caches
from toolkit.messages import ConfigError, RowError
from toolkit.models import embedding


def test_the_loss_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's own float64; queries a few at once."""
    monkeypatch.setattr(embedding, "_ROWS", 2)
    draw = torch.Generator().manual_seed(1)
    pairs = torch.randn(10, 3, generator=draw, dtype=torch.float64)
    pairs = (pairs / pairs.norm(dim=1, keepdim=True)).requires_grad_(True)
    found = embedding.pair_losses(pairs, 0.1)
    rows = pairs.tolist()
    similar = [[sum(a * b for a, b in zip(q, p, strict=True)) / 0.1 for p in rows[1::2]] for q in rows[0::2]]
    expected = [math.log(sum(map(math.exp, row))) - row[place] for place, row in enumerate(similar)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    [slopes] = torch.autograd.grad(found.sum(), pairs)
    shares = [[math.exp(value) / sum(map(math.exp, row)) for value in row] for row in similar]
    slope = sum((shares[0][j] - (j == 0)) * rows[2 * j + 1][0] for j in range(5)) / 0.1
    assert float(slopes[0, 0]) == pytest.approx(slope, rel=1e-10)
    places = [1 + sum(value > row[place] for value in row) for place, row in enumerate(similar)]
    assert embedding.ranks_of(pairs.detach()).tolist() == places and len(set(places)) > 1


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("kind", ["GlmConfig", "Qwen3Config"])
def test_embeddings_are_the_states_of_transformers(kind: str, pooling: Pooling) -> None:
    """Padded beside others; of length 1, with gradients in every layer."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES))
    samples = [torch.randint(8, 128, (size,)) for size in (5, 1, 9)]
    marks = [torch.arange(len(ids)) == len(ids) - 1 for ids in samples]
    batch = collate([[(ids.numpy(), mark.numpy())] for ids, mark in zip(samples, marks, strict=True)], 0)
    found = embedding.embeddings(model, batch, pooling)
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
    for wrong, why in (
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


def test_what_follows_from_the_task() -> None:
    cfg = load(["recipe=qwen3_embed_lora"]).cfg
    assert {one.format for one in cfg.data.sources} == {RowFormat.embed}
    check_rules(load(["recipe=qwen3_embed_lora", "evaluate.keep_best=eval_mrr", "data.too_long=truncate"]), files=False)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["embed.temperature=0.1"], "embed.temperature = 0.1 has no effect: task.kind is language"),
        (["task=embed", "embed.temperature=0"], "embed.temperature = 0.0 must be above 0"),
        (["task=embed", "data.packing=packed"], "pairs are not packed"),
        (["task=embed", "tuning=lora", "tuning.dropout=0.1"], "a step embeds its texts twice"),
        (["task=embed", "evaluate.keep_best=eval_mr"], "Did you mean 'eval_mrr'"),
        (
            ["task=embed", "parallel=tensor", "parallel.tensor=2", "zero=stage1"],
            "parallel.tensor = 2 is not supported with",
        ),
        (["data.sources=[{path: a.jsonl, format: embed}]"], "needs task=embed"),
    ],
)
def test_configs_that_cannot_be(words: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_rules(load(["recipe=glm4_9b", *words]), files=False)
    assert wrong in str(error.value)
