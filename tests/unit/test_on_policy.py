"""On-policy distillation: which samples are answered, what is drawn, what is read back, and the loss of own tokens."""

import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_distillation import CONFIGS, TAUGHT, VOCAB, apart, made
from toolkit.config.schema import DistillConfig, RolloutsConfig
from toolkit.tasks.distill_losses import distilled
from toolkit.tasks.on_policy import Draws, choose, draw_of, read_rollouts


def test_a_share_of_each_step_is_chosen_by_seed_and_step_alone() -> None:
    samples = list(range(100, 116))
    assert choose(samples, 1.0, 7, 3) == samples and choose(samples, 0.5, 7, 3) == choose(samples[::-1], 0.5, 7, 3)
    assert {len(choose(samples, 0.5, 7, step)) for step in range(50)} == {8}
    counts = [len(choose(samples, 0.1, 7, step)) for step in range(400)]
    assert set(counts) == {1, 2} and sum(counts) / 400 == pytest.approx(1.6, abs=0.1)
    assert len({tuple(choose(samples, 0.5, seed, 3)) for seed in range(20)}) > 15
    often = [sum(sample in choose(samples, 0.5, 7, step) for step in range(400)) for sample in samples]
    assert min(often) > 150 and max(often) < 250


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_what_is_drawn_has_the_distribution_of_the_logits(top_p: float) -> None:
    """Each row by its own seed, whatever stands next to it; never a token beyond the vocabulary."""
    config, scores = RolloutsConfig(temperature=2.0, top_p=top_p), torch.tensor([2.0, 1.0, 0.0, -1.0, 9.0])
    expected = torch.softmax(scores[:4] / 2, 0)
    if top_p < 1:
        expected = torch.where(torch.arange(4) < 2, expected, 0.0) / expected[:2].sum()
    rows = 20_000
    seeds = [draw_of(0, row) for row in range(rows)]
    drawn = Draws(seeds, torch.device("cpu"), config, 4)(torch.zeros(rows, 1), scores.repeat(rows, 1)).argmax(1)
    found = torch.bincount(drawn, minlength=5) / rows
    assert found[4] == 0
    torch.testing.assert_close(found[:4], expected, atol=0.015, rtol=0)
    some = [5, 3, 77]
    alone = Draws([seeds[row] for row in some], torch.device("cpu"), config, 4)
    assert alone(torch.zeros(3, 1), scores.repeat(3, 1)).argmax(1).tolist() == drawn[some].tolist()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.loss.value}-{one.beta}-{one.temperature}")
def test_own_tokens_have_the_divergence_alone(config: DistillConfig) -> None:
    """By the papers' formulas in float64, with gradients."""
    student, teacher, targets = made()
    own = torch.arange(TAUGHT) % 3 == 0
    exact = [one.detach().double().requires_grad_() for one in student]
    logits = torch.nn.functional.linear(*exact)
    assert teacher.weight is not None
    of_teacher = torch.nn.functional.linear(teacher.states.double(), teacher.weight.double())[:, :VOCAB]
    p, q = (torch.softmax(one[:TAUGHT] / config.temperature, 1) for one in (of_teacher, logits[:, :VOCAB]))
    labels = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    weights = torch.where(own, 1.0, config.weight)
    each = (1 - weights) * labels[:TAUGHT] + weights * config.temperature**2 * apart(config, p, q)
    expected = each.sum() + labels[TAUGHT:].sum()
    expected.backward()
    found = distilled(type(teacher)(*student), targets, teacher, VOCAB, config, own)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, wanted in zip(student, exact, strict=True):
        assert mine.grad is not None and wanted.grad is not None
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=2e-5, atol=2e-5)


def test_answers_are_read_from_the_first_step_on(tmp_path: Path) -> None:
    """A line that a crash cut is skipped, and the later of two for a sample counts."""
    file = tmp_path / "rollouts.jsonl"
    rows = [{"step": 3, "sample": 1, "tokens": [5]}, {"step": 4, "sample": 1, "tokens": [6]}]
    rows += [{"step": 4, "sample": 2, "failed": "late"}, {"step": 4, "sample": 1, "tokens": [7, 8]}]
    rows += [{"step": 4, "sample": 3, "tokens": []}]  # cut before its first token, and yet an answer
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "sam')
    assert read_rollouts([file, tmp_path / "none.jsonl"], 4) == {4: {1: [7, 8], 2: "late", 3: []}}
