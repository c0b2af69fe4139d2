"""Attention over rows that hold several samples: none of them sees another.

`varlen` is an attention implementation for transformers' models: it treats each sample of a packed row for itself, on
GPUs with PyTorch's kernel for variable lengths, elsewhere one after another. `sdpa` and `eager` take a mask of blocks
instead: right everywhere, but they compute all pairs of a row.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.config.schema import Attention
from toolkit.errors import ModelError
from toolkit.messages import tr

VARLEN = "varlen"
SEQUENCE = "sequence"
"""Of `toolkit.models.sequence`: rows whose tokens are divided over ranks."""
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
MOST_CHANGE = 0.06
"""Root mean square over the vocabulary by which the logits of a token may change, of the logits' spread (0.06 = 6 %).

Measured with random GLMs of 12 and 28 layers in bf16: 0.025 where one attention output in a thousand differs by an ulp
and 0.048 where all do, though single logits change by up to 0.16; 0.09 and more where a sample's first token sees one
token of another sample in one layer. Nothing smaller than rounding can be found so."""


def trains_on_gpu() -> bool:
    """Whether the device of a run is an NVIDIA GPU, though there may be one beside it that is left alone."""
    from deepspeed.accelerator import get_accelerator  # speaks on stdout where it has to find out, so not before

    return bool(get_accelerator().device_name() == "cuda")


def choose_attention(model: PreTrainedModel, attention: Attention, packed: bool, dtype: torch.dtype | None) -> None:
    """Set how a model computes attention; see `model.attention` in the schema.

    `packed`: whether rows hold several samples. PyTorch's kernel for variable lengths knows half precision (`dtype`)
    only.
    """
    name = attention.value
    if attention is Attention.auto:
        if not packed:
            return
        has_kernel = not trains_on_gpu() or dtype in _KERNEL_DTYPES
        name = VARLEN if has_kernel else Attention.sdpa.value
        # Where attention is more than PyTorch's function (Gemma 2 bends its scores, gpt-oss has sinks).
        name = name if model._supports_sdpa else Attention.eager.value
    try:
        if name == VARLEN and not model._supports_sdpa:
            raise ValueError(tr("its attention is more than PyTorch's function computes"))
        model.set_attn_implementation(name)
    except (ValueError, ImportError, KeyError) as error:
        raise ModelError(
            "model.attention = {name} is nothing that a {model} has ({reason}). Leave it at auto.",
            name=name,
            model=type(model).__name__,
            reason=str(error).splitlines()[0],
        ) from error


def check_isolation(
    engine: torch.nn.Module,
    vocab_size: int,
    device: torch.device,
    name: str,
    forward: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None = None,
) -> None:
    """Make sure, on the model as it is, that samples of a packed row do not see each other. A collective under ZeRO-3.

    Three rows in one forward pass: [a b], [c b] and [b]. The logits of b must be the same in all. Ids are below
    `vocab_size`. `forward` returns logits of a batch where the engine cannot simply be called, such as a pipeline's.
    """
    batch = isolation_rows(vocab_size)
    first, second = 12, 20
    logits = forward(batch) if forward is not None else _logits(engine, batch, device, name)
    after_other, after_third, alone = logits[0, first:], logits[1, first:], logits[2, :second]
    changes = torch.stack([(after_other - other).square().mean(-1).sqrt().max() for other in (after_third, alone)])
    change = float(changes.max() / after_other.std())
    if not change <= MOST_CHANGE:  # nan too
        raise ModelError(
            "{name} cannot be trained on packed rows: the samples of a row influence each other (logits of a token "
            "change by {change} of their spread, rounding changes them by less than {most}). Use "
            "data.packing=grouped.",
            name=name,
            change=f"{change:.3g}",
            most=MOST_CHANGE,
        )


def _logits(engine: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device, name: str) -> torch.Tensor:
    given = {key: tensor.to(device) for key, tensor in batch.items()}
    module = getattr(engine, "module", engine)
    was_training = module.training
    module.eval()
    logits = _packed_logits(engine, given, name)
    module.train(was_training)
    return logits


def _packed_logits(engine: torch.nn.Module, batch: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    module = getattr(engine, "module", engine)
    try:
        with torch.no_grad():
            logits: torch.Tensor = engine(
                input_ids=batch["input_ids"],
                position_ids=batch["position_ids"],
                use_cache=False,
                **attention_arguments(module, batch),
            ).logits
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise ModelError(
            "{name} cannot be trained on packed rows: it cannot do with what keeps their samples apart ({reason}). "
            "Use data.packing=grouped.",
            name=name,
            reason=str(error).split("\n")[0],
        ) from error
    return logits.float()


def isolation_rows(vocab_size: int, times: int = 1) -> dict[str, torch.Tensor]:
    """Return three packed rows: [a b], [c b] and [b], of `times` x 12 tokens of a and c and `times` x 20 of b."""
    first, second = 12 * times, 20 * times
    width = first + second
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (3, width), generator=generator)
    ids[1, first:] = ids[0, first:]
    ids[2, :second] = ids[0, first:]
    segments = torch.ones_like(ids)
    segments[:2, first:] = 2
    segments[2, second:] = 0
    positions = torch.cat((torch.arange(first), torch.arange(second))).repeat(3, 1)
    positions[2] = torch.arange(width)
    bounds = [0, first, width, width + first, 2 * width, 2 * width + second, 3 * width]
    return {
        "input_ids": ids,
        "segment_ids": segments,
        "position_ids": positions,
        "cu_seq_lens": torch.tensor(bounds, dtype=torch.int32),
    }


def attention_arguments(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a model's forward takes so that no token sees padding or another sample.

    The batch is packed if it holds `cu_seq_lens`, and has parts of rows if it holds `part`.
    """
    segments = batch["segment_ids"]
    if "part" in batch:
        if module.config._attn_implementation != SEQUENCE:
            raise RuntimeError("a model that does not attend over parts of rows got one")
        return {**_unmasked(batch, segments.size(1)), "in_parts": True}
    if "cu_seq_lens" not in batch:
        mask = segments > 0
        mask.is_right_padded = True  # type: ignore[attr-defined]
        return {"attention_mask": mask}
    implementation = module.config._attn_implementation
    if implementation == VARLEN:
        return _unmasked(batch, segments.size(1))
    size = segments.size(1)
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    blocks = ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]  # [B, 1, S, S]
    if implementation == "eager":
        dtype = next(module.parameters()).dtype
        return {"attention_mask": torch.zeros_like(blocks, dtype=dtype).masked_fill(~blocks, torch.finfo(dtype).min)}
    return {"attention_mask": blocks}


