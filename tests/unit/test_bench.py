"""The benchmark of the data side measures something; its numbers are no test."""

import json
from pathlib import Path

import pytest

from toolkit.bench.rows import rows_file
from toolkit.cli import main


def test_rows_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first, second, other = (rows_file(tmp_path / name, 50, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    rows = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 50
    assert all(row["prompt"] and row["response"] for row in rows)


def test_bench_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("toolkit.bench.data.FEW", 60)
    monkeypatch.setattr("toolkit.bench.data.WORKERS", (1,))
    output = tmp_path / "results.json"
    output.write_text('["earlier"]', encoding="utf-8")
    words = ["recipe=zero1", "model=glm_tiny", f"prepare.dir={tmp_path}/cache", "data.packing=packed"]
    assert main(["bench", "data", "rows=200", f"output={output}", *words]) == 0
    earlier, found = json.loads(output.read_text(encoding="utf-8"))
    assert earlier == "earlier"
    assert found["rows"] == 200
    assert found["tokens"] > 200
    assert 2 < found["store_bytes_per_token"] < 4
    assert min(found[name] for name in ("prepare_s", "encode_batch_s", "encode_batch_fast_s", "peak_pss_mib")) > 0
    assert [(one["rows"], one["num_workers"]) for one in found["opening"]] == [(60, 1), (200, 1)]
    assert found["packing"]["filled"] > 0.9
    assert [path.name for path in (tmp_path / "cache" / "bench").iterdir() if path.is_dir()] == []


def test_results_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "notes.json"
    output.write_text("{}", encoding="utf-8")
    assert main(["bench", "data", "recipe=zero1", "model=glm_tiny", f"output={output}"]) == 2
    assert "is not a list of results" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "{}"
    assert main(["bench", "everything"]) == 2
    assert "Known: data, resume, faults." in capsys.readouterr().err
