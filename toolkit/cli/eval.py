"""Evaluate a model: its loss and answers on validation data, benchmarks, or checks of its answers.

toolkit eval recipe=NAME [model.path=DIR] [adapter=DIR] [evaluate.metrics=[bleu,rouge_l]] [output=FILE.jsonl]
             [key=value …]
toolkit eval PATH tasks=NAME,… [questions=FILE] [compare=base] [limit=N] [num_fewshot=N] [batch_size=8] [key=value …]

On validation data:
  model.path=DIR    the model, such as runs/NAME/export (with model=hf if the recipe has another model)
  adapter=DIR       an adapter trained on it, such as runs/NAME/export; without model.path its own base model is used
  output=FILE       every prompt, answer, reference and score; default: a new file in RUN.DIR/evaluations. Totals
                    are written to FILE.json next to it
  key=value         any key of docs/config.md, mostly evaluate.… and data.validation

Benchmarks and checks, of a run directory, an export, a checkpoint, an adapter or any model directory:
  tasks=NAME,…      tasks, groups or patterns of lm-evaluation-harness, such as gsm8k,ifeval,ceval-valid
                    (pip install -c constraints.txt -e '.[eval]')
  include_path=DIR  directory with task files of your own
  questions=FILE    JSONL; each row has a question and a check: exact, contains, regex, json_schema or python
  compare=base      score the model before training too, in the same table; compare=DIR: another model
  limit=N           examples of each task; below 1 their share
  num_fewshot=N     solved examples in each prompt; default: each task's own number
  apply_chat_template=true    put the prompts of tasks into the model's chat template; questions always are
  system=TEXT       system message
  batch_size=8      prompts at once; auto: as many as fit (tasks only)
  max_new_tokens=256, temperature=0, top_p, top_k, seed     of answers to questions
  dtype=, device=   fp32, bf16 or fp16 (default: that of the files); such as cuda:1
  allow_code=true   run Python of task files, and code that the model writes
  adapter, model.family, model.chat_template    as for `toolkit generate`
  output=FILE       as above; default: a new file in the run's evaluations/, which the report shows

On several processes, which share the work:  deepspeed --num_gpus 8 --module toolkit eval recipe=NAME …
                                             deepspeed --num_gpus 8 --module toolkit eval PATH tasks=…
"""

import os
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from toolkit.arguments import Arguments, check_parsed, parse
from toolkit.cli.chat import MODEL, SAMPLING, check_model, sampling_arguments
from toolkit.command_line import named_arguments
from toolkit.config import hub, mesh, schema
from toolkit.disk import unused_path
from toolkit.launch import environment
from toolkit.messages import ConfigError, Problems, tr
from toolkit.train.startup import set_environment, warn_remote_code

_USAGE = "toolkit eval PATH tasks=gsm8k"
_OF_TASKS = ("include_path", "limit", "num_fewshot", "apply_chat_template")
_SCORED = ("compare", "batch_size", "system", "dtype", "device", "allow_code", "output")


def run(words: list[str]) -> None:
    """Score a model on benchmarks and checks if there are some, else evaluate it on a recipe's validation data."""
    inherited = dict(os.environ)  # what this process was started with
    ranks = environment.detect(os.environ)
    environment.set_rank_variables(ranks, os.environ)  # from here on an error knows which rank it speaks for
    if any(word.partition("=")[0] in ("tasks", "questions") for word in words):
        _score(words, ranks)
    elif words and "=" not in words[0] and Path(words[0]).is_dir():
        raise ConfigError(
            "toolkit eval {path}: add tasks=… or questions=FILE, or name a recipe= instead.", path=words[0]
        )
    else:
        _evaluate(words, ranks, inherited)


