"""Which charts a report has, of one run or of several in one picture."""

from collections.abc import Callable, Sequence
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
NAMES = frozenset(
    (
        *("loss", "learning-rate", "grad-norm", "loss-scale", "answers", *(f"answers-{one.value}" for one in Metric)),
        *("tokens", "step-parts", "step-time", "ranks", "stragglers", "memory"),
        *("padding", "padding-histogram", "lengths"),
    )
)
"""All charts that there are, by what their pictures are called."""


def draw(runs: Sequence[Run]) -> dict[str, list[Drawing]]:
    """Return the charts by the section that they stand in: learning, speed, memory, data."""
    one = len(runs) == 1
    sections: dict[str, list[Drawing | None]] = {
        "learning": [_loss(runs), _learning_rate(runs), _gradient(runs), *_scores(runs), _loss_scale(runs)],
        "speed": [_tokens(runs), *([_parts(runs[0]), _ranks(runs[0]), _slowest(runs[0])] if one else [_step(runs)])],
        "memory": [_memory(runs)],
        "data": [_padding(runs), *([_padded(runs[0]), *_lengths(runs[0])] if one else [])],
    }
    return {name: kept for name, found in sections.items() if (kept := [one for one in found if one is not None])}


def events_of(run: Run) -> list[Event]:
    """Return what happened in a run beside its steps, in their order."""
    found = []
    for row in run.starts[1:]:
        step = row.get("from_step")
        if isinstance(step, int) and not isinstance(step, bool):
            text = tr("started again after step {step}", step=step)
            found.append(Event(step=step, kind=tr("restart"), text=text, color=GREY))
    bad = {step for name, step, _ in run.history.events if name == "bad_steps"}
    for name, step, count in run.history.events:
        if name == "rewinds":
            found.append(Event(step=step, kind=tr("rewind"), text=tr("went back to a checkpoint"), color=PURPLE))
        elif name == "bad_steps":
            text = printable(run.bad_steps.get(step, "")) or tr("numbers went wrong: {count} steps", count=count)
            found.append(Event(step=step, kind=tr("bad step"), text=text, color=RED))
        elif name == "skipped_steps" and step not in bad:
            text = tr("steps left out: {count}", count=count)
            found.append(Event(step=step, kind=tr("skipped"), text=text, color=CYAN))
        elif name not in COUNTERS:
            text = tr("{figure} was no number", figure=name)
            found.append(Event(step=step, kind=tr("no number"), text=text, color=RED))
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
    rows = [row for row in run.history.evaluations if figure in row]
    return [{"x": int(row["step"]), "y": charts.rounded(row[figure]), "s": series} for row in rows]


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    return {run.name: PALETTE[place % len(PALETTE)] for place, run in enumerate(runs)}


def _loss(runs: Sequence[Run]) -> Drawing | None:
    y = tr("loss per sample") if is_own(runs[0]) else tr("nats per token")
    axes = Axes(x=tr("step"), y=y, series=tr("loss"))
    records: list[Record] = []
    events: list[Event] = []
    colors: dict[str, str] = {}
    quiet, dashed, dotted = [], [], []
    for place, run in enumerate(runs):
        color, other = (BLUE, ORANGE) if len(runs) == 1 else (PALETTE[place % len(PALETTE)],) * 2
        prefix = "" if len(runs) == 1 else f"{run.name} · "
        raw, smooth, validation = (
            prefix + word for word in (tr("training"), tr("training, smoothed"), tr("validation"))
        )
        if prefix:
            raw = smooth = run.name
        points = _points(run, "loss", raw)
        smoothed = _smooth(points, smooth)
        if len(runs) > 1 and smoothed:
            points = []
        records += [*points, *smoothed, *_validation(run, "eval_loss", validation)]
        colors |= {raw: color, smooth: color, validation: other}
        quiet += [raw] if smoothed and not prefix else []
        dashed += [validation] if len(runs) > 1 else []
        dotted.append(validation)
        events += events_of(run) if len(runs) == 1 else []
    if not records:
        return None
    looks = Series(colors=colors, faint=quiet, dashed=dashed, dotted=dotted, unlisted=dashed)
    note = tr("Pale: as logged.") if quiet else ""
    if len(runs) > 1:
        note = tr("Training loss smoothed; dashed: validation.")
    elif any("low" in record for record in records):
        note = tr("Pale: as logged. The band spans the extremes where a point stands for several rows.")
    return Drawing(
        name="loss", title=tr("Loss"), chart=charts.lines(records, axes, looks, events), note=note, is_wide=True
    )


