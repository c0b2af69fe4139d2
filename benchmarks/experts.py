"""Mixtures of experts under expert parallelism and under ZeRO-3: seconds of a step, in turns, and the bytes sent.

Both sides train the same made-up Qwen 3 MoE on the same batches in one process group; the ratio is taken pair by pair.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.engines import build_engine
from toolkit.config.mesh import Mesh, accumulation
from toolkit.config.schema import Init, RunConfig
from toolkit.distributed import row_exchange
from toolkit.distributed.process_group import barrier, on_rank0, world_size
from toolkit.launch.environment import Ranks
from toolkit.models import weights
from toolkit.plan.division import expert_parallel_bytes, expert_part
from toolkit.plan.outline import Outline
from toolkit.tasks.language import LanguageTask
from toolkit.tasks.language_batches import training_batches
from toolkit.tasks.language_data import LanguageData
from toolkit.train.step import StepGuard, train_step

SHAPE = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts_per_tok": 2}
"""Of the made-up models, whose numbers of experts differ alone."""


def compare(
    cfg: RunConfig, prepared: LanguageData, ranks: Ranks, counts: list[int], pairs: int, steps: int, folder: Path
) -> dict[str, Any]:
    """Time models of so many experts on both sides. A collective.

    Args:
        cfg: checked config; its model, `zero.stage` and `parallel.expert` are replaced.
        prepared: its data.
        ranks: who this process is.
        counts: experts of a layer, each a multiple of the ranks.
        pairs: interleaved pairs of blocks; one more warms up.
        steps: optimizer steps of each block.
        folder: of the models and the engines' own files.

    Returns:
        By number of experts: seconds per step of both sides, the ratio ZeRO-3 : experts divided, and bytes that a rank
        sends to others in a step's exchanges of tokens, counted and by the formula.
    """
    return {
        "shape": SHAPE,
        "load_average": os.getloadavg()[0],
        "by_experts": {str(count): _compare(cfg, prepared, ranks, count, pairs, steps, folder) for count in counts},
    }


def _compare(
    cfg: RunConfig, prepared: LanguageData, ranks: Ranks, count: int, pairs: int, steps: int, folder: Path
) -> dict[str, Any]:
    path = folder / f"model-{count}"
    on_rank0(lambda: _write(path, count, prepared))
    model = replace(cfg.model, init=Init.pretrained, path=str(path), router_loss=0.0)
    sides = {"divided": (2, world_size()), "zero3": (3, 1)}
    engines = {}
    for side, (stage, parts) in sides.items():
        parallel = replace(cfg.parallel, expert=parts)
        own = replace(cfg, model=model, zero=replace(cfg.zero, stage=stage), parallel=parallel)
        engines[side] = build_engine(own, prepared, folder)
    times, task = accumulation(cfg, world_size()), LanguageTask()
    loader = training_batches(cfg, prepared, ranks, steps)
    windows = [list(islice(loader, times)) for _ in range(steps)]
    guards = {side: StepGuard(engine, cfg.train) for side, engine in engines.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(pairs + 1):
        for side in sorted(sides, reverse=bool(pair % 2)):
            barrier()
            started = time.perf_counter()
            for window in windows:
                train_step(engines[side], task, window, Mesh(world_size=world_size()), guards[side])
                guards[side].check()
            barrier()
            if pair:
                seconds[side].append((time.perf_counter() - started) / steps)
    with _counted() as sent:
        for window in windows:
            train_step(engines["divided"], task, window, Mesh(world_size=world_size()), guards["divided"])
    tokens = sum(batch["input_ids"].numel() for window in windows for batch in window)
    # Whole under ZeRO-3, however it is divided.
    whole = Outline(weights.shapes_of(engines["zero3"].module), frozenset(), {"chosen": SHAPE["num_experts_per_tok"]})
    states_bytes = 4 * tokens // steps * SHAPE["hidden_size"]
    ratios = [zero3 / divided for zero3, divided in zip(seconds["zero3"], seconds["divided"], strict=True)]
    return {
        "parameters": whole.num_parameters,
        "divided_s": statistics.median(seconds["divided"]),
        "zero3_s": statistics.median(seconds["zero3"]),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "sent_bytes": sent[0] / steps,
        "formula_bytes": expert_parallel_bytes(expert_part(whole, world_size()), states_bytes, recomputes=False)[0],
    }


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Give a list whose one number grows by the bytes of rows that this rank sends to other ranks."""
    found = [0]
    exchange = row_exchange.exchange_rows

    def counting(rows: torch.Tensor, group: Any, sent: list[int], came: list[int]) -> torch.Tensor:
        others = sum(sent) - sent[torch.distributed.get_rank(group)]
        found[0] += others * rows.size(1) * rows.element_size()
        return exchange(rows, group, sent, came)

    with mock.patch.object(row_exchange, "exchange_rows", counting):
        yield found


def _write(path: Path, count: int, prepared: LanguageData) -> None:
    """Write a random model of `SHAPE` with so many experts, and the tokenizer of the data."""
    config = transformers.Qwen3MoeConfig(
        **SHAPE,
        num_experts=count,
        vocab_size=len(prepared.tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        eos_token_id=prepared.tokenizer.eos_token_id,
        pad_token_id=prepared.pad_id,
        bos_token_id=None,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
