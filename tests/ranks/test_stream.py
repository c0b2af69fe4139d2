"""Training on a stream is training on the cache: the losses of a plain loop, on any ranks, and from the middle on."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forked, run
from shared import LORA, STEADY, WORDS, WORKER, PlainOptimizer, losses, rows_of, tiny, trained

STEPS, EVERY = 12, 7
TOLERANCE = 5e-6
"""Measured: at most 4.1e-7."""
PAIRS = ["data.sources=[{path: 'FOLDER/p.jsonl'}]", "data.validation=FOLDER/pv.jsonl", "data.shuffle_buffer=0"]
CELLS: dict[str, list[str]] = {
    "alone": ["data.sources=[{path: 'FOLDER/a*.jsonl'}]"],
    "packed": [
        "data.sources=[{path: 'FOLDER/a*.jsonl'}, {path: 'FOLDER/b.parquet', weight: 0.1}]",
        *("data.packing=packed", "data.shuffle_buffer=4", "data.packing_window=4"),
    ],
    "pairs": [*PAIRS, "preference=simpo", "optim.lr=0.001"],
    "dpo": [*PAIRS, "preference=dpo", *LORA],
    # a pass of each lane is 5 or 6 rows, and the 22 rows are 5.5 steps, rounded to 6
    "epochs": ["data.sources=[{path: 'FOLDER/c.jsonl'}]", "train.max_steps=0", "train.epochs=2"],
}

LAYOUTS = {  # tensor parallelism last: DeepSpeed 0.19.8 makes no other engine then
    "sequence": ["parallel=sequence", "zero=stage2"],
    "pipeline": ["parallel=pipeline", "zero=stage0"],
    "tensor": ["parallel=tensor", "zero=stage1"],
}


def words(folder: Path, name: str, cell: str) -> list[str]:
    """Return the overrides of a run: four lanes, samples of at most 128 tokens."""
    own = [word.replace("FOLDER", str(folder)) for word in CELLS[cell]]
    stream = [STEADY, "data.streaming=true", f"model.tokenizer={folder}/tokenizer", "data.validation_fraction=0.05"]
    saved = [f"train.max_steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=0", "checkpoint.minutes=0"]
    return tiny(folder / "v.jsonl", folder, name, *stream, *saved, f"data.validation={folder}/v.jsonl", *own)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, pairs_file: Path) -> Path:
    """Each cell on two ranks and on one, and again from a checkpoint."""
    import pyarrow.parquet

    from tests.unit.test_templates import OURS, tokenizer_of

    folder, draw = tmp_path_factory.mktemp("stream"), random.Random(3)
    tokenizer_of(OURS["qwen"]).save_pretrained(folder / "tokenizer")
    (folder / "v.jsonl").write_text("".join(rows_file.read_text().splitlines(keepends=True)[:9]))

    def rows(count: int, size: int) -> list[dict[str, str]]:
        """Return rows; of long ones few make a block."""
        prompts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(count)]
        return [{"prompt": prompt, "response": " ".join(draw.choices(WORDS, k=size))} for prompt in prompts]

    for number in range(3):
        (folder / f"a{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(30, 2500)))
    (folder / "p.jsonl").write_text(pairs_file.read_text())
    (folder / "pv.jsonl").write_text("".join(pairs_file.read_text().splitlines(keepends=True)[:9]))
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(22, 20)))
    table = pyarrow.Table.from_pylist(rows(300, 5))
    pyarrow.parquet.write_table(table, folder / "b.parquet", row_group_size=50)
    for ranks in (2, 1):
        cases: list[dict[str, Any]] = []
        for cell in CELLS:
            cases.append({"overrides": words(folder, f"{cell}-{ranks}", cell)})
            again = f"{cell}-again-{ranks}"
            died = {"of": f"{folder}/runs/{cell}-2", "step": EVERY, "as": f"{folder}/runs/{again}"}
            cases.append({"overrides": words(folder, again, cell), "died": died})
        if ranks == 2:
            cases += [{"overrides": [*words(folder, name, "packed"), *LAYOUTS[name]]} for name in LAYOUTS]
        else:
            changed = ["batch.global_size=2", "checkpoint.allow_changes=[batch.global_size]"]
            died = {"of": f"{folder}/runs/alone-2", "step": EVERY, "as": f"{folder}/runs/half"}
            cases.append({"overrides": [*words(folder, "half", "alone"), *changed], "died": died})
        listing = folder / f"cases-{ranks}.json"
        listing.write_text(json.dumps(cases))
        finished = run([*forked(ranks if ranks > 1 else 0, WORKER), str(listing)], cwd=folder, timeout_s=400)
        assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def lanes_of_the_cache(folder: Path, overrides: list[str], files: str) -> tuple[Any, Any, list[list[Any]]]:
    """Return the config, the tokenizer, and the samples of the tokenized cache of all files, of a quarter of the bytes
    each.
    """
    from toolkit.config.load import load
    from toolkit.tasks.language_data import load_data

    cfg = load([*overrides, "data.streaming=false"]).cfg
    prepared = load_data(cfg)
    begins: dict[str, int] = {}
    end = 0
    for path in sorted(folder.glob(files)):
        for line, content in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            begins[f"{path}:{line}"] = end
            end += len(content)
    lanes: list[list[Any]] = [[] for _ in range(4)]
    for number in range(len(prepared.train)):
        begin = begins[prepared.train.where(number)]
        lanes[max(lane for lane in range(4) if end * lane // 4 <= begin)].append(prepared.train[number])
    return cfg, prepared, lanes


def test_losses_are_those_of_a_plain_loop(runs: Path) -> None:
    """A sample of each quarter of the data in each step, in the order of the cache, in a loop without our code."""
    from toolkit.data.loader import collate
    from toolkit.models.load import create_model

    cfg, prepared, lanes = lanes_of_the_cache(runs.parent, words(runs.parent, "plain", "alone"), "a*.jsonl")
    model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed)
    optimizer, wanted = PlainOptimizer(model, cfg, STEPS), []
    for step in range(STEPS):
        batch = collate([[lane[step % len(lane)]] for lane in lanes], prepared.pad_id)
        logits = model(input_ids=batch["input_ids"], attention_mask=(batch["segment_ids"] > 0).long()).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        wanted.append(float(loss.detach()))
        optimizer.step(loss)
    assert wanted[0] - wanted[-1] > 0.5, "losses that do not move prove nothing"
    for ranks in (1, 2):
        assert losses(runs / f"alone-{ranks}") == pytest.approx(wanted, abs=TOLERANCE)


def test_losses_of_pairs_are_those_of_a_plain_loop(runs: Path) -> None:
    """SimPO's loss of a pair of each quarter of the data in each step, in the order of the cache."""
    from toolkit.data.loader import collate
    from toolkit.models.load import create_model

    cfg, prepared, lanes = lanes_of_the_cache(runs.parent, words(runs.parent, "plain", "pairs"), "p.jsonl")
    model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed)
    optimizer, wanted = PlainOptimizer(model, cfg, STEPS), []
    for step in range(STEPS):
        pairs = [lane[begin : begin + 2] for lane in lanes for begin in [2 * step % len(lane)]]
        batch = collate([[answer] for pair in pairs for answer in pair], prepared.pad_id)
        logits = model(input_ids=batch["input_ids"], attention_mask=(batch["segment_ids"] > 0).long()).logits
        labels = batch["labels"][:, 1:]
        negative = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
        means = -negative.sum(1) / (labels != -100).sum(1)
        margins = cfg.preference.beta * (means[::2] - means[1::2]) - cfg.preference.gamma
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        wanted.append(float(loss.detach()))
        optimizer.step(loss)
    assert wanted[0] - wanted[-1] > 0.5, "losses that do not move prove nothing"
    for ranks in (1, 2):
        assert losses(runs / f"pairs-{ranks}") == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("cell", CELLS)
