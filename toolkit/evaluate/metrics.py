"""Scores of answers against references: pure functions over texts. All but `length` (characters) are from 0 to 100."""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from toolkit.config.schema import Metric

_CHINESE = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]")
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Scores:
    """What one metric says of some answers."""

    value: float
    """Of all answers together."""
    each: list[float]
    """Of each answer by itself, for a look at single ones: the mean of BLEU's, for example, is not BLEU."""
    signature: str = ""
    """How exactly it was computed, where the library says so."""


def tokenization(references: Iterable[str]) -> str:
    """Return sacrebleu's name for how texts become words: zh where a reference holds a Chinese character, else 13a.

    13a, sacrebleu's default, takes a Chinese sentence for one word, so that BLEU is 0 even for equal ones.
    """
    return "zh" if any(_CHINESE.search(reference) for reference in references) else "13a"


def score(metric: Metric, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Score some answers.

    Args:
        metric: which score.
        answers: at least one; an empty one scores 0.
        references: one for each answer.
        tokenize: of `tokenization`; for BLEU and distinct-n.
    """
    return _METRICS[metric](answers, references, tokenize)


def _bleu(answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    from sacrebleu.metrics import BLEU

    corpus, single = BLEU(tokenize=tokenize), BLEU(tokenize=tokenize, effective_order=True)
    each = [single.sentence_score(*pair).score for pair in _with_lists(answers, references)]
    return Scores(corpus.corpus_score(answers, [references]).score, each, str(corpus.get_signature()))


def _chrf(answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    each = [chrf.sentence_score(*pair).score for pair in _with_lists(answers, references)]
    return Scores(chrf.corpus_score(answers, [references]).score, each, str(chrf.get_signature()))


def _with_lists(answers: Sequence[str], references: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    return ((answer, [reference]) for answer, reference in zip(answers, references, strict=True))


def _mean(one: Callable[[str, str], float], answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Return the mean of a score of single answers."""
    each = [one(answer, reference) for answer, reference in zip(answers, references, strict=True)]
    return Scores(sum(each) / len(each), each)


def _rouge_n(n: int, answer: str, reference: str) -> float:
    """ROUGE-N as F1 over characters, white space left out."""
    ours, theirs = (Counter(_ngrams(_BLANKS.sub("", text), n)) for text in (answer, reference))
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def _rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L as F1: the longest common subsequence of characters, white space left out."""
    ours, theirs = (_BLANKS.sub("", text) for text in (answer, reference))
    return _f1(_common_subsequence(ours, theirs), len(ours), len(theirs))


def _f1(common: int, ours: int, theirs: int) -> float:
    return 200 * common / (ours + theirs) if common else 0.0


def _common_subsequence(left: str, right: str) -> int:
    """Return the length of the longest common subsequence, a row of the usual table at a time as bits of one number.

    Hyyrö, Bit-Parallel LCS-length Computation Revisited, 2004.
    """
    places: dict[str, int] = {}
    for place, letter in enumerate(right):
        places[letter] = places.get(letter, 0) | 1 << place
    full = (1 << len(right)) - 1
    row = full
    for letter in left:
        matches = row & places.get(letter, 0)
        row = (row + matches | row - matches) & full
    return len(right) - row.bit_count()


def _exact_match(answer: str, reference: str) -> float:
    return 100.0 if answer.strip() == reference.strip() else 0.0


def _length(answer: str, reference: str) -> float:
    return float(len(answer))


def _distinct(n: int, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Different n-grams among all n-grams of the answers, over the same words as BLEU. Li et al. 2016, section 5."""
    from sacrebleu.metrics import BLEU

    words = BLEU(tokenize=tokenize).tokenizer
    found = [list(_ngrams(words(answer).split(), n)) for answer in answers]
    return Scores(
        _share_of_different([one for own in found for one in own]), [_share_of_different(own) for own in found]
    )


def _share_of_different(ngrams: Sequence[object]) -> float:
    return 100 * len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _ngrams(units: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(units[begin:] for begin in range(n)), strict=False)


def _chatglm_bleu_4(answer: str, reference: str) -> float:
    """BLEU-4 as ChatGLM-6B's and ChatGLM2-6B's ptuning/main.py have it: of characters, smoothed, rounded."""
    bleu = importlib.import_module("nltk.translate.bleu_score")
    smoothed = bleu.SmoothingFunction().method3
    return float(round(bleu.sentence_bleu([list(reference)], list(answer), smoothing_function=smoothed) * 100, 4))


def _chatglm_rouge(name: str, answer: str, reference: str) -> float:
    """ROUGE as ibid.: rouge-chinese over jieba's words, rounded; an empty text, at which that fails, scores 0."""
    jieba, rouge = _chatglm_libraries()
    words = [" ".join(jieba.cut(text)) for text in (answer, reference)]
    if not all(text.split() for text in words):
        return 0.0
    return float(round(rouge.get_scores(*words)[0][name]["f"] * 100, 4))


@cache
def _chatglm_libraries() -> tuple[Any, Any]:
    jieba = importlib.import_module("jieba")
    jieba.setLogLevel("WARNING")  # it tells on stderr where it keeps its dictionary
    return jieba, importlib.import_module("rouge_chinese").Rouge()


_Score = Callable[[Sequence[str], Sequence[str], str], Scores]
_METRICS: dict[Metric, _Score] = {
    Metric.bleu: _bleu,
    Metric.chrf: _chrf,
    Metric.rouge_1: partial(_mean, partial(_rouge_n, 1)),
    Metric.rouge_2: partial(_mean, partial(_rouge_n, 2)),
    Metric.rouge_l: partial(_mean, _rouge_l),
    Metric.exact_match: partial(_mean, _exact_match),
    Metric.distinct_1: partial(_distinct, 1),
    Metric.distinct_2: partial(_distinct, 2),
    Metric.length: partial(_mean, _length),
    Metric.chatglm_bleu_4: partial(_mean, _chatglm_bleu_4),
    Metric.chatglm_rouge_1: partial(_mean, partial(_chatglm_rouge, "rouge-1")),
    Metric.chatglm_rouge_2: partial(_mean, partial(_chatglm_rouge, "rouge-2")),
    Metric.chatglm_rouge_l: partial(_mean, partial(_chatglm_rouge, "rouge-l")),
}
