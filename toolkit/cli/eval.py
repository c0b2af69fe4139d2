"""Evaluate a model on a recipe's validation data: its loss, and its answers by evaluate.metrics.

toolkit eval recipe=NAME [model.path=DIR] [adapter=DIR] [evaluate.metrics=[bleu,rouge_l]] [output=FILE.jsonl]
             [key=value …]

  model.path=DIR    the model, such as runs/NAME/export (beside model=hf where the recipe has another one)
  adapter=DIR       an adapter that was trained on it, such as runs/NAME/export; without model.path on its own base
  output=FILE       gets every prompt, answer, reference and score; a new file in RUN.DIR/evaluations without it.
                    FILE.json beside it gets the figures of all
  key=value         any key of docs/config.md, above all evaluate.… and data.validation

Under several processes, which share the work:  deepspeed --num_gpus 8 --module toolkit eval recipe=NAME …
"""

import logging
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.arguments import Arguments, check_parsed, parse
from toolkit.config import ops
from toolkit.config.hub import resolve_model_path
from toolkit.config.mesh import micro_rows, with_micro_batch
from toolkit.config.schema import ParallelConfig, RunConfig
from toolkit.disk import unused_path
from toolkit.errors import ConfigError
from toolkit.launch import env_vars, environment
from toolkit.messages import say, tr
from toolkit.problems import Problems
from toolkit.train.startup import warn_remote_code

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel

    from toolkit.train.language_data import LanguageData


def run(words: list[str]) -> int:
    """Evaluate."""
    inherited = dict(os.environ)
    ranks = environment.detect(os.environ)
    environment.apply(ranks, os.environ)  # from here on an error knows which rank it speaks for
    arguments, file = _checked(words, ranks.world_size)
    cfg = arguments.loaded.cfg
    env_vars.apply_env(cfg.launch.env, ranks, os.environ, inherited)
    if cfg.distributed.interface:
        environment.set_interface(cfg.distributed.interface, os.environ)
    environment.check_port(os.environ)
    ops.check_build_locks(os.environ)
    if ranks.rank == 0:
        warn_remote_code(cfg.model)
    cfg = with_micro_batch(resolve_model_path(arguments.loaded, say if ranks.rank == 0 else lambda line: None).cfg)
    cfg = replace(cfg, parallel=ParallelConfig())  # each rank, or ZeRO-3, has a whole model
    _evaluate(cfg, ranks, file, arguments.values.get("adapter", "") or cfg.tuning.adapter)
    return 0


def _checked(words: list[str], world_size: int) -> tuple[Arguments, Path]:
    """Return the checked config, and where the answers go.

    Raises:
        ConfigError: everything that is wrong with them.
    """
    problems = Problems()
    words = _with_base(words)
    arguments = parse(words, world_size=world_size, names=("output", "adapter"), problems=problems)
    cfg = arguments.loaded.cfg
    if not (cfg.data.validation or cfg.data.validation_fraction):
        problems.add(ConfigError(tr("there is nothing to evaluate: set data.validation or data.validation_fraction.")))
    file = problems.attempt(_output, cfg, arguments.values.get("output", ""))
    check_parsed(arguments.loaded, None, problems)  # no steps are taken: the batch need not fit these ranks
    problems.raise_all()
    assert file is not None
    return arguments, file


def _with_base(words: list[str]) -> list[str]:
    """Return the words with what an adapter says of itself: its method, and its base where none is given."""
    adapter = next((word.removeprefix("adapter=") for word in words if word.startswith("adapter=")), "")
    if not adapter:
        return words
    from toolkit.models.adapters import base_of_adapter, method_of, read_settings

    own = [f"tuning={method_of(read_settings(Path(adapter))).value}"]
    if not any(word.startswith("model.path=") for word in words):
        own += ["model=hf", f"model.path={base_of_adapter(Path(adapter))}"]
    return [*words, *own]


