"""What every session begins with, whatever it trains: its folder, its logs, and who looks after it."""

import os
import time
from dataclasses import replace
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.cli import run_logs
from toolkit.cli.context import AnySession
from toolkit.config import ops
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import AUTO, RunConfig
from toolkit.distributed import failure, process_group
from toolkit.distributed.watchdog import Watchdog
from toolkit.errors import RunFolderError
from toolkit.launch import environment, rank_status
from toolkit.launch.environment import Ranks
from toolkit.messages import say, tr
from toolkit.report.automatic import PATIENCE_S, AutomaticReport
from toolkit.train import resume
from toolkit.train.resume import Origin


def begin(cfg: RunConfig, ranks: Ranks) -> tuple[Origin, list[str]]:
    """Choose the run folder, see that all ranks see it, and write logs into it. A collective.

    Args:
        cfg: checked config.
        ranks: who this process is.

    Returns:
        The folder and what the run goes on from; the host of each rank.
    """
    origin = process_group.on_rank0(lambda: resume.choose(cfg, say))
    folder = origin.folder
    if ranks.rank and ranks.local_rank == 0:  # rank 0 has told it; a `toolkit launch` of another machine has no other
        rank_status.report_status(folder=str(folder))
    everybody = _check_shared(folder)
    failure.watch_failures(folder, ranks.rank, everybody)
    run_logs.begin(folder / "logs" / f"rank_{ranks.rank}.log", ranks.rank)
    return origin, [peer.host for peer in everybody]


def with_optimizer(cfg: RunConfig, origin: Origin) -> RunConfig:
    """Return the config with `optim.torch` decided, the same on all ranks and in every session of a run. A collective.

    Args:
        cfg: checked config.
        origin: what the run resumes from.
    """
    if cfg.optim.torch != AUTO:
        return cfg
    mine, reason = ops.with_optimizer(cfg)
    found = process_group.gather((bool(mine.optim.torch), reason))
    known = process_group.on_rank0(lambda: _optimizer_before(origin))
    is_torch = any(torch for torch, _ in found) or known is True  # a node without a compiler decides for all
    if is_torch and known is True and not any(torch for torch, _ in found):
        reason = tr("as before")
    else:
        reason = next(reason for torch, reason in found if torch == is_torch)
    if process_group.rank() == 0 and OPTIMIZERS[cfg.optim.name].takes_adam:
        whose = tr("PyTorch's own Adam") if is_torch else tr("DeepSpeed's Adam")
        say(tr("optim.torch = auto: {whose} ({reason}).", whose=whose, reason=reason))
    return replace(cfg, optim=replace(cfg.optim, torch=is_torch))


def _optimizer_before(origin: Origin) -> bool | None:
    """Return what the checkpoint's run decided; None without one."""
    if origin.checkpoint is None:
        return None
    known = directory.read_run_state(origin.checkpoint).config.get("optim", {}).get("torch")
    return known if isinstance(known, bool) else None


def _check_shared(folder: Path) -> list[failure.Peer]:
    """Refuse a run folder that some rank does not see: its part of a checkpoint would be lost to the others.

    Returns:
        The process of each rank.

    Raises:
        RunFolderError: on every rank.
    """
    found = process_group.gather((failure.me(), folder.is_dir()))
    blind = [peer.host for peer, sees in found if not sees]
    if blind:
        raise RunFolderError(
            tr(
                "the run folder {folder} is not there on {hosts}: checkpoints need a disk that all machines share. Set "
                "run.dir to a folder on one.",
                folder=folder,
                hosts=", ".join(sorted(set(blind))),
            )
        )
    return [peer for peer, _ in found]


def ready_line(session: AnySession) -> str:
    """Return how long it took until the first step can begin."""
    seconds = f"{time.monotonic() - session.started:.0f}"
    return tr("Ready after {seconds} s, counted from the start of the command.", seconds=seconds)


def reporter(cfg: RunConfig, folder: Path) -> AutomaticReport | None:
    """Return what makes a run's report, None where none is wanted. For rank 0 only."""
    if not cfg.report.enabled:
        return None
    patience_s = min(PATIENCE_S, cfg.distributed.timeout_s / 2)  # in the end the other ranks wait in a collective
    return AutomaticReport(folder, environment.without_ranks(os.environ), say, patience_s)


def watchdog(session: AnySession) -> Watchdog:
    """Return what notices that a session hangs."""
    ranks, config = session.ranks, session.cfg.distributed
    return Watchdog(session.folder, ranks.rank, ranks.world_size, config.hang_after_s, float(config.timeout_s))
