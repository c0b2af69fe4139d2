"""Check a recipe without training: config, data, model directory, DeepSpeed config. No weights are loaded.

toolkit check recipe=NAME [world_size=8] [gpus=8xA100-80GB] [key=value …]

  world_size=8     number of ranks that the batch sizes are checked for
  gpus=8xT4        GPUs that the precision is checked for, and the number of ranks; default: those of this node

All errors are reported at once. Only the first rows of each data file are read; datasets on Hugging Face are looked up,
not downloaded. A model on this disk is built without its weights, to find what training would reject.
"""

from toolkit.jobs.check import check_recipe


def run(words: list[str]) -> None:
    """Check a recipe, and print what it would train."""
    check_recipe(words)
