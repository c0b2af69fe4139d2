"""List the models of model=NAME; of a directory, show which methods can train the models in it.

toolkit models [PATH …] [max_length=1024] [--json]
toolkit models TEXT

  PATH             a directory with a config.json, or one that holds such directories; no weights are read
  TEXT             list only the models with it in their names
  max_length=1024  tokens of a sequence: attention over a shorter window cannot be packed
  --json           print the same as JSON

  toolkit models /models/Qwen3-8B /models/gemma-3-4b-it
  toolkit models /models --json

Every answer is what training with that setting would say. Exit code 0 if all of them can be trained, else 2.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import command_line
from toolkit.cli.recipes import about, with_text
from toolkit.config.files import conf_folder, read
from toolkit.config.schema import DataConfig
from toolkit.messages import ConfigError, joined, printable, say, tr
from toolkit.tables import text_table

if TYPE_CHECKING:  # transformers takes seconds to import
    from toolkit.extras.model_facts import ModelFacts

_USAGE = "toolkit models [PATH …] [max_length=1024] [--json]"
_WIDEST = 60
"""Characters of a list in a cell."""


def run(words: list[str]) -> int:
    """List the models of model=NAME, or print facts of directories; return 2 if one cannot be trained, else 0."""
    # A path may hold a =, as in runs/lr=1e-4, but not before its first /.
    paths = [word for word in words if not word.startswith("-") and ("=" not in word or "/" in word.partition("=")[0])]
    named_words = [word for word in words if word not in (*paths, "--json")]
    optional = ("max_length",) if paths else ()
    values = command_line.named_arguments(named_words, required=(), optional=optional, usage=_USAGE)
    is_no_path = len(paths) == 1 and not os.path.exists(paths[0]) and "/" not in paths[0]  # but a name or part of some
    is_full_name = is_no_path and (conf_folder() / "model" / f"{paths[0]}.yaml").is_file()
    # Of a full name no list is asked: `model_folders` rejects it, and says how to download the model.
    if not paths or (is_no_path and not is_full_name):
        _list_groups(paths[0] if paths else "")
        return 0
    max_length = command_line.positive_int(values, "max_length") or DataConfig().max_length
    from toolkit.extras.model_facts import facts_of, model_folders

    folders = [folder for path in paths for folder in model_folders(Path(path))]
    facts = []
    for folder in folders:
        facts.append(facts_of(folder, max_length))
        if "--json" not in words:
            lines_of_facts = text_table(("", ""), _rows(facts[-1]), texts=True)[1:]  # without the line of its heads
            _print([str(folder), *lines_of_facts, ""])
    if "--json" in words:
        say(json.dumps([asdict(each) for each in facts], ensure_ascii=False, indent=1))
    elif len(facts) > 1:
        _print(_summary(facts))
    return 2 if any(each.refused for each in facts) else 0


def _print(lines: list[str]) -> None:
    say(printable("\n".join(line.rstrip() for line in lines)))


def _list_groups(text: str) -> None:
    """List the models of model=NAME, those with a text in their names. If there are none, the ConfigError also says
    that there is no directory of this name, which may have been meant.
    """
    rows = list[tuple[str, ...]]()
    for path in sorted((conf_folder() / "model").glob("*.yaml")):
        values = read(path).values
        rows.append((path.stem, str(values.get("hub_id", "")), str(values.get("modelscope_id", "")), about(path)))
    try:
        rows = with_text(rows, text, "toolkit models")
    except ConfigError as error:
        raise ConfigError(joined(tr("there is no directory {path}.", path=text), str(error))) from None
    say("\n".join(text_table((tr("model"), "Hugging Face", "ModelScope", tr("what it is")), rows, texts=True)))


def _rows(facts: "ModelFacts") -> list[tuple[str, str]]:
    """Return the names and values of what is known of one directory."""
    if not facts.architecture:  # no model could be built of it
        return [(tr("cannot be trained"), facts.refused)]
    rows = [
        (tr("type"), f"{facts.type} ({facts.architecture})"),
        (tr("parameters"), f"{facts.parameters:,}"),
        (tr("kind"), tr("multimodal: the text model is trained") if facts.multimodal else tr("text")),
    ]
    if facts.frozen:
        parts, count = ", ".join(facts.frozen), f"{facts.frozen_parameters:,}"
        rows.append((tr("never trained"), tr("{parts} ({count} parameters)", parts=parts, count=count)))
    if facts.untested:
        rows.append((tr("untested"), facts.untested))
    if facts.refused:
        rows.append((tr("cannot be trained"), facts.refused))
    else:
        rows += [(f"tuning={name}", _method(facts, name)) for name in facts.methods]
        rows.append((tr("packing"), tr("grouped: {reason}", reason=facts.grouped) if facts.grouped else tr("packed")))
        rows += [
            (f"parallel.{way}=2", tr("no: {reason}", reason=reason) if reason else tr("yes"))
            for way, reason in facts.parallel.items()
        ]
    if facts.kernels:
        rows.append((tr("kernels"), facts.kernels))
    predicting = ", ".join(f"{key} = {value}" for key, value in facts.predicting.items())
    if predicting and not facts.trains_predicting:
        predicting = tr("{keys}: skipped, not trained", keys=predicting)
    rows.append((tr("multi-token prediction"), predicting or tr("no")))
    rows.append((tr("quantisation"), facts.quantization or tr("no")))
    rows.append(
        (tr("chat template"), tr("yes") if facts.chat_template else tr("no: set model.chat_template=NAME or FILE"))
    )
    return rows + [(tr("transformers says"), note) for note in facts.notes]


def _method(facts: "ModelFacts", name: str) -> str:
    """Return what a fine-tuning method trains, or why it is rejected, as a text."""
    method = facts.methods[name]
    if method.refused:
        return tr("no: {reason}", reason=method.refused)
    trained = tr("trains {count} parameters", count=f"{method.trained:,}")
    targets = ", ".join(method.targets)
    if not targets:
        return trained
    shown = targets if len(targets) <= _WIDEST else targets[:_WIDEST] + "…"
    return f"{trained}: {shown}"


def _summary(facts: "list[ModelFacts]") -> list[str]:
    """Return a table with one row for each directory."""

    def packing(each: "ModelFacts") -> str:
        """Return how its samples are put into sequences; "" if it cannot be trained."""
        if each.refused:
            return ""
        return tr("grouped") if each.grouped else tr("packed")

    rows = [
        (
            Path(each.path).name,
            each.type,
            f"{each.parameters:,}",
            " ".join(name for name, method in each.methods.items() if not method.refused) or tr("cannot be trained"),
            packing(each),
            " ".join(way for way, reason in each.parallel.items() if not reason),
            each.quantization,
            tr("yes") if each.chat_template else tr("no"),
        )
        for each in facts
    ]
    heads = (tr("directory"), tr("type"), tr("parameters"), "tuning", tr("packing"), "parallel", tr("quantisation"))
    return text_table((*heads, tr("chat template")), rows, texts=True)
