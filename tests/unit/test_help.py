"""Help texts: the overview is short, wrong commands name the right one, unexpected errors say what to attach."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli import COMMANDS, GROUPS, main
from toolkit.cli.help import help_of, overview
from toolkit.distributed.exits import run_guarded
from toolkit.messages import read_table, set_language

MEANT = {
    "trian": "train",
    "sft": "toolkit train",
    "webui": "toolkit board",
    "merge-lora": "toolkit export-model",
    "env": "toolkit doctor --report",
    "quickstart": "toolkit train quickstart",
    "mine.yaml": "toolkit train mine.yaml",
    "--hlep": "--help",
    "hlep": "help",
    "optim.lr": "toolkit help optim.lr",
    "data.columns": "toolkit help data.columns",
    "-v": "toolkit --version",
}


def test_the_overview_fits_a_terminal() -> None:
    lines = overview().splitlines()
    assert len(lines) <= len(COMMANDS) + 2 * len(GROUPS) + 12
    assert max(map(len, lines)) <= 100
    assert "toolkit doctor --report" in overview() and lines[0].startswith("Fine-tune language models")


@pytest.mark.parametrize("name", ["data.columns", "data.sources[0].columns", "columns"])
def test_a_key_of_the_only_source_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", name]) == 0
    assert capsys.readouterr().out.startswith("data.sources[i].columns\n  Names in the file")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_examples(command: str) -> None:
    lines = help_of(command).splitlines()
    examples = lines[lines.index("Examples:") + 1 :]
    assert len(examples) >= 2 and all(f"toolkit {command}" in line for line in examples)
    assert len(lines) <= 45


@pytest.mark.parametrize("word", MEANT)
def test_a_wrong_command_names_the_right_one(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert f"unknown command '{word}'. Did you mean '{MEANT[word]}'?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["help language=zh", "language=zh", "--help language=zh", "language=zh --help", "language=zh help"]
)
def test_the_overview_is_in_the_language_that_is_asked_for(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == (2 if words == "language=zh" else 0)
    assert "\n用法：toolkit 命令" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["language=zh help check", "language=zh --help check", "help check language=zh"])
def test_the_language_may_come_before_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith("不训练，只检查配方")


def test_help_of_a_key_is_what_the_reference_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "optim.decay"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "optim.decay" and "weight decay" in said[1]
    assert said[2:] == ["  choices: all, matrices, hidden", "  default: all"]
    assert main(["help", "optim.lr", "language=zh"]) == 0
    assert re.search("学习率峰值.*\n  类型：数\n  默认值：2e-05\n", capsys.readouterr().out)


def test_help_of_a_group_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "tuning"]) == 0
    said = capsys.readouterr().out
    assert "\n  tuning.rank " in said and "Choices of the group: tuning=… of freeze, full, lora" in said
    assert main(["help", "tuning", "language=zh"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("tuning：") and "full：全参数微调；freeze" in said and "可选 freeze、full、lora" in said
    assert main(["help", "language=zh"]) == 0
    assert "刚上手时会用到：new、check、show" in capsys.readouterr().out
    set_language("en")
    assert main(["help", "keys", "report"]) == 0  # `help report` is the command's
    assert "\n  report.every " in capsys.readouterr().out
    for words in (["help", "keys"], ["help", "config"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "\n  zero.offload_optimizer " in said and "docs/config.md" in said


@pytest.mark.parametrize(
    ("name", "meant"), [("optm.lr", "toolkit help optim.lr"), ("trian", "train"), ("optim.rl", "toolkit help optim.lr")]
)
def test_help_of_a_mistyped_key_names_the_right_one(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", name]) == 2
    assert f"is called '{name}'. Did you mean '{meant}'?" in capsys.readouterr().err


def test_help_of_a_choice_names_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "lora"]) == 2
    shown = capsys.readouterr().err
    assert "'lora' is a choice of the group tuning: tuning=lora. About it: toolkit help tuning" in shown


def test_help_of_a_key_needs_no_torch() -> None:
    program = "import sys; from toolkit.cli import main; main(['help', 'optim.lr']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


@pytest.mark.parametrize("words", ["language=zh check", "trian language=zh"])
def test_errors_of_a_command_are_too(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert re.match("ConfigError: (没有选择配方|未知命令)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "first"), [("recipes QWEN", "deepseek_r1_distill_qwen_7b_lora"), ("models glm-4", "glm45_air")]
)
def test_lists_can_be_filtered(words: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith(f"  {first} ") and all(line == line.rstrip() for line in (head, *rows))
    assert all(words.split()[1].lower() in row.lower() for row in rows)


def test_a_filter_that_finds_nothing_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "qwn"]) == 2
    assert "No name in `toolkit recipes` has 'qwn'. The nearest: qwen3_8b" in capsys.readouterr().err
    assert main(["models", "glmm"]) == 2
    assert (
        "there is no directory glmm. No name in `toolkit models` has 'glmm'. The nearest: " in capsys.readouterr().err
    )


def test_other_programs_commands_are_not_ours() -> None:
    others = read_table("cli/other_names.yaml")
    assert not set(others) & set(COMMANDS)
    assert {name.split()[0] for name in others.values()} <= {*COMMANDS, "--version"}


def test_an_unexpected_error_names_what_to_attach(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ValueError("never expected")

    assert run_guarded(fail) == 1
    *_, message, last = capsys.readouterr().err.splitlines()
    assert message.endswith(": never expected") and last.endswith("attach what this writes: toolkit doctor --report")


@pytest.mark.parametrize("command", ["check", "plan", "train", "prepare", "show", "launch", "sweep", "prove"])
def test_a_word_alone_is_the_recipe(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "quikstart", "optim.lr=1e-3"]) == 2
    assert "unknown recipe 'quikstart'. Did you mean 'quickstart'?" in capsys.readouterr().err


BARE = {
    "sweep quickstart optim.lr=1e-3,2e-3 trials": "trials=VALUE",
    "sweep quickstart optim.lr=1e-3,2e-3 trials 20": "trials=20",
    "sweep quickstart optim.lr=1e-3,2e-3 metric": "metric=VALUE",
    "prove quickstart steps": "steps=VALUE",
    "rounds quickstart samples": "samples=VALUE",
    "doctor timeout_s 3": "timeout_s=3",
    "plan quickstart gpus": "gpus=VALUE",
    "check quickstart world_size": "world_size=VALUE",
    "export-config quickstart output": "output=VALUE",
    "board port": "port=VALUE",
}
"""Commands with an argument of their own whose = is missing -> what to write."""


@pytest.mark.parametrize("command", BARE)
def test_an_argument_without_its_value_is_an_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    written = BARE[command]
    assert capsys.readouterr().err == f"ConfigError: '{written.partition('=')[0]}' has no =. Write {written}\n"
    assert not list(tmp_path.iterdir())


def test_help_takes_several_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "optim.lr", "optim.betas"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[:1] == "o"] == ["optim.lr", "optim.betas"]
    assert main(["help", "optim.lr", "optim.foo"]) == 2
