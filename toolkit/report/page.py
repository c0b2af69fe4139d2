"""Make a report: one HTML file that needs nothing else, and PNG files, drawn with the fonts of this machine alone."""

import base64
import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

import toolkit
from toolkit.disk import check_no_symlinks, write_atomically
from toolkit.messages import ConfigError, TrackError, current_language, printable, set_language, tr
from toolkit.report import figures, tables
from toolkit.report.figures import NAMES, Drawing, draw
from toolkit.report.run import PAGE, Run, Sample, distinct_names, expand_sweeps, read_run
from toolkit.report.tables import Table
from toolkit.secrets import hide, hide_all

PNG_FONTS = (
    "Noto Sans, DejaVu Sans, Liberation Sans, Noto Sans CJK SC, Noto Sans SC, Source Han Sans SC, "
    "WenQuanYi Micro Hei, WenQuanYi Zen Hei, Droid Sans Fallback, Arial, sans-serif"
)
_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
_CHINESE = re.compile(
    r"cjk|wqy|wenquanyi|droidsansfallback|sourcehan|notos(?:ans|erif)sc|simsun|simhei|msyh|uming|ukai"
)


def has_chinese(folders: Iterable[str] = _FOLDERS) -> bool:
    """Whether a font with Chinese letters is installed, by the names of the font files."""
    fonts = (path for folder in folders for path in Path(folder).expanduser().rglob("*.[ot]t[fc]"))
    return any(_CHINESE.search(path.name.lower()) for path in fonts)


_MOST_QUESTIONS = 20
GENERATOR = "deepspeed-finetuning-toolkit report"
"""What a page of ours says in its head: such a one may be replaced."""
_PAGE_FONTS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
_INK = "#16202e"
_PNG_WIDTH, _PNG_HEIGHT, _PNG_SCALE = 860, 320, 2.0
_VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


@dataclass(kw_only=True, slots=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[dict[str, Any]] = ()
    commands: Sequence[tuple[str, str]] = ()
    note: str = ""
    empty: str = ""
    """What is said where there is nothing yet."""


def render(runs: Sequence[Run], drawings: dict[str, list[Drawing]], images: str) -> str:
    """Return the page."""
    one = runs[0] if len(runs) == 1 else None
    drawn = [drawing for of_section in drawings.values() for drawing in of_section]
    program, library = _file("report.js"), vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", _VEGA_LITE)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    return environment.from_string(_file("report.html.j2")).render(
        language="zh-CN" if current_language() == "zh" else "en",
        generator=GENERATOR,
        title=one.name if one else tr("{count} runs compared", count=len(runs)),
        state=tables.status(one) if one else None,
        examples=tables.example_data(one) if one else "",
        head=tables.head(one) if one else [run.name for run in runs],
        failure=one.failure[:4000] if one and not one.summary else "",
        tiles=list(tables.tiles(one)) if one else [],
        sections=[
            section
            for section in _sections(runs, drawings)
            if any((section.drawings, section.tables, section.samples, section.commands, section.empty))
        ],
        words={
            "kind": tr("Training run") if one else tr("Comparison of training runs"),
            "noscript": tr("The charts need JavaScript; as pictures they are in {folder}.", folder=f"{images}/"),
            "made": tr(
                "Made by {name} {version} on {time}. The page needs no network.",
                name="DeepSpeed fine-tuning toolkit",
                version=toolkit.__version__,
                time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            ),
        },
        charts={
            "specs": {drawing.name: _without_legends(hide_all(_spec(drawing))) for drawing in drawn},
            "config": figures.config("currentColor", _PAGE_FONTS),
            "failed": tr("This chart could not be drawn; the browser's console says why."),
        },
        # Only these two scripts run, whatever else should ever get into the page.
        allowed=" ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in (library, program)
        ),
        style=Markup(_file("report.css")),  # noqa: S704
        library=Markup(library),  # noqa: S704
        program=Markup(program),  # noqa: S704
    )


