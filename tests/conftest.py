"""Shared by all tests: English messages, no network, and a way to launch real ranks."""

import gc
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from toolkit import secrets, terminal
from toolkit.messages import console, set_language, set_main_rank

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


TIERS = ("default", "ranks", "nightly")
FOLDERS = {"ranks": "ranks", "system": "nightly", "gpu": "nightly"}
"""Tier of the tests in a directory; those of all others belong to the default tier. A marker of a tier's name wins."""
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each test file by --tier, measured: the longest begins first, so that no worker is left with it alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Choose tiers and faults; measure."""
    parser.addoption("--tier", default="default,ranks", help="tiers to run: default, ranks, nightly, or all")
    parser.addoption("--faults", default="", help="only the faults with these identifiers, such as 'K1 K2'")
    parser.addoption("--device", choices=("cpu", "cuda"), help="what tests/gpu runs on; DS_ACCELERATOR if not given")
    parser.addoption("--record-combinations", default="", help="file that gets what the test of layouts finds")
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of each file to {DURATIONS}")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the tests of GPUs what they run on, before they are imported."""
    if config.getoption("--device"):
        os.environ["DS_ACCELERATOR"] = config.getoption("--device")


def tier_of(item: pytest.Item) -> str:
    """Return the tier that a test belongs to: the cheapest that can fail for its reason."""
    marked = [tier for tier in TIERS if item.get_closest_marker(tier)]
    return marked[0] if marked else FOLDERS.get(item.path.parent.name, "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select tiers and faults, start the longest files first, and record which fault a test puts in."""
    wanted = set(config.getoption("--faults").split())
    tiers = TIERS if config.getoption("--tier") == "all" else config.getoption("--tier").split(",")
    if unknown := set(tiers) - set(TIERS):
        raise pytest.UsageError(f"--tier: unknown {', '.join(sorted(unknown))}; expected {', '.join(TIERS)} or all")
    selected, deselected = [], []
    for item in items:
        faults = [name for mark in item.iter_markers("fault") for name in mark.args]
        if faults:
            item.user_properties.append(("fault", " ".join(faults)))
            text = getattr(getattr(item, "function", None), "__doc__", None) or ""
            item.user_properties.append(("text", text.split("\n")[0]))
        is_selected = tier_of(item) in tiers and (not wanted or wanted & set(faults))
        (selected if is_selected else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    known = recorded()
    seconds = known.get("all", {}) | known.get(config.getoption("--tier"), {})
    usual = median(seconds.values()) if seconds else 0.0  # of a file that was not there yet
    items[:] = sorted(selected, key=lambda item: -seconds.get(file_of(item.nodeid), usual))


def pytest_collection_finish() -> None:
    """Look for garbage in what tests leave behind, and not each time in all that was imported: a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name no test after bytes: packed ones hold the time, and pytest's workers must collect the same names."""
    return argname if isinstance(val, bytes) else None


def recorded() -> dict[str, dict[str, float]]:
    """Return the seconds of each file, by the tiers that ran."""
    return json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}


def file_of(nodeid: str) -> str:
    """Return the file of a test's identifier."""
    return nodeid.partition("::")[0]


_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what each file takes, set-up of its fixtures included."""
    name = file_of(report.nodeid)
    _seconds[name] = _seconds.get(name, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the seconds of the files that ran; those of the others stay."""
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        known, tier = recorded(), session.config.getoption("--tier")
        known[tier] = known.get(tier, {}) | {name: round(seconds, 1) for name, seconds in _seconds.items()}
        for name, files in known.items():
            known[name] = {file: files[file] for file in sorted(files) if (DURATIONS.parents[1] / file).exists()}
        DURATIONS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """Pin the language of messages."""
    set_language("en")
    yield
    set_language("en")


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Leave variables, secrets and display as they were: commands that are called in this process change them."""
    environment, learned = dict(os.environ), set(secrets._learned)
    display, is_session = terminal._display, terminal._is_session
    yield
    terminal._display, terminal._is_session = display, is_session
    set_main_rank(True)
    os.environ.clear()
    os.environ.update(environment)
    secrets._learned.clear()
    secrets._learned.update(learned)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the toolkit tells its user in this process, line by line."""
    lines: list[str] = []
    monkeypatch.setattr(console, "write", lines.append)
    return lines


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of the size that the test's parameter says, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
