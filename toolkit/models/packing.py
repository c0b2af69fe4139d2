"""Which models can be trained on packed rows, known from their config before anything is loaded."""

from toolkit.config.schema import Init, ModelConfig, TuningMethod
from toolkit.messages import tr
from toolkit.models.chatglm.family import Architecture, architecture_of
from toolkit.models.folder import read_config

_WHOLE = "full_attention"


def why_not_packed(model: ModelConfig, max_length: int, tuning: TuningMethod = TuningMethod.full) -> str:
    """Return why a model cannot be trained on packed rows, "" if nothing speaks against it.

    Whether samples really do not see each other is measured on the loaded model; see `attention.check_isolation`.

    Args:
        model: the recipe's section.
        max_length: tokens of a row.
        tuning: which parameters are trained.

    Raises:
        ModelError: the model folder cannot be read.
    """
    if tuning in (TuningMethod.ptuning_v2, TuningMethod.prompt):
        return tr("what tuning={method} learns stands before a row, not before each sample in it", method=tuning.value)
    if model.init is Init.random:
        return ""
    return _why_not(model, max_length)


def why_not_in_parts(model: ModelConfig, max_length: int) -> str:
    """Return why rows of a model cannot be divided over ranks, "" if nothing in its config speaks against it.

    What the loaded model says to it is seen by `toolkit.models.sequence`.

    Args:
        model: the recipe's section.
        max_length: tokens of a row.

    Raises:
        ModelError: the model folder cannot be read.
    """
    return "" if model.init is Init.random else _why_not(model, max_length)


def _why_not(model: ModelConfig, max_length: int) -> str:
    """Return what in a model folder's config mixes the tokens of a row otherwise than by causal attention."""
    config = read_config(model.path)
    if architecture_of(config) is Architecture.v1:
        return tr("ChatGLM-6B finds the positions of a whole row from its one <sop>")
    layers = set(config.get("layer_types") or [_WHOLE])
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        if window >= max_length:
            layers.discard("sliding_attention")
        elif "layer_types" not in config or "sliding_attention" in layers:
            return tr(
                "its attention reaches back {window} tokens only, less than data.max_length = {length}",
                window=window,
                length=max_length,
            )
    others = sorted(layers - {_WHOLE})
    return tr("it has layers that mix a whole row: {layers}", layers=", ".join(others)) if others else ""
