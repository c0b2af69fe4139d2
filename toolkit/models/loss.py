"""The loss of the tokens of a micro-batch, without their logits.

B batch, S sequence, T trained tokens, H hidden width, V vocabulary. The model's output layer yields losses in place of
logits, inside its own forward pass, so that ZeRO-3's hooks see an ordinary one.
"""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.config.schema import LossKernel
from toolkit.models import attention, probe
from toolkit.models.loss_kernels import chunked_loss_sum, chunked_losses
from toolkit.models.record import record_of
from toolkit.sample_types import UNTRAINED, Batch, with_targets

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Makes of states [T, H] what takes the place of the output layer's logits."""


def token_loss_sum(engine: Any, batch: Batch) -> torch.Tensor:
    """Run forward and return the sum of the trained tokens' cross entropies, a float32 scalar of this rank.

    The caller divides by the trained tokens of the global batch, as a mean of micro-batch means weighs tokens unequally
    (transformers#34191). `engine`: a DeepSpeed engine or a model; `batch`: on any device `input_ids`, `labels` (-100
    where untrained), `position_ids`, `segment_ids`, each `[B, S]`; if packed also what `attention.attention_arguments`
    reads.
    """
    return loss_head(engine).loss_sum(engine, on_device(engine, batch))


@torch.no_grad()
def token_losses(engine: Any, batch: Batch) -> torch.Tensor:
    """Return each trained token's cross entropy, at the position before it, 0 elsewhere: float32 `[B, S]`."""
    inputs = on_device(engine, batch)
    with torch.compiler.set_stance("force_eager"):
        losses = loss_head(engine).losses(engine, inputs)
    everywhere = losses.new_zeros(inputs["input_ids"].numel())
    return everywhere.index_copy_(0, inputs["target_indices"] - 1, losses).view(inputs["input_ids"].shape)


def num_trained_tokens(batch: Batch) -> int:
    """Return the number of tokens that `token_loss_sum` sums over, T."""
    return len(with_targets(batch)["target_indices"])


def on_device(engine: Any, batch: Batch) -> Batch:
    """Return a batch with its targets, on the device of an engine or a model."""
    module = getattr(engine, "module", engine)
    moved = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in with_targets(batch).items()}
    # ChatGLM-6B needs a <sop> in each row. Checked here, as a check on the GPU would make the host wait.
    if getattr(module, "builds_positions", False):
        rows = "row_ids" if "row_ids" in batch else "input_ids"
        module.check_rows(batch[rows])
        moved[rows].is_checked = True  # type: ignore[attr-defined]
    return moved


class LossPath(Enum):
    """What a model's output layer computes while a loss is computed."""

    losses = "losses"
    """The losses themselves, without any logits in memory."""
    picked = "picked"
    """Logits of the trained tokens: the model changes the logits, or the layer is more than a matrix."""
    all_logits = "all_logits"
    """Logits of all tokens, as the model does by itself."""


