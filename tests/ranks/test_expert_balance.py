"""The balance of experts on two ranks: the biases and loads of a plain loop, resumed bit by bit, and exported."""

import json
from pathlib import Path
from typing import Any

import official
import pytest
import torch
from ranks import forked, run
from safetensors.torch import load_file
from shared import (
    ALL,
    RECOMPUTE,
    WORKER,
    PlainOptimizer,
    by_tier,
    global_batches,
    losses,
    of_tier,
    rows_of,
    tiny,
)

from tests.architectures import write
from toolkit.config.load import load
from toolkit.data.loader import collate
from toolkit.models import load_tokenizer
from toolkit.models.load import create_model
from toolkit.tasks.language_data import load_data

RATE = 0.004
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
STEPS = 3
COMMON = [
    "model=hf",
    f"model.router_bias_rate={RATE}",
    # An epoch of 37 rows: of the third step's five most micro-batches have none, and hold a filler.
    "data.validation_fraction=0",
    "batch.global_size=16",
    "batch.micro_per_gpu=2",
    f"train.max_steps={STEPS}",
    "checkpoint.every=2",
    "optim.eps=1e-6",
    "checkpoint.export=true",
]
# name -> overrides, of which the architecture is the first; two ranks accumulate four micro-batches
CASES = {
    "stage0": ["glm4_moe", "zero=stage0"],
    "stage1": ["glm4_moe", "zero=stage1", "train.rehearse=true", "checkpoint.asynchronous=true"],
    "stage2-packed": ["deepseek_v3", "zero=stage2", "data.packing=packed", "batch.global_size=8"],
    "stage3": ["glm4_moe_lite", "zero=stage3", ALL, RECOMPUTE],
    "bf16-stage3": ["deepseek_v3", "zero=stage3", ALL, RECOMPUTE, "precision=bf16"],
    "divided": ["glm4_moe", "zero=stage2", "parallel.expert=2"],
    "bf16-divided": ["glm4_moe", "zero=stage1", "parallel.expert=2", "precision=bf16"],
    "sequence": ["glm4_moe", "zero=stage1", "parallel.sequence=2"],
    "freeze": ["glm4_moe", "zero=stage2", "tuning=freeze", "tuning.last_layers=1"],
    "skipped": ["glm4_moe", "zero=stage2", "train.on_bad_step=skip"],
    "lora": ["glm4_moe", "zero=stage2", "tuning=lora", "tuning.target_modules=[q_proj]", "model.router_bias_rate=0"],
}

BF16 = ("bf16-stage3", "bf16-divided")
LATE = ("stage0", "bf16-stage3", "freeze", "lora")
"""Cells of the nightly tier: loads are summed in the same place under each stage."""
AGAIN_LATE = (*LATE, "stage2-packed", "bf16-divided", "sequence")
"""Those that go on in the nightly tier alone: biases are saved in the same place for them and for others."""


def words_of(name: str, folder: Path, rows_file: Path) -> list[str]:
    architecture, *words = CASES[name]
    return tiny(rows_file, folder, name, *COMMON, f"model.path={folder / architecture}", *words)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Each case once through, and once more from its checkpoint at step 2, in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = load_tokenizer(official.write(folder / "vocabulary", "glm4", tokenizer=True))
    for name in {words[0] for words in CASES.values()}:
        tokenizer.save_pretrained(write(folder / name, name))
    cases: list[dict[str, Any]] = []
    again = of_tier(request, CASES, late=AGAIN_LATE)
    for name in of_tier(request, CASES, late=LATE):
        words, values = words_of(name, folder, rows_file), {"run.name": f"{name}-again"}
        died = {"of": f"{folder}/runs/{name}", "step": 2, "as": f"{folder}/runs/{name}-again"}
        spoil = {"steps": {"1": ["loss", "nan"]} if name == "skipped" else {}, "note": str(folder / f"{name}.note")}
        cases += [{"overrides": words, "spoil": spoil}]
        cases += [{"overrides": words, "values": values, "died": died}] if name in again else []
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=580)
    assert finished.code == 0, finished.output[-6000:]
    return folder


