"""Versions of what the toolkit needs: each combination, or set, in an environment of its own (prove_versions)."""

import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks import overlay, results
from toolkit import children
from toolkit.command_line import one_of
from toolkit.config.requirements import DISTRIBUTION
from toolkit.messages import ConfigError

ROOT = Path(__file__).absolute().parents[1]

PACKAGES = ("deepspeed", "torch", "transformers")
SETS = ("oldest", "pinned", "newest")
"""Of all packages that pyproject.toml names: what it allows at least, what is installed here, what the index has."""
RECIPE = ("recipe=quickstart", "optim.torch=true", "distributed.cpu_shared_memory=false")
SMALL = ("batch.micro_per_gpu=1", "batch.global_size=4")
BRIEF = ("train.max_steps=40", "schedule.warmup_steps=5", "run.name=quickstart")
LIMIT_S = 1800


def _prove(*words: str) -> tuple[str, ...]:
    command = ("toolkit", "prove", "--num_gpus", "2", *RECIPE, *SMALL, *words)
    return (*command, "run.dir={work}", "steps=4", "output={work}/found.json")


CHECKS = {
    "gradients": ("benchmarks.gradients", "{work}/found.json"),
    "parity": ("pytest", "-q", "--tier=default", "-p", "no:cacheprovider", "tests/parity"),
    "quickstart": ("toolkit", "launch", "--num_gpus", "2", *RECIPE, *BRIEF, "run.dir={work}"),
    "zero0": _prove("zero=stage0", "precision=fp32"),
    "zero1": _prove("zero=stage1", "precision=fp32"),
    "zero2": _prove("zero=stage2", "precision=bf16", "train.activation_checkpointing.enabled=true"),
    "zero3-packed": _prove("zero=stage3", "precision=bf16", "data.packing=packed"),
    "lora-packed": _prove("zero=stage2", "precision=bf16", "data.packing=packed", "tuning=lora"),
}
"""Programs of this checkout, each right if it ends with 0. `toolkit prove` compares losses, gradient norms, a resumed
run and the logits of the export with a plain loop; the quick start evaluates, saves and exports as a user's does. What
ChatGLM computes, trains and generates is held against the original code by tests/parity."""


class Cell(NamedTuple):
    """Versions that are judged together."""

    title: str
    install: list[str]
    """The arguments of `pip install` that make them of what is installed here."""
    is_allowed: bool = True
    """By pyproject.toml."""


def installed(name: str) -> str:
    """Return the version here, without where it was built."""
    return metadata.version(name).partition("+")[0]


def bounds() -> list[Requirement]:
    """Return what pyproject.toml asks for, as it was when this environment was made."""
    return [Requirement(one) for one in metadata.requires(DISTRIBUTION) or () if "extra ==" not in one]


def is_allowed(versions: dict[str, str]) -> bool:
    """Whether pyproject.toml allows a combination."""
    return all(one.specifier.contains(versions[one.name]) for one in bounds() if one.name in versions)


def combinations(lists: dict[str, list[str]]) -> list[Cell]:
    """Return the combinations of some versions of each package."""
    cells = []
    for choice in itertools.product(*lists.values()):
        versions = dict(zip(lists, choice, strict=True))
        changed = [f"{name}=={version}" for name, version in versions.items() if version != installed(name)]
        title = ", ".join(f"{name} {version}" for name, version in versions.items())
        cells.append(Cell(title, changed, is_allowed(versions)))
    return cells


def set_of(name: str) -> Cell:
    """Return one of `SETS`. pip chooses the newest, so that they go together; the oldest have to, as they are."""
    if name == "newest":
        return Cell(name, ["--upgrade", *map(str, bounds())])
    lowest = [one for one in bounds() if any(part.operator == ">=" for part in one.specifier)]
    return Cell(name, [f"{one.name}=={_oldest(one)}" for one in lowest] if name == "oldest" else [])


def _oldest(one: Requirement) -> str:
    """Return the oldest version on the index that a requirement accepts."""
    command = [sys.executable, "-m", "pip", "index", "versions", one.name]
    found = children.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    listed = re.search(r"^Available versions: (.*)$", found.stdout, re.MULTILINE)
    versions = [text for text in listed[1].split(", ") if one.specifier.contains(text)] if listed else []
    if not versions:
        raise ConfigError(f"the package index has no {one}: {found.stderr.strip()[-300:]}")
    return min(versions, key=Version)


