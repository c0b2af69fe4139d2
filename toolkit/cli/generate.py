"""Generate answers with a model: to one question, or to every row of a file.

toolkit generate PATH prompt="…" [adapter=DIR] [key=value …]
toolkit generate PATH input=FILE output=FILE [adapter=DIR] [batch_size=8] [key=value …]

  PATH                  (or model.path=PATH) a run directory, an export, an official ChatGLM directory or any other
                        model directory; optional with adapter=DIR
  adapter=DIR           an adapter that was trained on that model
  prompt=TEXT           the question; the answer alone goes to stdout
  input=FILE            questions: any file, directory or pattern that could be training data. A final assistant
                        message is optional; it is not passed to the model but kept as `reference`
  format=, columns=     as under data.sources: format=messages 'columns={prompt: question}'
  output=FILE           JSON lines, one for each row in order: messages, answer, reference, prompt_tokens, tokens,
                        finish (stop, or length: cut at max_new_tokens), where; or error, if the row could not be used;
                        with a `check` also passed, and failed (why not). Must not exist. Until complete it is named
                        FILE.part; rerun the same command to resume
  allow_code=true       let the check `python` run code that the model writes
  samples=1             answers per question, a line each with its `sample`; above 1 with temperature
  batch_size=8          questions per batch
  shard=i/n             answer one of n parts of the questions, for n processes or nodes, each with a GPU; then run the
                        same command once without it to merge them. Answers do not depend on n
  system=TEXT           system message for questions without one
  max_new_tokens=64     longest answer in tokens
  temperature=0         0 takes the most likely token; above 0 tokens are sampled from the top_p=1 of the probability
                        mass or the top_k=0 most likely tokens (0: all), with seed=0
  model.family=NAME     only if the files do not distinguish ChatGLM2 from ChatGLM3
  model.chat_template=FILE    as in a recipe: another template than the model's; exports hold that of their training
  server=vllm           let a server answer, which is started here with the model, and again if it dies: auto, vllm,
                        sglang or transformers as for `toolkit serve`, perhaps with options ('vllm --max-model-len
                        4096'), or a command: server='vllm serve {model} --port {port} --tensor-parallel-size 2'
  url=URL               a server that runs already answers, such as http://host:8000/v1; its model is served_name=NAME,
                        and PATH has the tokenizer. ROLLOUTS_API_KEY in the environment is sent as a bearer token
  timeout_s=600         seconds for a server's answer, before it is asked again; batch_size=64 requests run in parallel
  engine=deepspeed      split over ranks by deepspeed.init_inference: torchrun --nproc-per-node 2 -m toolkit generate …
"""

import os
import re
import shlex
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.chat import MODEL, SAMPLING, check_model, sampling_arguments
from toolkit.cli.serve import BACKENDS, serving_command
from toolkit.command_line import named_arguments, one_of, positive_int
from toolkit.config.schema import DistributedConfig, RowFormat
from toolkit.evaluate.servable import resolve_servable
from toolkit.evaluate.server import server_program
from toolkit.messages import ConfigError, notes_to_stderr, printable, say, tr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toolkit.evaluate.answer_files import Answering
    from toolkit.evaluate.generate import Sampling
    from toolkit.models.chat import AnyChatEncoder

USAGE = 'toolkit generate PATH prompt="…"'
_SERVER = ("server", "url", "served_name", "timeout_s")
_FOR_FILES = ("output", "format", "columns", "batch_size", "samples", "shard", "allow_code", *_SERVER)
_REQUESTS_AT_ONCE = 64


def run(words: list[str]) -> None:
    """Print the answer to one question, or write those to a file's questions."""
    optional = (*MODEL, "prompt", "input", *_FOR_FILES, "system", *SAMPLING, "engine")
    bare = [word for word in words if "=" not in word]
    if len(bare) > 1 and not any(word.startswith(("prompt=", "input=", "-")) for word in words):
        raise ConfigError("'{word}': write a question as prompt='{word}'", word=bare[1])
    settings = named_arguments(words, required=(), optional=optional, usage=USAGE, bare="model.path")
    check_model(settings, USAGE)
    is_split = one_of(settings, "engine", ("transformers", "deepspeed")) == "deepspeed"
    if bool(settings.get("prompt")) == bool(settings.get("input")):
        raise ConfigError(tr('either prompt="…", or input=FILE and output=FILE.'))
    ask = _ask_file if settings.get("input") else _ask_once
    ask(settings, sampling_arguments(settings, max_new_tokens=64), is_split)
    if is_split:
        from toolkit.distributed import process_group

        process_group.stop()


