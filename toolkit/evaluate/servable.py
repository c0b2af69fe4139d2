"""Which directory a server can load of a path that a user names."""

from pathlib import Path

from toolkit.config import files, suggest
from toolkit.messages import ConfigError, ModelError
from toolkit.models.directory import Architecture, architecture_of, read_config, saved_template


def exported(path: Path) -> Path:
    """Return the export of a run directory, any other directory itself; ConfigError if there is none."""
    files.check_directory(path)
    suggest.check_is_no_folder_of_runs(path)
    is_run = not (path / "config.json").is_file() and (path / "export").is_dir()
    return (path / "export" if is_run else path).resolve()


def resolve_servable(path: Path, adapter: Path | None = None, *, chats: bool = True) -> Path:
    """Return the directory to serve: `path`, or a run's export; ConfigError or ModelError if no server loads it.
    `adapter`: directory of an adapter that is served on it, whose chat template replaces its own. `chats`: it is for
    chats, which need a template.
    """
    folder = exported(path)
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            "{folder} is an adapter, not a whole model. Merge it: toolkit export-model {folder} merge=true output=DIR.",
            folder=folder,
        )
    config = read_config(str(folder))
    architecture = architecture_of(config)  # None: not of an official ChatGLM directory
    if architecture is Architecture.v1:
        raise ModelError(
            "{folder} holds a ChatGLM-6B, which neither transformers' server nor vLLM knows. What works: `toolkit "
            "chat`, `toolkit generate`, and the original's own servers (`toolkit export-model format=official`).",
            folder=folder,
        )
    if architecture is not None and adapter is not None:
        raise ConfigError(
            "{adapter} belongs to an official ChatGLM directory, which servers load with its remote code only. Merge "
            "it: toolkit export-model {adapter} merge=true format=hf output=DIR",
            adapter=adapter,
        )
    if architecture is not None:
        raise ConfigError(
            "{folder} is an official ChatGLM directory, which servers load with its remote code only. "
            "Convert it first: toolkit export-model model.path={folder} format=hf output=DIR",
            folder=folder,
        )
    if chats and not any(saved_template(source) for source in (adapter, folder) if source):
        raise ConfigError(
            "{folder} has no chat template (chat_template.jinja): a server could not chat.", folder=folder
        )
    if "@" in str(folder):
        raise ConfigError(
            "servers take what follows the @ in {folder} for a revision. Rename the directory.", folder=folder
        )
    return folder
