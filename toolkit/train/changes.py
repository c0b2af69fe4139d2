"""Which settings and data a resumed run changes, compared with its checkpoint, and which of these are allowed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit import secrets
from toolkit.config import dotted_keys, load, rule_tables, schema
from toolkit.messages import ConfigError, shortened_alike, tr
from toolkit.models.chat import TOKENIZER
from toolkit.train.consistency import is_below

_LONGEST = 80
"""Characters of a value in a message."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) of settings that differ, in the order of the config, without secrets. A
    key that the old config lacks, as an older version wrote it, is taken to have had its default. Not so one that
    decides what is trained, unless it has its default now too, and the old config has a tuning method: its old value is
    None, not known.
    """
    old = {key: value for key, value in dotted_keys.leaves(before) if not dotted_keys.was_removed_and_off(key, value)}
    new = dict(dotted_keys.leaves(now))
    has_method = "tuning.method" in old
    for key, default in dotted_keys.leaves(load.to_dict(schema.RunConfig())):
        if key in new and (not _decides_trained_part(key) or (has_method and new[key] == default)):
            old.setdefault(key, default)
    keys = [*new, *(key for key in old if key not in new)]
    return [(key, old.get(key), new.get(key)) for key in keys if not secrets.are_same(old.get(key), new.get(key))]


def is_allowed_change(key: str) -> bool:
    """Whether a config key may change without changing what the run computes."""
    return dotted_keys.influence_of(key, schema.RunConfig) in (schema.Influence.free, schema.Influence.content)


def _decides_trained_part(key: str) -> bool:
    """Whether a config key decides which parameters are trained."""
    return dotted_keys.influence_of(key, schema.RunConfig) is schema.Influence.trained


def check_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    data_before: Mapping[str, str],
    data_now: Mapping[str, str],
    allowed: Sequence[str],
) -> list[str]:
    """Compare a checkpoint's config and data (name -> digest) with those of now; return a line per change, to print.
    ConfigError if a change alters what is computed and is not in `allowed`, the keys and sections of
    `checkpoint.allow_changes`; or if the optimizer's states or the trained parameters would not fit.
    """
    changes = [
        (key, old, new, f"  {key}: " + " -> ".join(shortened_alike(old, new, _LONGEST)))
        for key, old, new in differences(before, now)
    ]
    optimizer_before = before.get("optim", {}).get("name")
    if other_states := [line for key, old, new, line in changes if _changes_states(key, old, new, optimizer_before)]:
        raise ConfigError(
            "the checkpoint holds the states of another optimizer, or of other parameter groups:\n{changes}\nUndo "
            "this, or start over under another run.name, from model.path=RUN/export.",
            changes="\n".join(other_states),
        )
    # A setting whose old value is None, not known, may have been the same.
    if retrained := [line for key, old, _, line in changes if _decides_trained_part(key) and old is not None]:
        raise ConfigError(
            "the checkpoint belongs to a run that trains other parameters:\n{changes}\nUndo this, or start over under "
            "another run.name; from an adapter: tuning.adapter=RUN/export.",
            changes="\n".join(retrained),
        )
    lines = [(key, line) for key, _, _, line in changes]
    lines += _changed_data(data_before, data_now)
    # Where a part of the model is trained, its directory may be another one: base.json in the checkpoint identifies it.
    is_part = now.get("tuning", {}).get("method", "full") != "full"
    may_change = [*allowed, "model.path"] if is_part else allowed
    disallowed = [(key, line) for key, line in lines if not is_allowed_change(key) and not is_below(key, may_change)]
    if disallowed:
        raise ConfigError(
            "the checkpoint belongs to a run that computes something else:\n{changes}\nUndo this, or allow it: "
            "checkpoint.allow_changes=[{keys}]; or start over under another run.name.",
            changes="\n".join(dict.fromkeys(line for _, line in disallowed)),
            keys=",".join(dict.fromkeys(key for key, _ in disallowed)),
        )
    return [line for _, line in lines]


def _changes_states(key: str, old: Any, new: Any, optimizer_before: str | None) -> bool:
    """Whether the saved states do not fit after a change: those of another optimizer, or of other parameter groups."""
    if key == "optim.name" and not {optimizer_before, new} <= {"adam", "adamw"}:  # these two have the same states
        return True
    # adam_lr is a rate, which leaves the groups as they are; `old` is None in a config from before there were groups.
    return key in rule_tables.GROUPING and key != "optim.adam_lr" and old is not None


def _changed_data(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield for each differing name -> digest the key that allows it in `allow_changes`, and the line to print."""
    parts = {
        "vocabulary": tr("vocabulary"),
        "division of text": tr("division of text"),
        "special tokens": tr("special tokens"),
        "chat template": tr("chat template"),
    }
    for name, digest in now.items():
        if before.get(name) == digest:
            continue
        if not name.startswith(TOKENIZER):
            yield "data", tr("  the prepared data: {name} is another one", name=name)
        elif name in before:  # earlier versions noted no tokenizer
            # "data" does not allow it: with a tokenizer that other data has trained, ids of tokens mean something else.
            yield (
                "model.tokenizer",
                tr(
                    "  the tokenizer: another {part} than in the checkpoint's model/, which model.tokenizer may name",
                    part=parts[name.removeprefix(TOKENIZER)],
                ),
            )
