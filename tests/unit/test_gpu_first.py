"""scripts/gpu_first: its stages are run one by one, and what each found is kept, whatever becomes of the next."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_first, overlay, results, wheels
from benchmarks.gpu_first import STAGES, Stage
from toolkit.messages import ConfigError, LaunchError


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Stage]:
    """A table of stages that is empty at first."""
    table: dict[str, Stage] = {}
    monkeypatch.setattr(gpu_first, "STAGES", table)
    monkeypatch.setattr(gpu_first, "LEAST_S", 0.1)
    monkeypatch.setattr(gpu_first, "ON_CPU", 1)
    monkeypatch.setattr(results, "describe_environment", lambda ranks: {"commit": ""})
    return table


def shell(command: str, limit_s: int = 60, figures: dict[str, Any] | None = None, **options: Any) -> Stage:
    """Return a stage that runs a line of a shell."""
    return Stage(limit_s, ("sh", "-c", command), lambda output, log: figures or {}, **options)


def stages_in(output: Path) -> dict[str, Any]:
    """Return what the file of results holds."""
    (result,) = json.loads((output / "result.json").read_text())
    assert result["measured"] == "gpu_first" and result["device"] == "cpu"
    found: dict[str, Any] = result["stages"]
    return found


def test_a_stage_that_fails_or_hangs_costs_no_other(tmp_path: Path, stages: dict[str, Stage]) -> None:
    """What is there is in the file before the next stage begins; of one that is ended nothing goes on."""
    output = tmp_path / "out"
    stages |= {
        "good": shell("echo fine", figures={"speed": 2}),
        "bad": shell("echo first; echo the reason >&2; exit 3"),
        "hanging": shell(f"setsid sleep 300 & echo $! > {tmp_path}/child; wait", limit_s=1),
        "looking": shell("cp {output}/result.json {output}/seen.json", figures={"failed": ["tests/one"]}),
        "empty": Stage(60, ("true",), lambda output, log: json.loads((output / "none.json").read_text())),
        "gpu": shell("exit 1", is_for_cpus=False),
        "bench": Stage(60, ("test", gpu_first._PARTS, "=", "parts=9b-lora"), lambda output, log: {}),
    }
    assert gpu_first.run(["device=cpu", f"output={output}", "parts=9b-lora"], time.monotonic()) == 4
    found = stages_in(output)
    assert found["good"] == {"is_right": True, "seconds": found["good"]["seconds"], "figures": {"speed": 2}}
    assert found["bad"]["failed"] == "exit code 3: the reason" and (output / "bad.log").read_text().startswith("first")
    assert found["hanging"]["failed"] == "it took more than 1 s" and found["hanging"]["seconds"] < 30
    assert not Path("/proc", (tmp_path / "child").read_text().strip()).exists()
    assert found["looking"]["failed"] == "tests/one"
    assert found["empty"]["failed"].startswith("there are no figures: FileNotFoundError")
    assert found["bench"]["is_right"]
    assert found["gpu"] == {"skipped": "CPU ranks cannot do it"}
    assert list(json.loads((output / "seen.json").read_text())[0]["stages"]) == ["good", "bad", "hanging"]
    with pytest.raises(ConfigError, match="holds the result of another call"):
        gpu_first.run(["device=cpu", f"output={output}"], time.monotonic())


def test_the_seconds_hold_for_all_stages(tmp_path: Path, stages: dict[str, Stage]) -> None:
    """From the start of the first program on, which may have installed wheels before."""
    stages |= {"first": shell("sleep 300"), "second": shell("true"), "third": shell("true")}
    (tmp_path / "packed.json").write_text('{"commit": "abc"}')
    words = ["device=cpu", "stages=first,third", "seconds=12", f"output={tmp_path}/out"]
    given = [*words, f"since={time.monotonic() - 10}", f"packed={tmp_path}/packed.json"]
    assert gpu_first.run(given, time.monotonic()) == 1
    found = stages_in(tmp_path / "out")
    assert list(found) == ["first", "third"] and found["first"]["failed"].startswith("it took more than ")
    assert found["third"] == {"skipped": "no time was left"}
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["packed"] == {"commit": "abc"} and result["command"] == " ".join(["scripts/gpu_first", *words])


@pytest.mark.parametrize(
    ("word", "told"), [("stages=facts,fact", "unknown fact"), ("stage=facts", "knows no stage=facts")]
)
def test_what_is_mistyped_is_named(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        gpu_first.run([word], time.monotonic())


def test_the_stages_are_commands_that_exist() -> None:
    """Files that they name are there, recipes compose, and figures are found where the commands write them."""
    from toolkit.config.load import load

    first, *_, last = STAGES
    assert (first, last) == ("facts", "tests")
    for name, stage in STAGES.items():
        words = [word.format(python="python", device="cpu", bench="cpu", output="/out") for word in stage.command]
        named = [
            word.removeprefix("--deselect=") for word in words if word.startswith(("scripts/", "tests/", "--desel"))
        ]
        assert all((gpu_first.ROOT / word).is_file() for word in named), name
        if "recipe=quickstart" in words:
            load(
                [word for word in words[words.index("recipe=quickstart") :] if not word.startswith(("steps", "output"))]
            )
    assert [name for name, stage in STAGES.items() if not stage.is_for_cpus] == ["fp16"]


def test_figures_are_read_from_what_the_stages_leave(tmp_path: Path) -> None:
    """Of tests that were ended, those that have an outcome."""
    log = "tests/gpu/a.py::x[bf16-y] PASSED [ 5%]\ntests/gpu/a.py::y SKIPPED (it needs a GPU) [ 9%]\n"
    log += "tests/gpu/a.py::z FAILED [ 12%]\ntests/gpu/b.py::last "
    read = STAGES["tests"].read
    assert read(tmp_path, log) == {
        "passed": ["tests/gpu/a.py::x[bf16-y]"],
        "skipped": ["tests/gpu/a.py::y"],
        "failed": ["tests/gpu/a.py::z"],
    }
    (tmp_path / "bench.json").write_text(
        json.dumps([{"parts": {"a": {"tokens_per_s": 1}, "b": {"skipped": "?"}}, "marks": {}}])
    )
    assert STAGES["bench"].read(tmp_path, "")["failed"] == ["b"]
    folder = tmp_path / "runs" / "fp16"
    folder.mkdir(parents=True)
    rows: list[dict[str, float]] = [
        {"loss": 7.5, "step": 1, "tokens_per_s": 5},
        {"valid_loss": 1},
        {"loss": 4.5, "tokens_per_s": 9},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert STAGES["fp16"].read(tmp_path, "") == {"steps": 2, "first_loss": 7.5, "last_loss": 4.5, "tokens_per_s": 9}


def test_an_environment_over_another_has_its_own_first(tmp_path: Path) -> None:
    wheel = tmp_path / "tabulate-99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tabulate.py", "mine = True\n")
        told = "Metadata-Version: 2.1\nName: tabulate\nVersion: 99.0\n"
        file.writestr("tabulate-99.0.dist-info/METADATA", told)
        file.writestr("tabulate-99.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tabulate-99.0.dist-info/RECORD", "")
    words = ["--no-index", "--no-deps", str(wheel)]
    python = overlay.make(tmp_path / "over", words)
    code = (
        "from importlib import metadata as m; import tabulate, yaml; print(tabulate.mine, m.version('tabulate'), yaml)"
    )
    ran = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    import yaml

    assert ran.stdout.split()[:2] == ["True", "99.0"] and str(yaml.__file__) in ran.stdout
    import tabulate

    assert not hasattr(tabulate, "mine"), "what lies below is as it was"
    wheel.unlink()
    assert overlay.make(tmp_path / "over", words) == python, "it is there, so nothing is installed"


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is wanted and what that needs, but torch and what is there in a version that is accepted."""
    found = wheels.needed(
        ["torch>=2", "datasets>=5", "no-such-one"], {"pandas": "", "numpy": "1.0", "pyarrow": "99"}, "3.12"
    )
    pins = dict(
        line.split("==") for line in (wheels.ROOT / "constraints.txt").read_text().splitlines() if line.count("==") == 1
    )
    assert found["datasets"] == pins["datasets"] and found["no-such-one"] == ""
    assert "dill" in found and "numpy" in found, "what it needs, and what is too old there"
    assert not {"torch", "pandas", "pyarrow", "sympy"} & set(found)
    older, newer = (wheels.needed(["transformers"], {}, python)["transformers"] for python in ("3.10", "3.12"))
    assert older < newer, "constraints.txt has other versions for Python 3.10"


