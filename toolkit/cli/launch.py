"""Train on several GPUs or nodes with DeepSpeed's launcher; restart crashed runs.

toolkit launch recipe=NAME [launcher options] [hostfile=FILE] [key=value …]

  --num_gpus N                GPUs (or ranks, on CPUs) of this node or of each; default: all GPUs
  --include H:0,1@H2          only these nodes and GPUs of the hostfile; --exclude, --num_nodes and other options of
                              `deepspeed` work too, before or after the recipe
  hostfile=FILE               several nodes, checked as by `toolkit doctor quick=true`; --no_ssh_check skips that
  recipe=NAME, key=value      as for `toolkit train`
  run.max_restarts=N          restart a run that crashed or hung, up to N times
  launch.min_nodes=N          continue without lost nodes and with new ones, on N nodes at least

On one node a free port is chosen if --master_port is not given.
"""

from toolkit.arguments import check_parsed, parse
from toolkit.config import hub
from toolkit.config.validate import field_type
from toolkit.jobs.launch import launch
from toolkit.launch import deepspeed, environment
from toolkit.messages import ConfigError, Problems
from toolkit.train import run_dir


def run(words: list[str]) -> int:
    """Check the arguments and the recipe once, before any rank is started, then launch; return the exit code."""
    typed, options, recipe_words = deepspeed.typed_options(words)
    environment.reject_if_rank()
    problems = Problems()
    for word in [word for word in recipe_words if _option_meant(word)]:
        recipe_words.remove(word)
        problems.add(ConfigError("'{word}' is an option here: {option}", word=word, option=_option_meant(word)))
    named_ranks = problems.attempt(deepspeed.ranks_of, options)
    arguments = parse(recipe_words, options=deepspeed.OPTIONS, problems=problems)
    # Checked here for this number of ranks: else every rank would report the same error. With `launch.min_nodes` it is
    # not known: as many nodes take part as the global batch divides over.
    is_elastic = bool(arguments.loaded.cfg.launch.min_nodes)
    ranks = None if is_elastic else named_ranks or arguments.world_size
    is_alone = deepspeed.hostfile_of(options) is None  # else each node may have its own files, which its ranks check
    check_parsed(arguments.loaded, ranks, problems, files=is_alone)
    problems.attempt(run_dir.check_unfinished, arguments.loaded.cfg)
    problems.raise_all()
    if is_alone:
        hub.resolve_model_path(arguments.loaded, config_only=True)
    return launch(typed, recipe_words, arguments.loaded.cfg)


def _option_meant(word: str) -> str:
    """Return the launcher's option that a `name=value` means, such as num_gpus=2; "" for any other word."""
    name, equals, value = word.partition("=")
    option = deepspeed.OTHER_NAMES.get(name, f"--{name}")
    return f"{option} {value}" if equals and option in deepspeed.OPTIONS and field_type(name) is None else ""
