"""Which GPU a rank takes, with an accelerator that counts in place of GPUs."""

import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from toolkit.config.schema import Backend, DistributedConfig
from toolkit.distributed import accelerator, meeting, process_group
from toolkit.messages import LaunchError


class Gpus:
    """An accelerator with so many GPUs, which none of them is."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, -1

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return self.count

    def set_device(self, number: int) -> None:
        if number >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.taken = number

    def current_device_name(self) -> str:
        return f"cuda:{self.taken}"


def start(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, rank: int = 0, **environ: str
) -> tuple[torch.device, dict[str, str]]:
    """Start as a rank of two; return its device and environment."""
    gpus = Gpus(visible)
    found = {"LOCAL_RANK": str(local_rank), "RANK": str(rank), "WORLD_SIZE": "2", **environ}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: gpus)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **options: None)
    monkeypatch.setattr(meeting, "init_method", lambda timeout: None)
    monkeypatch.setattr(process_group, "_tie_builds", lambda: None)
    return process_group.start(DistributedConfig(backend=Backend(environ.get("BACKEND", "gloo")))), found


@pytest.mark.parametrize(
    ("named", "has", "expected"),
    [
        *((None, "cuda", "cuda"), ("", "cuda", "cuda"), ("cuda", "cuda", "cuda"), ("cuda", "", "cpu")),
        *(("cpu", "cuda", "cpu"), (None, "xpu", "xpu"), ("xpu", "xpu", "xpu"), ("cuda", "xpu", "cpu")),
    ],
)
def test_a_process_alone_computes_where_ranks_would(
    named: str | None, has: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if named is None else {"DS_ACCELERATOR": named})
    found = torch.device(has) if has else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert accelerator.device_alone() == torch.device(expected)


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    device, environ = start(monkeypatch, visible=4, local_rank=3)
    assert (device, environ["LOCAL_RANK"]) == (torch.device("cuda:3"), "3")


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under srun --gpus-per-task=1; DeepSpeed too takes LOCAL_RANK for the number of the GPU."""
    device, environ = start(monkeypatch, visible=1, local_rank=3, OMPI_COMM_WORLD_LOCAL_RANK="3")
    assert device == torch.device("cuda:0")
    assert environ["LOCAL_RANK"] == environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"


def test_too_few_gpus_are_told_with_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 on .* 2 GPUs are visible \(CUDA_VISIBLE_DEVICES=5,6\)"):
        start(monkeypatch, visible=2, local_rank=2, rank=1, CUDA_VISIBLE_DEVICES="5,6")


def test_without_any_gpu_the_way_to_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"no GPU is visible \(CUDA_VISIBLE_DEVICES=5,6\): .*DS_ACCELERATOR=cpu"):
        start(monkeypatch, visible=0, local_rank=0, rank=0, CUDA_VISIBLE_DEVICES="5,6")


def test_two_ranks_on_one_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = HashStore()
    properties = SimpleNamespace(uuid="GPU-7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for rank in (0, 1):
        monkeypatch.setattr(meeting, "_met", (store, rank, 2))
        if rank == 0:
            start(monkeypatch, visible=1, local_rank=0, rank=0, BACKEND="nccl")
        else:
            with pytest.raises(LaunchError, match=r"rank 1 on .* the same GPU as another rank"):
                start(monkeypatch, visible=1, local_rank=1, rank=1, BACKEND="nccl")
    properties.uuid = "GPU-8"
    start(monkeypatch, visible=1, local_rank=1, rank=1, BACKEND="nccl")
