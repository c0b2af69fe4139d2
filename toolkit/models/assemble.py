"""The model that a recipe trains, made of the one in its directory; and the same without numbers, to be tried early."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.schema import Init, Packing, RunConfig, TuningMethod, score_labels
from toolkit.layouts import experts, fp8, pipeline
from toolkit.messages import ConfigError, NotStreamable
from toolkit.models import attention, classifier, directory, fine_tuning, layers, load, loss, probe, router_loss
from toolkit.plan.outline import tuning_of


def adapt(
    model: PreTrainedModel,
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    base: Path,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Change a model into the one that a recipe trains; where parameters are partitioned, a collective. `base`: see
    `base_model.base_of`; ConfigError or ModelError for what this model cannot do.
    """
    model.loss_head, model.routers = loss.LossHead(cfg.kernels.loss), router_loss.routers_of(model, cfg)
    if cfg.tuning.method is not TuningMethod.full:
        fine_tuning.apply_tuning(model, tuning_of(cfg), base, tokenizer, cfg.run.seed, ds_config)
    if cfg.kernels.mlp_pieces > 1:
        layers.tile_mlp(model, cfg.kernels.mlp_pieces)
    fp8.convert(model, cfg.precision.fp8, cfg.compile.enabled)
    if cfg.train.neftune_alpha:
        layers.add_neftune(model, cfg.train.neftune_alpha)


def check_model(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Build the model that a recipe trains as training does, but with its parameters on the meta device.

    Of its weights, where these are in its directory, names and shapes are compared. A model that is made from the
    recipe, or by Python code of its own, is not built.

    Args:
        cfg: of a language model; `model.path` is a directory, with config.json at least.
        tokenizer: None leaves out whether it fits the model.

    Raises:
        ConfigError, ModelError: what training would raise before its first step.
    """
    parts = cfg.parallel.sequence
    if parts > 1 and (reason := directory.division_unsupported(cfg.model, cfg.data.max_length)):
        raise ConfigError("parallel.sequence = {ranks} cannot be: {reason}.", ranks=parts, reason=reason)
    folder, is_qlora = Path(cfg.model.path), cfg.tuning.method is TuningMethod.qlora
    if cfg.model.init is Init.random or directory.is_trusted(folder):
        return
    try:
        model = load.empty(folder, compared=_is_comparable(folder))
    except NotStreamable:
        if cfg.zero.stage == 3 or cfg.parallel.pipeline > 1 or cfg.parallel.expert > 1 or is_qlora:
            raise
        model = load.empty(folder)
    if tokenizer is not None:
        load.check_vocabulary(model, tokenizer)
    labels = tuple(score_labels(cfg)) or (() if probe.is_classifier(model) else ("0", "1"))  # or those of the data
    if cfg.parallel.pipeline > 1:
        pipeline.stage_parameters(model, cfg.parallel.pipeline, 0, cfg.tuning, len(labels) if cfg.task.has_head else 0)
    elif cfg.parallel.expert > 1:
        experts.check_divides(model, cfg.parallel.expert)
    if not cfg.task.has_head:
        load.check_writes(model, folder)
    elif labels:
        model = classifier.with_head(model, classifier.Head(labels, 0), cfg.run.seed)
    if parts > 1:
        attention.check_splits(model, parts, cfg.parallel.tensor)
    else:
        packed = cfg.data.packing is Packing.packed
        attention.choose_attention(model, cfg.model.attention, packed, load.TORCH_DTYPES[cfg.precision.dtype])
    if is_qlora:  # layers in 4 bits are made of numbers; LoRA finds the same ones
        cfg = replace(cfg, tuning=replace(cfg.tuning, method=TuningMethod.lora))
    adapt(model, cfg, tokenizer, folder)


def _is_comparable(folder: Path) -> bool:
    """Whether the weights' headers tell whether they are the model's; names of quantised ones differ."""
    files = directory.weight_files(folder)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return False
    return "quantization_config" not in directory.read_object(folder / "config.json")
