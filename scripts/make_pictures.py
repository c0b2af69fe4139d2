"""The pictures of docs/images in both languages, from finished runs of recipe=quickstart and of the tutorial.

They are taken in headless Chromium, which needs fonts for Chinese (Debian: `apt install fonts-wqy-zenhei`).

python scripts/make_pictures.py runs/quickstart runs/library
"""

import argparse
import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
HEIGHT = 1180
"""Of the pictures of a report: from its verdict to its loss."""


def picture_report(browser: Browser, run: Path, folder: Path, language: str) -> bytes:
    """Return a run's report on a wide screen, and in the dark on a phone."""
    page = folder / f"{language}.html"
    toolkit = [sys.executable, "-m", "toolkit", "report", str(run), f"output={page}", f"language={language}"]
    subprocess.run(toolkit, check=True, stdout=subprocess.DEVNULL)
    shown = []
    for width, scheme in ((868, "light"), (276, "dark")):
        browser.open(page.as_uri(), width, HEIGHT, scheme)
        browser.wait("document.documentElement.dataset.drawn")
        shown.append(f'<img src="data:image/png;base64,{base64.b64encode(browser.picture()).decode()}">')
    both = folder / "both.html"
    both.write_text(f'<body style="margin:0;display:flex;justify-content:space-between">{"".join(shown)}')
    browser.open(both.as_uri(), height=HEIGHT)
    browser.wait("document.images.length == 2 && [...document.images].every((one) => one.complete)")
    return browser.picture()


def picture_board(browser: Browser, run: Path, language: str) -> bytes:
    """Return the board with a recipe that has an error."""
    command = [sys.executable, "-m", "toolkit", "board", str(run.parent), "port=0", f"language={language}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        browser.open(next(line.strip() for line in board.stdout if "http" in line), 1400, 860)
        browser.wait("document.documentElement.dataset.checked")
        browser.run("location.hash = 'recipe'")
        for selector, text in {"#base": "qwen3_8b_lora", "#gpus": "1x24GB", "#search": "optim.lr"}.items():
            browser.enter(selector, text)
        browser.enter("input[name='optim.lr']", "2e-4")
        browser.wait("document.getElementById('text').textContent.includes('2e-4')")
        found = browser.picture()
        board.terminate()
    return found


def main(run: Path, tutorial: Path) -> None:
    """Make all pictures."""
    os.environ["PYTHONPATH"] = str(IMAGES.parents[1])
    with tempfile.TemporaryDirectory() as name, Browser(Path(name) / "profile") as browser:
        for language, suffix in (("en", ""), ("zh", "_zh")):
            for file, of_run in (("report", run), ("tutorial", tutorial)):
                (IMAGES / f"{file}{suffix}.png").write_bytes(picture_report(browser, of_run, Path(name), language))
            (IMAGES / f"board{suffix}.png").write_bytes(picture_board(browser, run, language))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of recipe=quickstart")
    parser.add_argument("tutorial", type=Path, help="a finished run of the tutorial")
    arguments = parser.parse_args()
    main(arguments.run.absolute(), arguments.tutorial.absolute())
