"""Data and runs that several tests share; each launch is paid for once."""

import json
import random
from pathlib import Path

import pytest

WORDS = [
    "red",
    "green",
    "blue",
    "apple",
    "pear",
    "plum",
    "runs",
    "walks",
    "sleeps",
    "quickly",
    "slowly",
    "today",
    "tomorrow",
    "never",
    "always",
]


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 short question/answer rows: no multiple of any batch size used, so every epoch has a short last step."""
    draw = random.Random(7)
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for _ in range(37):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(2, 8)))
            response = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
            handle.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    return file


def tiny(rows_file: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    """Return overrides of a tiny run: fp32, torch's Adam, every step logged, everything below `folder`."""
    return [
        "recipe=quickstart",
        "model=glm_tiny",
        f"data.sources=[{{path: {rows_file}}}]",
        "data.validation_fraction=0.2",
        f"prepare.dir={folder}/cache",
        f"run.dir={folder}/runs",
        f"run.name={name}",
        "batch.global_size=4",
        "batch.micro_per_gpu=1",
        "train.max_steps=10",
        "train.log_every=1",
        "optim.lr=0.003",
        "schedule=linear",
        "schedule.warmup_steps=2",
        "evaluate.prompts=[]",
        "evaluate.ngram_baselines=false",
        *overrides,
    ]


def rows_of(run_folder: Path) -> list[dict[str, float]]:
    """Return metrics.jsonl of a run."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    """Return the training loss of each step."""
    return [row["loss"] for row in rows_of(run_folder) if "loss" in row]


def eval_losses(run_folder: Path) -> list[float]:
    """Return the validation losses in order."""
    return [row["eval_loss"] for row in rows_of(run_folder) if "eval_loss" in row]