def test_ranks_change_nothing(cell: str, runs: Path) -> None:
    one, two = (rows_of(runs / f"{cell}-{ranks}") for ranks in (1, 2))
    for key in ("loss", "eval_loss"):
        left, right = ([row[key] for row in rows if key in row] for rows in (one, two))
        assert left == pytest.approx(right, abs=TOLERANCE)
        assert len(left) > 1
    assert [row.get("trained_tokens") for row in one] == [row.get("trained_tokens") for row in two]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str, runs: Path) -> None:
    """Ranks that share a model's sequences, layers or matrices read the same lanes."""
    one, other = (rows_of(runs / name) for name in ("packed-1", layout))
    for key in ("loss", "eval_loss"):
        left, right = ([row[key] for row in rows if key in row] for rows in (one, other))
        assert left == pytest.approx(right, abs=TOLERANCE)
        assert len(left) > 1


@pytest.mark.parametrize("cell", CELLS)
def test_a_resumed_run_is_the_run(cell: str, runs: Path) -> None:
    """From the middle of a file, bit for bit; on another number of ranks as near as that number makes it."""
    saved = json.loads((runs / f"{cell}-2/checkpoints/step-{EVERY}/state.json").read_text())["stream"]
    assert len(saved["lanes"]) == 4
    assert cell not in ("alone", "packed") or any(
        offset > 0 and epoch == 0 for lane in saved["lanes"] for epoch, _, offset, *_ in lane
    )
    assert cell != "packed" or all(lane[1] != [0] * 5 for lane in saved["lanes"]), "both sources are read"
    straight = trained(runs / f"{cell}-2")
    assert trained(runs / f"{cell}-again-2") == straight
    wanted = [row["loss"] for row in straight if "loss" in row]
    assert losses(runs / f"{cell}-again-1") == pytest.approx(wanted, abs=TOLERANCE)
    lost = (runs / f"{cell}-again-1/logs/metrics-lost.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lost if "loss" in json.loads(line)]
    assert steps[:1] == [EVERY + 1]


def test_a_stream_begins_again_with_another_batch_size(runs: Path) -> None:
    """Its places are those of as many parts as the global batch has sequences."""
    state = json.loads((runs / f"half/checkpoints/step-{STEPS}/state.json").read_text())
    assert [len(lanes) for lanes in (state["stream"]["lanes"], losses(runs / "half"))] == [2, STEPS]


def test_epochs_become_steps(runs: Path) -> None:
    """Of data that the estimate reads whole the steps are exact; all rows are read, and most of them twice."""
    done = json.loads((runs / "epochs-2" / "DONE").read_text())
    assert done["steps"] == STEPS
    [[least, most]] = done["passes"]
    assert 1.8 <= least <= most <= 2.6
    saved = json.loads((runs / f"epochs-2/checkpoints/step-{EVERY}/state.json").read_text())["stream"]
    assert {lane[0][0] for lane in saved["lanes"]} == {1}, "the checkpoint is in the second pass"


def test_training_data_are_not_cached(runs: Path) -> None:
    """Of the validation files alone there is a cache, but for those that the comparisons make."""
    from toolkit.data.store import read_manifest

    files = [read_manifest(store)["files"] for store in (runs.parent / "cache" / "stores").glob("[0-9a-f]*[0-9a-f]")]
    names = [Path(listed[0]["path"]).name for listed in files if len(listed) == 1]
    assert sorted({*names} - {"p.jsonl"}) == ["pv.jsonl", "v.jsonl"]
    assert len(files) <= 4


def test_other_files_are_named(runs: Path) -> None:
    folder = runs.parent
    moved = folder / "a2.jsonl"
    content = moved.read_bytes()
    moved.write_bytes(content.replace(b"red", b"RED", 1))
    try:
        overrides = words(folder, "other", "alone")
        checkpoint = f"resume={runs}/alone-1/checkpoints/step-{EVERY}"
        finished = run(forked(0, str(Path(__file__).parents[2] / "run.py"), *overrides, checkpoint), cwd=folder)
    finally:
        moved.write_bytes(content)
    assert finished.code == 2
    assert "a2.jsonl has changed since the checkpoint was saved" in finished.output
