"""Losses of distillation are those of float64 over all logits, with their gradients, and hold only chunks of these."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.schema import DistillConfig, DistillLoss, RunConfig
from toolkit.messages import ModelError
from toolkit.models import base_model, loss_kernels
from toolkit.models.loss_kernels import Scores
from toolkit.plan import memory
from toolkit.tasks import distill, distill_losses
from toolkit.tasks.distill_losses import StoredScores, distilled, store

VOCAB, PADDED, TEACHERS, WIDTH, TOKENS, TAUGHT = 50, 56, 64, 8, 23, 17


def made(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[list[torch.Tensor], Scores, torch.Tensor]:
    """Return a student's states, weight and bias, a wider teacher's scores, and the labels."""
    draw = torch.Generator().manual_seed(4)
    student = [torch.randn(TOKENS, WIDTH, generator=draw), torch.randn(PADDED, WIDTH, generator=draw)]
    student += [torch.randn(PADDED, generator=draw)] if bias else []
    teacher = Scores(torch.randn(TAUGHT, 12, generator=draw), torch.randn(TEACHERS, 12, generator=draw))
    return [one.to(dtype).requires_grad_() for one in student], teacher, torch.randint(VOCAB, (TOKENS,), generator=draw)


def plain(config: DistillConfig, logits: torch.Tensor, of_teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses by the papers' formulas; float64 logits over what is compared."""
    share, heat = config.weight, config.temperature
    labels = functional.cross_entropy(logits, targets, reduction="none")
    p, q = (torch.softmax(one[:TAUGHT] / heat, 1) for one in (of_teacher, logits[:, : of_teacher.size(1)]))
    return (1 - share) * labels[:TAUGHT].sum() + labels[TAUGHT:].sum() + share * heat**2 * apart(config, p, q).sum()


