"""Why a new store is made although there are others."""

from pathlib import Path
from typing import Any

from toolkit.data.store import is_complete, read_manifest
from toolkit.messages import tr


def what_changed(stores: Path, inputs: dict[str, Any]) -> str:
    """Return why none of the stores fits: how the one that comes nearest differs; "" if none is anywhere near."""
    nearest: tuple[int, float, str, list[str]] | None = None
    for folder in stores.glob("*"):
        if not is_complete(folder):
            continue
        known = read_manifest(folder).get("inputs", {})
        differing = [name for name, value in inputs.items() if known.get(name) != value]
        entry = (len(differing), -folder.stat().st_mtime, folder.name, differing)
        nearest = min(nearest, entry) if nearest else entry
    if nearest is None or nearest[0] > len(inputs) // 3:
        return ""
    known = read_manifest(stores / nearest[2])["inputs"]
    words = [
        f"{name} {known.get(name)} -> {inputs[name]}" if name not in ("files", "encoder") else _named_change(name)
        for name in nearest[3]
    ]
    return tr(
        "Tokenising anew: since store {name} was made, this changed: {changes}.",
        name=nearest[2][:8],
        changes="; ".join(words),
    )


def _named_change(name: str) -> str:
    return {
        "files": tr("the content, format or columns of the data files"),
        "encoder": tr("the tokenizer or its chat template"),
    }[name]
