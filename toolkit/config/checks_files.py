"""Rules about files and folders that a config names, found out before anything is loaded."""

import glob
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolkit.config.examples import located
from toolkit.config.hub import is_hub_name
from toolkit.config.load import Loaded
from toolkit.config.places import fail, value_of
from toolkit.config.schema import ROW_FIELDS, Device, Init, RowFormat, SourceConfig
from toolkit.config.suggest import did_you_mean
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr


def _nvme_folders(loaded: Loaded) -> Iterator[ConfigError]:
    """An nvme path must be a folder that can be written to, found out by writing."""
    for section in ("zero.offload_optimizer", "zero.offload_param"):
        if value_of(loaded.cfg, f"{section}.device") is not Device.nvme:
            continue
        key = f"{section}.nvme_path"
        path = str(value_of(loaded.cfg, key))
        if not path:
            yield fail(
                loaded,
                f"{section}.device",
                tr("{section}.device = nvme needs {key}=FOLDER on the NVMe disk.", section=section, key=key),
            )
            continue
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            yield fail(
                loaded,
                key,
                tr(
                    "{key} = {path} is not a folder that can be written to: {reason}.",
                    key=key,
                    path=path,
                    reason=error.strerror,
                ),
            )


def _model(loaded: Loaded) -> Iterator[ConfigError]:
    model = loaded.cfg.model
    if model.init is Init.random:
        shape = model.shape
        if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
            yield fail(
                loaded,
                "model.shape.num_heads",
                tr(
                    "model.shape: hidden_size {hidden} must be a multiple of num_heads {heads}, and that of "
                    "num_kv_heads {kv_heads}.",
                    hidden=shape.hidden_size,
                    heads=shape.num_heads,
                    kv_heads=shape.num_kv_heads,
                ),
            )
        elif shape.hidden_size // shape.num_heads % 4:
            yield fail(
                loaded,
                "model.shape.num_heads",
                tr(
                    "model.shape: hidden_size {hidden} / num_heads {heads} = {size} must be a multiple of 4, "
                    "because half of a head is rotated in pairs.",
                    hidden=shape.hidden_size,
                    heads=shape.num_heads,
                    size=shape.hidden_size // shape.num_heads,
                ),
            )
    elif not model.path:
        sentence = tr("model.path is empty: set model.path=DIR to a folder with a model in transformers' layout.")
        yield fail(loaded, "model.path", sentence)
    elif not Path(model.path).is_dir() and not is_hub_name(model.path):
        sentence = tr("model.path = {path} is not a folder here.", path=model.path)
        hint = tr("It must be the folder that holds config.json and the weights, or owner/name on Hugging Face.")
        yield fail(loaded, "model.path", joined(sentence, hint))
    for key in ("model.tokenizer", "model.chat_template"):
        path = str(value_of(loaded.cfg, key))
        if path and not Path(path).exists():
            yield fail(loaded, key, tr("{key} = {path} does not exist.", key=key, path=path))


def _sources(loaded: Loaded) -> Iterator[ConfigError]:
    data = loaded.cfg.data
    if not data.sources:
        yield fail(
            loaded,
            "data.sources",
            tr("data.sources is empty: add 'data.sources=[{{path: FILE.jsonl}}]', or data=examples to try."),
        )
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            for sentence in _wrong_source(source, f"{name}[{index}]"):
                error = fail(loaded, name, sentence)
                error.keys = (f"{name}[{index}]",)
                yield error


def _wrong_source(source: SourceConfig, place: str) -> Iterator[str]:
    """Yield what is wrong with a source."""
    if source.format is RowFormat.docstrings:
        for key in ("path", "hub"):
            if value := getattr(source, key):
                yield tr(
                    "{key} = {path} has no effect with format docstrings. Remove it.",
                    key=f"{place}.{key}",
                    path=value,
                )
    elif bool(source.path) == bool(source.hub):
        yield tr("{place} needs one of path (a file, folder or pattern) and hub (a name on Hugging Face).", place=place)
    elif source.path and not Path(located(source.path)).exists() and not glob.glob(source.path, recursive=True):
        yield tr(
            "{key} = {path}: there is no such file (looked in {folder}).",
            key=f"{place}.path",
            path=source.path,
            folder=Path.cwd(),
        )
    for key in ("subset", "revision"):
        if getattr(source, key) and not source.hub:
            yield tr("{place}.{key} has an effect with hub only. Remove it.", place=place, key=key)
    if sentence := unread_column(source, place):
        yield sentence
    if not 0 < source.weight < math.inf:
        yield tr(
            "{place}.weight = {weight} must be above 0; remove the source instead.", place=place, weight=source.weight
        )


def unread_column(source: SourceConfig, place: str) -> str:
    """Return what is wrong with a source's `columns`: a name that its format does not read; "" if nothing is.

    Args:
        source: its format and columns.
        place: where it stands, for the message.
    """
    fields = ROW_FIELDS.get(source.format) or tuple(field for names in ROW_FIELDS.values() for field in names)
    for column in source.columns:
        if column not in fields:
            sentence = tr("{place}.columns: no format reads '{column}'.", place=place, column=column)
            return joined(sentence, did_you_mean(str(column), fields))
    return ""


def _run_dir(loaded: Loaded) -> Iterator[ConfigError]:
    """The run folder's parent must be writable, found out before anything is loaded."""
    existing = Path(loaded.cfg.run.dir).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield fail(
            loaded,
            "run.dir",
            tr("run.dir = {dir}: {folder} cannot be written to.", dir=loaded.cfg.run.dir, folder=existing),
        )


def _resume(loaded: Loaded) -> Iterator[ConfigError]:
    """A path to resume from must hold a checkpoint; whether it is intact is found out by reading it."""
    resume = loaded.cfg.resume
    if resume in ("auto", "must", "never"):
        return
    path = Path(resume)
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        yield fail(
            loaded,
            "resume",
            tr(
                "resume = {path} is a model or an adapter alone, without what training needs to resume. Query it "
                "(toolkit generate {path}), or start another training from it: model.path={path}, of an adapter "
                "tuning.adapter={path}.",
                path=path,
            ),
        )
    elif not ((path / "manifest.json").is_file() or any((path / "checkpoints").glob("step-*"))):
        yield fail(
            loaded,
            "resume",
            tr("resume = {path} is not auto, must or never, nor a checkpoint or a run directory with one.", path=path),
        )


def _packages(loaded: Loaded) -> Iterator[ConfigError]:
    """What the metrics of the ChatGLM repositories need is no part of this package: it is old, and few need it."""
    wanted = [metric.value for metric in loaded.cfg.evaluate.metrics if metric.value.startswith("chatglm_")]
    packages = {"jieba": "jieba", "rouge_chinese": "rouge-chinese", "nltk": "nltk"}
    missing = [package for name, package in packages.items() if wanted and importlib.util.find_spec(name) is None]
    if missing:
        yield fail(
            loaded,
            "evaluate.metrics",
            tr(
                "evaluate.metrics: {metrics} needs what is not installed: pip install {packages}",
                metrics=", ".join(wanted),
                packages=" ".join(missing),
            ),
        )


OWN_FILES = (_nvme_folders, _run_dir, _resume)
"""Rules about files and directories for a program that brings its own model and data."""
FILES = (*OWN_FILES, _model, _sources, _packages)
"""Rules about files and directories."""
