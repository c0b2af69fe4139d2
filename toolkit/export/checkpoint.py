"""A model out of a checkpoint, without the ranks that saved it: as an export, or to be run.

As a program it exports (`python -m toolkit.export.checkpoint FROM TO`): writing weights holds Python's lock, which
training beside it needs.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint import directory
from toolkit.checkpoint.convert import iter_weights
from toolkit.config.schema import TuningMethod
from toolkit.errors import CheckpointError, ConfigError, NotExportable, ToolkitError
from toolkit.export import own
from toolkit.export.adapter import write_adapter, write_original_prefix
from toolkit.export.card import FILE as CARD
from toolkit.export.card import card
from toolkit.export.folder import write_folder
from toolkit.export.tuned import Part, loaded, merged, part_of_checkpoint
from toolkit.launch.processes import run_module
from toolkit.messages import tr
from toolkit.models import adapters, probe, weights
from toolkit.models.adapters import CONFIG as ADAPTER_FILE
from toolkit.models.adapters import FILE as BASE_FILE
from toolkit.models.directory import read_object
from toolkit.models.load import empty
from toolkit.models.save import MAX_SHARD_SIZE, MODEL_DIR, Format


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a checkpoint holds of the model."""

    model: PreTrainedModel
    """Its architecture, with nothing in the parameters."""
    state: dict[str, torch.Tensor]
    """Its weights by name, tied ones once."""


def rebuild(
    checkpoint: Path, scratch: Path | None = None, part: Part | None = None, dtype: torch.dtype | None = None
) -> Rebuilt:
    """Return the whole model of a checkpoint.

    Args:
        checkpoint: verified.
        scratch: an empty folder for the weights, so that memory holds one at a time; None holds those of ZeRO-3, and
            those of a base, in memory, and maps others from the checkpoint.
        part: what the checkpoint holds, if that is not all.
        dtype: precision of the weights; None that of the training.

    Raises:
        CheckpointError: the weights cannot be read, or are not those of the model that the checkpoint describes.
        NotExportable: it was saved by an older version, or its weights lie on an NVMe disk.
        ConfigError: it cannot be merged.
        ModelError: the model that it describes cannot be built.
    """
    described = checkpoint / MODEL_DIR
    if not described.is_dir():
        raise NotExportable(
            tr(
                "{folder} does not say what its model is: it was saved by an older version. Go on with the run "
                "(resume={folder}) to its end: it writes export/.",
                folder=checkpoint,
            )
        )
    trained_in: torch.dtype = getattr(torch, read_object(described / "config.json")["dtype"])
    if part is None:
        return collect(empty(described), iter_weights(checkpoint, trained_in), checkpoint, dtype, scratch)
    return collect(*merged(part), checkpoint, dtype or trained_in, scratch)


def load_checkpoint(checkpoint: Path) -> PreTrainedModel:
    """Return the model of a checkpoint on the CPU, with what was trained in it or added to it, in its precision.

    Raises:
        CheckpointError: the weights cannot be read.
        NotExportable: see `rebuild`.
        ModelError: the model, or the one that a part was trained of, cannot be loaded.
    """
    part = part_of_checkpoint(checkpoint)
    if part is not None:
        return loaded(part)
    rebuilt = rebuild(checkpoint)
    weights.assign(rebuilt.model, rebuilt.state)
    return rebuilt.model


def collect(
    model: PreTrainedModel,
    values: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    dtype: torch.dtype | None,
    scratch: Path | None,
) -> Rebuilt:
    """Return a model and its weights, all of them and in the right shapes.

    Args:
        model: with nothing in its parameters.
        values: by name; tied ones may come twice.
        source: where they come from, for messages.
        dtype: precision in which they are kept; None their own.
        scratch: see `rebuild`.

    Raises:
        CheckpointError: they are not those of the model.
    """
    wanted, tied = weights.shapes_of(model), weights.tied_names(model)
    state: dict[str, torch.Tensor] = {}
    for name, value in values:
        if name in wanted or name not in tied:
            kept = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            state[name] = kept if scratch is None else _mapped(kept, scratch / f"{len(state)}.pt")
            del kept
        del value
        weights.return_memory()
    if wrong := weights.differences(model, state):
        raise CheckpointError(
            tr("{folder} does not hold its model: {reason}.", folder=source, reason="; ".join(wrong[:5]))
        )
    return Rebuilt(model, state)


def _mapped(value: torch.Tensor, file: Path) -> torch.Tensor:
    """Put a value into a file and return it mapped from there."""
    try:
        torch.save(value.clone(), file)  # the value alone, not all that lies in memory with it
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(
            tr(
                "cannot write the export to {folder}: {reason}. Nothing else was touched.",
                folder=file.parent,
                reason=error,
            )
        ) from error
    mapped: torch.Tensor = torch.load(file, weights_only=True, mmap=True)
    return mapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How an export is to be."""

    format: Format = "hf"
    """See `toolkit.models.save.save_model`."""
    merge: bool = False
    """Put an adapter into the weights of its base, instead of writing it alone."""
    dtype: str = ""
    """Precision of the weights, such as bfloat16; "" that of the training."""
    max_shard_size: str = MAX_SHARD_SIZE
    """See `toolkit.models.save.save_model`."""

    @property
    def precision(self) -> torch.dtype | None:
        """Return `dtype` as torch's."""
        return getattr(torch, self.dtype) if self.dtype else None


