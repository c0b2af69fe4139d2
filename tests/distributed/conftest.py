"""Fixtures of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "chatglm"))

from shared import rows_file, straight  # noqa: F401
