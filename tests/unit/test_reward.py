"""Reward models: the loss by its formula, rows with margins, heads on models and the configs that cannot have them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.unit.data_tools import ByteEncoder, run_config, write_rows
from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.config.schema import RowFormat, TaskKind
from toolkit.data.labeled_formats import MarginReader
from toolkit.data.tokenize import build_caches
from toolkit.messages import ConfigError, ModelError, RowError
from toolkit.models import classifier, probe
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.classifier import Head, with_head
from toolkit.models.load_weights import load_model
from toolkit.models.save import save_model
from toolkit.models.trainable import check_generates_text
from toolkit.plan.lookup import outline_of
from toolkit.tasks.reward import reward_losses

ROW = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_is_that_of_the_papers(center: float) -> None:
    """In Python's own float64, with its slope by the score of the chosen answer."""
    chosen, rejected, margins = [1.5, -0.25, 4.0], [0.5, 2.0, -3.0], [0.0, 1.0, 0.5]
    given = torch.tensor(chosen, dtype=torch.float64, requires_grad=True)
    others, wanted = (torch.tensor(values, dtype=torch.float64) for values in (rejected, margins))
    losses = reward_losses(given, others, wanted, center)
    slopes = torch.autograd.grad(losses.sum(), given)[0].tolist()
    for loss, slope, better, worse, margin in zip(losses.tolist(), slopes, chosen, rejected, margins, strict=True):
        share = 1 / (1 + math.exp(-(better - worse - margin)))
        assert loss == pytest.approx(-math.log(share) + center * (better + worse) ** 2, rel=1e-12)
        assert slope == pytest.approx(share - 1 + 2 * center * (better + worse), rel=1e-12)


def test_rows_have_margins(tmp_path: Path) -> None:
    for margin, value in ((None, 0.0), ("", 0.0), (1, 1.0), ("0.5", 0.5), (-2.5, -2.5)):
        pair = MarginReader({}).read_all({**ROW, "margin": margin})
        assert [one.value for one in pair] == [value, value]
        assert [one.messages[-1]["content"] for one in pair] == ["a", "b"]
    assert [one.value for one in MarginReader({"margin": "gap"}).read_all({**ROW, "gap": 2})] == [2.0, 2.0]
    for wrong, kind in (("much", "a text"), (True, "true"), ([1], "a list"), (float("nan"), "NaN"), (10**310, "1000")):
        with pytest.raises(RowError, match=f"'margin' is {kind}0*, not a number"):
            MarginReader({}).read_all({**ROW, "margin": wrong})
    assert MarginReader({}).unused({**ROW, "margin": 1, "id": 3}) == ["id"]
    rows = [{**ROW, "chosen": "a" * (number + 2), "margin": number} for number in range(3)]
    config = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    config.data.sources[0].format = RowFormat.reward
    train, _, report = build_caches(config, ByteEncoder())
    values = train.values(range(6))
    assert values is not None and values.tolist() == [0, 0, 1, 1, 2, 2] and not report.dropped


@pytest.mark.parametrize("kind", ["GlmConfig", "LlamaConfig", "Qwen3Config", "Glm4Config"])
def test_a_head_is_saved_and_loaded_with_equal_scores(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, kind)(**SIZES)
    torch.manual_seed(1)
    writer = transformers.AutoModelForCausalLM.from_config(config)
    layers = {name: value.clone() for name, value in writer.base_model.state_dict().items()}
    model = with_head(writer, Head(("reward",), 0), seed=3)
    assert classifier.head_of(model) == Head(("reward",), 0) and model.score.weight.std() > 0
    for name, value in model.base_model.state_dict().items():
        assert torch.equal(value, layers[name]), name
    ids = torch.randint(1, 128, (2, 8))
    save_model(model, tmp_path / "model")
    own = load_model(tmp_path / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    expected = probe.capture(model, ids)
    assert expected.logits.shape == (2, 8)
    for other in (own, theirs):
        assert torch.allclose(probe.capture(other, ids).logits, expected.logits, atol=1e-6)
    with torch.no_grad():
        row = model(input_ids=ids[:1, :5]).logits[0, 0]
    assert float(row) == pytest.approx(float(expected.logits[0, 4]), abs=1e-5)
    assert with_head(own, Head(("reward",), 5), seed=4) is own and own.config.pad_token_id == 5
    with pytest.raises(
        ModelError, match=r"model that scores sequences \(a reward model or a classifier\): it writes no text"
    ):
        check_generates_text(own, tmp_path / "model")
    with pytest.raises(ModelError, match="gives 1 scores for each sequence, and 2 are to be trained"):
        with_head(own, Head(("a", "b"), 0), seed=4)


def test_chatglm_6b_has_no_head() -> None:
    with torch.device("meta"):
        model: Any = ChatGLMForConditionalGeneration(
            ChatGLMConfig(vocab_size=128, hidden_size=32, num_layers=2, num_attention_heads=4, inner_hidden_size=48)
        )
    with pytest.raises(ModelError, match="no sequence classifier of ChatGLMForConditionalGeneration"):
        with_head(model, Head(("reward",), 0), seed=0)


def test_what_follows_from_the_task() -> None:
    loaded = load(["recipe=qwen3_reward_lora"])
    cfg = loaded.cfg
    assert cfg.task.kind is TaskKind.reward and {one.format for one in cfg.data.sources} == {RowFormat.reward}
    outline = outline_of(cfg)
    assert (
        outline.shapes["score.modules_to_save.default.weight"] == (1, 4096) and "lm_head.weight" not in outline.shapes
    )
    assert outline.vocabulary == (1, 4096) and outline.trains_head


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["task=reward", "preference=dpo"], "preference.loss = sigmoid and task.kind = reward do not go together"),
        (["task.center=0.1"], "task.center = 0.1 has no effect: task.kind is language"),
        (["task=reward", "data.packing=packed"], "each sequence has a score of its own"),
        (["task=reward", "tuning=ptuning_v2"], "no other program reads such a score"),
        (["task=reward", "tuning.adapter=x", "tuning=lora"], "it has no score. Merge it first"),
        (["task=reward", "evaluate.metrics=[bleu]"], "the model gives scores and no answers"),
        (["task=reward", "kernels.loss=full"], "kernels.loss = full has no effect: task.kind is reward"),
        (
            ["task=reward", "data.sources=[{path: a.jsonl, format: messages}]"],
            "messages is not the format that task=reward reads",
        ),
        (["data.sources=[{path: a.jsonl, format: reward}]"], "needs task=reward"),
    ],
)
def test_configs_that_cannot_be(words: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_rules(load(["recipe=glm4_9b", *words]), files=False)
    assert wrong in str(error.value)
