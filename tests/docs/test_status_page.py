"""docs/status.md is what tests/features.yaml, the tests that it names and the results in benchmarks/ say."""

import json
from pathlib import Path
from typing import Any

import gpu_page
import pytest
from pages import ROOT
from status_page import TEXTS, TIER_OF_FOLDER, features, fill_page, gpu_dates, tier_of

from tests.conftest import FOLDERS

RESULTS = list((ROOT / "benchmarks").glob("*.json"))
PAGES = [("status.md", "en"), ("status_zh.md", "zh")]


@pytest.mark.parametrize(("page", "language"), PAGES)
def test_the_tables_are_fresh(page: str, language: str) -> None:
    """A test that is named and no longer there is an error, and so is a result that is not."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert "| ZeRO 0-3 | CI | " in text
    assert fill_page(text, language, RESULTS) == text, "run scripts/status_page.py"


def test_features_are_described_in_both_languages_and_by_known_keys() -> None:
    for feature in features():
        assert {"name"} <= set(feature) <= {"name", "tests", "how", "needs", "records", "gpu"}, feature
        assert len(feature["name"]) == 2 and feature.get("how", "CI") in TEXTS, feature
        measured = {name for name in feature.get("gpu", ()) if "::" not in name}
        assert measured <= {*gpu_page.PARTS, *gpu_page.STAGES}, feature
        for test in {*feature.get("gpu", ())} - measured:
            file, _, name = test.partition("::")
            function, _, cell = name.removesuffix("]").partition("[")
            text = (ROOT / "tests" / "gpu" / file).read_text(encoding="utf-8")
            assert f"def {function}(" in text and (not cell or f'"{cell}": (' in text), test
    names = [feature["name"][0] for feature in features()]
    assert len(set(names)) == len(names)


def test_the_page_is_short() -> None:
    lines = (ROOT / "docs" / "status.md").read_text(encoding="utf-8").splitlines()
    rows = [line.replace("|", " ").split() for line in lines if line.startswith("|")]
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= 240
    assert max(map(len, rows)) <= 12


def test_the_readme_says_whether_anything_has_run_on_a_gpu() -> None:
    for page, says in (("README.md", "no GPU run yet"), ("README_zh.md", "还没有在 GPU 上运行过")):
        assert (says in (ROOT / page).read_text(encoding="utf-8")) == (not gpu_dates(RESULTS)), page


def test_tiers_are_those_of_the_tests() -> None:
    assert TIER_OF_FOLDER == FOLDERS
    for test, tier in {
        "tests/ranks/test_trajectory.py::test_bf16_stays_near_fp32": "CI",
        "tests/ranks/test_numbers.py::test_an_update_has_its_size_when_the_loss_scale_grows": "CI",
        "tests/ranks/test_combinations.py::test_losses_are_those_of_a_plain_loop": "nightly",
        "tests/ranks/test_prove.py::test_a_recipe_is_proved": "nightly",
        "tests/system/test_cluster.py::test_the_headline": "CI",
        "tests/system/test_cluster.py::test_a_machine_that_is_lost": "nightly",
        "tests/unit/test_serving.py::test_engines": "CI",
    }.items():
        assert tier_of(test) == tier, test


@pytest.mark.parametrize("test", ["tests/ranks/test_none.py::test_x", "tests/unit/test_serving.py::test_engine"])
def test_a_test_that_is_gone_is_named(test: str) -> None:
    with pytest.raises(ValueError, match=f"names {test}, which does not exist"):
        tier_of(test)


def test_only_what_was_right_on_a_gpu_counts_as_measured(tmp_path: Path) -> None:
    def result(device: str, is_right: bool) -> list[dict[str, Any]]:
        part = {"tokens_per_s": 1.0}
        stages = {
            "fp16": {"is_right": is_right, "figures": {}},
            "prove": {"skipped": "no time was left"},
            "bench": {"figures": {"parts": {"6b-lora": part}, "marks": {}}},
        }
        return [{"measured": "gpu_first", "device": device, "stages": stages}]

    for day, device, is_right in ((1, "gpu", True), (2, "gpu", False), (3, "cpu", True)):
        (tmp_path / f"2027-01-0{day}-gpu-first.json").write_text(json.dumps(result(device, is_right)))
    files = list(tmp_path.glob("*.json"))
    assert gpu_dates(files) == {"fp16": "2027-01-01", "6b-lora": "2027-01-02", "bench": "2027-01-02"}
    page = fill_page((ROOT / "docs" / "status.md").read_text(encoding="utf-8"), "en", files)
    assert "| fp16, loss scaling | CI | 2027-01-01 |" in page and "| toolkit prove | nightly | no |" in page
    assert "4 of " in page and " features have been measured on a GPU" in page
