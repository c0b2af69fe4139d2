"""Models that a config names by their repository on Hugging Face: looked up in the cache, or downloaded."""

import os
import time
from functools import partial
from importlib import import_module
from pathlib import Path

from toolkit.config import dotted_keys, files, schema
from toolkit.config.load import LoadedConfig, replace
from toolkit.disk import try_lock
from toolkit.messages import joined, say, tr

_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "*.safetensors")
_IGNORED_FILES = ["*/*", "consolidated*"]
"""Files in folders, and the weights a second time in their makers' own layout: nothing reads them."""
ADDING = "toolkit.models.added_tokens"
_POLL_S = 0.2


def needs_lookup(model: schema.ModelConfig) -> bool:
    """Whether only Hugging Face, or its cache, knows a model's sizes."""
    is_published = bool(model.published) and model.path == model.hub_id
    return model.init is not schema.Init.random and files.is_hub_name(model.path) and not is_published


def resolve_model_path(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
    """Return a config whose `model.path` is a directory: a snapshot in the cache, downloaded if it is not there.

    One process of a machine downloads; the others wait. Hugging Face's HF_* variables apply: with HF_HUB_OFFLINE=1
    nothing but the cache is looked at. With `config_only` config.json is enough, and the Python files if it names any.
    With `model.add_tokens` the directory is a copy with these tokens.
    A ConfigError if there is no such model, it is not for everybody, or neither cache nor network has it.
    """
    if loaded.cfg.model.init is schema.Init.random:
        return loaded
    resolved = _resolve(loaded, "model.path", "model.revision", config_only)
    if not resolved.cfg.model.add_tokens:
        return resolved
    # By its name: config/ imports nothing of models/.
    with_tokens: LoadedConfig = import_module(ADDING).resolve(resolved, config_only=config_only)
    return with_tokens


def resolve_teacher(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
    """Return a config whose `distill.teacher` is a directory, as `resolve_model_path` does of the model."""
    return _resolve(loaded, "distill.teacher", "distill.teacher_revision", config_only)


def _resolve(loaded: LoadedConfig, key: str, revision_key: str, config_only: bool) -> LoadedConfig:
    """Return the config with the directory of the model that `key` names on the Hub in the place of that name; as it is
    if it names none. `revision_key` has its commit or branch. ConfigError if the directory cannot be had.
    """
    name, revision = (str(dotted_keys.get_value(loaded.cfg, dotted)) for dotted in (key, revision_key))
    if not files.is_hub_name(name):
        return loaded
    is_model, modelscope_id = key == "model.path", loaded.cfg.model.modelscope_id
    try:
        folder = _config_folder(name, revision) if config_only else _once_per_machine(name, revision)
    except Exception as error:
        # The sentences name the model's keys: of a teacher they become the teacher's.
        reason = _reason(name, revision, error).replace("model.path", key).replace("model.revision", revision_key)
        if is_model and modelscope_id and name == loaded.cfg.model.hub_id:
            ways = tr(
                "Or `modelscope download --model {name} --local_dir DIR`, then model.path=DIR. To try the recipe "
                "without weights: model=glm_tiny.",
                name=modelscope_id,
            )
            reason = joined(reason, ways)
        raise loaded.about(key, reason) from error
    origin = tr("{name} on Hugging Face", name=name)
    values = {key: folder, revision_key: ""} | ({"model.hub_id": name} if is_model else {})
    return replace(loaded, {dotted: (value, origin) for dotted, value in values.items()})


def _config_folder(name: str, revision: str) -> str:
    """Return the directory of a downloaded config.json, with the Python files next to it if it names any."""
    import huggingface_hub as hub

    file = hub.try_to_load_from_cache(name, "config.json", revision=revision or None)
    if not isinstance(file, str):
        file = hub.hf_hub_download(name, "config.json", revision=revision or None)
    folder = Path(file).parent
    if '"auto_map"' in Path(file).read_text(encoding="utf-8") and not any(folder.glob("*.py")):
        wanted = ["config.json", "*.py"]
        return str(
            hub.snapshot_download(
                name, revision=revision or None, allow_patterns=wanted, ignore_patterns=_IGNORED_FILES
            )
        )
    return str(folder)


def _once_per_machine(name: str, revision: str) -> str:
    """Return a snapshot's directory. The ranks of a machine take it one after another, by a lock on a file in the
    cache: the first of a launch downloads, and the others find all of it in the cache.
    """
    from huggingface_hub import constants, snapshot_download

    def snapshot(is_first: bool) -> str:
        if is_first and not constants.HF_HUB_OFFLINE:
            say(
                "Looking for {name} on Hugging Face; what is not in {cache} yet is downloaded.",
                name=name,
                cache=constants.HF_HUB_CACHE,
            )
        is_local = constants.HF_HUB_OFFLINE or not is_first
        get = partial(snapshot_download, name, revision=revision or None, local_files_only=is_local)
        folder = Path(get(allow_patterns=list(_FILES), ignore_patterns=_IGNORED_FILES))
        if not any(folder.glob("*.safetensors")):  # the official ChatGLM repositories
            get(allow_patterns=[*_FILES, "pytorch_model*.bin"], ignore_patterns=_IGNORED_FILES)
        return str(folder)

    if constants.HF_HUB_OFFLINE or os.environ.get("WORLD_SIZE", "1") == "1":
        return snapshot(True)
    file = Path(constants.HF_HUB_CACHE) / ".locks" / f"models--{name.replace('/', '--')}.toolkit"
    launch = f"{os.getppid()} {os.environ.get('MASTER_PORT', '')} {revision}"  # the same for all its ranks here
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        while not try_lock(lock)[0]:
            time.sleep(_POLL_S)
        lock.seek(0)
        is_first = lock.read() != launch  # the file names the launch whose rank was the last to hold the lock
        folder = snapshot(is_first)
        lock.truncate(0)
        lock.write(launch)
    return folder


def _reason(name: str, revision: str, error: Exception) -> str:
    """Return a sentence on why the Hub gives no model `name` at `revision` ("": the newest), and what to do."""
    from huggingface_hub import constants, errors

    of_revision = tr("{name} at revision {revision}", name=name, revision=revision) if revision else name
    if isinstance(error, errors.GatedRepoError):
        return tr(
            "model.path = {name}: its authors give it to whom they have agreed with only. Accept the terms at "
            "https://huggingface.co/{name} and log in (`hf auth login`, or the variable HF_TOKEN).",
            name=name,
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return tr(
            "model.revision = {revision}: {name} has no such commit, branch or tag.", revision=revision, name=name
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return tr(
            "model.path = {name} is neither a directory here nor a model on Hugging Face (or a private "
            "one: log in with `hf auth login`, or the variable HF_TOKEN).",
            name=name,
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return tr("model.path = {name} holds no config.json: it is not a model of transformers.", name=of_revision)
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return tr(
            "model.path = {name} is neither a directory here nor in the cache ({cache}), and Hugging Face cannot be "
            "reached{offline}. Where there is a network: `hf download {repository}`, then copy the cache (HF_HOME) or "
            "set model.path=DIR.",
            name=of_revision,
            cache=constants.HF_HUB_CACHE,
            repository=name,
            offline=" (HF_HUB_OFFLINE=1)" if constants.HF_HUB_OFFLINE else "",
        )
    return tr(
        "model.path = {name} cannot be had from Hugging Face: {reason}",
        name=of_revision,
        reason=f"{type(error).__name__}: {first_line}",
    )
