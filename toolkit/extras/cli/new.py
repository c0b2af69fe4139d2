"""Write a recipe for a model, data and GPUs: the fine-tuning method, ZeRO stage and micro-batch that fit.

toolkit new model=MODEL data=PATH [gpus=8x80GB] [nodes=2] [host_memory=1TB] [tuning=auto] [max_length=N]
            [columns={prompt: question, response: answer}] [output=mine.yaml]

  model=MODEL        a name of `toolkit models`, a directory, or owner/name on Hugging Face
  data=PATH          a file, a directory or a pattern; or examples, to try it out
  gpus=8x80GB        GPUs of one node: their memory or their name (8xA100-80GB); without it those of this node
  nodes=2            identical nodes; default 1
  host_memory=1TB    memory of one node; without it offloading to host memory is not considered
  tuning=auto        full, lora or qlora; auto takes the first of them that fits
  max_length=N       tokens of the longest sample; default: what the first rows of the data need
  columns={…}        names in the file where they differ from the format's
  output=mine.yaml   the recipe; never an existing file

Missing values are asked for on a terminal. No model is loaded; only the first rows of the data are read.
"""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.command_line import check_output, named_arguments, one_of, write_output
from toolkit.config.schema import TuningMethod
from toolkit.extras.new_recipe import (
    METHODS,
    check_data,
    check_model,
    choose,
    data_facts,
    gpus_here,
    machine_of,
    plan_methods,
    recipe_text,
    remedies,
)
from toolkit.messages import ConfigError, DataError, ToolkitError, clauses, say, tr, warn
from toolkit.plan.machine import Machine
from toolkit.plan.summary import layout_table

_USAGE = "toolkit new model=qwen3_8b data=chat.jsonl gpus=8x80GB output=mine.yaml"
_OPTIONAL = ("model", "data", "gpus", "nodes", "host_memory", "tuning", "max_length", "columns", "output")


def run(words: list[str]) -> None:
    """Ask for what is missing, plan the methods, and write the recipe of one that fits; ConfigError if none does."""
    names = (*_OPTIONAL, "preference")  # taken to say which command trains preferences
    arguments = {"output": "mine.yaml", **named_arguments(words, required=(), optional=names, usage=_USAGE)}
    if loss := arguments.pop("preference", ""):
        raise _preferences_error(arguments, loss)
    check_output(arguments)
    tuning = one_of(arguments, "tuning", ("auto", *(method.value for method in METHODS)))
    methods = METHODS if tuning == "auto" else (TuningMethod(tuning),)
    if "gpus" not in arguments:
        arguments = {**gpus_here(), **arguments}
    model = tr("Model (a name of `toolkit models`, a directory, or owner/name on Hugging Face): ")
    _ask(arguments, "model", model, check_model)
    _ask(arguments, "data", tr("Data (a file, a directory or a pattern): "), check_data)
    _ask(arguments, "gpus", tr("GPUs of one node (such as 8x80GB or 1xRTX 4090; without GPUs 2xcpu): "), machine_of)
    machine = machine_of(arguments)
    facts = _facts(arguments)
    seen = {name: facts[name] for name in ("formats", "median", "longest", "rows_seen", "max_length")}
    if facts["is_counted"]:
        say(
            "{data}: format {formats}; of the first {rows_seen} samples {median} tokens (median) and {longest} "
            "(longest), by the model's tokenizer; data.max_length = {max_length}.",
            data=arguments["data"],
            **seen,
        )
    else:
        say(
            "{data}: format {formats}, about {median} tokens (median) and {longest} (longest) at 4 bytes per token, "
            "without the model's tokenizer; data.max_length = {max_length}.",
            data=arguments["data"],
            **seen,
        )
    if facts["rows_longer"] and not facts["is_text"]:
        say(
            "{rows_longer} of {rows_seen} samples ({longer_percent} %) are longer: they lose their oldest turns, then "
            "the end of their last answer (data.too_long=truncate; or drop, split, error).",
            rows_longer=f"{facts['rows_longer']:,}",
            rows_seen=facts["rows_seen"],
            longer_percent=facts["longer_percent"],
        )
    plans = list(plan_methods(arguments, facts, methods))
    say("{model} on {machine}, by the plan:", model=facts["name"], machine=machine.name)
    named = ((f"{plan.method.value}: {plan.layout.name}", plan.layout) for plan in plans)
    say("\n".join(layout_table(tr("method"), named)))
    plan = choose(plans)
    if plan is None:
        say("Nothing fits. Looking for what would …")
        ways = clauses(remedies(arguments, facts, methods)) or tr("a smaller model, or GPUs with more memory")
        raise ConfigError("nothing fits, so nothing was written. What would fit: {ways}.", ways=ways)
    commands = _commands(shlex.quote(arguments["output"]), machine)
    write_output(arguments, recipe_text(facts, plan, commands))
    say(
        "Wrote {file}: {method}, {layout}. Next:",
        file=arguments["output"],
        method=plan.method.value,
        layout=plan.layout.name,
    )
    say("\n".join(f"  {command}" for command in commands))


