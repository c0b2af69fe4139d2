"""A recipe as a form: its keys from the schema, the file that typed values make, what check and plan say of it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.config import files
from toolkit.config.load import LoadedConfig, group_choices, load, to_dict
from toolkit.config.mesh import with_micro_batch
from toolkit.config.schema import Init, leaves, set_leaf
from toolkit.config.validate import about
from toolkit.disk import write_atomically
from toolkit.errors import Problems
from toolkit.jobs.check import check_recipe, machine_for
from toolkit.messages import ConfigError, chinese, console, current_language, set_language, tr
from toolkit.plan.layouts import evaluate_layout, layouts, plan_lines
from toolkit.plan.machine import Machine
from toolkit.plan.outline import outline_of
from toolkit.plan.speed import rates_of
from toolkit.translate.convert import inline

Given = Mapping[str, Any]
"""What was typed: `base`, a recipe's name, `groups` and `values` by name and key, `gpus` to plan for."""
_NOT_IN_A_FORM = ("recipe", "defaults")


def form() -> dict[str, Any]:
    """Return what can be chosen: recipes, choices of groups, and every key with its sentence, default and choices."""
    schema = json.loads((files.shipped_folder("recipes") / "recipe.schema.json").read_text(encoding="utf-8"))
    return {"recipes": list(files.known_recipes()), "groups": group_choices(), "keys": list(_keys(schema))}


def _keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[dict[str, Any]]:
    sentences = chinese()["sentences"] if current_language() == "zh" else {}
    for name, key in section["properties"].items():
        value = key.get("anyOf", [key])[0]
        if "properties" in value:
            yield from _keys(value, f"{prefix}{name}.")
        elif name not in _NOT_IN_A_FORM:
            text = key.get("description", "")
            choices = ["true", "false"] if value.get("type") == "boolean" else value.get("enum", [])
            yield {"key": prefix + name, "text": sentences.get(text, text), "choices": choices}


def recipe_text(given: Given, problems: Problems) -> str:
    """Return the recipe that was typed, as its file has it; a value that is no YAML is left out, and a problem."""
    tree: dict[str, Any] = {}
    for key, value in given.get("values", {}).items():
        text = " ".join(str(value).split("\n"))
        try:
            files.parse(f"x: {text}", key)
        except ConfigError as error:
            problems.add(about(str(error), key))
        else:
            set_leaf(tree, key, text)
    base = [given["base"]] if given.get("base") else []
    chosen = [f"override /{group}: {choice}" for group, choice in given.get("groups", {}).items()]
    defaults = "".join(f"  - {item}\n" for item in (*base, *chosen, "_self_"))
    return f"# @package _global_\ndefaults:\n{defaults}\n" + "".join(f"{line}\n" for line in _lines(tree))


def _lines(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, str):
            yield f"{indent}{name}: {value}"
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")


def examine(given: Given, folder: Path) -> dict[str, Any]:
    """Return the recipe's text, all errors with their keys, what check and plan say, and the values in effect.

    `folder` is for the text as a file. Nothing is downloaded: the size of a model that only Hugging Face knows is left
    out.
    """
    problems, language, lines = Problems(), current_language(), list[str]()
    said: dict[str, Any] = {"notes": lines, "plan": [], "values": {}}
    before, console.write = console.write, lines.append
    file = folder / "recipe.yaml"
    try:
        said["text"] = recipe_text(given, problems)
        file.write_text(said["text"], encoding="utf-8")
        loaded = problems.attempt(lambda: load([f"recipe={file}"], problems=Problems()))
        if loaded is not None:
            said["values"] = {key: inline(value) for key, value in leaves(to_dict(loaded.cfg))}
            gpus = {"gpus": given["gpus"]} if given.get("gpus") else {}
            machine = problems.attempt(machine_for, gpus, loaded.cfg)
            ranks = [f"world_size={machine.world_size}"] if machine else []
            words = [f"recipe={file}", f"language={language}", *ranks]  # the reader's language, whatever the recipe's
            problems.attempt(lambda: check_recipe(words, fetch=False))
            if machine and not problems.errors:
                said["plan"] = _plan(loaded, machine)
    finally:
        console.write = before
        set_language(language)
    said["errors"] = [{"keys": one.keys, "text": str(one).replace(f"{folder}/", "")} for one in problems.errors]
    said["more"] = problems.more
    return said


def _plan(loaded: LoadedConfig, machine: Machine) -> list[str]:
    if not _is_known(loaded):
        model = loaded.cfg.model.path
        return [tr("No plan: the size of {model} is not known here. `toolkit plan` looks it up.", model=model)]
    cfg = with_micro_batch(loaded.cfg)
    outline = outline_of(cfg)
    rates = rates_of(cfg, machine, outline)
    mine = evaluate_layout(outline, cfg, machine, rates)
    return plan_lines(outline, machine, rates, mine, list(layouts(outline, cfg, machine, rates)))


def _is_known(loaded: LoadedConfig) -> bool:
    """Whether a model's sizes are known without the network."""
    model = loaded.cfg.model
    is_published = bool(model.published) and model.path == model.hub_id
    return is_published or model.init is Init.random or not files.is_hub_name(model.path)


def save(given: Given) -> dict[str, Any]:
    """Write the recipe that was typed to `file`; over one that exists only where `overwrite` is asked for."""
    problems, file = Problems(), Path(str(given.get("file", "")))
    text = recipe_text(given, problems)
    problems.raise_all()
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError("{file} must end in .yaml.", file=file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if given.get("overwrite") is True:
            write_atomically(file, text.encode())
        else:
            with file.open("x", encoding="utf-8") as new:
                new.write(text)
    except FileExistsError:
        return {"exists": True, "said": tr("{file} exists already: nothing was written.", file=file)}
    except OSError as error:
        raise ConfigError("cannot write {file}: {reason}.", file=file, reason=error.strerror or error) from error
    return {"said": tr("Wrote {file}.", file=file)}
