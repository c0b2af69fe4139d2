#!/usr/bin/env python3
"""Write docs/config*.md, tables of docs/coming_from*.md and the JSON schema of recipes; look at `git diff` after."""

import argparse
import sys
from pathlib import Path

from config_reference import render, sentences
from recipe_schema import recipe_schema
from translation_tables import fill_tables

from toolkit.messages import chinese

ROOT = Path(__file__).parents[1]
DOCS, SCHEMA = ROOT / "docs", ROOT / "recipes" / "recipe.schema.json"


def main() -> None:
    """Write the files."""
    SCHEMA.write_text(recipe_schema(), encoding="utf-8")
    (DOCS / "config.md").write_text(render(), encoding="utf-8")
    if missing := sorted(sentences() - set(chinese()["sentences"])):
        sys.exit("Write their Chinese into the sentences of toolkit/locale/zh.yaml:\n" + "\n".join(missing))
    (DOCS / "config_zh.md").write_text(render(chinese=True), encoding="utf-8")
    for language, name in (("en", "coming_from.md"), ("zh", "coming_from_zh.md")):
        page = DOCS / name
        page.write_text(fill_tables(page.read_text(encoding="utf-8"), language), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
