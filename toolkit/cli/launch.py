"""Train under DeepSpeed's launcher, on one or several nodes, with automatic restarts.

toolkit launch recipe=NAME [launcher options] [hostfile=FILE] [key=value …]

  --num_gpus N, --include …   options of `deepspeed`, before or after the recipe
  hostfile=FILE               several nodes, checked as by `toolkit doctor quick=true`; --no_ssh_check skips that
  recipe=NAME, key=value      as for `toolkit train`
  run.max_restarts=N          restart a run that crashed or hung, up to N times

On one node a free port is chosen if --master_port is not given.
"""

from toolkit.arguments import parse_checked
from toolkit.jobs.launch import launch
from toolkit.launch import deepspeed, environment


def run(words: list[str]) -> int:
    typed, options, rest = deepspeed.typed_options(words)
    environment.refuse_ranks()
    return launch(typed, options, rest, parse_checked(rest, files=False).loaded.cfg)
