"""DeepSpeed's autotuner, told by a recipe: it chooses what to try and compares; the runs are started as all others are.

`deepspeed --autotuning` of DeepSpeed 0.19.8 cannot be used: it wants a JSON among the program's arguments and hands
experiments over in base64 in its place, cleans up by `pkill` over pdsh also on one machine, breaks where MLflow is
installed (KeyError: MLFLOW_RUN_ID), forgets the activations' size that it is told, and takes any word "error" for one.
"""

import json
import shutil
import signal
import subprocess
import threading
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.autotuning import Autotuner, scheduler

from toolkit.cli.experiments import DS_CONFIG, Found, Search, overrides, read, start
from toolkit.config.schema import Dtype
from toolkit.messages import say, tr

_SECTION = "ds_config"
scheduler.tqdm = partial(scheduler.tqdm, disable=True)  # its bar would run through our lines


class _Runs(scheduler.ResourceManager):
    """Runs experiments by `toolkit launch`."""

    def __init__(self, search: Search, results: Path, experiments: Path) -> None:
        each = min(map(len, search.hosts.values()))
        super().__init__(Namespace(), list(search.hosts), each, str(results), str(experiments), None)
        self.search = search
        self.running: set[subprocess.Popen[bytes]] = set()

    def run_job(self, exp: dict[str, Any], reservations: Any) -> None:
        """Start one, in a thread that lasts as long as it."""
        folder = Path(exp["result_dir"])
        shutil.rmtree(folder, ignore_errors=True)  # of an experiment that was broken off
        folder.mkdir(parents=True)
        (folder / DS_CONFIG).write_text(json.dumps(exp[_SECTION], indent=2) + "\n", encoding="utf-8")
        words = overrides(exp[_SECTION])
        say(tr("Tries {words}", words=" ".join(words)))

        def wait() -> None:
            process = start(self.search, words, folder)
            self.running.add(process)
            process.wait()
            self.running.discard(process)
            # The autotuner looks for errors in here; what failed has no figures, and is tried again next time.
            (folder / "stderr.log").touch()
            say(f"  {read(folder).told()}")

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self.running_experiments[exp["exp_id"]] = (thread, exp, reservations, 0.0)

    def stop(self) -> None:
        """End what still runs."""
        for process in list(self.running):
            process.send_signal(signal.SIGTERM)
            process.wait()


class _Tuner(Autotuner):
    """Knows the model's memory from its plan, where DeepSpeed's own assumes Adam on all weights."""

    def __init__(self, search: Search) -> None:
        self.search = search
        super().__init__(Namespace(user_args=[], num_nodes=0, num_gpus=0, hostfile=""), search.hosts)

    def _get_user_config(self, user_args: list[str]) -> dict[str, Any]:
        search = self.search
        return {
            "train_micro_batch_size_per_gpu": search.micro,
            "gradient_accumulation_steps": search.rows // max(search.micro),
            "zero_optimization": {"stage": search.stages},
            "fp16": {"enabled": search.cfg.precision.dtype is not Dtype.fp32},
            "autotuning": {
                "enabled": True,
                "fast": search.is_fast,
                "overwrite": False,
                "results_dir": str(search.folder / "results"),
                "exps_dir": str(search.folder / "experiments"),
            },
        }

    def _get_resource_manager(self, active_resources: Any) -> _Runs:
        return _Runs(self.search, Path(self.results_dir), Path(self.exps_dir))

    def model_info_profile_run(self) -> dict[str, int]:
        """Return what a run of its own would measure."""
        one, two = (self.search.peak_bytes(0, micro) for micro in (1, 2))
        return {
            "num_params": self.search.outline.num_parameters,
            "hidden_size": self.search.outline.sizes["hidden"],
            "activation_mem_per_gpu": max(two - one, 1),
        }

    def get_instantiation_memory_required_per_gpu(self, zero_stage: int) -> int:
        """Return the bytes of a rank without activations."""
        return self.search.peak_bytes(int(zero_stage), 1) - int(self.get_activation_memory_per_gpu())


def tune(search: Search) -> list[Found]:
    """Run the search.

    Returns:
        What was found of each experiment, the same settings once.
    """
    for name in ("results", "experiments"):
        (search.folder / name).mkdir(parents=True, exist_ok=True)
    tuner = _Tuner(search)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tuner.tune()
    finally:
        tuner.rm.stop()
        signal.signal(signal.SIGTERM, before)
    return [read(file.parent) for file in sorted((search.folder / "results").glob(f"*/{DS_CONFIG}"))]
