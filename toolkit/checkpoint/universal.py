"""A checkpoint for another number of ranks or another ZeRO stage, through DeepSpeed's universal form.

As a program it converts (`python -m toolkit.checkpoint.universal FROM TO`): DeepSpeed's converter starts processes of
its own, and its output is for developers.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from toolkit.distributed.file_lock import build_once
from toolkit.errors import CheckpointError
from toolkit.launch.processes import run_module
from toolkit.messages import tr

SUFFIX = ".universal"


def can_convert(stage_before: int, stage_now: int) -> bool:
    """Whether the universal form leads from one ZeRO stage to another.

    Stage 0 has none, and stage 3 reads another one than 1 and 2 write (deepspeed 0.19.8, measured: KeyError in
    load_hp_checkpoint_state_from_checkpoint_dir_stage3).
    """
    return {stage_before, stage_now} <= {1, 2} or stage_before == stage_now == 3


def make(checkpoint: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """Return a checkpoint in its universal form, made now by whichever process is first; the others wait.

    No process waits in a collective, however long it takes.

    Args:
        checkpoint: verified.
        folder: where it is made; the checkpoint may lie on a disk that cannot be written to.
        say: tells the user.

    Raises:
        CheckpointError: DeepSpeed cannot convert it.
        DataError: the disk is full or not writable.
    """
    target = folder / (checkpoint.name + SUFFIX)
    build_once(
        target, partial(_convert, checkpoint, say), lambda made: (made / "zero").is_dir(), say, setting="run.dir"
    )
    return target


def remove(universal: Path) -> None:
    """Remove what `make` made; the checkpoint itself stays."""
    shutil.rmtree(universal, ignore_errors=True)
    universal.with_name(universal.name + ".lock").unlink(missing_ok=True)


def _convert(checkpoint: Path, say: Callable[[str], None], target: Path) -> None:
    say(tr("Converting {checkpoint} for other ranks or another ZeRO stage …", checkpoint=checkpoint))
    if reason := run_module("toolkit.checkpoint.universal", str(checkpoint), str(target)):
        raise CheckpointError(tr("cannot convert {folder}: {reason}.", folder=checkpoint, reason=reason))


def main() -> None:
    """Convert."""
    from deepspeed.checkpoint import ds_to_universal

    from toolkit.checkpoint import engine_files  # noqa: F401  lets its classes be read

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"

    source, target = sys.argv[1:]
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=source,
            output_folder=target,
            num_extract_workers=2,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


if __name__ == "__main__":
    main()
