"""SwanLab."""

from collections.abc import Mapping, Sequence

import swanlab

from toolkit.track.backends import FINISHED, Backend, TrackedRun, as_markdown
from toolkit.track.metrics import tracked_name


class SwanlabRun(Backend):
    """A run that goes on under its id. SwanLab leaves out a step of a metric that is not after the last one it has."""

    def begin(self, run: TrackedRun) -> None:
        """Begin the run or go on with it; its files lie in swanlab/ of the run folder."""
        chosen = run.settings
        self.run = swanlab.init(
            project=chosen["project"],
            workspace=chosen["workspace"] or None,
            mode=None if chosen["mode"] == "auto" else chosen["mode"],
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(run.folder / "swanlab"),
            config=dict(run.hyperparameters),
            # Of the machine only its load is sent: what git and pip say of it may hold addresses with passwords.
            settings=swanlab.Settings(
                interactive=False,
                terminal={"proxy_type": "none"},
                probe={"git": False, "requirements": False, "runtime": False},
            ),
        )
        for name, text in run.texts.items():
            self.run.log({name: swanlab.Text(text)}, step=run.step)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures."""
        self.run.log({tracked_name(name): value for name, value in values.items()}, step=step)

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Log a text."""
        self.run.log({name: swanlab.Text(as_markdown(answers))}, step=step)

    def end(self, status: str) -> None:
        """Wait until all is sent, or written."""
        if status == FINISHED:
            self.run.finish()
        else:
            self.run.finish(state="crashed", error=status)
