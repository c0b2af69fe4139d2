"""Commands on the device: a run that needs too much memory, a proof, answers, a server; on two GPUs, NCCL."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from device import DEVICE, launch, needs, train
from ranks import REPOSITORY, environment
from shared import ALL, FAULTY, faulty_words, losses, rows_of, tiny


def toolkit(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the device."""
    env = environment(DS_ACCELERATOR=DEVICE)
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *words],
        env=env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_memory_that_runs_out_is_told_with_what_helps(tmp_path: Path) -> None:
    """Rows of 2,000 tokens with all their attention scores, where a quarter of a GiB may be used."""
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps({"prompt": "red " * 1500, "response": "apple " * 500}) + "\n") * 20)
    words = tiny(file, tmp_path, "run", "zero=stage2", "train.rehearse=true", "plan.max_gpu_gib=0.25")
    words += ["data.max_length=2048", "batch.micro_per_gpu=4", "model.attention=eager"]
    finished = launch([str(REPOSITORY / "run.py"), *words], tmp_path)
    assert finished.code == 2, finished.output[-4000:]
    assert "out of memory before the first step, on rank 0 (" in finished.output
    helps = finished.output.partition("What helps")[2]
    assert "train.activation_checkpointing.enabled=true" in helps and "data.max_length=" in helps
    assert "Traceback" not in finished.output


def test_a_recipe_is_proved_and_its_run_answers(tmp_path: Path, rows_file: Path) -> None:
    """`toolkit prove` against float64 on the CPU, a run with run.py, and `toolkit generate` from what it made."""
    own = tiny(
        rows_file, tmp_path, "run", "zero=stage2", "precision=bf16", "data.packing=packed", "train.rehearse=true"
    )
    proved = toolkit("prove", "--num_gpus=1", *own, "steps=3", f"output={tmp_path}/out.json")
    assert proved.returncode == 0, proved.stdout[-4000:] + proved.stderr[-4000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["is_right"] and result["suspects"] == []
    finished = launch([str(REPOSITORY / "run.py"), *own, "train.rehearse=true"], tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    answered = toolkit("generate", str(tmp_path / "runs" / "run"), "prompt=red apple", "max_new_tokens=4")
    assert answered.returncode == 0, answered.stderr[-4000:]
    assert len(answered.stdout.splitlines()) == 1
    log = (tmp_path / "runs" / "run" / "logs" / "rank_0.log").read_text()
    assert DEVICE == "cpu" or "expandable_segments:True" in log
    peaks = [row.get("device_memory_peak_bytes", 0) for row in rows_of(tmp_path / "runs" / "run") if "loss" in row]
    assert (min(peaks) > 0) == (DEVICE == "cuda")


@needs("vllm")
def test_vllm_gives_the_tokens_of_training(tmp_path: Path, rows_file: Path) -> None:
    words = tiny(rows_file, tmp_path, "run", "zero=stage1", "precision=bf16")
    finished = launch([str(REPOSITORY / "run.py"), *words], tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    served = toolkit("verify-serving", str(tmp_path / "runs" / "run"))
    assert served.returncode == 0, served.stdout[-4000:] + served.stderr[-4000:]
    assert "vLLM" in served.stdout


@needs("gpus")
def test_two_gpus_follow_one(tmp_path: Path, rows_file: Path) -> None:
    """Losses through NCCL at every stage are those of one GPU."""
    cells = {f"stage{stage}": [f"zero=stage{stage}", *([ALL] if stage == 3 else [])] for stage in range(4)}
    for ranks in (1, 2):
        named = {f"{name}-{ranks}": given for name, given in cells.items()}
        cases = [{"overrides": tiny(rows_file, tmp_path, name, *given)} for name, given in named.items()]
        finished = train(cases, tmp_path, f"{ranks}-ranks", ranks=ranks)
        assert finished.code == 0, finished.output[-6000:]
    for name in cells:
        one, two = (losses(tmp_path / "runs" / f"{name}-{ranks}") for ranks in (1, 2))
        assert two == pytest.approx(one, abs=5e-6), name


@needs("gpus")
def test_a_collective_that_hangs_is_noticed(tmp_path: Path, rows_file: Path) -> None:
    """Rank 1 never comes to a collective; rank 0's kernel of NCCL waits for it on the GPU."""
    fault = {"at": "step", "step": 6, "rank": 1, "do": "hang", "note": str(tmp_path / "note")}
    words = faulty_words(rows_file, tmp_path, "run", "distributed.hang_after_s=10")
    started = time.monotonic()
    finished = launch([FAULTY, *words], tmp_path, ranks=2, FAULT=json.dumps(fault))
    assert (tmp_path / "note").exists() and finished.code != 0
    assert time.monotonic() - started < 150
    said = (tmp_path / "runs" / "run" / "FAILED").read_text()
    assert "step 6 has taken 1" in said and "All ranks are alive and in the same step" in said
    assert "faulty_run.py" in (tmp_path / "runs" / "run" / "logs" / "hang-rank-1.txt").read_text()


@needs("gpus")
def test_a_slow_gpu_is_named(tmp_path: Path, rows_file: Path) -> None:
    """By events on the GPUs: rank 1's forward passes are late, and nobody waits for anybody's clock."""
    naps = [{"ranks": [1], "steps": [21, 60], "before": "forward", "seconds": 0.07}]
    words = [
        *faulty_words(rows_file, tmp_path, "run"),
        "train.max_steps=60",
        "train.log_every=20",
        "checkpoint.every=0",
    ]
    fault = {"at": "slow", "naps": naps, "note": str(tmp_path / "note")}
    finished = launch([FAULTY, *words], tmp_path, ranks=2, FAULT=json.dumps(fault))
    assert finished.code == 0, finished.output[-4000:]
    rows = [row for row in rows_of(tmp_path / "runs" / "run") if "loss" in row]
    assert [row["slowest_rank"] for row in rows[1:]] == [1, 1]
    assert all(row["slowest_rank_s"] > 0.13 for row in rows[1:])
