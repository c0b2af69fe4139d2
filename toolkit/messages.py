"""What users are told: sentences, and the errors that carry them.

Every sentence goes through `tr`: the English text is the key, the Chinese one is looked up. The language is decided
once: `set_language` (from the recipe's `language`), else the locale. Tests pin English.
Whatever raises one of the errors below ends as a single message without traceback; any other exception is a defect of
ours and keeps its traceback. `Problems` makes one message of several errors.
"""

import difflib
import errno
import functools
import json
import logging
import os
import pwd
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TypeVar

from toolkit.secrets import hide

_PLACE = re.compile(r"^(?:\S+:\d+|command line|命令行)[:：] ?")
"""The place that a message may begin with: "recipes/x.yaml:12: "."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_FULL_WIDTH = ("。", "！", "？", "；", "：", "）")
_language = ""
_logger = logging.getLogger("toolkit")


def set_language(language: str) -> None:
    """Choose the language of all later messages. "" is the locale's: LC_ALL, LC_MESSAGES, LANG in that order."""
    global _language
    _language = language


def choose_language(words: Sequence[str]) -> list[str]:
    """Use the language of `language=en|zh`, which every command takes; return the other words."""
    typed = [word.partition("=")[2] for word in words if word.startswith("language=")]
    if typed:
        if typed[-1] not in ("", "en", "zh"):
            raise ConfigError("language = {value} must be en, zh or empty.", value=typed[-1])
        set_language(typed[-1])
    return [word for word in words if not word.startswith("language=")]


def current_language() -> str:
    """Return "zh" or "en": what `set_language` chose, else what the locale's variables say."""
    if _language:
        return _language
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(name, "")
        if value:
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


def tr(english: str, /, **values: object) -> str:
    """Return the message in the user's language with its `{placeholders}` filled in, and secrets left out.
    The template is written out at the call, so that a test can find it and its translation.
    """
    return _fill(english, values)


_LONGEST_LINE = 1000
"""Of a value in a message: what comes from a file or a command line may have megabytes."""
_COUNTED = re.compile(
    r"(?<!of )\{(\w+)\} (answer|epoch|error|file|GPU|group|layer|message|node|pair|question|rank|row|sample|sequence|"
    r"stage|step|token|turn)s\b( are| have| were)?"
)
"""A number and its noun, "{count} files are", but not the total of "1 of {count} files"."""
_SINGULAR = {None: "", " are": " is", " have": " has", " were": " was"}


def _fill(english: str, values: dict[str, object]) -> str:
    """Return a message in the user's language with its values: "1 file", but no secrets and control characters."""
    names_of_one = [name for name, value in values.items() if str(value) == "1"]

    def counted(match: re.Match[str]) -> str:  # "{count} files are" becomes "{count} file is"
        is_one = match[1] in names_of_one
        return f"{{{match[1]}}} {match[2]}{_SINGULAR[match[3]]}" if is_one else match[0]

    text = _COUNTED.sub(counted, translated(english))
    return hide(printable(text.format(**{name: _bounded(value) for name, value in values.items()})))


def _bounded(value: object) -> object:
    """Return a value as text with overlong lines shortened; the value itself if it has none."""
    if isinstance(value, (int, float, type(None))):
        return value
    text = str(value)
    if len(text) <= _LONGEST_LINE:
        return value
    return "\n".join(shortened(line, _LONGEST_LINE) for line in text.split("\n"))


def filled(english: str, value_of: Callable[[str], object]) -> str:
    """Return a message of a table, as `tr` does: each {placeholder} is a name whose value `value_of` gives."""
    return hide(
        printable(re.sub(r"\{([\w.]+)\}", lambda match: str(_bounded(value_of(match[1]))), translated(english)))
    )


def joined(*sentences: str) -> str:
    """Return sentences in one line: with spaces in between, but with none after Chinese punctuation; "" is skipped."""
    line = ""
    for sentence in filter(None, sentences):
        space = "" if not line or line.endswith(_FULL_WIDTH) else " "
        line += space + sentence
    return line


def listed(*texts: str) -> str:
    """Return texts as a list within a sentence; "" is skipped."""
    return ("、" if current_language() == "zh" else ", ").join(filter(None, texts))


