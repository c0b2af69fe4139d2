"""Validation loss against n-gram baselines; questions from validation splits, and scores of answers, from 0 to 100 but
for `length` (characters). Questions of similar length are asked together, each rank taking its share.
"""

import importlib
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toolkit.config.schema import EVAL_LOSS, EVAL_PAIRS, Metric
from toolkit.data.store import TokenizedCache
from toolkit.distributed.process_group import barrier, gather, rank, sum_over_ranks, world_size
from toolkit.evaluate.generate import Sampling, decode_answer, generate, until_stop
from toolkit.messages import Stopped, tr
from toolkit.models import chat, probe, stages
from toolkit.models.loss import token_losses
from toolkit.secrets import hide

Measure = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def evaluate_loss(
    model: DeepSpeedEngine | PreTrainedModel,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    names: Sequence[str],
    device: torch.device,
    copies: int = 1,
    measure: Measure = token_losses,
) -> dict[str, float]:
    """Evaluate a model as it is. A collective.

    Args:
        model: the engine, or the model without one; left in its mode.
        micro_batches: this rank's part, CPU tensors `[B, S]`, as many on every rank; `sources`: of trained tokens.
        names: of the sources, by number.
        device: where the model computes.
        copies: how many ranks have the same sequences.
        measure: returns the losses of a micro-batch's tokens as `token_losses` does.

    Returns:
        `eval_loss` in nats per trained token, `eval_perplexity`, `eval_tokens` (trained), and with several sources
        `eval_loss/SOURCE`.
    """
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    with probe.evaluating(model):
        for batch, by_position in stages.measured(model, micro_batches, lambda *given: measure(*given).cpu()):
            # A token's loss stands before it.
            losses = by_position.flatten()[batch["places"] - 1]
            for number in batch["sources"].unique().tolist():
                mine = batch["sources"] == number
                sums[number, 0] += losses[mine].sum(dtype=torch.float64)
                sums[number, 1] += mine.sum()
    totals = sum_over_ranks(sums.flatten(), device).view(-1, 2) / copies
    by_name: dict[str, torch.Tensor] = {}
    for name, total in zip(names, totals, strict=True):
        by_name[name] = by_name.get(name, 0) + total
    total_loss, tokens = (float(value) for value in totals.sum(dim=0))
    loss = total_loss / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf  # beyond that it overflows
    figures = {EVAL_LOSS: loss, "eval_perplexity": perplexity, "eval_tokens": int(tokens)}
    parts = {name: float(total[0] / total[1]) for name, total in sorted(by_name.items()) if total[1]}
    if len(parts) > 1:
        figures |= {f"{EVAL_LOSS}/{name}": part for name, part in parts.items()}
    return figures


