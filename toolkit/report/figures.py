"""Which charts a report has (`FIGURES`), and what each shows of one run, or of several in comparison."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from toolkit.config.schema import Metric
from toolkit.messages import joined, printable, tr
from toolkit.report.charts import (
    BLUE,
    CYAN,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    RED,
    Axes,
    Caption,
    Drawing,
    Event,
    Record,
    Series,
    bars,
    heat_map,
    histogram,
    lines,
    rounded,
    shares,
)
from toolkit.report.run import COUNTERS, Run, digits

GIB = 1024**3
_SPAN = 20
"""A smoothed curve averages over about one part in so many of its length, and needs so many points."""
_LEAST_STEPS = 2
_Draw = Callable[[Sequence[Run]], list[Drawing]]
"""Returns the charts of a figure for one run, or of several in comparison; [] if they have no data for it."""


def events_of(run: Run) -> list[Event]:
    """Return the restarts, rewinds, skipped and bad steps of a run, by step. Bad steps have a file of their own each,
    or where that could not be written are counted in a row of metrics.jsonl.
    """
    events: list[Event] = []
    for row in run.starts[1:]:
        step = row.get("from_step")
        if isinstance(step, int) and not isinstance(step, bool):
            events.append(Event(step, tr("restart"), tr("started again after step {step}", step=step), GREY))
    events += [Event(step, tr("bad step"), printable(text), RED) for step, text in run.bad_steps]
    steps_counted_bad = {step for name, step, _ in run.history.events if name == "bad_steps"}  # as skipped, too
    files_left = len(run.bad_steps)
    for name, step, count in run.history.events:
        if name == "rewinds":
            events.append(Event(step, tr("rewind"), tr("went back to a checkpoint"), PURPLE))
        elif name == "bad_steps":
            # Those with files are events already. They are counted, as after a rewind their rows have other steps.
            files_left -= count
            if files_left < 0:  # more are counted than have files: a full disk had no room for them
                text = tr("steps with NaN or Inf, or a spike: {count}", count=min(count, -files_left))
                events.append(Event(step, tr("bad step"), text, RED))
        elif name == "skipped_steps" and step not in steps_counted_bad:
            events.append(Event(step, tr("skipped"), tr("steps skipped: {count}", count=count), CYAN))
        elif name not in COUNTERS:
            events.append(Event(step, tr("NaN or Inf"), tr("{figure} was NaN or Inf", figure=name), RED))
    return sorted(events, key=lambda event: event.step)


def _points(run: Run, figure: str, series: str, factor: float = 1.0) -> list[Record]:
    """Return the points of a figure of training: its mean over each group of rows, with the group's extremes.

    Args:
        run: The run whose metrics are read.
        figure: A name of NAMES in toolkit/report/run.py, such as "loss".
        series: What the legend calls these points.
        factor: What every value is multiplied by, such as 1 / GIB for bytes.
    """
    records = []
    for step, group in run.history.training.series(figure):
        record: Record = {"x": step, "y": rounded(group.mean * factor), "s": series}
        if group.most > group.least:
            record |= {"low": rounded(group.least * factor), "high": rounded(group.most * factor)}
        records.append(record)
    return records


def _smooth(points: Sequence[Record], series: str) -> list[Record]:
    """Return the centred means of points over a 20th of them (_SPAN), [] of few. At both ends the window narrows, so
    that it stays centred: a trailing mean would lag behind a curve that falls.
    """
    if len(points) < _SPAN:
        return []
    half = _half_window(len(points))
    sums = list(accumulate((point["y"] for point in points), initial=0.0))
    means = []
    for index, point in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        mean = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
        means.append({"x": point["x"], "y": rounded(mean), "s": series})
    return means


def _half_window(count: int) -> int:
    """Return how many points on either side of each a curve of `count` points is smoothed over: a 40th, 2 at least."""
    return max(count // (2 * _SPAN), 2)


def _validation(run: Run, figure: str, series: str) -> list[Record]:
    """Return the points of a figure of the evaluations, such as "eval_loss"; `series`: their name in the legend."""
    return [
        {"x": int(row["step"]), "y": rounded(row[figure]), "s": series}
        for row in run.history.evaluations
        if figure in row
    ]


def _ngram_losses(run: Run) -> list[Record]:
    """Return the losses that unigrams and bigrams reach (`evaluate.ngram_baselines`), each as a level line."""
    losses = {name: run.summary.get(f"{name}_loss") for name in ("unigram", "bigram")}
    return [
        {"x": x, "y": rounded(loss), "s": name}
        for name, loss in losses.items()
        if isinstance(loss, float) and math.isfinite(loss)
        for x in (0, run.step)
    ]


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    """Return a color for each run, by name."""
    return {run.name: PALETTE[index % len(PALETTE)] for index, run in enumerate(runs)}


def _loss(runs: Sequence[Run]) -> list[Drawing]:
    """Return the chart of training and validation loss: of one run also raw values, n-gram baselines and events."""
    of_units = {"pairs": tr("loss per pair"), "answers": tr("loss per answer"), "labels": tr("loss per sample")}
    unit = "labels" if runs[0].is_custom else str(runs[0].data.get("unit"))  # custom: per sample, as of labels
    y = of_units.get(unit, tr("nats per token"))
    axes = Axes(x=tr("step"), y=y, series=tr("loss"))
    if len(runs) == 1:
        return _loss_of_run(runs[0], axes)
    records, colors = list[Record](), dict[str, str]()
    validations = [f"{run.name} · " + tr("validation") for run in runs]
    for run, color, validation in zip(runs, _colors(runs).values(), validations, strict=True):
        points = _points(run, "loss", run.name)
        training = _smooth(points, run.name) or points  # too few points are not smoothed
        records += [*training, *_validation(run, "eval_loss", validation)]
        colors |= {run.name: color, validation: color}
    looks = Series(colors=colors, dashed=validations, dotted=validations, unlisted=validations)
    caption = Caption("loss", tr("Loss"), tr("Training loss smoothed; dashed: validation."), is_wide=True)
    return [lines(records, axes, looks, caption)] if records else []


def _loss_of_run(run: Run, axes: Axes) -> list[Drawing]:
    """Return the chart of one run's losses; its note says what a point, the band and the smoothed line are."""
    raw, smooth, validation = tr("training"), tr("training, smoothed"), tr("validation")
    points, ngrams = _points(run, "loss", raw), _ngram_losses(run)
    smoothed = _smooth(points, smooth)
    records = [*points, *smoothed, *_validation(run, "eval_loss", validation), *ngrams]
    colors = {raw: BLUE, smooth: BLUE, validation: ORANGE, "unigram": PURPLE, "bigram": GREEN}
    looks = Series(colors=colors, faint=[raw] if smoothed else [], dotted=[validation], dashed=["unigram", "bigram"])
    note = ""
    if smoothed:
        count = 2 * _half_window(len(points)) + 1
        note = tr("Pale: values as logged. Smoothed: the mean of {count} points, centred.", count=count)
    if len(points) > 1 and points[1]["x"] - points[0]["x"] > 1:  # with train.log_every
        note = joined(note, tr("A point of training is the mean of the steps since the one before."))
    if any("low" in record for record in records):
        note = joined(note, tr("The band spans the extremes where a point stands for several rows."))
    caption = Caption("loss", tr("Loss"), note, is_wide=True)
    return [lines(records, axes, looks, caption, events_of(run))] if records else []


