"""The outline of a config's model, from its config.json or the sizes of a published model in its group. No torch.

A model without formulas is measured once, in a subprocess, and cached.
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
from toolkit.messages import ConfigError, ModelError, file_bytes, parsed_json, say, shortlist, tr
from toolkit.plan.outline import (
    HEAD,
    Outline,
    Shapes,
    Sizes,
    Targets,
    shapes_of_config,
    shapes_of_random,
    with_trained_rows,
    with_tuning,
)
from toolkit.plan.tuning_targets import SCORE, tuning_of

_MEASURE_S = 300
NO_MODEL = 3
"""Exit code of toolkit.models.outline if the model cannot be trained; its last line says why."""
_CACHE_VERSION = 6
"""Version of the cache's content; increase it when measurements change."""


def outline_of(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline:
    """Return the outline of a config's model; one whose group has `model.published` needs no directory. ConfigError if
    it cannot be built, or nothing would be trained. `vocab_size`: of a random model's tokenizer; 0: the recipe's
    maximum.
    """
    outline = cached_outline(cfg, vocab_size) or _outline_with_tuning(cfg, *_measure_outline(cfg, config_of(cfg)))
    if not outline.num_trained:
        raise ConfigError(tr("tuning: nothing of this model would be trained as far as its parameters' names tell."))
    other = _config_of_teacher(cfg)
    return replace(outline, teacher=outline_of(other)) if other else outline


def cached_outline(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline | None:
    """Return the same as `outline_of`, but None for a model that would have to be measured."""
    model = cfg.model
    if model.init is schema.Init.random:
        return _with_teacher(
            cfg, _outline_with_tuning(cfg, *shapes_of_random(vocab_size or model.shape.vocab_size, model.shape))
        )
    config = config_of(cfg)
    try:
        by_formula = shapes_of_config(config)
        sizes = [size for shape in by_formula[0].values() for size in shape] if by_formula else []
        if texts := [size for size in sizes if type(size) is not int]:
            raise ValueError(tr("{value} is no number", value=texts[0]))  # a text times a number is a longer text
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            "{file} is no model's config.json: {reason}", file=_config_file(cfg), reason=repr(error)
        ) from error
    if by_formula is not None:
        return _with_teacher(cfg, _outline_with_tuning(cfg, *by_formula))
    cached = _cache_file_of(cfg, config)
    return _with_teacher(cfg, _outline_with_tuning(cfg, *_read_cache(cached))) if cached.is_file() else None


def _with_teacher(cfg: schema.RunConfig, outline: Outline) -> Outline | None:
    """Return the outline with its teacher's, if there is one; None if the teacher has not been measured yet."""
    if (cfg_of_teacher := _config_of_teacher(cfg)) is None:
        return outline
    teacher = cached_outline(cfg_of_teacher)
    return teacher and replace(outline, teacher=teacher)


def _config_of_teacher(cfg: schema.RunConfig) -> schema.RunConfig | None:
    """Return a config that trains the teacher; None if no other model is the teacher."""
    if cfg.task.kind is not schema.TaskKind.distill or not cfg.distill.teacher or objective.has_own_teacher(cfg):
        return None
    path = cfg.distill.teacher
    published = published_models("hub_id").get(path, {})
    model = replace(cfg.model, init=schema.Init.pretrained, path=path, name=path, published=published)
    return replace(cfg, task=schema.TaskConfig(), model=model, tuning=schema.TuningConfig())


def _outline_with_tuning(
    cfg: schema.RunConfig, shapes: Shapes, sizes: Sizes, targets: Targets | None = None
) -> Outline:
    """Return the outline of a language model with its task's head and its method's parameters, if any."""
    if cfg.task.has_head:
        without_head = {name: shape for name, shape in shapes.items() if name != HEAD}
        # If only the data show the labels, two are assumed: a head is very small.
        head = len(objective.score_labels(cfg)) or 2, sizes["hidden"]
        shapes, sizes = without_head | {SCORE: head}, sizes | {"logits_change": 0}
    outline, tokens = with_tuning(shapes, sizes, tuning_of(cfg), targets), len(cfg.model.add_tokens)
    return with_trained_rows(outline, tokens) if tokens and outline.targets else outline


@cache
def published_models(by: str = "name") -> dict[str, dict[str, Any]]:
    """Return the models in conf/model/ with known sizes: name, or the value of another key `by` of their files, such as
    hub_id -> the content of their config.json.
    """
    groups = [files.read(path).values for path in sorted((files.conf_folder() / "model").glob("*.yaml"))]
    return {group[by]: group["published"] for group in groups if "published" in group and by in group}


def config_of(cfg: schema.RunConfig) -> dict[str, Any]:
    """Return the model's config.json, or that of its group, `model.published`; ConfigError without either."""
    model, file = cfg.model, _config_file(cfg)
    if file is None:
        if model.published:
            return model.published
        raise ConfigError(
            "model.path = '{path}' holds no config.json, and '{name}' is none of the models whose "
            "sizes are known here ({known}). Set model.path to a directory with the model's "
            "config.json; no weights are needed.",
            path=model.path,
            name=model.name,
            known=shortlist(published_models(), "toolkit models"),
        )
    try:
        config = parsed_json(file_bytes(file))
        if not isinstance(config, dict):
            raise ValueError("[]")
    except (ValueError, OSError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=file, reason=error) from None
    return config


def _config_file(cfg: schema.RunConfig) -> Path | None:
    file = Path(cfg.model.path) / "config.json"
    return file if cfg.model.path and file.is_file() else None


def _measure_outline(cfg: schema.RunConfig, config: Mapping[str, Any]) -> tuple[Shapes, Sizes, Targets]:
    """Build the model on the meta device, in a child process; return its shapes and sizes, and cache them."""
    cached, folder = _cache_file_of(cfg, config), Path(cfg.model.path).absolute()
    say("{kind} is not known by formula: its outline is measured, once.", kind=config.get("model_type"))
    try:
        with tempfile.TemporaryDirectory() as published:
            if _config_file(cfg) is None:  # what model.published says of it
                folder = Path(published)
                (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            command = [sys.executable, "-m", "toolkit.models.outline", str(folder)]
            # Without stdin, from which transformers would read whether code of the directory may run.
            completed = children.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MEASURE_S
            )
        reason = (completed.stderr.strip().splitlines() or ["?"])[-1] if completed.returncode else ""
        if completed.returncode == NO_MODEL:
            raise ModelError(reason)
    except subprocess.TimeoutExpired:
        reason = tr("no answer within {seconds} s", seconds=_MEASURE_S)
    if reason:
        file = folder / "config.json"
        raise ConfigError("{file}: the model cannot be built to be measured: {reason}", file=file, reason=reason)
    write_cache(cached, json.loads(completed.stdout.strip().splitlines()[-1]))
    return _read_cache(cached)


def _cache_file_of(cfg: schema.RunConfig, config: Mapping[str, Any]) -> Path:
    return cache_file(cfg, "outline", [config, _CACHE_VERSION, version("transformers")])


def _read_cache(file: Path) -> tuple[Shapes, Sizes, Targets]:
    measured = json.loads(file.read_text(encoding="utf-8"))
    shapes = {name: tuple(shape) for name, shape in measured["shapes"].items()}
    return shapes, measured["sizes"], measured["targets"]


def cache_file(cfg: schema.RunConfig, kind: str, inputs: object) -> Path:
    """Return the file that caches something, `kind`, that depends on these inputs alone."""
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.prepare.dir) / "plan" / f"{kind}-{key}.json"


def write_cache(file: Path, values: Any) -> None:
    """Write values as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(file, json.dumps(values).encode() + b"\n")
