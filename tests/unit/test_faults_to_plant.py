"""The table of scripts/plant_faults: every place is there once, and so are the tests that must find a fault there."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_every_fault_can_be_planted() -> None:
    table = yaml.safe_load((ROOT / "tests" / "planted_faults.yaml").read_text(encoding="utf-8"))
    assert len(table) >= 20
    for name, fault in table.items():
        assert set(fault) == {"file", "old", "new", "harm", "tests"}, name
        assert (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) == 1, name
        assert (ROOT / fault["tests"].split()[0].partition("::")[0]).is_file(), name
