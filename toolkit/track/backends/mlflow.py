"""MLflow: a server, a database or a folder."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from toolkit.config.preflight import mlflow_folder
from toolkit.track.backends import EVAL, FAILED, FINISHED, STOPPED, TRAIN, Backend, TrackedRun
from toolkit.track.metrics import hf_name

_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 6000
"""Of one request, and of one value."""
_STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
_OURS = "toolkit.run_id"


class MlflowRun(Backend):
    """A run that is found again by a tag. MLflow keeps every value that it gets, so it is asked for the last step."""

    def begin(self, run: TrackedRun) -> None:
        """Find the run or make it."""
        uri = run.settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or str(run.folder.parent / "mlruns")
        if mlflow_folder(uri):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # mlflow 3 would rather have a database
        self.client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(run.settings["experiment"])
        found = self.client.search_runs([experiment], filter_string=f"tags.`{_OURS}` = '{run.id}'", max_results=1)
        if found:
            self.id, known = found[0].info.run_id, set(found[0].data.params)
            self.client.update_run(self.id, status="RUNNING")
        else:
            tags = {_OURS: run.id, "mlflow.source.git.commit": str(run.hyperparameters.get("commit", ""))}
            self.id, known = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id, set()
        parameters = [
            Param(name, str(value)[:_LONGEST_PARAMETER])
            for name, value in run.hyperparameters.items()
            if name not in known  # what a run began with cannot be changed
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self.client.log_batch(self.id, params=parameters[first : first + _MOST_PARAMETERS])
        self.texts = run.texts
        for name, text in run.texts.items():
            self.client.log_text(self.id, text, name)

    def held(self) -> dict[str, int]:
        """Ask for the last steps of the two losses."""
        steps = {}
        for kind, name in ((TRAIN, "loss"), (EVAL, "eval_loss")):
            history = self.client.get_metric_history(self.id, name)
            steps[kind] = max((metric.step for metric in history), default=-1)
        return steps

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures, all of them or none."""
        now = int(1000 * time.time())
        self.client.log_batch(
            self.id, [Metric(_valid(hf_name(name)), value, now, step) for name, value in values.items()]
        )

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Keep a file."""
        lines = [json.dumps(answer, ensure_ascii=False) for answer in answers]
        self.client.log_text(self.id, "\n".join(lines) + "\n", f"{name}/step-{step}.jsonl")

    def end(self, status: str) -> None:
        """Set how the run ended."""
        self.client.set_terminated(self.id, _STATUS[status])

    def _experiment(self, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found:
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment(name))
        except MlflowException:  # another run has made it meanwhile
            found = self.client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)


def _valid(name: str) -> str:
    """Return a name in the letters that MLflow takes; in a folder, eval_loss is a file, and eval_loss/a cannot be."""
    return re.sub(r"[^\w\-. :]", "_", name.replace("/", "."), flags=re.ASCII)
