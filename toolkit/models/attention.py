"""How a run's model computes attention: which function, and the masks or segments that it is given.

In packed rows no sample sees another. `varlen` (models/segment_attention.py) computes each sample by itself. `sdpa` and
`eager` take a block-diagonal mask instead, which is correct everywhere, but computes all pairs.

B rows, S tokens of a row.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from toolkit.config.schema import Attention, Dtype, RunConfig
from toolkit.distributed import accelerator
from toolkit.distributed.accelerator import trains_on_gpu
from toolkit.messages import ModelError, tr
from toolkit.models.record import record_of

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_ADD_TO_MASK = ("doge",)
"""Model types whose attention adds to its mask (transformers 5.23), so that it needs one."""


@torch.compiler.assume_constant_result
def has_varlen_kernel() -> bool:
    """Whether PyTorch's kernel for variable lengths runs here: on GPUs from Ampere on (torch 2.13, flash_api.cpp), and
    not with torch 2.10, whose function takes no scale (nn/attention/varlen.py).
    """
    return accelerator.has_ampere_kernels() and varlen_kernel_takes("scale")


def _has_varlen(in_half_precision: bool) -> bool:
    """Whether varlen computes packed rows fast here: PyTorch's kernel knows half precision only."""
    return not trains_on_gpu() or (in_half_precision and has_varlen_kernel())


@torch.compiler.assume_constant_result
def varlen_kernel_takes(name: str) -> bool:
    """Whether PyTorch's function for variable lengths has an argument `name` in this version."""
    from torch.nn.attention.varlen import varlen_attn

    return name in _argument_names(varlen_attn)


@functools.cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def computes_segments(cfg: RunConfig) -> bool:
    """Whether a run's attention computes only pairs of tokens that see each other, if its model supports sdpa."""
    attention, in_half_precision = cfg.model.attention, cfg.precision.dtype is not Dtype.fp32
    return attention is Attention.varlen or (attention is Attention.auto and _has_varlen(in_half_precision))


def choose_attention(model: PreTrainedModel, attention: Attention, packed: bool, dtype: torch.dtype | None) -> None:
    """Set how a model computes attention; see `model.attention` in the schema. `packed`: rows hold several samples;
    `dtype`: precision of training. ModelError if the model does not support it.
    """
    name = attention.value
    # The state of layers of the gated delta rule would run on from one sample of a row to the next.
    if packed and "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        from toolkit.models.delta_layers import pack_delta_layers

        pack_delta_layers(model)
    if attention is Attention.auto:
        if not packed:
            return  # transformers' own choice remains
        name = _fastest_for_packed(model, dtype).value
    try:
        if name == Attention.varlen.value:
            if not model._supports_sdpa:
                raise ValueError(tr("its attention is more than PyTorch's function computes"))
            from toolkit.models import segment_attention

            segment_attention.register()
        model.set_attn_implementation(name)
    except (ValueError, ImportError, KeyError) as error:
        raise ModelError(
            "model.attention = {name} is not supported by {model} ({reason}). Use auto.",
            name=name,
            model=type(model).__name__,
            reason=str(error).splitlines()[0],
        ) from error


def _fastest_for_packed(model: PreTrainedModel, dtype: torch.dtype | None) -> Attention:
    """Return the fastest attention that a model supports for packed rows here; `dtype`: precision of training."""
    if not model._supports_sdpa:  # more than PyTorch's function: Gemma 2 soft-caps its scores, gpt-oss has sinks
        return Attention.eager
    takes_varlen = model.config.model_type not in _ADD_TO_MASK
    return Attention.varlen if takes_varlen and _has_varlen(dtype in _KERNEL_DTYPES) else Attention.sdpa


def first_position(model: PreTrainedModel) -> int:
    """Return the number of a sample's first position: 0, or in RoBERTa and its kind the one after the padding row."""
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    rows = [getattr(table, "padding_idx", None) for table in tables]
    return max((row + 1 for row in rows if row is not None), default=0)


def attention_arguments(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of forward that mask padding and other samples, for packed batches and parts of rows too;
    with `position_ids` if the model's first position is not 0.
    """
    arguments = _mask_arguments(module, batch)
    if first := record_of(module).first_position:
        arguments["position_ids"] = batch["position_ids"] + first
    return arguments


def _mask_arguments(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of forward by which a token sees the earlier tokens of its sample alone. Their form depends
    first on the batch (parts of rows, one sample a row, packed rows), then on the model's attention.
    """
    segments = batch["segment_ids"]  # [B, S], 0 for padding
    if "part" in batch:  # parallel.sequence: this rank has a part of each row
        from toolkit.layouts.sequence import part_arguments

        return part_arguments(module, batch)
    if getattr(module, "builds_positions", False):  # ChatGLM-6B makes mask and positions itself, from the ids
        return {"attention_mask": segments > 0, "position_ids": None}
    if "cu_seq_lens" not in batch:  # each row has one sample
        mask = segments > 0
        # `training_mask`, to which transformers hands this tensor, drops masks with this attribute.
        mask.is_right_padded = True  # type: ignore[attr-defined]
        return {"attention_mask": mask}
    # Packed rows: bounds of samples for varlen, else a mask.
    if module.config._attn_implementation == Attention.varlen.value:
        from toolkit.models.segment_attention import placeholder_mask, segment_arguments

        bounds, placeholder = segment_arguments(batch), placeholder_mask(segments)
        # Some models pass only the mask to their layers: there `sample_attention` takes the bounds from it.
        placeholder["attention_mask"].segments = bounds  # type: ignore[attr-defined]
        return placeholder | bounds
    # Layers of the gated delta rule take no mask: their kernels begin a new state at each sample's bound.
    for_delta_layers = {"cu_seq_lens_q": batch["cu_seq_lens"]} if record_of(module).has_delta_layers else {}
    return for_delta_layers | {"attention_mask": _block_diagonal_mask(module, batch)}


def _block_diagonal_mask(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mask of packed rows, [B, 1, S, S]: bool, True where a query sees a key; for eager attention, which
    adds it to the scores, 0 there and the smallest number elsewhere.
    """
    segments = batch["segment_ids"]
    size = segments.size(1)
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    # A key of segment s is seen by queries of the segments s to `seen_until`: of s alone, but for the tokens of a
    # prefix that later samples of the row share.
    seen_from, seen_until = segments[:, None, :], batch.get("seen_until", segments)[:, None, :]
    query_segments = segments[:, :, None]
    blocks = ((seen_from <= query_segments) & (query_segments <= seen_until) & causal)[:, None]  # [B, 1, S, S]
    if module.config._attn_implementation != "eager":
        return blocks
    dtype = next(module.parameters()).dtype
    return torch.zeros_like(blocks, dtype=dtype).masked_fill(~blocks, torch.finfo(dtype).min)


def training_mask(*arguments: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Return transformers' mask, without padding on the right, which causal attention hides anyway: so PyTorch takes
    its fastest kernel, and the host does not wait for the device to learn whether there is padding.
    """
    is_right_padded = getattr(attention_mask, "is_right_padded", False)
    return sdpa_mask(*arguments, attention_mask=None if is_right_padded else attention_mask, **options)


AttentionMaskInterface.register(Attention.sdpa.value, training_mask)
