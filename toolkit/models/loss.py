"""The sum of token losses of one micro-batch. B batch, S sequence, V vocabulary."""

from typing import Any

import torch
from torch.nn import functional

from toolkit.models.attention import attention_arguments

UNTRAINED = -100


def token_loss_sum(engine: torch.nn.Module, batch: dict[str, torch.Tensor], **model_arguments: Any) -> torch.Tensor:
    """Run the model forward and return the sum (not the mean) of the trained tokens' cross entropies.

    The sum, because a mean of micro-batch means weighs tokens unequally (transformers#34191 and others); the caller
    divides by the number of trained tokens of the whole global batch.

    Args:
        engine: the DeepSpeed engine, or a transformers model.
        batch: `input_ids`, `labels` (-100 where untrained), `position_ids`, `segment_ids`, each `[B, S]`, on the
            engine's device; packed with `cu_seq_lens`, see `attention_arguments`.
        **model_arguments: passed on to the model.

    Returns:
        float32 scalar on the engine's device, of this rank alone; 0 (with a zero gradient) without trained tokens.
    """
    return _cross_entropy(engine, batch, "sum", **model_arguments)


def token_losses(engine: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return each trained token's cross entropy, at the position before it; 0 elsewhere. Arguments as above.

    Returns:
        float32 `[B, S]`.
    """
    return _cross_entropy(engine, batch, "none").view(batch["labels"].shape)


def _cross_entropy(
    engine: torch.nn.Module, batch: dict[str, torch.Tensor], reduction: str, **model_arguments: Any
) -> torch.Tensor:
    # ChatGLM-6B's two position channels come from where <sop> stands; the model makes them itself.
    module = getattr(engine, "module", engine)
    builds_positions = getattr(module, "builds_positions", False)
    logits = engine(
        input_ids=batch["input_ids"],
        position_ids=None if builds_positions else batch["position_ids"],
        use_cache=False,
        **attention_arguments(module, batch),
        **model_arguments,
    ).logits
    # Position s predicts token s + 1. The labels are shifted, not the logits: [B, S, V] is never copied.
    targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=UNTRAINED)
    return functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)).float(),  # a view, but for a prompt's, which are cut
        targets.reshape(-1),
        ignore_index=UNTRAINED,
        reduction=reduction,
    )


def num_trained_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Return how many tokens `token_loss_sum` sums over (the first of a row is never predicted)."""
    return int((batch["labels"][:, 1:] != UNTRAINED).sum())
