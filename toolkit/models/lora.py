"""LoRA, through peft, in place; and QLoRA, whose frozen weights are in 4 bits.

Hu et al. 2021, https://arxiv.org/abs/2106.09685; rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732; DoRA:
Liu et al. 2024, https://arxiv.org/abs/2402.09353. QLoRA, NF4 with double quantisation, by bitsandbytes: Dettmers et al.
2023, https://arxiv.org/abs/2305.14314.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.config.schema import TuningConfig
from toolkit.distributed import process_group
from toolkit.messages import ConfigError, ModelError, say, silent, warn
from toolkit.models import adapter_settings, experts, linear_layers, structure
from toolkit.models.base_model import fingerprint_of
from toolkit.models.record import record_of
from toolkit.plan.tuning_targets import ALL_LINEAR, default_targets, matching_names, select_names

ADAPTER = "default"
_MERGE_WARNINGS = r"`lora_bias=True` was passed|Model has `tie_word_embeddings=True`"
"""Pattern of peft's warnings (0.21) about what it cannot merge; `toolkit.export.merge` can."""


def inject_lora(model: PreTrainedModel, config: LoraConfig, ds_config: dict[str, Any] | None) -> None:
    """Add untrained LoRA matrices to a model; they and `modules_to_save` alone stay trainable. With `ds_config`, the
    DeepSpeed dict, a collective if parameters are partitioned. ModelError or ConfigError for unsupported layers.
    """
    precision = model.dtype
    with ExitStack() as stack:
        if ds_config is not None and any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
            from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

            # peft (0.21) gathers partitioned weights if transformers knows of a ZeRO-3 config, to which transformers
            # has a weak reference: the local variable keeps it.
            _config = HfDeepSpeedConfig(ds_config)
            stack.callback(unset_hf_deepspeed_config)
        stack.enter_context(experts.pretend_full_expert_shapes(model))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _MERGE_WARNINGS)
        if config.trainable_token_indices:
            from toolkit.models import token_rows

            stack.enter_context(token_rows.gathered_on_any_device())
        try:
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:  # layers that peft does not support
            raise ModelError(
                "peft cannot add this LoRA to {architecture}: {reason} Name other layers (tuning.target_modules), or "
                "use tuning=full or tuning=freeze.",
                architecture=type(model).__name__,
                reason=str(error).partition("\n")[0],
            ) from error
    experts.attach_lora(model, ADAPTER)
    if config.trainable_token_indices:
        token_rows.compute_apart(model)
    for name, part in model.named_modules():
        if isinstance(part, AuxiliaryTrainingWrapper) and any(map(process_group.is_expert_part, part.parameters())):
            raise ConfigError(
                "tuning.save_modules: {name} holds experts, which parallel.expert divides over ranks. Add LoRA to them "
                "(tuning.target_modules=[experts.down_proj]), or set parallel.expert=1.",
                name=name,
            )
    for parameter in model.parameters():  # peft makes LoRA matrices of half-precision models in float32
        if parameter.requires_grad and not hasattr(parameter, "ds_shape"):
            parameter.data = parameter.data.to(precision)


