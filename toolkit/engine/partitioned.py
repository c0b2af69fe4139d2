"""A workaround for ZeRO-3's gathering of parameters (DeepSpeed 0.19.8)."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, register_external_parameter


def _registering_reader(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method by which a module's code reads a parameter: a parameter that a block reads from a layer inside it
    without calling that layer is registered with the block, so that DeepSpeed gathers it in the backward pass too.

    DeepSpeed (0.19.8, parameter_offload.py, ZeROOrderedDict) registers it only if it is partitioned when it is read. If
    it was prefetched, as the layer was called in an earlier pass (Gemma 3n's `correction_coefs`, called in evaluation
    alone), it would be partitioned in the backward pass, and perhaps still in flight in the forward pass.
    """

    @wraps(read)
    def read_and_register(self: Any, key: str) -> Any:
        parameter = read(self, key)
        status = getattr(parameter, "ds_status", ZeroParamStatus.NOT_AVAILABLE)
        stack = parameter_offload.FWD_MODULE_STACK
        # Partitioned, so DeepSpeed registers it; not read in a forward pass; or torch.compile reads it.
        if status is ZeroParamStatus.NOT_AVAILABLE or not self._in_forward or torch.compiler.is_compiling():
            return parameter
        # Never partitioned; read by its own layer, for which it is gathered anyway; or registered already.
        if parameter.ds_persist or self._parent_module in stack or id(parameter) in stack[-1]._external_params:
            return parameter
        if any(self._parent_module is part for part in stack[-1].modules()):
            register_external_parameter(stack[-1], parameter)
            if status is ZeroParamStatus.INFLIGHT:
                root = next(part for part in reversed(stack) if hasattr(part, "ds_inflight_param_registry"))
                root.ds_inflight_param_registry.pop(parameter).wait()
        return parameter

    return read_and_register


def register_parameters_read_across_modules() -> None:
    """Let DeepSpeed gather a parameter in the backward pass too where a block reads it from a layer inside it."""
    read = parameter_offload.ZeROOrderedDict.__getitem__
    if not hasattr(read, "__wrapped__"):  # not patched by an earlier engine
        parameter_offload.ZeROOrderedDict.__getitem__ = _registering_reader(read)