class LossHead:
    """Computes losses in place of a model's output layer, without all logits in memory; `ModelRecord.loss_head`."""

    def __init__(self, kernel: LossKernel = LossKernel.auto) -> None:
        self.kernel = kernel
        self._path: LossPath | None = None
        self._replacement: tuple[Compute, torch.Tensor, int]
        """What `run_with` computes in this pass, of which tokens, and the length of the rows."""
        # The same function object in all passes, which torch.compile calls without tracing it.
        self._forward = torch.compiler.disable(self._compute_picked)

    @property
    def name(self) -> str:
        """Name of the kernel that `LossPath.losses` uses."""
        return LossKernel.liger.value if self.kernel is LossKernel.liger else LossKernel.chunked.value

    def path(self, engine: Any) -> LossPath:
        """Return what the output layer computes; a collective under ZeRO-3 the first time."""
        if self._path is None:
            self._path = LossPath.all_logits if self.kernel is LossKernel.full else self._find_path(engine)
        return self._path

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of `losses`, a scalar, whose gradients are computed from the same logits in the same pass."""
        if self.path(engine) is not LossPath.losses:
            return self.losses(engine, batch).sum()
        sum_of = partial(self._sum_of, layer=output_layer(engine), targets=batch["targets"])
        return self.run_with(engine, batch, batch["target_indices"], sum_of).sum()

    def losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Run forward on a batch from `on_device`; return the losses of the T trained tokens, float32 [T]."""
        path, targets, indices = self.path(engine), batch["targets"], batch["target_indices"]
        if path is LossPath.losses:
            each_loss = partial(_each_loss, layer=output_layer(engine), targets=targets)
            return self.run_with(engine, batch, indices, each_loss).flatten()
        logits = self.picked_logits(engine, batch, indices, path)
        return functional.cross_entropy(logits.float(), targets, reduction="none")

    def _sum_of(self, states: torch.Tensor, layer: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum [1, 1, 1] of the losses of states [T, H]."""
        if not torch.is_grad_enabled():  # the kernels below compute gradients next to the sum
            return _each_loss(states, layer, targets).sum()[None, None, None]
        if self.kernel is not LossKernel.liger or not len(states):  # Liger's divides tokens into chunks: it needs some
            return chunked_loss_sum(states, layer.weight, layer.bias, targets)[None, None, None]
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        # It makes the host wait for the device once.
        kernel = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
        loss: torch.Tensor = kernel(layer.weight, states, targets, layer.bias)
        return loss[None, None, None]

    def picked_logits(self, engine: Any, batch: Batch, indices: torch.Tensor, path: LossPath) -> torch.Tensor:
        """Run forward and return the logits [T, V] that predict the tokens at some indices; `picked`: no others."""
        if path is LossPath.all_logits:
            return forward_output(engine, batch).flatten(0, 1).index_select(0, indices - 1)
        return self.run_with(engine, batch, indices, _logits_by(output_layer(engine))).flatten(0, 1)

    def run_with(self, engine: Any, batch: Batch, indices: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Run forward with `compute` in place of the output layer; return what it returns for the states [T, H] before
        the tokens at some indices. The model takes that for its logits, so it needs three dimensions: tuning=prompt
        cuts [B, S, V] along the second.
        """
        layer, length = output_layer(engine), batch["input_ids"].size(1)
        self._replacement, instance_forward = (compute, indices, length), layer.__dict__.get("forward")
        layer.forward = self._forward
        try:
            return forward_output(engine, batch)
        finally:
            del layer.forward, self._replacement
            if instance_forward is not None:
                layer.forward = instance_forward

    def _compute_picked(self, states: torch.Tensor) -> torch.Tensor:
        """What the output layer's forward is during `run_with`, for its inputs [B, S, H]."""
        compute, indices, length = self._replacement
        # Skips the learned tokens in front of each row (tuning=prompt).
        return compute(states[:, -length:].flatten(0, 1).index_select(0, indices - 1))

    def _find_path(self, engine: Any) -> LossPath:
        """Return how losses can be computed, by a forward pass over a few tokens: from the output layer's inputs if the
        model returns that layer's output unchanged as logits; else from its output for trained tokens, or for all.
        """
        module, layer = getattr(engine, "module", engine), output_layer(engine)
        if layer is None:
            return LossPath.all_logits
        # A row of eight tokens of which the last five are trained.
        token = module.config.pad_token_id if getattr(module, "builds_positions", False) else 0
        ids = torch.full((1, 8), token, device=engine.device)
        positions = torch.arange(8, device=engine.device)[None]
        labels = torch.where(positions < 3, UNTRAINED, ids)
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": torch.ones_like(ids)}
        batch = with_targets(batch)
        if not record_of(module).begins:  # the last stage of a pipeline
            shape = (1, 8, module.config.hidden_size)
            batch["inputs_embeds"] = torch.zeros(shape, dtype=module.dtype, device=engine.device)
        # Input, output, and how often the output had been changed in place.
        layer_calls: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        is_logits: list[bool] = []

        def record_call(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            layer_calls.append((inputs[0], output, output._version))

        def compare(_: nn.Module, __: Any, output: Any) -> None:
            is_logits.append(
                any(output.logits is tensor and tensor._version == version for _, tensor, version in layer_calls)
            )

        # The last hook of the layer and the first of the model, as DeepSpeed's hooks replace the tensor objects.
        hooks = layer.register_forward_hook(record_call), module.register_forward_hook(compare, prepend=True)
        without_compiling = torch.compiler.set_stance("force_eager")
        try:
            with probe.evaluating(engine), without_compiling:
                logits = self.run_with(engine, batch, batch["target_indices"], _logits_by(layer))
        finally:
            for hook in hooks:
                hook.remove()
        if len(layer_calls) != 1 or logits.shape[:2] != (len(batch["targets"]), 1):
            return LossPath.all_logits
        [(states, output, _)] = layer_calls
        is_plain = type(layer) is nn.Linear and states.dtype == layer.weight.dtype == output.dtype
        return LossPath.losses if is_plain and is_logits == [True] else LossPath.picked


def forward_output(engine: Any, batch: Batch) -> torch.Tensor:
    """Run an engine or a model and return what its output layer returned: logits, or what `LossHead` puts there."""
    output: torch.Tensor = engine(**forward_arguments(getattr(engine, "module", engine), batch)).logits
    return output


def output_layer(engine: Any) -> Any:
    """Return the output layer of an engine or a model."""
    return getattr(engine, "module", engine).get_output_embeddings()


def _each_loss(states: torch.Tensor, layer: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses [T, 1, 1] of states [T, H]."""
    return chunked_losses(states, layer.weight, layer.bias, targets)[:, None, None]


def as_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [T, H] as those of T rows of one token, [T, 1, H]."""
    return states[:, None]


def _logits_by(layer: Any) -> Compute:
    """Return what computes logits [T, 1, V] by a layer's forward, which `LossHead` is going to replace."""
    layer_forward = layer.forward

    def logits(states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer_forward(as_rows(states))
        return output

    return logits


def forward_arguments(module: Any, batch: Batch) -> dict[str, Any]:
    """Return the arguments of a model's forward for a batch on its device."""
    arguments: dict[str, Any] = {"use_cache": False}
    # ChatGLM-6B computes positions from the ids of special tokens, so it needs the ids even with embeddings.
    builds_positions = getattr(module, "builds_positions", False)
    if "segment_ids" in batch:
        arguments |= {"position_ids": batch["position_ids"], **attention.attention_arguments(module, batch)}
    if "inputs_embeds" in batch:
        arguments["inputs_embeds"] = batch["inputs_embeds"]
    if "inputs_embeds" not in batch or builds_positions:
        arguments["input_ids"] = batch["input_ids"]
    return arguments


def loss_head(engine: Any) -> LossHead:
    """Return the `LossHead` of an engine or a model: a run's is made by tasks/language_model.py (`adapt`), with
    `kernels.loss`; for a model without one it is made here.
    """
    record = record_of(engine)
    if record.loss_head is None:
        record.loss_head = LossHead()
    return record.loss_head
