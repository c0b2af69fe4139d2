"""Two training steps traced on a fake GPU: `python -m toolkit.extras.traced_steps SPEC`; see `main`.

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
from toolkit.models.record import record_of
from toolkit.plan.division import load_of_busiest_rank
from toolkit.plan.lookup import outline_of
from toolkit.sample_types import Batch, with_targets
from toolkit.tasks import language
from toolkit.train import schedule
from toolkit.train.step import StepGuard, TokenCounts, train_step

_STEPS = 2
"""Steps that are run: the optimizer allocates its states in the first, the second is traced."""
_TOTAL_STEPS = 100
_SAMPLES = 4
"""Samples of a packed sequence."""
_LARGEST = 8
"""Kinds of tensors that are listed."""


class _Task(language.LanguageTask):
    """Language modelling whose tokens are counted beforehand, all as trained: fake tensors have no numbers."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def count_losses(self, batch: Batch) -> int:
        """Return the trained tokens of a micro-batch."""
        return self.tokens

    def token_counts(self, batches: list[Batch]) -> TokenCounts:
        """Return all tokens as each of the four counts: a trace uses none of them."""
        return TokenCounts(*[self.tokens * len(batches)] * 4)


def trace(cfg: schema.RunConfig, rank: int, world_size: int) -> dict[str, Any]:
    """Return what rank `rank` of `world_size` holds, sends and waits for in its second training step, on the longest
    rows: `at_rest_bytes` and `peak_bytes` on the device before and in the step; `largest`, `waits` and `collectives` as
    `fake_gpu.Watch` notes them; `optimizer`, DeepSpeed's class and PyTorch's in it.
    """
    fake_gpu.begin(rank, world_size)
    if cfg.optim.torch is not True:  # auto chooses by the machine; either way the states take the same memory
        cfg = replace(cfg, optim=replace(cfg.optim, torch=False))
    outline, mode, watch = outline_of(cfg), FakeTensorMode(allow_non_fake_inputs=True), fake_gpu.Watch()
    with mode, watch:
        model, engine = _build_engine(cfg, outline.sizes["layers"], world_size)
    batch = with_targets(_longest_batch(cfg, outline, model))
    rows_sent = batch["input_ids"].numel() * outline.sizes.get("chosen", 0)  # each token goes to so many experts
    busiest_load = load_of_busiest_rank(cfg.model.expert_capacity)
    # The real function reads what routers chose, which fake tensors lack. Not restored: this process makes one trace.
    experts.rows_exchanged = partial(_assumed_rows, rows_sent, busiest_load)
    task, guard = _Task(len(batch["target_indices"])), StepGuard(engine, cfg.train)
    with mode, watch:
        fake = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        engine.train()
        for _ in range(_STEPS):  # of which the last is traced
            watch.restart()
            at_rest = watch.now
            window = [dict(fake) for _ in range(mesh.accumulation(cfg, world_size))]  # dicts of their own, as a run's
            train_step(engine, task, window, mesh.Mesh(world_size=world_size), guard)
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


def _build_engine(cfg: schema.RunConfig, layers: int, world_size: int) -> tuple[Any, Any]:
    """Return a recipe's model, random, with `layers` layers, on the fake GPU, and DeepSpeed's engine that trains it."""
    total_steps = max(_TOTAL_STEPS, cfg.schedule.warmup_steps + cfg.schedule.decay_steps)
    ds = ds_config.build_ds_config(cfg, world_size, total_steps).values
    with torch.device(fake_gpu.DEVICE) as device:
        model: Any = calibration.build_model(cfg, layers, device)
        if cfg.parallel.expert > 1:
            experts.divide(model, cfg.parallel.expert)
        _prepare(model, cfg, ds)
    make_schedule, checkpointing = schedule.make_schedule(cfg, total_steps), cfg.train.activation_checkpointing
    return model, build.initialize_engine(model, ds, checkpointing, make_schedule, None, cfg.optim)


def _prepare(model: PreTrainedModel, cfg: schema.RunConfig, ds: dict[str, Any]) -> None:
    """Prepare a random model for training as `build_model` of tasks/language_model.py: attention, loss, adapters."""
    attention.choose_attention(
        model, cfg.model.attention, cfg.data.packing is schema.Packing.packed, TORCH_DTYPES[cfg.precision.dtype]
    )
    model.config.use_cache = False
    model.get_input_embeddings().padding_idx = None
    record = record_of(model)
    record.loss_head, record.routers = loss.LossHead(cfg.kernels.loss), None
    if cfg.tuning.method is not schema.TuningMethod.full:
        fine_tuning.apply_tuning(model, cfg.tuning, Path(cfg.model.path), None, cfg.run.seed, ds)


def _assumed_rows(
    rows: int, busiest_load: float, counts: torch.Tensor, received: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Stand in for `experts.rows_exchanged`, as router choices are not known: return the rows that a rank sends to each
    rank, evenly divided, and those that it receives from each, as the busiest rank `busiest_load` times as many.
    """
    received.sum(1).tolist()  # the real function reads them, so the host waits here all the same
    num_ranks = len(counts)
    return [rows // num_ranks] * num_ranks, [math.ceil(busiest_load * rows / num_ranks)] * num_ranks


def _longest_batch(cfg: schema.RunConfig, outline: Any, model: torch.nn.Module) -> Batch:
    """Return the largest micro-batch; a packed one holds _SAMPLES samples of the same length per sequence."""
    batch = calibration.longest_batch(cfg, outline, model)
    if cfg.data.packing is not schema.Packing.packed:
        return batch
    rows, length = batch["input_ids"].shape
    places = torch.arange(length)
    starts = [row * length + sample * length // _SAMPLES for row in range(rows) for sample in range(_SAMPLES)]
    batch["cu_seq_lens"] = torch.tensor([*starts, rows * length], dtype=torch.int32)  # in the B x S tokens
    batch["segment_ids"] = (places * _SAMPLES // length + 1).repeat(rows, 1)  # [B, S], samples 1 to _SAMPLES
    return batch


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Trace the recipe and overrides `words` on some `ranks` of `world_size`, each in a forked process; return a trace
    or error per rank.
    """
    set_language(spec["language"])
    cfg = mesh.with_micro_batch(load(spec["words"]).cfg)
    # A copy each: what is registered with PyTorch stays.
    return [children.copied(_traced, cfg, rank, spec["world_size"]) for rank in spec["ranks"]]


def _traced(cfg: schema.RunConfig, rank: int, world_size: int) -> dict[str, Any]:
    """Return the trace of a rank, or the error that ended it, in a forked process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    try:
        return trace(cfg, rank, world_size)
    except Exception as error:  # whatever a model does on a device that it does not expect
        logging.getLogger("DeepSpeed").info("trace", exc_info=True)  # where the error came from, if that is turned on
        return {"rank": rank, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    file = Path(sys.argv[1])
    spec = json.loads(file.read_text(encoding="utf-8"))
    Path(spec["output"]).write_text(json.dumps(main(spec)), encoding="utf-8")
