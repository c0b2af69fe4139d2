"""A forward pass in the memory of one layer: weights are read from their files when they are used, and dropped."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.models import weights
from toolkit.models.load import opened


def streamed_model(path: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a folder's model that reads a layer's weights when the layer is called, and drops them afterwards.

    For a few forward passes, since each reads all files. Parameters that are not there are NaN without memory of their
    own: a model that uses a layer's weights elsewhere gives NaN.
    """
    model, files, layout = opened(path)
    weights.check_weights_fit(model, files, layout, Path(path))
    shapes = weights.shapes_of(model)
    kept = {name: files[name].dtype for name in files}
    dtypes = {
        target: dtype if dtype and known.is_floating_point else known
        for name, known in kept.items()
        for target in layout.parameters(name)
    }
    tied = getattr(model, "all_tied_weights_keys", None) or {}

    def read(names: dict[str, str]) -> None:
        """Set the parameters `names` to the values of those that they are tied to, or their own."""
        found = dict(weights.stored_values(files, layout, shapes, {*names.values()}))
        for name, source in names.items():
            weights.set_value(model, name, found[source].to(dtypes[source]).contiguous())

    def drop(names: dict[str, str]) -> None:
        for name, source in names.items():
            nothing = torch.full((), torch.nan, dtype=dtypes[source])
            weights.set_value(model, name, nothing.expand(shapes[source]))
        weights.return_memory()

    rest = {name: name for name in shapes}
    for prefix, unit in _units(model):
        stored = [f"{prefix}.{name}" for name in unit.state_dict(keep_vars=True)]
        names = {name: tied.get(name, name) for name in stored if tied.get(name, name) in shapes}
        for name in names:
            rest.pop(name, None)
        if names:
            drop(names)
            unit.register_forward_pre_hook(lambda *_, names=names: read(names))
            unit.register_forward_hook(lambda *_, names=names: drop(names))
    read(rest)
    weights.compute_buffers(model)
    return model.eval()


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what is read at once, with its name: items of the outermost lists, embeddings and matrices next to them."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        inside = [one for one in lists if name.startswith(f"{one}.")]
        is_layer = inside == [parent]
        if is_layer or (not inside and isinstance(module, nn.Embedding | nn.Linear)):
            yield name, module
