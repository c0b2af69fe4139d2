"""How PyTorch allocates memory, unless the user says otherwise."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from toolkit.launch import allocator, variables
from toolkit.train import startup

GPU, CPU = {"DS_ACCELERATOR": "cuda"}, {"DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(
    ("environ", "added", "keeps"),
    [
        (GPU, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        (CPU, {"THP_MEM_ALLOC_ENABLE": "1"}, True),
        (CPU | {"THP_MEM_ALLOC_ENABLE": "0"}, {}, True),
        (CPU | {"MALLOC_TRIM_THRESHOLD_": "1"}, {"THP_MEM_ALLOC_ENABLE": "1"}, False),
        (CPU | {"LD_PRELOAD": "libjemalloc.so"}, {"THP_MEM_ALLOC_ENABLE": "1"}, False),
        ({"DS_ACCELERATOR": "npu"}, {}, False),
        (GPU | {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}, False),
        (GPU | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, {}, False),
    ],
)
def test_a_variable_of_the_user_stays(
    environ: dict[str, str], added: dict[str, str], keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(allocator, "CDLL", lambda _: SimpleNamespace(mallopt=lambda name, value: calls.append(name)))
    variables = dict(environ)
    allocator.set_allocator(variables)
    allocator.share_one_arena(variables)
    assert variables == environ | added and bool(calls) == keeps


@pytest.mark.parametrize("where", ["main", "thread"])
def test_freed_memory_stays_with_the_process(where: str) -> None:
    """Without it each tensor of 128 MiB takes 32,768 page faults, or 64 of huge pages; in a thread that takes over the
    arena of an earlier one, too. With it the first 6 to 9 do: glibc 2.36 finds no aligned block of a size in one that
    was freed of the same size, until neighbours that are free too have made it larger.
    """
    code = """if True:
        import os, resource, sys, threading
        from toolkit.launch import allocator
        environ = {"DS_ACCELERATOR": "cpu"}
        allocator.share_one_arena(environ)
        bytearray(1 << 20)
        earlier = threading.Thread(target=threading.Event().wait, daemon=True)
        earlier.start()
        allocator.set_allocator(environ)
        import torch
        faults = []
        def allocate():
            for _ in range(36):
                tensor = torch.zeros(1 << 25)
                del tensor
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        if sys.argv[1] == "main":
            allocate()
        else:
            threads = [threading.Thread(target=allocate) for _ in range(2)]
            for thread in threads:
                thread.start()
                thread.join()
        print(faults[-1] - faults[-4])
    """
    command = [sys.executable, "-c", code, where]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(result.stdout) < 60


def test_the_recipe_counts_as_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch.env is applied first."""
    order: list[str] = []
    monkeypatch.setattr(variables, "apply_env", lambda *_: order.append("apply_env"))
    monkeypatch.setattr(startup.environment, "check_port", lambda _: order.append("check_port"))
    monkeypatch.setattr(allocator, "set_allocator", lambda environ: order.append("set_allocator"))
    monkeypatch.setattr(startup.native_ops, "check_build_locks", lambda environ: None)
    cfg = startup.schema.RunConfig(launch=startup.schema.LaunchConfig(env={"A": "b"}))
    startup.set_environment(cfg, startup.environment.detect({}), {})
    assert order == ["apply_env", "set_allocator", "check_port"]
