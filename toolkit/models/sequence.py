"""Sequence parallelism: each rank of a group has a part of every row's tokens, and for attention a part of the heads.

Ulysses: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509; for transformers' models as in ALST, Bekman et al. 2025,
https://arxiv.org/abs/2506.13996. For attention, parts of rows with all heads become whole rows with a part of the
heads, and back. DeepSpeed 0.19.8's ulysses_sp.py takes one batch size per run, and packed rows by flash attention
alone. B rows, S tokens of a whole row, P ranks of a group, H heads, D width of a head.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.config.schema import Attention
from toolkit.distributed.process_group import sum_over_ranks
from toolkit.messages import ModelError, tr
from toolkit.models import attention
from toolkit.models.loss import Batch, with_label_positions

MOST_CHANGE = 0.1
"""Root mean square by which logits of parts may differ, of their spread: rounding in bf16 makes up to 0.02 over twelve
layers, a wrong layout 0.6 and more."""
_group: dist.ProcessGroup | None = None


def split_sequences(model: PreTrainedModel, ranks: int) -> None:
    """Let a model take parts of rows (`local_part`) as well as whole ones. A collective of neighbours, P `ranks`."""
    global _group  # attention is called by transformers, with nothing of ours
    config = model.config.get_text_config()
    reason = ""
    if getattr(model, "builds_positions", False):
        reason = tr("it finds positions and mask of a whole row from its one <sop>")
    elif config._attn_implementation != Attention.sdpa.value or getattr(config, "attn_logit_softcapping", None):
        reason = tr("its attention is more than PyTorch's (sdpa)")
    elif config.num_attention_heads % ranks:
        reason = tr(
            "its {heads} attention heads cannot be divided by {ranks}", heads=config.num_attention_heads, ranks=ranks
        )
    if reason:
        raise ModelError(
            "parallel.sequence = {ranks} is incompatible with {model}: {reason}.",
            ranks=ranks,
            model=type(model).__name__,
            reason=reason,
        )
    model.set_attn_implementation(attention.SEQUENCE)
    _group, _ = dist.new_subgroups(ranks)


def local_part(batch: Batch, part: int, parts: int) -> Batch:
    """Return the part of each row (S a multiple of P) of rank `part` of P `parts`; with one part the batch as it is.

    There remain `input_ids`, `position_ids`, `segment_ids` [B, S / P]; `places`, `targets`, `sources` of the tokens
    whose loss is this rank's, as a loss stands at the token before; `cu_seq_lens`; and `part`, int64 [2].
    """
    if parts == 1:
        return batch
    size = batch["input_ids"].size(1)
    length = size // parts
    begin = part * length
    given = with_label_positions(batch)
    before = given["places"] - 1
    column = before % size - begin
    mine = (column >= 0) & (column < length)
    names = ("input_ids", "position_ids", "segment_ids")
    return {
        **{name: batch[name][:, begin : begin + length].contiguous() for name in names},
        **{name: given[name][mine] for name in ("targets", "sources") if name in given},
        **{name: batch[name] for name in ("cu_seq_lens",) if name in batch},
        "places": (before // size * length + column)[mine] + 1,
        "part": torch.tensor([part, parts]),
    }


def sequence_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    in_parts: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention over whole rows, of which this rank has a part, [B, S / P, H, D]; if not `in_parts`,
    `sdpa`'s. `query`: [B, H, S / P, D]; `key`, `value`: [B, heads of keys, S / P, D]; `cu_seq_lens_q`: int32
    [segments + 1], packed.
    """
    if not in_parts:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    assert _group is not None
    ranks = dist.get_world_size(_group)
    # Fewer heads of keys than ranks: each is sent to all ranks whose heads of queries need it.
    copies = ranks // math.gcd(key.size(1), ranks)
    if copies > 1:
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    query, key, value = (_Exchange.apply(states, 1, 2) for states in (query, key, value))  # [B, heads / P, S, D]
    bounds = options.get("cu_seq_lens_q")
    if bounds is not None:
        mixed = attention.attend_to_segments(query, key, value, bounds, query.size(2), dropout, scaling)
    else:
        grouped = key.size(1) != query.size(1)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2)
    return _Exchange.apply(mixed, 1, 2), None


class _Exchange(torch.autograd.Function):
    """Give each rank a piece of dimension `cut`, and join what comes along `joined`; backward the other way."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        ctx.dims = cut, joined
        ranks = dist.get_world_size(_group)
        sent = torch.stack(states.chunk(ranks, dim=cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=_group)
        return torch.cat(received.unbind(), dim=joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cut, joined = ctx.dims
        return _Exchange.apply(gradients[0], joined, cut), None, None


def check_sequence_parallel(
    engine: torch.nn.Module, vocab_size: int, device: torch.device, name: str, packed: bool
) -> None:
    """Measure on the loaded model that parts of rows give the logits of whole ones, else raise. A collective."""
    assert _group is not None
    part, parts = dist.get_rank(_group), dist.get_world_size(_group)
    batch = attention.isolation_rows(vocab_size, parts)
    if not packed:
        batch = {"input_ids": batch["input_ids"], "segment_ids": torch.ones_like(batch["input_ids"])}
        batch["position_ids"] = torch.arange(batch["input_ids"].size(1)).expand_as(batch["input_ids"])
    whole = attention.evaluate_logits(engine, batch, device)
    mine = attention.evaluate_logits(engine, local_part({**batch, "labels": batch["input_ids"]}, part, parts), device)
    length = mine.size(1)
    other = (mine - whole[:, part * length :][:, :length]).square().mean()
    # The mean, as single logits in bf16 differ by several per cent between kernels; of all ranks, to act alike.
    sums = sum_over_ranks(torch.stack((other, whole.var())), device)
    change = float((sums[0] / sums[1]).sqrt())
    if not change <= MOST_CHANGE:
        raise ModelError(
            "{name} cannot be trained with parallel.sequence = {ranks}: parts of rows give other logits than whole "
            "rows (by {change} of their spread).",
            name=name,
            ranks=parts,
            change=f"{change:.3g}",
        )


AttentionInterface.register(attention.SEQUENCE, sequence_attention)
AttentionMaskInterface.register(attention.SEQUENCE, attention.training_mask)
