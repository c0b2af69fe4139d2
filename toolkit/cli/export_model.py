"""Convert a model between the official ChatGLM layout and transformers' own, or take it out of a checkpoint.

toolkit export-model model.path=PATH format=hf|official output=DIR [model.family=chatglm2|chatglm3]

  model.path=PATH     an official ChatGLM folder; a folder that was exported from one, such as runs/NAME/export; a
                      checkpoint, such as runs/NAME/checkpoints/step-500; or a run folder: its newest whole checkpoint
  format=hf           safetensors, config and tokenizer that transformers, vLLM and others load without remote code
  format=official     the official files: names, precisions and shards as they came, the other files copied
  output=DIR          must not exist
  model.family=NAME   only where nothing in the folder tells ChatGLM2 from ChatGLM3

A checkpoint of any number of ranks under ZeRO 0 to 3 is exported by this one process, without a GPU, and without the
base model's folder: it holds what it takes. No more than a part of the weights is in memory at a time.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoint import folders, manifest
from toolkit.cli.compose import named_arguments
from toolkit.errors import CheckpointError, ConfigError
from toolkit.messages import say, tr

if TYPE_CHECKING:
    from toolkit.models.save import Format

FORMATS: "tuple[Format, ...]" = ("hf", "official")


def run(words: list[str]) -> int:
    """Convert."""
    usage = "toolkit export-model model.path=DIR format=hf output=DIR"
    given = named_arguments(
        words,
        required=("model.path", "format", "output"),
        optional=("model.family",),
        usage=usage,
    )
    format = next((known for known in FORMATS if known == given["format"]), None)
    if format is None:
        raise ConfigError(
            tr("unknown format '{format}'. Known: {known}.", format=given["format"], known=", ".join(FORMATS))
        )
    output = Path(given["output"])
    if output.exists():
        raise ConfigError(tr("{folder} exists already: nothing was written. Name another folder.", folder=output))
    checkpoint = _checkpoint_at(Path(given["model.path"]))
    if checkpoint is None:
        _convert(given["model.path"], given.get("model.family", "auto"), output, format)
    elif "model.family" in given:
        raise ConfigError(tr("model.family has no effect: a checkpoint knows its tokenizer. Remove it."))
    else:
        _quiet()
        from toolkit.export.checkpoint import export_checkpoint

        export_checkpoint(checkpoint, output, format)
    print(tr("wrote {folder}.", folder=output))
    return 0


def _checkpoint_at(path: Path) -> Path | None:
    """Return the checkpoint that a path means: itself, or the newest whole one of a run; None for a model folder.

    Raises:
        CheckpointError: a run none of whose checkpoints is whole.
    """
    if (path / "config.json").is_file():
        return None
    is_one = (path / manifest.MANIFEST).is_file()
    found = [path] if is_one else folders.published(path / "checkpoints") or folders.published(path)
    for folder in found:
        wrong = manifest.problems(folder)
        if not wrong:
            if not is_one:
                say(tr("Exporting {folder}.", folder=folder))
            return folder
        say(tr("{folder}: DAMAGED", folder=folder) + "".join(f"\n  {one}" for one in wrong[:3]))
    if found:
        raise CheckpointError(tr("{folder} holds no checkpoint that is whole.", folder=path))
    return None


def _quiet() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()


def _convert(path: str, family: str, output: Path, format: "Format") -> None:
    from toolkit.models.folder import read_config

    read_config(path)
    _quiet()
    from toolkit.export.folder import write_folder
    from toolkit.models import probe
    from toolkit.models.chat import load_chat_encoder
    from toolkit.models.chatglm.detect import official_vocabulary
    from toolkit.models.load import load_model
    from toolkit.models.save import describe

    folder = Path(path)
    has_tokenizer = official_vocabulary(folder) is not None or (folder / "tokenizer.json").is_file()
    encoder = load_chat_encoder(path, family=family) if has_tokenizer else None
    model = load_model(path)
    before = probe.read(folder)
    ids = probe.spread_ids(model.config) if before is None else before.ids
    write_folder(model, describe(model, encoder), output, format, probe.take(model, ids))
