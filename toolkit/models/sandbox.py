"""Limits of time and size for chat templates, which are programs from a model directory.

Jinja's sandbox (3.1.6) isolates a template from the machine, and a time limit ends loops, but not a single call such as
`'x' * 10**9`: `BoundedEnvironment` computes the size of a result before it is multiplied, padded, joined or replaced.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import BuiltinMethodType, FrameType
from typing import Any

from jinja2 import Environment, Template, nodes, utils
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.messages import tr


class TooSlow(Exception):
    """A `time_limit` has passed."""


_limited = False
"""Whether a `time_limit` is active in this process."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the body after some seconds; only in the main thread, where signals are handled. A limit inside
    another replaces it, which costs less than the first.
    """
    global _limited
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_first, previous_handler = not _limited, None
    if is_first:
        previous_handler, _limited = signal.signal(signal.SIGALRM, _stop), True
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if is_first:
            signal.signal(signal.SIGALRM, previous_handler)
            _limited = False


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle SIGALRM."""
    raise TooSlow


_LARGEST = 1 << 24
"""Characters of a text, or items of a list: more than a context of several million tokens takes."""
_MOST_BITS = 1 << 16
"""Largest number of bits of an int."""
_WIDTH = re.compile(r"\d+")
"""Numbers in a format string, mostly widths such as in `%1000000000d`."""
_SEQUENCES = (str, list, tuple, bytes)
_DICT_ATTRIBUTES = frozenset(dir(dict))
_STRING_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
"""Methods that Jinja's sandbox hands out as they are."""
_SHRINKING_METHODS = frozenset(
    ("split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "removeprefix")
)
"""Methods of str whose result is never longer than the text."""
_PLAIN_TYPES = frozenset((str, int, bool, dict, list))
_JINJA_OPTIONS = ("_loop_vars", "_block_vars")
"""Keyword arguments that compiled templates add to a call."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on sizes; each raises SecurityError."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        jinja_filters, self.filters = self.filters, _Filters()
        self.filters.update({name: _with_bounds(name, function) for name, function in jinja_filters.items()})
        self.globals["lipsum"] = _with_bounds("lipsum", utils.generate_lorem_ipsum)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator, unless its result would be too large."""
        if operator == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
            _check_size(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _check_size(bits, _MOST_BITS)  # the most that the result can have
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, _SEQUENCES) and isinstance(times, int):
                    _check_size(len(sequence) * times)
        elif operator == "%" and isinstance(left, str):
            _check_call("%", (left, right), {})
        return self.binop_table[operator](left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up an attribute with the result of Jinja's sandbox, but faster for what chat templates mostly ask for:
        keys of dicts, methods of strings, and plain values of loops and namespaces are known to be safe.
        """
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _STRING_METHODS:
            return getattr(obj, attribute)
        if attribute[:1] != "_" and (kind is LoopContext or issubclass(kind, utils.Namespace)):
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN_TYPES:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function or a method, unless its result would be too large."""
        kind, owner = type(function), getattr(function, "__self__", None)
        is_method = kind is BuiltinMethodType and type(owner) is str and function.__name__ in _SHRINKING_METHODS
        if is_method or kind is Macro:  # not longer than what it gets, or bounded within: no check, which takes time
            for name in _JINJA_OPTIONS:
                options.pop(name, None)
            return function(*args, **options) if is_method else function(context.eval_ctx, *args, **options)
        # Jinja's sandbox hands out format and format_map in a wrapper, whose text is that of the method within.
        owner = getattr(getattr(function, "__wrapped__", None), "__self__", owner)
        arguments = (owner, *args) if isinstance(owner, str) else args
        _check_call(getattr(function, "__name__", ""), arguments, options)
        return super().call(context, function, *args, **options)

    def concat(self, parts: Iterable[str]) -> str:
        """Join the texts of a template, a macro or `~`."""
        texts, length = [], 0
        for text in parts:
            length += len(text)
            if length > _LARGEST:
                _check_size(length)
            texts.append(text)
        return "".join(texts)


class _Filters(dict[str, Callable[..., Any]]):
    """Jinja's filters, with bounds also on those set later, such as transformers' `tojson` (5.23)."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _with_bounds(name, function))


class _Generator(CodeGenerator):
    """Compiles `~` to a call of `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write `a ~ b`."""
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


BoundedEnvironment.code_generator_class = _Generator


def bound_templates() -> None:
    """Let transformers render all chat templates of this process within the bounds."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


@lru_cache
def compiled(template: str) -> Template:
    """Return a chat template as transformers compiles it, within the bounds."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    bound_templates()
    compiled_template: Template = _compile_jinja_template(template)
    return compiled_template


def _with_bounds(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or function that raises SecurityError if its result would be too large."""
    kind = "%" if name == "format" else name  # the filter of that name, unlike the method

    @wraps(function)  # with the marks by which Jinja hands the context to some
    def bounded(*args: Any, **options: Any) -> Any:
        _check_call(kind, args, options)
        return function(*args, **options)

    return bounded


def _check_call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise SecurityError if a filter or method (its object comes first) would make something too large."""
    for value in (*args, *options.values()):
        if isinstance(value, int):  # it may be a width or a count
            _check_size(abs(value))
    if name in _SIZES:
        values = [value for value in (*args, *options.values()) if not isinstance(value, (Context, Environment))]
        _check_size(_SIZES[name](values) if values else 0)


def _padded_size(values: list[Any]) -> int:
    """Return the longest that a text can get if each of its lines or tabs is padded to a width, or gets another text.
    `values`: the text, then widths or texts.
    """
    count = sum(values[0].count(mark) for mark in "\n\t") + 1 if isinstance(values[0], str) else 1
    return _length(values[0]) + count * _longest(values[1:])


def _replaced_size(values: list[Any]) -> int:
    """Return the length of a text after a replacement; `values`: the text, the old and the new part."""
    text, old, new = (str(value) for value in [*values, "", ""][:3])
    return len(text) + text.count(old) * len(new)


def _joined_size(values: list[Any]) -> int:
    """Return the length of a list's joined items; `values`: list and separator, in either order (method, filter)."""
    items = next((value for value in values if isinstance(value, (list, tuple))), ())
    separator = max((len(value) for value in values if isinstance(value, str)), default=0)
    return sum(_length(item) + separator for item in items)


def _formatted_size(values: list[Any], mark: str = "{") -> int:
    """Return the longest that a format string, with fields that begin with `mark`, can get with the other values."""
    text = str(values[0])
    widths = sum(int(width[:20]) for width in _WIDTH.findall(text))  # 20 digits are too large anyway
    return len(text) + widths + text.count(mark) * _longest(values[1:])


def _longest(values: Iterable[Any]) -> int:
    """Return the largest int, or length of a text, among values and the items in them."""
    longest = 0
    for value in values:
        size = abs(value) if isinstance(value, int) else _length(value)
        items = value.values() if isinstance(value, dict) else value
        in_items = _longest(items) if isinstance(value, (dict, list, tuple)) else 0
        longest = max(longest, size, in_items)
    return longest


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 20  # about that of a number's text


_SIZES: dict[str, Callable[[list[Any]], int]] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "expandtabs", "indent"), _padded_size),
    **dict.fromkeys(("format", "format_map"), _formatted_size),
    "%": lambda values: _formatted_size(values, "%"),
    "replace": _replaced_size,
    "join": _joined_size,
    "sum": lambda values: sum(map(_length, values[0])) if isinstance(values[0], (list, tuple)) else 0,
    "translate": lambda values: _length(values[0]) * _longest(values[1:]),
    "tojson": lambda values: 10**5 * _longest(values[1:]),
    "wordwrap": lambda values: _length(values[0]) * (1 + _longest(v for v in values[1:] if isinstance(v, str))),
    "lipsum": lambda values: 1000 * _longest(values),
}
"""Method or filter -> about how large its result will be, for those that can make much of little."""


def _check_size(size: int, limit: int = _LARGEST) -> None:
    """Raise SecurityError if a size is more than `limit`."""
    if size > limit:
        raise SecurityError(
            tr(
                "it makes a text, a list or a number of {size}, and {most} are the most that a template may make",
                size=f"{size:.2g}" if size > 10**12 else f"{size:,}",
                most=f"{limit:,}",
            )
        )
