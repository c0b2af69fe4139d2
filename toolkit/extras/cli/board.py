"""Serve a page on this machine to watch, compare and start runs: write recipes, see samples, chat, stop runs.

toolkit board [RUNS_DIR] [port=8765]

  RUNS_DIR     the directory of runs; default runs
  port=8765    the port, on 127.0.0.1 only; 0 takes a free one

Open the printed address, whose token lets you in. From another machine:  ssh -L 8765:127.0.0.1:8765 HOST
Training does not depend on the page: runs started here continue when it ends. Needs  pip install starlette uvicorn
"""

from pathlib import Path

from toolkit.command_line import named_arguments, port_number
from toolkit.messages import ConfigError, tr

USAGE = "toolkit board runs"


def run(words: list[str]) -> None:
    """Serve the board, or say which packages it needs."""
    arguments = named_arguments(words, required=(), optional=("runs", "port"), usage=USAGE, bare="runs")
    try:
        from toolkit.extras.board import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            tr("the board needs packages that are not installed:  pip install starlette uvicorn")
        ) from error
    serve(Path(arguments.get("runs", "runs")), port_number(arguments, 8765))
