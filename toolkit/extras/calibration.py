"""Measures the speeds that `toolkit plan` would otherwise assume of this machine, on every rank:
`python -m toolkit.extras.calibration CONFIG ANSWER`.

All ranks measure at once, as they train. A layer's time, at its real sizes, is that of two layers less that of one.
"""

import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.nn import functional
from torch.optim.lr_scheduler import ConstantLR
from transformers import AutoConfig, AutoModelForCausalLM, GlmForCausalLM

from toolkit.config import schema
from toolkit.config.load import load
from toolkit.distributed import process_group
from toolkit.engine import build, ds_config
from toolkit.launch import environment
from toolkit.messages import set_language, tr
from toolkit.models import directory, loss
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration, glm_config
from toolkit.models.load import TORCH_DTYPES, random_config
from toolkit.plan import memory
from toolkit.plan.flops import Work, causal_pairs, formula
from toolkit.plan.lookup import outline_of
from toolkit.plan.model_config import config_of
from toolkit.plan.outline import Outline
from toolkit.plan.speed import Rates
from toolkit.sample_types import Batch

_REPEATS = 7
_ELEMENTS = 4_000_000
"""Weights that an optimizer step updates, and numbers that a collective sends."""
_TRIES = 3
"""Attempts at measuring a layer, whose time is a difference and must be positive."""
_NEVER = 1_000_000
"""Micro-batches of a step that never comes: the optimizer is measured by itself."""


def measure(cfg: schema.RunConfig, world_size: int, device: torch.device) -> Rates:
    """Measure FLOP/s, memory and link speed (bytes/s) of this rank for a config's model and longest rows. A collective.

    The rates are the machine's, so all weights are trained, whatever the recipe's fine-tuning method.
    """
    full_cfg = replace(cfg, tuning=type(cfg.tuning)())
    width = memory.WIDTHS[cfg.precision.dtype]
    outline = outline_of(full_cfg)
    first_s, layer_s, first_flops, layer_flops = _time_layers(full_cfg, outline, device)
    speed = layer_flops / layer_s
    link, latency_s = 1e12, 0.0  # of one rank, which sends nothing: as fast as can be
    if world_size > 1:
        sent, single = torch.ones(_ELEMENTS, device=device), torch.ones(1, device=device)
        seconds = _seconds(lambda: torch.distributed.all_reduce(sent))
        link = 2 * (world_size - 1) / world_size * sent.nbytes / seconds  # bytes that a rank sends in a ring
        latency_s = _seconds(lambda: torch.distributed.all_reduce(single))
    weights = torch.nn.Parameter(torch.ones(_ELEMENTS, device=device))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    # On GPUs ZeRO-3 gathers while they compute, so that only the links' own speed counts: 0 stands for `link`.
    is_cpu_group = device.type == "cpu" and world_size > 1
    gather = _gather_rate(full_cfg, outline, layer_s, device, world_size) if is_cpu_group else 0.0
    return Rates(
        flops=speed,
        micro_s=max(0.0, first_s - first_flops / speed),  # what a micro-batch takes besides its operations
        # Bytes of each weight, as the plan counts them: gradient read, fp32 weight read and written (12), two states of
        # Adam read and written (16), and the weight in the run's precision read and written.
        memory=_ELEMENTS * (16 + 12 + 2 * width) / _seconds(optimizer.step),
        link=link,
        gather=min(gather, link),
        latency_s=latency_s,
        is_measured=True,
    )


def _time_layers(cfg: schema.RunConfig, outline: Outline, device: torch.device) -> tuple[float, float, float, float]:
    """Return seconds of a micro-batch (forward and backward) of a one-layer model, seconds that another layer adds, and
    the FLOPs of the one and of the other. A collective; ValueError if a second layer seems to take no time.
    """
    rows = memory.longest_rows(outline, cfg)
    work = Work(rows.tokens, causal_pairs([rows.length] * rows.rows), rows.tokens)
    calls, flops = [], []
    for layers in (1, 2):
        model = build_model(cfg, layers, device).train()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        flops.append(formula(shapes, {**outline.sizes, "layers": layers}).model_flops(work))
        calls.append(partial(_pass, model, longest_batch(cfg, outline, model)))
    for _ in range(_TRIES):
        first_s, layer_s = _seconds_and_difference(calls)
        if layer_s > 0:
            return first_s, layer_s, flops[0], flops[1] - flops[0]
    raise ValueError(tr("two layers took no longer than one: this machine is too busy with something else"))


def _pass(model: torch.nn.Module, batch: Batch) -> None:
    """Run a micro-batch forward and backward."""
    loss.token_loss_sum(model, batch).backward()
    model.zero_grad()


