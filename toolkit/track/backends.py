"""`Backend`, the interface of a tracker, and one class for each: files (CSV, TensorBoard) and services."""

import csv
import io
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.disk import write_atomically
from toolkit.track.metrics import append_rows, hf_name, tracked_name

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
TRAIN, EVAL, ANSWERS, SAMPLES = "train", "eval", "answers", "samples"
"""Parts of what is tracked: rows of steps, of evaluations, answers to validation samples and to `evaluate.prompts`."""

Row = tuple[int, Mapping[str, float]]
"""A step and its figures, under their names in metrics.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run before its first row. All texts are without secrets."""

    name: str
    id: str
    """Unique to this run; the same when it is resumed."""
    folder: Path
    settings: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    """Dotted key -> value: the config, the data, the code's commit, the versions."""
    texts: Mapping[str, str]
    """File name -> content, such as config.yaml."""
    step: int
    """The step that the session resumes after; 0 at the start."""


class Backend:
    """A tracker; its constructor imports its library. Methods run in a thread of its own and may be slow; what they
    raise is reported once and retried.
    """

    redoes = False
    """Whether rows after a step can be taken back (`take_back`), so that they can be written again."""
    most_rows = 1
    """Rows that `write` takes in one call: all of them are written or, if it raises, none."""

    def begin(self, run: TrackedRun) -> None:
        """Begin the run, or resume it. Called again if it fails."""

    @staticmethod
    def folders(settings: Mapping[str, Any]) -> dict[str, Path]:
        """Return setting -> directory outside the run directory that it makes the tracker write to."""
        return {}

    def held(self) -> dict[str, int]:
        """Return the last steps that the tracker itself reports to have: TRAIN -> step, EVAL -> step; {} if unknown."""
        return {}

    def take_back(self, step: int) -> None:
        """Remove the rows after a step, as the run was rewound; called only where `redoes`."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, no more than `most_rows`."""
        for step, values in rows:
            self.row(step, values)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of one step: what `write` calls for each row, unless it is overridden."""

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Write ANSWERS or SAMPLES: each has `prompt`, `answer`, and where there is one `reference`."""

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Write figures of the whole run, at its last step: here like those of a step, as transformers does."""
        self.write([(step, values)])

    def end(self, status: str) -> None:
        """End the session with FINISHED, STOPPED or FAILED; what was written must be delivered before it returns."""


def as_markdown(answers: Sequence[Mapping[str, str]]) -> str:
    """Return answers (`prompt`, `answer`, perhaps `reference`) as a Markdown table."""
    names = [name for name in ("prompt", "answer", "reference") if any(name in answer for answer in answers)]
    lines = [names, ["---"] * len(names)]
    for answer in answers:
        lines.append([answer.get(name, "").replace("|", "\\|").replace("\n", "<br>") for name in names])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


class CsvFile(Backend):
    """metrics.csv: metrics.jsonl as a table, a column per metric; rewritten for a new session or a new column."""

    redoes = True
    most_rows = sys.maxsize

    def begin(self, run: TrackedRun) -> None:
        """Make the file, without rows; one of an earlier session stays until its rows are there again."""
        self.path = run.folder / "metrics.csv"
        self.columns = ["step"]
        self.is_old = self.path.exists()  # all in it is of an earlier session: the first `write` replaces it
        if not self.is_old:
            self._write(self.columns, [])

    def held(self) -> dict[str, int]:
        """Return -1 for both: a resumed run writes the whole file again."""
        return {TRAIN: -1, EVAL: -1}

    def take_back(self, step: int) -> None:
        """Rewrite the file without rows after `step`; not before the new session has written any."""
        if not self.is_old:
            self._write(self.columns, [row for row in self._read() if int(row["step"]) <= step])

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; an empty cell is a metric that a row does not have."""
        csv_rows = [
            {"step": str(step)}
            | {name: str(int(value) if value.is_integer() else value) for name, value in values.items()}  # 12, not 12.0
            for step, values in rows
        ]
        columns = list(dict.fromkeys([*self.columns, *(name for row in csv_rows for name in row)]))
        has_rows_of_session = self.path.exists() and not self.is_old
        if has_rows_of_session and columns == self.columns:
            append_rows(self.path, _csv(columns, csv_rows))
            return
        self._write(columns, [*(self._read() if has_rows_of_session else []), *csv_rows])
        self.columns, self.is_old = columns, False  # not before: without room for it, it is tried again

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Skip it: the table holds logged steps and evaluations only."""

    def _read(self) -> list[dict[str, str]]:
        """Return the rows of metrics.csv."""
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
        """Replace metrics.csv by a header and rows."""
        header = {column: column for column in columns}
        write_atomically(self.path, _csv(columns, [header, *rows]))


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> bytes:
    """Return rows as CSV lines without a header."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue().encode()


