"""The kinds of charts that a report draws, as Altair definitions, for the page and PNG files alike."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import altair as alt

from toolkit.report.run import digits

BLUE, ORANGE, GREEN, PURPLE, RED, CYAN, PINK, GREY = (
    *("#2f7bf0", "#d97706", "#059669", "#8b5cf6"),
    *("#dc2626", "#0891b2", "#db2777", "#8492a6"),
)
PALETTE = (
    *(BLUE, ORANGE, GREEN, PURPLE, CYAN, PINK, RED, GREY),
    *("#65a30d", "#c026d3", "#a16207", "#4f46e5", "#0d9488", "#ea580c", "#0284c7", "#be123c"),
)
"""Colors of series, legible on white and on black."""
HEIGHT = 240
_SPREAD = 30
"""Ratio of the highest value to the median from which on an axis is logarithmic."""
_DIGITS = 5
"""Significant digits of the values in the page."""
_LONG_NAME, _LABEL_PIXELS = 14, 260

Record = dict[str, Any]
"""A point: x, y, s (its series); low and high where it stands for several rows."""


class Event(NamedTuple):
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
    """Names drawn behind others: thin, pale, without tooltips."""
    dotted: Sequence[str] = ()
    """Names of few values, each shown with a point."""
    unlisted: Sequence[str] = ()
    """Names that the legend omits, as the note below the chart explains them."""


class Key(NamedTuple):
    """An entry of a legend."""

    name: str
    color: str
    look: str = "full"
    """full, dashed, or event."""


@dataclass(frozen=True, slots=True)
class Caption:
    """A chart's name and title, and the note that the page writes below it."""

    name: str
    """Of its file, without suffix."""
    title: str
    note: str = ""
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing(Caption):
    """A chart with its caption and legend."""

    definition: Any
    keys: Sequence[Key] = ()
    """Its legend, which the page writes as HTML, as text wraps there and in Vega-Lite does not."""


def rounded(value: float) -> float:
    """Return a value rounded to _DIGITS significant digits, which keeps pages small."""
    return float(f"{value:.{_DIGITS}g}")


def lines(
    records: Sequence[Record], axes: Axes, looks: Series, caption: Caption, events: Sequence[Event] = ()
) -> Drawing:
    """Return a chart of values over steps, a line for each series.

    Args:
        records: The points of all series.
        axes: What the axes say; the y axis is logarithmic where a few values are far above the median.
        looks: The series in the order of the legend, and how each is drawn.
        caption: Name, title and note of the drawing.
        events: What happened at a step, drawn as upright lines.
    """
    drawn = {record["s"] for record in records}
    names = [name for name in looks.colors if name in drawn]
    base = alt.Chart(alt.InlineData(values=list(records)))
    listed = [name for name in names if name not in (*looks.faint, *looks.unlisted)]
    color = _colored("s:N", {name: looks.colors[name] for name in names}, _legend(listed))
    values = [record["y"] for record in records]
    is_steep = bool(values) and min(values) > 0 and max(values) > _SPREAD * statistics.median(values)
    is_log = is_steep and not axes.from_zero  # a logarithmic axis has no zero
    fitted = alt.Scale(type="log") if is_log else alt.Scale(zero=axes.from_zero, nice=True)
    x = _steps(axes.x)
    y = alt.Y("y:Q", title=axes.y, scale=fitted, axis=alt.Axis(format=axes.format) if axes.format else alt.Axis())
    layers = []
    if any("low" in record for record in records):  # between the extremes: as lines, so that a lone spike is seen
        band = base.transform_filter("isValid(datum.low)").mark_rule(opacity=0.3, strokeWidth=1.5)
        layers.append(band.encode(x=x, y=alt.Y("low:Q", title=axes.y), y2="high:Q", color=color))
    for name in names:  # a layer each: a mark's dash and width are of the whole layer
        line = base.transform_filter(alt.datum.s == name).encode(x=x, y=y, color=color)
        if name in looks.faint:
            layers.append(line.mark_line(strokeWidth=1, opacity=0.45))
        else:
            dash = [5, 4] if name in looks.dashed else [1, 0]
            dots = {"size": 36, "filled": True} if name in looks.dotted else False
            layers.append(line.mark_line(strokeWidth=2, strokeDash=dash, point=dots))
    layers.append(_hover_points(base, names, looks, axes, x, y, color))
    chart = alt.layer(*layers)
    keys = []
    if len(listed) > 1:
        keys = [Key(name, looks.colors[name], "dashed" if name in looks.dashed else "full") for name in listed]
    if events:
        kinds = {event.kind: event.color for event in events}
        keys += [Key(kind, kind_color, "event") for kind, kind_color in kinds.items()]
        chart = _with_events(chart, events, kinds, x, axes.x)
    return _drawing(chart, caption, keys)


