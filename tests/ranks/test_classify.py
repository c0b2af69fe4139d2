"""Classifiers on ranks: however cut up and packed, a plain PyTorch loop's losses; resumed bit by bit; exported."""

import json
import random
from pathlib import Path
from typing import Any

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
    losses,
    plain_run,
    rows_of,
    runs_fixture,
    tiny,
)

# fp32: the only difference left is the order of additions.
TOLERANCE = 1e-5
STEPS, COMPARED = 12, 8
"""Trained, and compared with the plain loop: what rounding makes of a trajectory grows with each of Adam's steps."""
FULL = ["optim.lr=0.004"]
SAVED = ["checkpoint.every=6", "checkpoint.keep=0"]
PACKED = ["data.packing=packed", "data.max_length=48", "batch.global_size=4"]
LABELS = ("cold", "warm", "wild")
ENDS = (WORDS[:5], WORDS[6:11], WORDS[12:])

# name -> overrides; two ranks
CELLS: dict[str, list[str]] = {
    "full-stage0": ["zero=stage0", *FULL, *SAVED],
    "full-stage2-micro2": ["zero=stage2", "batch.micro_per_gpu=2", RECOMPUTE, *FULL],
    "full-stage3": ["zero=stage3", ALL, *FULL],
    "lora-stage2": ["zero=stage2", *LORA, *SAVED],
    "packed-stage3": ["zero=stage3", ALL, *PACKED, *FULL],
    "packed-lora": ["zero=stage2", *PACKED, *LORA],
}
ONE_RANK = {"full-one-rank-4x1": ["zero=stage1", "batch.micro_per_gpu=4", "train.rehearse=true", *FULL]}
RESUMED = ("full-stage0", "lora-stage2")
EXPORTED = ("lora-stage2", "packed-stage3", "full-stage0")
LATE = ("full-stage0", "full-stage3", "packed-lora")
RESUMED_LATE = ("full-stage0",)
"""Cells of the nightly tier: what is particular to each is met in another one."""


