"""Tables of scores on benchmarks and checks (`toolkit eval PATH tasks=…`), in a terminal and in a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.messages import tr
from toolkit.report.run import Run


def score_table(scores: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of scores, with standard errors and, if any has one, the base's score."""
    has_base = any("base" in score for score in scores)
    score_heads = [tr("base model"), tr("model"), tr("change")] if has_base else [tr("score")]
    rows = []
    for score in scores:
        value, base = score["value"], score.get("base")
        cells = [_with_error(value, score.get("error"))]
        if has_base:
            base_cell = "" if base is None else _with_error(base, score.get("base_error"))
            cells = [base_cell, *cells, "" if base is None else f"{value - base:+.4f}"]
        rows.append([f"{score['task']} {score['metric']}", f"{score['samples']:,}", *cells])
    return ["", tr("examples"), *score_heads], rows


def tables_of(runs: Sequence[Run]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, heads and rows of a run's evaluations, the newest first; of several runs, of each one's last."""
    tables = []
    for run in runs:
        shown = run.scores if len(runs) == 1 else run.scores[-1:]
        for evaluation in reversed(shown):
            listed = evaluation.get("scores")
            scores = [score for score in listed if _is_valid(score)] if isinstance(listed, list) else []
            if not scores:
                continue
            step, base = evaluation.get("step"), evaluation.get("base")
            facts = [run.name] if len(runs) > 1 else []
            facts += [str(evaluation.get(name) or "") for name in ("model", "time")]
            facts += [tr("step {step}", step=f"{step:,}")] if type(step) is int else []
            facts += [tr("base model {path}", path=base)] if base else []
            tables.append((" · ".join(filter(None, facts)), *score_table(scores)))
    return tables


def _is_valid(score: Any) -> bool:
    """Whether a score can be shown: somebody may have edited the file. Errors may be null, values may not."""
    if not isinstance(score, dict) or not {"task", "metric", "value", "samples"} <= score.keys():
        return False
    numbers = [score["value"], score["samples"], score.get("base", 0)]
    numbers += [score[name] for name in ("error", "base_error") if score.get(name) is not None]
    return all(type(number) in (int, float) for number in numbers)


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
