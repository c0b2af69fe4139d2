"""From answers to figures and to the rows that are kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.schema import Metric
from toolkit.errors import Stopped
from toolkit.evaluate.answers import Answers
from toolkit.evaluate.generate import text_of
from toolkit.evaluate.metrics import score, tokenization
from toolkit.evaluate.questions import Question
from toolkit.models.chat import AnyChatEncoder
from toolkit.secrets import hide


@dataclass(kw_only=True, slots=True)
class Results:
    """What the answers are worth."""

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


def judge(
    questions: Sequence[Question], answers: Answers, metrics: Sequence[Metric], encoder: AnyChatEncoder
) -> Results:
    """Score the answers; a metric that fails is left out.

    Args:
        questions: what was asked.
        answers: by their numbers; at least one.
        metrics: the scores wanted.
        encoder: turns ids into texts.
    """
    numbers = sorted(answers.ids)
    asked = [questions[number] for number in numbers]
    texts = [text_of(encoder, answers.ids[number]) for number in numbers]
    references = [text_of(encoder, question.answer) for question in asked]
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
    asked: Sequence[Question],
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
