"""A virtual environment over the packages of the Python that runs this: what it has of its own comes first.

It needs no package: where it begins, there may be none yet (scripts/gpu_first).
"""

import os
import site
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from toolkit import children


def make(folder: Path, install: Sequence[str]) -> Path:
    """Make the environment, unless it is there, and return its Python.

    Args:
        folder: where it is, or is made; what an interrupted call has left there is made anew.
        install: the arguments of `pip install`; with none, the environment has no package of its own.

    Raises:
        subprocess.CalledProcessError: pip cannot install that; it has said why.
    """
    python, done = folder / "bin" / "python", folder / "done"
    if done.exists():
        return python
    venv.create(folder, with_pip=False, clear=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    below = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    lines = [f"import site; site.addsitedir({place!r})\n" for place in below]
    (packages / "below.pth").write_text("".join(lines), encoding="utf-8")
    if install:
        # Run by the environment's Python, so pip leaves what lies below as it is, whatever the versions there.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-build-isolation"]
        children.run([*pip, *install], check=True)
    done.touch()
    return python


def go_on_with_wheels(script: Path, words: list[str], started: float) -> None:
    """Become a script with its arguments again, in an environment that has the wheels of `wheels=DIRECTORY`."""
    (folder,) = (Path(word.partition("=")[2]).absolute() for word in words if word.startswith("wheels="))
    python = make(folder / "environment", ["--no-index", "--no-deps", *map(str, sorted(folder.glob("*.whl")))])
    rest = [word for word in words if not word.startswith("wheels=")]
    own = [f"since={started}", f"packed={folder}/packed.json"]
    os.execv(python, [str(python), str(script.absolute()), *rest, *own])  # noqa: S606  # of words that a user typed
