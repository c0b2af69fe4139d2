"""`toolkit export-model`: the model of a run, checkpoint, adapter or model directory, written as a new directory."""

import os
from dataclasses import replace
from pathlib import Path

from toolkit import disk
from toolkit.checkpoint import intact
from toolkit.export import adapter as adapter_export, verify
from toolkit.export.card import CARD_FILE
from toolkit.export.checkpoint import export_checkpoint
from toolkit.export.text_model import text_model
from toolkit.export.write import ExportOptions, cannot_write, scratch_directory, write_folder
from toolkit.messages import ConfigError, ToolkitError, tr
from toolkit.models import adapters, chat, embedding_files, probe, quantized, tokenizer_files
from toolkit.models.chatglm.official_files import official_vocabulary
from toolkit.models.directory import read_json_or_empty
from toolkit.models.load import load_empty, record_extra_tensors, report_extra_tensors
from toolkit.models.load_weights import load_model
from toolkit.models.save import non_weight_files
from toolkit.models.weights import files_of


def export_verified(path: Path, folder: Path, options: ExportOptions, *, forward: bool = True, **chosen: str) -> str:
    """Export as `export_any` (`chosen`: its keyword arguments) and verify the logits before the directory gets its name
    `folder`. Return the comparison as text; "" without `forward`, when nothing is verified. An error leaves nothing.
    """
    try:
        with scratch_directory(folder) as parent:
            unverified = parent / folder.name
            try:
                export_any(path, unverified, options, **chosen)
                verdict = verify.verify_logits(unverified) if forward else ""
            except ToolkitError as error:
                text = str(error).replace(str(unverified), str(folder))
                # An error that names no file gets the source's name.
                raise type(error)(text if os.sep in text else f"{path}: {text}") from error
            unverified.rename(folder)
            disk.flush(folder.parent)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return verdict


def export_any(
    path: Path, folder: Path, options: ExportOptions, *, adapter: str = "", base: str = "", family: str = "auto"
) -> None:
    """Write the model or adapter in `path` to `folder`, which must not exist.

    Args:
        path: a run directory (its newest complete checkpoint counts), a checkpoint, an adapter or a model directory.
        folder: the export.
        options: how it is written.
        adapter: directory of an adapter that was trained on the model in `path`; "" none.
        base: directory of the base model that an adapter or a part was trained of; "" finds it.
        family: chat format, see `load_chat_encoder`.
    """
    is_adapter = bool(adapter) or adapters.is_adapter(path)
    checkpoint = None if is_adapter else intact.resolve_checkpoint(path)  # None: an adapter, or a model directory
    if not is_adapter and checkpoint is None:
        options.check_whole_model()
        _export_directory(path, folder, options, family, path)
    elif options.text_only:  # in two steps: the text model is taken out of a whole model's directory
        with scratch_directory(folder) as scratch:
            exported, all_parts = scratch / "exported", replace(options, text_only=False)
            export_any(path, exported, all_parts, adapter=adapter, base=base, family=family)
            if adapters.is_adapter(exported):
                raise ConfigError(tr("text_only=true needs merge=true: an adapter belongs to the whole model."))
            _export_directory(exported, folder, options, family, path)
    elif checkpoint is None:  # an adapter: a model directory was written above
        _export_adapter(Path(adapter or path), folder, options, str(path) if adapter else base, family)
    elif family != "auto":
        raise ConfigError(tr("model.family has no effect: a checkpoint knows its tokenizer. Remove it."))
    else:
        export_checkpoint(checkpoint, folder, options, base)


def _export_directory(path: Path, folder: Path, options: ExportOptions, family: str, source: Path) -> None:
    """Write the model of a model directory with a probe of its logits; with `text_only` the text model of a multimodal
    one. Quantized weights are written in 16 bits, without a probe. `source`: the path that errors name.
    """
    if quantized.method_of(path, read_json_or_empty(path / "config.json")):
        from toolkit.export.dequantize import write_dequantized

        write_dequantized(path, folder, options)
        return
    model = load_model(path, dtype=options.precision)
    saved_probe = probe.read(path)
    probed = probe.capture(model, probe.spread_ids(model.config) if saved_probe is None else saved_probe.ids)
    if options.text_only:
        report_extra_tensors(model, copied=False)
        model = text_model(model, source)
    files = non_weight_files(model, _encoder(path, family)) | embedding_files.read_files(path)
    write_folder(model, files, folder, options.format, probed, max_shard_size=options.max_shard_size)


def _export_adapter(path: Path, folder: Path, options: ExportOptions, base: str, family: str) -> None:
    """Merge an adapter into the weights of its base, or copy it; `base` "" finds the base."""
    part = adapter_export.part_of_adapter(path, base)
    precision = options.precision or next(iter(part.values.values())).dtype
    model = part.shaped(load_empty(part.base))
    model.to(precision)
    if options.merge:  # a whole model's export copies the tensors of the base that no class of transformers reads
        record_extra_tensors(model, files_of(part.base))
    has_tokenizer = (path / "tokenizer_config.json").is_file()
    encoder = _encoder(path if has_tokenizer else part.base, family)
    files = non_weight_files(model, encoder) | embedding_files.read_files(path)
    if (path / CARD_FILE).is_file():
        files[CARD_FILE] = (path / CARD_FILE).read_bytes()
        if options.merge:  # the card was written for the adapter alone
            files[CARD_FILE] = files[CARD_FILE].replace(b'library_name: "peft"', b'library_name: "transformers"', 1)
    adapter_export.export_part(path, part, folder, options, files, precision)


def _encoder(folder: Path, family: str) -> chat.AnyChatEncoder | None:
    """Return a directory's tokenizer with its chat format, None if it has no vocabulary."""
    has_vocabulary = official_vocabulary(folder) is not None or (folder / "tokenizer.json").is_file()
    return tokenizer_files.load_chat_encoder(folder, family=family) if has_vocabulary else None
