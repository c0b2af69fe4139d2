"""Whether a model's rows can hold several samples, or be divided over ranks, by its config."""

from inspect import signature
from pathlib import Path
from typing import Any

from toolkit.config.schema import Init, ModelConfig, TuningMethod
from toolkit.messages import say, tr
from toolkit.models.directory import Architecture, architecture_of, is_trusted, read_config
from toolkit.models.load import registered_class, transformers_config


def reason_not_to_pack(model: ModelConfig, max_length: int, tuning: TuningMethod = TuningMethod.full) -> str:
    """Return why rows cannot hold several samples, "" if the model's config allows it."""
    if tuning in (TuningMethod.ptuning_v2, TuningMethod.prompt):
        return tr("what tuning={method} learns stands before a row, not before each sample in it", method=tuning.value)
    if model.init is Init.random:
        return ""
    config = read_config(model.path, with_weights=False)
    if architecture_of(config) is Architecture.v1:
        return tr("ChatGLM-6B finds the positions of a whole row from its one <sop>")
    if config.get("model_type") in _MASKS_OF_ROWS:
        return tr("its attention takes no mask that tells samples of one row apart")
    return _reason_not_to_mix(model, max_length, takes_bounds=True)


def report_grouped(reason: str) -> None:
    """Report that samples are grouped by length instead of packed, and why."""
    say(
        "This model cannot be trained on packed rows: {reason}. Samples of like length share micro-batches instead "
        "(data.packing=grouped).",
        reason=reason,
    )


_MASKS_OF_ROWS = ("openai-gpt", "xlm")
"""Model types (transformers 5.23) whose forward takes no other masks than of padding."""
_PACKABLE = {"full_attention", "mlp", "moe"}
"""Values of `layer_types` (transformers 5.23) for layers in which a mask or bounds keep samples apart."""
_WITHOUT_POSITION_IDS = ("mpt", "whisper")
"""Model types without position_ids in their forward's signature that compute packed samples correctly: MPT's attention
depends on distances alone, and Whisper's decoder takes position_ids all the same."""


def reason_not_to_divide_rows(model: ModelConfig, max_length: int) -> str:
    """Return why rows cannot be divided over ranks, "" if the model's config allows it: tokens may be mixed only by
    attention to all earlier tokens.
    """
    return _reason_not_to_mix(model, max_length, takes_bounds=False)


def _reason_not_to_mix(model: ModelConfig, max_length: int, *, takes_bounds: bool) -> str:
    """Return why a row cannot hold several samples, or parts of them; "" if it can. `max_length`: of a sample;
    `takes_bounds`: whether layers other than attention may be told where samples begin.
    """
    config = {} if model.init is Init.random else _attention_settings(model.path)
    layer_types, window = set(config.get("layer_types") or ["full_attention"]), config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        if window >= max_length:  # the window holds any sample
            layer_types.discard("sliding_attention")
        # Without a list of types the window is that of all layers.
        elif not config.get("layer_types") or "sliding_attention" in layer_types:
            return tr(
                "its attention reaches back {window} tokens only, less than data.max_length = {length}",
                window=window,
                length=max_length,
            )
    if takes_bounds and "linear_attention" in layer_types:
        from toolkit.plan.kernels import kernels_of, missing

        kernels = kernels_of(config)
        if kernels and kernels.packs and not missing(kernels):  # installed kernels that take samples' bounds
            layer_types.discard("linear_attention")
    if mixing := sorted(layer_types - _PACKABLE):
        return tr("it has layers that mix a whole row: {layers}", layers=", ".join(mixing))
    return "" if config.get("takes_positions", True) else tr("its positions run on over a whole row")


def _attention_settings(path: str) -> dict[str, Any]:
    """Return a config's settings of attention as transformers reads them, which knows defaults and older names; and
    `takes_positions`, whether forward takes position_ids.
    """
    config = read_config(path, with_weights=False)
    if architecture_of(config) is not None or is_trusted(Path(path)):
        return config
    model_config = transformers_config(Path(path))
    text, arguments = model_config.get_text_config(decoder=True), signature(registered_class(model_config).forward)
    takes_positions = "position_ids" in arguments.parameters or model_config.model_type in _WITHOUT_POSITION_IDS
    keys = "model_type", "layer_types", "sliding_window", "use_sliding_window"
    settings = {key: getattr(text, key) for key in keys if hasattr(text, key)}
    return settings | {"takes_positions": takes_positions}
