"""Data of a language model: its chat encoder, tokenized caches, and their plans of packed sequences."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config import objective, schema
from toolkit.config.mesh import micro_rows, with_micro_batch
from toolkit.data import sampler, tokenize
from toolkit.data.loader import Layout
from toolkit.data.plans import PackingPlan, takes_each_once
from toolkit.data.sources import read_conversations
from toolkit.data.store import BAD_ROWS, TokenizedCache
from toolkit.disk import check_no_symlinks
from toolkit.distributed.process_group import check_alike
from toolkit.messages import DataError, say, warn
from toolkit.models import attention, chat, directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.targets import TokenTargets
    from toolkit.models.classifier import Head


@dataclass(kw_only=True, slots=True)
class LanguageData:
    """Encoder, samples and plans of a run; ranks of a node share the files."""

    encoder: chat.AnyChatEncoder
    train: TokenizedCache
    validation: TokenizedCache | None
    packing: schema.Packing
    """How samples become sequences: the recipe's setting, or grouped if the model does not support packed ones."""
    layout: Layout
    """How the plans' sequences become rows of a micro-batch."""
    train_plan: PackingPlan
    """Sequences of the training split, called rows in language_batches.py."""
    validation_plan: PackingPlan | None
    report: tokenize.PrepareReport
    """What became of the rows of the sources."""
    reference: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Split -> log-probability of each sample's answer by the reference model, if computed before training."""
    targets: dict[str, "TokenTargets"] = field(default_factory=dict)
    """Split -> which tokens have a teacher, if not all do, and the teacher's scores, if they are stored."""

    @property
    def identity(self) -> dict[str, str]:
        """Return digests of the training samples and of their division into rows (the name of the plan's directory)."""
        plan = self.train_plan.folder
        return {"store": self.train.content, "rows": plan.name if plan else self.packing.value}

    def split(self, name: str) -> tuple[TokenizedCache, PackingPlan]:
        """Return the samples of "train" or "validation", which must be there, and the plan of their rows."""
        is_train = name == "train"
        store, plan = (self.train, self.train_plan) if is_train else (self.validation, self.validation_plan)
        assert store is not None and plan is not None
        return store, plan

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows hold samples that share a prefix."""
        return any(plan is not None and plan.num_shared for plan in (self.train_plan, self.validation_plan))

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
        """Return the padding token's id, or the end token's without one, as padding is never trained."""
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(end if pad is None else pad)


def head_of(cfg: schema.RunConfig, data: LanguageData) -> "Head | None":
    """Return the classifier's head that the task needs, None for a language model."""
    if not cfg.task.has_head:
        return None
    from toolkit.models.classifier import Head

    return Head(tuple(objective.score_labels(cfg) or data.report.labels), data.pad_id)


def load_data(cfg: schema.RunConfig, encoder: chat.AnyChatEncoder | None = None) -> LanguageData:
    """Open the tokenized caches, which are built if they do not exist, and report what became of the rows. ModelError
    or DataError if the tokenizer or the data cannot be used. `encoder`: of `build_encoder`, the default.
    """
    data = load_data_with(cfg, encoder or build_encoder(cfg))
    _print_report(data.report, cfg.data)
    if data.packing is not cfg.data.packing:
        from toolkit.models.packable import report_grouped

        report_grouped(reason_not_to_pack(cfg))
    if objective.shares_prompts(cfg) and data.layout is Layout.alone:
        say(
            "Both answers of a pair are computed with their prompt: {reason} (data.share_prefixes).",
            reason=reason_not_to_pack(cfg),
        )
    if data.train_plan.num_shared:
        from toolkit.data.prefixes import sharing_line

        say(sharing_line(cfg, data.train, data.train_plan))
    max_samples, validation = cfg.evaluate.max_samples, data.validation
    if validation is not None and 0 < max_samples < len(validation):
        say(
            "Evaluations take {count} of {all} validation samples, the same ones each time (evaluate.max_samples; "
            "0 takes all).",
            count=f"{max_samples:,}",
            all=f"{len(validation):,}",
        )
    return data


