"""What keeps control strings in messages text: what would become a control token is broken up beforehand."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A token that is looked for in the raw text is found no more once the normalizer may drop what breaks it up; one that
# is looked for in the normalized text, once the pre-tokenizer may.
_BEFORE_NORMALIZER, _AFTER_NORMALIZER = "\ufdd0", "\ufdd1"
SPLIT = _AFTER_NORMALIZER
"""Between two parts of a text: `Shield.backend` drops it, and tokenizes each part for itself."""
BREAKS = re.compile(f"[{_BEFORE_NORMALIZER}{_AFTER_NORMALIZER}]")

_Value = TypeVar("_Value")


class Shield:
    """What keeps control strings in messages text. `turn_marks`: added tokens that begin and end turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn_marks: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, token in added.items() if token.special}
        control = {*tokenizer.all_special_tokens, *turn_marks} | special
        # A token of a single character cannot be broken up; no known tokenizer has one that is special.
        self._breaks = {
            text: _AFTER_NORMALIZER if text in added and added[text].normalized else _BEFORE_NORMALIZER
            for text in control
            if len(text) > 1
        }
        self._control = re.compile(any_of(self._breaks))
        # Most texts hold none: two characters tell so much faster than some hundred tokens.
        self._hint = re.compile(any_of({text[:2] for text in self._breaks}))
        self._added = re.compile(f"({any_of(added)})")

    def cover(self, value: _Value) -> _Value:
        """Return messages or tools with every control string in them broken up; the same object if there is none."""
        return self._cover(value) if self._holds_control(value) else value

    def control_at(self, text: str, position: int = 0) -> str:
        """Return the control string that stands there in a text, "" if none does."""
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
        """A copy of a fast tokenizer's backend that drops what breaks control strings up."""
        from tokenizers import Tokenizer, normalizers, pre_tokenizers

        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        drop = normalizers.Replace(_BEFORE_NORMALIZER, "")
        copy.normalizer = drop if copy.normalizer is None else normalizers.Sequence([drop, copy.normalizer])
        split = pre_tokenizers.Split(_AFTER_NORMALIZER, "removed")
        pre_tokenizer = copy.pre_tokenizer
        order = [split] if pre_tokenizer is None else [split, pre_tokenizer]
        if isinstance(pre_tokenizer, pre_tokenizers.Metaspace):  # it would put a blank before each part
            order.reverse()
        copy.pre_tokenizer = pre_tokenizers.Sequence(order)
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = False
        return copy

    def slow_ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text by a tokenizer that has no such backend: between the added tokens."""
        ids: list[int] = []
        for part in filter(None, self._added.split(text)):
            if self._added.fullmatch(part):
                ids.append(int(self._tokenizer.convert_tokens_to_ids(part)))
                continue
            plain = BREAKS.sub("", part)
            ids += self._tokenizer(plain, add_special_tokens=False, split_special_tokens=True, verbose=False)[
                "input_ids"
            ]
        return ids

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "backend"}


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern that finds any of some texts, the longest first; nothing if there are none."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"
