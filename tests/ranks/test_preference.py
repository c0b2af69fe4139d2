"""Preferences on ranks: however they are cut up, a plain PyTorch loop's losses; resumed bit by bit; it learns."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from shared import (
    ALL,
    LORA,
    RECOMPUTE,
    by_tier,
    check_resumed,
    global_batches,
    losses,
    plain_run,
    rows_of,
    runs_fixture,
    tiny,
)

# fp32: the only difference left is the order of additions.
TOLERANCE = 1e-5
STEPS = 8
FULL = ["optim.lr=0.001"]
SAVED = ["checkpoint.every=4", "checkpoint.keep=0"]
# With this seed other questions' answers become likelier; with most the KL is 0 in all steps, which says little.
KTO = ["preference=kto", "preference.beta=0.5", "preference.undesirable_weight=0.8", "run.seed=2"]

# name -> overrides; two ranks
CELLS: dict[str, list[str]] = {
    "full-stage0": ["zero=stage0", *FULL, *SAVED],
    "full-stage2-micro2": ["zero=stage2", "batch.micro_per_gpu=2", RECOMPUTE, *FULL],
    "full-stage3": ["zero=stage3", ALL, *FULL],
    "lora-stage0-micro2": ["zero=stage0", "batch.micro_per_gpu=2", "model.attention=sdpa", *LORA],
    "lora-stage2": ["zero=stage2", *LORA, *SAVED],
    "lora-stage3": ["zero=stage3", ALL, RECOMPUTE, *LORA],
    "orpo-stage3": ["zero=stage3", ALL, "preference=orpo", *FULL],
    "freeze-stage2": ["zero=stage2", "tuning=freeze", "tuning.last_layers=1", *FULL],
    "full-stage2-offload": ["zero=stage2_offload", "data.share_prefixes=false", *FULL],
    "lora-stage3-rows": ["zero=stage3", ALL, "data.share_prefixes=false", *LORA],
    "full-stage1-auto": ["zero=stage1", "batch.micro_per_gpu=auto", *FULL],
    "bf16-stage2": ["zero=stage2", "precision=bf16", *FULL],
    **(
        {
            "qlora-stage2": ["zero=stage2", *LORA, "tuning=qlora", *SAVED],
            "qlora-bf16-stage1": ["zero=stage1", *LORA, "tuning=qlora", "precision=bf16"],
            "kto-qlora-stage1": ["zero=stage1", *KTO, *LORA, "tuning=qlora"],
        }
        if importlib.util.find_spec("bitsandbytes")
        else {}
    ),
    "kto-full-stage0": ["zero=stage0", *KTO, *FULL, *SAVED],
    "kto-full-stage3-micro2": ["zero=stage3", ALL, "batch.micro_per_gpu=2", RECOMPUTE, *KTO, *FULL, *SAVED],
    "kto-lora-stage2": ["zero=stage2", *KTO, *LORA, *SAVED],
}
ROOM_MIB = {"full-stage1-auto": [8192.0, 8192.0]}
# bfloat16 rounds to 2^-9.
ROUGH = {"bf16-stage2": 0.03, "qlora-bf16-stage1": 0.03}
ONE_RANK = {
    "full-one-rank-4x1": ["zero=stage1", "batch.micro_per_gpu=4", "train.rehearse=true", *FULL],
    "lora-one-rank-1x4": ["zero=stage1", *LORA],
    "kto-one-rank-4x1": ["zero=stage1", "batch.micro_per_gpu=4", "train.rehearse=true", *KTO, *FULL],
}
RESUMED = [name for name in CELLS if {"checkpoint.every=4"} <= set(CELLS[name])]
LATE = (
    *("full-stage2-micro2", "lora-stage3-rows", "freeze-stage2", "bf16-stage2", "kto-full-stage0"),
    *("lora-one-rank-1x4", "kto-one-rank-4x1", "qlora-bf16-stage1", "kto-qlora-stage1"),
)
RESUMED_LATE = ("qlora-stage2", "kto-full-stage0", "kto-lora-stage2")
"""Cells of the nightly tier: what is particular to each is met in another one."""


def words(pairs_file: Path, folder: Path, name: str, overrides: list[str]) -> list[str]:
    """Return the overrides of a run; for KTO each pair becomes two answers, marked good and bad."""
    if "preference=kto" in overrides:
        pairs = map(json.loads, pairs_file.read_text(encoding="utf-8").splitlines())
        rows = [
            {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
            for pair in pairs
            for name in ("chosen", "rejected")
        ]
        pairs_file = pairs_file.with_name("labeled.jsonl")
        pairs_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tiny(pairs_file, folder, name, "preference=dpo", f"train.max_steps={STEPS}", *overrides)


runs = runs_fixture(
    "preference", words, "pairs_file", (CELLS, ONE_RANK), dict.fromkeys(RESUMED, 4), (LATE, RESUMED_LATE), ROOM_MIB
)


def plain_loop(overrides: list[str]) -> dict[str, list[float]]:
    """Train in a plain PyTorch loop, with a second model as the reference; return losses and a figure of the steps."""
    from toolkit.models.fine_tuning import apply_tuning

    run = plain_run(overrides, STEPS)
    cfg, data, model, reference, optimizer = run
    if cfg.tuning.method.value == "qlora":  # weights in 4 bits, too; a new adapter adds nothing
        apply_tuning(reference, cfg.tuning, Path("base"), data.tokenizer, cfg.run.seed)

    def of_answers(which: Any, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = run.forward(which, samples)
        labels = labels[:, 1:]
        of_token = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return (of_token * (labels >= 0)).sum(dim=1), (labels >= 0).sum(dim=1)

    beta = cfg.preference.beta
    found: dict[str, list[float]] = {"loss": [], "figure": [], "kl": []}
    for rows in global_batches(cfg, data, STEPS):
        if cfg.preference.loss.value == "kto":
            both = [[data.train[row[0]] for row in rows], [mismatched(data.train, row[0]) for row in rows]]
        else:
            both = [[data.train[row[place]] for row in rows] for place in (0, 1)]
        (chosen, tokens), (rejected, others) = (of_answers(model, samples) for samples in both)
        if cfg.preference.loss.value == "orpo":
            means = chosen / tokens, rejected / others
            margins = means[0] - means[1]
            odds = [mean - torch.log(1 - mean.exp()) for mean in means]
            loss = (-means[0] - beta * torch.nn.functional.logsigmoid(odds[0] - odds[1])).mean()
        elif cfg.preference.loss.value == "kto":
            with torch.no_grad():
                before = [of_answers(reference, samples)[0] for samples in both]
            divergence = max(0.0, float((rejected - before[1]).detach().mean()))
            # Good ones are on odd lines.
            good = torch.tensor([int(data.train.where(row[0]).rsplit(":")[1]) % 2 == 1 for row in rows])
            signs, weights = torch.where(good, 1.0, -1.0), torch.where(good, 1.0, cfg.preference.undesirable_weight)
            gains = beta * signs * (chosen - before[0] - divergence)
            loss, margins = (weights * (1 - gains.sigmoid())).mean(), torch.tensor(divergence / beta)
        else:
            with torch.no_grad():
                before = [of_answers(reference, samples)[0] for samples in both]
            margins = (chosen - before[0]) - (rejected - before[1])
            found["kl"].append(float(((chosen - before[0]) + (rejected - before[1])).detach().mean()) / 2)
            loss = -torch.nn.functional.logsigmoid(beta * margins).mean()
        found["loss"].append(float(loss.detach()))
        found["figure"].append(float(beta * margins.detach().mean()))
        optimizer.step(loss)
    return found


def mismatched(samples: Any, number: int) -> tuple[Any, Any]:
    """Return a question with the answer of the nearest sample before it that has another question."""
    import numpy as np

    ids, trained = samples[number]
    begin = next(place for place, is_trained in enumerate(trained) if is_trained)
    earlier = (samples[(number - back) % len(samples)] for back in range(1, len(samples)))
    others, covered = next(one for one in earlier if list(one[0][~one[1]]) != list(ids[:begin]))
    answer = [(token, mark) for token, mark in zip(others, covered, strict=True)][list(covered).index(True) :]
    joined = [*zip(ids[:begin], trained[:begin], strict=True), *answer]
    return np.array([token for token, _ in joined], np.uint16), np.array([mark for _, mark in joined], np.bool_)


@pytest.mark.parametrize("name", by_tier([*CELLS, *ONE_RANK], late=LATE))
def test_every_layout_follows_the_plain_loop(name: str, runs: Path, pairs_file: Path, tmp_path: Path) -> None:
    expected = plain_loop(words(pairs_file, tmp_path, "plain", ({**CELLS, **ONE_RANK})[name]))
    assert expected["loss"][0] - expected["loss"][-1] > 0.02, "the reference must learn, or the comparison says little"
    rows = [row for row in rows_of(runs / name) if "loss" in row]
    is_kto = "kto" in name
    figure = [row["kl" if is_kto else "rewards/margins"] for row in rows]
    tolerance = ROUGH.get(name, TOLERANCE)
    assert losses(runs / name) == pytest.approx(expected["loss"], abs=tolerance)
    assert figure == pytest.approx(expected["figure"], abs=tolerance)
    if expected["kl"]:
        # A sum over the tokens of answers.
        assert [row["kl"] for row in rows] == pytest.approx(expected["kl"], abs=10 * tolerance)
        assert rows[0]["kl"] == pytest.approx(0, abs=10 * tolerance) and max(map(abs, expected["kl"])) > 0.01
    else:
        assert is_kto or not any("kl" in row for row in rows), "without a reference there is none"
    if is_kto:
        assert [row["answers"] for row in rows] == [4] * STEPS and max(figure) > 0.01
    else:
        assert [row["pairs"] for row in rows] == [*[4] * (STEPS - 1), 2], "30 pairs"
    card = json.loads((runs / name / "data.json").read_text())
    assert (card["unit"], card["splits"]["train"]["samples"]) == (("answers", 59) if is_kto else ("pairs", 30))
    shares = not is_kto and "data.share_prefixes=false" not in ({**CELLS, **ONE_RANK})[name]
    assert (card["shared_tokens"] > 100) is shares
    if name in ROOM_MIB:
        assert yaml.safe_load((runs / name / "config.yaml").read_text())["batch"]["micro_per_gpu"] == 2
    if "orpo" not in name and name not in ROUGH:
        begin = 0.45 if is_kto else 0.6931472
        assert rows[0]["loss"] == pytest.approx(begin, abs=0.051 if is_kto else 1e-6), "it begins as the reference"


@pytest.mark.parametrize("name", by_tier(RESUMED, late=RESUMED_LATE))
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    check_resumed(runs, name, 4, STEPS)
    kept = [sorted((runs / one).glob("reference/*.f32")) for one in (name, f"{name}-resumed")]
    assert [len(files) for files in kept] == ([2, 2] if "full" in name else [0, 0])
    for one, other in zip(*kept, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", ["full-stage3", "lora-stage2"])
def test_held_out_pairs_come_in_order(name: str, runs: Path) -> None:
    first, last = (rows_of(runs / name)[index] for index in (0, -1))
    assert (first["eval_loss"], first["eval_rewards/margins"]) == pytest.approx((0.6931472, 0.0), abs=1e-6)
    assert first["eval_pairs"] == 7 and abs(first["eval_kl"]) < 1e-5 < abs(last["eval_kl"])
    assert last["eval_loss"] < first["eval_loss"] and last["eval_rewards/accuracies"] > 0.7


def test_held_out_answers_are_told_apart(runs: Path) -> None:
    """After KTO good answers are above the divergence of both models, and bad ones below."""
    first, last = (rows_of(runs / "kto-lora-stage2")[index] for index in (0, -1))
    assert first["eval_samples"] == 15 and first["eval_kl"] == 0.0
    assert last["eval_loss"] < first["eval_loss"] - 0.01 and last["eval_rewards/accuracies"] > 0.6
    assert last["eval_rewards/chosen"] > last["eval_rewards/rejected"]
