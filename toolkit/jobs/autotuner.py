"""DeepSpeed's autotuner, told by a recipe: it chooses what to try next and compares.

Runs, their clock and the limits of memory are ours, as those of DeepSpeed 0.19.8 do not help: `deepspeed
--autotuning` wants a JSON among the program's arguments and hands experiments over in base64 in its place, cleans up by
`pkill` over pdsh also on one machine, and breaks where MLflow is installed (KeyError: MLFLOW_RUN_ID). It times the last
step alone, from six micro-batches on without the one that updates the weights (engine.py, _autotuning_exit; timer.py,
trim_mean). It knows Adam on all weights alone, and passes later stages over once a micro-batch was too large for one.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from deepspeed.autotuning import Autotuner
from deepspeed.autotuning.scheduler import ResourceManager

from toolkit.jobs.autotune import AutotuneSearch

_MICRO = "train_micro_batch_size_per_gpu"


class _Runs(ResourceManager):
    """Runs experiments one after another, and gives the autotuner what we measured."""

    def __init__(self, search: AutotuneSearch, results: str, experiments: str) -> None:
        super().__init__(Namespace(), ["localhost"], 1, results, experiments, None)
        self.search = search

    def run(self) -> None:
        """Run what is in the queue."""
        while self.experiment_queue:
            exp = self.experiment_queue.pop(0)
            tried = exp["ds_config"]
            speed = self.search.tokens_per_s(tried["zero_optimization"]["stage"], tried[_MICRO])
            if speed:
                file = Path(tried["autotuning"]["metric_path"])
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"throughput": speed}), encoding="utf-8")
            self.finished_experiments[exp["exp_id"]] = (exp, None if speed else "failed")


class _Tuner(Autotuner):
    """Tries at each stage what can be tried there."""

    def __init__(self, search: AutotuneSearch, folder: Path) -> None:
        self.search, self.folder = search, folder
        super().__init__(Namespace(user_args=[], num_nodes=1, num_gpus=1, hostfile=""), {"localhost": [0]})

    def _get_user_config(self, user_args: list[str]) -> dict[str, Any]:
        return {
            "zero_optimization": {"stage": sorted({stage for stage, _ in self.search.configs})},
            "autotuning": {
                "enabled": True,
                "fast": True,
                "results_dir": str(self.folder / "results"),
                "exps_dir": str(self.folder / "experiments"),
            },
        }

    def _get_resource_manager(self, active_resources: Any) -> _Runs:
        return _Runs(self.search, self.results_dir, self.exps_dir)

    def model_info_profile_run(self) -> dict[str, int]:
        """Return nothing that keeps it from trying; what does not fit is left out already."""
        return {"num_params": 0, "activation_mem_per_gpu": 1}

    def get_gpu_memory_info(self) -> int:
        """Return more than it will ask for."""
        return 2**62

    def tune_space(
        self,
        tuning_space: dict[str, Any],
        prev_max_mbs: int = 0,
        prev_best_mbs: int = 0,
        prev_best_metric_val: float = 0,
    ) -> Any:
        """Try a stage, whatever became of those before."""
        micro = [rows for stage, rows in self.search.configs if stage == tuning_space["zero_optimization"]["stage"]]
        self.user_config[_MICRO] = micro
        self.user_config["gradient_accumulation_steps"] = self.search.rows // max(micro)
        return super().tune_space(tuning_space, 0, prev_best_mbs, prev_best_metric_val)


def tune(search: AutotuneSearch) -> None:
    """Run the search; its results are in `search.jobs`. Raises Stopped if a signal asked for that."""
    _Tuner(search, search.sweep.folder / ".autotuning").tune()
