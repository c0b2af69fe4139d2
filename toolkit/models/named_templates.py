"""Chat templates by name (`model.chat_template=chatml`): for base models that come without one, and for rows that a
model's own has no place for. templates/NAME.jinja writes what the published template of that name writes.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from toolkit.config import files
from toolkit.messages import ModelError, file_bytes, reading, tr

_LARGEST_BYTES = 1_000_000
_SYSTEM, _TOOLS = frozenset({"system"}), frozenset({"tools", "tool_calls", "parallel", "tool", "text"})
_REASONING = frozenset({"reasoning"})
_CONTROL = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|<\|\w+>|<\w+\|>|\[gMASK\]|<sop>")
"""Strings in a template that a model knows as single tokens; `<think>` and [INST] are text in many vocabularies."""


class _Template(NamedTuple):
    takes: frozenset[str]
    """What rows may have beside questions and answers."""
    end: str = ""
    """Token that ends an answer, which becomes the tokenizer's end token; "" keeps that of the tokenizer."""
    begin: str = ""
    """Token that a conversation begins with, which becomes the tokenizer's BOS; "" keeps that of the tokenizer."""


TEMPLATES = {
    "alpaca": _Template(_SYSTEM),
    "chatml": _Template(_SYSTEM, "<|im_end|>"),
    "chatml_tools": _Template(_SYSTEM | _TOOLS, "<|im_end|>"),
    "deepseek_r1": _Template(_SYSTEM | _REASONING, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "deepseek_v3_2": _Template(_SYSTEM | _REASONING, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "gemma": _Template(_SYSTEM, "<end_of_turn>", "<bos>"),
    "gemma4": _Template(_SYSTEM | _REASONING, "<turn|>", "<bos>"),
    "glm4": _Template(_SYSTEM | _TOOLS, "<|user|>"),
    "glm4_5": _Template(_SYSTEM | _TOOLS | _REASONING),
    "glm_z1": _Template(_SYSTEM | _REASONING),
    "llama3": _Template(_SYSTEM, "<|eot_id|>", "<|begin_of_text|>"),
    "mistral": _Template(_SYSTEM, "</s>", "<s>"),
    "qwen3": _Template(_SYSTEM | _TOOLS | _REASONING, "<|im_end|>"),
}
"""What each can write, and its first and last token. Sources of the published ones: tests/golden/templates.json."""


def use_template(tokenizer: Any, name: str) -> None:
    """Replace a tokenizer's chat template by a named one, with its BOS and end token, or by that of a Jinja file.
    ModelError if the file cannot be read, or if the vocabulary lacks control tokens of the named template.
    """
    file = files.chat_template_file(name)
    with reading(str(file), ModelError, tr("Correct model.chat_template.")):
        text = file_bytes(file, _LARGEST_BYTES).decode("utf-8")
    if template := _named(name):
        if missing := _missing_tokens(tokenizer, name):
            raise ModelError(
                "model.chat_template = {name} writes {token}, which is no token of '{tokenizer}': the model would "
                "have to learn it from its letters. Add it: model.add_tokens={add}. Templates that this vocabulary has "
                "the tokens of: {names}.",
                name=name,
                token=missing[0],
                add=json.dumps(missing, ensure_ascii=False),
                tokenizer=tokenizer.name_or_path,
                names=", ".join(templates_taking(tokenizer, ())),
            )
        if template.begin:
            tokenizer.bos_token = template.begin
        if template.end:
            tokenizer.eos_token = template.end
    tokenizer.chat_template, tokenizer.split_special_tokens = text, False  # its control tokens are tokens in a text


def templates_taking(tokenizer: Any, features: Iterable[str]) -> list[str]:
    """Return the names of templates that write all of these features of rows, in tokens that a tokenizer has."""
    return [
        name
        for name, template in TEMPLATES.items()
        if template.takes.issuperset(features) and not _missing_tokens(tokenizer, name)
    ]


def template_setting(tokenizer: Any, *features: str) -> str:
    """Return the setting that gives a tokenizer a template with a place for these features, for error messages."""
    return f"model.chat_template={' / '.join([*templates_taking(tokenizer, features), 'FILE'])}"


def control_tokens(name: str) -> list[str]:
    """Return the control tokens that a named template writes; none of "" and of a Jinja file, whose are not known."""
    return _control_tokens(name) if _named(name) else []


def _named(name: str) -> _Template | None:
    """Return the template of a name, None for a user's file, be it of that name."""
    return TEMPLATES.get(name) if files.chat_template_file(name) == files.named_chat_template(name) else None


def _missing_tokens(tokenizer: Any, name: str) -> list[str]:
    """Return the control tokens of a named template that a tokenizer does not have."""
    tokens = _control_tokens(name)
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return [token for token, index in zip(tokens, ids, strict=True) if index in (None, tokenizer.unk_token_id)]


@cache
def _control_tokens(name: str) -> list[str]:
    """Return the control tokens in a named template, but for its comments, and those that it begins and ends with."""
    text, template = files.named_chat_template(name).read_text(encoding="utf-8"), TEMPLATES[name]
    in_text = _CONTROL.findall(re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL))
    return sorted({*in_text, template.begin, template.end} - {""})
