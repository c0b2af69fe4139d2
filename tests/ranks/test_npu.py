"""A run on a device that is neither a CPU nor CUDA: a stand-in for torch_npu, and DeepSpeed's own accelerator for NPUs.

See stand_in_npu/torch_npu: what is computed is what CPUs compute, so that numbers are those of the run on CPUs.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, free_port, kill_session, run, start
from shared import losses, tiny
from transformers import AutoModelForCausalLM

STAND_IN = Path(__file__).parent / "stand_in_npu"
NPU = {
    "DS_ACCELERATOR": "npu",
    "ASCEND_HOME_PATH": "/nowhere",  # of CANN's set_env.sh; DeepSpeed's op builder fails without
    "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{STAND_IN}",
}
WORDS = ["optim.torch=true", "zero=stage2", "train.rehearse=true", "checkpoint.every=4", "checkpoint.export=true"]


def on_two_ranks(folder: Path, words: list[str], **extra: str) -> str:
    """Run two ranks to their end; return what they print."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(REPOSITORY / "run.py"), *words]
    ranks = [start(command, folder, RANK=str(rank), LOCAL_RANK=str(rank), **group, **extra) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            kill_session(rank)
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(outputs)[-6000:]
    return outputs[0]


@pytest.mark.nightly  # compiles the stand-in, and no rank is a fork
def test_a_run_on_npus_is_the_run_on_cpus(rows_file: Path, tmp_path: Path) -> None:
    """Trains, saves, resumes and exports on two ranks through DeepSpeed's accelerator; its export answers on one."""
    runs = {name: tmp_path / "runs" / name for name in ("cpu", "npu", "again")}
    words = {name: tiny(rows_file, tmp_path, name, *WORDS) for name in runs}
    on_two_ranks(tmp_path, words["cpu"])
    output = on_two_ranks(tmp_path, words["npu"], **NPU)
    assert "datasheet of 'Ascend stand-in'" in output and "Dry run passed" in output
    assert json.loads((runs["npu"] / "environment.json").read_text())["device"] == "Ascend stand-in"
    on_two_ranks(tmp_path, [*words["again"], f"resume={runs['npu']}/checkpoints/step-4"], **NPU)
    straight, found = losses(runs["cpu"]), losses(runs["npu"])
    # Not to the last bit: PyTorch's attention has kernels of its own for CPUs.
    assert found == pytest.approx(straight, rel=1e-6) and losses(runs["again"]) == found[4:]
    npu, again = (AutoModelForCausalLM.from_pretrained(runs[name] / "export").state_dict() for name in ("npu", "again"))
    assert [name for name in npu if not npu[name].equal(again[name])] == []
    ask = [sys.executable, "-m", "toolkit", "generate", f"model.path={runs['npu'] / 'export'}", "prompt=hi"]
    answer = run([*ask, "max_new_tokens=8"], tmp_path, **NPU)
    assert answer.code == 0 and "Computing in bf16 on npu" in answer.output, answer.output
