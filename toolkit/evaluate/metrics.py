"""Scores of answers against references: pure functions over texts. All but `length` (characters) are from 0 to 100.

Then from answers to metrics and to the rows that are kept, and what is said of an evaluation.
"""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from toolkit.config.schema import EVAL_LOSS, Metric
from toolkit.errors import Stopped
from toolkit.evaluate.answers import Answers, ValidationQuestion
from toolkit.evaluate.generate import decode_answer
from toolkit.messages import tr
from toolkit.models.chat import AnyChatEncoder
from toolkit.secrets import hide

_CHINESE = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]")
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Scores:
    """One metric's scores of some answers."""

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
    """Score some answers, at least one, against one reference each; an empty one scores 0."""
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


@dataclass(kw_only=True, slots=True)
class Results:
    """The scores of an evaluation."""

    values: dict[str, float] = field(default_factory=dict)
    """As in metrics.jsonl: eval_METRIC, eval_METRIC/SOURCE where there are several, eval_answers, eval_tokens_per_s."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One for each answer, in the order of the questions."""
    tokenize: str = ""
    """How texts became words; see `metrics.tokenization`."""
    signatures: dict[str, str] = field(default_factory=dict)
    """How sacrebleu computed its metrics."""
    failures: dict[str, str] = field(default_factory=dict)
    """Metric -> why it could not be computed."""


def score_answers(
    questions: Sequence[ValidationQuestion], answers: Answers, metrics: Sequence[Metric], encoder: AnyChatEncoder
) -> Results:
    """Score the answers to some questions, at least one; a metric that fails is left out."""
    numbers = sorted(answers.ids)
    asked = [questions[number] for number in numbers]
    texts = [decode_answer(encoder, answers.ids[number]) for number in numbers]
    references = [decode_answer(encoder, question.answer) for question in asked]
    tokens = [len(answers.ids[number]) for number in numbers]
    results = Results(
        values={"eval_answers": len(asked), "eval_tokens_per_s": sum(tokens) / answers.seconds},
        tokenize=tokenization(references),
    )
    each = _score_all(results, metrics, asked, texts, references)
    results.rows = [
        {
            "source": question.source,
            "where": question.where,
            "prompt": hide(str(encoder.tokenizer.decode(question.prompt))),
            "output": hide(text),
            "reference": hide(reference),
            "output_tokens": count,
            **{name: scores[place] for name, scores in each.items()},
        }
        for place, (question, text, reference, count) in enumerate(zip(asked, texts, references, tokens, strict=True))
    ]
    return results


def _score_all(
    results: Results,
    metrics: Sequence[Metric],
    asked: Sequence[ValidationQuestion],
    texts: Sequence[str],
    references: Sequence[str],
) -> dict[str, list[float]]:
    """Fill in the values, over all answers and by source, and return the scores of single answers."""
    tokenize = results.tokenize
    by_source: dict[str, list[int]] = {}
    for place, question in enumerate(asked):
        by_source.setdefault(question.source, []).append(place)
    each = {}
    for metric in metrics:
        name = metric.value
        try:
            scores = score(metric, texts, references, tokenize)
            values = {f"eval_{name}": scores.value}
            for source, places in sorted(by_source.items()) if len(by_source) > 1 else ():
                of_source = score(metric, [texts[i] for i in places], [references[i] for i in places], tokenize)
                values[f"eval_{name}/{source}"] = of_source.value
        except Stopped:
            raise
        except Exception as error:  # a library's fault is no reason to lose the others, let alone a training run
            results.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        results.values |= values
        each[name] = scores.each
        if scores.signature:
            results.signatures[name] = scores.signature
    return each


SAMPLES = "eval_samples"
"""How many samples an evaluation of a custom model is of; a language model's counts tokens."""


def describe_evaluation(row: Mapping[str, float]) -> list[str]:
    """Return the lines about an evaluation, a row of metrics.jsonl."""
    step = int(row["step"])
    if SAMPLES in row:
        others = {name: value for name, value in row.items() if name not in ("step", EVAL_LOSS, SAMPLES)}
        return [
            tr(
                "step {step}  validation loss {loss} over {count} samples",
                step=step,
                loss=f"{row[EVAL_LOSS]:.4f}",
                count=f"{int(row[SAMPLES]):,}",
            )
            + "".join(f"  {name.removeprefix('eval_')} {value:.4f}" for name, value in others.items())
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
        whole = {name.removeprefix("eval_"): value for name, value in row.items() if "/" not in name}
        figures = [f"{metric.value} {whole[metric.value]:.2f}" for metric in Metric if metric.value in whole]
        lines.append(
            tr(
                "step {step}  {count} answers, {pace} tokens/s: {figures}",
                step=step,
                count=f"{whole['answers']:,}",
                pace=f"{whole['tokens_per_s']:,.0f}",
                figures=", ".join(figures),
            )
        )
    return lines