def _plain(runs: Sequence[Run], figure: str, name: str, title: str, y: str, **more: Any) -> Drawing | None:
    """Return a chart of one figure, a line for each run."""
    note, smooth = more.pop("note", ""), more.pop("smooth", False)
    colors = {"": BLUE} if len(runs) == 1 else _colors(runs)
    records, looks = [], Series(colors=colors)
    for run in runs:
        points = _points(run, figure, "" if len(runs) == 1 else run.name)
        smoothed = _smooth(points, points[0]["s"]) if smooth and points else []
        if smoothed and len(runs) == 1:
            raw, even = tr("as logged"), tr("smoothed")
            records += [{**point, "s": raw} for point in points] + [{**point, "s": even} for point in smoothed]
            looks = Series(colors={raw: BLUE, even: BLUE}, faint=[raw])
        else:
            records += smoothed or points
    if len({record["x"] for record in records}) < _LEAST_STEPS:
        return None
    axes = Axes(x=tr("step"), y=y, series=tr("run") if len(runs) > 1 else tr("values"), **more)
    return Drawing(name=name, title=title, chart=charts.lines(records, axes, looks), note=note)


def _learning_rate(runs: Sequence[Run]) -> Drawing | None:
    return _plain(runs, "lr", "learning-rate", tr("Learning rate"), tr("learning rate"), format=".1e", from_zero=True)


def _gradient(runs: Sequence[Run]) -> Drawing | None:
    note = tr("Before clipping.")
    return _plain(runs, "grad_norm", "grad-norm", tr("Gradient norm"), tr("norm"), smooth=True, note=note)


def _loss_scale(runs: Sequence[Run]) -> Drawing | None:
    return _plain(runs, "loss_scale", "loss-scale", tr("Loss scale"), tr("scale"), format="~s")


def _tokens(runs: Sequence[Run]) -> Drawing | None:
    note = tr("All ranks together, padding left out; evaluation and saving are not counted.")
    title, y = tr("Tokens per second"), tr("tokens per second")
    if is_own(runs[0]):
        note = tr("All ranks together; evaluation and saving are not counted.")
        title, y = tr("Samples per second"), tr("samples per second")
        return _plain(runs, "samples_per_s", "tokens", title, y, format="~s", from_zero=True, smooth=True, note=note)
    return _plain(runs, "tokens_per_s", "tokens", title, y, format="~s", from_zero=True, smooth=True, note=note)


def _step(runs: Sequence[Run]) -> Drawing | None:
    return _plain(runs, "step_s", "step-time", tr("Step time"), tr("seconds per step"), from_zero=True, smooth=True)


def _padding(runs: Sequence[Run]) -> Drawing | None:
    title, y = tr("Padding over the run"), tr("share of the tokens computed")
    return _plain(runs, "padding_fraction", "padding", title, y, format=".0%", from_zero=True, smooth=True)


def _scores(runs: Sequence[Run]) -> list[Drawing | None]:
    """Return a chart of the answers' metrics, for several runs one of each metric."""
    left_out = ("eval_loss", "eval_perplexity", "eval_tokens", "eval_answers", "eval_tokens_per_s", "eval_samples")
    found = {
        name: None
        for run in runs
        for row in run.history.evaluations
        for name in row
        if name.startswith("eval_") and "/" not in name and name not in left_out
    }
    names = list(found)[: len(PALETTE)]
    if len(runs) == 1:
        colors = {name.removeprefix("eval_"): PALETTE[place] for place, name in enumerate(names)}
        records = [point for name in names for point in _validation(runs[0], name, name.removeprefix("eval_"))]
        title = tr("Metrics") if is_own(runs[0]) else tr("Scores of the answers")
        return [_score(records, colors, "answers", title, tr("metric"))] if records else []
    return [
        _score(
            [point for run in runs for point in _validation(run, name, run.name)],
            _colors(runs),
            f"answers-{name.removeprefix('eval_')}",
            tr("Answers: {metric}", metric=name.removeprefix("eval_")),
            tr("run"),
        )
        for name in names
    ]


def _score(records: list[Record], colors: dict[str, str], name: str, title: str, series: str) -> Drawing:
    axes = Axes(x=tr("step"), y=tr("score"), series=series, from_zero=True)
    looks = Series(colors=colors, dotted=list(colors))
    return Drawing(name=name, title=title, chart=charts.lines(records, axes, looks))


def _parts(run: Run) -> Drawing | None:
    """Return what a step's time is made of: limits between its parts, each not before the one below."""
    figures = ("data_wait_s", "median_rank_s", "slowest_rank_s", "step_s")
    names = (tr("waiting for data"), tr("forward, own work"), tr("waiting for the slowest rank"), tr("the rest"))
    known = [dict(run.history.training.series(figure)) for figure in figures]
    steps = [step for step in known[-1] if step in known[0]]
    if len(steps) < _LEAST_STEPS:
        return None
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
    return Drawing(
        name="step-parts", title=tr("What a step is made of"), chart=charts.stacked(records, axes, colors), note=note
    )


