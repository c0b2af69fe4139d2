"""The benchmarks measure something; their numbers are no test."""

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks import gpu, start
from benchmarks.rows import rows_file
from benchmarks.run import ARGUMENTS, run as bench
from toolkit.cli import main
from toolkit.config.schema import RunConfig
from toolkit.extras.cli import bench as door
from toolkit.messages import ConfigError, LaunchError

ROOT = Path(__file__).parents[2]


def test_every_program_is_importable_and_every_script_has_help(tmp_path: Path) -> None:
    """They import the package, whose names change; most of them are started by `toolkit bench` alone. A script that
    took --help for an argument would write a file of that name, or begin its work.
    """
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    scripts = [
        path for path in scripts if path.suffix == ".py" or path.read_text().startswith("#!/usr/bin/env python3")
    ]
    scripts_with_help = [path for path in scripts if '__name__ == "__main__"' in path.read_text()]
    code = f"""if True:
        import contextlib, io, runpy, sys
        sys.path[:0] = [{str(ROOT / "scripts")!r}, {str(ROOT)!r}]
        import {", ".join(f"benchmarks.{name}" for name in names)}
        for path in {[*map(str, {*scripts} - {*scripts_with_help})]}:
            runpy.run_path(path)
        for path in {[*map(str, scripts_with_help)]}:
            sys.argv, said = [path, "--help"], io.StringIO()
            try:
                with contextlib.redirect_stdout(said):
                    runpy.run_path(path, run_name="__main__")
            except SystemExit as ended:
                assert not ended.code, (path, ended.code)
            assert runpy.run_path(path)["__doc__"].split()[1] in said.getvalue(), path
    """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert not list(tmp_path.iterdir())
    assert len(names) > 15 and len(scripts) > 8


