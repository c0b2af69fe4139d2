"""Noise on embeddings (NEFTune), and layers that leave tokens out (random-LTD).

NEFTune: noise on the embeddings of training rows (Jain et al., 2023, arXiv 2310.05914).

Random layerwise token dropping, after random-LTD (Yao et al., 2022, arXiv 2211.11586): while training begins, each
middle layer draws the tokens of a row that it computes, and the others skip it. The first and last layers compute all,
and the number of tokens grows until all are computed. DeepSpeed (0.19.8) has it with its own data loader only. B rows,
S tokens, K tokens that are kept, H hidden width.
"""

import hashlib
import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook

from toolkit.config.schema import RandomLtdConfig
from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.attention import segment_arguments
from toolkit.models.tuning import arguments_by_name, decoder_layers


def add_neftune(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise to what the input embedding gives in training mode; evaluation is left alone.

    transformers' own hook (5.23): of up to alpha / sqrt(S x H) for rows of S tokens, padding included, and hidden
    width H. What is drawn follows from the rank's random state, as dropout does, so that a resumed run draws the same.
    """
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = alpha
    embedding.register_forward_hook(neftune_post_forward_hook)


_MULTIPLE = 8
"""Kept tokens are rounded up to a multiple of this, so that there are few different shapes."""
_PER_TOKEN = ("position_ids", "position_embeddings")


class TokenDropping:
    """What the middle layers of a model compute; `model.token_dropping`. Evaluation is left alone.

    Nothing of it needs saving: what is drawn follows from seed, step, micro-batch and data rank. On another number of
    ranks it is other tokens, as with dropout. Ranks with the same rows (`data_rank`) drop the same tokens. Models
    without middle layers, or with layers that read more than can be picked per token, are an error.
    """

    def __init__(self, model: PreTrainedModel, config: RandomLtdConfig, seed: int, data_rank: int) -> None:
        layers = list(decoder_layers(model))
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

    def begin(self, step: int) -> None:
        """Begin a step, from 1; forward passes in training mode are its micro-batches, one after another."""
        self.step, self.micro_batch = step, 0

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
    """Tell a model that drops tokens which step it is in, from 1."""
    dropping = getattr(model, "token_dropping", None)
    if dropping is not None:
        dropping.begin(step)


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
