"""Which charts a report has, of one run or of several in one picture: the table FIGURES, and what draws its rows."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from toolkit.config.schema import Metric
from toolkit.messages import printable, tr
from toolkit.report import charts
from toolkit.report.charts import BLUE, CYAN, GREEN, GREY, ORANGE, PALETTE, PURPLE, RED, Axes, Drawing, Event, Series
from toolkit.report.history import COUNTERS
from toolkit.report.run import Run

GIB = 1024**3
_SPAN = 20
"""A smoothed curve weighs over about this part of its length, and is drawn from so many points on."""
_LEAST_STEPS = 2
Record = charts.Record
_Draw = Callable[[Sequence[Run]], list[Drawing]]


def events_of(run: Run) -> list[Event]:
    """Return what happened in a run beside its steps, in their order."""
    found: list[Event] = []

    def tell(step: int, kind: str, text: str, color: str) -> None:
        found.append(Event(step=step, kind=kind, text=text, color=color))

    for row in run.starts[1:]:
        step = row.get("from_step")
        if isinstance(step, int) and not isinstance(step, bool):
            tell(step, tr("restart"), tr("started again after step {step}", step=step), GREY)
    bad = {step for name, step, _ in run.history.events if name == "bad_steps"}
    for name, step, count in run.history.events:
        if name == "rewinds":
            tell(step, tr("rewind"), tr("went back to a checkpoint"), PURPLE)
        elif name == "bad_steps":
            text = printable(run.bad_steps.get(step, "")) or tr("numbers went wrong: {count} steps", count=count)
            tell(step, tr("bad step"), text, RED)
        elif name == "skipped_steps" and step not in bad:
            tell(step, tr("skipped"), tr("steps left out: {count}", count=count), CYAN)
        elif name not in COUNTERS:
            tell(step, tr("no number"), tr("{figure} was no number", figure=name), RED)
    return sorted(found, key=lambda event: event.step)


def is_own(run: Run) -> bool:
    """Whether a run is of a program's own model, of which samples are counted and not tokens."""
    return "program" in run.data and "model" in run.data


def _points(run: Run, figure: str, series: str, factor: float = 1.0) -> list[Record]:
    """Return a figure's means, with its extremes where a point stands for several rows."""
    found = []
    for step, one in run.history.training.series(figure):
        record: Record = {"x": step, "y": charts.rounded(one.mean * factor), "s": series}
        if one.most > one.least:
            record |= {"low": charts.rounded(one.least * factor), "high": charts.rounded(one.most * factor)}
        found.append(record)
    return found


def _smooth(points: Sequence[Record], series: str) -> list[Record]:
    """Return the exponential moving average of points; none of few."""
    if len(points) < _SPAN:
        return []
    keep = 1 - 2 / (len(points) / _SPAN + 1) if len(points) > 3 * _SPAN else 0.6
    found, total, weight = [], 0.0, 0.0
    for point in points:
        total, weight = keep * total + point["y"], keep * weight + 1
        found.append({"x": point["x"], "y": charts.rounded(total / weight), "s": series})
    return found


def _validation(run: Run, figure: str, series: str) -> list[Record]:
    return [
        {"x": int(row["step"]), "y": charts.rounded(row[figure]), "s": series}
        for row in run.history.evaluations
        if figure in row
    ]


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    return {run.name: PALETTE[place % len(PALETTE)] for place, run in enumerate(runs)}


def _loss(runs: Sequence[Run]) -> list[Drawing]:
    y = tr("loss per sample") if is_own(runs[0]) else tr("nats per token")
    axes = Axes(x=tr("step"), y=y, series=tr("loss"))
    if len(runs) == 1:
        (run,) = runs
        raw, smooth, validation = tr("training"), tr("training, smoothed"), tr("validation")
        points = _points(run, "loss", raw)
        smoothed = _smooth(points, smooth)
        records = [*points, *smoothed, *_validation(run, "eval_loss", validation)]
        colors = {raw: BLUE, smooth: BLUE, validation: ORANGE}
        looks = Series(colors=colors, faint=[raw] if smoothed else [], dotted=[validation])
        note = tr("Pale: as logged.") if smoothed else ""
        if any("low" in record for record in records):
            note = tr("Pale: as logged. The band spans the extremes where a point stands for several rows.")
        events = events_of(run)
    else:
        records, colors, events = [], {}, []
        validations = [f"{run.name} · " + tr("validation") for run in runs]
        for run, color, validation in zip(runs, _colors(runs).values(), validations, strict=True):
            points = _points(run, "loss", run.name)
            records += [*(_smooth(points, run.name) or points), *_validation(run, "eval_loss", validation)]
            colors |= {run.name: color, validation: color}
        looks = Series(colors=colors, dashed=validations, dotted=validations, unlisted=validations)
        note = tr("Training loss smoothed; dashed: validation.")
    if not records:
        return []
    chart = charts.lines(records, axes, looks, events)
    return [Drawing(name="loss", title=tr("Loss"), chart=chart, note=note, is_wide=True)]


