"""How PyTorch allocates memory, unless the user says otherwise."""

import platform
import subprocess
import sys

import pytest

from toolkit.train import startup

GPU, CPU = {"DS_ACCELERATOR": "cuda"}, {"DS_ACCELERATOR": "cpu"}
KEEPS = """
import resource, torch
from toolkit.train import startup
startup.set_allocator({"DS_ACCELERATOR": "%s"})
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(%d * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([faults() for _ in range(5)][-1])
"""


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        (GPU, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (CPU, {"THP_MEM_ALLOC_ENABLE": "1"}),
        (CPU | {"THP_MEM_ALLOC_ENABLE": "0"}, {}),
        ({"DS_ACCELERATOR": "npu"}, {}),
        (GPU | {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (GPU | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, {}),
    ],
)
def test_a_variable_of_the_user_stays(environ: dict[str, str], added: dict[str, str]) -> None:
    found = dict(environ)
    startup.set_allocator(found)
    assert found == environ | added


def test_the_recipe_counts_as_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch.env is applied first."""
    order: list[str] = []
    for name in ("apply_env", "check_port"):
        monkeypatch.setattr(startup.environment, name, lambda *_, name=name: order.append(name))
    monkeypatch.setattr(startup, "set_allocator", lambda environ: order.append("set_allocator"))
    monkeypatch.setattr(startup.preflight, "check_build_locks", lambda environ: None)
    startup.set_environment(startup.schema.RunConfig(), startup.environment.detect({}), {})
    assert order == ["apply_env", "set_allocator", "check_port"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("device", "mebibytes", "kept"),
    [
        ("cpu", 16, True),
        ("cpu", 64, False),
        ("cuda", 16, False),
        ('cpu", "MALLOC_MMAP_THRESHOLD_": "131072', 16, False),
    ],
)
def test_memory_of_tensors_is_kept_without_a_gpu(device: str, mebibytes: int, kept: bool) -> None:
    """What is allocated again is not mapped again, page by page; large blocks leave no holes in the heap."""
    words = [sys.executable, "-c", KEEPS % (device, mebibytes)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    assert (int(found) < 5) == kept, found
