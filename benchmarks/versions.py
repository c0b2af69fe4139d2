"""Versions of DeepSpeed, PyTorch and transformers: each combination in an environment of its own (prove_versions)."""

import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path
from subprocess import TimeoutExpired

from packaging.requirements import Requirement

from benchmarks import results
from toolkit import children
from toolkit.arguments import one_of

ROOT = Path(__file__).absolute().parents[1]

PACKAGES = ("deepspeed", "torch", "transformers")
OWN = "deepspeed-finetuning-toolkit"
RECIPE = (
    *("recipe=quickstart", "precision=bf16", "zero=stage2", "train.activation_checkpointing.enabled=true"),
    *("optim.torch=true", "distributed.cpu_shared_memory=false", "batch.micro_per_gpu=1", "batch.global_size=4"),
)
LIMIT_S = 1800


def installed(name: str) -> str:
    """Return the version here, without where it was built."""
    return metadata.version(name).partition("+")[0]


def is_allowed(cell: dict[str, str]) -> bool:
    """Whether pyproject.toml allows a combination."""
    bounds = [Requirement(one) for one in metadata.requires(OWN) or ()]
    return all(one.specifier.contains(cell[one.name]) for one in bounds if one.name in cell)


def environment(folder: Path, cell: dict[str, str]) -> Path:
    """Make an environment over this one's packages, unless it is there; return its Python."""
    python = folder / "bin" / "python"
    done = folder / "done"
    if done.exists():
        return python
    venv.create(folder, with_pip=False, clear=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    below = sysconfig.get_path("purelib")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")
    changed = [f"{name}=={version}" for name, version in cell.items() if version != installed(name)]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-build-isolation"]
    for one in changed:
        others = [] if one.startswith("torch==") else ["--no-deps"]  # torch alone brings libraries of its own version
        children.run([*pip, *others, one], check=True)
    if not is_allowed(cell):  # found before the one below, and without bounds that a run would hold against it
        told = packages / f"{OWN.replace('-', '_')}-0.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {OWN}\nVersion: 0\n", encoding="utf-8")
    done.touch()
    return python


def judge(folder: Path, cell: dict[str, str], words: list[str]) -> dict[str, object]:
    """Return what the two checks find of a combination."""
    python = environment(folder / "-".join(f"{name}{version}" for name, version in cell.items()), cell)
    environ = os.environ | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parents[1]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    found: dict[str, object] = {"versions": cell, "allowed": is_allowed(cell)}
    with tempfile.TemporaryDirectory() as work:
        gradients, proof = Path(work, "gradients.json"), Path(work, "proof.json")
        commands = {
            "gradients": [str(python), "-m", "benchmarks.gradients", str(gradients)],
            "prove": [str(python), "-m", "toolkit", "prove", "--num_gpus", "2", *words, f"run.dir={work}", "steps=4"],
        }
        commands["prove"] += [f"output={proof}"]
        for name, command in commands.items():
            begun = time.monotonic()
            try:
                ran = children.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
                lines = (ran.stdout + ran.stderr).strip().splitlines() or ["?"]
                code, last = ran.returncode, re.sub(r" \(/\S+\)", "", lines[-1])
            except TimeoutExpired:
                code, last = 124, f"no end within {LIMIT_S} s"
            found[f"{name}_s"] = round(time.monotonic() - begun)
            found[name] = "right" if code == 0 else last
        if gradients.exists():
            rows = json.loads(gradients.read_text(encoding="utf-8"))
            wrong = [row for row in rows if not row.get("is_right", True)]
            found["cases"], found["refused"] = len(rows), sum("error" in row for row in rows)
            found["gradients"] = wrong or "right"
        if proof.exists():
            told = json.loads(proof.read_text(encoding="utf-8"))
            found["findings"], found["suspects"] = told["findings"], told["suspects"]
            found["prove"] = "right" if told["is_right"] else "deviates"
    found["is_right"] = found["gradients"] == "right" and found["prove"] == "right"
    return found


def run(arguments: list[str]) -> int:
    """Judge all combinations; return in how many something is wrong."""
    own = (*PACKAGES, "ungated", "folder", "output")
    given = dict(word.split("=", 1) for word in arguments if word.partition("=")[0] in own)
    words = [*RECIPE, *(word for word in arguments if word.partition("=")[0] not in own)]
    ungated = one_of(given, "ungated", ("false", "true")) == "true"
    output = given.get("output") or f"benchmarks/{time.strftime('%Y-%m-%d')}-versions.json"
    before = results.earlier(output)
    lists = {name: (given.get(name) or installed(name)).split(",") for name in PACKAGES}
    folder = Path(given.get("folder") or tempfile.mkdtemp(prefix="versions-")).absolute()
    wrong = 0
    try:
        for versions in itertools.product(*lists.values()):
            cell = dict(zip(lists, versions, strict=True))
            title = ", ".join(f"{name} {version}" for name, version in cell.items())
            if not is_allowed(cell) and not ungated:
                print(f"{title}: excluded by pyproject.toml; judge it with ungated=true", flush=True)
                continue
            found = judge(folder, cell, words)
            wrong += not found["is_right"]
            print(f"{title}: {json.dumps({key: found[key] for key in ('gradients', 'prove')})}", flush=True)
            command = ["scripts/prove_versions", *arguments]
            before.append(results.append_result(output, before, command, {"measured": "versions", **found}, 2))
    finally:
        if "folder" not in given:
            shutil.rmtree(folder, ignore_errors=True)
    return wrong
