"""The package liger-kernel: Triton kernels for GPUs. Written against its release 0.8.5."""

from importlib.util import find_spec
from typing import Any

import torch

from toolkit.config.schema import KernelsConfig, LossKernel, When
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.models.attention import trains_on_gpu


def liger_loss_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return what `chunked_loss_sum` returns, by liger's fused kernel; it makes the host wait for the device once."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    kernel = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
    loss: torch.Tensor = kernel(weight, hidden, targets, bias)
    return loss


def apply_liger(model: Any, kernels: KernelsConfig) -> str:
    """Replace a model's norms, feed-forward layers and rotary positions by liger's, as `kernels.liger` says.

    Args:
        model: as built, before anything is added to it.
        kernels: what was asked for.

    Returns:
        Why nothing was replaced; "" if it was.

    Raises:
        ConfigError: it was asked for and cannot be.
    """
    if kernels.loss is LossKernel.liger and (reason := _why_no_kernels()):
        raise ConfigError(tr("kernels.loss = liger: {reason}", reason=reason))
    if kernels.liger is When.never:
        return tr("kernels.liger is never")
    reason = _why_no_kernels() or _why_not_this(model.config.model_type)
    if reason and kernels.liger is When.always:
        raise ConfigError(tr("kernels.liger = always: {reason}", reason=reason))
    if not reason:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # Losses are ours to compute (kernels.loss): they are summed over the global batch.
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return reason


def _why_no_kernels() -> str:
    if not trains_on_gpu():
        return tr("there is no GPU")
    if find_spec("liger_kernel") is None:
        return tr("the package liger-kernel is not installed (pip install liger-kernel)")
    return ""


def _why_not_this(kind: str) -> str:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return "" if kind in MODEL_TYPE_TO_APPLY_LIGER_FN else tr("liger-kernel does not know {kind} models", kind=kind)