def apart(config: DistillConfig, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(one > 0, one * (one.clamp(min=1e-300) / other.clamp(min=1e-300)).log(), 0.0).sum(1)

    if config.loss is DistillLoss.forward_kl:
        return kl(p, q)
    if config.loss is DistillLoss.reverse_kl:
        return kl(q, p)
    between = config.beta * p + (1 - config.beta) * q
    return config.beta * kl(p, between) + (1 - config.beta) * kl(q, between)


CONFIGS = [
    DistillConfig(loss=loss, beta=beta, temperature=heat, weight=share)
    for loss, beta, heat, share in (
        (DistillLoss.forward_kl, 0.5, 1.0, 0.5),
        (DistillLoss.forward_kl, 0.5, 2.0, 1.0),
        (DistillLoss.reverse_kl, 0.5, 1.5, 0.3),
        (DistillLoss.jsd, 0.5, 1.0, 0.7),
        (DistillLoss.jsd, 0.1, 2.0, 0.7),
    )
]


@pytest.mark.parametrize("by_logits", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.loss.value}-{one.beta}-{one.temperature}")
def test_values_and_gradients(config: DistillConfig, by_logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens; the last tokens have labels alone; embeddings are padded, the teacher's further."""
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 4 * 4 * PADDED * 4)
    student, teacher, targets = made()
    exact = [one.detach().double().requires_grad_() for one in student]
    of_teacher = functional.linear(*(one.double() for one in teacher[:2]))[:, :VOCAB]
    expected = plain(config, functional.linear(*exact), of_teacher, targets)
    expected.backward()
    given = Scores(functional.linear(*student)) if by_logits else Scores(*student)
    found = distilled(given, targets, teacher, VOCAB, config)
    (3 * found.loss).backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, wanted in zip(student, exact, strict=True):
        assert mine.grad is not None and wanted.grad is not None
        torch.testing.assert_close(mine.grad.double() / 3, wanted.grad, rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        again = distilled(Scores(*student), targets, teacher, VOCAB, config)
    for one, other in zip(again, found, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-6)
    labels = functional.cross_entropy(functional.linear(*exact), targets, reduction="none")
    torch.testing.assert_close(found.cross_entropies.double(), labels.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.loss.value}-{one.beta}-{one.temperature}")
@pytest.mark.parametrize("count", [3, VOCAB])
def test_what_was_stored_is_compared_in_groups(config: DistillConfig, count: int) -> None:
    """The likeliest tokens, and all others as one; of the whole vocabulary it is what a live teacher gives."""
    student, teacher, targets = made()
    stored = store(teacher, VOCAB, count)
    exact = [one.detach().double().requires_grad_() for one in student]
    logits, of_teacher = functional.linear(*exact), functional.linear(*(one.double() for one in teacher[:2]))[:, :VOCAB]

    def grouped(one: torch.Tensor) -> torch.Tensor:
        masses = torch.softmax(one[:TAUGHT, :VOCAB], 1)
        taken = masses.gather(1, stored.ids)
        rest = masses.scatter(1, stored.ids, 0.0).sum(1, keepdim=True)
        powers = torch.cat((taken, rest), 1) ** (1 / config.temperature)
        return powers / powers.sum(1, keepdim=True)

    share = config.weight
    labels = functional.cross_entropy(logits, targets, reduction="none")
    distance = apart(config, grouped(of_teacher), grouped(logits))
    expected = (
        (1 - share) * labels[:TAUGHT].sum() + labels[TAUGHT:].sum() + share * config.temperature**2 * distance.sum()
    )
    if count < VOCAB:  # a power of nothing has no slope
        expected.backward()
    found = distilled(Scores(*student), targets, stored, VOCAB, config)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    live = distilled(Scores(*student), targets, teacher, VOCAB, config)
    if count < VOCAB:
        for mine, wanted in zip(student, exact, strict=True):
            assert mine.grad is not None and wanted.grad is not None
            torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=2e-5, atol=2e-5)
        if config.temperature == 1:
            assert (found.divergences <= live.divergences + 1e-6).all() and (found.divergences > 0).all()
    else:
        mine = [one.grad for one in student]
        for one in student:
            one.grad = None
        live.loss.backward()
        for one, stored_gradient in zip(student, mine, strict=True):
            assert one.grad is not None and stored_gradient is not None
            torch.testing.assert_close(one.grad, stored_gradient, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_its_numbers(dtype: torch.dtype) -> None:
    student, teacher, targets = made(dtype)
    teacher = Scores(*(one.to(dtype) for one in teacher[:2]))
    exact = [one.detach().double().requires_grad_() for one in student]
    config = DistillConfig(weight=0.9, temperature=2.0)
    of_teacher = functional.linear(*(one.double() for one in teacher[:2]))[:, :VOCAB]
    expected = plain(config, functional.linear(*exact), of_teacher, targets)
    expected.backward()
    found = distilled(Scores(*student), targets, teacher, VOCAB, config)
    found.loss.backward()
    unit = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert found.loss.item() == pytest.approx(expected.item(), rel=unit)
    for mine, wanted in zip(student, exact, strict=True):
        assert mine.grad is not None and mine.grad.dtype is dtype and wanted.grad is not None
        assert (mine.grad.double() - wanted.grad).norm() / wanted.grad.norm() <= unit


def test_no_tokens_give_nothing() -> None:
    student = torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(VOCAB, WIDTH, requires_grad=True)
    for teacher in (Scores(torch.zeros(0, 3), torch.zeros(VOCAB, 3)), store(Scores(torch.zeros(0, VOCAB)), VOCAB, 4)):
        found = distilled(Scores(*student), torch.zeros(0, dtype=torch.int64), teacher, VOCAB, DistillConfig())
        found.loss.backward()
        assert found.loss.item() == 0 and not student[1].grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("top_k", [0, 16])
@pytest.mark.parametrize("loss", list(DistillLoss))
def test_nothing_is_as_large_as_all_logits(loss: DistillLoss, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens chunks of 8 are held: no tensor but weights and their gradients is larger than a chunk."""
    vocab, tokens, chunk, largest = 4000, 256, 8, [0]
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 4 * 4 * vocab * chunk)
    states, weight = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(vocab, WIDTH)
    live = Scores(torch.randn(tokens, WIDTH), torch.randn(vocab, WIDTH))
    held: dict[int, int] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(one, torch.Tensor) and one.size(-1 if one.dim() else 0) == vocab if one.dim() else False:
                    largest[0] = max(largest[0], one.numel())
            return result

    teacher: Scores | StoredScores = store(live, vocab, top_k) if top_k else live
    with Watch():
        targets = torch.randint(vocab, (tokens,))
        distilled(Scores(states, weight), targets, teacher, vocab, DistillConfig(loss=loss)).loss.backward()
    assert not held and largest[0] == chunk * vocab
    assert math.isfinite(float(states.grad.sum()))  # type: ignore[union-attr]


def test_the_plan_counts_the_same_chunks() -> None:
    assert memory._DISTILLED_PART == distill_losses._COPIES


class Words:
    """A tokenizer, as far as it is asked."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def convert_ids_to_tokens(self, place: int) -> str:
        return self.words[place]


def test_another_tokenizer_is_refused_by_its_first_other_token(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = RunConfig()
    cfg.distill.teacher = "large"
    found: list[Any] = []
    monkeypatch.setattr(distill, "quantized", SimpleNamespace(check_readable=len))
    monkeypatch.setattr(distill, "directory", SimpleNamespace(read_config=found.append))
    for mine, theirs, place in (("ab", "ab", None), ("abc", "aBC", 1), ("ab", "abc", 2), ("abc", "ab", 2)):
        loading = SimpleNamespace(load_tokenizer=lambda *_, theirs=theirs, **__: Words(*theirs))
        monkeypatch.setattr(distill, "tokenizer_files", loading)
        if place is None:
            distill.check_teacher(cfg, Words(*mine))  # type: ignore[arg-type]
            continue
        with pytest.raises(ModelError, match=f"distill.teacher = large has another tokenizer.* token {place} is "):
            distill.check_teacher(cfg, Words(*mine))  # type: ignore[arg-type]
    assert found == ["large"] * 4


def test_what_is_stored_is_known_by_the_teachers_content(tmp_path: Path) -> None:
    digests = set()
    for name, content in (
        ("a", b"1" * 10**6),
        ("b", b"1" * 10**6),
        ("c", b"1" * 999_999 + b"2"),
        ("d", b"1" * 999_999),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        digests.add(base_model.weights_digest(folder))
    assert len(digests) == 3, "a and b are the same"
