"""The loss of the tokens of a micro-batch, without their logits.

B batch, S sequence, T trained tokens, H hidden width, V vocabulary. The model's output layer yields losses in place of
logits, inside its own forward pass, so that ZeRO-3's hooks see an ordinary one. Gradients are made next to the loss, a
chunk of tokens at a time: nothing of the size [T, V] is ever held, and no logit is computed twice. Hsu et al. 2024
(Liger Kernel), https://arxiv.org/abs/2410.10989, section 3.2.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from toolkit.config.schema import LossKernel
from toolkit.models import attention, probe
from toolkit.models.record import record_of
from toolkit.sample_types import UNTRAINED, Batch, with_targets

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Makes of states [T, H] what takes the place of the output layer's logits."""
CHUNK_BYTES = 128 * 2**20
"""Of the logits in float32 that the loss computes at once; plan/memory.py counts with it."""


def token_loss_sum(engine: Any, batch: Batch) -> torch.Tensor:
    """Run forward and return the sum of the trained tokens' cross entropies, a float32 scalar of this rank.

    The caller divides by the trained tokens of the global batch, as a mean of micro-batch means weighs tokens unequally
    (transformers#34191).

    Args:
        engine: a DeepSpeed engine or a model.
        batch: `input_ids`, `labels` (-100 where untrained), `position_ids` and `segment_ids`, each `[B, S]`, on any
            device; if it is packed also what `attention.attention_arguments` reads.
    """
    return loss_head(engine).loss_sum(engine, on_device(engine, batch))