def _ranks(run: Run) -> Drawing | None:
    names = {"slowest_rank_s": tr("slowest"), "median_rank_s": tr("median"), "fastest_rank_s": tr("fastest")}
    found = {name: _points(run, figure, name) for figure, name in names.items()}
    pairs = zip(found[names["median_rank_s"]], found[names["fastest_rank_s"]], strict=False)
    if all(median["y"] == fastest["y"] for median, fastest in pairs):  # of two ranks the faster one is the median
        del found[names["median_rank_s"]]
    records = [{"x": one["x"], "y": one["y"], "s": one["s"]} for points in found.values() for one in points]
    if len({record["x"] for record in records}) < _LEAST_STEPS:
        return None
    axes = Axes(x=tr("step"), y=tr("own seconds per step"), series=tr("rank"), from_zero=True)
    looks = Series(colors=dict(zip(names.values(), (RED, BLUE, GREEN), strict=True)))
    note = tr("What each rank does by itself before it waits for the others.")
    return Drawing(
        name="ranks", title=tr("Slowest and fastest rank"), chart=charts.lines(records, axes, looks), note=note
    )


def _slowest(run: Run) -> Drawing | None:
    if not run.history.slowest:
        return None
    hosts = run.environment.get("hosts")
    names = [str(host) for host in hosts] if isinstance(hosts, list) else []
    total = sum(run.history.slowest.values())
    records = [
        {"x": f"{rank} ({names[rank]})" if 0 <= rank < len(names) else str(rank), "y": count / total, "s": ""}
        for rank, count in sorted(run.history.slowest.most_common(16))
    ]
    axes = Axes(x=tr("rank"), y=tr("share of the log lines"), format=".0%")
    chart = charts.bars(records, axes, Series(colors={"": BLUE}))
    return Drawing(name="stragglers", title=tr("Which rank was the slowest"), chart=chart)


def _memory(runs: Sequence[Run]) -> Drawing | None:
    """Return what was measured beside what was planned: over the steps, for several runs as bars."""
    measured, planned = tr("measured"), tr("planned")
    looks = Series(colors={measured: BLUE, planned: GREY}, dashed=[planned])
    figures = [
        "device_memory_peak_bytes"
        if run.history.training.series("device_memory_peak_bytes")
        else "host_memory_peak_bytes"
        for run in runs
    ]
    note = tr("The highest of all ranks since the start, of a GPU; without one, of the process.")
    pairs: list[tuple[Run, str, str]] = [
        (run, figure, name)
        for run, of_run in zip(runs, figures, strict=True)
        for figure, name in ((of_run, measured), ("planned_memory_bytes", planned))
    ]
    title = tr("Memory of a rank, measured and planned")
    if len(runs) == 1:
        records = [point for run, figure, name in pairs for point in _points(run, figure, name, 1 / GIB)]
        axes = Axes(x=tr("step"), y="GiB", series=tr("memory"), from_zero=True)
        draw_it: Callable[..., charts.Chart] = charts.lines
    else:
        tops = [(run, name, run.history.training.most(figure)) for run, figure, name in pairs]
        records = [{"x": run.name, "y": charts.rounded(top / GIB), "s": name} for run, name, top in tops if top]
        axes = Axes(x=tr("run"), y="GiB", series=tr("memory"), format="~g")
        draw_it = charts.bars
    if not records:
        return None
    return Drawing(name="memory", title=title, chart=draw_it(records, axes, looks), note=note)


def _padded(run: Run) -> Drawing | None:
    found = run.history.padding
    if not found:
        return None
    records = [
        {
            "low": low / 100,
            "high": (low + 5) / 100,
            "y": sum(found[low + one] for one in range(5)),
            "text": f"{low}–{low + 5} %",
        }
        for low in range(0, 100, 5)
    ]
    axes = Axes(x=tr("share of padding"), y=tr("log lines"), format=".0%")
    return Drawing(
        name="padding-histogram", title=tr("How much padding there is"), chart=charts.histogram(records, axes, ORANGE)
    )


def _lengths(run: Run) -> list[Drawing | None]:
    splits = run.data.get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    edges, counts = (train.get("edges"), train.get("counts")) if isinstance(train, dict) else (None, None)
    if not (isinstance(edges, list) and isinstance(counts, list) and len(edges) == len(counts) + 1):
        return []
    if not all(isinstance(value, (int, float)) for value in (*edges, *counts)):
        return []
    records = [
        {"low": low, "high": high, "y": count, "text": f"{low + 1:,}–{high:,}"}
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    axes = Axes(x=tr("tokens per sample"), y=tr("samples"))
    chart = charts.histogram(records, axes, GREEN)
    return [Drawing(name="lengths", title=tr("Lengths of the training samples"), chart=chart)]
