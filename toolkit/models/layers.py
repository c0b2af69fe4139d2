"""What changes a model's layers while it is trained.

- Liger: liger-kernel's Triton kernels for GPUs, written against its release 0.8.5.
- Tiled MLP of ALST (Bekman et al. 2025, https://arxiv.org/abs/2506.13996, section 3.1): feed-forward layers take tokens
  in pieces and compute each again backward. DeepSpeed 0.19.8's TiledMLP loses gradients of weights where the pieces do
  not divide the tokens, or nothing before it has a gradient.
- NEFTune: noise on the embeddings of training rows (Jain et al., 2023, arXiv 2310.05914).
- Random layerwise token dropping, after random-LTD (Yao et al., 2022, arXiv 2211.11586): each middle layer draws the
  tokens that it computes, more and more until all. DeepSpeed (0.19.8) has it with its own data loader only.

B rows, S tokens, K tokens that are kept, H hidden width.
"""

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook

from toolkit.config import preflight
from toolkit.config.schema import KernelsConfig, LossKernel, RandomLtdConfig, When
from toolkit.messages import ConfigError, ModelError, tr
from toolkit.models import adapters, experts
from toolkit.models.attention import segment_arguments, trains_on_gpu
from toolkit.models.cache import arguments_by_name


def apply_liger(model: Any, kernels: KernelsConfig) -> str:
    """Replace a new model's norms, MLPs and rotary positions by liger's, as `kernels.liger` says; "" or why not."""
    reason = preflight.without_liger(trains_on_gpu())
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

        # Losses are ours to compute (kernels.loss): they are summed over the global batch.
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
        experts.keep_interface(model)
    return reason


Forward = Callable[[torch.Tensor], torch.Tensor]


def tile_mlp(model: nn.Module, pieces: int) -> None:
    """Let feed-forward layers, not experts, take tokens in `pieces`: equal on all ranks, as ZeRO-3 gathers for each."""
    found = [part for name, part in model.named_modules() if name.endswith(".mlp") and not hasattr(part, "experts")]
    if not found:
        raise ConfigError(
            "kernels.mlp_pieces = {pieces}: {model} has no feed-forward layers that could be divided. Set it to 1.",
            pieces=pieces,
            model=type(model).__name__,
        )
    for layer in found:
        layer.forward = partial(_forward, layer, layer.forward, pieces)