def _unmasked(batch: dict[str, torch.Tensor], longest: int) -> dict[str, Any]:
    """Return the arguments of attention that knows by itself what a token sees."""
    # transformers passes masks of four dimensions on as they are; this one is never looked at.
    arguments: dict[str, Any] = {
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch["segment_ids"].device)
    }
    if (bounds := batch.get("cu_seq_lens")) is not None:
        arguments |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        arguments |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
    return arguments


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention within the segments of `cu_seq_lens_q`; without them (generation) that of `sdpa`.

    B rows, H heads (key and value may have fewer), S tokens, D width of a head.

    Args:
        module: the attention module; unused.
        query: [B, H, S, D].
        key: [B, heads of keys, S, D].
        value: as `key`.
        attention_mask: used without segments only.
        dropout: of the attention's weights.
        scaling: of the scores; None is 1 / sqrt(D).
        **options: `cu_seq_lens_q`, int32 [segments + 1] over the B x S tokens, and `max_length_q`.

    Returns:
        [B, S, H, D] and None.
    """
    bounds = options.get("cu_seq_lens_q")
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    return attend_to_segments(query, key, value, bounds, int(options["max_length_q"]), dropout, scaling), None


def attend_to_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return causal attention within segments, [B, S, H, D]; arguments as those of `varlen_attention`.

    Args:
        query: [B, H, S, D].
        key: [B, heads of keys, S, D].
        value: as `key`.
        bounds: int32 [segments + 1] over the B x S tokens.
        longest: no segment has more tokens.
        dropout: of the attention's weights.
        scaling: of the scores; None is 1 / sqrt(D).
    """
    rows, _, size, width = query.shape
    flat = tuple(states.transpose(1, 2).reshape(rows * size, -1, width) for states in (query, key, value))
    if query.is_cuda and not dropout and query.dtype in _KERNEL_DTYPES:
        mixed = _kernel(flat, bounds, longest, scaling)
    else:
        mixed = _one_by_one(flat, bounds, dropout, scaling)
    return mixed.view(rows, size, -1, width)


def _kernel(
    states: tuple[torch.Tensor, ...], bounds: torch.Tensor, longest: int, scaling: float | None
) -> torch.Tensor:
    """Flash attention over segments; query, key and value, [tokens, heads, D] each."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = states
    mixed = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=key.size(1) != query.size(1),
    )
    assert isinstance(mixed, torch.Tensor)
    return mixed


def _one_by_one(
    states: tuple[torch.Tensor, ...], bounds: torch.Tensor, dropout: float, scaling: float | None
) -> torch.Tensor:
    """The same without the kernel: a segment at a time."""
    groups = states[0].size(1) // states[1].size(1)
    parts = []
    for begin, end in pairwise(bounds.tolist()):
        if begin == end:  # all tokens of the segment were dropped
            continue
        q, k, v = (state[begin:end].transpose(0, 1)[None] for state in states)
        mixed = functional.scaled_dot_product_attention(
            q, repeat_kv(k, groups), repeat_kv(v, groups), dropout_p=dropout, is_causal=True, scale=scaling
        )
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


def training_mask(*arguments: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Return transformers' mask for PyTorch's attention, without looking at padding that stands on the right.

    No token of the sample sees it, as attention is causal; what padding itself sees is not trained. So no mask is
    needed, which lets PyTorch take its fastest kernel, and the host does not wait for the device to learn whether there
    is any padding.
    """
    is_right_padded = getattr(attention_mask, "is_right_padded", False)
    return sdpa_mask(*arguments, attention_mask=None if is_right_padded else attention_mask, **options)


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, training_mask)
AttentionMaskInterface.register(Attention.sdpa.value, training_mask)