def _output(cfg: RunConfig, given: str) -> Path:
    """Return where the answers go.

    Raises:
        ConfigError: there is something already, or it would be no JSONL file.
    """
    if not given:
        name = f"{cfg.recipe}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        return unused_path(Path(cfg.run.dir) / "evaluations" / name)
    file = Path(given)
    if file.suffix != ".jsonl":
        raise ConfigError("output = {file} must end with .jsonl.", file=file)
    for path in (file, file.with_suffix(".json")):
        if path.exists():
            raise ConfigError("{path} is there already. Choose another output, or remove it.", path=path)
    return file


def _evaluate(cfg: RunConfig, ranks: environment.Ranks, file: Path, adapter: str) -> None:
    """Load, evaluate and tell. A collective."""
    from toolkit.distributed import process_group
    from toolkit.errors import DataError
    from toolkit.train import alike
    from toolkit.train.evaluation import Evaluation, choose_prompts
    from toolkit.train.language_data import load_data

    tell = say if ranks.rank == 0 else _silent
    alike.check_settings(cfg)
    prepared = load_data(cfg, speaks=ranks.rank == 0)
    alike.check_data(cfg, prepared)
    questions = choose_prompts(cfg, prepared, tell)
    if prepared.validation is None:
        raise DataError(tr("the validation split is empty: there are too few rows."))
    device = process_group.start(cfg.distributed)
    _quieten()
    evaluation = Evaluation(
        cfg=cfg,
        prepared=prepared,
        ranks=ranks,
        questions=questions,
        model=_model(cfg, prepared, ranks.world_size, device, adapter),
        device=device,
        in_step=cfg.zero.stage == 3,
        say=tell,
        adapter=adapter,
    )
    evaluation.leave_out_too_long()
    figures = evaluation.run(file)
    tell("\n".join(_lines(figures)))
    if not cfg.evaluate.metrics:
        tell(tr("To see its answers too: evaluate.metrics=[bleu,chrf,rouge_l]"))
    elif file.exists():
        tell(tr("Each prompt, answer and score: {file}", file=file))
    process_group.stop()


def _silent(line: str) -> None:
    """Say nothing."""


def _quieten() -> None:
    """Leave what libraries warn users of, and nothing below that."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # for the developers of libraries, not between these lines


def _model(
    cfg: RunConfig, prepared: "LanguageData", world_size: int, device: "torch.device", adapter: str
) -> "DeepSpeedEngine | PreTrainedModel":
    """Return the model: under ZeRO-3 partitioned over the ranks as in training, else whole on each of them."""
    from toolkit.config.schema import Packing
    from toolkit.engine.build import initialize_untrained, use_tf32
    from toolkit.engine.ds_config import build_ds_config
    from toolkit.models.adapters import base_of, load_adapter
    from toolkit.models.attention import check_isolation
    from toolkit.models.load import create_model

    use_tf32(cfg.precision)
    packed = prepared.packing is Packing.packed
    # Steps are not taken: batch.global_size need not fit these ranks.
    batch = replace(cfg.batch, global_size=micro_rows(cfg) * world_size)
    ds = build_ds_config(replace(cfg, batch=batch), world_size).values
    model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed, ds, packed)
    if adapter:
        load_adapter(model, Path(adapter), base_of(model, Path(cfg.model.path)), ds_config=ds)
    loaded = initialize_untrained(model, ds) if cfg.zero.stage == 3 else model.to(device)
    if packed:
        check_isolation(loaded, len(prepared.tokenizer), device, cfg.model.name or cfg.model.path)
    return loaded


def _lines(figures: dict[str, float]) -> list[str]:
    """Return the figures as a table, with a column for each source where there are several."""
    from toolkit.terminal import text_table

    sources = sorted({name.partition("/")[2] for name in figures} - {""})
    rows = []
    for name in figures:
        if "/" not in name:
            cells = [figures.get(key) for key in (name, *(f"{name}/{source}" for source in sources))]
            rows.append([name.removeprefix("eval_"), *(_shown(cell) for cell in cells)])
    return text_table(["", tr("all"), *sources], rows)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
