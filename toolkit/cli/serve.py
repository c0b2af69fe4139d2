"""Serve a model over HTTP with an OpenAI-compatible API: by transformers' own server, vLLM or SGLang.

toolkit serve PATH [port=8000] [host=127.0.0.1] [served_name=NAME] [backend=auto] [adapter=DIR] [--server-option …]

  PATH             (or model.path=PATH) a run directory with an export, or a model in transformers' layout; convert
                   an official ChatGLM directory with `toolkit export-model`. A LoRA adapter is served with its base
  backend=auto     vllm if $PATH has that program, else transformers (pip install fastapi uvicorn openai); or sglang
  host=127.0.0.1   where to listen: this machine only; 0.0.0.0 allows everyone who can reach it, as no server
                   authenticates users
  served_name=NAME name of the model in requests; default: name of its directory, or of the run
  adapter=DIR      a run or a LoRA adapter in peft's layout, served on this model, not on its own base (vllm, sglang)
  --…              passed to the server unchanged, with everything after it: --device cpu

A request names the model: POST http://HOST:PORT/v1/chat/completions, {"model": "NAME", "messages": […]}; its full path
is accepted too. GET /v1/models lists it.
This process becomes the server. None of the servers supports ChatGLM-6B.
"""

import json
import os
from itertools import pairwise, takewhile
from pathlib import Path

from toolkit.command_line import named_arguments, one_of, port_number
from toolkit.evaluate.servable import exported, resolve_servable
from toolkit.evaluate.server import adapter_options, check_adapter, server_program
from toolkit.messages import ConfigError, say, tr

USAGE = "toolkit serve PATH"
_ARGUMENTS = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "served_name",
    "--lora-modules": "adapter",
    "--lora-paths": "adapter",
}
"""Option of a server -> the argument of this command that sets it."""
BACKENDS = ("auto", "vllm", "sglang", "transformers")


def run(words: list[str]) -> None:
    """Print the server's command and a request to try it with, and become the server in place of this program."""
    toolkit_words = list(takewhile(lambda word: not word.startswith("--"), words))
    options = words[len(toolkit_words) :]
    arguments = named_arguments(
        toolkit_words,
        required=("model.path",),
        optional=("port", "host", "served_name", "backend", "adapter"),
        usage=USAGE,
        bare="model.path",
    )
    _check_options(options)
    folder, adapter = _model_and_adapter(Path(arguments["model.path"]), arguments.get("adapter"))
    backend, program = server_program(one_of(arguments, "backend", BACKENDS))
    host, port = arguments.get("host", "127.0.0.1"), port_number(arguments, 8000)
    model = base = arguments.get("served_name") or name_of(adapter or folder)  # their names in requests
    if adapter is not None:
        base = f"{model}-base" if name_of(folder) == model else name_of(folder)
        check_adapter(adapter, backend)
        options = [*adapter_options(adapter, folder, model, backend), *options]
        model = f"{base}:{model}" if backend == "sglang" else model  # how a request names the adapter
    command = serving_command(backend, program, folder, base, (host, port), options)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": tr("Hello")}]}, ensure_ascii=False)
    say("Starting:  {command}", command=" ".join(command))
    say(
        "Ask it:  {command}",
        command=f"curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    )
    # The model is here: nothing is looked up elsewhere, nor can a request have another one fetched.
    alone = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    os.execve(command[0], command, os.environ | alone)  # noqa: S606  the command is made above


def _check_options(options: list[str]) -> None:
    """Raise ConfigError for an option of the server that is an argument of this command, which prints its value."""
    for option in options:
        if argument := _ARGUMENTS.get(option.split("=")[0]):
            raise ConfigError(
                "{option} is an option of the server. Write {argument}=… before the first option instead.",
                option=option,
                argument=argument,
            )


def _model_and_adapter(path: Path, adapter: str | None) -> tuple[Path, Path | None]:
    """Return the directory of the model to serve and, if `path` is an adapter or one is named, the adapter's."""
    adapter_folder = exported(Path(adapter) if adapter else path)
    if adapter:
        return resolve_servable(path, adapter_folder), adapter_folder
    if not (adapter_folder / "adapter_config.json").is_file():
        return resolve_servable(path), None
    from toolkit.models.adapters import base_of_adapter

    return resolve_servable(base_of_adapter(adapter_folder), adapter_folder), adapter_folder


def serving_command(
    backend: str, program: list[str], folder: Path, model: str, address: tuple[str, int], options: list[str]
) -> list[str]:
    """Return the command by which a server serves a model.

    Args:
        backend: of `server_program`, as is `program`.
        folder: the model, of `resolve_servable`.
        model: its name in requests.
        address: host and port.
        options: further ones of the server.
    """
    listen = ["--host", address[0], "--port", str(address[1])]
    if backend == "sglang":
        return [*program, "serve", "--model-path", str(folder), *listen, "--served-model-name", model, *options]
    if backend == "vllm":  # several names: the full path is accepted as well
        return [*program, "serve", str(folder), *listen, "--served-model-name", model, str(folder), *options]
    precision = [] if "--dtype" in options else ["--dtype", _precision(options)]
    return [*program, model, "serve", str(folder), *listen, *precision, *options]


def _precision(options: list[str]) -> str:
    """Return the precision, such as "bfloat16", in which `toolkit generate` computes on the device of `options`."""
    import torch

    from toolkit.distributed.accelerator import device_alone
    from toolkit.export.load import usual_precision
    from toolkit.models.load import TORCH_DTYPES

    named = dict(pairwise(options)).get("--device", "")  # the option that follows --device
    device = torch.device(named) if named not in ("", "auto") else device_alone()
    return str(TORCH_DTYPES[usual_precision(device)]).removeprefix("torch.")


def name_of(folder: Path) -> str:
    """Return the short name of a model: its directory's, or that of the run whose export it is."""
    return folder.parent.name if folder.name == "export" and folder.parent.name else folder.name
