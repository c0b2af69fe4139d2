"""Tensors in a model's files that transformers' model does not have, such as layers for multi-token prediction.

They are not trained. Exports of the full model copy them unchanged from the directory that the model was loaded from,
and config.json counts their layers as before (`toolkit.export.extra_tensors`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from toolkit.messages import say, tr
from toolkit.models import weights
from toolkit.models.record import EXTRA_TENSORS, record_of

FILE = EXTRA_TENSORS
"""File of a checkpoint that names the directory of such tensors, their types and shapes."""
_COUNT = re.compile(r"num_nextn_predict_layers|num_mtp_(layers|modules)|mtp_num_(hidden_)?layers")
_COMPUTED = re.compile(r"(bias|position_ids|position_index|inv_freq|num_batches_tracked)$")
"""Ends of names of buffers that older versions of transformers stored."""


def record(model: PreTrainedModel, files: weights.WeightFiles, names: Iterable[str]) -> None:
    """Record the tensors `names` of a model's files in `ModelRecord.extra_tensors`, except for buffers."""
    # Layers for prediction may have parameters with such names, such as a router's bias.
    extra_names = [name for name in names if not _COMPUTED.search(name) or is_predicting(name, model.config)]
    tensors = {name: dtype_and_shape(files, name) for name in extra_names}
    if tensors:
        record_of(model).extra_tensors = {"folder": str(files.folder.absolute()), "tensors": tensors}


def report(model: PreTrainedModel, *, copied: bool = True) -> None:
    """Report the extra tensors in one line; `copied`: whether exports will have them."""
    extra = record_of(model).extra_tensors
    assert extra is not None
    names = list(extra["tensors"])
    say(
        "{count} tensors in {folder} are not part of the model that transformers builds ({name}{more}), and are not "
        "trained: {what}.",
        count=len(names),
        folder=extra["folder"],
        name=names[0],
        more=", …" if len(names) > 1 else "",
        what=tr("exports of the whole model copy them") if copied else tr("exports do not have them"),
    )


def is_predicting(name: str, config: Any) -> bool:
    """Whether an extra tensor belongs to a layer for multi-token prediction."""
    return has_predicting_layers([name], getattr(config.get_text_config(), "num_hidden_layers", 0))


def has_predicting_layers(names: Iterable[str], layers: int) -> bool:
    """Whether some names are of layers for multi-token prediction: by words such as mtp, or by the layer number
    `layers`, the first after those of the model's decoder layers, of which there are so many.
    """
    return any(re.search(rf"mtp|nextn|(^|\.)layers\.{layers}\.", name) for name in names)


def predicting_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that count layers for multi-token prediction and are not 0."""
    return [key for key, value in config.items() if _COUNT.fullmatch(key) and isinstance(value, int) and value]


def correct_layer_counts(model: PreTrainedModel) -> None:
    """Set the config's number of layers for multi-token prediction to 0 if the model has none. transformers (5.23)
    skips those of GLM-4.5, DeepSeek-V3 and others at loading, and vLLM and llama.cpp would look for them.
    """
    names = [name for name, _ in model.named_parameters()]
    for config in (model.config, model.config.get_text_config()):  # the same if it is a model of text
        if not has_predicting_layers(names, getattr(config, "num_hidden_layers", 0)):
            for key in predicting_keys(config.to_dict()):
                setattr(config, key, 0)


def dtype_and_shape(files: weights.WeightFiles, name: str) -> list[Any] | None:
    """Return [type, *shape] of a stored tensor, None if there is none of that name."""
    info = files.get(name)
    return None if info is None else [str(info.dtype).removeprefix("torch."), *info.shape]
