"""LoRA through peft, put into the model in place: its class, and all that knows it, stays.

Hu et al. 2021, https://arxiv.org/abs/2106.09685; rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732; DoRA:
Liu et al. 2024, https://arxiv.org/abs/2402.09353.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.schema import TuningConfig
from toolkit.models.tuning.layers import decoder_layers_name
from toolkit.plan.parameters import ALL_LINEAR, check_matches, default_targets, select_names

ADAPTER = "default"


def lora_config(model: PreTrainedModel, config: TuningConfig, base: str) -> LoraConfig:
    """Return peft's settings for a model.

    Args:
        model: as loaded.
        config: `tuning`.
        base: folder of the model, for adapter_config.json.

    Raises:
        ConfigError: target_modules or save_modules match nothing.
    """
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        target_modules=_targets(model, config.target_modules),
        modules_to_save=_saved(model, config.save_modules) or None,
    )


def inject(model: PreTrainedModel, config: LoraConfig, ds_config: dict[str, Any] | None) -> None:
    """Put untrained additions into a model; only they, and the modules saved whole, stay trainable.

    Args:
        model: as loaded; its parameters may be partitioned or on the meta device.
        config: peft's settings.
        ds_config: the DeepSpeed dict if the parameters are partitioned.
    """
    precision = model.dtype
    is_partitioned = any(hasattr(parameter, "ds_shape") for parameter in model.parameters())
    with _partitioning_known(ds_config if is_partitioned else None):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for parameter in model.parameters():  # peft keeps additions to half-precision models in float32
        if parameter.requires_grad and not hasattr(parameter, "ds_shape"):
            parameter.data = parameter.data.to(precision)


@contextmanager
def _partitioning_known(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Let peft gather partitioned weights where it reads them: it asks transformers whether they are (peft 0.21)."""
    if ds_config is None:
        yield
        return
    from transformers.integrations.deepspeed import (
        HfDeepSpeedConfig,
        unset_hf_deepspeed_config,
    )

    known = HfDeepSpeedConfig(ds_config)  # kept by a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del known


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


def _saved(model: PreTrainedModel, names: list[str]) -> list[str]:
    modules = {name for name, part in model.named_modules() if next(part.parameters(recurse=False), None) is not None}
    for name in names:
        check_matches("tuning.save_modules", name, modules)
    return names


def parameter_of(layer: Any) -> str:
    """Return what the parameter is called that one of peft's layers adds to."""
    name: str = getattr(layer, "parameter_name", "weight")
    return name


def merged(layer: Any, weight: torch.Tensor, trained: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a layer's weight with its additions in it, computed in float32.

    Args:
        layer: peft's, on the meta device; left there.
        weight: its own weight.
        trained: the additions, by their names in the layer.
    """
    base, own = layer.get_base_layer(), parameter_of(layer)
    empty = base.get_parameter(own)
    setattr(base, own, nn.Parameter(weight.float(), requires_grad=False))
    before = {name: layer.get_parameter(name) for name in trained}
    for name, value in trained.items():
        _set(layer, name, nn.Parameter(value.float(), requires_grad=False))
    layer.merge(safe_merge=True)
    found = base.get_parameter(own).detach()
    layer.merged_adapters.clear()
    setattr(base, own, empty)
    for name, parameter in before.items():
        _set(layer, name, parameter)
    return found


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    place = module.get_submodule(owner)
    if isinstance(place, nn.ParameterDict):
        place[leaf] = parameter
    else:
        setattr(place, leaf, parameter)
