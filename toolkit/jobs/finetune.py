"""Training from Python: `from toolkit import finetune`. It runs the command that a user would type, so that there is no
second way to train; checks and errors are the command's.
"""

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.arguments import parse_checked
from toolkit.command_line import positive_int
from toolkit.config import dotted_keys
from toolkit.config.files import quoted
from toolkit.disk import json_lines
from toolkit.launch import environment
from toolkit.messages import ConfigError, RunFailed, Stopped, tr

_LAST_LINES = 20


def finetune(recipe: str, *, gpus: int = 1, hostfile: str = "", quiet: bool = False, **settings: Any) -> "Run":
    """Train a recipe and return its run; called again with the same `run.name` it resumes, as the command does.

    The training is a process of its own, `toolkit train`, or `toolkit launch` for several GPUs: the caller's holds no
    GPU memory and joins no process group. An interrupt (KeyboardInterrupt) stops the run, which saves a checkpoint.

    Args:
        recipe: a recipe's name or its file.
        gpus: how many GPUs of this machine train; without GPUs as many CPU ranks.
        hostfile: nodes that train, in place of `gpus`.
        quiet: do not print what the training prints.
        settings: config groups and keys: `model="qwen3_8b"`, `data="chat.jsonl"`, `optim={"lr": 1e-4}`.

    Raises:
        ToolkitError: wrong settings or files, before anything is started.
        Stopped: the run was stopped, and has saved a checkpoint.
        RunFailed: the run ended in another way; the message has its exit code and the last lines that it printed.
    """
    if hostfile and gpus != 1:
        raise ConfigError("{name} has no effect with {other}. Remove it.", name="gpus", other="hostfile")
    gpus = positive_int({"gpus": str(gpus)}, "gpus") or 1
    environment.reject_if_rank()
    words = [f"recipe={_as_written(recipe)}", *override_words(settings)]
    cfg = parse_checked(words, world_size=None if hostfile else gpus).loaded.cfg
    if not cfg.run.name:
        cfg.run.name = f"{Path(cfg.recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        words.append(f"run.name={cfg.run.name}")
    run = Run(Path(cfg.run.dir, cfg.run.name).absolute())
    if hostfile:
        command = ["launch", f"hostfile={hostfile}"]
    else:
        command = ["train"] if gpus == 1 else ["launch", "--num_gpus", str(gpus)]
    code, output = _run_command([sys.executable, "-m", "toolkit", *command, *words], quiet)
    if code:
        text = tr("the run ended with exit code {code}: {folder}", code=code, folder=run.directory)
        raise (Stopped if code == Stopped.exit_code else RunFailed)(f"{text}\n{output}")
    return run


class Run:
    """A finished run, by its directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: `step`, `loss`, `lr`, … of logged steps, `eval_loss`, … of evaluations."""
        return [row for row in json_lines(self.directory / "metrics.jsonl") if row]

    @property
    def model(self) -> Path:
        """Directory of the exported model or adapter, which transformers or peft loads."""
        return self.directory / "export"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.directory / "report.html"

    def chat(self, *, system: str = "", **sampling: Any) -> "Chat":
        """Return a new conversation with the model; `sampling`: `max_new_tokens`, `temperature`, … as `toolkit chat`
        takes them. The first one loads the model, in this process.
        """
        return Chat(*self._loaded, system=system, **sampling)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from toolkit.export.load import load_any

        return tuple(load_any(str(self.directory)))

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"


class Chat:
    """A conversation: `chat("question")` returns the answer, and remembers both, as `toolkit chat` does."""

    def __init__(self, model: Any, encoder: Any, *, system: str = "", **sampling: Any) -> None:
        from toolkit.evaluate.chat_session import ChatSession
        from toolkit.evaluate.generate import Sampling

        self._session = ChatSession(model, encoder, Sampling(**{"max_new_tokens": 512, **sampling}), False, "")
        self._session.set_system(system)

    def __call__(self, question: str) -> str:
        """Return the model's answer to a question after all that was said before."""
        answer = self._session.ask(question)
        self._session.remember(question, answer)
        return answer

    @property
    def messages(self) -> list[Any]:
        """What was said: the system message, questions and answers."""
        from toolkit.evaluate.generate import with_system

        return with_system(self._session.history, self._session.system)


def override_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as the words that a user would type: `optim={"lr": 1e-4}` becomes optim.lr=0.0001."""
    return [f"{key}={_as_written(value)}" for key, value in dotted_keys.leaves(settings)]


def _as_written(value: Any) -> str:
    """Return a value in Hydra's grammar: true, null, [a,b], {key:value}, a text in quotes if it needs them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_as_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_as_written, value)) + "]"
    return quoted(str(value))


def _run_command(command: list[str], quiet: bool) -> tuple[int, str]:
    """Run a training and print what it prints, unless `quiet`; return its exit code and its last lines. It runs in a
    session of its own, so that it gets one signal at an interrupt, from here, and not also the terminal's.
    """
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    child = children.start(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert child.stdout is not None
    with child.stdout:
        while True:
            try:
                for line in child.stdout:
                    lines.append(line.decode(errors="replace"))
                    if not quiet:
                        sys.stdout.write(lines[-1])
                        sys.stdout.flush()
                return child.wait(), "".join(lines).rstrip()
            except KeyboardInterrupt:  # then read on, as the child saves a checkpoint before it ends
                child.send_signal(signal.SIGINT)