def test_packing_builds_what_has_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commands = tmp_path / "wheels", list[list[str]]()

    def run(command: list[str], **options: Any) -> None:
        if "pip" not in command:
            return
        commands.append(command)
        assert options["env"]["DS_BUILD_OPS"] == "0"
        names = ["a.whl", "b.tar.gz"] if "download" in command else ["b.whl"]
        for name in names:
            (folder / name).touch()

    monkeypatch.setattr(wheels.children, "run", run)
    monkeypatch.setattr(wheels, "commit", lambda: "abc")
    has = tmp_path / "has.txt"
    has.write_text("numpy==2.2.0\npandas @ file:///x\ntqdm\n")
    assert wheels.pack([str(folder), "python=3.12", f"has={has}"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["a.whl", "b.whl", "packed.json"]
    assert json.loads((folder / "packed.json").read_text()) == {"commit": "abc", "python": "3.12"}
    download, build = commands
    assert not [word for word in download if word.startswith(("numpy", "pandas", "tqdm", "torch"))]
    assert download[download.index("--python-version") + 1] == "3.12" and build[-1] == str(folder / "b.tar.gz")

    def fail(command: list[str], **options: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(wheels.children, "run", fail)
    with pytest.raises(LaunchError, match="pip could not pack them"):
        wheels.pack([str(folder)])
    with pytest.raises(ConfigError, match="holds something else"):
        wheels.pack([str(tmp_path)])
    assert has.exists()


def test_the_page_of_gpus_shows_the_stages(tmp_path: Path) -> None:
    from scripts import gpu_page

    row = {"tokens_per_s": 100.0, "size": {"layers": 28}}
    stages = {
        "kernels": {
            "is_right": False,
            "seconds": 9,
            "failed": "it took | long",
            "figures": {"passed": ["a::x", "a::y", "a::z"], "skipped": ["a::v"], "failed": []},
        },
        "bf16-packed": {
            "is_right": True,
            "seconds": 8,
            "figures": {"first_loss": 7.5, "last_loss": 4.25, "tokens_per_s": 1234.5},
        },
        "prove": {"is_right": True, "seconds": 7, "figures": {"is_right": True}},
        "bench": {"is_right": True, "seconds": 6, "figures": {"parts": {"6b-lora": row}, "marks": {}}},
        "fp16": {"skipped": "no time was left"},
    }
    known = {"commit": "", "machine": {"gpus": ["NVIDIA H100, 81559 MiB"]}}
    whole = {
        "measured": "gpu_first",
        "device": "gpu",
        "stages": stages,
        "packed": {"commit": "0123456789"},
        "environment": known,
        "notes": [["Both were alone.", "两者都单独运行。"]],
    }
    (tmp_path / "a.json").write_text(json.dumps([whole]))
    lines = gpu_page.page([tmp_path / "a.json"], 0).splitlines()
    source = "NVIDIA H100, 81559 MiB; 0123456"
    rows = {line.split(" | ")[0]: line for line in lines}
    (kernels,) = (line for line in lines if "test_gpu_kernels" in line)
    assert kernels.endswith(f"| 3 passed, 1 skipped, 0 failed; failed: it took / long | 9 | {source} |")
    assert rows["| quickstart, 40 steps, bf16, packed"].endswith(f"| loss 7.500 to 4.250 | 8 | {source} |")
    assert rows["| quickstart, 40 steps, fp16"].endswith("| not measured |  |  |")
    assert rows["| `toolkit prove`, quickstart, ZeRO-2, bf16, packed"].endswith(f"| right | 7 | {source} |")
    assert rows["| ChatGLM3-6B, LoRA, packed"].endswith("28 layers; 0123456 |")
    assert "- Both were alone." in lines
    assert {*gpu_page.STAGES, "facts", "bench"} == set(STAGES)


def test_help_needs_no_package() -> None:
    command = [sys.executable, "-S", "scripts/gpu_first", "--help"]
    ran = subprocess.run(
        command, cwd=gpu_first.ROOT, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]}
    )
    assert ran.returncode == 0 and all(name in ran.stdout for name in STAGES)
