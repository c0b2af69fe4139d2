"""`toolkit doctor --report`: one file to attach to a bug report, without secrets, with what a run left."""

import json
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.extras.doctor import attachment

KEY = "not-a-real-key-0123456789"
TOKEN = "hf_" + "x" * 20


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, in which the command is typed, and secrets in the environment."""
    folder = tmp_path / "home of me"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{KEY}@mirror.example")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def failed_run(home: Path) -> Path:
    """What a failed run has left: some of its files, with secrets that no filter has seen."""
    run = home / "runs" / "lora"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"model: {{path: {home}/models/glm}}\nds_extra: {{comet: {{api_key: secret-of-the-config}}}}\n"
    )
    (run / "FAILED").write_text("exit code 2\nOutOfMemory: 30 GiB needed.\n````\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in range(1, 10)))
    lines = [f"line {number} of {home}/data.jsonl, /home/alice/x and file:///home/bob." for number in range(100)]
    lines += [f"Authorization: Bearer {TOKEN}", f"key {KEY}", "secret-of-the-config", "y" * 5000 + TOKEN]
    (run / "logs" / "rank_0.log").write_text("\n".join(lines))
    for rank in range(1, 9):
        (run / "logs" / f"rank_{rank}.log").write_text(f"rank {rank} says\n")
    return run


def written(*words: str) -> str:
    """Run the command and return the file that it writes."""
    assert main(["doctor", "--report", *words, "output=out.md", "language=en"]) == 0
    return Path("out.md").read_text(encoding="utf-8")


def test_a_report_without_a_run_describes_the_machine(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written()
    assert "- packages: torch 2." in text and "- GPUs: " in text
    assert "\nNCCL_DEBUG=INFO\n" in text and "\nWANDB_API_KEY=***\n" in text
    assert KEY not in text and "https://***@mirror.example" in text
    assert "## Run" not in text
    assert "out.md is written. Read it before you attach it" in capsys.readouterr().out


def test_a_report_of_a_failed_run_has_what_it_left(failed_run: Path) -> None:
    text = written("runs/lora")
    assert "## Run lora: failed\n" in text and "OutOfMemory: 30 GiB needed." in text
    assert "- step 9 of ?, starts: 0\n" in text and '{"step": 9, ' in text and '{"step": 4, ' not in text
    assert "line 99 of" in text and "line 10 of" not in text, "the last lines alone"
    assert "path: ~/models/glm" in text
    assert text.count("Last lines of rank_") == 4 and text.index("rank_0.log") < text.index("rank_8.log")
    assert text.count("````") % 2 == 0, "nothing in the run ends a block"


def test_a_report_has_no_secrets_and_no_home_directories(failed_run: Path, home: Path) -> None:
    text = written(str(failed_run))
    for secret in (KEY, TOKEN, TOKEN[:12], "secret-of-the-config"):
        assert secret not in text, secret
    assert "Authorization: Bearer ***" in text and "key ***" in text and "api_key: '***'" in text
    assert str(home) not in text and "line 99 of ~/data.jsonl, ~/x and file://~" in text


def test_the_first_line_that_is_read_may_be_cut_and_is_dropped(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text("x" * attachment._LOG_BYTES + "\nlast\n")
    assert attachment._last_lines(log, 10) == ["last"]
    assert attachment._last_lines(tmp_path / "none.log", 10) == []


@pytest.mark.parametrize("words", [["runs/none"], ["."], ["--steps"], ["runs/lora", "more"], ["output=there.md"]])
def test_mistakes_end_with_2_and_write_nothing(
    words: list[str], failed_run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "there.md").write_text("mine")
    assert main(["doctor", "--report", *words]) == 2
    assert "Error: " in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in home.glob("*.md")] == [("there.md", "mine")]
