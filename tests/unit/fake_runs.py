"""Run folders for reports, as a run writes them, with what may be wrong in them."""

import json
import math
from pathlib import Path
from typing import Any

from toolkit.config.load import load, to_yaml

HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">\u202e {{7*7}}"
)


def row(step: int, **more: Any) -> dict[str, Any]:
    """Return a row of metrics.jsonl."""
    return {
        "step": step,
        "epoch": step / 100,
        "loss": 2 + 6 * math.exp(-step / 20),
        "lr": 0.001 * step / 100,
        "grad_norm": 1.0 + step % 3,
        "tokens_per_s": 1000.0 + step,
        "step_s": 0.5,
        "padding_fraction": 0.25,
        "trained_tokens": 100 * step,
        "total_tokens": 200 * step,
        "skipped_steps": 0,
        "bad_steps": 0,
        "rewinds": 0,
        "time": 1_760_000_000.0 + step,
        "data_wait_s": 0.01,
        "slowest_rank": step % 2,
        "slowest_rank_s": 0.3,
        "median_rank_s": 0.2,
        "fastest_rank_s": 0.15,
        "host_memory_peak_bytes": 2**29,
        "planned_memory_bytes": 2**30,
        **more,
    }


def lines(path: Path, rows: list[Any]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


def fake_run(folder: Path, steps: int = 40, *words: str, text: str = "fine") -> Path:
    """Write a run folder.

    Args:
        folder: it.
        steps: that were logged.
        words: overrides of its config.
        text: what stands wherever a run has text of its user's.
    """
    (folder / "logs").mkdir(parents=True)
    rows: list[Any] = [row(step) for step in range(1, steps + 1)]
    evaluations = range(0, steps + 1, 10)
    rows += [
        {"step": step, "eval_loss": 8 - step / 10, "eval_perplexity": 9.0, "eval_bleu": step} for step in evaluations
    ]
    lines(folder / "metrics.jsonl", sorted(rows, key=lambda one: one["step"]))
    cfg = load(["recipe=quickstart", "train.max_steps=40", *words]).cfg
    cfg.evaluate.prompts = [text]
    (folder / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    known = {
        "python": "3.11.7",
        "world_size": 2,
        "hosts": ["a", text],
        "packages": {"torch": "2"},
        "commit": "c+changes",
    }
    (folder / "environment.json").write_text(json.dumps(known))
    plan = {"device_bytes": {"step": {"weights": 2**30, "loss": 2**29}}, "step_s": 0.25, "tokens_per_s": 4321.0}
    (folder / "plan.json").write_text(json.dumps(plan))
    split = {
        "samples": 9,
        "tokens": 90,
        "shortest": 1,
        "median": 5,
        "longest": 9,
        "edges": [0, 5, 10],
        "counts": [4, 5],
    }
    data = {"total_steps": 40, "dropped": {text: 3}, "splits": {"train": split}, "sources": [{"name": text, "rows": 9}]}
    (folder / "data.json").write_text(json.dumps(data))
    command = ["deepspeed", "--num_gpus", "2", "run.py", "recipe=quickstart", f"run.name={text}"]
    starts = [{"time": "2025-10-09T08:53:20+0000", "from_step": step, "command": command} for step in (0, 20)]
    lines(folder / "logs" / "starts.jsonl", starts)
    for step in evaluations:
        answers = [
            {"where": f"f:{n}", "prompt": f"{n} {text}", "output": f"{step} {text}", "reference": text, "bleu": 1.5}
            for n in range(9)
        ]
        lines(folder / "evaluations" / f"step-{step}.jsonl", answers)
    lines(folder / "samples.jsonl", [{"prompt": text, "before": text, "answer": text}])
    return folder
