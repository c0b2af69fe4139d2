"""List the available models (model=NAME) and where their weights are.

toolkit models
"""

from toolkit.arguments import named_arguments
from toolkit.cli.recipes import about
from toolkit.config.files import conf_folder, read
from toolkit.messages import say, tr
from toolkit.terminal import text_table


def run(words: list[str]) -> None:
    named_arguments(words, required=(), optional=(), usage="toolkit models")
    rows = []
    for path in sorted((conf_folder() / "model").glob("*.yaml")):
        values = read(path).values
        rows.append((path.stem, str(values.get("hub_id", "")), str(values.get("modelscope_id", "")), about(path)))
    say("\n".join(text_table((tr("model"), "Hugging Face", "ModelScope", tr("what it is")), rows, texts=True)))
