"""Which parts of a tokenizer a run notes, so that it does not go on with another one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.speaker import write_random
from toolkit.models.chat import tokenizer_identity
from toolkit.models.tokenizer_files import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random(tmp_path / "model")


def swap(settings: dict[str, Any]) -> None:
    """Give two tokens the numbers of each other."""
    known = settings["model"]["vocab"]
    known["Q"], known["Z"] = known["Z"], known["Q"]


def add(settings: dict[str, Any]) -> None:
    """Add a control token."""
    last = {**settings["added_tokens"][-1], "id": len(settings["model"]["vocab"]), "content": "<|more|>"}
    settings["added_tokens"].append(last)


def lower(settings: dict[str, Any]) -> None:
    settings["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("edit", "changed"),
    [(swap, {"vocabulary"}), (add, {"vocabulary", "special tokens"}), (lower, {"division of text"})],
)
def test_an_edited_tokenizer_differs(edit: Callable[[dict[str, Any]], None], changed: set[str], folder: Path) -> None:
    before = tokenizer_identity(load_tokenizer(folder))
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    edit(settings)
    file.write_text(json.dumps(settings))
    after = tokenizer_identity(load_tokenizer(folder))
    assert {name.removeprefix("tokenizer: ") for name in before if before[name] != after[name]} == changed


def test_another_template_differs_and_what_a_save_makes_of_it_does_not(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    before = tokenizer_identity(tokenizer)
    tokenizer.save_pretrained(tmp_path / "again")
    assert tokenizer_identity(load_tokenizer(tmp_path / "again")) == before
    tokenizer.chat_template += "\n"
    after = tokenizer_identity(tokenizer)
    assert [name for name in before if before[name] != after[name]] == ["tokenizer: chat template"]
