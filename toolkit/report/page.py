"""Reports: one self-contained HTML file of tables, tiles and charts, and PNG files of the charts, drawn with this
machine's fonts.
"""

import base64
import hashlib
import importlib.util
import os
import re
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import jinja2
import yaml
from markupsafe import Markup

import toolkit
from toolkit import disk, messages, secrets, terminal
from toolkit.config import dotted_keys, files, schema
from toolkit.config.load import load, to_dict, to_plain
from toolkit.messages import tr
from toolkit.report.charts import Drawing, config
from toolkit.report.figures import GIB, NAMES, draw, events_of
from toolkit.report.run import (
    DONE,
    FAILED,
    PAGE,
    RUNNING,
    Run,
    Sample,
    digits,
    distinct_names,
    expand_sweeps,
    read_run,
    read_within,
)
from toolkit.report.scores import tables_of
from toolkit.report.verdict import DIVERGED, FLAT, LEARNED, OVERFIT, next_commands, verdict_of

_READING_S = 600.0
"""Seconds that `toolkit report` waits for a run directory to be read."""
_MOST_ROWS = 60
_GOOD, _BAD = "good", "bad"
NONE = "—"


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    detail: str = ""
    tone: str = ""


class Table(NamedTuple):
    """Rows with the same columns."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    marked: Collection[int] = ()


class Lead(NamedTuple):
    """What the page begins with."""

    text: str
    tone: str
    commands: Sequence[tuple[str, str]]


def status(run: Run) -> tuple[str, str]:
    """Return a run's state: DONE, FAILED, RUNNING or UNFINISHED, which colors the page, and the words for it."""
    words = {DONE: tr("finished"), FAILED: tr("failed"), RUNNING: tr("running")}
    return run.status, words.get(run.status, tr("stopped, unfinished"))


def short(value: float) -> str:
    """Return a number with three digits and a letter for its size."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            unit = 1000 if letter == "k" else limit  # numbers of four digits have no letter: 9,999, then 10k
            return f"{value / unit:.3g}{letter}"
    return f"{value:,.0f}"


def speed(run: Run) -> float | None:
    """Return the mean tokens (or samples) per second, each row weighted by its steps' seconds; None without any."""
    paces = run.history.training.series("samples_per_s" if run.is_custom else "tokens_per_s")
    step_s = dict(run.history.training.series("step_s"))
    timed = [(pace.mean, step_s[step].mean) for step, pace in paces if step in step_s]
    total_s = sum(seconds for _, seconds in timed)
    return sum(pace * seconds for pace, seconds in timed) / total_s if total_s else None


def peak(run: Run) -> tuple[float | None, float | None]:
    """Return the highest memory of a rank and the planned one, in bytes: of its GPU, in runs on CPUs of its process."""
    training = run.history.training
    most = training.most("device_memory_peak_bytes")
    return training.most("host_memory_peak_bytes") if most is None else most, training.most("planned_memory_bytes")


def tiles(run: Run) -> Iterator[Tile]:
    """Yield the tiles at the top of a run's page: losses, steps, data, speed, memory, time, and what went wrong."""
    history, last = run.history, run.history.training.last
    if history.best is not None:
        best, at = history.best
        newest = next((row["eval_loss"] for row in reversed(history.evaluations) if "eval_loss" in row), best)
        detail = tr("best {loss} at step {step}", loss=digits(best), step=f"{at:,}")
        yield Tile(tr("Validation loss"), digits(newest), detail, _GOOD if newest <= best else "")
    if (loss := last("loss")) is not None:
        yield Tile(tr("Training loss"), digits(loss), tr("from {loss}", loss=digits(history.first_loss or loss)))
    epochs = last("epoch")
    parts = [tr("of {total}", total=f"{run.total_steps:,}")] if run.total_steps else []
    parts += [tr("{epochs} epochs", epochs=f"{epochs:.2f}")] if epochs is not None else []
    yield Tile(tr("Steps"), f"{run.step:,}", messages.listed(*parts))
    samples, total, trained = map(last, ("samples", "total_tokens", "trained_tokens"))
    if samples is not None:
        yield Tile(tr("Samples"), short(samples))
    elif total is not None:
        detail = tr("{count} of them trained", count=short(trained)) if trained is not None else ""
        yield Tile(tr("Tokens"), short(total), detail)
    if (pace := speed(run)) is not None:
        yield _speed_tile(run, pace)
    most, planned = peak(run)
    if most is not None:
        detail = tr("of {planned} GiB planned", planned=digits(planned / GIB)) if planned else ""
        yield Tile(
            tr("Memory of a rank"), f"{digits(most / GIB)} GiB", detail, _BAD if planned and most > planned else ""
        )
    if history.seconds:
        detail, total_s = tr("in training steps"), run.summary.get("seconds")
        if isinstance(total_s, (int, float)) and len(run.starts) == 1:  # as the log's last lines say
            detail = tr(
                "in training steps; {time} in all, from the start of the command", time=terminal.clock(round(total_s))
            )
        yield Tile(tr("Time"), terminal.clock(round(history.seconds)), detail)
    yield _bad_steps_tile(run)


