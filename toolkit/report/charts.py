"""The kinds of charts that a report has, as Altair definitions: the page draws them, and so do the PNG files."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

BLUE, ORANGE, GREEN, PURPLE, RED, CYAN, PINK, GREY = (
    *("#2f7bf0", "#d97706", "#059669", "#8b5cf6"),
    *("#dc2626", "#0891b2", "#db2777", "#8492a6"),
)
PALETTE = (
    *(BLUE, ORANGE, GREEN, PURPLE, CYAN, PINK, RED, GREY),
    *("#65a30d", "#c026d3", "#a16207", "#4f46e5", "#0d9488", "#ea580c", "#0284c7", "#be123c"),
)
"""Each stands out from white and from black."""
HEIGHT = 240
_SPREAD = 30
"""Times that the highest value is the median from which on an axis is logarithmic."""
_DIGITS = 5
_LONG_NAME, _LABEL_PIXELS = 14, 260

Record = dict[str, Any]
"""A point: x, y, s (its series); low and high where it stands for several rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened at a step."""

    step: int
    kind: str
    text: str
    color: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """What a chart's axes say."""

    x: str
    y: str
    series: str = ""
    """What the series are, for tooltips; "" leaves them out."""
    format: str = ""
    """Of y, in d3's language."""
    from_zero: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """How the series of a chart look, in the order of the legend."""

    colors: dict[str, str]
    dashed: Sequence[str] = ()
    faint: Sequence[str] = ()
    """Those that lie behind others: thin, pale, not pointed at."""
    dotted: Sequence[str] = ()
    """Those of few values, each shown with a point."""
    unlisted: Sequence[str] = ()
    """Those that the legend leaves out, as what is written below the chart explains them."""


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend."""

    name: str
    color: str
    look: str = "full"
    """full, dashed, or event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart and its legend, which the page writes itself: words in HTML wrap where there is little room."""

    definition: Any
    keys: Sequence[Key] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A chart with what is said about it."""

    name: str
    """Of its file, without ending."""
    title: str
    chart: Chart
    note: str = ""
    is_wide: bool = False


def rounded(value: float) -> float:
    """Return a value with as many digits as can be seen."""
    return float(f"{value:.{_DIGITS}g}")


def lines(records: Sequence[Record], axes: Axes, looks: Series, events: Sequence[Event] = ()) -> Chart:
    """Return a chart of values over steps."""
    there = {record["s"] for record in records}
    names = [name for name in looks.colors if name in there]
    base = alt.Chart(alt.InlineData(values=list(records)))
    listed = [name for name in names if name not in (*looks.faint, *looks.unlisted)]
    color = _colored("s:N", {name: looks.colors[name] for name in names}, _legend(listed))
    shown = [record["y"] for record in records]
    is_steep = bool(shown) and min(shown) > 0 and max(shown) > _SPREAD * statistics.median(shown)
    is_log = is_steep and not axes.from_zero
    fitted = alt.Scale(type="log") if is_log else alt.Scale(zero=axes.from_zero, nice=True)
    x = _steps(axes.x)
    y = alt.Y("y:Q", title=axes.y, scale=fitted, axis=alt.Axis(format=axes.format) if axes.format else alt.Axis())
    layers = []
    if any("low" in record for record in records):  # between the extremes: as lines, so that a lone spike is seen
        band = base.transform_filter("isValid(datum.low)").mark_rule(opacity=0.3, strokeWidth=1.5)
        layers.append(band.encode(x=x, y=alt.Y("low:Q", title=axes.y), y2="high:Q", color=color))
    for name in names:
        one = base.transform_filter(alt.datum.s == name).encode(x=x, y=y, color=color)
        if name in looks.faint:
            layers.append(one.mark_line(strokeWidth=1, opacity=0.45))
        else:
            dash = [5, 4] if name in looks.dashed else [1, 0]
            dots = {"size": 36, "filled": True} if name in looks.dotted else False
            layers.append(one.mark_line(strokeWidth=2, strokeDash=dash, point=dots))
    layers.append(_pointed_at(base, names, looks, axes, x, y, color))
    chart = alt.layer(*layers)
    keys = []
    if len(listed) > 1:
        keys = [Key(name, looks.colors[name], "dashed" if name in looks.dashed else "full") for name in listed]
    if events:
        kinds = {event.kind: event.color for event in events}
        keys += [Key(kind, kind_color, "event") for kind, kind_color in kinds.items()]
        chart = _with_events(chart, events, kinds, x, axes.x)
    return _chart(chart, keys)


def _chart(definition: Any, keys: Sequence[Key] = ()) -> Chart:
    return Chart(definition=definition.properties(width="container", height=HEIGHT), keys=keys)


def _steps(title: str) -> alt.X:
    return alt.X("x:Q", title=title, axis=alt.Axis(format="~s", tickMinStep=1), scale=alt.Scale(nice=False))


def _colored(field: str, colors: dict[str, str], legend: alt.Legend | None) -> alt.Color:
    return alt.Color(field, scale=alt.Scale(domain=list(colors), range=list(colors.values())), legend=legend)


def _legend(names: Sequence[str]) -> alt.Legend | None:
    """Return a legend of names; of one alone there is none."""
    if len(names) < 2:
        return None
    columns = 2 if max(map(len, names)) > _LONG_NAME else 4
    return alt.Legend(title=None, orient="top", columns=columns, labelLimit=_LABEL_PIXELS, values=list(names))