def _score(words: list[str], ranks: environment.Ranks) -> None:
    """Score a model on benchmarks and checks, without a recipe."""
    names = (*MODEL, "tasks", "questions", *_OF_TASKS, *SAMPLING, *_SCORED)
    values = named_arguments(words, required=(), optional=names, usage=_USAGE, bare="model.path")
    check_model(values, _USAGE)
    for dependent, owner in ((_OF_TASKS, "tasks"), (SAMPLING, "questions")):  # arguments, and which one they are for
        if not values.get(owner) and (wrong := [name for name in dependent if name in values]):
            raise ConfigError("{name} has an effect with {owner}= only. Remove it.", name=wrong[0], owner=owner)
    sampling = sampling_arguments(values, max_new_tokens=256)
    import_module("toolkit.extras.scores").score(values, sampling, ranks.world_size)


def _evaluate(words: list[str], ranks: environment.Ranks, inherited: dict[str, str]) -> None:
    """Evaluate a model on a recipe's validation data."""
    arguments, file = _checked(words, ranks.world_size)
    cfg = arguments.loaded.cfg
    set_environment(cfg, ranks, inherited)
    if ranks.rank == 0:
        warn_remote_code(cfg.model)
    cfg = mesh.with_micro_batch(hub.resolve_model_path(arguments.loaded).cfg)
    cfg = replace(cfg, parallel=schema.ParallelConfig())  # each rank, or ZeRO-3, has a whole model
    from toolkit.jobs.evaluate import evaluate_model

    evaluate_model(cfg, ranks, file, arguments.values.get("adapter", "") or cfg.tuning.adapter)


def _checked(words: list[str], world_size: int) -> tuple[Arguments, Path]:
    """Return the checked arguments, with the config, and where the answers go; ConfigError with all that is wrong."""
    problems = Problems()
    words = _with_base(words)
    arguments = parse(words, world_size=world_size, names=("output", "adapter"), problems=problems)
    cfg = arguments.loaded.cfg
    if cfg.preference.is_on:
        problems.add(
            ConfigError(
                tr("toolkit eval does not support preference pairs: use preference=none, with conversations as data.")
            )
        )
    if not cfg.task.is_language:
        problems.add(
            ConfigError(
                "toolkit eval does not support task={kind}: a run evaluates itself, see eval_ in its metrics.jsonl.",
                kind=cfg.task.kind.value,
            )
        )
    if not (cfg.data.validation or cfg.data.validation_fraction):
        problems.add(ConfigError(tr("there is nothing to evaluate: set data.validation or data.validation_fraction.")))
    file = problems.attempt(
        output_file, Path(cfg.run.dir) / "evaluations", cfg.recipe, arguments.values.get("output", "")
    )
    check_parsed(arguments.loaded, None, problems)  # no steps are taken: the batch need not fit these ranks
    problems.raise_all()
    assert file is not None
    return arguments, file


def _with_base(words: list[str]) -> list[str]:
    """Return the words; with adapter=DIR also `tuning=`, and unless typed `model.path=`, as the adapter's files say."""
    adapter = next((word.removeprefix("adapter=") for word in words if word.startswith("adapter=")), "")
    if not adapter:
        return words
    from toolkit.models.adapters import base_of_adapter, method_of, read_settings

    adapter_words = [f"tuning={method_of(read_settings(Path(adapter))).value}"]
    if not any(word.startswith("model.path=") for word in words):
        adapter_words += ["model=hf", f"model.path={base_of_adapter(Path(adapter))}"]
    return [*words, *adapter_words]


def output_file(folder: Path, name: str, path: str = "") -> Path:
    """Return the file of answers, `path`; where that is "" a new one in a directory, whose name begins with `name`."""
    if not path:
        return unused_path(folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    file = Path(path)
    if file.suffix != ".jsonl":
        raise ConfigError("output = {file} must end with .jsonl.", file=file)
    for existing in (file, file.with_suffix(".json")):  # the totals are written to the second
        if existing.exists():
            raise ConfigError("{path} already exists. Choose another output, or remove it.", path=existing)
    return file
