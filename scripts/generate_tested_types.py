#!/usr/bin/env python3
"""Write toolkit/models/tested.yaml from the installed transformers: what it calls causal, but for what is rejected and
what was never tried, and what tests/architectures.py trains of models with images. Look at `git diff` after.
"""

import sys
import textwrap
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.architectures import WRAPPERS  # noqa: E402
from toolkit.messages import read_table  # noqa: E402

TARGET = ROOT / "toolkit" / "models" / "tested.yaml"
UNTRIED = {
    *("blt", "dbrx", "dots3_note", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "mllama"),
    *("musicgen", "musicgen_melody", "qwen4_exp"),
}
"""Types of transformers 5.23 of which no tiny model could be built (docs/models.md)."""


def tested_types() -> list[str]:
    """Return the types of models that were trained and compared, with the official ChatGLM's."""
    of_images = {make().model_type for make in WRAPPERS.values()}
    return sorted({*CAUSAL, *of_images, "chatglm"} - {*read_table("models/refused.yaml")} - UNTRIED)


if __name__ == "__main__":
    lines = textwrap.wrap(
        " ".join(tested_types()), 118, break_on_hyphens=False, initial_indent="  ", subsequent_indent="  "
    )
    head = "# Written by scripts/generate_tested_types.py: types of models that were trained and compared."
    text = f"{head}\ntransformers: {transformers.__version__}\ntypes: >-\n" + "\n".join(lines) + "\n"
    TARGET.write_text(text, encoding="utf-8")
