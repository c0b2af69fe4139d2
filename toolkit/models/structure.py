"""What a model is made of: its decoder layers, which of its parameters are trained, its routers."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from toolkit.messages import ModelError


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers, first to last."""
    layers: nn.ModuleList = model.get_submodule(decoder_layers_name(model))
    return layers


def decoder_layers_name(model: PreTrainedModel) -> str:
    """Return the name of the ModuleList of a model's decoder layers; ModelError if there is not exactly one."""
    lists = layer_lists(model)
    if len(lists) != 1:
        raise ModelError("{architecture} has no list of decoder layers.", architecture=type(model).__name__)
    return lists[0]


def layer_lists(model: PreTrainedModel) -> list[str]:
    """Return the names of the ModuleLists that hold a model's decoder layers: the one whose length is
    num_hidden_layers, or else all that are not inside another list (HRM has two; LongCat-Flash counts two layers for
    each item).
    """
    number = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    towers = tower_prefixes(model)  # which may have as many layers
    lengths = {name: len(part) for name, part in lists.items() if not name.startswith(towers)}
    if fitting := [name for name, length in lengths.items() if length == number]:
        return [min(fitting, key=len)]  # of several the outermost, whose name is the shortest
    inside_lists = tuple(f"{name}." for name in lengths)
    return [name for name in lengths if not name.startswith(inside_lists)]


def tower_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the name prefixes, such as "model.visual.", of modules that process only images and sound; () without."""
    modules, embedding = dict(model.named_modules()), model.get_input_embeddings()
    tower_names = []
    for name, part in modules.items():  # inner models that take no text
        if isinstance(part, PreTrainedModel) and "text" not in part.input_modalities:
            # Each with what is around it: the outermost module that does not hold the embedding of text, too.
            path = name.split(".")
            around = [".".join(path[:depth]) for depth in range(1, len(path))]  # the outermost first
            tower_names.append(next((outer for outer in around if embedding not in modules[outer].modules()), name))
    tower_names += [name for name in modules if name.endswith(_PROJECTIONS)]
    if model.config.get_text_config() is not model.config:  # a multimodal wrapper: everything but its text model
        text_modules = {model.get_decoder(), model.get_output_embeddings()}
        without_text = [part for part in model.base_model.children() if text_modules.isdisjoint(part.modules())]
        tower_names += [name for name, part in modules.items() if part in without_text]
    return tuple(f"{name}." for name in dict.fromkeys(tower_names))


_PROJECTIONS = ("git.visual_projection",)
"""Ends of names (transformers 5.23) of what brings images into a text model, next to its embedding."""


def trained_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def routers_in(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return by name the modules whose first output transformers records as router_logits."""
    routers: dict[str, nn.Module] = {}
    for prefix, part in model.named_modules():
        recorders = getattr(part, "_can_record_outputs", None) if isinstance(part, PreTrainedModel) else None
        recorder = (recorders or {}).get("router_logits")
        if isinstance(recorder, OutputRecorder) and recorder.index == 0:
            # Only modules with this in their path count, such as ".mlp.gate."; "." is in all.
            layer = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
            for name, module in part.named_modules():
                is_router = isinstance(module, recorder.target_class) and layer in f".{name}."
                if is_router and module not in routers.values():
                    routers[f"{prefix}.{name}"] = module
    return routers
