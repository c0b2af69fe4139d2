"""Whether a recipe's model can be trained as the recipe says: built as training does, on the meta device."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.objective import score_labels
from toolkit.config.schema import Init, Packing, RunConfig, TuningMethod
from toolkit.engine.recompute import check_recomputes
from toolkit.messages import ConfigError, NotStreamable
from toolkit.models import attention, directory, load, probe
from toolkit.models.packable import division_unsupported
from toolkit.models.trainable import check_trains
from toolkit.tasks.language_model import adapt


def check_model(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase | None, *, compared: bool = True
) -> PreTrainedModel | None:
    """Build the model that a recipe trains as training does, but with its parameters on the meta device.

    Of its weights, where these are in its directory, names and shapes are compared. A model that is made from the
    recipe, or by Python code of its own, is not built.

    Args:
        cfg: of a language model; `model.path` is a directory, with config.json at least.
        tokenizer: None leaves out whether it fits the model.
        compared: with the headers of the weights, where these are there.

    Returns:
        The model as it would be trained, None if it was not built.

    Raises:
        ConfigError, ModelError: what training would raise before its first step.
    """
    parts = cfg.parallel.sequence
    if parts > 1 and (reason := division_unsupported(cfg.model, cfg.data.max_length)):
        raise ConfigError("parallel.sequence = {ranks} cannot be: {reason}.", ranks=parts, reason=reason)
    folder, is_qlora = Path(cfg.model.path), cfg.tuning.method is TuningMethod.qlora
    if cfg.model.init is Init.random or directory.is_trusted(folder):
        return None
    try:
        model = load.empty(folder, compared=compared and _is_comparable(folder))
    except NotStreamable:
        if cfg.zero.stage == 3 or cfg.parallel.pipeline > 1 or cfg.parallel.expert > 1 or is_qlora:
            raise
        model = load.empty(folder)
    check_trains(model, folder, cfg.task.kind)
    if tokenizer is not None:
        load.check_vocabulary(model, tokenizer)
    labels = tuple(score_labels(cfg)) or (() if probe.is_classifier(model) else ("0", "1"))  # or those of the data
    _check_division(model, cfg, len(labels) if cfg.task.has_head else 0)
    if not cfg.task.has_head:
        load.check_writes(model, folder)
    elif labels:
        from toolkit.models import classifier

        extra = getattr(model, "extra_tensors", None)
        model = classifier.with_head(model, classifier.Head(labels, 0), cfg.run.seed)
        if extra:
            model.extra_tensors = extra
    if parts > 1:
        from toolkit.layouts.sequence import check_splits

        check_splits(model, parts, cfg.parallel.tensor)
    else:
        packed = cfg.data.packing is Packing.packed
        attention.choose_attention(model, cfg.model.attention, packed, load.TORCH_DTYPES[cfg.precision.dtype])
    if is_qlora:  # layers in 4 bits are made of numbers; LoRA finds the same ones
        cfg = replace(cfg, tuning=replace(cfg.tuning, method=TuningMethod.lora))
    adapt(model, cfg, tokenizer, folder)
    if cfg.train.activation_checkpointing.enabled:
        check_recomputes(model, cfg.zero.stage)
    return model


def _check_division(model: PreTrainedModel, cfg: RunConfig, num_scores: int) -> None:
    if cfg.parallel.pipeline > 1:
        from toolkit.layouts import pipeline

        pipeline.stage_parameters(model, cfg.parallel.pipeline, 0, cfg.tuning, num_scores)
    elif cfg.parallel.expert > 1:
        from toolkit.layouts import experts

        experts.check_divides(model, cfg.parallel.expert)
    if cfg.parallel.tensor > 1:
        from toolkit.layouts.tensor import check_split

        check_split(model, cfg.parallel.tensor)


def _is_comparable(folder: Path) -> bool:
    """Whether the weights' headers tell whether they are the model's."""
    files = directory.weight_files(folder)
    return bool(files) and all(file.suffix == ".safetensors" for file in files)
