"""Control strings in messages, such as `<|user|>`, stay text: characters in between keep them from becoming tokens."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A token that is searched in the raw text is broken up by a character that the normalizer drops; one that is searched
# in the normalized text, by a character that the pre-tokenizer drops.
_BREAK_RAW, _BREAK_NORMALIZED = "\ufdd0", "\ufdd1"
SPLIT = _BREAK_NORMALIZED
"""A border in a text: `Shield.backend` drops it, and tokenizes the text before and after it separately."""
BREAKS = re.compile(f"[{_BREAK_RAW}{_BREAK_NORMALIZED}]")

_Value = TypeVar("_Value")


class Shield:
    """Breaks up control strings in messages: special tokens, and the added tokens `turn_marks` around turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn_marks: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        special_texts = {text for text, token in added.items() if token.special}
        control = {*tokenizer.all_special_tokens, *turn_marks} | special_texts
        # A token of a single character cannot be broken up; no known tokenizer has one that is special.
        self._breaks = {
            text: _BREAK_NORMALIZED if text in added and added[text].normalized else _BREAK_RAW
            for text in control
            if len(text) > 1
        }
        self._control = re.compile(any_of(self._breaks))
        # Most texts have none: a search for the first two characters is much faster than for some hundred tokens.
        self._hint = re.compile(any_of({text[:2] for text in self._breaks}))
        self._added = re.compile(f"({any_of(added)})")

    def cover(self, value: _Value) -> _Value:
        """Return messages or tools with every control string in them broken up; the same object if there is none."""
        return self._cover(value) if self._holds_control(value) else value

    def control_at(self, text: str, position: int = 0) -> str:
        """Return the control string at a position of a text, "" if there is none."""
        control = self._control.match(text, position)
        return control[0] if control else ""

    def _holds_control(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._hint.search(value) is not None and self._control.search(value) is not None
        if isinstance(value, dict):
            return any(self._holds_control(inner) for pair in value.items() for inner in pair)
        return isinstance(value, (list, tuple)) and any(self._holds_control(inner) for inner in value)

    def _cover(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(lambda control: "".join(c + self._breaks[control[0]] for c in control[0]), value)
        if isinstance(value, dict):
            return {self._cover(key): self._cover(inner) for key, inner in value.items()}
        return [self._cover(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    @cached_property
    def backend(self) -> Any:
        """A copy of a fast tokenizer's backend that drops the characters which break control strings up."""
        from tokenizers import Tokenizer, normalizers, pre_tokenizers

        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        drop = normalizers.Replace(_BREAK_RAW, "")
        copy.normalizer = drop if copy.normalizer is None else normalizers.Sequence([drop, copy.normalizer])
        split = pre_tokenizers.Split(_BREAK_NORMALIZED, "removed")
        pre_tokenizer = copy.pre_tokenizer
        order = [split] if pre_tokenizer is None else [split, pre_tokenizer]
        if isinstance(pre_tokenizer, pre_tokenizers.Metaspace):  # else it would put a blank before each part
            order.reverse()
        copy.pre_tokenizer = pre_tokenizers.Sequence(order)
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = False
        return copy

    def slow_ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text by a slow tokenizer, which tokenizes what is between added tokens."""
        ids: list[int] = []
        for part in filter(None, self._added.split(text)):
            if self._added.fullmatch(part):
                ids.append(int(self._tokenizer.convert_tokens_to_ids(part)))
                continue
            text_without_breaks = BREAKS.sub("", part)
            ids += self._tokenizer(
                text_without_breaks, add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]
        return ids

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "backend"}


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches any of some texts, the longest first; without texts it never matches."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"
