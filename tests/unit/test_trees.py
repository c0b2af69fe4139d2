"""Samples of one conversation as a tree in a row: losses and gradients are those of each sample on its own."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.architectures import CONFIGS
from tests.unit.data_tools import ByteEncoder, run_config, text_of, write_rows
from toolkit.config.load import load
from toolkit.config.schema import Attention, Packing, SourceConfig, TrainOn
from toolkit.data.loader import Branch, Layout, collate, collate_planned
from toolkit.data.packing import plan_sequences
from toolkit.data.plans import PackingPlan
from toolkit.data.prefixes import shared_prefixes
from toolkit.data.store import TokenizedCache
from toolkit.data.tokenize import build_caches
from toolkit.layouts.sequence import local_part
from toolkit.messages import ModelError
from toolkit.models import segment_attention
from toolkit.models.attention import choose_attention
from toolkit.models.isolation import check_isolation
from toolkit.models.loss import loss_head, num_trained_tokens, token_loss_sum
from toolkit.models.per_sample import answer_log_probabilities
from toolkit.models.router_loss import routers_of
from toolkit.sample_types import Encoded

# fp32: what is left is the order of additions.
TOLERANCE = 1e-5
PACKED = [
    *("glm", "glm4", "glm4_moe", "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "granitemoe", "deepseek_v3"),
    *("phi3", "olmo2", "gpt_neox", "falcon", "gpt2"),
]
"""Architectures that train on packed rows; ChatGLM2, ChatGLM3 and glm-4-9b are built as glm."""


def conversation(draw: np.random.Generator, turns: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a sample for each turn: what was said before it, without the reasoning, a question, an answer with it."""
    said, samples = draw.integers(2, 900, 20), []
    for _ in range(turns):
        question, reasoning, answer = (draw.integers(2, 900, draw.integers(2, 9)) for _ in range(3))
        ids = np.concatenate((said, question, reasoning, answer)).astype(np.uint32)
        samples.append((ids, np.arange(len(ids)) >= len(said) + len(question)))
        said = np.concatenate((said, question, answer))
    return samples


def branches(samples: list[tuple[np.ndarray, np.ndarray]]) -> list[Branch]:
    """Return the samples of a conversation as branches of a tree, by hand."""
    found, before = [], np.empty(0, np.uint32)
    for ids, trained in samples:
        most = min(len(before), trained.argmax() - 1)
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids[:most], before, strict=False))
        found.append(Branch(ids, trained, len(list(equal))))
        before = ids
    return found


def made_rows() -> tuple[list[list[Branch]], list[tuple[np.ndarray, np.ndarray]]]:
    """Return two rows, of two conversations and a lone sample, and of a conversation; and all samples."""
    draw = np.random.default_rng(3)
    talks = [conversation(draw, turns) for turns in (4, 1, 2, 5)]
    rows = [branches(talks[0]) + branches(talks[1]) + branches(talks[2]), branches(talks[3])]
    return rows, list(itertools.chain.from_iterable(talks))


