"""Samples and counts as text for a terminal: what is trained, what is context, what is padding."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit import secrets
from toolkit.config import mesh, objective, schema
from toolkit.data import sampler, sources, store, tokenize
from toolkit.data.plans import PackingPlan
from toolkit.messages import DataError, printable, tr
from toolkit.tables import text_table

_BAR = 40

Style = Mapping[str, tuple[str, str]]
"""What is put before and after a stretch of tokens of a kind, if anything: colours, or brackets without them."""
COLOURS: Style = {
    "trained": ("\x1b[1;32m", "\x1b[0m"),
    "special": ("\x1b[36m", "\x1b[0m"),
    "padding": ("\x1b[90m", "\x1b[0m"),
    "removed": ("\x1b[1;31m", "\x1b[0m"),
    "added": ("\x1b[1;32m", "\x1b[0m"),
}
BRACKETS: Style = {"trained": ("⟦", "⟧"), "removed": ("[-", "-]"), "added": ("{+", "+}")}
_AROUND = 6
"""Equal tokens that are shown on either side of a difference."""


def style_of(color: str) -> Style:
    """Return the style for color=always, never or auto: colour on a terminal, unless NO_COLOR is set."""
    on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return COLOURS if color == "always" or (color == "auto" and on_terminal) else BRACKETS


def _in_style(kind: str, text: str, style: Style) -> str:
    """Return a text between the style's markers (colours or brackets) for its kind, such as "trained"."""
    begin, end = style.get(kind, ("", ""))
    return f"{begin}{text}{end}"


def legend(style: Style) -> str:
    """Return a line that shows the kinds of tokens, each in its colour."""
    words = {
        "trained": tr("trained"),
        "context": tr("context"),
        "special": tr("special token"),
        "padding": tr("padding"),
    }
    return " · ".join(_in_style(kind, word, style) for kind, word in words.items())


