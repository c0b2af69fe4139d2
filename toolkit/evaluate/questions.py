"""What a model is asked, and what it should say: out of the tokenised validation split, as training sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.data.store import Store
from toolkit.evaluate.generate import until_stop
from toolkit.models.chat import AnyChatEncoder


@dataclass(frozen=True, slots=True)
class Question:
    """A validation sample up to its last answer, and that answer."""

    prompt: list[int]
    """Ids, exactly those before the answer in training."""
    answer: list[int]
    """Ids, without the token that ends it."""
    source: str
    """Name of its source, as `toolkit show` has it."""
    where: str
    """file:line of its row."""


def choose_questions(
    store: Store, encoder: AnyChatEncoder, names: Sequence[str], max_samples: int
) -> tuple[list[Question], int]:
    """Take samples evenly from all over a split.

    Args:
        store: the split.
        encoder: what tokenised it.
        names: of the sources.
        max_samples: how many samples to take; 0 takes all.

    Returns:
        The questions; and how many of the samples are none, such as plain texts, which have no prompt.
    """
    count = min(max_samples or len(store), len(store))
    chosen = [number * len(store) // count for number in range(count)]
    sources = store.sources()
    questions = []
    for sample in chosen:
        ids, trained = store[sample]
        if parts := split_sample(ids.tolist(), trained.tolist(), encoder):
            questions.append(Question(*parts, names[sources[sample]], store.where(sample)))
    return questions, count - len(questions)


def split_sample(
    ids: Sequence[int], trained: Sequence[bool], encoder: AnyChatEncoder
) -> tuple[list[int], list[int]] | None:
    """Return prompt and answer of a sample; None if nothing but special tokens comes before what is trained.

    The answer is the last stretch that is trained. Where a family trains more than answers (ChatGLM-6B's <sop>, tools'
    observations), it begins after the last token that makes the assistant speak.
    """
    end = max((place for place, is_trained in enumerate(trained) if is_trained), default=-1) + 1
    begin = next((place + 1 for place in range(end - 1, -1, -1) if not trained[place]), 0)
    asked = {int(token) for token in encoder.answer_ids}
    begin = next((place + 1 for place in range(end - 1, begin - 1, -1) if ids[place] in asked), begin)
    prompt = list(ids[:begin])
    # The first token of a sample is never trained: alone it is the beginning of a text, or of a piece of one.
    if len(prompt) < 2 or set(prompt) <= set(encoder.tokenizer.all_special_ids):
        return None
    return prompt, until_stop(list(ids[begin:end]), set(encoder.stop_ids))
