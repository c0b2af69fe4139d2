"""Inspects a dataset for what harms training (duplicates, control strings of templates, declined and cut answers), and
measures lengths, turns and scripts. One pass over the rows, in as many processes as tokenizing uses.

Near-duplicates: the 5-character shingles of the user's and the assistant's texts, lower-cased and without white space,
are hashed once into 32 bins, each of which keeps its least hash (one-permutation MinHash; an empty bin takes the next
one's). The share of equal bins estimates the Jaccard similarity of two rows, with a standard deviation of about 0.07. A
row is a near-duplicate if that is 0.8 or more to an earlier row with which it shares one of 8 bands of 4 bins (as two
rows of similarity 0.8 do with a probability of 0.985); in a band it is compared with the first row and the one before.

`data_page` is the page of `toolkit data-report`.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit import children
from toolkit.data import formats, readers, rows
from toolkit.data.tokenize import LEAST_BYTES_FOR_PROCESSES, PrepareReport
from toolkit.messages import RowError, read_table, tr, translated
from toolkit.report.page import Section, Table, Tile, short, write_page

SIMILAR = 0.8
_SHINGLE, _BINS, _BANDS = 5, 32, 8
_BATCH_CHARS = 1 << 20
"""Characters of conversations whose lengths, scripts and hashes are computed at once by NumPy."""
EXAMPLES = 5
OTHER = "other"

Place = tuple[int, int, int]
"""Of a row the number of its file, line and item (`readers.place_of`)."""


@dataclass(slots=True)
class Facts:
    """What inspecting some rows has counted; of all rows once merged."""

    rows: int = 0
    bad: int = 0
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, what) -> rows; kinds: unusable, leftover in a question, leftover in an answer, answer."""
    examples: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(kind, what) -> the first few rows, "file:line"."""
    turns: Counter[int] = field(default_factory=Counter)
    """User's messages -> conversations."""
    scripts: Counter[str] = field(default_factory=Counter)
    """Characters by script; digits, signs and white space are `OTHER`."""
    mostly: Counter[str] = field(default_factory=Counter)
    """Rows by the script that most of their letters are of."""
    asked: list[NDArray[np.uint32]] = field(default_factory=list)
    """Characters of the user's messages of each row; as all lists below, an array [rows] for each batch of rows."""
    answered: list[NDArray[np.uint32]] = field(default_factory=list)
    """Characters of the assistant's messages of each row."""
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    """Hash of all messages of each row: equal rows have equal hashes."""
    bins: list[NDArray[np.uint32]] = field(default_factory=list)
    """MinHash of each row, [rows, 32]."""
    places: list[NDArray[np.uint32]] = field(default_factory=list)
    """`Place` of each row, [rows, 3]."""

    def note(self, kind: str, what: str, where: str) -> None:
        """Count a row with the finding `what` of a `kind`, and keep the first few places (`where`) as examples."""
        self.found[kind, what] += 1
        examples = self.examples.setdefault((kind, what), [])
        if len(examples) < EXAMPLES:
            examples.append(where)

    def add(self, other: "Facts") -> None:
        """Merge the facts of later rows into these."""
        self.rows, self.bad = self.rows + other.rows, self.bad + other.bad
        for name in ("found", "turns", "scripts", "mostly"):
            getattr(self, name).update(getattr(other, name))
        for key, places in other.examples.items():
            self.examples[key] = [*self.examples.get(key, []), *places][:EXAMPLES]
        for name in ("asked", "answered", "hashes", "bins", "places"):
            getattr(self, name).extend(getattr(other, name))


@cache
def _script_table() -> tuple[list[str], NDArray[np.uint8]]:
    """Return the names of scripts, and for every Unicode code point the index of its script, [0x110000]."""
    scripts = read_table("extras/data_report.yaml")["scripts"]
    table = np.zeros(0x110000, np.uint8)
    for number, ranges in enumerate(scripts.values(), start=1):
        for interval in ranges:
            first, last = (int(text, 16) for text in interval.split("-"))
            table[first : last + 1] = number
    return [OTHER, *scripts], table


