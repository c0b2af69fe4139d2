"""What is said of an evaluation."""

from collections.abc import Mapping

from toolkit.config.schema import EVAL_LOSS, Metric
from toolkit.messages import tr

SAMPLES = "eval_samples"
"""How many samples an evaluation of a model of one's own is of; a language model's counts tokens."""


def told(row: Mapping[str, float]) -> list[str]:
    """Return the lines about an evaluation.

    Args:
        row: of metrics.jsonl.
    """
    step = int(row["step"])
    if SAMPLES in row:
        others = {name: value for name, value in row.items() if name not in ("step", EVAL_LOSS, SAMPLES)}
        return [
            tr(
                "step {step}  validation loss {loss} over {count} samples",
                step=step,
                loss=f"{row[EVAL_LOSS]:.4f}",
                count=f"{int(row[SAMPLES]):,}",
            )
            + "".join(f"  {name.removeprefix('eval_')} {value:.4f}" for name, value in others.items())
        ]
    lines = [
        tr(
            "step {step}  validation loss {loss} nats/token, perplexity {perplexity} over {tokens} tokens",
            step=step,
            loss=f"{row[EVAL_LOSS]:.4f}",
            perplexity=f"{row['eval_perplexity']:.2f}",
            tokens=f"{int(row['eval_tokens']):,}",
        )
    ]
    if "eval_answers" in row:
        whole = {name.removeprefix("eval_"): value for name, value in row.items() if "/" not in name}
        figures = [f"{metric.value} {whole[metric.value]:.2f}" for metric in Metric if metric.value in whole]
        lines.append(
            tr(
                "step {step}  {count} answers, {pace} tokens/s: {figures}",
                step=step,
                count=f"{whole['answers']:,}",
                pace=f"{whole['tokens_per_s']:,.0f}",
                figures=", ".join(figures),
            )
        )
    return lines
