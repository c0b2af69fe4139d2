"""What a run's curves show, in one sentence (`judge`, a function of numbers alone), and what to type next."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from toolkit.config.schema import EVAL_EMBED, EVAL_LABELS, EVAL_LOSS, EVAL_PAIRS
from toolkit.messages import joined, tr
from toolkit.report.run import DONE, RUNNING, Run, digits

_FEW_STEPS = 50
"""Optimizer steps below which a curve that still moves is not judged."""
_SHARE, _OF_FIRST = 0.01, 0.001
"""Two losses differ if by more than 1 % of the larger, and by more than 0.1 % of the first loss."""
_NATS_OF_A_TOKEN = 1.0
"""About the standard deviation of a token's loss in nats: means over n tokens that differ by less than this, divided by
the root of n, may be the same."""
_LEAST_POINTS = 0.01
"""Two accuracies differ if by more than a percentage point, and by more than two standard errors of their samples."""
_SKIPPED = 0.05
"""Share of skipped steps from which on a verdict names them."""
_CHANCE = 0.5
"""Share of pairs that a coin puts in the right order."""

Points = Sequence[tuple[int, float]]
"""(step, value) in the order of steps, finite numbers alone."""

LEARNED, SHORT, OVERFIT, FLAT, DIVERGED, UNSEEN = "learned", "short", "overfit", "flat", "diverged", "unseen"
"""Kinds of verdicts; `short`: too few steps or evaluations, `unseen`: without a validation set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """The metrics of a run that its verdict is about."""

    steps: int
    """Optimizer steps done."""
    training: Points
    """Training loss, each point a mean over the steps since the one before."""
    validation: Points = ()
    validation_tokens: int = 0
    """Trained tokens that a validation loss is the mean of, 0 where it is not known."""
    has_validation: bool = True
    shares: Points = ()
    """The task's own metric on the validation set, such as accuracy: a share, more is better."""
    metric: str = ""
    """What that metric is called, "" without one."""
    samples: int = 0
    """How many samples or pairs it is a share of, 0 where it is not known."""
    chance: float = 0.0
    """What guessing reaches in it."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Validation loss of unigrams and bigrams."""
    not_finite: bool = False
    """Whether the last loss, of training or validation, is NaN or Inf."""
    skipped: int = 0
    """Steps without an update."""


class Verdict(NamedTuple):
    """What the curves show."""

    kind: str
    text: str
    best_step: int | None = None
    """The step from which on validation became worse."""
    is_falling: bool = False
    """Whether the last evaluation is still clearly better than the one before."""
    headline: str = ""
    """The text without figures, for a reader who has them already; "" where the figures are what it says."""


def judge(curves: Curves) -> Verdict | None:
    """Return the verdict on a run, None where no step was logged."""
    if not curves.training and not curves.validation:
        return None
    if curves.not_finite:
        text = tr("Diverged: the last loss is NaN or Inf, at step {step}.", step=f"{curves.steps:,}")
        verdict = Verdict(DIVERGED, text)
    elif len(curves.shares) > 1:
        verdict = _judge_shares(curves)
    elif len(curves.validation) > 1:
        verdict = _judge_losses(curves)
    elif curves.has_validation:
        verdict = _judge_without_evaluations(curves)
    else:
        verdict = _judge_training(curves)
    if curves.steps and curves.skipped >= _SKIPPED * curves.steps:
        more = tr("Skipped steps: {count} of {steps}.", count=f"{curves.skipped:,}", steps=f"{curves.steps:,}")
        headline = joined(verdict.headline, more) if verdict.headline else ""
        verdict = verdict._replace(text=joined(verdict.text, more), headline=headline)
    return verdict


