"""What makes inputs hostile, and how one is tried: in a fork of this process, within bounds of time and memory.

All draws are seeded by the input's name, so that the same input comes again on any machine.
"""

import base64
import copy
import functools
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from toolkit import messages
from toolkit.cli import main
from toolkit.distributed.exits import run_guarded

LIMIT_S = 20.0
LIMIT_BYTES = 2 << 30
"""Of memory, above that of a process that has imported everything."""
_ADDRESS_BYTES = 6 << 30
"""Further address space, so that what has no bound does not take the machine with it."""
_FILE_BYTES = 1 << 30
_OUTPUT_BYTES, _MESSAGE_CHARS = 1 << 20, 1 << 14
"""What is printed, which may be a recipe with a long value of the input, and a message."""
_LONGEST_LINE = 2000
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_CODES = {0, 2, 70, 74, 75}
_OURS = [name for name, kind in vars(messages).items() if isinstance(kind, type) and issubclass(kind, Exception)]
_ERROR = re.compile(rf"^(?:{'|'.join(_OURS)}): (.+)", re.MULTILINE | re.DOTALL)
CANARY = "CANARY"


class Special(Enum):
    """What stands where a file should be."""

    absent = "absent"
    directory = "directory"
    pipe = "pipe"
    loop = "loop"
    endless = "endless"
    unreadable = "unreadable"
    dangling = "dangling"


@dataclass
class Case:
    """One input."""

    name: str
    words: list[str] | Callable[[], int]
    """A command, or what stands for one."""
    files: Mapping[str, bytes | Special] = field(default_factory=dict)
    """By their paths in the case's directory, which is where the command runs."""
    base: Path | None = None
    """Linked as the directory `m` before."""
    told: tuple[str, ...] = ()
    """One of these is in the message, if there is one."""
    limit_s: float = LIMIT_S


@dataclass
class Outcome:
    """What came of it."""

    case: Case
    wrong: str
    seconds: float
    memory_bytes: int
    code: int
    said: str


def try_all(cases: Iterator[Case], folder: Path) -> list[Outcome]:
    """Try all inputs, as many at once as there are processors; directories of those that went well are removed."""
    found, running = list[Outcome](), list[Attempt]()
    most = max(1, len(os.sched_getaffinity(0)))
    waiting = enumerate(cases)
    is_over = False
    while running or not is_over:
        while len(running) < most and not is_over:
            number, case = next(waiting, (0, None))
            if case is None:
                is_over = True
            else:
                running.append(Attempt(case, folder / f"{number}"))
        for attempt in running[:]:
            if (outcome := attempt.poll()) is not None:
                running.remove(attempt)
                found.append(outcome)
                if not outcome.wrong:
                    shutil.rmtree(attempt.place, ignore_errors=True)
        time.sleep(0.002)
    return found


