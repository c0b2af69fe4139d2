"""Checkpoints brought into another form: DeepSpeed's universal one for other ranks, and weights read without ranks."""

import argparse
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from toolkit.checkpoint.engine_files import read_file, unreadable_error
from toolkit.distributed.file_lock import build_once
from toolkit.distributed.process_group import join_parts
from toolkit.launch.processes import run_module
from toolkit.messages import CheckpointError, NotExportable, say

SUFFIX = ".universal"


def make_universal(checkpoint: Path, folder: Path) -> Path:
    """Return a checkpoint's universal form, made in `folder` (its own disk may be read-only) by the first process.
    Others wait in no collective, however long it takes. CheckpointError if DeepSpeed cannot convert it.
    """
    made = folder / (checkpoint.name + SUFFIX)

    def convert(target: Path) -> None:
        say("Converting {checkpoint} for other ranks or another ZeRO stage …", checkpoint=checkpoint)
        if reason := run_module("toolkit.checkpoint.convert", str(checkpoint), str(target)):
            raise CheckpointError("cannot convert {folder}: {reason}.", folder=checkpoint, reason=reason)

    build_once(made, convert, lambda target: (target / "zero").is_dir(), setting="run.dir")
    return made


def remove_universal(universal: Path) -> None:
    """Remove what `make_universal` made; the checkpoint itself stays."""
    shutil.rmtree(universal, ignore_errors=True)
    universal.with_name(universal.name + ".lock").unlink(missing_ok=True)


_LAYERS = "layer_*-model_states.pt"
_PARTS, _FIRST_PART = "mp_rank_*_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"


def iter_weights(checkpoint: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each parameter and buffer, in `dtype` if partitioned; tied ones may come twice.
    CheckpointError if a file is missing, damaged or runs code; NotExportable if weights are in an NVMe offload's
    files.
    """
    if layers := sorted(checkpoint.glob(_LAYERS)):
        for file in layers:
            yield from read_file(file, mmap=True).items()
    elif parts := sorted(checkpoint.glob(_PARTS)):
        modules = [read_file(part, mmap=True)["module"] for part in parts]
        yield from ((name, join_parts(name, [module[name] for module in modules])) for name in modules[0])
    else:
        yield from _join_zero_parts(checkpoint, dtype)


def _join_zero_parts(checkpoint: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    first = read_file(checkpoint / _FIRST_PART, mmap=True)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # over DeepSpeed's own arguments, which allow anything
    place = checkpoint.resolve()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # progress, for developers
            found = get_fp32_state_dict_from_zero_checkpoint(str(place.parent), tag=place.name, lazy_mode=True)
    except Exception as error:  # as above; a sum that does not come out is a ValueError
        if (checkpoint / "offloaded_tensors").is_dir():
            raise NotExportable(
                "the weights in {folder} are in the files of an NVMe offload, which only the run itself can read. "
                "Resume the run (resume={folder}) and let it finish: it writes export/.",
                folder=checkpoint,
            ) from error
        raise unreadable_error(checkpoint, error) from None
    for name, value in found.items():
        if name in first["buffer_names"]:  # DeepSpeed makes float32 of them
            yield name, first["module"][name]
        elif isinstance(value, torch.Tensor):  # not trained: kept as it is
            yield name, value
        else:
            yield name, value.contiguous().to(dtype)


def main() -> None:
    """Convert, in a process of its own."""
    from deepspeed.checkpoint import ds_to_universal

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
