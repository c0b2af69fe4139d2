"""Which keys a wrong name means: those for another program's name, or the nearest of ours. Read in errors alone."""

import difflib
import re
from collections.abc import Callable, Iterable
from functools import cache, partial

from toolkit.config.dotted_keys import REMOVED, all_keys
from toolkit.config.program_keys import keys_of, sentence
from toolkit.config.validate import error_about, field_type, members
from toolkit.messages import ConfigError, joined, read_table, shortlist, tr

_PROGRAMS = ("axolotl", "swift", "chatglm", "hf", "factory")
_MOST_GUESSES = 3
_LAUNCH = "toolkit launch --num_gpus N"
_ELSEWHERE = {
    "hostfile": "toolkit launch hostfile=FILE, toolkit doctor hostfile=FILE",
    "gpus": f"{_LAUNCH}, toolkit plan gpus=8x80GB",
    "world_size": f"{_LAUNCH}, toolkit check world_size=N",
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "nproc_per_node", "num_processes"), _LAUNCH),
}
"""Arguments of some commands, or of launchers, which others take for a key -> the commands to type."""
_LEAST_NAME, _LEAST_SHORT, _LEAST_HERE, _LEAST_PATH = 0.75, 0.85, 0.6, 0.8
"""How similar (difflib's ratio) a name must be to be guessed: any key's or program's last part; one of up to four
letters; one in the section that was typed; a dotted path as a whole."""


@cache
def foreign_names() -> dict[str, tuple[str, ...]]:
    """Return another program's name -> our keys for it, from import-config's tables and other_names.yaml."""
    # axolotl's rl is too likely a misspelling of lr.
    names = {name: key.to for program in _PROGRAMS for name, key in keys_of(program).items() if key.to and name != "rl"}
    return {name: tuple(keys.split(", ")) for name, keys in (names | read_table("config/other_names.yaml")).items()}


def is_foreign(name: str) -> bool:
    """Whether another program has an argument of this name."""
    return any(name in keys_of(program) for program in _PROGRAMS)


def unknown_key(path: str, locate: Callable[[str], str]) -> ConfigError:
    """Return the error for an unknown key, with the keys that were probably meant."""
    shown = _without_indices(path)
    meant, siblings = keys_meant(path), members(shown.rpartition(".")[0])
    text = tr("{place}: unknown key '{key}'.", place=locate(path), key=path)
    if elsewhere := _ELSEWHERE.get(path):
        text = joined(text, tr("Other commands take it: {commands}", commands=elsewhere))
        meant = ()
    elif meant == (path,):  # of the items of a list, without a position
        section, _, name = path.rpartition(".")
        text = joined(text, tr("Did you mean '{name}'?", name=f"{section}=[{{{name}: VALUE}}]"))
    elif meant:
        names = "' / '".join(meant[:_MOST_GUESSES])
        is_old = any(f"{key}.".startswith(f"{path}.") for key in REMOVED)
        removed = tr("It has been removed; instead, see '{name}'.", name=names)
        text = joined(text, removed if is_old else tr("Did you mean '{name}'?", name=names))
    elif says := _why_there_is_none(shown.rpartition(".")[2]):
        text = joined(text, tr("There is none here: {says}.", says=says))
    elif siblings:
        text = joined(text, tr("Known here: {keys}.", keys=shortlist(siblings, "docs/config.md")))
    # Without sections among the meant keys, so that errors in these are still reported.
    keys = (path, *(key for key in meant if not members(key)))
    return error_about(text, *(re.sub(r"\[\d+\].*", "", key) for key in keys))


def keys_meant(path: str) -> tuple[str, ...]:
    """Return the keys that a dotted name may mean: itself, those for another program's name, or the nearest ones."""
    shown = _without_indices(path)
    if field_type(shown) is not None:
        return (path,)
    prefix, _, name = path.rpartition(".")
    names, (section, _, rest) = foreign_names(), shown.partition(".")
    inside = tuple(key for ours in names.get(section, ()) if rest and field_type(key := f"{ours}.{rest}") is not None)
    plural = (f"{shown}s",) if f"{name}s" in members(shown.rpartition(".")[0]) else ()
    removed = names.get(prefix, ()) if shown in REMOVED else ()
    # Another program's name: of the whole path, within its section, or of its last part.
    exact = names.get(shown) or removed or inside or plural or names.get(name) or names.get(shown.replace(".", "_"))
    return exact or _nearest(prefix, shown, name)


