"""Train a recipe; run.py is the same.

toolkit train recipe=NAME [key=value …] [--config-dir DIR] [--cfg job]

  recipe=NAME       a recipe by name (recipes/), or a path to a .yaml; `recipe=` may be left out, as in all commands
  key=value         any key of docs/config.md, or a group: zero=stage3, model=glm_tiny. The usual ones:
    data=FILE       your own rows                    model.path=DIR  the model
    tuning=lora     or full, qlora, …                run.name=NAME   the run's directory: the same name resumes it
    train.epochs=3  or train.max_steps=500           optim.lr=1e-4   batch.global_size=16   data.max_length=2048
  deepspeed_json=F  take DeepSpeed's settings from your own JSON
  --cfg job         print the resolved config and stop
  --multirun, -m    several values of a key: see `toolkit sweep`

Under several processes: deepspeed run.py …, torchrun … run.py …, mpirun … python run.py …
"""

import time
from pathlib import Path

from toolkit.config import paths
from toolkit.config.context_length import check_positions
from toolkit.config.load import LoadedConfig
from toolkit.launch import ancestors, environment
from toolkit.messages import ConfigError, tr
from toolkit.train import run_dir
from toolkit.train.startup import greet, make_ready


def run(words: list[str]) -> None:
    """Train a recipe, as one of the ranks that a launcher has started, or alone."""
    words = environment.strip_launcher_arguments(words)
    ready = make_ready(words)
    if ready is None:  # `--cfg job` has printed the config
        return
    arguments, ranks = ready
    cfg = arguments.loaded.cfg
    if cfg.prepare.shard:
        raise ConfigError(tr("prepare.shard is for `toolkit prepare` alone: training needs all parts. Remove it."))
    run_dir.check_unfinished(cfg)
    if ranks.rank == 0:
        greet(arguments, ranks, cfg.model.name or Path(cfg.model.path).name or "?")
    loaded = _with_directories(arguments.loaded)
    check_positions(loaded)
    if cfg.model.published and ranks.rank == 0:  # the config names a known model: the directory may hold another
        from toolkit.config.other_model import warn_of_another_model

        warn_of_another_model(loaded.cfg.model)
    # Only now is torch imported: whatever is wrong so far was told within seconds.
    from toolkit.tasks.registry import task_of
    from toolkit.train.trainer import Trainer

    command_started = time.monotonic() - ancestors.age_s()  # which counts what the launcher took
    Trainer(task_of(loaded.cfg), loaded.cfg, ranks, command_started).train()


def _with_directories(loaded: LoadedConfig) -> LoadedConfig:
    """Return a config whose model and teacher are directories: of the Hugging Face Hub fetched, tokens added."""
    if not (paths.names_repository(loaded.cfg) or loaded.cfg.model.add_tokens):
        return loaded
    from toolkit.config.hub import resolve_model_path, resolve_teacher

    return resolve_teacher(resolve_model_path(loaded))