def build(family: str) -> Any:
    torch.manual_seed(5)
    config = CONFIGS[family]()
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)  # of GPT-2
    config.sliding_window = None if family != "gemma2" else 512
    return transformers.AutoModelForCausalLM.from_config(config).train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(PACKED, [Attention.varlen, Attention.sdpa]),
        *(("glm", Attention.eager), ("glm4_moe", Attention.eager), ("qwen3", Attention.eager)),
        ("gemma2", Attention.eager),
    ],
)
def test_a_tree_is_its_samples(family: str, kind: Attention) -> None:
    model = build(family)
    if kind is Attention.eager:  # alone too: of Gemma 2 no other bends the scores
        choose_attention(model, kind, True, torch.float32)
    rows, samples = made_rows()
    total = sum(int(trained.sum()) for _, trained in samples)
    expected = 0.0
    for sample in samples:
        loss = token_loss_sum(model, collate([[sample]], 0)) / total
        loss.backward()
        expected += loss.item()
    alone = gradients(model)
    choose_attention(model, kind, True, torch.float32)
    batch = collate(rows, 0, packed=True)
    assert batch["input_ids"].numel() < 0.7 * sum(len(ids) for ids, _ in samples)
    assert num_trained_tokens(batch) == total
    loss = token_loss_sum(model, batch) / total
    loss.backward()
    found = gradients(model)
    assert loss.item() == pytest.approx(expected, abs=TOLERANCE)
    assert set(found) == set(alone)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, alone[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_recomputed_layers_see_the_same_tree() -> None:
    model = build("qwen3")
    choose_attention(model, Attention.auto, True, torch.float32)
    batch = collate(made_rows()[0], 0, packed=True)
    token_loss_sum(model, batch).backward()
    expected = gradients(model)
    function = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    token_loss_sum(model, batch).backward()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


def test_routers_count_a_token_for_each_of_its_samples() -> None:
    """So their loss is that of the copies, and the experts' loads too, but for which tokens are computed together."""
    rows, samples = made_rows()
    found = []
    for given in (rows, [[sample] for sample in samples]):
        model = build("qwen3_moe")
        choose_attention(model, Attention.auto, True, torch.float32)
        routers = routers_of(model, load(["recipe=quickstart", "model=hf", "model.router_loss=0.1"]).cfg)
        assert routers is not None
        batch = collate(given, 0, packed=True)
        loss_head(model).path(model)
        routers.begin(batch, torch.device("cpu"), 1.0)
        (token_loss_sum(model, batch) * 0).backward()
        found.append((routers.collect(torch.device("cpu")), gradients(model)))
    torch.testing.assert_close(found[0], found[1], rtol=TOLERANCE, atol=TOLERANCE)


def pairs_of_answers(count: int) -> list[list[Branch]]:
    """Return pairs of answers behind one prompt; the answers may begin alike, and that is not shared."""
    draw, pairs = np.random.default_rng(8), []
    for _ in range(count):
        asked, begun = draw.integers(2, 900, draw.integers(2, 30)), draw.integers(2, 900, draw.integers(1, 3))
        pair = []
        for _ in range(2):
            ids = np.concatenate((asked, begun, draw.integers(2, 900, draw.integers(1, 9)))).astype(np.uint32)
            pair.append(Branch(ids, np.arange(len(ids)) >= len(asked), (len(asked) - 1) * len(pair)))
        pairs.append(pair)
    return pairs


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(("glm", "qwen3", "llama", "gpt2", "falcon"), [Attention.varlen, Attention.sdpa]),
        ("gemma2", Attention.eager),
    ],
)
def test_answers_behind_one_prompt_are_those_of_two_rows(family: str, kind: Attention) -> None:
    """Side by side in one row, or each pair in its own, and without any."""
    model, pairs = build(family), pairs_of_answers(3)
    if kind is Attention.eager:
        choose_attention(model, kind, True, torch.float32)
    weights = torch.tensor([0.3, -1.7, 5.0, 0.1, -0.4, 1.0])
    alone = collate_planned([[Branch(*one[:2], 0) for one in pair] for pair in pairs], 0, Layout.alone)
    values, counts = answer_log_probabilities(model, alone)
    (values * weights).sum().backward()
    expected = gradients(model)
    choose_attention(model, kind, True, torch.float32)
    for layout, rows in ((Layout.packed, 3), (Layout.joined, 1)):
        batch = collate_planned(pairs, 0, layout)
        assert len(batch["input_ids"]) == rows
        assert batch["input_ids"].numel() < 0.8 * alone["input_ids"].numel()
        found, tokens = answer_log_probabilities(model, batch)
        assert tokens.tolist() == counts.tolist() == [int(one.trained.sum()) for pair in pairs for one in pair]
        torch.testing.assert_close(found, values, rtol=TOLERANCE, atol=TOLERANCE)
        (found * weights).sum().backward()
        torch.testing.assert_close(gradients(model), expected, rtol=TOLERANCE, atol=TOLERANCE)
    nothing, tokens = answer_log_probabilities(model, collate_planned([], 0, Layout.joined))
    assert (nothing.tolist(), tokens.tolist()) == ([0.0], [0.0])


def test_collate_by_hand() -> None:
    first = Branch(np.array([5, 6, 7, 8], np.uint32), np.array([0, 0, 0, 1], bool), 0)
    second = Branch(np.array([5, 6, 9, 3], np.uint32), np.array([0, 0, 0, 1], bool), 2)
    third = Branch(np.array([5, 4, 3], np.uint32), np.array([0, 0, 1], bool), 1)
    batch = collate([[first, second, third, Branch(first.ids[:2], first.trained[:2], 0)]], pad_id=0, packed=True)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 3, 4, 3, 5, 6, 0, 0, 0, 0, 0, 0]],
        "labels": [[-100, -100, -100, 8, -100, 3, -100, 3, *[-100] * 8]],
        "position_ids": [[0, 1, 2, 3, 2, 3, 1, 2, 0, 1, *range(10, 16)]],
        "segment_ids": [[1, 1, 1, 1, 2, 2, 3, 3, 4, 4, *[0] * 6]],
        "cu_seq_lens": [0, 4, 6, 8, 10, 16],
        "seen_until": [[3, 2, 1, 1, 2, 2, 3, 3, 4, 4, *[0] * 6]],
        "keys": [0, 1, 2, 3, 0, 1, 4, 5, 0, 6, 7, 8, 9, *range(10, 16)],
        "cu_seq_lens_k": [0, 4, 8, 11, 13, 19],
        "target_indices": [3, 5, 7],
        "targets": [8, 3, 3],
    }
    assert "keys" not in collate([[Branch(*first[:2], 0)]], 0, packed=True)
    part = local_part(batch, 1, 2)
    assert part["keys"] is batch["keys"]
    assert part["cu_seq_lens_k"] is batch["cu_seq_lens_k"]


def aligned_at_the_first_key(*arguments: Any, paths: Any = None, **options: Any) -> torch.Tensor:
    """Attend as a kernel would that puts the first query of a branch at the first key, not the last at the last."""
    query, key, value, bounds, longest, dropout, scaling, *rest = arguments
    if rest and rest[0] is not None:
        places, key_bounds = rest[0]
        turned = [torch.roll(places[a:b], 1) for a, b in itertools.pairwise(key_bounds.tolist())]
        rest = [(torch.cat(turned), key_bounds)]
    return ATTEND(query, key, value, bounds, longest, dropout, scaling, *rest)


