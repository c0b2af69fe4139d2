"""`toolkit export-model` lets a directory be there, and says so, once it is proven; a path that is not is named."""

import re
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.export import verify
from toolkit.messages import ModelError

GOLDEN = Path(__file__).parents[1] / "golden" / "chatglm"


def test_an_export_has_its_name_once_it_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, real, seen = tmp_path / "new" / "out", verify.verify_logits, list[tuple[bool, str]]()

    def compare(folder: Path) -> str:
        seen.append((output.exists(), capsys.readouterr().out))
        return real(folder)

    monkeypatch.setattr(verify, "verify_logits", compare)
    assert main(["export-model", str(GOLDEN / "v2"), f"output={output}"]) == 0
    assert seen == [(False, "")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wrote {output}." and "the logits are those of the save" in lines[1]
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ModelError("{folder} is wrong", folder="?"), KeyboardInterrupt()])
def test_what_is_not_proven_is_not_there(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong, or ended while it was compared."""

    def compare(folder: Path) -> str:
        raise ModelError("{folder} is wrong", folder=folder) if isinstance(error, ModelError) else error

    monkeypatch.setattr(verify, "verify_logits", compare)
    assert main(["export-model", str(GOLDEN / "v2"), f"output={tmp_path}/out"]) != 0
    told = capsys.readouterr()
    assert "wrote" not in told.out and list(tmp_path.iterdir()) == []
    assert isinstance(error, KeyboardInterrupt) or told.err == f"ModelError: {tmp_path}/out is wrong\n"


COMMANDS = {
    "export-model runs/lora merge=true": "ConfigError",
    "serve runs/lora": "ConfigError",
    "verify runs/lora": "ConfigError",
    "verify-serving runs/lora": "ConfigError",
    "replay runs/lora step=3": "ConfigError",
    "report runs/lora": "RunFolderError",
    "generate runs/lora prompt=hi": "ModelError",
    "chat runs/lora": "ModelError",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_is_not_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not "output is missing" or "no config.json": what was meant is beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("lora-rank8", "full", ".hidden"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert main(command.split()) == 2
    shown = capsys.readouterr().err
    where = rf"{COMMANDS[command]}: there is no directory (\S+/)?runs/lora( \(\S+\))?\."
    told = rf"{where} Did you mean '(\S+/)?runs/lora-rank8'\?\n"
    assert re.fullmatch(told, shown)