def _lines(name: str, metric: str, *, smooth: bool = False, **look: Any) -> _Draw:
    """Return what draws a metric over the steps, a line for each run."""

    def draw_lines(runs: Sequence[Run]) -> list[Drawing]:
        is_one = len(runs) == 1
        records, looks = [], Series(colors={"": BLUE} if is_one else _colors(runs))
        for run in runs:
            points = _points(run, metric, "" if is_one else run.name)
            smoothed = _smooth(points, points[0]["s"]) if smooth and points else []
            if smoothed and is_one:
                raw, even = tr("as logged"), tr("smoothed")
                records += [{**point, "s": raw} for point in points] + [{**point, "s": even} for point in smoothed]
                looks = Series(colors={raw: BLUE, even: BLUE}, faint=[raw])
            else:
                records += smoothed or points
        if len({record["x"] for record in records}) < _LEAST_STEPS:
            return []
        title, y, note = _WORDS[metric]()
        axes = Axes(x=tr("step"), y=y, series=tr("values") if is_one else tr("run"), **look)
        return [Drawing(name=name, title=title, chart=charts.lines(records, axes, looks), note=note)]

    return draw_lines


def _scores(runs: Sequence[Run]) -> list[Drawing]:
    """Return a chart of the answers' metrics, for several runs one of each metric."""
    left_out = ("eval_loss", "eval_perplexity", "eval_tokens", "eval_answers", "eval_tokens_per_s", "eval_samples")
    found = dict.fromkeys(name for run in runs for row in run.history.evaluations for name in row)
    scores = [name for name in found if name.startswith("eval_") and "/" not in name and name not in left_out]
    shown = {name: name.removeprefix("eval_") for name in scores[: len(PALETTE)]}

    def draw_scores(records: list[Record], colors: dict[str, str], name: str, title: str, series: str) -> Drawing:
        axes = Axes(x=tr("step"), y=tr("score"), series=series, from_zero=True)
        chart = charts.lines(records, axes, Series(colors=colors, dotted=list(colors)))
        return Drawing(name=name, title=title, chart=chart)

    if len(runs) == 1:
        records = [point for name, short in shown.items() for point in _validation(runs[0], name, short)]
        colors = dict(zip(shown.values(), PALETTE, strict=False))
        title = tr("Metrics") if is_own(runs[0]) else tr("Scores of the answers")
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


def _parts(run: Run) -> list[Drawing]:
    """Return what a step's time is made of: limits between its parts, each not before the one below."""
    figures = ("data_wait_s", "median_rank_s", "slowest_rank_s", "step_s")
    names = (tr("waiting for data"), tr("forward, own work"), tr("waiting for the slowest rank"), tr("the rest"))
    known = [dict(run.history.training.series(figure)) for figure in figures]
    steps = [step for step in known[-1] if step in known[0]]
    if len(steps) < _LEAST_STEPS:
        return []
    records: list[Record] = []
    for step in steps:
        below, whole = 0.0, known[-1][step].mean
        for name, of_step in zip(names, known, strict=True):
            if step in of_step:
                limit = min(max(below, of_step[step].mean), whole)
                records.append({"x": step, "y": charts.rounded(limit - below), "s": name})
                below = limit
    colors = dict(zip(names, (ORANGE, BLUE, RED, GREEN), strict=True))
    colors = {name: color for name, color in colors.items() if any(record["s"] == name for record in records)}
    axes = Axes(x=tr("step"), y=tr("seconds per step"), series=tr("part"))
    note = tr("The rest: backward, reduction over the ranks, update.")
    if len(colors) < len(names):
        note = tr("The rest: forward, backward, update.")
    chart = charts.stacked(records, axes, colors)
    return [Drawing(name="step-parts", title=tr("What a step is made of"), chart=chart, note=note)]


def _ranks(run: Run) -> list[Drawing]:
    names = {"slowest_rank_s": tr("slowest"), "median_rank_s": tr("median"), "fastest_rank_s": tr("fastest")}
    found = {name: _points(run, figure, name) for figure, name in names.items()}
    pairs = zip(found[names["median_rank_s"]], found[names["fastest_rank_s"]], strict=False)
    if all(median["y"] == fastest["y"] for median, fastest in pairs):  # of two ranks the faster one is the median
        del found[names["median_rank_s"]]
    records = [{"x": one["x"], "y": one["y"], "s": one["s"]} for points in found.values() for one in points]
    if len({record["x"] for record in records}) < _LEAST_STEPS:
        return []
    axes = Axes(x=tr("step"), y=tr("own seconds per step"), series=tr("rank"), from_zero=True)
    looks = Series(colors=dict(zip(names.values(), (RED, BLUE, GREEN), strict=True)))
    note = tr("What each rank does by itself before it waits for the others.")
    chart = charts.lines(records, axes, looks)
    return [Drawing(name="ranks", title=tr("Slowest and fastest rank"), chart=chart, note=note)]


