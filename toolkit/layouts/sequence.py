"""Sequence parallelism (`parallel.sequence`): of the tokens of each row a rank has a part.

Ulysses: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509; for transformers' models as in ALST, Bekman et al. 2025,
https://arxiv.org/abs/2506.13996. For attention, parts of rows with all heads become whole rows with a part of the
heads, and back. DeepSpeed 0.19.8's ulysses_sp.py takes one batch size per run, and packed rows by flash attention
alone.

B rows, S tokens of a whole row, P ranks of a group, H heads, D width of a head.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.config.schema import Attention
from toolkit.distributed.process_group import sum_over_ranks
from toolkit.distributed.row_exchange import exchange_rows
from toolkit.messages import ModelError, tr
from toolkit.models.attention import training_mask
from toolkit.models.isolation import evaluate_logits, isolation_rows
from toolkit.models.per_sample import part_indices
from toolkit.models.segment_attention import placeholder_mask, sample_attention, segment_arguments
from toolkit.sample_types import Batch, with_targets

SEQUENCE = "sequence"
"""Rows whose tokens are divided over ranks."""
_MOST_CHANGE_OF_PARTS = 0.1
"""Root mean square by which logits of parts may differ, of their spread: rounding in bf16 makes up to 0.02 over twelve
layers, a wrong layout 0.6 and more."""
_group: dist.ProcessGroup | None = None


def split_sequences(model: PreTrainedModel, ranks: int, tensor: int = 1) -> None:
    """Let a model take parts of rows (`local_part`) as well as whole ones. A collective of P `ranks`, which are
    neighbours but for the `tensor` ranks that share each part.
    """
    global _group  # attention is called by transformers, with nothing of ours
    check_splits(model, ranks, tensor)
    model.set_attn_implementation(SEQUENCE)
    # Each row is a group: of 8 ranks with P = 2 and `tensor` = 2 the groups are [0, 2], [1, 3], [4, 6], [5, 7].
    members = torch.arange(dist.get_world_size()).view(-1, ranks, tensor).transpose(1, 2).reshape(-1, ranks)
    _group, _ = dist.new_subgroups_by_enumeration(members.tolist())


def check_splits(model: PreTrainedModel, ranks: int, tensor: int = 1) -> None:
    """Raise ModelError unless a model's attention can be divided over `ranks`, each part shared by `tensor` ranks."""
    config = model.config.get_text_config()
    reason = ""
    if config._attn_implementation != Attention.sdpa.value or getattr(config, "attn_logit_softcapping", None):
        reason = tr("its attention is more than PyTorch's (sdpa)")
    elif config.num_attention_heads % (ranks * tensor):
        heads, divisor = config.num_attention_heads, ranks * tensor
        reason = tr("its {heads} attention heads cannot be divided by {ranks}", heads=heads, ranks=divisor)
    if reason:
        raise ModelError(
            "parallel.sequence = {ranks} is incompatible with {model}: {reason}.",
            ranks=ranks,
            model=type(model).__name__,
            reason=reason,
        )


def part_arguments(module: Any, batch: Batch) -> dict[str, Any]:
    """Return forward's arguments that hide padding and other samples from this rank's part of rows."""
    if module.config._attn_implementation != SEQUENCE:
        raise RuntimeError("a model that does not attend over parts of rows got one")
    if getattr(module, "builds_positions", False):
        # ChatGLM-6B makes mask and positions of special tokens, which may be anywhere in the row. Padding is on the
        # right, where no token of a sample looks.
        mask, positions = module.base_model.complete(batch["row_ids"], None, None)
        own_positions = positions.chunk(dist.get_world_size(_group), dim=-1)[dist.get_rank(_group)]
        return {"attention_mask": mask, "position_ids": own_positions, "in_parts": True}
    arguments = {**placeholder_mask(batch["segment_ids"]), "in_parts": True}
    return arguments | (segment_arguments(batch) if "cu_seq_lens" in batch else {})


