"""Attention over rows that hold several samples (packed sequences).

Packed, no sample sees another. `varlen` treats each sample for itself, on GPUs with PyTorch's kernel for variable
lengths. `sdpa` and `eager` take a block-diagonal mask instead: right everywhere, but they compute all pairs of a row.

Samples of one conversation may share what they begin with: a tree, in a row each token once, branch after branch. A
token sees those before it whose branch it is in (`seen_until`). `varlen` gathers the keys and values of each branch's
path (`keys`), so that it computes exactly the pairs that see each other; the mask is that of the tree otherwise.

B rows, S tokens of a row, H heads, D width of a head.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.config.schema import Attention, Dtype, RunConfig
from toolkit.messages import ModelError, tr

VARLEN = "varlen"
Batch = dict[str, torch.Tensor]
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_ADD_TO_MASK = ("doge",)
"""Types of models whose attention adds to the mask that it is given (transformers 5.23), so that it needs one."""
_SHORT = 512
"""Tokens up to which PyTorch 2.13's kernel for CPUs takes longer in bf16 than in float32: forward and backward of five
heads of 64 columns, one core of an EPYC without AMX, 2.0 times as long for 128 tokens, 1.3 for 300, 0.8 for 1,024."""


def trains_on_gpu() -> bool:
    """Whether the device of a run is an NVIDIA GPU; a run on CPUs leaves a GPU that is there alone."""
    from deepspeed.accelerator import get_accelerator  # speaks on stdout where it has to find out, so not before

    return bool(get_accelerator().device_name() == "cuda")


@torch.compiler.assume_constant_result
def _has_kernel() -> bool:
    """Whether a GPU has PyTorch's kernel for variable lengths, as from Ampere on (torch 2.13, flash_api.cpp).

    2.10's function takes no scale (nn/attention/varlen.py), so there GPUs do without the kernel, as older ones do.
    """
    is_older = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return not is_older and _kernel_takes("scale")


@torch.compiler.assume_constant_result
def _kernel_takes(name: str) -> bool:
    """Whether the function for variable lengths of this PyTorch has an argument."""
    from torch.nn.attention.varlen import varlen_attn

    return name in _arguments(varlen_attn)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def computes_segments(cfg: RunConfig) -> bool:
    """Whether a run's attention, where a model has PyTorch's, computes only pairs of tokens that see each other."""
    has_kernel = not trains_on_gpu() or (cfg.precision.dtype is not Dtype.fp32 and _has_kernel())
    return cfg.model.attention is Attention.varlen or (cfg.model.attention is Attention.auto and has_kernel)


def choose_attention(model: PreTrainedModel, attention: Attention, packed: bool, dtype: torch.dtype | None) -> None:
    """Set how a model computes attention; see `model.attention` in the schema. `packed`: rows hold several samples."""
    name = attention.value
    if attention is Attention.auto:
        if not packed:
            return
        # PyTorch's kernel for variable lengths knows half precision only.
        has_kernel = not trains_on_gpu() or (dtype in _KERNEL_DTYPES and _has_kernel())
        name = VARLEN if has_kernel else Attention.sdpa.value
        # Where attention is more than PyTorch's function (Gemma 2 bends its scores, gpt-oss has sinks).
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
    """Return the number of a sample's first position: where the table of positions has a row for padding (RoBERTa and
    its kind), the one after that.
    """
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    rows = [getattr(table, "padding_idx", None) for table in tables]
    return max((row + 1 for row in rows if row is not None), default=0)


def attention_arguments(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return forward's arguments that hide padding and other samples, of packed batches and of parts of rows; with
    `position_ids` for a model that has its own.
    """
    arguments = _mask_arguments(module, batch)
    if first := getattr(module, "first_position", 0):
        arguments["position_ids"] = batch["position_ids"] + first
    return arguments


