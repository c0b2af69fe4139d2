"""The validation loss, what n-gram models reach, and the lines about an evaluation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toolkit.config.schema import EVAL_LOSS, EVAL_PAIRS, Metric
from toolkit.data.store import TokenizedCache
from toolkit.distributed.process_group import sum_over_ranks
from toolkit.messages import tr
from toolkit.models import probe, stages
from toolkit.models.loss import token_losses

SAMPLES, PAIRS = "eval_samples", "eval_pairs"
"""Figures with the number of samples of a custom model's, or pairs of a preference task's, evaluation."""
Measure = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def evaluate_loss(
    model: DeepSpeedEngine | PreTrainedModel,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    names: Sequence[str],
    device: torch.device,
    copies: int = 1,
    measure: Measure = token_losses,
) -> dict[str, float]:
    """Return a model's mean loss over micro-batches of all ranks, also for each data source. A collective.

    Args:
        model: the engine, or the model without one; left in its mode.
        micro_batches: this rank's, CPU tensors `[B, S]`, as many on every rank; `sources` [T] of them has the number of
            each trained token's data source.
        names: of the sources, by number.
        device: where the model computes.
        copies: how many ranks have the same sequences.
        measure: returns the losses of a micro-batch's tokens as `token_losses` does.

    Returns:
        `eval_loss` in nats per trained token, `eval_perplexity`, `eval_tokens`; of several sources `eval_loss/SOURCE`.
    """
    sums = torch.zeros(len(names), 2, dtype=torch.float64)  # of each source: losses, tokens
    with probe.evaluating(model):
        for batch, by_position in stages.measure_each(
            model, micro_batches, lambda *arguments: measure(*arguments).cpu()
        ):
            # A token's loss is at the position before it.
            losses = by_position.flatten()[batch["target_indices"] - 1]
            for number in batch["sources"].unique().tolist():
                is_of_source = batch["sources"] == number
                sums[number, 0] += losses[is_of_source].sum(dtype=torch.float64)
                sums[number, 1] += is_of_source.sum()
    totals = sum_over_ranks(sums.flatten(), device).view(-1, 2) / copies
    by_name: dict[str, torch.Tensor] = {}
    for name, total in zip(names, totals, strict=True):  # several sources may have the same name
        by_name[name] = by_name.get(name, 0) + total
    total_loss, tokens = totals.sum(dim=0).tolist()
    loss = total_loss / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows beyond that
    figures = {EVAL_LOSS: loss, "eval_perplexity": perplexity, "eval_tokens": int(tokens)}
    parts = {name: float(total[0] / total[1]) for name, total in sorted(by_name.items()) if total[1]}
    if len(parts) > 1:
        figures |= {f"{EVAL_LOSS}/{name}": part for name, part in parts.items()}
    return figures


def ngram_baselines(
    train: TokenizedCache, validation: TokenizedCache, vocab_size: int, samples: NDArray[Any] | None = None
) -> tuple[float, float]:
    """Fit a unigram and a bigram model to the trained tokens of `train`; return the loss of each on `validation`'s.

    Unigram: counts plus one. Bigram: Witten-Bell, P(w|h) = (c(h,w) + t(h) P(w)) / (c(h) + t(h)) with t(h) the number of
    different tokens seen after h and P the unigram, which an h never seen leaves. 1 million tokens take about a second.
    Losses are means in nats per trained token; `samples` of the validation split are measured, None takes all.
    """
    # Arrays over the trained tokens, each with the token before it (h), or [V] by token id.
    before, token = _pairs(train)
    probability = (np.bincount(token, minlength=vocab_size) + 1.0) / (len(token) + vocab_size)

    bigrams, bigram_counts = np.unique(before * vocab_size + token, return_counts=True)  # a pair as one number, sorted
    seen = np.bincount(before, minlength=vocab_size)
    followers = np.bincount(bigrams // vocab_size, minlength=vocab_size)

    before, token = _pairs(validation, samples)
    code = before * vocab_size + token
    index = np.minimum(np.searchsorted(bigrams, code), len(bigrams) - 1)  # where the pair is, if it was seen
    count = np.where(bigrams[index] == code, bigram_counts[index], 0)
    total = np.maximum(seen[before] + followers[before], 1)  # no division by 0 where h was never seen
    unseen_weight = np.where(seen[before] > 0, followers[before] / total, 1.0)
    bigram_probability = count / total + unseen_weight * probability[token]
    return float(-np.log(probability[token]).mean()), float(-np.log(bigram_probability).mean())


def _pairs(store: TokenizedCache, samples: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the preceding token and the token of each trained position of a split, int64 [T] each."""
    is_member = np.zeros(len(store.offsets) - 1, dtype=np.bool_)  # which samples of the files are asked for
    is_member[store.members if samples is None else store.members[samples]] = True
    end = int(store.offsets[-1])
    positions = np.flatnonzero(store.read_trained(0, end))
    sample_of = np.searchsorted(store.offsets, positions, side="right") - 1  # the last that begins at or before each
    positions = positions[is_member[sample_of]]
    ids = store.read_ids(0, end)
    return ids[positions - 1].astype(np.int64), ids[positions].astype(np.int64)


def describe_evaluation(row: Mapping[str, float]) -> list[str]:
    """Return the lines to print about an evaluation, which is a line of metrics.jsonl."""
    step = int(row["step"])
    if PAIRS in row:
        return [
            tr(
                "step {step}  validation loss {loss}, reward accuracy {accuracy}, margin {margin} over {count} pairs",
                step=step,
                loss=f"{row[EVAL_LOSS]:.4f}",
                accuracy=f"{row[EVAL_PAIRS[0]]:.1%}",
                count=f"{int(row[PAIRS]):,}",
                margin=f"{row[EVAL_PAIRS[1]]:.4f}",
            )
        ]
    if SAMPLES in row:
        custom_figures = {name: value for name, value in row.items() if name not in ("step", EVAL_LOSS, SAMPLES)}
        return [
            tr(
                "step {step}  validation loss {loss} over {count} samples",
                step=step,
                loss=f"{row[EVAL_LOSS]:.4f}",
                count=f"{int(row[SAMPLES]):,}",
            )
            + "".join(f"  {name.removeprefix('eval_')} {value:.4f}" for name, value in custom_figures.items())
        ]
    lines = [
        tr(
            "step {step}  validation loss {loss} nats/token, perplexity {perplexity} over {tokens} tokens",
            step=step,
            loss=f"{row[EVAL_LOSS]:.4f}",
            perplexity=f"{row['eval_perplexity']:.2f}",
            tokens=f"{int(row['eval_tokens']):,}",
        )
    ]
    if "eval_answers" in row:
        values = {name.removeprefix("eval_"): value for name, value in row.items() if "/" not in name}
        figures = [f"{metric.value} {values[metric.value]:.2f}" for metric in Metric if metric.value in values]
        lines.append(
            tr(
                "step {step}  {count} answers, {pace} tokens/s: {figures}",
                step=step,
                count=f"{values['answers']:,}",
                pace=f"{values['tokens_per_s']:,.0f}",
                figures=", ".join(figures),
            )
        )
    return lines
