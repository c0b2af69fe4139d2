"""Traces of small models, and of some with a defect planted, each on ranks of its own: `traced.py FILE`."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from toolkit.extras import traced_steps as trace

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
MIXTURE = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
MIXTURE |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
MIXTURE |= {"vocab_size": 4096, "intermediate_size": 1024, "max_position_embeddings": 2048}
EXPERTS = ["recipe=quickstart", "model=hf", "precision=bf16", "data.max_length=2048", "batch.micro_per_gpu=4"]
EXPERTS += ["batch.global_size=16", "optim.torch=false", "parallel=expert", "zero=stage2"]
EXPERTS += ["tuning=lora", "tuning.target_modules=[q_proj,v_proj,*.experts.*]", "model.router_loss=0"]
real = trace.train_step


def experts(folder: Path, *words: str) -> list[str]:
    """Return the words of a mixture's run, of which a directory has the config."""
    Qwen3MoeConfig(**MIXTURE).save_pretrained(folder)
    return [*EXPERTS, f"model.path={folder}", f"prepare.dir={folder}", *words]


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
        words = WORDS.get(name) or experts(Path(file).parent)
        return trace.main({"words": words, "ranks": ranks, "world_size": WORLD, "language": "en"})

    found = {"full": traced("full", 0, 3), "lora": traced("lora", 1), "experts": traced("experts", 0, 3)}
    for planted, rank in ((one_more_collective, 3), (a_wait, 0), (wrong_device, 0)):
        trace.train_step = planted  # type: ignore[assignment]
        found[planted.__name__] = traced("full", rank)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
