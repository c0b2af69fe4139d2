"""Tokenise once: from the recipe's data section to a finished store that all processes map.

The store's name is a fingerprint of everything it depends on, so a stale one is never found. It is made before any
process group exists; whoever comes second waits at the lock (see `build_once`).
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import DataConfig, OnBadRow, RunConfig, SourceConfig, TooLong
from toolkit.data.conversation import Row
from toolkit.data.encode import ChatEncoder, Encoded
from toolkit.data.sources import (
    BadRows,
    content_hash,
    locate,
    read_rows,
    read_training_rows,
)
from toolkit.data.store import Store, StoreWriter, is_complete, read_manifest
from toolkit.distributed.build_once import build_once
from toolkit.errors import DataError, RowError
from toolkit.messages import tr

CODE_VERSION = 1
"""Part of the fingerprint; raise it when a store would come out differently."""

_log = logging.getLogger(__name__).info
_BATCH_ROWS = 512
_EXAMPLES = 5


@dataclass(slots=True)
class PrepareReport:
    """What became of the rows; kept in the manifest, so that a later run can show it too."""

    rows_read: int = 0
    """Rows that could be read, of training and validation files together."""
    train_rows: int = 0
    validation_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """For each reason the first few places, "file:line"; for unusable rows with what is wrong."""
    truncated: int = 0
    """Rows whose prompt lost its beginning."""
    tokens: int = 0
    """Tokens in the training split."""
    trained_tokens: int = 0
    """Tokens in the training split that the loss covers."""
    seconds: float = 0.0
    """Time the build took; of the earlier build if the store is reused."""
    built: bool = False
    """Whether this process built the store."""
    folder: str = ""
    """The store."""

    def drop(self, reason: str, where: str) -> None:
        """Count a row that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(where)


class Prepared(NamedTuple):
    """The finished store's splits (validation is None if there is none) and what became of the rows."""

    train: Store
    validation: Store | None
    report: PrepareReport


def prepare(cfg: RunConfig, encoder: ChatEncoder, say: Callable[[str], None] = _log) -> Prepared:
    """Return the tokenised data, made now if no store with the same fingerprint exists.

    Args:
        cfg: the run; its sections data and prepare and `run.seed` are used.
        encoder: turns messages into ids and mask.
        say: receives messages about waiting for another process.

    Raises:
        DataError: a file or a row cannot be used, nothing is left to train on, or the store cannot be written.
    """
    cache_dir = Path(cfg.prepare.dir)
    inputs = _inputs(cfg, encoder, say)
    fingerprint = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir / "stores" / fingerprint

    def build(building: Path) -> None:
        _Builder(cfg, encoder, say).build(building, {"fingerprint": fingerprint, "inputs": inputs})

    built = build_once(folder, build, is_complete, say)
    manifest = read_manifest(folder)
    report = PrepareReport(**{**manifest["report"], "built": built, "folder": str(folder)})
    validation = Store(folder, "validation") if report.validation_rows else None
    return Prepared(Store(folder, "train"), validation, report)


def _inputs(cfg: RunConfig, encoder: ChatEncoder, say: Callable[[str], None]) -> dict[str, Any]:
    """Return everything the store depends on."""
    data, cache_dir = cfg.data, Path(cfg.prepare.dir)

    def contents(sources: list[SourceConfig]) -> list[list[str]]:
        located = [locate(source, cache_dir, say) for source in sources]
        return [[content_hash(path), row_format.name] for path, row_format in located]

    return {
        "code_version": CODE_VERSION,
        "encoder": encoder.fingerprint,
        "sources": contents(data.sources),
        "validation": contents(data.validation),
        "validation_fraction": 0.0 if data.validation else data.validation_fraction,
        "seed": cfg.run.seed,
        "max_length": data.max_length,
        "too_long": data.too_long.name,
        "on_bad_row": data.on_bad_row.name,
        "max_samples": data.max_samples,
    }