def _nearest(prefix: str, shown: str, name: str) -> tuple[str, ...]:
    """Return the keys that a mistyped one is most like, ours or those for another program's name, by the first rule
    that gives any: what is surest first, so that the order is what decides.

    Args:
        prefix: The section as typed, "" for none.
        shown: The whole key as typed, without positions in lists.
        name: Its last part.
    """
    here = {sibling: (f"{prefix}.{sibling}" if prefix else sibling,) for sibling in members(_without_indices(prefix))}
    ours: dict[str, tuple[str, ...]] = {}
    for key in all_keys():
        leaf = key.rpartition(".")[2]
        ours[leaf] = (*ours.get(leaf, ()), key)
    theirs = {
        foreign: keys
        for foreign, keys in foreign_names().items()
        if not any(f"{key}.".startswith(foreign) for key in REMOVED)
    }
    if close := _most_similar(name, here, _LEAST_NAME) or (prefix and _with_words_of(name, here)):
        return here[close]
    if prefix and (close := _with_a_word_like(name, here)):
        return here[close]
    if name in ours and not prefix:
        return ours[name]
    # The right name in a section that is nearly right: of several sections the one that is most like the typed one.
    section_of = partial(_likeness, prefix)
    best = max(ours.get(name, ()), key=lambda key: section_of(key.rpartition(".")[0]), default="")
    if best and section_of(best.rpartition(".")[0]) >= _LEAST_HERE:
        return (best,)
    if close := _most_similar(shown, (path for path in theirs if "." in path), _LEAST_PATH):
        return theirs[close]
    if name == "enabled" and prefix:
        return keys_meant(prefix)
    if prefix and (close := _with_the_words(name, here)):
        return here[close]
    everywhere = theirs | {leaf: keys for leaf, keys in ours.items() if len(keys) == 1}
    least = _LEAST_NAME if len(name) > 4 else _LEAST_SHORT  # of the many names, short ones are like each other
    if close := _most_similar(name, everywhere, least) or _with_the_words(name, everywhere):
        return everywhere[close][:_MOST_GUESSES]
    if close := _most_similar(shown, (key for key in all_keys() if not shown.startswith(key)), _LEAST_PATH):
        return (close,)
    return here[close] if (close := _most_similar(name, here, _LEAST_HERE)) else ()


def _likeness(text: str, other: str) -> float:
    """Return how alike two texts are, from 0 to 1."""
    return difflib.SequenceMatcher(None, text, other).ratio()


def _most_similar(name: str, candidates: Iterable[str], least: float) -> str | None:
    """Return the candidate that is most like a name, None if none is like it enough."""
    close = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=least)
    return close[0] if close else None


def _with_the_words(name: str, candidates: Iterable[str]) -> str | None:
    """Return the shortest candidate that has all words of a name, as `grad_clip` has `clip`; None without one."""
    words = set(name.lower().split("_"))
    having = [key for key in candidates if "." not in key and words <= set(key.split("_"))]
    return min(having, key=len, default=None)


def _with_words_of(name: str, candidates: Iterable[str]) -> str | None:
    """Return the longest candidate whose words a name has, as `save_every` has `every`; None without one."""
    words = set(name.lower().split("_"))
    return max((key for key in candidates if set(key.split("_")) <= words), key=len, default=None)


def _with_a_word_like(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate of which one word is a name with letters swapped, as `max_steps` of `stpes`."""
    letters = sorted(name.lower())
    return next((key for key in candidates for word in key.split("_") if sorted(word) == letters), None)


def _why_there_is_none(name: str) -> str:
    """Return what other programs' key, which has no counterpart here, is instead; "" for a name that none has."""
    tables = [keys_of(program) for program in _PROGRAMS]
    keys = [table[name] for table in tables if name in table]
    return next((sentence(key.says).rstrip(".。") for key in keys if key.says), "")


def _without_indices(path: str) -> str:
    """Return a dotted path without the positions in lists: `data.sources[0].path` is `data.sources.path`."""
    return re.sub(r"\[\d+\]", "", path)
