"""Whether a folder's tokenizer is an official ChatGLM one, and whose. Files are read as text; nothing is executed."""

import json
from pathlib import Path
from typing import Any

from toolkit.config.schema import Family
from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.chatglm.family import TOKENIZER_CODE, architecture_of, named_family, read_text
from toolkit.models.chatglm.vocabulary import is_tiktoken, load_pieces


def official_vocabulary(folder: Path) -> Path | None:
    """Return the official vocabulary file that a folder's tokenizer is made from; None if it is another tokenizer.

    A model saved in transformers' layout keeps the files it came with in `official/`; those are preferred, because in
    memory they give a tokenizer that never parses control strings.

    Raises:
        ModelError: an official tokenizer whose vocabulary is missing.
    """
    if (folder / "official" / "layout.json").is_file():
        return official_vocabulary(folder / "official")
    for name in ("ice_text.model", "tokenizer.model"):
        if (folder / name).is_file() and (name == "ice_text.model" or _is_official(folder)):
            return folder / name
    if "chatglm" in _classes(folder) and not (folder / "tokenizer.json").is_file():
        raise ModelError(
            tr(
                "'{folder}' has an official ChatGLM tokenizer, but not its vocabulary (ice_text.model or "
                "tokenizer.model): download it again.",
                folder=folder,
            )
        )
    return None


def _is_official(folder: Path) -> bool:
    if (folder / TOKENIZER_CODE).is_file() or "chatglm" in _classes(folder):
        return True
    if architecture_of(read_json(folder / "config.json")) is not None:
        return True
    # Nothing but the vocabulary: other families' folders have at least a tokenizer_config.json.
    return not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "config.json"))


def _classes(folder: Path) -> str:
    config = read_json(folder / "tokenizer_config.json")
    return f"{config.get('auto_map', '')} {config.get('tokenizer_class', '')}".lower()


def family_of(vocabulary: Path) -> Family:
    """Return whose tokenizer an official vocabulary is; `auto` where ChatGLM2 and ChatGLM3 cannot be told apart.

    Their vocabulary is the same file. What tells them apart are ChatGLM3's role tokens and their names in the files
    beside it.
    """
    if vocabulary.name == "ice_text.model":
        return Family.chatglm
    if is_tiktoken(vocabulary):
        return Family.glm4
    return named_family(vocabulary.parent)


def image_tokens(vocabulary: Path) -> int:
    """Return the number of ids before ChatGLM-6B's first piece: 0, or 20,000 in the repository's first months.

    Raises:
        ModelError: the vocabulary does not belong to the model in the same folder.
    """
    folder = vocabulary.parent
    first = read_json(folder / "config.json").get("bos_token_id")
    named = read_json(folder / "tokenizer_config.json").get("num_image_tokens")
    if first is None:
        return int(named or 0)
    sop = int(load_pieces(vocabulary).piece_to_id("<sop>"))
    offset = int(first) - sop
    if offset not in (0, 20000) or (named is not None and offset != named):
        raise ModelError(
            tr(
                "{file} is of another revision than the model beside it: <sop> is {sop} there, and {first} in "
                "config.json (bos_token_id). Download tokenizer and model from the same revision.",
                file=vocabulary,
                sop=sop + int(named or 0),
                first=first,
            )
        )
    return offset


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, {} if there is none; a damaged one is reported by whoever needs it."""
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
