"""Model directories that other programs load: written atomically, and read back bit for bit.

A directory gets its name once it is complete, with manifest.json: size and SHA-256 of every file.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit import disk
from toolkit.checkpoint import directory
from toolkit.distributed.process_group import full_shape, on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.messages import CheckpointError, ConfigError, ModelError, reason_of, system_text, tr
from toolkit.models import probe, stored_form, weights
from toolkit.models.directory import is_trusted
from toolkit.models.load import check_structure, stream_parameters
from toolkit.models.record import EXTRA_TENSORS
from toolkit.models.save import MAX_SHARD_SIZE, Format, save_model
from toolkit.models.stages import unwrap_model


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """How an export is written."""

    format: Format = "hf"
    """Layout of files, see `toolkit.models.save.save_model`."""
    merge: bool = False
    """Merge an adapter into the weights of its base, instead of writing it alone."""
    dtype: str = ""
    """Precision of the weights, such as bfloat16; "" that of the training."""
    max_shard_size: str = MAX_SHARD_SIZE
    text_only: bool = False
    """Write only the text model of a multimodal one."""

    def __post_init__(self) -> None:
        if self.format == "official" and (self.dtype or self.max_shard_size != MAX_SHARD_SIZE):
            raise ConfigError(tr("format=official keeps precisions and files: remove dtype= and max_shard_size=."))
        if self.format == "official" and self.text_only:
            raise ConfigError(tr("text_only=true writes transformers' layout: remove format=official."))

    def check_whole_model(self) -> None:
        """Raise ConfigError for merge=true, when what is exported is a full model and no adapter."""
        if self.merge:
            raise ConfigError(tr("this is a whole model already: there is nothing to merge. Leave merge=true out."))

    @property
    def precision(self) -> torch.dtype | None:
        """`dtype` as torch's; None: that of the training."""
        return getattr(torch, self.dtype) if self.dtype else None


