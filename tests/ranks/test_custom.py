"""Custom models and datasets on two ranks: the mean over samples exactly, resuming, streams, the examples."""

import json
from pathlib import Path

import pytest
import torch
from custom_worker import COUNT, Regression, Stream, network, plain, squares
from ranks import BIN, REPOSITORY, forked, kill_session, run, start, wait_for
from safetensors.torch import load_file, load_model
from shared import losses, rows_of, trained
from torch.utils.data import default_collate

from toolkit.cli import main as toolkit_main
from toolkit.data.sampler import GlobalBatchSampler
from toolkit.launch.environment import free_port
from toolkit.tasks.custom_data import _MicroBatchReader

WORKER = str(REPOSITORY / "tests" / "ranks" / "custom_worker.py")
EXAMPLES = REPOSITORY / "examples"
STEPS = 12


def words(folder: Path, name: str, *more: str) -> list[str]:
    """Return the words of a small run: 37 samples are five steps, the last one short."""
    return [
        f"run.dir={folder}/runs",
        f"run.name={name}",
        "batch.global_size=8",
        "batch.micro_per_gpu=2",
        f"train.max_steps={STEPS}",
        "train.log_every=1",
        "train.rehearse=false",
        "report.enabled=false",
        "schedule=constant",
        "optim.lr=0.01",
        *more,
    ]


def image_words(folder: Path, name: str) -> list[str]:
    """Return the words of a small run of the image classifier."""
    given = (
        "train.max_steps=6",
        "train.log_every=1",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "schedule.warmup_steps=2",
    )
    return [
        f"run.dir={folder}/runs",
        f"run.name={name}",
        "zero=stage1",
        "report.enabled=false",
        "evaluate.every=3",
        *given,
    ]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs of one launch."""
    folder = tmp_path_factory.mktemp("own")
    every = ("checkpoint.every=4", "checkpoint.keep=9")
    mapped = words(folder, "map", "batch.micro_per_gpu=4", "evaluate.every=4", "evaluate.keep_best=eval_error", *every)
    stream = words(folder, "stream", *every)
    itself = words(folder, "itself", *every)
    encoder = [*image_words(folder, "encoder"), "evaluate.keep_best=eval_accuracy"]
    jobs = [
        ("plain", words(folder, "zero0")),
        (
            "plain",
            words(
                folder,
                "zero3",
                "batch.micro_per_gpu=1",
                "zero=stage3",
                "zero.stage3_param_persistence_threshold=0",
                *every,
            ),
        ),
        ("plain", words(folder, "workers", "data.num_workers=2", "batch.micro_per_gpu=4", "train.max_steps=6")),
        ("plain", words(folder, "bf16", "precision=bf16", "zero=stage2", "train.max_steps=2", "train.rehearse=true")),
        ("map", mapped),
        ("8:map", mapped),
        ("score", words(folder, "score", "batch.micro_per_gpu=4", "train.max_steps=2", "train.rehearse=true")),
        ("stream", stream),
        ("4:stream", stream),
        ("itself", itself),
        ("8:itself", itself),
        ("cifar10", image_words(folder, "cifar10")),
        ("encoder", encoder),
        ("4:encoder", encoder),
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    finished = run(forked(2, WORKER, str(folder / "jobs.json")), cwd=folder)
    assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def alone(batches: list[list[int]], rows: _MicroBatchReader, epochs: list[int]) -> list[float]:
    """Train in a plain loop on whole global batches, by torch's own mean."""
    torch.manual_seed(42)
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for batch, epoch in zip(batches, epochs, strict=True):
        loss = squares(model, rows[epoch, batch].batch).mean()
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found


def test_a_step_is_the_mean_over_the_samples_of_the_global_batch(runs: Path) -> None:
    sampler = GlobalBatchSampler(COUNT, 8, 8, 0, 1, f"42 Regression {COUNT}", num_steps=STEPS)
    batches = list(sampler)
    assert [len(batch) for batch in batches[:6]] == [8, 8, 8, 8, 5, 8]
    assert sorted(row for batch in batches[:5] for row in batch) == list(range(COUNT))
    expected = alone(
        batches, _MicroBatchReader(Regression(), default_collate, 42), [number // 5 for number in range(STEPS)]
    )
    for name in ("zero0", "zero3"):
        assert losses(runs / name) == pytest.approx(expected, rel=2e-5), name
    # What is drawn for a sample depends neither on its micro-batch nor on the process that reads it.
    assert losses(runs / "workers") == pytest.approx(expected[:6], rel=2e-5)
    row = rows_of(runs / "zero0")[-1]
    assert row["samples"] == 2 * COUNT + 16 and row["samples_per_s"] > 0 and "tokens_per_s" not in row
    assert losses(runs / "bf16") == pytest.approx(expected[:2], rel=0.05)


def test_a_run_that_died_goes_on_as_if_nothing_had_happened(runs: Path) -> None:
    for name, steps in {"map": STEPS, "stream": STEPS, "itself": STEPS, "encoder": 6}.items():
        before, again = trained(runs / name), trained(runs / f"{name}-again")
        assert again == before, name
        assert len(losses(runs / name)) == steps
        first, second = (load_file(runs / one / "export" / "model.safetensors") for one in (name, f"{name}-again"))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first), name


