"""What is in a model's files beside the model that transformers builds, such as layers for multi-token prediction.

It is not trained. Whole exports copy it bit for bit from the directory that the model was loaded from, and config.json
counts it as before (`toolkit.export.extra_tensors`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from toolkit.messages import say, tr
from toolkit.models import weights

FILE = "extra_tensors.json"
"""In a checkpoint's description of its model: the directory that holds such tensors, and their types and shapes."""
_COUNT = re.compile(r"num_nextn_predict_layers|num_mtp_(layers|modules)|mtp_num_(hidden_)?layers")
_COMPUTED = re.compile(r"(bias|position_ids|position_index|inv_freq|num_batches_tracked)$")
"""How the names of buffers end that older versions of transformers stored."""


def note(model: PreTrainedModel, files: weights.WeightFiles, names: Iterable[str]) -> None:
    """Remember which tensors of a model's files, by `names`, are none of the model's."""
    names = [name for name in names if not _COMPUTED.search(name) or is_predicting(name, model.config)]
    tensors = {name: describe(files, name) for name in names}
    if tensors:
        model.extra_tensors = {"folder": str(files.folder.absolute()), "tensors": tensors}


def tell(model: PreTrainedModel, *, copied: bool = True) -> None:
    """Name what a model's files hold beside it, in one line."""
    names = list(model.extra_tensors["tensors"])
    say(
        "{count} tensors in {folder} are not part of the model that transformers builds ({name}{more}), and are not "
        "trained: {what}.",
        count=len(names),
        folder=model.extra_tensors["folder"],
        name=names[0],
        more=", …" if len(names) > 1 else "",
        what=tr("exports of the whole model copy them") if copied else tr("exports do not have them"),
    )


def is_predicting(name: str, config: Any) -> bool:
    """Return whether a tensor that the model does not read is of a layer for multi-token prediction."""
    return has_predicting_layers([name], getattr(config.get_text_config(), "num_hidden_layers", 0))


def has_predicting_layers(names: Iterable[str], layers: int) -> bool:
    """Return whether weights, by name, hold layers for multi-token prediction beyond the model's own `layers`."""
    return any(re.search(rf"mtp|nextn|(^|\.)layers\.{layers}\.", name) for name in names)


def predicting_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that count such layers, and do not say 0."""
    return [key for key, value in config.items() if _COUNT.fullmatch(key) and isinstance(value, int) and value]


def count_layers(model: PreTrainedModel) -> None:
    """Set the config's number of layers for multi-token prediction to 0 if the model has none. transformers (5.23)
    skips those of GLM-4.5, DeepSeek-V3 and others at loading, and vLLM and llama.cpp would look for them.
    """
    names = [name for name, _ in model.named_parameters()]
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        if not has_predicting_layers(names, getattr(config, "num_hidden_layers", 0)):
            for key in predicting_keys(config.to_dict()):
                setattr(config, key, 0)


def describe(files: weights.WeightFiles, name: str) -> list[Any] | None:
    """Return type and shape of a stored tensor as they are recorded; None if there is none."""
    info = files.get(name)
    return None if info is None else [str(info.dtype).removeprefix("torch."), *info.shape]