def _shown(value: Any) -> Any:
    """Return what is put into the page: texts without secrets, and without what turns the direction of writing."""
    return printable(hide(value)) if type(value) is str else value


def _spec(drawing: Drawing) -> dict[str, Any]:
    """Return a chart for Vega-Lite, without a look of its own."""
    found: dict[str, Any] = drawing.definition.to_dict()
    found.pop("config", None)
    return found


def _without_legends(part: Any) -> Any:
    """Return a chart, or a part of it, without its legends: the page writes them itself."""
    if isinstance(part, dict):
        return {name: None if name == "legend" else _without_legends(inner) for name, inner in part.items()}
    return [_without_legends(inner) for inner in part] if isinstance(part, list) else part


def png(drawing: Drawing) -> bytes:
    """Return a chart as a picture on white."""
    found = {
        **hide_all(_spec(drawing)),
        "title": drawing.title,
        "width": _PNG_WIDTH,
        "height": _PNG_HEIGHT,
        "config": {**figures.config(_INK, PNG_FONTS), "background": "#ffffff", "padding": 16},
    }
    image: bytes = vl_convert.vegalite_to_png(found, vl_version=_VEGA_LITE, scale=_PNG_SCALE, allowed_base_urls=[])
    return image


def _file(name: str) -> str:
    return (resources.files("toolkit.report") / "page" / name).read_text(encoding="utf-8")


def _sections(runs: Sequence[Run], drawings: dict[str, list[Drawing]]) -> list[Section]:
    one = runs[0] if len(runs) == 1 else None
    changed = tables.settings(runs)

    def section(name: str, title: str, *given: Table | None, empty: str = "") -> Section:
        shown = [table for table in given if table]
        return Section(id=name, title=title, drawings=drawings.get(name, ()), tables=shown, empty=empty)

    no_step = "" if drawings.get("learning") else tr("No step has been logged yet.")
    no_change = "" if changed or one else tr("None: the settings are the same.")
    return [
        section("overview", tr("At a glance"), None if one else tables.overview(runs)),
        section("learning", tr("Learning"), tables.events(one) if one else None, empty=no_step),
        section("speed", tr("Speed"), tables.collectives(one) if one else None),
        section("memory", tr("Memory"), tables.plan(one) if one else None),
        _answers(runs),
        section("data", tr("Data"), *(tables.data_card(one) if one else ())),
        section("settings", tr("Settings") if one else tr("Settings that differ"), changed, empty=no_change),
        section("environment", tr("Environment"), tables.environment(runs)),
        _again(runs),
    ]


def _answers(runs: Sequence[Run]) -> Section:
    """Return what models said: of one run over time, of several what each said last."""
    note = ""
    if len(runs) > 1:
        # The question alone tells samples apart, as data may be copied.
        asked: dict[tuple[str, str], tuple[Sample, list[dict[str, Any]]]] = {}
        for run in runs:
            for one in run.answers.samples:
                _, said = asked.setdefault((one.prompt, one.reference), (one, []))
                said += _said_at(one, [max(one.said)], f"{run.name} · ")
        samples = [_sample(one.where, one.prompt, said, one) for one, said in asked.values() if len(said) > 1]
    else:
        found = runs[0].answers
        samples = [_sample(one.where, one.prompt, _said_at(one, found.steps), one) for one in found.samples]
        for row in runs[0].samples[:_MOST_QUESTIONS]:
            said = [_answer(tr("answer"), str(row.get("answer", "")))]
            samples.append(_sample(tr("asked at the end"), str(row.get("prompt", "")), said))
        if found.evaluations > len(found.steps):
            note = tr("{shown} of {count} evaluations are shown.", shown=len(found.steps), count=found.evaluations)
    return Section(id="answers", title=tr("Answers"), samples=samples, note=note)


def _sample(where: str, prompt: str, said: list[dict[str, Any]], of: Sample | None = None) -> dict[str, Any]:
    """Return a sample as the page shows it, with the reference answer last."""
    reference = [_answer(tr("reference"), of.reference, is_reference=True)] if of and of.reference else []
    return {"where": where, "prompt": prompt, "answers": [*said, *reference]}


