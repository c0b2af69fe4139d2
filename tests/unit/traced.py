"""Traces of small models, and of some with a defect planted, each on ranks of its own: `traced.py FILE`."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.train import trace

WORLD = 4
SIZES = ["model.shape.hidden_size=1024", "model.shape.intermediate_size=2816", "model.shape.num_layers=2"]
SIZES += ["model.shape.vocab_size=16384", "model.shape.num_heads=8", "model.shape.num_kv_heads=2"]
SMALL = ["recipe=quickstart", *SIZES, "precision=bf16", "data.max_length=512", "batch.micro_per_gpu=2"]
SMALL += [
    "batch.global_size=8",
    "optim.torch=false",
    "train.activation_checkpointing.enabled=true",
    "model.shape.max_positions=512",
]
WORDS = {
    "full": [*SMALL, "zero=stage2", "data.packing=packed"],
    "lora": [*SMALL, "zero=stage3", "tuning=lora"],
}
real = trace.train_step


def one_more_collective(engine: Any, *arguments: Any) -> Any:
    """Send something that only the last rank sends."""
    if dist.get_rank() == WORLD - 1:
        dist.all_reduce(torch.zeros(7, device=engine.device))
    return real(engine, *arguments)


def a_wait(engine: Any, *arguments: Any) -> Any:
    """Read a number of the device."""
    torch.zeros(7, device=engine.device).sum().item()
    return real(engine, *arguments)


def wrong_device(engine: Any, *arguments: Any) -> Any:
    """Add a tensor of the host to one of the device."""
    torch.zeros(7, device=engine.device).add_(torch.zeros(7))
    return real(engine, *arguments)


def main(file: str) -> None:
    """Write what is found."""
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    def traced(name: str, *ranks: int) -> Any:
        return trace.main({"words": WORDS[name], "ranks": ranks, "world_size": WORLD, "language": "en"})

    found = {"full": traced("full", 0, 3), "lora": traced("lora", 1)}
    for planted, rank in ((one_more_collective, 3), (a_wait, 0), (wrong_device, 0)):
        trace.train_step = planted  # type: ignore[assignment]
        found[planted.__name__] = traced("full", rank)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
