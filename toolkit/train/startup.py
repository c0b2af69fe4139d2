"""The start of a training process: a checked config, its environment, and what is said first. Without torch."""

import os

from toolkit.arguments import Arguments, parse, parse_checked
from toolkit.config import files, ops
from toolkit.config.load import to_yaml
from toolkit.config.mesh import accumulation, mesh_of
from toolkit.config.ops import check_compiler
from toolkit.config.preflight import check_track_here
from toolkit.config.schema import AUTO, ModelConfig, RunConfig
from toolkit.launch import deepspeed, env_vars, environment
from toolkit.messages import say, tr
from toolkit.models.directory import runs_code
from toolkit.problems import Problems


def warn_remote_code(model: ModelConfig) -> None:
    """Say, in red on a terminal, that the Python files of a model run, if they do."""
    if not model.trust_remote_code or not runs_code(model.path):
        return
    from rich.console import Console
    from rich.text import Text

    line = tr("model.trust_remote_code = true: the Python files of {path} run with all your rights.", path=model.path)
    Console().print(Text(line, style="bold red"), soft_wrap=True)


def make_ready(words: list[str], custom: bool = False) -> tuple[Arguments, environment.Ranks] | None:
    """Compose and check the config, and set this process's environment by it.

    Args:
        words: command line without what launchers add.
        custom: whether a program trains a model and a data set of its own.

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
        say(to_yaml(parse(_without_cfg(words), world_size=ranks.world_size).loaded.cfg).rstrip("\n"))
        return None
    problems = Problems()
    arguments = parse_checked(words, world_size=ranks.world_size, custom=custom, problems=problems)
    problems.attempt(check_compiler, arguments.loaded)
    if ranks.rank == 0:
        problems.attempt(check_track_here, arguments.loaded)
    problems.raise_all()
    cfg = arguments.loaded.cfg
    deepspeed.check_launcher(cfg.launch.num_nodes, ranks)
    deepspeed.check_restarts(cfg.run.max_restarts, ranks, words)
    set_environment(cfg, ranks, inherited)
    return arguments, ranks


def set_environment(cfg: RunConfig, ranks: environment.Ranks, inherited: dict[str, str]) -> None:
    """Set this process's variables by the config, and check that it can meet the other ranks."""
    env_vars.apply_env(cfg.launch.env, ranks, os.environ, inherited)
    if cfg.distributed.interface:
        environment.set_interface(cfg.distributed.interface, os.environ)
    environment.check_port(os.environ)
    ops.check_build_locks(os.environ)


def _without_cfg(words: list[str]) -> list[str]:
    place = words.index("--cfg")
    return words[:place] + words[place + 2 :]


def greet(arguments: Arguments, ranks: environment.Ranks, model: str) -> None:
    """Say what begins: on which ranks, in which batches."""
    cfg = arguments.loaded.cfg
    if line := files.notice(cfg.data):
        say(line)
    for note in [*arguments.notes, *environment.mpi_notes(ranks.launcher, ranks.local_world_size, os.environ)]:
        say(note)
    is_found = cfg.batch.micro_per_gpu == AUTO
    say(
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
    warn_remote_code(cfg.model)