def _slowest(run: Run) -> list[Drawing]:
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
    chart = charts.bars(records, axes, Series(colors={"": BLUE}))
    return [Drawing(name="stragglers", title=tr("Which rank was the slowest"), chart=chart)]


def _memory(runs: Sequence[Run]) -> list[Drawing]:
    """Return what was measured beside what was planned: over the steps, for several runs as bars."""
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
                records.append({"x": run.name, "y": charts.rounded(top / GIB), "s": name})
    if not records:
        return []
    if len(runs) == 1:
        chart = charts.lines(records, Axes(x=tr("step"), y="GiB", series=tr("memory"), from_zero=True), looks)
    else:
        chart = charts.bars(records, Axes(x=tr("run"), y="GiB", series=tr("memory"), format="~g"), looks)
    note = tr("The highest of all ranks since the start, of a GPU; without one, of the process.")
    return [Drawing(name="memory", title=tr("Memory of a rank, measured and planned"), chart=chart, note=note)]


def _padded(run: Run) -> list[Drawing]:
    found = run.history.padding
    if not found:
        return []
    bins = [
        (low / 100, (low + 5) / 100, sum(found[low + one] for one in range(5)), f"{low}–{low + 5} %")
        for low in range(0, 100, 5)
    ]
    axes = Axes(x=tr("share of padding"), y=tr("log lines"), format=".0%")
    chart = charts.histogram(bins, axes, ORANGE)
    return [Drawing(name="padding-histogram", title=tr("How much padding there is"), chart=chart)]


def _lengths(run: Run) -> list[Drawing]:
    splits = run.data.get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    edges, counts = (train.get("edges"), train.get("counts")) if isinstance(train, dict) else (None, None)
    if not (isinstance(edges, list) and isinstance(counts, list) and len(edges) == len(counts) + 1):
        return []
    if not all(isinstance(value, (int, float)) for value in (*edges, *counts)):
        return []
    ends = zip(pairwise(edges), counts, strict=True)
    bins = [(low, high, count, f"{low + 1:,}–{high:,}") for (low, high), count in ends]
    axes = Axes(x=tr("tokens per sample"), y=tr("samples"))
    chart = charts.histogram(bins, axes, GREEN)
    return [Drawing(name="lengths", title=tr("Lengths of the training samples"), chart=chart)]


def _of_one(draw_run: Callable[[Run], list[Drawing]]) -> _Draw:
    """Draw where there is one run only."""
    return lambda runs: draw_run(runs[0]) if len(runs) == 1 else []


_RATE: dict[str, Any] = {"format": "~s", "from_zero": True, "smooth": True}
_WORDS: dict[str, Callable[[], Sequence[str]]] = {
    "lr": lambda: (tr("Learning rate"), tr("learning rate"), ""),
    "grad_norm": lambda: (tr("Gradient norm"), tr("norm"), tr("Before clipping.")),
    "loss_scale": lambda: (tr("Loss scale"), tr("scale"), ""),
    "tokens_per_s": lambda: (
        tr("Tokens per second"),
        tr("tokens per second"),
        tr("All ranks together, padding left out; evaluation and saving are not counted."),
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
    return _lines("tokens", "samples_per_s" if is_own(runs[0]) else "tokens_per_s", **_RATE)(runs)


def _step_time(runs: Sequence[Run]) -> list[Drawing]:
    return _lines("step-time", "step_s", from_zero=True, smooth=True)(runs) if len(runs) > 1 else []


FIGURES: tuple[tuple[str, Sequence[str], _Draw], ...] = (
    ("learning", ["loss"], _loss),
    ("learning", ["learning-rate"], _lines("learning-rate", "lr", format=".1e", from_zero=True)),
    ("learning", ["grad-norm"], _lines("grad-norm", "grad_norm", smooth=True)),
    ("learning", ["answers", *(f"answers-{metric.value}" for metric in Metric)], _scores),
    ("learning", ["loss-scale"], _lines("loss-scale", "loss_scale", format="~s")),
    ("speed", ["tokens"], _throughput),
    ("speed", ["step-parts"], _of_one(_parts)),
    ("speed", ["ranks"], _of_one(_ranks)),
    ("speed", ["stragglers"], _of_one(_slowest)),
    ("speed", ["step-time"], _step_time),
    ("memory", ["memory"], _memory),
    ("data", ["padding"], _lines("padding", "padding_fraction", **_RATE | {"format": ".0%"})),
    ("data", ["padding-histogram"], _of_one(_padded)),
    ("data", ["lengths"], _of_one(_lengths)),
)
"""Section of the page, names of the charts (and of their pictures), what draws them of the runs."""
NAMES = frozenset(name for _, names, _ in FIGURES for name in names)


def draw(runs: Sequence[Run]) -> dict[str, list[Drawing]]:
    """Return the charts by section."""
    sections: dict[str, list[Drawing]] = {}
    for section, _, figure in FIGURES:
        sections.setdefault(section, []).extend(figure(runs))
    return {name: drawn for name, drawn in sections.items() if drawn}
