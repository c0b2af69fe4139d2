"""Models of full size traced without a GPU: what a step takes is what the plan says, ranks send the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import main
from toolkit.extras.trace import TOLERANCE

MODELS = ("chatglm3_6b", "glm4_9b", "qwen3_8b")
SETTINGS = ["recipe=chatglm", "model.path=/models/none", "gpus=8x80GB", "batch.global_size=8", "trace=true"]


def traced(tmp_path: Path, *words: str) -> dict[str, Any]:
    output = tmp_path / "plan.json"
    assert main(["plan", *SETTINGS, f"output={output}", *words]) == 0
    return dict(json.loads(output.read_text())["trace"])


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_is_what_is_traced(model: str, stage: int, tmp_path: Path) -> None:
    found = traced(tmp_path, f"model={model}", f"zero=stage{stage}")
    assert abs(found["ratio"] - 1) < TOLERANCE and found["difference"] == ""


@pytest.mark.parametrize("words", [["zero=stage3"], ["zero=stage3", "tuning=lora", "data.packing=packed"]])
def test_the_plan_is_no_less_than_what_is_traced(words: list[str], tmp_path: Path) -> None:
    """Under ZeRO-3 it counts as many gathered weights as the settings allow, which is more than there are."""
    found = traced(tmp_path, *words)
    assert found["ratio"] > 1 - TOLERANCE and found["difference"] == ""


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=glm45_air_lora", "gpus=4xH100", "batch.micro_per_gpu=4"],
        ["recipe=glm45_air_lora", "gpus=8xH100"],
        ["recipe=glm47_flash", "gpus=8xH100"],
    ],
)
def test_mixtures_take_what_is_planned(words: list[str], tmp_path: Path) -> None:
    """With experts divided; how many tokens a rank gets is the plan's assumption in both."""
    output = tmp_path / "plan.json"
    assert main(["plan", *words, "trace=true", f"output={output}"]) == 0
    found = json.loads(output.read_text())["trace"]
    assert abs(found["ratio"] - 1) < 0.1 and found["difference"] == ""
    assert any("alltoall" in one[0] for one in found["ranks"][0]["collectives"])