class Inspector:
    """Inspects blocks of rows, in several processes; `special`: the tokenizer's control strings."""

    def __init__(self, special: Iterable[str]) -> None:
        rules = read_table("extras/data_report.yaml")
        texts = {*rules["leftovers"], *(text for text in special if len(text) > 2)}  # shorter ones are in usual texts
        longest_first = sorted(texts, key=len, reverse=True)  # else a regular expression finds the beginning of one
        self.leftovers = re.compile("|".join(re.escape(text) for text in longest_first))
        self.answers = {what: re.compile(re.sub(r"\n\s*", " ", pattern)) for what, pattern in rules["answers"].items()}

    def inspect(self, file_block: readers.FileBlock) -> Facts:
        """Return the facts of a block of rows."""
        number, file, block = file_block
        facts, reader = Facts(), formats.reader_of(file.row_format, file.columns)
        waiting: list[tuple[Place, formats.Conversation]] = []  # rows still to be measured
        size = 0  # their characters
        for ordinal, (offset, row) in enumerate(readers.rows_of(block)):
            line, item = block.line_and_item(offset, ordinal)
            location = readers.place_of(file.path, line, item)
            facts.rows += 1
            try:
                conversations = reader.read_all(rows.parse_row(row))
            except RowError as error:
                facts.bad += 1
                facts.note("unusable", str(error)[:80], location)
                continue
            for conversation in conversations:
                self._inspect_conversation(conversation, location, facts)
            # A row counts once: a preference pair is its first conversation and the messages that only the other has.
            first, *others = conversations
            more = [message for other in others for message in other.messages if message not in first.messages]
            whole_row = replace(first, messages=[*first.messages, *more])
            waiting.append(((number, line, item), whole_row))
            size += sum(len(message["content"]) for message in whole_row.messages)
            if size >= _BATCH_CHARS:
                _add_measures(waiting, facts)
                waiting, size = [], 0
        if waiting:
            _add_measures(waiting, facts)
        return facts

    def _inspect_conversation(self, conversation: formats.Conversation, where: str, facts: Facts) -> None:
        """Count turns, control strings in texts, and patterns (declined, cut, …) of the last answer."""
        messages = conversation.messages
        facts.turns[sum(message["role"] == "user" for message in messages)] += 1
        for is_answer in (False, True):
            texts = (str(message["content"]) for message in messages if (message["role"] == "assistant") is is_answer)
            kind = "leftover in an answer" if is_answer else "leftover in a question"
            for leftover in {match for text in texts for match in self.leftovers.findall(text)}:  # once in a row
                facts.note(kind, leftover, where)
        last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
        if last is not None and not last.get("tool_calls"):  # a call of a tool may have no text
            for what, pattern in self.answers.items():
                if pattern.search(str(last["content"])):
                    facts.note("answer", what, where)


