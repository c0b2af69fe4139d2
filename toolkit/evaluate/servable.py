"""Which directory a server can load of a path that a user names."""

from pathlib import Path

from toolkit.config import files, suggest
from toolkit.messages import ConfigError, ModelError
from toolkit.models.directory import Architecture, architecture_of, read_config, saved_template


def resolve_servable(path: Path) -> Path:
    """Return the directory to serve: `path`, or a run's export; ConfigError or ModelError if no server loads it."""
    files.check_directory(path)
    suggest.check_is_no_folder_of_runs(path)
    is_run = not (path / "config.json").is_file() and (path / "export").is_dir()
    folder = (path / "export" if is_run else path).resolve()
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            "{folder} is an adapter, not a whole model. Merge it: toolkit export-model {folder} merge=true "
            "output=DIR. Or serve its base, with backend=vllm adapter={folder}.",
            folder=folder,
        )
    config = read_config(str(folder))
    architecture = architecture_of(config)
    if architecture is Architecture.v1:
        raise ModelError(
            "{folder} holds a ChatGLM-6B, which neither transformers' server nor vLLM knows. What works: `toolkit "
            "chat`, `toolkit generate`, and the original's own servers (`toolkit export-model format=official`).",
            folder=folder,
        )
    if architecture is not None:
        raise ConfigError(
            "{folder} is an official ChatGLM directory, which servers load with its remote code only. "
            "Convert it first: toolkit export-model model.path={folder} format=hf output=DIR",
            folder=folder,
        )
    if not saved_template(folder):
        raise ConfigError(
            "{folder} has no chat template (chat_template.jinja): a server could not chat.", folder=folder
        )
    if "@" in str(folder):
        raise ConfigError(
            "servers take what follows the @ in {folder} for a revision. Rename the directory.", folder=folder
        )
    return folder
