"""Checks whether a recipe's model can be trained as configured, by building it on the meta device."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.objective import score_labels
from toolkit.config.schema import Init, Packing, RunConfig, TuningMethod
from toolkit.engine.recompute import check_recomputes
from toolkit.messages import ConfigError, NotStreamable
from toolkit.models import attention, directory, load, probe
from toolkit.models.packable import reason_not_to_divide_rows
from toolkit.models.record import record_of
from toolkit.models.trainable import check_generates_text, check_trains, check_vocabulary
from toolkit.tasks.language_model import adapt


def check_model(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase | None, *, compared: bool = True
) -> PreTrainedModel | None:
    """Build the model as training does, but with its parameters on the meta device.

    A model with random weights, or with Python code of its own, is not built.

    Args:
        cfg: `model.path` is a directory that has at least a config.json.
        tokenizer: to check against the model; None skips that check.
        compared: whether to compare the model with the headers of the weight files, if there are any.

    Returns:
        The model as it would be trained, None if it was not built.

    Raises:
        ConfigError, ModelError: what training would raise before its first step.
    """
    parts = cfg.parallel.sequence
    if parts > 1 and (reason := reason_not_to_divide_rows(cfg.model, cfg.data.max_length)):
        raise ConfigError("parallel.sequence = {ranks} cannot be: {reason}.", ranks=parts, reason=reason)
    folder, is_qlora = Path(cfg.model.path), cfg.tuning.method is TuningMethod.qlora
    if cfg.model.init is Init.random or directory.is_trusted(folder):
        return None
    try:
        model = load.load_empty(folder, compared=compared and _is_comparable(folder))
    except NotStreamable:  # training lets transformers read these as a whole, unless it needs single tensors
        if cfg.zero.stage == 3 or cfg.parallel.pipeline > 1 or cfg.parallel.expert > 1 or is_qlora:
            raise
        model = load.load_empty(folder)
    check_trains(model, folder, cfg.task.kind)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer)
    labels = tuple(score_labels(cfg))
    if not labels and not probe.is_classifier(model):  # the data will tell them: here any two do
        labels = ("0", "1")
    _check_division(model, cfg, len(labels) if cfg.task.has_head else 0)
    if not cfg.task.has_head:
        check_generates_text(model, folder)
    elif labels:
        from toolkit.models import classifier

        extra = record_of(model).extra_tensors  # what transformers leaves out, which the caller reports
        model = classifier.with_head(model, classifier.Head(labels, 0), cfg.run.seed)
        record_of(model).extra_tensors = extra
    if parts > 1:
        from toolkit.layouts.sequence import check_splits

        check_splits(model, parts, cfg.parallel.tensor)
    else:
        packed = cfg.data.packing is Packing.packed
        attention.choose_attention(model, cfg.model.attention, packed, load.TORCH_DTYPES[cfg.precision.dtype])
    if is_qlora:  # without values nothing can be quantized; LoRA has the same targets
        cfg = replace(cfg, tuning=replace(cfg.tuning, method=TuningMethod.lora))
    adapt(model, cfg, tokenizer, folder)
    if cfg.train.activation_checkpointing.enabled:
        check_recomputes(model, cfg.zero.stage)
    return model


def _check_division(model: PreTrainedModel, cfg: RunConfig, num_scores: int) -> None:
    """Raise an error if the model cannot be divided into stages, experts or tensor-parallel parts as configured."""
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
    """Whether a directory has safetensors files, whose headers have names and shapes."""
    files = directory.weight_files(folder)
    return bool(files) and all(file.suffix == ".safetensors" for file in files)
