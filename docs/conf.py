"""Sphinx's settings: one site per language from the pages as they stand on GitHub; scripts/build_docs builds both.

The sources are the whole checkout, so that links to benchmarks/, recipes/ and CONTRIBUTING.md lead to pages.
"""

import os
import re
from pathlib import Path

import yaml
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).parents[1]
IS_CHINESE = tags.has("zh")  # type: ignore[name-defined]  # noqa: F821 (sphinx-build -t zh)
ENGLISH_ONLY = ["SECURITY.md", "recipes/README.md", "benchmarks/README.md"]

project = "ExactTune"
language = "zh_CN" if IS_CHINESE else "en"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index_zh" if IS_CHINESE else "docs/index"
include_patterns = (
    ["docs/*_zh.md", "README_zh.md", "CONTRIBUTING_zh.md", "CHANGELOG_zh.md"]
    if IS_CHINESE
    else ["docs/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
)
include_patterns += ENGLISH_ONLY
# Folders without a page are not even walked: environments and runs may hold a million files.
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and not list(path.glob("*.md"))]
exclude_patterns += [] if IS_CHINESE else ["docs/*_zh.md"]

myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "search_scorer.js")
html_show_copyright = False
html_use_index = False  # its entries are for the search alone


class ChineseSearch(SearchEnglish):
    """Finds Chinese by pairs of characters: Sphinx's own needs jieba, and its script fails in the browser (9.0.4)."""

    lang = "zh"
    js_splitter_code = """
        var splitQuery = (query) => (query.match(/\\w+|[\\u4e00-\\u9fff]+/g) || []).flatMap((word) =>
            word < "\\u4e00" || word.length < 3 ? [word] : [...word].slice(1).map((_, i) => word.slice(i, i + 2)));
    """

    def split(self, input: str) -> list[str]:
        """Return the words of a text: Latin ones, and each pair of neighbouring Chinese characters."""
        han = re.findall("[\u4e00-\u9fff]+", input)
        return re.findall(r"[a-zA-Z0-9_]+", input) + [
            run[i : i + 2] for run in han for i in range(max(len(run) - 1, 1))
        ]


SEARCH_WORDS = yaml.safe_load((ROOT / "docs" / "search_words.yaml").read_text(encoding="utf-8"))
HAN = "[\u3000-\u9fff\uff00-\uffef]"


def _finish(app: Sphinx, page: str, source: list[str]) -> None:
    """Fit a page that is written for GitHub to the site."""
    text, folder = source[0], Path(page).parent
    if IS_CHINESE and not page.endswith("_zh"):  # pages in English alone: their neighbours are in Chinese here
        text = re.sub(r"(\]\(\S*docs/\w+)\.md", r"\1_zh.md", text)
    other = f"{os.path.relpath('.', folder)}/../{'en' if IS_CHINESE else 'zh'}/{folder}"
    text = re.sub(r" · (?=\[(?:中文|English)\]\()", "\n", text, count=1)  # the switch is set apart on the site
    switch = rf'<a class="language" href="{other}/\2.html">\1</a>'
    text = re.sub(r"^\[(中文|English)\]\((\w+)\.md\)", switch, text, count=1, flags=re.MULTILINE)
    text = re.sub(r"\[(\w+\.md)\]\((\1[^)]*)\)", r"[](\2)", text)  # a page's title instead of its file's name
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(rf"(?<={HAN})\n(?={HAN})", "", part) for part in parts[::2]]  # else shown as a blank
    text = "".join(parts)
    if page.startswith(("README", "SECURITY")):  # linked from pages, but its place is GitHub
        text = f"---\norphan: true\n---\n{text}"
    words = SEARCH_WORDS.get(Path(page).name.removesuffix("_zh"), {}).get("zh" if IS_CHINESE else "en", [])
    if words and page.startswith("docs/"):
        entries = ", ".join(f"! {word}" for word in words)
        text = text.replace("\n\n", f"\n\n```{{index}} {entries}\n```\n\n", 1)
    if page == root_doc:  # the sidebar has the groups of the index page, and its short names of the pages
        text = "---\nhide-toc: true\n---\n" + text.replace("\n## ", "\n(doors)=\n## ", 1)  # cards, by site.css
        for group, links in re.findall(r"^- \*\*(.+?)\*\*[:：](.*)$", text, re.MULTILINE):
            pages = "\n".join(f"{name} <{file}>" for name, file in re.findall(r"\[([^]]+)\]\((\S+?)\.md\)", links))
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {group}\n\n{pages}\n```\n"
    source[0] = text


def setup(app: Sphinx) -> None:
    """Register."""
    app.add_search_language(ChineseSearch)
    app.connect("source-read", _finish)