def part_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    in_parts: bool = False,
    learned: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention over whole rows, of which this rank has S / P tokens, [B, S / P, H, D]; if not `in_parts`, that
    of `sample_attention`. A causal module needs no mask; another attends by the mask of whole rows.

    Keys beyond those of the tokens are learned ones in front (P-Tuning v2); so are the first `learned` tokens (a soft
    prompt). Learned tokens attend only to each other, so each rank computes them all; their gradients on a rank are
    those through its heads, or its tokens, and add up over the group.
    `query`: [B, H, S / P, D]; `key`, `value`: the same with as many heads as keys have.
    """
    if not in_parts:
        return sample_attention(module, query, key, value, attention_mask, dropout, scaling, **options)
    if learned:
        first = [states[:, :, :learned] for states in (query, key, value)]
        of_learned, _ = sdpa_attention_forward(module, *first, None, dropout, scaling)
        query = query[:, :, learned:]
        of_tokens, _ = part_attention(module, query, key, value, attention_mask, dropout, scaling, in_parts)
        return torch.cat((of_learned, of_tokens), dim=1), None
    ranks = dist.get_world_size(_group)
    # Fewer heads of keys than ranks: each is sent to all ranks whose heads of queries need it.
    copies = ranks // math.gcd(key.size(1), ranks)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    learned_keys = key.size(2) - query.size(2)
    key, value = _exchange(key, learned_keys), _exchange(value, learned_keys)  # [B, heads / P, learned_keys + S, D]
    query = _exchange(query)
    if "cu_seq_lens_q" in options:
        mixed, _ = sample_attention(module, query, key, value, attention_mask, dropout, scaling, **options)
    else:
        grouped, is_causal = key.size(1) != query.size(1), getattr(module, "is_causal", True)
        mask = None if is_causal else attention_mask
        padded = learned_keys if is_causal else 0
        # With `is_causal` query i attends to keys 0 to i, so learned keys get queries too, whose results are dropped:
        # it takes no mask besides that, and PyTorch's class of biases cannot be compiled.
        query = functional.pad(query, (0, 0, padded, 0)) if padded else query
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=grouped
        )[:, :, padded:].transpose(1, 2)
    return _exchange(mixed), None


def local_part(batch: Batch, part: int, parts: int) -> Batch:
    """Return a batch of rank `part` of P `parts`: its S / P tokens of each row, and the trained tokens whose loss it
    computes. With P = 2 and S = 8, part 0 has the tokens 0 to 3 and the losses of 1 to 4, as a token is predicted at
    the one before it. With one part the batch stays as it is; what has a number for each segment or sample always does.
    Added are `part` (part, parts), int64 [2], and `row_ids` and `row_segments` of whole rows, [B, S], of which
    ChatGLM-6B makes positions and mask.
    """
    if parts == 1:
        return batch
    part_batch = {**batch, "part": torch.tensor([part, parts])}
    part_batch |= {"row_ids": batch["input_ids"], "row_segments": batch["segment_ids"]}
    part_batch.pop("labels", None)  # `targets` has them
    length = batch["input_ids"].size(1) // parts
    for name in ("input_ids", "position_ids", "segment_ids", "seen_until"):
        if name in batch:
            part_batch[name] = batch[name].narrow(1, part * length, length).contiguous()
    # Indices of the tokens before trained ones: which are in this part, and those in the part's B x S / P tokens.
    is_own, before = part_indices(part_batch, part_batch["target_indices"] - 1)
    part_batch["target_indices"] = before + 1
    row_masks = {"targets": is_own, "sources": is_own, "taught": is_own}  # a row for each trained token
    if "taught" in batch:  # these have a row only for each trained token that the teacher scored
        row_masks["teacher_ids"] = row_masks["teacher_logs"] = is_own[batch["taught"]]
    return part_batch | {name: batch[name][mask] for name, mask in row_masks.items() if name in batch}


def _exchange(states: torch.Tensor, learned: int = 0) -> torch.Tensor:
    """Send each rank its piece of dimension 1, and join the pieces that come along dimension 2: all heads of some
    tokens become some heads of all tokens, or back. `learned`: so many tokens in front, which each rank has already
    with all heads, are not sent; those of its heads remain.
    """
    assert _group is not None
    ranks = dist.get_world_size(_group)
    if learned:
        own_heads = states[:, :, :learned].chunk(ranks, dim=1)[dist.get_rank(_group)]
        return torch.cat((own_heads, _exchange(states[:, :, learned:])), dim=2)
    pieces = torch.stack(states.chunk(ranks, dim=1))
    return torch.cat(exchange_rows(pieces, _group).unbind(), dim=2)


def sum_over_parts(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values that ranks have of parts of rows; its gradient is each summand's. A collective."""
    total = values.detach().clone()
    dist.all_reduce(total, group=_group)
    return values + (total - values.detach())  # the total, with the gradient of `values`


def check_sequence_parallel(
    engine: torch.nn.Module,
    vocab_size: int,
    device: torch.device,
    name: str,
    forward: Callable[[Batch], torch.Tensor] | None,
    packed: bool,
    shared: bool = False,
) -> None:
    """Measure on the loaded model that parts of rows give the logits of whole ones, else raise ModelError. A
    collective. `forward`: as of `check_isolation`; `packed`: rows hold several samples; `shared`: these share prefixes.
    """
    assert _group is not None
    part, parts = dist.get_rank(_group), dist.get_world_size(_group)
    batch = isolation_rows(vocab_size, times=parts, trunk=8 if shared else 0)
    if not packed:  # the same ids as rows of one sample each
        batch = {"input_ids": batch["input_ids"], "segment_ids": torch.ones_like(batch["input_ids"])}
        batch["position_ids"] = torch.arange(batch["input_ids"].size(1)).expand_as(batch["input_ids"])
    module: Any = getattr(engine, "module", engine)
    if getattr(module, "builds_positions", False):
        # Contexts that end in the first part, in the middle and in the last part.
        size = batch["input_ids"].size(1)
        batch["input_ids"][torch.arange(3), torch.tensor([4, size // 2, size - 4])] = module.config.bos_token_id
    part_batch = local_part(with_targets({**batch, "labels": batch["input_ids"]}), part, parts)
    logits_of = forward or (lambda rows: evaluate_logits(engine, rows, device))
    logits, part_logits = logits_of(batch), logits_of(part_batch)
    length = part_logits.size(1)
    squared_change = (part_logits - logits[:, part * length :][:, :length]).square().mean()
    # The mean, as single logits in bf16 differ by several per cent between kernels; of all ranks, to act alike.
    sums = sum_over_ranks(torch.stack((squared_change, logits.var())), device)
    change = float((sums[0] / sums[1]).sqrt())
    if not change <= _MOST_CHANGE_OF_PARTS:
        raise ModelError(
            "{name} cannot be trained with parallel.sequence = {ranks}: parts of rows give other logits than whole "
            "rows (by {change} of their spread).",
            name=name,
            ranks=parts,
            change=f"{change:.3g}",
        )


AttentionInterface.register(SEQUENCE, part_attention)
AttentionMaskInterface.register(SEQUENCE, training_mask)
