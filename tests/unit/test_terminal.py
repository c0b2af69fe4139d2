"""What a terminal shows, as an emulator reads it: one view that is redrawn; elsewhere lines that can be searched."""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.text import Text

from toolkit import live_view, terminal
from toolkit.messages import say, set_language, set_main_rank, warn
from toolkit.tables import text_table, text_width
from toolkit.track.metrics import Progress
from toolkit.train.startup import LastingStdout, pass_on_warnings

COLUMNS, LINES = 100, 24
ROW = {
    "step": 20,
    "epoch": 0.25,
    "loss": 2.5,
    "lr": 1e-4,
    "grad_norm": 0.75,
    "tokens_per_s": 4200.0,
    "mfu": 0.41,
    "device_memory_peak_bytes": 12.3 * 2**30,
    "planned_memory_bytes": 14.0 * 2**30,
    "skipped_steps": 3,
    "loss_scale": 65536.0,
}


class Terminal(io.StringIO):
    """A stdout that is a terminal, and what is on its screen."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.screen.set_mode(pyte.modes.LNM)  # as a terminal's driver does
        self.stream = pyte.Stream(self.screen)
        self.written: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.stream.feed(text)
        self.written.append(text)
        return len(text)

    def shows(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).strip()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*terminal.SCHEDULERS, "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))
    set_language("en")
    terminal.set_display("auto")  # as a training session does
    yield
    terminal.set_display("auto")
    live_view._shown.clear()
    live_view._follow()


@pytest.fixture
def screen() -> Terminal:
    return Terminal()


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition() and time.monotonic() < ends:
        time.sleep(0.05)
    assert condition()


def test_a_live_view_only_where_somebody_looks(screen: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_stdout(screen):
        assert terminal.is_live()
        for name in terminal.SCHEDULERS:
            monkeypatch.setenv(name, "1")
            assert not terminal.is_live()
            monkeypatch.delenv(name)
        monkeypatch.setenv("TERM", "dumb")
        assert not terminal.is_live()
        terminal.set_display("live")
        assert terminal.is_live()
        monkeypatch.setenv("TERM", "xterm")
        terminal.set_display("plain")
        assert not terminal.is_live()
        terminal.set_display("auto")
        with redirect_stdout(io.StringIO()):
            assert not terminal.is_live()


def test_no_view_is_drawn_while_a_line_is_printed(screen: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer for a line than the view's thread waits."""
    render = Text.__rich_console__

    def slowly(self: Text, *given: Any) -> Iterator[Any]:
        time.sleep(0.6 if self.plain == "it is warm." else 0)
        yield from render(self, *given)

    monkeypatch.setattr(Text, "__rich_console__", slowly)
    with redirect_stdout(screen):
        progress = Progress(100, shown=True)
        progress.start()
        say("it is warm.")
        progress.close()
    assert screen.shows() == "it is warm."


def test_the_view_of_a_run(screen: Terminal) -> None:
    with redirect_stdout(screen):
        progress = Progress(100, shown=True, done=10)
        progress.start()
        for _ in range(10):
            progress.advance()
        progress.show(ROW)
        progress.note(evaluation={"step": 10, "eval_loss": 2.75}, checkpoint=Path("checkpoints/step-15"))
        warn("it is warm.")
        wait_for(lambda: "step-15" in screen.shows())
        shown = screen.shows()
        assert shown.splitlines()[0] == "WARNING: it is warm."  # above the view
        for part in (
            "20/100",
            "20%",
            "ETA 0:00:0",
            "loss 2.5000",
            "validation loss 2.7500 (step 10)",
            "learning rate 1.00e-04",
            "gradient norm 0.750",
            "epoch 0.25",
            "4,200 tokens/s",
            "MFU 41%",
            "memory 12.3 of 14.0 GiB planned",
            "last checkpoint step-15",
            "skipped steps 3",
            "loss scale 65536",
            "warnings above 1",
        ):
            assert part in shown, part
        progress.back_to(15)
        wait_for(lambda: "15/100" in screen.shows())
        progress.close()
        assert screen.shows() == "WARNING: it is warm."  # nothing of the view is left
        assert not screen.screen.cursor.hidden


def test_chinese_and_other_ranks(screen: Terminal) -> None:
    with redirect_stdout(screen):
        silent = Progress(100, shown=False)
        silent.start()
        silent.show(ROW)
        silent.close()
        assert screen.shows() == ""
        set_language("zh")
        progress = Progress(100, shown=True)
        progress.start()
        progress.show(ROW)
        warn("磁盘已满。")
        wait_for(lambda: "上方的警告1" in screen.shows().replace(" ", ""))
        assert "最近的检查点" in screen.shows().replace(" ", "")
        progress.close()


def test_a_view_that_fails_ends_nothing(screen: Terminal) -> None:
    with redirect_stdout(screen):
        with live_view.showing(lambda: 1 / 0):
            say("a line")
            wait_for(lambda: "ZeroDivisionError" in screen.shows())
        assert screen.shows() == "a line"


def test_phases_have_bars_one_below_the_other(screen: Terminal) -> None:
    with redirect_stdout(screen):
        with terminal.phase("Loading weights", 4 << 20, terminal.BYTES) as loaded, terminal.phase("Waiting"):
            loaded(1 << 20)
            wait_for(lambda: "1.0/4.2 MB" in screen.shows())
            assert "Loading weights" in screen.shows().splitlines()[0]
            assert "Waiting" in screen.shows().splitlines()[1]
        assert screen.shows() == ""


