"""Checkpoints of the engine: written beside their place, renamed when whole, then named in `latest`."""

import os
import shutil
from pathlib import Path

from deepspeed import DeepSpeedEngine

from toolkit.distributed.process_group import barrier, on_rank0, sum_over_ranks
from toolkit.errors import CheckpointError
from toolkit.messages import tr


def save(
    engine: DeepSpeedEngine,
    folder: Path,
    step: int,
    state: dict[str, object],
    keep: int,
) -> Path:
    """Save `checkpoints/step-N`. A collective.

    DeepSpeed's own `latest` is never used: rank 0 writes it before the others have finished (deepspeed 0.19.8,
    engine.save_checkpoint).

    Args:
        engine: the engine.
        folder: checkpoints/ of the run.
        step: optimizer step.
        state: plain numbers and strings that go along (`client_state`).
        keep: newest checkpoints that stay; 0 keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    target = folder / f"step-{step}"
    temporary = folder / f"step-{step}.tmp"
    failure = ""
    try:
        engine.save_checkpoint(str(folder), tag=temporary.name, client_state=state, save_latest=False)
    except (
        OSError,
        RuntimeError,
    ) as error:  # torch.save reports a full disk as RuntimeError
        failure = str(error).splitlines()[0]
    _agree_on_success(engine, temporary, failure)
    on_rank0(lambda: _publish(temporary, target, keep))
    barrier()
    return target


def _agree_on_success(engine: DeepSpeedEngine, temporary: Path, failure: str) -> None:
    """Raise on every rank if any rank failed: none may go on alone into the next collective."""
    if float(sum_over_ranks([float(bool(failure))], engine.device)[0]) > 0:
        raise CheckpointError(
            tr(
                "cannot save the checkpoint {folder}: {reason}. Earlier checkpoints are untouched.",
                folder=temporary,
                reason=failure or tr("another rank could not write its part"),
            )
        )


def _publish(temporary: Path, target: Path, keep: int) -> None:
    temporary.rename(target)
    latest = target.parent / "latest"
    latest_new = target.parent / "latest.tmp"
    latest_new.write_text(target.name + "\n", encoding="utf-8")
    latest_new.replace(latest)
    descriptor = os.open(target.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    if keep > 0:
        # By step, never by time: clocks jump.
        existing = sorted(
            target.parent.glob("step-*[0-9]"),
            key=lambda path: int(path.name.removeprefix("step-")),
        )
        for old in existing[:-keep]:
            shutil.rmtree(old)