def _ask_once(settings: dict[str, str], sampling: "Sampling", is_split: bool) -> None:
    """Print the answer to one question. `is_split`: whether the model is split over ranks."""
    for name in _FOR_FILES:
        if name in settings:
            raise ConfigError("{name} has an effect with input=FILE only. Remove it.", name=name)
    with notes_to_stderr():  # such as which checkpoint of a run is loaded: stdout is for the answer
        model, encoder = _load(settings, is_split)
    from toolkit.distributed import process_group
    from toolkit.evaluate.answer_files import finish_of
    from toolkit.evaluate.generate import decode_answer, generate, with_system

    messages = with_system([{"role": "user", "content": settings["prompt"]}], settings.get("system", ""))
    [ids] = generate(model, encoder, [encoder.prompt(messages)], sampling, model.device)
    if process_group.rank() == 0:
        print(printable(decode_answer(encoder, ids)))
        if finish_of(ids, sampling) == "length":
            with notes_to_stderr():
                say("The answer is cut at max_new_tokens={count}.", count=len(ids))


def _ask_file(settings: dict[str, str], sampling: "Sampling", is_split: bool) -> None:
    """Write the answers to the questions of the file `input` into the file `output`. `is_split`: see `_ask_once`."""
    if not settings.get("output"):
        raise ConfigError("{name} is missing: {usage}", name="output", usage="input=FILE output=FILE")
    if is_split and "shard" in settings:
        raise ConfigError(tr("shard= and engine=deepspeed do not go together. Keep one of them."))
    row_format = RowFormat(one_of(settings, "format", [choice.value for choice in RowFormat]))
    is_served = _check_server_arguments(settings, is_split)
    from toolkit.evaluate.answer_files import AnswerOptions, LocalModel, answer_source, parse_shard, question_source

    source = question_source(settings["input"], row_format, settings.get("columns", "{}"))
    options = AnswerOptions(
        sampling=sampling,
        batch_size=positive_int(settings, "batch_size") or (_REQUESTS_AT_ONCE if is_served else 8),
        samples=positive_int(settings, "samples") or 1,
        system=settings.get("system", ""),
        shard=parse_shard(settings.get("shard", "1/1")),
        allow_code=one_of(settings, "allow_code", ("false", "true")) == "true",
    )
    # A file may be resumed through another server; `answer_source` compares the files and the batch size itself.
    not_compared = ("input", "output", "batch_size", "shard", *_SERVER)
    with ExitStack() as running:
        answer_source(
            source,
            Path(settings["output"]),
            lambda: _served(settings, sampling, running) if is_served else LocalModel(*_load(settings, is_split)),
            options,
            models=[Path(settings[name]) for name in ("model.path", "adapter") if settings.get(name)],
            settings={name: settings[name] for name in settings if name not in not_compared},
        )


def check_server(text: str) -> bool:
    """Return whether `server=` is a server of `toolkit serve`, perhaps with options, and no command of the user's own;
    ConfigError if it is neither, or not installed.
    """
    placeholders = set(re.findall(r"\{\w+\}", text))
    try:
        first_word = shlex.split(text)[0]
    except (ValueError, IndexError):  # a quote that is not closed, or nothing
        first_word = ""
    if not placeholders and first_word in BACKENDS:
        server_program(first_word)
        return True
    if not first_word or placeholders != {"{model}", "{port}"}:
        raise ConfigError(
            "server = {value} is neither one of {known}, perhaps with options, nor a command with {{model}} and "
            "{{port}}, such as 'vllm serve {{model}} --port {{port}}'.",
            value=text,
            known=", ".join(BACKENDS),
        )
    if not shutil.which(first_word):
        raise ConfigError("server = {value}: there is no program {program} here.", value=text, program=first_word)
    return False


