"""The wheel holds what the package reads and runs away from the checkout; scripts/environment.sh shows its stages."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import installed
import pytest

ROOT = Path(__file__).parents[2]
PACKED = {"conf": "toolkit/_conf", "examples/data": "toolkit/_examples", "recipes": "toolkit/_recipes"}
"""Directory of the checkout -> where a wheel has it."""
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
exit 0
"""


def pip(*words: str) -> None:
    """Run pip without the network."""
    command = [sys.executable, "-m", "pip", *words, "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; setuptools leaves files in what it builds from, so that is a copy."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("toolkit", "conf", "recipes", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def test_a_wheel_holds_each_file_of_the_package(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [path for path in (ROOT / "toolkit").rglob("*.*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {str(path.relative_to(ROOT)) for path in sources}
    for folder, place in PACKED.items():
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".md"]
        assert files
        expected |= {f"{place}/{path.relative_to(ROOT / folder)}" for path in files}
    assert packed == expected


def test_an_installed_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--target", str(site), str(wheel))

    def run(*command: str) -> str:
        env = os.environ | {"PYTHONPATH": str(site), "LC_ALL": "C.UTF-8"}
        finished = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    code = (
        "import toolkit; from toolkit.config import files; "
        "examples = files.shipped_folder('examples/data', '_examples'); "
        "print(toolkit.__file__, files.conf_folder(), *files.recipe_folders(), examples, sep='\\n')"
    )
    places = run(sys.executable, "-c", code).splitlines()
    assert len(places) == 4
    assert all(Path(place).is_relative_to(site) for place in places), places
    toolkit = str(site / "bin" / "toolkit")
    listed = run(toolkit, "recipes")
    assert all(path.stem in listed for path in (ROOT / "recipes").glob("*.yaml"))
    run(toolkit, "check", "recipe=zero1", "model=glm_tiny")
    run(toolkit, "export-config", "recipe=chatglm", "world_size=2", "total_steps=10", "output=ds_config.json")
    assert (elsewhere / "ds_config.json").is_file()


def test_each_stage_of_the_environment_is_shown_with_its_seconds(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    venv = tmp_path / "venv"

    def source() -> list[str]:
        script = f'extras="[serve]"; source {ROOT}/scripts/environment.sh; echo "$summary"'
        environ = {"PYTHON": str(python), "TOOLKIT_VENV": str(venv), "TOOLKIT_NO_INSTALL": "", "PIP_INDEX_URL": "-"}
        env = os.environ | environ
        ran = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
        return ran.stdout.splitlines()

    lines = source()
    begun = [line for line in lines if line.startswith("== ") and ": done in " not in line]
    assert [line.split(":")[0] for line in begun] == ["== venv", "== torch", "== packages", "== bytecode"]
    ended = [line.split(" done in ")[0] for line in lines if ": done in " in line]
    assert ended == ["== venv:", "== torch:", "== packages:", "== bytecode:"]
    assert "torch==" in begun[1] and "-c constraints.txt -e .[serve]" in begun[2]
    assert lines[-1].startswith("venv ") and lines[-1].endswith(" s")
    assert [line for line in source() if line] == [f"== environment: {venv} is up to date"]


def test_a_full_disk_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    df = tmp_path / "df"
    df.write_text("#!/bin/sh\necho header\necho /dev/x 9 9 1900000 99% /\n")
    df.chmod(0o755)
    words = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOOLKIT_VENV": str(tmp_path / "venv"), "extras": ""}
    finished = run_script("source scripts/environment.sh; echo too far", **words)
    assert finished.returncode == 2 and not finished.stdout
    assert finished.stderr == f"{tmp_path}/venv needs 2 GB of disk, 8 with PyTorch for CUDA; 1 GB are free.\n"


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """An environment whose Python notes its arguments, and is this one where its own program is asked."""
    (tmp_path / "ready/bin").mkdir(parents=True)
    python = tmp_path / "ready/bin/python3"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$1" in *installed.py) exec {sys.executable} "$@";; esac\n'
    )
    python.chmod(0o755)
    return tmp_path / "ready"


def run_script(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash from the checkout, in no environment but the one that is given."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "TOOLKIT_VENV")}
    env = kept | environ
    return subprocess.run(["bash", "-c", command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("variable", ["TOOLKIT_VENV", "VIRTUAL_ENV", "PATH"])
def test_an_environment_that_is_there_is_taken_as_it_is(ready: Path, variable: str) -> None:
    place = f"{ready}/bin:{os.environ['PATH']}" if variable == "PATH" else str(ready)
    finished = run_script("scripts/test --no-install gpu -k sampler", **{variable: place})
    assert finished.returncode == 0, finished.stderr
    assert f"== environment: {ready}/bin/python3 as it is" in finished.stdout
    asked = (ready.parent / "asked").read_text().splitlines()
    assert asked[0] == "scripts/installed.py pytest pytest-timeout" and asked[1].startswith("-c import sys, torch")
    assert asked[2:] == ["scripts/build_ops.py", "-m pytest --tier=all tests/gpu -k sampler"]
    assert [path.name for path in ready.rglob("*")] == ["bin", "python3"], "nothing is put into it"


def test_what_such_an_environment_lacks_is_named(ready: Path) -> None:
    words = {"TOOLKIT_VENV": str(ready), "TOOLKIT_NO_INSTALL": "1", "needed": "no-such-one"}
    finished = run_script("source scripts/environment.sh; echo too far", **words)
    assert finished.returncode == 2 and "too far" not in finished.stdout
    assert finished.stderr.count("\n") == 1
    assert " lacks no-such-one (there is nothing). Nothing was installed. To do so:  " in finished.stderr
    finished = run_script("scripts/quickstart", TOOLKIT_VENV=f"{ready}/none", TOOLKIT_NO_INSTALL="1")
    assert (finished.returncode, finished.stderr) == (2, f"There is no {ready}/none/bin/python3 to be used as it is.\n")
    bench = subprocess.run(
        [sys.executable, "-S", ROOT / "scripts/bench_gpu"], capture_output=True, text=True, timeout=60
    )
    assert bench.returncode == 2 and " lacks packaging " in bench.stderr and "Traceback" not in bench.stderr


def test_packages_are_accepted_by_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.lacking("pytest", "pytest-timeout") == {}
    versions = {"torch": "2.10.0a0+b4e4ee81d3.nv25.12", "deepspeed": "0.18.9", "numpy": "1.26.4"}
    version = installed.metadata.version
    monkeypatch.setattr(installed.metadata, "version", lambda name: versions.get(name) or version(name))
    assert installed.lacking() == {
        "deepspeed<0.20,>=0.19.8": "0.18.9",
        "numpy>=2": "1.26.4",
    }


CPU, CU126 = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    ("gpus", "environ", "index"),
    [
        ("", {}, CPU),
        ("570.86.15, 8.9", {}, CU126),
        ("580.65.06, 8.9", {}, ""),
        # A V100 has no kernels in CUDA 13, an RTX 5090 none in CUDA 12.6.
        ("580.65.06, 7.0", {}, CU126),
        ("580.65.06, 12.0", {}, ""),
        ("580.65.06, 8.9\n580.65.06, 6.1", {}, CU126),
        # An old nvidia-smi knows no compute_cap; a virtual GPU may not say it.
        ("470.57.02", {}, CU126),
        ("580.65.06, [N/A]", {}, ""),
        ("", {"PIP_INDEX_URL": "https://mirror.example/simple"}, CPU),
        ("", {"CONFIGURED": "global.index-url='https://mirror.example/simple'"}, CPU),
        ("", {"PIP_EXTRA_INDEX_URL": "https://mine.example"}, "https://mine.example"),
        ("", {"CONFIGURED": "global.extra-index-url='https://mine.example'"}, ""),
        ("", {"UNREACHABLE": "1"}, ""),
    ],
)
def test_the_build_of_pytorch_fits_the_machine(gpus: str, environ: dict[str, str], index: str, tmp_path: Path) -> None:
    """The build that has kernels for the GPU and takes its driver; an additional index of one's own stays."""
    ran = choose_torch(gpus, environ, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == (f"{index}\n" if index else "")
    assert ("PIP_FIND_LINKS" in ran.stderr) is ("UNREACHABLE" in environ)


def test_a_gpu_that_no_build_fits_is_told_to_update_its_driver(tmp_path: Path) -> None:
    ran = choose_torch("570.86.15, 12.0", {}, tmp_path)
    assert ran.returncode == 2
    assert "driver before 580: update the driver" in ran.stderr


def choose_torch(gpus: str, environ: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run scripts/torch_build.sh on a machine whose nvidia-smi prints `gpus`, "" where there is none."""
    (folder / "bin").mkdir()
    unknown = 'case "$*" in *compute_cap*) exit 2;; esac; ' if "," not in gpus else ""
    programs = {
        "python": 'case "$*" in *"config list"*) echo "$CONFIGURED";; *) [ -z "$UNREACHABLE" ];; esac',
        "nvidia-smi": f"{unknown}printf '{gpus}\n'" if gpus else "exit 9",
    }
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = kept | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | environ
    command = ["scripts/torch_build.sh", str(folder / "bin" / "python")]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
