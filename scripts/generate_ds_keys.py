#!/usr/bin/env python3
"""Write toolkit/engine/ds_keys.json from the installed DeepSpeed; look at `git diff` after."""

from pathlib import Path

from toolkit.testing.ds_key_table import source

TARGET = Path(__file__).parents[1] / "toolkit" / "engine" / "ds_keys.json"


def main() -> None:
    """Write the file."""
    TARGET.write_text(source(), encoding="utf-8")


if __name__ == "__main__":
    main()
