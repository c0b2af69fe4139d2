"""What the rows of metrics.jsonl hold, in which unit, and what the trackers call it: as transformers' Trainer does.

docs/tracking.md shows this table; a test holds the two together.
"""

from collections.abc import Mapping

UNITS: dict[str, str] = {
    "step": "steps",
    "epoch": "epochs",
    "loss": "nats/token",
    "lr": "1",
    "grad_norm": "1",
    "router_loss": "1",
    "tokens_per_s": "tokens/s",
    "trained_tokens_per_s": "tokens/s",
    "rank_tokens_per_s": "tokens/s",
    "step_s": "s",
    "step_median_s": "s",
    "step_p95_s": "s",
    "trained_tokens": "tokens",
    "total_tokens": "tokens",
    "samples_per_s": "samples/s",
    "rank_samples_per_s": "samples/s",
    "samples": "samples",
    "padding_fraction": "share",
    "data_wait_s": "s/step",
    "data_wait_fraction": "share",
    "data_wait_rank": "rank",
    "slowest_rank": "rank",
    "slowest_rank_s": "s/step",
    "median_rank_s": "s/step",
    "fastest_rank_s": "s/step",
    "model_flops_per_s": "FLOP/s",
    "hardware_flops_per_s": "FLOP/s",
    "mfu": "share",
    "hfu": "share",
    "mfu_matmul": "share",
    "hfu_matmul": "share",
    "host_memory_peak_bytes": "bytes",
    "device_memory_peak_bytes": "bytes",
    "planned_memory_bytes": "bytes",
    "communication_fraction": "share",
    "curriculum_length": "tokens",
    "mixture_share": "share",
    "ltd_share": "share",
    "skipped_steps": "steps",
    "bad_steps": "steps",
    "rewinds": "times",
    "loss_scale": "1",
    "time": "s",
    "eval_loss": "nats/token",
    "eval_perplexity": "1",
    "eval_tokens": "tokens",
    "eval_samples": "samples",
    "eval_answers": "answers",
    "eval_tokens_per_s": "tokens/s",
    "eval_METRIC": "0-100",
    "eval_length": "characters",
}
"""Each name in metrics.jsonl -> its unit; eval_METRIC stands for those of evaluate.metrics, NAME/SOURCE is as NAME."""
SUMMARY: dict[str, str] = {
    "train_loss": "nats/token",
    "train_runtime": "s",
    "train_steps_per_second": "steps/s",
    "train_samples_per_second": "samples/s",
}
"""What trackers get once, at the end of a run."""
_HF_NAMES = {"step": "global_step", "lr": "learning_rate", "total_tokens": "num_input_tokens_seen"}
_EVALUATION = "eval_"


def hf_name(name: str) -> str:
    """Return what transformers' Trainer calls a metric, as it stands in its logs."""
    return _HF_NAMES.get(name, name)


def tracked_name(name: str) -> str:
    """Return the name under which transformers' integrations of TensorBoard, wandb, SwanLab and Trackio log it."""
    hf = hf_name(name)
    return f"eval/{hf.removeprefix(_EVALUATION)}" if hf.startswith(_EVALUATION) else f"train/{hf}"


def is_evaluation(row: Mapping[str, object]) -> bool:
    """Whether a row of metrics.jsonl is of an evaluation, not of a logged step."""
    return "eval_loss" in row


def figures(row: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a row; "nan" and "inf" are numbers that JSON does not have."""
    found = {}
    for name, value in row.items():
        try:
            found[name] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
    return found
