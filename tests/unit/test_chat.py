"""`toolkit chat`, in a terminal and through a pipe."""

import fcntl
import io
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.speaker import SAYS, write_random, write_speaker
from toolkit.cli import main
from toolkit.evaluate.chat_session import ChatSession
from toolkit.evaluate.generate import Sampling
from toolkit.export.load import LoadedModel, load_any
from toolkit.messages import ModelError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "LC_ALL": "", "TERM": "dumb"}
CTRL_C, CTRL_D, BACKSPACE = "\x03", "\x04", "\x7f"
TIMEOUT_S = 120


def take_terminal() -> None:
    """Be ended by the keys of a terminal, also where the tests are not: in the background of a shell."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toolkit", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)
        self.unread = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.ours, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until a text appears, and return what came before it."""
        deadline, content = time.monotonic() + TIMEOUT_S, self.unread.encode()
        while text.encode() not in content:
            assert time.monotonic() < deadline, f"no '{text}' in {content.decode(errors='replace')}"
            if not select.select([self.ours], [], [], 1.0)[0]:
                continue
            try:
                content += os.read(self.ours, 65536)
            except OSError:  # what a terminal says when its last program has ended
                raise AssertionError(f"no '{text}' before the end: {content.decode(errors='replace')}") from None
        before, _, after = content.partition(text.encode())
        self.unread = after.decode(errors="surrogateescape")
        return before.decode()

    def end(self) -> int:
        """Wait for the command's end."""
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """What is put here is closed."""
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)


def test_a_conversation_in_a_terminal(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal("chat", str(write_speaker(tmp_path / "model")))
    terminals.append(terminal)
    terminal.wait_for("Ctrl-D ends.")
    terminal.wait_for("> ")
    terminal.type(f"你好吗{BACKSPACE}\r")
    terminal.wait_for(SAYS)
    terminal.wait_for("> ")
    terminal.type("/undo\r")
    terminal.wait_for("Forgotten: 你好\r\n")  # a whole character was taken back
    terminal.type("/undo\r")
    terminal.wait_for("Nothing has been said yet.")
    terminal.type("再来\r")
    terminal.wait_for(SAYS)
    terminal.type("/reset\r")
    terminal.wait_for("Everything that was said is forgotten.")
    terminal.type("/undo\r")
    terminal.wait_for("Nothing has been said yet.")
    terminal.type("/system 简短\r")
    terminal.wait_for("System message: 简短")
    terminal.type("/rest\r")
    terminal.wait_for("unknown command '/rest'. Did you mean '/reset'?")
    terminal.type("/help\r")
    terminal.wait_for("remove the last question and its answer")
    terminal.wait_for("> ")
    terminal.type("never asked")
    terminal.wait_for("never asked")
    time.sleep(0.5)  # a signal that comes before readline waits again is not seen until the next key
    terminal.type(CTRL_C)
    terminal.wait_for("Ctrl-D ends.")
    terminal.wait_for("> ")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_alone(tmp_path: Path, terminals: list[Terminal]) -> None:
    model = write_speaker(tmp_path / "model", ends=False)
    terminal = Terminal("chat", str(model), "max_new_tokens=100000")
    terminals.append(terminal)
    terminal.wait_for("> ")
    terminal.type("为什么\r")
    terminal.wait_for(SAYS)
    terminal.wait_for(SAYS)  # it goes on and on
    terminal.type(CTRL_C)
    terminal.wait_for("Stopped.")
    terminal.wait_for("> ")
    assert terminal.process.poll() is None
    terminal.type("/undo\r")
    terminal.wait_for("Forgotten: 为什么")
    terminal.wait_for("> ")
    terminal.type("quit\r")
    assert terminal.end() == 0


def test_questions_through_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers alone on stdout; a question that cannot be asked ends it with an error."""
    model = write_speaker(tmp_path / "model", positions=100)

    def pipe(content: bytes) -> int:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
        return main(["chat", str(model), "max_new_tokens=30"])

    assert pipe(b"exit\n") == 0  # a question like any other
    assert capsys.readouterr().out == f"{SAYS}\n"
    assert pipe("你好\n\n/undo\n".encode() + b"half a character \xe4\xbd\n") == 0
    found = capsys.readouterr()
    assert found.out == f"{SAYS}\n{SAYS}\n"
    assert "Forgotten: 你好" in found.err
    assert pipe(b"x\n" + b"y" * 100 + b"\nz\n") == 2
    found = capsys.readouterr()
    assert found.out == f"{SAYS}\n"
    assert "more than the 100 positions" in found.err
    assert main(["chat"]) == 2
    assert "model.path is missing: toolkit chat PATH" in capsys.readouterr().err


@pytest.fixture(scope="module")
def usable(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_any(str(write_random(tmp_path_factory.mktemp("models") / "random", positions=120)))


def chat(usable: LoadedModel, max_new_tokens: int = 8) -> ChatSession:
    """Return a conversation in which nothing was said."""
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return ChatSession(usable.model, usable.encoder, sampling, is_terminal=False, help_text="")


@pytest.mark.parametrize("line", ["exit", " Quit ", "/exit", "/quit"])
def test_what_leaves_a_terminal(line: str, usable: LoadedModel) -> None:
    assert not ChatSession(usable.model, usable.encoder, Sampling(max_new_tokens=1), True, "").handle(line)


def test_the_prompt_is_the_training_prompt(usable: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    """What was said and the next question, as training writes it."""
    talk, encoder = chat(usable), usable.encoder
    talk.set_system("简短")
    for question in ("one", " 二 "):
        before = [{"role": "system", "content": "简短"}, *talk.history, {"role": "user", "content": question.strip()}]
        prompt = talk._prompt(question.strip())
        ids, trained = encoder.encode([*before, {"role": "assistant", "content": "好"}])
        assert ids[: len(prompt)] == prompt and trained[len(prompt)]
        talk._answer(question.strip())
        assert talk.history[-1]["content"] == capsys.readouterr().out.removesuffix("\n")
    assert [message["role"] for message in talk.history] == ["user", "assistant"] * 2


def test_the_oldest_turns_leave_when_there_is_no_room(usable: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    talk = chat(usable)
    talk.set_system("s")
    for text in ("a", "b", "c"):
        talk.history += [{"role": "user", "content": text * 10}, {"role": "assistant", "content": text * 10}]
    rest = [{"role": "system", "content": "s"}, *talk.history[2:], {"role": "user", "content": "d" * 30}]
    assert talk._prompt("d" * 30) == usable.encoder.prompt(rest)
    assert [message["content"][0] for message in talk.history] == ["b", "b", "c", "c"]
    assert "the oldest 1 question was dropped" in capsys.readouterr().err
    with pytest.raises(ModelError, match="more than the 120 positions"):
        talk._prompt("e" * 120)
    assert len(talk.history) == 4, "a question that cannot be asked costs nothing"