def _lines(name: str, metric: str, *, smooth: bool = False, **look: Any) -> _Draw:
    """Return a function that draws a metric of _WORDS over the steps, a line for each run; `look`: fields of Axes."""

    def draw_lines(runs: Sequence[Run]) -> list[Drawing]:
        """Draw the metric of one run, raw and smoothed, or of several, a line each."""
        is_one = len(runs) == 1
        records, looks = [], Series(colors={"": BLUE} if is_one else _colors(runs))
        for run in runs:
            series = "" if is_one else run.name
            points = _points(run, metric, series)
            smoothed = _smooth(points, series) if smooth else []
            if smoothed and is_one:
                raw, smooth_name = tr("as logged"), tr("smoothed")
                records += [{**point, "s": raw} for point in points]
                records += [{**point, "s": smooth_name} for point in smoothed]
                looks = Series(colors={raw: BLUE, smooth_name: BLUE}, faint=[raw])
            else:
                records += smoothed or points
        if len({record["x"] for record in records}) < _LEAST_STEPS:
            return []
        title, y, note = _WORDS[metric]()
        axes = Axes(x=tr("step"), y=y, series=tr("values") if is_one else tr("run"), **look)
        return [lines(records, axes, looks, Caption(name, title, note))]

    return draw_lines


def _evaluated(run: Run, figure: str, evaluated: str, axes: Axes, name: str, title: str) -> list[Drawing]:
    """Return a chart of a training figure and its counterpart `evaluated` of the evaluations; [] without the former."""
    training, validation = tr("training"), tr("validation")
    points = _points(run, figure, training)
    looks = Series(colors={training: BLUE, validation: ORANGE}, dotted=[validation])
    records = [*points, *_validation(run, evaluated, validation)]
    return [lines(records, axes, looks, Caption(name, title))] if points else []


