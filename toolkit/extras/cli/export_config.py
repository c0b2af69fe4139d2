"""Write the DeepSpeed JSON of a recipe: what the engine receives, no "auto".

toolkit export-config recipe=NAME [world_size=8] [total_steps=N] [output=ds_config.json] [--explain] [key=value …]
toolkit export-config recipe=NAME script=DIR [world_size=8] [key=value …]

  world_size=8     number of ranks that the batch sizes are for (default 1)
  total_steps=N    optimizer steps, for the scheduler's section; train.max_steps where the recipe has it
  output=FILE      where to write; without it the JSON is printed
  --explain        print for each value the YAML line or the formula that it comes from
  script=DIR       write a program of transformers' Trainer that trains the same without this toolkit: train.py,
                   ds_config.json and the tokenized data; its head says what it does otherwise
"""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from toolkit.arguments import Arguments, parse_checked
from toolkit.command_line import positive_int
from toolkit.config import dotted_keys
from toolkit.config.hub import resolve_model_path
from toolkit.config.load import LoadedConfig
from toolkit.config.schema import Init, RunConfig, TaskConfig
from toolkit.engine.ds_config import DsConfig, build_ds_config, limit_reduce_bucket
from toolkit.messages import ConfigError, tr
from toolkit.plan.lookup import cached_outline
from toolkit.plan.outline import rank_part


def run(words: list[str]) -> None:
    """Write, print or explain a recipe's DeepSpeed JSON, or write a program with it."""
    names = ("world_size", "total_steps", "output", "script")
    writes_script = any(word.startswith("script=") for word in words)
    arguments = parse_checked(words, world_size=1, names=names, flags=("--explain",), files=writes_script)
    world_size = arguments.world_size or 1
    if writes_script:
        _write_script(arguments, world_size)
        return
    cfg = arguments.loaded.cfg
    total_steps = positive_int(arguments.values, "total_steps")
    if total_steps and cfg.train.max_steps and total_steps != cfg.train.max_steps:
        raise arguments.loaded.error(
            "train.max_steps",
            "train.max_steps = {value} and total_steps={total} contradict each other: remove total_steps, or set "
            "train.max_steps={total}.",
            total=total_steps,
        )
    total_steps = total_steps or cfg.train.max_steps or None
    ds = build_ds_config(cfg, world_size, total_steps)
    _fit_buckets(ds, cfg)
    text = json.dumps(ds.values, indent=2) + "\n"
    output = arguments.values.get("output")
    for note in [*arguments.notes, *ds.missing]:
        sys.stderr.write(note + "\n")
    if output:
        file = Path(output)
        try:
            if file.exists() and file.read_text(encoding="utf-8") != text:
                raise ConfigError(
                    "{file} exists with different content; it is not overwritten. Move it away first.", file=file
                )
            file.write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("cannot write {file}: {reason}.", file=file, reason=error) from error
        print(tr("wrote {file} for {world_size} ranks.", file=output, world_size=world_size))
    if "--explain" in arguments.flags:
        print(explain(ds, arguments.loaded))
    elif not output:
        print(text, end="")


def explain(ds: DsConfig, loaded: LoadedConfig) -> str:
    """Return a table with a line for each DeepSpeed key: its value, the schema key or formula that it comes from, and
    the "file:line" that sets it, or the section above it as a whole.
    """
    rows = []
    for key, value in dotted_keys.leaves(ds.values):
        why = ds.why[key]  # a formula begins with =, anything else is a schema key
        if not why.startswith("="):
            why += f"  ({loaded.location(why) or tr('schema default')})"
        rows.append((key, json.dumps(value), why))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {why}" for key, value, why in rows)


def _write_script(arguments: Arguments, world_size: int) -> None:
    """Write the program of `script=`, its JSON and its data; ConfigError for a recipe that it cannot carry."""
    folder = Path(arguments.values["script"])
    if folder.exists():
        raise ConfigError("{folder} exists already: nothing was written. Name another directory.", folder=folder)
    if "total_steps" in arguments.values or "output" in arguments.values or arguments.flags:
        raise ConfigError(tr("script= takes its steps from the data: leave total_steps=, output= and --explain out."))
    cfg = resolve_model_path(arguments.loaded).cfg
    from toolkit.extras import plain_script
    from toolkit.tasks.language_data import load_data

    plain_script.check(cfg)
    plain_script.write(cfg, load_data(cfg), world_size, folder)
    print(
        tr(
            "wrote {folder}. Train with:  deepspeed --num_gpus {world_size} {folder}/train.py",
            folder=folder,
            world_size=world_size,
        )
    )


def _fit_buckets(ds: DsConfig, cfg: RunConfig) -> None:
    """Limit the buckets of gradients to what is trained, as a run does, where the model's shapes are known here."""
    key = "zero_optimization.reduce_bucket_size"
    outline = None
    if cfg.model.init is Init.pretrained:  # the vocabulary of a random model is known once its tokenizer is fitted
        with suppress(ConfigError):
            outline = cached_outline(replace(cfg, task=TaskConfig()))  # without the teacher that distilling needs
    if outline is None or cfg.tuning.adapter or cfg.parallel.pipeline > 1 or not cfg.task.is_language:
        ds.omit("{key} is limited to the parameters that are trained, once they are known: see the run's.", key=key)
        return
    fitted = limit_reduce_bucket(ds.values, rank_part(outline, cfg).num_trained)
    if fitted is not ds.values:
        ds.values = fitted
        ds.why[key] = tr("= parameters that are trained, fewer than zero.reduce_bucket_size")
