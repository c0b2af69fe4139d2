"""Everything that a run leaves has the mode that the user's umask asks for."""

import stat
from pathlib import Path

import pytest
from ranks import REPOSITORY, forked, run
from shared import tiny

PROGRAM = f"import os, runpy, sys; os.umask(int(sys.argv.pop(1), 8)); sys.argv[0] = '{REPOSITORY}/run.py'; "
PROGRAM += "runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(("umask", "mode"), [("002", 0o664), ("027", 0o640)])
def test_modes(umask: str, mode: int, rows_file: Path, tmp_path: Path) -> None:
    words = tiny(rows_file, tmp_path, "run", "train.max_steps=2", "checkpoint.every=1", "data.packing=packed")
    words += ["batch.global_size=1", "evaluate.prompts=[red]", "evaluate.max_new_tokens=2"]
    words += ["checkpoint.export=true"]
    (tmp_path / "program.py").write_text(PROGRAM)
    finished = run(forked(0, str(tmp_path / "program.py"), umask, *words), cwd=tmp_path)
    assert finished.code == 0, finished.output[-3000:]
    found = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for folder in ("runs", "cache")
        for path in [tmp_path / folder, *(tmp_path / folder).rglob("*")]
    }
    assert {name: oct(found[name]) for name in found if found[name] not in (mode, mode | 0o111 & ~int(umask, 8))} == {}
    wanted = ("runs/run/export/model.safetensors", "runs/run/checkpoints/step-2/random-rank-00000.safetensors")
    assert {*wanted, "runs/run/DONE", "runs/run/logs/rank_0.log", "runs/run/metrics.jsonl"} <= set(found)
    assert any(name.startswith("cache/stores/") and name.endswith("ids.bin") for name in found)