def _speed_tile(run: Run, pace: float) -> Tile:
    """Return the tile of tokens (or samples) per second; on a GPU with MFU, or the share of its matmul speed."""
    detail = ""
    for name in ("mfu_matmul", "mfu") if run.environment.get("device") else ():
        if series := run.history.training.series(name):
            mean = f"{sum(figure.mean for _, figure in series) / len(series):.0%}"
            detail = f"MFU {mean}" if name == "mfu" else tr("{share} of matmul", share=mean)
    return Tile(tr("Samples per second") if run.is_custom else tr("Tokens per second"), digits(pace), detail)


def _bad_steps_tile(run: Run) -> Tile:
    """Return the tile of bad steps, with restarts, skipped steps and rewinds."""
    counts = (run.history.training.last(name) for name in ("bad_steps", "skipped_steps", "rewinds"))
    bad, skipped, rewinds = (int(count or 0) for count in counts)
    restarts = max(len(run.starts) - 1, 0)
    parts = [
        tr("restarts: {count}", count=restarts) if restarts else "",
        tr("steps skipped: {count}", count=skipped) if skipped else "",
        tr("rewinds: {count}", count=rewinds) if rewinds else "",
    ]
    detail = messages.listed(*parts) or tr("no restarts")
    return Tile(tr("Bad steps"), f"{bad:,}", detail, _BAD if bad or rewinds else "")


def overview(runs: Sequence[Run]) -> Table:
    """Return the figures of several runs, a row for each."""
    rows = []
    for run in runs:
        history, pace, (most, planned) = run.history, speed(run), peak(run)
        last = history.training.last("loss")
        sizes = [digits(size / GIB) for size in (most, planned) if most and size]
        rows.append(
            [
                run.name,
                status(run)[1],
                f"{run.step:,}" + (f" / {run.total_steps:,}" if run.total_steps else ""),
                digits(last) if last is not None else NONE,
                digits(history.best[0]) if history.best else NONE,
                _paced(run, digits(pace)) if pace else NONE,
                " / ".join(sizes) or NONE,
                terminal.clock(round(history.seconds)) if history.seconds else NONE,
            ]
        )
    heads = (
        *(tr("run"), tr("state"), tr("steps"), tr("training loss"), tr("best validation loss")),
        *(tr("per second"), tr("GiB, measured / planned"), tr("time in steps")),
    )
    losses = [run.history.best[0] for run in runs if run.history.best]
    best = {index for index, run in enumerate(runs) if run.history.best and run.history.best[0] == min(losses)}
    return Table(heads, rows, marked=best, note=tr("Marked: the lowest validation loss."))


def _paced(run: Run, count: str) -> str:
    """Return a count of what a run's speed is measured in: samples of custom models, else tokens."""
    return tr("{count} samples", count=count) if run.is_custom else tr("{count} tokens", count=count)


def events(run: Run) -> Table | None:
    """Return a run's restarts, rewinds, skipped and bad steps as a table in the order of steps; None without any."""
    run_events = events_of(run)
    if not run_events:
        return None
    left = max(len(run_events) - _MOST_ROWS, 0) + run.history.more_events
    note = tr("{count} more are not listed.", count=f"{left:,}") if left else ""
    rows = [[event.kind, f"{event.step:,}", event.text] for event in run_events[:_MOST_ROWS]]
    return Table((tr("event"), tr("step"), tr("details")), rows, note=note)


