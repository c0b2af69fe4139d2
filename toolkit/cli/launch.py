"""Train under DeepSpeed's launcher, on one or several nodes, with automatic restarts.

toolkit launch recipe=NAME [launcher options] [hostfile=FILE] [key=value …]

  --num_gpus N, --include …   options of `deepspeed`, before or after the recipe
  hostfile=FILE               several nodes, checked as by `toolkit doctor quick=true`; --no_ssh_check skips that
  recipe=NAME, key=value      as for `toolkit train`
  run.max_restarts=N          restart a run that crashed or hung, up to N times

On one node a free port is chosen if --master_port is not given.
"""

from toolkit.arguments import check_parsed, parse_checked
from toolkit.jobs.launch import launch
from toolkit.launch import deepspeed, environment
from toolkit.messages import Problems


def run(words: list[str]) -> int:
    typed, options, rest = deepspeed.typed_options(words)
    environment.refuse_ranks()
    loaded, problems = parse_checked(rest, files=False).loaded, Problems()
    if ranks := deepspeed.ranks_of(options):  # else each rank would say it, on all nodes, after their start
        check_parsed(loaded, ranks, problems, files=False)
    problems.raise_all()
    return launch(typed, options, rest, loaded.cfg)
