"""Train a recipe; run.py is this command.

toolkit train recipe=NAME [key=value …] [--config-dir DIR] [--cfg job]

  recipe=NAME       a recipe by name (recipes/), or a path to a .yaml
  key=value         any key of docs/config.md, or a group: zero=stage3, model=glm_tiny
  deepspeed_json=F  take DeepSpeed's settings from your own JSON
  --cfg job         print the resolved config and stop
  --multirun, -m    several values of a key: see `toolkit sweep`

Under several processes: deepspeed run.py …, torchrun … run.py …, mpirun … python run.py …
"""

import os
import sys
import time
from pathlib import Path

from toolkit.cli import sweep
from toolkit.cli.compose import Composed, compose
from toolkit.config.checks import accumulation, check
from toolkit.config.checks_track import check_track_here
from toolkit.config.hub import with_folder
from toolkit.config.load import to_yaml
from toolkit.config.schema import AUTO
from toolkit.errors import ConfigError
from toolkit.launch import ancestors, build_locks, environment, forward, mpi, restarts
from toolkit.messages import say, tr


def run(words: list[str]) -> int:
    """Train, evaluate, save and export."""
    words = environment.strip_launcher_arguments(words)
    if any(word in sweep.MULTIRUN for word in words):
        return sweep.run(words)
    inherited = dict(os.environ)
    ranks = environment.detect(os.environ)
    environment.apply(ranks, os.environ)  # from here on an error knows which rank it speaks for
    if "--cfg" in words:
        print(
            to_yaml(compose(_without_cfg(words), world_size=ranks.world_size).loaded.cfg),
            end="",
        )
        return 0
    composed = compose(words, world_size=ranks.world_size)
    cfg = composed.loaded.cfg
    check(composed.loaded, ranks.world_size)
    forward.apply(cfg.launch.env, ranks, os.environ, inherited)
    if cfg.prepare.shard:
        raise ConfigError(tr("prepare.shard is for `toolkit prepare` alone: training needs all parts. Remove it."))
    ancestors.check_launcher(cfg.launch.num_nodes, ranks)
    restarts.check(cfg.run.max_restarts, ranks, words)
    if cfg.distributed.interface:
        environment.set_interface(cfg.distributed.interface, os.environ)
    environment.check_port(os.environ)
    build_locks.check(os.environ)
    if ranks.rank == 0:
        check_track_here(composed.loaded)
        _greet(composed, ranks)
    loaded = with_folder(composed.loaded, say if ranks.local_rank == 0 else lambda line: None)
    # Only now is torch imported: whatever is wrong so far was told within seconds.
    from toolkit.cli.session import train

    return train(loaded, ranks, started=time.monotonic())


def _without_cfg(words: list[str]) -> list[str]:
    place = words.index("--cfg")
    return words[:place] + words[place + 2 :]


def _greet(composed: Composed, ranks: environment.Ranks) -> None:
    cfg = composed.loaded.cfg
    for note in [*composed.notes, *mpi.notes(ranks.launcher, ranks.local_world_size, os.environ)]:
        print(note)
    is_found = cfg.batch.micro_per_gpu == AUTO
    print(
        tr(
            "{recipe}: {model}, ZeRO-{stage}, {dtype}, {world} ranks ({launcher}). Batch: "
            "{micro} x {times} x {world} = {size} rows per step (micro-batch x accumulation x ranks).",
            recipe=cfg.recipe,
            model=cfg.model.name or Path(cfg.model.path).name or "?",
            stage=cfg.zero.stage,
            dtype=cfg.precision.dtype.value,
            launcher=ranks.launcher,
            micro=cfg.batch.micro_per_gpu,
            times=AUTO if is_found else accumulation(cfg, ranks.world_size),
            world=ranks.world_size,
            size=cfg.batch.global_size,
        )
    )
    if cfg.model.trust_remote_code:
        from rich.console import Console
        from rich.text import Text

        line = tr(
            "model.trust_remote_code = true: the Python files of {path} run with all your rights.", path=cfg.model.path
        )
        Console().print(Text(line, style="bold red"), soft_wrap=True)
    sys.stdout.flush()
