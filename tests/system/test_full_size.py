"""A full-size ChatGLM3-6B of random weights in the official layout: LoRA from check to verify, within 20 GB."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from official import GLM, official_shapes, write as write_official
from ranks import REPOSITORY, kill_session, start
from safetensors.torch import save_file
from shared import rows_file as rows_file

SIZES = {
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "num_layers": 28,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "padded_vocab_size": 65024,
    "seq_length": 8192,
    "torch_dtype": "bfloat16",
}
SHARDS = 7
MAX_REQUEST_BYTES = 20e9
NEEDED_BYTES = 30e9
STEP_S = 300
TOLERANCE = 1.02
"""Memory measured / planned, at most."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder of 12.5 GB, removed at the end."""
    place = tmp_path_factory.mktemp("full-size")
    if psutil.virtual_memory().available < MAX_REQUEST_BYTES or shutil.disk_usage(place).free < NEEDED_BYTES:
        pytest.skip("needs 20 GB of memory and 30 GB of disk")
    try:
        yield _written(place / "chatglm3-6b")
    finally:
        shutil.rmtree(place)


def _written(folder: Path) -> Path:
    """Write the folder a shard at a time: a tiny one's vocabulary and config, and weights out of one drawn buffer."""
    write_official(folder, "v3", tokenizer=True, shards=1)
    (folder / "model.safetensors").unlink()
    config = {**json.loads((folder / "config.json").read_text()), **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = official_shapes({**GLM, **SIZES})
    drawn = (0.02 * torch.randn(1 << 24, generator=torch.Generator().manual_seed(1))).bfloat16()
    names, weight_map = list(shapes), {}
    for number in range(SHARDS):
        part = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        tensors = {name: _values(name, shapes[name], drawn, place) for place, name in enumerate(part)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _values(name: str, shape: tuple[int, ...], drawn: torch.Tensor, place: int) -> torch.Tensor:
    if name.endswith("inv_freq"):
        return (1.0 / 10000 ** (torch.arange(0, 2 * shape[0], 2) / (2 * shape[0]))).bfloat16()
    if "layernorm" in name and name.endswith("weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    return drawn.roll(1009 * place).repeat(-(-count // len(drawn)))[:count].view(shape).clone()


def peak_of(command: list[str], cwd: Path) -> tuple[str, int]:
    """Run a command; return its output, and the most bytes of its processes at once, mapped files included."""
    process = start([sys.executable, *command], cwd=cwd, OMP_NUM_THREADS="2")
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.2):
            peak = max(peak, _bytes_of(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        output, _ = process.communicate(timeout=STEP_S)
    finally:
        ended.set()
        thread.join()
        kill_session(process)
    assert process.returncode == 0, output[-4000:]
    return output, peak


def _bytes_of(process: "subprocess.Popen[str]") -> int:
    total = 0
    try:
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            total += one.memory_info().rss
    except psutil.Error:
        pass
    return total


def test_lora_of_a_full_size_model_fits(folder: Path, rows_file: Path, tmp_path: Path) -> None:
    words = [
        "recipe=chatglm",
        f"model.path={folder}",
        f"data.sources=[{{path: {rows_file}}}]",
        "tuning=lora",
        "zero=stage1",
        "data.max_length=64",
        "batch.global_size=1",
        "batch.micro_per_gpu=1",
        "train.max_steps=2",
        "schedule.warmup_ratio=0",
        "train.epochs=1",
        "train.rehearse=false",
        "train.log_every=1",
        "evaluate.every=0",
        "evaluate.at_start=false",
        "evaluate.prompts=[]",
        "data.validation_fraction=0",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "report.enabled=false",
        f"prepare.dir={tmp_path}/cache",
        f"run.dir={tmp_path}/runs",
        "run.name=full",
    ]
    toolkit, run = ["-m", "toolkit"], tmp_path / "runs" / "full"
    peaks = {}
    said, peaks["check"] = peak_of([*toolkit, "check", *words], tmp_path)
    assert "parameters are trained" in said
    said, peaks["plan"] = peak_of([*toolkit, "plan", *words, "gpus=1xcpu"], tmp_path)
    said, peaks["train"] = peak_of([str(REPOSITORY / "run.py"), *words], tmp_path)
    assert "Done: 2 steps" in said
    assert (run / "export" / "adapter_model.safetensors").is_file()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    used = {name: max(row[name] for row in rows) for name in ("host_memory_peak_bytes", "planned_memory_bytes")}
    plan = json.loads((run / "plan.json").read_text())["host_bytes"]
    planned = max(sum(parts.values()) for parts in plan.values())
    said, peaks["verify"] = peak_of([*toolkit, "verify", str(run / "export")], tmp_path)
    assert "the logits are those of the save" in said
    print({name: f"{peak / 1e9:.2f} GB" for name, peak in {**peaks, **used, "planned": planned}.items()})
    assert max(peaks.values()) < MAX_REQUEST_BYTES, peaks
    assert peaks["train"] <= TOLERANCE * planned, plan
    assert used["host_memory_peak_bytes"] <= TOLERANCE * used["planned_memory_bytes"]