@pytest.fixture(scope="session")
def labels_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 texts and conversations, whose last words say their label."""
    draw = random.Random(7)
    file = tmp_path_factory.mktemp("data") / "labels.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for number in range(90):
            kind = number % 3
            begin, end = (" ".join(draw.choices(words, k=draw.randint(1, 5))) for words in (WORDS, ENDS[kind]))
            row: dict[str, Any] = {"text": f"{begin} {end}"}
            if number % 5 == 1:
                row = {"messages": [{"role": "user", "content": begin}, {"role": "assistant", "content": end}]}
            elif number % 5 == 2:
                row = {"instruction": begin, "input": end}
            handle.write(json.dumps({**row, "label": LABELS[kind]}) + "\n")
    return file


def words(labels_file: Path, folder: Path, name: str, overrides: list[str]) -> list[str]:
    export = f"checkpoint.export={str(name in EXPORTED).lower()}"
    given = [f"train.max_steps={STEPS}", STEADY, "evaluate.at_start=true", "batch.global_size=16", export, *overrides]
    return tiny(labels_file, folder, name, "task=classify", *given)


runs = runs_fixture(
    "classify", words, "labels_file", (CELLS, ONE_RANK), dict.fromkeys(RESUMED, 6), (LATE, RESUMED_LATE)
)


def plain_loop(overrides: list[str]) -> dict[str, list[float]]:
    """Train in a plain PyTorch loop with transformers' own classifier, every sample on a row of its own; return losses
    and figures of the steps.
    """
    run = plain_run(overrides, STEPS)
    assert run.model.config.id2label == dict(enumerate(LABELS))
    lines = Path(run.cfg.data.sources[0].path).read_text(encoding="utf-8").splitlines()
    labels = [LABELS.index(json.loads(line)["label"]) for line in lines]
    found: dict[str, list[float]] = {"loss": [], "accuracy": [], "grad_norm": [], "labels": []}
    for rows in global_batches(run.cfg, run.data, STEPS):
        samples = [sample for row in rows for sample in row]
        wanted = torch.tensor([labels[run.line(sample)] for sample in samples])
        scores, _ = run.forward(run.model, (run.data.train[sample] for sample in samples))
        probabilities = scores.softmax(dim=1)[torch.arange(len(samples)), wanted]
        loss = -probabilities.log().mean()
        found["loss"].append(float(loss.detach()))
        found["accuracy"].append(float((scores.argmax(dim=1) == wanted).float().mean()))
        found["labels"].append(len(samples))
        found["grad_norm"].append(run.optimizer.step(loss))
    return found


@pytest.mark.parametrize("name", by_tier([*CELLS, *ONE_RANK], late=LATE))
def test_every_layout_follows_the_plain_loop(name: str, runs: Path, labels_file: Path, tmp_path: Path) -> None:
    expected = plain_loop(words(labels_file, tmp_path, "plain", ({**CELLS, **ONE_RANK})[name]))
    assert expected["loss"][0] - expected["loss"][-1] > 0.1, "the reference must learn, or the comparison says little"
    whole = [row for row in rows_of(runs / name) if "loss" in row]
    assert losses(runs / name)[:COMPARED] == pytest.approx(expected["loss"][:COMPARED], abs=TOLERANCE)
    for figure, allowed in (("grad_norm", 1e-3), ("accuracy", 1e-6), ("labels", 0)):
        assert [row[figure] for row in whole[:COMPARED]] == pytest.approx(expected[figure][:COMPARED], rel=allowed)
    # Of equal weights; later ones differ by what the steps before rounded.
    assert whole[0]["grad_norm"] == pytest.approx(expected["grad_norm"][0], rel=1e-5)


@pytest.mark.parametrize("name", by_tier(RESUMED, late=RESUMED_LATE))
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    check_resumed(runs, name, 6, STEPS)


@pytest.mark.parametrize("name", by_tier(EXPORTED, late=LATE))
def test_held_out_samples_get_their_labels_also_in_transformers_alone(name: str, runs: Path, tmp_path: Path) -> None:
    """An export, for LoRA by peft alone and merged: its accuracy over the held-out texts is the run's."""
    import transformers
    from peft import PeftModel

    from toolkit.export.convert import export_any
    from toolkit.export.verify import verify_logits
    from toolkit.export.write import ExportOptions
    from toolkit.models import probe

    first, last = (rows_of(runs / name)[index] for index in (0, -1))
    assert first["eval_samples"] == 18 and last["eval_loss"] < first["eval_loss"]
    assert last["eval_accuracy"] >= 0.65 and last["eval_macro_f1"] >= 0.6, "by chance a third"
    folder, kind = runs / name / "export", transformers.AutoModelForSequenceClassification
    found = {"own": folder}
    if name.startswith("lora"):
        export_any(folder, tmp_path / "merged", ExportOptions(merge=True))
        base = json.loads((folder / "adapter_config.json").read_text())
        whole = kind.from_pretrained(base["base_model_name_or_path"], num_labels=len(LABELS))
        adapted = PeftModel.from_pretrained(whole, folder).base_model.model
        found = {"merged": tmp_path / "merged"}
    models = {way: kind.from_pretrained(one, dtype="auto").eval() for way, one in found.items()}
    for model in models.values():
        assert model.config.id2label == dict(enumerate(LABELS))
        assert model.config.label2id == {label: index for index, label in enumerate(LABELS)}
    if name.startswith("lora"):
        adapted.config.pad_token_id = models["merged"].config.pad_token_id
        models["adapter"] = adapted.eval()
    saved = probe.read(folder)
    assert saved is not None and saved.logits.std() > 0.05
    for way, model in models.items():
        assert torch.allclose(probe.capture(model, saved.ids).logits, saved.logits, atol=1e-5), way
    for one in (folder, *found.values()):
        assert "forward" in verify_logits(one)
    text, end = "red apple " + " ".join(ENDS[1][:3]), next(iter(found.values()))
    pipe = transformers.pipeline("text-classification", model=str(end), tokenizer=str(end), device="cpu")
    assert pipe(text)[0]["label"] in LABELS
