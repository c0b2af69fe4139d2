"""The outline of a config's model, with its teacher's, and where measurements of models are cached. No torch."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import disk
from toolkit.config import objective, schema
from toolkit.messages import ConfigError, tr
from toolkit.plan.outline import HEAD, Outline, Shapes, Sizes, Targets, shapes_of_random, with_tuning
from toolkit.plan.tuning_targets import SCORE, tuning_of


def outline_of(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline:
    """Return the outline of a config's model; one whose group has `model.published` needs no directory. ConfigError if
    it cannot be built, or nothing would be trained. `vocab_size`: of a random model's tokenizer; 0: the recipe's
    maximum.
    """
    if (outline := cached_outline(cfg, vocab_size)) is None:
        from toolkit.plan.model_config import measured_shapes

        outline = _tuned_outline(cfg, *measured_shapes(cfg))
    if not outline.num_trained:
        raise ConfigError(tr("tuning: nothing of this model would be trained as far as its parameters' names tell."))
    cfg_of_teacher = _config_of_teacher(cfg)
    return replace(outline, teacher=outline_of(cfg_of_teacher)) if cfg_of_teacher else outline


def cached_outline(cfg: schema.RunConfig, vocab_size: int = 0) -> Outline | None:
    """Return the same as `outline_of`, but None for a model that would have to be measured."""
    model = cfg.model
    if model.init is schema.Init.random:
        shapes, sizes = shapes_of_random(vocab_size or model.shape.vocab_size, model.shape)
        return _with_teacher(cfg, _tuned_outline(cfg, shapes, sizes))
    from toolkit.plan.model_config import known_shapes

    shapes_and_sizes = known_shapes(cfg)
    return _with_teacher(cfg, _tuned_outline(cfg, *shapes_and_sizes)) if shapes_and_sizes else None


def _with_teacher(cfg: schema.RunConfig, outline: Outline) -> Outline | None:
    """Return the outline with its teacher's, if there is one; None if the teacher has not been measured yet."""
    if (cfg_of_teacher := _config_of_teacher(cfg)) is None:
        return outline
    teacher = cached_outline(cfg_of_teacher)
    return replace(outline, teacher=teacher) if teacher else None


def _config_of_teacher(cfg: schema.RunConfig) -> schema.RunConfig | None:
    """Return a config that trains the teacher; None if no other model is the teacher."""
    if cfg.task.kind is not schema.TaskKind.distill or not cfg.distill.teacher or objective.has_own_teacher(cfg):
        return None
    from toolkit.plan.model_config import published_models

    path = cfg.distill.teacher
    published = published_models("hub_id").get(path, {})
    model = replace(cfg.model, init=schema.Init.pretrained, path=path, name=path, published=published)
    return replace(cfg, task=schema.TaskConfig(), model=model, tuning=schema.TuningConfig())


def _tuned_outline(cfg: schema.RunConfig, shapes: Shapes, sizes: Sizes, targets: Targets | None = None) -> Outline:
    """Return the outline of a model as a config trains it, from the shapes and sizes of the bare language model: its
    output layer replaced by the task's head, if it has one, and the parameters added that tuning trains. `targets`: of
    a measured model, see `outline.Targets`.
    """
    if cfg.task.has_head:
        shapes = {name: shape for name, shape in shapes.items() if name != HEAD}
        num_labels = len(objective.score_labels(cfg)) or 2  # where only the data show them two are assumed: few bytes
        shapes[SCORE] = (num_labels, sizes["hidden"])
        sizes = {**sizes, "logits_change": 0}  # what changed the logits of the output layer is gone with it
    outline = with_tuning(shapes, sizes, tuning_of(cfg), targets)
    has_lora = bool(outline.targets)
    if cfg.model.add_tokens and has_lora:  # LoRA also trains the rows of added tokens in the embedding
        from toolkit.plan.lora_outline import with_trained_rows

        return with_trained_rows(outline, len(cfg.model.add_tokens))
    return outline


def cache_file(cfg: schema.RunConfig, kind: str, inputs: object) -> Path:
    """Return the file that caches something, `kind`, that depends on these inputs alone."""
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.prepare.dir) / "plan" / f"{kind}-{key}.json"


def write_cache(file: Path, values: Any) -> None:
    """Write values as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(file, json.dumps(values).encode() + b"\n")
