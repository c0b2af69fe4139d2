"""The sources of a recipe: their files and rows, and what is checked of them before a model is loaded.

The quickstart's are docstrings of Python's standard library, parsed and never imported: several questions per object,
so that a validation question asks in new words for what was trained.
"""

import ast
import hashlib
import json
import math
import os
import platform
import re
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.config.schema import DataConfig, OnBadRow, Packing, RowFormat, SourceConfig
from toolkit.data.formats import Conversation, detect_format, parse_row, reader_of
from toolkit.data.readers import Block, block_bytes, blocks, files_of, first_row, rows_of
from toolkit.disk import sha256, write_atomically
from toolkit.distributed.file_lock import build_once
from toolkit.messages import DataError, Problems, RowError, ToolkitError, did_you_mean, joined, reading, tr

_SETTLED_S = 2.0


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a source."""

    path: Path
    source: int
    """Number of its source: training sources from 0, then validation sources."""
    row_format: RowFormat
    """As given; `auto` is decided by the first row."""
    columns: dict[str, str]
    max_rows: int = 0
    """Most rows that are used of its source, the first ones; 0: all."""


def locate_source(source: SourceConfig, number: int, cache_dir: Path) -> list[DataFile]:
    """Return the files of source number `number`; docstrings are extracted first, hub datasets downloaded."""
    row_format = source.format
    if row_format is RowFormat.docstrings:
        paths, row_format = [pairs_file(cache_dir)], RowFormat.prompt_response
    elif source.hub:
        paths = _from_hub(source)
    else:
        paths = files_of(source)
    return [DataFile(path, number, row_format, dict(source.columns), source.max_samples) for path in paths]


def _from_hub(source: SourceConfig) -> list[Path]:
    """Return the Arrow files that `datasets` makes of a data set on Hugging Face; no code of it is executed."""
    if "[" in source.split:
        raise DataError(
            "`split` = {split} selects rows, which is not known here: the files are read whole. Name a "
            "whole split, or save the selection with `datasets` (save_to_disk) and give its directory "
            "as `path`.",
            split=source.split,
        )
    import datasets

    try:
        data = datasets.load_dataset(
            source.hub, source.subset or None, split=source.split, revision=source.revision or None
        )
    except ConnectionError as error:
        is_offline = datasets.config.HF_HUB_OFFLINE
        raise DataError(
            "'{name}' is neither a file here nor a dataset in the cache, and Hugging Face cannot be reached{offline}.\n"
            "Copy the cache from where it was loaded (HF_HOME), set a mirror (HF_ENDPOINT), or give a copy of its "
            "files: data.path=DIR.",
            name=source.hub,
            offline=" (HF_HUB_OFFLINE=1)" if is_offline else "",
        ) from error
    except Exception as error:  # whatever the library or the network raises, the user must choose something else
        raise DataError(
            "The dataset '{name}' cannot be had from Hugging Face ({reason}). Correct `hub`, `subset`, "
            "`split` or `revision`, or download it and give its directory as `path`.",
            name=source.hub,
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
        ) from error
    return [Path(file["filename"]) for file in data.cache_files]


def locate_all(data: DataConfig, cache_dir: Path) -> list[DataFile]:
    """Return the files of all sources, training before validation; a DataError if there are no sources or files."""
    if not data.sources:
        raise DataError(tr("data.sources is empty: name at least one file under data.sources."))
    return [file for numbered in _numbered(data) for file in locate_source(*numbered, cache_dir)]


def local_files(data: DataConfig) -> list[DataFile]:
    """Return the files of the sources that have a path; downloads and derives nothing."""
    return [file for numbered in _numbered(data) if numbered[0].path for file in locate_source(*numbered, Path())]


def _numbered(data: DataConfig) -> list[tuple[SourceConfig, int]]:
    """Return (source, its number) of all sources, validation after training."""
    return [(source, number) for number, source in enumerate([*data.sources, *data.validation])]


def read_blocks(files: Sequence[DataFile], limits: Sequence[int] = ()) -> Iterator[tuple[int, DataFile, Block]]:
    """Yield (index in `files`, file, block of its rows), in order; a file's format `auto` is replaced by the detected
    one. No more is read of a source than its files' `max_rows`. `limits`, one per file: stop reading the file once so
    many rows were read from all limited files (0: no limit).
    """
    taken, taken_of_source, least_bytes = 0, Counter[int](), block_bytes(total_bytes(files))
    for number, file in enumerate(files):
        with_known_format: DataFile | None = None
        limit = limits[number] if limits else 0
        of_file = blocks(file.path, least_bytes, file.columns.values())
        while True:
            counts = ((limit, taken), (file.max_rows, taken_of_source[file.source]))
            left = min((most - count for most, count in counts if most), default=None)
            if (left is not None and left <= 0) or (block := next(of_file, None)) is None:
                break
            if left is not None:
                block, count = first_of(block, left)
                taken_of_source[file.source] += count
                taken += count if limit else 0
            if with_known_format is None:
                with_known_format = with_format(file, block)
            yield number, with_known_format or file, block


def first_of(block: Block, count: int) -> tuple[Block, int]:
    """Return the first `count` rows of a block as a block, and how many there are."""
    rows = list(islice(rows_of(block), count))
    if not isinstance(block.content, bytes):
        return replace(block, content=rows), len(rows)
    end = rows[-1][0] + 1 if rows else 0
    content = b"".join(line + b"\n" for line in block.content.split(b"\n")[:end])
    return replace(block, content=content), len(rows)


def with_format(file: DataFile, block: Block) -> DataFile | None:
    """Return the file with the format that its first row shows; None if no row can be parsed, DataError if unknown."""
    if file.row_format is not RowFormat.auto:
        return file
    try:
        line, row = first_row(block)
    except RowError:
        return None
    if not isinstance(row, dict):
        # Not an object: the row's own complaint is the clearest.
        return replace(file, row_format=RowFormat.prompt_response)
    try:
        row_format = detect_format(row, file.columns)
    except RowError as error:  # the whole file is meant, so skipping rows would not help
        raise DataError(f"{file.path}:{line}: {error}.") from None
    return replace(file, row_format=row_format)


def read_conversations(data: DataConfig, cache_dir: Path) -> Iterator[Conversation]:
    """Yield the conversations of the training sources, to train a tokenizer on. Unusable rows are skipped in silence:
    building the tokenized cache reports them.
    """
    files = [file for file in locate_all(data, cache_dir) if file.source < len(data.sources)]
    return (conversation for _, conversation in usable_rows(files, row_limits(data, files)))


def row_limits(data: DataConfig, files: Sequence[DataFile]) -> list[int]:
    """Return the limits of `read_blocks` for the files of all sources: `data.max_samples` counts rows of training."""
    return [data.max_samples if file.source < len(data.sources) else 0 for file in files]


def usable_rows(files: Sequence[DataFile], limits: Sequence[int] = ()) -> Iterator[tuple[str, Conversation]]:
    """Yield ("file:line", conversation) of the rows of files, skipping unusable ones; `limits` as in `read_blocks`."""
    for _, file, block in read_blocks(files, limits):
        reader = reader_of(file.row_format, file.columns)
        for offset, row in rows_of(block):
            with suppress(RowError):
                yield from (
                    (f"{file.path}:{block.first + offset}", conversation)
                    for conversation in reader.read_all(parse_row(row))
                )


def total_bytes(files: Sequence[DataFile]) -> int:
    """Return the bytes of all files on disk together."""
    return sum(file.path.stat().st_size for file in files)


def content_hash(path: Path, cache_dir: Path) -> str:
    """Return the SHA-256 of a file's bytes, cached below `cache_dir` while size, times and inode stay the same. As in
    git, it is not cached for a file changed just now: a change within the clock's resolution would not be seen.
    """
    with reading(path, DataError):
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        # Nodes that share both folders may number the device differently: each number has its own cache file.
        name = hashlib.sha256(f"{status.st_dev} {path.absolute()}".encode(errors="surrogateescape")).hexdigest()[:32]
        hash_file = cache_dir / "hashes" / f"{name}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            remembered = json.loads(hash_file.read_text(encoding="utf-8"))
            if remembered["stamp"] == stamp:
                return str(remembered["sha256"])
        digest = sha256(path)
    if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_S:
        with suppress(OSError):  # a hash that cannot be cached is no error
            hash_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(hash_file, json.dumps({"path": str(path), "stamp": stamp, "sha256": digest}).encode())
    return digest


CODE_VERSION = 2
"""Part of the file's name; raise it when the pairs change."""

