"""LoRA, QLoRA and training some layers: which parts of a model are trained, and how.

LoRA comes through peft, put into the model in place: its class, and all that knows it, stays. Hu et al. 2021,
https://arxiv.org/abs/2106.09685; rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732; DoRA: Liu et al. 2024,
https://arxiv.org/abs/2402.09353. QLoRA's frozen weights have 4 bits (NF4, double quantisation), through bitsandbytes.
Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.schema import TuningConfig
from toolkit.errors import ConfigError
from toolkit.plan.parameters import ALL_LINEAR, check_matches, default_targets, select_names


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers, first to last."""
    layers: nn.ModuleList = model.get_submodule(decoder_layers_name(model))
    return layers


def decoder_layers_name(model: PreTrainedModel) -> str:
    """Return the name of the list of a model's decoder layers."""
    number = model.config.num_hidden_layers
    found = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == number]
    return min(found, key=len)


def arguments_by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a forward pass by name."""
    return dict(zip(_argument_names(type(model).forward), args, strict=False)) | kwargs


@cache
def _argument_names(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def num_cached(kwargs: dict[str, Any]) -> int:
    """Return how many places the cache of a forward pass holds already."""
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def mask_and_positions(kwargs: dict[str, Any], ids: torch.Tensor, num_before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention mask and the positions of a forward pass that something learned precedes.

    `kwargs` are the pass's arguments; what they leave out is made as transformers makes it. `ids` are `[B, S]`, or
    embeddings `[B, S, H]`. The mask has ones for `num_before` learned tokens in front; positions do not count them.
    """
    rows, size = ids.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        earlier = max(num_cached(kwargs) - num_before, 0)
        mask = torch.ones(rows, earlier + size, dtype=torch.long, device=ids.device)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -size:]
    return torch.cat((mask.new_ones(rows, num_before), mask), dim=1), positions


def freeze(model: PreTrainedModel, config: TuningConfig) -> None:
    """Leave trainable the last layers, and the parameters that the patterns name."""
    number = len(decoder_layers(model))
    if config.last_layers > number:
        raise ConfigError(
            "tuning.last_layers = {value}, but the model has {number} layers.",
            value=config.last_layers,
            number=number,
        )
    names = [name for name, _ in model.named_parameters()]
    layers = decoder_layers_name(model)
    last = tuple(f"{layers}.{index}." for index in range(number - config.last_layers, number))
    trained = {name for name in names if name.startswith(last)}
    for pattern in config.patterns:
        trained.update(check_matches("tuning.patterns", pattern, names))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


ADAPTER = "default"


def lora_config(model: PreTrainedModel, config: TuningConfig, base: str) -> LoraConfig:
    """Return peft's settings for a model."""
    modules = {name for name, part in model.named_modules() if next(part.parameters(recurse=False), None) is not None}
    for name in config.save_modules:
        check_matches("tuning.save_modules", name, modules)
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        target_modules=_targets(model, config.target_modules),
        modules_to_save=config.save_modules or None,
    )


def inject_lora(model: PreTrainedModel, config: LoraConfig, ds_config: dict[str, Any] | None) -> None:
    """Put untrained additions into a model; only they, and the modules saved whole, stay trainable."""
    precision = model.dtype
    with ExitStack() as stack:
        if ds_config is not None and any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
            from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

            # peft (0.21) gathers partitioned weights where it reads them, if transformers says that they are. A local
            # name keeps the config, to which transformers has a weak reference.
            _config = HfDeepSpeedConfig(ds_config)
            stack.callback(unset_hf_deepspeed_config)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for parameter in model.parameters():  # peft keeps additions to half-precision models in float32
        if parameter.requires_grad and not hasattr(parameter, "ds_shape"):
            parameter.data = parameter.data.to(precision)


def _targets(model: PreTrainedModel, patterns: list[str]) -> list[str]:
    """Return the names, or ends of names, of the layers that get additions."""
    layers = f"{decoder_layers_name(model)}."
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name.startswith(layers)}
    patterns = patterns or default_targets(model.config.model_type, linear)
    if ALL_LINEAR in patterns:
        return sorted({name.rpartition(".")[2] for name in linear})
    fitting = {name for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Embedding)}
    for pattern in patterns:
        check_matches("tuning.target_modules", pattern, fitting)
    if not any(sign in pattern for pattern in patterns for sign in "*?["):
        return patterns
    return sorted(select_names(fitting, patterns))


def parameter_of(layer: Any) -> str:
    """Return what the parameter is called that one of peft's layers adds to."""
    name: str = getattr(layer, "parameter_name", "weight")
    return name


def merge_lora(layer: Any, weight: torch.Tensor, trained: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a layer's weight with its additions in it, computed in float32.

    `trained`: the additions, by their names in the layer, which is on the meta device and stays there.
    """
    base, own = layer.get_base_layer(), parameter_of(layer)
    empty = base.get_parameter(own)
    setattr(base, own, nn.Parameter(weight.float(), requires_grad=False))
    before = {name: layer.get_parameter(name) for name in trained}
    for name, value in trained.items():
        _set_parameter(layer, name, nn.Parameter(value.float(), requires_grad=False))
    layer.merge(safe_merge=True)
    found = base.get_parameter(own).detach()
    layer.merged_adapters.clear()
    setattr(base, own, empty)
    for name, parameter in before.items():
        _set_parameter(layer, name, parameter)
    return found


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    if isinstance(part, nn.ParameterDict):
        part[leaf] = parameter
    else:
        setattr(part, leaf, parameter)


def quantize(model: PreTrainedModel) -> None:
    """Put the linear layers of a model's decoder on the GPU in 4 bits, one after another; embedding and head stay."""
    import bitsandbytes

    device = torch.device("cuda", torch.cuda.current_device())
    for layer in decoder_layers(model):
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            small = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=model.dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
            small.load_state_dict(linear.state_dict())
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, small.to(device))
    model.is_loaded_in_4bit = True  # asked for by peft 0.21
