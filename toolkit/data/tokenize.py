"""Tokenize once: from the recipe's data section to a cache that all processes map, named by a fingerprint of all it
depends on. It is made before any process group exists, under a lock; an interrupted build continues with its parts.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.config.files import TABLE_SUFFIXES
from toolkit.config.schema import DataConfig, OnBadRow, RunConfig, TooLong
from toolkit.data import readers, store, tokenize_workers as workers
from toolkit.data.readers import DataFile, place_of
from toolkit.data.sources import check_distinct, content_hash, locate_all, row_limits
from toolkit.data.tokenize_workers import BuiltPart, Part, PartBuilder, RowPosition, make_parts, read_part
from toolkit.distributed.file_lock import built_once, explain_lock_error
from toolkit.launch.ancestors import age_s
from toolkit.messages import ConfigError, DataError, clauses, joined, say, tr, warn
from toolkit.sample_types import ChatEncoder
from toolkit.secrets import hide

FOLDERS = ("stores", "parts", "plans", "tokenizers", "hashes", "docstrings", store.BAD_ROWS)
"""What `prepare.dir` holds; it may hold other things beside them."""
_LENGTH_STEP = 128
"""Tokens to a multiple of which a suggested `data.max_length` is rounded up."""
MOST_LONGER = 0.01
"""More rows than this fraction that are longer than `data.max_length` are a warning."""
TOLERATED_BAD_ROWS = 10
LEAST_BYTES_FOR_PROCESSES = 8 << 20
"""Starting a process takes seconds; less data than this is tokenized at once."""
_OLD_PARTS_S = 7 * 24 * 3600
_opened: set[Path] = set()
"""Stores that this process has opened before."""


def cache_changes(stores: Path, inputs: dict[str, Any]) -> str:
    """Return a sentence on why no cache below `stores` can be reused: which `inputs` (of `_cache_inputs`) differ in the
    most similar one, the latest of these; "" if more than a third or the data files do, as of another recipe's cache.
    """
    candidates: list[tuple[int, float, str, list[str]]] = []  # number of differences, -mtime, name, differing inputs
    for folder in stores.glob("*"):
        if not store.is_complete(folder):
            continue
        inputs_of_cache = store.read_manifest(folder).get("inputs", {})
        differing = [name for name, value in inputs.items() if inputs_of_cache.get(name) != value]
        candidates.append((len(differing), -folder.stat().st_mtime, folder.name, differing))
    if not candidates:
        return ""
    num_differing, _, cache_name, differing = min(candidates)
    if num_differing > len(inputs) // 3 or "files" in differing:
        return ""
    inputs_of_cache = store.read_manifest(stores / cache_name)["inputs"]
    tokenizer = tr("the tokenizer or its chat template")
    words = {"encoder": tokenizer, "texts": tokenizer}
    changes = [words.get(name, f"{name} {inputs_of_cache.get(name)} -> {inputs[name]}") for name in differing]
    return tr(
        "Tokenizing again: since the cache {name} was built, this changed: {changes}.",
        name=cache_name[:8],
        changes=clauses(changes),
    )


@dataclass(slots=True)
class PrepareReport(workers.RowCounts):
    """What became of the rows; kept in the manifest, so that a later run can show it too."""

    rows_read: int = 0
    """Rows of training and validation files together, blank lines excepted."""
    train_samples: int = 0
    validation_samples: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    """For each reason of `dropped` the first few places, "file:line"; for unusable rows with what is wrong."""
    bad_rows: int = 0
    """Rows that could not be used; all are listed in bad_rows.jsonl of the cache."""
    repeated: int = 0
    """Training rows that give the same samples as an earlier training row."""
    repeated_examples: list[str] = field(default_factory=list)
    """The first few, "file:line = file:line"."""
    leaked: int = 0
    """Validation rows that give the same samples as a training row."""
    leaked_examples: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Of a classifier, in the order of its scores: how many training samples have each."""
    tokens: int = 0
    trained_tokens: int = 0
    sources: list[dict[str, Any]] = field(default_factory=list)
    """For each source: name, split, rows, samples, tokens, trained_tokens."""
    seconds: float = 0.0
    """Time the build took; of the earlier build if the cache is reused."""
    parts_kept: int = 0
    """Parts of an interrupted build that were used."""
    built: bool = False
    is_new: bool = False
    """Whether the cache was built since this process began, by whichever rank."""
    folder: str = ""

    def add_part(self, built_part: BuiltPart, counts: workers.PartCounts) -> None:
        """Add the counts of a part, and the file:line of the first rows of each kind of problem."""
        self.rows_read += counts.rows
        self.add(counts)
        for reason, rows in counts.dropped_rows.items():
            self.examples.setdefault(reason, []).extend(map(built_part.place, rows))
        if counts.bad:
            reason = tr("cannot be used")
            self.bad_rows += len(counts.bad)
            self.dropped[reason] = self.bad_rows
            errors = (tr("{place}: {reason}.", place=built_part.place(row), reason=why) for row, why, _ in counts.bad)
            self.examples.setdefault(reason, []).extend(errors)
        for examples in self.examples.values():
            del examples[workers.EXAMPLES :]

    def print_dropped(self) -> None:
        """Print how many rows are skipped for each reason, with the first ones' file:line, and what of rows is odd."""
        for reason, count in self.dropped.items():
            say(
                "Skipped {count} rows: {reason}. First: {examples}",
                count=f"{count:,}",
                reason=reason,
                examples=clauses(self.examples.get(reason, [])),
            )
        if self.unasked:
            warn(
                "{count} rows begin with the assistant: it learns to speak before anything is asked. If that is not "
                "meant, check their roles.",
                count=f"{self.unasked:,}",
            )
        if self.unanswered:
            say("The last turn of {count} rows has no answer, and is not used.", count=f"{self.unanswered:,}")

    def longer_rows(self, data: DataConfig) -> str:
        """Return a sentence on the rows longer than `data.max_length` and what became of them; "" if there are none."""
        if not self.longer:
            return ""
        became = {
            TooLong.truncate: tr(
                "{truncated} samples were shortened, which took {turns} oldest turns and the end of {cut} last answers "
                "or texts",
                truncated=f"{self.truncated:,}",
                turns=f"{self.turns_dropped:,}",
                cut=f"{self.cut:,}",
            ),
            TooLong.split: tr("{count} became several samples", count=f"{self.split:,}"),
            TooLong.drop: tr("they are skipped"),
        }
        return tr(
            "{count} of {rows} rows ({percent} %) are longer than data.max_length = {limit} tokens, the longest "
            "has {longest}. data.too_long={rule}: {became}.",
            count=f"{self.longer:,}",
            rows=f"{self.rows_read:,}",
            percent=percent(self.longer_share),
            limit=f"{data.max_length:,}",
            longest=f"{self.longest:,}",
            rule=data.too_long.value,
            became=became.get(data.too_long, tr("that is an error")),
        )

    @property
    def longer_share(self) -> float:
        """The fraction of the rows that are longer than `data.max_length`."""
        return self.longer / max(self.rows_read, 1)

    def no_trained_tokens(self, key: str) -> DataError:
        """Return the error for data none of whose rows can be used, with the reasons. `key`: where they are set."""
        reasons = [
            f"  {count} x {reason} ({', '.join(self.examples[reason])})" for reason, count in self.dropped.items()
        ]
        if self.longer:
            reasons.append(
                tr(
                    "The longest row has {longest} tokens: set data.max_length={length}, which takes more memory, or "
                    "shorten the rows.",
                    longest=f"{self.longest:,}",
                    length=-(-self.longest // _LENGTH_STEP) * _LENGTH_STEP,
                )
            )
        return DataError(
            "No trained tokens: none of the {count} rows of {key} can be used.{reasons}",
            count=self.rows_read,
            key=key,
            reasons="".join(f"\n{line}" for line in reasons),
        )

    def print_longer(self, data: DataConfig) -> None:
        """Print the sentence of `longer_rows`; as a warning where more than 1 % of the rows are longer."""
        if line := self.longer_rows(data):
            (warn if self.longer_share > MOST_LONGER else say)(line)

    def print_limits(self, data: DataConfig) -> None:
        """Print which limits of rows (`max_samples`) are above what there is."""
        names = [f"data.sources[{number}]" for number in range(len(data.sources))]
        names += [f"data.validation[{number}]" for number in range(len(data.validation))]
        limits = [source.max_samples for source in (*data.sources, *data.validation)]
        rows = [int(source["rows"]) for source in self.sources]
        total = sum(rows[: len(data.sources)])
        # Where data.max_samples has cut the training rows, what is left of a source says nothing of its own limit.
        num_skipped = len(data.sources) if total == data.max_samples else 0
        sources = [*zip(names, limits, rows, strict=True)][num_skipped:]
        for name, limit, count in (*sources, ("data", data.max_samples, total)):
            if count < limit:
                say(
                    "{name}.max_samples = {limit}: there are {count} rows, all of which are used.",
                    name=name,
                    limit=f"{limit:,}",
                    count=f"{count:,}",
                )

    def duplicates(self) -> str:
        """Return a sentence on how many rows are duplicates; "" if none is."""
        if not self.repeated and not self.leaked:
            return ""
        return tr(
            "Duplicates: {training} training rows; {validation} validation rows that are also training rows.",
            training=f"{self.repeated:,}",
            validation=f"{self.leaked:,}",
        )

    def print_duplicates(self) -> None:
        """Print the duplicate rows of training and of validation with the first ones' file:line, a line for each."""
        if self.repeated:
            say(
                "Duplicates: {count} training rows are equal to an earlier one and are trained again. First: "
                "{examples}",
                count=f"{self.repeated:,}",
                examples=clauses(self.repeated_examples),
            )
        if self.leaked:
            warn(
                "{count} validation rows are also training rows: the validation loss will be too low. "
                "Remove them from one of the two. First: {examples}",
                count=f"{self.leaked:,}",
                examples=clauses(self.leaked_examples),
            )


def percent(share: float) -> str:
    """Return a fraction as a percentage without the sign, with two significant digits where it is below 10 %."""
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"


class CachePair(NamedTuple):
    """The finished cache's splits (validation is None if there is none) and what became of the rows."""

    train: store.TokenizedCache
    validation: store.TokenizedCache | None
    report: PrepareReport


def build_caches(cfg: RunConfig, encoder: ChatEncoder) -> CachePair:
    """Return the tokenized data of a run, tokenized now unless `prepare.dir` holds it. Ranks that call it at once wait
    for the one that builds it. DataError if a row is unusable, or nothing is trained.
    """
    if cfg.data.streaming:
        raise ConfigError(tr("data.streaming = true makes no tokenized cache. For this, set data.streaming=false."))
    stores = Path(cfg.prepare.dir) / "stores"
    files = locate_all(cfg.data, Path(cfg.prepare.dir))
    check_distinct(cfg.data, files)
    inputs = _cache_inputs(cfg, encoder, files)
    check_distinct(cfg.data, files, [file[0] for file in inputs["files"]])
    fingerprint = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    folder = stores / fingerprint
    builder = _CacheBuilder(cfg, encoder, files)
    with built_once(folder, store.is_complete, lambda: builder.pace.line) as building:
        if building is not None:  # the cache does not exist yet
            if changes := cache_changes(stores, inputs):
                say(changes)
            builder.build(building, {"fingerprint": fingerprint, "inputs": inputs})
            if _cache_inputs(cfg, encoder, files)["files"] != inputs["files"]:
                raise DataError(tr("A data file was changed while it was being tokenized. Run the same command again."))
    is_built_here = building is not None
    if is_built_here:
        builder.remove_parts()
    builder.report = report = _report_of(folder, is_built_here)
    # The cache may be of a build that was allowed more bad rows.
    builder.check_limit(builder.bytes, folder / store.BAD_ROWS)
    validation = store.TokenizedCache(folder, "validation") if report.validation_samples else None
    return CachePair(store.TokenizedCache(folder, "train"), validation, report)


def _report_of(folder: Path, is_built_here: bool) -> PrepareReport:
    """Return the report of a finished cache. It is new where this process opens it for the first time, and this process
    or, while this one imported or waited for the lock, another rank has built it.
    """
    report = store.read_manifest(folder)["report"]
    is_built_since = (folder / store.MANIFEST).stat().st_mtime > time.time() - age_s()
    is_new = folder not in _opened and (is_built_here or is_built_since)
    _opened.add(folder)
    return PrepareReport(**{**report, "built": is_built_here, "is_new": is_new, "folder": str(folder)})


def prepare_shard(cfg: RunConfig, encoder: ChatEncoder) -> tuple[int, int]:
    """Tokenize the blocks of `prepare.shard` ("2/8": the second of eight shards) into part files, which a later
    `prepare` without shard joins. Return (parts of the shard, how many of them were not there yet).
    """
    number, count = (int(text) for text in cfg.prepare.shard.split("/"))
    builder = _CacheBuilder(cfg, encoder, locate_all(cfg.data, Path(cfg.prepare.dir)))
    own_blocks = (block for index, block in enumerate(builder.blocks()) if index % count == number - 1)
    num_parts = num_new = 0
    try:
        for built_part in make_parts(own_blocks, builder.maker, builder.num_workers):
            check_part(cfg.data, built_part, builder.read(built_part))
            num_parts, num_new = num_parts + 1, num_new + built_part.is_new
    except OSError as error:
        raise explain_lock_error(error, builder.parts) from error
    return num_parts, num_new


def _cache_inputs(cfg: RunConfig, encoder: ChatEncoder, files: list[DataFile]) -> dict[str, Any]:
    """Return everything the tokenized cache depends on, as JSON values; its fingerprint is a hash of them. Inputs that
    came later have no entry where they are not in use, so that earlier caches keep their names.
    """
    data, cache_dir = cfg.data, Path(cfg.prepare.dir)
    most_of_sources = [source.max_samples for source in (*data.sources, *data.validation)]
    return {
        "code_version": workers.CODE_VERSION,
        "encoder": encoder.fingerprint,
        "files": [
            [content_hash(file.path, cache_dir), file.source, file.row_format.name, file.columns] for file in files
        ],
        "training_sources": len(data.sources),
        "validation_fraction": 0.0 if data.validation or data.validation_rows else data.validation_fraction,
        "seed": cfg.run.seed,
        "train_on": data.train_on.name,
        "max_length": data.max_length,
        "too_long": data.too_long.name,
        "on_bad_row": data.on_bad_row.name,
        "max_samples": data.max_samples,
        **({"validation_rows": data.validation_rows} if data.validation_rows and not data.validation else {}),
        **({"max_samples of sources": most_of_sources} if any(most_of_sources) else {}),
        **_version_of_tables(files),
        **({"labels": cfg.classify.labels} if cfg.classify.labels else {}),
        **({"negatives": cfg.embed.negatives} if cfg.embed.negatives else {}),
        **({"texts": encoder.text_key} if encoder.text_key and workers.TEXTS & {f.row_format for f in files} else {}),
    }


def _version_of_tables(files: list[DataFile]) -> dict[str, int]:
    """Return {"tables": version of reading Parquet and Arrow files}, {} if none of them has columns of objects."""
    paths = [file.path for file in files if file.path.suffix.lower() in TABLE_SUFFIXES]
    if not paths:
        return {}
    from toolkit.data.tables import TABLE_VERSION, has_struct_columns

    return {"tables": TABLE_VERSION} if any(map(has_struct_columns, paths)) else {}


class BuildProgress:
    """Prints how much of `total_bytes` of files is tokenized: after 5 s, then every 10 s."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = max(total_bytes, 1)
        self.started = time.monotonic()
        self.next_report = self.started + 5.0
        self.line = ""

    def update(self, done_bytes: int, rows: int, new_bytes: int, new_tokens: int) -> None:
        """Set `line` to the progress, and print it if that is due. `done_bytes`: of the files, input; `new_bytes`,
        `new_tokens`: those of this process, without parts reused from an interrupted build; they give the speed.
        """
        seconds = max(time.monotonic() - self.started, 1e-6)
        seconds_left = (self.total_bytes - done_bytes) / (new_bytes / seconds) if new_bytes else 0
        self.line = tr(
            "Tokenizing: {rows} rows, {percent} %, {rate} tokens/s, about {minutes} min left.",
            rows=f"{rows:,}",
            percent=f"{100 * done_bytes / self.total_bytes:.0f}",
            rate=f"{new_tokens / seconds:,.0f}",
            minutes=f"{seconds_left / 60:.1f}",
        )
        if time.monotonic() >= self.next_report:
            self.next_report = time.monotonic() + 10.0
            say(self.line)


class _CacheBuilder:
    """Builds one tokenized cache: makes or reuses the parts, appends them, and counts what became of the rows."""

    def __init__(self, cfg: RunConfig, encoder: ChatEncoder, files: list[DataFile]) -> None:
        self.data, self.seed = cfg.data, cfg.run.seed
        self.encoder, self.files = encoder, files
        if len(files) > np.iinfo(np.uint16).max:
            raise DataError("{count} data files are more than 65,535. Join some.", count=f"{len(files):,}")
        self.bytes = readers.total_bytes(files)
        self.num_workers = cfg.prepare.num_workers or len(os.sched_getaffinity(0))
        if self.bytes < LEAST_BYTES_FOR_PROCESSES:
            self.num_workers = 1
        self.parts = Path(cfg.prepare.dir) / "parts"
        self.maker = PartBuilder(encoder, cfg, self.parts)
        self.labels = list(cfg.classify.labels)
        self.pace = BuildProgress(self.bytes)
        self.report = PrepareReport()
        self.used: list[Path] = []  # part files that the cache is made of
        self.source_rows = [0] * (len(cfg.data.sources) + len(cfg.data.validation))  # rows read of each source
        self.bad_rows_file = Path(cfg.prepare.dir) / store.BAD_ROWS

    def build(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the cache into an empty directory: parts are appended in order while workers make later ones.
        `manifest`: its first entries. DataError if too many rows are unusable, or a split has no samples.
        """
        started, report, bad_rows_file = time.monotonic(), self.report, folder / store.BAD_ROWS
        # Bytes of the files that are done, and bytes read of the current one, number `file_number`.
        finished_bytes = position = file_number = 0
        new_bytes = new_tokens = 0  # of parts that are made now, by which the progress tells the speed
        with closing(store.CacheWriter(folder, workers.id_dtype(self.encoder.vocab_size))) as writer:
            for built_part in make_parts(self.blocks(), self.maker, self.num_workers):
                while file_number < built_part.file_number:
                    finished_bytes += self.files[file_number].path.stat().st_size
                    file_number, position = file_number + 1, 0
                part = self.read(built_part)
                check_part(self.data, built_part, part)
                self._count_part(built_part, part, bad_rows_file)
                if part.counts.labels:  # a classifier's, which each part numbers by itself
                    part.values = self._label_numbers(part.counts.labels)[part.values.astype(np.int64)]
                writer.append(part, built_part.file_number, built_part.block)
                self.used.append(built_part.path)
                if built_part.is_new:
                    new_bytes += built_part.block.position - position
                    new_tokens += len(part.ids)
                else:
                    report.parts_kept += 1
                position = built_part.block.position
                self.pace.update(finished_bytes + position, report.rows_read, new_bytes, new_tokens)
                self.check_limit(finished_bytes + position, bad_rows_file)
            self.check_limit(self.bytes, bad_rows_file)
            if self.labels and not self.maker.labels:  # not given by the recipe, and numbered as they came
                ordered = sorted(self.labels, key=_label_order)
                writer.number_labels(np.array([ordered.index(label) for label in self.labels], np.float32))
                self.labels = ordered
            index = writer.index()
            first = first_equal(index.hashes)
            splits = self._splits(index, first)
            self._count_samples(index, splits)
            self._count_duplicates(index, first, splits["train"])
            report.seconds = time.monotonic() - started
            files = [{"path": str(file.path), "source": file.source} for file in self.files]
            writer.finish(splits, {**manifest, "files": files, "report": asdict(report)})

    def _label_numbers(self, labels: list[str]) -> NDArray[np.float32]:
        """Return the index of each of a part's labels in `self.labels`, to which new ones are added, [labels]."""
        self.labels += [label for label in labels if label not in self.labels]
        return np.array([self.labels.index(label) for label in labels], np.float32)

    def remove_parts(self) -> None:
        """Delete the part files that are in the finished cache, and those older than a week, of abandoned builds."""
        for path in self.used:
            path.unlink(missing_ok=True)
        for path in self.parts.glob("*"):
            with suppress(OSError):  # another build may remove it at the same time
                if time.time() - path.stat().st_mtime > _OLD_PARTS_S:
                    path.unlink()

    def blocks(self) -> Iterator[readers.FileBlock]:
        """Yield the blocks of rows of all files, within the limits of `max_samples`."""
        return readers.read_blocks(self.files, row_limits(self.data, self.files))

    def read(self, built_part: BuiltPart) -> Part:
        """Return a part from its file; if another build that used it too has removed that, tokenize the block again."""
        part = read_part(built_part.path)
        if part is None:
            path, _ = self.maker.make(readers.FileBlock(built_part.file_number, built_part.file, built_part.block))
            part = read_part(path)
        if part is None:
            raise DataError(
                "{path} was changed or removed while it was being used. Start the same command again; what is "
                "whole is kept.",
                path=built_part.path,
            )
        return part

    def _count_part(self, built_part: BuiltPart, part: Part, bad_rows_file: Path) -> None:
        """Add a part's counts to the report, and its unusable rows to `bad_rows_file` (JSON lines)."""
        self.source_rows[built_part.file.source] += part.counts.rows
        self.report.add_part(built_part, part.counts)
        if part.counts.bad:
            # A file's name need not be UTF-8; such bytes become escapes, which JSON reads back.
            with open(bad_rows_file, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(bad_row(built_part.file.path, built_part.block, *bad) for bad in part.counts.bad)

    def check_limit(self, done_bytes: int, bad_rows_file: Path) -> None:
        """Raise a DataError if more rows are unusable than `data.max_bad_fraction` of all rows, extrapolated from the
        bytes read so far: skipping so many would hide a mistake in the data. Their list then stays in `prepare.dir`.
        """
        report = self.report
        expected_rows = report.rows_read * self.bytes / max(done_bytes, 1)
        if report.bad_rows <= max(TOLERATED_BAD_ROWS, self.data.max_bad_fraction * expected_rows):
            return
        shutil.copyfile(bad_rows_file, self.bad_rows_file)
        raise DataError(
            tr(
                "{bad} of {rows} rows cannot be used, more than data.max_bad_fraction = {fraction} allows. They are "
                "listed in {file}. {examples}",
                bad=f"{report.bad_rows:,}",
                rows=f"{report.rows_read:,}",
                fraction=self.data.max_bad_fraction,
                file=self.bad_rows_file,
                examples="\n".join(["", *report.examples.get(tr("cannot be used"), ())]),
            ).rstrip()
        )

    def _splits(self, index: store.CacheIndex, first: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return {"train", "validation": samples, ascending}; a DataError if a split has none. Validation samples are
        those of `data.validation`, else of training rows that are held out, with all rows that are equal to these, so
        that no validation row is trained. `first`: for each used row, the first row that is equal to it.
        """
        num_training = len(self.data.sources)
        for file in self.files:
            if not self.source_rows[file.source] and not self.data.max_samples:  # which may end before this file
                raise DataError("{path} holds no row.", path=file.path)
        is_training = np.array([file.source < num_training for file in self.files])[index.files]
        if not is_training.any():
            raise self.report.no_trained_tokens("data.sources")
        if self.data.validation:
            if is_training.all():
                raise self.report.no_trained_tokens("data.validation")
            return {"train": np.flatnonzero(is_training), "validation": np.flatnonzero(~is_training)}
        distinct = np.flatnonzero(first == np.arange(len(first)))  # the first one of equal rows
        if self.data.validation_rows >= len(distinct):
            raise DataError(
                "data.validation = {count} rows: there are {all} different rows, and none would be left to train. Take "
                "fewer, or a fraction: data.validation=0.05.",
                count=f"{self.data.validation_rows:,}",
                all=f"{len(distinct):,}",
            )
        distinct_rows = split_rows(
            len(distinct), self.data.validation_fraction, self.seed, count=self.data.validation_rows
        )
        held_out = np.zeros(len(first), dtype=np.bool_)
        held_out[distinct[distinct_rows["validation"]]] = True
        held_out = held_out[first]  # and the rows that are equal to these
        is_validation = held_out[index.used_rows()]  # by sample
        return {"train": np.flatnonzero(~is_validation), "validation": np.flatnonzero(is_validation)}

    def _count_samples(self, index: store.CacheIndex, splits: dict[str, NDArray[np.int64]]) -> None:
        """Add to the report what needs all parts: samples and tokens of each split, label and source. `splits`: name ->
        samples. A DataError if all rows have the same label.
        """
        report, train = self.report, splits["train"]
        report.train_samples, report.validation_samples = len(train), len(splits["validation"])
        report.tokens, report.trained_tokens = int(index.lengths[train].sum()), int(index.trained[train].sum())
        if self.labels:
            if len(self.labels) == 1:
                raise DataError(
                    "all rows have the label '{label}': there is nothing to tell apart. Add rows with other labels.",
                    label=self.labels[0],
                )
            counts = np.bincount(index.values[train].astype(np.int64), minlength=len(self.labels))
            report.labels = dict(zip(self.labels, counts.tolist(), strict=True))
        sources = [*self.data.sources, *self.data.validation]
        of_sample = np.array([file.source for file in self.files])[index.files]
        for number, source in enumerate(sources):
            is_of_source = of_sample == number
            report.sources.append(
                {
                    "name": hide(source.path or source.hub or source.format.value),
                    "split": "train" if number < len(self.data.sources) else "validation",
                    "rows": self.source_rows[number],
                    "samples": int(is_of_source.sum()),
                    "tokens": int(index.lengths[is_of_source].sum()),
                    "trained_tokens": int(index.trained[is_of_source].sum()),
                }
            )

    def _count_duplicates(self, index: store.CacheIndex, first: NDArray[np.int64], training: NDArray[np.int64]) -> None:
        """Add to the report the training rows that equal an earlier one, and the validation rows that equal a training
        row. `first`: for each used row, the first row that is equal to it; `training`: the samples of training.
        """
        rows = index.used_rows()
        is_training = np.zeros(len(first), dtype=np.bool_)
        is_training[rows[training]] = True
        first_samples = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()  # of each row

        def where(row: int) -> str:
            sample = first_samples[row]
            return place_of(self.files[index.files[sample]].path, index.lines[sample], index.items[sample])

        def examples(repeated: NDArray[np.int64]) -> list[str]:
            return [f"{where(row)} = {where(first[row])}" for row in repeated[: workers.EXAMPLES]]

        # Training files are read first, so the first of equal rows is a training row if any of them is.
        repeated = np.flatnonzero(is_training & (first != np.arange(len(first))))
        leaked = np.flatnonzero(~is_training & is_training[first])
        self.report.repeated, self.report.repeated_examples = len(repeated), examples(repeated)
        self.report.leaked, self.report.leaked_examples = len(leaked), examples(leaked)


def bad_row(path: Path, block: readers.Block, row: RowPosition, reason: str, excerpt: str) -> str:
    """Return the line of bad_rows.jsonl for a row of a block that cannot be used."""
    line, item = block.line_and_item(*row, in_error=True)
    location = {"file": str(path), "line": line} | ({"item": item} if item else {})
    return json.dumps(location | {"reason": reason, "excerpt": excerpt}, ensure_ascii=False) + "\n"


def check_part(data: DataConfig, built_part: BuiltPart, part: Part) -> None:
    """Raise a DataError for the first row that is unusable or too long, where the config makes these errors."""
    counts = part.counts
    if counts.bad and data.on_bad_row is OnBadRow.error:
        row, reason, _ = counts.bad[0]
        mend = tr("Such rows are skipped and counted with data.on_bad_row=skip.")
        text = tr("{place}: {reason}.", place=built_part.place(row), reason=reason)
        raise DataError(joined(text, mend))
    if counts.too_long:
        row, length = counts.too_long[0]
        raise DataError(
            "{where}: {length} tokens, more than data.max_length = {limit}. Raise it, or choose what happens "
            "to long rows with data.too_long=drop, truncate or split.",
            where=built_part.place(row),
            length=length,
            limit=data.max_length,
        )


def _label_order(label: str) -> tuple[bool, int, str]:
    """Return the sort key of a class label: numbers in numeric order (9 before 10, by length), then texts."""
    return not label.isdecimal(), len(label) if label.isdecimal() else 0, label


def first_equal(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each row the index of the first row with the same hash, which may be itself, [rows]."""
    _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
    return first[number]


def held_out(num_rows: int, fraction: float) -> int:
    """Return how many of so many rows a fraction keeps for validation: one of two at least, and not all."""
    return min(max(1, round(num_rows * fraction)), num_rows - 1) if fraction > 0 else 0


def split_rows(num_rows: int, fraction: float, seed: int, *, count: int = 0) -> dict[str, NDArray[np.int64]]:
    """Return {"train", "validation": row numbers, ascending}, chosen at random. `fraction`: of validation; if above 0,
    at least one row of two. `count`: rows of validation, in the place of a fraction.
    """
    count = count or held_out(num_rows, fraction)
    is_validation = np.zeros(num_rows, dtype=np.bool_)
    is_validation[np.random.Generator(np.random.PCG64(seed)).permutation(num_rows)[:count]] = True
    return {"train": np.flatnonzero(~is_validation), "validation": np.flatnonzero(is_validation)}