# fmt: off
_MODULES = [
    "argparse", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime", "fnmatch",
    "functools", "genericpath", "glob", "gzip", "heapq", "json", "os", "pathlib", "posixpath", "queue",
    "random", "shlex", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap",
]
# fmt: on
"""Of the standard library; few, so that a small model can learn each sentence in minutes."""
_SPOKEN_AS = {"posixpath": "os.path", "genericpath": "os.path"}
_MIN_ANSWER_CHARS = 15
_MAX_ANSWER_CHARS = 90
_PAIRS_FILE = "pairs.jsonl"

_QUESTIONS = {
    "module": (
        "What is the module `{name}` for?",
        "What is {name} for?",
        "What does the module {name} offer?",
        "What does `{name}` do?",
        "Explain `{name}`.",
        "Tell me about {name}.",
    ),
    "class": (
        "What is `{name}`?",
        "What is the class {name} for?",
        "When would I use `{name}`?",
        "What does `{name}` do?",
        "Explain `{name}`.",
        "Tell me about {name}.",
    ),
    "function": (
        "What does `{name}` do?",
        "What does {name} do?",
        "What is `{name}` for?",
        "When would I call {name}?",
        "Explain `{name}`.",
        "Tell me about {name}.",
    ),
}


def pairs_file(cache_dir: Path) -> Path:
    """Return the JSONL file of quickstart's example data: questions and answers (keys prompt, response) made of the
    docstrings of Python's standard library, written at first use.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    # The version alone does not say it: distributions ship the library whole, in parts or patched.
    build_id = hashlib.sha256(f"{sys.version} {library}".encode()).hexdigest()[:8]
    name = f"python-{platform.python_version()}-{build_id}-v{CODE_VERSION}"
    folder = cache_dir / "docstrings" / name

    def build(building: Path) -> None:
        pairs = list(derive_pairs(library))
        if not pairs:
            raise DataError(
                "'{folder}' holds no Python sources to take docstrings from. Use another Python installation, or "
                "name files of your own under data.sources.",
                folder=library,
            )
        with open(building / _PAIRS_FILE, "w", encoding="utf-8") as file:
            for question, answer in pairs:
                file.write(json.dumps({"prompt": question, "response": answer}, ensure_ascii=False) + "\n")

    build_once(folder, build, lambda built: (built / _PAIRS_FILE).is_file())
    return folder / _PAIRS_FILE


def derive_pairs(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs from the docstrings of a Python library directory, several questions for each
    object, in an order that depends on names only. The files are parsed, never imported.
    """
    answers: dict[str, tuple[str, str]] = {}
    files = [file for module in _MODULES for file in (library / f"{module}.py", *(library / module).glob("*.py"))]
    for path in sorted(file for file in files if file.is_file()):
        module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        if "._" in module:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old escapes in the library's own files
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError, OSError):
                continue  # a distribution's library may be patched
        for name, kind, docstring in _documented(tree, _SPOKEN_AS.get(module, module)):
            if answer := _first_sentence(docstring):
                answers.setdefault(name, (kind, answer))
    seen: set[str] = set()
    for name, (kind, answer) in sorted(answers.items()):
        if answer not in seen:  # one answer, one object: nothing to be confused with
            seen.add(answer)
            for form in _QUESTIONS[kind]:
                yield form.format(name=name), answer


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, kind, docstring) of an AST node called `name` and of its public members, recursively."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    if docstring := ast.get_docstring(node):
        yield name, kind, docstring
    for child in [] if kind == "function" else node.body:
        child_name = getattr(child, "name", "_")
        if not child_name.startswith("_"):
            yield from _documented(child, f"{name}.{child_name}")