class TensorboardEvents(Backend):
    """A file of events per session. TensorBoard's own EventFileWriter has a thread that one error ends for good, and
    reports too late what was lost.
    """

    redoes = True
    most_rows = 1000

    def __init__(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.record_writer import RecordWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self.event, self.start, self.records = Event, SessionLog.START, RecordWriter
        self.hparams, self.tensor = hparams_pb, make_tensor_proto
        self.text_metadata = create_summary_metadata(display_name=None, description=None)

    @staticmethod
    def folders(settings: Mapping[str, Any]) -> dict[str, Path]:
        """Return the directory that `track.tensorboard.dir` names, if any."""
        return {"dir": Path(settings["dir"])} if settings["dir"] else {}

    def begin(self, run: TrackedRun) -> None:
        """Start an event file with hyperparameters and texts; readers then ignore older files after the first step."""
        chosen = run.settings["dir"]
        folder = Path(chosen) / f"{run.name}-{run.id}" if chosen else run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files in the order of their names, and know them by "tfevents".
        self.file = folder / f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        hyperparameters = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value, ensure_ascii=False)
            for name, value in run.hyperparameters.items()
        }
        # Indented: Markdown shows them as code.
        texts = {name: "\n".join(f"    {line}" for line in text.splitlines()) for name, text in run.texts.items()}
        self._write(
            {"file_version": "brain.Event:2"},
            self._beginning(run.step),
            {"step": run.step, "summary": self.hparams(hyperparameters, trial_id=run.id)},
            *(self._text(run.step, name, text) for name, text in texts.items()),
        )

    def take_back(self, step: int) -> None:
        """Make readers ignore the events after a step that were written so far."""
        self._write(self._beginning(step))

    def write(self, rows: Sequence[Row]) -> None:
        """Write scalars, which TensorBoard keeps in fp32."""
        events = []
        for step, values in rows:
            scalars = [{"tag": tracked_name(name), "simple_value": value} for name, value in values.items()]
            events.append({"step": step, "summary": {"value": scalars}})
        self._write(*events)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Write answers as a Markdown table."""
        self._write(self._text(step, name, as_markdown(answers)))

    def _beginning(self, step: int) -> dict[str, Any]:
        """Return an event that starts a session after `step`: readers drop older events of later steps."""
        return {"step": step + 1, "session_log": {"status": self.start}}

    def _text(self, step: int, tag: str, text: str) -> dict[str, Any]:
        """Return an event with a text in Markdown."""
        value = {"tag": f"{tag}/text_summary", "metadata": self.text_metadata, "tensor": self.tensor(text)}
        return {"step": step, "summary": {"value": [value]}}

    def _write(self, *events: Mapping[str, Any]) -> None:
        """Append events (fields of the protobuf Event) to the file."""
        content, now = io.BytesIO(), time.time()
        records = self.records(content)
        for event in events:
            records.write(self.event(wall_time=now, **event).SerializeToString())
        append_rows(self.file, content.getvalue())


class _LoggedRun(Backend):
    """A run of wandb, SwanLab or Trackio, logged by `log`; they drop a step that is not after their last one."""

    run: Any
    as_text: Callable[[str], object]
    """The library's type of a text in Markdown."""

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Log figures under transformers' names."""
        self.run.log({tracked_name(name): value for name, value in values.items()}, step=step)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Log answers as a Markdown table."""
        self.run.log({name: self.as_text(as_markdown(answers))}, step=step)

    def end(self, status: str) -> None:
        """Finish the run, whatever its status."""
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
        """Log figures under transformers' names, with the step as a figure that charts use as x axis."""
        named = {tracked_name(name): value for name, value in values.items()}
        self.run.log(named | {"train/global_step": step}, step=step)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Log answers as a table."""
        columns = ["prompt", "answer", "reference"]
        data = [[answer.get(column, "") for column in columns] for answer in answers]
        self.run.log({name: self.wandb.Table(columns=columns, data=data)}, step=step)

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Set the run's summary values, as transformers does."""
        self.run.summary.update(dict(values))

    def end(self, status: str) -> None:
        """End the run with exit code 0 if it has finished, else 1."""
        code = 0 if status == FINISHED else 1
        self.run.finish(exit_code=code)
        # `finish` of 0.31 does not wait for wandb's own process to close its file, and that process ends within 0.1 s
        # of this one, without a flush ("parent process exited, terminating service process").
        self.wandb.teardown(exit_code=code)


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
        """End the run as finished or crashed."""
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
        """Begin the run, or resume it under its name."""
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

    @staticmethod
    def folders(settings: Mapping[str, Any]) -> dict[str, Path]:
        """Return the directory that a tracking URI means; {} for a server or a database."""
        uri = settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI", "")
        parts = urlsplit(uri)
        is_folder = uri and parts.scheme in ("", "file")
        return {"uri": Path(parts.path if parts.scheme == "file" else uri)} if is_folder else {}

    def begin(self, run: TrackedRun) -> None:
        """Begin the run, or resume the one with this run's id as a tag; log hyperparameters and texts."""
        uri = run.settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or str(run.folder.parent / "mlruns")
        if self.folders({"uri": uri}):  # a directory
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # mlflow 3 would rather have a database
        self.client = self.connect(tracking_uri=uri)
        experiment = self._experiment(run.settings["experiment"])
        runs = self.client.search_runs([experiment], filter_string=f"tags.`{_OURS}` = '{run.id}'", max_results=1)
        if runs:
            self.id, logged = runs[0].info.run_id, set(runs[0].data.params)
            self.client.update_run(self.id, status="RUNNING")
        else:
            tags = {_OURS: run.id, "mlflow.source.git.commit": str(run.hyperparameters.get("commit", ""))}
            self.id, logged = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id, set()
        parameters = [
            self.entities.Param(name, str(value)[:_LONGEST_PARAMETER])
            for name, value in run.hyperparameters.items()
            if name not in logged  # what a run began with cannot be changed
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self.client.log_batch(self.id, params=parameters[first : first + _MOST_PARAMETERS])
        for name, text in run.texts.items():
            self.client.log_text(self.id, text, name)

    def held(self) -> dict[str, int]:
        """Ask MLflow for the last steps of the training and the validation loss."""
        steps = {}
        for part, name in ((TRAIN, "loss"), (EVAL, "eval_loss")):
            history = self.client.get_metric_history(self.id, name)
            steps[part] = max((metric.step for metric in history), default=-1)
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
        """Log the answers as a JSONL file."""
        lines = [json.dumps(answer, ensure_ascii=False) for answer in answers]
        self.client.log_text(self.id, "\n".join(lines) + "\n", f"{name}/step-{step}.jsonl")

    def end(self, status: str) -> None:
        """Set the run's final status."""
        self.client.set_terminated(self.id, _STATUS[status])

    def _experiment(self, name: str) -> str:
        """Return the id of the experiment of this name, which is created if it does not exist."""
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self.client.create_experiment(name))
            except self.error:  # another run has made it meanwhile
                experiment = self.client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


BACKENDS: dict[str, type[Backend]] = {
    "tensorboard": TensorboardEvents,
    "csv": CsvFile,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "swanlab": SwanlabRun,
    "trackio": TrackioRun,
}
"""By their names in `track`."""
