"""Attention over rows that hold several samples (packed sequences).

In packed rows no sample sees another. `varlen` computes each sample by itself, on GPUs with PyTorch's kernel for
variable lengths. `sdpa` and `eager` take a block-diagonal mask instead, which is correct everywhere, but computes all
pairs.

Samples of one conversation may share a prefix. They form a tree, which a row holds branch after branch, each token
once. A token sees the earlier tokens on its branch (`seen_until`). `varlen` gathers the keys and values on the path to
each branch (`keys`), so that it computes no pair in vain; the others take the tree's mask.

B rows, S tokens of a row, H heads, D width of a head.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.config.schema import Attention, Dtype, RunConfig
from toolkit.distributed import accelerator
from toolkit.distributed.accelerator import trains_on_gpu
from toolkit.messages import ModelError, tr
from toolkit.models.record import record_of
from toolkit.sample_types import Batch

VARLEN = "varlen"
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_ADD_TO_MASK = ("doge",)
"""Model types whose attention adds to its mask (transformers 5.23), so that it needs one."""
_SHORT = 512
"""Tokens, of segments on average, up to which PyTorch 2.13's kernel for CPUs takes longer in bf16 than in float32:
forward and backward of five heads of 64 columns, one core of an EPYC without AMX, 2.0 times as long for 128 tokens,
1.3 for 300, 0.8 for 1,024."""


@torch.compiler.assume_constant_result
def _has_kernel() -> bool:
    """Whether PyTorch's kernel for variable lengths runs here: on GPUs from Ampere on (torch 2.13, flash_api.cpp), and
    not with torch 2.10, whose function takes no scale (nn/attention/varlen.py).
    """
    return accelerator.has_ampere_kernels() and _kernel_takes("scale")


def _has_varlen(in_half_precision: bool) -> bool:
    """Whether varlen computes packed rows fast here: PyTorch's kernel knows half precision only."""
    return not trains_on_gpu() or (in_half_precision and _has_kernel())


@torch.compiler.assume_constant_result
def _kernel_takes(name: str) -> bool:
    """Whether PyTorch's function for variable lengths has an argument `name` in this version."""
    from torch.nn.attention.varlen import varlen_attn

    return name in _arguments(varlen_attn)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def computes_segments(cfg: RunConfig) -> bool:
    """Whether a run's attention computes only pairs of tokens that see each other, if its model supports sdpa."""
    attention, in_half_precision = cfg.model.attention, cfg.precision.dtype is not Dtype.fp32
    return attention is Attention.varlen or (attention is Attention.auto and _has_varlen(in_half_precision))


def choose_attention(model: PreTrainedModel, attention: Attention, packed: bool, dtype: torch.dtype | None) -> None:
    """Set how a model computes attention; see `model.attention` in the schema. `packed`: rows hold several samples."""
    name = attention.value
    if packed and "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        from toolkit.models.delta_layers import pack_delta_layers

        pack_delta_layers(model)
    if attention is Attention.auto:
        if not packed:
            return
        name = VARLEN if _has_varlen(dtype in _KERNEL_DTYPES) else Attention.sdpa.value
        # Some attention is more than PyTorch's function: Gemma 2 soft-caps its scores, gpt-oss has sinks.
        name = name if model._supports_sdpa else Attention.eager.value
        if name == VARLEN and model.config.model_type in _ADD_TO_MASK:
            name = Attention.sdpa.value
    try:
        if name == VARLEN and not model._supports_sdpa:
            raise ValueError(tr("its attention is more than PyTorch's function computes"))
        model.set_attn_implementation(name)
    except (ValueError, ImportError, KeyError) as error:
        raise ModelError(
            "model.attention = {name} is not supported by {model} ({reason}). Use auto.",
            name=name,
            model=type(model).__name__,
            reason=str(error).splitlines()[0],
        ) from error