def _pointed_at(
    base: Any, names: Sequence[str], looks: Series, axes: Axes, x: alt.X, y: alt.Y, color: alt.Color
) -> Any:
    """Return points that show, the nearest one, what they are when they are pointed at."""
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False, encodings=["x", "y"])
    told = [alt.Tooltip("x:Q", title=axes.x, format=",d"), alt.Tooltip("y:Q", title=axes.y, format=".5~g")]
    if len(names) > 1 and axes.series:
        told.insert(0, alt.Tooltip("s:N", title=axes.series))
    visible = [name for name in names if name not in looks.faint] or list(names)
    return (
        base.transform_filter(alt.FieldOneOfPredicate(field="s", oneOf=visible))
        .mark_point(size=60, filled=True)
        .encode(x=x, y=y, color=color, tooltip=told, opacity=alt.condition(nearest, alt.value(1), alt.value(0)))
        .add_params(nearest)
    )


def _with_events(chart: Any, events: Sequence[Event], kinds: dict[str, str], x: alt.X, title: str) -> Any:
    """Return a chart with upright lines for what happened, and a second legend for their kinds."""
    values = [{"x": event.step, "kind": event.kind, "text": event.text} for event in events]
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolDash=[3, 3], labelLimit=_LABEL_PIXELS)
    rules = (
        alt.Chart(alt.InlineData(values=values))
        .mark_rule(strokeWidth=1.5, strokeDash=[3, 3])
        .encode(
            x=x,
            color=_colored("kind:N", kinds, legend),
            tooltip=[alt.Tooltip("text:N", title=" "), alt.Tooltip("x:Q", title=title, format=",d")],
        )
    )
    return alt.layer(chart, rules).resolve_scale(color="independent")


def stacked(records: Sequence[Record], axes: Axes, colors: dict[str, str]) -> Chart:
    """Return a chart of parts over steps that add up; `colors` of the parts, the lowest first."""
    order = {name: place for place, name in enumerate(colors)}
    values = [{**record, "o": order[record["s"]]} for record in records]
    definition = (
        alt.Chart(alt.InlineData(values=values))
        .mark_area(opacity=0.85, line=False)
        .encode(
            x=_steps(axes.x),
            y=alt.Y("y:Q", title=axes.y, stack="zero", axis=alt.Axis(format="~g")),
            color=_colored("s:N", colors, alt.Legend(title=None, orient="top", columns=2, labelLimit=_LABEL_PIXELS)),
            order=alt.Order("o:Q"),
            tooltip=[
                alt.Tooltip("s:N", title=axes.series),
                alt.Tooltip("x:Q", title=axes.x, format=",d"),
                alt.Tooltip("y:Q", title=axes.y, format=".4~g"),
            ],
        )
    )
    return _chart(definition, [Key(name, color) for name, color in colors.items()])


def bars(records: Sequence[Record], axes: Axes, looks: Series) -> Chart:
    """Return a chart with a bar for each name, which is a record's x; its s tells bars of one name apart."""
    names = list(looks.colors)
    order = list(dict.fromkeys(record["x"] for record in records))
    definition = (
        alt.Chart(alt.InlineData(values=list(records)))
        .mark_bar(cornerRadiusEnd=2, opacity=0.9, size=36 if len(order) < 9 and len(names) == 1 else alt.Undefined)
        .encode(
            x=alt.X(
                "x:N",
                title=axes.x,
                sort=order,
                axis=alt.Axis(labelAngle=0 if len(order) < 9 else -45),
                scale=alt.Scale(padding=0.4),
            ),
            xOffset=alt.XOffset("s:N", sort=names) if len(names) > 1 else alt.Undefined,
            y=alt.Y("y:Q", title=axes.y, axis=alt.Axis(format=axes.format or "~s")),
            color=_colored("s:N", looks.colors, _legend(names)),
            tooltip=[
                alt.Tooltip("x:N", title=axes.x),
                alt.Tooltip("y:Q", title=axes.y, format=",.4~g"),
                *([alt.Tooltip("s:N", title=axes.series)] if axes.series else []),
            ],
        )
    )
    return _chart(definition, [Key(name, looks.colors[name]) for name in names] if len(names) > 1 else [])


def histogram(bins: Iterable[tuple[float, float, int, str]], axes: Axes, color: str) -> Chart:
    """Return a chart of how often values are met: the low and the high end of each bin, how often, and its text."""
    values = [{"low": low, "high": high, "y": count, "text": text} for low, high, count, text in bins]
    definition = (
        alt.Chart(alt.InlineData(values=values))
        .mark_bar(color=color, opacity=0.9, binSpacing=1)
        .encode(
            x=alt.X("low:Q", bin="binned", title=axes.x, axis=alt.Axis(format=axes.format or "~s")),
            x2="high:Q",
            y=alt.Y("y:Q", title=axes.y, axis=alt.Axis(format="~s")),
            tooltip=[alt.Tooltip("text:N", title=axes.x), alt.Tooltip("y:Q", title=axes.y, format=",d")],
        )
    )
    return _chart(definition)


def config(ink: str, font: str) -> dict[str, Any]:
    """Return Vega-Lite's configuration."""
    quiet = {"gridColor": ink, "gridOpacity": 0.12, "domainColor": ink, "domainOpacity": 0.35, "tickOpacity": 0}
    words = {"labelColor": ink, "titleColor": ink, "labelOpacity": 0.8, "titleOpacity": 0.65, "titleFontWeight": 500}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": {**quiet, **words, "labelFontSize": 11, "titleFontSize": 11, "titlePadding": 8, "labelPadding": 6},
        "axisX": {"grid": False, "labelFlush": True, "labelOverlap": True, "tickCount": 8},
        "axisY": {"domain": False, "tickCount": 5},
        "legend": {"labelColor": ink, "labelFontSize": 12, "symbolStrokeWidth": 3, "symbolOpacity": 1, "offset": 6},
        "title": {"color": ink, "fontSize": 15, "anchor": "start", "offset": 12},
    }
