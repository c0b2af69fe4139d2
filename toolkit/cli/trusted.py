"""What a user is told before code of a model's own runs."""

from toolkit.config.schema import ModelConfig
from toolkit.messages import tr
from toolkit.models.directory import runs_code


def warn_of_code(model: ModelConfig) -> None:
    """Say, in red on a terminal, that the Python files of a model run, if they do."""
    if not model.trust_remote_code or not runs_code(model.path):
        return
    from rich.console import Console
    from rich.text import Text

    line = tr("model.trust_remote_code = true: the Python files of {path} run with all your rights.", path=model.path)
    Console().print(Text(line, style="bold red"), soft_wrap=True)
