"""Packages of other versions than the toolkit knows: one message, before torch is imported."""

from pathlib import Path

import pytest

from toolkit.config.requirements import DISTRIBUTION, check_packages
from toolkit.messages import LaunchError

WANTED = (
    "numpy>=1.20",
    "deepspeed<0.19.8",
    "no-such-one",
    "neither; extra == 'serve'",
    "nor; python_version < '3'",
)


def install(folder: Path, *wanted: str) -> None:
    """Write the metadata of a package that needs others."""
    (folder / "some_toolkit-1.dist-info").mkdir()
    lines = ["Metadata-Version: 2.1", "Name: some-toolkit", "Version: 1", *(f"Requires-Dist: {one}" for one in wanted)]
    (folder / "some_toolkit-1.dist-info" / "METADATA").write_text("\n".join(lines) + "\n")


def test_all_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, *WANTED)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        LaunchError, match=r"installed: deepspeed<0\.19\.8 \(0\.\d+\.\d+\), no-such-one \(not installed\)\."
    ):
        check_packages("some-toolkit")


def test_the_package_is_asked_for_by_its_own_name() -> None:
    """An unknown name has no requirements: no package would be compared."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nname = "{DISTRIBUTION}"\n' in project


def test_what_is_right_or_unknown_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages("no-toolkit-of-this-name")
    install(tmp_path, "numpy>=1.20", "torch>=2.0")
    monkeypatch.syspath_prepend(tmp_path)
    check_packages("some-toolkit")
