"""Compare training's ids and masks with published chat templates, and write what was found.

    TOOLKIT_TEMPLATES=FOLDER python -m scripts.compare_templates [conversations]

Fills tests/golden/templates.json, which names where each template was taken from; the templates themselves are not part
of this project. A template that is not in the folder keeps its entry.
"""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.unit.test_templates import FOUND, PUBLISHED, compared


def main(count: int = 2000) -> None:
    """Compare each template of the folder over so many generated conversations."""
    found = json.loads(FOUND.read_text("utf-8"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for name, entry in found["templates"].items():
        path = Path(PUBLISHED[name].template)
        if not path.is_file():
            continue
        entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        entry["few"] = compared(PUBLISHED[name], len(name), 200)._asdict()
        entry["many"] = compared(PUBLISHED[name], len(name), count)._asdict() | {"differences": 0}
        print(name, entry["many"], flush=True)
    found["commit"] = commit
    found["versions"] = {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
    found["command"] = f"TOOLKIT_TEMPLATES=FOLDER python -m scripts.compare_templates {count}"
    FOUND.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
