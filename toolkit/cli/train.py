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

from toolkit.arguments import Arguments as Composed
from toolkit.arguments import parse as compose
from toolkit.arguments import parse_checked as compose_checked
from toolkit.cli import sweep
from toolkit.cli.trusted import warn_of_code
from toolkit.config import files, ops
from toolkit.config.hub import resolve_model_path
from toolkit.config.load import to_yaml
from toolkit.config.mesh import accumulation, mesh_of
from toolkit.config.ops import check_compiler
from toolkit.config.preflight import check_positions, check_track_here
from toolkit.config.schema import AUTO
from toolkit.errors import ConfigError
from toolkit.launch import deepspeed, env_vars, environment, mpi
from toolkit.messages import say, tr


def run(words: list[str]) -> int:
    """Train, evaluate, save and export."""
    words = environment.strip_launcher_arguments(words)
    if any(word in sweep.MULTIRUN for word in words):
        return sweep.run(words)
    ready = make_ready(words)
    if ready is None:
        return 0
    composed, ranks = ready
    cfg = composed.loaded.cfg
    if cfg.prepare.shard:
        raise ConfigError(tr("prepare.shard is for `toolkit prepare` alone: training needs all parts. Remove it."))
    if ranks.rank == 0:
        greet(composed, ranks, cfg.model.name or Path(cfg.model.path).name or "?")
    loaded = resolve_model_path(composed.loaded, say if ranks.local_rank == 0 else lambda line: None)
    check_positions(loaded)
    # Only now is torch imported: whatever is wrong so far was told within seconds.
    from toolkit.cli.session import train

    return train(loaded, ranks, started=time.monotonic() - deepspeed.age_s())


def make_ready(words: list[str], own: bool = False) -> tuple[Composed, environment.Ranks] | None:
    """Compose and check the config, and set this process's environment by it.

    Args:
        words: command line without what launchers add.
        own: whether a program trains a model and a data set of its own.

    Returns:
        The config, and who this process is; None where the config alone was asked for, and has been printed.

    Raises:
        ConfigError: anything wrong with the config.
        LaunchError: the processes were not started as the config says.
    """
    inherited = dict(os.environ)
    ranks = environment.detect(os.environ)
    environment.apply(ranks, os.environ)  # from here on an error knows which rank it speaks for
    if "--cfg" in words:
        print(to_yaml(compose(_without_cfg(words), world_size=ranks.world_size).loaded.cfg), end="")
        return None
    composed = compose_checked(words, world_size=ranks.world_size, own=own)
    cfg = composed.loaded.cfg
    check_compiler(composed.loaded)
    env_vars.apply_env(cfg.launch.env, ranks, os.environ, inherited)
    deepspeed.check_launcher(cfg.launch.num_nodes, ranks)
    deepspeed.check_restarts(cfg.run.max_restarts, ranks, words)
    if cfg.distributed.interface:
        environment.set_interface(cfg.distributed.interface, os.environ)
    environment.check_port(os.environ)
    ops.check_build_locks(os.environ)
    if ranks.rank == 0:
        check_track_here(composed.loaded)
    return composed, ranks


def _without_cfg(words: list[str]) -> list[str]:
    place = words.index("--cfg")
    return words[:place] + words[place + 2 :]


def greet(composed: Composed, ranks: environment.Ranks, model: str) -> None:
    """Say what begins: on which ranks, in which batches."""
    cfg = composed.loaded.cfg
    if line := files.notice(cfg.data):
        print(line)
    for note in [*composed.notes, *mpi.notes(ranks.launcher, ranks.local_world_size, os.environ)]:
        print(note)
    is_found = cfg.batch.micro_per_gpu == AUTO
    print(
        tr(
            "{recipe}: {model}, ZeRO-{stage}, {dtype}, {world} ranks ({launcher}). Batch: "
            "{micro} x {times} x {parts} = {size} rows per step (micro-batch x accumulation x data-parallel ranks).",
            recipe=cfg.recipe,
            model=model,
            stage=cfg.zero.stage,
            dtype=cfg.precision.dtype.value,
            launcher=ranks.launcher,
            micro=cfg.batch.micro_per_gpu,
            times=AUTO if is_found else accumulation(cfg, ranks.world_size),
            world=ranks.world_size,
            parts=mesh_of(cfg, ranks.world_size).data_ranks,
            size=cfg.batch.global_size,
        )
    )
    warn_of_code(cfg.model)
    sys.stdout.flush()