def plain(words: list[str], without: int = 0) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Train in a plain loop, a whole global batch at once; return losses, the bias and the last step's loads. Step
    `without` updates nothing.
    """
    cfg = load(words).cfg
    data = load_data(cfg)
    model = create_model(cfg.model, cfg.precision.dtype, data.tokenizer, cfg.run.seed).train()
    router = model.model.layers[1].mlp.gate
    if cfg.tuning.last_layers:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("model.layers.1."))
    chosen: list[torch.Tensor] = []
    router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    optimizer, found = PlainOptimizer(model, cfg, STEPS), []
    for step, rows in enumerate(global_batches(cfg, data, STEPS), start=1):
        batch = collate([[data.train[sample]] for row in rows for sample in row], data.pad_id)
        mask = batch["segment_ids"] > 0
        logits = model(input_ids=batch["input_ids"], attention_mask=mask.long()).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loads = torch.bincount(chosen.pop()[mask.flatten()].flatten(), minlength=4)
        found.append(float(loss.detach()))
        if step != without:
            if cfg.tuning.method.value != "lora":
                optimizer.step(loss)
            if cfg.model.router_bias_rate:
                router.e_score_correction_bias += RATE * torch.sign(loads.double().mean() - loads).float()
    return found, router.e_score_correction_bias, loads


def bias_of(run_folder: Path) -> torch.Tensor:
    return load_file(run_folder / "export" / "model.safetensors")[BIAS]


@pytest.mark.parametrize("name", by_tier([name for name in CASES if name not in (*BF16, "lora")], late=LATE))
def test_the_plain_loops_biases_and_loads(name: str, folder: Path, rows_file: Path) -> None:
    words, skipped = words_of(name, folder, rows_file), int(name == "skipped")
    wanted, bias, loads = plain(words, without=skipped)
    found = losses(folder / "runs" / name)
    assert found[skipped:] == pytest.approx(wanted[skipped:], abs=1e-5)
    exported = bias_of(folder / "runs" / name)
    assert exported.dtype is torch.float32
    assert torch.equal(exported, bias)
    assert exported.any()
    told = json.loads((folder / "runs" / name / "experts.json").read_text())
    assert told == {"step": STEPS, "loads": {"1": loads.tolist()}}
    if skipped:
        assert not torch.equal(plain(words)[1], bias), "the step must matter, or the comparison says little"


@pytest.mark.parametrize("name", by_tier(CASES, late=AGAIN_LATE))
def test_it_goes_on_bit_by_bit(name: str, folder: Path) -> None:
    mine, again = folder / "runs" / name, folder / "runs" / f"{name}-again"
    assert losses(again) == losses(mine)
    assert (again / "experts.json").read_text() == (mine / "experts.json").read_text()
    if name != "lora":
        assert torch.equal(bias_of(again), bias_of(mine))


@pytest.mark.parametrize("name", by_tier(BF16, late=LATE))
def test_biases_stay_float32(name: str, folder: Path) -> None:
    exported = bias_of(folder / "runs" / name)
    assert exported.dtype is torch.float32
    steps = exported / RATE  # whole ones, which bfloat16 would have rounded
    assert (steps - steps.round()).abs().max() < 1e-5
    assert 1 <= steps.abs().max().round() <= STEPS


@pytest.mark.parametrize("name", by_tier(CASES, late=LATE))
def test_metrics_tell_of_the_load(name: str, folder: Path) -> None:
    rows = [row for row in rows_of(folder / "runs" / name) if "loss" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert 1 <= row["expert_load_max"] <= 2  # of four experts each token goes to two
        assert 0 <= row["expert_unused"] <= 0.5
        assert 0.5 <= row["router_entropy"] <= 1
        assert "router_loss" not in row