def _divergences(run: Run) -> list[Drawing]:
    """Return charts of the divergence from the teacher or reference model, and of the loss on general samples."""
    axes = Axes(x=tr("step"), y=tr("nats per token"), series=tr("divergence"), from_zero=True)
    drawn = _evaluated(run, "distill/kl", "eval_kl", axes, "divergence", tr("Divergence from the teacher"))
    axes = replace(axes, y=tr("nats per answer"))
    drawn = drawn or _evaluated(run, "kl", "eval_kl", axes, "divergence", tr("Divergence from the reference"))
    general, all_samples = tr("general"), tr("all")
    if drawn and (records := _validation(run, "eval_general_loss", general)):
        records += _validation(run, "eval_loss", all_samples)
        looks = Series(colors={general: BLUE, all_samples: ORANGE}, dotted=[general, all_samples])
        axes = Axes(x=tr("step"), y=tr("nats per token"), series=tr("validation"))
        title = tr("What is forgotten: loss on general samples")
        drawn.append(lines(records, axes, looks, Caption("forgetting", title)))
    return drawn


def _rewards(run: Run) -> list[Drawing]:
    """Return charts of the rewards of chosen and rejected answers with their margins, and of the share of pairs in the
    right order; [] of runs without rewards.
    """
    color_of = {"chosen": GREEN, "rejected": RED, "margins": BLUE}
    records = [point for name in color_of for point in _points(run, f"rewards/{name}", name)]
    if not records:
        return []
    axes = Axes(x=tr("step"), y=tr("reward"), series=tr("answers"), from_zero=True)
    drawn = [lines(records, axes, Series(colors=color_of), Caption("rewards", tr("Rewards")))]
    axes, title = replace(axes, y=tr("share"), format=".0%"), tr("Reward accuracy")
    figure = "rewards/accuracies"
    return drawn + _evaluated(run, figure, f"eval_{figure}", axes, "reward-accuracy", title)


_MOST_EXPERTS = 1 << 16
"""Experts of all layers together: a file with more was not written by a run."""


def _experts(run: Run) -> list[Drawing]:
    """Return a chart of each expert's tokens, by layer, divided by the layer's mean; without malformed layers."""
    loads, relative_loads = run.experts.get("loads"), {}
    for layer, load in loads.items() if isinstance(loads, dict) else ():
        is_valid = isinstance(load, list) and all(type(count) is int and count >= 0 for count in load)
        if is_valid and sum(load):
            relative_loads[printable(layer)] = [rounded(count * len(load) / sum(load)) for count in load]
    if not 0 < sum(map(len, relative_loads.values())) <= _MOST_EXPERTS:
        return []
    axes = Axes(x=tr("expert"), y=tr("layer"), series=tr("times the mean"))
    note = tr(
        "Tokens of each expert, divided by the mean of its layer (1: balanced), in the steps of the last row of "
        "metrics.jsonl, up to step {step}.",
        step=run.experts.get("step", "?"),
    )
    colors = {0.0: ORANGE, 1.0: GREY, 4.0: BLUE}
    return [heat_map(relative_loads, axes, colors, Caption("experts", tr("Load of the experts"), note, is_wide=True))]