def _facts(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of model and data; ConfigError with the command to type for data that hold preferences."""
    try:
        return data_facts(arguments)
    except DataError as error:  # of such data the reader's message names the setting that they need
        if needed := re.search(r"preference=(\w+)", str(error)):
            raise _preferences_error(arguments, needed[1]) from error
        raise


def _preferences_error(arguments: Mapping[str, str], loss: str) -> ConfigError:
    """Return the error about preferences, for which no recipe is made here, with the command that trains them."""
    data, model = arguments.get("data", "FILE.jsonl"), arguments.get("model", "NAME")
    is_shipped = "/" not in model and not Path(model).is_dir()
    words = [f"model={model}"] if is_shipped else ["model=hf", f"model.path={model}"]
    words += [f"data={data}", *([f"columns={arguments['columns']}"] if arguments.get("columns") else [])]
    words += [] if loss == "dpo" else [f"preference={loss}"]  # dpo is the recipe's own
    return ConfigError(
        "preferences ({data}) have recipes of their own, which toolkit new does not make (docs/preference.md):  "
        "toolkit launch --num_gpus N recipe=qwen3_dpo {words}",
        data=data,
        words=shlex.join(words),
    )


def _ask(arguments: dict[str, str], name: str, question: str, check: Callable[[Mapping[str, str]], object]) -> None:
    """Ask for a missing argument if on a terminal, until `check` raises nothing; ConfigError if it is missing.
    What is typed as an argument is checked with the rest. `name`: the argument's; its value is set in `arguments`.
    """
    while not arguments.get(name) and sys.stdin.isatty():
        try:
            arguments[name] = input(question).strip()
            if arguments[name]:
                check(arguments)
        except EOFError:
            break
        except ToolkitError as error:
            warn(str(error))
            if not _ask_columns(arguments, error, check):  # then another value is asked for
                del arguments[name]
    if not arguments.get(name):
        raise ConfigError("{name} is missing: {usage}", name=name, usage=_USAGE)


def _ask_columns(arguments: dict[str, str], error: ToolkitError, check: Callable[[Mapping[str, str]], object]) -> bool:
    """Ask which column holds what, if an error is about that; return whether the data can be used then."""
    if "columns={" not in str(error) or arguments.get("columns"):  # that error's message shows how to name columns
        return False
    try:
        question = tr(
            "Columns (such as {example}; Enter for other data): ", example="prompt: question, response: reply"
        )
        typed = input(question).strip().removeprefix("columns=")
        if typed:
            columns = typed if typed.startswith("{") else f"{{{typed}}}"  # a YAML map, whose braces are optional
            check({**arguments, "columns": columns})
            arguments["columns"] = columns
            return True
    except EOFError:
        pass  # as is noticed by whoever asks next
    except ToolkitError as wrong:
        warn(str(wrong))
    return False


def _commands(recipe: str, machine: Machine) -> list[str]:
    """Return the commands to run next, for the recipe's file."""
    where = "hostfile=hostfile" if machine.nodes > 1 else f"--num_gpus {machine.ranks}"
    return [
        f"toolkit check recipe={recipe} world_size={machine.world_size}",
        f"toolkit show recipe={recipe} n=3",
        f"toolkit launch {where} recipe={recipe}",
    ]
