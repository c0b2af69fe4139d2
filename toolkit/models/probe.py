"""Probes: a few ids and the logits that a model computed for them, stored in every checkpoint and export. A model that
loads the weights must compute the same logits, but for rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.distributed import accelerator
from toolkit.messages import CheckpointError, reading

# In a subdirectory: vLLM and others take every *.safetensors next to config.json for weights.
FILE = "probe/probe.safetensors"
ROWS, LENGTH = 2, 8
# Largest difference of a logit as a fraction of the logits' spread (standard deviation), by the coarser precision of
# the two. Another machine, kernel or attention adds up in another order. Measured between sdpa, eager and float32 with
# random GLMs of 2 to 40 layers and up to 65,024 tokens, weights spread 0.02 to 0.05: float32 up to 3e-5, float16 up to
# 0.03, bfloat16 up to 0.25; allowed is at least the double. (Spread 0.1, bfloat16 reached 0.67.) Weights that have
# nothing to do with each other differ by about 6.
# TF32, with float16's mantissa in products alone: 5e-3. QLoRA's 4 bits against whole weights: 0.7 to 2.4, on CPUs.
TOLERANCES = {"float32": 1e-4, "tf32": 0.05, "float16": 0.1, "bfloat16": 0.5, "nf4": 4.0}

# A larger difference is of other weights, or of weights put to other use. Measured with 19 random and briefly trained
# GLMs and Llamas of 12 and 28 layers, 64 and 256 wide, weights spread 0.02 to 0.12. Rounding (sdpa against eager,
# float64, every module's output off by up to a unit in the last place): float32 up to 1e-5, TF32 0.012, float16 0.025,
# bfloat16 0.21. Damage in the first, middle or last layer: a zero matrix of values, outputs or the feed-forward 0.03 to
# 6; a zero or transposed query or key 7e-4 to 7; two layers exchanged 0.006 to 7; all LoRAs of query and value missing,
# each of 5 % of its matrix, 0.013 to 0.9; one of them 3e-5 to 0.6.
WRONG = {"float32": 3e-4, "tf32": 0.1, "float16": 0.2, "bfloat16": 1.0, "nf4": 4.0}

# In half precision and TF32 rounding and damage overlap, unless the bounds follow the model, by what it rounds itself:
# the difference between its logits in that precision and in float32. Rounding as above was at most 2.6 times that. Of
# the damage above, more than 6 times that were, in float16 / bfloat16: all / 78 % of the zero matrices, 61 / 16 % of
# the queries and keys, 92 / 87 % of the exchanges, 89 / 74 % of the adapters (with 1.0 for all precisions it were 39,
# 16, 53 and 0 %); the rest moves no more than a few roundings. float32: 100 % of each, and 75 % of single LoRAs.
TIMES_ROUNDING, TIMES_WRONG = 3.0, 6.0
# In float32 rounding is far below damage, but for attention so sharp that it enlarges what it gets: with queries and
# keys 6 to 32 times as large, rounding as above was up to 8e-4, and 1 to 31 times the difference to float64.
TIMES_IN_FLOAT32 = 16.0
_STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11, "float32": 2.0**-24}
"""Precision -> relative distance between neighbouring numbers."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A few ids and a model's logits for them. R rows, L tokens of a row, V vocabulary."""

    ids: torch.Tensor
    """[R, L], int64."""
    logits: torch.Tensor
    """At the last position, float32 [R, V]; of a classifier the scores of every prefix of a row [R, L x labels]."""
    dtype: str
    """Precision of the weights, such as bfloat16; nf4 where the frozen ones have 4 bits; tf32: float32 in TF32."""


def probe_ids(samples: Sequence[Sequence[int]], config: PreTrainedConfig) -> torch.Tensor:
    """Return the first tokens of the first two samples, [R, L]; for ChatGLM-6B they end with [gMASK] <sop>."""
    samples = samples[:ROWS]
    length = min(LENGTH, *map(len, samples))
    rows = [[int(token) for token in sample[:length]] for sample in samples]
    if config.model_type == "chatglm":
        rows = [[*row[:-2], config.gmask_token_id, config.bos_token_id] for row in rows]
    return torch.tensor(rows)