def _drawing(definition: Any, caption: Caption, keys: Sequence[Key] = ()) -> Drawing:
    """Return a drawing of an Altair chart, as wide as the page has room for."""
    sized = definition.properties(width="container", height=HEIGHT)
    return Drawing(definition=sized, keys=keys, **asdict(caption))


def _steps(title: str) -> alt.X:
    """Return an x axis of optimizer steps."""
    return alt.X("x:Q", title=title, axis=alt.Axis(format="~s", tickMinStep=1), scale=alt.Scale(nice=False))


def _colored(field: str, colors: dict[str, str], legend: alt.Legend | None) -> alt.Color:
    """Return a color encoding that gives each value of a field of the records its color."""
    return alt.Color(field, scale=alt.Scale(domain=list(colors), range=list(colors.values())), legend=legend)


def _legend(names: Sequence[str]) -> alt.Legend | None:
    """Return a legend of names, None for a single one."""
    if len(names) < 2:
        return None
    columns = 2 if max(map(len, names)) > _LONG_NAME else 4
    return alt.Legend(title=None, orient="top", columns=columns, labelLimit=_LABEL_PIXELS, values=list(names))


def _hover_points(
    base: Any, names: Sequence[str], looks: Series, axes: Axes, x: alt.X, y: alt.Y, color: alt.Color
) -> Any:
    """Return a layer of invisible points, of which the one nearest to the pointer shows itself and its tooltip."""
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False, encodings=["x", "y"])
    # The pointer is over the cell around a point, whose datum is the point; Vega-Lite 6.4 looks for texts in the cell.
    point = "(datum.datum || datum)"
    fields = {axes.x: f"format({point}.x, ',d')", axes.y: f"format({point}.y, ',.3~r')"}
    if len(names) > 1 and axes.series:
        fields = {axes.series: f"{point}.s", **fields}
    tooltip = ", ".join(f"{json.dumps(title)}: {value}" for title, value in fields.items())
    opacity = alt.condition(nearest, alt.value(1), alt.value(0))
    visible = [name for name in names if name not in looks.faint] or list(names)
    return (
        base.transform_filter(alt.FieldOneOfPredicate(field="s", oneOf=visible))
        .mark_point(size=60, filled=True)
        .encode(x=x, y=y, color=color, tooltip=alt.value({"expr": f"{{{tooltip}}}"}), opacity=opacity)
        .add_params(nearest)
    )


def _with_events(chart: Any, events: Sequence[Event], kinds: dict[str, str], x: alt.X, title: str) -> Any:
    """Return a chart with a vertical line for each event, and a second legend of their kinds (kind -> color)."""
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


def shares(parts: dict[str, float], axes: Axes, color: str, caption: Caption) -> Drawing:
    """Return a bar for each part of a whole, the largest first, with its name and percentage above it.

    Args:
        parts: Name -> amount.
        axes: `x` names the share, `y` the amount, `series` the parts, for tooltips.
        color: Of the bars.
        caption: Name, title and note of the drawing.
    """
    total = sum(parts.values()) or 1.0
    values = [
        {"s": name, "x": part / total, "y": part, "text": f"{name}: {digits(100 * part / total)} %"}
        for name, part in sorted(parts.items(), key=lambda pair: -pair[1])
    ]
    # The bar lies below the middle of its row (yOffset), and the text stands above it, as names may be long.
    base = alt.Chart(alt.InlineData(values=values)).encode(
        y=alt.Y("s:N", title=None, sort=None, axis=None),
        tooltip=[
            alt.Tooltip("s:N", title=axes.series),
            alt.Tooltip("x:Q", title=axes.x, format=".3~p"),
            alt.Tooltip("y:Q", title=axes.y, format=",.3~r"),
        ],
    )
    scale = alt.Scale(domain=[0, 1])
    bar = base.mark_bar(color=color, opacity=0.9, cornerRadiusEnd=2, size=14, yOffset=9).encode(
        x=alt.X("x:Q", title=axes.x, scale=scale, axis=alt.Axis(format=".0%"))
    )
    text = base.mark_text(align="left", baseline="bottom", dy=-2, fontSize=13).encode(x=alt.value(0), text="text:N")
    return _drawing(alt.layer(bar, text), caption)


