"""By which names GPUs are known, what is known of them, and what they cannot do."""

import os
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.config import native_ops
from toolkit.messages import ConfigError
from toolkit.plan.machine import find_gpu, known_gpus
from toolkit.plan.planned_machine import parse_machine
from toolkit.train import startup


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H800 PCIe", "H800 PCIe"),
        ("NVIDIA GH200 480GB", "GH200 480GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA H20-3e", "H20 3e"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("L40S-48GB", "L40S"),
        ("T4-16GB", "T4"),
        ("H100-96GB", None),
        ("H100-64GB", None),
        ("A100", None),
        ("NVIDIA A10-24Q", None),
        ("NVIDIA L40-48Q", None),
        ("GRID A100D-40C", None),
        ("cpu", None),
        ("RTX4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("nvidia geforce rtx4090d", "RTX 4090 D"),
        ("A100-80G", "A100 80GB"),
        ("a100 sxm4 80 GB", "A100 80GB"),
        ("H100 SXM", "H100"),
        ("h100nvl", "H100 NVL"),
        ("RTX2080Ti", "RTX 2080 Ti"),
        ("RTX 3080", "RTX 3080"),
        ("RTX3080-12GB", "RTX 3080 12GB"),
        ("RTX 3080 Ti", None),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("RTXPRO6000", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("Quadro RTX 6000", None),
        ("Ascend910B", "Ascend 910B"),
        ("910b", "Ascend 910B"),
        ("910B4", None),
    ],
)
def test_cards_by_the_names_that_drivers_give(reported: str, name: str | None) -> None:
    found = find_gpu(reported)
    assert (found and found.name) == name


def test_a_name_without_its_memory_is_told_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"one of: A100 40GB, A100 40GB PCIe, A100 80GB, A100 80GB PCIe\.$"):
        parse_machine("8xA100", 1, "")


@pytest.mark.parametrize(
    ("name", "nearest"), [("RTX 4060", "RTX 4090"), ("V100S", "V100 32GB"), ("GTX1080Ti", "RTX 2080 Ti")]
)
def test_an_unknown_name_is_told_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_machine(f"8x{name}", 1, "")
    told = str(caught.value).partition("one of: ")[2].rstrip(".").split(", ")
    assert nearest in told and len(told) == 5


def test_one_gpu_needs_no_count_and_a_name_is_no_size() -> None:
    assert parse_machine("rtx 4090", 1, "") == parse_machine("1xRTX4090", 1, "") == parse_machine("4090", 1, "")
    assert parse_machine("2x2080ti", 1, "").memory_bytes == 11 << 30
    for wrong in ("many", "80GB", "8", "0xH100"):
        with pytest.raises(ConfigError, match="should be the GPUs of one machine"):
            parse_machine(wrong, 1, "")


def test_the_datasheet_is_plausible() -> None:
    assert len({gpu.name for gpu in known_gpus()}) == len(known_gpus())
    for gpu in known_gpus():
        assert find_gpu(gpu.name) is gpu
        assert gpu.flops("fp32") < gpu.flops("fp16") or gpu.flops("fp32") == gpu.flops("fp16") == 0
        assert gpu.flops("bf16") == (0 if gpu.lacks_bf16 else gpu.flops("fp16"))
        assert 10 << 30 <= gpu.memory_bytes < 200 << 30
        assert gpu.link_bytes_per_s < gpu.memory_bytes_per_s or gpu.memory_bytes_per_s == 0
        assert gpu.capability in (7.0, 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0) or gpu.name.startswith("Ascend")


def test_a_plan_says_what_is_not_known_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    speed, npu = "How fast these GPUs compute in bf16 is not known here", "Training on NPUs is not supported"
    for name, says_speed, says_npu in (("Ascend 910B", 1, 1), ("RTX 3060", 1, 0), ("RTX 3090", 0, 0)):
        assert main(["plan", "recipe=chatglm", f"gpus=8x{name}"]) == 0
        told = capsys.readouterr().out
        assert (speed in told) is bool(says_speed)
        assert (npu in told) is bool(says_npu)


SENTENCE = (
    "precision.dtype = bf16 needs GPUs of compute capability 8.0 or higher (A100, RTX 30 and newer), and {} is older. "
    "Use precision=fp16 or precision=fp32."
)
RUN = ["recipe=quickstart", "precision=bf16"]


@pytest.mark.parametrize("name", ["T4", "V100 32GB", "RTX 2080 Ti"])
@pytest.mark.parametrize("command", ["plan", "check"])
def test_older_gpus_have_no_bf16(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *RUN, f"gpus=1x{name}"]) == 2
    assert capsys.readouterr().err == f"ConfigError: {SENTENCE.format(name)}\n"
    assert main([command, *RUN, f"gpus=1x{name}", "precision=fp16"]) == 0, "whatever this machine computes in"
    assert main([command, *RUN, "gpus=1xRTX 3060"]) == 0


def test_fp8_on_gpus_without_bf16_is_not_sent_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=chatglm", "precision=fp8", "gpus=8xT4"]) == 2
    assert SENTENCE.format("T4") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        ("Tesla T4, 15360, 7.5", "T4"),
        ("NVIDIA GeForce GTX 1080 Ti, 11264, 6.1", "NVIDIA GeForce GTX 1080 Ti"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU, 6144, 8.6", ""),
        ("Tesla T4, 15360, 7.5\nNVIDIA A100-SXM4-40GB, 40960, 8.0", ""),
        ("NVIDIA X1, 15360, [N/A]", ""),
    ],
)
def test_the_gpus_here_are_asked_for_bf16(
    listed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `plan` and `check`, and on each node by training before data are prepared; not where ranks run on CPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{listed}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(startup, "set_environment", lambda *_: None)
    assert startup.make_ready(RUN) and main(["check", *RUN]) == 0, "CPU ranks beside a GPU"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setattr(native_ops, "check_compiler", lambda _: None)  # there may be no nvcc
    capsys.readouterr()
    for command in ("plan", "check", "train"):
        if command == "train" and not name:
            assert startup.make_ready(RUN)
            continue
        assert main([command, *RUN]) == (2 if name else 0)
        assert (SENTENCE.format(name) in capsys.readouterr().err) is bool(name)
    assert main(["check", *RUN, "gpus=8xH100", "batch.global_size=64"]) == 0, "for other GPUs than those here"
    assert "64 sequences per step = 8 x 1 x 8 " in capsys.readouterr().out
