"""The oldest and the newest versions that pyproject.toml allows; what is pinned is what all other tests run on.

It needs a package index, and some gigabytes: PyTorch for CUDA is what the index has.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.versions import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_a_set_of_versions_trains_as_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    """Also ChatGLM beside the original code; ZeRO 0 to 3, LoRA and packing, on two ranks, with the export."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "deepspeed"]
    if subprocess.run(asked, capture_output=True, timeout=300).returncode:
        pytest.skip("there is no package index here")
    command = [sys.executable, "scripts/prove_versions", f"sets={name}", f"folder={tmp_path}/environments"]
    command.append(f"output={tmp_path}/found.json")
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["is_right"] and list(found["checks"]) == list(CHECKS)
    proofs = [row["findings"] for row in found["checks"].values() if "findings" in row]
    assert len(proofs) == 5 and all(set(one) == {"losses", "norms", "logits"} for one in proofs)
