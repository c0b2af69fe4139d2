"""Measure which ZeRO stage and micro-batch train fastest, with DeepSpeed's autotuner.

toolkit autotune [launcher options] recipe=NAME [stages=0,1,2] [micro=1,2,4] [sweep=NAME] [key=value …]

  launcher options  as for `toolkit launch`, which runs each experiment: eight optimizer steps
  stages=0,1,2      ZeRO stages to try; default 0,1,2,3, or 2,3 if the recipe keeps optimizer states in host memory
  micro=1,2,4       micro-batches to try; default: powers of two up to 16 that divide a rank's sequences per step
  sweep=NAME        directory of the experiments, run.dir/NAME; default: named after recipe and arguments
  key=value         as for `toolkit train`, except zero= and batch.micro_per_gpu=, which are being tuned

The global batch stays the recipe's. Experiments are the runs of a sweep: rerun the command to resume unfinished ones.
Combinations that the config checks reject, or that by plan do not fit into this node's GPUs, are reported and skipped.
"""

from toolkit.jobs.autotune import run_autotune
from toolkit.launch import environment


def run(words: list[str]) -> int:
    environment.refuse_ranks()
    return run_autotune(words)
