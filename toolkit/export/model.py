"""A model or an adapter out of a run, a checkpoint or another directory: read, merged, written, verified.

Written as a directory that other programs load, checked before it gets its name; `toolkit verify` reads its probe, and
manifest.json with size and SHA-256 of every file. What a run trained of a model is put together with the rest one
parameter at a time, without the ranks that saved it. Exports during training have a process of their own (`python -m`),
as writing weights holds Python's lock, which training needs.
"""

import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit import disk, secrets
from toolkit.checkpoint import directory, fragments
from toolkit.config.schema import TuningMethod
from toolkit.distributed.process_group import full_shape, gather, on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.export.merge import TunedPart, merge_adapter
from toolkit.launch.processes import run_module
from toolkit.messages import (
    CheckpointError,
    ConfigError,
    ModelError,
    NotExportable,
    ProofDiffers,
    ToolkitError,
    clauses,
    reason_of,
    say,
    system_text,
    tr,
)
from toolkit.models import adapters, base_model, chat, classifier, embedding_files, probe, structure, weights
from toolkit.models.directory import is_trusted, official_vocabulary, read_object
from toolkit.models.load import check_structure, empty, load_model, stream, streamed_model
from toolkit.models.save import MAX_SHARD_SIZE, MODEL_DIR, ORIGIN_DIR, Format, describe, save_model, stored_form
from toolkit.models.stages import capture_probe, stage_model, unwrap_model

CARD_FILE = "README.md"
_PACKAGES = ("torch", "deepspeed", "transformers", "peft")


