"""torch.compile: which layers it reaches, and how they are compiled."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.compile.util import is_deepcompile_supported
from transformers import PreTrainedModel

from toolkit.config import schema
from toolkit.engine.recompute import outermost_layers
from toolkit.messages import ConfigError, tr, warn


def reaches_recomputed_layers(
    compiling: schema.CompileConfig, recompute: schema.ActivationCheckpointingConfig, stage: int
) -> bool:
    """Return whether torch.compile compiles layers that are computed again, at a ZeRO `stage`; warn if it does not.

    It traces PyTorch's checkpoint function, but not DeepSpeed's (0.19.8, checkpointing.py, `lazy_disable`). DeepSpeed's
    is needed for its own settings, and by ZeRO 3 without DeepCompile, whose hooks that gather the weights end each
    graph.
    """
    # Whether anything but these two differs from its default: those are settings of DeepSpeed's function.
    needs_deepspeed = replace(recompute, enabled=False, number_checkpoints=0) != schema.ActivationCheckpointingConfig()
    is_traced = not needs_deepspeed and (stage < 3 or compiling.deepcompile)
    if not is_traced:
        warn(
            "torch.compile does not reach the layers: not with activation checkpointing under ZeRO 3, nor with "
            "settings of DeepSpeed's own. Set zero=stage2, or train.activation_checkpointing.enabled=false."
        )
    return is_traced


def compile_layers(engine: DeepSpeedEngine, model: PreTrainedModel, compiling: schema.CompileConfig) -> None:
    """Compile each layer of the engine's model by itself: layers of a kind share what is compiled, so that 28 take as
    long as one. As one graph, a ChatGLM3-6B was not compiled after 150 s (torch 2.11, one H200).

    Compiled as a whole is what has no layers, what DeepCompile changes, and ZeRO 3, whose hooks end each graph anyway.

    Args:
        engine: what trains `model`.
        model: the transformers model; of a pipeline, this rank's stage.
        compiling: the settings.

    Raises:
        ConfigError: the backend is not installed, or there is no DeepCompile here.
        AssertionError, ValueError, RuntimeError: DeepSpeed or PyTorch rejects the settings.
    """
    backends = torch.compiler.list_backends(exclude_tags=())
    if compiling.backend not in backends:
        raise ConfigError(
            "compile.backend = {backend} is not installed. There are: {known}.",
            backend=compiling.backend,
            known=", ".join(backends),
        )
    if compiling.deepcompile and not is_deepcompile_supported():
        raise ConfigError(tr("compile.deepcompile = true needs NVIDIA GPUs, and there are none here. Set it to false."))
    keep_gradients_of_compiled_functions()
    dynamic = {"auto": None, "always": True, "never": False}[compiling.dynamic.value]
    options = {"dynamic": dynamic, **({"mode": compiling.mode} if compiling.mode else {})}
    as_a_whole = compiling.deepcompile or engine.zero_optimization_stage() == 3
    layers = [] if as_a_whole else outermost_layers(model)
    # PyTorch stops compiling a function that it has compiled eight times (torch 2.13, recompile_limit), and all layers
    # are one function to it: each may be of a kind of its own, and is compiled for one length and then for all.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.compile(backend=compiling.backend, **options)
    if not layers:
        engine.compile(compiling.backend, options)


@cache
def keep_gradients_of_compiled_functions() -> None:
    """Make torch 2.11 trace custom functions as 2.12 does, which drops aliases of outputs from what forward hands on
    (_dynamo/variables/higher_order_ops.py, trace_forward_graph). 2.11 silently loses all gradients of an
    autograd.Function that returns a tensor it changed in place (pytorch issue 180642), as DeepSpeed's linear layer of
    ZeRO-3 does that has a bias (0.19.8, runtime/zero/linear.py).
    """
    if torch.__version__.split(".")[:2] != ["2", "11"]:
        return
    from torch._dynamo.variables import higher_order_ops

    name = "speculate_subgraph_with_auto_output_flattening"
    trace = getattr(higher_order_ops, name)

    def without_aliases(*arguments: Any, **options: Any) -> Any:
        # The fifth argument says what is traced.
        is_forward = arguments[4] == "autograd.Function" and options.get("set_subgraph_inputs") == "automatic"
        return trace(*arguments, **{"filter_aliased_intermediates": is_forward, **options})

    setattr(higher_order_ops, name, without_aliases)
