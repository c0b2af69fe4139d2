"""The outline of the model that a config names: by formula, or measured once and cached. No torch here."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.config.files import conf_folder, read
from toolkit.config.schema import Init, RunConfig
from toolkit.messages import ConfigError, say, tr
from toolkit.plan.parameters import Outline, Shapes, Sizes, shape_of_random, shapes_of_config, tuned

_MEASURE_S = 300
_FORM = 1
"""Of what is remembered; another one is measured anew."""


def outline_of(cfg: RunConfig, vocab_size: int = 0) -> Outline:
    """Return what is trained, and in what; a model whose group has `model.published` needs no directory.

    `vocab_size`: of a random model's tokenizer; 0 takes the most that the recipe allows.
    """
    found = cached_outline(cfg, vocab_size) or tuned(*_measured(cfg, config_of(cfg)), cfg.tuning)
    if not found.num_trained:
        raise ConfigError(tr("tuning: nothing of this model would be trained as far as its parameters' names tell."))
    return found


def cached_outline(cfg: RunConfig, vocab_size: int = 0) -> Outline | None:
    """Return the same; None for a model that no formula knows and that has not been measured yet."""
    model = cfg.model
    if model.init is Init.random:
        return tuned(*shape_of_random(vocab_size or model.shape.vocab_size, model.shape), cfg.tuning)
    config = config_of(cfg)
    try:
        found = shapes_of_config(config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=_file(cfg), reason=repr(error)) from error
    if found is None and (kept := _cache_of(cfg, config)).is_file():
        found = _read(kept)
    return found and tuned(*found, cfg.tuning)


@cache
def published_models() -> dict[str, dict[str, Any]]:
    """Return by name the models of conf/model/ whose sizes are known, with what their config.json says of them."""
    groups = [read(path).values for path in sorted((conf_folder() / "model").glob("*.yaml"))]
    return {group["name"]: group["published"] for group in groups if "published" in group}


def config_of(cfg: RunConfig) -> dict[str, Any]:
    """Return config.json of the model, or what its group says of a published one that is not there."""
    model, file = cfg.model, _file(cfg)
    if file is None:
        if model.published:
            return model.published
        raise ConfigError(
            "model.path = '{path}' holds no config.json, and '{name}' is none of the models whose "
            "sizes are known here ({known}). Set model.path to a directory with the model's "
            "config.json; no weights are needed.",
            path=model.path,
            name=model.name,
            known=", ".join(published_models()),
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("[]")
    except (ValueError, OSError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=file, reason=error) from None
    return config


def _file(cfg: RunConfig) -> Path | None:
    file = Path(cfg.model.path) / "config.json"
    return file if cfg.model.path and file.is_file() else None


def _measured(cfg: RunConfig, config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
    """Build the model on the meta device, in a process of its own, once for each config.json."""
    kept, folder = _cache_of(cfg, config), Path(cfg.model.path).absolute()
    say("{kind} is not known by formula: its outline is measured, once.", kind=config.get("model_type"))
    command = [sys.executable, "-m", "toolkit.models.outline", str(folder)]
    try:  # without a standard input: nobody is to be asked whether code of the folder may run
        ran = children.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MEASURE_S)
        reason = (ran.stderr.strip().splitlines() or ["?"])[-1] if ran.returncode else ""
    except subprocess.TimeoutExpired:
        reason = tr("no answer within {seconds} s", seconds=_MEASURE_S)
    if reason:
        file = folder / "config.json"
        raise ConfigError("{file}: the model cannot be built to be measured: {reason}", file=file, reason=reason)
    write_cache(kept, json.loads(ran.stdout.strip().splitlines()[-1]))
    return _read(kept)


def _cache_of(cfg: RunConfig, config: Mapping[str, Any]) -> Path:
    return cache_file(cfg, "outline", [config, _FORM, version("transformers")])


def _read(file: Path) -> tuple[Shapes, Sizes]:
    measured = json.loads(file.read_text(encoding="utf-8"))
    return {name: tuple(shape) for name, shape in measured["shapes"].items()}, measured["sizes"]


def cache_file(cfg: RunConfig, kind: str, inputs: object) -> Path:
    """Return where something is kept that depends on these inputs alone."""
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.prepare.dir) / "plan" / f"{kind}-{key}.json"


def write_cache(file: Path, values: Any) -> None:
    """Write values as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(values) + "\n", encoding="utf-8")
    part.replace(file)
