"""Scores of answers, from 0 to 100 but for `length` (characters)."""

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

from toolkit.config.schema import Metric
from toolkit.evaluate.generate import decode_answer
from toolkit.evaluate.questions import Answers, ValidationQuestion
from toolkit.messages import Stopped
from toolkit.models import chat
from toolkit.secrets import hide

_CHINESE = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]")
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Scores:
    """One metric's scores of some answers."""

    value: float
    """Score of all answers together."""
    each: list[float]
    """Score of each answer by itself; their mean is not always `value`, as for BLEU."""
    signature: str = ""
    """The library's description of how it was computed."""


def tokenization(references: Iterable[str]) -> str:
    """Return sacrebleu's tokenization: zh if a reference has a Chinese character, else 13a, which splits at spaces."""
    return "zh" if any(_CHINESE.search(reference) for reference in references) else "13a"


def score(metric: Metric, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Score some answers, at least one, against one reference each; an empty one scores 0."""
    return _METRICS[metric](answers, references, tokenize)


def _sacrebleu_scores(metric: Metric, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Score by sacreBLEU: BLEU, else chrF, of all answers and of each."""
    from sacrebleu.metrics import BLEU, CHRF

    if metric is Metric.bleu:  # `effective_order`: a text of three words has no 4-grams, and would score 0
        corpus, single = BLEU(tokenize=tokenize), BLEU(tokenize=tokenize, effective_order=True)
    else:
        corpus = single = CHRF()
    each = [single.sentence_score(text, [wanted]).score for text, wanted in zip(answers, references, strict=True)]
    return Scores(corpus.corpus_score(answers, [references]).score, each, str(corpus.get_signature()))


def _mean_score(
    score_of: Callable[[str, str], float], answers: Sequence[str], references: Sequence[str], tokenize: str
) -> Scores:
    """Return the mean of a score over all answers, and each one's score against its reference, without `tokenize`."""
    each = [score_of(answer, reference) for answer, reference in zip(answers, references, strict=True)]
    return Scores(sum(each) / len(each), each)


def _rouge_n(n: int, answer: str, reference: str) -> float:
    """Return ROUGE-N of an answer, F1 over the n-grams of its characters without white space."""
    in_answer = Counter(_ngrams(_BLANKS.sub("", answer), n))
    in_reference = Counter(_ngrams(_BLANKS.sub("", reference), n))
    return _f1((in_answer & in_reference).total(), in_answer.total(), in_reference.total())


def _rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L of an answer: F1 of the longest common subsequence of characters, without white space."""
    in_answer, in_reference = _BLANKS.sub("", answer), _BLANKS.sub("", reference)
    return _f1(_common_subsequence(in_answer, in_reference), len(in_answer), len(in_reference))


def _f1(common: int, in_answer: int, in_reference: int) -> float:
    """Return F1 in percent, 100 * 2 * common / (in_answer + in_reference), from numbers of units such as n-grams."""
    return 200 * common / (in_answer + in_reference) if common else 0.0


def _common_subsequence(left: str, right: str) -> int:
    """Return the longest common subsequence's length: Hyyrö, Bit-Parallel LCS-length Computation Revisited, 2004."""
    positions: dict[str, int] = {}
    for index, letter in enumerate(right):
        positions[letter] = positions.get(letter, 0) | 1 << index
    full = (1 << len(right)) - 1
    row = full  # a bit for each letter of `right`; it is 0 where the subsequence grows by that letter
    for letter in left:
        matches = row & positions.get(letter, 0)
        row = (row + matches | row - matches) & full
    return len(right) - row.bit_count()


def _distinct(n: int, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Return the percentage of different n-grams among all of the answers, of the same words as BLEU's: distinct-n of
    Li et al. 2016, section 5. It needs no references.
    """
    from sacrebleu.metrics import BLEU

    words = BLEU(tokenize=tokenize).tokenizer
    by_answer = [list(_ngrams(words(answer).split(), n)) for answer in answers]
    return Scores(_share_of_different(list(chain(*by_answer))), [_share_of_different(ngrams) for ngrams in by_answer])


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
    """ROUGE as ChatGLM-6B's ptuning/main.py has it: rouge-chinese over jieba's words, rounded. An empty text, for which
    rouge-chinese fails, scores 0. `name`: such as rouge-1.
    """
    jieba, rouge = _chatglm_libraries()
    words = [" ".join(jieba.cut(text)) for text in (answer, reference)]
    if not all(text.split() for text in words):
        return 0.0
    return float(round(rouge.get_scores(*words)[0][name]["f"] * 100, 4))


@cache
def _chatglm_libraries() -> tuple[Any, Any]:
    jieba = importlib.import_module("jieba")
    jieba.setLogLevel("WARNING")  # else it prints the path of its dictionary
    return jieba, importlib.import_module("rouge_chinese").Rouge()


_METRICS: dict[Metric, Callable[[Sequence[str], Sequence[str], str], Scores]] = {
    Metric.bleu: partial(_sacrebleu_scores, Metric.bleu),
    Metric.chrf: partial(_sacrebleu_scores, Metric.chrf),
    Metric.rouge_1: partial(_mean_score, partial(_rouge_n, 1)),
    Metric.rouge_2: partial(_mean_score, partial(_rouge_n, 2)),
    Metric.rouge_l: partial(_mean_score, _rouge_l),
    Metric.exact_match: partial(_mean_score, lambda answer, reference: 100.0 * (answer.strip() == reference.strip())),
    Metric.distinct_1: partial(_distinct, 1),
    Metric.distinct_2: partial(_distinct, 2),
    Metric.length: partial(_mean_score, lambda answer, reference: float(len(answer))),
    Metric.chatglm_bleu_4: partial(_mean_score, _chatglm_bleu_4),
    Metric.chatglm_rouge_1: partial(_mean_score, partial(_chatglm_rouge, "rouge-1")),
    Metric.chatglm_rouge_2: partial(_mean_score, partial(_chatglm_rouge, "rouge-2")),
    Metric.chatglm_rouge_l: partial(_mean_score, partial(_chatglm_rouge, "rouge-l")),
}


@dataclass(kw_only=True, slots=True)
class Results:
    """The scores of an evaluation."""

    values: dict[str, float] = field(default_factory=dict)
    """As in metrics.jsonl: eval_METRIC, eval_METRIC/SOURCE if there are several, eval_answers, eval_tokens_per_s."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One for each answer, in the order of the questions."""
    tokenize: str = ""
    """How texts became words; see `metrics.tokenization`."""
    signatures: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Metric -> why it could not be computed."""


def score_answers(
    questions: Sequence[ValidationQuestion], answers: Answers, metrics: Sequence[Metric], encoder: chat.AnyChatEncoder
) -> Results:
    """Score the answers to at least one question; a metric that fails is in `failures`."""
    numbers = sorted(answers.ids)
    asked = [questions[number] for number in numbers]
    texts = [decode_answer(encoder, answers.ids[number]) for number in numbers]
    references = [decode_answer(encoder, question.answer) for question in asked]
    tokens = [len(answers.ids[number]) for number in numbers]
    tokenize = tokenization(references)
    values = {"eval_answers": len(asked), "eval_tokens_per_s": sum(tokens) / answers.seconds}
    results = Results(values=values, tokenize=tokenize)
    by_source: dict[str, list[int]] = defaultdict(list)
    for index, question in enumerate(asked):
        by_source[question.source].append(index)
    compared_sources = sorted(by_source.items()) if len(by_source) > 1 else []
    scores_by_metric = {}
    for metric in metrics:
        name = metric.value
        try:
            scores = score(metric, texts, references, tokenize)
            figures = {f"eval_{name}": scores.value}
            for source, indices in compared_sources:
                texts_of, references_of = [texts[index] for index in indices], [references[index] for index in indices]
                figures[f"eval_{name}/{source}"] = score(metric, texts_of, references_of, tokenize).value
        except Stopped:
            raise
        except Exception as error:  # a library's fault is no reason to lose the others, let alone a training run
            results.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        results.values |= figures
        scores_by_metric[name] = scores.each
        if scores.signature:
            results.signatures[name] = scores.signature
    results.rows = [
        {
            "source": question.source,
            "where": question.where,
            "prompt": hide(str(encoder.tokenizer.decode(question.prompt))),
            "output": hide(text),
            "reference": hide(reference),
            "output_tokens": count,
            **{name: scores[index] for name, scores in scores_by_metric.items()},
        }
        for index, (question, text, reference, count) in enumerate(zip(asked, texts, references, tokens, strict=True))
    ]
    return results