def _check_server_arguments(settings: dict[str, str], is_split: bool) -> bool:
    """Return whether a server answers; ConfigError if the arguments about it are wrong, or do not go together."""
    server, url = settings.get("server", ""), settings.get("url", "")
    if not (server or url):
        for name in _SERVER:
            if name in settings:
                raise ConfigError("{name} has an effect with server= or url= only. Remove it.", name=name)
        return False
    if (server and url) or is_split:
        raise ConfigError(tr("server=, url= and engine=deepspeed do not go together. Keep one of them."))
    if url and not re.fullmatch(r"https?://[^@\s]+", url):
        raise ConfigError(
            "url = {url} must begin with http:// or https:// and hold no user. Put a token into ROLLOUTS_API_KEY.",
            url=url,
        )
    if server:
        check_server(server)
        if settings.get("adapter"):
            raise ConfigError(
                "server = {value} serves whole models. Merge the adapter first: toolkit export-model {adapter} "
                "merge=true output=DIR",
                value=server,
                adapter=settings["adapter"],
            )
        resolve_servable(Path(settings["model.path"]), chats=False)
    return True


def _served(settings: dict[str, str], sampling: "Sampling", running: ExitStack) -> "Answering":
    """Return the model whose answers a server gives; it is not loaded here. `running`: ends a server of our own."""
    from toolkit.evaluate.answer_files import parse_shard, shard_of
    from toolkit.evaluate.generate import check_system
    from toolkit.evaluate.served_model import ServedModel, ServerChoice
    from toolkit.export.load import load_encoder

    path, family, template, adapter = (settings.get(name, "") for name in MODEL)
    encoder, max_tokens = load_encoder(path, adapter=adapter, family=family or "auto", chat_template=template)
    check_system(encoder, settings.get("system", ""))
    name, server = settings.get("served_name", ""), settings.get("server", "")
    if server and check_server(server):
        name = name or "model"  # which `_server_command` gives it
    output, shard = Path(settings["output"]), parse_shard(settings.get("shard", "1/1"))
    answer_file = shard_of(output, *shard) if shard[1] > 1 else output
    choice = ServerChoice(
        url=settings.get("url", ""),
        command=partial(_server_command, server, path, name),
        log=answer_file.with_name(f"{answer_file.name}.server.log"),
        name=name,
        timeout_s=positive_int(settings, "timeout_s") or 600,
    )
    return ServedModel(choice, encoder, max_tokens, sampling, running)


def _server_command(server: str, path: str, name: str, port: int) -> list[str]:
    """Return the command that serves the model in `path`, as `name` where that can be chosen, on a port of this
    machine. `server`: of `check_server`.
    """
    folder, words = resolve_servable(Path(path), chats=False), shlex.split(server)
    if check_server(server):
        return serving_command(*server_program(words[0]), folder, name, ("127.0.0.1", port), words[1:])
    return [word.replace("{model}", str(folder)).replace("{port}", str(port)) for word in words]


def _load(settings: dict[str, str], is_split: bool) -> "tuple[PreTrainedModel, AnyChatEncoder]":
    """Return the model that the arguments name, and its chat encoder; with `is_split` it is split over the ranks."""
    from toolkit.evaluate.generate import check_system
    from toolkit.export.load import load_any, usual_precision

    path, family, template, adapter = (settings.get(name, "") for name in MODEL)
    precision_and_device: dict[str, str] = {}
    if is_split:
        import torch
        from deepspeed.accelerator import get_accelerator

        from toolkit.distributed import process_group
        from toolkit.evaluate.inference_engine import split_inference

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            process_group.start(DistributedConfig())
        # In host memory until it is split: a part may fit onto a GPU where the whole does not.
        precision = usual_precision(torch.device(get_accelerator().device_name()))
        precision_and_device = {"dtype": precision.value, "device": "cpu"}
    loaded = load_any(path, adapter=adapter, family=family or "auto", chat_template=template, **precision_and_device)
    if is_split:
        split_inference(loaded.model)
    check_system(loaded.encoder, settings.get("system", ""))
    return loaded.model, loaded.encoder
