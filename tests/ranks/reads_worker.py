"""Run under no launcher: train cases, each in a fork, and note which keys of the config each reads.

Arguments: a JSON file with {NAME: WORDS of `toolkit train`}; CUSTOM in front of the words: of `toolkit.custom.train`.
Beside it is written NAME.json for each: {"read": [keys], "error": the error that the run ended with, or ""}.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config import dotted_keys, schema
from toolkit.messages import ToolkitError, set_language

CUSTOM = "custom"
BESIDE = (
    *("/config/load.py", "/config/rules.py", "/config/paths.py", "/config/hub.py", "/config/requirements.py"),
    *("/config/native_ops.py", "/config/context_length.py", "/toolkit/plan/", "/dataclasses.py"),
)
"""Parts of files that copy, write, judge or estimate from a config; what they read has no effect by that."""


def note_reads(found: set[str]) -> None:
    """Add every key to a set that is read from here on, by whatever is not called by what is BESIDE."""
    for prefix, kind in dotted_keys.sections():
        watch(kind, prefix, found)
    watch(schema.SourceConfig, "data.sources[0].", found)


def watch(kind: type, prefix: str, found: set[str]) -> None:
    """Do that for one section."""
    names = {name: prefix + name for name in dotted_keys.types_of(kind)}
    read: Callable[[Any, str], Any] = kind.__getattribute__

    def noting(section: Any, name: str) -> Any:
        key = names.get(name)
        if key is not None and key not in found:
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
            if not any(part in file for part in BESIDE for file in files):
                found.add(key)
        return read(section, name)

    kind.__getattribute__ = noting  # type: ignore[method-assign,assignment]


def train(words: list[str]) -> None:
    """Train as a user does."""
    if words[0] == CUSTOM:
        from custom_worker import Regression, errors, plain, squares

        from toolkit import custom

        custom.train(plain, Regression(), squares, validation=Regression(), metrics=errors, words=words[1:])
    else:
        from toolkit.cli.train import run

        run(words)


def main() -> None:
    """Train every case."""
    set_language("en")
    listing = Path(sys.argv[-1])
    sys.argv = [sys.argv[0]]
    for name, words in json.loads(listing.read_text()).items():
        pid = os.fork()
        if pid == 0:
            found, error = set[str](), ""
            note_reads(found)
            try:
                train(words)
            except ToolkitError as refusal:
                error = f"{type(refusal).__name__}: {refusal}"
            except BaseException:
                error = traceback.format_exc()
            listing.with_name(f"{name}.json").write_text(json.dumps({"read": sorted(found), "error": error}))
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