def export_model(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write the model of an engine to `folder`, with its logits of `probe_ids`. A collective."""
    probed = probe.capture_probe(engine, probe_ids)
    # On rank 0 all of the model, on others nothing.
    state = {name: value for name, value in gathered_parameters(engine.module) if value.numel()}
    on_rank0(lambda: write_folder(unwrap_model(engine.module), files, folder, "hf", probed, state))


def write_folder(
    model: PreTrainedModel,
    files: Mapping[str, bytes],
    folder: Path,
    format: Format,
    probed: probe.Probe | None,
    state: dict[str, torch.Tensor] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a model directory atomically, and read it back as it will be loaded: every tensor is there, bit for bit.

    Args:
        model: the model; on the meta device where `state` has its parameters.
        files: path -> content of all but the weights, of `toolkit.models.save.non_weight_files`.
        folder: must not exist.
        format: see `save_model`.
        probed: this model's logits of a few token ids, to prove the directory with later.
        state: full parameters by name; None: those of `model`.
        max_shard_size: largest file of weights, such as "5GB".

    Raises:
        CheckpointError: it cannot be written, or what is read back is something else.
    """
    with atomic_directory(folder) as temporary:
        # It also writes a config.json. That of `files`, which has more keys, takes its place below.
        save_model(model, temporary, format, state=state, max_shard_size=max_shard_size)
        files = {name: content for name, content in files.items() if name != stored_form.FILE}
        if EXTRA_TENSORS in files and format == "hf":
            from toolkit.export import extra_tensors

            files = extra_tensors.write(files, temporary, max_shard_size)
        write_files(files if format == "hf" else {}, temporary, probed)
        expected = weights.under_first_names(model, state if state is not None else model.state_dict())
        try:
            wrong = _wrongly_written(temporary, expected)
        except ModelError as error:  # a known defect under ZeRO-3: empty tensors
            wrong = [str(error)]
        if wrong:
            raise not_as_trained(folder, wrong)


def _wrongly_written(folder: Path, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the parameters that a directory lacks, or holds otherwise than `expected` rounded to its precision."""
    model: PreTrainedModel
    values: Iterable[tuple[str, torch.Tensor]]
    if is_trusted(folder):  # code of a directory may build what cannot be built empty
        from toolkit.models.load_weights import load_model

        model = load_model(folder)
        values = weights.under_first_names(model, model.state_dict()).items()
    else:
        model, values = stream_parameters(folder)
    missing, wrong = {*weights.shapes_of(model)}, []
    for name, value in values:
        missing.discard(name)
        if name not in expected or not is_same(expected[name].detach().cpu().to(value.dtype), value):
            wrong.append(name)
        del value
        weights.return_memory()
    return wrong + sorted(missing)


@contextmanager
def scratch_directory(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `folder`, under a name of its own; make the parent directories."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        yield Path(scratch)


@contextmanager
def atomic_directory(folder: Path) -> Iterator[Path]:
    """Yield a path to write a directory to; after the body, flush it, add a manifest and rename it to `folder`."""
    try:
        with scratch_directory(folder) as parent:
            temporary = parent / folder.name
            yield temporary
            paths = sorted(path for path in temporary.rglob("*") if path.is_file())
            for path in paths:
                disk.flush(path)
            records = {path.relative_to(temporary).as_posix(): directory.record_file(path) for path in paths}
            directory.write_manifest(temporary, records, {})
            disk.flush(temporary)
            for path in temporary.rglob("*"):
                disk.set_permissions(path)
            temporary.rename(folder)
            disk.flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: Path, error: Exception) -> CheckpointError:
    """Return the message for an error while exporting: the export cannot be written, or its source cannot be read."""
    if isinstance(error, OSError) and error.filename is not None:
        # The export is written to `folder` or to a temporary directory next to it, with its name in it.
        sibling = Path(os.path.relpath(os.fsdecode(error.filename), folder.parent)).parts[0]
        if folder.name not in sibling:
            return CheckpointError(system_text(error))
    return CheckpointError(
        "cannot write the export to {folder}: {reason}. Nothing else was touched.", folder=folder, reason=error
    )


def not_as_trained(folder: Path, names: Sequence[str]) -> CheckpointError:
    """Return the error for an export in which the parameters `names` are missing or have other values."""
    return CheckpointError(
        "the export in {folder} does not hold what was trained: {names}", folder=folder, names=list(names[:5])
    )


def save_checked(state: Mapping[str, torch.Tensor], file: Path, folder: Path) -> None:
    """Write tensors to a safetensors file and read them back, bit for bit; errors name the export's `folder`."""
    save_file({name: value.contiguous() for name, value in state.items()}, file, {"format": "pt"})
    written = weights.read_tensors(file)
    if wrong := [name for name, value in state.items() if name not in written or not is_same(value, written[name])]:
        raise not_as_trained(folder, wrong)


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals NaN."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    left, right = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def write_files(files: Mapping[str, bytes], folder: Path, probed: probe.Probe | None) -> None:
    """Write `files` (path in the directory -> content) to a directory, and the probe if there is one."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if probed is not None:
        probe.write(probed, folder)


def check_exportable(model: PreTrainedModel, files: Mapping[str, bytes], folder: Path) -> None:
    """Raise ModelError if an export to `folder` could not be read back: its config and files are written to a temporary
    directory next to it, and names and shapes compared. For rank 0 only; parameters may be partitioned.
    """
    tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    shapes = {name: full_shape(name, value) for name, value in tensors.items()}
    with trial_directory(folder) as described:
        write_files(files, described, None)
        if is_trusted(described):  # code of a directory may build what cannot be built empty
            return
        check_structure(
            described, stored_form.as_stored(model, {name: shapes[name] for name in weights.shapes_of(model)})
        )


@contextmanager
def trial_directory(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory next to an export's, to try it in; any error of the body becomes one ModelError."""
    try:
        with scratch_directory(folder) as temporary:
            yield temporary
    except Exception as error:
        raise ModelError(
            "the model of this run could not be exported after training: {reason} Nothing was trained. To train it all "
            "the same, with checkpoints alone: checkpoint.export=false.",
            reason=reason_of(error).rstrip(".") + ".",
        ) from error