def settings(runs: Sequence[Run]) -> Table | None:
    """Return a table of the settings in which a run differs from recipe or defaults, or runs differ; or None."""
    if len(runs) > 1:
        rows = [[change.key, *change.values] for change in differences_between(runs)]
        return Table((tr("setting"), *(run.name for run in runs)), rows) if rows else None
    changed, has_recipe = differences_of_run(runs[0])
    if not changed:
        return None
    if not has_recipe:
        note = tr(
            "The run's recipe is not installed here: compared with the defaults. All settings are in config.yaml."
        )
        rows = [[change.key, change.values[0], change.values[2]] for change in changed]
        return Table((tr("setting"), tr("this run"), tr("default")), rows, note=note)
    recipe = tr("recipe {name}", name=runs[0].config.get("recipe", ""))
    note = tr("Marked: not what the recipe says, as it is installed here. All settings are in config.yaml.")
    rows = [[change.key, *change.values] for change in changed]
    marked = {index for index, change in enumerate(changed) if change.is_new}
    return Table((tr("setting"), tr("this run"), recipe, tr("default")), rows, marked=marked, note=note)


def plan(run: Run) -> Table | None:
    """Return the planned memory of a rank in each phase of a step, from plan.json; None without it."""
    phases, words = run.plan.get("device_bytes"), messages.read_table("plan/kinds.yaml")
    rows = []
    for phase, parts in phases.items() if isinstance(phases, dict) else ():
        if isinstance(parts, dict) and all(isinstance(size, (int, float)) for size in parts.values()):
            by_kind = messages.listed(
                *(f"{messages.translated(words.get(name, name))} {digits(size / GIB)}" for name, size in parts.items())
            )
            rows.append([messages.translated(words.get(phase, phase)), digits(sum(parts.values()) / GIB), by_kind])
    step_s, pace = run.plan.get("step_s"), run.plan.get("tokens_per_s")
    note = ""
    if isinstance(step_s, float) and isinstance(pace, float):
        note = tr(
            "Planned, if each row had all tokens of data.max_length: {time} s per step, {pace} tokens/s. Shorter rows "
            "take less.",
            time=digits(step_s),
            pace=digits(pace),
        )
    heads = (tr("phase"), tr("GiB of tensors, planned"), tr("of it"))
    return Table(heads, rows, note=note) if rows else None


def collectives(run: Run) -> Table | None:
    """Return calls, bytes and seconds of each collective operation (profile.comms), the longest first; None without."""
    timed_rows = []
    for operation in run.collectives:
        calls, size, seconds = operation.get("calls"), operation.get("bytes"), operation.get("seconds")
        if not all(isinstance(value, (int, float)) and value >= 0 for value in (calls, size, seconds)) or not calls:
            continue
        rate = digits(size / seconds / 1e9) if seconds else NONE
        figures = [digits(size / calls / 2**20), digits(size / GIB), digits(seconds), rate]  # type: ignore[operator,arg-type]
        timed_rows.append((float(seconds), [str(operation.get("operation")), f"{calls:,.0f}", *figures]))  # type: ignore[arg-type]
    timed_rows.sort(key=lambda pair: -pair[0])
    heads = [tr("collective"), tr("calls"), tr("MiB per call"), tr("GiB"), tr("seconds"), tr("GB per second")]
    title = tr("Communication of rank 0 while it trained (profile.comms)")
    return Table(heads, [row for _, row in timed_rows[:_MOST_ROWS]], title=title) if timed_rows else None


