"""liger-kernel's Triton kernels for GPUs, written against its release 0.8.5."""

from typing import Any

from toolkit.config import requirements
from toolkit.config.schema import KernelsConfig, LossKernel, When
from toolkit.distributed import accelerator
from toolkit.messages import ConfigError, tr


def apply_liger(model: Any, kernels: KernelsConfig) -> str:
    """Replace a model's norms, MLPs and rotary positions by liger's kernels if `kernels.liger` allows.

    Returns:
        The reason why they were not replaced, "" if they were. ConfigError if they must be and cannot.
    """
    reason = requirements.reason_not_to_use_liger(accelerator.trains_on_cuda())
    if reason and kernels.loss is LossKernel.liger:
        raise ConfigError("kernels.loss = liger: {reason}", reason=reason)
    if kernels.liger is When.never:
        return tr("kernels.liger is never")
    if not reason:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        kind = model.config.model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            reason = tr("liger-kernel does not know {kind} models", kind=kind)
    if reason and kernels.liger is When.always:
        raise ConfigError("kernels.liger = always: {reason}", reason=reason)
    if not reason:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # Not the loss: the toolkit sums it over the global batch (kernels.loss).
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
        from toolkit.models import experts

        experts.restore_expert_interface(model)
    return reason
