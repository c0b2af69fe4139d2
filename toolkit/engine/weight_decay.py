"""Which parameters of a model are weights that decay, by kind of module."""

import torch

_CONSTANTS = ("A_log", "D")
"""Parameters of state spaces (Mamba, Jamba, Zamba) that are no factors of what they see, though some are matrices."""


def weight_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that `optim.decay=matrices` means: what tokens are multiplied with, in linear
    layers, convolutions, embeddings, routers and experts. A norm's may be a matrix too, with a row for each head
    (Command R+), as may be the biases of a layer's experts (gpt-oss); a vector may have dimensions of size 1 (RWKV).
    """
    names = set()
    for prefix, module in model.named_modules():
        is_layer = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        if not is_layer and "Norm" in type(module).__name__:
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            dimensions = len(shape) if is_layer else sum(size > 1 for size in shape)
            if dimensions >= 2 and "bias" not in attribute and attribute not in _CONSTANTS:
                names.add(f"{prefix}.{attribute}" if prefix else attribute)
    return names