def answer_log_probabilities(engine: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and return for each sample, row by row, the sum of its trained tokens' log-probabilities (nats),
    which has gradients, and the number of these tokens, both float32 [samples] on the engine's device. A sample without
    trained tokens gives 0 and 0. `engine`, `batch`: as in `token_loss_sum`.
    """
    # The predicting tokens count: they are of the same sample, and always in this rank's part of the rows.
    indices, segments = batch["target_indices"].cpu() - 1, batch["segment_ids"].cpu()
    in_row = samples_in_rows(batch)
    before = in_row.cumsum(0) - in_row
    samples = before[indices // segments.size(1)] + segments.flatten()[indices] - 1
    counts = torch.bincount(samples, minlength=int(in_row.sum()))
    losses = loss_head(engine).losses(engine, on_device(engine, batch))
    # Not index_add, which adds in another order each time on a GPU.
    sums = torch.stack([part.sum() for part in losses.split(counts.tolist())])
    sums_and_counts = attention.sum_over_row_parts(torch.stack((-sums, counts.to(losses, non_blocking=True))), batch)
    return sums_and_counts[0], sums_and_counts[1].detach()


def samples_in_rows(batch: Batch) -> torch.Tensor:
    """Return how many samples each row of a batch holds, int64 [B]."""
    return attention.full_row_segments(batch).amax(dim=1).cpu()


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
    return len(batch["target_indices"])


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


class Scores(NamedTuple):
    """Factors of logits [T, V]: states [T, H], weight [V, H] and bias [V]; without a weight states are the logits."""

    states: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def vocabulary(self) -> int:
        """V."""
        return (self.states if self.weight is None else self.weight.t()).size(1)

    def logits(self, part: slice) -> torch.Tensor:
        """Return the logits of a slice of the tokens in float32, as a new tensor."""
        states = self.states[part]
        if self.weight is None:
            return states.to(torch.float32, copy=True)
        return functional.linear(states, self.weight, self.bias).float()


class LossHead:
    """Computes losses in place of a model's output layer, without all logits in memory; `ModelRecord.loss_head`."""

    def __init__(self, kernel: LossKernel = LossKernel.auto) -> None:
        self.kernel = kernel
        self._path: LossPath | None = None
        self._replacement: tuple[Compute, torch.Tensor, int]
        """What `_run_with` computes in this pass, of which tokens, and the length of the rows."""
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
        sum_of = partial(self._sum_of, layer=_output_layer(engine), targets=batch["targets"])
        return self._run_with(engine, batch, batch["target_indices"], sum_of).sum()

    def losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Run forward on a batch from `on_device`; return the losses of the T trained tokens, float32 [T]."""
        path, targets, indices = self.path(engine), batch["targets"], batch["target_indices"]
        if path is LossPath.losses:
            each_loss = partial(_each_loss, layer=_output_layer(engine), targets=targets)
            return self._run_with(engine, batch, indices, each_loss).flatten()
        logits = self._picked_logits(engine, batch, indices, path)
        return functional.cross_entropy(logits.float(), targets, reduction="none")

    def scores(self, engine: Any, batch: Batch, indices: torch.Tensor) -> Scores:
        """Run forward on a batch from `on_device`; return the scores of the tokens at T indices of B x S."""
        path = self.path(engine)
        if path is not LossPath.losses:
            return Scores(self._picked_logits(engine, batch, indices, path))
        layer = _output_layer(engine)
        states = self._run_with(engine, batch, indices, _as_rows).flatten(0, 1)
        return Scores(states, layer.weight, layer.bias)

    def states(self, engine: Any, batch: Batch, indices: torch.Tensor) -> torch.Tensor:
        """Run forward on a batch from `on_device`; return the output layer's inputs [T, H] at T indices of the B x S
        tokens. The layer's weight takes part with a factor of 0, so that it has a gradient, for which ZeRO waits.
        """
        layer = _output_layer(engine)

        def with_weight(states: torch.Tensor) -> torch.Tensor:
            return _as_rows(states + 0 * layer.weight.flatten()[0])

        # `_run_with` takes the state before each index, which predicts the token there.
        return self._run_with(engine, batch, indices + 1, with_weight).flatten(0, 1)

    def total(
        self, engine: Any, batch: Batch, indices: torch.Tensor, compute: Callable[[Scores], torch.Tensor]
    ) -> torch.Tensor:
        """Run forward and return the scalar that `compute` returns for the scores of T tokens. If possible it is called
        inside the output layer's forward pass, while ZeRO-3 has gathered the layer's weight.
        """
        if self.path(engine) is not LossPath.losses:
            return compute(self.scores(engine, batch, indices))
        layer = _output_layer(engine)

        def total_of(states: torch.Tensor) -> torch.Tensor:
            return compute(Scores(states, layer.weight, layer.bias))[None, None, None]

        return self._run_with(engine, batch, indices, total_of).sum()

    def _sum_of(self, states: torch.Tensor, layer: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum [1, 1, 1] of the losses of states [T, H]."""
        if not torch.is_grad_enabled():
            return _each_loss(states, layer, targets).sum()[None, None, None]
        if self.kernel is not LossKernel.liger or not len(states):
            return chunked_loss_sum(states, layer.weight, layer.bias, targets)[None, None, None]
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        # It makes the host wait for the device once.
        kernel = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
        loss: torch.Tensor = kernel(layer.weight, states, targets, layer.bias)
        return loss[None, None, None]

    def _picked_logits(self, engine: Any, batch: Batch, indices: torch.Tensor, path: LossPath) -> torch.Tensor:
        """Run forward and return the logits [T, V] that predict the tokens at some indices; `picked`: no others."""
        if path is LossPath.all_logits:
            return logits_of(engine, batch).flatten(0, 1).index_select(0, indices - 1)
        return self._run_with(engine, batch, indices, _logits_by(_output_layer(engine))).flatten(0, 1)

    def _run_with(self, engine: Any, batch: Batch, indices: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Run forward with `compute` in place of the output layer; return what it returns for the states [T, H] before
        the tokens at some indices. The model takes that for its logits, so it needs three dimensions: tuning=prompt
        cuts [B, S, V] along the second.
        """
        layer, length = _output_layer(engine), batch["input_ids"].size(1)
        self._replacement, instance_forward = (compute, indices, length), layer.__dict__.get("forward")
        layer.forward = self._forward
        try:
            return _forward_output(engine, batch)
        finally:
            del layer.forward, self._replacement
            if instance_forward is not None:
                layer.forward = instance_forward

    def _compute_picked(self, states: torch.Tensor) -> torch.Tensor:
        """What the output layer's forward is during `_run_with`, for its inputs [B, S, H]."""
        compute, indices, length = self._replacement
        # Skips the learned tokens in front of each row (tuning=prompt).
        return compute(states[:, -length:].flatten(0, 1).index_select(0, indices - 1))

    def _find_path(self, engine: Any) -> LossPath:
        """Return how losses can be computed, by a forward pass over a few tokens: from the output layer's inputs if the
        model returns that layer's output unchanged as logits; else from the layer's output for trained tokens, or for
        all.
        """
        module, layer = getattr(engine, "module", engine), _output_layer(engine)
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
                logits = self._run_with(engine, batch, batch["target_indices"], _logits_by(layer))
        finally:
            for hook in hooks:
                hook.remove()
        if len(layer_calls) != 1 or logits.shape[:2] != (len(batch["targets"]), 1):
            return LossPath.all_logits
        [(states, output, _)] = layer_calls
        is_plain = type(layer) is nn.Linear and states.dtype == layer.weight.dtype == output.dtype
        return LossPath.losses if is_plain and is_logits == [True] else LossPath.picked


def logits_of(engine: Any, batch: Batch) -> torch.Tensor:
    """Run an engine or a model on rows as `hidden_states` takes them and return the logits `[B, S, V]`."""
    return _forward_output(engine, batch)


def _forward_output(engine: Any, batch: Batch) -> torch.Tensor:
    """Run an engine or a model and return what its output layer returned: logits, or what `LossHead` puts there."""
    output: torch.Tensor = engine(**_arguments(getattr(engine, "module", engine), batch)).logits
    return output


def _output_layer(engine: Any) -> Any:
    return getattr(engine, "module", engine).get_output_embeddings()


def _as_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [T, H] as those of T rows of one token, [T, 1, H]."""
    return states[:, None]


def _logits_by(layer: Any) -> Compute:
    """Return what computes logits [T, 1, V] by a layer's forward, which `LossHead` is going to replace."""
    layer_forward = layer.forward

    def logits(states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer_forward(_as_rows(states))
        return output

    return logits


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """Run a transformers model without its output layer and return the states `[B, S, H]`. The batch of a later
    pipeline stage has `inputs_embeds`; one without `segment_ids` has no padding, as that of a probe.
    """
    inputs = on_device(model, batch) if "labels" in batch else batch
    output = model.base_model(**_arguments(model, inputs))
    states: torch.Tensor = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    return states


def _arguments(module: Any, batch: Batch) -> dict[str, Any]:
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


_FP16_SCALE = 2.0**12
"""float16 ends at 6e-8: probabilities of a large vocabulary are scaled by it (exactly) while they are in float16."""


def chunked_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return each token's cross entropy, float32 [T], of states [T, H], weight [V, H], bias [V]; no gradients."""
    pieces = zip(hidden.split(chunk_rows(len(weight))), targets.split(chunk_rows(len(weight))), strict=True)
    losses = [_log_probabilities(states, weight, bias).gather(1, target_ids[:, None]) for states, target_ids in pieces]
    return -torch.cat(losses).view(-1)


def chunked_loss_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the tokens' cross entropies, 0 for no tokens; differentiable once, in all but the targets.

    Gradients are summed in float32 during the forward pass, and multiplied by the outer gradient in the backward pass,
    so that no loss scale makes them over- or underflow. Until then a trained weight's gradient takes V x H x 4 bytes.
    As each addition to it reads and writes all of it, the gradients of several chunks' logits are collected first, in
    up to half as many bytes.
    """
    return _ChunkedLossSum.apply(hidden, weight, bias, targets)


class _ChunkedLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)

        def of_logits(part: slice) -> torch.Tensor:
            log_probabilities, target_ids = _log_probabilities(hidden[part], weight, bias), targets[part, None]
            total.sub_(log_probabilities.gather(1, target_ids).sum())
            # The gradient of a token's loss by its logits: the probabilities, minus 1 at the target.
            gradient = log_probabilities.exp_()
            return gradient.scatter_(1, target_ids, gradient.gather(1, target_ids) - 1)

        size = chunk_rows(len(weight))
        ctx.gradients = (LossGradients(Scores(hidden, weight, bias), ctx.needs_input_grad, of_logits, size),)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradients,), ctx.gradients = ctx.gradients, None  # `times` changes them in place: a second backward must fail
        return (*gradients.times(outer[0]), None)


class LossGradients:
    """Gradients, in float32, of a sum of tokens' losses by states, weight and bias, if `needs` has True for them.
    `of_logits` returns the gradients by the logits for a slice of tokens; it is called for `size` tokens at a time.
    """

    def __init__(
        self, scores: Scores, needs: Sequence[bool], of_logits: Callable[[slice], torch.Tensor], size: int
    ) -> None:
        hidden, weight, bias = scores
        of_hidden, of_weight, of_bias = needs[:3]
        self.dtype, self.scale = hidden.dtype, _FP16_SCALE if hidden.dtype is torch.float16 else 1.0
        self.of_hidden = torch.empty_like(hidden, dtype=torch.float32) if of_hidden else None
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if weight is not None and of_weight else None
        self.of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_bias else None
        group = size
        if weight is not None and of_weight:  # several chunks at once, up to half the bytes of the weight's gradient
            group = max(size, 2 * weight.size(1) // hidden.element_size())
        for start in range(0, len(hidden), group):
            stop = min(start + group, len(hidden))
            gradient = hidden.new_empty(stop - start, scores.vocabulary) if stop - start > size else None
            for begin in range(start, stop, size):
                part = slice(begin, min(begin + size, stop))
                of_part = of_logits(part)
                if self.of_bias is not None:
                    self.of_bias += of_part.sum(dim=0)
                of_part.mul_(self.scale)
                if gradient is None:
                    gradient = of_part.to(hidden.dtype)
                else:
                    gradient[part.start - start : part.stop - start] = of_part
            assert gradient is not None
            if self.of_hidden is not None:
                self.of_hidden[start:stop] = gradient if weight is None else _product(gradient, weight)
            if self.of_weight is not None:
                _add_product(self.of_weight, gradient.t(), hidden[start:stop])

    def times(self, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of states, weight and bias, times `outer`, in the states' type; only once."""
        return (
            _scaled(self.of_hidden, outer / self.scale, self.dtype),
            _scaled(self.of_weight, outer / self.scale, self.dtype),
            _scaled(self.of_bias, outer, self.dtype),
        )


def _each_loss(states: torch.Tensor, layer: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses [T, 1, 1] of states [T, H]."""
    compute = _ChunkedLosses.apply if torch.is_grad_enabled() else chunked_losses
    losses: torch.Tensor = compute(states, layer.weight, layer.bias, targets)
    return losses[:, None, None]


class _ChunkedLosses(torch.autograd.Function):
    """`chunked_losses` with gradients. As the outer gradient of each token is known in the backward pass only, the
    logits of each chunk are computed again there.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        return chunked_losses(hidden, weight, bias, targets)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if of_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_bias else None
        size = chunk_rows(len(weight))
        for begin in range(0, len(hidden), size):
            states, target_ids = hidden[begin : begin + size], targets[begin : begin + size, None]
            gradient = _log_probabilities(states, weight, bias).exp_()
            gradient.scatter_(1, target_ids, gradient.gather(1, target_ids) - 1)
            gradient *= outer[0][begin : begin + size, None]
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[begin : begin + size] = _product(gradient, weight)
            if weight_gradient is not None:
                weight_gradient += _product(gradient.t(), states)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        bias_gradient = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None


def chunk_rows(vocabulary: int) -> int:
    """Return how many tokens' float32 logits fit into `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def _log_probabilities(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.log_softmax(functional.linear(states, weight, bias), dim=1, dtype=torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix product in float32, without copies of half-precision factors if the device can."""
    if left.dtype is torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype is torch.bfloat16:
        # Summed in float32 inside and rounded once per chunk, to the precision of the gradient that the optimizer gets.
        # Five times as fast as float32 factors on a processor with bfloat16 instructions.
        return (left @ right).float()
    return left.float() @ right.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to float32 `total`; in half precision a slice of rows at a time, to save memory."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
        return
    rows = max(1, CHUNK_BYTES // (4 * total.size(1)))
    for sums, factors in zip(total.split(rows), left.split(rows), strict=True):
        sums.add_(_product(factors, right))


def _scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    return None if gradient is None else gradient.mul_(factor).to(dtype)
