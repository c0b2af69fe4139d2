"""The site is built without a warning in both languages, and its links lead to pages that are there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from pages import DOCS, ROOT


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
