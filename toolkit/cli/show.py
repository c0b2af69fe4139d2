"""Show samples as training sees them: which tokens are trained, what was left out, how long they are.

toolkit show recipe=NAME [n=5] [split=train] [color=auto] [key=value …]
toolkit show runs/NAME/logs/bad-step-N.jsonl [n=5] [color=auto]    the samples of a step that went wrong

  n=5          samples to show (rows, where data.packing fills rows with several); 0 shows the counts only
  split=train  train or validation
  color=auto   always, never, or auto: colour on a terminal (unless NO_COLOR is set), brackets elsewhere
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.arguments import named_arguments, non_negative_int, one_of, parse_checked
from toolkit.config.hub import resolve_model_path
from toolkit.config.schema import Packing, RunConfig
from toolkit.errors import ConfigError, DataError
from toolkit.messages import say, tr
from toolkit.secrets import hide

if TYPE_CHECKING:
    from toolkit.data.packing import PackingPlan
    from toolkit.data.preview import Style
    from toolkit.data.store import TokenizedCache
    from toolkit.train.prepared import Prepared

COLORS = ("auto", "always", "never")


def run(words: list[str]) -> int:
    """Show."""
    if words and words[0].endswith(".jsonl") and "=" not in words[0]:
        return _show_step(Path(words[0]), words[1:])
    arguments = parse_checked(words, names=("n", "split", "color"))
    count = non_negative_int(arguments.values, "n", 5)
    split = one_of(arguments.values, "split", ("train", "validation"))
    color = one_of(arguments.values, "color", COLORS)
    cfg = resolve_model_path(arguments.loaded, say).cfg
    from toolkit.train.prepared import prepare_data

    prepared = prepare_data(cfg, speaks=True)
    store, plan = prepared.train, prepared.train_plan
    if split == "validation":
        if prepared.validation is None or prepared.validation_plan is None:
            raise ConfigError(tr("this recipe has no validation data: show split=train."))
        store, plan = prepared.validation, prepared.validation_plan
    style = _style(color)
    say("\n".join([*_counts(cfg, prepared, store, plan), *_samples(cfg, prepared, store, plan, count, style)]))
    return 0


def _style(color: str) -> "Style":
    from toolkit.data.preview import BRACKETS, COLOURS

    on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return COLOURS if color == "always" or (color == "auto" and on_terminal) else BRACKETS


def _show_step(file: Path, words: list[str]) -> int:
    """Show the samples of a step that went wrong, from the file that the run wrote."""
    from toolkit.data.preview import legend, marked

    usage = "toolkit show runs/NAME/logs/bad-step-N.jsonl n=5 color=auto"
    given = named_arguments(words, required=(), optional=("n", "color"), usage=usage)
    count, style = non_negative_int(given, "n", 5), _style(one_of(given, "color", COLORS))
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
        if len(rows) > len(rows[: count or None]):
            lines.append(tr("{count} more; n=0 shows all.", count=len(rows) - count))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(tr("{file} is no file of a step's samples: {reason}.", file=file, reason=error)) from None
    say("\n".join(lines))
    return 0


def _counts(cfg: RunConfig, prepared: "Prepared", store: "TokenizedCache", plan: "PackingPlan") -> list[str]:
    from toolkit.data.preview import histogram, padding_line
    from toolkit.terminal import text_table

    heads = (tr("source"), tr("split"), tr("rows"), tr("samples"), tr("tokens"), tr("trained"))
    names = [source.path or source.hub or source.format.value for source in (*cfg.data.sources, *cfg.data.validation)]
    rows = [
        (
            hide(name),
            str(source["split"]),
            *(f"{source[key]:,}" for key in ("rows", "samples", "tokens", "trained_tokens")),
        )
        for name, source in zip(names, prepared.report.sources, strict=True)
    ]
    report, lengths = prepared.report, store.lengths()
    left_out = sum(report.dropped.values())
    lines = [
        *text_table(heads, rows),
        tr(
            "Left out: {dropped} rows. Truncated: {truncated} samples. Split for their length: {split} rows.",
            dropped=f"{left_out:,}",
            truncated=f"{report.truncated:,}",
            split=f"{report.split:,}",
        ),
        "",
        tr(
            "Tokens per sample: {least} to {most}, median {median}.",
            least=f"{lengths.min():,}",
            most=f"{lengths.max():,}",
            median=f"{int(sorted(lengths)[len(lengths) // 2]):,}",
        ),
        *histogram(lengths, cfg.data.max_length),
    ]
    if line := padding_line(cfg, prepared.packing, store, plan):
        lines.append(line)
    return [*lines, ""]


def _samples(
    cfg: RunConfig, prepared: "Prepared", store: "TokenizedCache", plan: "PackingPlan", count: int, style: "Style"
) -> list[str]:
    import numpy as np

    from toolkit.data.preview import colored_spans, legend, marked, padding_text
    from toolkit.data.sampler import Permutation
    from toolkit.data.sources import locate_all

    # The cache knows its data by content: the run that made it may have called the same files otherwise.
    paths = [file.path for file in locate_all(cfg.data, Path(cfg.prepare.dir), say)]
    chosen = Permutation(len(plan), f"show {cfg.run.seed}")(np.arange(min(count, len(plan))))
    lines = [legend(style), ""] if len(chosen) else []
    for row in sorted(chosen.tolist()):
        filled = 0
        for sample in plan[row]:
            ids, trained = store[sample]
            filled += len(ids)
            lines += [
                tr(
                    "── row {row}: sample {sample} from {where}, {tokens} tokens, {trained} trained",
                    row=row,
                    sample=sample,
                    where=store.where(sample, paths),
                    tokens=len(ids),
                    trained=int(trained.sum()),
                ),
                marked(colored_spans(prepared.tokenizer, ids.tolist(), trained.tolist()), style),
            ]
        if prepared.packing is Packing.packed:
            lines.append(padding_text(cfg.data.max_length - filled, style))
        lines.append("")
    return lines
