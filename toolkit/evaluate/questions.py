"""Questions from a validation split, and generation of their answers on all ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.data.store import TokenizedCache
from toolkit.distributed.process_group import barrier, gather, rank, world_size
from toolkit.evaluate.generate import Sampling, generate, until_stop
from toolkit.messages import Stopped
from toolkit.models import chat


@dataclass(frozen=True, slots=True)
class ValidationQuestion:
    """A validation sample up to its last answer, and that answer."""

    prompt: list[int]
    """Ids before the answer, the same as in training."""
    answer: list[int]
    """Ids of the answer, without the token that ends it."""
    source: str
    """Name of its source, as in `toolkit show`."""
    where: str
    """file:line of its row."""


def choose_questions(
    store: TokenizedCache, encoder: chat.AnyChatEncoder, names: Sequence[str], max_samples: int
) -> tuple[list[ValidationQuestion], int]:
    """Return the questions of at most `max_samples` samples (0: all), evenly from a split, and how many of these have
    no prompt, and so give no question.
    """
    count = min(max_samples or len(store), len(store))
    sources = store.sources()
    questions = []
    for sample in (number * len(store) // count for number in range(count)):
        ids, trained = store[sample]
        if parts := split_sample(ids.tolist(), trained.tolist(), encoder):
            questions.append(ValidationQuestion(*parts, names[sources[sample]], store.where(sample)))
    return questions, count - len(questions)


def split_sample(
    ids: Sequence[int], trained: Sequence[bool], encoder: chat.AnyChatEncoder
) -> tuple[list[int], list[int]] | None:
    """Return prompt and answer of a sample, None if only special tokens precede the trained ones. The answer is the
    last run of trained tokens, after the last of the encoder's `answer_ids` in it.
    """
    # The last run of trained tokens is ids[begin:end].
    end = len(trained)
    while end and not trained[end - 1]:
        end -= 1
    begin = end
    while begin and trained[begin - 1]:
        begin -= 1
    openers = {int(token) for token in encoder.answer_ids}
    begin = max((index + 1 for index in range(begin, end) if ids[index] in openers), default=begin)
    prompt = list(ids[:begin])
    # The first token of a sample is never trained; alone it is the beginning of a plain text.
    if len(prompt) < 2 or set(prompt) <= set(encoder.tokenizer.all_special_ids):
        return None
    return prompt, until_stop(list(ids[begin:end]), set(encoder.stop_ids))


@dataclass(kw_only=True, slots=True)
class Answers:
    """The answers to some prompts, the same on every rank."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Number of the question -> tokens of its answer; without those that failed."""
    failures: list[str] = field(default_factory=list)
    """Why batches failed, each reason once."""
    seconds: float = 0.0
    """From the first batch to the last, over all ranks."""


def generate_all(
    model: PreTrainedModel,
    encoder: chat.AnyChatEncoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int,
    device: torch.device,
    *,
    in_step: bool,
    alive: Callable[[], object],
    replica: int | None = None,
    num_replicas: int | None = None,
    options: Callable[[Sequence[int]], Mapping[str, Any]] = lambda batch: {},
) -> Answers:
    """Answer every prompt once over all ranks. A collective; arguments as for `generate`, and these.

    Which prompts share a batch, and what is sampled, does not depend on the number of ranks. A batch that fails is
    counted; with `in_step` it ends the run, as the other ranks are in the middle of theirs.

    Args:
        prompts: the same on every rank; those too long for the model are dropped already.
        batch_size: prompts that a rank answers at once.
        alive: called after each batch.
        replica: index among the `num_replicas` of the model that take batches; None: the rank. The ranks of one
            replica answer together.
        num_replicas: None: as many as there are ranks.
        options: returns further arguments of `generate` for a batch, of which it gets the numbers of the prompts.
    """
    replica, at_once = rank() if replica is None else replica, num_replicas or world_size()
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    answered: dict[int, list[int]] = {}
    failures: set[str] = set()
    started = time.perf_counter()
    for first in range(0, len(batches), at_once):
        number = first + replica
        has_batch = number < len(batches)
        # A rank without a batch takes part in the others' forward passes with the shortest prompt.
        batch = batches[number] if has_batch else order[:1]
        if has_batch or in_step:
            try:
                seeded = replace(sampling, seed=sampling.seed + number)
                asked = [prompts[index] for index in batch]
                answers = generate(model, encoder, asked, seeded, device, in_step=in_step, **options(batch))
                if has_batch:
                    answered |= dict(zip(batch, answers, strict=True))
            except Stopped:
                raise
            except Exception as error:  # most likely out of memory; a training run must go on
                if in_step:
                    raise
                failures.add(f"{type(error).__name__}: {error}".splitlines()[0])
        barrier()  # so that no rank falls behind until the others' next collective times out
        alive()
    result = Answers(seconds=time.perf_counter() - started)
    for ids, reasons in gather((answered, failures)):
        result.ids |= ids
        result.failures += sorted(reasons - set(result.failures))
    return result