def test_metrics_are_of_each_sample_once(runs: Path) -> None:
    rows = [row for row in rows_of(runs / "map") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [0, 4, 8, 12]
    assert all(row["eval_samples"] == COUNT for row in rows)
    assert all(row["eval_error"] == pytest.approx(row["eval_loss"], rel=1e-6) for row in rows)
    model = network()
    load_model(model, runs / "map" / "export" / "model.safetensors")
    model.eval()
    rows_read = _MicroBatchReader(Regression(), default_collate, 42)
    with torch.no_grad():
        loss = squares(model, rows_read[-1, list(range(COUNT))].batch).mean().item()
    assert rows[-1]["eval_loss"] == pytest.approx(loss, rel=1e-5)
    scored = [row for row in rows_of(runs / "score") if "eval_loss" in row]
    assert len(scored) == 2 and all(-1 <= row["eval_correlation"] <= 1 for row in scored)
    assert all(row["eval_samples"] == COUNT for row in scored)


def test_a_classifier_on_a_transformers_encoder(runs: Path) -> None:
    rows = [row for row in rows_of(runs / "encoder") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [0, 3, 6]
    assert all(row["eval_samples"] == 200 and 0 <= row["eval_f1"] <= 1 for row in rows)
    assert rows[-1]["eval_accuracy"] * 200 == pytest.approx(round(rows[-1]["eval_accuracy"] * 200))
    output = runs.parent / "encoder.html"
    assert toolkit_main(["report", str(runs / "encoder"), f"output={output}"]) == 0
    page = output.read_text(encoding="utf-8")
    assert "Classifier" in page and "Samples per second" in page and "nats per token" not in page


def test_a_stream_is_shared_out_to_the_ranks(runs: Path) -> None:
    stream = list(Stream())
    assert len(stream) == COUNT
    # Without a rank's own draws the losses of both ways to share are of other samples, but all are of whole steps.
    for name in ("stream", "itself"):
        assert [row["samples"] for row in rows_of(runs / name)] == [8 * step for step in range(1, STEPS + 1)]
    assert losses(runs / "stream") != losses(runs / "itself")


def test_checkpoints_are_verified_and_exported(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert toolkit_main(["verify", str(runs / "zero3")]) == 0
    assert "its program alone can build" in capsys.readouterr().out
    output = tmp_path / "weights"
    assert toolkit_main(["export-model", str(runs / "zero3"), f"output={output}"]) == 0
    whole, taken = (load_file(one / "model.safetensors") for one in (runs / "zero3" / "export", output))
    assert whole.keys() == taken.keys() and all(torch.equal(whole[name], taken[name]) for name in whole)


@pytest.mark.nightly
def test_the_image_classifier_goes_on_after_a_kill(runs: Path, tmp_path: Path) -> None:
    command = forked(2, str(EXAMPLES / "cifar10.py"), *image_words(tmp_path, "killed"))
    first = start(command, tmp_path)
    try:
        wait_for(lambda: (tmp_path / "runs" / "killed" / "checkpoints" / "step-2").is_dir(), 200)
    finally:
        kill_session(first)
        first.communicate()
    finished = run(command, tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    assert trained(tmp_path / "runs" / "killed") == trained(runs / "cifar10")
    assert toolkit_main(["report", str(tmp_path / "runs" / "killed")]) == 0
    page = (tmp_path / "runs" / "killed" / "report.html").read_text(encoding="utf-8")
    assert "Samples per second" in page and "examples/cifar10.py" in page
    assert "nats per token" not in page


SHORT = ["train.max_steps=2", "schedule.warmup_steps=0", "evaluate.at_start=false", "report.enabled=false"]


def test_under_no_launcher(tmp_path: Path, runs: Path) -> None:
    finished = run(forked(0, str(EXAMPLES / "cifar10.py"), *SHORT, "run.name=one"), tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    assert finished.output.count("train.max_steps = 2: enough to try the recipe out, too few to learn.") == 1
    assert losses(tmp_path / "runs" / "one")[0] == pytest.approx(losses(runs / "cifar10")[0], rel=0.1)


@pytest.mark.nightly
def test_plain_python_and_torchrun(tmp_path: Path) -> None:
    given = [*SHORT, "run.name=one"]
    finished = run(["python", str(EXAMPLES / "cifar10.py"), *given], tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port())]
    finished = run([*torchrun, str(EXAMPLES / "cifar10.py"), *given[:-1], "run.name=two", "zero=stage2"], tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    assert finished.output.count("train.max_steps = 2: enough to try the recipe out, too few to learn.") == 1
    assert losses(tmp_path / "runs" / "one")[0] == pytest.approx(losses(tmp_path / "runs" / "two")[0], rel=0.1)
