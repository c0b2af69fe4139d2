"""TensorBoard's event files, in TensorBoard's own form, which needs no torch."""

import io
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from toolkit.track.backends import Backend, Row, TrackedRun, as_markdown
from toolkit.track.metrics import append_rows, tracked_name


class TensorboardEvents(Backend):
    """A file of events per session. Readers leave out what an earlier file holds after the step that one begins at.

    TensorBoard's own EventFileWriter has a thread, which one error ends for good, and tells too late what was lost.
    """

    redoes = True
    most_rows = 1000

    def begin(self, run: TrackedRun) -> None:
        """Open a file; what older ones hold after the session's first step counts no more."""
        chosen = run.settings["dir"]
        folder = Path(chosen) / f"{run.name}-{run.id}" if chosen else run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files in the order of their names.
        self.file = folder / f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        hyperparameters = {name: _plain(value) for name, value in run.hyperparameters.items()}
        texts = {
            name: "\n".join(f"    {line}" for line in text.splitlines())  # as it is, in Markdown
            for name, text in run.texts.items()
        }
        self._write(
            Event(file_version="brain.Event:2"),
            _beginning(run.step),
            Event(step=run.step, summary=hparams_pb(hyperparameters, trial_id=run.id)),
            *(Event(step=run.step, summary=_text(name, text)) for name, text in texts.items()),
        )

    def take_back(self, step: int) -> None:
        """Tell readers to leave out what comes after a step so far."""
        self._write(_beginning(step))

    def write(self, rows: Sequence[Row]) -> None:
        """Write scalars, which TensorBoard keeps in fp32."""
        events = []
        for step, values in rows:
            scalars = [Summary.Value(tag=tracked_name(name), simple_value=value) for name, value in values.items()]
            events.append(Event(step=step, summary=Summary(value=scalars)))
        self._write(*events)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Write a table."""
        self._write(Event(step=step, summary=_text(name, as_markdown(answers))))

    def _write(self, *events: Event) -> None:
        content, now = io.BytesIO(), time.time()
        records = RecordWriter(content)
        for event in events:
            event.wall_time = now
            records.write(event.SerializeToString())
        append_rows(self.file, content.getvalue())


def _beginning(step: int) -> Event:
    return Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))


def _plain(value: object) -> bool | float | str:
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value, ensure_ascii=False)


def _text(tag: str, text: str) -> Summary:
    metadata = create_summary_metadata(display_name=None, description=None)
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=make_tensor_proto(text))])