def _forward(layer: nn.Module, mlp_forward: Forward, pieces: int, states: torch.Tensor) -> torch.Tensor:
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if trained and not states.requires_grad:  # or nothing would lead back to the weights
        states = states.detach().requires_grad_()
    tiled: torch.Tensor = _Tiled.apply(states, mlp_forward, pieces, trained)
    return tiled


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, mlp_forward: Forward, pieces: int, trained: list[nn.Parameter]
    ) -> torch.Tensor:
        ctx.save_for_backward(states)
        ctx.given = mlp_forward, pieces, trained
        flat = states.flatten(0, -2)  # [tokens, H]
        return torch.cat([mlp_forward(piece) for piece in flat.tensor_split(pieces)]).view(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mlp_forward, pieces, trained = ctx.given
        [states] = ctx.saved_tensors
        flat, outer = states.detach().flatten(0, -2), gradients[0].flatten(0, -2)
        found = []
        cut = zip(flat.tensor_split(pieces), outer.tensor_split(pieces), strict=True)
        for number, (piece, gradient) in enumerate(cut, start=1):
            for parameter in trained:  # ZeRO hands a gradient on when the last piece is in it (deepspeed 0.19.8)
                parameter.ds_grad_is_ready = number == pieces
            piece = piece.clone().requires_grad_()
            with torch.enable_grad():
                output = mlp_forward(piece)
            torch.autograd.backward(output, gradient)
            found.append(piece.grad)
        return torch.cat(found).view(states.shape), None, None, None


def add_neftune(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise, up to alpha / sqrt(S x H), to the input embedding in training mode: transformers' own hook
    (5.23). It follows from the rank's random state, as dropout does, so that a resumed run draws the same.
    """
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = alpha
    embedding.register_forward_hook(neftune_post_forward_hook)


_MULTIPLE = 8
"""Kept tokens are rounded up to a multiple of this, so that there are few different shapes."""
_PER_TOKEN = ("position_ids", "position_embeddings")


class TokenDropping:
    """What the middle layers compute in training; `model.token_dropping`. ModelError if they cannot drop tokens. Drawn
    from seed, step, micro-batch and `data_rank`: nothing is saved, and ranks with the same rows agree.
    """

    def __init__(self, model: PreTrainedModel, config: RandomLtdConfig, seed: int, data_rank: int) -> None:
        layers = list(adapters.decoder_layers(model))
        self.config, self.key = config, f"{seed} {data_rank}"
        self.middle = layers[config.first_layers : len(layers) - config.last_layers]
        reason = ""
        if not self.middle:
            reason = tr("no layer is left between train.random_ltd.first_layers and last_layers")
        elif any("position_embeddings" not in inspect.signature(type(one).forward).parameters for one in self.middle):
            reason = tr("its layers find positions in another way than transformers' rotary ones")
        elif any("experts" in name.split(".") for name, _ in model.named_modules()):
            reason = tr("its experts are balanced over all tokens of all layers")
        if reason:
            raise ModelError("train.random_ltd cannot be used with this model: {reason}.", reason=reason)
        self.step, self.micro_batch = 0, 0
        self.positions: list[torch.Tensor] = []
        """Of each middle layer the tokens that it computes, ascending, int64 [B, K]; [] while all are computed."""
        self._full_states: dict[int, torch.Tensor] = {}
        model.register_forward_pre_hook(self._draw, with_kwargs=True)
        for number, layer in enumerate(self.middle):
            layer.register_forward_pre_hook(partial(self._pick, number), with_kwargs=True)
            layer.register_forward_hook(partial(self._put_back, number))

    def share(self, step: int) -> float:
        """Return the share of a row's tokens that the middle layers compute in a step, from 1; 0 is before training."""
        if not 0 < step <= self.config.steps:
            return 1.0
        return self.config.start_share + (1 - self.config.start_share) * (step - 1) / self.config.steps

    def _draw(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draw the tokens of a forward pass, before it."""
        self.positions, share = [], self.share(self.step)
        if not model.training or share == 1:
            return
        ids = arguments_by_name(model, args, kwargs)["input_ids"]
        rows, size = ids.shape
        count = min(size, -(-int(share * size) // _MULTIPLE) * _MULTIPLE)
        digest = hashlib.sha256(f"{self.key} {self.step} {self.micro_batch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        self.micro_batch += 1
        drawn = torch.rand(len(self.middle), rows, size, generator=generator).argsort(dim=-1)[..., :count]
        self.positions = list(drawn.sort(dim=-1).values.to(ids.device, non_blocking=True))

    def _pick(
        self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hand a middle layer the tokens that it computes, with their positions and what they may see."""
        if not self.positions:
            return None
        kept, states = self.positions[number], args[0]
        self._full_states[number] = states
        given = kwargs | {name: _picked(kwargs[name], kept) for name in _PER_TOKEN if kwargs.get(name) is not None}
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4 and mask.size(-1) > 1:  # one of a single place is never looked at
            rows = mask.expand(len(kept), -1, -1, -1).take_along_dim(kept[:, None, :, None], 2)
            given["attention_mask"] = rows.take_along_dim(kept[:, None, None, :], 3)
        if kwargs.get("cu_seq_lens_q") is not None:
            indices = (kept + torch.arange(len(kept), device=kept.device)[:, None] * states.size(1)).flatten()
            bounds = torch.searchsorted(indices, kwargs["cu_seq_lens_q"].long()).int()
            given |= segment_arguments(bounds, kept.size(1))
        return (_picked(states, kept), *args[1:]), given

    def _put_back(self, number: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return all tokens after a middle layer: those that it computed, and the others as they came."""
        if not self.positions:
            return None
        full, kept = self._full_states.pop(number), self.positions[number]
        states = output[0] if isinstance(output, tuple) else output
        merged = full.scatter(1, kept[..., None].expand_as(states), states.to(full.dtype))
        return (merged, *output[1:]) if isinstance(output, tuple) else merged


def begin_step(model: nn.Module, step: int) -> None:
    """Begin a step, from 1, of a model that may drop tokens; forward passes in training mode are its micro-batches."""
    dropping = getattr(model, "token_dropping", None)
    if dropping is not None:
        dropping.step, dropping.micro_batch = step, 0


def dropping_metrics(model: nn.Module) -> dict[str, float]:
    """Return what metrics.jsonl says of it; {} if no token is ever dropped."""
    dropping = getattr(model, "token_dropping", None)
    return {} if dropping is None else {"ltd_share": round(dropping.share(dropping.step), 6)}


def _picked(values: Any, kept: torch.Tensor) -> Any:
    """Return the kept tokens of [B or 1, S] or [B or 1, S, H]; of each in a tuple."""
    if isinstance(values, tuple):
        return tuple(_picked(one, kept) for one in values)
    if values.dim() == 2:
        return values.expand(len(kept), -1).gather(1, kept)
    return values.expand(len(kept), -1, -1).gather(1, kept[..., None].expand(-1, -1, values.size(-1)))