def _scores(runs: Sequence[Run]) -> list[Drawing]:
    """Return a chart of the metrics of answers (such as eval_rouge_l), or to compare runs one for each metric."""
    left_out = {"eval_loss", "eval_perplexity", "eval_tokens", "eval_answers", "eval_tokens_per_s", "eval_samples"}
    left_out |= {"eval_general_loss", "eval_kl", "eval_pairs"}  # the first two are drawn as divergences
    metrics = dict.fromkeys(name for run in runs for row in run.history.evaluations for name in row)
    scores = [name for name in metrics if name.startswith("eval_") and "/" not in name and name not in left_out]
    shown = {name: name.removeprefix("eval_") for name in scores[: len(PALETTE)]}

    def draw_scores(records: list[Record], colors: dict[str, str], name: str, title: str, series: str) -> Drawing:
        """Return one chart of scores over the steps."""
        axes = Axes(
            x=tr("step"), y=tr("score") if len(colors) > 1 else next(iter(colors)), series=series, from_zero=True
        )
        return lines(records, axes, Series(colors=colors, dotted=list(colors)), Caption(name, title))

    if len(runs) == 1:
        records = [point for name, short in shown.items() for point in _validation(runs[0], name, short)]
        colors = dict(zip(shown.values(), PALETTE, strict=False))
        title = tr("Metrics") if runs[0].is_custom else tr("Scores of the answers")
        return [draw_scores(records, colors, "answers", title, tr("metric"))] if records else []
    return [
        draw_scores(
            [point for run in runs for point in _validation(run, name, run.name)],
            _colors(runs),
            f"answers-{short}",
            tr("Answers: {metric}", metric=short),
            tr("run"),
        )
        for name, short in shown.items()
    ]


def _step_parts(run: Run) -> list[Drawing]:
    """Return a chart of the share that each part has in the time of all steps.

    The figures are the seconds from the step's begin to the end of each part, so a part is the difference of two. Each
    is a mean over several rows: an end before that of the part before, or after the step's, is moved to it. A single
    rank has no times of ranks: its parts are the wait for data and all the rest.
    """
    figures = ("data_wait_s", "median_rank_s", "slowest_rank_s", "step_s")
    # Step -> `Figure`, of the end of each part.
    wait, median, slowest, full_step = (dict(run.history.training.series(figure)) for figure in figures)
    names = [tr("waiting for data"), tr("forward pass"), tr("waiting for the slowest rank")]
    names.append(tr("backward pass, gradient reduction, optimizer") if median else tr("forward, backward, optimizer"))
    steps = [step for step in full_step if step in wait]
    if not steps:
        return []
    parts: dict[str, float] = {}  # name -> mean seconds per step
    for step in steps:
        begin, step_s = 0.0, full_step[step].mean
        for name, by_step in zip(names, (wait, median, slowest, full_step), strict=True):
            if step in by_step:
                end = min(max(begin, by_step[step].mean), step_s)
                parts[name] = parts.get(name, 0.0) + (end - begin) / len(steps)
                begin = end
    axes = Axes(x=tr("share of a step's time"), y=tr("seconds per step"), series=tr("part"))
    seconds = digits(sum(parts.values()))
    note = tr("Mean over all logged steps; a step takes {seconds} s.", seconds=seconds)
    if median:
        note = joined(note, tr("Forward pass: of the median rank."))
    return [shares(parts, axes, BLUE, Caption("step-parts", tr("Where a step's time goes"), note))]


def _rank_times(run: Run) -> list[Drawing]:
    """Return a chart of the seconds of own work per step of the slowest, the median and the fastest rank."""
    names = {"slowest_rank_s": tr("slowest"), "median_rank_s": tr("median"), "fastest_rank_s": tr("fastest")}
    curves = {name: _points(run, figure, name) for figure, name in names.items()}
    pairs = zip(curves[names["median_rank_s"]], curves[names["fastest_rank_s"]], strict=False)
    if all(median["y"] == fastest["y"] for median, fastest in pairs):  # of two ranks the lower median is the faster one
        del curves[names["median_rank_s"]]
    records = [{"x": point["x"], "y": point["y"], "s": point["s"]} for points in curves.values() for point in points]
    if len({record["x"] for record in records}) < _LEAST_STEPS:
        return []
    axes = Axes(x=tr("step"), y=tr("own seconds per step"), series=tr("rank"), from_zero=True)
    looks = Series(colors=dict(zip(names.values(), (RED, BLUE, GREEN), strict=True)))
    note = tr("What each rank does by itself before it waits for the others.")
    return [lines(records, axes, looks, Caption("ranks", tr("Slowest and fastest rank"), note))]


