"""The report in a real browser, offline: each chart is drawn, nothing is wider than the page, and no error is told."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_runs import HOSTILE, fake_run, row
from toolkit.cli import main

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (375, 1440)
# What each frame has drawn, once all have; a frame's page never learns that it is looked at.
LOOK = """
const frames = [...document.querySelectorAll("iframe")];
const seen = (frame) => {
  const page = frame.contentDocument, root = page.documentElement;
  const charts = [...page.querySelectorAll("[data-chart]")];
  const texts = charts.flatMap((chart) => [...chart.querySelectorAll("svg text")]);
  return {
    title: page.title,
    drawn: charts.filter((chart) => chart.querySelectorAll("svg path").length > 3).length,
    charts: charts.length,
    cut: charts.filter((chart) => chart.firstElementChild.scrollWidth > chart.clientWidth + 1).length,
    wider: root.scrollWidth - root.clientWidth,
    ink: [...new Set(texts.map((text) => getComputedStyle(text).fill))],
    paper: getComputedStyle(page.body).backgroundColor,
    told: charts.flatMap((chart) => [...chart.querySelectorAll(".voronoi path, .role-mark path")].map((mark) => {
      mark.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", { bubbles: true }));
      return [...page.querySelectorAll("#vg-tooltip-element td")].map((cell) => cell.textContent).join(" ");
    })),
    smallest: Math.min(...texts.map((text) => parseFloat(getComputedStyle(text).fontSize))),
  };
};
const wait = () => {
  if (frames.some((frame) => !frame.contentDocument?.documentElement.dataset.drawn)) return setTimeout(wait, 50);
  document.getElementById("seen").textContent = JSON.stringify(frames.map(seen));
};
window.onload = wait;
"""


def look_at(folder: Path, pages: list[Path], *flags: str) -> list[dict[str, Any]]:
    """Open pages in frames of all widths; return what is seen in each. Nothing may be written to the console."""
    frames = [
        f'<iframe src="{page.as_uri()}" width="{width}" height="900"></iframe>' for page in pages for width in WIDTHS
    ]
    outer = folder / "outer.html"
    outer.write_text(f"<!doctype html>{''.join(frames)}<pre id=seen></pre><script>{LOOK}</script>")
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *(
            "--disable-sync",
            "--no-first-run",
            "--allow-file-access-from-files",
            "--host-resolver-rules=MAP * ~NOTFOUND",
        ),
        *(f"--user-data-dir={folder}/profile", "--virtual-time-budget=30000", "--enable-logging=stderr", "--dump-dom"),
        *(*flags, outer.as_uri()),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [line for line in finished.stderr.splitlines() if ":CONSOLE" in line] == []
    found = re.search(r'<pre id="seen">(.+?)</pre>', finished.stdout, re.DOTALL)
    assert found, finished.stdout[-2000:] + finished.stderr[-2000:]
    seen: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return seen


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed (Debian: apt-get install chromium)")
def test_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.report.page.png", lambda drawing: b"a picture")
    one = fake_run(tmp_path / ("long-name-" * 9), text=HOSTILE)
    with (one / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(41, bad_steps=1, rewinds=1)) + "\n")
    other = fake_run(tmp_path / "other", 3, "optim.lr=0.5")
    pages = [one / "report.html", tmp_path / "both.html"]
    assert main(["report", str(one)]) == 0
    assert main(["report", str(one), str(other), f"output={pages[1]}", "language=zh"]) == 0
    for flags, paper in ((), "rgb(246, 247, 249)"), (("--blink-settings=preferredColorScheme=0",), "rgb(14, 19, 26)"):
        for seen in look_at(tmp_path, pages, *flags):
            assert seen["title"] in (one.name, "2 次训练的对比")
            assert seen["drawn"] == seen["charts"] >= 6
            assert (seen["wider"], seen["cut"]) == (0, 0)
            assert seen["paper"] == paper
            assert seen["ink"] == ["rgb(22, 32, 46)" if not flags else "rgb(232, 237, 244)"]
            assert seen["smallest"] >= 11
            assert any(re.search("loss|损失", told) for told in seen["told"])
            assert [told for told in seen["told"] if re.search("undefined|NaN", told)] == []