def _judge_losses(curves: Curves) -> Verdict:
    """Return the verdict on two or more validation losses: they rise since the best step (overfit), there are too few
    steps, they did not fall, are not below the n-gram baselines yet, or the model has learned; in this order.
    """
    points, has_few_steps = curves.validation, curves.steps < _FEW_STEPS
    first, last = points[0][1], points[-1][1]
    best_step, best = min(points, key=lambda point: point[1])
    noise = _NATS_OF_A_TOKEN / math.sqrt(curves.validation_tokens) if curves.validation_tokens else 0.0
    least = max(_OF_FIRST * abs(first), noise)  # the smallest difference that is no chance
    fell, losses = _is_less(last, first, least), _from_to(points)
    if _is_less(best, last, least) and _is_less(best, first, least):
        later = [loss for step, loss in points if step > best_step]
        values = {"step": f"{best_step:,}", "best": digits(best), "last": digits(last)}
        if _is_less(last, max(later), least):  # it rose, and falls again
            text = tr("Validation loss was lowest at step {step}: {best}, at the end {last}.", **values)
        else:
            text = tr("Validation loss rises since step {step}: {best} -> {last}. Stop earlier.", **values)
        return Verdict(OVERFIT, text, best_step)
    is_falling = fell and len(points) > 2 and _is_less(last, points[-2][1], least)
    # A short run is judged only where its loss fell and does so no more.
    if has_few_steps and (not fell or is_falling or len(points) < 3):
        return _too_few(curves.steps, tr("validation loss {losses}", losses=losses))._replace(is_falling=is_falling)
    if not fell:
        text = tr("Loss did not fall: validation loss {losses}.", losses=losses)
        return Verdict(FLAT, text, headline=tr("Loss did not fall."))
    # The baselines that the last loss is below; one that was not computed is none of them.
    below = [name for name in ("unigram", "bigram") if last < curves.baselines.get(name, -math.inf)]
    values = {"losses": losses, "unigram": "", "bigram": ""}
    values |= {name: digits(loss) for name, loss in curves.baselines.items()}
    if "unigram" in curves.baselines and "unigram" not in below:
        text = tr("Not enough yet: validation loss {losses}, above the unigram baseline ({unigram}).", **values)
        headline = tr("Not enough yet: the validation loss is above the unigram baseline.")
        return Verdict(SHORT, text, is_falling=is_falling, headline=headline)
    if below == ["unigram"] and "bigram" in curves.baselines:
        text = tr(
            "Not enough yet: validation loss {losses}, below the unigram baseline ({unigram}), above the bigram one "
            "({bigram}).",
            **values,
        )
        headline = tr("Not enough yet: the validation loss is above the bigram baseline.")
        return Verdict(SHORT, text, is_falling=is_falling, headline=headline)
    return _learned(curves, losses, below, values)._replace(is_falling=is_falling)


def _learned(curves: Curves, losses: str, below: Sequence[str], values: Mapping[str, str]) -> Verdict:
    """Return the verdict on validation losses that fell far enough. `losses`: the first and last; `below`: baselines
    that the last is below; `values`: fields of the sentence about both.
    """
    best_step, best = min(curves.validation, key=lambda point: point[1])
    text, headline = tr("Learned: validation loss {losses}.", losses=losses), tr("Learned.")
    if len(below) == 2:
        text = tr(
            "Learned: validation loss {losses}, below the unigram ({unigram}) and bigram ({bigram}) baselines.",
            **values,
        )
        headline = tr("Learned: the validation loss is below the unigram and bigram baselines.")
    # The best may be lower, but by no more than chance: else `_judge_losses` had called it overfit.
    if curves.validation_tokens and _is_less(best, curves.validation[-1][1], 0.0):
        lowest = tr(
            "It was lowest at step {step} ({best}); over {tokens} validation tokens that may be chance.",
            step=f"{best_step:,}",
            best=digits(best),
            tokens=f"{curves.validation_tokens:,}",
        )
        text, headline = joined(text, lowest), joined(headline, lowest)
    return Verdict(LEARNED, text, headline=headline)


