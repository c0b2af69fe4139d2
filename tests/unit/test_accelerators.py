"""Accelerators other than NVIDIA's GPUs, as far as they are known without one: names, variables, compilers."""

import importlib
from pathlib import Path

import pytest
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from toolkit.config import compilers, devices, native_ops
from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.jobs import check
from toolkit.launch import allocator

NPU = {"DS_ACCELERATOR": "npu", "TORCH_EXTENSIONS_DIR": "/nowhere", "CXX": "no-such-compiler"}


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """PyTorch's build for AMD's GPUs, and the environment of such a machine."""
    monkeypatch.setattr(devices, "is_rocm", lambda: True)
    monkeypatch.setattr(compilers, "is_rocm", lambda: True)
    return {"DS_ACCELERATOR": "cuda", "TORCH_EXTENSIONS_DIR": "/nowhere", "ROCM_HOME": "/no/rocm", "PATH": ""}


@pytest.mark.parametrize("name", ["cuda", "npu", "xpu", "mlu", "sdaa", "supa", "klxpu"])
def test_ranks_see_devices_by_the_variable_that_deepspeed_sets(name: str) -> None:
    module = importlib.import_module(f"deepspeed.accelerator.{name}_accelerator")
    kind = next(
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, DeepSpeedAccelerator) and kind.__module__ == module.__name__
    )
    assert [devices.visible_variable({"DS_ACCELERATOR": name})] == kind.visible_devices_envs(None)


@pytest.mark.parametrize("package", ["torch_npu", "torch_mlu"])
def test_a_package_decides_as_in_deepspeed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == package else None)
    assert devices.device_here({}) == package.removeprefix("torch_")
    assert devices.device_here({"DS_ACCELERATOR": "cpu"}) == "cpu"
    assert not devices.on_nvidia({})


def test_an_amd_gpu_is_called_cuda(rocm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/kfd")
    assert devices.device_here({}) == "cuda"
    assert devices.device_here({"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    assert not devices.on_nvidia(rocm)
    environ = dict(rocm)
    allocator.set_allocator(environ)
    assert environ == rocm, "its allocator has no expandable segments"


def test_an_amd_gpu_needs_no_nvcc(rocm: dict[str, str]) -> None:
    tools = compilers.tools_for(["fused_adam"], rocm)
    assert "nvcc" not in tools and tools["hipcc"] is False
    cfg, why = native_ops.resolve_optimizer(load(["recipe=quickstart", "optim=lion", "optim.torch=auto"]).cfg, rocm)
    assert cfg.optim.torch is True and "hipcc" in why and "nvcc" not in why


@pytest.mark.parametrize("words", [[], ["optim=lion"]])
def test_an_npu_needs_no_compiler_for_the_optimizer(words: list[str]) -> None:
    loaded = load(["recipe=quickstart", "optim.torch=auto", *words])
    cfg, why = native_ops.resolve_optimizer(loaded.cfg, NPU)
    assert (cfg.optim.torch, why) == (False, "DeepSpeed's accelerator npu brings its own")
    assert native_ops.needed_ops(cfg, NPU) == []
    native_ops.check_compiler(loaded, NPU)


def test_memory_is_planned_for_a_card_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    monkeypatch.setattr(check, "this_machine", lambda nodes=1: None)
    assert check.machine_for({}, RunConfig()).card is None
    assert "accelerators of this machine (npu) have is not known, and no gpus=" in capsys.readouterr().out
