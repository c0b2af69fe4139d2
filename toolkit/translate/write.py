"""A recipe as text: groups, then only what differs from them, each line with the key that it comes from."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from toolkit.config import files
from toolkit.config.load import escaped, plain
from toolkit.config.schema import Device, OptimizerName, RunConfig, ScheduleName, SourceConfig, TuningMethod

_INDENT = "  "


def chosen_groups(cfg: RunConfig) -> dict[str, str]:
    """Return the groups, other than those that are taken anyway, whose files say what a config says."""
    found = {}
    if cfg.tuning.method is not TuningMethod.full:
        found["tuning"] = cfg.tuning.method.value
    if cfg.optim.name is not OptimizerName.adamw:
        found["optim"] = cfg.optim.name.value
    if cfg.schedule.name is not ScheduleName.cosine:
        found["schedule"] = cfg.schedule.name.value
    if cfg.precision.dtype.value != "bf16":
        found["precision"] = cfg.precision.dtype.value
    zero, stage = cfg.zero, cfg.zero.stage
    optimizer, param = zero.offload_optimizer.device, zero.offload_param.device
    kind = ""
    if stage == 3 and optimizer is param and optimizer is not Device.none:
        kind = "_nvme" if optimizer is Device.nvme else "_offload"
    elif stage == 2 and optimizer is Device.cpu:
        kind = "_offload"
    if (stage, kind) != (2, ""):
        found["zero"] = f"stage{stage}{kind}"
    return found


def recipe_text(
    cfg: RunConfig | None, base: RunConfig | None, groups: Mapping[str, str], origins: Mapping[str, str]
) -> str:
    """Return a recipe.

    Args:
        cfg: what it shall say; None: nothing but the groups.
        base: what the groups say without it.
        groups: group -> choice.
        origins: our key -> where it comes from, for the comment behind it.
    """
    lines = ["# @package _global_", "defaults:"]
    lines += [f"  - override /{group}: {choice}" for group, choice in sorted(groups.items())]
    lines += ["  - _self_"]
    if cfg is not None and base is not None:
        body = list(_lines(_differing(cfg, base), "", "", origins))
        lines += ["", *body] if body else []
    return "\n".join(lines) + "\n"


def _differing(cfg: Any, base: Any) -> dict[str, Any]:
    """Return the fields that differ, nested; the name of the recipe is no setting."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cfg):
        mine, theirs = getattr(cfg, item.name), getattr(base, item.name)
        if dataclasses.is_dataclass(mine):
            if inner := _differing(mine, theirs):
                found[item.name] = inner
        elif mine != theirs and not (isinstance(cfg, RunConfig) and item.name == "recipe"):
            found[item.name] = mine
    return found


def _lines(tree: Mapping[str, Any], path: str, indent: str, origins: Mapping[str, str]) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        comment = f"  # {origins[key]}" if key in origins else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:{comment}"
            yield from _lines(value, key, indent + _INDENT, origins)
        elif isinstance(value, list) and value and isinstance(value[0], SourceConfig):
            yield f"{indent}{name}:{comment}"
            for source in value:
                yield f"{indent}{_INDENT}- {_inline(plain_source(source))}"
        else:
            yield f"{indent}{name}: {_inline(plain(value))}{comment}"


def plain_source(source: SourceConfig) -> dict[str, Any]:
    """Return what a source says beside the defaults."""
    return {name: plain(value) for name, value in _differing(source, SourceConfig()).items()}


def _inline(value: Any) -> str:
    """Return a value in one line of YAML, which reads as the same value again."""
    text = yaml.safe_dump([escaped(value)], default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    text = text.strip()[1:-1]
    return text if files.parse(f"x: {text}", "").values["x"] == escaped(value) else json.dumps(escaped(value))
