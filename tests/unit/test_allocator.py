"""How PyTorch allocates memory, unless the user says otherwise."""

import subprocess
import sys

import pytest

from toolkit.launch import variables
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
    calls: list[bool] = []
    monkeypatch.setattr(startup, "_keep_freed_memory", lambda: calls.append(True))
    variables = dict(environ)
    startup.set_allocator(variables)
    assert variables == environ | added and bool(calls) == keeps


def test_freed_memory_stays_with_the_process() -> None:
    """Without it each of the last three tensors of 64 MiB takes 16,384 page faults."""
    code = """if True:
        import resource
        import torch
        from toolkit.train import startup
        startup._keep_freed_memory()
        faults = []
        for _ in range(12):
            tensor = torch.zeros(1 << 24)
            del tensor
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        print(faults[-1] - faults[-4])
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(result.stdout) < 3_000


def test_the_recipe_counts_as_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch.env is applied first."""
    order: list[str] = []
    monkeypatch.setattr(variables, "apply_env", lambda *_: order.append("apply_env"))
    monkeypatch.setattr(startup.environment, "check_port", lambda _: order.append("check_port"))
    monkeypatch.setattr(startup, "set_allocator", lambda environ: order.append("set_allocator"))
    monkeypatch.setattr(startup.native_ops, "check_build_locks", lambda environ: None)
    cfg = startup.schema.RunConfig(launch=startup.schema.LaunchConfig(env={"A": "b"}))
    startup.set_environment(cfg, startup.environment.detect({}), {})
    assert order == ["apply_env", "set_allocator", "check_port"]
