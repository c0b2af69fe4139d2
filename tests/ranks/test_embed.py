"""Embeddings on ranks: however cut up, losses and gradients of the whole batch in one process; resumed; exported."""

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
STEPS, COMPARED = 12, 6
"""Trained, and compared with the plain loop: what rounding makes of a trajectory grows with each of Adam's steps."""
FULL = ["optim.lr=0.003", "embed.temperature=0.2"]
MEAN = ["optim.lr=0.001", "embed.pooling=mean"]
SAVED = ["checkpoint.every=6", "checkpoint.keep=0"]

# name -> overrides; two ranks
CELLS: dict[str, list[str]] = {
    "full-stage0": ["zero=stage0", *FULL, *SAVED],
    "full-stage2-micro2": ["zero=stage2", "batch.micro_per_gpu=2", RECOMPUTE, *MEAN],
    "full-stage3": ["zero=stage3", ALL, *FULL],
    "negatives-stage3-micro2": ["zero=stage3", ALL, "batch.micro_per_gpu=2", "embed.negatives=2", *FULL, *SAVED],
    "lora-stage2": ["zero=stage2", "embed.temperature=0.2", *LORA, *SAVED],
}
ONE_RANK = {"full-one-rank-8x1": ["zero=stage1", "batch.micro_per_gpu=8", "train.rehearse=true", *FULL]}
ONE_RANK["negatives-one-rank-4x2"] = ["zero=stage0", "batch.micro_per_gpu=4", "embed.negatives=1", *MEAN]
RESUMED = ("full-stage0", "negatives-stage3-micro2", "lora-stage2")
EXPORTED = ("full-stage3", "negatives-stage3-micro2", "full-stage2-micro2", "lora-stage2")
LATE = ("full-stage0", "full-stage3", "negatives-one-rank-4x2")
RESUMED_LATE = ("full-stage0", "lora-stage2")
"""Cells of the nightly tier: what is particular to each is met in another one."""


