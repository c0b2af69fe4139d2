"""Tokenizer, chat encoder and tokenised stores of a config: what `prepare` and `train` both need. No process group."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.schema import Init, RunConfig
from toolkit.data.prepare import PrepareReport, prepare
from toolkit.data.sources import BadRows, read_training_rows
from toolkit.data.store import Store
from toolkit.messages import tr
from toolkit.models.chat import AnyChatEncoder, chat_encoder
from toolkit.models.folder import read_config
from toolkit.models.tokenizer import fit_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class Prepared:
    """What all ranks of a node read together."""

    encoder: AnyChatEncoder
    """Turns conversations into ids."""
    train: Store
    """Tokenised training split."""
    validation: Store | None
    """Tokenised validation split."""
    report: PrepareReport
    """What became of the rows."""

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

    def say(line: str) -> None:
        if speaks:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    if cfg.model.init is Init.pretrained:
        read_config(cfg.model.path)
    encoder = chat_encoder(_tokenizer(cfg, say), cfg.model.original_labels)
    train, validation, report = prepare(cfg, encoder, say)
    _tell(report, say)
    return Prepared(encoder=encoder, train=train, validation=validation, report=report)


def _tokenizer(cfg: RunConfig, say: Callable[[str], None]) -> "PreTrainedTokenizerBase":
    folder = cfg.model.tokenizer or cfg.model.path
    if folder:
        return load_tokenizer(folder, family=cfg.model.family, chat_template=cfg.model.chat_template)
    cache_dir = Path(cfg.prepare.dir)

    def texts() -> Iterator[str]:
        # Bad rows are reported when the store is built; here they are passed over under `skip`, or stop it at once.
        for row in read_training_rows(cfg.data, cache_dir, say, BadRows()):
            yield from (message["content"] for message in row.messages)

    return fit_tokenizer(texts, cfg.model.shape.vocab_size, cache_dir, say)


def _tell(report: PrepareReport, say: Callable[[str], None]) -> None:
    """Say where the rows went; a dropped row is never silent, whether the store is new or reused."""
    if report.built:
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
    if report.truncated:
        say(
            tr(
                "Cut the beginning of {count} prompts to data.max_length.",
                count=f"{report.truncated:,}",
            )
        )
