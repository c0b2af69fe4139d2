"""A virtual environment over the packages of the Python that runs this: what it has of its own comes first.

It needs no package: where it begins, there may be none yet (scripts/gpu_first).
"""

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
