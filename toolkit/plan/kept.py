"""What has been measured once for all plans, in files beside the tokenised data. No torch."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from toolkit.config.schema import RunConfig


def file_for(cfg: RunConfig, kind: str, inputs: object) -> Path:
    """Return where something is kept that depends on these inputs alone.

    Args:
        cfg: its `prepare.dir` holds all of them.
        kind: the file's name begins with it.
        inputs: JSON-able.
    """
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.prepare.dir) / "plan" / f"{kind}-{key}.json"


def write(file: Path, values: Any) -> None:
    """Write values as JSON, so that a reader finds all of them or no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(values) + "\n", encoding="utf-8")
    part.replace(file)