def _add_measures(placed_rows: list[tuple[Place, formats.Conversation]], facts: Facts) -> None:
    """Add lengths, scripts, hashes and MinHashes of rows to the facts. Roles, texts, tools and calls go into the hash,
    which tells equal rows; only the texts of user and assistant, and plain texts, into scripts and MinHash.
    `placed_rows`: the rows, each behind its place.
    """
    texts, asked, answered, hashes = [], [], [], []
    for _, conversation in placed_rows:
        role_texts = [(str(message["role"]), str(message["content"])) for message in conversation.messages]
        asked.append(sum(len(text) for role, text in role_texts if role == "user"))
        answered.append(sum(len(text) for role, text in role_texts if role == "assistant"))
        texts.append("".join(text for role, text in role_texts if role in ("user", "assistant", "text")))
        contents = [*role_texts]  # what must be equal in equal rows
        if conversation.tools:
            contents.append(("tools", json.dumps(conversation.tools, sort_keys=True)))
        calls = [message.get("tool_calls") for message in conversation.messages if message.get("tool_calls")]
        # JSON may hold half of a surrogate pair (\ud83d), which plain UTF-8 does not encode.
        digest = hashlib.blake2b(repr((contents, calls)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    _count_scripts(texts, facts)
    facts.asked.append(np.array(asked, np.uint32))
    facts.answered.append(np.array(answered, np.uint32))
    facts.hashes.append(np.array(hashes, np.uint64))
    facts.bins.append(min_hashes(texts))
    facts.places.append(np.array([file_line_item for file_line_item, _ in placed_rows], np.uint32))


def _code_points(texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Put texts one after the other, so that NumPy counts or hashes the characters of all at once: return their code
    points, and for each of these the index of its text. Of ["ab", "c"] these are [97, 98, 99] and [0, 0, 1].
    """
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    text_indices = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    return points, text_indices


def _count_scripts(texts: list[str], facts: Facts) -> None:
    """Count the characters of each script, and of each text the script that most of its letters are of."""
    names, table = _script_table()
    points, text_indices = _code_points(texts)
    # A number for each pair of a text and a script, so that one bincount counts all pairs.
    pair_numbers = text_indices * len(names) + table[points]
    counts = np.bincount(pair_numbers, minlength=len(texts) * len(names))
    counts = counts.reshape(len(texts), len(names))  # [texts, scripts]; script 0 is OTHER
    for name, count in zip(names, counts.sum(0).tolist(), strict=True):
        facts.scripts[name] += count
    letters = counts[:, 1:]
    main_scripts = np.where(letters.sum(1) > 0, letters.argmax(1) + 1, 0)  # [texts]; OTHER of a text without letters
    facts.mostly.update(names[index] for index in main_scripts.tolist())


def min_hashes(texts: list[str]) -> NDArray[np.uint32]:
    """Return the MinHash of each text, [texts, 32]: rows that share many shingles agree in many of the 32 values.

    A shingle's 64-bit hash is used in two parts: its lowest 5 bits choose the bin, its upper 32 are compared in it.
    """
    hashes, text_indices = _shingle_hashes(texts)
    least = np.full(len(texts) * _BINS, np.iinfo(np.uint32).max, np.uint32)  # the maximum: an empty bin
    bin_numbers = (hashes & np.uint64(_BINS - 1)).astype(np.int64)
    slots = text_indices * _BINS + bin_numbers  # of all texts' bins, one after another
    np.minimum.at(least, slots, (hashes >> np.uint64(32)).astype(np.uint32))
    bins = least.reshape(len(texts), _BINS)
    for _ in range(_BINS):  # an empty bin takes the next one's; the lowest bit, set to 1, marks it as taken over
        empty = bins == np.iinfo(np.uint32).max
        if not empty.any():
            break
        bins = np.where(empty, np.roll(bins, -1, 1) | np.uint32(1), bins)
    return bins


def _shingle_hashes(texts: list[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a hash of every 5-character shingle of each text, and for each hash the index of its text. Texts are
    lower-cased and without white space; a shorter one is padded to 5.

    All texts are one array, so a shingle is hashed as five shifted slices of it: multiply and xorshift, as SplitMix64
    and MurmurHash3 mix their numbers. The factors are odd 64-bit constants of such functions, one per character.
    """
    points, text_indices = _code_points(["".join(text.lower().split()).ljust(_SHINGLE, "\0") for text in texts])
    factors = np.array(
        [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD]
    )
    count = len(points) - _SHINGLE + 1
    hashes = np.zeros(max(count, 0), np.uint64)
    for offset, factor in enumerate(factors.astype(np.uint64)):
        hashes += (points[offset : offset + count].astype(np.uint64) + np.uint64(1)) * factor
        hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(32)
    is_inside = text_indices[:count] == text_indices[_SHINGLE - 1 :]  # first and last character are of the same text
    return hashes[is_inside], text_indices[:count][is_inside]


@dataclass(frozen=True, slots=True)
class Alike:
    """Rows that repeat an earlier row."""

    count: int
    pairs: list[tuple[int, int]]
    """The first few: a row, and the earlier one."""


def alike(facts: Facts) -> tuple[Alike, Alike]:
    """Return the rows that equal an earlier one, and among the others those that are similar to an earlier one."""
    if not facts.hashes:
        return Alike(0, []), Alike(0, [])
    _, firsts, numbers = np.unique(np.concatenate(facts.hashes), return_index=True, return_inverse=True)
    earlier = firsts[numbers]  # for every row the first one with its hash, which may be itself
    rows = np.arange(len(earlier))
    similar = _similar_rows(np.concatenate(facts.bins), rows[earlier == rows])
    return _alike_rows(rows[earlier != rows], earlier), _alike_rows(np.flatnonzero(similar >= 0), similar)


def _alike_rows(rows: NDArray[np.int64], partners: NDArray[np.int64]) -> Alike:
    """Count `rows`, and return the first few with the earlier row that each repeats (`partners`, of every row)."""
    return Alike(len(rows), [(int(row), int(partners[row])) for row in rows[:EXAMPLES]])


def _similar_rows(bins: NDArray[np.uint32], distinct: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for every row the earlier row that it is similar to, or -1, as the docstring of this file describes.
    `bins`: the MinHash of every row, [rows, 32]; `distinct`: the rows to compare, in their order: those that are not
    equal to an earlier one.
    """
    similar = np.full(len(bins), -1, np.int64)
    width = _BINS // _BANDS
    for band in range(_BANDS):
        # The four bins of a band as one value of 16 bytes, so that rows can be sorted by them.
        keys = np.ascontiguousarray(bins[distinct, band * width : (band + 1) * width]).view(f"V{4 * width}").ravel()
        order = np.argsort(keys, kind="stable")  # rows with the same band lie together, in their order
        rows, sorted_keys = distinct[order], keys[order]
        starts = np.flatnonzero(np.append(True, sorted_keys[1:] != sorted_keys[:-1]))  # of each group of equal bands
        first_of_band = np.repeat(rows[starts], np.diff(np.append(starts, len(rows))))  # for every row of `rows`
        row_before = np.append(rows[:1], rows[:-1])
        for partners in (first_of_band, row_before):
            candidates = np.flatnonzero((partners < rows) & (similar[rows] < 0))  # earlier ones, for rows without one
            # In parts, so that the copies of their bins stay small.
            for chunk in np.array_split(candidates, max(1, len(candidates) // 100_000)):
                is_similar = (bins[rows[chunk]] == bins[partners[chunk]]).mean(1) >= SIMILAR
                similar[rows[chunk[is_similar]]] = partners[chunk[is_similar]]
    return similar


def kinds() -> dict[str, str]:
    """Return kind of finding -> its words in the reader's language."""
    return {
        "unusable": tr("the row cannot be used"),
        "leftover in a question": tr("control string of a template in a question"),
        "leftover in an answer": tr("control string of a template in an answer"),
        "answer": tr("the last answer"),
    }


def inspect_files(
    files: Sequence[readers.DataFile], special: Iterable[str] = (), workers: int = 0, limits: Sequence[int] = ()
) -> Facts:
    """Return the facts of the rows of files. `special`: the tokenizer's control strings; `workers`: processes, 0 one
    for each core; `limits`: as of `read_blocks`.
    """
    size, facts = readers.total_bytes(files), Facts()
    count = (workers or len(os.sched_getaffinity(0))) if size >= LEAST_BYTES_FOR_PROCESSES else 1
    for _, part in children.in_order(count, Inspector(special).inspect, readers.read_blocks(files, limits)):
        facts.add(part)
    return facts


def spread(lengths: list[NDArray[Any]]) -> list[str]:
    """Return shortest, median, 95th and 99th percentile and longest of lengths, as texts."""
    values = np.concatenate(lengths) if lengths else np.zeros(1)
    return [f"{int(value):,}" for value in np.percentile(values, [0, 50, 95, 99, 100])]


def data_page(title: str, facts: Facts, files: Sequence[readers.DataFile], prepared: PrepareReport | None) -> str:
    """Return the HTML page of the data report; `prepared`: the report of tokenizing a recipe's
    data, None for a file.
    """
    equal, near = alike(facts)
    places = [file_and_line for part in facts.places for file_and_line in part.tolist()]
    total = len(places)

    def where(row: int) -> str:
        """Return `place_of` a row, by its number over all files."""
        number, *line_and_item = places[row]
        return readers.place_of(files[number].path, *line_and_item)

    repeated = Table(
        [tr("rows that are there more than once"), tr("rows"), tr("share"), tr("first places")],
        [
            _duplicates_row(tr("equal to an earlier row"), equal, total, where),
            _duplicates_row(tr("nearly so"), near, total, where),
        ],
        note=tr(
            "Nearly: 5-character shingles of questions and answers, lower-cased, without white space, have an "
            "estimated Jaccard similarity of {similar} or more (MinHash of 32 values; equal rows are left out).",
            similar=SIMILAR,
        ),
    )
    nothing_found = tr("No control strings of templates, declined or cut answers or unusable rows.")
    sections = [
        Section(id="duplicates", title=tr("Duplicates"), tables=[repeated]),
        Section(
            id="texts",
            title=tr("Texts to look at"),
            tables=[_findings_table(facts)] if facts.found else [],
            empty="" if facts.found else nothing_found,
        ),
        Section(id="lengths", title=tr("Lengths and turns"), tables=_lengths(facts)),
        Section(id="languages", title=tr("Scripts"), tables=[_scripts(facts)]),
        Section(id="files", title=tr("Files"), tables=[Table([tr("file")], [[str(file.path)] for file in files[:60]])]),
    ]
    tiles = [
        Tile(
            tr("Rows"), short(facts.rows), tr("unusable: {count}", count=f"{facts.bad:,}"), "bad" if facts.bad else ""
        ),
        Tile(tr("Duplicates"), short(equal.count), tr("nearly so: {count}", count=f"{near.count:,}")),
    ]
    if prepared is not None:
        share = f"{prepared.trained_tokens / max(prepared.tokens, 1):.1%}"
        tiles.append(Tile(tr("Tokens"), short(prepared.tokens), tr("of the training split")))
        tiles.append(Tile(tr("Trained tokens"), share, tr("{count} tokens", count=short(prepared.trained_tokens))))
    return write_page(title=title, kind=tr("Data report"), head=[], tiles=tiles, sections=sections)


def _duplicates_row(name: str, repeated: Alike, total: int, where: Callable[[int], str]) -> list[str]:
    """Return a row of the table of duplicates; `where`: row number -> "file:line"."""
    pairs = "; ".join(f"{where(row)} = {where(earlier)}" for row, earlier in repeated.pairs)
    return [name, f"{repeated.count:,}", f"{repeated.count / max(total, 1):.2%}", pairs]


def _findings_table(facts: Facts) -> Table:
    """Return the table of findings, the most frequent first, each with its first places."""
    words, rows = kinds(), []
    for (kind, what), count in sorted(facts.found.items(), key=lambda entry: -entry[1])[:100]:
        shown = translated(what) if kind == "answer" else what
        rows.append([words[kind], shown, f"{count:,}", ", ".join(facts.examples[kind, what])])
    return Table([tr("what"), tr("which"), tr("rows"), tr("first places")], rows)


def _lengths(facts: Facts) -> list[Table]:
    """Return tables of the lengths of questions and answers in characters, and of turns per conversation."""
    heads = [tr("characters"), tr("shortest"), tr("median"), "95 %", "99 %", tr("longest")]
    rows = [[tr("questions of a row"), *spread(facts.asked)], [tr("answers of a row"), *spread(facts.answered)]]
    turns = [[str(count), f"{rows:,}"] for count, rows in sorted(facts.turns.items())[:20]]
    return [Table(heads, rows), Table([tr("messages of the user"), tr("conversations")], turns)]


def _scripts(facts: Facts) -> Table:
    """Return the table of scripts: share of characters, and rows mostly written in each."""
    characters = max(sum(facts.scripts.values()), 1)
    rows = [
        [
            tr("digits, signs, white space, others") if name == OTHER else translated(name),
            f"{count / characters:.2%}",
            f"{facts.mostly[name]:,}",
        ]
        for name, count in facts.scripts.most_common()
        if count
    ]
    note = tr("By Unicode's blocks of letters, not by language: Latin is English as well as French.")
    return Table(
        [tr("script"), tr("share of the characters"), tr("rows whose letters are mostly of it")], rows, note=note
    )
