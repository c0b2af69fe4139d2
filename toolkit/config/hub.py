"""`model.path` as a name on Hugging Face (owner/name): the folder of its files in huggingface_hub's cache."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.files import is_hub_name
from toolkit.config.load import LoadedConfig, replace
from toolkit.config.schema import Init, ModelConfig
from toolkit.disk import try_lock
from toolkit.messages import joined, say, tr

_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "*.safetensors")
_PICKLED = (*_FILES, "pytorch_model*.bin")
"""For what has no safetensors: the official ChatGLM repositories."""
_NOT = ("*/*", "consolidated*")
"""Files in folders, and the weights a second time in their makers' own layout: nothing reads them."""
_POLL_S = 0.2


def resolve_model_path(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
    """Return a config whose `model.path` is a folder: that of a snapshot in the cache, downloaded if it is not there.

    One process of a machine downloads; the others wait and take what it got. HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and
    HF_ENDPOINT are huggingface_hub's own variables; with HF_HUB_OFFLINE=1 nothing but the cache is looked at.

    Args:
        loaded: the config; returned as it is where `model.path` is no such name.
        config_only: nothing but config.json is needed, and the Python files if it names any: taken from the cache, and
            only if it is not there asked for.

    Raises:
        ConfigError: there is no such model, it is not for everybody, or it is not in the cache and the network is away.
    """
    name, revision = loaded.cfg.model.path, loaded.cfg.model.revision
    if loaded.cfg.model.init is Init.random or not is_hub_name(name):
        return loaded
    import huggingface_hub

    try:
        if config_only:
            folder = _config_folder(huggingface_hub, name, revision)
        else:
            folder = _once_per_machine(name, revision, lambda is_first: _snapshot(name, revision, is_first))
    except Exception as error:
        reason = joined(_reason(name, revision, error), _other_ways(loaded.cfg.model))
        raise loaded.about("model.path", reason) from error
    place = tr("{name} on Hugging Face", name=name)
    values = {"model.path": folder, "model.revision": "", "model.hub_id": name}
    return replace(loaded, {key: (value, place) for key, value in values.items()})


def _config_folder(hub: Any, name: str, revision: str) -> str:
    file = hub.try_to_load_from_cache(name, "config.json", revision=revision or None)
    if not isinstance(file, str):
        file = hub.hf_hub_download(name, "config.json", revision=revision or None)
    folder = Path(file).parent
    if '"auto_map"' in Path(file).read_text(encoding="utf-8") and not any(folder.glob("*.py")):
        wanted = ["config.json", "*.py"]
        return str(hub.snapshot_download(name, revision=revision or None, allow_patterns=wanted, ignore_patterns=_NOT))
    return str(folder)


def _snapshot(name: str, revision: str, is_first: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    is_local = HF_HUB_OFFLINE or not is_first
    if not is_local:
        say(
            "Looking for {name} on Hugging Face; what is not in {cache} yet is downloaded.",
            name=name,
            cache=HF_HUB_CACHE,
        )
    get = partial(snapshot_download, name, revision=revision or None, local_files_only=is_local, ignore_patterns=_NOT)
    folder = Path(get(allow_patterns=list(_FILES)))
    if not any(folder.glob("*.safetensors")):
        get(allow_patterns=list(_PICKLED))
    return str(folder)


def _once_per_machine(name: str, revision: str, get: Callable[[bool], str]) -> str:
    """Call `get` in one process after another, with whether it is the first of those that one launcher started."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE or os.environ.get("WORLD_SIZE", "1") == "1":
        return get(True)
    file = Path(HF_HUB_CACHE) / ".locks" / f"models--{name.replace('/', '--')}.toolkit"
    launch = f"{os.getppid()} {os.environ.get('MASTER_PORT', '')} {revision}"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        while not try_lock(lock)[0]:
            time.sleep(_POLL_S)
        lock.seek(0)
        folder = get(lock.read() != launch)
        lock.truncate(0)
        lock.write(launch)
    return folder


def _other_ways(model: ModelConfig) -> str:
    """Return how a published model can be had elsewhere, and what runs without it; "" for other models."""
    if not model.modelscope_id:
        return ""
    return tr(
        "Or `modelscope download --model {name} --local_dir DIR`, then model.path=DIR. To try the recipe without "
        "weights: model=glm_tiny.",
        name=model.modelscope_id,
    )


def _reason(name: str, revision: str, error: Exception) -> str:
    from huggingface_hub import errors
    from huggingface_hub.constants import HF_HUB_CACHE

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
            "model.path = {name} is neither a folder here nor a model on Hugging Face (or a private one: log in with "
            "`hf auth login`, or the variable HF_TOKEN).",
            name=name,
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return tr("model.path = {name} holds no config.json: it is not a model of transformers.", name=of_revision)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return tr(
            "model.path = {name} is no folder here, and it is not in the cache of Hugging Face ({cache}), which cannot "
            "be reached or may not be (HF_HUB_OFFLINE): {reason} Where there is a network: `hf download {repository}`, "
            "then take the cache along (HF_HOME), or give the folder as model.path.",
            name=of_revision,
            cache=HF_HUB_CACHE,
            repository=name,
            reason=first,
        )
    return tr(
        "model.path = {name} cannot be had from Hugging Face: {reason}",
        name=of_revision,
        reason=f"{type(error).__name__}: {first}",
    )
