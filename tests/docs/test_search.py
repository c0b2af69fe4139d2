"""What newcomers type into the site's search is a heading of its page, which docs/search_scorer.js lists first."""

import re
from pathlib import Path

import pytest
from pages import DOCS, chinese

PAGES = {
    "断点续训": "reliability_zh",
    "多机多卡": "multinode_zh",
    "单卡": "first_run_zh",
    "爆显存": "debugging_zh",
    "梯度检查点": "deepspeed_zh",
    "工具调用": "data_zh",
    "loss does not decrease": "debugging",
    "out of memory": "debugging",
    "merge lora": "tuning",
}


def headings(page: Path) -> list[str]:
    """Return a page's headings in lower case, without code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [heading.lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]


@pytest.mark.parametrize(("query", "page"), PAGES.items(), ids=PAGES)
def test_what_is_searched_is_found_first(query: str, page: str) -> None:
    """Sphinx looks for the query in headings of at most twice its length, and else for its words in all headings."""
    of_language = [chinese(one) if page.endswith("_zh") else one for one in DOCS]
    shares = {
        one.stem: max((len(query) / len(heading) for heading in headings(one) if query in heading), default=0.0)
        for one in of_language
    }
    if max(shares.values()) >= 0.5:
        assert max(shares, key=lambda name: shares[name]) == page
    else:
        words = query.split()
        assert [
            one.stem
            for one in of_language
            if all(any(re.search(rf"{word}|{word[:4]}ing", text) for text in headings(one)) for word in words)
        ] == [page]
