"""Trackio: on this machine, or in a Hugging Face Space."""

from collections.abc import Mapping, Sequence

import trackio

from toolkit.track.backends import Backend, TrackedRun, as_markdown
from toolkit.track.metrics import tracked_name


class TrackioRun(Backend):
    """A run that goes on under its name, so the name holds the id too."""

    def begin(self, run: TrackedRun) -> None:
        """Begin the run or go on with it."""
        self.project, self.space = run.settings["project"], run.settings["space"]
        self.run = trackio.init(
            project=self.project,
            name=f"{run.name}-{run.id}",
            space_id=self.space or None,
            config=dict(run.hyperparameters),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for name, text in run.texts.items():
            self.run.log({name: trackio.Markdown(f"```\n{text}\n```")}, step=run.step)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures."""
        self.run.log({tracked_name(name): value for name, value in values.items()}, step=step)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Log a table."""
        self.run.log({name: trackio.Markdown(as_markdown(answers))}, step=step)

    def end(self, status: str) -> None:
        """Wait until all is sent, or written."""
        self.run.finish()