@pytest.fixture(scope="session")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 pairs: both texts end with the same words, after others; of three negatives two end with one of these."""
    draw = random.Random(9)
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for _ in range(90):
            end = draw.sample(WORDS, 2)
            query, positive = ([*draw.choices(WORDS, k=draw.randint(1, 4)), *end] for _ in range(2))
            negatives = [" ".join([*draw.choices(WORDS, k=3), *more]) for more in (end[1:] * 2, end[1:] * 3, ())]
            row = {"query": " ".join(query), "positive": " ".join([*positive, end[1]]), "negatives": negatives}
            handle.write(json.dumps(row) + "\n")
    return file


def words(texts_file: Path, folder: Path, name: str, overrides: list[str]) -> list[str]:
    export = f"checkpoint.export={str(name in EXPORTED).lower()}"
    given = [f"train.max_steps={STEPS}", STEADY, "evaluate.at_start=true", "batch.global_size=8", export, *overrides]
    return tiny(texts_file, folder, name, "task=embed", *given)


runs = runs_fixture("embed", words, "texts_file", (CELLS, ONE_RANK), dict.fromkeys(RESUMED, 6), (LATE, RESUMED_LATE))


def embedded(model: Any, batch: dict[str, torch.Tensor], pooling: str) -> torch.Tensor:
    """Return the embeddings of rows by transformers' own base model."""
    mask = batch["segment_ids"] > 0
    states = model(input_ids=batch["input_ids"], attention_mask=mask.long()).last_hidden_state
    if pooling == "mean":
        found = (states * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    else:
        found = states[torch.arange(len(states)), mask.sum(dim=1) - 1]
    normalized: torch.Tensor = found / found.norm(dim=1, keepdim=True)
    return normalized


def plain_loop(overrides: list[str]) -> dict[str, list[float]]:
    """Train in a plain PyTorch loop, each global batch at once; return losses and figures of the steps."""
    from toolkit.data.loader import collate

    cfg, data, model, _, optimizer = plain_run(overrides, STEPS)
    found: dict[str, list[float]] = {"loss": [], "recall_at_1": [], "grad_norm": [], "pairs": []}
    for rows in global_batches(cfg, data, STEPS):
        sides = []
        for place in range(2 + cfg.embed.negatives):
            batch = collate([[data.train[row[place]]] for row in rows], data.pad_id)
            sides.append(embedded(model.base_model, batch, cfg.embed.pooling.value))
        similar = sides[0] @ torch.cat(sides[1:]).t() / cfg.embed.temperature
        loss = -similar.log_softmax(dim=1).diagonal().mean()
        found["loss"].append(float(loss.detach()))
        found["pairs"].append(len(rows))
        found["recall_at_1"].append(float((similar.argmax(dim=1) == torch.arange(len(rows))).float().mean()))
        found["grad_norm"].append(optimizer.step(loss))
    return found


@pytest.mark.parametrize("name", by_tier([*CELLS, *ONE_RANK], late=LATE))
def test_every_layout_follows_one_process_with_the_whole_batch(
    name: str, runs: Path, texts_file: Path, tmp_path: Path
) -> None:
    expected = plain_loop(words(texts_file, tmp_path, "plain", ({**CELLS, **ONE_RANK})[name]))
    learned = sum(expected["loss"][:4]) - sum(expected["loss"][-4:])
    assert learned > 0.5, "the reference must learn, or the comparison says little"
    whole = [row for row in rows_of(runs / name) if "loss" in row]
    assert losses(runs / name)[0] == pytest.approx(expected["loss"][0], abs=1e-6)
    assert losses(runs / name)[:COMPARED] == pytest.approx(expected["loss"][:COMPARED], abs=TOLERANCE)
    for figure, allowed in (("grad_norm", 1e-3), ("recall_at_1", 1e-6)):
        assert [row[figure] for row in whole[:COMPARED]] == pytest.approx(expected[figure][:COMPARED], rel=allowed)
    # Of equal weights; later ones differ by what the steps before rounded.
    assert whole[0]["grad_norm"] == pytest.approx(expected["grad_norm"][0], rel=1e-5)
    assert [row["pairs"] for row in whole] == expected["pairs"]


@pytest.mark.parametrize("name", by_tier(RESUMED, late=RESUMED_LATE))
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    check_resumed(runs, name, 6, STEPS)


@pytest.mark.parametrize("name", by_tier(EXPORTED, late=LATE))
def test_held_out_pairs_find_each_other_also_in_transformers_alone(name: str, runs: Path, tmp_path: Path) -> None:
    """An export in the base model of transformers, pooled as it says, has the figures of the run's last evaluation."""
    import transformers

    from toolkit.config.load import load
    from toolkit.data.loader import collate
    from toolkit.export.convert import export_any
    from toolkit.export.write import ExportOptions
    from toolkit.tasks.language_data import load_data

    first, last = (rows_of(runs / name)[index] for index in (0, -1))
    assert first["eval_samples"] == 18
    folder = runs / name / "export"
    if name.startswith("lora"):
        export_any(folder, tmp_path / "merged", ExportOptions(merge=True))
        folder = tmp_path / "merged"
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    kind = "mean" if pooling["pooling_mode_mean_tokens"] else "last"
    assert pooling["pooling_mode_lasttoken"] == (kind == "last")
    assert kind == "mean" or last["eval_mrr"] > 0.25, "by chance less than 0.2"
    parts = json.loads((folder / "modules.json").read_text())
    assert [part["path"] for part in parts] == ["", "1_Pooling", "2_Normalize"]
    model = transformers.AutoModel.from_pretrained(folder, dtype="auto").eval()
    assert model.config.hidden_size == pooling["word_embedding_dimension"]
    cfg = load([f"recipe={runs / name / 'config.yaml'}"]).cfg
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == cfg.data.max_length
    data = load_data(cfg)
    assert data.validation is not None
    rows = collate([[data.validation[sample]] for sample in range(len(data.validation))], data.pad_id)
    with torch.no_grad():
        found = embedded(model, rows, kind)
    size = 2 + cfg.embed.negatives
    similar = found[0::size] @ torch.cat([found[place::size] for place in range(1, size)]).t()
    places = (similar > similar.diagonal()[:, None]).sum(dim=1) + 1
    assert float((places == 1).float().mean()) == pytest.approx(last["eval_recall_at_1"], abs=1e-6)
    assert float((1 / places.double()).mean()) == pytest.approx(last["eval_mrr"], abs=1e-6)
    scaled = similar / cfg.embed.temperature
    assert float(-scaled.log_softmax(dim=1).diagonal().mean()) == pytest.approx(last["eval_loss"], abs=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = json.loads(Path(cfg.data.sources[0].path).read_text(encoding="utf-8").splitlines()[0])["query"]
    own = {tuple(data.train[sample][0].tolist()) for sample in range(len(data.train))}
    own |= {tuple(data.validation[sample][0].tolist()) for sample in range(len(data.validation))}
    assert tuple(tokenizer(text)["input_ids"]) in own, "texts are tokenized as in transformers"
