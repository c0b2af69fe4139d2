"""Tokenizer, chat encoder and tokenised stores of a config: what `prepare` and `train` both need. No process group."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.config.mesh import micro_rows, with_micro_batch
from toolkit.config.schema import Init, Packing, RunConfig, SourceConfig
from toolkit.data.curriculum import length_classes
from toolkit.data.packing import PackingPlan, plan_sequences
from toolkit.data.sources import read_conversations
from toolkit.data.store import BAD_ROWS, TokenizedCache
from toolkit.data.tokenize import FOLDERS, PrepareReport, build_caches
from toolkit.disk import check_no_symlinks
from toolkit.errors import DataError
from toolkit.messages import say, tr
from toolkit.models.chat import AnyChatEncoder, chat_encoder
from toolkit.models.directory import packing_unsupported, read_config, trust_code
from toolkit.models.tokenizer import fit_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class Prepared:
    """What all ranks of a node read together."""

    encoder: AnyChatEncoder
    """Turns conversations into ids."""
    train: TokenizedCache
    """Tokenised training split."""
    validation: TokenizedCache | None
    """Tokenised validation split."""
    packing: Packing
    """How rows are made; not what the recipe says where the model cannot be trained on packed rows."""
    train_plan: PackingPlan
    """Rows of the training split."""
    validation_plan: PackingPlan | None
    """Rows of the validation split."""
    report: PrepareReport
    """What became of the rows."""

    @property
    def train_lengths(self) -> Callable[[NDArray[np.int64]], NDArray[np.int64]] | None:
        """Return what tells the tokens of some rows; None where rows are alike already."""
        plan, store = self.train_plan, self.train
        if self.packing is not Packing.none:
            return None
        return lambda rows: store.lengths(rows if plan.members is None else plan.members[rows])

    def longest_samples(self) -> NDArray[np.int64]:
        """Return the tokens of the longest sample of each row of the training plan, [rows]."""
        lengths, offsets = self.train.lengths(self.train_plan.members), self.train_plan.offsets
        return lengths if offsets is None else np.maximum.reduceat(lengths, offsets[:-1])

    @property
    def source_names(self) -> list[str]:
        """Return the names of all sources by their numbers, as `toolkit show` has them; several may be the same."""
        return [str(source["name"]) for source in self.report.sources]

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the encoder's tokenizer."""
        return self.encoder.tokenizer

    @property
    def pad_id(self) -> int:
        """Return the id that fills up; never trained, so any id serves where the tokenizer has no padding token."""
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(end if pad is None else pad)


def prepare_data(cfg: RunConfig, speaks: bool) -> Prepared:
    """Open the tokenised stores, building them first if nobody has.

    Args:
        cfg: checked config.
        speaks: whether this process tells what it does.

    Raises:
        ModelError: model or tokenizer folder unusable.
        DataError: data unusable.
    """
    tell = say if speaks else _silent
    return prepare_with(cfg, build_encoder(cfg, tell), tell)


def _silent(line: str) -> None:
    """Say nothing."""


def prepare_with(cfg: RunConfig, encoder: AnyChatEncoder, say: Callable[[str], None]) -> Prepared:
    """Do the same with an encoder that is there already."""
    train, validation, report = build_caches(cfg, encoder, say)
    _tell(report, say)
    packing = _packing(cfg, say)

    most = cfg.evaluate.max_samples

    def plan(store: TokenizedCache, sources: list[SourceConfig]) -> PackingPlan:
        return plan_sequences(
            store,
            packing,
            max_length=cfg.data.max_length,
            micro_per_gpu=micro_rows(with_micro_batch(cfg)),
            window=cfg.data.packing_window,
            classes=length_classes(cfg.data.curriculum, cfg.data.max_length) if store is train else [],
            seed=cfg.run.seed,
            sources=sources,
            most=0 if store is train else most,
            cache_dir=Path(cfg.prepare.dir),
            say=say,
        )

    if validation is not None and 0 < most < len(validation):
        say(
            tr(
                "Evaluations take {count} of {all} validation samples, the same ones each time (evaluate.max_samples; "
                "0 takes all).",
                count=f"{most:,}",
                all=f"{len(validation):,}",
            )
        )
    return Prepared(
        encoder=encoder,
        train=train,
        validation=validation,
        packing=packing,
        train_plan=plan(train, cfg.data.sources),
        validation_plan=None if validation is None else plan(validation, []),
        report=report,
    )


