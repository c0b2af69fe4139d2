"""Convert a model between the official ChatGLM layout and transformers' own, without training.

toolkit export-model model.path=DIR format=hf|official output=DIR [model.family=chatglm2|chatglm3]

  model.path=DIR      an official ChatGLM folder, or a folder that was exported from one, such as runs/NAME/export
  format=hf           safetensors, config and tokenizer that transformers, vLLM and others load without remote code
  format=official     the official files: names, precisions and shards as they came, the other files copied
  output=DIR          must not exist
  model.family=NAME   only where nothing in the folder tells ChatGLM2 from ChatGLM3
"""

from pathlib import Path

from toolkit.cli.compose import named_arguments
from toolkit.errors import ConfigError
from toolkit.messages import tr

FORMATS = ("hf", "official")


def run(words: list[str]) -> int:
    """Convert."""
    usage = "toolkit export-model model.path=DIR format=hf output=DIR"
    given = named_arguments(
        words,
        required=("model.path", "format", "output"),
        optional=("model.family",),
        usage=usage,
    )
    if given["format"] not in FORMATS:
        raise ConfigError(
            tr("unknown format '{format}'. Known: {known}.", format=given["format"], known=", ".join(FORMATS))
        )
    output = Path(given["output"])
    if output.exists():
        raise ConfigError(tr("{folder} exists already: nothing was written. Name another folder.", folder=output))
    from toolkit.models.folder import read_config

    read_config(given["model.path"])
    _convert(given["model.path"], given.get("model.family", "auto"), output, given["format"])
    print(tr("wrote {folder}.", folder=output))
    return 0


def _convert(path: str, family: str, output: Path, format: str) -> None:
    import transformers

    from toolkit.export.folder import write_folder
    from toolkit.models.chat import load_chat_encoder
    from toolkit.models.chatglm.detect import official_vocabulary
    from toolkit.models.load import load_model

    transformers.utils.logging.disable_progress_bar()
    folder = Path(path)
    has_tokenizer = official_vocabulary(folder) is not None or (folder / "tokenizer.json").is_file()
    encoder = load_chat_encoder(path, family=family) if has_tokenizer else None
    write_folder(load_model(path), encoder, output, "official" if format == "official" else "hf")
