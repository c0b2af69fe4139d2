"""Whether a run's checkpoints and its export can be written, and have room: asked before the first step."""

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from toolkit.checkpoint import directory
from toolkit.checkpoint.engine_files import EngineFiles
from toolkit.config.schema import CheckpointConfig
from toolkit.disk import flush
from toolkit.distributed.process_group import gather, on_rank0, rank
from toolkit.errors import CheckpointError
from toolkit.messages import tr

_TINY = {"rehearsal": torch.zeros(16)}


def try_checkpoint(folder: Path) -> None:
    """Write a small file into checkpoints/ as checkpoints are written, on every rank, and remove it. A collective.

    Raises:
        CheckpointError: some rank cannot.
    """
    was_there = on_rank0(lambda: folder.is_dir())
    reasons = gather(_reason(lambda: folder.mkdir(exist_ok=True)) if rank() == 0 else "")
    path = folder / f".rehearsal-rank-{rank():05d}.tmp"
    files = EngineFiles()

    def write() -> None:
        files.save(_TINY, str(path))
        if not files.failure:
            flush(path)
            directory.verify_files(path)

    if not any(reasons):
        written = _reason(write) or files.failure
        removed = _reason(lambda: path.unlink(missing_ok=True))
        reasons = gather(written or removed)
    is_left = rank() == 0 and not was_there and folder.is_dir()
    left = gather(_reason(folder.rmdir) if is_left else "")
    reasons = reasons if any(reasons) else left
    reason = next((f"{reason} (rank {number})" for number, reason in enumerate(reasons) if reason), "")
    if reason:
        raise CheckpointError(
            tr(
                "checkpoints cannot be written to {folder}: {reason}. Set run.dir to a folder that every rank may "
                "write to.",
                folder=folder,
                reason=reason,
            )
        )


def try_export(folder: Path) -> None:
    """Write a small model folder beside where the export will be, and remove it. For rank 0 only.

    Raises:
        CheckpointError: it cannot be written.
    """

    def write() -> None:
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            for name in ("model.safetensors", "config.json"):
                path = Path(parent) / name
                if path.suffix == ".json":
                    path.write_text("{}", encoding="utf-8")
                else:
                    save_file(_TINY, path)
                flush(path)

    if reason := _reason(write):
        raise CheckpointError(
            tr(
                "cannot write the export to {folder}: {reason}. Set run.dir to a folder that you may write to, or "
                "checkpoint.export=false.",
                folder=folder,
                reason=reason,
            )
        )


def check_room(folder: Path, config: CheckpointConfig, saves: int, each_bytes: int, export_bytes: int) -> None:
    """See whether the disk has room for all that will be on it at once. For rank 0 only.

    Args:
        folder: checkpoints/ of the run; need not exist.
        config: how many are kept.
        saves: checkpoints that are still to be saved.
        each_bytes: that one takes at least.
        export_bytes: of the export; 0 without one.

    Raises:
        CheckpointError: it has not.
    """
    # An older one goes only when its successor is whole.
    at_once = min(saves, config.keep + 1) if config.keep else saves
    count = max(at_once - len(directory.published_checkpoints(folder)), min(saves, 1))
    most = count * each_bytes
    if config.max_gib:
        most = min(most, int(config.max_gib * 2**30) + each_bytes)
    needed, free = most + export_bytes, shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
    if needed <= free:
        return
    raise CheckpointError(
        tr(
            "{folder} has {free} GB free, and this run needs {needed} GB at least: {count} checkpoints of {each} GB "
            "(checkpoint.keep = {keep}, and the next before an older one goes) and an export of {export} GB. Free "
            "some, lower checkpoint.keep, or set run.dir to another disk; train.rehearse=false leaves out this check.",
            folder=folder.parent,
            free=_gb(free),
            needed=_gb(needed),
            count=count,
            each=_gb(each_bytes),
            keep=config.keep,
            export=_gb(export_bytes),
        )
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g}"


def _reason(write: Callable[[], object]) -> str:
    """Return why something cannot be written, "" if it can."""
    try:
        write()
    except (OSError, SafetensorError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