def reason_not_to_pack(cfg: schema.RunConfig) -> str:
    """Return why the model cannot be trained on packed sequences, "" if it can."""
    from toolkit.models import packable

    return packable.reason_not_to_pack(cfg.model, cfg.data.max_length, cfg.tuning.method)


def load_data_with(cfg: schema.RunConfig, encoder: chat.AnyChatEncoder) -> LanguageData:
    """Open the tokenized caches, which are built if they do not exist, and plan their rows; without a report."""
    train, validation, report = tokenize.build_caches(cfg, encoder)
    if cfg.preference.loss is schema.PreferenceLoss.kto:
        from toolkit.data.mismatched import MismatchedCache

        train = MismatchedCache(train.folder, "train", cfg.data.max_length)
        if validation is not None:
            validation = MismatchedCache(validation.folder, "validation", cfg.data.max_length)
    packing, layout = _packing_and_layout(cfg)

    def plan(store: TokenizedCache, sources: list[schema.SourceConfig]) -> PackingPlan:
        """Return the plan of a split's rows; `sources`, [] for validation, say how often each sample is taken."""
        most = 0 if store is train else cfg.evaluate.max_samples  # samples that are taken; 0: all
        size = objective.data_unit(cfg)[1]  # samples that share a row: 2 of a preference pair
        if packing is schema.Packing.none and size == 1 and takes_each_once(store, sources, most):
            return PackingPlan(len(store))
        from toolkit.data.packing import plan_sequences

        planned = plan_sequences(
            store,
            packing,
            max_length=cfg.data.max_length,
            micro_per_gpu=micro_rows(with_micro_batch(cfg)),
            window=cfg.data.packing_window,
            classes=sampler.length_classes(cfg.data.curriculum, cfg.data.max_length) if store is train else [],
            seed=cfg.run.seed,
            sources=sources,
            most=most,
            size=size,
            share=cfg.data.share_prefixes and not has_targets(cfg),
            cache_dir=Path(cfg.prepare.dir),
        )
        if not objective.shares_prompts(cfg) or layout is Layout.alone:
            return planned
        from toolkit.data.prefixes import share_prompts

        return share_prompts(store, planned, Path(cfg.prepare.dir))

    sources = cfg.data.sources
    if cfg.distill.general_share:
        from toolkit.tasks.distill import weighted_sources

        sources = weighted_sources(cfg, train)
    return LanguageData(
        encoder=encoder,
        train=train,
        validation=validation,
        packing=packing,
        layout=layout,
        train_plan=plan(train, sources),
        validation_plan=None if validation is None else plan(validation, []),
        report=report,
    )


def _packing_and_layout(cfg: schema.RunConfig) -> tuple[schema.Packing, Layout]:
    """Return how samples become sequences, and these rows of a batch. Packing, and answers that share the tokens of
    their prompt, need a model that keeps samples of a row apart; with others samples are grouped at most.
    """
    packing, shares_prompts = cfg.data.packing, objective.shares_prompts(cfg)
    is_packed = packing is schema.Packing.packed
    if not is_packed and not shares_prompts:
        return packing, Layout.alone
    if reason_not_to_pack(cfg):
        return schema.Packing.grouped if is_packed else packing, Layout.alone
    can_join = shares_prompts and attention.computes_segments(cfg)
    return packing, Layout.joined if can_join else Layout.packed


def has_targets(cfg: schema.RunConfig) -> bool:
    """Whether batches have columns of a teacher for each token: whether it teaches the token, or its stored scores."""
    is_distilled = cfg.task.kind is schema.TaskKind.distill
    return is_distilled and (bool(cfg.distill.top_k) or not cfg.distill.teacher)


