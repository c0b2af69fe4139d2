"""Wheels of what the toolkit and its tests need beside torch, for a machine without an index (scripts/gpu_first)."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from subprocess import CalledProcessError

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from toolkit import children
from toolkit.config.requirements import DISTRIBUTION
from toolkit.messages import ConfigError, LaunchError
from toolkit.train.run_dir import commit

ROOT = Path(__file__).absolute().parents[1]
TESTS = ("pytest", "pytest-timeout")
PACKED = "packed.json"
"""Says of which commit and for which Python the wheels beside it are."""
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")


def needed(wanted: Sequence[str], there: Mapping[str, str], python: str) -> dict[str, str]:
    """Return package -> version (as constraints.txt has it, "" if it does not) of all that has to be brought.

    Args:
        wanted: requirements; of those that are installed here, what they require is wanted, too.
        there: package -> version of what need not be brought if it is accepted.
        python: version of Python there, such as 3.12.
    """
    target = {**_markers_here(), "python_version": python, "python_full_version": f"{python}.0"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [
        pin for pin in map(Requirement, (one for one in lines if not one.startswith("#"))) if _holds(pin, target, ())
    ]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    left, found = [Requirement(one) for one in wanted], dict[str, str]()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if name in found or name == "torch" or _is_accepted(one, there.get(name)):
            continue
        found[name] = versions.get(name, "")
        left += [more for more in _required_by(name) if _holds(more, target, one.extras)]
    return dict(sorted(found.items()))


def _markers_here() -> dict[str, str]:
    return {name: str(value) for name, value in default_environment().items()}


def _holds(one: Requirement, target: Mapping[str, str], extras: set[str] | tuple[str, ...]) -> bool:
    return one.marker is None or any(one.marker.evaluate({**target, "extra": extra}) for extra in ("", *extras))


def _is_accepted(one: Requirement, version: str | None) -> bool:
    try:
        return version == "" or (version is not None and one.specifier.contains(Version(version).base_version))
    except InvalidVersion:
        return False


def _required_by(name: str) -> Iterator[Requirement]:
    try:
        yield from map(Requirement, metadata.requires(name) or ())
    except metadata.PackageNotFoundError:  # asked for, and not installed here
        return


def pack(words: list[str]) -> int:
    """Fill a directory with wheels; return 0."""
    given = dict(word.split("=", 1) for word in words if word.startswith(("python=", "has=")))
    names = [word for word in words if not word.startswith(("python=", "has="))]
    if not names:
        raise ConfigError("scripts/gpu_first pack wants a directory for the wheels.")
    folder, python = Path(names[0]), given.get("python", "{}.{}".format(*sys.version_info))
    if (folder / "environment").exists() or (
        folder.exists() and not (folder / PACKED).exists() and any(folder.iterdir())
    ):
        raise ConfigError(f"{folder} holds something else. Choose a directory that is empty or not there.")
    there = _freeze(Path(given["has"])) if "has" in given else {}
    wanted = [*(one for one in metadata.requires(DISTRIBUTION) or () if "extra ==" not in one), *TESTS, *names[1:]]
    packages = [f"{name}=={version}" if version else name for name, version in needed(wanted, there, python).items()]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    target = ["--python-version", python, "--implementation", "cp"]
    target += [word for one in _PLATFORMS for word in ("--platform", f"{one}_{platform.machine()}")]
    environ = os.environ | {"DS_BUILD_OPS": "0"}  # DeepSpeed's wheel has no compiled ops, so it fits any Python
    try:
        children.run([*pip, "download", *options, *target, "--dest", str(folder), *packages], env=environ, check=True)
        sources = sorted(str(file) for file in folder.iterdir() if file.suffix != ".whl")
        if sources:
            children.run([*pip, "wheel", *options, "--wheel-dir", str(folder), *sources], env=environ, check=True)
    except CalledProcessError as error:
        raise LaunchError(f"pip could not pack them (exit code {error.returncode}); what it said is above.") from error
    for source in map(Path, sources):
        source.unlink()
    (folder / PACKED).write_text(json.dumps({"commit": commit(), "python": python}) + "\n", encoding="utf-8")
    files = list(folder.glob("*.whl"))
    size = sum(file.stat().st_size for file in files)
    print(
        f"{len(files)} wheels, {size / 2**20:.0f} MiB, in {folder}; on the machine: scripts/gpu_first wheels={folder}"
    )
    return 0


def _freeze(file: Path) -> dict[str, str]:
    """Return package -> version of what `pip freeze` printed, "" where a line has none: then any is accepted."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    pairs = [line.partition("==") for line in lines]
    return {canonicalize_name(name.partition(" @ ")[0]): version for name, _, version in pairs}
