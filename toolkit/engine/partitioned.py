"""ZeRO-3: what DeepSpeed lacks where parameters are in pieces; an import puts it there."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, register_external_parameter


def _noting_readers(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method by which a module's code gets a parameter, which notes what a block reads of layers within it
    that it does not call, so that DeepSpeed gathers it for the block in the backward pass too.

    DeepSpeed (0.19.8, parameter_offload.py, ZeROOrderedDict) does so if the parameter is in pieces. If it was gathered
    ahead, as the layer was called in an earlier pass (Gemma 3n's `correction_coefs`, called in evaluation alone), it
    would be in pieces in the backward pass, and perhaps on its way still in the forward pass.
    """

    @wraps(read)
    def read_and_note(self: Any, key: str) -> Any:
        parameter = read(self, key)
        status = getattr(parameter, "ds_status", ZeroParamStatus.NOT_AVAILABLE)
        stack = parameter_offload.FWD_MODULE_STACK
        if status is ZeroParamStatus.NOT_AVAILABLE or not self._in_forward or torch.compiler.is_compiling():
            return parameter
        if parameter.ds_persist or self._parent_module in stack or id(parameter) in stack[-1]._external_params:
            return parameter
        if any(self._parent_module is part for part in stack[-1].modules()):
            register_external_parameter(stack[-1], parameter)
            if status is ZeroParamStatus.INFLIGHT:
                root = next(part for part in reversed(stack) if hasattr(part, "ds_inflight_param_registry"))
                root.ds_inflight_param_registry.pop(parameter).wait()
        return parameter

    return read_and_note


parameter_offload.ZeROOrderedDict.__getitem__ = _noting_readers(parameter_offload.ZeROOrderedDict.__getitem__)
