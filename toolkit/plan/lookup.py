"""The outline of the model that a config names: by its config.json, or by what its group says of a published model.

No torch. A model that no formula knows is measured once, in a process of its own, and cached.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolkit import children, disk
from toolkit.config import files, objective, schema
from toolkit.messages import ConfigError, ModelError, file_bytes, parsed_json, say, tr
from toolkit.plan.outline import HEAD, Outline, Shapes, Sizes, Targets, shapes_of_config, shapes_of_random, with_tuning
from toolkit.plan.tuning_targets import SCORE, tuning_of

_MEASURE_S = 300
NO_MODEL = 3
"""Exit code of what measures, where the last line says why this is no model that could be trained."""
_FORM = 4
"""Of what is remembered; another one is measured anew."""


def outline_of(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline:
    """Return what is trained, and in what; a model whose group has `model.published` needs no directory.
    `vocab_size`: of a random model's tokenizer; 0 takes the most that the recipe allows.
    """
    outline = cached_outline(cfg, vocab_size) or _tuned(cfg, *_measured(cfg, config_of(cfg)))
    if not outline.num_trained:
        raise ConfigError(tr("tuning: nothing of this model would be trained as far as its parameters' names tell."))
    other = _teacher(cfg)
    return replace(outline, teacher=outline_of(other)) if other else outline


def cached_outline(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline | None:
    """Return what `outline_of` does, but without measuring: None for a model that needs it and was not measured yet."""
    model = cfg.model
    if model.init is schema.Init.random:
        return _taught(cfg, _tuned(cfg, *shapes_of_random(vocab_size or model.shape.vocab_size, model.shape)))
    config = config_of(cfg)
    try:
        by_formula = shapes_of_config(config)
        sizes = [size for shape in by_formula[0].values() for size in shape] if by_formula else []
        if texts := [size for size in sizes if type(size) is not int]:
            raise ValueError(tr("{value} is no number", value=texts[0]))  # a text times a number is a longer text
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=_file(cfg), reason=repr(error)) from error
    if by_formula is not None:
        return _taught(cfg, _tuned(cfg, *by_formula))
    cached = _cache_of(cfg, config)
    return _taught(cfg, _tuned(cfg, *_read(cached))) if cached.is_file() else None


def _taught(cfg: schema.RunConfig, outline: Outline) -> Outline | None:
    """Return the outline with its teacher's, if there is one; None if the teacher has not been measured yet."""
    if (cfg_of_teacher := _teacher(cfg)) is None:
        return outline
    teacher = cached_outline(cfg_of_teacher)
    return teacher and replace(outline, teacher=teacher)


def _teacher(cfg: schema.RunConfig) -> schema.RunConfig | None:
    """Return a config as if the teacher were the model to train; None if no other model is the teacher."""
    if cfg.task.kind is not schema.TaskKind.distill or not cfg.distill.teacher or objective.has_own_teacher(cfg):
        return None
    path = cfg.distill.teacher
    published = published_models("hub_id").get(path, {})
    model = replace(cfg.model, init=schema.Init.pretrained, path=path, name=path, published=published)
    return replace(cfg, task=schema.TaskConfig(), model=model, tuning=schema.TuningConfig())


def _tuned(cfg: schema.RunConfig, shapes: Shapes, sizes: Sizes, targets: Targets | None = None) -> Outline:
    """Return a language model's outline with the head of the task, if it has one, and what tuning adds and trains."""
    if cfg.task.has_head:
        rest = {name: shape for name, shape in shapes.items() if name != HEAD}
        # Labels that only the data know are taken for two: the head is next to nothing.
        head = len(objective.score_labels(cfg)) or 2, sizes["hidden"]
        shapes, sizes = rest | {SCORE: head}, sizes | {"logits_change": 0}
    return with_tuning(shapes, sizes, tuning_of(cfg), targets)


@cache
def published_models(by: str = "name") -> dict[str, dict[str, Any]]:
    """Return the models of conf/model/ whose sizes are known, with what their config.json says of them: by name, or by
    another key of their files, such as hub_id.
    """
    groups = [files.read(path).values for path in sorted((files.conf_folder() / "model").glob("*.yaml"))]
    return {group[by]: group["published"] for group in groups if "published" in group and by in group}


def config_of(cfg: schema.RunConfig) -> dict[str, Any]:
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
        config = parsed_json(file_bytes(file))
        if not isinstance(config, dict):
            raise ValueError("[]")
    except (ValueError, OSError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=file, reason=error) from None
    return config


def _file(cfg: schema.RunConfig) -> Path | None:
    file = Path(cfg.model.path) / "config.json"
    return file if cfg.model.path and file.is_file() else None


def _measured(cfg: schema.RunConfig, config: Mapping[str, Any]) -> tuple[Shapes, Sizes, Targets]:
    """Build the model on the meta device, in a child process; return its shapes and sizes, and cache them."""
    cached, folder = _cache_of(cfg, config), Path(cfg.model.path).absolute()
    say("{kind} is not known by formula: its outline is measured, once.", kind=config.get("model_type"))
    try:
        with tempfile.TemporaryDirectory() as published:
            if _file(cfg) is None:  # what model.published says of it
                folder = Path(published)
                (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            command = [sys.executable, "-m", "toolkit.models.outline", str(folder)]
            # Without a standard input: nobody is to be asked whether code of the folder may run.
            ran = children.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MEASURE_S)
        reason = (ran.stderr.strip().splitlines() or ["?"])[-1] if ran.returncode else ""
        if ran.returncode == NO_MODEL:
            raise ModelError(reason)
    except subprocess.TimeoutExpired:
        reason = tr("no answer within {seconds} s", seconds=_MEASURE_S)
    if reason:
        file = folder / "config.json"
        raise ConfigError("{file}: the model cannot be built to be measured: {reason}", file=file, reason=reason)
    write_cache(cached, json.loads(ran.stdout.strip().splitlines()[-1]))
    return _read(cached)


def _cache_of(cfg: schema.RunConfig, config: Mapping[str, Any]) -> Path:
    return cache_file(cfg, "outline", [config, _FORM, version("transformers")])


def _read(file: Path) -> tuple[Shapes, Sizes, Targets]:
    measured = json.loads(file.read_text(encoding="utf-8"))
    shapes = {name: tuple(shape) for name, shape in measured["shapes"].items()}
    return shapes, measured["sizes"], measured["targets"]


def cache_file(cfg: schema.RunConfig, kind: str, inputs: object) -> Path:
    """Return where something is kept that depends on these inputs alone."""
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.prepare.dir) / "plan" / f"{kind}-{key}.json"


def write_cache(file: Path, values: Any) -> None:
    """Write values as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(file, json.dumps(values).encode() + b"\n")