def first_position(model: PreTrainedModel) -> int:
    """Return the number of a sample's first position: 0, or in RoBERTa and its kind the one after the padding row of
    the position embeddings.
    """
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
    """Return the mask, or what replaces it, in the form that the model's attention takes."""
    segments, implementation = batch["segment_ids"], module.config._attn_implementation
    if "part" in batch:
        from toolkit.layouts.sequence import part_arguments

        return part_arguments(module, batch)
    if getattr(module, "builds_positions", False):
        return {"attention_mask": segments > 0, "position_ids": None}
    if "cu_seq_lens" not in batch:  # each row has one sample
        mask = segments > 0
        mask.is_right_padded = True  # type: ignore[attr-defined]
        return {"attention_mask": mask}
    if implementation == VARLEN:
        arguments, arguments_with_mask = segment_arguments(batch), placeholder_mask(segments)
        arguments_with_mask["attention_mask"].segments = arguments  # type: ignore[attr-defined]
        return arguments_with_mask | arguments
    size = segments.size(1)
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    # A key of segment s is seen by queries of the segments s to `seen_until`.
    seen_from, seen_until = segments[:, None, :], batch.get("seen_until", segments)[:, None, :]
    query_segments = segments[:, :, None]
    blocks = ((seen_from <= query_segments) & (query_segments <= seen_until) & causal)[:, None]  # [B, 1, S, S]
    arguments = {"cu_seq_lens_q": batch["cu_seq_lens"]} if record_of(module).has_delta_layers else {}
    if implementation == "eager":
        dtype = next(module.parameters()).dtype
        blocks = torch.zeros_like(blocks, dtype=dtype).masked_fill(~blocks, torch.finfo(dtype).min)
    return arguments | {"attention_mask": blocks}


