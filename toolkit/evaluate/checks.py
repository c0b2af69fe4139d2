"""Passes or fails generated answers by the `check` of their question: exact, contains, regex, json_schema or python."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, validators
from referencing import Registry
from referencing.exceptions import Unresolvable

from toolkit.messages import RowError, parsed_json, shortened, tr
from toolkit.models.sandbox import TooSlow, time_limit

Check = Mapping[str, Any]
"""Kind -> what it asks for; an answer passes if it meets all of them."""
TIME_LIMIT_S = 2.0
"""For a regular expression or a schema on one answer: some patterns take years."""
_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)\n?```", re.DOTALL)


def read_check(value: object, allow_code: bool = False) -> Check:
    """Return the `check` of a row, without kinds that are null.

    Args:
        value: as it stands in the row.
        allow_code: whether the user agrees that generated code is run.

    Raises:
        RowError: it is no check, or asks for something that cannot be done.
    """
    if isinstance(value, dict):
        value = {kind: expected for kind, expected in value.items() if expected is not None}
    if not isinstance(value, dict) or not value:
        raise RowError("check = {value} is not of the form {form}", value=shortened(value, 60), form='{"regex": "…"}')
    for kind, expected in value.items():
        if kind not in _KINDS:
            raise RowError("check has no '{kind}'; known are {known}", kind=kind, known=", ".join(_KINDS))
        has_other_items = isinstance(expected, list) and not all(type(text) is str for text in expected)
        if has_other_items or not isinstance(expected, _TYPES[kind]):
            raise RowError("check.{kind} = {value} has a wrong type", kind=kind, value=shortened(expected, 60))
    if "regex" in value:
        try:
            re.compile(value["regex"])
        except (re.error, OverflowError, RecursionError) as error:
            raise RowError(
                "check.regex = {value} is no regular expression: {reason}",
                value=shortened(value["regex"], 60),
                reason=error,
            ) from None
    if "json_schema" in value:
        _check_schema(value["json_schema"])
    if "python" in value and not allow_code:
        raise RowError(
            tr(
                "check.python runs code that a model has written, as your user. In a container, or on a machine with "
                "nothing to lose: add allow_code=true"
            )
        )
    return value


def why_failed(check: Check, answer: str) -> str:
    """Return why an answer does not pass a check of `read_check`, "" if it does."""
    for kind, expected in check.items():
        try:
            with time_limit(TIME_LIMIT_S if kind != "python" else 0):  # 0: none, as code_run.py has its own
                reason = _KINDS[kind](expected, answer)
        except TooSlow:
            reason = tr("no result within {seconds} s", seconds=f"{TIME_LIMIT_S:g}")
        except RecursionError:
            reason = tr("nested too deeply")
        if reason:
            return f"{kind}: {reason}"
    return ""


def code_of(answer: str) -> str:
    """Return the first fenced code block of an answer, the whole answer without one."""
    match = _FENCED.search(answer)
    return match[1] if match else answer


def _exact(expected: str | list[str], answer: str) -> str:
    """Return why an answer is none of the expected texts, "" if it is one."""
    texts = [expected] if isinstance(expected, str) else expected
    return "" if answer.strip() in [text.strip() for text in texts] else tr("another text")


def _contains(expected: str | list[str], answer: str) -> str:
    """Return which of the expected texts an answer lacks, "" if it has all."""
    texts = [expected] if isinstance(expected, str) else expected
    missing = [text for text in texts if text not in answer]
    return tr("without {texts}", texts=shortened(json.dumps(missing, ensure_ascii=False), 200)) if missing else ""


def _regex(expected: str, answer: str) -> str:
    """Return why the pattern `expected` matches nowhere in an answer, "" if it does."""
    return "" if re.search(expected, answer) else tr("no match")


def _json_schema(expected: Any, answer: str) -> str:
    """Return why an answer, or the code block in it, is no JSON of the schema `expected`; "" if it is."""
    try:
        value = parsed_json(code_of(answer.strip()))
    except ValueError:
        return tr("no JSON")
    try:
        error = next(iter(_validator(expected).iter_errors(value)), None)
    except Unresolvable as unresolved:
        return tr("the schema refers to {name}, and no other document is read", name=unresolved.ref)
    return "" if error is None else shortened(f"{error.json_path}: {error.message}", 200)


def _validator(schema: Any) -> Any:
    """Return the validator of a JSON Schema, which fetches no other document."""
    return validators.validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def _check_schema(schema: Any) -> None:
    """Raise RowError if a value is no JSON Schema."""
    try:
        type(_validator(schema)).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        reason = shortened(getattr(error, "message", type(error).__name__), 200)
        raise RowError("check.json_schema is no JSON Schema: {reason}", reason=reason) from None


def _python(expected: str, answer: str) -> str:
    """Return why a program fails, "" if it does not: the code in an answer, and after it that of the check."""
    from toolkit.evaluate import code_run

    return code_run.why_failed(f"{code_of(answer)}\n\n{expected}\n")


_KINDS: dict[str, Callable[[Any, str], str]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "json_schema": _json_schema,
    "python": _python,
}
_TYPES: dict[str, tuple[type, ...]] = {
    "exact": (str, list),
    "contains": (str, list),
    "regex": (str,),
    "json_schema": (dict, bool),
    "python": (str,),
}
