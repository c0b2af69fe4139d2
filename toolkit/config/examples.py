"""The conversations that are shipped with the toolkit: where they are, and whether a run trains on example data."""

from collections.abc import Iterable
from pathlib import Path

from toolkit.config.files import example_folder
from toolkit.config.schema import DataConfig, RowFormat
from toolkit.messages import tr

SHIPPED = ("examples/data/chat_zh.jsonl", "examples/data/chat_en.jsonl")
"""Paths that name a shipped file from any working directory, unless a file of that name is there."""
OWN = "data=chat.jsonl"
"""The shortest override that names data of one's own."""


def located(path: str) -> str:
    """Return where the files of a source are: the path as it is, or the shipped file that it names."""
    if path in SHIPPED and not Path(path).exists():
        return str(example_folder() / Path(path).name)
    return path


def notice(data: DataConfig) -> str:
    """Return the sentence about example data in data.sources; "" if there is none."""
    return sentence((source.path, source.format.value) for source in data.sources)


def sentence(sources: Iterable[tuple[str, str]]) -> str:
    """Return the sentence about example data among a run's sources; "" if there is none.

    Args:
        sources: path and format of each item of data.sources.
    """
    names = []
    for path, row_format in sources:
        if row_format == RowFormat.docstrings.value:
            names.append(tr("the docstrings of the installed Python"))
        elif path in SHIPPED:
            names.append(path)
    if not names:
        return ""
    return tr(
        "EXAMPLE DATA: this run trains on {names}. To train on your own conversations, add {override}",
        names=", ".join(names),
        override=OWN,
    )