def _judge_shares(curves: Curves) -> Verdict:
    """Return the verdict on two or more values of the task's own metric: it falls since its best step, has risen, the
    run is short, it was high from the start, is not above chance, or did not rise.
    """
    points = curves.shares
    # Below chance nothing has been learned yet: what counts is the rise from there.
    first, last = max(points[0][1], curves.chance), points[-1][1]
    best_step, best = max(points, key=lambda point: point[1])
    noise = _LEAST_POINTS
    if curves.samples > 0:  # two standard errors of a share p of n samples: 2 sqrt(p (1 - p) / n)
        variance = max(last * (1 - last), first * (1 - first), 0.0)  # a damaged file may hold what is no share
        noise = max(noise, 2 * math.sqrt(variance / curves.samples))
    values = {"metric": curves.metric, "first": f"{points[0][1]:.1%}", "last": f"{last:.1%}"}
    if best - last > noise and best - first > noise:
        step = f"{best_step:,}"
        text = tr(
            "Validation {metric} falls since step {step}: {best} -> {last}.", step=step, best=f"{best:.1%}", **values
        )
        return Verdict(OVERFIT, text, best_step)
    losses = curves.validation
    more = tr("Validation loss {losses}.", losses=_from_to(losses)) if len(losses) > 1 else ""
    if last - first > noise:
        is_falling = len(points) > 2 and last - points[-2][1] > noise  # like a loss that falls: it still gets better
        text = tr("Learned: validation {metric} {first} -> {last}.", **values)
        return Verdict(LEARNED, joined(text, more), is_falling=is_falling, headline=tr("Learned."))
    if curves.steps < _FEW_STEPS:
        few = _too_few(curves.steps, tr("validation {metric} {first} -> {last}", **values))
        return few._replace(text=joined(few.text, more))
    if first >= 1 - noise:
        text = tr("Validation {metric} was {first} from the start and is {last}.", **values)
        return Verdict(FLAT, joined(text, more))
    if curves.chance and last - curves.chance <= noise:
        text = tr(
            "Not above chance: validation {metric} {first} -> {last}, guessing gives {chance}.",
            chance=f"{curves.chance:.0%}",
            **values,
        )
        return Verdict(FLAT, joined(text, more))
    text = tr(
        "Validation {metric} did not rise: {first} -> {last}; differences below {noise} points may be chance.",
        noise=f"{100 * noise:.2g}",
        **values,
    )
    return Verdict(FLAT, joined(text, more))


def _judge_without_evaluations(curves: Curves) -> Verdict:
    """Return the verdict on a run with a validation set and at most one evaluation."""
    if curves.validation:
        step, loss = curves.validation[-1]
        text = tr(
            "One evaluation is too few to judge: validation loss {loss} at step {step}.",
            loss=digits(loss),
            step=f"{step:,}",
        )
    else:
        text = tr("No evaluation yet: training loss {losses}.", losses=_from_to(_ends(curves.training)))
    return Verdict(SHORT, text)


def _judge_training(curves: Curves) -> Verdict:
    """Return the verdict on a run without a validation set."""
    ends = _ends(curves.training)
    first, last, losses = ends[0][1], ends[-1][1], _from_to(ends)
    if _is_less(last, first, _OF_FIRST * abs(first)):
        text = tr(
            "No validation set: training loss {losses}, which does not show whether the model does better on new data.",
            losses=losses,
        )
        headline = tr("No validation set: this does not show whether the model does better on new data.")
        return Verdict(UNSEEN, text, headline=headline)
    if curves.steps < _FEW_STEPS:
        return _too_few(curves.steps, tr("training loss {losses}", losses=losses))
    text = tr("Loss did not fall: training loss {losses}.", losses=losses)
    return Verdict(FLAT, text, headline=tr("Loss did not fall."))


def _too_few(steps: int, what: str) -> Verdict:
    """Return the verdict on a run of too few steps; `what`: what they have changed."""
    if steps == 1:
        return Verdict(SHORT, tr("1 step is too few: {what}.", what=what), headline=tr("1 step is too few to judge."))
    text = tr("{steps} steps are too few: {what}.", steps=steps, what=what)
    return Verdict(SHORT, text, headline=tr("{steps} steps are too few to judge.", steps=steps))


