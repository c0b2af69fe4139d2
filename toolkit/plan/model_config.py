"""Names and shapes of a model's parameters by its config.json, or by its group if it is a published one. No torch.

There are formulas for ChatGLM-6B and transformers' GLM, GLM-4, Llama, Mistral, Qwen2 and Qwen3; a model without is
measured once, in a subprocess, and cached.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.config import files, schema
from toolkit.messages import ConfigError, ModelError, file_bytes, parsed_json, say, shortlist, tr
from toolkit.plan.lookup import cache_file, write_cache
from toolkit.plan.outline import HEAD, Shapes, Sizes, Targets, decoder_shapes

_DENSE = ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
_MEASURE_S = 300
NO_MODEL = 3
"""Exit code of toolkit.models.outline if the model cannot be trained; its last line says why."""
_CACHE_VERSION = 6
"""Version of the cache's content; increase it when measurements change."""


def known_shapes(cfg: schema.RunConfig) -> tuple[Shapes, Sizes] | tuple[Shapes, Sizes, Targets] | None:
    """Return the shapes and sizes of a model by formula, or these and the targets as they were measured; None if they
    have to be measured. ConfigError for a config.json with odd values.
    """
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
        return by_formula
    cached = _cache_file_of(cfg, config)
    return _read_cache(cached) if cached.is_file() else None


def shapes_of_config(config: Mapping[str, Any]) -> tuple[Shapes, Sizes] | None:
    """Return parameters and sizes by a config.json, official ChatGLM or transformers; None for an unknown model."""
    if "inner_hidden_size" in config:
        return _chatglm_6b_shapes(config)
    if "padded_vocab_size" in config:
        is_grouped = config.get("multi_query_attention")
        return decoder_shapes(
            {
                "model_type": "glm",
                "vocab_size": config["padded_vocab_size"],
                "hidden_size": config["hidden_size"],
                "intermediate_size": config["ffn_hidden_size"],
                "num_hidden_layers": config["num_layers"],
                "num_attention_heads": config["num_attention_heads"],
                "num_key_value_heads": config["multi_query_group_num" if is_grouped else "num_attention_heads"],
                "head_dim": config["kv_channels"],
                "attention_bias": bool(config.get("add_qkv_bias", False)),
            }
        )
    return decoder_shapes(config) if config.get("model_type") in _DENSE else None


def _chatglm_6b_shapes(config: Mapping[str, Any]) -> tuple[Shapes, Sizes]:
    """Return shapes and sizes of ChatGLM-6B."""
    hidden, inner, layers = config["hidden_size"], config["inner_hidden_size"], config["num_layers"]
    norms = ("input_layernorm", "post_attention_layernorm")
    matrices = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    layer: Shapes = {f"{name}.{end}": (hidden,) for name in norms for end in ("weight", "bias")}
    layer |= {f"{name}.weight": shape for name, shape in matrices.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    shapes |= {f"transformer.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    shapes |= {f"transformer.final_layernorm.{end}": (hidden,) for end in ("weight", "bias")}
    shapes[HEAD] = (config["vocab_size"], hidden)
    heads = config["num_attention_heads"]
    return shapes, {
        "layers": layers,
        "hidden": hidden,
        "inner": inner,
        "heads": heads,
        "head_size": hidden // heads,
        "keys": hidden,
        # The original's prefix network begins with embeddings of the hidden width.
        "prefix": hidden,
        "norms": 2,
        "rotary": hidden // heads,
    }


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
            raise ValueError("[]")  # what such JSON may be, in place of {}
    except (ValueError, OSError) as error:
        raise ConfigError("{file} is no model's config.json: {reason}", file=file, reason=error) from None
    return config


def _config_file(cfg: schema.RunConfig) -> Path | None:
    file = Path(cfg.model.path) / "config.json"
    return file if cfg.model.path and file.is_file() else None


def measured_shapes(cfg: schema.RunConfig) -> tuple[Shapes, Sizes, Targets]:
    """Build the model on the meta device, in a child process; return its shapes, sizes and targets (see `outline`), and
    cache them. ModelError if it cannot be trained, ConfigError if it cannot be built.
    """
    config = config_of(cfg)
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
