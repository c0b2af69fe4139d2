"""The keys that DeepSpeed's JSON may have (ds_keys.json), and what is wrong with others.

DeepSpeed ignores unknown keys silently, so they are rejected here. Imports neither torch nor deepspeed.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from toolkit.config import dotted_keys
from toolkit.messages import ConfigError, nearest, raise_all, tr

_TABLE = json.loads(Path(__file__).with_name("ds_keys.json").read_text(encoding="utf-8"))
KEYS: dict[str, Any] = _TABLE["keys"]
"""Key of DeepSpeed's JSON -> the keys in that section; None for a key that is no section."""
RENAMED: dict[str, str] = _TABLE["renamed"]
REMOVED: list[str] = _TABLE["removed"]
# Keys that people write and that DeepSpeed never had there, or rejects -> the right ones.
ELSEWHERE = {
    "optimizer.params.max_grad_norm": "gradient_clipping",
    "optimizer.params.learning_rate": "optimizer.params.lr",
}
# Removed section -> the toolkit's key that replaces it, and the page about that.
INSTEAD = {
    "elasticity": ("batch.world_sizes", "docs/data_efficiency.md"),
    "curriculum_learning": ("data.curriculum", "docs/data_efficiency.md"),
    "zero_optimization.mics_shard_size": ("zero.zero_hpz_partition_size", "docs/zero.md"),
}
# If these are false, DeepSpeed (0.19.8) does not compute a step's gradient norm, or updates even if it is not finite.
NEEDED = ("zero_optimization.compute_grad_norm", "bf16.check_grad_overflow")
MOST_PROBLEMS = 20
"""Unknown keys that an error lists; it counts the others."""


def json_keys(tree: dict[str, Any] | None = None, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of DeepSpeed's JSON (or of `tree`, its section below `prefix`), sections included."""
    for name, children in (KEYS if tree is None else tree).items():
        yield prefix + name
        if children:
            yield from json_keys(children, f"{prefix}{name}.")


def wrong_keys(section: dict[str, Any], tree: dict[str, Any] | None = None, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys in `section` that DeepSpeed's JSON cannot have; `key_problem` says why. `tree`: the keys
    that the section may have, `KEYS` by default; `prefix`: the section's dotted key and a dot.
    """
    keys: dict[str, Any] = KEYS if tree is None else tree
    for name, value in section.items():
        key, below = prefix + name, keys.get(name)
        is_no_section = below and not isinstance(value, dict | None)  # a value where DeepSpeed has a section
        if key == "data_efficiency" or name not in keys or is_no_section:  # the first is known, but has no use here
            yield key
        elif below and value:
            yield from wrong_keys(value, below, f"{key}.")


def key_problem(key: str) -> str:
    """Return a sentence about what is wrong with a key of `wrong_keys`, and which key was meant."""
    prefix, _, name = key.rpartition(".")
    siblings: dict[str, Any] = KEYS
    for section in prefix.split(".") if prefix else ():
        siblings = siblings.get(section) or {}
    if key == "data_efficiency":
        return tr(
            "'{key}' works with DeepSpeed's own data loader and layers only, which are not used here. Take it out, "
            "and use data.curriculum instead (docs/data_efficiency.md).",
            key=key,
        )
    if name in siblings:
        return tr("'{key}' is a section, so it needs {{...}}, not a value.", key=key)
    if key in INSTEAD:
        schema, page = INSTEAD[key]
        return tr(
            "'{key}' belongs to a feature that was removed from DeepSpeed. Take it out, and use {schema} instead "
            "({page}).",
            key=key,
            schema=schema,
            page=page,
        )
    if key in REMOVED:
        return tr("'{key}' belongs to a feature that was removed from DeepSpeed. Take it out.", key=key)
    if key in RENAMED:
        return tr("'{key}' is an old name. Write '{today}'.", key=key, today=RENAMED[key])
    # What was meant: the name in another section, a similar name in this section, or a key that is similar as a whole.
    namesakes = [other for other in json_keys() if other.rpartition(".")[2] == name]
    close = nearest(name, siblings)
    guess = ELSEWHERE.get(key) or next(iter(namesakes), None) or (key.removesuffix(name) + close if close else None)
    guess = guess or nearest(key, json_keys())
    if guess is None:
        return tr("DeepSpeed has no key '{key}'.", key=key)
    if guess in namesakes:
        return tr("'{key}' is in the wrong section. It belongs to '{guess}'.", key=key, guess=guess)
    return tr("DeepSpeed has no key '{key}'. Did you mean '{guess}'?", key=key, guess=guess)


def _extra_problem(key: str, values: Mapping[str, Any], owned: Mapping[str, str]) -> str:
    """Return what is wrong with a key of ds_extra; `values`: its dotted keys and values, `owned`: see `check_extra`."""
    if key in owned:
        return tr("set {schema} instead; ds_extra is for keys that have no own place.", schema=owned[key])
    if key in NEEDED and values[key] is False:
        return tr(
            "cannot be false: every step is judged by the norm of its gradient before it changes the weights "
            "(train.on_bad_step). Take it out."
        )
    if values.get(key, 0) in (None, "auto"):  # 0 stands for a section, which has no value
        return tr("needs a value; {value} would be read as something else by DeepSpeed.", value=repr(values[key]))
    return key_problem(key)


def check_extra(extra: dict[str, Any], owned: Mapping[str, str], where: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for keys in ds_extra that DeepSpeed does not know, or that the schema has a key for.
    `owned`: dotted DeepSpeed key -> the schema's key for it; `where`: schema key -> "file:line" that sets it.
    """
    values, wrong = dict(dotted_keys.leaves(extra)), dict.fromkeys(wrong_keys(extra))  # an ordered set
    for key, value in values.items():
        # The key or a section above it that the schema owns: of a.b.c the first of a, a.b and a.b.c.
        ours = next((name for name in accumulate(key.split("."), "{}.{}".format) if name in owned), "")
        if ours or value is None or value == "auto" or (key in NEEDED and value is False):
            wrong[ours or key] = None
    errors = []
    for key in islice(wrong, MOST_PROBLEMS):
        full, prefix = f"ds_extra.{key}", ""
        for key_in_file, position in (where or {}).items():  # its own position, or the first one above or below it
            if f"{full}.".startswith(f"{key_in_file}.") or key_in_file.startswith(f"{full}."):
                prefix = tr("{place}: ", place=position)
                break
        errors.append(ConfigError(f"{prefix}{full}: {_extra_problem(key, values, owned)}"))
    if len(wrong) > MOST_PROBLEMS:
        errors.append(ConfigError("… and {count} more.", count=f"{len(wrong) - MOST_PROBLEMS:,}"))
    raise_all(errors)
