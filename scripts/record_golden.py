#!/usr/bin/env python3
"""Record the DeepSpeed JSON of every recipe for the snapshot test; look at `git diff` after.

For 2 ranks, or as many as share its experts, and 1000 steps.
"""

import argparse
import json
import os
from pathlib import Path

from toolkit.config.files import known_recipes
from toolkit.config.load import load
from toolkit.config.mesh import model_ranks
from toolkit.engine.ds_config import build_ds_config

FOLDER = Path(__file__).parents[1] / "tests" / "golden" / "ds_config"


def main() -> None:
    """Write one file per recipe and delete those of recipes that are gone."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # by which optim.torch=auto chooses, wherever this runs
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for recipe in known_recipes():
        cfg = load([f"recipe={recipe}"]).cfg
        values = build_ds_config(cfg, max(2, model_ranks(cfg)), 1000).values
        (FOLDER / f"{recipe}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
