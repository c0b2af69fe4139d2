"""Rules about the files and folders that a config names: they must exist, or be writable, before anything is loaded."""

import os
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from toolkit.config import dotted_keys, files, schema, validate
from toolkit.config.load import LoadedConfig, as_typed
from toolkit.messages import ConfigError, joined, tr


def _nvme_folders(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each `nvme_path` that is missing, or to which a file cannot be written, as tried here."""
    for section in ("zero.offload_optimizer", "zero.offload_param"):
        if dotted_keys.get_value(loaded.cfg, f"{section}.device") is not schema.Device.nvme:
            continue
        key = f"{section}.nvme_path"
        path = str(dotted_keys.get_value(loaded.cfg, key))
        if not path:
            yield loaded.error(f"{section}.device", "{key} = nvme needs {path}=FOLDER on the NVMe disk.", path=key)
            continue
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            yield loaded.error(
                key, "{key} = {value} is not a directory that can be written to: {reason}.", reason=error.strerror
            )


def _model(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for a model, teacher, tokenizer or chat template that is neither here nor named on the Hub."""
    model = loaded.cfg.model
    is_read = model.init is not schema.Init.random
    if is_read and not model.path:
        yield loaded.error(
            "model.path", "model.path is empty: set model.path=DIR to a directory with a model in transformers' layout."
        )
    elif is_read and os.path.isfile(model.path):
        yield loaded.error(
            "model.path",
            "model.path = {value} is a file. It must be the directory that holds config.json and the weights, or "
            "owner/name on Hugging Face.",
        )
    elif is_read and not os.path.isdir(model.path) and not files.is_hub_name(model.path):
        yield loaded.error(
            "model.path",
            "model.path = {value} is not a directory here. It must be the directory that holds "
            "config.json and the weights, or owner/name on Hugging Face.",
        )
    elif is_read and os.path.isfile(Path(model.path) / "adapter_config.json"):
        yield loaded.error(
            "model.path",
            "model.path = {value} is an adapter, not a whole model. Train it further with tuning.adapter={value}, or "
            "merge it first: toolkit export-model {value} merge=true output=DIR",
        )
    teacher = loaded.cfg.distill.teacher
    if teacher and not os.path.isdir(teacher) and not files.is_hub_name(teacher):
        yield loaded.error(
            "distill.teacher",
            "{key} = {value} is not a directory here. It must be the directory that holds config.json and the weights, "
            "or owner/name on Hugging Face.",
        )
    if model.tokenizer and not os.path.exists(model.tokenizer):
        yield loaded.error("model.tokenizer", "{key} = {value} does not exist.")
    if model.chat_template and not files.chat_template_file(model.chat_template).exists():
        names = sorted(path.stem for path in files.named_chat_template("").parent.glob("*.jinja"))
        yield loaded.error(
            "model.chat_template",
            "{key} = {value} is neither a file nor one of the templates that come with the toolkit: {names}.",
            names=", ".join(names),
        )


def _sources(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each mistake in a data source, and for a config without sources."""
    data = loaded.cfg.data
    if not data.sources:
        sentence = tr("data.sources is empty: add 'data.sources=[{{path: FILE.jsonl}}]', or data=examples to try.")
        yield loaded.about("data.sources", sentence)
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            streams = data.streaming and sources is data.sources
            for sentence in _wrong_source(source, f"{name}[{index}]", streams):
                yield validate.error_about(loaded.position(name) + sentence, f"{name}[{index}]")


def _is_pattern_of_files(path: str) -> bool:
    """Whether a path is a pattern that some file fits."""
    from toolkit.file_patterns import matching

    return bool(matching(path))


def _wrong_source(source: schema.SourceConfig, location: str, streams: bool = False) -> Iterator[str]:
    """Yield a sentence for each mistake in a data source; `location` names it, such as data.sources[0]; `streams`:
    whether it is read while it is trained.
    """
    if source.format is schema.RowFormat.docstrings:
        for name in ("path", "hub", "split", "columns"):
            value = getattr(source, name)
            if value and (name, value) != ("split", "train"):  # the default
                key, shown = f"{location}.{name}", as_typed(value)
                yield tr("{key} = {path} has no effect with format docstrings. Remove it.", key=key, path=shown)
    elif bool(source.path) == bool(source.hub):
        yield tr(
            "{place} needs one of path (a file, directory or pattern) and hub (a name on Hugging Face).", place=location
        )
    elif files.is_remote(source.path):
        if not streams:
            yield tr(
                "{key} = {path} is a URL, which is read with data.streaming=true, in data.sources, alone. Add that, or "
                "download the file and give its path.",
                key=f"{location}.path",
                path=source.path,
            )
    elif source.path and not os.path.exists(files.located(source.path)) and not _is_pattern_of_files(source.path):
        from toolkit.config import suggest  # read in errors alone

        key, folder = f"{location}.path", Path.cwd()
        sentence = tr(
            "{key} = {path}: there is no such file (looked in {folder}).", key=key, path=source.path, folder=folder
        )
        is_named = files.is_dataset_name(source.path)
        hub = tr("A dataset on Hugging Face is data={name}.", name=source.path) if is_named else ""
        yield joined(sentence, hub or suggest.similar_path(Path(source.path), Path.exists))
    elif source.path and source.split != "train" and not os.path.isfile(Path(source.path, "dataset_dict.json")):
        yield tr(
            "{place}.split = {split} has an effect with hub and directories of several splits (dataset_dict.json) "
            "only. Remove it; where files are named by their split, give a pattern as path: data/{split}-*.parquet.",
            place=location,
            split=source.split,
        )
    for key in ("subset", "revision"):
        if getattr(source, key) and not source.hub:
            yield tr("{place}.{key} has an effect with hub only. Remove it.", place=location, key=key)
    if sentence := wrong_column(source, location):
        yield sentence
    if source.max_samples < 0:
        yield tr(
            "{place}.max_samples = {count} must be at least 0, which uses all rows.",
            place=location,
            count=source.max_samples,
        )


def wrong_column(source: schema.SourceConfig, location: str) -> str:
    """Return a sentence on a name in a source's `columns` that its format does not read; "" if there is none."""
    fields = schema.ROW_FIELDS.get(source.format) or tuple(chain.from_iterable(schema.ROW_FIELDS.values()))
    for column, theirs in source.columns.items():
        if column not in fields:
            from toolkit.config.suggest import column_meant  # read in errors alone

            sentence = tr("{place}.columns: no format reads '{column}'.", place=location, column=column)
            return joined(sentence, column_meant(str(column), str(theirs), fields))
    return ""


def _nearest_existing(folder: Path) -> Path:
    """Return a folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _is_writable(folder: Path) -> bool:
    """Whether a directory can be made in a folder. To root the kernel's own file systems only look writable."""
    of_kernel = [os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path)]
    return os.access(folder, os.W_OK) and os.stat(folder).st_dev not in of_kernel


def _run_dir(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if no run directory can be made in `run.dir`."""
    existing = _nearest_existing(Path(loaded.cfg.run.dir).absolute())
    if not os.path.isdir(existing) or not _is_writable(existing):
        yield loaded.error("run.dir", "run.dir = {value}: {folder} cannot be written to.", folder=existing)


def _prepare_dir(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if `prepare.dir` has tokenized data that cannot be read, or has none and cannot be written to."""
    stores = Path(loaded.cfg.prepare.dir).absolute() / "stores"
    existing = _nearest_existing(stores)
    is_usable = existing.is_dir() and os.access(existing, os.R_OK | os.X_OK)
    if not is_usable or (existing != stores and not _is_writable(existing)):
        yield loaded.error(
            "prepare.dir", "prepare.dir = {value}: {folder} cannot be used by this user.", folder=existing
        )


def _resume(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if `resume` is a path without a checkpoint; whether that is intact is found when it is read."""
    resume = loaded.cfg.resume
    if resume in ("auto", "must", "never"):
        return
    path, run = Path(resume), loaded.cfg.run
    if run.name and os.path.isfile(Path(run.dir) / run.name / "logs" / "starts.jsonl"):
        return  # what its last start has resumed need not be there any more, see run_dir.py
    has_checkpoint = os.path.isfile(path / "manifest.json") or any((path / "checkpoints").glob("step-*"))
    if is_exported(path) or not has_checkpoint:
        yield loaded.about("resume", not_resumable(path))


def is_exported(path: Path) -> bool:
    """Whether a directory holds a model or an adapter alone, which no run can be resumed from."""
    return any(os.path.isfile(path / name) for name in ("config.json", "adapter_config.json"))


def not_resumable(path: Path) -> str:
    """Return why `resume` cannot be a path that holds no checkpoint."""
    if is_exported(path):
        return tr(
            "resume = {path} is a model or an adapter alone, without what training needs to resume. Query it "
            "(toolkit generate {path}), or start another training from it: model.path={path}, of an adapter "
            "tuning.adapter={path}.",
            path=path,
        )
    return tr("resume = {path} is not auto, must or never, nor a checkpoint or a run directory with one.", path=path)


def _adapter(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if `tuning.adapter` is no directory."""
    adapter = loaded.cfg.tuning.adapter
    if adapter and not os.path.isdir(adapter):
        yield loaded.error("tuning.adapter", "tuning.adapter = {value} is not a directory here.")


CUSTOM_FILES = (_nvme_folders, _run_dir, _resume)
"""Rules about files and directories for a program that brings its own model and data."""
FILES = (*CUSTOM_FILES, _prepare_dir, _model, _sources, _adapter)
"""The same for a language model."""


def names_repository(cfg: schema.RunConfig) -> bool:
    """Return whether the model or the teacher is named by its repository on Hugging Face, which hub.py looks up."""
    return files.is_hub_name(cfg.model.path) or files.is_hub_name(cfg.distill.teacher)