def trained_rows(model: PreTrainedModel, save_modules: list[str]) -> dict[str, list[int]]:
    """Return peft's `trainable_token_indices` for the tokens that `model.add_tokens` gave to a model: the rows of its
    embedding and output layer; {} without such tokens, or if one of these layers is trained in full.
    """
    ids = record_of(model).added_token_ids
    tables = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    if len(tables) == 2 and tables[0].weight is tables[1].weight:  # tied: the same rows
        tables.pop()
    names = [name for name, part in model.named_modules() if any(part is table for table in tables)]
    return {name: ids for name in names} if ids and not select_names(names, save_modules) else {}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Disable a model's LoRA matrices and `modules_to_save`, so that it computes what the base model computes.

    Not by peft's `enable_adapters` (0.21, tuners/tuners_utils.py), which also changes requires_grad, unknown to
    DeepSpeed's hooks.
    """
    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled


def quantize(model: PreTrainedModel) -> None:
    """Quantize all decoder layers of a model that have values; see `quantize_layer`."""
    for name, _ in list(model.named_parameters()):
        quantize_layer(model, name)
    experts.use_sorted_experts(model)
    model.is_loaded_in_4bit = True  # asked for by peft 0.21


def quantize_layer(model: PreTrainedModel, name: str) -> None:
    """Quantize the linear layer that a parameter is in, or the experts that it is, to 4 bits on this rank's device;
    does nothing if that is done, if values are missing, or outside the decoder layers. A collective for divided ones.
    """
    if not linear_layers.layer_of(name, structure.layer_lists(model)):
        return
    import bitsandbytes
    from deepspeed.accelerator import get_accelerator  # takes seconds to import

    device = torch.device(get_accelerator().current_device_name())
    path, parameter = name.rpartition(".")[0], model.get_parameter_or_buffer(name)
    if not isinstance(parameter, nn.Parameter):  # a router's bias
        return
    layer, is_stacked = model.get_submodule(path), experts.is_stacked(name, parameter)
    if is_stacked and not model._can_set_experts_implementation():  # their code cannot be replaced by one for 4 bits
        return
    needed = [parameter] if is_stacked else list(layer.parameters(recurse=False))
    # Parameters of other pipeline stages stay on the meta device.
    if any(tensor.is_meta or hasattr(tensor, "quant_state") for tensor in needed):
        return
    if is_stacked:
        numbers = fingerprint_of(parameter)
        experts.quantize_matrices(layer, name, device).fingerprint = numbers
    elif isinstance(layer, nn.Linear) and not linear_layers.with_weight_read_directly(model, {path}):
        quantized = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,  # not model.dtype, which is wrong before the first parameter is read
            compress_statistics=True,
            quant_type="nf4",
        )
        # On some CPUs bitsandbytes (0.50) would repack weights in evaluation, after which training fails.
        quantized.support_avx512bf16_for_cpu = False
        quantized.load_state_dict(layer.state_dict())
        model.set_submodule(path, quantized.to(device))
        quantized.weight.fingerprint = fingerprint_of(layer.weight)


def choose_targets(model: PreTrainedModel, config: TuningConfig) -> tuple[list[str], list[str]]:
    """Return peft's `target_modules`, as ends of names if these select the same layers, and its `target_parameters`
    (matrices of experts); report layers that get no LoRA. ConfigError for settings that cannot be.
    """
    patterns, chosen, of_experts = _select_layers(model, config.target_modules)
    for key, value in (("tuning.dropout", config.dropout), ("tuning.dora", config.dora)):
        if of_experts and value:
            raise ConfigError(
                "{key} = {value} cannot be: peft has it for linear layers alone, and {name} is a tensor of all "
                "experts. Leave it out, or the experts (tuning.target_modules).",
                key=key,
                value=value,
                name=of_experts[0],
            )
    left_out = _unsupported_targets(model, chosen, has_others=bool(of_experts))
    chosen = chosen - left_out
    lists, modules = structure.layer_lists(model), [name for name, _ in model.named_modules()]
    layers = {name: linear_layers.layer_of(name, lists) for name in (*chosen, *of_experts)}  # target -> decoder layer
    reached = {*layers.values()} - {""}  # "": a target outside the decoder layers
    total = sum(name.rpartition(".")[0] in lists for name in modules)  # items of the lists of decoder layers
    if len(reached) < total:
        say("LoRA reaches {count} of {total} layers (tuning.target_modules).", count=len(reached), total=total)
    # adapter_config.json has short names where they select just these layers: the patterns, or else ends of names.
    patterns = [pattern for pattern in patterns if not select_names(left_out, [pattern])]
    ends = sorted({name.removeprefix(f"{layers[name]}.") for name in chosen})
    has_wildcards = any(sign in pattern for pattern in patterns for sign in "*?[")  # unknown to peft
    if not of_experts and not has_wildcards:
        for short_names in (patterns, ends):  # peft matches them against all modules
            if {*select_names(modules, short_names)} == chosen:
                return short_names, []
    return sorted(chosen), of_experts


def _unsupported_targets(model: PreTrainedModel, chosen: set[str], has_others: bool) -> set[str]:
    """Return the chosen layers to which LoRA cannot be added, with a warning; ConfigError if no target is left.
    `has_others`: whether there are targets besides `chosen`.
    """
    misplaced = adapter_settings.misplaced_by_peft(model, chosen)
    if misplaced:
        if misplaced == chosen and not has_others:
            raise ConfigError(
                "tuning.target_modules: peft would load LoRA on {name} into another layer, or into none. Name the "
                "experts (experts.down_proj), or layers of the attention.",
                name=min(misplaced),
            )
        warn(
            "LoRA leaves out {count} linear layers, such as {name}: peft would load it into other layers or into none.",
            count=len(misplaced),
            name=min(misplaced),
        )
    if bypassed := linear_layers.with_weight_read_directly(model, chosen - misplaced):
        if bypassed | misplaced == chosen and not has_others:
            raise ConfigError(
                "tuning.target_modules: LoRA on {name} would do nothing: the model's code reads the weight past the "
                "layer. Name other layers.",
                name=min(bypassed),
            )
        warn(
            "LoRA leaves out {count} linear layers, such as {name}: the model's code reads their weights past them.",
            count=len(bypassed),
            name=min(bypassed),
        )
    return misplaced | bypassed


def linear_targets(model: PreTrainedModel, patterns: list[str]) -> list[str]:
    """Return the names of the linear layers that LoRA is added to, of patterns as in `tuning.target_modules`."""
    _, chosen, _ = _select_layers(model, patterns)
    with silent():
        return sorted(chosen - _unsupported_targets(model, chosen, has_others=True))


def _select_layers(model: PreTrainedModel, patterns: list[str]) -> tuple[list[str], set[str], list[str]]:
    """Return patterns of the ends of names, and the names of the linear layers and of the matrices of experts that are
    chosen: those that `patterns` match. Without patterns they are query, key and value; in a hybrid all linear layers
    of the blocks that mix tokens, for which no patterns are returned; in an unknown model every linear layer.
    ConfigError for a pattern without a match.
    """
    linear, mixing = linear_layers.linear_layers(model), linear_layers.mixing_layers(model)
    defaults = [] if patterns else default_targets(model.config.model_type, linear)
    if ALL_LINEAR in (*patterns, *defaults):
        return sorted({name.rpartition(".")[2] for name in linear}), linear, []
    if defaults:
        return ([], mixing, []) if mixing else (defaults, {*select_names(linear, defaults)}, [])
    kinds, towers = (nn.Linear, nn.Embedding, Conv1D), structure.tower_prefixes(model)
    fitting = [name for name, part in model.named_modules() if isinstance(part, kinds) and not name.startswith(towers)]
    stacked = experts.expert_matrix_names(model)
    for pattern in patterns:
        matching_names("tuning.target_modules", pattern, {*fitting, *stacked})
    return patterns, {*select_names(fitting, patterns)}, sorted(select_names(stacked, patterns))