def test_rows_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first, second, other = (rows_file(tmp_path / name, 50, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    rows = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 50
    assert all(row["prompt"] and row["response"] for row in rows)


@pytest.mark.nightly
def test_bench_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.data.FEW", 60)
    monkeypatch.setattr("benchmarks.data.WORKERS", (1,))
    output = tmp_path / "results.json"
    output.write_text('["earlier"]', encoding="utf-8")
    words = ["recipe=zero1", "model=glm_tiny", f"prepare.dir={tmp_path}/cache", "data.packing=packed"]
    assert bench(["data", "rows=200", f"output={output}", *words]) == 0
    earlier, found = json.loads(output.read_text(encoding="utf-8"))
    assert earlier == "earlier"
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["measured"] == "data"
    assert found["config"]["data"]["packing"] == "packed"
    assert found["environment"]["machine"]["memory_bytes"] > 1 << 30
    assert found["rows"] == 200
    assert found["tokens"] > 200
    assert 2 < found["store_bytes_per_token"] < 4
    assert min(found[name] for name in ("prepare_s", "encode_batch_s", "encode_batch_fast_s", "peak_pss_mib")) > 0
    assert [(one["rows"], one["num_workers"]) for one in found["opening"]] == [(60, 1), (200, 1)]
    assert found["packing"]["filled"] > 0.9
    assert [path.name for path in (tmp_path / "cache" / "bench").iterdir() if path.is_dir()] == []


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "notes.json"
    output.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a list of results"):
        bench(["data", "recipe=zero1", "model=glm_tiny", f"output={output}"])
    assert output.read_text(encoding="utf-8") == "{}"


def test_bench_encode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")  # measuring sets it
    monkeypatch.setattr("benchmarks.encode.gc.freeze", lambda: None)
    words = ["recipe=zero1", "model=glm_tiny", "data=examples", "data.max_samples=30", f"prepare.dir={tmp_path}"]
    assert bench(["encode", "turns=3", "repeats=1", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["by_turns"]
    assert list(found) == ["as they are", "3"]
    assert found["3"]["conversations"] > 1 and min(one["speed_to_encode_batch"] for one in found.values()) > 0
    with pytest.raises(ConfigError, match="turns = many is not a list of numbers"):
        bench(["encode", "turns=many", *words])


def test_the_command_runs_the_program_of_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "everything"]) == 2
    assert (
        "Known: step, data, encode, memory, checkpoint, start, plan, resume, nvme, trees, experts, faults."
        in capfd.readouterr().err
    )
    monkeypatch.setattr(door, "PACKAGE", tmp_path / "site-packages" / "toolkit")
    assert main(["bench", "data", "recipe=zero1"]) == 2
    assert capfd.readouterr().err.startswith("ConfigError: toolkit bench needs a checkout of this toolkit: there is no")


def test_the_help_lists_what_can_be_measured_and_every_argument() -> None:
    lines = {line.split()[0]: line for line in (door.__doc__ or "").splitlines() if line.startswith("  ")}
    for name, arguments in ARGUMENTS.items():
        own = [argument for argument in arguments if argument != "ranks"]
        assert all(f"[{argument}=" in lines[name] for argument in own), name


@pytest.mark.parametrize(
    "name", [pytest.param("step", marks=pytest.mark.ranks), pytest.param("memory", marks=pytest.mark.nightly)]
)
def test_what_is_measured_is_told(name: str, tmp_path: Path) -> None:
    """One rank of a tiny model: what is measured on ranks, or our run and a bare script watched from outside."""
    (tmp_path / "README.md").write_text("# Results\n", encoding="utf-8")
    words = [f"only={name}", f"folder={tmp_path}", f"prepare.dir={tmp_path}/cache", "model=glm_tiny"]
    words += ["data.max_samples=60", "schedule.warmup_steps=0", "ranks=1", "pairs=1", "steps=2"]
    command = [sys.executable, str(ROOT / "scripts" / "bench"), *words]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (file,) = tmp_path.glob("*-bench.json")
    [found] = json.loads(file.read_text(encoding="utf-8"))
    assert found["measured"] == name
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# Results\n")
    assert f"scripts/bench {' '.join(words)}\n" in readme
    if name == "step":
        assert (found["pairs"], found["steps_per_block"]) == (1, 2)
        return
    for side in ("ours", "bare"):
        (uss,), (pss,) = found[side]["uss_mib"], found[side]["pss_mib"]
        assert 100 < uss <= pss < 10_000
    assert "| `memory` | our run, the same | " in readme
    assert not list((tmp_path / "cache" / "bench").iterdir()), "what measuring leaves"


class FakeSides:
    """Launches that take no time; the second of ours fails if asked to."""

    fails = False

    def __init__(self, *_: Any) -> None:
        self.begun: list[str] = []

    def ours(self) -> tuple[Any, Callable[[], int]]:
        return self._begin("ours", 3.0)

    def bare(self) -> tuple[Any, Callable[[], int]]:
        return self._begin("bare", 2.0)

    def _begin(self, name: str, seconds: float) -> tuple[Any, Callable[[], int]]:
        self.begun.append(name)
        if self.fails and self.begun.count(name) == 2:
            raise LaunchError("failed")

        class Fake:
            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

            def until(self, condition: Callable[[], bool]) -> float:
                assert condition()
                return seconds

        return Fake(), lambda: 1


def test_starts_are_compared_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "Sides", FakeSides)
    folder, said = tmp_path / "work", []
    folder.mkdir()
    found = start.compare_with_bare(RunConfig(), [], 2, 2, folder, said.append)
    assert found["ours_s"] == [3.0, 3.0]
    assert found["ratio"] == 1.5
    assert len(said) == 3
    assert not folder.exists()
    folder.mkdir()
    monkeypatch.setattr(FakeSides, "fails", True)
    with pytest.raises(LaunchError):
        start.compare_with_bare(RunConfig(), [], 2, 2, folder, said.append)
    assert not folder.exists()


def test_a_bare_script_knows_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set tuning=full data\.packing=none"):
        bench(["start", "recipe=zero1", "model=glm_tiny", "tuning=lora", f"prepare.dir={tmp_path}"])


@pytest.mark.nightly
def test_the_gpu_bench_runs_without_a_gpu(tmp_path: Path) -> None:
    """The whole way with tiny twins of the models; the other parts differ from these by overrides."""
    output, parts = tmp_path / "gpu.json", ["6b-full-zero1", "6b-lora", "6b-trainer"]
    words = ["device=cpu", f"parts={','.join(parts)}", f"output={output}", "minutes=20"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_gpu"), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=590)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (found,) = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(finished.stdout.splitlines()[-1]) == found
    full, lora, trainer = (found["parts"][name] for name in parts)
    assert full["size"]["steps"] == full["step"] == 1
    assert full["total_tokens"] == lora["total_tokens"] > 400
    assert full["padding_fraction"] < 0.1 and full["planned_memory_bytes"] > 1 << 20
    assert found["marks"]["6b-lora"] == {"to_full": lora["tokens_per_s"] / full["tokens_per_s"], "goal": 1.3}
    assert found["marks"]["6b-trainer"]["ours_to_it"] == full["tokens_per_s"] / trainer["tokens_per_s"]
    assert "6b-lora: to_full " in finished.stdout


def test_a_gpu_bench_without_time_names_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu_parts

    assert gpu_parts.measured("6b-lora", ["device=cpu"], [], time.monotonic() + 30) == {"skipped": "no time was left"}
    monkeypatch.setattr(gpu_parts, "LIMIT_S", 0.2)
    found = gpu_parts.measured("6b-lora", ["device=cpu"], [], time.monotonic() + 100)
    assert found == {"skipped": "it took more than 0 s"}
    monkeypatch.setattr(gpu_parts, "LIMIT_S", 100.0)
    found = gpu_parts.measured("6b-lora", ["device=cpu"], ["zero.stag=1"], time.monotonic() + 100)
    assert str(found["skipped"]).startswith("it failed: ")
    assert "unknown key 'zero.stag'" in capsys.readouterr().out


def test_seconds_of_kernels_are_of_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of kernels as an H200 has them; neither the host's calls nor PyTorch's own ranges are kernels."""
    rows = [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "CUDA", 2e6, 3),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>", "CUDA", 1e6, 2),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "CUDA", 0.5e6, 1),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "CUDA", 4e6, 9),
        ("Optimizer.step#AdamW.step", "CUDA", 0.5e6, 1),
        ("cudaLaunchKernel", "CPU", 0.0, 15),
    ]
    events = [
        SimpleNamespace(key=key, device_type=f"DeviceType.{device}", self_device_time_total=time, count=count)
        for key, device, time, count in rows
    ]
    profile = mock.MagicMock()
    profile.return_value.__enter__.return_value.key_averages.return_value = events
    monkeypatch.setattr(gpu.torch.profiler, "profile", profile)
    found = gpu.kernel_seconds(lambda: None)
    assert found["kernels_s"] == {"matrix products": 2.0, "attention": 1.0, "optimizer": 0.5, "others": 4.0}
    assert found["kernels"] == 15 and found["longest"][0][1:] == [9, 4.0]


def test_a_gpu_bench_that_is_stopped_leaves_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time on GPUs ends when it ends: the file is whole after each part, and what it held before stays."""
    from benchmarks import gpu_parts

    output, held, ends = tmp_path / "gpu.json", list[list[str]](), list[float]()
    output.write_text('["earlier"]')

    def measured(name: str, is_tiny: bool, overrides: list[str], until: float) -> dict[str, object]:
        ends.append(until)
        earlier, *results = json.loads(output.read_text())
        assert earlier == "earlier" and [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
        held.append([part for result in results for part in result["parts"]])
        if len(held) == 3:
            raise KeyboardInterrupt
        return {"size": {"layers": 2}, "tokens_per_s": 3.0, "mfu": 0.5}

    monkeypatch.setattr(gpu_parts, "measured", measured)
    monkeypatch.setattr(gpu_parts.allocator, "set_allocator", lambda environ: None)
    monkeypatch.setattr(gpu_parts.results, "describe_environment", lambda world_size: {})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    names = ["6b-full-zero1", "6b-lora", "9b-lora"]
    with pytest.raises(KeyboardInterrupt):
        gpu_parts.run(["device=cpu", f"parts={','.join(names)}", f"output={output}", "minutes=2"], started=1000.0)
    assert held == [[], names[:1], names[:2]]
    assert json.loads(output.read_text())[1]["marks"]["6b-lora"] == {"to_full": 1.0, "goal": 1.3}
    assert ends == [1120.0] * 3


def test_the_minutes_of_a_gpu_bench_begin_before_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 29 s on a busy machine, of ten minutes."""
    times: dict[str, float] = {}

    class Slow(ModuleType):
        def __getattr__(self, name: str) -> Callable[..., int]:
            times.setdefault("imported", time.monotonic())
            return lambda words, started: times.update(started=started) or 0

    monkeypatch.setitem(sys.modules, "benchmarks.gpu_parts", Slow("gpu_parts"))
    monkeypatch.setattr("toolkit.distributed.exits.run_guarded", lambda function: function())
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    before = time.monotonic()
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts" / "bench_gpu"), run_name="__main__")
    assert before < times["started"] < times["imported"]


def test_the_page_of_gpus_is_written_from_the_results(tmp_path: Path) -> None:
    """The newest result on a GPU counts, those of CPUs never; the pages are those that the script writes."""
    from scripts import gpu_page

    files = list((ROOT / "benchmarks").glob("*.json"))
    for language, name in enumerate(gpu_page.PAGES):
        file = ROOT / "docs" / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        assert text == (gpu_page.page(files, language) if gpu_page.newest(files) else ""), "run gpu_page.py"
    assert set(gpu_page.PARTS) == set(gpu.PARTS) and {part.mark for part in gpu.PARTS.values()} == set(gpu_page.MARKS)

    def result(device: str, speed: float) -> dict[str, Any]:
        row = {"tokens_per_s": speed, "size": {"layers": 28}, "device_memory_peak_bytes": 3 << 30}
        known = {"commit": "0123456789", "machine": {"gpus": ["NVIDIA H200, 143771 MiB"]}}
        whole = {"measured": "gpu", "device": device, "environment": known}
        parts = {"6b-full-zero1": row, "6b-lora": {"skipped": "no time was left"}}
        return {**whole, "parts": parts, "marks": {"6b-full-zero1": {"mfu": 0.47, "goal": 0.45}}}

    for name, found in (
        ("2026-12-01", [result("gpu", 1.0)]),
        ("2026-12-02", [result("gpu", 12345.6), result("cpu", 7)]),
    ):
        (tmp_path / f"{name}-gpu.json").write_text(json.dumps(found))
    lines = gpu_page.page(list(tmp_path.iterdir()), 0).splitlines()
    assert (
        "| ChatGLM3-6B, full, ZeRO-1, packed | 12,346 | MFU 0.47 | 0.45 | 3.0 GiB |  | "
        "NVIDIA H200, 143771 MiB; 28 layers; 0123456 |"
    ) in lines
    assert sum("not measured" in line for line in lines if line.startswith("|")) == len(gpu_page.STAGES)
    rest = lines[lines.index("Not measured yet:") + 2 :]
    rest = rest[: rest.index("")]
    assert len(rest) == len(gpu.PARTS) - 1 and "- ChatGLM3-6B, LoRA, packed" in rest


def test_the_marks_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand; parts of another size are not compared. On a GPU a model that does not fit has fewer layers."""
    size = {"size": {"layers": 28}}
    found: dict[str, dict[str, Any]] = {
        "6b-full-zero1": {**size, "tokens_per_s": 100.0, "mfu": 0.5, "mfu_matmul": 0.6},
        "6b-lora": {**size, "tokens_per_s": 140.0},
        "6b-trainer": {"size": {"layers": 20}, "tokens_per_s": 50.0},
        "6b-full-padded": {**size, "tokens_per_s": 25.0},
        "9b-lora": {"skipped": "no time was left"},
    }
    assert gpu.marks(found) == {
        "6b-full-zero1": {"mfu": 0.5, "goal": 0.45},
        "6b-lora": {"to_full": 1.4, "goal": 1.3},
        "6b-full-padded": {"ours_to_it": 4.0, "goal": 1.0},
    }
    layers = {}
    for total in (79, 140):  # GiB that an H100 and an H200 have
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda total=total: (total << 30, 0))
        layers[total] = {name: gpu.size_of(name, False).layers for name in ("6b-full-zero1", "6b-lora", "9b-lora")}
    assert layers[140] == {"6b-full-zero1": 28, "6b-lora": 28, "9b-lora": 40}
    assert 10 < layers[79]["6b-full-zero1"] == layers[79]["6b-lora"] < 28 and layers[79]["9b-lora"] == 40