def _first_sentence(docstring: str) -> str:
    """Return a docstring's first sentence on one line; "" if there is none of a length that serves as an answer."""
    paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
    # A first paragraph such as "wrap(text, width) -> list" repeats the signature; the next one speaks.
    spoken = [part for part in paragraphs if part and not re.match(r"^[\w.]+\([^)]*\)( *-> *[^.]*)?$", part)]
    sentence = re.split(r"(?<=\.) (?=[A-Z])", spoken[0])[0].replace("``", "`") if spoken else ""
    useful = _MIN_ANSWER_CHARS <= len(sentence) <= _MAX_ANSWER_CHARS and sentence.endswith(".")
    return sentence if useful and sentence.isprintable() else ""


_CHECKED_ROWS = 1000
"""Rows of each file that are checked before the model is loaded."""
_CHECKED_BYTES = 1 << 20
"""About as much of a file is read for them."""
_SHOWN_ERRORS = 3
"""Errors of one file that are reported in full."""
_CHECK_S = 3.0
"""Seconds after which no further file is opened."""


def check_sources(data: DataConfig, wrong_places: Collection[str], problems: Problems) -> str:
    """Check the first rows of every local file and add what is wrong to `problems`. Return a sentence if time allowed
    only some of the files, else "". `wrong_places`: sources to skip, such as "data.sources[0]", as they are wrong.
    """
    until = time.monotonic() + _CHECK_S
    looked = total = 0
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            location = f"{name}[{index}]"
            if source.hub or source.format is RowFormat.docstrings or location in wrong_places:
                continue
            files = problems.attempt(files_of, source) or []
            total += len(files)
            for path in files:
                if looked and time.monotonic() > until:
                    break
                looked += 1
                file = DataFile(path, index, source.format, dict(source.columns))
                problems.attempt(_check_file, file, source, location, data.on_bad_row, problems)
    if looked == total:
        return ""
    return tr(
        "The first rows of {looked} of {total} files were read; the others are read by `toolkit prepare`.",
        looked=f"{looked:,}",
        total=f"{total:,}",
    )