def _gather_rate(
    cfg: schema.RunConfig, outline: Outline, layer_s: float, device: torch.device, world_size: int
) -> float:
    """Return the bytes/s at which ZeRO-3 gathers and reduces a layer, from how much longer a layer takes under it than
    `layer_s`, its seconds without ZeRO. That includes DeepSpeed's copies and work around each collective (0.19.8: on
    CPU ranks as much again). Settings that would compute something twice or in another way are switched off.
    """
    zero3 = replace(
        cfg,
        zero=schema.ZeroConfig(stage=3),
        optim=replace(cfg.optim, torch=True),  # DeepSpeed's own Adam would have to be compiled first
        batch=replace(cfg.batch, micro_per_gpu=1, global_size=_NEVER * world_size),
        train=replace(cfg.train, activation_checkpointing=schema.ActivationCheckpointingConfig()),
        compile=schema.CompileConfig(),
        profile=schema.ProfileConfig(),
        ds_extra={},
    )
    ds = ds_config.build_ds_config(zero3, world_size).values
    calls, engines, sizes, linear = [], [], [], functional.linear
    for layers in (1, 2):
        model = build_model(cfg, layers, device)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        batch = longest_batch(cfg, outline, model)
        schedule = partial(ConstantLR, factor=1)
        engine = build.initialize_engine(model, ds, zero3.train.activation_checkpointing, schedule, optim=zero3.optim)
        engine.train()
        engines.append(engine)
        # As default values, each call keeps the engine and batch of its own turn of the loop.
        calls.append(lambda engine=engine, batch=batch: engine.backward(loss.token_loss_sum(engine, batch)))
    _, zero3_layer_s = _seconds_and_difference(calls)
    for engine in engines:
        engine.destroy()
    functional.linear = linear  # DeepSpeed's, which keeps more for the backward pass, would stay (0.19.8)
    layer_params = sizes[1] - sizes[0]
    # Of a micro-batch: weights forward and backward, and gradients.
    sent = 3 * layer_params * memory.WIDTHS[cfg.precision.dtype] * (world_size - 1) / world_size
    return sent / max(zero3_layer_s - layer_s, 1e-6)  # a difference of measured times may come out as 0 or less


def longest_batch(cfg: schema.RunConfig, outline: Outline, model: torch.nn.Module) -> Batch:
    """Return the largest micro-batch that a config allows, `[B, S]` on the CPU; every token is trained."""
    rows = memory.longest_rows(outline, cfg)
    size = (rows.rows, rows.length)
    ids = torch.full(size, 5)  # any token: its id changes neither time nor memory
    if isinstance(model, ChatGLMForConditionalGeneration):  # which finds the end of the prompt by this token
        ids[:, 1] = model.config.bos_token_id
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(rows.length).repeat(rows.rows, 1),
        "segment_ids": torch.ones(size, dtype=torch.long),
    }


def build_model(cfg: schema.RunConfig, layers: int, device: torch.device) -> torch.nn.Module:
    """Return a recipe's model, random, with `layers` layers, in its precision on `device`; only its config is read."""
    if cfg.model.init is schema.Init.random:
        shape = replace(cfg.model.shape, num_layers=layers)
        model: torch.nn.Module = GlmForCausalLM(random_config(shape, shape.vocab_size))
    else:
        model = _model_of_config(dict(config_of(cfg)), layers)
    for parameter in model.parameters():  # alone: rotary frequencies stay float32, as in a run
        parameter.data = parameter.data.to(TORCH_DTYPES[cfg.precision.dtype])
    return model.to(device)


def _model_of_config(config: dict[str, Any], layers: int) -> torch.nn.Module:
    """Return a random model of a config.json with `layers` layers, of the class that a run takes."""
    architecture = directory.architecture_of(config)  # None: a model of transformers
    if architecture is directory.Architecture.v1:  # ChatGLM-6B; its config.json names Python files of its own
        config = {key: value for key, value in config.items() if key not in ("auto_map", "architectures")}
        return ChatGLMForConditionalGeneration(ChatGLMConfig(**config | {"num_layers": layers}))
    if architecture is not None:  # ChatGLM2 and later, which transformers' GLM class computes
        # Old files lack them. They and stretched (divided) positions change no time or size.
        defaults = {"layernorm_epsilon": 1e-5, "seq_length": 8192}
        model_config = glm_config(defaults | config | {"num_layers": layers}, {}, divides_positions=False)
    else:
        model_config = AutoConfig.for_model(**config)
        model_config.get_text_config().num_hidden_layers = layers
    model: torch.nn.Module = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
    return model


def _seconds(call: Callable[[], object]) -> float:
    """Return the median seconds of a call over several runs, after a first one that is not timed."""
    call()
    return statistics.median(_once(call) for _ in range(_REPEATS))


def _seconds_and_difference(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Return this rank's median seconds of the first of two calls, and how many more the second takes, the largest
    median of all ranks. They are timed in turns, as a machine's speed drifts. A collective.
    """
    first, second = calls
    first(), second()  # not timed
    pairs = [(_once(first), _once(second)) for _ in range(_REPEATS)]
    # Of the slowest rank, as all wait for it; so all find the same, and do the same about it.
    own_difference = statistics.median(second_s - first_s for first_s, second_s in pairs)
    return statistics.median(first_s for first_s, _ in pairs), max(process_group.gather(own_difference))


def _once(call: Callable[[], object]) -> float:
    """Return the seconds of one call, begun by all ranks together, until the device has finished its work."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    get_accelerator().synchronize()
    started = time.perf_counter()
    call()
    get_accelerator().synchronize()
    return time.perf_counter() - started


def main(config: str, answer: str) -> None:
    """Measure a config's model and sequences as one of all ranks; write this rank's rates to the JSON file `answer`."""
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 deprecates, and logs the engines that it makes.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    cfg = load([f"recipe={config}"]).cfg
    set_language(cfg.language)
    ranks = environment.detect(os.environ)
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(1)  # all ranks measure at once: with a thread per core each they would compete
    try:
        device = process_group.start(schema.DistributedConfig())
        rates = measure(cfg, ranks.world_size, device)
        process_group.stop()
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)  # one line, which the parent process shows
    Path(answer).write_text(json.dumps(asdict(rates)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