def _said_at(sample: Sample, steps: Sequence[int], prefix: str = "") -> list[dict[str, Any]]:
    """Return the answers after some steps, of those that have one."""
    return [
        _answer(prefix + tr("step {step}", step=f"{step:,}"), sample.said[step], sample.scores.get(step))
        for step in steps
        if step in sample.said
    ]


def _answer(
    title: str, text: str, scores: dict[str, float] | None = None, is_reference: bool = False
) -> dict[str, Any]:
    score = " · ".join(f"{name} {value:.3g}" for name, value in list((scores or {}).items())[:2])
    return {"title": title, "text": text or tr("(nothing)"), "score": score, "is_reference": is_reference}


def _again(runs: Sequence[Run]) -> Section:
    found = [
        (f"{run.name}: {label}" if len(runs) > 1 else label, command)
        for run in runs
        for label, command in tables.commands(run)
    ]
    note = ""
    if any(str(run.environment.get("commit", "")).endswith("+changes") for run in runs):
        note = tr("The toolkit had changes that are in no commit (+changes): the commit alone does not make it again.")
    return Section(id="again", title=tr("Do it again"), commands=found, note=note)


COMPARISON = "comparison.html"
_HEAD_BYTES = 2048


def make_report(paths: Sequence[Path], output: Path | None = None) -> tuple[Path, Path]:
    """Report on one run, or compare several (of a sweep all); return the page and the directory of its pictures."""
    folders = expand_sweeps(paths)
    real = [path.resolve() for path in folders]
    if twice := [str(path) for path, one in zip(folders, real, strict=True) if real.count(one) > 1]:
        raise ConfigError("{runs}: these are the same run. Name each once.", runs=", ".join(twice))
    runs = [read_run(path) for path in real]
    distinct_names(runs)
    if output is None:
        output = paths[0].resolve() / PAGE if len(paths) == 1 else Path(COMPARISON)
    output = output.absolute()
    images = output.with_suffix("")
    _check_target(output, images)
    try:
        _write(runs, output, images)
    except OSError as error:
        raise TrackError(
            "the report {file} cannot be written: {reason}. Choose another place with output=FILE.html.",
            file=error.filename or output,
            reason=error.strerror or error,
        ) from error
    return output, images


def _check_target(output: Path, images: Path) -> None:
    """Reject an output that would overwrite what is no report."""
    if output.suffix != ".html":
        raise ConfigError("output = {file} must end in .html.", file=output)
    is_ours = False
    with suppress(OSError), output.open("rb") as file:
        is_ours = GENERATOR.encode() in file.read(_HEAD_BYTES)
    if os.path.lexists(output) and not is_ours:
        raise ConfigError(
            "{file} already exists and is not a report; it is not touched. Choose another output.", file=output
        )
    if os.path.lexists(images) and not is_ours and not (images.is_dir() and not any(images.iterdir())):
        raise ConfigError(
            "{folder} already exists and is not of a report; it is not touched. Choose another output.", folder=images
        )
    check_no_symlinks(images, ConfigError)


def _write(runs: Sequence[Run], output: Path, images: Path) -> None:
    drawings = draw(runs)
    write_atomically(output, render(runs, drawings, images.name).encode("utf-8", errors="backslashreplace"))
    language = current_language()
    if language == "zh" and not has_chinese():  # the letters would be boxes
        set_language("en")
        drawings = draw(runs)
    try:
        images.mkdir(exist_ok=True)
        names = set()
        for drawing in (one for of_section in drawings.values() for one in of_section):
            names.add(f"{drawing.name}.png")
            write_atomically(images / f"{drawing.name}.png", png(drawing))
    finally:
        set_language(language)
    for name in {f"{name}.png" for name in NAMES} - names:  # of a report with other charts
        (images / name).unlink(missing_ok=True)
