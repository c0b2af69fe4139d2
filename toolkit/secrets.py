"""Secrets stay where they are: what goes into a file, a log or a message is passed through here first.

A secret is the value of an environment variable, of a key of the config or of a parameter of a URL whose name says so,
the user and password of a URL, and what has the form of a well-known key. Nothing that a run writes needs them, and all
of it gets copied, uploaded and shown.
"""

import json
import logging
import os
import re
import traceback
from functools import cache
from typing import Any

MASK = "***"
_learned: set[str] = set()
"""Secrets that were found in configs, or named there: from then on they are known wherever else they come up."""
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_CONFIG_NAME = re.compile(r"(?:^|_)(?:api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
"""Of the config's own keys none is one of these; such as ds_extra.comet.api_key."""
_VOCABULARY = r"(?:\w+_)?(?:bos|eos|eot|pad|unk|sep|cls|mask|stop|image|video|audio)_token"
"""Names of a tokenizer's special tokens, such as eos_token: these are no secrets."""
_WORD = re.compile(
    rf"((?<![\w.])\w+(?:\.\w+)*\.(?!{_VOCABULARY}=)(?:\w+_)?(?:api_?key|token|secret|password|passwd|credentials?)=)"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\",}\]]+)",
    re.IGNORECASE,
)
"""Of a command line, such as ds_extra.comet.api_key=…: by its key alone, as no config may have been read yet."""
_LEAST_LENGTH = 8
_COMMON = {"disabled", "required", "optional", "password", "changeme", "undefined", "localhost"}
"""Values that hide nothing, and would be missed everywhere."""
_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}
"""TOKENIZERS_PARALLELISM=false is no secret."""
_URL = re.compile(r"((?<=[A-Za-z0-9+.-]{2}):/+)[^\s/:@\"']*:[^\s/\"']+@|(https?:/+)[^\s/:@?#\"']+@")
"""User and password; of HTTP the user alone too, which is where access tokens are put. ssh://git@host shows none.

A path made of a URL has one slash: Path("https://host") is https:/host. The scheme is looked back at: to look for where
one begins took 8 s in a text of 100,000 letters.
"""
_PARAMETER = re.compile(
    r"([?&;][\w.%-]*(?:key|token|secret|password|passwd|credential|signature|(?<=[?&;])sig)=)[^\s&;#\"'<>]+",
    re.IGNORECASE,
)
"""Of a URL, such as ?access_token=…, or &X-Amz-Signature=… and &sig=… of a link that was signed to be passed on."""
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,})"
)


def hide(text: str) -> str:
    """Return a text with `***` in the place of every secret."""
    return str(_hidden(text, _secrets()))


def hide_all(value: Any) -> Any:
    """Return a value of dicts, lists and plain values with the secrets hidden in all its texts."""
    _learn(value)
    return _hidden(value, _secrets())


def hide_word(word: str) -> str:
    """Return a word of a command line without secrets; of KEY=VALUE all of the value is hidden if the key is secret."""
    key, equals, value = word.partition("=")
    section, _, name = key.lstrip("+").rpartition(".")
    is_variable = section == "launch.env" and is_under_secret_name(name, value)
    if equals and (is_variable or _is_secret_entry(name, value)):
        _learn({name: value})
        return f"{key}={MASK}"
    return hide(word)


def learn_from(config: Any) -> None:
    """From now on hide the secrets among a config's keys, wherever they come up."""
    _learn(config)


def learn(value: str) -> None:
    """From now on hide a value, whatever its variable's name; not one that is short, or says where something lies."""
    if _is_secret(value):
        _learned.add(value)


def is_under_secret_name(name: str, value: str) -> bool:
    """Whether a variable's name says that its value is a secret, and the value is no switch and no path that exists."""
    return _says_secret(name) and value.lower() not in _SWITCHES and not os.path.exists(value)


def _hidden(value: Any, secrets: list[str]) -> Any:
    """Return a value, and what is in it, with MASK in place of `secrets` and of whatever looks like one."""
    if isinstance(value, str):
        return _hidden_text(value, secrets)
    if isinstance(value, dict):
        return {
            _hidden(name, secrets): MASK if _is_secret_entry(name, item) else _hidden(item, secrets)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_hidden(item, secrets) for item in value)
    return value


def _hidden_text(text: str, secrets: list[str]) -> str:
    """Return a text with MASK in place of `secrets` and of whatever looks like one; two that overlap are one MASK."""
    spans = [match.span() for match in _FORMS.finditer(text)]
    spans += [match.span() for secret in secrets for match in re.finditer(re.escape(secret), text)]
    shown, end = "", 0  # what is shown of text[:end]
    for start, last in sorted(spans):
        if start >= end:  # else it begins within the span before it
            shown += text[end:start] + MASK
        end = max(end, last)
    shown += text[end:]
    shown = _URL.sub(rf"\1\2{MASK}@", shown)
    shown = _PARAMETER.sub(rf"\1{MASK}", shown)
    return _WORD.sub(rf"\1{MASK}", shown)


def _learn(value: Any) -> None:
    """Remember the values of keys whose names say that they are secrets, so that they are hidden anywhere."""
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str) and _says_secret_key(name) and _is_secret(item):
                _learned.add(item)
            _learn(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _learn(item)


def _is_secret_entry(name: Any, value: Any) -> bool:
    """Whether a config's key says that a text is a secret, however short; a switch or a path that exists is none."""
    is_text = isinstance(value, str) and value.lower() not in _SWITCHES
    return is_text and _says_secret_key(name) and not os.path.exists(value)


def _says_secret_key(name: Any) -> bool:
    """Whether the name of a config's key says that its value is secret; names of vocabularies do not."""
    text = str(name)
    return _CONFIG_NAME.search(text) is not None and re.fullmatch(_VOCABULARY, text, re.IGNORECASE) is None


def are_same(left: Any, right: Any) -> bool:
    """Whether two values, of which either may have its secrets hidden, can be the same: MASK stands for any text."""
    for hidden, text in ((str(left), str(right)), (str(right), str(left))):
        pattern = re.escape(hidden).replace(re.escape(MASK), ".+")
        if MASK in hidden and re.fullmatch(pattern, text, re.DOTALL):
            return True
    return bool(left == right)


def _secrets() -> list[str]:
    """Return the known secrets, in each form in which they may be written, the longest first."""
    # Each message comes by here: of a large environment only the values are read whose names say so.
    values = [os.environ.get(name, "") for name in filter(_says_secret, os.environ)]
    of_variables = set(filter(_is_secret, values))
    # As they are, and as JSON and Python escape them (a quote, a backslash), without the quotes around.
    forms = {form for value in of_variables | _learned for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])}
    return sorted(forms, key=len, reverse=True)


@cache
def _says_secret(name: str) -> bool:
    """Whether a variable's name says that its value is secret."""
    return _NAME.search(name) is not None


def _is_secret(value: str) -> bool:
    """Whether the value of a variable whose name says secret is one. The path of an existing file is not."""
    return len(value) >= _LEAST_LENGTH and value.lower() not in _COMMON and not os.path.exists(value)


class HidingFilter(logging.Filter):
    """Hides secrets in what a log handler writes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the record's message, and its traceback, by what may be seen."""
        record.msg, record.args = hide(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = hide("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True