def _is_less(value: float, other: float, least: float) -> bool:
    """Whether a loss is less than another by more than _SHARE of the larger, and by more than `least`."""
    return other - value > max(_SHARE * max(abs(value), abs(other)), least)


def _ends(points: Points) -> Points:
    """Return the means over the first and the last tenth of a curve: single steps are noisy."""
    count = max(len(points) // 10, 1)
    head, tail = points[:count], points[-count:]
    return [(part[-1][0], sum(value for _, value in part) / count) for part in (head, tail)]


def _from_to(points: Points) -> str:
    """Return the first and the last of some losses, as "7.66 -> 0.101"; the only one if they are of one step."""
    return " -> ".join(digits(loss) for loss in dict([points[0], points[-1]]).values())


def curves_of(run: Run) -> Curves:
    """Return what `judge` needs of a run that was read."""
    history, metric = run.history, _task_metric(run)
    names = {EVAL_PAIRS[0]: tr("reward accuracy"), EVAL_LABELS[0]: tr("accuracy"), EVAL_EMBED[0]: tr("recall at 1")}
    evaluations = {int(row["step"]): row for row in history.evaluations}  # of a repeated step the last
    rows = [evaluations[step] for step in sorted(evaluations)]
    splits = run.data.get("splits")
    training = history.training.series("loss")
    skipped = history.training.last("skipped_steps") or 0
    baselines = {name: run.summary.get(f"{name}_loss") for name in ("unigram", "bigram")}
    return Curves(
        steps=run.step,
        training=[(step, loss.mean) for step, loss in training],
        validation=[(int(row["step"]), row[EVAL_LOSS]) for row in rows if EVAL_LOSS in row],
        validation_tokens=int(rows[-1].get("eval_tokens", 0)) if rows else 0,
        has_validation=bool(rows) or (isinstance(splits, dict) and bool(splits.get("validation"))),
        shares=[(int(row["step"]), row[metric]) for row in rows if metric in row],
        metric=names.get(metric, ""),
        samples=int(rows[-1].get("eval_pairs", rows[-1].get("eval_samples", 0))) if metric else 0,
        chance=_CHANCE if metric == EVAL_PAIRS[0] else 0.0,
        baselines={name: loss for name, loss in baselines.items() if isinstance(loss, float) and math.isfinite(loss)},
        # A row of an evaluation holds finite numbers alone.
        not_finite=history.ends_not_finite or bool(rows and EVAL_LOSS not in rows[-1]),
        skipped=int(skipped),
    )


def verdict_of(run: Run) -> Verdict | None:
    """Return the verdict on a run, which says so where the run has not ended; None where no step was logged."""
    verdict = judge(curves_of(run))
    if verdict is None or run.status == DONE:
        return verdict
    if run.status == RUNNING:
        text = tr("So far: {verdict}", verdict=verdict.text)
    else:
        text = tr("Until it ended at step {step}: {verdict}", step=f"{run.step:,}", verdict=verdict.text)
    return verdict._replace(text=text)


def next_commands(run: Run, verdict: Verdict, again: Sequence[str]) -> list[tuple[str, str]]:
    """Return (what for, command): what to type next; nothing for a run that is running.

    Args:
        run: The run.
        verdict: The verdict on it.
        again: The words of a command that trains with the run's settings once more, up to `run.name=`.
    """
    if run.status == RUNNING or not run.config:
        return []
    if run.status != DONE:
        words = run.starts[-1].get("command") if run.starts else None
        label = tr("Resume it (the same command; a run without run.name starts again)")
        return [(label, shlex.join(map(str, words)))] if isinstance(words, list) else []
    commands, every = [], f"evaluate.every={max(run.step // 5, 1)}"  # five evaluations of as many steps
    if verdict.kind in (LEARNED, UNSEEN, OVERFIT):
        commands += _chat_and_export(run, is_best=verdict.kind != OVERFIT)
    if verdict.best_step is not None:
        commands.append(_best(run, verdict.best_step, again))
    if verdict.kind == UNSEEN:
        words = [*again, "data.validation_fraction=0.05", every]
        commands.append((tr("Train again with a validation set"), words))
    elif verdict.kind == SHORT and len(run.history.evaluations) < 2:
        commands.append((tr("Train again with more evaluations"), [*again, every]))
    elif verdict.kind == SHORT or verdict.is_falling:
        commands += _longer(run, again)
    elif verdict.kind in (FLAT, DIVERGED):
        commands += _other_rate(run, again, lower=verdict.kind == DIVERGED)
    return [(label, shlex.join(words)) for label, words in commands]


def _chat_and_export(run: Run, *, is_best: bool) -> list[tuple[str, list[str]]]:
    """Return (what for, command) to chat with a run's export, if it generates text, and if its last step is the best
    one (`is_best`) to export the model if it is not yet, or to merge an exported adapter; [] of a custom model.
    """
    export: Path = run.folder / "export"
    if run.is_custom:
        return []
    commands = []
    if export.is_dir() and str(run.section("task").get("kind", "language")) in ("language", "distill"):
        commands.append((tr("Chat with it"), ["toolkit", "chat", str(export)]))
    if is_best and not export.is_dir():
        commands.append((tr("Export the model"), ["toolkit", "export-model", str(run.folder)]))
    elif is_best and (export / "adapter_config.json").is_file():
        words = ["toolkit", "export-model", str(export), "merge=true", "output=merged"]
        commands.append((tr("Merge the adapter into its model"), words))
    return commands


def _best(run: Run, step: int, again: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that gives the model of the best step."""
    checkpoint = run.folder / "checkpoints" / f"step-{step}"
    if checkpoint.is_dir():
        label = tr("Export the checkpoint of step {step}", step=f"{step:,}")
        return label, ["toolkit", "export-model", str(checkpoint), f"output=step-{step}"]
    every = run.section("evaluate").get("every") or step
    words = [*again, f"evaluate.keep_best={_task_metric(run) or EVAL_LOSS}", f"checkpoint.every={every}"]
    return tr("Train again and keep the best checkpoint"), words


def _longer(run: Run, again: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the command that continues a run from its last checkpoint, for as long again."""
    train = run.section("train")
    name = "max_steps" if train.get("max_steps") else "epochs"
    length = train.get(name)
    if not isinstance(length, (int, float)) or not (run.folder / "checkpoints" / "latest").exists():
        return []
    key = f"train.{name}"
    words = [*again, f"resume={run.folder}", f"{key}={2 * length:g}", f"checkpoint.allow_changes=[{key}]"]
    return [(tr("Continue, for twice as long in all"), words)]


def _other_rate(run: Run, again: Sequence[str], *, lower: bool) -> list[tuple[str, list[str]]]:
    """Return the commands that look at the samples, and train with a third or the triple of the learning rate."""
    commands = [(tr("See which tokens are trained"), ["toolkit", "show", f"recipe={run.folder / 'config.yaml'}"])]
    rate = run.section("optim").get("lr")
    if isinstance(rate, float):
        label = tr("Train again with a lower learning rate") if lower else tr("Train again with a higher learning rate")
        commands.append((label, [*again, f"optim.lr={rate / 3 if lower else rate * 3:.2g}"]))
    return commands


def _task_metric(run: Run) -> str:
    """Return the name in metrics.jsonl of the metric of a run's task, such as eval_accuracy; "" if it has none."""
    row = run.history.evaluations[-1] if run.history.evaluations and not run.is_custom else {}
    return next((name for name in (EVAL_PAIRS[0], EVAL_LABELS[0], EVAL_EMBED[0]) if name in row), "")