def _slowest_shares(run: Run) -> list[Drawing]:
    """Return a chart of how often each rank was the slowest."""
    if not run.history.slowest:
        return []
    hosts = run.environment.get("hosts")
    names = [str(host) for host in hosts] if isinstance(hosts, list) else []
    total = sum(run.history.slowest.values())
    records = [
        {"x": f"{rank} ({names[rank]})" if 0 <= rank < len(names) else str(rank), "y": count / total, "s": ""}
        for rank, count in sorted(run.history.slowest.most_common(16))
    ]
    axes = Axes(x=tr("rank"), y=tr("share of the log lines"), format=".0%")
    looks = Series(colors={"": BLUE})
    return [bars(records, axes, looks, Caption("stragglers", tr("Which rank was the slowest")))]


def _memory(runs: Sequence[Run]) -> list[Drawing]:
    """Return a chart of a rank's measured and planned memory: over the steps, or to compare runs as bars."""
    measured, planned = tr("measured"), tr("planned")
    looks = Series(colors={measured: BLUE, planned: GREY}, dashed=[planned])
    records: list[Record] = []
    for run in runs:
        series, most = run.history.training.series, run.history.training.most
        peak = "device_memory_peak_bytes" if series("device_memory_peak_bytes") else "host_memory_peak_bytes"
        for metric, name in ((peak, measured), ("planned_memory_bytes", planned)):
            if len(runs) == 1:
                records += _points(run, metric, name, 1 / GIB)
            elif top := most(metric):
                records.append({"x": run.name, "y": rounded(top / GIB), "s": name})
    if not records:
        return []
    caption = Caption(
        "memory",
        tr("Memory of a rank, measured and planned"),
        tr("The highest of all ranks since the start, of a GPU; without one, of the process."),
    )
    if len(runs) == 1:
        return [lines(records, Axes(x=tr("step"), y="GiB", series=tr("memory"), from_zero=True), looks, caption)]
    return [bars(records, Axes(x=tr("run"), y="GiB", series=tr("memory"), format="~g"), looks, caption)]


def _padding(run: Run) -> list[Drawing]:
    """Return a histogram of the share of padding in the rows of metrics.jsonl, in bins of 5 %."""
    counts = run.history.padding
    if not counts:
        return []
    bins = [
        (low / 100, (low + 5) / 100, sum(counts[low + percent] for percent in range(5)), f"{low}–{low + 5} %")
        for low in range(0, 100, 5)
    ]
    axes = Axes(x=tr("share of padding"), y=tr("log lines"), format=".0%")
    return [histogram(bins, axes, ORANGE, Caption("padding-histogram", tr("How much padding there is")))]


def _lengths(run: Run) -> list[Drawing]:
    """Return a histogram of the lengths of training samples, of data.json; [] if that has none, or is malformed."""
    splits = run.data.get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    edges, counts = (train.get("edges"), train.get("counts")) if isinstance(train, dict) else (None, None)
    if not (isinstance(edges, list) and isinstance(counts, list) and len(edges) == len(counts) + 1):
        return []
    if not all(isinstance(value, (int, float)) for value in (*edges, *counts)):
        return []
    ends = zip(pairwise(edges), counts, strict=True)
    bins = [(low, high, count, f"{low + 1:,}–{high:,}") for (low, high), count in ends]  # `low` is of the bin before
    axes = Axes(x=tr("tokens per sample"), y=tr("samples"))
    return [histogram(bins, axes, GREEN, Caption("lengths", tr("Lengths of the training samples")))]


def _of_single_run(draw_run: Callable[[Run], list[Drawing]]) -> _Draw:
    """Return a figure for reports of one run, which draws nothing when several are compared."""
    return lambda runs: draw_run(runs[0]) if len(runs) == 1 else []


