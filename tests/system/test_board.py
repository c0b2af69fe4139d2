"""A run of the board: started, left alone, found again, stopped, and asked."""

import json
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import kill_session, start, wait_for
from shared import tiny

from toolkit.extras.board import Launches


def opened(folder: Path, processes: list[Any]) -> Callable[..., str]:
    """Start a board; return what asks it."""
    command = [sys.executable, "-m", "toolkit", "board", "runs", "port=0"]
    processes.append(start(command, cwd=folder))
    address = next(line.strip() for line in processes[-1].stdout if "http://" in line)
    with urllib.request.urlopen(address) as page:
        cookie = page.headers["set-cookie"].partition(";")[0]

    def ask(action: str, /, **given: Any) -> str:
        body, headers = json.dumps(given).encode(), {"Cookie": cookie}
        request = urllib.request.Request(f"{address.partition('?')[0]}do/{action}", body, headers)
        with urllib.request.urlopen(request, timeout=240) as answer:
            return str(answer.read().decode())

    return ask


def test_a_run_outlives_the_board_that_started_it(rows_file: Path, tmp_path: Path) -> None:
    overrides = dict(word.split("=", 1) for word in tiny(rows_file, tmp_path, "mine", "train.max_steps=100000"))
    values = {key: value for key, value in overrides.items() if "." in key and not key.startswith("run.")}
    groups = {key: value for key, value in overrides.items() if "." not in key and key != "recipe"}
    given = {"base": "quickstart", "groups": groups, "values": values}
    processes: list[Any] = []
    folder = tmp_path / "runs" / "mine"

    def steps() -> int:
        metrics = folder / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.is_file() else 0

    try:
        ask = opened(tmp_path, processes)
        assert "Wrote" in ask("save", **given, file="mine.yaml")
        assert "Started" in ask("start", recipe="mine.yaml", name="mine", ranks="1")
        wait_for(lambda: steps() > 2)
        processes[-1].send_signal(signal.SIGKILL)  # no chance to stop what it has started
        reached = steps()
        wait_for(lambda: steps() > reached + 2)

        ask = opened(tmp_path, processes)
        [row] = json.loads(ask("runs"))["rows"]
        assert (row["run"], row["state"], row["is_alive"]) == ("mine", "running", True)
        assert "checkpoint" in ask("stop", run="mine")
        wait_for(lambda: not json.loads(ask("runs"))["rows"][0]["is_alive"])
        assert "Stopped: stopped by SIGTERM after step" in json.loads(ask("log", run="mine"))["text"]
        assert (folder / "checkpoints" / "latest").is_file() and not (folder / "FAILED").exists()

        assert ask("open", path="runs/mine").strip() == '{"end": ""}'
        answer = [json.loads(line) for line in ask("ask", text="red green").splitlines()]
        assert answer[-1] == {"end": ""} and any("text" in line for line in answer)
        processes[-1].send_signal(signal.SIGTERM)
        assert processes[-1].wait(60) == 0
    finally:
        for process in processes:
            kill_session(process)
            process.wait()
            process.stdout.close()
        launches = Launches(tmp_path / "runs")
        if launches.is_alive("mine"):
            launches.stop({"run": "mine"})