def build_encoder(cfg: RunConfig, say: Callable[[str], None]) -> AnyChatEncoder:
    """Return what turns the recipe's conversations into ids.

    Raises:
        ModelError: model or tokenizer folder unusable.
        DataError: the folder for prepared data is not this user's to write to.
    """
    check_no_symlinks(Path(cfg.prepare.dir), DataError, FOLDERS)
    if cfg.model.init is Init.pretrained:
        if cfg.model.trust_remote_code:
            trust_code(cfg.model.path)
        read_config(cfg.model.path)
    return chat_encoder(_tokenizer(cfg, say), cfg.model.original_labels)


def _packing(cfg: RunConfig, say: Callable[[str], None]) -> Packing:
    """Return how rows are made: as asked for, or grouped where the model cannot be trained on packed rows."""
    if cfg.data.packing is not Packing.packed:
        return cfg.data.packing
    reason = packing_unsupported(cfg.model, cfg.data.max_length, cfg.tuning.method)
    if not reason:
        return Packing.packed
    say(
        tr(
            "This model cannot be trained on packed rows: {reason}. Samples of like length share micro-batches instead "
            "(data.packing=grouped).",
            reason=reason,
        )
    )
    return Packing.grouped


def _tokenizer(cfg: RunConfig, say: Callable[[str], None]) -> "PreTrainedTokenizerBase":
    folder = cfg.model.tokenizer or cfg.model.path
    if folder:
        return load_tokenizer(folder, family=cfg.model.family, chat_template=cfg.model.chat_template)
    cache_dir = Path(cfg.prepare.dir)

    def texts() -> Iterator[str]:
        for conversation in read_conversations(cfg.data, cache_dir, say):
            yield from (str(message["content"]) for message in conversation.messages)

    return fit_tokenizer(texts, cfg.model.shape.vocab_size, cache_dir, say)


def _tell(report: PrepareReport, say: Callable[[str], None]) -> None:
    """Say where the rows went; a dropped row is never silent, whether the store is new or reused."""
    if report.is_new:
        say(
            tr(
                "Tokenised {rows} rows in {seconds} s.",
                rows=f"{report.rows_read:,}",
                seconds=f"{report.seconds:.1f}",
            )
        )
    for reason, count in report.dropped.items():
        say(
            tr(
                "Left out {count} rows: {reason}. First: {examples}",
                count=f"{count:,}",
                reason=reason,
                examples="; ".join(report.examples.get(reason, [])),
            )
        )
    for count, sentence in (
        (
            report.truncated,
            tr("{count} samples lost their oldest turns to data.max_length.", count=f"{report.truncated:,}"),
        ),
        (report.split, tr("{count} conversations became several samples.", count=f"{report.split:,}")),
        (
            report.systems,
            tr(
                "{count} rows have a system message or tools, which this model's format has no place for: left out.",
                count=f"{report.systems:,}",
            ),
        ),
        (len(report.unused), tr("Columns that are not read: {names}.", names=", ".join(report.unused))),
        (
            len(report.message_keys),
            tr(
                "Keys of messages that are not read: {names}.",
                names=", ".join(f"{key} ({count:,})" for key, count in report.message_keys.items()),
            ),
        ),
        (
            report.bad_rows,
            tr("The rows that cannot be used are listed in {file}.", file=Path(report.folder) / BAD_ROWS),
        ),
    ):
        if count:
            say(sentence)
    for line in report.duplicate_lines():
        say(line)
