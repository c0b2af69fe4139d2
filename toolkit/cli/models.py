"""List the available models (model=NAME) and where their weights are.

toolkit models
"""

from toolkit import arguments, terminal
from toolkit.cli.recipes import about
from toolkit.config.files import conf_folder, read
from toolkit.messages import say, tr


def run(words: list[str]) -> None:
    arguments.named_arguments(words, required=(), optional=(), usage="toolkit models")
    rows = []
    for path in sorted((conf_folder() / "model").glob("*.yaml")):
        values = read(path).values
        rows.append((path.stem, str(values.get("hub_id", "")), str(values.get("modelscope_id", "")), about(path)))
    say("\n".join(terminal.text_table((tr("model"), "Hugging Face", "ModelScope", tr("what it is")), rows, texts=True)))
