"""Answers to many questions: every rank takes its part of the batches, and all ranks get all answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from toolkit.distributed.process_group import barrier, gather, rank, world_size
from toolkit.errors import Stopped
from toolkit.evaluate.generate import Sampling, generate
from toolkit.models.chat import AnyChatEncoder


@dataclass(kw_only=True, slots=True)
class Answers:
    """What came of it, the same on every rank."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Number of the question -> tokens of its answer; without those that failed."""
    failures: list[str] = field(default_factory=list)
    """Why batches failed, each reason once."""
    seconds: float = 0.0
    """From the first batch to the last, over all ranks."""


def answer_all(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int,
    device: torch.device,
    *,
    in_step: bool,
    alive: Callable[[], object],
    place: int | None = None,
    num_places: int | None = None,
) -> Answers:
    """Answer every prompt once over all ranks. A collective.

    Prompts of like length share a batch. Which do, and what is drawn for them, is the same on any number of ranks.

    Args:
        model: see `generate`.
        encoder: see `generate`.
        prompts: the same on every rank; those too long for the model are left out already.
        sampling: how to choose tokens.
        batch_size: prompts that a rank answers at once.
        device: see `generate`.
        in_step: see `generate`. A batch that fails then ends the run, as the other ranks are in the middle of theirs;
            otherwise it is counted, and the others go on.
        alive: called after each batch.
        place: of this rank among those that take batches; None: each rank by itself.
        num_places: how many there are; ranks of one place answer the same batches together.
    """
    place, at_once = rank() if place is None else place, num_places or world_size()
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    mine: dict[int, list[int]] = {}
    failures: set[str] = set()
    started = time.perf_counter()
    for first in range(0, len(batches), at_once):
        number = first + place
        has_one = number < len(batches)
        # A rank without a batch takes part in the others' forward passes all the same, with the shortest prompt.
        batch = batches[number] if has_one else order[:1]
        if has_one or in_step:
            try:
                asked = [prompts[question] for question in batch]
                own = replace(sampling, seed=sampling.seed + number)
                found = generate(model, encoder, asked, own, device, in_step=in_step)
                mine |= dict(zip(batch, found, strict=True)) if has_one else {}
            except Stopped:
                raise
            except Exception as error:  # whatever it is, most likely a lack of memory: no reason to end a training run
                if in_step:
                    raise
                failures.add(f"{type(error).__name__}: {error}".splitlines()[0])
        barrier()  # no rank gets so far behind that the others' next collective takes it for dead
        alive()
    answers = Answers(seconds=time.perf_counter() - started)
    for ids, reasons in gather((mine, failures)):
        answers.ids |= ids
        answers.failures += sorted(reasons - set(answers.failures))
    return answers
