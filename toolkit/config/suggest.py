"""What a wrong key, choice or directory means: another program's name, or the nearest of ours. Read in errors alone."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

from toolkit.config import data_forms, files
from toolkit.config.dotted_keys import REMOVED, all_keys
from toolkit.config.program_keys import keys_of, sentence
from toolkit.config.validate import error_about, field_type, members
from toolkit.messages import ConfigError, did_you_mean, joined, nearest, read_table, shortlist, tr

_PROGRAMS = ("axolotl", "swift", "chatglm", "hf", "factory")
_MOST_GUESSES = 3
_LAUNCH = "toolkit launch --num_gpus N"
_ELSEWHERE = {
    "hostfile": "toolkit launch hostfile=FILE, toolkit doctor hostfile=FILE",
    **dict.fromkeys(("gpus", "gpu"), f"{_LAUNCH}, toolkit plan gpus=8x80GB"),
    "world_size": f"{_LAUNCH}, toolkit check world_size=N",
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "nproc_per_node", "num_processes"), _LAUNCH),
}
"""Arguments of some commands, or of launchers, which others take for a key -> the commands to type."""
_OTHER_CHOICES = {"float16": "fp16", "half": "fp16", "16": "fp16", "float32": "fp32", "32": "fp32", "bfloat16": "bf16"}
"""What PyTorch calls choices of ours, where that is not like them."""
COLUMNS_MEANT = {
    "prompt": (
        *("question", "questions", "q", "query", "input", "inputs", "ask", "user", "human", "problem", "text"),
        *("content", "问题", "提问", "输入", "用户", "题目"),
    ),
    "response": (
        *("answer", "answers", "a", "reply", "output", "outputs", "target", "summary", "assistant", "bot", "solution"),
        *("completion", "label", "回答", "答案", "输出", "回复", "摘要"),
    ),
}
"""What people call a prompt and a response."""
_WIDE, _IN_QUOTES = re.compile("[＝：｛｝［］“”‘’＂＇]"), re.compile(r"'[^']*'|\"[^\"]*\"")
_ONLINE = {"grpo", "ppo", "rlhf", "rl", "dapo", "gspo", "rloo", "reinforce", "online_dpo"}
"""What other programs call online reinforcement learning."""
_MOST_RUNS = 5
_LEAST_OPTIONS = 3
"""Options of other programs that make a command of theirs."""
_LEAST_NAME, _LEAST_SHORT, _LEAST_WORDS, _LEAST_SECTION, _LEAST_PATH = 0.75, 0.85, 0.7, 0.6, 0.8
"""How similar (difflib's ratio) a name must be to be guessed: any key's or program's last part; one of up to four
letters; the words that are not the same; the section of a name that is right; a dotted path as a whole."""


@cache
def foreign_names() -> dict[str, tuple[str, ...]]:
    """Return another program's name -> our keys for it, from import-config's tables and other_names.yaml."""
    names = {name: key.to for program in _PROGRAMS for name, key in keys_of(program).items() if key.to}
    names.pop("rl")  # axolotl's is too likely a misspelling of lr
    names |= read_table("config/other_names.yaml")
    return {name: tuple(keys.split(", ")) for name, keys in names.items()}


_deepspeed = cache(partial(read_table, "engine/ds_keys.json"))


@cache
def _deepspeed_keys() -> dict[str, str]:
    """Return a name -> the dotted key of DeepSpeed's JSON that it means: that key, and its last part if that has
    several words and no other key ends so.
    """
    keys: list[str] = []

    def collect(section: Mapping[str, Any], prefix: str = "") -> None:
        for name, children in section.items():
            keys.append(prefix + name)
            collect(children or {}, f"{prefix}{name}.")

    collect(_deepspeed()["keys"])
    count = Counter(key.rpartition(".")[2] for key in keys)
    names = {name: key for key in keys if "_" in (name := key.rpartition(".")[2]) and count[name] == 1}
    return names | dict(zip(keys, keys, strict=True))


def is_foreign(name: str) -> bool:
    """Whether another program has an argument of this name."""
    return any(name in keys_of(program) for program in _PROGRAMS)


def is_of_others(name: str) -> bool:
    """Whether another program, or DeepSpeed's JSON, has a key of this name."""
    tables = (foreign_names(), _deepspeed_keys(), _deepspeed()["removed"])
    return is_foreign(name) or any(name in table for table in tables)


def reject_foreign_keys(file: str, keys: Sequence[str], total: int) -> None:
    """Raise ConfigError if most of the `total` keys of a config are DeepSpeed's, or another program's; `keys`: those
    that a recipe does not have.
    """
    theirs = [key for key in keys if key in _deepspeed()["keys"]]
    if 2 * len(theirs) > total:
        raise ConfigError(
            "{file} is no recipe but a DeepSpeed config ({keys}, …). It goes with a recipe:  recipe=NAME "
            "deepspeed_json={file}",
            file=file,
            keys=", ".join(theirs[:3]),
        )
    foreign = [key for key in keys if is_foreign(key)]
    if len(foreign) >= 2 and 2 * len(foreign) > total:
        raise ConfigError(
            "{file} is no recipe but another program's config ({keys}, …). Make a recipe of it:  toolkit "
            "import-config {file} output=NAME.yaml",
            file=file,
            keys=", ".join(foreign[:3]),
        )


def no_recipe(path: Path) -> ConfigError:
    """Return the error about a file or directory in the place of a recipe, by its name and what is in it."""
    is_large, values = path.stat().st_size > files.LARGEST_FILE_BYTES, {}
    if path.suffix == ".json" and not is_large:
        with suppress(ValueError, OSError):
            values = json.loads(path.read_text(encoding="utf-8"))
    if path.suffix not in (".json", ".sh") or is_large or not isinstance(values, dict) or path.is_dir():
        return ConfigError(
            "command line: {path} is no recipe. Data is data={path}, a model is model.path={path}, both next to a "
            "recipe: recipe=NAME or recipe=PATH.yaml.",
            path=path,
        )
    try:
        reject_foreign_keys(str(path), [*values], len(values))
    except ConfigError as error:
        return error
    return ConfigError(
        "command line: {path} is no recipe. A DeepSpeed JSON goes with a recipe: recipe=NAME "
        "deepspeed_json={path}. Of another program's config make one:  toolkit import-config {path} "
        "output=NAME.yaml",
        path=path,
    )


def option_meant(name: str, value: str) -> str:
    """Return what to write for another program's option `--name value`, or that it is to be left out; "" where the keys
    that the name means take its value as it is.
    """
    patterns = read_table("config/other_options.yaml").get(name, {})  # pattern of its value -> row
    row = next((row for pattern, row in patterns.items() if fnmatch(value.lower(), pattern)), None)
    if row is not None:
        # What to write ("": nothing), alone or with the name of a sentence that gives the reason.
        words, reason_name = (row, "") if isinstance(row, str) else row
        return _write_or_leave_out(words.format(value=value or "VALUE"), sentence(reason_name))
    # Without a row of its own it is known by the keys that it means, or by a reason why there are none.
    keys = foreign_names().get(name, ())
    if not keys and (reason := why_there_is_none(name)):
        return _write_or_leave_out("", reason)
    kind = field_type(keys[0]) if len(keys) == 1 else None
    if kind == list[str] and value and not value.startswith("["):  # one item: a list is written in brackets here
        return _write_or_leave_out(f"'{keys[0]}=[{value}]'", "")
    if kind is bool and not value:  # a flag
        return _write_or_leave_out(f"{keys[0]}=true", "")
    return ""


def _write_or_leave_out(words: str, reason: str) -> str:
    """Return the advice to write `words` in the place of an option, or if they are "" to leave it out; `reason`: "" if
    none need be given.
    """
    if not reason:
        return tr("Write {words}", words=words) if words else tr("Leave it out.")
    return tr("Write {words}: {says}.", words=words, says=reason) if words else tr("Leave it out: {says}.", says=reason)


def whole_command(options: Sequence[str]) -> list[ConfigError]:
    """Return the one error about options that are another program's command; [] if too few are that program's."""
    table = read_table("config/other_options.yaml")
    names = [option.lstrip("-").replace("-", "_") for option in options]
    if sum(name in table or is_foreign(name) for name in names) < _LEAST_OPTIONS:
        return []
    program = tr(
        "These are arguments of another program: save its command as FILE.sh, then  toolkit import-config FILE.sh"
    )
    return [ConfigError(program)]


def unknown_key(path: str, locate: Callable[[str], str]) -> ConfigError:
    """Return the error for an unknown key, with its place and the first of these that there is: the commands that take
    it as an argument, the keys that were probably meant, why there is no such key, the keys of its section.
    """
    shown = _without_indices(path)
    meant, siblings = keys_meant(path), members(shown.rpartition(".")[0])
    text = joined(tr("{place}: unknown key '{key}'.", place=locate(path), key=path), wide_advice(path))
    if elsewhere := _ELSEWHERE.get(path):
        text = joined(text, tr("Other commands take it: {commands}", commands=elsewhere))
        meant = ()
    elif meant == (path,):  # data.sources.path lacks the position in the list: data.sources=[{path: VALUE}] is meant
        section, _, name = path.rpartition(".")
        text = joined(text, tr("Did you mean '{name}'?", name=f"{section}=[{{{name}: VALUE}}]"))
    elif meant:
        names = "' / '".join(meant[:_MOST_GUESSES])
        is_old = any(f"{key}.".startswith(f"{path}.") for key in REMOVED)  # one of these keys, or a section of them
        removed = tr("It has been removed; instead, see '{name}'.", name=names)
        text = joined(text, removed if is_old else tr("Did you mean '{name}'?", name=names))
    elif reason := why_there_is_none(shown):
        text = joined(text, tr("There is none here: {says}.", says=reason))
    elif siblings:
        text = joined(text, tr("Known here: {keys}.", keys=shortlist(siblings, tr("docs/config.md"))))
    # Without sections among the meant keys, so that errors in these are still reported.
    keys = (path, *(key for key in meant if not members(key)))
    return error_about(text, *(re.sub(r"\[\d+\].*", "", key) for key in keys))


def wide_advice(text: str) -> str:
    """Return what to do about a full-width sign or a typographic quote in a key or value; "" if there is none."""
    wide = _WIDE.search(text)
    if wide is None:
        return ""
    return tr(
        "'{character}' is full-width or a typographic quote. Write = : , {{ }} [ ] \" ' as in code.", character=wide[0]
    )


def unreadable(word: str) -> ConfigError:
    """Return the error for an argument that is not in Hydra's grammar."""
    if advice := wide_advice(_IN_QUOTES.sub("", word)):
        return ConfigError("command line: cannot read '{word}': {advice}", word=word, advice=advice)
    if re.match(r"(data\.)?columns=", word):
        return ConfigError(
            "command line: cannot read '{word}': quote it for the shell, with a field of the toolkit before each name: "
            "{example}",
            word=word,
            example="'columns={prompt: question, response: answer}'",
        )
    return ConfigError(
        "command line: cannot read '{word}': write key=value (quote spaces and brackets for the shell).", word=word
    )


def column_meant(column: str, theirs: str, fields: Sequence[str]) -> str:
    """Return what a name on the left of `columns`, which no format has, probably means: the field that people call so,
    or, if `theirs` on its right is that field, the opposite order.
    """
    meant = next((ours for ours, names in COLUMNS_MEANT.items() if column.lower() in names and ours in fields), "")
    if theirs in fields and meant in ("", theirs):
        return tr("Did you mean '{name}'?", name=f"{{{theirs}: {column}}}")
    return tr("Did you mean '{name}'?", name=meant) if meant else did_you_mean(column, fields)


def check_word(word: str, value: str, names: Sequence[str]) -> None:
    """Raise a ConfigError if a typed `word` is a key without =value, or NAME=value with a misspelt one of the command's
    own `names`. `value`: what the advice writes behind the = of a key, the next word or "VALUE".
    """
    name, equals, _ = word.partition("=")
    if equals:  # whether it is a key of the config is checked where that is read
        if name not in foreign_names() and (own := _most_similar(name, names, _LEAST_PATH)):
            unknown = tr("{place}: unknown key '{key}'.", place=tr("command line"), key=name)
            raise ConfigError(joined(unknown, tr("Did you mean '{name}'?", name=own)))
        return
    if "＝" in word:
        raise unreadable(word)
    if word in names:
        raise ConfigError("'{word}' has no =. Write {words}", word=word, words=f"{word}={value}")
    is_key = field_type(word) is not None or word in foreign_names()
    is_like_a_key = "." in word and not nearest(word, files.known_recipes())  # names of recipes may have a dot, too
    if (is_key or is_like_a_key) and (keys := keys_meant(word)):
        written = tr(" or ").join(f"{key}={value}" for key in keys)
        raise ConfigError("'{word}' has no =. Write {words}", word=word, words=written)


def unknown_choice(group: str, name: str, groups: Mapping[str, Mapping[str, Path]], location: str) -> ConfigError:
    """Return the error for a choice that a group has not, with what it probably means. `groups`: all, by name."""
    sentence = tr("{place}: unknown choice '{group}={name}'.", place=location, group=group, name=name)
    source = "toolkit models" if group == "model" else f"conf/{group}/"
    choices = tr("Known: {choices}.", choices=shortlist(groups[group], source, like=name))
    advice = choice_meant(group, name, groups[group], groups["preference"])
    return error_about(joined(sentence, advice, choices), group)


def choice_meant(key: str, value: str, choices: Iterable[str], losses: Iterable[str] = ()) -> str:
    """Return what a wrong choice of a group, or of a key, probably means; `losses`: the choices of preference=, which
    others take for a task.
    """
    if value.lower() in _ONLINE and key in ("preference", "preference.loss", "task", "task.kind"):
        return tr(
            "There is no online reinforcement learning (docs/limits.md): `toolkit rounds` samples answers, scores them "
            "and trains on them."
        )
    if key == "task" and value in {"preference", *losses} - {"none"}:
        return tr("Preferences are a group of their own: preference={loss}.", loss=value if value in losses else "dpo")
    if key == "model" and data_forms.is_path(value):
        return tr("A directory or a name on Hugging Face is model.path={name}.", name=value)
    return did_you_mean(_OTHER_CHOICES.get(value.lower(), value), choices)


def directory_meant(path: Path) -> str:
    """Return what a run, checkpoint or model that is not there probably means: the first that there is of a directory
    with a similar name, a run, a model of conf/, a recipe, the newest runs in that directory, and a model on Hugging
    Face; "" without any of these.
    """
    if similar := similar_path(path, Path.is_dir):
        return similar
    if (run := "runs" / path).is_dir():
        return tr("Did you mean '{name}'?", name=run)
    if hub := files.hub_id_of_group(str(path)):
        return tr(
            "It is a model of `toolkit models`, not on this disk:  hf download {hub} --local-dir DIR  and write DIR; "
            "to train it: recipe=NAME model={name}",
            hub=hub,
            name=path,
        )
    if str(path) in files.known_recipes():
        return tr("It is a recipe: train it, `toolkit train {name} run.name=NAME`, then type runs/NAME.", name=path)
    here = Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    if path.parent != Path() and (runs := _newest_runs(path.parent)):
        return tr("The newest runs there: {names}", names=", ".join(map(str, runs[:_MOST_RUNS])))
    if path.parent == Path("runs"):  # which is empty, as it has no newest one
        return tr("There is no run yet: train one, `toolkit train quickstart run.name=first`, then type runs/first.")
    if files.is_hub_name(str(path)):
        return tr("Of a model on Hugging Face:  hf download {name} --local-dir DIR", name=path)
    return ""


def similar_path(path: Path, kind: Callable[[Path], bool]) -> str:
    """Return "Did you mean …?" with the path most like one that is not there, for which `kind` holds, or ""."""
    names: list[str] = []
    with suppress(OSError):
        names = sorted(entry.name for entry in path.absolute().parent.iterdir() if kind(entry) and entry.name[0] != ".")
    longer = [name for name in names if name.startswith(path.name)]  # the typed name was cut off
    # Compared without suffixes: most files have the same one, such as .jsonl.
    alike = [name for name in names if nearest(path.stem, [Path(name).stem])]
    name = longer[0] if longer and path.name else nearest(path.name, alike)
    return tr("Did you mean '{name}'?", name=path.parent / name) if name else ""


def check_is_no_folder_of_runs(path: Path) -> None:
    """Raise ConfigError for a directory that holds runs where one of them is wanted."""
    is_meant = any((path / name).exists() for name in ("config.json", "config.yaml", "adapter_config.json"))
    if not is_meant and (runs := _newest_runs(path)):
        names = ", ".join(map(str, runs[:_MOST_RUNS]))
        raise ConfigError("{folder} holds runs: name one of them. The newest: {names}", folder=path, names=names)


def _newest_runs(parent: Path) -> list[Path]:
    """Return the runs in a directory, the newest first, without those that failed before they saved anything."""
    with suppress(OSError):
        newest = sorted(parent.glob("*/config.yaml"), key=lambda file: -file.stat().st_mtime)
        return [file.parent for file in newest if not _failed_at_start(file.parent)]
    return []


def _failed_at_start(run: Path) -> bool:
    """Whether a run failed and holds no model."""
    return (run / "FAILED").exists() and not any((run / name).exists() for name in ("checkpoints/latest", "export"))


def keys_meant(path: str) -> tuple[str, ...]:
    """Return the keys that a typed name may mean: itself if it is a key, else those for another program's name, else
    the nearest ones; () if nothing is like it. `path`: dotted, it may have positions in lists: data.sources[0].path.
    """
    shown = _without_indices(path)
    if field_type(shown) is not None:
        return (path,)
    prefix, _, name = path.rpartition(".")
    ours_of, deepspeed_keys = foreign_names(), _deepspeed_keys()
    outermost, _, below = shown.partition(".")
    candidates = [f"{our_section}.{below}" for our_section in ours_of.get(outermost, ()) if below]
    # The first of these that is not empty counts.
    ways = (
        ours_of.get(shown),  # another program's whole name: optimizer.params.lr
        ours_of.get(prefix) if shown in REMOVED else (),  # what takes the place of the removed section that it was in
        tuple(key for key in candidates if field_type(key) is not None),  # as scheduler is schedule: scheduler.name
        (f"ds_extra.{shown}",) if shown in deepspeed_keys.values() else (),  # DeepSpeed's, without one of ours
        (f"{shown}s",) if f"{name}s" in members(shown.rpartition(".")[0]) else (),  # the plural is our key
        ours_of.get(name),  # another program's name behind any section
        ours_of.get(shown.replace(".", "_")),  # a dot in the place of its underscore
        keys_meant(today) if (today := _deepspeed()["renamed"].get(shown)) else (),
    )
    if meant := next(filter(None, ways), None):
        return meant
    if name in deepspeed_keys:  # the last part of a key of DeepSpeed's
        return keys_meant(deepspeed_keys[name])
    is_in_section = prefix and members(shown.rpartition(".")[0])  # of ours: then it is rather a misspelling
    is_known_elsewhere = not is_in_section and why_there_is_none(shown)
    return () if is_known_elsewhere else _nearest(prefix, shown, name)


def _nearest(prefix: str, shown: str, name: str) -> tuple[str, ...]:
    """Return the keys that a mistyped one is most like, ours or those for another program's name. Rules are tried from
    the surest to the least sure, and the first that finds a key decides. `prefix`: the section as typed, "" for none;
    `shown`: the whole key without positions in lists; `name`: its last part.
    """

    def likeness_of_section(key: str) -> float:  # to the typed section, from 0 to 1
        return difflib.SequenceMatcher(None, prefix, key.rpartition(".")[0]).ratio()

    # Name -> the keys that it means: in the typed section; last part of any key of ours; another program's name.
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
    # In the typed section: a similar name, one of its words (save_every: every), or letters swapped (stpes: max_steps).
    least = _LEAST_NAME if prefix or len(name) > 4 else _LEAST_SHORT  # of many names, short ones are like each other
    if close := _most_similar(name, here, least) or (prefix and _with_words_of(name, here)):
        return here[close]
    if prefix and (close := _with_a_word_like(name, here)):
        return here[close]
    if name in ours and not prefix:  # a key of ours whose section is missing
        return ours[name]
    # The right name in a section that is nearly right: of several sections the one that is most like the typed one.
    best = max(ours.get(name, ()), key=likeness_of_section, default="")
    if best and likeness_of_section(best) >= _LEAST_SECTION:
        return (best,)
    # A name of another program that has a section, too.
    if close := _most_similar(shown, (path for path in theirs if "." in path), _LEAST_PATH):
        return theirs[close]
    if name == "enabled" and prefix:  # the section itself is mistyped
        return keys_meant(prefix)
    if prefix and (close := _with_the_words(name, here)):
        return here[close]
    # In any section, and by other programs' names; last parts that several keys share say too little.
    everywhere = theirs | {leaf: keys for leaf, keys in ours.items() if len(keys) == 1}
    least = _LEAST_NAME if len(name) > 4 else _LEAST_SHORT
    if close := _most_similar(name, everywhere, least) or _with_the_words(name, everywhere):
        return everywhere[close][:_MOST_GUESSES]
    # As a whole: section and name are both slightly wrong.
    close = _most_similar(shown, (key for key in all_keys() if not shown.startswith(key)), _LEAST_PATH)
    return (close,) if close else ()


def _most_similar(name: str, candidates: Iterable[str], least: float) -> str | None:
    """Return the candidate that is most like a name, None if none is like it enough: as a whole, and in what is left
    of both without their common words, so that auto_ratio is not like topk_ratio.
    """
    words = re.split(r"[._]", name.lower())

    def is_like(candidate: str) -> bool:
        candidate_words = re.split(r"[._]", candidate)
        typed = "_".join(word for word in words if word not in candidate_words)
        meant = "_".join(word for word in candidate_words if word not in words)
        likeness = difflib.SequenceMatcher(None, typed, meant).ratio()
        has_swapped_letters = sorted(typed) == sorted(meant)
        return not typed or not meant or has_swapped_letters or likeness >= _LEAST_WORDS

    close = difflib.get_close_matches(name.lower(), list(candidates), n=_MOST_GUESSES, cutoff=least)
    return next(filter(is_like, close), None)


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


def why_there_is_none(path: str) -> str:
    """Return why another program's key of this name has no counterpart here; "" if no program has one, or no reason.
    `path`: dotted, without positions in lists.
    """
    name = path.rpartition(".")[2]
    if path in _deepspeed()["removed"]:
        return tr("it belongs to a feature that was removed from DeepSpeed")
    tables = [keys_of(program) for program in _PROGRAMS]
    keys = [table[name] for table in tables if name in table]
    return next((sentence(key.says).rstrip(".。") for key in keys if key.says), "")


def _without_indices(path: str) -> str:
    """Return a dotted path without the positions in lists: `data.sources[0].path` is `data.sources.path`."""
    return re.sub(r"\[\d+\]", "", path)
