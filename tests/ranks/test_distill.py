"""Distillation on ranks: however it is cut up, a plain PyTorch loop's losses; resumed bit by bit; it is learned."""

import copy
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
STEPS = 6
FULL = ["optim.lr=0.003"]
SAVED = ["checkpoint.every=3", "checkpoint.keep=0"]
PACKED = ["data.packing=packed", "data.max_length=64", "batch.global_size=2"]
JSD = ["distill.loss=jsd", "distill.beta=0.3", "distill.temperature=2"]

# name -> overrides; two ranks. "general" in a name: the model keeps what it says of a second file.
CELLS: dict[str, list[str]] = {
    "live-stage0": ["zero=stage0", *FULL],
    "live-stage2-micro2": ["zero=stage2", "batch.micro_per_gpu=2", RECOMPUTE, "distill.loss=reverse_kl", *FULL],
    "live-stage3": ["zero=stage3", ALL, *JSD, *SAVED, *FULL],
    "live-packed-stage1": ["zero=stage1", *PACKED, *FULL],
    "live-lora-stage2": ["zero=stage2", "distill.weight=1", *LORA],
    "stored-stage2": ["zero=stage2", "distill.top_k=8", *SAVED, *FULL],
    "stored-packed-stage3": ["zero=stage3", ALL, "distill.top_k=5", *JSD, *PACKED, *FULL],
    "general-lora-stage3": ["zero=stage3", ALL, RECOMPUTE, *LORA, *SAVED],
    "general-lora-packed-stage2": ["zero=stage2", *PACKED, *LORA],
    "general-stored-stage1": ["zero=stage1", "distill.top_k=16", "batch.micro_per_gpu=2", *SAVED, *FULL],
}
BEST = ["evaluate.every=2", "checkpoint.every=2", "checkpoint.keep=1", "evaluate.keep_best=eval_kl"]
ONE_RANK = {
    "live-one-rank-4x1": ["zero=stage1", "batch.micro_per_gpu=4", "train.rehearse=true", *FULL],
    "stored-one-rank-1x4": ["zero=stage0", "distill.top_k=8", "train.rehearse=true", *FULL],
    "general-one-rank-4x1": ["zero=stage1", "batch.micro_per_gpu=4", "distill.general_share=0.5", *BEST, *LORA],
}
# Until it has learned: from the teacher, and for comparison next to nothing of it.
LEARNED = {
    "taught": ["zero=stage0", "distill.weight=1", "train.max_steps=40", *FULL],
    "labels": ["zero=stage0", "distill.weight=1e-6", "train.max_steps=40", *FULL],
}
RESUMED = ("live-stage3", "stored-stage2", "general-lora-stage3", "general-stored-stage1")
LATE = ("live-stage0", "live-lora-stage2", "stored-stage2", "live-one-rank-4x1")
RESUMED_LATE = ("live-stage3", "stored-stage2")
"""Cells of the nightly tier: what is particular to each is met in another one."""


@pytest.fixture(scope="session")
def general_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 rows with answers in another order of words."""
    draw, file = random.Random(11), tmp_path_factory.mktemp("general") / "general.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for _ in range(20):
            prompt, answer = (sorted(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(2))
            handle.write(json.dumps({"prompt": " ".join(prompt), "response": " ".join(answer)}) + "\n")
    return file


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """A wider model with the same tokenizer, and rows of embeddings that no token has; trained a little."""
    import transformers

    from toolkit.config.load import load
    from toolkit.data.loader import collate
    from toolkit.export.write import write_folder
    from toolkit.models.load import random_config
    from toolkit.models.save import non_weight_files
    from toolkit.tasks.language_data import load_data

    folder = tmp_path_factory.mktemp("teacher")
    cfg = load(tiny(rows_file, folder, "teacher")).cfg
    data, shape = load_data(cfg), copy.deepcopy(cfg.model.shape)
    shape.hidden_size, shape.intermediate_size = 2 * shape.hidden_size, 2 * shape.intermediate_size
    torch.manual_seed(9)
    config = random_config(shape, len(data.tokenizer) + 24, data.tokenizer.eos_token_id)
    model: Any = transformers.GlmForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = collate([[data.train[number]] for number in range(16)], data.pad_id)
    for _ in range(12):
        mask = (batch["segment_ids"] > 0).long()
        model(input_ids=batch["input_ids"], attention_mask=mask, labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    write_folder(model.eval(), non_weight_files(model, data.encoder), folder / "model", "hf", None)
    return folder / "model"


def words(files: tuple[Path, Path, Path], folder: Path, name: str, overrides: list[str]) -> list[str]:
    """Return the overrides of a run."""
    rows, general, teacher = files
    sources = f"data.sources=[{{path: {rows}}}, {{path: {general}, general: true}}]"
    own = [sources] if "general" in name else [f"distill.teacher={teacher}"]
    tokenizer = [f"model.tokenizer={teacher}"]
    return tiny(rows, folder, name, "task=distill", f"train.max_steps={STEPS}", *tokenizer, *own, *overrides)


@pytest.fixture(scope="session")
def files(rows_file: Path, general_file: Path, teacher: Path) -> tuple[Path, Path, Path]:
    return rows_file, general_file, teacher


runs = runs_fixture(
    "distill", words, "files", (CELLS, {**ONE_RANK, **LEARNED}), dict.fromkeys(RESUMED, 3), (LATE, RESUMED_LATE)
)


def apart(cfg: Any, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the divergence of each token from the teacher's logits, by the papers' formulas."""
    vocabulary, heat, top_k = logits.size(-1), cfg.distill.temperature, cfg.distill.top_k
    p, q = torch.softmax(others[..., :vocabulary], -1), torch.softmax(logits, -1)
    if top_k:
        ids = p.topk(top_k, dim=-1).indices
        p, q = (torch.cat((one.gather(-1, ids), one.scatter(-1, ids, 0).sum(-1, keepdim=True)), -1) for one in (p, q))
    p, q = (one ** (1 / heat) / (one ** (1 / heat)).sum(-1, keepdim=True) for one in (p, q))
    kind, beta = cfg.distill.loss.value, cfg.distill.beta
    between = p if kind == "reverse_kl" else q if kind == "forward_kl" else beta * p + (1 - beta) * q
    shares = {"forward_kl": (1, 0), "reverse_kl": (0, 1), "jsd": (beta, 1 - beta)}[kind]
    terms = [(one * (one / between).log()).sum(-1) for one in (p, q)]
    return shares[0] * terms[0] + shares[1] * terms[1]