def build_encoder(cfg: schema.RunConfig) -> chat.AnyChatEncoder:
    """Return the recipe's chat encoder, with a tokenizer that is loaded, or trained on the data."""
    cache_dir, model = Path(cfg.prepare.dir), cfg.model
    check_no_symlinks(cache_dir, DataError, tokenize.FOLDERS)
    if model.init is schema.Init.pretrained:
        if model.trust_remote_code:
            directory.trust_code(model.path)
        directory.read_config(model.path)
        from toolkit.models import quantized

        quantized.check_readable(model.path)

    def texts() -> Iterator[str]:
        for conversation in read_conversations(cfg.data, cache_dir):
            yield from (str(message["content"]) for message in conversation.messages)

    if folder := model.tokenizer or model.path:
        from toolkit.models import tokenizer_files

        tokenizer = tokenizer_files.load_tokenizer(folder, family=model.family, chat_template=model.chat_template)
    else:
        tokenizer = chat.fit_tokenizer(texts, model.shape.vocab_size, cache_dir)
        if model.chat_template:
            from toolkit.models.named_templates import use_template

            use_template(tokenizer, model.chat_template)
    return chat.chat_encoder(tokenizer, model.original_labels, cfg.data.train_thinking)


def _print_report(report: tokenize.PrepareReport, data: schema.DataConfig) -> None:
    """Report what became of the sources' rows, whether the cache is new or reused."""
    if report.is_new:
        say("Tokenized {rows} rows in {seconds} s.", rows=f"{report.rows_read:,}", seconds=f"{report.seconds:.1f}")
    report.print_limits(data)
    report.print_dropped()
    report.print_longer(data)
    if report.divided:
        say(
            "{count} conversations became {samples} samples: the chat template, or the tokenizer, writes earlier "
            "answers otherwise once another turn follows. data.train_on=last trains the last answer of each only.",
            count=f"{report.divided:,}",
            samples=f"{report.divided_samples:,}",
        )
    if report.systems:
        say(
            "{count} rows have a system message or tools, which this model's format does not support: dropped.",
            count=f"{report.systems:,}",
        )
    if report.unused:
        say("Columns that are not read: {names}.", names=", ".join(report.unused))
    if report.message_keys:
        names = ", ".join(f"{key} ({count:,})" for key, count in report.message_keys.items())
        say("Keys of messages that are not read: {names}.", names=names)
    if report.bad_rows:
        say("The rows that cannot be used are listed in {file}.", file=Path(report.folder) / BAD_ROWS)
    if missing := [label for label, count in report.labels.items() if not count]:
        warn("No training sample has the label {labels}: it cannot be learned.", labels=", ".join(missing))
    report.print_duplicates()


_BINS = 40


def split_card(store: TokenizedCache) -> dict[str, Any]:
    """Return counts and a histogram of samples' lengths; bin i has lengths > edges[i] and <= edges[i + 1]."""
    lengths = store.lengths()
    longest = int(lengths.max(initial=1))
    width = -(-longest // _BINS)
    edges = np.arange(0, longest + width, width)
    counts, _ = np.histogram(lengths, edges + 1)  # NumPy's bins include the lower edge instead
    return {
        "fingerprint": store.fingerprint,
        "samples": len(store),
        "tokens": store.num_tokens,
        "trained_tokens": store.num_trained_tokens,
        "shortest": int(lengths.min(initial=longest)),
        "median": int(np.median(lengths)) if len(lengths) else 0,
        "longest": longest,
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }


def check_same_data(cfg: schema.RunConfig, data: LanguageData) -> None:
    """Raise DataError on every rank if the nodes have different data. A collective."""
    identity = data.identity
    facts = {
        "data: training samples": f"{len(data.train):,} ({identity['store'][:12]})",
        "data: training sequences": f"{len(data.train_plan):,} ({identity['rows'][:12]})",
    }
    if (validation := data.validation) is not None:
        facts["data: validation samples"] = f"{len(validation):,} ({validation.fingerprint[:12]})"
    check_alike(cfg.distributed, facts, DataError)
