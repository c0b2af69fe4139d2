"""Repeat one step of a run from the nearest checkpoint: bit for bit, with the loss of each micro-batch.

toolkit replay RUN step=N

  RUN      a run directory, also of a run that has ended
  step=N   the optimizer step; the steps since the newest checkpoint before it are done again, from the start if
           there is none

On as many ranks as the run had:  deepspeed --num_gpus 8 --module toolkit replay RUN step=N

Nothing in RUN changes; a directory in RUN/replays/step-N is made, whose step-N.jsonl holds the samples of the step with
the loss of their micro-batch, for `toolkit show`. Use it where the loss or the gradient norm has a spike.
"""

import os
import time
from pathlib import Path

from toolkit.command_line import named_arguments, positive_int
from toolkit.config.context_length import check_positions
from toolkit.config.hub import resolve_model_path
from toolkit.launch import ancestors, environment
from toolkit.train.startup import make_ready


def run(words: list[str]) -> None:
    """Train again up to a step of a run, in a directory of its own. A collective of as many ranks as the run had."""
    usage = "toolkit replay runs/NAME step=120"
    arguments = named_arguments(
        environment.strip_launcher_arguments(words), required=("run", "step"), optional=(), usage=usage, bare="run"
    )
    step, folder = positive_int(arguments, "step"), Path(arguments["run"])
    assert step is not None
    from toolkit.train.replay import replay, replay_overrides

    overrides = replay_overrides(folder, step, environment.detect(os.environ))
    ready = make_ready([*overrides, *(word for word in words if word.startswith("language="))])
    assert ready is not None  # None is for `--cfg job`, which is no argument here
    replayed, ranks = ready
    loaded = resolve_model_path(replayed.loaded)
    check_positions(loaded)
    from toolkit.tasks.registry import task_of
    from toolkit.train.trainer import Trainer

    trainer = Trainer(task_of(loaded.cfg), loaded.cfg, ranks, time.monotonic() - ancestors.age_s())
    replay(trainer, step, folder / "metrics.jsonl")
