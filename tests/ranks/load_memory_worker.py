"""Run on every rank: load a folder, print by how much this process's memory grew, in MB.

Under ZeRO-3; with a second argument without ZeRO: `experts`, which are divided over the ranks, or `4-bits` as in QLoRA.
"""

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import deepspeed  # noqa: F401 -- a library's code is not what is measured
import torch

from toolkit.config.schema import DistributedConfig
from toolkit.distributed import process_group
from toolkit.launch import environment
from toolkit.layouts import experts
from toolkit.models import load_model, lora

DS_CONFIG = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3},
}


def memory_mb() -> dict[str, float]:
    """Return resident memory now and at its highest since the last reset."""
    status = Path("/proc/self/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1000 for name in ("VmRSS", "VmHWM")}


def main() -> None:
    """Load and report."""
    path, *way = environment.strip_launcher_arguments(sys.argv[1:])
    process_group.start(DistributedConfig())
    if way == ["4-bits"]:
        import bitsandbytes  # noqa: F401
    torch.ones(8, 8) @ torch.ones(8, 8)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mb()
    if way == ["4-bits"]:
        model = load_model(path, dtype=torch.bfloat16, ready=lora.quantize_layer)
    elif way:
        model = load_model(path, dtype=torch.float32, needed_rows=partial(experts.divide, ranks=2))
    else:
        model = load_model(path, dtype=torch.float32, ds_config=DS_CONFIG)
    after = memory_mb()
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    print(
        "MEMORY "
        + json.dumps(
            {
                "rank": int(os.environ["RANK"]),
                "grown": after["VmRSS"] - before["VmRSS"],
                "peak": after["VmHWM"] - before["VmRSS"],
                "partitioned": sum(one.numel() for one in held),
                "bytes": sum(one.numel() * one.element_size() for one in held),
            }
        ),
        flush=True,
    )
    process_group.stop()


if __name__ == "__main__":
    main()