def environment(folder: Path, cell: Cell) -> Path:
    """Make an environment over this one's packages, unless it is there; return its Python."""
    python = overlay.make(folder, cell.install)
    told = next(folder.glob("lib/python*/site-packages")) / f"{DISTRIBUTION}-0.dist-info"
    if not cell.is_allowed and not told.exists():  # found before the one below, without bounds that runs are held to
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n", encoding="utf-8")
    return python


def judge(python: Path, checks: list[str], words: list[str]) -> dict[str, Any]:
    """Return the versions of an environment, and what each check finds there.

    Args:
        python: its Python.
        checks: of `CHECKS`.
        words: overrides for all that train.
    """
    environ = os.environ | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parents[1]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        # Ops that another version of PyTorch built cannot be loaded.
        "TORCH_EXTENSIONS_DIR": f"{python.parents[1]}/torch_extensions",
    }
    names = [one.name for one in bounds()]
    program = "import sys; from importlib import metadata; print(*map(metadata.version, sys.argv[1:]))"
    told = children.run([str(python), "-c", program, *names], env=environ, capture_output=True, text=True, check=True)
    found: dict[str, Any] = {"versions": dict(zip(names, told.stdout.split(), strict=True)), "checks": {}}
    for name in checks:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            command = [str(python), "-m", *(word.format(work=work) for word in CHECKS[name])]
            command += words if CHECKS[name][0] == "toolkit" else []
            try:
                ran = children.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
                lines = (ran.stdout + ran.stderr).strip().splitlines() or ["?"]
                code, last = ran.returncode, re.sub(r" \(/\S+\)", "", lines[-1])
            except TimeoutExpired:
                code, last = 124, f"no end within {LIMIT_S} s"
            row: dict[str, Any] = {"is_right": code == 0, "seconds": round(time.monotonic() - begun)}
            if code:
                row["said"] = last
            if (output := Path(work, "found.json")).exists():
                row |= _figures(json.loads(output.read_text(encoding="utf-8")))
        found["checks"][name] = row
        print(f"  {name}: {'right' if row['is_right'] else row['said']} ({row['seconds']} s)", flush=True)
    return found | {"is_right": all(row["is_right"] for row in found["checks"].values())}


def _figures(told: Any) -> dict[str, Any]:
    if isinstance(told, dict):
        return {"findings": told["findings"], "suspects": told["suspects"]}
    wrong = [row for row in told if not row.get("is_right", True)]
    return {"cases": len(told), "refused": sum("error" in row for row in told), "wrong": wrong}


def run(arguments: list[str]) -> int:
    """Judge all combinations, or sets; return in how many something is wrong."""
    own = (*PACKAGES, "sets", "checks", "ungated", "folder", "output")
    given = dict(word.split("=", 1) for word in arguments if word.partition("=")[0] in own)
    words = [word for word in arguments if word.partition("=")[0] not in own]
    ungated = one_of(given, "ungated", ("false", "true")) == "true"
    checks = _listed(given, "checks", tuple(CHECKS))
    if "sets" in given and set(PACKAGES) & set(given):
        raise ConfigError("sets names versions of all packages: leave out deepspeed, torch and transformers.")
    output = given.get("output") or f"benchmarks/{time.strftime('%Y-%m-%d')}-versions.json"
    before = results.earlier(output)
    lists = {name: (given.get(name) or installed(name)).split(",") for name in PACKAGES}
    cells = [set_of(name) for name in _listed(given, "sets", SETS)] if "sets" in given else combinations(lists)
    folder = Path(given.get("folder") or tempfile.mkdtemp(prefix="versions-")).absolute()
    wrong = 0
    try:
        for cell in cells:
            if not cell.is_allowed and not ungated:
                print(f"{cell.title}: excluded by pyproject.toml; judge it with ungated=true", flush=True)
                continue
            python = environment(folder / re.sub(r"\W+", "-", cell.title), cell)
            print(f"{cell.title}:", flush=True)
            found = judge(python, checks, words)
            wrong += not found["is_right"]
            told = {"measured": "versions", "title": cell.title, "allowed": cell.is_allowed, **found}
            before.append(results.append_result(output, before, ["scripts/prove_versions", *arguments], told, 2))
    finally:
        if "folder" not in given:
            shutil.rmtree(folder, ignore_errors=True)
    return wrong


def _listed(given: dict[str, str], name: str, known: tuple[str, ...]) -> list[str]:
    """Return an argument that lists some of the known values, all of them if it was not given."""
    found = given[name].split(",") if name in given else list(known)
    if unknown := [one for one in found if one not in known]:
        raise ConfigError(f"{name}: unknown {', '.join(unknown)}. There are {', '.join(known)}.")
    return found
