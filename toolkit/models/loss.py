"""The losses of one micro-batch's tokens, without the logits. B batch, S sequence, T trained tokens, V vocabulary.

While a loss is computed, the model's output layer yields losses in place of logits. They are made inside that layer's
own forward pass, so whatever hangs on it (ZeRO-3 gathers its weight before and hands on the weight's gradient after)
sees an ordinary pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.config.schema import LossKernel
from toolkit.models.attention import attention_arguments
from toolkit.models.chatglm.positions import check_rows
from toolkit.models.chunked_loss import chunked_loss_sum, chunked_losses
from toolkit.models.liger import liger_loss_sum

UNTRAINED = -100
Batch = dict[str, torch.Tensor]


def token_loss_sum(engine: Any, batch: Batch) -> torch.Tensor:
    """Run the model forward and return the sum (not the mean) of the trained tokens' cross entropies.

    The sum, because a mean of micro-batch means weighs tokens unequally (transformers#34191 and others); the caller
    divides by the number of trained tokens of the whole global batch.

    Args:
        engine: the DeepSpeed engine, or a transformers model.
        batch: `input_ids`, `labels` (-100 where untrained), `position_ids`, `segment_ids`, each `[B, S]`; packed with
            `cu_seq_lens`, see `attention_arguments`. It is copied to where the engine computes, and the host does not
            wait for the copy if the batch is in page-locked memory and holds `with_places` already.

    Returns:
        float32 scalar on the engine's device, of this rank alone; 0 (with a zero gradient) without trained tokens.
    """
    given = _on_device(engine, batch)
    return loss_head(engine).losses(engine, given).sum()


@torch.no_grad()
def token_losses(engine: Any, batch: Batch) -> torch.Tensor:
    """Return each trained token's cross entropy, at the position before it; 0 elsewhere. Arguments as above.

    A model that is compiled for training computes them as it is: compiling it once more would take minutes.

    Returns:
        float32 `[B, S]`, without gradients.
    """
    given = _on_device(engine, batch)
    with torch.compiler.set_stance("force_eager"):
        losses = loss_head(engine).losses(engine, given)
    everywhere = losses.new_zeros(given["input_ids"].numel())
    return everywhere.index_copy_(0, given["places"] - 1, losses).view(given["input_ids"].shape)


def with_places(batch: Batch) -> Batch:
    """Return a batch with `places`, int64 [T]: where its trained tokens stand in the flattened rows; `targets`: these.

    Their number is the shape of what is computed, so they are counted before the batch goes to a device. Of a part of
    rows (`toolkit.models.sequence.part_of`) the tokens count before which a token of this part stands.
    """
    if "places" in batch:
        return batch
    is_trained = batch["labels"] != UNTRAINED
    is_trained[:, 0] = False  # nothing stands before it that could predict it
    places = is_trained.flatten().nonzero().flatten()
    return {**batch, "places": places, "targets": batch["labels"].flatten()[places]}


def num_trained_tokens(batch: Batch) -> int:
    """Return how many tokens `token_loss_sum` sums over (the first of a row is never predicted)."""
    return len(with_places(batch)["places"])


def _on_device(engine: Any, batch: Batch) -> Batch:
    module = getattr(engine, "module", engine)
    given = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in with_places(batch).items()}
    if _builds_positions(module):  # checked here, as the model itself would make the host wait for the device
        check_rows(batch["input_ids"], module.config)
        given["input_ids"].is_checked = True  # type: ignore[attr-defined]
    return given


def _builds_positions(module: Any) -> bool:
    """Whether it is ChatGLM-6B, whose two position channels come from where <sop> stands."""
    return getattr(module, "builds_positions", False)


class Way(Enum):
    """What a model's output layer computes while a loss is computed."""

    losses = "losses"
    """The losses of the trained tokens."""
    picked = "picked"
    """Logits of the trained tokens: the model does something with them, or the layer is more than a matrix."""
    whole = "whole"
    """All logits."""


class LossHead:
    """A model's output layer while a loss is computed; `model.loss_head`.

    Args:
        kernel: what was asked for.
    """

    def __init__(self, kernel: LossKernel = LossKernel.auto) -> None:
        self.kernel = kernel
        self._way: Way | None = None
        # One and the same function in all passes, which a compiled model calls but does not look into.
        self._forward = torch.compiler.disable(self._yield)

    @property
    def name(self) -> str:
        """The kernel of `Way.losses`."""
        return LossKernel.liger.value if self.kernel is LossKernel.liger else LossKernel.chunked.value

    def way(self, engine: Any) -> Way:
        """Return what the output layer computes; a collective under ZeRO-3 the first time."""
        if self._way is None:
            self._way = Way.whole if self.kernel is LossKernel.full else self._find_way(engine)
        return self._way

    def losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Run the model forward and return the losses of the trained tokens.

        Args:
            engine: the engine, or the model.
            batch: on its device, with places.

        Returns:
            float32 [T]; where a gradient is wanted perhaps only their sum, [1].
        """
        way, targets = self.way(engine), batch["targets"]
        if way is Way.whole:
            logits = _logits(engine, batch).flatten(0, 1).index_select(0, batch["places"] - 1)
        else:
            with self._in_place_of_logits(engine, batch, targets):
                logits = _logits(engine, batch).flatten(0, 1)
            if way is Way.losses:
                return logits.flatten()
        return functional.cross_entropy(logits.float(), targets, reduction="none")

    @contextmanager
    def _in_place_of_logits(self, engine: Any, batch: Batch, targets: torch.Tensor) -> Iterator[None]:
        layer = getattr(engine, "module", engine).get_output_embeddings()
        own = layer.__dict__.get("forward")
        self._layer, self._own_forward = layer, layer.forward
        self._before, self._targets, self._size = batch["places"] - 1, targets, batch["input_ids"].size(1)
        layer.forward = self._forward
        try:
            yield
        finally:
            del layer.forward, self._layer, self._own_forward, self._before, self._targets
            if own is not None:
                layer.forward = own

    def _yield(self, states: torch.Tensor) -> torch.Tensor:
        """Return the losses [T, 1, 1] or their sum [1, 1, 1], or the logits [T, 1, V]; of states [B, S, H].

        Nothing that cuts [B, S, V] by its second dimension, as tuning=prompt does, mistakes these for it.
        """
        # What is learned before the first token, as tuning=prompt does, stands in front.
        states = states[:, -self._size :].flatten(0, 1).index_select(0, self._before)
        if self._way is not Way.losses:
            return self._own_forward(states[:, None])
        given = states, self._layer.weight, self._layer.bias, self._targets
        if not torch.is_grad_enabled():
            return chunked_losses(*given)[:, None, None]
        add_up = liger_loss_sum if self.kernel is LossKernel.liger and len(states) else chunked_loss_sum
        return add_up(*given)[None, None, None]

    def _find_way(self, engine: Any) -> Way:
        """Find out, by one pass over a few tokens, what the model does with what its output layer returns."""
        module = getattr(engine, "module", engine)
        layer = module.get_output_embeddings()
        if layer is None:
            return Way.whole
        batch, targets = _probe(module, engine.device)
        seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        is_logits: list[bool] = []

        def see(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen.append((inputs[0], output, output._version))

        def compare(_: nn.Module, __: Any, output: Any) -> None:
            is_logits.append(any(output.logits is one and one._version == version for _, one, version in seen))

        # Last of the layer's hooks, and first of the model's: DeepSpeed's own put other objects in the tensors' place.
        hooks = layer.register_forward_hook(see), module.register_forward_hook(compare, prepend=True)
        was_training = module.training
        module.eval()
        try:
            eagerly = torch.compiler.set_stance("force_eager")
            with torch.no_grad(), eagerly, self._in_place_of_logits(engine, batch, targets):
                logits = _logits(engine, batch)
        finally:
            module.train(was_training)
            for hook in hooks:
                hook.remove()
        if len(seen) != 1 or logits.shape[:2] != (len(targets), 1):
            return Way.whole
        [(states, output, _)] = seen
        is_plain = type(layer) is nn.Linear and states.dtype == layer.weight.dtype == output.dtype
        return Way.losses if is_plain and is_logits == [True] else Way.picked


def _probe(module: Any, device: torch.device) -> tuple[Batch, torch.Tensor]:
    """Return a row of eight tokens of which the last five are trained, and these."""
    token = module.config.pad_token_id if _builds_positions(module) else 0
    ids = torch.full((1, 8), token, device=device)
    places = torch.arange(3, 8, device=device)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(8, device=device)[None],
        "segment_ids": torch.ones_like(ids),
        "places": places,
        "targets": ids.flatten()[places],
    }
    if not getattr(module, "begins", True):  # the last stage of a pipeline
        batch["inputs_embeds"] = torch.zeros(1, 8, module.config.hidden_size, dtype=module.dtype, device=device)
    return batch, batch["targets"]


def _logits(engine: Any, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = engine(**_arguments(getattr(engine, "module", engine), batch)).logits
    return logits


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """Run a transformers model without its output layer and return the hidden states `[B, S, H]`.

    Args:
        model: the model.
        batch: as `token_loss_sum`; where a pipeline's stage goes on from another's it holds `inputs_embeds`
            `[B, S, H]`. Without `segment_ids` the rows are whole, as those of a probe.
    """
    given = _on_device(model, batch) if "labels" in batch else batch
    found = model.base_model(**_arguments(model, given))
    states: torch.Tensor = found if isinstance(found, torch.Tensor) else found.last_hidden_state
    return states


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    """Run a transformers model on rows as `hidden_states` takes them and return the logits `[B, S, V]`."""
    return _logits(model, batch)


def _arguments(module: Any, batch: Batch) -> dict[str, Any]:
    """Return what a model's forward takes of a batch that is on its device."""
    given: dict[str, Any] = {"use_cache": False}
    if "segment_ids" in batch:
        given |= attention_arguments(module, batch)
        given["position_ids"] = None if _builds_positions(module) else batch["position_ids"]
    if "inputs_embeds" in batch:
        given["inputs_embeds"] = batch["inputs_embeds"]
    if "inputs_embeds" not in batch or _builds_positions(module):
        given["input_ids"] = batch["input_ids"]
    return given


def loss_head(engine: Any) -> LossHead:
    """Return how the losses of an engine's or a model's tokens are computed."""
    module = getattr(engine, "module", engine)
    head = getattr(module, "loss_head", None)
    if head is None:
        head = module.loss_head = LossHead()
    return head