def card(state: directory.RunState, is_adapter: bool) -> bytes:
    """Return the model card of a run, or of its adapter: what was trained, on what, how far, with what versions."""
    config: Mapping[str, Any] = secrets.hide_all(state.config)
    model, tuning, (kind, _) = config["model"], config["tuning"], _kinds(config)
    base = model["name"] or model["path"] or "?"
    pipeline = "text-generation" if kind in ("language", "distill") else "text-classification"
    front = {"pipeline_tag": pipeline, "tags": ["deepspeed", f"tuning-{tuning['method']}"]}
    if not (is_adapter and tuning["method"] == TuningMethod.ptuning_v2.value):  # which no library loads
        front["library_name"] = "peft" if is_adapter else "transformers"
    if model["hub_id"]:
        front["base_model"] = model["hub_id"]
    sources = [str(one["hub"] or one["path"] or one["format"]) for one in config["data"]["sources"]]
    facts = [
        tr("recipe: {recipe}", recipe=config["recipe"]),
        tr("base model: {path}", path=model["path"] or model["name"]),
        tr("what was trained: tuning={method}", method=tuning["method"]),
        tr("data: {sources} (store {store})", sources=", ".join(sources), store=state.data.get("store", "?")),
        tr(
            "{steps} steps, {trained} trained tokens of {total}, {ranks} ranks",
            steps=f"{state.step:,}",
            trained=f"{state.trained_tokens:,}",
            total=f"{state.total_tokens:,}",
            ranks=state.world_size,
        ),
    ]
    packages, commit = state.versions.get("packages", {}), state.versions.get("commit")
    versions = [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    versions += [tr("toolkit commit {commit}", commit=commit)] if commit else []
    keys = ("task", "tuning", "data", "preference", "distill", "batch", "optim", "schedule", "precision")
    left_out = ["task"] * (kind == "language") + ["distill"] * (kind != "distill")
    shown = {key: config[key] for key in keys if key in config and key not in left_out}
    lines = [
        *("---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", ""),
        *(f"# {tr('{base}, fine-tuned', base=base)}", "", *(f"- {fact}" for fact in facts), ""),
        *(f"## {tr('Losses')}", "", *_losses(state, config), ""),
        *(f"## {tr('Versions')}", "", *(f"- {version}" for version in versions), ""),
        *(f"## {tr('Settings')}", "", "```json"),
        *(json.dumps(shown, indent=1, ensure_ascii=False, default=str), "```", ""),
    ]
    return "\n".join(lines).encode()


def _kinds(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return kind of task and loss of preferences; a config of before there were such keys knows neither."""
    return config.get("task", {}).get("kind", "language"), config.get("preference", {}).get("loss", "none")


def _losses(state: directory.RunState, config: Mapping[str, Any]) -> list[str]:
    """Return a table of the evaluations, and the training loss at both ends."""
    lines = []
    if not math.isnan(state.first_loss):
        kind, preference = _kinds(config)
        is_of_samples = kind in ("reward", "classify", "embed") or preference != "none"
        ends = f"{state.first_loss:.4f} -> {state.last_loss:.4f}" + ("" if is_of_samples else " nats/token")
        lines += [tr("training: {losses}", losses=ends), ""]
    if state.evaluations:
        names = [name for name in state.evaluations[-1] if name != "step" and "/" not in name]  # not each source's
        lines += [f"| step | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
        lines += [
            f"| {int(row['step'])} | {' | '.join(f'{row[name]:.4g}' if name in row else '' for name in names)} |"
            for row in state.evaluations[-20:]
        ]
    return lines or [tr("none were logged")]


def export_model(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write what was trained, in transformers' layout. A collective; rank 0 holds the whole model in host memory."""
    probed, model = capture_probe(engine, probe_ids), unwrap_model(engine.module)
    state = {name: value for name, value in gathered_parameters(engine.module) if value.numel()}
    on_rank0(lambda: write_folder(model, files, folder, "hf", probed, state))


def check_exportable(model: PreTrainedModel, files: Mapping[str, bytes], folder: Path) -> None:
    """Raise ModelError unless what `export_model` or `export_adapter` will write to `folder` can be read back, by name
    and shape, without values. For rank 0 only.
    """
    held = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    shapes = {name: full_shape(name, value) for name, value in held.items()}
    with _trial_directory(folder) as described:
        write_files(files, described, None)
        if is_trusted(described):  # code of a directory may build what cannot be built empty
            return
        if not structure.has_adapter(model):
            own = {name: shapes[name] for name in weights.shapes_of(model)}
            check_structure(described, stored_form(model, own))
            return
        shell = empty(described)
        adapters.attach_adapter(shell, model.tuned.settings, model.tuned.base)
        found = {name: tuple(value.shape) for name, value in shell.state_dict(keep_vars=True).items()}
        written = {(name, shapes[name]) for name in adapters.stored_names(model)}
        read = {(name, found[name]) for name in adapters.stored_names(shell)}
        if wrong := sorted(written ^ read):
            raise _not_as_trained(folder, [name for name, _ in wrong])


def check_custom_exportable(module: torch.nn.Module, folder: Path) -> None:
    """Raise ModelError unless `export_custom` can write a model's parameters and stored buffers to `folder`, by name
    and type, without values. For rank 0 only.
    """
    named = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    with _trial_directory(folder) as trial:
        save_checked(
            {name: torch.empty(0, dtype=value.dtype) for name, value in named.items()}, trial / WEIGHTS, folder
        )


@contextmanager
def _trial_directory(folder: Path) -> Iterator[Path]:
    """Yield a directory next to that of an export; whatever a library raises at the model becomes one message."""
    try:
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as temporary:
            yield Path(temporary)
    except Exception as error:
        raise _not_exportable(reason_of(error)) from error


def _not_exportable(reason: str) -> ModelError:
    return ModelError(
        "the model of this run could not be exported after training: {reason} Nothing was trained. To train it all the "
        "same, with checkpoints alone: checkpoint.export=false.",
        reason=reason.rstrip(".") + ".",
    )


def write_folder(
    model: PreTrainedModel,
    files: Mapping[str, bytes],
    folder: Path,
    format: Format,
    probed: probe.Probe | None,
    state: dict[str, torch.Tensor] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a model directory atomically, and read it back as it is loaded: every tensor is there, bit for bit.

    `files` are those of `toolkit.models.save.describe`; `folder` must not exist; `probed` are this model's logits of a
    few ids; `state`: full parameters by name; `format`, `max_shard_size`: see `save_model`.
    """
    with atomic_directory(folder) as temporary:
        save_model(model, temporary, format, state=state, max_shard_size=max_shard_size)
        write_files(files if format == "hf" else {}, temporary, probed)
        held = weights.under_first_names(model, state if state is not None else model.state_dict())
        try:
            wrong = _wrongly_written(temporary, held)
        except ModelError as error:  # a known defect under ZeRO-3: empty tensors
            wrong = [str(error)]
        if wrong:
            raise _not_as_trained(folder, wrong)


def _wrongly_written(folder: Path, held: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters that a directory lacks, or holds otherwise than `held` in the file's precision."""
    model: PreTrainedModel
    values: Iterable[tuple[str, torch.Tensor]]
    if is_trusted(folder):  # code of a directory may build what cannot be built empty
        model = load_model(folder)
        values = weights.under_first_names(model, model.state_dict()).items()
    else:
        model, values = stream(folder)
    missing, wrong = {*weights.shapes_of(model)}, []
    for name, value in values:
        missing.discard(name)
        if name not in held or not _is_same(held[name].detach().cpu().to(value.dtype), value):
            wrong.append(name)
        del value
        weights.return_memory()
    return wrong + sorted(missing)


@contextmanager
def atomic_directory(folder: Path) -> Iterator[Path]:
    """Yield a directory to write to; with a manifest, it then gets the name `folder`, which must not exist."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A unique name: other files next to the directory are the user's.
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            temporary = Path(parent) / folder.name
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
    """Return the error about an export that cannot be written, or whose source cannot be read."""
    if isinstance(error, OSError) and error.filename is not None:
        # What is written is in the folder, or beside it in a temporary one of its name.
        place = Path(os.path.relpath(os.fsdecode(error.filename), folder.parent)).parts[0]
        if folder.name not in place:
            return CheckpointError(system_text(error))
    return CheckpointError(
        "cannot write the export to {folder}: {reason}. Nothing else was touched.", folder=folder, reason=error
    )


def _not_as_trained(folder: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "the export in {folder} does not hold what was trained: {names}", folder=folder, names=list(names[:5])
    )


def save_checked(state: Mapping[str, torch.Tensor], file: Path, folder: Path) -> None:
    """Write tensors to a file of an export to `folder`, and read them back, bit for bit."""
    save_file({name: value.contiguous() for name, value in state.items()}, file, {"format": "pt"})
    written = weights.read_tensors(file)
    if wrong := [name for name, value in state.items() if name not in written or not _is_same(value, written[name])]:
        raise _not_as_trained(folder, wrong)


def write_files(files: Mapping[str, bytes], folder: Path, probed: probe.Probe | None) -> None:
    """Write files by their path in a directory, and the probe."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if probed is not None:
        probe.write(probed, folder)


def export_adapter(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write the adapter of a tuned model (`engine.module.tuned`), and nothing else. A collective."""
    probed = capture_probe(engine, probe_ids)
    state = _adapter_state(engine)
    on_rank0(lambda: write_adapter(state, files, folder, probed))


def _adapter_state(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    model = unwrap_model(engine.module)
    names, shared = adapters.stored_names(model), adapters.shared_names(model)
    state = {names[name]: adapters.as_stored(name, value) for name, value in gathered_parameters(engine.module, names)}
    return state | {names[second]: state[names[first]].clone() for second, first in shared.items() if second in names}


def write_adapter(
    state: dict[str, torch.Tensor], files: Mapping[str, bytes], folder: Path, probed: probe.Probe | None
) -> None:
    """Write an adapter's directory atomically and read it back; `state` is by stored name."""
    empty = [name for name, value in state.items() if not value.numel()]
    if empty or not state:
        raise _not_as_trained(folder, empty)
    of_model = ("config.json", f"{ORIGIN_DIR}/")  # with one it would be taken for a model
    own = {name: content for name, content in files.items() if not name.startswith(of_model)}
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        write_files(own, temporary, probed)
        save_checked(state, temporary / adapters.WEIGHTS, folder)


def prove_adapter(engine: DeepSpeedEngine, folder: Path) -> None:
    """Compare an adapter's directory with the adapter and base in memory; raises on every rank. A collective. Equal
    numbers, settings and base give the logits of the directory's probe, so no model is loaded.
    """
    state, tuned = _adapter_state(engine), engine.module.tuned
    parts = gather(base_model.base_numbers(stage_model(engine.module)))

    @aside_if_wrong(folder)
    def compare() -> None:
        values, base = adapters.read_adapter_weights(folder), base_model.read_base(folder)
        wrong = sorted({*values} ^ {*state})
        wrong += [name for name, value in state.items() if name in values and not _is_same(value, values[name])]
        wrong += [adapters.CONFIG] * (adapters.read_settings(folder) != tuned.settings)
        wrong += [base_model.BASE_FILE] * (base != tuned.base)
        if wrong or base is None:
            raise _not_as_trained(folder, wrong)
        for part in parts:
            for name, found in part.items():
                base_model.check_numbers(base, name, found, base.path, folder)

    on_rank0(compare)


@contextmanager
def aside_if_wrong(folder: Path) -> Iterator[None]:
    """Rename an export, from export to export.wrong, that turns out not to hold what was trained."""
    try:
        yield
    except ProofDiffers:  # by rounding alone
        raise
    except (CheckpointError, ModelError) as error:
        aside = folder.rename(disk.unused_path(folder.with_name(f"{folder.name}.wrong")))
        raise CheckpointError(
            "{reason}. The export is kept as {folder} for inspection.", reason=str(error).rstrip("."), folder=aside
        ) from error


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    mine, theirs = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(mine, theirs)


def write_original_prefix(
    state: dict[str, torch.Tensor], settings: Mapping[str, Any], base: Path, folder: Path
) -> None:
    """Write a P-Tuning v2 prefix as the ChatGLM repositories' training leaves it, for their programs."""
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        torch.save({name: value.clone() for name, value in state.items()}, temporary / "pytorch_model.bin")
        own = {key: settings[key] for key in ("pre_seq_len", "prefix_projection")}
        config = json.dumps(read_object(base / "config.json") | own, indent=2, ensure_ascii=False)
        (temporary / "config.json").write_text(config + "\n", encoding="utf-8")


def part_of_checkpoint(checkpoint: Path, given: str = "") -> TunedPart | None:
    """Return what a verified checkpoint holds, None if that is the whole model; NotExportable if it does not say what
    its model is. `given` "" finds the base.
    """
    described = checkpoint / MODEL_DIR
    if not described.is_dir():
        raise NotExportable(
            "{folder} does not say what its model is: it was saved by an older version or another program. Go on with "
            "the run (resume={folder}) to its end: it writes export/.",
            folder=checkpoint,
        )
    known = base_model.read_base(described)
    if known is None:
        return None
    settings = read_object(described / adapters.CONFIG) if (described / adapters.CONFIG).is_file() else {}
    values = dict(fragments.iter_weights(checkpoint))
    if settings:
        shell = empty(described)
        adapters.attach_adapter(shell, settings, known)
        stored = adapters.stored_names(shell)
        # Beside it stand buffers, and what is tied under its second name: DeepSpeed takes neither for frozen.
        frozen = {*shell.state_dict()} - {*stored}
        values = {name: value for name, value in values.items() if name not in frozen}
        shared = adapters.shared_names(shell).items()
        values |= {second: values[first].clone() for second, first in shared if second in stored and first in values}
        if wrong := sorted({*values} ^ {*stored}):
            raise CheckpointError("{folder} does not hold its model: {reason}.", folder=checkpoint, reason=wrong[:5])
        values = {stored[name]: adapters.as_stored(name, value) for name, value in values.items()}
    config = read_object(described / "config.json")
    head = (
        classifier.Head(tuple(config["id2label"].values()), config["pad_token_id"])
        if probe.is_of_classifier(config)
        else None
    )
    return TunedPart(checkpoint, settings, known, base_model.find_base(described, given), values, head)


def part_of_adapter(folder: Path, given: str = "") -> TunedPart:
    """Return an adapter; `given` "" finds the base."""
    base = adapters.base_of_adapter(folder, given)
    settings, values = adapters.read_settings(folder), adapters.read_adapter_weights(folder)
    return TunedPart(folder, settings, base_model.read_base(folder), base, values, classifier.read_head(folder))


def load_part(part: TunedPart) -> PreTrainedModel:
    """Return the model with what was trained in it or added to it, on the CPU."""
    dtype = next(iter(part.values.values())).dtype
    model = part.shaped(load_model(part.base, dtype=dtype))
    found = base_model.base_of(model, part.base)
    if part.known is not None:
        base_model.check_base(part.known, found, part.source)
    if not part.settings:
        model.load_state_dict(part.values, strict=False)
        return model
    adapters.attach_adapter(model, part.settings, found)
    adapters.load_values(model, part.values, part.source)
    return model.eval()


def rebuild(
    source: Path, scratch: Path | None = None, part: TunedPart | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], dict[str, Any]]:
    """Return an empty model, its weights by name, tied ones once, and the keys of its config that merging changed: of a
    verified checkpoint, or of a base with what was trained, `part`.

    CheckpointError if a weight is missing, unknown or of another shape. `scratch`: an empty directory, so that memory
    holds one weight at a time; None holds all of them. `dtype` None: that of training.
    """
    described, changed = source / MODEL_DIR, dict[str, Any]()
    if part is not None:
        plan, values = merge_adapter(part)
        model, changed = plan.model, plan.config
        dtype = dtype or getattr(torch, read_object(described / "config.json")["dtype"])
    else:
        model, values = empty(described), fragments.iter_weights(source)
    wanted, tied = weights.shapes_of(model), weights.tied_names(model)
    own_dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}  # routers' biases stay in float32
    state: dict[str, torch.Tensor] = {}
    for stored_name, value in values:  # perhaps tied ones twice
        name = stored_name if stored_name in wanted else tied.get(stored_name, stored_name)
        if name not in state:
            is_cast = dtype is not None and value.is_floating_point()
            kept = value.to(own_dtypes.get(name, dtype)) if is_cast else value
            state[name] = kept if scratch is None else _map(kept, scratch / f"{len(state)}.pt")
            del kept
        del value
        weights.return_memory()
    if wrong := weights.differences(model, state):
        raise CheckpointError("{folder} does not hold its model: {reason}.", folder=source, reason=clauses(wrong[:5]))
    return model, state, changed


def load_checkpoint(checkpoint: Path) -> PreTrainedModel:
    """Return the model of a checkpoint on the CPU, in its precision; raises as `part_of_checkpoint`."""
    part = part_of_checkpoint(checkpoint)
    if part is not None:
        return load_part(part)
    model, state, _ = rebuild(checkpoint)
    weights.assign(model, state)
    return model


def _map(value: torch.Tensor, file: Path) -> torch.Tensor:
    """Put a value into a file and return it mapped from there."""
    try:
        torch.save(value.clone(), file)  # the value alone, not all of its storage
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise cannot_write(file.parent, error) from error
    mapped: torch.Tensor = torch.load(file, weights_only=True, mmap=True)
    return mapped


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """How an export is written."""

    format: Format = "hf"
    """As `max_shard_size`: see `toolkit.models.save.save_model`."""
    merge: bool = False
    """Put an adapter into the weights of its base, instead of writing it alone."""
    dtype: str = ""
    """Precision of the weights, such as bfloat16; "" that of the training."""
    max_shard_size: str = MAX_SHARD_SIZE

    def __post_init__(self) -> None:
        if self.format == "official" and (self.dtype or self.max_shard_size != MAX_SHARD_SIZE):
            raise ConfigError(tr("format=official keeps precisions and files: remove dtype= and max_shard_size=."))

    @property
    def precision(self) -> torch.dtype | None:
        """Return `dtype` as torch's."""
        return getattr(torch, self.dtype) if self.dtype else None


def export_any(
    path: Path, folder: Path, wanted: ExportOptions, *, adapter: str = "", base: str = "", family: str = "auto"
) -> None:
    """Write the model, or the adapter, of a run (its newest complete checkpoint), a checkpoint, an adapter or a model.
    `folder` must not exist; `adapter` was trained on the model in `path`; `base` "" finds the base.
    """
    if adapter or adapters.is_adapter(path):
        export_adapter_folder(Path(adapter or path), folder, wanted, str(path) if adapter else base, family)
    elif checkpoint := directory.resolve_checkpoint(path):
        if family != "auto":
            raise ConfigError(tr("model.family has no effect: a checkpoint knows its tokenizer. Remove it."))
        export_checkpoint(checkpoint, folder, wanted, base)
    elif wanted.merge:
        raise _nothing_to_merge()
    else:
        model = load_model(path, dtype=wanted.precision)
        before = probe.read(path)
        probed = probe.capture(model, probe.spread_ids(model.config) if before is None else before.ids)
        files = describe(model, _encoder(path, family)) | embedding_files.read_files(path)
        write_folder(model, files, folder, wanted.format, probed, max_shard_size=wanted.max_shard_size)


def export_checkpoint(checkpoint: Path, folder: Path, wanted: ExportOptions | None = None, base: str = "") -> None:
    """Write a verified checkpoint's model or adapter, bit for bit as the run would; `base` "" finds the base."""
    wanted = wanted or ExportOptions()
    if is_custom(checkpoint):
        if wanted != ExportOptions():
            raise ConfigError(
                "{folder} holds a custom model: its weights alone are written, as they are.", folder=checkpoint
            )
        record = json.loads((checkpoint / MODEL_DIR / CUSTOM_CARD).read_text(encoding="utf-8"))
        names = {*record["names"]}  # of tied ones the first, as in the model
        state = {name: value for name, value in fragments.iter_weights(checkpoint) if name in names}
        _write_custom(state, record, folder)
        return
    part = part_of_checkpoint(checkpoint, base)
    described = [name for name in directory.read_manifest(checkpoint)["files"] if name.startswith(f"{MODEL_DIR}/")]
    files = {name.removeprefix(f"{MODEL_DIR}/"): (checkpoint / name).read_bytes() for name in described}
    is_adapter = part is not None and bool(part.settings) and not wanted.merge
    files[CARD_FILE] = card(directory.read_run_state(checkpoint), is_adapter)
    _export_part(checkpoint, part, folder, wanted, files, wanted.precision)


def _export_part(
    source: Path,
    part: TunedPart | None,
    folder: Path,
    wanted: ExportOptions,
    files: Mapping[str, bytes],
    dtype: torch.dtype | None,
) -> None:
    """Write what `rebuild` makes of a checkpoint or an adapter, or an adapter alone. `files`: of
    `toolkit.models.save.describe`, and the card.
    """
    probed = probe.read(source)
    is_adapter = part is not None and bool(part.settings)
    if wanted.merge and not is_adapter:
        raise _nothing_to_merge()
    if part is not None and is_adapter and not wanted.merge:
        is_prefix = adapters.method_of(part.settings) is TuningMethod.ptuning_v2
        whole = wanted.dtype or wanted.max_shard_size != MAX_SHARD_SIZE or (wanted.format != "hf" and not is_prefix)
        if whole and part.can_merge:
            raise ConfigError(tr("format=official, dtype= and max_shard_size= are for whole models: add merge=true."))
        if whole:
            raise ConfigError(
                "format=official, dtype= and max_shard_size= are for whole models, and what {folder} holds cannot be "
                "merged into one: leave them out.",
                folder=part.source,
            )
        if wanted.format == "official":
            write_original_prefix(part.values, part.settings, part.base, folder)
        else:
            write_adapter(part.values, {**files, **part.describe()}, folder, probed)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        model, state, changed = rebuild(source, Path(scratch), part, dtype)
        if changed and wanted.format == "official":
            raise ConfigError(
                "format=official has no place for what merging adds to the model ({keys}): use format=hf.",
                keys=_as_words(changed),
            )
        if changed:
            say("The merged model has weights that its base lacks: config.json says {keys}.", keys=_as_words(changed))
        own = {name: content for name, content in files.items() if name not in (base_model.BASE_FILE, adapters.CONFIG)}
        own["config.json"] = _with_keys(own["config.json"], changed, wanted.dtype)
        write_folder(model, own, folder, wanted.format, probed, state, wanted.max_shard_size)


def _as_words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())


def _with_keys(config_file: bytes, changed: Mapping[str, Any], dtype: str) -> bytes:
    """Return config.json with the keys that merging changed, in its text model's section too, and with a precision."""
    config = json.loads(config_file) | changed | ({"dtype": dtype} if dtype else {})
    for section in config.values():
        if isinstance(section, dict):
            section.update({key: value for key, value in changed.items() if key in section})
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _nothing_to_merge() -> ConfigError:
    return ConfigError(tr("this is a whole model already: there is nothing to merge. Leave merge=true out."))


def export_in_background(checkpoint: Path, folder: Path) -> None:
    """Verify a checkpoint and export it in transformers' layout in a child process, alongside training."""
    if reason := run_module("toolkit.export.model", str(checkpoint), str(folder)):
        raise CheckpointError(reason)


def export_adapter_folder(path: Path, folder: Path, wanted: ExportOptions, base: str, family: str) -> None:
    """Merge an adapter into the weights of its base, or copy it; `base` "" finds the base."""
    part = part_of_adapter(path, base)
    precision = wanted.precision or next(iter(part.values.values())).dtype
    model = part.shaped(empty(part.base))
    model.to(precision)
    own_tokenizer = (path / "tokenizer_config.json").is_file()
    files = describe(model, _encoder(path if own_tokenizer else part.base, family)) | embedding_files.read_files(path)
    if (path / CARD_FILE).is_file():
        files[CARD_FILE] = (path / CARD_FILE).read_bytes()
        if wanted.merge:
            files[CARD_FILE] = files[CARD_FILE].replace(b'library_name: "peft"', b'library_name: "transformers"', 1)
    _export_part(path, part, folder, wanted, files, precision)


def _encoder(folder: Path, family: str) -> chat.AnyChatEncoder | None:
    """Return a directory's tokenizer, None if it has none."""
    has_one = official_vocabulary(folder) is not None or (folder / "tokenizer.json").is_file()
    return chat.load_chat_encoder(folder, family=family) if has_one else None


WEIGHTS, CUSTOM_CARD = "model.safetensors", "own.json"


def export_custom(engine: DeepSpeedEngine, card: dict[str, Any], folder: Path) -> None:
    """Write a custom model's parameters and stored buffers in the precision of the training. A collective."""
    state = dict(gathered_parameters(engine.module))
    on_rank0(lambda: _write_custom(state, card, folder))


def _write_custom(state: dict[str, torch.Tensor], card: dict[str, Any], folder: Path) -> None:
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        (temporary / CUSTOM_CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        save_checked(state, temporary / WEIGHTS, folder)


def is_custom(folder: Path) -> bool:
    """Whether a checkpoint or an export is of a custom model."""
    return (folder / CUSTOM_CARD).is_file() or (folder / MODEL_DIR / CUSTOM_CARD).is_file()


def verify_logits(folder: Path) -> str:
    """Run the model of a checkpoint or an export once, on the CPU, and return the comparison with its probe as text.

    ProofDiffers if the logits differ by more than rounding was measured to, but by less than damage does;
    CheckpointError, of an export ModelError, if weights are missing, empty, of another shape, or others than were
    saved: see `probe.WRONG`.
    """
    if adapters.is_original_prefix(folder):
        reason = tr("the layout of the ChatGLM repositories does not say of which model a prefix is")
        return tr("no forward: {reason}", reason=reason)
    if is_custom(folder):
        return tr("no forward: {reason}", reason=tr("it holds a custom model, which its program alone can build"))
    saved = probe.read(folder)
    is_model = (folder / "config.json").is_file()
    if is_model:
        model = streamed_model(folder)
    elif (folder / adapters.CONFIG).is_file():
        model = load_part(part_of_adapter(folder))
    else:
        try:
            model = load_checkpoint(folder)
        except NotExportable as error:
            return tr("no forward: {reason}", reason=error)
    if is_model and (saved is None or not saved.logits.isfinite().all()):
        deque(stream(folder)[1], maxlen=0)  # no forward pass reads it
    if saved is None:
        return tr("it loads; there is no probe to compare its logits with")
    if not saved.logits.isfinite().all():
        return tr("it loads; its logits were NaN or Inf when it was saved: the model had diverged")
    found = run_folder(folder, saved.ids, model) if is_model else probe.capture(model, saved.ids)
    return judge_logits(model, folder if is_model else None, found, saved)


def run_folder(folder: Path, ids: torch.Tensor, model: PreTrainedModel | None = None) -> probe.Probe:
    """Run a directory's model on ids [R, L], on the CPU, a layer in memory at a time; `model`: streamed already."""
    with suppress(RuntimeError):  # a model that changes its weights in a forward pass
        found = probe.capture(model or streamed_model(folder), ids)
        if found.logits.isfinite().all():
            return found
    return probe.capture(load_model(folder), ids)  # a layer that is used elsewhere too


def judge_logits(model: PreTrainedModel, folder: Path | None, found: probe.Probe, saved: probe.Probe) -> str:
    """Return how logits compare with those of a save as text; raises as `verify_logits`. `model`: it, or with its
    `folder` the same without weights.
    """
    difference = probe.difference_of(found, saved)
    tolerance, wrong = _bounds(model, folder, found, saved, difference)
    if difference <= tolerance:
        return tr(
            "forward: the logits are those of the save (difference {difference} of their spread, tolerance "
            "{tolerance})",
            difference=f"{difference:.1e}",
            tolerance=f"{tolerance:.2g}",
        )
    shown = {"difference": f"{difference:.2g}", "tolerance": f"{tolerance:.2g}"}
    if difference <= wrong:
        raise ProofDiffers(
            "the logits differ from those of the save by {difference} of their spread (tolerance {tolerance})", **shown
        )
    raise CheckpointError(  # nan too
        "other weights than were saved: the logits differ by {difference} of their spread (tolerance {tolerance})",
        **shown,
    )


def _bounds(
    model: PreTrainedModel, folder: Path | None, found: probe.Probe, saved: probe.Probe, difference: float
) -> tuple[float, float]:
    """Return what a difference may be, and from what on the weights are wrong; see `probe.WRONG`. A model runs twice to
    learn how it rounds, unless it has experts, whose choice may flip: a directory's in half precision or TF32 always,
    as its own bounds are often narrower; others where the usual ones do not do, as with very sharp attention.
    """
    kind = probe.coarser(found, saved)
    usual = probe.TOLERANCES.get(kind, 0.0), probe.WRONG.get(kind, 0.0)
    narrows = folder is not None and kind != "float32"
    other = probe.other_precision(found, saved)
    is_settled = not difference or (difference <= usual[0] and not narrows)
    if is_settled or other is None or "expert" in str(model.config.to_dict()):
        return usual
    again = probe.capture(streamed_model(folder, other) if folder else model.to(other), saved.ids)
    rounding = probe.rounding(found, again, saved)
    if not math.isfinite(rounding):
        return usual
    rounding *= probe.TIMES_IN_FLOAT32 if kind == "float32" else 1.0
    own = probe.TIMES_ROUNDING * rounding, probe.TIMES_WRONG * rounding
    return own if narrows else (max(usual[0], own[0]), max(usual[1], own[1]))


def main() -> None:
    """Export in a process of its own."""
    source, target = map(Path, sys.argv[1:])
    if wrong := directory.manifest_problems(source):
        sys.exit(clauses(wrong[:3]))
    try:
        export_checkpoint(source, target)
    except (ToolkitError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
