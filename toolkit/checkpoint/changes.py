"""What differs between the run that saved and the run that goes on; and which differences change the mathematics."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.load import to_dict
from toolkit.config.schema import Influence, RunConfig, influence_of
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.secrets import are_same
from toolkit.tables import leaves


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return key, old and new value of everything that differs, in the order of the config; secrets do not.

    A run older than a key did what the key's default says; only of what was trained it says nothing.
    """
    old, new = dict(leaves(before)), dict(leaves(now))
    defaults = leaves(to_dict(RunConfig()))
    old = {key: value for key, value in defaults if key in new and not _is_trained(key)} | old
    keys = [*new, *(key for key in old if key not in new)]
    return [(key, old.get(key), new.get(key)) for key in keys if not are_same(old.get(key), new.get(key))]


def is_allowed_change(key: str) -> bool:
    """Whether a key may change without changing what is computed."""
    return influence_of(key, RunConfig) in (Influence.free, Influence.content)


def _is_trained(key: str) -> bool:
    return influence_of(key, RunConfig) is Influence.trained


def check_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    data_before: Mapping[str, str],
    data_now: Mapping[str, str],
    allowed: Sequence[str],
) -> list[str]:
    """Return a line for each difference.

    `allowed` is `checkpoint.allow_changes`: keys and sections; `data` for the data, which fingerprints compare.
    """
    found = differences(before, now)
    lines = [f"  {key}: {_shown(old)} -> {_shown(new)}" for key, old, new in found]
    refused = [
        (key, line)
        for (key, _, _), line in zip(found, lines, strict=True)
        if not is_allowed_change(key) and not _is_allowed(key, allowed) and not (key == "model.path" and _is_part(now))
    ]
    _check_states(found, lines, before)
    other = [line for (key, old, _), line in zip(found, lines, strict=True) if _is_trained(key) and old is not None]
    if other:
        raise ConfigError(
            "the checkpoint belongs to a run that trains other parameters:\n{changes}\nUndo this, or start anew "
            "under another run.name; from an adapter: tuning.adapter=RUN/export.",
            changes="\n".join(other),
        )
    for name, fingerprint in data_now.items():
        if data_before.get(name) != fingerprint:
            line = tr("  the prepared data: {name} is another one", name=name)
            lines.append(line)
            if not _is_allowed("data", allowed):
                refused.append(("data", line))
    if refused:
        keys = list(dict.fromkeys(key for key, _ in refused))
        raise ConfigError(
            "the checkpoint belongs to a run that computes something else:\n{changes}\nUndo this, or allow it: "
            "checkpoint.allow_changes=[{keys}]; or start anew under another run.name.",
            changes="\n".join(dict.fromkeys(line for _, line in refused)),
            keys=",".join(keys),
        )
    return lines


def _check_states(found: Sequence[tuple[str, Any, Any]], lines: Sequence[str], before: Mapping[str, Any]) -> None:
    """Refuse states that the optimizer cannot read; adam and adamw have the same, and older configs know no groups."""
    adams, name = {"adam", "adamw"}, before.get("optim", {}).get("name")
    other = [
        line
        for (key, old, now), line in zip(found, lines, strict=True)
        if (key == "optim.name" and not {name, now} <= adams)
        or (key in ("optim.decay", "optim.layer_lr_decay") and old is not None)
    ]
    if other:
        raise ConfigError(
            "the checkpoint holds the states of another optimizer, or of other parameter groups:\n{changes}\nUndo "
            "this, or start anew under another run.name, from model.path=RUN/export.",
            changes="\n".join(other),
        )


def _is_part(config: Mapping[str, Any]) -> bool:
    """Whether a part of the model is trained: base.json in the checkpoint tells then whether the rest is the same."""
    return bool(config.get("tuning", {}).get("method", "full") != "full")


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
