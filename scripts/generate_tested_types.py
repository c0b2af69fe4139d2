#!/usr/bin/env python3
"""Write toolkit/models/tested.yaml: the types that the newest run of scripts/record_types.py trained, and those of
models with images that tests/architectures.py trains. Look at `git diff` after.
"""

import argparse
import sys
import textwrap
from pathlib import Path

from types_page import newest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.architectures import WRAPPERS  # noqa: E402
from toolkit.messages import read_table  # noqa: E402

TARGET = ROOT / "toolkit" / "models" / "tested.yaml"


def tested_types() -> list[str]:
    """Return the types of models that were trained and compared, with the official ChatGLM's."""
    built = {kind for kind, row in newest()["types"].items() if "not built" not in row}
    of_images = {make().model_type for make in WRAPPERS.values()}
    return sorted({*built, *of_images, "chatglm"} - {*read_table("models/refused.yaml")})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = textwrap.wrap(
        " ".join(tested_types()), 118, break_on_hyphens=False, initial_indent="  ", subsequent_indent="  "
    )
    head = "# Written by scripts/generate_tested_types.py: types of models that were trained and compared."
    version = newest()["environment"]["packages"]["transformers"]
    text = f"{head}\ntransformers: {version}\ntypes: >-\n" + "\n".join(lines) + "\n"
    TARGET.write_text(text, encoding="utf-8")
