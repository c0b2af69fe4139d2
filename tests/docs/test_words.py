"""Pages and messages keep to the field's words: those of the project's first, private language do not come back."""

import re
from pathlib import Path

import pytest
from pages import BLOCK, PAIRED, ROOT, chinese

from toolkit import messages
from toolkit.cli import COMMANDS
from toolkit.cli.help import help_of

ENGLISH = (
    r"says? so\b|said so|told otherwise|(?:is|are) told\b|anew\b|going on\b|go(?:es)? on (?:from|with|where)|"
    r"\brefus(?:e|es|ed|al|als|ing)\b|one's own\b|\brehears(?:al|als|es|ing)\b|stands? in the\b|"
    r"lies? (?:in|there|elsewhere)\b|passed over|of no use\b|\bnobody\b|\bsomebody\b|ways of tuning|that is no number|"
    r"\bfolders?\b|\bin silence\b|numbers went wrong|tokenis\w+|\bdata set\b|what is learned from\b|further words"
)
"""Only what is always wrong: "machine" and "beside" have honest uses. Names of files and keys are skipped."""
CHINESE = "续跑|接着运行|一声不响|死掉|走到尽头|预演|文件夹|词元|理解成|运行目录|您|键=值|被告知|从不指名|其余的词"
WORDS = {"en": re.compile(ENGLISH), "zh": re.compile(CHINESE)}
HAN = "[\u3000-\u9fff\uff00-\uffef]"


def prose(page: Path) -> str:
    """Return a page without its blocks, names of files and keys."""
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|\w+\.md\b", "", BLOCK.sub("", page.read_text(encoding="utf-8")))


def test_pages_use_the_field_s_words() -> None:
    pages = {"en": [*PAIRED, ROOT / "recipes" / "README.md"], "zh": [chinese(page) for page in PAIRED]}
    for language, of_language in pages.items():
        assert {page.name: words for page in of_language if (words := WORDS[language].findall(prose(page)))} == {}


def test_messages_and_settings_use_the_field_s_words() -> None:
    catalogue = messages.chinese()["messages"] | messages.chinese()["sentences"]
    plain = {re.sub(r"`[^`]*`|\{[^}]*\}|\w+\.md\b", "", english): text for english, text in catalogue.items()}
    assert [text for text in plain if WORDS["en"].search(text)] == []
    assert [text for text in plain.values() if WORDS["zh"].search(text)] == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_help_uses_the_field_s_words(language: str) -> None:
    messages.set_language(language)
    assert [command for command in COMMANDS if WORDS[language].search(help_of(command))] == []


def test_no_line_breaks_between_chinese_characters() -> None:
    """GitHub shows them as blanks."""
    for page in map(chinese, PAIRED):
        assert re.findall(rf"{HAN}\n *{HAN}", BLOCK.sub("\n", page.read_text(encoding="utf-8"))) == [], page.name