def _check_file(file: DataFile, source: SourceConfig, location: str, on_bad_row: OnBadRow, problems: Problems) -> None:
    """Check the columns and the first rows of a file: raise a DataError if all of it is unusable, else add the errors
    of its rows to `problems`. `location`: its source for messages, such as "data.sources[0]".
    """
    block = next(blocks(file.path, _CHECKED_BYTES, file.columns.values()), None)
    most = min(_CHECKED_ROWS, source.max_samples or _CHECKED_ROWS)
    rows = [(block.first + offset, row) for offset, row in islice(rows_of(block), most)] if block else []
    if block is None or not rows:
        raise DataError("{path} holds no row.", path=file.path)
    if wrong := _missing_column(source, [row for _, row in rows], location, str(file.path)):
        raise DataError(wrong)
    with_known_format = with_format(file, block)
    reader = reader_of(with_known_format.row_format, file.columns) if with_known_format else None
    errors = []
    for line, row in rows:
        try:
            parse_row(row) if reader is None else reader.read_all(parse_row(row))
        except RowError as error:
            errors.append(DataError(f"{file.path}:{line}: {error}."))
    if on_bad_row is OnBadRow.skip and len(errors) < len(rows):
        return  # training counts them, and stops at data.max_bad_fraction
    for wrong_row in errors[:_SHOWN_ERRORS]:
        problems.add(wrong_row)
    if len(errors) > _SHOWN_ERRORS:
        sentence = tr(
            "{path}: {count} more of its first {rows} rows cannot be used.",
            path=file.path,
            count=len(errors) - _SHOWN_ERRORS,
            rows=len(rows),
        )
        problems.add(DataError(sentence))


def _missing_column(source: SourceConfig, rows: list[Any], location: str, path: str) -> str:
    """Return an error sentence for a name in the source's `columns` that none of the rows (or their messages) has as a
    key; "" if all are there or no row can be parsed. `location`, `path`: for the sentence.
    """
    names: dict[str, None] = {}  # an ordered set
    for row in rows:
        try:
            parsed = parse_row(row)
        except RowError:
            continue
        if isinstance(parsed, dict):
            lists = [value[:20] for value in parsed.values() if isinstance(value, list)]
            messages = [item for value in lists for item in value if isinstance(item, dict)]
            names |= {key: None for mapping in (parsed, *messages) for key in mapping if isinstance(key, str)}
    for ours, theirs in source.columns.items():
        if names and theirs not in names:
            sentence = tr(
                "{place}.columns: {field} = {name}, but no row of {path} has '{name}'; there are {names}.",
                place=location,
                field=ours,
                name=theirs,
                path=path,
                names=", ".join(f"'{name}'" for name in list(names)[:10]),
            )
            return joined(sentence, did_you_mean(theirs, names))
    return ""


