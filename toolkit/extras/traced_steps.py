"""Two training steps on a GPU that is not there: `python -m toolkit.extras.traced_steps SPEC`; see `main`.

The model, adapters, loss, checkpointing and step are those of a run, and so is DeepSpeed's engine: with its own ZeRO
optimizers, buckets and partitions, of one rank of as many as wanted. Of numbers there are none, see extras/fake_gpu.py.
"""

import json
import logging
import math
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from toolkit import children
from toolkit.config import mesh, schema
from toolkit.config.load import load
from toolkit.engine import build, ds_config
from toolkit.extras import calibration, fake_gpu
from toolkit.layouts import experts
from toolkit.messages import set_language
from toolkit.models import attention, fine_tuning, loss
from toolkit.models.load import TORCH_DTYPES
from toolkit.plan.lookup import outline_of
from toolkit.plan.outline import busiest
from toolkit.tasks import language
from toolkit.train import schedule
from toolkit.train.step import StepGuard, train_step

_STEPS = 2
"""The optimizer makes its states in the first."""
_TOTAL_STEPS = 100
_SAMPLES = 4
"""Of a packed sequence."""
_LARGEST = 8


class _Task(language.LanguageTask):
    """Language modelling whose tokens are counted beforehand: all of a micro-batch."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def count(self, batch: attention.Batch) -> int:
        return self.tokens

    def sizes(self, batches: list[attention.Batch]) -> list[int]:
        return [self.tokens * len(batches)] * 4


def trace(cfg: schema.RunConfig, rank: int, world_size: int) -> dict[str, Any]:
    """Return what a rank holds, sends and waits for in a step on the longest rows."""
    fake_gpu.begin(rank, world_size)
    attention.trains_on_gpu = lambda: True
    if cfg.optim.torch is not True:  # as where there is an nvcc
        cfg = replace(cfg, optim=replace(cfg.optim, torch=False))
    total_steps = max(_TOTAL_STEPS, cfg.schedule.warmup_steps + cfg.schedule.decay_steps)
    outline, ds = outline_of(cfg), ds_config.build_ds_config(cfg, world_size, total_steps)
    device, mode, watch = torch.device(fake_gpu.DEVICE), FakeTensorMode(allow_non_fake_inputs=True), fake_gpu.Watch()
    with mode, watch:
        with device:
            model: Any = calibration.build_model(cfg, outline.sizes["layers"], device)
            if cfg.parallel.expert > 1:
                experts.divide(model, cfg.parallel.expert)
            _prepare(model, cfg, ds.values)
        engine = build.initialize_engine(
            model,
            ds.values,
            cfg.train.activation_checkpointing,
            schedule.make_schedule(cfg, total_steps),
            None,
            cfg.optim,
        )
    batch = loss.with_label_positions(_longest_batch(cfg, outline, model))
    sent, most = batch["input_ids"].numel() * outline.sizes.get("chosen", 0), busiest(cfg.model.expert_capacity)
    experts.rows_exchanged = partial(_assumed_rows, sent, most)
    task, guard = _Task(len(batch["places"])), StepGuard(engine, cfg.train)
    with mode, watch:
        fake = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        engine.train()
        for _ in range(_STEPS):
            watch.restart()
            at_rest = watch.now
            train_step(engine, task, [dict(fake) for _ in range(mesh.accumulation(cfg, world_size))], world_size, guard)
            guard.check()
    return {
        "rank": rank,
        "at_rest_bytes": at_rest,
        "peak_bytes": watch.peak,
        "largest": watch.largest(_LARGEST),
        "waits": dict(watch.waits),
        "collectives": watch.collectives,
        "optimizer": f"{type(engine.optimizer).__name__}({type(engine.basic_optimizer).__name__})",
    }


def _prepare(model: PreTrainedModel, cfg: schema.RunConfig, ds: dict[str, Any]) -> None:
    """Do with an untrained model what tasks/language_model.py, `build_model`, does."""
    attention.choose_attention(
        model, cfg.model.attention, cfg.data.packing is schema.Packing.packed, TORCH_DTYPES[cfg.precision.dtype]
    )
    model.config.use_cache = False
    model.get_input_embeddings().padding_idx = None
    model.loss_head, model.routers = loss.LossHead(cfg.kernels.loss), None
    if cfg.tuning.method is not schema.TuningMethod.full:
        fine_tuning.apply_tuning(model, cfg.tuning, Path(cfg.model.path), None, cfg.run.seed, ds)


def _assumed_rows(rows: int, most: float, counts: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Stand for `experts.rows_exchanged`, as no number is known: a rank sends as many rows to each, and gets `most`
    times as many.
    """
    received.sum(1).tolist()  # waited for all the same
    return [rows // len(counts)] * len(counts), [math.ceil(most * rows / len(counts))] * len(counts)


def _longest_batch(cfg: schema.RunConfig, outline: Any, model: torch.nn.Module) -> attention.Batch:
    """Return the largest micro-batch; a packed one of a few samples of the same length."""
    batch = calibration.longest_batch(cfg, outline, model)
    if cfg.data.packing is not schema.Packing.packed:
        return batch
    rows, length = batch["input_ids"].shape
    places = torch.arange(length)
    ends = [row * length + sample * length // _SAMPLES for row in range(rows) for sample in range(_SAMPLES)]
    batch["cu_seq_lens"] = torch.tensor([*ends, rows * length], dtype=torch.int32)
    batch["segment_ids"] = (places * _SAMPLES // length + 1).repeat(rows, 1)
    return batch


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Trace the recipe and overrides `words` on some `ranks` of `world_size`, each in a process of its own."""
    set_language(spec["language"])
    cfg = mesh.with_micro_batch(load(spec["words"]).cfg)
    # A copy each: what is registered with PyTorch stays.
    return [children.copied(_traced, cfg, rank, spec["world_size"]) for rank in spec["ranks"]]


def _traced(cfg: schema.RunConfig, rank: int, world_size: int) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    try:
        return trace(cfg, rank, world_size)
    except Exception as error:  # whatever a model does on a device that it does not expect
        logging.getLogger("DeepSpeed").info("trace", exc_info=True)
        return {"rank": rank, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    file = Path(sys.argv[1])
    given = json.loads(file.read_text(encoding="utf-8"))
    Path(given["output"]).write_text(json.dumps(main(given)), encoding="utf-8")
