"""Attention over packed rows that computes only pairs of tokens of one sample: `model.attention=varlen`.

On GPUs PyTorch's kernel for variable lengths computes each sample by itself; on CPUs a call a sample does.

Samples of one conversation may share a prefix. They form a tree, which a row holds branch after branch, each token
once. A token sees the earlier tokens on its branch (`seen_until`). The keys and values on the path to each branch are
gathered (`keys`), so that no pair is computed in vain.

B rows, S tokens of a row, H heads, D width of a head.
"""

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from toolkit.config.schema import Attention
from toolkit.messages import tr
from toolkit.models.attention import has_varlen_kernel, training_mask, varlen_kernel_takes
from toolkit.sample_types import Batch

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_SHORT = 512
"""Tokens, of segments on average, up to which PyTorch 2.13's kernel for CPUs takes longer in bf16 than in float32:
forward and backward of five heads of 64 columns, one core of an EPYC without AMX, 2.0 times as long for 128 tokens,
1.3 for 300, 0.8 for 1,024."""


def register() -> None:
    """Make `varlen` known to transformers."""
    AttentionInterface.register(Attention.varlen.value, sample_attention)
    AttentionMaskInterface.register(Attention.varlen.value, training_mask)


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
    if query.is_cuda and not dropout and query.dtype in _KERNEL_DTYPES and has_varlen_kernel():
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.13 checks enable_gqa if there are fewer heads of keys, but does not pass it on; 2.11 checks nothing
        # and calls the same kernel (nn/attention/varlen.py), which takes any number of heads that divides the queries',
        # and sums the gradients of each group (flash_attn/flash_api.cpp: mha_varlen_fwd, mha_varlen_bwd).
        grouped: dict[str, Any] = {"enable_gqa": heads != key.size(1)} if varlen_kernel_takes("enable_gqa") else {}
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
    return _attend_one_by_one(query, key, value, bounds, key_bounds, dropout, scaling).view(rows, size, -1, width)


@torch.compiler.disable
def _attend_one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Return what `attend_to_segments` does by a call a segment: attention [T, H, D] of queries [T, H, D] to keys and
    values [K, heads of keys, D].

    Not traced by torch.compile, which would compile it again for every division of a row into samples.
    """
    heads = query.size(1)
    lengths, key_lengths = bounds.diff().tolist(), key_bounds.diff().tolist()
    dtype = query.dtype
    is_short = len(key) <= _SHORT * len(key_lengths)
    if query.device.type == "cpu" and dtype in _KERNEL_DTYPES and is_short:  # faster in float32, see `_SHORT`
        query, key, value = query.float(), key.float(), value.float()
    # Split and not sliced, squeezed and not indexed: the gradient of a slice or an index is as large as the whole
    # tensor, is filled with zeros first, and they are added up.
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True):
        if not len(q):  # all tokens of the segment were dropped
            continue
        q, k, v = (repeat_kv(tensor.transpose(0, 1)[None], heads // tensor.size(1)) for tensor in (q, k, v))
        seen, shared = k.size(2), k.size(2) - q.size(2)  # `shared`: tokens of a prefix, which all queries see
        mask = torch.ones(q.size(2), seen, dtype=torch.bool, device=q.device).tril(shared) if shared else None
        is_causal = mask is None
        part = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scaling)
        parts.append(part.squeeze(0).transpose(0, 1))
    return torch.cat(parts).to(dtype)