def colored_spans(tokenizer: Any, ids: Sequence[int], trained: Sequence[bool]) -> list[tuple[str, str]]:
    """Return a sample's text as (kind, text) spans; kind is trained, context or special. `ids`, `trained`: its tokens
    and loss mask, [tokens]; special tokens are shown by their names.
    """
    special_ids = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    spans: list[tuple[str, str]] = []
    tokens = [(int(token), bool(is_trained)) for token, is_trained in zip(ids, trained, strict=True)]
    for is_trained, stretch in groupby(tokens, key=lambda token_and_mask: token_and_mask[1]):
        parts = []
        for is_special, group in groupby((token for token, _ in stretch), key=special_ids.__contains__):
            group_ids = list(group)
            if is_special:
                parts.append(("special", "".join(map(str, tokenizer.convert_ids_to_tokens(group_ids)))))
            else:
                text = tokenizer.decode(group_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                parts.append(("context", text))
        # A trained end token keeps the colour of what is trained.
        spans += [("trained", "".join(text for _, text in parts))] if is_trained else parts
    return [(kind, printable(text)) for kind, text in spans]


def marked(text: Iterable[tuple[str, str]], style: Style) -> str:
    """Return the (kind, text) spans of a sample as one text, each span coloured or bracketed by its kind."""
    return "".join(_in_style(kind, part, style) for kind, part in text)


def token_diff(tokenizer: Any, trained: Sequence[int], served: Sequence[int], style: Style) -> str:
    """Return how two token sequences differ, those of training and of serving: the first difference as ids, then all
    as text, styled as removed where it is only in `trained`, and as added where it is only in `served`.
    """
    texts: list[str] = []
    first_difference = ""
    matcher = SequenceMatcher(None, trained, served, autojunk=False)
    for kind, begin, end, served_begin, served_end in matcher.get_opcodes():
        trained_ids, served_ids = trained[begin:end], served[served_begin:served_end]
        if kind == "equal":
            shown = [trained_ids]
            if len(trained_ids) > 2 * _AROUND:  # only what is next to a difference: before the first one, the end
                shown = [trained_ids[:_AROUND] if texts else [], trained_ids[-_AROUND:]]
            texts.append("…".join(printable(tokenizer.decode(part)) for part in shown))
            continue
        first_difference = first_difference or tr(
            "at token {place}: {ids} -> {others}", place=begin, ids=list(trained_ids[:5]), others=list(served_ids[:5])
        )
        for name, part in (("removed", trained_ids), ("added", served_ids)):
            texts += [_in_style(name, printable(tokenizer.decode(part)), style)] if part else []
    return f"{first_difference}  {''.join(texts)}"


def histogram(lengths: NDArray[np.int64], bins: int = 10) -> list[str]:
    """Return the lines of a histogram of the samples' lengths (tokens), shortest to longest, as bars of characters."""
    longest = int(lengths.max())
    edges = np.unique(np.linspace(lengths.min() - 1, longest, bins + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, edges + 1)  # NumPy's bins begin with their edge, these end with it
    most = max(int(counts.max(initial=0)), 1)
    width = len(f"{longest:,}")
    return [
        f"  {begin + 1:>{width},} - {end:>{width},}  {count:>10,}  {'█' * round(_BAR * count / most)}"
        for begin, end, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    ]


def padding_line(cfg: schema.RunConfig, packing: schema.Packing, cache: store.TokenizedCache, plan: PackingPlan) -> str:
    """Return a sentence on how many rows are planned and how full of tokens they are; "" without packing."""
    if packing is schema.Packing.none:
        return ""
    is_grouped = packing is schema.Packing.grouped  # then a row of the plan is a whole micro-batch
    room = cfg.data.max_length * (mesh.micro_rows(mesh.with_micro_batch(cfg)) if is_grouped else 1)
    taken = int(plan.lengths(cache).sum())
    return tr(
        "{rows} rows of {room} tokens ({packing}), {percent} % of them filled.",
        rows=f"{len(plan):,}",
        room=f"{room:,}",
        packing=packing.value,
        percent=f"{100 * taken / (len(plan) * room):.1f}",
    )


def unit_name(cfg: schema.RunConfig) -> str:
    """Return the translated name of what the data are counted in: samples, or of preference tasks pairs or answers."""
    return {"pairs": tr("pairs"), "answers": tr("answers")}.get(objective.data_unit(cfg)[0], tr("samples"))


def count_lines(
    cfg: schema.RunConfig,
    report: tokenize.PrepareReport,
    packing: schema.Packing,
    cache: store.TokenizedCache,
    plan: PackingPlan,
    held_out: int = 0,
) -> list[str]:
    """Return a table of each source's rows, samples and tokens, and the lengths of the samples of `cache`, as lines.
    `held_out`: samples of the training sources that are validation data.
    """
    _, size = objective.data_unit(cfg)  # samples of a unit, such as two of a pair
    unit = unit_name(cfg)
    heads = (tr("source"), tr("split"), tr("rows"), unit, tr("tokens"), tr("trained"))
    names = [source.path or source.hub or source.format.value for source in (*cfg.data.sources, *cfg.data.validation)]
    rows = []
    for name, source in zip(names, report.sources, strict=True):
        counts = source["rows"], source["samples"] // size, source["tokens"], source["trained_tokens"]
        rows.append((secrets.hide(name), str(source["split"]), *(f"{count:,}" for count in counts)))
    lengths = cache.lengths()
    padding = padding_line(cfg, packing, cache, plan)
    labels = ", ".join(f"{label} {count:,}" for label, count in report.labels.items())
    num_held_out = f"{held_out // size:,}"
    return [
        *text_table(heads, rows),
        *([tr("Held out for validation: {count} {unit}.", count=num_held_out, unit=unit)] if held_out else []),
        *([tr("Training samples of each label: {labels}.", labels=labels)] if labels else []),
        tr("Skipped: {dropped} rows.", dropped=f"{sum(report.dropped.values()):,}"),
        *filter(None, [report.longer_rows(cfg.data)]),
        "",
        tr(
            "Tokens per sample: {least} to {most}, median {median}.",
            least=f"{lengths.min():,}",
            most=f"{lengths.max():,}",
            median=f"{int(sorted(lengths)[len(lengths) // 2]):,}",
        ),
        *histogram(lengths),
        *([padding] if padding else []),
        "",
    ]


def sample_lines(
    cfg: schema.RunConfig,
    tokenizer: Any,
    packing: schema.Packing,
    cache: store.TokenizedCache,
    plan: PackingPlan,
    count: int,
    style: Style,
) -> list[str]:
    """Return the samples of `count` random rows of the plan as text, as lines; the same ones for the same seed."""
    # The cache knows its data by content: the run that made it may have called the same files otherwise.
    paths = [file.path for file in sources.locate_all(cfg.data, Path(cfg.prepare.dir))]
    rows = sampler.Permutation(len(plan), f"show {cfg.run.seed}")(np.arange(min(count, len(plan))))
    lines = [legend(style), ""] if len(rows) else []
    for row in sorted(rows.tolist()):
        filled = 0
        for number, sample in enumerate(plan[row]):
            ids, trained = cache[sample]
            shared = plan.prefixes(row)[number] if plan.shared is not None else 0
            filled += len(ids) - shared
            head = tr(
                "── row {row}: sample {sample} from {where}, {tokens} tokens, {trained} trained",
                row=row,
                sample=sample,
                where=cache.where(sample, paths),
                tokens=len(ids),
                trained=int(trained.sum()),
            )
            lines.append(head + _label(cfg, cache, sample))
            if shared:
                lines.append(_in_style("padding", tr("prefix of the sample above x {count}", count=shared), style))
            lines.append(marked(colored_spans(tokenizer, ids[shared:].tolist(), trained[shared:].tolist()), style))
        if packing is schema.Packing.packed:
            empty = cfg.data.max_length - filled
            lines.append(_in_style("padding", tr("padding x {count}", count=empty), style) if empty else "")
        lines.append("")
    return lines


def _label(cfg: schema.RunConfig, cache: store.TokenizedCache, sample: int) -> str:
    """Return ", " and a sample's role (query, rejected answer, …) or value (label, margin, good or bad answer); ""
    if it has neither. `sample`: its index in the split.
    """
    index = sample % objective.data_unit(cfg)[1]  # in its pair, or in its row's query, positive and negatives
    if cfg.task.kind is schema.TaskKind.embed:
        return ", " + (tr("the query"), tr("the positive"), tr("a negative"))[min(index, 2)]
    role = ""
    if objective.has_pairs(cfg):
        role = ", " + (tr("the rejected answer") if index else tr("the chosen answer"))
    if (values := cache.values([sample])) is None:
        return role
    if cfg.task.kind is schema.TaskKind.classify:
        labels = list(store.read_manifest(cache.folder)["report"]["labels"])
        return ", " + tr("label {label}", label=labels[int(values[0])])
    if cfg.task.kind is schema.TaskKind.reward:
        return role + (", " + tr("margin {margin}", margin=f"{values[0]:g}") if values[0] else "")
    if sample >= len(cache):  # of a `MismatchedCache`
        return ", " + tr("with another sample's answer, for the estimate of the divergence")
    return ", " + (tr("a good answer") if values[0] > 0 else tr("a bad answer"))


def bad_step_lines(file: Path, count: int, style: Style) -> list[str]:
    """Return as lines the first `count` (0: all) samples of a skipped or non-finite step, from the JSON-lines file that
    the run wrote for it; a DataError if it is no such file.
    """
    try:
        with file.open(encoding="utf-8") as content:  # str.splitlines would cut texts at U+2028 and its like too
            step, *rows = [json.loads(line) for line in content]
        lines = [tr("Step {step}: {what}.", step=step["step"], what=step["text"]), legend(style), ""]
        for row in rows[: count or None]:
            lines += [
                tr(
                    "── {where}: rank {rank}, micro-batch {micro_batch} with loss {loss}, {tokens} tokens, "
                    "{trained} trained",
                    where=row["where"],
                    rank=row["rank"],
                    micro_batch=row["micro_batch"],
                    loss=row["loss"],
                    tokens=row["tokens"],
                    trained=row["trained_tokens"],
                ),
                marked(row["text"], style),
                "",
            ]
        if count and len(rows) > count:
            lines.append(tr("{count} more; n=0 shows all.", count=len(rows) - count))
    except PermissionError:
        raise  # the file may be one all the same
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("{file} is no file of a step's samples: {reason}.", file=file, reason=error) from None
    return lines