def data_card(run: Run) -> list[Table]:
    """Return tables of the data's splits and sources, from data.json."""
    splits, sources = run.data.get("splits"), run.data.get("sources")
    dropped, duplicates = run.data.get("dropped"), run.data.get("duplicates")
    tables = []
    unit = {"pairs": tr("pairs"), "answers": tr("answers")}.get(str(run.data.get("unit")), tr("samples"))
    if isinstance(splits, dict) and splits:
        counts = ["samples", "tokens", "trained_tokens", "shortest", "median", "longest"]
        valid_splits = [(name, split) for name, split in splits.items() if isinstance(split, dict)]
        heads = [tr("split"), unit, tr("tokens"), tr("trained"), tr("shortest"), tr("median"), tr("longest")]
        reasons = dropped.items() if isinstance(dropped, dict) else ()
        note = messages.clauses(f"{reason}: {_count(count)}" for reason, count in reasons)
        notes = [tr("Rows skipped: {reasons}.", reasons=note or tr("none"))]
        if isinstance(duplicates, dict):
            notes.append(
                tr(
                    "Duplicates: {training} training rows; {validation} validation rows that are also training rows.",
                    training=_count(duplicates.get("training")),
                    validation=_count(duplicates.get("validation")),
                )
            )
        rows = [[name, *(_count(split.get(key)) for key in counts)] for name, split in valid_splits]
        tables.append(Table(heads, rows, note=messages.joined(*notes)))
    if isinstance(sources, list) and sources:
        counts = ["rows", "samples", "tokens", "trained_tokens"]
        listed = [source for source in sources[:_MOST_ROWS] if isinstance(source, dict)]
        heads = [tr("source"), tr("split"), tr("rows"), unit, tr("tokens"), tr("trained")]
        rows = [
            [str(source.get("name")), str(source.get("split")), *(_count(source.get(key)) for key in counts)]
            for source in listed
        ]
        tables.append(Table(heads, rows))
    return tables


def _count(value: object) -> str:
    """Return a number with thousands separators, a dash if it is none."""
    return f"{value:,}" if isinstance(value, (int, float)) else NONE


def environment(runs: Sequence[Run]) -> Table | None:
    """Return a table of versions, nodes and hardware, a column for each run; what differs is marked."""
    columns = [_environment(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, NONE) for column in columns)] for name in names]
    marked = {index for index, row in enumerate(rows) if len(set(row[1:])) > 1}
    heads = ("", *(run.name if len(runs) > 1 else tr("this run") for run in runs))
    return Table(heads, rows, marked=marked) if rows else None