def clauses(texts: Iterable[str]) -> str:
    """Return parts of a sentence that may hold commas, with semicolons in between."""
    return ("；" if current_language() == "zh" else "; ").join(texts)


def type_name(kind: Any) -> str:
    """Return what a value of a type is called within a sentence."""
    words = {int: tr("a whole number"), float: tr("a number"), bool: tr("true or false"), str: tr("a text")}
    return words.get(kind) or (tr("a list, for example [a, b]") if kind is list else str(kind))


def translated(english: str) -> str:
    """Return a text in the user's language as it is: one of a data file, or a template that is not filled in."""
    return chinese()["messages"].get(english, english) if current_language() == "zh" else english


def read_table(path: str) -> Any:
    """Return what a data file of the package holds; its path is relative to the package."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time where PyYAML has libyaml
    return yaml.load((Path(__file__).parent / path).read_text(encoding="utf-8"), loader)  # noqa: S506


@functools.cache
def chinese() -> dict[str, dict[str, str]]:
    """Return the sections of locale/zh.yaml: English -> Chinese. It is read once, when Chinese is first needed."""
    catalogue: dict[str, dict[str, str]] = read_table("locale/zh.yaml")  # 20 ms
    return catalogue


def printable(text: str) -> str:
    """Return a text from elsewhere (a sample, a file's name) with those characters escaped that would move a terminal's
    cursor, change its colours or the direction of writing, and lone surrogates; line breaks and tabs stay.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def say(line: str, /, **values: object) -> None:
    """Print a line to the user, on the main rank only: a template with its `values`, or a finished line."""
    _logger.info("%s", _fill(line, values) if values else translated(line))


def warn(line: str, /, **values: object) -> None:
    """Print a warning to the user, on the main rank only."""
    _logger.warning("%s", _fill(line, values) if values else translated(line))


@contextmanager
def notes_to_stderr() -> Iterator[None]:
    """Write what is said meanwhile to stderr: stdout is for answers alone."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def silent() -> Iterator[None]:
    """Print no messages to the user within the body, as for what is tried now and reported when it is really done."""
    level = _logger.level
    _logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _logger.setLevel(level)


def set_main_rank(is_main: bool) -> None:
    """Choose whether this process prints to the user: one rank of a run does (launch/environment.py)."""
    _logger.setLevel(logging.INFO if is_main else logging.CRITICAL)


def is_main_rank() -> bool:
    """Return whether this process prints to the user; one that is not a rank does."""
    return _logger.isEnabledFor(logging.INFO)


def write_to_stdout(line: str) -> None:
    """Write a line and flush: stdout may be a pipe that is being followed."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Console(logging.Handler):
    """The handler of `say` and `warn`: writes to stdout, or through `write`, which a live view replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[str], None] = write_to_stdout
        self.num_warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a warning has its prefix."""
        line = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.num_warnings += 1
            line = tr("WARNING: {line}", line=line)
        self.write(line)


console = _Console()
_logger.addHandler(console)
_logger.setLevel(logging.INFO)
_logger.propagate = False
_MOST_NAMES = 8
"""So many names are in a message; of more the first ones."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that has a name in it (bleu: eval_bleu), is similar to it, or is in it; None without one."""
    name, spellings = name.lower(), {candidate.lower(): candidate for candidate in candidates}
    parts = sorted((part for part in spellings if re.search(rf"(\b|_){re.escape(part)}", name)), key=len)
    begun = sorted((other for other in spellings if re.search(rf"(\b|_){re.escape(name)}", other)), key=len)
    having = begun[:1] if len(name) > 2 else []  # shorter names are in too many others
    close = [*having, *difflib.get_close_matches(name, spellings, n=1, cutoff=0.75), *parts[::-1]]
    return spellings[close[0]] if close else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "Did you mean 'x'?", or "" without a candidate that is like `name`."""
    return tr("Did you mean '{name}'?", name=near) if (near := nearest(name, candidates)) is not None else ""


def shortlist(names: Iterable[str], more: str, like: str = "") -> str:
    """Return names for a message: of many the first, or those like `like`, and what shows all: a command or a page."""
    names = list(names)
    if len(names) <= _MOST_NAMES + 2:  # to leave out one or two would save nothing
        return listed(*names)
    if close := difflib.get_close_matches(like, names, n=_MOST_NAMES, cutoff=0.5):
        names = [*close, *(name for name in names if name not in close)]
    shown = listed(*names[:_MOST_NAMES])
    return tr("{names} and {count} more: {more}", names=shown, count=len(names) - _MOST_NAMES, more=more)


class ToolkitError(Exception):
    """Base of all errors that are shown to the user as one message, in the user's language.

    With values, the message is a template, written out at the call as that of `tr`; else it is taken as it is.
    `exit_code` is the process's exit status, `parts` are the errors that one message numbers (`Problems`), `more`
    how many it only counts, `keys` the config keys that it is about.
    """

    exit_code = 2
    parts: "tuple[ToolkitError, ...]" = ()
    more: int = 0
    keys: tuple[str, ...] = ()

    def __init__(self, message: str = "", /, **values: object) -> None:
        super().__init__(_fill(message, values) if values else message)


class ConfigError(ToolkitError):
    """A recipe, an override or a DeepSpeed JSON says something that cannot be."""


class DataError(ToolkitError):
    """A data file cannot be read, or holds rows that cannot be used: the user's to mend, so exit code 2."""


class ModelError(ToolkitError):
    """A model or tokenizer folder is missing, incomplete or of a kind that cannot be trained."""


class NotStreamable(ModelError):
    """Weights that transformers alone can read, as a whole: they are stored in another form than is computed with."""


class BaseMissing(ModelError):
    """An adapter or a checkpoint without frozen weights is whole, but the model that it stands on is not there."""


class CodeNotTrusted(ModelError):
    """A model may be whole, but Python files of its directory would have to run, and they are not trusted."""


class RowError(Exception):
    """One row cannot be used; the message, made as in ToolkitError, says why. Whoever reads rows adds the position."""

    def __init__(self, message: str = "", /, **values: object) -> None:
        super().__init__(_fill(message, values) if values else message)


class LaunchError(ToolkitError):
    """The processes were not started as the user asked: hostfile, ranks, ports."""


class RunFolderError(ToolkitError):
    """The run folder cannot be made, or belongs to another run."""


class CheckpointError(ToolkitError):
    """A checkpoint or an export could not be written or read."""

    exit_code = 74


class OtherFormat(CheckpointError):
    """A checkpoint was written by another version of the toolkit; it may be whole."""


class ProofDiffers(CheckpointError):
    """Logits are not those of the save but for rounding, though they may well be of the same weights."""


class NotExportable(CheckpointError):
    """A checkpoint is whole, but its model cannot be taken out of it."""


class NotMergeable(ModelError):
    """An adapter is whole, but no weights of its base can stand for it."""


class Diverged(ToolkitError):
    """The loss is no number any more, or no step could be taken for many steps in a row."""

    exit_code = 70


class OutOfMemory(ToolkitError):
    """The run does not fit into memory as it is set: the user's to change, so exit code 2."""


class TrackError(ToolkitError):
    """What a run measures cannot be written."""

    exit_code = 74


class Stopped(ToolkitError):
    """The run was stopped by a signal, at a step boundary, with a checkpoint saved."""

    exit_code = 75


class RunFailed(ToolkitError):
    """A run that was started from Python ended with an exit code other than 0."""

    exit_code = 1


class RepeatedDeath(ToolkitError):
    """The run died twice without getting any further: to start it again would not help."""

    exit_code = 1


T = TypeVar("T")
MOST = 50
"""Errors that are told; further ones are counted: who made thousands of them made one mistake."""


class Problems:
    """Errors found so far."""

    def __init__(self) -> None:
        self.errors: list[ToolkitError] = []
        self.more = 0
        """Further ones."""
        self._texts: set[str] = set()
        self._doubtful: set[str] = set()

    @property
    def count(self) -> int:
        """All errors so far."""
        return len(self.errors) + self.more

    def add_lazily(self, make: Callable[..., ToolkitError], *arguments: Any) -> None:
        """Keep the error that `make` returns; if as many as are shown are there already, count it without making it."""
        if len(self.errors) < MOST:
            self.add(make(*arguments))
        else:
            self.more += 1

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function; return its result, or None if it raised a ToolkitError, which is kept. Any other exception
        is ignored once there are errors: then it follows from a value that is known to be wrong.
        """
        try:
            return function(*arguments)
        except ToolkitError as error:
            self.add(error)
        except Exception:
            if not self.errors:
                raise
        return None

    def apply(self, rules: Iterable[Callable[..., Iterable[ToolkitError]]], *arguments: Any) -> None:
        """Call every rule with the same arguments; keep all errors that it yields."""

        def keep(rule: Callable[..., Iterable[ToolkitError]]) -> None:
            for error in rule(*arguments):
                self.add(error)

        for rule in rules:
            self.attempt(keep, rule)

    def add(self, error: ToolkitError) -> None:
        """Keep an error, or its parts, unless known already or due to a value that is wrong anyway: `settle`."""
        self.more += error.more
        for part in error.parts or (error,):
            text = str(part)
            if text in self._texts or any(_mentions(text, key) for key in self._doubtful):
                continue
            # The same error may have been found before where its line was not known: this one takes its place.
            unplaced = _PLACE.sub("", text)
            is_placed = unplaced != text
            earlier = [index for index, known in enumerate(self.errors) if is_placed and str(known) == unplaced]
            self._texts |= {text, unplaced}
            if earlier:
                self.errors[earlier[0]] = part
            elif len(self.errors) < MOST:
                self.errors.append(part)
            else:
                self.more += 1

    def settle(self) -> None:
        """From here on skip errors that mention a key which an error so far is about: its value is not known."""
        self._doubtful |= {key for error in self.errors for key in error.keys if key}

    def raise_all(self) -> None:
        """Raise what was found, as one error."""
        if not self.errors:
            return
        if self.count == 1:
            raise self.errors[0]
        classes = {type(error) for error in self.errors}  # the one error has their class if they share one
        lines = [f"{number}. " + str(error).replace("\n", "\n   ") for number, error in enumerate(self.errors, start=1)]
        error_class = classes.pop() if len(classes) == 1 else ConfigError
        lines += [tr("… and {count} more.", count=f"{self.more:,}")] if self.more else []
        error = error_class("\n".join([tr("{count} errors:", count=self.count), *lines]))
        error.parts, error.more = tuple(self.errors), self.more
        raise error


def raise_all(errors: Iterable[ToolkitError]) -> None:
    """Raise several errors as one exception that lists them all."""
    problems = Problems()
    for error in errors:
        problems.add(error)
    problems.raise_all()


def _mentions(text: str, key: str) -> bool:
    """Return whether a message is about a key; a section's name may also be an ordinary word."""
    # So "data" counts only in data.path, data=x, data = x and data[0].
    end = r"(?!\w)" if "." in key else r"(?=\.\w|=| = |\[)"
    return re.search(rf"(?<![\w.]){re.escape(key)}{end}", text) is not None


LARGEST_JSON_BYTES = 256 << 20
"""Of a file that is one JSON object; the largest in use are tokenizers and the indices of weights, below 64 MiB."""
_REASON_CHARS = 300


def shortened(value: object, most: int) -> str:
    """Return a value as a message shows it: it may have thousands of characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def shortened_alike(first: object, second: object, most: int) -> tuple[str, str]:
    """Return two values as `shortened` does, each from shortly before where they differ if one of them is too long."""
    texts = str(first), str(second)
    pairs = enumerate(zip(*texts, strict=False))
    differs_at = next((i for i, (left, right) in pairs if left != right), min(map(len, texts)))
    start = max(0, differs_at - most // 2) if max(map(len, texts)) > most else 0
    left, right = (("…" if start else "") + shortened(text[start:], most) for text in texts)
    return left, right


@contextmanager
def reading(file: Path | str, error: type[ToolkitError], mend: str = "") -> Iterator[None]:
    """Turn whatever the body raises while it reads a file into one message.
    The body holds calls of libraries on the file and little else, so that no mistake of ours hides in it. `mend`: a
    sentence that says what to do. An error that already names its position passes.
    """
    try:
        yield
    except (ToolkitError, RowError):
        raise
    except BaseException as problem:
        if not is_failure(problem):
            raise
        text = tr("Cannot read '{path}': {reason}.", path=file, reason=reason_of(problem))
        raise error(joined(text, mend)) from problem


def is_failure(problem: BaseException) -> bool:
    """Whether a problem is a failure, not the end of the process; a panic of Rust is no Exception (pyo3 0.26)."""
    return isinstance(problem, Exception) or type(problem).__name__ == "PanicException"


def reason_of(problem: BaseException) -> str:
    """Return an exception's cause in one line, for a message."""
    if isinstance(problem, RecursionError):
        return tr("it is nested too deeply")
    if isinstance(problem, MemoryError):
        return tr("it needs more memory than there is")
    if isinstance(problem, UnicodeDecodeError):
        from toolkit.encodings import conversion  # read in errors alone

        return conversion(problem.object)
    if isinstance(problem, OSError) and problem.strerror:
        return translated(problem.strerror)
    if isinstance(problem, KeyError):
        return tr("no key '{key}'", key=str(problem.args[0]) if problem.args else "")
    lines = str(problem).strip().splitlines()
    reason = lines[0][:_REASON_CHARS].rstrip(".") if lines else ""
    return reason or type(problem).__name__


def system_text(error: OSError) -> str:
    """Return what to say of a system's error: file and reason, and if access is denied, whose the file is."""
    if error.filename is None:
        return str(error)
    file, reason = os.fsdecode(error.filename), error.strerror or ""
    if error.errno in (errno.EACCES, errno.EPERM):
        path = Path(file).absolute()
        for directory in (path, *path.parents):
            with suppress(OSError):  # hidden by a directory above: that is tried next
                status = directory.stat()
                return tr(
                    "{file}: {reason}. {place} belongs to user {owner} (mode {mode}), and this process runs as user "
                    "{user}. Ask for access, or choose another directory: run.dir, prepare.dir, data.sources, "
                    "model.path, TMPDIR or TORCH_EXTENSIONS_DIR.",
                    file=file,
                    reason=reason,
                    place=directory,
                    owner=user_name(status.st_uid),
                    mode=f"{status.st_mode & 0o7777:o}",
                    user=user_name(os.geteuid()),
                )
    return tr("{file}: {reason}.", file=file, reason=reason)


def user_name(number: int) -> str:
    """Return a user's name; the number where it has none, as in containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def file_bytes(file: Path, most: int = LARGEST_JSON_BYTES) -> bytes:
    """Return what is in a file; ValueError if it has more bytes than `most`, or is no file, which could be endless."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(tr("it is no file"))
    with file.open("rb") as opened:  # not by its size: it may be of a kind that has none, or grow
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(tr("it has more than {most} bytes", most=f"{most:,}"))
    return content


def parsed_json(text: str | bytes, once: bool = False, nan: bool = False) -> Any:
    """Return what JSON of any origin says; ValueError if it is none or nests too deeply. `once`: a key that stands
    twice in an object is an error too; `nan`: NaN may be in it, as where no loss is known yet. Infinity always may be.
    """

    def number_of_name(name: str) -> float:  # NaN, Infinity or -Infinity
        if name == "NaN" and not nan:
            raise ValueError(tr("{value} is no number", value=name))
        return float(name)

    def dict_of_unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in members]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(tr("the key '{key}' stands twice", key=twice))
        return dict(members)

    try:
        return json.loads(text, parse_constant=number_of_name, object_pairs_hook=dict_of_unique if once else None)
    except RecursionError as error:
        raise ValueError(reason_of(error)) from None


def json_object(file: Path, error: type[ToolkitError]) -> dict[str, Any]:
    """Return the JSON object in a file from anywhere, or raise `error`: the one reader of such files."""
    with reading(file, error):
        content = file_bytes(file).decode("utf-8-sig")
    try:
        value = parsed_json(content)
    except ValueError as problem:
        raise error(tr("{file} is not JSON: {reason}", file=file, reason=reason_of(problem))) from problem
    if not isinstance(value, dict):
        raise error(tr("{file} is not a JSON object.", file=file))
    return value
