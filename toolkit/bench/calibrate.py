"""Measure in a few seconds what `toolkit plan` otherwise assumes of this machine; run by it, a process per rank.

One layer of the model, with its real sizes and rows, is what two layers take beyond one. Every rank measures at the
same time, as they would train.
"""

import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, GlmForCausalLM

from toolkit.config.schema import Init, RunConfig
from toolkit.models.build import TORCH_DTYPES, random_config
from toolkit.models.chatglm.family import Architecture, architecture_of
from toolkit.models.chatglm.glm import glm_config
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.loss import token_loss_sum
from toolkit.plan.flops import Work, causal_pairs, formula
from toolkit.plan.memory import WIDTHS, longest_rows
from toolkit.plan.outline import config_of, outline_of
from toolkit.plan.speed import Rates

_REPEATS = 5
_UPDATED = 4_000_000
_SENT = 4_000_000


def measure(cfg: RunConfig, local_rank: int, world_size: int, on_cpu: bool) -> Rates:
    """Return this machine's rates. A collective."""
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
    if not on_cpu:
        torch.cuda.set_device(device)
    seconds, flops = zip(*(_layers(cfg, layers, device) for layers in (1, 2)), strict=True)
    speed = (flops[1] - flops[0]) / max(seconds[1] - seconds[0], 1e-6)
    return Rates(
        flops=speed,
        micro_s=max(0.0, seconds[0] - flops[0] / speed),
        memory=_update(device, WIDTHS[cfg.precision.dtype]),
        link=_link(device, world_size, _SENT),
        latency_s=_latency(device, world_size),
        is_measured=True,
    )


def _layers(cfg: RunConfig, layers: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of one micro-batch of a model with so many layers, and its FLOPs."""
    model = _model(cfg, layers).to(device, TORCH_DTYPES[cfg.precision.dtype]).train()
    small = deepcopy(cfg)
    small.tuning = type(cfg.tuning)()
    outline = outline_of(small, print)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    rows = longest_rows(outline, small)
    ids = torch.ones(rows.rows, rows.length, dtype=torch.long)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(rows.length).expand(rows.rows, -1).contiguous(),
        "segment_ids": torch.ones_like(ids),
    }
    if isinstance(model, ChatGLMForConditionalGeneration):
        batch["input_ids"] = ids.clone()
        batch["input_ids"][:, 0] = model.config.bos_token_id
    batch = {name: tensor.to(device) for name, tensor in batch.items()}

    def step() -> None:
        token_loss_sum(model, batch).backward()
        model.zero_grad()

    work = Work(rows.tokens, causal_pairs([rows.length] * rows.rows), rows.tokens)
    return _seconds(step, device), formula(shapes, {**outline.sizes, "layers": layers}).model_flops(work)


def _model(cfg: RunConfig, layers: int) -> torch.nn.Module:
    if cfg.model.init is Init.random:
        shape = replace(cfg.model.shape, num_layers=layers)
        return GlmForCausalLM(random_config(shape, shape.vocab_size))
    config: dict[str, Any] = dict(config_of(cfg))
    architecture = architecture_of(config)
    if architecture is Architecture.v1:
        config = {key: value for key, value in config.items() if key not in ("auto_map", "architectures")}
        return ChatGLMForConditionalGeneration(ChatGLMConfig(**config | {"num_layers": layers}))
    if architecture is not None:
        usual = {"layernorm_epsilon": 1e-5, "seq_length": 8192}
        known = glm_config(usual | config | {"num_layers": layers}, {})
        return AutoModelForCausalLM.from_config(known, trust_remote_code=False)
    known = AutoConfig.for_model(**config)
    known.get_text_config().num_hidden_layers = layers
    return AutoModelForCausalLM.from_config(known, trust_remote_code=False)


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the median of a few runs after the first: the machine as it is, whatever else it does."""
    found = []
    for _ in range(_REPEATS + 1):
        if distributed.is_initialized():
            distributed.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def _update(device: torch.device, width: int) -> float:
    weights = torch.nn.Parameter(torch.ones(_UPDATED, device=device))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return _UPDATED * (16 + 12 + 2 * width) / _seconds(lambda: optimizer.step() and None, device)


def _link(device: torch.device, world_size: int, elements: int) -> float:
    if world_size == 1:
        return 1e12
    sent = torch.ones(elements, device=device)
    seconds = _seconds(lambda: distributed.all_reduce(sent) and None, device)
    return 2 * (world_size - 1) / world_size * sent.nbytes / seconds


def _latency(device: torch.device, world_size: int) -> float:
    one = torch.ones(1, device=device)
    return 0.0 if world_size == 1 else _seconds(lambda: distributed.all_reduce(one) and None, device)


def measure_rank(cfg: RunConfig, rank: int, world_size: int, port: int, on_cpu: bool) -> dict[str, Any]:
    """Return one rank's rates, measured beside the others; the target of a process.

    Args:
        cfg: whose model and rows are measured.
        rank: of this process.
        world_size: processes.
        port: free, for them to meet at.
        on_cpu: whether to leave GPUs alone.
    """
    if on_cpu:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo" if on_cpu else "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    rates = asdict(measure(cfg, rank, world_size, on_cpu))
    distributed.destroy_process_group()
    return rates
