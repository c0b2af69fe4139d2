"""LLaMA-Factory's data sets: names, looked up in dataset_info.json, become sources."""

import json
from pathlib import Path
from typing import Any

from toolkit.config.suggest import did_you_mean
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr
from toolkit.translate.given import Draft, Given

INFO = "dataset_info.json"
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system",),
}
"""The names of speakers that our formats read, by LLaMA-Factory's word for them."""
_MEDIA = ("images", "videos", "audios")


def sources_of(given: Given, name: str, stage: str, draft: Draft) -> list[dict[str, Any]]:
    """Return the items of `data.sources` for a list of data sets.

    Args:
        given: the config.
        name: dataset or eval_dataset.
        stage: sft, or pt: texts.
        draft: gets a note where something cannot be taken over.

    Raises:
        ConfigError: dataset_info.json cannot be read, or does not name a data set.
    """
    sets = given.names(name)
    folder = str(given.get("dataset_dir"))
    if not sets:
        raise ConfigError(tr("{file}: {key} is not given: there is nothing to train on.", file=given.shown, key=name))
    if folder == "ONLINE":
        return [{"hub": item} for item in sets]
    base = next((path for path in (Path(folder), given.folder / folder) if (path / INFO).is_file()), None)
    if base is None:
        draft.notes.append(
            tr(
                "{key} = {sets}: {file} is not here, so it is not known which files these are. Run this again where "
                "it is, or write data.sources (docs/data.md).",
                key=name,
                sets=", ".join(sets),
                file=Path(folder) / INFO,
            )
        )
        return []
    info = _read(base / INFO)
    found = []
    for item in sets:
        if item not in info:
            raise ConfigError(
                joined(
                    tr(
                        "{place}: {file} has no data set '{name}'.",
                        place=given.place(name),
                        file=base / INFO,
                        name=item,
                    ),
                    did_you_mean(item, info),
                )
            )
        if source := _source(item, info[item], base, stage, draft):
            found.append(source)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(tr("cannot read {file}: {reason}", file=path, reason=error)) from error
    if not isinstance(info, dict) or not all(isinstance(entry, dict) for entry in info.values()):
        raise ConfigError(tr("{file} must be an object of objects, {{name: {{…}}}}.", file=path))
    return info


def _source(name: str, entry: dict[str, Any], base: Path, stage: str, draft: Draft) -> dict[str, Any]:
    """Return one source; {} where it cannot be one."""
    columns: dict[str, Any] = entry.get("columns") or {}
    reason = ""
    if entry.get("ranking"):
        reason = tr("it holds preferences, and there is supervised training only")
    elif media := [kind for kind in _MEDIA if columns.get(kind)]:
        reason = tr("it holds {media}, and there are texts only", media=", ".join(media))
    elif not entry.get("file_name") and not entry.get("hf_hub_url"):
        reason = tr("it is neither a file nor on Hugging Face: save it as a file")
    if reason:
        draft.notes.append(tr("the data set {name} is left out: {reason}.", name=name, reason=reason))
        return {}
    if entry.get("num_samples"):
        draft.notes.append(
            tr("the data set {name}: num_samples has no counterpart; weight below 1 takes a part.", name=name)
        )
    return _where(entry, base) | _format(name, entry, columns, stage, draft)


def _where(entry: dict[str, Any], base: Path) -> dict[str, Any]:
    if not entry.get("hf_hub_url"):
        return {"path": str(base / str(entry["file_name"]))}
    names = {"hub": "hf_hub_url", "subset": "subset", "revision": "revision", "split": "split"}
    return {ours: str(entry[theirs]) for ours, theirs in names.items() if entry.get(theirs)}


def _format(name: str, entry: dict[str, Any], columns: dict[str, Any], stage: str, draft: Draft) -> dict[str, Any]:
    """Return format and columns; LLaMA-Factory's prompt, query and response are our instruction, input and output."""
    if stage == "pt":
        return _named("text", {"text": columns.get("prompt", "instruction" if not columns else None)})
    shared = {"system": columns.get("system"), "tools": columns.get("tools")}
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        tags: dict[str, Any] = entry.get("tags") or {}
        for tag, known in _ROLES.items():
            if tags.get(tag, known[0]) not in known:
                draft.notes.append(
                    tr(
                        "the data set {name}: {tag} = {value} is no name that is read here; known are {known}.",
                        name=name,
                        tag=tag,
                        value=tags[tag],
                        known=", ".join(known),
                    )
                )
        said = {"from": tags.get("role_tag", "from"), "value": tags.get("content_tag", "value")}
        return _named("sharegpt", {"conversations": columns.get("messages", "conversations"), **said, **shared})
    shared["history"] = columns.get("history")
    if columns and not columns.get("query"):
        return _named(
            "prompt_response", {"prompt": columns.get("prompt"), "response": columns.get("response"), **shared}
        )
    asked = {"instruction": columns.get("prompt"), "input": columns.get("query"), "output": columns.get("response")}
    return _named("instruction", asked | shared)


def _named(row_format: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the format, and those columns that are called otherwise in the file."""
    renamed = {ours: str(theirs) for ours, theirs in columns.items() if theirs and theirs != ours}
    return {"format": row_format} | ({"columns": renamed} if renamed else {})
