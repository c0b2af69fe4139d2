"""The site is built without a warning in both languages, its links lead to pages, and its search finds them first."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import PROGRAM, Browser
from pages import DOCS, ROOT

SEARCHES = {
    "断点续训": "reliability_zh",
    "多机多卡": "multinode_zh",
    "单卡": "tuning_zh",
    "爆显存": "debugging_zh",
    "显存不足": "debugging_zh",
    "loss 不下降": "debugging_zh",
    "损失不下降": "debugging_zh",
    "梯度检查点": "deepspeed_zh",
    "工具调用": "data_zh",
    "合并 LoRA": "tuning_zh",
    "量化": "tuning_zh",
    "部署": "using_zh",
    "loss does not decrease": "debugging",
    "out of memory": "debugging",
    "merge LoRA": "tuning",
    "resume": "reliability",
    "gradient checkpointing": "deepspeed",
    "multi-node": "multinode",
    "single GPU": "tuning",
}
"""What newcomers type into the search field, and the page that must come first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(name, reason=f"{name} is not installed (the extra docs; needs Python 3.11)")
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(ROOT / "scripts" / "build_docs"), str(folder)]
    built = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there_and_leads_to_the_other_language(site: Path) -> None:
    for page in DOCS:
        english, chinese = site / f"en/docs/{page.stem}.html", site / f"zh/docs/{page.stem}_zh.html"
        for one, other in ((english, chinese), (chinese, english)):
            (switch,) = re.findall(r'class="language" href="([^"]+)"', one.read_text(encoding="utf-8"))
            assert (one.parent / switch).resolve() == other.resolve()


def test_no_link_is_broken_and_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r'(?:href|src)="([^"#]+)[^"]*"', text):
            if not target.startswith(("http", "data:")):
                assert (page.parent / unquote(target.partition("?")[0])).exists(), f"{page.relative_to(site)}: {target}"
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//', text)
        assert not re.findall(r'<link[^>]+rel="(?:stylesheet|preload)"[^>]+href="(?:https?:)?//', text)


def test_the_sidebar_has_every_page(site: Path) -> None:
    for language, tail in (("en", ""), ("zh", "_zh")):
        text = (site / language / "docs" / f"index{tail}.html").read_text(encoding="utf-8")
        sidebar = text[text.index("sidebar-tree") :]
        missing = [page.stem for page in DOCS if page.stem != "index" and f'"{page.stem}{tail}.html"' not in sidebar]
        assert missing == []


def test_both_languages_can_be_searched(site: Path) -> None:
    """Sphinx 9.0.4 names a stemmer for Chinese that its script does not hold, and needs jieba for Chinese words."""
    for language, word in (("en", "offload"), ("zh", "卸载")):
        script = (site / language / "_static" / "language_data.js").read_text(encoding="utf-8")
        (stemmer,) = re.findall(r"window\.Stemmer = (\w+);", script)
        assert f"{stemmer}=function" in script
        assert json.dumps(word) in (site / language / "searchindex.js").read_text(encoding="utf-8")


def search(browser: Browser, query: str) -> str:
    """Return the address of the first result: words are typed and Enter is pressed, as Sphinx searches by a script."""
    browser.run("document.querySelector('.sidebar-search').select()")
    browser.call("Input.insertText", text=query)
    browser.call("Input.dispatchKeyEvent", type="char", text="\r")
    browser.wait(f"new URLSearchParams(location.search).get('q') == {json.dumps(query)}")
    browser.wait("document.querySelector('#search-results li a, #search-results .search-summary:not(:empty)')")
    return str(browser.run("document.querySelector('#search-results li a')?.pathname"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without a line per request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
def test_what_newcomers_search_for_is_found_first(site: Path, tmp_path: Path) -> None:
    found = {}
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server,
        Browser(tmp_path / "profile") as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for language, index in (("en", "en/docs/index.html"), ("zh", "zh/docs/index_zh.html")):
            browser.open(f"http://127.0.0.1:{server.server_port}/{index}")
            for query in (query for query, page in SEARCHES.items() if page.endswith("_zh") == (language == "zh")):
                found[query] = search(browser, query)
        server.shutdown()
    assert {query: Path(path).stem for query, path in found.items()} == SEARCHES
