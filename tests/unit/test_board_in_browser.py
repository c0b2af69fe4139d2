"""The board in a real browser: what is typed is checked, planned, saved and shown; nothing comes from elsewhere; all
of it can be reached by keyboard, has a name for screen readers, and is legible.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
            answer_three_questions(browser, tmp_path)
            look_at_runs(browser, tmp_path / "runs" / "one")
            write_a_recipe(browser, tmp_path)
            see_samples(browser)
            choose_a_run_to_chat_with(browser, tmp_path / "runs" / "two")
            use_it_without_eyes_or_mouse(browser)
        finally:
            board.terminate()
    assert browser.told == []


def answer_three_questions(browser: Browser, folder: Path) -> None:
    """The page opens on them, with an example filled in; the recipe can be edited at once."""
    browser.wait("document.getElementById('new-gpus').value")
    fields = "[...document.querySelectorAll('#questions input')].map((one) => one.value)"
    assert browser.run(fields) == ["qwen3_8b", "examples", "1x24GB", "recipes/mine.yaml"]
    assert "glm_tiny" in browser.run("[...document.getElementById('models').options].map((one) => one.value)")
    for name, text in {"model": "glm_tiny", "gpus": "1xcpu", "file": "recipes/first.yaml"}.items():
        browser.enter(f"#new-{name}", text)
    busy = "document.getElementById('write').ariaBusy"
    assert browser.run(f"document.getElementById('write').click(); {busy}") == "true"
    browser.wait("document.getElementById('written').dataset.done")
    assert browser.run(busy) == "false" and (folder / "recipes" / "first.yaml").is_file()
    browser.run("document.getElementById('edit').click()")
    browser.wait("location.hash == '#recipe' && document.getElementById('base').value == 'first'")
    browser.run("location.hash = 'runs'")


def look_at_runs(browser: Browser, run: Path) -> None:
    """The list grows with the run, its report is reloaded, two are compared."""
    browser.wait("document.querySelectorAll('#rows tr').length == 2")
    assert "token" not in browser.run("location.href")
    assert browser.run("document.title") == "训练面板"
    browser.run("document.querySelector('#rows .link').click()")
    browser.wait("document.getElementById('report').src.includes('/report?run=')")
    assert browser.run("document.getElementById('shown').ariaBusy") == "true"
    curves = "[...document.querySelectorAll('#rows .curve')].map((one) => one.ariaLabel)"
    assert browser.run(curves) == ["训练 loss: 7.71 → 2.81"] * 2
    shown = browser.run("document.getElementById('shown-name').textContent")
    browser.run("window.loads = 0; document.getElementById('report').onload = () => window.loads++; 0")
    with (run.parent / shown / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(41, loss=0.125)) + "\n")
    browser.wait("document.getElementById('rows').textContent.includes('0.125') && window.loads > 0")
    browser.run("document.querySelectorAll('#rows input').forEach((box) => box.click())")
    browser.run("document.getElementById('compare').click()")
    browser.wait("document.getElementById('report').src.split('run=').length == 3")
    compared = "fetch(document.getElementById('report').src).then((answer) => answer.text())"
    charts = browser.run(f'{compared}.then((text) => text.match(/id="charts">(.*?)<.script>/)[1])')
    assert {"one", "two"} <= {one["s"] for values in spec_values(json.loads(charts)) for one in values}


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
        "input[name='schedule.warmup_steps']": "1",  # the recipe's 20 are more than so few rows have steps
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


def spec_values(charts: Any) -> list[list[dict[str, Any]]]:
    """Return the data of the loss chart."""
    return list(charts["specs"]["loss"]["datasets"].values())


def choose_a_run_to_chat_with(browser: Browser, run: Path) -> None:
    """Runs with a model are offered; others are not."""
    (run / "export").mkdir()
    browser.run("location.hash = 'chat'")
    offered = "[...document.getElementById('model').options].map((one) => one.textContent).join()"
    browser.wait(f"{offered} == 'two'")
    browser.run("document.getElementById('question').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="a", text="a")
    assert browser.run("document.getElementById('question').value") == "a"


# What axe-core would say of names, contrast and focus, computed from the page.
SEEN = """
(() => {
  const shown = (one) => one.checkVisibility({ visibilityProperty: true }) && one.getClientRects().length;
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [red, green, blue] = parts(color).map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const paper = (one) => {
    const color = getComputedStyle(one).backgroundColor;
    return (parts(color)[3] ?? 1) === 0 && one.parentElement ? paper(one.parentElement) : color;
  };
  const ratio = (first, second) => {
    const [low, high] = [light(first), light(second)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const name = (one) =>
    one.ariaLabel || one.labels?.[0]?.textContent.trim() || one.title ||
    (one.matches("a, button, summary") && one.textContent.trim());
  const told = (list) => list.map((one) => one.outerHTML.slice(0, 200));
  const all = [...document.querySelectorAll("body *")].filter(shown);
  const texts = all.filter((one) => hasText(one) && !one.matches(":disabled, option, script"));
  const controls = all.filter((one) => one.matches("a, button, input, select, textarea, summary, iframe, [tabindex]"));
  const boxes = controls.filter((one) => one.matches("input, select, textarea, button:not(.link)"));
  return {
    pale: told(texts.filter((one) => ratio(getComputedStyle(one).color, paper(one)) < 4.5)),
    faint: told(boxes.filter((one) => ratio(getComputedStyle(one).borderTopColor, paper(one.parentElement)) < 3)),
    nameless: told(controls.filter((one) => !name(one))),
    reachable: controls.filter((one) => !one.disabled && one.tabIndex >= 0).length,
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
})()
"""
FOCUS = """
(() => {
  const one = document.activeElement, style = getComputedStyle(one);
  one.dataset.place ??= [...document.querySelectorAll("*")].indexOf(one);
  return [one.tagName, one.dataset.place, style.outlineStyle, parseFloat(style.outlineWidth)];
})()
"""


def use_it_without_eyes_or_mouse(browser: Browser) -> None:
    """Each control has a name and is reached by Tab, which shows where it is; texts have AA contrast on any screen."""
    address = browser.run("location.href.split('#')[0]")
    assert browser.run("document.getElementById('report').title").count("·") == 1
    browser.run("document.getElementById('shown').hidden = true")  # the report in its frame has links of its own
    for part in ("new", "runs", "recipe", "samples", "chat"):
        for width, scheme in ((1160, "light"), (390, "dark")):
            browser.open(f"{address}#{part}", width, 918, scheme)
            browser.wait(f"document.querySelectorAll('#rows tr').length && !document.getElementById('{part}').hidden")
            seen = browser.run(SEEN)
            assert (seen["pale"], seen["faint"], seen["nameless"], seen["wider"]) == ([], [], [], 0), (part, scheme)
        reached = set[str]()
        for _ in range(seen["reachable"] + 3):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", windowsVirtualKeyCode=9)
            tag, place, outline, width = browser.run(FOCUS)
            if tag != "BODY":
                reached.add(place)
                assert outline != "none" and width >= 1, (part, tag, place)
        assert len(reached) == seen["reachable"], part