def ngram_baselines(
    train: TokenizedCache, validation: TokenizedCache, vocab_size: int, samples: NDArray[Any] | None = None
) -> tuple[float, float]:
    """Fit a unigram and a bigram model to the trained tokens of one split; return its losses on the other's.

    Unigram: counts plus one. Bigram: Witten-Bell, P(w|h) = (c(h,w) + t(h) P(w)) / (c(h) + t(h)) with t(h) the number of
    different tokens seen after h and P the unigram, which an h never seen leaves. 1 million tokens take about a second.
    Losses are means in nats per trained token; `samples` of the validation split are measured, None takes all.
    """
    before, token = _pairs(train)
    probability = (np.bincount(token, minlength=vocab_size) + 1.0) / (len(token) + vocab_size)

    bigrams, bigram_counts = np.unique(before * vocab_size + token, return_counts=True)
    seen = np.bincount(before, minlength=vocab_size)
    followers = np.bincount(bigrams // vocab_size, minlength=vocab_size)

    before, token = _pairs(validation, samples)
    code = before * vocab_size + token
    index = np.minimum(np.searchsorted(bigrams, code), len(bigrams) - 1)
    count = np.where(bigrams[index] == code, bigram_counts[index], 0)
    total = np.maximum(seen[before] + followers[before], 1)
    unseen_weight = np.where(seen[before] > 0, followers[before] / total, 1.0)
    bigram_probability = count / total + unseen_weight * probability[token]
    return float(-np.log(probability[token]).mean()), float(-np.log(bigram_probability).mean())


def _pairs(store: TokenizedCache, samples: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the token before each trained one of this split, and the trained one, int64 each."""
    member = np.zeros(len(store.offsets) - 1, dtype=np.bool_)
    member[store.members if samples is None else store.members[samples]] = True
    end = int(store.offsets[-1])
    positions = np.flatnonzero(store.read_trained(0, end))
    positions = positions[member[np.searchsorted(store.offsets, positions, side="right") - 1]]
    ids = store.read_ids(0, end)
    return ids[positions - 1].astype(np.int64), ids[positions].astype(np.int64)


@dataclass(frozen=True, slots=True)
class ValidationQuestion:
    """A validation sample up to its last answer, and that answer."""

    prompt: list[int]
    """Ids, exactly those before the answer in training."""
    answer: list[int]
    """Ids, without the token that ends it."""
    source: str
    """Name of its source, as in `toolkit show`."""
    where: str
    """file:line of its row."""


def choose_questions(
    store: TokenizedCache, encoder: chat.AnyChatEncoder, names: Sequence[str], max_samples: int
) -> tuple[list[ValidationQuestion], int]:
    """Return questions sampled evenly from a split, and how many samples have no prompt; `max_samples` 0 takes all."""
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
    """Return prompt and answer of a sample; None if only special tokens precede what is trained. The answer is the last
    trained stretch, after the last token that makes the assistant speak.
    """
    end = max((index for index, is_trained in enumerate(trained) if is_trained), default=-1) + 1
    begin = next((index + 1 for index in range(end - 1, -1, -1) if not trained[index]), 0)
    starts = {int(token) for token in encoder.answer_ids}
    begin = next((index + 1 for index in range(end - 1, begin - 1, -1) if ids[index] in starts), begin)
    prompt = list(ids[:begin])
    # The first token of a sample is never trained: alone it is the beginning of a text, or of a piece of one.
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
    place: int | None = None,
    num_places: int | None = None,
) -> Answers:
    """Answer every prompt once over all ranks. A collective; arguments as for `generate`, and these.

    Which prompts share a batch, and what is sampled, does not depend on the number of ranks. A batch that fails is
    counted; with `in_step` it ends the run, as the other ranks are in the middle of theirs.

    Args:
        prompts: the same on every rank; those too long for the model are dropped already.
        batch_size: prompts that a rank answers at once.
        alive: called after each batch.
        place: index among the `num_places` that take batches; None: this rank's own. Equal ones answer together.
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
                seeded = replace(sampling, seed=sampling.seed + number)
                answers = generate(model, encoder, [prompts[one] for one in batch], seeded, device, in_step=in_step)
                mine |= dict(zip(batch, answers, strict=True)) if has_one else {}
            except Stopped:
                raise
            except Exception as error:  # whatever it is, most likely a lack of memory: no reason to end a training run
                if in_step:
                    raise
                failures.add(f"{type(error).__name__}: {error}".splitlines()[0])
        barrier()  # no rank gets so far behind that the others' next collective times out
        alive()
    result = Answers(seconds=time.perf_counter() - started)
    for ids, reasons in gather((mine, failures)):
        result.ids |= ids
        result.failures += sorted(reasons - set(result.failures))
    return result


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
    """Return zh where a reference holds a Chinese character, else sacrebleu's 13a, for which a sentence is one word."""
    return "zh" if any(_CHINESE.search(reference) for reference in references) else "13a"


def score(metric: Metric, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    """Score some answers, at least one, against one reference each; an empty one scores 0."""
    return _METRICS[metric](answers, references, tokenize)


def _by_sacrebleu(metric: Metric, answers: Sequence[str], references: Sequence[str], tokenize: str) -> Scores:
    from sacrebleu.metrics import BLEU, CHRF

    if metric is Metric.bleu:
        corpus, single = BLEU(tokenize=tokenize), BLEU(tokenize=tokenize, effective_order=True)
    else:
        corpus = single = CHRF()
    each = [single.sentence_score(text, [wanted]).score for text, wanted in zip(answers, references, strict=True)]
    return Scores(corpus.corpus_score(answers, [references]).score, each, str(corpus.get_signature()))


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
    """Return the longest common subsequence's length: Hyyrö, Bit-Parallel LCS-length Computation Revisited, 2004."""
    positions: dict[str, int] = {}
    for index, letter in enumerate(right):
        positions[letter] = positions.get(letter, 0) | 1 << index
    full = (1 << len(right)) - 1
    row = full
    for letter in left:
        matches = row & positions.get(letter, 0)
        row = (row + matches | row - matches) & full
    return len(right) - row.bit_count()


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


_METRICS: dict[Metric, Callable[[Sequence[str], Sequence[str], str], Scores]] = {
    Metric.bleu: partial(_by_sacrebleu, Metric.bleu),
    Metric.chrf: partial(_by_sacrebleu, Metric.chrf),
    Metric.rouge_1: partial(_mean, partial(_rouge_n, 1)),
    Metric.rouge_2: partial(_mean, partial(_rouge_n, 2)),
    Metric.rouge_l: partial(_mean, _rouge_l),
    Metric.exact_match: partial(_mean, lambda answer, reference: 100.0 * (answer.strip() == reference.strip())),
    Metric.distinct_1: partial(_distinct, 1),
    Metric.distinct_2: partial(_distinct, 2),
    Metric.length: partial(_mean, lambda answer, reference: float(len(answer))),
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
    failures: dict[str, str] = field(default_factory=dict)
    """Metric -> why it could not be computed."""


def score_answers(
    questions: Sequence[ValidationQuestion], answers: Answers, metrics: Sequence[Metric], encoder: chat.AnyChatEncoder
) -> Results:
    """Score the answers to some questions, at least one; a metric that fails is left out."""
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
    each = {}
    for metric in metrics:
        name = metric.value
        try:
            scores = score(metric, texts, references, tokenize)
            values = {f"eval_{name}": scores.value}
            for source, mine in sorted(by_source.items()) if len(by_source) > 1 else ():
                part = score(metric, [texts[index] for index in mine], [references[index] for index in mine], tokenize)
                values[f"eval_{name}/{source}"] = part.value
        except Stopped:
            raise
        except Exception as error:  # a library's fault is no reason to lose the others, let alone a training run
            results.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        results.values |= values
        each[name] = scores.each
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
            **{name: scores[index] for name, scores in each.items()},
        }
        for index, (question, text, reference, count) in enumerate(zip(asked, texts, references, tokens, strict=True))
    ]
    return results


SAMPLES, PAIRS = "eval_samples", "eval_pairs"
"""How many samples (pairs) an evaluation of a custom model (of preferences) is of; a language model's counts tokens."""


def describe_evaluation(row: Mapping[str, float]) -> list[str]:
    """Return the lines about an evaluation, a row of metrics.jsonl."""
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
