"""Tensor parallelism (`parallel.tensor`): matrices are split over ranks by DeepSpeed's AutoTP, with what it lacks; an
import puts it there.
"""

from copy import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from deepspeed.module_inject import layers
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel

from toolkit.config import tensor_split
from toolkit.distributed import process_group
from toolkit.engine.ds_config import for_split_stage, tensor_ranks

_REGISTER, _REPLACE = AutoTP.register_replicated_grad_hooks, AutoTP._replace_with_config


def _register_hooks(autotp: AutoTP, model: torch.nn.Module) -> None:
    """Register AutoTP's hooks for what is trained: PyTorch rejects others (0.19.8, module_inject/auto_tp.py)."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    _REGISTER(autotp, SimpleNamespace(named_parameters=lambda: trained))


def _replace_inside(autotp: AutoTP, child: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """Split a layer, and return what takes its place. Of peft's layers split what is within them: AutoTP takes each for
    a matrix, as it has a `weight` (0.19.8, peft 0.21).
    """
    if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
        replaced = autotp._replace_module(child, name)
        _split_magnitudes(child, name)
        return replaced
    if hasattr(child.weight, "quant_state"):  # bitsandbytes' 4 bits
        return _split_4bit(child, f"{name}.weight")
    return _REPLACE(autotp, child, name)


class _SplitDora(DoraLinearLayer):
    """DoRA's part of a matrix that is split: norms are of whole rows, which `split` columns have parts of.

    peft (0.21) takes LoRA's product from the layers, which here exchange what is no part of a matrix, and multiplies
    with the matrix itself where there is dropout.
    """

    split: tensor_split.Split

    @torch.no_grad()
    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:  # noqa: N803
        product: torch.Tensor = lora_B.weight @ lora_A.weight
        return product

    @torch.no_grad()
    def get_weight_norm(
        self, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, adapter_name: str | None = None
    ) -> torch.Tensor:
        """Return the norm of each row of the matrix with LoRA's product, over all ranks that have parts of the row."""
        norm = torch.linalg.vector_norm(weight + scaling * lora_weight, dim=1, dtype=torch.float32)
        if self.split is tensor_split.Split.columns:
            squares = norm.square()
            torch.distributed.all_reduce(squares, group=process_group.tensor_group())
            norm = squares.sqrt()
        return norm.to(weight.dtype)

    def forward(
        self, x: torch.Tensor, *, base_layer: Any, base_result: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Return what DoRA adds to the layer's output, which it must get without a bias: peft knows of `bias` alone."""
        result = base_layer(x) if base_result is None else base_result
        if (added := getattr(base_layer, "added_bias", None)) is not None:
            result = result - added
        output: torch.Tensor = super().forward(x, base_layer=base_layer, base_result=result, **options)
        return output


def _split_magnitudes(layer: torch.nn.Module, name: str) -> None:
    """Split what DoRA has beside a split matrix: a number (magnitude) for each of its rows, in each adapter."""
    split = tensor_split.split_of(f"{name}.base_layer.weight")
    if split is None:  # the matrix is whole on all ranks
        return
    rank, size = process_group.tensor_rank(), process_group.tensor_group_size()
    magnitudes = getattr(layer, "lora_magnitude_vector", {})  # {} without DoRA
    for adapter, magnitude in list(magnitudes.items()):
        part: Any = _SplitDora(magnitude.fan_in_fan_out)
        part.split, part.weight = split, magnitude.weight
        if split is not tensor_split.Split.columns:  # with columns each rank has a piece of every row
            stored_name = f"{name}.lora_magnitude_vector.{adapter}.weight"
            own_rows = process_group.take_part(stored_name, magnitude.weight.data, rank, size)
            part.weight.data = own_rows.contiguous()
            part.weight.tensor_model_parallel = True
        magnitudes[adapter] = part


def _split_4bit(layer: Any, name: str) -> torch.nn.Module:
    """Return this rank's part of a layer that bitsandbytes (0.50) has in 4 bits, AutoTP's collectives around it.

    The weight is dequantized, cut and quantized again. Nothing is lost where a part holds whole blocks of 64 numbers,
    as the largest of each block is one of the 16 codes exactly. Scales stay in float32 (4.5 bits a weight in place of
    4.13): quantizing them again would change them.
    """
    from bitsandbytes import functional, nn

    split, group = tensor_split.split_of(name), process_group.tensor_group()
    if split is None:  # it is whole on all ranks
        return layer
    weight, rank, size = layer.weight, process_group.tensor_rank(), process_group.tensor_group_size()
    state = copy(weight.quant_state)
    state.dtype = torch.float32  # bf16 would round the scales
    value = functional.dequantize_4bit(weight.data, state)
    value = process_group.take_part(name, value, rank, size).contiguous()
    part = nn.Linear4bit(*reversed(value.shape), bias=False, compute_dtype=layer.compute_dtype, quant_type="nf4")
    part.weight = nn.Params4bit(value.cpu(), requires_grad=False, compress_statistics=False, quant_type="nf4")
    part.support_avx512bf16_for_cpu = False  # see `lora.quantize_layer`: weights would be repacked in evaluation
    part = part.to(weight.device)  # which quantizes
    part.weight.quant_state.dtype = weight.quant_state.dtype
    part.weight.tensor_model_parallel = True
    bias = layer.bias
    if split is tensor_split.Split.columns:  # each rank's output is a summand

        def add_up(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            output = layers.RowParallel.apply(group, output, False)
            return output if bias is None else output + bias

        part.register_forward_hook(add_up)
        part.added_bias = bias
        return part
    # Rows: each rank's output is a piece, with the bias of its rows.
    if bias is not None:
        own_bias = process_group.take_part(name.removesuffix("weight") + "bias", bias.data, rank, size)
        part.bias = torch.nn.Parameter(own_bias.contiguous(), requires_grad=False)
        part.bias.tensor_model_parallel = True

    def sum_input_gradients(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (layers.ColumnParallel.apply(group, inputs[0]),)  # the inputs as they are, with gradients summed

    part.register_forward_pre_hook(sum_input_gradients)
    return part


AutoTP.register_replicated_grad_hooks, AutoTP._replace_with_config = _register_hooks, _replace_inside


def tensor_groups(model: PreTrainedModel, ds_config: dict[str, Any]) -> ModuleType:
    """Return DeepSpeed's module `groups`, which from here on knows a rank's place where layers are split over ranks.

    Without it DeepSpeed 0.19.8 divides the global batch by all ranks (runtime/config.py).
    """
    size = tensor_ranks(ds_config)
    check_split(model, size)
    groups._init_tp_mesh_device(size)
    if (prefix := getattr(model, "prefix_encoder", None)) is not None:
        prefix.tensor_size = size
    return groups


def split_stage(module: PipelineModule, model: PreTrainedModel, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Split the layers that a pipeline's stage holds; return the config without its section about that.

    DeepSpeed 0.19.8 would take ranks of other stages for data-parallel ones (engine._configure_tensor_parallel_states).
    """
    section = ds_config["tensor_parallel"]
    size, group = tensor_ranks(ds_config), module.mpu().get_slice_parallel_group()
    check_split(model, size)
    groups._TENSOR_MODEL_PARALLEL_GROUP = group
    layers.set_autotp_mode(training=True)
    autotp = AutoTP(
        module=model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(torch.nn.Linear, torch.nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig.from_dict(section["partition_config"]),
        model_config=model.config,
        training_mode=True,
    )
    autotp.set_tensor_parallel_config(size, group)
    autotp.update_linear_policies()
    autotp._replace_module(model)
    autotp.register_replicated_grad_hooks(model)
    # Of what all ranks have in full, the norm counts the first rank's gradient.
    for parameter in (each for each in module.parameters() if each.requires_grad):
        parameter.model_parallel &= process_group.tensor_rank() == 0 or process_group.is_tensor_part(parameter)
    return for_split_stage(ds_config)


def check_split(model: PreTrainedModel, size: int) -> None:
    """Raise ConfigError unless `size` ranks divide what is split of a model: heads, and the feed-forward width."""
    config = model.config
    sizes = {"model_type": config.model_type}
    if config.model_type in tensor_split.FAMILIES:  # others are rejected by their type, and may lack these keys
        heads = config.num_attention_heads
        sizes |= {"heads": heads, "key_heads": getattr(config, "num_key_value_heads", None) or heads}
        # ChatGLM-6B has its own name of the feed-forward width.
        sizes["inner"] = getattr(config, "intermediate_size", None) or getattr(config, "inner_hidden_size", 0)
    tensor_split.check_split(sizes, size)
