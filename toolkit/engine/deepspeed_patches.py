"""Workarounds for DeepSpeed and PyTorch, each with the version that needs it; importing this module applies some."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cpuinfo
import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime import utils
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.superoffload import superoffload_utils
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zenflow import zenflow_utils
from deepspeed.runtime.zero import stage3, stage_1_and_2

from toolkit import children
from toolkit.engine.parameters import is_muon

# 1.2 s each time; for an op of the CPU DeepSpeed asks twice, to compare with what it was built on (0.19.8,
# op_builder/builder.py, cpu_arch and simd_width).
cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
# To allocate the optimizer's states, DeepSpeed updates once with gradients of 0 where fp16 or bf16 runs without ZeRO
# (0.19.8, runtime/fp16/fused_optimizer.py). Adam counts that step, so that its first real update has 0.74 of its size,
# and weights decay once too often. Optimizers allocate their states at the first update anyway.
FP16_Optimizer.initialize_optimizer_states = FP16_UnfusedOptimizer.initialize_optimizer_states = lambda _: None

# ZeRO-1 in bf16 prints memory twelve times on rank 0's terminal, whatever the log level is (0.19.8,
# runtime/bf16_optimizer.py); metrics.jsonl and the report have memory.
deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **_options: None


def _sharing_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fused optimizer's `step`, extended to give all parameters of a group the same count of steps.
    DeepSpeed's own counts for the last parameter alone (0.19.8, fused_adam.py, fused_lion.py): resumed by another
    optimizer, the moments of all others would be taken for those of a first step.
    """

    def step_and_share(self: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        result = step(self, *arguments, **options)
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if self.state.get(parameter)]
            count = max((state["step"] for state in states), default=0)
            for state in states:
                state["step"] = count
        return result

    return step_and_share


for _fused in (FusedAdam, FusedLion):
    _fused.step = _sharing_steps(_fused.step)


def scale_fp16_loss(engine: deepspeed.DeepSpeedEngine) -> None:
    """Multiply fp16 losses by the loss scale without ZeRO: DeepSpeed divides the gradients by it, but does not multiply
    the loss, so that clipping has no effect and small gradients are lost (0.19.8, engine.backward; pull request 8393).
    """
    if engine.fp16_enabled() and not engine.zero_optimization():
        backward = engine.backward
        engine.backward = lambda loss, **options: backward(loss * engine.optimizer.loss_scale, **options)


def _mask_invalid(input: torch.Tensor, device: object = None, val: float = -1.0) -> None:
    """Replace NaN and Inf by `val` in place, as DeepSpeed's `mask_nan_or_inf_with_val_inplace`, but without waiting for
    a GPU: DeepSpeed passes a tensor as the value (0.19.8, runtime/utils.py), which `masked_fill_` reads back.
    """
    input.masked_fill_(~input.isfinite(), val)


def patch_norm_masking() -> None:
    """Let DeepSpeed's optimizers mask a gradient norm that is not finite by `_mask_invalid`, which does not wait."""
    for module in (utils, stage3, stage_1_and_2):
        module.mask_nan_or_inf_with_val_inplace = _mask_invalid


def end_optimizer_processes_with_rank() -> None:
    """Let the processes that ZenFlow and SuperOffload start for their optimizers end when this rank is killed, by
    replacing the function that each of them runs. Python ends them only if the rank exits regularly (deepspeed 0.19.8).
    """
    targets = (zenflow_utils, "zenflow_optimizer_process"), (superoffload_utils, "superoffload_optimizer_worker")
    for module, name in targets:  # the replacement calls the original by its name, in the new process
        setattr(module, name, children.ending_with_this(module.__name__, name))


