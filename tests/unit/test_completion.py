"""Completion in real shells: a TAB in a terminal; and what a line may become."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.cli import COMMANDS, main
from toolkit.config.dotted_keys import sections, types_of
from toolkit.config.files import known_recipes
from toolkit.config.key_texts import field_texts
from toolkit.extras.cli.completion import SCRIPTS
from toolkit.extras.completion import PATH_KEYS, candidates

STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(toolkit completion bash)"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "autoload -Uz compinit; compinit -u -D; source <(toolkit completion zsh)",
    ),
    "fish": (["fish", "--no-config", "-i"], "toolkit completion fish | source"),
}
TYPED = {
    "toolkit import-c": "import-config",
    "toolkit check recipe=chatglm3_q": "recipe=chatglm3_qlora",
    "toolkit train zero=stage3_z": "zero=stage3_zeropp",
    "toolkit train optim.weig": "optim.weight_decay=",
    "toolkit train optim.name=adamw_": "optim.name=adamw_8bit",
    "toolkit check data=mine/ch": "data=mine/chat.jsonl",
}
"""What is typed before TAB, and what is on the screen after it."""
SECONDS = 200
"""A loaded machine starts a shell and a Python in much less."""


class Terminal:
    """A shell that believes it has a person."""

    def __init__(self, command: list[str], folder: Path) -> None:
        pid, self.file = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.environ |= {"HOME": str(folder), "TERM": "xterm", "PS1": "> ", "LC_ALL": "C.UTF-8"}
            os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            os.execvp(command[0], command)
        self.pid = pid

    def types(self, text: str, expected: str) -> bool:
        """Type, and read until something is on the screen; whether it ever was."""
        os.write(self.file, text.encode())
        until, seen = time.monotonic() + SECONDS, ""
        while time.monotonic() < until:
            try:
                seen += os.read(self.file, 4096).decode(errors="replace")
            except OSError:
                break
            if expected in re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\x1b[=>()][B0]?|\x07", "", seen):
                return True
        return False

    def close(self) -> None:
        """End the shell."""
        os.close(self.file)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("shell", STARTS)
def test_tab_completes(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "chat.jsonl").touch()
    command, source = STARTS[shell]
    terminal = Terminal(command, tmp_path)
    try:
        assert terminal.types(f"{source}\necho rea''dy\n", "ready")
        for typed, expected in TYPED.items():
            assert terminal.types(f"{typed}\t", expected), typed
            os.write(terminal.file, b"\x15")  # Ctrl-U empties the line
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("toolkit rec", ["recipes"]),
        ("VAR=1 toolkit rec", ["recipes"]),
        ("toolkit nothing x", []),
        ("toolkit check rec", ["recipe="]),
        ("toolkit check optim", ["optim=", "optim."]),
        ("toolkit check zero.off", ["zero.offload_optimizer.", "zero.offload_param."]),
        ("toolkit check train.rehearse=", ["train.rehearse=true", "train.rehearse=false"]),
        ("toolkit check precision.dtype=b", ["precision.dtype=bf16"]),
        ("toolkit check optim.lr=", []),
        ("toolkit verify runs forward=", ["forward=yes", "forward=no"]),
        ("toolkit export-config --e", ["--explain"]),
        ("toolkit completion ", ["bash", "zsh", "fish", "language="]),
        ("toolkit chat language=", ["language=en", "language=zh"]),
        ("toolkit chat ru", ["runs/"]),
        ("toolkit chat runs/", ["runs/first/"]),
        ("toolkit chat runs/.", ["runs/.hidden"]),
        ("toolkit train data=r", ["data=rows.jsonl", "data=runs/"]),
        ("toolkit train run.name=", []),
        ("toolkit new model=qwen3_8b_", ["model=qwen3_8b_base"]),
        ("toolkit new tun", ["tuning="]),
        ("", []),
        (" ", []),
        ("toolkit", []),
        ("toolkit hel", ["help"]),
        ("toolkit help lau", ["launch"]),
    ],
)
def test_what_a_line_may_become(
    line: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / ".hidden").touch()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "rows with blanks.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert candidates(line, COMMANDS) == expected


def test_each_command_s_arguments_are_known_and_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in COMMANDS:
        candidates(f"toolkit {command} ", COMMANDS)
    monkeypatch.chdir(tmp_path)
    assert candidates("toolkit train recipe=", COMMANDS) == [f"recipe={name}" for name in known_recipes()]


def test_keys_of_files_are_known_by_their_names() -> None:
    """By what the schema says of each text."""
    texts = field_texts()
    for prefix, section in sections():
        for name, kind in types_of(section).items():
            says = re.match(r"(Local )?(File|Directory|A DeepSpeed JSON)", texts[section.__name__][name])
            assert not (kind is str and says) or PATH_KEYS.search(prefix + name), prefix + name


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; from toolkit.cli import main; main(['--complete', 'toolkit train zero.'])\n"
        "sys.exit(str({'torch', 'deepspeed', 'transformers', 'hydra', 'jinja2'} & set(sys.modules) or ''))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert "zero.stage=" in ran.stdout and not ran.stderr.strip()


def test_the_script_is_printed_and_another_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
    for words in ([], ["csh"], ["bash", "zsh"]):
        assert main(["completion", *words]) == 2
        assert "name one shell" in capsys.readouterr().err
