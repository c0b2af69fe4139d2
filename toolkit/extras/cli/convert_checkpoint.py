"""Convert checkpoints of other programs or versions, to resume from them.

toolkit convert-checkpoint PATH output=DIR [base=DIR]

  PATH         a checkpoint of format 1, such as runs/NAME/checkpoints/step-500; or what DeepSpeed's save_checkpoint
               has written, itself or through transformers' Trainer, LLaMA-Factory and others: checkpoint-500, or
               checkpoint-500/global_step500; ZeRO 0 to 3, any number of ranks; or what these programs write without
               DeepSpeed: a model or an adapter, with optimizer.pt (AdamW)
  output=DIR   the directory to write; must not exist. Resume from it in any layout:  resume=DIR run.name=NEW
  base=DIR     base model of an adapter with optimizer.pt, if it is not where adapter_config.json says, nor in Hugging
               Face's cache; config.json is enough

One process without a GPU, and without the ranks that saved it; PATH is not changed. Nothing pickled is executed: a file
that wants to run code is rejected. Weights, optimizer states, step count and loss scale are carried over bit for bit.
A checkpoint of format 1 resumes its run exactly. One of another program says nothing of this toolkit's data and random
states: training resumes after its step, with the learning rate that the recipe has there, from the first epoch's data.
"""

from pathlib import Path

from toolkit.checkpoint import intact
from toolkit.command_line import named_arguments
from toolkit.messages import ConfigError, tr

_USAGE = "toolkit convert-checkpoint PATH output=DIR [base=DIR]"


def run(words: list[str]) -> None:
    """Convert a checkpoint to a new directory, and print what is not taken over."""
    arguments = named_arguments(words, required=("path", "output"), optional=("base",), usage=_USAGE, bare="path")
    output = Path(arguments["output"])
    if output.exists():
        raise ConfigError("{folder} exists already: nothing was written. Name another directory.", folder=output)
    from toolkit.export.write import atomic_directory
    from toolkit.extras import convert_checkpoint as convert, trainer_checkpoint

    source, base = convert.find(Path(arguments["path"])), arguments.get("base", "")
    if base and not trainer_checkpoint.is_of_adapter(source):
        raise ConfigError("{name} has no effect with {other}. Remove it.", name=f"base={base}", other=source)
    with atomic_directory(output) as temporary:
        temporary.mkdir()
        state = convert.convert(source, temporary, base)
    print(tr("wrote {folder}.", folder=output))
    if state.is_foreign:
        print(intact.foreign_text(output))
