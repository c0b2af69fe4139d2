"""The entry points: short, quick, helpful."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli import COMMANDS, main
from toolkit.messages import ConfigError
from toolkit.train.startup import make_ready

ROOT = Path(__file__).parents[1]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python from another folder than the checkout."""
    command = [sys.executable, *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT)})


def test_run_py_is_short() -> None:
    assert len((ROOT / "run.py").read_text().splitlines()) <= 25


def test_scripts_are_short() -> None:
    """Commands only call the toolkit; the Python tools that write docs, tables and goldens hold their own logic."""
    for path in (ROOT / "scripts").iterdir():
        if path.is_file():
            limit = 150 if path.suffix == ".py" else 60
            assert len(path.read_text().splitlines()) <= limit, path.name


def test_overview_names_every_command() -> None:
    finished = run("-m", "toolkit", "--help")
    assert finished.returncode == 0
    assert all(f"\n  {name} " in finished.stdout for name in COMMANDS)


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "launch"]) == 0
    helped = capsys.readouterr().out
    assert main(["launch", "--help"]) == 0
    assert helped == capsys.readouterr().out
    assert main(["help"]) == 0 and "usage: toolkit COMMAND" in capsys.readouterr().out
    assert main(["help", "lanch"]) == 2 and "Did you mean 'launch'?" in capsys.readouterr().err


EXPLAIN = """
import contextlib, io, os, sys
import hydra.utils, omegaconf, yaml  # what is imported of others, once
from toolkit.cli import COMMANDS
for command in COMMANDS:
    sys.stdout.flush()
    if os.fork() == 0:  # none has what another one has imported
        from toolkit.cli import main
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = main([command, "--help"])
        print(f"\\0{command} {code}\\n{said.getvalue()}", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, command
"""


def test_each_command_explains_itself() -> None:
    finished = run("-c", EXPLAIN)
    assert finished.returncode == 0, finished.stderr
    explained = dict(part.split("\n", 1) for part in finished.stdout.split("\0")[1:])
    assert list(explained) == [f"{command} 0" for command in COMMANDS]
    for command in COMMANDS:  # some take no arguments
        assert re.search(rf"^toolkit {command}( |$)", explained[f"{command} 0"], re.MULTILINE), command


def test_run_py_explains_itself() -> None:
    finished = run(str(ROOT / "run.py"), "--help")
    assert finished.returncode == 0
    assert "recipe=NAME" in finished.stdout


def test_cfg_prints_a_config_that_is_a_recipe(tmp_path: Path) -> None:
    printed = run(str(ROOT / "run.py"), "recipe=zero1", "optim.lr=0.5", "--cfg", "job")
    assert printed.returncode == 0
    (tmp_path / "again.yaml").write_text(printed.stdout)
    again = run(str(ROOT / "run.py"), f"recipe={tmp_path}/again.yaml", "--cfg", "job")
    assert again.stdout.replace("recipe: again", "recipe: zero1") == printed.stdout
    assert "lr: 0.5" in again.stdout


@pytest.mark.parametrize(
    "words", [["--cfg", "recipe=zero1"], ["recipe=zero1", "--cfg"], ["recipe=zero1", "--cfg", "x"]]
)
def test_cfg_takes_no_other_word(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=r"^write --cfg job: it prints the resolved config and stops\.$"):
        make_ready(words)


def test_unknown_command() -> None:
    finished = run("-m", "toolkit", "trian")
    assert finished.returncode == 2
    assert finished.stderr.startswith("ConfigError: unknown command 'trian'. Did you mean 'train'?")
    finished = run("-m", "toolkit", "autotune", "recipe=quickstart")
    assert finished.returncode == 2
    assert finished.stderr.startswith("ConfigError: unknown command 'autotune'. It has been removed; instead, see ")


def test_no_command_shows_the_overview() -> None:
    finished = run("-m", "toolkit")
    assert finished.returncode == 2
    assert "export-config" in finished.stdout


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_a_reader_that_has_read_enough(words: list[str]) -> None:
    command = [sys.executable, "-m", "toolkit", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as asked:
        assert asked.stdout is not None and asked.stderr is not None
        asked.stdout.close()  # as `| head -0` does
        assert asked.stderr.read() == ""
        assert asked.wait(60) == 0


@pytest.mark.parametrize("words", [["run.py", "recipe=quickstart"], ["-m", "toolkit", "doctor"]])
def test_without_its_packages_it_says_how_to_get_them(words: list[str]) -> None:
    command = [sys.executable, "-I", "-S", "-c", f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); "]
    if words[0] == "run.py":
        command[-1] += f"sys.argv = {words!r}; runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')"
    else:
        command[-1] += f"sys.argv = {words[1:]!r}; runpy.run_module('toolkit', run_name='__main__')"
    finished = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    english, chinese = finished.stderr.splitlines()
    assert "is not installed for" in english and "source .venv/bin/activate" in english
    assert "没有安装" in chinese
