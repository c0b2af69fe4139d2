"""Loading a whole model takes its own size and little more: one tensor is read at a time."""

import subprocess
import sys
from pathlib import Path

import pytest
from official import write

MEASURE = """
import re, sys
from pathlib import Path
import torch
from toolkit.models import load_model
def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1000
torch.ones(8, 8) @ torch.ones(8, 8)
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
model = load_model(sys.argv[1])
print(memory("VmHWM") - before, sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6)
"""


@pytest.mark.parametrize(("family", "pickled"), [("v1", True), ("v3", False)])
def test_peak_memory(family: str, pickled: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_layers": 12}
    inner = {"inner_hidden_size": 3072} if family == "v1" else {"ffn_hidden_size": 2304, "kv_channels": 64}
    folder = write(tmp_path / "m", family, shards=3, pickled=pickled, **sizes, **inner)
    shard_mb = max(file.stat().st_size for file in folder.iterdir()) / 1e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    peak, model_mb = map(float, done.stdout.split())
    print(f"model {model_mb:.0f} MB, shard {shard_mb:.0f} MB, peak {peak:.0f} MB above the start")
    assert model_mb > 120
    layer_mb = model_mb / 12
    assert peak <= model_mb + shard_mb + layer_mb
