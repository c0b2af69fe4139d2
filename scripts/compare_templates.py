"""Compare training's ids and masks with published chat templates, and write what was found.

    TOOLKIT_TEMPLATES=FOLDER python -m scripts.compare_templates [conversations]

Fills tests/golden/templates.json, which names where each template was taken from; the templates themselves are not part
of this project. A template that is not in the folder keeps its entry.
"""

import argparse
import hashlib
import json
import subprocess
from importlib.metadata import version
from pathlib import Path

from tests.unit.test_templates import FOUND, PUBLISHED, compared, rendering_digest, renderings
from toolkit.config.files import named_chat_template

NAMED = {"chatml_tools": "qwen2_5", "gemma": "gemma3", "glm4_5": "glm4moe", "llama3": "llama3", "qwen3": "qwen3"}
"""Templates of toolkit/models/templates -> the published one that they write the same as; those that no file is
published of, or that keep what it removes, are compared in tests/unit.
"""


def main(count: int) -> None:
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
    for name, published in NAMED.items():
        original = PUBLISHED[published]
        if not Path(original.template).is_file():
            continue
        ours = original._replace(template=named_chat_template(name))
        pairs = list(zip(renderings(ours, name, count), renderings(original, name, count), strict=True))
        differences = sum(one != other for one, other in pairs)
        digest = rendering_digest(ours, name)
        entry = {"published": published, "renderings": len(pairs), "differences": differences, "digest": digest}
        found.setdefault("named", {})[name] = entry
        print(name, entry, flush=True)
    found["commit"] = commit
    found["versions"] = {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
    found["command"] = f"TOOLKIT_TEMPLATES=FOLDER python -m scripts.compare_templates {count}"
    FOUND.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", nargs="?", type=int, default=2000, help="of each template; default: 2000")
    main(parser.parse_args().conversations)
