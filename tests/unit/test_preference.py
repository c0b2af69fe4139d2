"""Preferences: each loss by its paper's formula, answers' log-probabilities, rows of pairs and their plans."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.unit.data_tools import ByteEncoder, run_config, text_of, write_rows
from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.config.schema import (
    Packing,
    PreferenceConfig,
    PreferenceLoss,
    RowFormat,
    RunConfig,
    SourceConfig,
    TooLong,
    TrainOn,
)
from toolkit.data import preview
from toolkit.data.formats import RowReader
from toolkit.data.labeled_formats import LabelReader, PairReader
from toolkit.data.mismatched import MismatchedCache
from toolkit.data.packing import plan_sequences
from toolkit.data.plans import PackingPlan
from toolkit.data.prefixes import share_prompts
from toolkit.data.tokenize import build_caches
from toolkit.messages import DataError, RowError
from toolkit.models import loss_kernels
from toolkit.models.loss import LossHead
from toolkit.models.per_sample import answer_log_probabilities
from toolkit.models.record import record_of
from toolkit.sample_types import with_targets
from toolkit.tasks.preference import Answers, answer_losses, pair_losses

# Log-probabilities of chosen and rejected, tokens of both, and the reference's, of four pairs.
PAIRS = [
    (-3.0, -5.0, 4, 6, -4.0, -4.5),
    (-20.0, -2.0, 11, 3, -12.0, -3.0),
    (-7.5, -7.5, 5, 5, -7.5, -7.5),
    (-1.25, -9.0, 2, 8, -6.0, -1.0),
]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def by_paper(kind: str, pair: tuple[float, ...], beta: float, swapped: float, gamma: float) -> float:
    """Return a pair's loss in Python's own float64."""
    chosen, rejected, chosen_tokens, rejected_tokens, chosen_reference, rejected_reference = pair
    ratios = (chosen - chosen_reference) - (rejected - rejected_reference)
    per_token = chosen / chosen_tokens - rejected / rejected_tokens
    if kind == "sigmoid":  # 2305.18290, equation 7; with swapped labels 2403.00409, equation 9
        return -(1 - swapped) * math.log(sigmoid(beta * ratios)) - swapped * math.log(sigmoid(-beta * ratios))
    if kind == "robust":  # 2403.00409, equation 10
        right, wrong = -math.log(sigmoid(beta * ratios)), -math.log(sigmoid(-beta * ratios))
        return ((1 - swapped) * right - swapped * wrong) / (1 - 2 * swapped)
    if kind == "hinge":  # 2305.10425, with DPO's ratios
        return max(0.0, 1 - beta * ratios)
    if kind == "ipo":  # 2310.12036, equation 17, of means over tokens
        means = (chosen - chosen_reference) / chosen_tokens - (rejected - rejected_reference) / rejected_tokens
        return (means - 1 / (2 * beta)) ** 2
    if kind == "simpo":  # 2405.14734, equation 6
        right = beta * per_token - gamma
        return -(1 - swapped) * math.log(sigmoid(right)) - swapped * math.log(sigmoid(-right))
    if kind == "cpo":  # 2401.08417, equation 5
        right = beta * (chosen - rejected)
        return -(1 - swapped) * math.log(sigmoid(right)) - swapped * math.log(sigmoid(-right))
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (chosen / chosen_tokens, rejected / rejected_tokens)]
    return -beta * math.log(sigmoid(math.log(odds[0] / odds[1])))  # orpo: 2403.07691, equations 6 and 7


@pytest.mark.parametrize("sft_weight", [0.0, 0.7])
@pytest.mark.parametrize(
    ("kind", "beta", "swapped", "gamma"),
    [
        ("sigmoid", 0.1, 0.0, 0.0),
        ("sigmoid", 0.3, 0.2, 0.0),
        ("robust", 0.3, 0.2, 0.0),
        ("hinge", 0.05, 0.0, 0.0),
        ("ipo", 0.1, 0.0, 0.0),
        ("simpo", 2.0, 0.0, 1.0),
        ("simpo", 2.0, 0.1, 1.4),
        ("orpo", 0.1, 0.0, 0.0),
        ("cpo", 0.1, 0.05, 0.0),
    ],
)
def test_losses_are_those_of_the_papers(
    kind: str, beta: float, swapped: float, gamma: float, sft_weight: float
) -> None:
    config = PreferenceConfig(
        loss=PreferenceLoss[kind], beta=beta, label_smoothing=swapped, gamma=gamma, sft_weight=sft_weight
    )
    chosen, rejected, chosen_tokens, rejected_tokens, *reference = torch.tensor(PAIRS, dtype=torch.float64).T
    chosen = chosen.clone().requires_grad_()
    found = pair_losses(
        config, Answers(chosen, chosen_tokens, reference[0]), Answers(rejected, rejected_tokens, reference[1])
    )
    for place, pair in enumerate(PAIRS):
        expected = by_paper(kind, pair, beta, swapped, gamma) - sft_weight * pair[0] / pair[2]
        assert float(found.losses[place].detach()) == pytest.approx(expected, rel=1e-12), pair
        step = 1e-6
        up, down = (
            by_paper(kind, (pair[0] + move, *pair[1:]), beta, swapped, gamma) - sft_weight * (pair[0] + move) / pair[2]
            for move in (step, -step)
        )
        (slope,) = torch.autograd.grad(found.losses[place], chosen, retain_graph=True)
        assert float(slope[place]) == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)
    assert not found.chosen_rewards.requires_grad
    if kind in ("sigmoid", "hinge", "robust"):
        assert found.chosen_rewards.tolist() == pytest.approx([beta * (pair[0] - pair[4]) for pair in PAIRS])


@pytest.mark.parametrize("divergence", [0.0, 1.7])
def test_loss_of_single_answers_is_that_of_the_paper(divergence: float) -> None:
    """2402.01306, equation 7, in Python's own float64; TRL 1.16.0 gives the same."""
    ratios, labels, weights = [0.4, -3.0, 1.7, 12.0], [True, True, False, False], {True: 1.3, False: 0.6}
    config = PreferenceConfig(loss=PreferenceLoss.kto, beta=0.2, desirable_weight=1.3, undesirable_weight=0.6)
    given = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    losses = answer_losses(config, given, torch.tensor(labels), torch.tensor(divergence, dtype=torch.float64))
    slopes = torch.autograd.grad(losses.sum(), given)[0].tolist()
    for loss, slope, ratio, is_good in zip(losses.tolist(), slopes, ratios, labels, strict=True):
        value = sigmoid(0.2 * (ratio - divergence)) if is_good else sigmoid(0.2 * (divergence - ratio))
        assert loss == pytest.approx(weights[is_good] * (1 - value), rel=1e-12)
        towards = -1 if is_good else 1
        assert slope == pytest.approx(towards * 0.2 * weights[is_good] * value * (1 - value), rel=1e-12)


