"""One rank of a real all-reduce, with a rank's variables set.

python -m toolkit.extras.doctor.collective BACKEND SECONDS FILE

Writes seconds and sizes as JSON; a program of its own because it needs torch, and may hang or die.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.distributed import accelerator

_ENOUGH_S = 0.2
"""Seconds from which on a measurement is taken: shorter ones are mostly latency."""
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 28
_FLOAT_BYTES = 4


def main(backend: str, limit_s: float, file: Path) -> int:
    """Join the other ranks, measure an all-reduce and a transfer to the next rank, and write the results to `file`.
    `limit_s`: seconds until an operation is given up.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device(accelerator.device_alone().type, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    measured: dict[str, Any] = {"rank": rank, **_measure_all_reduce(device, rank, size)}
    if size > 1:
        measured["pair_bytes"] = measured["bytes"] // 4
        measured["pair_s"] = _measure_ring_transfer(device, rank, size, measured["pair_bytes"])
    dist.barrier()
    dist.destroy_process_group()
    # Renamed when it is complete: the agent reads the file as soon as it is there.
    file.with_suffix(".new").write_text(json.dumps(measured), encoding="utf-8")
    file.with_suffix(".new").replace(file)
    return 0


def _seconds(device: torch.device, started: float) -> float:
    """Return the seconds since `started`, once the device has finished what was queued on it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter() - started


def _measure_all_reduce(device: torch.device, rank: int, size: int) -> dict[str, Any]:
    """All-reduce more and more bytes until it takes long enough to be measured; return of the last one `bytes`,
    `seconds` of the slowest rank, and whether the sum was `right`.
    """
    nbytes = _FIRST_BYTES
    while True:
        # Each rank adds its number: the sum is 0 + 1 + … + (size - 1) everywhere.
        values = torch.full((nbytes // _FLOAT_BYTES,), float(rank), device=device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        taken_s = _seconds(device, started)
        right = bool((values == size * (size - 1) / 2).all())
        slowest = torch.tensor([taken_s, float(not right)], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # so that all ranks stop at the same size
        seconds, any_wrong = slowest.tolist()
        if seconds > _ENOUGH_S or nbytes >= _MOST_BYTES or any_wrong:
            return {"bytes": nbytes, "seconds": seconds, "right": right}
        nbytes *= 4


def _measure_ring_transfer(device: torch.device, rank: int, size: int, nbytes: int) -> float:
    """Send `nbytes` (at least one number) from each rank to the next, first from even ones, so that pairs share no
    network card. Return the seconds that this rank took to receive from the one before it.
    """
    values, receive_s = torch.zeros(max(1, nbytes // _FLOAT_BYTES), device=device), 0.0
    before, after = (rank - 1) % size, (rank + 1) % size
    # Twice, and the second time counts: in the first NCCL makes a communicator of each pair.
    for sending_parity in (0, 1, 0, 1):
        dist.barrier()
        if rank % 2 == sending_parity:
            dist.send(values, after)
        if before % 2 == sending_parity:
            started = time.perf_counter()
            dist.recv(values, before)
            receive_s = _seconds(device, started)
    return receive_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