def _environment(run: Run) -> dict[str, str]:
    """Return what environment.json says of a run: name shown in the table -> value."""
    recorded = run.environment
    hosts, packages = recorded.get("hosts"), recorded.get("packages")
    names = list(dict.fromkeys(map(str, hosts))) if isinstance(hosts, list) else []
    facts = {
        tr("ranks"): recorded.get("world_size"),
        tr("nodes"): ", ".join(names[:8]) + (" …" if len(names) > 8 else ""),
        "GPU": recorded.get("device"),
        tr("processors"): recorded.get("processors"),
        tr("system"): recorded.get("platform"),
        tr("commit"): recorded.get("commit"),
        "Python": recorded.get("python"),
        **(packages if isinstance(packages, dict) else {}),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def commands(run: Run) -> list[tuple[str, str]]:
    """Return (label, command) of each start of a run with another command, and of how to repeat its settings."""
    labelled_commands: list[tuple[str, str]] = []
    for row in run.starts[-_MOST_ROWS:]:
        words = row.get("command")
        text = messages.printable(shlex.join(map(str, words))) if isinstance(words, list) else ""
        if text and (not labelled_commands or text != labelled_commands[-1][1]):
            labelled_commands.append(
                (tr("{time}, from step {step}", time=row.get("time", "?"), step=row.get("from_step")), text)
            )
    if run.config:
        label = tr("The same settings, whatever the recipe says by now")
        labelled_commands.append((label, messages.printable(shlex.join(_training_words(run)))))
    return labelled_commands


def _training_words(run: Run) -> list[str]:
    """Return the words of a command that trains with a run's settings once more, on as many ranks, such as
    `deepspeed --num_gpus 8 run.py recipe=RUN/config.yaml run.name=NAME`.
    """
    ranks, hosts = run.environment.get("world_size"), run.environment.get("hosts")
    has_several_nodes = isinstance(hosts, list) and len(set(map(str, hosts))) > 1
    program = str(run.data.get("program") or "run.py")  # of a custom model the user's own
    if has_several_nodes and not run.is_custom:  # `toolkit launch` starts no program of a user's
        start = ["toolkit", "launch", "hostfile=hostfile"]  # the hostfile says on how many ranks
    elif isinstance(ranks, int) and ranks > 1:
        start = ["deepspeed", "--num_gpus", str(ranks), program]
    else:
        start = ["python", program]
    return [*start, f"recipe={files.quoted(run.folder / 'config.yaml')}", "run.name=NAME"]


def lead(run: Run) -> Lead | None:
    """Return the verdict on a run and what to type next, which its page begins with; None where no step was logged."""
    verdict = verdict_of(run)
    if verdict is None:
        return None
    tone = {LEARNED: _GOOD, OVERFIT: _BAD, FLAT: _BAD, DIVERGED: _BAD}.get(verdict.kind, "")
    return Lead(verdict.text.replace("->", "→"), tone, next_commands(run, verdict, _training_words(run)))


def example_data(run: Run) -> str:
    """Return the sentence about a run that trained on example data; "" if it did not."""
    sources = run.section("data").get("sources")
    listed = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    return files.notice_of_sources((str(source.get("path")), str(source.get("format"))) for source in listed)


def head(run: Run) -> list[str]:
    """Return the page's subtitle as parts: recipe, model, method, ZeRO stage, precision, ranks."""
    model, tuning, zero = run.section("model"), run.section("tuning"), run.section("zero")
    ranks: Any = run.environment.get("world_size")
    parts = [
        tr("recipe {name}", name=run.config["recipe"]) if run.config.get("recipe") else "",
        str(run.data["model"] if run.is_custom else model.get("name") or model.get("path") or ""),
        "" if run.is_custom else str(tuning.get("method", "")),
        f"ZeRO-{zero['stage']}" if "stage" in zero else "",
        str(run.section("precision").get("dtype", "")),
        (tr("1 rank") if ranks == 1 else tr("{count} ranks", count=ranks)) if ranks else "",
    ]
    return [messages.printable(part) for part in parts if part]


_IDENTIFYING = ("run.name", "run.dir", "recipe", "resume")
"""Settings that differ between any two runs and are not compared."""
_SOURCE_DEFAULTS = dict(dotted_keys.leaves(to_plain(schema.SourceConfig())))


class Changed(NamedTuple):
    """A setting that differs."""

    key: str
    values: Sequence[str]
    """Its values in the run, its recipe and the defaults; or in each run."""
    is_new: bool
    """Whether the run's value is not its recipe's either."""


def differences_of_run(run: Run) -> tuple[list[Changed], bool]:
    """Return the settings in which a run differs from the defaults or its recipe, first those that differ from the
    recipe; and whether the recipe is installed here: if not, it is taken to be the defaults.
    """
    run_values, defaults = _settings(run.config), _settings(to_dict(schema.RunConfig()))
    name, recipe = str(run.config.get("recipe", "")), None
    if name in files.known_recipes():
        with suppress(messages.ConfigError):
            recipe = _settings(to_dict(load([f"recipe={name}"]).cfg))
    changes = []
    for key in run_values | (recipe or {}):
        value, default = run_values.get(key), defaults.get(key)
        recipe_value = recipe.get(key) if recipe is not None else default
        is_new = not secrets.are_same(value, recipe_value)
        if key not in _IDENTIFYING and (is_new or not secrets.are_same(value, default)):
            changes.append(Changed(key, [_setting_text(setting) for setting in (value, recipe_value, default)], is_new))
    return sorted(changes, key=lambda change: not change.is_new), recipe is not None


def differences_between(runs: Sequence[Run]) -> list[Changed]:
    """Return the settings in which runs differ, with each run's value."""
    settings = [_settings(run.config) for run in runs]
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    changes = []
    for key in keys:
        values = [run_settings.get(key) for run_settings in settings]
        is_same = all(secrets.are_same(value, values[0]) for value in values[1:])
        if key not in _IDENTIFYING and not is_same:
            changes.append(Changed(key, [_setting_text(value) for value in values], is_new=True))
    return changes


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value; of the sections in a list (data sources) only values that are not defaults."""
    values: dict[str, Any] = {}
    for key, value in dotted_keys.leaves(config):
        if key.startswith("model.published."):  # facts about a model, not settings
            continue
        is_list_of_sections = isinstance(value, list) and all(isinstance(section, dict) for section in value)
        if not value or not is_list_of_sections:
            values[key] = value
            continue
        for number, section in enumerate(value):
            for name, setting in dotted_keys.leaves(section):
                if setting not in (_SOURCE_DEFAULTS.get(name), None):
                    values[f"{key}[{number}].{name}"] = setting
    return values


def _setting_text(value: object) -> str:
    """Return a value as YAML has it."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value or '""'
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")  # YAML's end of a document, after a lone value


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
GENERATOR = "toolkit report"
"""Marks a report in its HTML head: such a file may be overwritten."""
_PAGE_FONTS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
_INK = "#16202e"
_PNG_WIDTH, _PNG_HEIGHT, _PNG_SCALE = 860, 320, 2.0
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


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
    """What is shown if the section has no content."""


def render(runs: Sequence[Run], drawings: dict[str, list[Drawing]], images: str) -> str:
    """Return the HTML page of one run, or of several in comparison; `images`: name of the directory of PNG files."""
    single_run = runs[0] if len(runs) == 1 else None
    return write_page(
        title=single_run.name if single_run else tr("{count} runs compared", count=len(runs)),
        kind=tr("Training run") if single_run else tr("Comparison of training runs"),
        head=head(single_run) if single_run else [run.name for run in runs],
        tiles=list(tiles(single_run)) if single_run else [],
        sections=_sections(runs, drawings),
        drawn=list(chain(*drawings.values())),
        noscript=tr(
            "The charts need JavaScript; with vl-convert-python they are in {folder} as pictures.", folder=f"{images}/"
        ),
        state=status(single_run) if single_run else None,
        lead=lead(single_run) if single_run else None,
        examples=example_data(single_run) if single_run else "",
        failure=single_run.failure[:4000] if single_run and not single_run.summary else "",
    )


def write_page(
    *,
    title: str,
    kind: str,
    head: Sequence[str],
    tiles: Sequence[Tile],
    sections: Sequence[Section],
    drawn: Sequence[Drawing] = (),
    noscript: str = "",
    state: tuple[str, str] | None = None,
    lead: Lead | None = None,
    examples: str = "",
    failure: str = "",
) -> str:
    """Return a page in the report's look. `kind`: what it is a page of; `head`: parts of the subtitle; `drawn`: the
    charts of its sections; `noscript`: shown in their place without JavaScript; `state`: see `status`; `examples`: a
    sentence about example data; `failure`: the error that ended the run. "" and None leave the last five out.
    """
    program, library = (_file("report.js"), _file("vega.js")) if drawn else ("", "")
    pages = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    return pages.from_string(_file("report.html.j2")).render(
        language="zh-CN" if messages.current_language() == "zh" else "en",
        generator=GENERATOR,
        title=title,
        state=state,
        lead=lead,
        examples=examples,
        head=head,
        failure=failure,
        tiles=tiles,
        sections=[
            section
            for section in sections
            if any((section.drawings, section.tables, section.samples, section.commands, section.empty))
        ],
        words={
            "kind": kind,
            "next": tr("What to type next"),
            "noscript": noscript,
            "made": tr(
                "Made by {name} {version} on {time}. The page needs no network.",
                name="ExactTune",
                version=toolkit.__version__,
                time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            ),
        },
        charts={
            "specs": {drawing.name: _without_legends(secrets.hide_all(_spec(drawing))) for drawing in drawn},
            "config": config("currentColor", _PAGE_FONTS),
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
    """Return a value as the template inserts it: texts without secrets and control characters."""
    return messages.printable(secrets.hide(value)) if type(value) is str else value


def _spec(drawing: Drawing) -> dict[str, Any]:
    """Return a chart's Vega-Lite specification, without Altair's default configuration."""
    spec: dict[str, Any] = drawing.definition.to_dict()
    spec.pop("config", None)
    return spec


def _without_legends(part: Any) -> Any:
    """Return a Vega-Lite specification, or a part of it, without legends: the page writes them as HTML."""
    if isinstance(part, dict):
        return {name: None if name == "legend" else _without_legends(inner) for name, inner in part.items()}
    return [_without_legends(inner) for inner in part] if isinstance(part, list) else part


def png(drawing: Drawing) -> bytes:
    """Return a chart as a PNG file on white."""
    import vl_convert  # 84 MB, of which a page needs none

    spec = {
        **secrets.hide_all(_spec(drawing)),
        "title": drawing.title,
        "width": _PNG_WIDTH,
        "height": _PNG_HEIGHT,
        "config": {**config(_INK, PNG_FONTS), "background": "#ffffff", "padding": 16},
    }
    image: bytes = vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=_PNG_SCALE, allowed_base_urls=[])
    return image


def _file(name: str) -> str:
    """Return the text of a packaged file of the page."""
    return (resources.files("toolkit.report") / "page" / name).read_text(encoding="utf-8")


def _sections(runs: Sequence[Run], drawings: dict[str, list[Drawing]]) -> list[Section]:
    """Return the sections of the page, of one run or comparing several."""
    single_run = runs[0] if len(runs) == 1 else None
    changed = settings(runs)
    scores = [Table(heads, rows, title=title) for title, heads, rows in tables_of(runs)]

    def section(name: str, title: str, *tables: Table | None, empty: str = "") -> Section:
        """Return a section with the charts of its name, and those tables that are not None."""
        shown = [table for table in tables if table]
        return Section(id=name, title=title, drawings=drawings.get(name, ()), tables=shown, empty=empty)

    no_step = "" if drawings.get("learning") else tr("No step has been logged yet.")
    no_change = "" if changed or single_run else tr("None: the settings are the same.")
    return [
        section("overview", tr("At a glance"), None if single_run else overview(runs)),
        section("learning", tr("Learning"), events(single_run) if single_run else None, empty=no_step),
        section("speed", tr("Speed"), collectives(single_run) if single_run else None),
        section("memory", tr("Memory"), plan(single_run) if single_run else None),
        _answers(runs),
        *([section("scores", tr("Benchmarks and checks"), *scores)] if scores else []),
        section("data", tr("Data"), *(data_card(single_run) if single_run else ())),
        section("settings", tr("Settings") if single_run else tr("Settings that differ"), changed, empty=no_change),
        section("environment", tr("Environment"), environment(runs)),
        _again(runs),
    ]


def _answers(runs: Sequence[Run]) -> Section:
    """Return the section of answers to samples: of one run over its evaluations, of several each one's last."""
    if len(runs) > 1:
        return Section(id="answers", title=tr("Answers"), samples=_compared_samples(runs))
    evaluated, note = runs[0].answers, ""
    samples = [
        _sample(sample.where, sample.prompt, _answers_after(sample, evaluated.steps), sample)
        for sample in evaluated.samples
    ]
    for row in runs[0].samples[:_MOST_QUESTIONS]:
        titles = {"before": tr("before training"), "answer": tr("after training")}
        answers = [_answer(title, str(row[name])) for name, title in titles.items() if name in row]
        samples.append(_sample(tr("a question of the recipe"), str(row.get("prompt", "")), answers))
    if evaluated.evaluations > len(evaluated.steps):
        note = tr("{shown} of {count} evaluations are shown.", shown=len(evaluated.steps), count=evaluated.evaluations)
    return Section(id="answers", title=tr("Answers"), samples=samples, note=note)


def _compared_samples(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the samples that several runs have answered, each with every run's last answer."""
    # By question and reference, not by place, as data may have been copied: the first run's sample, all runs' answers.
    asked: dict[tuple[str, str], tuple[Sample, list[dict[str, Any]]]] = {}
    for run in runs:
        for sample in run.answers.samples:
            _, answers = asked.setdefault((sample.prompt, sample.reference), (sample, []))
            answers += _answers_after(sample, [max(sample.answers)], f"{run.name} · ")
    of_several = [(sample, answers) for sample, answers in asked.values() if len(answers) > 1]
    return [_sample(sample.where, sample.prompt, answers, sample) for sample, answers in of_several]


def _sample(where: str, prompt: str, answers: list[dict[str, Any]], asked: Sample | None = None) -> dict[str, Any]:
    """Return a sample as the template shows it, the reference answer of `asked`, if any, last. `where`: its title."""
    reference = [_answer(tr("reference"), asked.reference, is_reference=True)] if asked and asked.reference else []
    return {"where": where, "prompt": prompt, "answers": [*answers, *reference]}


def _answers_after(sample: Sample, steps: Sequence[int], prefix: str = "") -> list[dict[str, Any]]:
    """Return the sample's answers after those of `steps` that it has an answer for, labelled with prefix and step."""
    return [
        _answer(prefix + tr("step {step}", step=f"{step:,}"), sample.answers[step], sample.scores.get(step))
        for step in steps
        if step in sample.answers
    ]


def _answer(
    title: str, text: str, scores: dict[str, float] | None = None, is_reference: bool = False
) -> dict[str, Any]:
    """Return an answer as the template shows it, with its first two scores."""
    score = " · ".join(f"{name} {value:.3g}" for name, value in list((scores or {}).items())[:2])
    return {"title": title, "text": text or tr("(nothing)"), "score": score, "is_reference": is_reference}


def _again(runs: Sequence[Run]) -> Section:
    """Return the section of commands that reproduce the runs."""
    labelled_commands = [
        (f"{run.name}: {label}" if len(runs) > 1 else label, command)
        for run in runs
        for label, command in commands(run)
    ]
    note = ""
    if any(str(run.environment.get("commit", "")).endswith("+changes") for run in runs):
        note = tr("The toolkit had changes that are in no commit (+changes): the commit alone does not reproduce it.")
    return Section(id="again", title=tr("Reproduce this run"), commands=labelled_commands, note=note)


COMPARISON = "comparison.html"
_HEAD_BYTES = 2048


def make_report(paths: Sequence[Path], output: Path | None = None) -> tuple[Path, Path | None]:
    """Write a report of one run, or of several (or all of a sweep) in comparison; return the page and the directory of
    its PNG files, None if vl-convert-python, which draws them, is not installed.
    Raises RunFolderError for what is no run, ConfigError for a run named twice or an output that is no report, and
    TrackError where the report cannot be written.
    """
    folders = expand_sweeps(paths)
    real_paths = [path.resolve() for path in folders]
    repeated = [str(path) for path, real in zip(folders, real_paths, strict=True) if real_paths.count(real) > 1]
    if repeated:
        raise messages.ConfigError("{runs}: these are the same run. Name each once.", runs=", ".join(repeated))
    runs = [read_within(_READING_S, partial(read_run, path), path) for path in real_paths]
    distinct_names(runs)
    if output is None:
        output = paths[0].resolve() / PAGE if len(paths) == 1 else Path(COMPARISON)
    output = output.absolute()
    images = output.with_suffix("")
    _check_target(output, images)
    has_pictures = importlib.util.find_spec("vl_convert") is not None
    try:
        _write(runs, output, images, has_pictures)
    except OSError as error:
        raise messages.TrackError(
            "the report {file} cannot be written: {reason}. Choose another place with output=FILE.html.",
            file=error.filename or output,
            reason=error.strerror or error,
        ) from error
    return output, images if has_pictures else None


def check_output(output: Path) -> bool:
    """Return whether `output` is an existing report; ConfigError if it is another file, or not named .html."""
    if output.suffix != ".html":
        raise messages.ConfigError("output = {file} must end in .html.", file=output)
    is_ours = False
    with suppress(OSError), output.open("rb") as file:
        is_ours = f'{GENERATOR}">'.encode() in file.read(_HEAD_BYTES)
    if os.path.lexists(output) and not is_ours:
        raise messages.ConfigError(
            "{file} already exists and is not a report; it is not touched. Choose another output.", file=output
        )
    return is_ours


def _check_target(output: Path, images: Path) -> None:
    """Raise ConfigError if the page or its directory of PNG files would overwrite something else."""
    is_ours = check_output(output)
    if os.path.lexists(images) and not is_ours and not (images.is_dir() and not any(images.iterdir())):
        raise messages.ConfigError(
            "{folder} already exists and is not of a report; it is not touched. Choose another output.", folder=images
        )
    disk.check_no_symlinks(images, messages.ConfigError)


def _write(runs: Sequence[Run], output: Path, images: Path, has_pictures: bool) -> None:
    """Write the page and, with `has_pictures`, a PNG file per chart; remove those of an earlier report."""
    drawings, written = draw(runs), set[str]()
    disk.write_atomically(output, render(runs, drawings, images.name).encode("utf-8", errors="backslashreplace"))
    language = messages.current_language()
    if language == "zh" and not has_chinese():  # the letters in pictures would be boxes; the page has a browser's fonts
        messages.set_language("en")
        drawings = draw(runs)
    try:
        if has_pictures:
            images.mkdir(exist_ok=True)
            for drawing in chain(*drawings.values()):
                written.add(drawing.name)
                disk.write_atomically(images / f"{drawing.name}.png", png(drawing))
    finally:
        messages.set_language(language)
    for name in NAMES - written:  # of an earlier report with other charts
        (images / f"{name}.png").unlink(missing_ok=True)
