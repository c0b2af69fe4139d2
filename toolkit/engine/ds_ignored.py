"""What DeepSpeed ignores in somebody's JSON, and its old names: taken out or renamed before the file is translated.

Read in DeepSpeed 0.19.8. A likely misspelling is left in, so that it becomes an error.
"""

import difflib
from typing import Any

from toolkit.engine.ds_keys import INSTEAD, KEYS, REMOVED, RENAMED, dotted_keys
from toolkit.messages import tr

_OFFLOADS = {
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_param": "offload_param",
}
"""Switches of old versions -> the section that took their place."""
_KNOWN = ("zero_optimization.cpu_offload_use_pin_memory", "scheduler.params.last_batch_iteration")
"""Names that could be taken for misspellings, and that change nothing."""
_LIKELY = 0.8
"""How alike a name must be to a known one to be a misspelling of it."""


def without_ignored(values: dict[str, Any], where: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a DeepSpeed JSON without what DeepSpeed ignores in it, and with today's names.

    Args:
        values: the nested dictionary, without nulls.
        where: dotted key -> "file:line"; receives the places of renamed keys.

    Returns:
        A new dictionary; and dotted key -> a sentence about what became of it.
    """
    notes: dict[str, str] = {}
    return _section(values, KEYS, "", where, notes), notes


def _section(
    section: dict[str, Any], known: dict[str, Any], prefix: str, where: dict[str, str], notes: dict[str, str]
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    is_disabled = bool(prefix) and section.get("enabled") is False
    for name, value in section.items():
        key = prefix + name
        if is_disabled and name != "enabled":
            notes[prefix.rstrip(".")] = tr("{key} is disabled: its other keys have no effect.", key=prefix.rstrip("."))
        elif key in _OFFLOADS:
            if value is True:
                kept.setdefault(_OFFLOADS[key], {"device": "cpu"})
            notes[key] = tr(
                "{key} is an old name, read as {today}.",
                key=key,
                today=f"{prefix}{_OFFLOADS[key]}.device = {'cpu' if value is True else 'none'}",
            )
        elif key in RENAMED and " or " not in RENAMED[key]:
            today = RENAMED[key]
            notes[key] = tr("{key} is an old name, read as {today}.", key=key, today=today)
            where.update(
                {today + place.removeprefix(key): line for place, line in list(where.items()) if place.startswith(key)}
            )
            short = today.removeprefix(prefix)
            kept.setdefault(
                short,
                value if not isinstance(value, dict) else _section(value, known[short], f"{today}.", where, notes),
            )
        elif key == "data_efficiency" and isinstance(value, dict) and value.get("enabled") is False:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)  # known to it, and not used here if it is on
        elif name in known and isinstance(value, dict) and known[name]:
            kept[name] = _section(value, known[name], f"{key}.", where, notes)
        elif name in known or not _is_ignored(key, name, known):
            kept[name] = value
        elif key in INSTEAD:
            notes[key] = tr("DeepSpeed ignores {key}; {schema} does what it did.", key=key, schema=INSTEAD[key][0])
        else:
            notes[key] = tr("DeepSpeed ignores {key}.", key=key)
    return kept


def _is_ignored(key: str, name: str, known: dict[str, Any]) -> bool:
    """Return whether an unknown name is no more than that: a comment, a removed feature, what others read."""
    if key in REMOVED or key in _KNOWN or name.startswith(("_", "#", "//")) or name.lower().startswith("comment"):
        return True
    elsewhere = {other.rpartition(".")[2] for other in dotted_keys()}
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=_LIKELY)
    begins = any(other.startswith(f"{name}_") or name.startswith(f"{other}_") for other in known)
    return name not in elsewhere and name != "learning_rate" and not close and not begins
