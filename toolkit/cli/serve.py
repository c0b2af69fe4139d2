"""Serve a model over HTTP with OpenAI's interface, by transformers' own server or vLLM.

toolkit serve PATH [port=8000] [host=127.0.0.1] [served_name=NAME] [backend=auto] [adapter=DIR] [--server-option …]

  PATH             (or model.path=PATH) a run folder with an export, or a folder in transformers' layout; of an official
                   ChatGLM folder make one with `toolkit export-model`
  backend=auto     vllm where it is installed, else transformers (pip install fastapi uvicorn openai)
  host=127.0.0.1   where to listen: this machine alone; 0.0.0.0 lets everybody in who can reach it, as neither server
                   asks who is there
  served_name=NAME name of the model in requests; by default that of its directory, or of the run
  adapter=DIR      a LoRA adapter in peft's layout (vllm)
  --…              goes to the server as it is, with all that follows: --device cpu

A request names the model: POST http://HOST:PORT/v1/chat/completions, {"model": "NAME", "messages": […]}; its full path
is accepted too. GET /v1/models lists it.
This process becomes the server. ChatGLM-6B can be served by neither.
"""

import importlib.util
import json
import os
import shutil
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from toolkit.arguments import named_arguments, one_of, positive_int
from toolkit.errors import ConfigError, ModelError
from toolkit.messages import say, tr
from toolkit.models.chatglm.family import Architecture, architecture_of
from toolkit.models.directory import read_config, read_object

USAGE = "toolkit serve PATH"
BACKENDS = ("auto", "vllm", "transformers")
_NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has for adapters."""


def run(words: list[str]) -> int:
    """Become the server."""
    own = list(takewhile(lambda word: not word.startswith("--"), words))
    options = words[len(own) :]
    given = named_arguments(
        own,
        required=("model.path",),
        optional=("port", "host", "served_name", "backend", "adapter"),
        usage=USAGE,
        bare="model.path",
    )
    folder = servable(Path(given["model.path"]))
    host, port = given.get("host", "127.0.0.1"), positive_int(given, "port") or 8000
    model = given.get("served_name") or name_of(folder)
    program = server(one_of(given, "backend", BACKENDS))
    is_vllm = len(program) == 1
    command = [*program, *([] if is_vllm else [model]), "serve", str(folder), "--host", host, "--port", str(port)]
    if is_vllm:
        command += ["--served-model-name", model, str(folder)]
    if given.get("adapter"):
        model = Path(given["adapter"]).resolve().name
        command += adapter_options(Path(given["adapter"]), model, is_vllm=is_vllm)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "你好"}]}, ensure_ascii=False)
    say(tr("Starting:  {command}", command=" ".join([*command, *options])))
    say(
        tr(
            "Ask it:  {command}",
            command=f"curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        )
    )
    # The model is here: nothing is looked up elsewhere, nor can a request have another one fetched.
    alone = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    os.execve(command[0], [*command, *options], os.environ | alone)  # noqa: S606  the command is made above


def servable(path: Path) -> Path:
    """Return the folder that servers load for a path.

    Raises:
        ConfigError: it is a run without an export, in the official layout, or has no chat template.
        ModelError: it is no model folder, or one that no server knows.
    """
    folder = (path if (path / "config.json").is_file() or not (path / "export").is_dir() else path / "export").resolve()
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            tr(
                "{folder} is an adapter, not a whole model. Merge it: toolkit export-model {folder} merge=true "
                "output=DIR. Or serve its base, with backend=vllm adapter={folder}.",
                folder=folder,
            )
        )
    config = read_config(str(folder))
    architecture = architecture_of(config)
    if architecture is Architecture.v1:
        raise ModelError(
            tr(
                "{folder} holds a ChatGLM-6B, which neither transformers' server nor vLLM knows. What works: `toolkit "
                "chat`, `toolkit generate`, and the original's own servers (`toolkit export-model format=official`).",
                folder=folder,
            )
        )
    if architecture is not None:
        raise ConfigError(
            tr(
                "{folder} is an official ChatGLM folder, which servers load with its remote code only. Convert it "
                "first: toolkit export-model model.path={folder} format=hf output=DIR",
                folder=folder,
            )
        )
    if not _has_template(folder):
        raise ConfigError(
            tr("{folder} has no chat template (chat_template.jinja): a server could not chat.", folder=folder)
        )
    if "@" in str(folder):
        raise ConfigError(
            tr("servers take what follows the @ in {folder} for a revision. Rename the folder.", folder=folder)
        )
    return folder


def name_of(folder: Path) -> str:
    """Return the short name of a model: its directory's, or that of the run whose export it is."""
    return folder.parent.name if folder.name == "export" and folder.parent.name else folder.name


def server(backend: str) -> list[str]:
    """Return the program that serves, and its first words.

    Raises:
        ConfigError: it is not installed.
    """
    vllm = shutil.which("vllm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if vllm and backend != "transformers":
        return [vllm]
    if backend == "vllm":
        raise ConfigError(tr("backend = vllm, but there is no vllm here:  pip install vllm"))
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            tr(
                "transformers' server needs packages that are not installed:  pip install {packages}",
                packages=" ".join(missing),
            )
        )
    return [sys.executable, "-m", "toolkit.cli.transformers_server"]


def adapter_options(adapter: Path, name: str, is_vllm: bool) -> list[str]:
    """Return what makes vLLM load an adapter under a name.

    Raises:
        ConfigError: it is no LoRA adapter in peft's layout, or the server takes none.
    """
    if not is_vllm:
        raise ConfigError(
            tr("transformers' server takes no adapter. Export base and adapter as one model, or take backend=vllm.")
        )
    file = adapter / "adapter_config.json"
    config: dict[str, Any] = read_object(file) if file.is_file() else {}
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            tr("{folder} is no LoRA adapter in peft's layout; vLLM serves no other kind of adapter.", folder=adapter)
        )
    needed = max(config.get("r", 0), *config.get("rank_pattern", {}).values(), 0)
    rank = next((known for known in _RANKS if known >= needed), needed)
    return ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{name}={adapter.resolve()}"]


def _has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and bool(read_object(config).get("chat_template"))
    )
