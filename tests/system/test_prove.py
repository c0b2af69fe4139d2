"""`toolkit prove` with a defect planted into DeepSpeed's ZeRO-2: it is found, and named."""

import json
from pathlib import Path

import pytest
from ranks import REPOSITORY, run

HALF_A_GRADIENT = """
import importlib.abc, importlib.util, sys

class Plant(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "deepspeed.runtime.zero.stage_1_and_2":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def planted(module):
            execute(module)
            step = module.DeepSpeedZeroOptimizer.step

            def half(self, *arguments, **named):
                for parts in self.averaged_gradients.values() if self.partition_gradients else ():
                    parts[-1].mul_(0.5)
                return step(self, *arguments, **named)

            module.DeepSpeedZeroOptimizer.step = half

        spec.loader.exec_module = planted
        return spec

sys.meta_path.insert(0, Plant())
"""


@pytest.mark.timeout(1900)
def test_a_planted_defect_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HALF_A_GRADIENT)
    settings = ["recipe=quickstart", "precision=bf16", "zero=stage2", f"run.dir={tmp_path}/runs"]
    command = ["python", "-m", "toolkit", "prove", "--num_gpus=2", *settings, "steps=4", f"output={tmp_path}/out.json"]
    finished = run(command, cwd=REPOSITORY, timeout_s=1800, PYTHONPATH=str(tmp_path))
    assert finished.code == 1, finished.output[-4000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert not result["is_right"] and result["suspects"] == ["zero=stage1", "zero=stage0"]
    assert "Right with zero=stage1, zero=stage0: what that changes deviates." in finished.output
