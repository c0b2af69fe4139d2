"""Print shapes and activation sizes of a model directory as JSON: `python -m toolkit.models.outline DIR`.

No weights are read. Activations of a layer are measured on the meta device, as the difference between models of two and
four layers, with attention as a fused kernel.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.pytorch_utils import Conv1D

from toolkit.messages import ModelError
from toolkit.models import lora
from toolkit.models.load import model_class, transformers_config
from toolkit.models.trainable import untrained_prefixes
from toolkit.plan.model_config import NO_MODEL
from toolkit.plan.outline import TOWERS, WITHOUT_ATTENTION, flop_sizes
from toolkit.plan.tuning_targets import ALL_LINEAR

_LENGTH = 64
_LAYERS = 2
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config keys of operations on the logits."""


class _Fused(torch.autograd.Function):
    """Stands in for a fused attention kernel, which PyTorch decomposes on the meta device."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Values may be narrower than queries (DeepSeek-V3). Fused kernels lay results out by token, then by head.
        rows, heads, length, _ = query.shape
        result = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, statistics)
        return result


def saved_by_layer(folder: Path, dtype: torch.dtype, trains: bool = True) -> int:
    """Return the bytes per token that one layer of the model in `folder` saves for the backward pass, the mean over its
    layers. `trains`: whether layers are trained, or only parameters before them.
    """
    text = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    if text.is_heterogeneous:  # layers of different sizes (Gemma 4): the whole model counts, with its output layer
        return _saved_bytes(folder, 0, dtype, trains) // (text.num_hidden_layers * _LENGTH)
    layer_types = getattr(text, "layer_types", None) or ["full_attention"]
    # In a hybrid a layer of each kind is measured, its last: all layers with attention count as one kind.
    kinds = [kind if kind in WITHOUT_ATTENTION else "attention" for kind in layer_types]
    last_of_kind = {kind: number for number, kind in enumerate(kinds)}
    try:
        saved_by_kind = {
            kind: _saved_by_layers_like(folder, dtype, trains, number) for kind, number in last_of_kind.items()
        }
    except LookupError:  # Zamba2 needs a layer of each kind
        saved_by_kind = dict.fromkeys(kinds, _saved_by_layers_like(folder, dtype, trains, -1))
    # `_saved_by_layers_like` measures _LAYERS layers and _LENGTH tokens.
    return sum(saved_by_kind[kind] for kind in kinds) // (len(kinds) * _LAYERS * _LENGTH)


def _saved_by_layers_like(folder: Path, dtype: torch.dtype, trains: bool, number: int) -> int:
    """Return the bytes that `_LAYERS` layers like layer `number` save for `_LENGTH` tokens: a model of twice as many
    layers less one of `_LAYERS`, so that embedding and output layer do not count.
    """
    deep = _saved_bytes(folder, 2 * _LAYERS, dtype, trains, number)
    return deep - _saved_bytes(folder, _LAYERS, dtype, trains, number)


def outline(folder: Path) -> dict[str, Any]:
    """Return what `toolkit.plan.lookup` reads: the `shapes` of a model's parameters, LoRA's `targets` and the `sizes`
    (types of plan/outline.py). `saved_2` and `saved_4` are the bytes per token that a trained layer saves with numbers
    of 2 and 4 bytes, `frozen_*` those of a frozen one. ModelError if the model cannot be built.
    """
    config = transformers_config(folder)
    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    # `flop_sizes` knows no heads where there is no attention (Mamba), and where layers differ (Gemma 4 31B): of such a
    # config reading one number for all layers raises.
    sizes = {"layers": text.num_hidden_layers, "heads": 0, "head_size": 0}
    sizes |= flop_sizes(lambda name: getattr(text, name, None))
    heads, head_size = sizes["heads"], sizes["head_size"]
    key_width = (getattr(text, "num_key_value_heads", None) or heads) * head_size if head_size else 0
    untrained, shapes = untrained_prefixes(model), dict[str, list[int]]()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.startswith(untrained):  # only its size counts
            shapes[f"{TOWERS}p{index}"] = [parameter.numel()]
        else:
            shapes[name] = list(_shape_of(model, name))
    saved = saved_by_layer(folder, torch.bfloat16)
    frozen = saved_by_layer(folder, torch.bfloat16, trains=False)
    has_experts = any("expert" in name for name, _ in model.named_parameters())  # which PyTorch groups in bf16 alone
    return {
        "shapes": shapes,
        "targets": {pattern: lora.linear_targets(model, pattern.split()) for pattern in ("", ALL_LINEAR)},
        "sizes": {
            **sizes,
            "hidden": text.hidden_size,
            "inner": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "keys": key_width,
            "prefix": 2 * text.num_hidden_layers * key_width,  # keys and values of all layers
            "norms": 2,  # for formulas of a layer's activations, which are not used where `saved_*` were measured
            "logits_change": int(any(getattr(text, name, None) not in (None, 1.0) for name in _AFTER_THE_HEAD)),
            "rotary": head_size,  # cosines and sines count once for all layers; what each repeats is in `saved_*`
            "saved_2": saved,
            "saved_4": 2 * saved if has_experts else saved_by_layer(folder, torch.float32),  # twice bf16's bytes
            "frozen_2": frozen,
            "frozen_4": 2 * frozen if has_experts else saved_by_layer(folder, torch.float32, trains=False),
        },
    }


def _shape_of(model: PreTrainedModel, name: str) -> torch.Size:
    """Return the shape of a parameter; of a transposed weight (GPT-2's Conv1D) that of a linear layer."""
    path, _, attribute = name.rpartition(".")
    parameter = model.get_parameter(name)
    is_transposed = isinstance(model.get_submodule(path), Conv1D) and attribute == "weight"
    return parameter.T.shape if is_transposed else parameter.shape


def _saved_bytes(folder: Path, layers: int, dtype: torch.dtype, trains: bool, number: int = -1) -> int:
    """Return the bytes that a forward pass over `_LENGTH` tokens saves, of a model with `layers` layers that are all
    like the layer `number` of the one in `folder`; with 0 of that model itself. `trains`: whether all parameters are
    trained, or the embedding alone.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config()
    if layers:
        # Lists in the config with one entry for each layer: each of the new layers gets that of layer `number`.
        lists = {name: value for name, value in vars(text).items() if isinstance(value, list)}
        per_layer_keys = [
            name
            for name, value in lists.items()
            if len(value) == text.num_hidden_layers and all(isinstance(item, (str, int)) for item in value)
        ]
        text.num_hidden_layers = layers
        for name in per_layer_keys:
            setattr(text, name, [lists[name][number]] * layers)
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=dtype, trust_remote_code=False).train()
    for parameter in model.parameters():  # as DeepSpeed's engine does: routers that transformers keeps in float32, too
        parameter.data = parameter.data.to(dtype)
    if model._can_set_experts_implementation() and any("expert" in name for name, _ in model.named_parameters()):
        model.set_experts_implementation("grouped_mm")  # the other ways look at values, and here are none
    model.requires_grad_(trains).get_input_embeddings().requires_grad_()
    model_storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    model_storage_ids = {id(storage) for storage in model_storages}
    saved_storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in model_storage_ids:
            saved_storages.setdefault(id(storage), storage)
        return tensor

    # So that transformers' sdpa calls the stand-in, and does not repeat the keys for each head of queries (GQA).
    original_attention = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda query, key, value, *_, **__: _Fused.apply(query, key, value)
    original_use_gqa, sdpa_attention.use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa, lambda *_: True
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # A mask of four dimensions is passed on as it is; any other is looked at.
            has_attention = getattr(text, "num_attention_heads", None) is not None
            mask = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool, device="meta") if has_attention else None
            ids = torch.zeros(1, _LENGTH, dtype=torch.long, device="meta")
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        functional.scaled_dot_product_attention, sdpa_attention.use_gqa_in_sdpa = original_attention, original_use_gqa
    return sum(storage.nbytes() for storage in saved_storages.values())


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(outline(Path(sys.argv[1]))) + "\n")
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_MODEL)
