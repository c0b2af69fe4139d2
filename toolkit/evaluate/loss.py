"""Loss and perplexity of the validation split, exact over all its tokens."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.config.schema import EVAL_LOSS
from toolkit.distributed.process_group import sum_over_ranks
from toolkit.models.loss import token_losses
from toolkit.models.pipeline import evaluate_window, is_pipeline


def evaluate_loss(
    model: DeepSpeedEngine | PreTrainedModel,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    names: Sequence[str],
    device: torch.device,
    copies: int = 1,
) -> dict[str, float]:
    """Evaluate a model as it stands. A collective.

    Args:
        model: the engine, or the model where there is none; left in its mode.
        micro_batches: this rank's part of the split, CPU tensors `[B, S]`; as many on every rank, fillers included.
            `sources` tells of each trained token the number of its source.
        names: of the sources, by number.
        device: where the model computes.
        copies: how many ranks have the same rows.

    Returns:
        As in metrics.jsonl: `eval_loss` in nats per trained token, `eval_perplexity`, `eval_tokens`, the trained
        tokens; where the split has several sources also `eval_loss/SOURCE`.
    """
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    was_training = getattr(model, "module", model).training
    model.eval()
    for batch, by_place in _losses(model, micro_batches):
        # A token's loss stands before it.
        losses = by_place.flatten()[batch["places"] - 1]
        for number in batch["sources"].unique().tolist():
            mine = batch["sources"] == number
            sums[number, 0] += losses[mine].sum(dtype=torch.float64)
            sums[number, 1] += mine.sum()
    model.train(was_training)
    totals = sum_over_ranks(sums.flatten(), device).view(-1, 2) / copies
    by_name: dict[str, torch.Tensor] = {}
    for name, total in zip(names, totals, strict=True):
        by_name[name] = by_name.get(name, 0) + total
    loss, tokens = (float(value) for value in totals.sum(dim=0))
    found = {EVAL_LOSS: loss / tokens, "eval_perplexity": perplexity(loss / tokens), "eval_tokens": int(tokens)}
    parts = {name: float(total[0] / total[1]) for name, total in sorted(by_name.items()) if total[1]}
    if len(parts) > 1:
        found |= {f"{EVAL_LOSS}/{name}": part for name, part in parts.items()}
    return found


def _losses(
    model: DeepSpeedEngine | PreTrainedModel, micro_batches: Iterable[dict[str, torch.Tensor]]
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield micro-batches and the losses of their tokens `[B, S]`, on the CPU; a pipeline's on its last stage alone."""
    if not is_pipeline(model):
        for batch in micro_batches:
            yield batch, token_losses(model, batch).cpu()
        return
    remaining = iter(micro_batches)
    while window := list(islice(remaining, 2 * model.num_stages)):  # so many that most stages have something to do
        found = evaluate_window(model, window, lambda stage, batch: token_losses(stage, batch).cpu())
        yield from zip(window, found, strict=False)


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