ATTEND = segment_attention.attend_to_segments


@pytest.mark.parametrize("kind", [Attention.auto, Attention.sdpa])
def test_what_a_branch_sees_is_measured(kind: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    choose_attention(model, kind, True, torch.float32)
    given = model, 1024, torch.device("cpu"), "Qwen3"
    check_isolation(*given, shared=True)
    if kind is Attention.auto:
        monkeypatch.setattr(segment_attention, "attend_to_segments", aligned_at_the_first_key)
        check_isolation(*given)
        with pytest.raises(ModelError, match=r"samples of a row influence each other.*Use data.share_prefixes=false\."):
            check_isolation(*given, shared=True)


def chats(count: int, turns: int) -> list[dict[str, Any]]:
    """Return conversations of turns, each with a long text before them."""
    return [
        {
            "messages": [
                message
                for turn in range(turns)
                for message in (
                    {"role": "user", "content": f"{number:02d} says {'what ' * 6 * (not turn)}{turn}?"},
                    {"role": "assistant", "content": f"{number} answers {turn}."},
                )
            ]
        }
        for number in range(count)
    ]


class LastAnswers(ByteEncoder):
    """Trains the last answer of a conversation, so that each is in a sample of its own."""

    def encode(self, messages: Any, tools: Any = None) -> Encoded:
        ids, trained = super().encode(messages, tools)
        answer = len(messages[-1]["content"].encode()) + 1
        return ids, [False] * (len(ids) - answer) + trained[-answer:]


def cache_of(tmp_path: Path, rows: list[dict[str, Any]]) -> TokenizedCache:
    cfg = run_config(tmp_path, write_rows(tmp_path / "chats.jsonl", rows))
    cfg.data.train_on = TrainOn.all
    return build_caches(cfg, LastAnswers(only_last=True)).train


def planned(cache: TokenizedCache, folder: Path, **given: Any) -> PackingPlan:
    given = {"max_length": 400, "share": True, "sources": [], **given}
    return plan_sequences(cache, Packing.packed, micro_per_gpu=1, seed=1, cache_dir=folder, **given)


def test_conversations_stay_whole_in_a_row(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, [*chats(9, 3), *chats(5, 1)])
    plan = planned(cache, tmp_path)
    assert plan.members is not None
    assert sorted(plan.members.tolist()) == list(range(len(cache)))
    for row in range(len(plan)):
        samples, prefixes = plan[row], plan.prefixes(row)
        assert sum(len(cache[one][0]) - shared for one, shared in zip(samples, prefixes, strict=True)) <= 400
        for place, (sample, shared) in enumerate(zip(samples, prefixes, strict=True)):
            ids, trained = cache[sample]
            assert not trained[: shared + 1].any()
            if cache.rows[cache.members[sample]] == cache.rows[cache.members[max(sample - 1, 0)]] and sample:
                before, _ = cache[samples[place - 1]]
                assert samples[place - 1] == sample - 1
                assert (ids[:shared] == before[:shared]).all()
                assert text_of(ids[shared:]).endswith("$")
                assert shared == len(before)  # the answer before, and its end
            else:
                assert shared == 0
    computed = plan.lengths(cache).sum()
    assert computed + plan.num_shared == cache.num_tokens
    assert plan.num_shared > 0.5 * cache.num_tokens
    whole = planned(cache, tmp_path, share=False)
    assert whole.shared is None
    assert len(whole) > len(plan)
    assert whole.prefixes(0) == []


def test_a_tree_that_is_longer_than_a_row_is_cut(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, chats(1, 9))
    lengths = cache.lengths()
    shared = shared_prefixes(cache, np.arange(9), int(lengths[-1]))  # a chain is as long as its longest sample
    assert (shared == [0, *lengths[:-1]]).all()
    shared = shared_prefixes(cache, np.arange(9), int(lengths[-2]))
    assert (shared == [0, *lengths[:-2], 0]).all()
    apart = cache_of(tmp_path, [{"messages": [*one["messages"]]} for one in chats(30, 1)])
    assert not shared_prefixes(apart, np.arange(len(apart)), 400).any()  # alike, but of different conversations


@pytest.mark.parametrize("weight", [0.5, 1.5, 2.0])
def test_weights_take_the_same_samples(weight: float, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, chats(9, 3))
    sources = [SourceConfig(path="chats.jsonl", weight=weight)]
    plans = [planned(cache, tmp_path, share=share, sources=sources) for share in (True, False)]
    taken = [sorted(plan.members.tolist()) for plan in plans if plan.members is not None]
    assert taken[0] == taken[1]
    assert plans[0].num_shared


def test_evaluations_take_the_same_samples(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, chats(9, 3))
    plans = [planned(cache, tmp_path, share=share, most=10) for share in (True, False)]
    taken = [sorted(plan.members.tolist()) for plan in plans if plan.members is not None]
    assert taken[0] == taken[1]
    assert len(taken[0]) == 10