class Attempt:
    """A fork that tries one input."""

    def __init__(self, case: Case, place: Path) -> None:
        self.case, self.place, self.output = case, place, place / ".output"
        _write(case, place)
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._become()

    def _become(self) -> None:
        """Be the child, which never returns."""
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            out = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for place in (1, 2):
                os.dup2(out, place)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdin, sys.stdout = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", encoding="utf-8")
            sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")  # as Python's own
            os.chdir(self.place)
            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _ADDRESS_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES,) * 2)
            words = self.case.words
            code = main(words) if isinstance(words, list) else run_guarded(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 98
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def poll(self) -> Outcome | None:
        """Return what came of it, None while it runs."""
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.started
        if not pid:
            if seconds < self.case.limit_s:
                return None
            os.killpg(self.pid, signal.SIGKILL)
            pid, status, used = os.wait4(self.pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started
        code = os.waitstatus_to_exitcode(status)
        memory = max(0, (used.ru_maxrss << 10) - psutil.Process().memory_info().rss)
        with open(self.output, "rb") as file:
            said = file.read(_OUTPUT_BYTES + 1).decode("utf-8", "replace")
        return Outcome(self.case, self._wrong(code, seconds, memory, said), seconds, memory, code, said)

    def _wrong(self, code: int, seconds: float, memory: int, said: str) -> str:
        """Return which promise was broken, "" if none."""
        error = _ERROR.search(said)
        shown = error[1] if error else ""
        is_named = any(word in shown for word in (*self.case.told, "/mem"))  # what `unreadable` leads to
        broken = {
            f"no end within {self.case.limit_s} s": seconds >= self.case.limit_s,
            f"killed by signal {-code}": code < 0 and seconds < self.case.limit_s,
            "a traceback": "Traceback (most recent" in said,
            f"exit code {code}": code >= 0 and code not in _CODES,
            "no message": code > 0 and not shown.strip(),
            f"more than {_OUTPUT_BYTES} bytes of output": len(said) > _OUTPUT_BYTES,
            f"a message of {len(shown)} characters": len(shown) > _MESSAGE_CHARS,
            f"a line of {max(map(len, shown.splitlines()), default=0)} characters": any(
                len(line) > _LONGEST_LINE for line in shown.splitlines()
            ),
            "control characters": bool(_CONTROLS.search(said)),
            f"{memory >> 20} MiB of memory": memory > LIMIT_BYTES,
            "something of the input ran": any(self.place.rglob(CANARY)) or any(self.place.parent.glob(CANARY)),
            f"none of {self.case.told} is named": code > 0 and bool(self.case.told) and not is_named,
        }
        if not any(broken.values()):
            return ""
        return self._report([text for text, is_broken in broken.items() if is_broken], said)

    def _report(self, broken: list[str], said: str) -> str:
        """Return what a person needs to see it again."""
        words = self.case.words if isinstance(self.case.words, list) else ["(no command)"]
        lines = [f"{self.case.name}: {'; '.join(broken)}", f"  cd {self.place}; toolkit {' '.join(words)[:600]}"]
        for name, content in self.case.files.items():
            if isinstance(content, bytes):
                packed = base64.b64encode(gzip.compress(content, mtime=0)).decode()
                text = packed if len(packed) < 1500 else f"{packed[:200]}… ({len(packed)} characters)"
                lines.append(f"  {name}: {content[:160]!r}, {len(content)} bytes; gzip, base64: {text}")
            else:
                lines.append(f"  {name}: {content.value}")
        return "\n".join([*lines, "  " + said[-1500:].replace("\n", "\n  ")])


def _write(case: Case, place: Path) -> None:
    place.mkdir(parents=True)
    if case.base is not None:
        shutil.copytree(case.base, place / "m", copy_function=os.link, symlinks=True)
    for name, content in case.files.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        put(file, content)


def put(file: Path, content: bytes | Special) -> None:
    """Write a file, or what stands where it should be."""
    match content:
        case bytes():
            file.write_bytes(content)
        case Special.directory:
            file.mkdir()
        case Special.pipe:
            os.mkfifo(file)
        case Special.loop:
            file.symlink_to(file.name)
        case Special.endless:
            file.symlink_to("/dev/zero")
        case Special.unreadable:  # by root, too: an I/O error
            file.symlink_to("/proc/self/mem")
        case Special.dangling:
            file.symlink_to("nowhere")


def _nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


CODE = {"_target_": "os.system", "command": f"touch {CANARY}"}
STRAY = "\x1b[2J\x1b]0;title\x07\u202eevil\u2066\x9b31m"
MARKUP = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\"' onmouseover='alert(1)"
FORMATS = "{0.__class__.__mro__} {config} %s%n%999999d ${oc.env:HOME} {{7*7}} $(touch CANARY) `touch CANARY`"
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus": -1,
    "zero": 0,
    "half": 0.5,
    "million": 10**6,
    "huge": 10**30,
    "large": 1e308,
    "nan": float("nan"),
    "infinity": float("-inf"),
    "empty": "",
    "word": "x",
    "long": "x" * 100_000,
    "list": [],
    "lists": [[], {}, None],
    "object": {},
    "unknown": {"unknown": 1},
    "nested": _nested(60),
    "controls": STRAY,
    "nul": "a\0b",
    "surrogate": "\ud83d",
    "traversal": "../../../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "endless": "/dev/zero",
    "folder": "/",
    "formats": FORMATS,
    "markup": MARKUP,
    "code": CODE,
    "tag": "!!python/object/apply:os.system ['touch CANARY']",
    "template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "expression": "((((.*)*)*)*)*!",
    "newlines": "a\n\n\nb\r\nc",
    "@digits": "9" * 5000,
    "@deep": "[" * 5000 + "]" * 5000,
    "@exponent": "1e99999",
    "@hex": "0x41",
}
"""Those with an @ are written as they are."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value of a tree."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a tree with another value at one place."""
    made = copy.deepcopy(tree)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


def trees(name: str, tree: Any, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield so many spoiled trees as JSON, each with its name and the changed key."""
    all_paths = list(paths(tree))
    for number in range(count):
        draw = random.Random(f"{name}-{number}")
        path = draw.choice(all_paths)
        key = str(next((part for part in reversed(path) if isinstance(part, str)), path[0]))
        kind = draw.choice([*VALUES, "removed", "twice", "another"])
        label = f"{name}-{number} {'.'.join(map(str, path))} {kind}"
        if kind == "removed":
            made = changed(tree, path, None)
            inner = made
            for part in path[:-1]:
                inner = inner[part]
            del inner[path[-1]]
        elif kind == "another":
            made = changed(tree, path, None)
            inner = made
            for part in path[:-1]:
                inner = inner[part]
            if isinstance(inner, dict):
                inner[draw.choice(["unknwon", "__class__", "1", " ", "é", "_target_", STRAY])] = 1
        else:
            made = changed(tree, path, "@twice@" if kind == "twice" else f"{kind}@" if kind[0] == "@" else VALUES[kind])
        yield label, key, as_json(made, key)


def as_json(tree: Any, key: str = "") -> bytes:
    """Return JSON, with what is no JSON put in."""
    text = json.dumps(tree)
    for kind, raw in VALUES.items():
        if kind[0] == "@":
            text = text.replace(json.dumps(f"{kind}@"), raw)
    return text.replace('"@twice@"', f"1, {json.dumps(key)}: 2").encode()


@functools.cache
def _bomb() -> bytes:
    """Return a megabyte that unpacks to 256."""
    return gzip.compress(bytes(256 << 20), 1)


def spoiled(name: str, content: bytes, count: int) -> Iterator[tuple[str, bytes | Special]]:
    """Yield so many spoiled files, first what is no such file at all."""
    text = content.decode("utf-8", "replace")
    whole: dict[str, bytes | Special] = {
        "empty": b"",
        "blank": b" \n\t\n\r\n" * 50,
        "bom": b"\xef\xbb\xbf" + content,
        "utf-16": text.encode("utf-16"),
        "gbk": ("你好 # 中文\n" + text).encode("gbk", "replace"),
        "crlf": content.replace(b"\n", b"\r\n"),
        "nul": content.replace(b" ", b"\0"),
        "zeros": bytes(4096),
        "controls": STRAY.encode() + content,
        "long line": b"x" * (4 << 20),
        "deep": b"[" * 200_000,
        "deep objects": b'{"a":' * 200_000,
        "gzip": gzip.compress(content),
        "bomb": _bomb(),
        "zstd": b"\x28\xb5\x2f\xfd" + content,
        "pickle": b"cos\nsystem\n(S'touch CANARY'\ntR.",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "page": b"<!DOCTYPE html><html><script>alert(1)</script></html>",
        "alias": b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]\n",
        "itself": b"a: &a [*a]\n",
        "tag": b"!!python/object/apply:os.system ['touch CANARY']\n",
        **{kind.value: kind for kind in Special},
    }
    names = list(whole)
    for number in range(count):
        draw = random.Random(f"{name}-{number}")
        if number < len(names):
            yield f"{name}-{number} {names[number]}", whole[names[number]]
            continue
        kind = draw.choice(["cut", "bits", "bytes", "inserted", "doubled", "swapped", "noise"])
        made, at = bytearray(content), draw.randrange(max(1, len(content)))
        if kind == "cut":
            del made[at:]
        elif kind == "bits":
            for _ in range(draw.choice((1, 4, 32))):
                made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
        elif kind == "bytes":
            made[at : at + 8] = draw.randbytes(8)
        elif kind == "inserted":
            texts = [STRAY, FORMATS, MARKUP, "\0", "[" * 300, "9" * 5000, "\u2028", '"', "'", "&a *b", "{", "\n"]
            made[at:at] = draw.choice(texts).encode()
        elif kind == "doubled":
            made += made[at:]
        elif kind == "swapped":
            made[:] = made[at:] + made[:at]
        else:
            made[:] = draw.randbytes(draw.choice((1, 64, 4096)))
        yield f"{name}-{number} {kind}", bytes(made)
