"""The model's weights out of the engine's files, without ranks: nothing is executed, nothing is read before it is used.

Up to ZeRO-2 they stand in one file as they were trained, or in one for each rank of a tensor group; those of a pipeline
in one file for each layer. Under ZeRO-3 each rank's optimizer file holds its part of every parameter in float32, from
which DeepSpeed puts the parameters together one by one.
"""

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.engine_files import unreadable
from toolkit.distributed.tensor import join
from toolkit.errors import NotExportable
from toolkit.messages import tr

_LAYERS = "layer_*-model_states.pt"
_PARTS, _FIRST_PART = "mp_rank_*_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"


def weights(checkpoint: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of every parameter and stored buffer as the run held them; tied ones may come twice.

    Args:
        checkpoint: verified.
        dtype: precision of the training, in which partitioned parameters are given.

    Raises:
        CheckpointError: a file is missing, damaged or wants to run code.
        NotExportable: the weights lie in the files of an offload to NVMe.
    """
    if layers := sorted(checkpoint.glob(_LAYERS)):
        for file in layers:
            yield from _load(file).items()
    elif parts := sorted(checkpoint.glob(_PARTS)):
        modules = [_load(part)["module"] for part in parts]
        yield from ((name, join(name, [module[name] for module in modules])) for name in modules[0])
    else:
        yield from _put_together(checkpoint, dtype)


def _load(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle and zip raise whatever they like on damaged files
        raise unreadable(path, error) from None
    return found


def _put_together(checkpoint: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    first = _load(checkpoint / _FIRST_PART)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # over DeepSpeed's own arguments, which allow anything
    place = checkpoint.resolve()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # progress, for developers
            found = get_fp32_state_dict_from_zero_checkpoint(str(place.parent), tag=place.name, lazy_mode=True)
    except Exception as error:  # as above; a sum that does not come out is a ValueError
        if (checkpoint / "offloaded_tensors").is_dir():
            raise NotExportable(
                tr(
                    "the weights in {folder} lie in the files of an offload to NVMe, which only the run itself can "
                    "read. Go on with the run (resume={folder}) to its end: it writes export/.",
                    folder=checkpoint,
                )
            ) from error
        raise unreadable(checkpoint, error) from None
    for name, value in found.items():
        if name in first["buffer_names"]:  # DeepSpeed makes float32 of them
            yield name, first["module"][name]
        elif isinstance(value, torch.Tensor):  # not trained: kept as it is
            yield name, value
        else:
            yield name, value.contiguous().to(dtype)
