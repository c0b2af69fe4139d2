"""Reward models on ranks: however cut up, a plain PyTorch loop's losses; resumed bit by bit; their scores exported."""

import json
import random
from pathlib import Path

import pytest
import torch
from shared import (
    ALL,
    LORA,
    RECOMPUTE,
    STEADY,
    WORDS,
    by_tier,
    check_resumed,
    global_batches,
    plain_run,
    rows_of,
    runs_fixture,
    tiny,
)

# fp32: the only difference left is the order of additions.
TOLERANCE = 1e-5
STEPS, COMPARED = 12, 8
"""Trained, and compared with the plain loop: what rounding makes of a trajectory grows with each of Adam's steps."""
FULL = ["optim.lr=0.0015"]
SAVED = ["checkpoint.every=6", "checkpoint.keep=0"]

# name -> overrides; two ranks
CELLS: dict[str, list[str]] = {
    "full-stage0": ["zero=stage0", *FULL, *SAVED],
    "full-stage2-micro2": ["zero=stage2", "batch.micro_per_gpu=2", RECOMPUTE, *FULL],
    "full-stage3": ["zero=stage3", ALL, *FULL],
    "lora-stage2": ["zero=stage2", *LORA, *SAVED],
    "lora-stage3": ["zero=stage3", ALL, RECOMPUTE, *LORA],
    # At the rate of the others its loss falls ninefold in the compared steps, and what is rounded grows with it.
    "freeze-stage2": ["zero=stage2", "tuning=freeze", "tuning.last_layers=1", "optim.lr=0.0007", *SAVED],
}
ONE_RANK = {"full-one-rank-4x1": ["zero=stage1", "batch.micro_per_gpu=4", "train.rehearse=true", *FULL]}
RESUMED = ("full-stage0", "lora-stage2", "freeze-stage2")
EXPORTED = ("full-stage3", "lora-stage2", "freeze-stage2")
LATE = ("full-stage0", "lora-stage3", "freeze-stage2")
RESUMED_LATE = ("full-stage0", "freeze-stage2")
"""Cells of the nightly tier: what is particular to each is met in another one."""


@pytest.fixture(scope="session")
def margins_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pairs: the chosen answers end with words with which no rejected one ends; some have a margin."""
    draw = random.Random(5)
    file = tmp_path_factory.mktemp("data") / "margins.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for number in range(60):
            prompt, chosen, rejected = (
                " ".join(draw.choices(words, k=draw.randint(1, 6))) for words in (WORDS, WORDS[:7], WORDS[8:])
            )
            margin = {} if number % 3 else {"margin": 0.25 * (number % 4)}
            handle.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected, **margin}) + "\n")
    return file


def words(margins_file: Path, folder: Path, name: str, overrides: list[str]) -> list[str]:
    export = f"checkpoint.export={str(name in EXPORTED).lower()}"
    given = [f"train.max_steps={STEPS}", STEADY, "task.center=0.01", "evaluate.at_start=true", export, *overrides]
    return tiny(margins_file, folder, name, "task=reward", *given)


runs = runs_fixture("reward", words, "margins_file", (CELLS, ONE_RANK), dict.fromkeys(RESUMED, 6), (LATE, RESUMED_LATE))


def plain_loop(overrides: list[str]) -> dict[str, list[float]]:
    """Train in a plain PyTorch loop with transformers' own classifier; return losses and figures of the steps."""
    run = plain_run(overrides, STEPS)
    data = run.data
    lines_of_file = Path(run.cfg.data.sources[0].path).read_text(encoding="utf-8").splitlines()
    margins = [json.loads(line).get("margin", 0.0) for line in lines_of_file]
    found: dict[str, list[float]] = {"loss": [], "rewards/margins": [], "grad_norm": []}
    for rows in global_batches(run.cfg, data, STEPS):
        scores = [run.forward(run.model, (data.train[row[place]] for row in rows))[0][:, 0] for place in (0, 1)]
        wanted = torch.tensor([margins[run.line(row[0])] for row in rows])
        gained, both = scores[0] - scores[1], scores[0] + scores[1]
        loss = (torch.log1p(torch.exp(wanted - gained)) + 0.01 * both**2).mean()
        found["loss"].append(float(loss.detach()))
        found["rewards/margins"].append(float(gained.detach().mean()))
        found["grad_norm"].append(run.optimizer.step(loss))
    return found


