"""The gradient norm before a step where DeepSpeed tells none: without ZeRO, or in BF16_Optimizer (ZeRO 1 in bf16)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import groups

from toolkit.distributed import process_group
from toolkit.engine.deepspeed_patches import UpdateVeto


def ask_before_step(veto: UpdateVeto) -> None:
    """Ask `veto` before the engine's step; a veto makes a gradient infinite, for which DeepSpeed skips the update."""
    engine, optimizer = veto.engine, veto.optimizer
    take_model_step = engine._take_model_step

    def judge_first(lr_kwargs: Any) -> None:
        gradients, experts = _gradients(engine, optimizer)
        norm = _norm_of(gradients, engine.device)
        for name, expert_gradients in experts.items():  # over the ranks that share one copy of all experts
            total = _norm_of(expert_gradients, engine.device).square()
            torch.distributed.all_reduce(total, group=groups._get_expert_parallel_group(name))
            norm = (norm.square() + total).sqrt()
        if engine.pipeline_parallelism or process_group.tensor_group_size() > 1:
            total = norm.square()  # over the ranks that share one model: stages, or ranks that split layers
            torch.distributed.all_reduce(total, group=engine.mpu.get_model_parallel_group())
            norm = total.sqrt()
        if veto.judge(norm) and gradients:
            gradients[0].view(-1)[0] = math.inf
        take_model_step(lr_kwargs)

    def step_unless_vetoed(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        optimizer.overflow = veto.vetoed  # in fp32 DeepSpeed looks for no overflow, but reads this
        return None if veto.vetoed else real(*arguments, **options)

    engine._take_model_step = judge_first
    if not hasattr(optimizer, "overflow"):  # PyTorch's own or a fused one, in fp32
        veto.wrap("step", step_unless_vetoed)


def _norm_of(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients together, 0 of none."""
    # In fp32, as the squares of ordinary fp16 gradients would overflow.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=device)


def _gradients(engine: DeepSpeedEngine, optimizer: Any) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Return this rank's gradients that count in the norm, and those of divided experts by the name of their group of
    ranks. A parameter that several ranks of one model hold in full counts on one of them.
    """
    if hasattr(optimizer, "get_grads_for_norm"):  # BF16_Optimizer (0.19.8, runtime/bf16_optimizer.py)
        gradients: tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]] = optimizer.get_grads_for_norm()
        return gradients
    is_first = process_group.tensor_rank() == 0
    parameters = (p for p in engine.module.parameters() if not getattr(p, "ds_pipe_replicated", False))
    counted = (p.grad for p in parameters if is_first or process_group.is_tensor_part(p))
    return [gradient for gradient in counted if gradient is not None], {}
