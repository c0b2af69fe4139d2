"""The evaluation of a model on a recipe's validation data, as `toolkit eval` runs it."""

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import transformers

from toolkit.config.mesh import micro_rows
from toolkit.config.schema import RunConfig
from toolkit.data import loader
from toolkit.distributed import accelerator, process_group
from toolkit.engine import build, ds_config
from toolkit.launch.environment import Ranks
from toolkit.messages import DataError, say, tr
from toolkit.models import load
from toolkit.tables import text_table
from toolkit.tasks import language_data, language_evaluation


def evaluate_model(cfg: RunConfig, ranks: Ranks, file: Path, adapter: str) -> None:
    """Load a model, with the adapter of a directory unless `adapter` is "", evaluate it data-parallel, and print the
    scores; answers are written to `file`. A collective.
    """
    if ranks.world_size > 1:
        from toolkit.train.consistency import check_settings

        check_settings(cfg)
    data = language_data.load_data(cfg)
    language_data.check_same_data(cfg, data)
    questions = language_evaluation.choose_prompts(cfg, data)
    if data.validation is None:
        raise DataError(tr("the validation split is empty: there are too few rows."))
    device = process_group.start(cfg.distributed)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # meant for developers of libraries
    accelerator.set_tf32(cfg.precision.tf32)
    packed = data.layout is not loader.Layout.alone
    # There are no steps, so that the recipe's batch.global_size need not fit these ranks.
    batch = replace(cfg.batch, global_size=micro_rows(cfg) * ranks.world_size)
    ds = ds_config.build_ds_config(replace(cfg, batch=batch), ranks.world_size).values
    model = load.create_model(cfg.model, cfg.precision.dtype, data.tokenizer, cfg.run.seed, ds, packed)
    if adapter:
        from toolkit.models import adapters, base_model

        adapters.load_adapter(model, Path(adapter), base_model.base_of(model, Path(cfg.model.path)), ds_config=ds)
    # Under ZeRO-3 the model is partitioned over ranks as in training, else each rank has a copy.
    loaded = build.initialize_untrained(model, ds) if cfg.zero.stage == 3 else model.to(device)
    if packed:
        from toolkit.models.isolation import check_isolation

        name = cfg.model.name or cfg.model.path
        check_isolation(loaded, len(data.tokenizer), device, name, shared=data.shares_prefixes)
    evaluation = language_evaluation.Evaluation(
        cfg=cfg, data=data, ranks=ranks, questions=questions, model=loaded, adapter=adapter
    )
    evaluation.drop_too_long()
    figures = evaluation.run(file)
    say("\n".join(_table_of_figures(figures)))
    if not cfg.evaluate.metrics:
        say("To see its answers too: evaluate.metrics=[bleu,chrf,rouge_l]")
    elif file.exists():
        say("Each prompt, answer and score: {file}", file=file)
    process_group.stop()


def _table_of_figures(figures: dict[str, float]) -> list[str]:
    """Return the lines of a table of figures, with a column for each source if there are several. `figures`: value by
    eval_NAME, of all rows, and by eval_NAME/SOURCE, which a source may lack.
    """

    def shown(value: float | None) -> str:  # a whole number is a count
        if value is None:
            return ""
        return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"

    sources = sorted({name.partition("/")[2] for name in figures} - {""})
    rows = []
    for name in figures:
        if "/" not in name:
            cells = [shown(figures.get(key)) for key in (name, *(f"{name}/{source}" for source in sources))]
            rows.append([name.removeprefix("eval_"), *cells])
    return text_table(["", tr("all"), *sources], rows)