@pytest.mark.parametrize("name", by_tier([*CELLS, *ONE_RANK], late=LATE))
def test_every_layout_follows_the_plain_loop(name: str, runs: Path, margins_file: Path, tmp_path: Path) -> None:
    expected = plain_loop(words(margins_file, tmp_path, "plain", ({**CELLS, **ONE_RANK})[name]))
    assert expected["loss"][0] - expected["loss"][-1] > 0.1, "the reference must learn, or the comparison says little"
    rows = [row for row in rows_of(runs / name) if "loss" in row]
    assert [row["pairs"] for row in rows] == [4] * STEPS
    rows, expected = rows[:COMPARED], {figure: values[:COMPARED] for figure, values in expected.items()}
    assert [row["loss"] for row in rows] == pytest.approx(expected["loss"], abs=TOLERANCE)
    margins = [row["rewards/margins"] for row in rows]
    assert margins == pytest.approx(expected["rewards/margins"], rel=1e-4, abs=TOLERANCE)
    # Of equal weights; later ones differ by what the steps before rounded.
    assert rows[0]["grad_norm"] == pytest.approx(expected["grad_norm"][0], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert {"rewards/chosen", "rewards/rejected", "rewards/accuracies"} <= rows[0].keys()


@pytest.mark.parametrize("name", by_tier(RESUMED, late=RESUMED_LATE))
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    check_resumed(runs, name, 6, STEPS)


@pytest.mark.parametrize("name", ["full-stage3", "lora-stage2"])
def test_held_out_pairs_come_in_order(name: str, runs: Path) -> None:
    first, last = (rows_of(runs / name)[index] for index in (0, -1))
    assert first["eval_pairs"] == 12 and last["eval_loss"] < first["eval_loss"]
    assert last["eval_rewards/accuracies"] >= 0.9 and last["eval_rewards/margins"] > 0.5


@pytest.mark.parametrize("name", by_tier(EXPORTED, late=LATE))
def test_transformers_alone_gives_the_same_scores(name: str, runs: Path, tmp_path: Path) -> None:
    """An export, for LoRA by peft alone and merged, and what is exported from the checkpoint."""
    import transformers
    from peft import PeftModel

    from toolkit.export.convert import export_any
    from toolkit.export.load import load_any
    from toolkit.export.verify import verify_logits
    from toolkit.export.write import ExportOptions
    from toolkit.messages import ModelError
    from toolkit.models import probe

    folder, kind = runs / name / "export", transformers.AutoModelForSequenceClassification
    found = {"own": folder}
    if name.startswith("lora"):
        export_any(folder, tmp_path / "merged", ExportOptions(merge=True))
        base = json.loads((folder / "adapter_config.json").read_text())
        assert base["task_type"] == "SEQ_CLS"
        whole = kind.from_pretrained(base["base_model_name_or_path"], num_labels=1)
        adapted = PeftModel.from_pretrained(whole, folder).base_model.model
        found = {"merged": tmp_path / "merged"}
    if "checkpoint.every=6" in CELLS[name]:
        merge = name.startswith("lora")
        export_any(runs / name, tmp_path / "of_checkpoint", ExportOptions(merge=merge))
        found["of checkpoint"] = tmp_path / "of_checkpoint"
    saved = probe.read(folder)
    assert saved is not None and saved.logits.std() > 0.05
    models = {way: kind.from_pretrained(one, dtype="auto").eval() for way, one in found.items()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if name.startswith("lora"):
        adapted.config.pad_token_id = models["merged"].config.pad_token_id
        models["adapter"] = adapted.eval()
    for way, model in models.items():
        assert model.num_labels == 1 and model.config.pad_token_id is not None
        scores = probe.capture(model, saved.ids).logits
        assert torch.allclose(scores, saved.logits, atol=1e-6), way
        texts = ["red", "red apple runs today"]
        rows = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            both = model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
            alone = [
                model(**tokenizer(text, return_tensors="pt")).logits[0] for text in ("red", "red apple runs today")
            ]
        assert torch.allclose(both, torch.stack(alone), atol=1e-5), "padding has no score"
    for one in found.values():
        assert "forward" in verify_logits(one)
        with pytest.raises(ModelError, match="it writes no text"):
            load_any(str(one))
    assert "forward" in verify_logits(folder)