def test_what_is_certain_has_finite_odds() -> None:
    config = PreferenceConfig(loss=PreferenceLoss.orpo, sft_weight=1.0)
    values = torch.zeros(1, requires_grad=True)
    side = Answers(values, torch.ones(1), torch.zeros(1))
    loss = pair_losses(config, side, side).losses.sum()
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(values.grad).all()  # type: ignore[arg-type]


def batch_of(lengths: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return rows of so many tokens, of which so many at the end are trained."""
    size = max(length for length, _ in lengths)
    ids = torch.randint(4, 128, (len(lengths), size), generator=torch.Generator().manual_seed(1))
    places = torch.arange(size).repeat(len(lengths), 1)
    ends, trained = (torch.tensor(column)[:, None] for column in zip(*lengths, strict=True))
    labels = torch.where((places < ends) & (places >= ends - trained), ids, -100)
    batch = {"input_ids": ids, "labels": labels, "position_ids": places, "segment_ids": (places < ends).long()}
    return with_targets(batch)


@pytest.mark.parametrize("trains_head", [True, False])
def test_log_probabilities_and_gradients_of_each_answer(trains_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 3 * 4 * 128)  # of three tokens
    torch.manual_seed(0)
    model: Any = transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES))
    model.lm_head.bias = torch.nn.Parameter(torch.randn(128))
    model.lm_head.requires_grad_(trains_head)
    record_of(model).loss_head = LossHead()
    batch, weights = batch_of([(9, 4), (5, 2), (7, 0)]), torch.tensor([0.3, -1.7, 5.0])
    logits = model(batch["input_ids"], attention_mask=batch["segment_ids"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    of_token = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    expected = of_token.sum(dim=1)
    (expected * weights).sum().backward()
    parameters = dict(model.named_parameters())
    gradients = {name: one.grad.clone() for name, one in parameters.items() if one.grad is not None}
    model.zero_grad()
    values, counts = answer_log_probabilities(model, batch)
    (values * weights).sum().backward()
    assert counts.tolist() == [4, 2, 0]
    assert torch.allclose(values, expected, atol=1e-5)
    assert gradients.keys() == {name for name, one in parameters.items() if one.grad is not None}
    assert ("lm_head.weight" in gradients) is trains_head
    for name, gradient in gradients.items():
        assert torch.allclose(parameters[name].grad, gradient, atol=1e-5), name
    with torch.no_grad():
        assert torch.equal(answer_log_probabilities(model, batch)[0], values)


def test_no_answers_have_a_gradient_of_zero() -> None:
    model: Any = transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES))
    values, _ = answer_log_probabilities(model, batch_of([(4, 0)]))
    values.sum().backward()
    assert all(not one.grad.any() for one in model.parameters() if one.grad is not None)


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in [("user", "q"), ("assistant", "a"), ("assistant", "b")]
)
ROWS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "instruction": {"instruction": "q", "input": "", "output": "left out", "chosen": "a", "rejected": "b"},
    "whole conversations (UltraFeedback)": {
        "prompt": "q",
        "prompt_id": "1",
        "messages": [USER, GOOD],
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 9.0,
    },
    "whole conversations alone": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "messages and answers (TRL)": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "text and messages": {"prompt": "q", "chosen": [GOOD], "rejected": [BAD]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    "messages and one answer each": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "ms-swift": {"messages": [USER, GOOD], "rejected_response": "b"},
    "ms-swift, whole": {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    "ms-swift, query": {"query": "q", "response": "a", "rejected_response": "b"},
    "as text": {"messages": json.dumps([USER]), "chosen": json.dumps(GOOD), "rejected": json.dumps([BAD])},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_of_every_layout(row: dict[str, Any]) -> None:
    chosen, rejected = PairReader({}).read_all(row)
    assert chosen.messages == [USER, GOOD]
    assert rejected.messages == [USER, BAD]


@pytest.mark.parametrize("answer", ['{"a": 1}', "{}", "[]", "[1, 2]", '[{"a": 1}]', '[{"role": "x"}, 3]'])
def test_answers_and_questions_may_be_json(answer: str) -> None:
    said = [USER, {"role": "assistant", "content": answer}]
    for row in ({"prompt": "q"}, {"prompt": [USER]}, {"messages": [USER]}):
        chosen, rejected = PairReader({}).read_all({**row, "chosen": answer, "rejected": "b"})
        assert (chosen.messages, rejected.messages) == (said, [USER, BAD])
    assert PairReader({}).read_all({"messages": [USER, GOOD], "rejected_response": answer})[1].messages == said
    assert LabelReader({}).read_all({"prompt": "q", "completion": answer, "label": True})[0].messages == said
    asked = PairReader({}).read_all({"prompt": answer, "chosen": "a", "rejected": "b"})[0]
    assert asked.messages == [{"role": "user", "content": answer}, GOOD]


def test_conversations_as_hh_rlhf_writes_them() -> None:
    before = "\n\nHuman: Say: \n\nHi\n\nAssistant: Hi\n\nHuman: q"
    row = {"chosen": f"{before}\n\nAssistant: a", "rejected": f"{before}\n\nAssistant: b"}
    asked = [{"role": "user", "content": "Say: \n\nHi"}, {"role": "assistant", "content": "Hi"}, USER]
    chosen, rejected = PairReader({}).read_all(row)
    assert (chosen.messages, rejected.messages) == ([*asked, GOOD], [*asked, BAD])
    assert RowReader(RowFormat.messages, {"messages": "chosen"}).read(row).messages == [*asked, GOOD]


def test_history_system_tools_and_names() -> None:
    tool = {"name": "look", "parameters": {}}
    row = {"q": "q", "history": [["x", "y"]], "system": "s", "tools": [tool], "good": "a", "bad": "b"}
    reader = PairReader({"prompt": "q", "chosen": "good", "rejected": "bad"})
    for conversation, answer in zip(reader.read_all(row), "ab", strict=True):
        assert [message["content"] for message in conversation.messages] == ["s", "x", "y", "q", answer]
        assert conversation.tools == [{"type": "function", "function": tool}]
    assert reader.unused({**row, "id": 1}) == ["id"]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    pair = PairReader({}).read_all({"messages": [USER], "tools": [tool], "chosen": call, "rejected": BAD})
    assert [conversation.messages[-1].get("tool_calls") is not None for conversation in pair] == [True, False]


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "q", "chosen": "a"}, "no key 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "no key 'prompt'; the row has 'chosen', 'rejected'"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": 3}, "'rejected' is 3, not a text"),
        ({"messages": [USER, GOOD], "chosen": GOOD, "rejected": BAD}, "must end with a question"),
        ({"messages": [USER, GOOD]}, "the row has no 'chosen' and 'rejected' answer, only 'messages': preference data"),
        (
            {"messages": [USER], "chosen": {"role": "x", "content": "a"}, "rejected": BAD},
            "'chosen' cannot be used: unknown role 'x'",
        ),
        ({"prompt": "q", "chosen": [GOOD, USER], "rejected": [USER, BAD]}, "does not end with the assistant's answer"),
        (
            {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "p"}, BAD]},
            "the same messages before their last answer",
        ),
        ({"messages": [USER], "rejected_response": "b"}, "holds no answer of the assistant"),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RowError, match=wrong):
        PairReader({}).read_all(row)


MARKED: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": "q", "completion": "a", "label": True},
    "TRL, messages": {"prompt": [USER], "completion": [GOOD], "label": True},
    "ms-swift": {"messages": [USER, GOOD], "label": 1},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "kto_tag": True,
    },
    "LLaMA-Factory, instruction": {"instruction": "q", "output": "a", "kto_tag": "true"},
    "query": {"query": "q", "response": "a", "label": 1.0},
}


@pytest.mark.parametrize("row", MARKED.values(), ids=MARKED)
def test_marked_rows_of_every_layout(row: dict[str, Any]) -> None:
    key = "label" if "label" in row else "kto_tag"
    for value, expected in ((row[key], 1.0), (False, 0.0), (0, 0.0), ("False", 0.0)):
        (conversation,) = LabelReader({}).read_all({**row, key: value})
        assert (conversation.messages, conversation.value) == ([USER, GOOD], expected)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "q", "completion": "a"}, "no key 'label'"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "'label' is a text, neither true nor false"),
        ({"prompt": "q", "completion": "a", "label": None}, "'label' is null, neither true nor false"),
        ({"prompt": "q", "completion": "", "label": True}, "'completion' is empty"),
        ({"messages": [USER, GOOD, USER], "label": True}, "does not end with the assistant's answer"),
    ],
)
def test_marked_rows_that_cannot_be_used(row: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RowError, match=wrong):
        LabelReader({}).read_all(row)


def test_a_question_meets_the_answer_before_it(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"question{number}", "completion": "a" * (number + 1), "label": number % 2 == 0}
        for number in range(5)
    ]
    train, validation, _ = caches(tmp_path, rows, row_format=RowFormat.labeled, validation_fraction=0.2)
    assert (len(train), len(validation)) == (4, 1)
    for cache in (train, validation):
        mismatched = pickle.loads(pickle.dumps(MismatchedCache(cache.folder, cache.split, 14)))
        size = len(mismatched)
        assert (size, mismatched.num_numbers) == (len(cache), 2 * len(cache))
        for place in range(size):
            lines = [int(mismatched.where(number).rsplit(":")[1]) for number in (place, size + place)]
            assert lines[0] == lines[1]
            assert mismatched.values([place, size + place]).tolist() == [float(lines[0] % 2)] * 2
            (ids, trained), (others, covered) = mismatched[place], mismatched[size + place]
            assert (ids == cache[place][0]).all() and (trained == cache[place][1]).all()
            before = text_of(cache[(place or size) - 1][0][cache[(place or size) - 1][1]])
            label = "a bad answer" if lines[0] % 2 == 0 else "a good answer"
            assert preview._label(RunConfig(), mismatched, place) == f", {label}"
            assert "with another sample's answer" in preview._label(RunConfig(), mismatched, size + place)
            asked = text_of(ids[~trained])
            assert text_of(others) == (asked + before)[:14]
            assert text_of(others[covered]) == before[: 14 - len(asked)]
        plan = plan_sequences(
            mismatched,
            Packing.none,
            max_length=64,
            micro_per_gpu=1,
            seed=3,
            sources=[],
            cache_dir=tmp_path / "cache",
        )
        assert [plan[row] for row in range(len(plan))] == [[place, size + place] for place in range(size)]


def test_a_question_meets_no_answer_to_itself(tmp_path: Path) -> None:
    """Unrolled pairs stand side by side. Where there is one question only, its other answers are all there is."""
    rows = [
        {"prompt": f"Q{question}", "completion": f"{question}{kind}", "label": kind == "a"}
        for question in (1, 2)
        for kind in "ab"
    ]
    for given, wanted in ((rows, ["Q12b", "Q12b", "Q21b", "Q21b"]), (rows[:2], ["Q11b", "Q11a"])):
        train = caches(tmp_path, given, row_format=RowFormat.labeled, validation_fraction=0.0)[0]
        mismatched = MismatchedCache(train.folder, "train", 14)
        found = [text_of(mismatched[len(given) + place][0]) for place in range(len(given))]
        assert found == [f"{text}$" for text in wanted]


def caches(
    folder: Path,
    rows: list[dict[str, Any]],
    encoder: ByteEncoder | None = None,
    row_format: RowFormat = RowFormat.preference,
    **data: Any,
) -> Any:
    """Return the caches of a file of preferences."""
    cfg = run_config(folder)
    cfg.data.sources = [SourceConfig(path=write_rows(folder / "pairs.jsonl", rows), format=row_format)]
    cfg.data.train_on = TrainOn.last
    for name, value in data.items():
        setattr(cfg.data, name, value)
    return build_caches(cfg, encoder or ByteEncoder())


@pytest.mark.parametrize("only_last", [False, True])
def test_a_pair_is_two_samples_side_by_side(only_last: bool, tmp_path: Path) -> None:
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yy", "loss": True}]
    rows = [
        {"messages": [*history, USER], "chosen": GOOD, "rejected": "bbb"},
        {"prompt": "same", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "x" * 50, "rejected": "b"},
        {"prompt": "q", "chosen": "b", "rejected": "x" * 50},
        {"prompt": "q", "chosen": "last", "rejected": "one"},
    ]
    train, _, report = caches(tmp_path, rows, ByteEncoder(only_last=only_last), max_length=30, too_long=TooLong.drop)
    cfg = RunConfig(preference=PreferenceConfig(loss=PreferenceLoss.sigmoid))
    assert [preview._label(cfg, train, place) for place in (2, 3)] == [", the chosen answer", ", the rejected answer"]
    found = [(text_of(ids), text_of(ids[trained])) for ids, trained in map(train.__getitem__, range(len(train)))]
    texts = [(found[place][0], found[place + 1][0]) for place in range(0, len(found), 2)]
    assert texts == [("xyy$qa$", "xyy$qbbb$"), ("qlast$", "qone$")]
    if not only_last:  # such an encoder marks by itself
        assert [trained for _, trained in found] == ["a$", "bbb$", "last$", "one$"]
    assert report.dropped == {"both answers are the same": 1, "longer than data.max_length = 30": 2}


def test_both_halves_are_dropped_where_one_cannot_be_encoded(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "REFUSED"},
        {"prompt": "q", "chosen": "REFUSED", "rejected": "REFUSED too"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ]
    with pytest.raises(DataError, match=r"pairs.jsonl:1: refused by the encoder"):
        caches(tmp_path, rows)
    from toolkit.config.schema import OnBadRow

    train, _, report = caches(tmp_path, rows, on_bad_row=OnBadRow.skip)
    assert len(train) == 2 and report.bad_rows == 2
    with pytest.raises(DataError, match=r"pairs.jsonl:3: .* tokens, more than"):
        caches(
            tmp_path,
            rows[2:] * 2 + [{"prompt": "q", "chosen": "a", "rejected": "b" * 99}],
            max_length=30,
            too_long=TooLong.error,
        )


def test_splits_and_plans_keep_pairs_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b" * (number + 1)} for number in range(40)]
    train, validation, _ = caches(tmp_path, rows, validation_fraction=0.25)
    assert (len(train), len(validation)) == (60, 20)
    lines = [cache.lines[cache.members] for cache in (train, validation)]
    assert all((found[::2] == found[1::2]).all() for found in lines)
    assert not set(lines[0].tolist()) & set(lines[1].tolist())

    def plan(cache: Any, weight: float = 1.0, most: int = 0) -> PackingPlan:
        sources = [SourceConfig(weight=weight)] if weight != 1 else []
        return plan_sequences(
            cache,
            Packing.none,
            max_length=64,
            micro_per_gpu=1,
            seed=3,
            sources=sources,
            most=most,
            size=2,
            cache_dir=tmp_path / "cache",
        )

    for one, size in ((plan(train), 30), (plan(validation, most=7), 7), (plan(train, 2.0), 60), (plan(train, 0.5), 15)):
        found = [one[row] for row in range(len(one))]
        assert len(found) == size
        assert all(first % 2 == 0 and second == first + 1 for first, second in found)
        again = pickle.loads(pickle.dumps(one))
        assert [again[row] for row in range(len(again))] == found
    assert plan(train, 2.0).folder != plan(train, 0.5).folder
    counts = np.bincount([plan(train, 2.0)[row][0] // 2 for row in range(60)])
    assert (counts == 2).all()


def test_answers_share_their_prompt_in_a_plan(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"question {number}", "chosen": f"same {number}", "rejected": f"same {number + 1}"}
        for number in range(9)
    ]
    train, _, _ = caches(tmp_path, rows, validation_fraction=0.0)
    given: dict[str, Any] = {"max_length": 64, "micro_per_gpu": 1, "seed": 3, "size": 2}
    for weight in (1.0, 2.0, 0.5):
        sources = [SourceConfig(weight=weight)] if weight != 1 else []
        whole = plan_sequences(train, Packing.none, sources=sources, cache_dir=tmp_path / "cache", **given)
        tree = share_prompts(train, whole, tmp_path / "cache")
        assert [tree[row] for row in range(len(tree))] == [whole[row] for row in range(len(whole))]
        assert pickle.loads(pickle.dumps(tree)).prefixes(0) == tree.prefixes(0)
        for row in range(len(tree)):
            ids, trained = train[tree[row][1]]
            before, _ = train[tree[row][0]]
            first, shared = tree.prefixes(row)
            assert first == 0 and (ids[:shared] == before[:shared]).all()
            assert shared == int(trained.argmax()) - 1 > 5, "the answers begin alike, and that is theirs"
        assert tree.lengths(train).sum() + tree.num_shared == whole.lengths(train).sum()


def test_the_config_says_how_rows_are_read_and_how_fast_is_learned() -> None:
    words = ["recipe=zero1", "model=glm_tiny", "data=pairs.jsonl"]
    assert load(words).cfg.data.sources[0].format is RowFormat.auto
    for tuning, rate in (("full", 5e-7), ("lora", 5e-6)):
        cfg = load([*words, "preference=dpo", f"tuning={tuning}"]).cfg
        assert cfg.data.sources[0].format is RowFormat.preference and cfg.data.train_on is TrainOn.last
        assert cfg.optim.lr == rate
    assert load([*words, "preference=dpo", "optim.lr=1e-3"]).cfg.optim.lr == 1e-3
    assert load([*words, "preference=kto"]).cfg.data.sources[0].format is RowFormat.labeled
