"""The board in a real browser: what is typed is checked, planned, saved and shown; nothing comes from elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import PROGRAM, Browser

from tests.unit.fake_runs import HOSTILE, fake_run, row

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
def test_a_day_at_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("one", "two"):
        fake_run(tmp_path / "runs" / name, text=HOSTILE)
    rows = [{"prompt": f"say {word}", "response": f"{word} {HOSTILE}"} for word in ("red", "green", "blue")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    command = [sys.executable, "-m", "toolkit", "board", "port=0", "language=zh"]
    with (
        Browser(tmp_path / "profile") as browser,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as board,
    ):
        try:
            assert board.stdout is not None
            browser.open(next(line.strip() for line in board.stdout if "http" in line))
            look_at_runs(browser, tmp_path / "runs" / "one")
            write_a_recipe(browser, tmp_path)
            see_samples(browser)
        finally:
            board.terminate()
    assert browser.told == []


def look_at_runs(browser: Browser, run: Path) -> None:
    """The list grows with the run, its report is reloaded, two are compared."""
    browser.wait("document.querySelectorAll('#rows tr').length == 2")
    assert "token" not in browser.run("location.href")
    assert browser.run("document.title") == "训练面板"
    browser.run("document.querySelector('#rows a').click()")
    browser.wait("document.getElementById('report').src.includes('/report?run=')")
    shown = browser.run("document.getElementById('shown-name').textContent")
    browser.run("window.loads = 0; document.getElementById('report').onload = () => window.loads++; 0")
    with (run.parent / shown / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(41, loss=0.125)) + "\n")
    browser.wait("document.getElementById('rows').textContent.includes('0.1250') && window.loads > 0")
    browser.run("document.querySelectorAll('#rows input').forEach((box) => box.click())")
    browser.run("document.getElementById('compare').click()")
    browser.wait("document.getElementById('report').src.split('run=').length == 3")


def write_a_recipe(browser: Browser, folder: Path) -> None:
    """Errors appear at their keys, the plan once there are none; a file that exists stays unless one agrees."""
    browser.run("location.hash = 'recipe'")
    browser.wait("document.documentElement.dataset.checked")
    for selector, text in {
        "#base": "quickstart",
        "#gpus": "1xcpu",
        "select[name='/model']": "glm_tiny",
        "input[name='data.sources']": "rows.jsonl",
        "input[name='data.validation_fraction']": "0.4",
        "input[name='optim.lr']": "fast",
        "input[name='batch.global_size']": "7",
    }.items():
        browser.enter(selector, text)
    wrong = "[...document.querySelectorAll('label.bad')].map((one) => one.querySelector('code').textContent)"
    browser.wait(f"['optim.lr', 'batch.global_size'].every((key) => {wrong}.includes(key))")
    assert "fast" in browser.run("document.getElementById('errors').textContent")
    browser.enter("input[name='optim.lr']", "1e-3")
    browser.enter("input[name='batch.global_size']", "8")
    browser.wait("document.querySelector('#errors .good')")
    assert "glm-tiny" in browser.run("document.getElementById('plan').textContent")
    assert browser.run("document.querySelector(\"input[name='train.epochs']\").placeholder") == "4"  # the recipe's
    browser.enter("#search", "optim.lr")
    shown = "[...document.querySelectorAll('#keys label')].filter((one) => one.offsetParent).length"
    assert 0 < browser.run(shown) < 10
    file = folder / "recipes" / "mine.yaml"
    for answer, expected in (("false", "1e-3"), ("false", "1e-3"), ("true", "2e-3")):
        browser.run(f"window.confirm = () => {answer}; document.getElementById('said').textContent = ''; 0")
        browser.run("document.getElementById('save').click()")
        browser.wait("document.getElementById('said').textContent")
        assert f"lr: {expected}" in file.read_text()
        browser.enter("input[name='optim.lr']", "2e-3")


def see_samples(browser: Browser) -> None:
    """Trained tokens are marked, and texts of the data stay texts."""
    browser.run("location.hash = 'samples'")
    browser.run("document.getElementById('show').click()")
    browser.wait("document.getElementById('marked').dataset.done")
    marked = "[...document.querySelectorAll('#marked .trained')].map((one) => one.textContent).join('|')"
    assert "red </script><script>document.title" in browser.run(marked)
    assert "say red" not in browser.run(marked)
    assert browser.run("document.title") == "训练面板"
