"""examples/first_run.ipynb runs as it is, trains, and draws the report inline."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


@pytest.mark.default
def test_it_is_kept_without_outputs() -> None:
    """They would be of another machine, and change with each run."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # of Jupyter's own libraries
def test_it_trains_and_draws_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[dict[str, Any]] = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    drawn = [one["data"] for one in outputs if "data" in one]
    assert any("image/png" in data for data in drawn)
    assert any("<iframe srcdoc=" in data.get("text/html", "") and "vega" in data["text/html"] for data in drawn)
    text = "".join(str(one.get("text", "")) for one in outputs)
    assert "config and files are in order" in text and "\x1b[1;32m" in text and "Validation loss" in text
    assert "\x1b[?25l" not in text, "no live view"
    (run,) = (tmp_path / "runs").glob("quickstart-*")
    assert (run / "DONE").exists()