_RATE: dict[str, Any] = {"format": "~s", "from_zero": True, "smooth": True}
_WORDS: dict[str, Callable[[], Sequence[str]]] = {
    "lr": lambda: (tr("Learning rate"), tr("learning rate"), ""),
    "grad_norm": lambda: (tr("Gradient norm"), tr("norm"), tr("Before clipping.")),
    "expert_load_max": lambda: (
        tr("Largest load of an expert"),
        tr("times the mean"),
        tr("Tokens of the expert that gets most, divided by the mean of its layer; 1: balanced."),
    ),
    "expert_dropped": lambda: (
        tr("Tokens dropped by experts"),
        tr("share"),
        tr("Of all choices of an expert, those that it had no place for (model.expert_capacity)."),
    ),
    "router_entropy": lambda: (
        tr("Entropy of the experts' loads"),
        tr("share of the largest"),
        tr("Mean over layers; 1: balanced."),
    ),
    "loss_scale": lambda: (tr("Loss scale"), tr("scale"), ""),
    "tokens_per_s": lambda: (
        tr("Tokens per second"),
        tr("tokens per second"),
        tr("All ranks together, padding not counted; evaluation and saving are not counted."),
    ),
    "samples_per_s": lambda: (
        tr("Samples per second"),
        tr("samples per second"),
        tr("All ranks together; evaluation and saving are not counted."),
    ),
    "step_s": lambda: (tr("Step time"), tr("seconds per step"), ""),
    "padding_fraction": lambda: (tr("Padding over the run"), tr("share of the tokens computed"), ""),
}
"""Title, y axis and note of the charts of one metric."""


def _throughput(runs: Sequence[Run]) -> list[Drawing]:
    """Return the chart of tokens per second, of custom models samples per second."""
    return _lines("tokens", "samples_per_s" if runs[0].is_custom else "tokens_per_s", **_RATE)(runs)


def _step_time(runs: Sequence[Run]) -> list[Drawing]:
    """Return the chart that compares runs' seconds per step; of one run `_step_parts` shows more."""
    return _lines("step-time", "step_s", from_zero=True, smooth=True)(runs) if len(runs) > 1 else []


FIGURES: tuple[tuple[str, Sequence[str], _Draw], ...] = (
    ("learning", ["loss"], _loss),
    ("learning", ["learning-rate"], _lines("learning-rate", "lr", format="~g", from_zero=True)),
    ("learning", ["grad-norm"], _lines("grad-norm", "grad_norm", smooth=True)),
    ("learning", ["answers", *(f"answers-{metric.value}" for metric in Metric)], _scores),
    ("learning", ["rewards", "reward-accuracy"], _of_single_run(_rewards)),
    ("learning", ["divergence", "forgetting"], _of_single_run(_divergences)),
    ("learning", ["expert-load"], _lines("expert-load", "expert_load_max", smooth=True)),
    ("learning", ["expert-entropy"], _lines("expert-entropy", "router_entropy", smooth=True)),
    (
        "learning",
        ["expert-dropped"],
        _lines("expert-dropped", "expert_dropped", format=".1%", from_zero=True, smooth=True),
    ),
    ("learning", ["experts"], _of_single_run(_experts)),
    ("learning", ["loss-scale"], _lines("loss-scale", "loss_scale", format="~s")),
    ("speed", ["tokens"], _throughput),
    ("speed", ["step-parts"], _of_single_run(_step_parts)),
    ("speed", ["ranks"], _of_single_run(_rank_times)),
    ("speed", ["stragglers"], _of_single_run(_slowest_shares)),
    ("speed", ["step-time"], _step_time),
    ("memory", ["memory"], _memory),
    ("data", ["padding"], _lines("padding", "padding_fraction", **_RATE | {"format": ".0%"})),
    ("data", ["padding-histogram"], _of_single_run(_padding)),
    ("data", ["lengths"], _of_single_run(_lengths)),
)
"""Section of the page, names of the charts (and of their PNG files), and the function that draws them."""
NAMES = frozenset(name for _, names, _ in FIGURES for name in names)


def draw(runs: Sequence[Run]) -> dict[str, list[Drawing]]:
    """Return section of the page -> charts, of the runs' data; without sections that have none."""
    sections: dict[str, list[Drawing]] = {}
    for section, _, figure in FIGURES:
        sections.setdefault(section, []).extend(figure(runs))
    return {name: drawn for name, drawn in sections.items() if drawn}