def test_phases_have_lines_elsewhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "EVERY_S", 0.2)
    monkeypatch.setattr(terminal, "WORTH_TELLING_S", 0.4)
    said: list[str] = []
    with terminal.phase("Loading weights", 8, terminal.BYTES) as advance:
        advance(2)
        wait_for(lambda: bool(said.append(capsys.readouterr().out) or "".join(said)))
        time.sleep(0.4)
    with terminal.phase("Building"):
        time.sleep(0.3)
    set_main_rank(False)
    with terminal.phase("Nothing") as advance:
        advance(1)
        time.sleep(0.5)
    lines = ("".join(said) + capsys.readouterr().out).splitlines()
    assert lines[0] == "Loading weights: 25 % after 0 s."
    assert "Loading weights: done in 1 s." in lines
    assert "Building: 0 s so far." in lines
    assert not [line for line in lines if "Nothing" in line or "\x1b" in line or "Building: done" in line]


def test_a_phase_that_fails_lets_the_error_through(screen: Terminal) -> None:
    with redirect_stdout(screen):
        with pytest.raises(KeyError), terminal.phase("Loading weights", 8) as advance:
            advance(1)
            raise KeyError("gone")
        assert screen.shows() == ""
        assert not screen.screen.cursor.hidden


def test_warnings_of_nccl_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.train.startup._LOOK_S", 0.01)
    log, out, ended = tmp_path / "rank_0.log", io.StringIO(), threading.Event()
    log.write_text("old: NCCL WARN was told\n")
    follower = threading.Thread(target=pass_on_warnings, args=(log, out, ended))
    follower.start()
    time.sleep(0.1)
    with log.open("a") as file:
        for text in ("n1:7:9 [0] NCCL INFO Using network Socket\nn1:7:9 [0] NCCL WA", "RN Call to connect failed\n"):
            file.write(text)
            file.flush()
            time.sleep(0.05)
    wait_for(lambda: bool(out.getvalue()))
    ended.set()
    follower.join(10)
    assert out.getvalue() == "n1:7:9 [0] NCCL WARN Call to connect failed\n"
    assert logging.getLogger("py.warnings")  # the module is importable without a session


def test_a_stdout_that_is_gone_ends_nothing() -> None:
    ours, theirs = os.pipe()
    stdout = LastingStdout(os.fdopen(theirs, "wb"), encoding="gbk", errors="backslashreplace", line_buffering=True)
    print("你好", file=stdout)
    assert os.read(ours, 100) == "你好\n".encode("gbk")
    os.close(ours)
    for _ in range(3):
        print("nobody reads this", file=stdout)
        stdout.write("nor this")
        stdout.flush()
    stdout.close()


def test_long_lines_can_be_copied_whole_and_stderr_stays_where_it_goes(
    screen: Terminal, capfd: pytest.CaptureFixture[str]
) -> None:
    command = "toolkit generate " + "x" * 2 * COLUMNS
    with redirect_stdout(screen), live_view.showing(lambda: "view"):
        say(command)
        sys.stderr.write("an error\n")
        wait_for(lambda: "view" in screen.shows())
    assert command in screen.shows().replace("\n", "")
    assert "".join(screen.written).count(command) == 1  # not broken by line ends of ours
    assert capfd.readouterr().err == "an error\n"


def test_other_commands_keep_stdout_for_their_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_is_session", False)
    monkeypatch.setattr(terminal, "WORTH_TELLING_S", 0.0)
    with terminal.phase("Loading weights"):
        pass
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "Loading weights: done in 0 s.\n")


def test_the_time_left_after_going_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("toolkit.track.metrics.time.monotonic", lambda: now[0])
    progress = Progress(100, shown=True, done=50)
    progress.start()
    now[0] += 600
    progress.back_to(40)  # a checkpoint of before this session
    progress.show({**ROW, "step": 40})
    now[0] += 10
    progress.show({**ROW, "step": 45})
    lefts = [line.rpartition("ETA ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lefts == ["?", "0:01:50"]


def test_tables_end_without_blanks_and_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ("model", "where", "what it is")
    rows = [("qwen3_8b", "Qwen/Qwen3-8B", "a model of eight billion parameters"), ("a", "b", "模型，共八十亿参数" * 4)]
    wide = text_table(heads, rows, texts=True)
    assert len(wide) == 3 and all(line == line.rstrip() for line in wide) and max(map(text_width, wide)) > 60
    for columns in (60, 40, 20):
        with redirect_stdout(Terminal()):
            monkeypatch.setenv("COLUMNS", str(columns))
            lines = text_table(heads, rows, texts=True)
        assert max(map(text_width, lines)) <= columns and all(line == line.rstrip() for line in lines)
        assert "".join(lines).replace(" ", "").count("参数") == 4 and not any(
            line.lstrip().startswith("，") for line in lines
        )
        assert "".join("".join(lines).split()).endswith("".join(rows[1][2].split()))
    assert text_table(("", "n"), [("a", "1"), ("b", "22")]) == ["      n", "  a   1", "  b  22"]
