"""`python -m toolkit` is the command `toolkit`."""

import sys
from collections.abc import Sequence


def start(words: Sequence[str]) -> int:
    """Run a command and return its exit code: 2, and how to activate the environment, where a package is missing."""
    try:
        from toolkit.cli import main

        return main(words)
    except ModuleNotFoundError as error:
        if (error.name or "toolkit").startswith("toolkit"):  # a module of ours: a defect, which keeps its traceback
            raise
        # Without its packages the toolkit has no catalog of translations.
        sys.stderr.write(
            f"{error.name} is not installed for {sys.executable}. Activate the environment: source "
            f".venv/bin/activate; or make it: scripts/quickstart.\n{sys.executable} 中没有安装 {error.name}。"
            "请先激活环境：source .venv/bin/activate；还没有环境时运行 scripts/quickstart。\n"
        )
        return 2


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
