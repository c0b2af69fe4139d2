"""Every type of model that transformers calls causal trains as a plain loop does, or is rejected before step 1."""

from pathlib import Path

import pytest
from type_runs import try_type
from types_page import newest

from tests.model_types import KINDS

TOLERANCES = {"loss": 1e-6, "norm": 2e-6, "logits": 1e-4}
"""Relative, of the first loss and gradient norm; of logits, of their spread."""
WIDER = {("xlstm", "packed", "norm"): 2e-5}
"""xLSTM pads rows itself, on the right, as its chunks need it."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_type_is_what_the_page_says(kind: str, tmp_path: Path) -> None:
    row, expected = try_type(kind, tmp_path / kind), newest()["types"][kind]
    if "not built" in row:
        assert "not built" in expected, row
        return
    for way, cell in row.items():
        assert cell["state"] == expected[way]["state"], (way, cell)
        assert cell.get("reason") == expected[way].get("reason"), way
        for name, most in TOLERANCES.items():
            assert cell.get(name, 0) < WIDER.get((kind, way, name), most), (way, cell)