def _mask_arguments(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    segments, bounds = batch["segment_ids"], batch.get("cu_seq_lens")
    implementation = module.config._attn_implementation
    if "part" in batch:
        from toolkit.layouts.sequence import part_arguments

        return part_arguments(module, batch)
    if getattr(module, "builds_positions", False):
        return {"attention_mask": segments > 0, "position_ids": None}
    if bounds is not None and implementation == VARLEN:
        arguments, unseen = segment_arguments(batch), unseen_mask(segments)
        unseen["attention_mask"].segments = arguments  # type: ignore[attr-defined]
        return unseen | arguments
    if bounds is None:
        mask = segments > 0
        mask.is_right_padded = True  # type: ignore[attr-defined]
        return {"attention_mask": mask}
    size = segments.size(1)
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    # A key of segment s is seen by queries of the segments s to `seen_until`.
    seen_from, seen_until = segments[:, None, :], batch.get("seen_until", segments)[:, None, :]
    query_segments = segments[:, :, None]
    blocks = ((seen_from <= query_segments) & (query_segments <= seen_until) & causal)[:, None]  # [B, 1, S, S]
    if implementation == "eager":
        dtype = next(module.parameters()).dtype
        return {"attention_mask": torch.zeros_like(blocks, dtype=dtype).masked_fill(~blocks, torch.finfo(dtype).min)}
    return {"attention_mask": blocks}


def unseen_mask(segments: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mask of a function that knows by itself what a token sees: transformers passes masks of four
    dimensions on as they are, and this one is never looked at.
    """
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
    """Return causal attention within the segments of `cu_seq_lens_q`, int32 [segments + 1], [B, S, H, D]; without them
    `sdpa`'s. With `keys`, int64 [K], each segment attends to its tokens at these places, of `cu_seq_lens_k`: its own
    are the last of them. `query`: [B, H, S, D]; `key`, `value`: the same with as many heads as keys have.
    """
    if "cu_seq_lens_q" not in options:  # layers of StableLM and Nemotron hand on the mask alone (transformers 5.23)
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
    tokens; `longest`: most tokens that one sees; `scaling`: of the scores, None is 1 / sqrt(D); `paths`: places of the
    tokens that each segment sees, int64 [K], its own the last of them, and bounds over these.
    """
    rows, heads, size, width = query.shape
    groups = heads // key.size(1)
    query, key, value = (tensor.transpose(1, 2).reshape(rows * size, -1, width) for tensor in (query, key, value))
    key_bounds = bounds
    if paths is not None:
        # Not index_select, whose gradient is added up in another order each time on a GPU.
        key, value, key_bounds = key[paths[0]], value[paths[0]], paths[1]
    if query.is_cuda and not dropout and query.dtype in _KERNEL_DTYPES and _has_kernel():
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.13 wants to be told of fewer heads of keys, and tells its kernel nothing; 2.11 compares no heads and
        # calls the same kernel (nn/attention/varlen.py), which takes any number that divides the queries' and sums the
        # gradients of each group (flash_attn/flash_api.cpp: mha_varlen_fwd, mha_varlen_bwd).
        grouped: dict[str, Any] = {"enable_gqa": groups != 1} if _kernel_takes("enable_gqa") else {}
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
    parts = []
    for (begin, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(key_bounds.tolist()), strict=True):
        if begin == end:  # all tokens of the segment were dropped
            continue
        q = query[begin:end].transpose(0, 1)[None]
        k, v = (repeat_kv(tensor[first:last].transpose(0, 1)[None], groups) for tensor in (key, value))
        shared = last - first - (end - begin)
        mask = torch.ones(end - begin, last - first, dtype=torch.bool, device=q.device).tril(shared) if shared else None
        if last - first <= _SHORT and q.device.type == "cpu" and q.dtype in _KERNEL_DTYPES:
            q, k, v = q.float(), k.float(), v.float()
        part = functional.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling)
        parts.append(part[0].transpose(0, 1).to(query.dtype))
    return torch.cat(parts).view(rows, size, -1, width)


def training_mask(*arguments: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Return transformers' mask without looking at padding on the right, which causal attention hides anyway: PyTorch
    takes its fastest kernel, and the host does not wait for the device to learn whether there is any.
    """
    is_right_padded = getattr(attention_mask, "is_right_padded", False)
    return sdpa_mask(*arguments, attention_mask=None if is_right_padded else attention_mask, **options)


def whole_segments(batch: Batch) -> torch.Tensor:
    """Return the segments of a batch's rows, [B, S], also where a rank has a part of each."""
    return batch.get("row_segments", batch["segment_ids"])


def own_places(batch: Batch, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which places are in this rank's part of the rows, and where in it.

    Args:
        batch: whose `part`, if it has one, is this rank's number among P, and P.
        places: indices in the B x S tokens of whole rows, row by row [N].

    Returns:
        Whether each place is in the part, bool [N]; and of those that are, the indices in its B x S / P tokens.
    """
    if "part" not in batch:
        return torch.ones_like(places, dtype=torch.bool), places
    size, (part, parts) = whole_segments(batch).size(1), batch["part"].tolist()
    length = size // parts
    column = places % size - part * length
    is_in_part = (column >= 0) & (column < length)
    return is_in_part, (places // size * length + column)[is_in_part]


def of_whole_rows(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of values of samples over the P ranks that hold parts of their rows; a collective if there are.

    Every rank then computes the same loss, and the mean of their gradients is taken. So the gradient goes to this
    rank's own values alone, P times: the mean over the ranks is what one rank with whole rows would have.
    """
    if "part" not in batch:
        return values
    from toolkit.layouts.sequence import sum_over_parts

    scaled = values * int(batch["part"][1])
    return scaled + (sum_over_parts(values.detach()) - scaled.detach())


AttentionInterface.register(VARLEN, sample_attention)
AttentionMaskInterface.register(VARLEN, training_mask)
AttentionMaskInterface.register(Attention.sdpa.value, training_mask)
