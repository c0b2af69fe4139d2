"""Evaluate a model on a recipe's validation data: its loss, and its answers by evaluate.metrics.

toolkit eval recipe=NAME [model.path=DIR] [adapter=DIR] [evaluate.metrics=[bleu,rouge_l]] [output=FILE.jsonl]
             [key=value …]

  model.path=DIR    the model, such as runs/NAME/export (with model=hf if the recipe has another model)
  adapter=DIR       an adapter trained on it, such as runs/NAME/export; without model.path its own base model is used
  output=FILE       every prompt, answer, reference and score; default: a new file in RUN.DIR/evaluations. Totals
                    are written to FILE.json next to it
  key=value         any key of docs/config.md, mostly evaluate.… and data.validation

On several processes, which share the work:  deepspeed --num_gpus 8 --module toolkit eval recipe=NAME …
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from toolkit.arguments import Arguments, check_parsed, parse
from toolkit.config import hub, mesh, schema
from toolkit.disk import unused_path
from toolkit.launch import environment
from toolkit.messages import ConfigError, Problems, tr
from toolkit.train.startup import set_environment, warn_remote_code


def run(words: list[str]) -> None:
    inherited = dict(os.environ)
    ranks = environment.detect(os.environ)
    environment.set_rank_variables(ranks, os.environ)  # from here on an error knows which rank it speaks for
    arguments, file = _checked(words, ranks.world_size)
    cfg = arguments.loaded.cfg
    set_environment(cfg, ranks, inherited)
    if ranks.rank == 0:
        warn_remote_code(cfg.model)
    cfg = mesh.with_micro_batch(hub.resolve_model_path(arguments.loaded).cfg)
    cfg = replace(cfg, parallel=schema.ParallelConfig())  # each rank, or ZeRO-3, has a whole model
    from toolkit.tasks.language_evaluation import evaluate_model

    evaluate_model(cfg, ranks, file, arguments.values.get("adapter", "") or cfg.tuning.adapter)


def _checked(words: list[str], world_size: int) -> tuple[Arguments, Path]:
    """Return the checked config, and where the answers go."""
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
    file = problems.attempt(_output, cfg, arguments.values.get("output", ""))
    check_parsed(arguments.loaded, None, problems)  # no steps are taken: the batch need not fit these ranks
    problems.raise_all()
    assert file is not None
    return arguments, file


def _with_base(words: list[str]) -> list[str]:
    """Return the words, with the tuning method (and base model, unless typed) that the folder of adapter= names."""
    adapter = next((word.removeprefix("adapter=") for word in words if word.startswith("adapter=")), "")
    if not adapter:
        return words
    from toolkit.models.adapters import base_of_adapter, method_of, read_settings

    adapter_words = [f"tuning={method_of(read_settings(Path(adapter))).value}"]
    if not any(word.startswith("model.path=") for word in words):
        adapter_words += ["model=hf", f"model.path={base_of_adapter(Path(adapter))}"]
    return [*words, *adapter_words]


def _output(cfg: schema.RunConfig, path: str) -> Path:
    """Return the file of answers; a new one in the directory of runs where none is named."""
    if not path:
        name = f"{cfg.recipe}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        return unused_path(Path(cfg.run.dir) / "evaluations" / name)
    file = Path(path)
    if file.suffix != ".jsonl":
        raise ConfigError("output = {file} must end with .jsonl.", file=file)
    for existing in (file, file.with_suffix(".json")):
        if existing.exists():
            raise ConfigError("{path} already exists. Choose another output, or remove it.", path=existing)
    return file
