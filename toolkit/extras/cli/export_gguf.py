"""Write a trained model as a GGUF file for llama.cpp, with a Modelfile for Ollama.

toolkit export-gguf PATH [output=DIR] [type=auto] [llama_cpp=DIR] [system=TEXT] [context=N] [check=yes]

  PATH            a run directory, a checkpoint, an adapter (it is merged) or a model directory
  output=DIR      must not exist; default for a run directory: RUN/gguf
  type=auto       16 bits, as the weights; f32, f16, bf16 or q8_0, or a type of llama-quantize, such as Q4_K_M
  llama_cpp=DIR   a checkout of llama.cpp, with build/bin if it was compiled; default: its programs on PATH
  system=TEXT     system message of conversations that bring none
  context=N       context window in tokens; default: that of the training, at least 4096
  base=DIR        current path of an adapter's base model, if it was moved after training
  check=no        do not compare prompts and greedy answers by llama.cpp's server

llama.cpp's convert_hf_to_gguf.py converts (with its packages: pip install gguf). Where llama-server is installed, its
prompts and greedy answers are compared with the toolkit's; if they differ, nothing is written. Without llama.cpp the
Modelfile names the model directory, which Ollama itself converts for many architectures.
"""

import shlex
from pathlib import Path

from toolkit.arguments import parse
from toolkit.cli.serve import name_of
from toolkit.command_line import named_arguments, one_of, positive_int
from toolkit.config import files
from toolkit.messages import ConfigError, say, tr

_USAGE = "toolkit export-gguf PATH output=DIR"


def run(words: list[str]) -> None:
    """Export, and print the checks and the commands that serve the file."""
    optional = ("output", "type", "llama_cpp", "system", "context", "base", "check")
    arguments = named_arguments(words, required=("path",), optional=optional, usage=_USAGE, bare="path")
    path, context = Path(arguments["path"]), positive_int(arguments, "context") or 0
    check = one_of(arguments, "check", ("yes", "no")) == "yes"
    files.check_directory(path)
    is_run = (path / "config.yaml").is_file()
    if not arguments.get("output") and not is_run:
        raise ConfigError("{name} is missing: {usage}", name="output", usage=_USAGE)
    output = Path(arguments.get("output") or path / "gguf")
    if output.exists():
        raise ConfigError("{folder} exists already: nothing was written. Name another directory.", folder=output)
    trained = parse([str(path / "config.yaml")]).loaded.cfg.data.max_length if is_run else 0
    import transformers

    from toolkit.extras import gguf, serving

    transformers.utils.logging.disable_progress_bar()
    options = gguf.GgufOptions(
        kind=arguments.get("type", "auto"),
        checkout=arguments.get("llama_cpp", ""),
        base=arguments.get("base", ""),
        system=arguments.get("system", ""),
        context=context,
        trained_length=trained,
        check=check,
    )
    name = name_of(path.resolve())
    result = gguf.export_gguf(path, output, name, options)
    for line in serving.lines_of(result.findings):
        print(line)
    create = f"ollama create {shlex.quote(name.lower())} -f {shlex.quote(str(result.modelfile))}"
    if result.source.is_file():
        print(tr("wrote {file} ({size} GB)", file=result.source, size=f"{result.source.stat().st_size / 1e9:.2f}"))
        say("Serve it:  {command}", command=f"llama-server -m {shlex.quote(str(result.source))} --jinja")
        say("Or with Ollama:  {command}", command=create)
        return
    say("llama.cpp's converter was not found: no GGUF file was written, only {file}.", file=result.modelfile)
    if result.imported_by_ollama:
        say("Ollama converts this architecture itself:  {command}", command=create)
    say(
        "For a GGUF file:  {command}",
        command="git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install gguf && toolkit export-gguf "
        f"{shlex.quote(str(path))} output=OTHER llama_cpp=llama.cpp",
    )
