"""Weights & Biases."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from toolkit.track.backends import FINISHED, Backend, TrackedRun
from toolkit.track.metrics import tracked_name


class WandbRun(Backend):
    """A run that goes on under its id. wandb leaves out a step that is not after the last one it has."""

    def begin(self, run: TrackedRun) -> None:
        """Begin the run or go on with it; its files lie in wandb/ of the run folder."""
        chosen = run.settings
        self.run = wandb.init(
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
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_save_requirements=False
            ),
        )
        self.run.define_metric("train/*", step_metric="train/global_step")
        self.run.define_metric("eval/*", step_metric="train/global_step")
        folder = Path(self.run.dir) / "run"  # beside wandb's own config.yaml
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
        table = wandb.Table(columns=columns, data=[[answer.get(one, "") for one in columns] for answer in answers])
        self.run.log({name: table}, step=step)

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Set what the run's table shows, as transformers does."""
        self.run.summary.update(dict(values))

    def end(self, status: str) -> None:
        """Wait until all is sent, or written."""
        self.run.finish(exit_code=0 if status == FINISHED else 1)