class _Builder:
    """Fills one store."""

    def __init__(self, cfg: RunConfig, encoder: ChatEncoder, say: Callable[[str], None]) -> None:
        self.data: DataConfig = cfg.data
        self.seed, self.cache_dir = cfg.run.seed, Path(cfg.prepare.dir)
        self.encoder, self.say = encoder, say
        self.report = PrepareReport()

    def build(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the store into an empty folder."""
        started, data = time.monotonic(), self.data
        with StoreWriter(folder, self.encoder.vocab_size) as writer:
            bad_rows = BadRows()
            self._write(
                read_training_rows(data, self.cache_dir, self.say, bad_rows),
                bad_rows,
                writer,
            )
            num_train = len(writer)
            self._check_not_empty(num_train, "data.sources")
            if data.validation:
                bad_rows = BadRows()
                rows = read_rows(data.validation, data.on_bad_row, self.cache_dir, self.say, bad_rows)
                self._write(rows, bad_rows, writer)
                self._check_not_empty(len(writer) - num_train, "data.validation")
                splits = {
                    "train": np.arange(num_train),
                    "validation": np.arange(num_train, len(writer)),
                }
            else:
                splits = split_rows(num_train, data.validation_fraction, self.seed)
            report = self.report
            report.train_rows, report.validation_rows = (
                len(splits["train"]),
                len(splits["validation"]),
            )
            counts, lengths = np.array(writer.trained_counts), np.diff(writer.offsets)
            report.tokens = int(lengths[splits["train"]].sum())
            report.trained_tokens = int(counts[splits["train"]].sum())
            report.seconds = time.monotonic() - started
            writer.finish(splits, {**manifest, "report": asdict(report)})

    def _write(self, rows: Iterator[Row], bad_rows: BadRows, writer: StoreWriter) -> None:
        """Encode rows in batches and append those that can be used."""
        while batch := list(islice(rows, _BATCH_ROWS)):
            self.report.rows_read += len(batch)
            for row, encoded in self._encode(batch, bad_rows):
                kept = self._fit(row, *encoded)
                if kept:
                    writer.append(*kept)
        if bad_rows.count:
            reason = tr("cannot be used")
            self.report.dropped[reason] = self.report.dropped.get(reason, 0) + bad_rows.count
            self.report.examples.setdefault(reason, []).extend(bad_rows.examples)

    def _encode(self, batch: list[Row], bad_rows: BadRows) -> list[tuple[Row, Encoded]]:
        """Encode a batch at once; if a row of it cannot be encoded, one by one to find which."""
        try:
            return list(
                zip(
                    batch,
                    self.encoder.encode_many([row.messages for row in batch]),
                    strict=True,
                )
            )
        except RowError:
            pass
        encoded = []
        for row in batch:
            try:
                encoded.append((row, self.encoder.encode(row.messages)))
            except RowError as error:
                if self.data.on_bad_row is OnBadRow.error:
                    raise DataError(f"{row.where}: {error}.") from None
                bad_rows.add(f"{row.where}: {error}.")
        return encoded

    def _fit(self, row: Row, ids: list[int], trained: list[bool]) -> Encoded | None:
        """Return what of a row goes into the store, None if it is left out."""
        # The first token has nothing before it to be predicted from; unmarking it keeps every count exact.
        trained = [False, *trained[1:]]
        if not any(trained):
            self.report.drop(tr("no token the loss covers"), row.where)
            return None
        limit = self.data.max_length
        if len(ids) <= limit:
            return ids, trained
        if self.data.too_long is TooLong.error:
            raise DataError(
                tr(
                    "{where}: {length} tokens, more than data.max_length = {limit}. Raise it, or choose what happens "
                    "to long rows with data.too_long=drop or data.too_long=truncate.",
                    where=row.where,
                    length=len(ids),
                    limit=limit,
                )
            )
        if self.data.too_long is TooLong.drop:
            self.report.drop(tr("longer than data.max_length = {limit}", limit=limit), row.where)
            return None
        if len(ids) - trained.index(True) >= limit:  # at least one token of the prompt must stay
            self.report.drop(
                tr("answer alone longer than data.max_length = {limit}", limit=limit),
                row.where,
            )
            return None
        self.report.truncated += 1
        return ids[-limit:], trained[-limit:]

    def _check_not_empty(self, usable: int, key: str) -> None:
        """Refuse data of which nothing is left."""
        if usable:
            return
        reasons = "".join(
            f"\n  {count} x {reason} ({', '.join(self.report.examples[reason])})"
            for reason, count in self.report.dropped.items()
        )
        raise DataError(
            tr(
                "No trained tokens: none of the {count} rows of {key} can be used.{reasons}",
                count=self.report.rows_read,
                key=key,
                reasons=reasons,
            )
        )


def split_rows(num_rows: int, fraction: float, seed: int) -> dict[str, NDArray[np.int64]]:
    """Return the rows of both splits, ascending: a function of its arguments only.

    Args:
        num_rows: rows to split.
        fraction: share of the validation split; it gets at least one row if this is above 0 and there are two.
        seed: chooses the rows.
    """
    count = min(max(1, round(num_rows * fraction)), num_rows - 1) if fraction > 0 else 0
    chosen = np.zeros(num_rows, dtype=np.bool_)
    chosen[np.random.Generator(np.random.PCG64(seed)).permutation(num_rows)[:count]] = True
    return {"train": np.flatnonzero(~chosen), "validation": np.flatnonzero(chosen)}