def export_checkpoint(checkpoint: Path, folder: Path, wanted: Wanted | None = None, base: str = "") -> None:
    """Write the model of a checkpoint, or its adapter. Bit for bit what the run would have exported at that step.

    Args:
        checkpoint: verified.
        folder: must not exist.
        wanted: how; None: as a run does.
        base: folder of the model that a part was trained of; "" finds it.

    Raises:
        CheckpointError: the weights cannot be read, or the export cannot be written.
        ConfigError: there is nothing to be merged, or it cannot be.
        ModelError: there is no official layout to go back to, or the base is not there.
    """
    if own.is_own(checkpoint):
        if wanted not in (None, Wanted()):
            raise ConfigError(
                tr(
                    "{folder} holds a model of one's own: its weights alone are written, as they are.",
                    folder=checkpoint,
                )
            )
        own.export_checkpoint(checkpoint, folder)
        return
    wanted = wanted or Wanted()
    described, part = checkpoint / MODEL_DIR, part_of_checkpoint(checkpoint, base)
    names = [PurePosixPath(name) for name in directory.read_manifest(checkpoint)["files"]]
    mine = [name.relative_to(MODEL_DIR) for name in names if name.is_relative_to(MODEL_DIR)]
    files = {name.as_posix(): (described / name).read_bytes() for name in mine}
    state = directory.read_run_state(checkpoint)
    is_adapter = part is not None and bool(part.settings) and not wanted.merge
    files[CARD] = card(state, is_adapter)
    taken = probe.read(checkpoint)
    export_part(
        part, folder, wanted, files, taken, lambda scratch: rebuild(checkpoint, scratch, part, wanted.precision)
    )


def export_part(
    part: Part | None,
    folder: Path,
    wanted: Wanted,
    files: Mapping[str, bytes],
    taken: probe.Probe | None,
    build: Callable[[Path], Rebuilt],
) -> None:
    """Write a model, or an adapter alone.

    Args:
        part: what was trained, if that is not all.
        folder: must not exist.
        wanted: how.
        files: of `toolkit.models.save.describe`, and the card.
        taken: what the model makes of a few ids.
        build: makes the whole model, given an empty folder for its weights.

    Raises:
        CheckpointError: the export cannot be written.
        ConfigError: there is nothing to be merged.
    """
    is_adapter = part is not None and bool(part.settings)
    if wanted.merge and not is_adapter:
        raise nothing_to_merge()
    if part is not None and is_adapter and not wanted.merge:
        is_prefix = adapters.method_of(part.settings) is TuningMethod.ptuning_v2
        whole = wanted.dtype or wanted.max_shard_size != MAX_SHARD_SIZE or (wanted.format != "hf" and not is_prefix)
        if whole and part.can_merge:
            raise ConfigError(tr("format=official, dtype= and max_shard_size= are for whole models: add merge=true."))
        if whole:
            raise ConfigError(
                tr(
                    "format=official, dtype= and max_shard_size= are for whole models, and what {folder} holds cannot "
                    "be merged into one: leave them out.",
                    folder=part.source,
                )
            )
        if wanted.format == "official":
            write_original_prefix(part.values, part.settings, part.base, folder)
        else:
            write_adapter(part.values, {**files, **part.describe()}, folder, taken)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        rebuilt = build(Path(scratch))
        own = {name: content for name, content in files.items() if name not in (BASE_FILE, ADAPTER_FILE)}
        if wanted.dtype:
            own["config.json"] = json.dumps(json.loads(own["config.json"]) | {"dtype": wanted.dtype}, indent=2).encode()
        write_folder(
            rebuilt.model, own, folder, wanted.format, taken, rebuilt.state, max_shard_size=wanted.max_shard_size
        )


def nothing_to_merge() -> ConfigError:
    """Return the error about merging what is whole."""
    return ConfigError(tr("this is a whole model already: there is nothing to merge. Leave merge=true out."))


def export_beside(checkpoint: Path, folder: Path) -> None:
    """Verify a checkpoint and export it in transformers' layout, in a process of its own, beside training.

    Raises:
        CheckpointError: it came to nothing; the message says why.
    """
    if reason := run_module("toolkit.export.checkpoint", str(checkpoint), str(folder)):
        raise CheckpointError(reason)


def main() -> None:
    """Export."""
    source, target = map(Path, sys.argv[1:])
    if wrong := directory.manifest_problems(source):
        sys.exit("; ".join(wrong[:3]))
    try:
        export_checkpoint(source, target)
    except (ToolkitError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