def check_distinct(data: DataConfig, files: Sequence[DataFile], hashes: Sequence[str] | None = None) -> None:
    """Raise a DataError if two sources read the same file (by inode, so links count), or, with `hashes` of the files,
    the same content. The same file with other `columns` or another format is allowed.
    """
    identities: Sequence[Hashable] = hashes or [
        (status.st_dev, status.st_ino) for status in (os.stat(file.path) for file in files)
    ]
    seen: dict[Hashable, list[DataFile]] = {}
    training = len(data.sources)
    for file, identity in zip(files, identities, strict=True):
        # Other columns or another format make other samples of the same rows, such as a translation in both directions.
        others = seen.setdefault((identity, tuple(sorted(file.columns.items()))), [])
        for other in others:
            formats = {other.row_format, file.row_format}
            if other.source == file.source or (len(formats) > 1 and RowFormat.auto not in formats):
                continue
            first, second = (
                f"data.sources[{each.source}]"
                if each.source < training
                else f"data.validation[{each.source - training}]"
                for each in (other, file)
            )
            named = f"{file.path}" if other.path == file.path else f"{other.path} = {file.path}"
            if other.source < training <= file.source:
                raise DataError(
                    "{second} is also training data ({first}): {files}. A validation loss on trained rows says "
                    "nothing. Use other rows for validation, or remove data.validation: data.validation_fraction then "
                    "holds out some rows.",
                    first=first,
                    second=second,
                    files=named,
                )
            raise DataError(
                "{first} and {second} read the same file: {files}. Remove one of them. To train its rows more often, "
                "set `weight` (weight: 2 takes each row twice per epoch).",
                first=first,
                second=second,
                files=named,
            )
        if all(other.source != file.source for other in others):
            others.append(file)


def formats_and_sizes(data: DataConfig) -> tuple[list[RowFormat], list[int]]:
    """Return (formats of the local files, bytes of text of each conversation in their first rows, ascending)."""
    until, formats, sizes = time.monotonic() + _CHECK_S, set[RowFormat](), list[int]()
    for file in local_files(data):
        block = next(blocks(file.path, _CHECKED_BYTES, file.columns.values()), None)
        if (
            block is None
            or (with_known_format := with_format(file, block)) is None
            or (sizes and time.monotonic() > until)
        ):
            continue
        formats.add(with_known_format.row_format)
        reader = reader_of(with_known_format.row_format, with_known_format.columns)
        for _, row in islice(rows_of(block), min(_CHECKED_ROWS, file.max_rows or _CHECKED_ROWS)):
            with suppress(RowError):
                for conversation in reader.read_all(parse_row(row)):
                    sizes.append(sum(len(str(message["content"]).encode()) for message in conversation.messages))
    return sorted(formats), sorted(sizes)


BYTES_PER_TOKEN = 4
"""Of a row as it is in its file, roughly, in English and in Chinese."""
_ESTIMATE_S = 1.0


def estimated_samples(data: DataConfig, most: int) -> tuple[int, int] | None:
    """Return about (samples, sequences) of an epoch, from a second of reading rows and sizes, without a tokenizer; None
    if there are more than `most` sequences, or if the data are not local files that can be read in that time.
    """
    until = time.monotonic() + _ESTIMATE_S
    is_split = not data.validation
    training_share = 1.0 - data.validation_fraction if is_split and not data.validation_rows else 1.0
    rows = size = 0.0
    for source in data.sources:
        if source.hub or source.format is RowFormat.docstrings:
            return None
        weight = training_share * (source.mean_weight if source.weights else source.weight)
        left = source.max_samples or sys.maxsize
        try:
            for path in files_of(source):
                for whole_block in blocks(path, _CHECKED_BYTES, source.columns.values()) if left else ():
                    block, count = first_of(whole_block, left)
                    left -= count
                    rows_of_block = list(rows_of(block))
                    content = block.content
                    length = (
                        len(content) if isinstance(content, bytes) else sum(len(str(row)) for _, row in rows_of_block)
                    )
                    rows, size = rows + weight * len(rows_of_block), size + weight * length
                    if _sequences(data, rows, size) > most or time.monotonic() > until:
                        return None
                    if not left:
                        break
        except ToolkitError:
            return None  # told by the check of the files
    if data.max_samples:
        rows, size = (value * min(1.0, data.max_samples * training_share / max(rows, 1.0)) for value in (rows, size))
    if is_split and data.validation_rows:
        rows, size = (value * max(0.0, 1.0 - data.validation_rows / max(rows, 1.0)) for value in (rows, size))
    return round(rows), _sequences(data, rows, size)


def _sequences(data: DataConfig, rows: float, size: float) -> int:
    """Return about how many sequences `rows` rows of together `size` bytes become; packed ones are full."""
    if data.packing is Packing.none:
        return round(rows)
    return math.ceil(min(rows, size / BYTES_PER_TOKEN / data.max_length))
