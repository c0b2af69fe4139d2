"""Export a run's model, or merge LoRA; convert between the official ChatGLM layout and transformers' own.

toolkit export-model PATH [merge=true] [format=hf|official] [dtype=bf16] [max_shard_size=5GB] [output=DIR]

  PATH                a run directory (its newest complete checkpoint); a checkpoint, such as
                      runs/NAME/checkpoints/step-500; an adapter, such as runs/NAME/export; or a model
                      directory, official or in transformers' layout
                      (or model.path=PATH)
  adapter=DIR         an adapter that was trained on the model PATH
  merge=true          merge the adapter into its base model's weights; without it the adapter alone is exported
  format=hf           safetensors, config and tokenizer; transformers, vLLM and others load them without remote code
  format=official     the official layout: names, precisions and shards as in the original, other files copied
  dtype=bf16          precision of the weights: fp32, bf16 or fp16; default: that of the training, or of the files. Of
                      quantized weights (FP8, MXFP4, GPTQ, AWQ, compressed-tensors): a copy to train
  text_only=true      export only the text model of a multimodal one, where transformers has a class for it
  max_shard_size=5GB  largest file of weights in transformers' layout
  base=DIR            current path of the base model, if it was moved after training
  output=DIR          must not exist; default for a run directory: RUN/export, RUN/merged, RUN/text or RUN/official
  forward=no          do not reload the output and compare its logits with the run's
  model.family=NAME   only if the files do not distinguish ChatGLM2 from ChatGLM3

One process without a GPU exports checkpoints of any number of ranks under ZeRO 0 to 3. Only a part of the weights is in
memory at a time, also during the comparison; to compare an adapter, its base model is loaded.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.command_line import named_arguments, one_of
from toolkit.config import files
from toolkit.messages import ConfigError, tr

if TYPE_CHECKING:
    from toolkit.models.save import Format

FORMATS: "tuple[Format, ...]" = ("hf", "official")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_USAGE = "toolkit export-model PATH output=DIR"
_OPTIONAL = (
    *("adapter", "merge", "format", "dtype", "max_shard_size", "text_only", "base", "output", "forward"),
    "model.family",
)
_PARAMETERS = {"adapter": "adapter", "base": "base", "family": "model.family"}
"""Parameter of `export_verified` -> argument."""


def _directory_name(format: str, text_only: bool, merges: bool) -> str:
    """Return the name, in a run directory, of an export of that kind, so that several kinds can be made."""
    if format == "official":
        return "official"
    if text_only:
        return "text"
    return "merged" if merges else "export"


def run(words: list[str]) -> None:
    """Write a model or adapter to a new directory in the chosen layout, and verify what was written."""
    arguments = named_arguments(words, required=("model.path",), optional=_OPTIONAL, usage=_USAGE, bare="model.path")
    format = one_of(arguments, "format", FORMATS)
    merge = one_of(arguments, "merge", ("false", "true")) == "true"
    text_only = one_of(arguments, "text_only", ("false", "true")) == "true"
    dtype = DTYPES[one_of(arguments, "dtype", tuple(DTYPES))] if "dtype" in arguments else ""
    forward = one_of(arguments, "forward", ("yes", "no")) == "yes"
    size = arguments.get("max_shard_size", "")
    if size and not re.fullmatch("[1-9][0-9]*[KMGT]B", size):
        raise ConfigError("max_shard_size = {size} is no size such as 500MB or 5GB.", size=size)
    path = Path(arguments["model.path"])
    files.check_directory(path)
    if not arguments.get("output") and not (path / "config.yaml").is_file():  # no run directory
        raise ConfigError("{name} is missing: {usage}", name="output", usage=_USAGE)
    output = Path(arguments.get("output") or path / _directory_name(format, text_only, merge))
    if output.exists():
        raise ConfigError("{folder} exists already: nothing was written. Name another directory.", folder=output)
    import transformers

    from toolkit.export.convert import export_verified
    from toolkit.export.write import ExportOptions

    transformers.utils.logging.disable_progress_bar()
    shards = {"max_shard_size": size} if size else {}
    layout: Format = "official" if format == "official" else "hf"
    options = ExportOptions(format=layout, merge=merge, dtype=dtype, text_only=text_only, **shards)
    optional = {parameter: arguments[word] for parameter, word in _PARAMETERS.items() if word in arguments}
    verdict = export_verified(path, output, options, forward=forward, **optional)
    print(tr("wrote {folder}.", folder=output))
    if verdict:
        print("  " + verdict)
