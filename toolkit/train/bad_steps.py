"""What a step that went wrong was made of, in a file that `toolkit show` prints."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.disk import unused_path
from toolkit.distributed.process_group import gather, on_rank0
from toolkit.messages import tr
from toolkit.train.guard import Kind, Trouble
from toolkit.train.step import StepResult

Samples = list[list[list[dict[str, Any]]]]
"""Of each rank, of each micro-batch, each sample as something that JSON can say."""
_NAMED = 3


def record(
    folder: Path, step: int, trouble: Trouble, result: StepResult, samples: Callable[[], Samples]
) -> tuple[str, Path]:
    """Write the samples of a step to logs/bad-step-N.jsonl, the worst micro-batch first. A collective.

    Args:
        folder: the run folder.
        step: the step.
        trouble: what is wrong with it.
        result: of the step.
        samples: called on rank 0 only.

    Returns:
        On every rank: a sentence that names step, rank and samples; the file.
    """
    sums = result.micro_losses.tolist()
    means = [loss / count if count else 0.0 for loss, count in zip(sums, result.micro_tokens, strict=True)]
    losses = gather(means)
    file = unused_path(folder / "logs" / f"bad-step-{step}.jsonl")
    return on_rank0(lambda: _write(file, step, trouble, losses, samples())), file


def _write(file: Path, step: int, trouble: Trouble, losses: list[list[float]], samples: Samples) -> str:
    rows = [
        {"step": step, "rank": rank, "micro_batch": place, "loss": _number(losses[rank][place]), **sample}
        for rank, micro_batches in enumerate(samples)
        for place, micro_batch in enumerate(micro_batches)
        for sample in micro_batch
    ]
    rows.sort(key=lambda row: math.inf if isinstance(row["loss"], str) else row["loss"], reverse=True)
    try:
        with file.open("w", encoding="utf-8") as handle:
            handle.write(json.dumps({"step": step, "what": trouble.kind.value, "text": trouble.text()}) + "\n")
            handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:  # a full disk is told by what has to be saved; the sentence below is the least of it
        file.unlink(missing_ok=True)
        rows = [{**row, "where": f"{row['where']} ({error.strerror})"} for row in rows]
    worst = [row for row in rows if (row["rank"], row["micro_batch"]) == (rows[0]["rank"], rows[0]["micro_batch"])]
    return tr(
        "step {step}: {what}; {which} rank {rank}, micro-batch {micro_batch}: {samples}",
        step=step,
        what=trouble.text(),
        which=tr("it comes from") if trouble.kind is Kind.loss else tr("the highest loss is that of"),
        rank=rows[0]["rank"],
        micro_batch=rows[0]["micro_batch"],
        samples=", ".join(row["where"] for row in worst[:_NAMED]) + (", …" if len(worst) > _NAMED else ""),
    )


def _number(loss: float) -> float | str:
    return loss if math.isfinite(loss) else str(loss)
