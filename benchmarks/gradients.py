"""Gradients and weights of bare DeepSpeed on two CPU ranks beside plain PyTorch: `python -m benchmarks.gradients FILE`.

Nothing of the toolkit takes part, so it judges versions of DeepSpeed that the toolkit rejects. A layer may be used once
in a forward pass or twice, be recomputed or not, and a step may have one micro-batch or two: what the bookkeeping of
gradients goes by. DeepSpeed 0.18.3 to 0.19.3 are wrong under ZeRO-2 in bf16 without an error (issue 8224).
"""

import json
import logging
import math
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STEPS, ROWS, WIDTH, RANKS, RATE = 3, 4, 32, 2, 0.1
FACTOR, FLOOR = 8.0, 1e-3
"""A norm may deviate from float64 by this many times what the plain loop in the same precision does, and by this."""
WAYS = ("plain", "contiguous_gradients=false", "recomputed", "recomputed reentrantly")
STAGES = (0, 1, 2, 3)
CASES = [
    case
    for case in product(STAGES, ("fp32", "bf16"), WAYS, (1, 2), (1, 2))
    if case[2:4] != ("recomputed reentrantly", 2)  # refused, after which the bookkeeping is another
]
"""ZeRO stage, precision, way, how often the layer is used, micro-batches of a step."""


class Small(nn.Module):
    """A layer between two others, used so many times."""

    def __init__(self, times: int, way: str) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.times, self.way = times, way

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what comes out."""
        states.requires_grad_()  # as what embeddings return; reentrant recomputation needs it
        for _ in range(self.times):
            states = functional.gelu(self._use(states))
        return self.last(states).float().square().mean()

    def _use(self, states: torch.Tensor) -> torch.Tensor:
        if not self.way.startswith("recomputed"):
            return self.layer(states)
        return checkpoint(self.layer, states, use_reentrant=self.way.endswith("reentrantly"))


def model_of(times: int, way: str = "plain") -> Small:
    """Return the same weights each time, which bf16 can hold."""
    torch.manual_seed(7)
    model = Small(times, way)
    for one in model.parameters():
        one.data = one.data.bfloat16().float()
    return model


def rows_of(step: int, micro: int, rank: int) -> torch.Tensor:
    """Return a micro-batch of a rank."""
    made = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(ROWS, WIDTH, generator=made).bfloat16().float()


def plain(times: int, micros: int, dtype: torch.dtype) -> list[float]:
    """Return the gradient norms of some steps of SGD in one process; weights and sums in at least float32."""
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    master, norms = model_of(times).to(kept), []
    optimizer = torch.optim.SGD(master.parameters(), lr=RATE)
    for step in range(STEPS):
        for micro, rank in product(range(micros), range(RANKS)):
            used = model_of(times).to(dtype)
            used.load_state_dict(master.state_dict())
            (used(rows_of(step, micro, rank).to(dtype)) / (micros * RANKS)).backward()
            for mine, own in zip(master.parameters(), used.parameters(), strict=True):
                assert own.grad is not None
                mine.grad = own.grad.to(kept) if mine.grad is None else mine.grad + own.grad.to(kept)
        norms.append(
            math.sqrt(sum(float(one.grad.square().sum()) for one in master.parameters() if one.grad is not None))
        )
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained(stage: int, precision: str, way: str, times: int, micros: int, rank: int) -> list[float]:
    """Return those of DeepSpeed."""
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micros,
        "data_types": {"grad_accum_dtype": "fp32"} if stage else {},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "contiguous_gradients": way != "contiguous_gradients=false"},
        "zero_allow_untested_optimizer": True,
    }
    model = model_of(times, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    norms = []
    for step in range(STEPS):
        before = [one.detach().clone() for one in model.parameters()]
        for micro in range(micros):
            rows = rows_of(step, micro, rank)
            engine.backward(engine(rows.bfloat16() if precision == "bf16" else rows))
            engine.step()
        norm = engine.get_global_grad_norm()
        if norm is None:  # in fp32 without ZeRO; then what SGD did tells
            changes = zip(before, model.parameters(), strict=True)
            norm = math.sqrt(sum(float((old - new).square().sum()) for old, new in changes)) / RATE
        norms.append(float(norm))
    engine.destroy()
    return norms


def work(rank: int, folder: str, stage: int) -> None:
    """Be a rank, of the cases of a stage: what DeepSpeed puts into torch for ZeRO-3 would be there for the others."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo serves, without minutes of compiling
    meeting = f"file://{folder}/meeting-{stage}"
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, verbose=False, init_method=meeting, rank=rank, world_size=RANKS
    )
    found: list[list[float] | str] = []
    for case in CASES:
        if case[0] != stage:
            continue
        try:
            found.append(trained(*case, rank=rank))
        except Exception as error:  # whatever a version of DeepSpeed does not do
            found.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        if rank == 0:
            Path(folder, f"norms-{stage}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    os._exit(0)


def main(file: str) -> int:
    """Write what each case gave; return how many are wrong. What DeepSpeed refuses is not: nobody trains with it."""
    norms: list[list[float] | str] = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES:
            with suppress(Exception):  # a rank that ends with a signal; what it has found is there, or it is said below
                multiprocessing.spawn(work, (folder, stage), nprocs=RANKS)  # type: ignore[attr-defined]
            kept, of_stage = Path(folder, f"norms-{stage}.json"), [case for case in CASES if case[0] == stage]
            found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
            norms += found + ["a rank died"] * (len(of_stage) - len(found))
    rows = []
    for (stage, precision, way, times, micros), found in zip(CASES, norms, strict=True):
        row = {"zero_stage": stage, "precision": precision, "way": way, "layer_uses": times, "micro_batches": micros}
        exact = plain(times, micros, torch.float64)
        rounded = plain(times, micros, torch.bfloat16 if precision == "bf16" else torch.float32)
        if isinstance(found, str):
            rows.append(row | {"error": found})
            continue
        off, rounding = (
            max(abs(one / other - 1) for one, other in zip(some, exact, strict=True)) for some in (found, rounded)
        )
        rows.append(row | {"off": off, "rounding": rounding, "is_right": off <= FACTOR * rounding + FLOOR})
    Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return sum(not row.get("is_right", True) for row in rows)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 100))
