"""One Markdown file about this machine and a run, to attach to a bug report: without secrets, in English."""

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

import toolkit
from toolkit.disk import open_regular_file
from toolkit.extras.doctor import facts
from toolkit.messages import printable
from toolkit.report.run import Run, read_run
from toolkit.secrets import MASK, hide, is_under_secret_name

_PACKAGES = (
    *(*facts.PACKAGES, "accelerate", "bitsandbytes", "flash-attn", "liger-kernel", "omegaconf", "peft"),
    *("sglang", "triton", "vllm"),
)
_LOG_LINES, _LOG_BYTES, _LINE_LETTERS = 60, 1 << 16, 500
_MOST_LOGS = 4
"""Of a run of many ranks: the log of rank 0, and those that were written last."""
_METRIC_ROWS = 5
_HOMES = r"/(?:home|Users)/[^/\s'\":,;)\]}]+"
"""Home directories on Linux and macOS."""


def describe(run_folder: Path | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return what a maintainer needs to see of this machine, and of a run if one is given; RunFolderError if
    `run_folder` is no run's.
    """
    run = read_run(run_folder) if run_folder else None  # first: it learns the secrets of the run's config
    lines = [f"# toolkit {toolkit.__version__}, {time.strftime('%Y-%m-%d %H:%M %z')}", "", *_machine(environ)]
    if run is not None:
        lines += _run(run)
    return _short_homes(hide(printable("\n".join(lines)))) + "\n"


def _machine(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield versions, GPUs and the variables by which runs differ."""
    here = facts.of_machine(environ)
    cards = here["gpus"]["cards"]
    gpus = [f"{card['index']}: {card['name']}, {card['mib']} MiB, {card['free_mib']} MiB free" for card in cards]
    versions = [f"{name} {version}" for name in _PACKAGES if (version := facts.version(name))]
    yield from ("## Machine", "")
    rows = {
        "commit": here["code"]["commit"] or "none: not a checkout",
        "Python": here["python"],
        "packages": ", ".join(versions),
        "NCCL": here["nccl"] or "not installed",
        "driver": here["gpus"]["driver"] or ("nvidia-smi does not answer" if here["gpus"]["late"] else "none"),
        "GPUs": "; ".join(gpus) or "none",
        "CPU cores, free memory": f"{here['cores']}, {here['memory'] / 2**30:.1f} GiB",
        "limits": ", ".join(f"{name} {limit if limit >= 0 else 'none'}" for name, limit in here["limits"].items()),
    }
    yield from (f"- {name}: {text}" for name, text in rows.items())
    yield "- locks of unfinished builds: " + (", ".join(here["locks"]) or "none")
    values = {name: value for name, value in sorted(environ.items()) if name.startswith(facts.MATTERING)}
    shown = (f"{name}={MASK if is_under_secret_name(name, value) else value}" for name, value in values.items())
    yield from ("", "Environment variables:", "", *_block(shown))


def _run(run: Run) -> Iterator[str]:
    """Yield how a run ended, its last metrics and log lines, and its config."""
    yield from ("", f"## Run {run.name}: {run.status}", "")
    yield f"- step {run.step} of {run.total_steps or '?'}, starts: {len(run.starts)}"
    yield from (f"- {name}: {_flat(value)}" for name, value in run.environment.items())
    if run.failure:
        yield from ("", "FAILED:", "", *_block(run.failure.splitlines()))
    rows = _last_lines(run.folder / "metrics.jsonl", _METRIC_ROWS)
    yield from ("", "Last metrics:", "", *_block(rows))
    for log in _logs(run.folder / "logs"):
        yield from ("", f"Last lines of {log.name}:", "", *_block(_last_lines(log, _LOG_LINES)))
    # Not folded: a secret or a home directory on two lines would not be found.
    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=math.inf)
    yield from ("", "Config:", "", *_block(config.splitlines(), "yaml"))


def _flat(value: Any) -> str:
    """Return a value of environment.json in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _logs(folder: Path) -> list[Path]:
    """Return the logs in a directory that are shown, at most _MOST_LOGS: that of rank 0 first, then the newest."""
    written: dict[Path, float] = {}
    for path in folder.glob("rank_*.log"):
        with suppress(OSError):
            written[path] = path.stat().st_mtime
    rank_0_then_newest = sorted(written, key=lambda path: (path.name != "rank_0.log", -written[path], path.name))
    return rank_0_then_newest[:_MOST_LOGS]


def _last_lines(path: Path, count: int) -> list[str]:
    """Return a file's last lines, cut to _LINE_LETTERS; none if it cannot be read."""
    with suppress(OSError), open_regular_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOG_BYTES))
        lines = file.read(_LOG_BYTES).decode("utf-8", errors="replace").splitlines()
        if size > _LOG_BYTES:
            del lines[0]  # its beginning is missing, and a secret could be cut in two
        return lines[-count:]
    return []


def _block(lines: Iterable[str], language: str = "text") -> list[str]:
    """Return lines as a block of Markdown, which no line of theirs can end."""
    # A secret is hidden before a line is cut: half of it would not be recognised. A line of four backticks would end
    # the block, which begins with four.
    cut = [line if len(line) <= _LINE_LETTERS else line[:_LINE_LETTERS] + "…" for line in map(hide, lines)]
    return [f"````{language}", *(line.replace("````", "'''") for line in cut), "````"]


def _short_homes(text: str) -> str:
    """Return a text with `~` in place of home directories: this user's, and those of a run copied from elsewhere.
    `/home/ann/data` -> `~/data`; `/mnt/home/ann` and, if /root is the home, `/root2` stay.
    """
    homes_of_user = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    longest_first = sorted(homes_of_user, key=len, reverse=True)  # one may be the beginning of the other
    homes = "|".join([*map(re.escape, longest_first), _HOMES])
    # Whole names only, and only where a path begins: no letter of a path stands before or directly behind.
    return re.sub(rf"(?<![\w.~-])(?:{homes})(?![\w.-])", "~", text)
