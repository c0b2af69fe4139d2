"""Whether an update may happen is asked just before it, when its gradient norm is known and the weights are untouched.

A refusal takes DeepSpeed's own way of skipping a step whose gradients overflowed, so that all its books agree: the step
is counted in `skipped_steps`, the schedule does not advance, gradients are dropped. (Seen in deepspeed 0.19.8.)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups

from toolkit.distributed.tensor import group, is_part


class UpdateGate:
    """Stands before the optimizer of one engine.

    Args:
        engine: the engine.
        may_update: gets the norm of the whole gradient before clipping, the same on every rank; called inside
            `engine.step` unless DeepSpeed has found an overflow already. Must answer alike on all ranks.
    """

    def __init__(self, engine: DeepSpeedEngine, may_update: Callable[[float], bool]) -> None:
        self.engine, self.optimizer, self.may_update = engine, engine.optimizer, may_update
        self.grad_norm = math.inf
        """Norm before clipping of the step in progress or just done; inf where gradients overflowed."""
        self.refused = False
        """Whether this gate stopped the step in progress or just done."""
        if hasattr(self.optimizer, "_update_scale"):  # a refusal is no overflow: fp16's loss scale stays as it is
            update_scale = self.optimizer._update_scale
            self.optimizer._update_scale = lambda overflow=False: update_scale(overflow and not self.refused)
        stage = engine.zero_optimization_stage() if hasattr(self.optimizer, "averaged_gradients") else 0
        # Muon puts its update, and its momentum forward, before DeepSpeed takes the norm: it is asked still earlier.
        is_muon = type(engine.basic_optimizer).__name__ == "MuonWithAuxAdam"
        if is_muon and stage == 3:
            self._before_muon("_apply_muon_to_accumulated_grads", "_get_norm_groups", combine_grad_norm_groups)
        elif is_muon and stage and self.optimizer.cpu_offload:
            self._before_muon("_apply_muon_updates_cpu_offload", "scaled_global_norm", float)
        elif stage == 3:
            self._replace("_get_norm_groups", self._stage3_norms)
        elif stage:
            self._replace("scaled_global_norm", self._stage2_norm)
        else:  # no ZeRO, or BF16_Optimizer (stage 1 in bf16)
            take_model_step = engine._take_model_step
            engine._take_model_step = lambda lr_kwargs: self._take_model_step(take_model_step, lr_kwargs)
            if not hasattr(self.optimizer, "overflow"):  # PyTorch's own or a fused one, in fp32
                self._replace("step", self._plain_step)

    def begin(self) -> None:
        """A new step: nothing is known of it yet."""
        self.grad_norm, self.refused = math.inf, False

    def _ask(self, scaled_norm: Any) -> bool:
        """Return whether the update is refused."""
        scale = float(getattr(self.optimizer, "loss_scale", None) or 1.0)  # None: bf16 without ZeRO, FusedAdam (0.19.8)
        norm = float(scaled_norm) / scale
        # DeepSpeed's helpers say -1 for what is not finite.
        self.grad_norm = norm if math.isfinite(norm) and norm >= 0 else math.inf
        self.refused = not self.may_update(self.grad_norm)
        return self.refused

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        real = getattr(self.optimizer, name)
        setattr(self.optimizer, name, lambda *arguments, **options: function(real, *arguments, **options))

    def _stage3_norms(self, real: Callable[[], list[Any]]) -> list[Any]:
        norms = real()
        return [torch.full((), math.inf)] if self._ask(combine_grad_norm_groups(norms)) else norms

    def _stage2_norm(self, real: Callable[..., Any], *arguments: Any) -> Any:
        norm = real(*arguments)
        return torch.full((), math.inf) if self._ask(norm) else norm

    def _before_muon(self, update: str, norm: str, combine: Callable[[Any], Any]) -> None:
        """Ask with the gradient's norm before Muon makes updates of gradients: refused, its momentum stays.

        Args:
            update: what does so.
            norm: what DeepSpeed takes the norm by: of gradients before, of updates after.
            combine: makes one number of that.
        """
        take_norm = getattr(self.optimizer, norm)

        def ask_first(real: Callable[[], None]) -> None:
            if not self._ask(combine(take_norm())):
                real()

        def norm_or_refusal(real: Callable[..., Any], *arguments: Any) -> Any:
            infinite = torch.full((), math.inf)
            return ([infinite] if norm == "_get_norm_groups" else infinite) if self.refused else real(*arguments)

        self._replace(update, ask_first)
        self._replace(norm, norm_or_refusal)

    def _take_model_step(self, real: Callable[[Any], None], lr_kwargs: Any) -> None:
        gradients = self._gradients()
        # In fp32: the squares of fp16 gradients that are in order would overflow.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        own = torch.stack(norms).norm() if norms else torch.zeros((), device=self.engine.device)
        if self._ask(self._over_model(own)) and gradients:
            gradients[0].view(-1)[0] = math.inf  # which DeepSpeed's optimizers skip themselves
        real(lr_kwargs)

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's; of what all ranks of a tensor group have whole the first alone has the gradient."""
        if hasattr(self.optimizer, "get_grads_for_norm"):
            gradients: list[torch.Tensor] = self.optimizer.get_grads_for_norm()[0]
            return gradients
        # Of what all ranks of a tensor group have whole, and of what stages of a pipeline share, one has the gradient.
        has_whole = self.engine.autotp_size() <= 1 or torch.distributed.get_rank(group()) == 0
        own = (p for p in self.engine.module.parameters() if not getattr(p, "ds_pipe_replicated", False))
        return [p.grad for p in own if p.grad is not None and (has_whole or is_part(p))]

    def _over_model(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of the gradients of all ranks that share one model: stages, or ranks that split layers."""
        if not self.engine.pipeline_parallelism and self.engine.autotp_size() <= 1:
            return norm
        total = norm.square()
        torch.distributed.all_reduce(total, group=self.engine.mpu.get_model_parallel_group())
        return total.sqrt()

    def _plain_step(self, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Without ZeRO in fp32 DeepSpeed looks for no overflow, but heeds the attribute."""
        self.optimizer.overflow = self.refused
        return None if self.refused else real(*arguments, **options)
