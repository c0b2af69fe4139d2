"""A block of rows to a part: ids, mask and counts of its rows. What the tokenizing processes do. A part's name hashes
the block's content and every rule, so an interrupted build finds the parts that still hold.
"""

import hashlib
import json
import os
import pickle
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain, groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit import children
from toolkit.config.objective import data_unit
from toolkit.config.schema import RowFormat, RunConfig, TooLong
from toolkit.data import readers
from toolkit.data.formats import Conversation, RowReader, mark_trained, reader_of
from toolkit.data.rows import parse_row
from toolkit.messages import DataError, RowError, current_language, tr
from toolkit.sample_types import ChatEncoder, Encoded

CODE_VERSION = 9
"""Part of a part's and of a cache's name; raise it when ids, masks or counts would differ, or a row be rejected."""

EXAMPLES = 5
TEXTS = {RowFormat.text, RowFormat.classify, RowFormat.embed}
"""Formats whose rows may be plain texts."""
_BATCH_ROWS = 512
_BATCH_CHARS = 1 << 22
"""So much text is tokenized at once: tokens take about a hundred times the memory of their text while that lasts."""
_MOST_MESSAGES = 2000
"""Of a row: a chat template writes a conversation once more for each of its answers."""
_MOST_TEXT = 1 << 26
"""Characters of all the samples of a row, which repeat each other where only the last answer of one is trained."""
_EXCERPT_CHARS = 200
_SUMMED = (
    *("longer", "truncated", "turns_dropped", "cut", "split", "divided", "divided_samples", "systems"),
    *("unasked", "unanswered"),
)
"""Fields of `RowCounts` that `add` sums."""


class RowPosition(NamedTuple):
    """A row's position relative to the first line of its block, wherever that is in the file."""

    offset: int
    """Its line minus the first of the block."""
    ordinal: int
    """Rows of the block before it; several items of a JSON array can share a line."""


@dataclass(slots=True)
class RowCounts:
    """What became of some rows."""

    dropped: dict[str, int] = field(default_factory=dict)
    """Rows of which nothing, or not all, was used, by reason."""
    longer: int = 0
    """Rows with a sample of more than `data.max_length` tokens, whatever became of it."""
    longest: int = 0
    """Tokens of the longest of these."""
    truncated: int = 0
    """Samples that lost their oldest turns or their end."""
    turns_dropped: int = 0
    """Turns that these lost."""
    cut: int = 0
    """Samples that lost their end: of the last answer or of a plain text, with its end token."""
    split: int = 0
    """Conversations that became several samples for their length."""
    divided: int = 0
    """Conversations that became several samples, as earlier answers are written otherwise once a turn follows."""
    divided_samples: int = 0
    systems: int = 0
    """Rows whose system message or tools were left out because the model's format has no place for them."""
    unasked: int = 0
    """Rows whose first turn is the assistant's, so that it learns to speak before anything is asked."""
    unanswered: int = 0
    """Rows whose last turn has no answer, and is not used."""
    unused: list[str] = field(default_factory=list)
    """Columns that were not read, no more than a hundred."""
    message_keys: dict[str, int] = field(default_factory=dict)
    """Keys of messages that were not read, and in how many messages."""

    def add(self, other: "RowCounts") -> None:
        """Add the counts of other rows to these."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.unused = list(dict.fromkeys([*self.unused, *other.unused]))[:100]
        for counts, theirs in ((self.dropped, other.dropped), (self.message_keys, other.message_keys)):
            for name, count in theirs.items():
                counts[name] = counts.get(name, 0) + count


@dataclass(slots=True)
class PartCounts(RowCounts):
    """What became of the rows of a part."""

    rows: int = 0
    bad: list[tuple[RowPosition, str, str]] = field(default_factory=list)
    """Rows that cannot be used: place, reason, excerpt."""
    dropped_rows: dict[str, list[RowPosition]] = field(default_factory=dict)
    """The first few of those that were dropped, by reason."""
    too_long: list[tuple[RowPosition, int]] = field(default_factory=list)
    """With too_long=error: the first row that is too long, and its tokens."""
    labels: list[str] = field(default_factory=list)
    """Labels of the samples, in the order in which they came; a sample's value is a number of these."""

    _last: dict[str, RowPosition] = field(default_factory=dict)

    def note_row(self, kind: str, row: RowPosition) -> bool:
        """Note an event of a row, and return whether it is new: a row counts once, even if several samples have it."""
        is_new = self._last.get(kind) != row
        self._last[kind] = row
        return is_new

    def drop(self, reason: str, row: RowPosition) -> None:
        """Count a row that is skipped for `reason`: once, however many of its samples are."""
        if not self.note_row(reason, row):
            return
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        rows = self.dropped_rows.setdefault(reason, [])
        if len(rows) < EXAMPLES:
            rows.append(row)

    def reject(self, row: RowPosition, reason: RowError, value: object) -> None:
        """List an unusable row once in `bad`, with the reason and an excerpt of `value`, its content in the file."""
        if not self.bad or self.bad[-1][0] != row:
            # A character has at most four bytes.
            text = value[: 4 * _EXCERPT_CHARS].decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
            self.bad.append((row, str(reason), text.strip()[:_EXCERPT_CHARS]))