def bars(records: Sequence[Record], axes: Axes, looks: Series, caption: Caption) -> Drawing:
    """Return a bar chart: a bar for each record's x; several with the same x are told apart by s, its series."""
    names = list(looks.colors)
    order = list(dict.fromkeys(record["x"] for record in records))
    are_few = len(order) < 9  # labels fit side by side
    definition = (
        alt.Chart(alt.InlineData(values=list(records)))
        .mark_bar(cornerRadiusEnd=2, opacity=0.9, size=36 if are_few and len(names) == 1 else alt.Undefined)
        .encode(
            x=alt.X(
                "x:N",
                title=axes.x,
                sort=order,
                axis=alt.Axis(labelAngle=0 if are_few else -45),
                scale=alt.Scale(padding=0.4),
            ),
            xOffset=alt.XOffset("s:N", sort=names) if len(names) > 1 else alt.Undefined,
            y=alt.Y("y:Q", title=axes.y, axis=alt.Axis(format=axes.format or "~s")),
            color=_colored("s:N", looks.colors, _legend(names)),
            tooltip=[
                alt.Tooltip("x:N", title=axes.x),
                alt.Tooltip("y:Q", title=axes.y, format=",.3~r"),
                *([alt.Tooltip("s:N", title=axes.series)] if axes.series else []),
            ],
        )
    )
    keys = [Key(name, looks.colors[name]) for name in names] if len(names) > 1 else []
    return _drawing(definition, caption, keys)


def histogram(bins: Iterable[tuple[float, float, int, str]], axes: Axes, color: str, caption: Caption) -> Drawing:
    """Return a histogram of `bins`, which are drawn as they are: (low end, high end, count, text of the tooltip)."""
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
    return _drawing(definition, caption)


def heat_map(rows: dict[str, list[float]], axes: Axes, colors: dict[float, str], caption: Caption) -> Drawing:
    """Return a heat map of `rows` (name -> values, a cell each); `colors`: of some values, between which others are
    interpolated. The page gets a list for each row instead of a record for each cell, of which there are thousands.
    """
    y = alt.Y("row:N", title=axes.y, sort=list(rows), axis=alt.Axis(labelOverlap=True, domain=False))
    scale = alt.Scale(domain=list(colors), range=list(colors.values()), clamp=True, interpolate="rgb")
    keys = [Key(f"{value:g}" if value < max(colors) else f"≥ {value:g}", color) for value, color in colors.items()]
    definition = (
        alt.Chart(alt.InlineData(values=[{"row": name, "v": values} for name, values in rows.items()]))
        .transform_flatten(["v"])  # a record for each cell, and x, its place in the row from 0
        .transform_window(count="row_number()", groupby=["row"])
        .transform_calculate(x="datum.count - 1")
        .mark_rect()
        .encode(
            x=alt.X("x:O", title=axes.x, axis=alt.Axis(labelAngle=0)),
            y=y,
            color=alt.Color("v:Q", scale=scale, legend=alt.Legend(title=None)),
            tooltip=[
                alt.Tooltip("row:N", title=axes.y),
                alt.Tooltip("x:O", title=axes.x),
                alt.Tooltip("v:Q", title=axes.series, format=",.3~r"),
            ],
        )
    )
    return _drawing(definition, caption, keys)


def config(ink: str, font: str) -> dict[str, Any]:
    """Return Vega-Lite's configuration: colors (`ink`: of text and axes), fonts and sizes."""
    lines = {"gridColor": ink, "gridOpacity": 0.12, "domainColor": ink, "domainOpacity": 0.35, "tickOpacity": 0}
    texts = {"labelColor": ink, "titleColor": ink, "labelOpacity": 0.8, "titleOpacity": 0.65, "titleFontWeight": 500}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": {**lines, **texts, "labelFontSize": 11, "titleFontSize": 11, "titlePadding": 8, "labelPadding": 6},
        "axisX": {"grid": False, "labelFlush": True, "labelOverlap": True, "tickCount": 8},
        "axisY": {"domain": False, "tickCount": 5},
        "text": {"color": ink},
        "legend": {"labelColor": ink, "labelFontSize": 12, "symbolStrokeWidth": 3, "symbolOpacity": 1, "offset": 6},
        "title": {"color": ink, "fontSize": 15, "anchor": "start", "offset": 12},
    }
