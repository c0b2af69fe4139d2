#!/usr/bin/env python3
"""Write docs/config.md from the schema; look at `git diff` after."""

from pathlib import Path

from toolkit.config.reference import render

TARGET = Path(__file__).parents[1] / "docs" / "config.md"


def main() -> None:
    """Write the page."""
    TARGET.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
