"""scripts/prove_versions: which versions make up a set, and what is kept of the checks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks import overlay, results, versions
from toolkit.config.requirements import DISTRIBUTION
from toolkit.messages import ConfigError

BOUNDS = [Requirement(one) for one in ("torch>=2.10", "peft>=0.21,<0.22", "tokenizers")]
INDEX = {"torch": "2.15.0, 2.10.0, 2.9.1", "peft": "0.22.0, 0.21.10, 0.21.2, 0.20.0"}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the package index has."""
    known = dict(INDEX)

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        text = f"x (1)\nAvailable versions: {known[command[-1]]}\n  INSTALLED: 1\n" if command[-1] in known else ""
        return subprocess.CompletedProcess(command, 0, text, "ERROR: no such package")

    monkeypatch.setattr(versions.children, "run", run)
    monkeypatch.setattr(versions, "bounds", lambda: BOUNDS)
    return known


def test_the_sets_are_those_of_the_bounds(index: dict[str, str]) -> None:
    assert versions.set_of("oldest").install == ["torch==2.10.0", "peft==0.21.2"]
    assert versions.set_of("newest").install == ["--upgrade", "torch>=2.10", "peft<0.22,>=0.21", "tokenizers"]
    assert versions.set_of("pinned").install == []
    index["peft"] = "0.22.0"
    with pytest.raises(ConfigError, match="the package index has no peft"):
        versions.set_of("oldest")


def test_combinations_install_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "bounds", lambda: BOUNDS)
    monkeypatch.setattr(versions, "installed", {"torch": "2.13.0", "peft": "0.21.2"}.get)
    first, second = versions.combinations({"torch": ["2.13.0", "2.9.1"], "peft": ["0.21.2"]})
    assert first == versions.Cell("torch 2.13.0, peft 0.21.2", [], True)
    assert second == versions.Cell("torch 2.9.1, peft 0.21.2", ["torch==2.9.1"], False)


def test_what_the_checks_find_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails costs no other; the file is whole after each set."""
    proof = {"findings": {"losses": 1}, "suspects": [], "is_right": True, "settings": []}
    code = "import json, sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    (tmp_path / "write.py").write_text(code)
    rows = [{"is_right": True}, {"error": "?"}, {"is_right": False}]
    checks = {
        "gradients": ("write", "{work}/found.json", json.dumps(rows).replace("{", "{{").replace("}", "}}")),
        "zero0": ("write", "{work}/found.json", json.dumps(proof).replace("{", "{{").replace("}", "}}")),
        "failing": ("no_such_module",),
    }
    monkeypatch.setattr(versions, "CHECKS", checks)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "environment", lambda folder, cell: Path(sys.executable))
    monkeypatch.setattr(results, "describe_environment", lambda ranks: {})
    output = tmp_path / "found.json"
    assert versions.run(["sets=pinned", f"output={output}"]) == 1
    (found,) = json.loads(output.read_text())
    assert (found["title"], found["is_right"], found["allowed"]) == ("pinned", False, True)
    gradients, zero0, failing = found["checks"].values()
    assert (gradients["cases"], gradients["refused"], gradients["wrong"]) == (3, 1, [{"is_right": False}])
    assert zero0["is_right"] and zero0["findings"] == {"losses": 1} and "said" not in zero0
    assert not failing["is_right"] and "No module named no_such_module" in failing["said"]
    assert found["versions"]["torch"].startswith("2.")
    assert versions.run(["sets=pinned", "checks=zero0", f"output={output}"]) == 0
    assert [list(one["checks"]) for one in json.loads(output.read_text())] == [list(checks), ["zero0"]]


@pytest.mark.parametrize("words", [["sets=old"], ["checks=zero9"], ["sets=oldest", "torch=2.13.0"]])
def test_what_is_mistyped_is_named(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        versions.run([*words, f"output={tmp_path}/none.json"])


def test_versions_that_are_not_allowed_get_an_environment_without_bounds(tmp_path: Path) -> None:
    python = versions.environment(tmp_path / "other", versions.Cell("", [], is_allowed=False))
    assert python == overlay.make(tmp_path / "other", [])
    code = f"from importlib import metadata as m; print(m.requires({DISTRIBUTION!r}), m.version('torch'))"
    ran = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("None 2.")
