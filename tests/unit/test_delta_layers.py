"""Packed rows in hybrids of attention and the gated delta rule, with stand-ins for the kernels that need a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KINDS = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Each type in a process of its own, as transformers looks for kernels when it is imported."""
    path = os.pathsep.join([str(ROOT), str(HERE / "kernel_stand_ins")])
    command = [sys.executable, str(HERE / "delta_worker.py"), *KINDS]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_are_computed_as_each_alone(kind: str, measured: dict[str, Any]) -> None:
    answer = measured[kind]
    assert answer["reason"] == "" and "linear_attention" in answer["divided"]
    for way in ("varlen", "sdpa", "eager"):
        assert answer[way] == pytest.approx(answer["alone"], rel=1e-6), way
        assert answer[f"{way} isolated"]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_not_told_where_samples_begin_are_found_out(kind: str, measured: dict[str, Any]) -> None:
    answer = measured[kind]
    assert answer["untold"] != pytest.approx(answer["alone"], rel=1e-4)
    assert not answer["untold isolated"]
