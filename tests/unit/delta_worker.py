"""Trains packed and single samples of a hybrid with stand-ins for its kernels, in a process where they are importable.

delta_worker.py TYPE…: prints for each type loss and gradient norm of samples alone, of packed rows by each kind of
attention, of packed rows where no layer is told where samples begin, and what the checks say.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model_types import built
from toolkit.config.schema import Attention, ModelConfig
from toolkit.messages import ModelError
from toolkit.models import attention, isolation, load_model, packable
from toolkit.models.loss import token_loss_sum
from toolkit.sample_types import Batch

LENGTHS = [[9, 14, 7], [21, 6]]
SIZE = 30


def batch() -> Batch:
    """Return two packed rows, each with padding at its end or none."""
    ids = torch.randint(5, 300, (2, SIZE), generator=torch.Generator().manual_seed(1))
    segments, positions, bounds = torch.zeros_like(ids), torch.zeros_like(ids), [0]
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for number, length in enumerate(lengths):
            segments[row, begin : begin + length] = number + 1
            positions[row, begin : begin + length] = torch.arange(length)
            begin += length
            bounds.append(row * SIZE + begin)
        bounds += [(row + 1) * SIZE] if begin < SIZE else []
    labels = ids.masked_fill(segments == 0, -100)
    labels[:, 1:][segments[:, 1:] != segments[:, :-1]] = -100  # a sample's first token is not learned
    values = {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}
    return values | {"cu_seq_lens": torch.tensor(bounds, dtype=torch.int32)}


def measured(model: Any, batches: list[Batch]) -> list[float]:
    """Return the loss of batches and the norm of its gradient."""
    model.zero_grad()
    total = 0.0
    for rows in batches:
        loss = token_loss_sum(model, rows)
        loss.backward()
        total += float(loss.detach())
    squares = (parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None)
    return [total, float(sum(squares)) ** 0.5]


def alone(packed: Batch) -> list[Batch]:
    """Return each sample of packed rows in a batch of its own."""
    names = ("input_ids", "labels", "segment_ids", "position_ids")
    samples = []
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            sample = {name: packed[name][row, begin : begin + length][None] for name in names}
            samples.append(sample | {"segment_ids": torch.ones_like(sample["segment_ids"])})
            begin += length
    return samples


def examined(kind: str) -> dict[str, Any]:
    """Return what was measured of a type."""
    answer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        built(kind).save_pretrained(folder)
        answer["reason"] = packable.reason_not_to_pack(ModelConfig(path=folder), 512)
        answer["divided"] = packable.reason_not_to_divide_rows(ModelConfig(path=folder), 512)
        for name in ("alone", "varlen", "sdpa", "eager", "untold"):
            model = load_model(Path(folder), dtype=torch.float32).train()
            if name == "alone":
                answer[name] = measured(model, alone(batch()))
                continue
            way = Attention.varlen if name == "untold" else Attention(name)
            attention.choose_attention(model, way, True, torch.float32)
            if name == "untold":
                for part in model.modules():
                    if type(part).__name__.endswith("GatedDeltaNet"):
                        part._forward_pre_hooks.clear()
                        part.register_forward_pre_hook(
                            lambda _, args, kwargs: (args, kwargs | {"cu_seq_lens_q": None}), with_kwargs=True
                        )
            answer[name] = measured(model, [batch()])
            try:
                isolation.check_isolation(model, 300, torch.device("cpu"), kind)
                answer[f"{name} isolated"] = True
            except ModelError:
                answer[f"{name} isolated"] = False
    return answer


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(json.dumps({kind: examined(kind) for kind in sys.argv[1:]}))