@dataclass(slots=True)
class Part:
    """The samples of a block of rows, concatenated."""

    ids: NDArray[Any]
    """Unsigned integers, [tokens]."""
    trained: NDArray[np.bool_]
    """Whether the loss covers each, [tokens]."""
    lengths: NDArray[np.uint32]
    """Tokens of each sample, [samples]."""
    lines: NDArray[np.uint32]
    """Line of the row that each sample comes from, minus the block's first, [samples]."""
    rows: NDArray[np.uint32]
    """Ordinal of that row in the block, [samples]; several samples of a row follow each other."""
    hashes: NDArray[np.uint64]
    """Of each row that gave a sample, see `row_hashes`, [rows with a sample]."""
    values: NDArray[np.float32]
    """What rows say of their answers, or the numbers of their labels, [samples], or nothing, [0]."""
    counts: PartCounts


_Sample = tuple[RowPosition, Encoded, float | None]
"""A sample, its row, and what that says of it."""
_ReadRow = tuple[RowPosition, object, Conversation]
"""What is learned from a row, or a part of that; with the row as it is in the file."""


class PartBuilder:
    """Makes parts and keeps them in a folder."""

    def __init__(self, encoder: ChatEncoder, cfg: RunConfig, folder: Path) -> None:
        """Keep what decides how rows become samples, and a hash key of it."""
        self.encoder, self.folder, data = encoder, folder, cfg.data
        self.labels, (_, samples_per_unit) = cfg.classify.labels, data_unit(cfg)
        self.texts = max(2, samples_per_unit)
        """Most texts of a row that are used: two answers of a pair, or query, positive and `embed.negatives` more."""
        self.limit, self.too_long, self.train_on = data.max_length, data.too_long, data.train_on
        # The language is that of the reasons of bad rows. Rules that are not in use add nothing: earlier parts hold.
        rules = [CODE_VERSION, encoder.fingerprint, self.limit, self.too_long, self.train_on, current_language()]
        rules += [list(self.labels)] if self.labels else []
        rules += [self.texts] if self.texts > 2 else []
        rules += [encoder.text_key] if encoder.text_key else []
        self._key = repr(rules).encode()

    def path(self, file: readers.DataFile, block: readers.Block) -> Path:
        """Return the file of a block's part, named by a hash of its content and of all that decides the samples."""
        digest = hashlib.sha256(self._key + repr((file.row_format, sorted(file.columns.items()))).encode())
        digest.update(block.content if isinstance(block.content, bytes) else pickle.dumps(block.content, 4))
        return self.folder / f"{digest.hexdigest()[:40]}.npz"

    def make(self, file_block: readers.FileBlock) -> tuple[Path, bool]:
        """Tokenize a block into its part file, unless an undamaged one exists. Return (file, whether it is new)."""
        _, file, block = file_block
        path = self.path(file, block)
        if read_part(path) is not None:
            return path, False
        write_part(path, self.encode(block, reader_of(file.row_format, file.columns)))
        return path, True

    def encode(self, block: readers.Block, reader: RowReader) -> Part:
        """Tokenize a block, unparsed lines or rows of a table (data/readers.py, `read_blocks`), whose format `reader`
        knows. Return its samples as flat arrays, and counts of what became of its rows. The part is appended to the
        cache unchanged: `TokenizedCache[sample]` (data/store.py) reads ids and mask from it.
        """
        counts, ids, trained = PartCounts(), array("I"), bytearray()
        lengths, lines, ordinals, values = array("I"), array("I"), array("I"), array("f")
        rows = ((RowPosition(offset, number), value) for number, (offset, value) in enumerate(readers.rows_of(block)))
        while batch := list(islice(rows, _BATCH_ROWS)):
            samples = self._samples_of(batch, reader, counts)
            if reader.gives_pairs:
                samples = _complete_groups(samples, self.texts)
            for row, (sample_ids, sample_mask), value in samples:
                ids.extend(sample_ids)
                trained.extend(sample_mask)
                lengths.append(len(sample_ids))
                lines.append(row.offset)
                ordinals.append(row.ordinal)
                if value is not None:
                    values.append(value)
        counts.message_keys = dict(reader.skipped)
        tokens = np.frombuffer(ids, np.uint32).astype(id_dtype(self.encoder.vocab_size), copy=False)
        mask, sizes = np.frombuffer(trained, np.bool_), np.frombuffer(lengths, np.uint32)
        rows_of_samples = np.frombuffer(ordinals, np.uint32)
        hashes = row_hashes(tokens, mask, sizes, rows_of_samples)
        of_samples = np.frombuffer(values, np.float32)
        return Part(tokens, mask, sizes, np.frombuffer(lines, np.uint32), rows_of_samples, hashes, of_samples, counts)

    def _samples_of(
        self, batch: list[tuple[RowPosition, Any]], reader: RowReader, counts: PartCounts
    ) -> Iterator[_Sample]:
        """Yield the samples of rows (position, content in the file), and add what became of the rows to `counts`."""
        read_rows = self._read_rows(batch, reader, counts)
        # About _BATCH_CHARS of text are encoded at once: a new group begins where the characters so far exceed a
        # multiple of it. (The last entry of `chars_before` is the sum of all, and begins no row.)
        chars_before = accumulate((_num_chars(conversation) for _, _, conversation in read_rows), initial=0)
        for _, group in groupby(zip(chars_before, read_rows, strict=False), key=lambda pair: pair[0] // _BATCH_CHARS):
            rows_of_group = [read_row for _, read_row in group]
            for (row, content, conversation), encoded in self._encode_or_reject(rows_of_group, counts):
                if self.too_long is TooLong.error and len(encoded[0]) > self.limit:
                    counts.too_long = counts.too_long or [(row, len(encoded[0]))]
                    continue
                try:
                    samples = self._fit_to_length(conversation, encoded, row, counts)
                except RowError as error:
                    counts.reject(row, error, content)
                    continue
                value = conversation.value
                if conversation.label is not None:
                    value = _label_index(conversation.label, counts.labels)
                yield from ((row, sample, value) for sample in samples)

    def _read_rows(self, batch: list[tuple[RowPosition, Any]], reader: RowReader, counts: PartCounts) -> list[_ReadRow]:
        """Return (position, content, conversation) of each conversation to train in some rows, with its loss flags set.
        Rows that are skipped are counted, and so are parts of the others that are not used.
        """
        counts.rows += len(batch)
        read: list[_ReadRow] = []
        columns_seen: set[tuple[frozenset[str], bool]] = set()  # rows with the same ones need not be looked at again
        for row, value in batch:
            try:
                parsed = parse_row(value)
                all_texts = reader.read_all(parsed)
                texts = self._first_texts(all_texts)
                conversations = list(chain.from_iterable(self._conversations_of(text, counts) for text in texts))
            except RowError as error:
                counts.reject(row, error, value)
                continue
            leaves_all_negatives = len(texts) == 2 and len(all_texts) > 2  # with embed.negatives=0
            if isinstance(parsed, dict) and (columns := (frozenset(parsed), leaves_all_negatives)) not in columns_seen:
                columns_seen.add(columns)
                unused = reader.unused(parsed) + (["negatives"] if leaves_all_negatives else [])
                counts.add(RowCounts(unused=unused))
            if len(texts) > 1 and texts[0] == texts[1]:
                same = tr("both texts are the same") if texts[0].is_input_only else tr("both answers are the same")
                counts.drop(same, row)
                continue
            if not conversations:
                counts.drop(tr("no token the loss covers"), row)
                continue
            self._count_messages_left_out(texts[0], counts)
            read += [(row, value, conversation) for conversation in conversations]
        return read

    def _count_messages_left_out(self, conversation: Conversation, counts: PartCounts) -> None:
        """Count a conversation that loses its system or tools, that begins with an answer or ends with a question."""
        roles = [message["role"] for message in conversation.messages]
        drops_tools = self.encoder.drops_tools and bool(conversation.tools)
        drops_system = self.encoder.drops_system and "system" in roles
        counts.systems += drops_tools or drops_system
        if not conversation.is_input_only and not conversation.is_text:
            turns = [role for role in roles if role != "system"]
            counts.unasked += turns[0] == "assistant"
            counts.unanswered += turns[-1] != "assistant"

    def _first_texts(self, texts: list[Conversation]) -> list[Conversation]:
        """Return those of a row's texts that are used, the first `self.texts`: its only one, two answers of a pair, or
        query, positive and negatives; RowError if there are too few negatives.
        """
        if self.texts > 2 and len(texts) < self.texts:
            raise RowError(
                "it has {count} negatives, fewer than embed.negatives = {wanted}. Add some, or remove the row",
                count=len(texts) - 2,
                wanted=self.texts - 2,
            )
        return texts[: self.texts]

    def _conversations_of(self, conversation: Conversation, counts: PartCounts) -> list[Conversation]:
        """Return the conversations that become samples for one of a row: those that train its answers; itself if it is
        only read, as by a classifier. RowError if its label is none of `classify.labels`.
        """
        if not conversation.is_input_only:
            return self._conversations_to_train(conversation, counts)
        if self.labels and conversation.label is not None and conversation.label not in self.labels:
            raise RowError(
                "the label '{label}' is none of classify.labels ({labels})",
                label=conversation.label[:40],
                labels=", ".join(self.labels),
            )
        return [conversation]

    def _conversations_to_train(self, conversation: Conversation, counts: PartCounts) -> list[Conversation]:
        """Return the conversations that train a row's answers, with the `loss` of their messages set; RowError if they
        are too large.

        Mostly it is one. Several are needed if the encoder trains the last message only (`mark_trained` gives one for
        each trained answer), or if the chat template renders earlier answers otherwise once another turn follows
        (`ChatEncoder.divide`; only these are counted as divided).
        """
        if len(conversation.messages) > _MOST_MESSAGES:
            raise RowError(
                "a conversation of {count} messages; at most {most} can be used. Split it over several rows",
                count=f"{len(conversation.messages):,}",
                most=f"{_MOST_MESSAGES:,}",
            )
        trained = list[Conversation]()
        num_divided = num_parts = 0
        for marked in mark_trained(conversation, self.train_on, self.encoder.only_last):
            parts = self.encoder.divide(marked.messages, marked.tools)
            trained += [replace(marked, messages=messages) for messages in parts]
            if len(parts) > 1:
                num_divided += 1
                num_parts += len(parts)
        if len(trained) > 1 and sum(map(_num_chars, trained)) > _MOST_TEXT:
            raise RowError(
                "{count} answers, each with all that is said before it, come to more than {most} million "
                "characters. Split the conversation over several rows",
                count=len(trained),
                most=_MOST_TEXT >> 20,
            )
        # Only now, as a row that is rejected counts for nothing else.
        counts.divided += num_divided
        counts.divided_samples += num_parts
        return trained

    def _encode_or_reject(self, read: list[_ReadRow], counts: PartCounts) -> Iterator[tuple[_ReadRow, Encoded]]:
        """Yield each row with its token ids and mask; rows that cannot be encoded are counted instead. All are encoded
        at once, which is fast; if one fails, one by one, to find which.
        """
        try:
            encoded = self._encode_all([conversation for _, _, conversation in read])
        except RowError:
            encoded = []
        if encoded:
            yield from zip(read, encoded, strict=True)
            return
        for row, value, conversation in read:
            try:
                yield (row, value, conversation), self._encode_all([conversation])[0]
            except RowError as error:
                counts.reject(row, error, value)

    def _encode_all(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Return ids and mask of each conversation. The mask of one that is only read (`is_input_only`) marks the last
        token, at which a classifier's score or an embedding is taken. That is, of a text, where the tokenizer itself
        ends it; of a conversation without a last answer, where one would begin.
        """
        complete = [conversation for conversation in conversations if _is_complete(conversation)]
        encodings = iter(
            self.encoder.encode_many(
                [conversation.messages for conversation in complete], [conversation.tools for conversation in complete]
            )
        )
        if not any(conversation.is_input_only for conversation in conversations):  # then all are complete
            return list(encodings)
        encoded = []
        for conversation in conversations:
            is_complete = _is_complete(conversation)
            ids = next(encodings)[0] if is_complete else self.encoder.prompt(conversation.messages, conversation.tools)
            if conversation.is_text:  # in place of the end token that a text to be trained has
                ids = [*ids[:-1], *self.encoder.after_text]
            encoded.append((ids, [index == len(ids) - 1 for index in range(len(ids))]))
        return encoded

    def _fit_to_length(
        self, conversation: Conversation, encoded: Encoded, row: RowPosition, counts: PartCounts
    ) -> list[Encoded]:
        """Return the samples of an encoded conversation: itself if it fits into `data.max_length` and anything in it is
        trained, else what `data.too_long` makes of it. Skipped rows are counted.
        """
        length = len(encoded[0])
        samples = [encoded] if length else []
        if length > self.limit:
            if counts.note_row("longer", row):
                counts.longer += 1
            counts.longest = max(counts.longest, length)
            samples = []
            if self.too_long in (TooLong.split, TooLong.truncate):
                from toolkit.data.too_long import Shortener

                shortener = Shortener(self.encoder, self.limit)
                if self.too_long is TooLong.split:
                    return shortener.split(conversation, encoded, row, counts)
                samples = shortener.truncated(conversation, encoded, counts)
            if not samples:
                counts.drop(tr("longer than data.max_length = {limit}", limit=self.limit), row)
                return []
        if conversation.is_input_only and samples:  # its mask marks no token to be trained
            return samples
        usable = [sample for sample in map(trainable, samples) if sample]
        if not usable:
            counts.drop(tr("no token the loss covers"), row)
        return usable


def _complete_groups(samples: Iterable[_Sample], size: int) -> Iterator[_Sample]:
    """Yield the samples of those rows that have all `size` of them, such as both answers of a pair: where one was
    dropped, which is counted already, the others are of no use.
    """
    for _, of_row in groupby(samples, key=itemgetter(0)):
        group = list(of_row)
        if len(group) == size:
            yield from group


def _label_index(label: str, labels: list[str]) -> int:
    """Return the index of a label in `labels`, to which it is appended if it is new."""
    if label not in labels:
        labels.append(label)
    return labels.index(label)


def trainable(encoded: Encoded) -> Encoded | None:
    """Return the sample with its first token untrained, or None if then no token of it is trained."""
    ids, trained = with_first_untrained(*encoded)
    return (ids, trained) if any(trained) else None


def with_first_untrained(ids: list[int], trained: list[bool]) -> Encoded:
    """Return (ids, mask) with the first token untrained: no token before it could predict it."""
    if trained and trained[0]:
        trained = [False, *trained[1:]]
    return ids, trained


def row_hashes(
    ids: NDArray[Any], trained: NDArray[np.bool_], lengths: NDArray[np.uint32], rows: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return a hash of the token ids and mask of each row, over all of its samples, [rows with a sample]; rows of equal
    content have equal hashes, whatever their format. `ids`, `trained`: [tokens]; `lengths`, `rows` (each sample's row,
    ascending): [samples].
    """
    first_samples = np.flatnonzero(np.diff(rows, prepend=-1))  # of each row
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))  # of each sample in `ids`
    id_bytes, mask_bytes, size = memoryview(ids.tobytes()), memoryview(trained.tobytes()), ids.itemsize
    digests = bytearray()
    row_bounds = [*offsets[first_samples].tolist(), len(ids)]
    for begin, end in pairwise(row_bounds):
        digest = hashlib.blake2b(id_bytes[begin * size : end * size], digest_size=8)
        digest.update(mask_bytes[begin:end])
        digests += digest.digest()
    return np.frombuffer(digests, np.uint64)


