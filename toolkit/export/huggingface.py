"""A model or an adapter as a directory that other programs load, checked before it gets its name. `toolkit verify`
reads its probe, and manifest.json with size and SHA-256 of every file.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit.checkpoint import directory
from toolkit.checkpoint.directory import RunState
from toolkit.config.schema import TuningMethod
from toolkit.disk import flush, set_permissions
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.messages import CheckpointError, tr
from toolkit.models import adapters, probe
from toolkit.models.directory import read_object
from toolkit.models.pipeline import capture_probe, unwrap_model
from toolkit.models.probe import Probe
from toolkit.models.save import MAX_SHARD_SIZE, ORIGIN_DIR, Format, save_model
from toolkit.models.weights import WeightFiles, read_tensors, tied_names
from toolkit.secrets import hide_all

CARD_FILE = "README.md"
_PACKAGES = ("torch", "deepspeed", "transformers", "peft")


def card(state: RunState, is_adapter: bool) -> bytes:
    """Return the model card of a run, or of its adapter: what was trained, on what, how far, with what versions."""
    config: Mapping[str, Any] = hide_all(state.config)
    model, tuning = config["model"], config["tuning"]
    base = model["name"] or model["path"] or "?"
    front = {"pipeline_tag": "text-generation", "tags": ["deepspeed", f"tuning-{tuning['method']}"]}
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
    shown = {key: config[key] for key in ("tuning", "data", "batch", "optim", "schedule", "precision")}
    lines = [
        *("---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", ""),
        *(f"# {tr('{base}, fine-tuned', base=base)}", "", *(f"- {fact}" for fact in facts), ""),
        *(f"## {tr('Losses')}", "", *_losses(state), ""),
        *(f"## {tr('Versions')}", "", *(f"- {version}" for version in versions), ""),
        *(f"## {tr('Settings')}", "", "```json"),
        *(json.dumps(shown, indent=1, ensure_ascii=False, default=str), "```", ""),
    ]
    return "\n".join(lines).encode()


def _losses(state: RunState) -> list[str]:
    """Return a table of the evaluations, and the training loss at both ends; nats per trained token."""
    lines = []
    if not math.isnan(state.first_loss):
        line = tr(
            "training: {first} -> {last} nats/token", first=f"{state.first_loss:.4f}", last=f"{state.last_loss:.4f}"
        )
        lines += [line, ""]
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


def write_folder(
    model: PreTrainedModel,
    files: Mapping[str, bytes],
    folder: Path,
    format: Format,
    probed: Probe | None,
    state: dict[str, torch.Tensor] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a model directory atomically, and check every header: nothing missing or empty, every shape complete.

    `files` are those of `toolkit.models.save.describe`; `folder` must not exist; `probed` are this model's logits of a
    few ids; `state`: full parameters by name; `format`, `max_shard_size`: see `save_model`.
    """
    with atomic_directory(folder) as temporary:
        save_model(model, temporary, format, state=state, max_shard_size=max_shard_size)
        write_files(files if format == "hf" else {}, temporary, probed)
        written = {name: info.shape for name, info in WeightFiles(temporary).items()}
        if format == "official":
            wrong = sorted(set(written) ^ set(model.origin.tensors))
        else:
            tied, held = tied_names(model), state if state is not None else model.state_dict()
            held = {name: value for name, value in held.items() if name not in tied}
            wrong = [name for name, shape in written.items() if name in held and tuple(held[name].shape) != shape]
            # transformers may store parameters under other names (experts one by one), but never fewer numbers.
            expected = sum(value.numel() for value in held.values())
            found = sum(torch.Size(shape).numel() for shape in written.values())
            if expected != found:
                wrong += sorted(set(held) - set(written)) or [json.dumps({"expected": expected, "found": found})]
        wrong += [name for name, shape in written.items() if 0 in shape]  # a known defect under ZeRO-3
        if wrong or not written:
            raise _not_as_trained(folder, wrong)


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
                flush(path)
            records = {path.relative_to(temporary).as_posix(): directory.record_file(path) for path in paths}
            directory.write_manifest(temporary, records, {})
            flush(temporary)
            for path in temporary.rglob("*"):
                set_permissions(path)
            temporary.rename(folder)
            flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: Path, error: Exception) -> CheckpointError:
    """Return the error about an export that cannot be written."""
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
    written = read_tensors(file)
    if wrong := [name for name, value in state.items() if name not in written or not _is_same(value, written[name])]:
        raise _not_as_trained(folder, wrong)


def write_files(files: Mapping[str, bytes], folder: Path, probed: Probe | None) -> None:
    """Write files by their path in a directory, and the probe."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if probed is not None:
        probe.write(probed, folder)


def export_adapter(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write the adapter of a tuned model (`engine.module.tuned`), and nothing else. A collective."""
    probed = probe.capture(engine.module, probe_ids, engine.device)
    state = _adapter_state(engine)
    on_rank0(lambda: write_adapter(state, files, folder, probed))


def _adapter_state(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    names = adapters.stored_names(engine.module)
    return {names[name]: value for name, value in gathered_parameters(engine.module, names)}


def write_adapter(
    state: dict[str, torch.Tensor], files: Mapping[str, bytes], folder: Path, probed: Probe | None
) -> None:
    """Write an adapter's directory atomically and read it back; `state` is by stored name."""
    empty = [name for name, value in state.items() if not value.numel()]
    if empty or not state:
        raise _not_as_trained(folder, empty)
    model_files = ("config.json", "generation_config.json")  # with one, or the origin, it would be taken for a model
    own = {
        name: content
        for name, content in files.items()
        if name not in model_files and not name.startswith(f"{ORIGIN_DIR}/")
    }
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        write_files(own, temporary, probed)
        save_checked(state, temporary / adapters.WEIGHTS, folder)


def prove_adapter(engine: DeepSpeedEngine, folder: Path) -> None:
    """Compare an adapter's directory with the adapter and base in memory; raises on every rank. A collective. Equal
    numbers, settings and base give the logits of the directory's probe, so no model is loaded.
    """
    state, numbers, tuned = _adapter_state(engine), adapters.base_numbers(engine.module), engine.module.tuned

    def compare() -> None:
        values, base = adapters.read_adapter_weights(folder), adapters.read_base(folder)
        wrong = sorted({*values} ^ {*state})
        wrong += [name for name, value in state.items() if name in values and not _is_same(value, values[name])]
        wrong += [adapters.CONFIG] * (adapters.read_settings(folder) != tuned.settings)
        wrong += [adapters.BASE_FILE] * (base != tuned.base)
        if wrong or base is None:
            raise _not_as_trained(folder, wrong)
        for name, found in numbers.items():
            adapters.check_numbers(base, name, found, base.path, folder)

    on_rank0(compare)


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
