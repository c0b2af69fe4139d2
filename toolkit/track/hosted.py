"""Trackers with a service behind them: Weights & Biases, SwanLab, Trackio, MLflow."""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.preflight import mlflow_folder
from toolkit.track.backends import EVAL, FAILED, FINISHED, STOPPED, TRAIN, Backend, TrackedRun, as_markdown
from toolkit.track.metrics import hf_name, tracked_name


class _LoggedRun(Backend):
    """A run that takes rows and texts by `log`. A step that is not after the last one it has is dropped there."""

    run: Any
    as_text: Callable[[str], object]
    """The library's type of a text in Markdown."""

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures."""
        self.run.log({tracked_name(name): value for name, value in values.items()}, step=step)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Log a table."""
        self.run.log({name: self.as_text(as_markdown(answers))}, step=step)

    def end(self, status: str) -> None:
        """Wait until all is sent, or written."""
        self.run.finish()


class WandbRun(_LoggedRun):
    """A run that is resumed under its id."""

    def __init__(self) -> None:
        import wandb

        self.wandb = wandb

    def begin(self, run: TrackedRun) -> None:
        """Begin the run or resume it; its files are in wandb/ of the run directory."""
        chosen = run.settings
        self.run = self.wandb.init(
            project=chosen["project"],
            entity=chosen["entity"] or None,
            group=chosen["group"] or None,
            tags=chosen["tags"] or None,
            mode=None if chosen["mode"] == "auto" else chosen["mode"],
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.hyperparameters),
            allow_val_change=True,
            # Neither the terminal nor what git and pip say is sent: it may hold addresses with passwords.
            settings=self.wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_save_requirements=False
            ),
        )
        self.run.define_metric("train/*", step_metric="train/global_step")
        self.run.define_metric("eval/*", step_metric="train/global_step")
        folder = Path(self.run.dir) / "run"  # next to wandb's own config.yaml
        folder.mkdir(exist_ok=True)
        for name, text in run.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            self.run.save(str(folder / name), base_path=self.run.dir, policy="now")

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures."""
        named = {tracked_name(name): value for name, value in values.items()}
        self.run.log(named | {"train/global_step": step}, step=step)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Log a table."""
        columns = ["prompt", "answer", "reference"]
        data = [[answer.get(one, "") for one in columns] for answer in answers]
        self.run.log({name: self.wandb.Table(columns=columns, data=data)}, step=step)

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Set what the run's table shows, as transformers does."""
        self.run.summary.update(dict(values))

    def end(self, status: str) -> None:
        """Wait until all is sent, or written."""
        self.run.finish(exit_code=0 if status == FINISHED else 1)


class SwanlabRun(_LoggedRun):
    """A run that is resumed under its id."""

    def __init__(self) -> None:
        import swanlab

        self.swanlab, self.as_text = swanlab, swanlab.Text

    def begin(self, run: TrackedRun) -> None:
        """Begin the run or resume it; its files are in swanlab/ of the run directory."""
        chosen = run.settings
        self.run = self.swanlab.init(
            project=chosen["project"],
            workspace=chosen["workspace"] or None,
            mode=None if chosen["mode"] == "auto" else chosen["mode"],
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(run.folder / "swanlab"),
            config=dict(run.hyperparameters),
            # Of the machine only its load is sent: what git and pip say of it may hold addresses with passwords.
            settings=self.swanlab.Settings(
                interactive=False,
                terminal={"proxy_type": "none"},
                probe={"git": False, "requirements": False, "runtime": False},
            ),
        )
        for name, text in run.texts.items():
            self.run.log({name: self.as_text(text)}, step=run.step)

    def end(self, status: str) -> None:
        """Wait until all is sent, or written."""
        if status == FINISHED:
            self.run.finish()
        else:
            self.run.finish(state="crashed", error=status)


class TrackioRun(_LoggedRun):
    """A run, on this machine or in a Hugging Face Space, that is resumed under its name, which holds the id too."""

    def __init__(self) -> None:
        import trackio

        self.trackio, self.as_text = trackio, trackio.Markdown

    def begin(self, run: TrackedRun) -> None:
        """Begin the run or resume it."""
        self.run = self.trackio.init(
            project=run.settings["project"],
            name=f"{run.name}-{run.id}",
            space_id=run.settings["space"] or None,
            config=dict(run.hyperparameters),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for name, text in run.texts.items():
            self.run.log({name: self.as_text(f"```\n{text}\n```")}, step=run.step)


_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 6000
"""Of one request to MLflow, and of one value."""
_STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
_OURS = "toolkit.run_id"


class MlflowRun(Backend):
    """A run on a server, in a database or directory, found again by a tag; MLflow keeps every value that it gets."""

    def __init__(self) -> None:
        import mlflow
        from mlflow import entities, exceptions

        self.connect, self.entities, self.error = mlflow.MlflowClient, entities, exceptions.MlflowException

    def begin(self, run: TrackedRun) -> None:
        """Find the run or make it."""
        uri = run.settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or str(run.folder.parent / "mlruns")
        if mlflow_folder(uri):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # mlflow 3 would rather have a database
        self.client = self.connect(tracking_uri=uri)
        experiment = self._experiment(run.settings["experiment"])
        found = self.client.search_runs([experiment], filter_string=f"tags.`{_OURS}` = '{run.id}'", max_results=1)
        if found:
            self.id, known = found[0].info.run_id, set(found[0].data.params)
            self.client.update_run(self.id, status="RUNNING")
        else:
            tags = {_OURS: run.id, "mlflow.source.git.commit": str(run.hyperparameters.get("commit", ""))}
            self.id, known = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id, set()
        parameters = [
            self.entities.Param(name, str(value)[:_LONGEST_PARAMETER])
            for name, value in run.hyperparameters.items()
            if name not in known  # what a run began with cannot be changed
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self.client.log_batch(self.id, params=parameters[first : first + _MOST_PARAMETERS])
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
        now, metrics = int(1000 * time.time()), []
        for name, value in values.items():
            # In the letters that MLflow takes; in a directory, eval_loss is a file, and eval_loss/a cannot be.
            valid = re.sub(r"[^\w\-. :]", "_", hf_name(name).replace("/", "."), flags=re.ASCII)
            metrics.append(self.entities.Metric(valid, value, now, step))
        self.client.log_batch(self.id, metrics)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Keep a file."""
        lines = [json.dumps(answer, ensure_ascii=False) for answer in answers]
        self.client.log_text(self.id, "\n".join(lines) + "\n", f"{name}/step-{step}.jsonl")

    def end(self, status: str) -> None:
        """Set how the run ended."""
        self.client.set_terminated(self.id, _STATUS[status])

    def _experiment(self, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name))
            except self.error:  # another run has made it meanwhile
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)
