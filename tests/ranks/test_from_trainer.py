"""Checkpoints that transformers' Trainer saved, with DeepSpeed and without: converted, a run goes on as the Trainer."""

import json
from pathlib import Path

import pytest
from ranks import REPOSITORY, forked, run
from shared import experts, losses, tiny
from test_plain_script import RUN_PLAIN

from toolkit.checkpoint.intact import read_run_state
from toolkit.cli import main

BEFORE = 3
DEEPSPEED = 'deepspeed=str(HERE / "ds_config.json"),'
CASES = {
    "lora": (["tuning=lora", "tuning.target_modules=[all-linear]"], False),
    "lora_dora": (["tuning=lora", "tuning.dora=true"], False),
    "lora_zero2": (["tuning=lora", "tuning.save_modules=[lm_head]"], True),
    "full": (["optim.weight_decay=0.1", "optim.decay=matrices"], False),
}
"""Case -> what it trains, and whether under DeepSpeed."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_the_trainer_goes_on(name: str, rows_file: Path, tmp_path: Path) -> None:
    """Each step has all samples, as a converted checkpoint does not say where in the data it is."""
    own, with_deepspeed = CASES[name]
    own = ["model=hf", f"model.path={experts(tmp_path / 'base')}", "schedule=cosine", "train.max_steps=6", *own]
    own += ["data.max_samples=8", "data.validation_fraction=0", "batch.global_size=8", "batch.micro_per_gpu=2"]
    words = tiny(rows_file, tmp_path, "run", *own, "zero=stage2")
    assert main(["export-config", *words, f"script={tmp_path / 'plain'}", "world_size=1"]) == 0
    script = tmp_path / "plain" / "train.py"
    text = script.read_text()
    saving = f"save_strategy='steps', save_steps={BEFORE}, "
    assert DEEPSPEED in text and "save_strategy='no'," in text
    text = text.replace("save_strategy='no',", saving)
    script.write_text(text if with_deepspeed else text.replace(DEEPSPEED, ""))
    program = tmp_path / "run_plain.py"
    program.write_text(RUN_PLAIN.format(script=str(script)))
    finished = run(forked(1, str(program)), cwd=tmp_path, timeout_s=300)
    assert finished.code == 0, finished.output[-4000:]
    source = tmp_path / "plain" / "output" / f"checkpoint-{BEFORE}"
    assert (source / "optimizer.pt").exists() != with_deepspeed
    assert main(["convert-checkpoint", str(source), f"output={tmp_path / 'converted'}"]) == 0
    state = read_run_state(tmp_path / "converted")
    assert state.step == BEFORE and state.is_foreign
    finished = run(forked(1, str(REPOSITORY / "run.py"), *words, f"resume={tmp_path / 'converted'}"), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    history = json.loads((tmp_path / "plain" / "output" / "trainer_state.json").read_text())["log_history"]
    trained = [entry["loss"] for entry in history if "loss" in entry]
    assert losses(tmp_path / "runs" / "run") == pytest.approx(trained[BEFORE:], abs=1e-5)
    assert trained[BEFORE - 1] - trained[-1] > 1e-3, "losses that do not move prove nothing"
