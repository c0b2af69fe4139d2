"""What the pages show: their blocks of code, and the commands in those."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted(path for path in (ROOT / "docs").glob("*.md") if not path.stem.endswith("_zh"))
PAIRED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
"""Pages that are there in both languages, by the English one."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    body: str

    def __str__(self) -> str:
        """Return the place, as a test's name."""
        return f"{self.page.name}:{self.line}"


def chinese(page: Path) -> Path:
    """Return the Chinese page of an English one."""
    return page.with_name(f"{page.stem}_zh.md")


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return a page's blocks in some languages; in all of them if none is named."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2].replace("\\\n", ""))
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def commands(page: Path) -> list[tuple[Block, str]]:
    """Return a page's shell lines, without comments, with the block that each stands in."""
    return [
        (block, line.partition("  #")[0].strip())
        for block in blocks(page, "bash")
        for line in block.body.splitlines()
        if line.strip() and not line.startswith("#")
    ]
