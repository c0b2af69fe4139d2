"""Steps per second of our loop against a bare DeepSpeed loop: same ranks, same model, same batches, in turns.

Both loops live in one process group and take turns (A B A B …), so that a machine that gets slower or faster while they
run does so for both; the ratio is taken pair by pair.
"""

import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch

from toolkit.config.mesh import Mesh, accumulation
from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import barrier, rank, world_size
from toolkit.engine.ds_config import build_ds_config
from toolkit.launch.environment import Ranks
from toolkit.models.fine_tuning import apply_tuning
from toolkit.models.load import create_model
from toolkit.sample_types import Batch
from toolkit.tasks.language import LanguageTask
from toolkit.tasks.language_batches import training_batches
from toolkit.tasks.language_data import LanguageData
from toolkit.track.metrics import MetricsLog
from toolkit.train.baseline import measure_baseline
from toolkit.train.step import StepGuard, train_step
from toolkit.train.throughput import ThroughputMeter


def compare(
    cfg: RunConfig,
    prepared: LanguageData,
    ranks: Ranks,
    pairs: int,
    steps: int,
    folder: Path,
) -> dict[str, Any]:
    """Time both loops. A collective.

    Args:
        cfg: checked config; its schedule is left out of both sides.
        prepared: tokenizer and stores.
        ranks: who this process is.
        pairs: interleaved pairs; the first one warms up and is not counted.
        steps: optimizer steps of each block.
        folder: where our side writes its metrics, as in training.

    Returns:
        Seconds per step of both sides per pair, the ratio bare/ours per pair, and their medians.
    """
    times = accumulation(cfg, world_size())
    loader = training_batches(cfg, prepared, ranks, steps)
    windows = [list(islice(loader, times)) for _ in range(steps)]
    ours, bare = (
        _ours(build_bare_engine(cfg, prepared), cfg, folder),
        _bare(build_bare_engine(cfg, prepared)),
    )
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for pair in range(pairs + 1):
        # Which side goes first alternates too.
        sides = [("ours", ours), ("bare", bare)] if pair % 2 else [("bare", bare), ("ours", ours)]
        for name, block in sides:
            barrier()
            started = time.perf_counter()
            block(windows)
            barrier()
            if pair:
                seconds[name].append((time.perf_counter() - started) / steps)
    ratios = [bare_s / ours_s for bare_s, ours_s in zip(seconds["bare"], seconds["ours"], strict=True)]
    return {
        "ours_steps_per_s": 1 / statistics.median(seconds["ours"]),
        "bare_steps_per_s": 1 / statistics.median(seconds["bare"]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": pairs,
        "steps_per_block": steps,
        "micro_batches_per_step": times,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def build_bare_engine(cfg: RunConfig, prepared: LanguageData) -> deepspeed.DeepSpeedEngine:
    """Return an engine as DeepSpeed's getting-started page makes it, from the recipe's settings."""
    ds = build_ds_config(cfg, world_size(), 1_000_000)
    values = {key: value for key, value in ds.values.items() if key != "scheduler"}
    model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed, values)
    apply_tuning(model, cfg.tuning, Path(cfg.model.path), prepared.tokenizer, cfg.run.seed, values)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=values,
        dist_init_required=False,
    )
    engine.train()
    return engine


def _ours(engine: deepspeed.DeepSpeedEngine, cfg: RunConfig, folder: Path) -> Callable[[list[list[Batch]]], None]:
    """Our step with what the loop does around it: counting, and a log line every `train.log_every` steps."""
    meter = ThroughputMeter(engine, measure_baseline(engine, cfg.tuning, cfg.train.activation_checkpointing.enabled))
    guard = StepGuard(engine, cfg.train)
    metrics, done = MetricsLog(folder / "metrics.jsonl"), 0

    def block(windows: list[list[Batch]]) -> None:
        nonlocal done
        for window in windows:
            meter.add(train_step(engine, LanguageTask(), window, Mesh(world_size=world_size()), guard))
            guard.check()
            done += 1
            if done % cfg.train.log_every == 0:
                row = meter.row(done, 0.0, cfg.optim.lr, meter.pace())
                if rank() == 0:
                    metrics.append(row)

    return block


def _bare(engine: deepspeed.DeepSpeedEngine) -> Callable[[list[list[Batch]]], None]:
    """The loop of DeepSpeed's own getting-started page; logs nothing."""

    def block(windows: list[list[Batch]]) -> None:
        for window in windows:
            for batch in window:
                on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
                loss: torch.Tensor = engine(**on_device, use_cache=False).loss
                engine.backward(loss)
                engine.step()

    return block