def placeholder_mask(segments: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a mask for attention functions that do not read it: transformers passes 4-D masks on without a change."""
    return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=segments.device)}


def segment_arguments(batch: Batch) -> dict[str, Any]:
    """Return transformers' arguments for the segments of packed rows; see `attend_to_segments`."""
    bounds, longest = batch["cu_seq_lens"], batch["segment_ids"].size(1)
    arguments = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if "keys" in batch:
        arguments |= {"cu_seq_lens_k": batch["cu_seq_lens_k"], "keys": batch["keys"]}
    return arguments


def sample_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    keys: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention [B, S, H, D] within the segments of `cu_seq_lens_q`, int32 [segments + 1]; transformers'
    function of the name `varlen`. Without segments it is `sdpa`. `query`: [B, H, S, D]; `key`, `value`: [B, heads of
    keys, S, D]. With `keys`, int64 [K], a segment attends to the tokens at the indices that `cu_seq_lens_k` bounds, of
    which its own are the last.
    """
    if "cu_seq_lens_q" not in options:  # StableLM and Nemotron pass only the mask to their layers (transformers 5.23)
        options |= getattr(attention_mask, "segments", {})
        keys = options.get("keys", keys)
    bounds = options.get("cu_seq_lens_q")
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    if attention_mask is not None and attention_mask.numel() > 1:
        raise ValueError(tr("its attention adds to the mask: set model.attention=sdpa"))
    paths = None if keys is None else (keys, options["cu_seq_lens_k"])
    return attend_to_segments(query, key, value, bounds, query.size(2), dropout, scaling, paths), None


def attend_to_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    paths: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return causal attention within segments, [B, S, H, D]: B rows, S tokens, H heads, D width of a head.

    `query`: [B, H, S, D]; `key`, `value`: [B, heads of keys, S, D]; `bounds`: int32 [segments + 1] over the B x S
    tokens; `longest`: most tokens that one sees; `scaling`: of the scores, None is 1 / sqrt(D); `paths`: indices of the
    tokens that each segment sees, int64 [K], its own last, and their bounds, int32 [segments + 1].
    """
    rows, heads, size, width = query.shape
    query, key, value = (tensor.transpose(1, 2).reshape(rows * size, -1, width) for tensor in (query, key, value))
    key_bounds = bounds
    if paths is not None:
        # Not index_select, whose gradient is added up in another order each time on a GPU.
        key, value, key_bounds = key[paths[0]], value[paths[0]], paths[1]
    if query.is_cuda and not dropout and query.dtype in _KERNEL_DTYPES and _has_kernel():
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.13 checks enable_gqa if there are fewer heads of keys, but does not pass it on; 2.11 checks nothing
        # and calls the same kernel (nn/attention/varlen.py), which takes any number of heads that divides the queries',
        # and sums the gradients of each group (flash_attn/flash_api.cpp: mha_varlen_fwd, mha_varlen_bwd).
        grouped: dict[str, Any] = {"enable_gqa": heads != key.size(1)} if _kernel_takes("enable_gqa") else {}
        mixed = varlen_attn(
            query,
            key,
            value,
            bounds,
            key_bounds,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),  # causal, the last query at the last key; `check_isolation` measures it
            **grouped,
        )
        assert isinstance(mixed, torch.Tensor)
        return mixed.view(rows, size, -1, width)
    lengths, key_lengths = bounds.diff().tolist(), key_bounds.diff().tolist()
    dtype = query.dtype
    if query.device.type == "cpu" and dtype in _KERNEL_DTYPES and len(key) <= _SHORT * len(key_lengths):
        query, key, value = query.float(), key.float(), value.float()
    # Split and not sliced, squeezed and not indexed: the gradient of a slice or an index is as large as the whole
    # tensor, is filled with zeros first, and they are added up.
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True):
        if not len(q):  # all tokens of the segment were dropped
            continue
        q, k, v = (repeat_kv(tensor.transpose(0, 1)[None], heads // tensor.size(1)) for tensor in (q, k, v))
        seen, shared = k.size(2), k.size(2) - q.size(2)
        mask = torch.ones(q.size(2), seen, dtype=torch.bool, device=q.device).tril(shared) if shared else None
        part = functional.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling)
        parts.append(part.squeeze(0).transpose(0, 1))
    return torch.cat(parts).to(dtype).view(rows, size, -1, width)


def training_mask(*arguments: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Return transformers' mask, without padding on the right, which causal attention hides anyway: so PyTorch takes
    its fastest kernel, and the host does not wait for the device to learn whether there is padding.
    """
    is_right_padded = getattr(attention_mask, "is_right_padded", False)
    return sdpa_mask(*arguments, attention_mask=None if is_right_padded else attention_mask, **options)


def full_row_segments(batch: Batch) -> torch.Tensor:
    """Return the segments of a batch's full rows, [B, S], also if this rank has a part of each row."""
    return batch.get("row_segments", batch["segment_ids"])


def part_indices(batch: Batch, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert token indices of full rows to indices in this rank's part of the rows.

    Args:
        batch: `part`, if it has one, is this rank's number among P ranks, and P.
        indices: of the B x S tokens of full rows, row by row, int64 [N].

    Returns:
        Which indices are in the part, bool [N]; and the indices of these in its B x S / P tokens.
    """
    if "part" not in batch:
        return torch.ones_like(indices, dtype=torch.bool), indices
    size, (part, parts) = full_row_segments(batch).size(1), batch["part"].tolist()
    length = size // parts
    column = indices % size - part * length
    is_in_part = (column >= 0) & (column < length)
    return is_in_part, (indices // size * length + column)[is_in_part]


def sum_over_row_parts(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of samples' values over the P ranks that hold parts of their rows; a collective if P > 1.

    Every rank then computes the same loss, and DeepSpeed averages the gradients. So this rank's values get the gradient
    times P: the average over the ranks is the gradient of one rank with full rows.
    """
    if "part" not in batch:
        return values
    from toolkit.layouts.sequence import sum_over_parts

    scaled = values * int(batch["part"][1])
    return scaled + (sum_over_parts(values.detach()) - scaled.detach())


AttentionInterface.register(VARLEN, sample_attention)
AttentionMaskInterface.register(VARLEN, training_mask)
AttentionMaskInterface.register(Attention.sdpa.value, training_mask)