def _is_complete(conversation: Conversation) -> bool:
    """Whether a conversation is a text or ends with an answer, as all that are trained do; others end as prompts."""
    return not conversation.is_input_only or conversation.is_text or conversation.messages[-1]["role"] == "assistant"


def _num_chars(conversation: Conversation) -> int:
    """Return the characters of a conversation's contents and reasoning."""
    return sum(len(m["content"]) + len(m.get("reasoning_content", "")) for m in conversation.messages)


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type that holds every token id, uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_part(path: Path, part: Part) -> None:
    """Write a part file (.npz) atomically: under a temporary name, then renamed."""
    building = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(building, "wb") as file:
            arrays = {name: getattr(part, name) for name in ("ids", "lengths", "lines", "rows", "hashes", "values")}
            # Without what `note_row` needs while a part is made.
            counts = {name: value for name, value in asdict(part.counts).items() if name != "_last"}
            account = np.frombuffer(json.dumps(counts).encode(), np.uint8)
            np.savez(file, trained=np.packbits(part.trained), account=account, **arrays)
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def read_part(path: Path) -> Part | None:
    """Return the part of a file, None if it is missing or damaged (the zip container has a checksum for each array)."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("ids", "lengths", "lines", "rows", "hashes", "values")}
            trained = np.unpackbits(stored["trained"], count=len(arrays["ids"])).view(np.bool_)
            counts = json.loads(stored["account"].tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    # JSON has lists in the place of tuples.
    counts["bad"] = [(RowPosition(*row), reason, excerpt) for row, reason, excerpt in counts["bad"]]
    counts["too_long"] = [(RowPosition(*row), length) for row, length in counts["too_long"]]
    dropped_rows = counts["dropped_rows"].items()
    counts["dropped_rows"] = {reason: [RowPosition(*row) for row in rows] for reason, rows in dropped_rows}
    part = Part(**arrays, trained=trained, counts=PartCounts(**counts))
    return part if int(part.lengths.sum()) == len(part.ids) else None


class BuiltPart(NamedTuple):
    """A part file that is ready, with the block of rows that it was made of."""

    file_number: int
    file: readers.DataFile
    block: readers.Block
    path: Path
    is_new: bool

    def place(self, row: RowPosition) -> str:
        """Return `readers.place_of` a row, for errors."""
        return readers.place_of(self.file.path, *self.block.line_and_item(*row, in_error=True))


def make_parts(blocks: Iterable[readers.FileBlock], maker: PartBuilder, num_workers: int) -> Iterator[BuiltPart]:
    """Yield each block's part, in order, made by `num_workers` processes or found; DataError if one was killed."""
    maker.folder.mkdir(parents=True, exist_ok=True)
    try:
        for file_block, path_and_is_new in children.in_order(num_workers, maker.make, blocks):
            yield BuiltPart(*file_block, *path_and_is_new)
    except BrokenProcessPool:
        raise DataError(
            "A tokenizing process was killed, most likely by the system for lack of memory (see "
            "`dmesg`). What was finished is kept: the same command continues from there. With less "
            "memory: prepare.num_workers={fewer}.",
            fewer=max(1, num_workers // 2),
        ) from None