def rotary_frequencies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's rotary frequencies by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def assert_frequencies_unchanged(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if the frequencies `before`, by name, were cast, as DeepSpeed 0.18.9 did: in half precision
    positions beyond a few hundred turn into noise.
    """
    for name, buffer in rotary_frequencies(model).items():
        expected = before[name].to(buffer.device)
        if buffer.dtype is not torch.float32 or not torch.equal(buffer, expected):
            raise RuntimeError(f"{name} is {buffer.dtype} after deepspeed.initialize; it must stay as it was, float32")


class UpdateVeto:
    """Asks `may_update` in each `engine.step`, when the gradient norm is known and the weights are still unchanged.

    `may_update` gets the global gradient norm before clipping, the same on every rank, and must return the same on all;
    it is not called if DeepSpeed has found an overflow already. A vetoed step is skipped as DeepSpeed (0.19.8) skips
    one whose gradients overflowed: it counts in `skipped_steps`, the schedule does not advance, gradients are dropped.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, may_update: Callable[[float], bool]) -> None:
        self.engine, self.optimizer, self.may_update = engine, engine.optimizer, may_update
        self.grad_norm = math.inf
        """Norm before clipping of the step in progress or just done; inf where gradients overflowed."""
        self.vetoed = False
        """Whether the step in progress or just done was stopped here."""
        self._grow_scale: Callable[[], None] | None = None
        """Tells the loss scaler of a step without overflow, once the step is done; None: nothing to tell (yet)."""
        if hasattr(self.optimizer, "_update_scale"):  # it has a loss scaler, to which a veto must be no overflow
            self.wrap("_update_scale", self._update_scale)
            self.wrap("step", self._step)
        stage = engine.zero_optimization_stage()
        if stage and hasattr(self.optimizer, "averaged_gradients"):  # ZeRO's own optimizers: they compute the norm
            self._ask_in_zero(is_stage3=stage == 3)
        else:  # the optimizers of stage 0, and BF16_Optimizer, which is that of stage 1 in bf16
            from toolkit.engine import veto_without_zero

            veto_without_zero.ask_before_step(self)

    def begin(self) -> None:
        """Start a step: forget the norm and the veto of the last one."""
        self.grad_norm, self.vetoed = math.inf, False

    def _update_scale(self, real: Callable[[bool], None], overflow: bool = False) -> None:
        """Stand in for the optimizer's method `real`: an overflow lowers fp16's loss scale at once, unless it is a
        veto; any other call is put off until after the update, see `_step`.
        """
        if overflow and not self.vetoed:
            real(True)
        else:
            self._grow_scale = partial(real, False)

    def _step(self, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Stand in for the optimizer's `step`, `real`: let the loss scale grow after the update. DeepSpeed doubles it
        before, and divides gradients by the doubled one, which halves an update without clipping (0.19.8).
        """
        self._grow_scale = None
        result = real(*arguments, **options)  # in which `_update_scale` is called
        if self._grow_scale is not None:
            self._grow_scale()
        return result

    def judge(self, scaled_norm: Any) -> bool:
        """Set `grad_norm` and `vetoed` from a norm in units of the loss scale; return `vetoed`."""
        scale = float(getattr(self.optimizer, "loss_scale", None) or 1.0)  # None: bf16 without ZeRO, FusedAdam (0.19.8)
        norm = float(scaled_norm) / scale
        # DeepSpeed's helpers return -1 for a norm that is not finite.
        self.grad_norm = norm if math.isfinite(norm) and norm >= 0 else math.inf
        self.vetoed = not self.may_update(self.grad_norm)
        return self.vetoed

    def wrap(self, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of the optimizer by a function whose first argument is that method."""
        real = getattr(self.optimizer, name)
        setattr(self.optimizer, name, lambda *arguments, **options: function(real, *arguments, **options))

    def _ask_in_zero(self, is_stage3: bool) -> None:
        """Ask where DeepSpeed's ZeRO computes the norm: after a veto that method returns infinity, for which the update
        is skipped. Stage 3's returns a list of norms, that of stages 1 and 2 one norm. In two cases Muon's momentum is
        updated before that: `may_update` is asked before it then, and a veto skips the momentum's update too.
        """
        norm_method = "_get_norm_groups" if is_stage3 else "scaled_global_norm"
        compute_norm = getattr(self.optimizer, norm_method)
        momentum_method = ""
        if is_muon(self.engine):
            if is_stage3:
                momentum_method = "_apply_muon_to_accumulated_grads"
            elif self.optimizer.cpu_offload:
                momentum_method = "_apply_muon_updates_cpu_offload"

        def judge(norm: Any) -> None:
            self.judge(combine_grad_norm_groups(norm) if is_stage3 else norm)

        def update_unless_vetoed(real: Callable[[], None]) -> None:
            judge(compute_norm())
            if not self.vetoed:
                real()

        def infinity() -> Any:
            norm = torch.full((), math.inf)
            return [norm] if is_stage3 else norm

        def judged_norm(real: Callable[..., Any], *arguments: Any) -> Any:
            norm = real(*arguments)
            judge(norm)
            return infinity() if self.vetoed else norm

        def norm_unless_vetoed(real: Callable[..., Any], *arguments: Any) -> Any:
            return infinity() if self.vetoed else real(*arguments)

        if momentum_method:  # DeepSpeed calls it before it computes a norm, which is then that of updates
            self.wrap(momentum_method, update_unless_vetoed)
            self.wrap(norm_method, norm_unless_vetoed)
        else:
            self.wrap(norm_method, judged_norm)


def pass_rate_to_second_optimizers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Give the learning rate to DeepSpeed's second optimizers, which would begin or stay at the peak rate (0.19.8).

    ZenFlow's gets it too late for its first update. `backup_optimizer`, for sub-groups on the GPU under partial
    offloading, shares all parameter groups but the first, and decays as AdamW even if Adam is asked for (stage3.py).
    """
    if engine.zenflow:
        engine.optimizer._sync_selective_optimizer_lr()
    elif backup := getattr(engine.optimizer, "backup_optimizer", None):
        first = engine.basic_optimizer.param_groups[0]
        for name, value in backup.param_groups[0].items():
            first.setdefault(name, value)
        backup.param_groups[0] = first
        for group in backup.param_groups:
            group["decoupled_weight_decay"] = engine.basic_optimizer.adam_w_mode
