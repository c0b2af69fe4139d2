"""The copy of a run that `toolkit prove` resumes."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.extras import prove


def test_a_copy_that_was_cut_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, copied, launched = tmp_path / "recipe", shutil.copytree, []
    for folder in ("checkpoints/step-2", "checkpoints/step-10", "export"):
        (run / folder).mkdir(parents=True)
    (run / "DONE").touch()
    (run / "metrics.jsonl").write_text('{"loss": 2.0}\n')

    def train(words: Any, cfg: Any, name: str) -> SimpleNamespace:
        launched.append({path.name for path in [*(tmp_path / name).iterdir(), *(tmp_path / name).glob("*/*")]})
        return SimpleNamespace(state=prove.DONE)

    def killed(*given: Any) -> None:
        copied(*given)
        if len(given) == 2:  # it calls itself for directories
            raise KeyboardInterrupt

    sweep = SimpleNamespace(folder=tmp_path, run_dir=lambda job: run)
    proof = cast("Any", SimpleNamespace(sweep=sweep, cfg=None, train=train))
    monkeypatch.setattr(shutil, "copytree", killed)
    with pytest.raises(KeyboardInterrupt):
        prove._resume(proof, cast("Any", None))
    monkeypatch.setattr(shutil, "copytree", copied)
    assert prove._resume(proof, cast("Any", None)) == 0.0
    assert launched == [{"checkpoints", "step-2", "metrics.jsonl"}] and not (tmp_path / "resumed.part").exists()
