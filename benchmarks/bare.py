"""What a user writes who follows DeepSpeed's getting-started page: the floor that our own runs are measured against.

deepspeed --num_gpus 2 bare.py --deepspeed --deepspeed_config ds.json --model DIR --rows rows.jsonl --steps 100
"""

import argparse
import json
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", required=True, help="folder; without weights in it they are random")
parser.add_argument("--random", action="store_true")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--rows", required=True, help="JSONL: input_ids, labels")
parser.add_argument("--steps", type=int, required=True)
deepspeed.add_config_arguments(parser)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
    }


def main() -> None:
    """Train."""
    args = parser.parse_args()
    deepspeed.init_distributed()
    dtype = getattr(torch, args.dtype)
    if args.random:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    with open(args.rows, encoding="utf-8") as file:
        rows: Any = [json.loads(line) for line in file]
    sampler: Any = DistributedSampler(rows, shuffle=False)
    size = engine.train_micro_batch_size_per_gpu()
    loader: Any = DataLoader(rows, batch_size=size, sampler=sampler, collate_fn=collate, drop_last=True)
    while engine.global_steps < args.steps:
        for batch in loader:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}, use_cache=False).loss
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if boundary and engine.global_rank == 0:
                print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