def plain_loop(overrides: list[str]) -> dict[str, list[float]]:
    """Train in a plain PyTorch loop, with a second model as the teacher; return losses and divergences of the steps."""
    from toolkit.models.load_weights import load_model

    run = plain_run(overrides, STEPS)
    cfg, data, model, untrained, optimizer = run
    other: Any = load_model(cfg.distill.teacher).eval() if cfg.distill.teacher else untrained
    share = cfg.distill.weight
    found: dict[str, list[float]] = {"loss": [], "kl": []}
    for rows in global_batches(cfg, data, STEPS):
        samples = [sample for row in rows for sample in row]
        read = [data.train[sample] for sample in samples]
        logits, labels = run.forward(model, read)
        with torch.no_grad():
            others = run.forward(other, read)[0][:, :-1]
        logits, labels = logits[:, :-1], labels[:, 1:]
        labelled = -logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        sources = data.train.sources()[samples]
        taught = torch.ones(len(samples)) if cfg.distill.teacher else torch.from_numpy(sources).float()
        weights, distance = share * taught[:, None].expand_as(labelled), apart(cfg, logits, others)
        mask = (labels >= 0).float()
        each = (1 - weights) * labelled + weights * cfg.distill.temperature**2 * distance
        loss = (each * mask).sum() / mask.sum()
        of_taught = mask * taught[:, None]
        mean = (distance.detach() * of_taught).sum() / of_taught.sum()
        found["loss"].append(float(loss.detach()))
        found["kl"].append(float(mean))
        optimizer.step(loss)
    return found


@pytest.mark.parametrize("name", by_tier([*CELLS, *ONE_RANK], late=LATE))
def test_every_layout_follows_the_plain_loop(
    name: str, runs: Path, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    expected = plain_loop(words(files, tmp_path, f"plain-{name}", ({**CELLS, **ONE_RANK})[name]))
    assert abs(expected["loss"][0] - expected["loss"][-1]) > 0.02, "it must learn, or the comparison says little"
    rows = [row for row in rows_of(runs / name) if "loss" in row]
    assert losses(runs / name) == pytest.approx(expected["loss"], abs=TOLERANCE)
    divergences = [row.get("distill/kl", float("nan")) for row in rows]
    assert divergences == pytest.approx(expected["kl"], abs=TOLERANCE, nan_ok=True)
    first, last = (rows_of(runs / name)[index] for index in (0, -1))
    if "general" in name:
        assert first["eval_kl"] == pytest.approx(0, abs=1e-6) and last["eval_kl"] > 1e-4
        assert first["eval_general_loss"] > 1 and last["eval_general_loss"] < 20
    else:
        assert last["eval_kl"] < first["eval_kl"] and "eval_general_loss" not in last
    done = json.loads((runs / name / "DONE").read_text())
    assert (done["first_eval_kl"], done["last_eval_kl"]) == (first["eval_kl"], last["eval_kl"])


def test_the_checkpoint_nearest_to_the_teacher_is_kept(runs: Path) -> None:
    """The teacher is the model before training, so it is not the last."""
    folder = runs / "general-one-rank-4x1"
    saved = [row for row in rows_of(folder) if "eval_kl" in row and row["step"] and row["step"] % 2 == 0]
    best = min(saved, key=lambda row: row["eval_kl"])["step"]
    kept = sorted(int(one.name.removeprefix("step-")) for one in (folder / "checkpoints").glob("step-*"))
    assert kept == [best, STEPS] and best < STEPS


def test_held_out_answers_are_nearer_to_the_teacher_than_labels_bring_them(runs: Path) -> None:
    taught, labels = (rows_of(runs / name)[-1]["eval_kl"] for name in LEARNED)
    assert taught < 0.8 * labels and taught < 0.5 * rows_of(runs / "taught")[0]["eval_kl"]


@pytest.mark.parametrize("name", by_tier(RESUMED, late=RESUMED_LATE))
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    check_resumed(runs, name, 3, STEPS)
    kept = [sorted((runs / one).glob("teacher/*/*.bin")) for one in (name, f"{name}-resumed")]
    assert [len(found) for found in kept] == ([4, 4] if "stored" in name else [0, 0]), "a file of each rank and split"