def spread_ids(config: PreTrainedConfig) -> torch.Tensor:
    """Return ids spread over the vocabulary, [R, L], for a model without samples."""
    return probe_ids(
        [
            # A prime, so that neighbours are far apart.
            [index * 7919 % config.get_text_config().vocab_size for index in range(row, row + LENGTH)]
            for row in range(ROWS)
        ],
        config,
    )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model or an engine into evaluation mode without gradients; restore its mode afterwards."""
    was_training = getattr(model, "module", model).training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def capture(model: PreTrainedModel, ids: torch.Tensor, device: torch.device | str = "cpu") -> Probe:
    """Return a model's probe for ids [R, L]. A collective if it is partitioned; random state and mode do not change."""
    # Eagerly, as torch.compile would specialize graphs on these sizes, which training does not have.
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        if is_classifier(model):
            logits = _prefix_scores(model, ids.to(device)).float().cpu()
        else:
            logits = model(input_ids=ids.to(device), use_cache=False).logits[:, -1].float().cpu()
    return Probe(ids, logits, precision_of(model, device))


def capture_probe(engine: Any, ids: torch.Tensor) -> Probe:
    """Return the probe of an engine's model for ids [R, L]. A collective over all ranks that hold parts of it."""
    from toolkit.models.stages import is_pipeline  # imports DeepSpeed, which programs that load a model do without

    if not is_pipeline(engine):
        return capture(engine.module, ids, engine.device)
    from toolkit.layouts.pipeline import capture_stages

    return capture_stages(engine, ids)


KIND = "ForSequenceClassification"


def is_classifier(model: Any) -> bool:
    """Whether a model scores sequences, in place of computing logits of tokens."""
    return type(model).__name__.endswith(KIND)


def describes_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a sequence classifier."""
    return any(str(name).endswith(KIND) for name in config.get("architectures") or ())


def _prefix_scores(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return a classifier's scores of every prefix of rows: [R, L x labels] for ids [R, L], in one forward pass."""
    rows, size = ids.shape
    is_in_prefix = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril().repeat(rows, 1)
    prefixes = ids.repeat_interleave(size, dim=0).masked_fill(~is_in_prefix, model.config.pad_token_id)
    logits: torch.Tensor = model(input_ids=prefixes, attention_mask=is_in_prefix.long(), use_cache=False).logits
    return logits.reshape(rows, -1)


def precision_of(model: PreTrainedModel, device: torch.device | str) -> str:
    """Return the precision in which a model computes on a device, a key of `TOLERANCES`."""
    if getattr(model, "is_loaded_in_4bit", False):
        return "nf4"
    is_tf32 = accelerator.uses_tf32(torch.device(device))
    return "tf32" if is_tf32 and model.dtype is torch.float32 else str(model.dtype).removeprefix("torch.")


def write(probe: Probe, folder: Path) -> Path:
    """Write a probe into a checkpoint or an export and return the file."""
    file = folder / FILE
    file.parent.mkdir()
    tensors = {"ids": probe.ids.contiguous(), "logits": probe.logits.contiguous()}
    file.write_bytes(save(tensors, metadata={"dtype": probe.dtype}))
    return file


def read(folder: Path) -> Probe | None:
    """Return the probe of a checkpoint or an export, None if there is none."""
    file = folder / FILE
    if not file.is_file():
        return None
    with reading(file, CheckpointError), safe_open(file, framework="pt") as tensors:
        return Probe(tensors.get_tensor("ids"), tensors.get_tensor("logits"), tensors.metadata()["dtype"])


def difference_of(measured: Probe, recorded: Probe) -> float:
    """Return the largest difference of a logit divided by the standard deviation of the logits; nan if one is NaN."""
    if measured.logits.shape != recorded.logits.shape:
        return float("inf")
    if torch.equal(measured.logits, recorded.logits):
        return 0.0
    return float((measured.logits - recorded.logits).abs().max() / recorded.logits.std())


def coarser_precision(measured: Probe, recorded: Probe) -> str:
    """Return the coarser precision of two probes, a key of `TOLERANCES`."""
    return max(measured.dtype, recorded.dtype, key=lambda dtype: TOLERANCES.get(dtype, 0.0))


def other_precision(measured: Probe, recorded: Probe) -> torch.dtype | None:
    """Return the other precision in which to run a model to measure its rounding; None if nothing is to be measured."""
    kind = coarser_precision(measured, recorded)
    if kind not in _STEPS:  # nf4, whose bounds are the same for all models
        return None
    if kind == "float32":
        return torch.float64
    return torch.bfloat16 if measured.dtype == "float32" else torch.float32


def rounding_error(measured: Probe, again: Probe, recorded: Probe) -> float:
    """Return the rounding error of logits (see `difference_of`) in the coarser precision of `measured` and `recorded`.

    `again`: of the same weights as `measured`, in the other precision (`other_precision`).
    """
    # `measured` and `again` differ by rounding in the coarser of their precisions: scaled to the one asked for.
    step_between = _STEPS[coarser_precision(measured, again)]
    return difference_of(again, measured) * _STEPS[coarser_precision(measured, recorded)] / step_between
