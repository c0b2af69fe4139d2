"""The program that `export-config script=DIR` writes trains as the toolkit does: by transformers' Trainer alone."""

import json
from pathlib import Path

import pytest
from ranks import REPOSITORY, forked, run
from safetensors.torch import load_file
from shared import experts, losses, tiny

from toolkit.cli import main

RUN_PLAIN = """
import runpy, sys
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
sys.modules.pop("toolkit", None)
runpy.run_path({script!r}, run_name="__main__")
"""


def test_the_trainer_takes_the_same_steps(rows_file: Path, tmp_path: Path) -> None:
    """Over the end of an epoch, which has a short step: the same samples, rates and sums of losses in float32."""
    own = ["model=hf", f"model.path={experts(tmp_path / 'base')}", "tuning=lora", "zero=stage1", "schedule=cosine"]
    words = tiny(rows_file, tmp_path, "run", *own, "train.max_steps=12", "checkpoint.export=true")
    assert main(["export-config", *words, f"script={tmp_path / 'plain'}", "world_size=2"]) == 0
    assert main(["export-config", *words, f"script={tmp_path / 'plain'}"]) == 2  # it exists
    finished = run(forked(2, str(REPOSITORY / "run.py"), *words), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    program = tmp_path / "run_plain.py"
    program.write_text(RUN_PLAIN.format(script=str(tmp_path / "plain" / "train.py")))
    finished = run(forked(2, str(program)), cwd=tmp_path, timeout_s=300)
    assert finished.code == 0, finished.output[-4000:]
    output = tmp_path / "plain" / "output"
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    trained = [entry["loss"] for entry in history if "loss" in entry]
    assert trained == pytest.approx(losses(tmp_path / "runs" / "run"), abs=1e-5)
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "runs" / "run" / "export", output)
    )
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in ours)


def test_what_a_plain_program_cannot_carry_is_named(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model, other methods and tasks; packing is only noted in the program's head."""
    base = ["model=hf", f"model.path={experts(tmp_path / 'base')}"]
    for more, wrong in (
        ([], "it needs a model's directory or name"),
        ([*base, "tuning=prompt"], "possible are tuning=full, freeze and lora"),
        ([*base, "parallel=sequence", "parallel.sequence=2"], "it divides the model by ZeRO alone"),
    ):
        words = tiny(rows_file, tmp_path, "run", *more)
        assert main(["export-config", *words, f"script={tmp_path / 'out'}", "world_size=2"]) == 2
        assert wrong in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    words = tiny(rows_file, tmp_path, "run", *base, "tuning=freeze", "tuning.last_layers=1", "data.packing=packed")
    assert main(["export-config", *words, f"script={tmp_path / 'packed'}"]) == 0
    text = (tmp_path / "packed" / "train.py").read_text()
    assert "- data.packing = packed: the recipe fills sequences" in text
    compile(text, "train.py", "exec")
