"""Compare a recipe's exact settings, on your ranks, with a plain PyTorch loop; find the setting that deviates.

toolkit prove [launcher options] recipe=NAME [steps=8] [max_length=256] [output=FILE] [sweep=NAME] [key=value …]

  launcher options  as for `toolkit launch`, which trains
  steps=8           optimizer steps; the run is resumed at half of them
  max_length=256    longest sample, in tokens
  output=FILE       the result as JSON
  sweep=NAME        directory of the runs, run.dir/NAME; default: named after recipe and arguments

The model keeps its architecture and vocabulary but is small and randomly initialized; data, precision, kernels,
packing, adapters, ZeRO, offload and layout are the recipe's. Losses, gradient norms and the export's logits may deviate
from float64 by a small multiple of the plain loop's own deviation in the same precision. Beyond that, settings are
simplified one by one to find the cause.

Exit code 0: everything is right; 1: something deviates.
"""

from toolkit.extras.prove import run_prove
from toolkit.launch import environment


def run(words: list[str]) -> int:
    """Prove a recipe; return 0 if everything is right, else 1."""
    environment.reject_if_rank()
    return run_prove(words)
