"""LoRA that starts from the weights, PiSSA and OLoRA, on a base that stays as it is.

PiSSA: Meng et al. 2024, https://arxiv.org/abs/2404.02948; OLoRA: Büyükakyüz 2024, https://arxiv.org/abs/2406.01775.
Both take the first factors A0, B0 of LoRA from a weight W. peft (0.21) leaves the residual W - s B0 A0 in W's place.
Here W is kept, and the layer computes W x + s (B A x - B0 A0 x): the same function, without the rounding of a residual,
and without an adapter (the reference of a preference loss) the base itself. A0 and B0 are buffers: checkpoints hold
them, and an export joins them to the trained factors as a plain LoRA of twice the rank (`as_plain_state`).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import distributed
from torch.nn import functional
from transformers import PreTrainedModel

from toolkit.distributed import process_group
from toolkit.messages import ConfigError, ModelError, say
from toolkit.models import weights
from toolkit.models.lora import ADAPTER

BUFFERS = FIRST, SECOND = "initial_A", "initial_B"
"""Buffers of a layer: A0 [rank, in] and B0 [out, rank]."""
_AT_ONCE = 8
"""Layers that are gathered together under ZeRO-3, and decomposed by as many ranks."""


def is_from_weights(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json says that LoRA starts from the weights in a way that is known here."""
    kind = str(settings.get("init_lora_weights", True)).lower()
    return settings.get("peft_type") == "LORA" and (kind.startswith("pissa") or kind == "olora")


class InitializedLinear(Linear):
    """A linear layer with LoRA that starts from its weight; at first it computes exactly what the base computes."""

    initial_A: torch.Tensor  # noqa: N815  # peft's name of the factor
    initial_B: torch.Tensor  # noqa: N815

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return W x + s (B A x - B0 A0 x), with scaling s and initial A0, B0; as in peft, A alone gets dropout."""
        result: torch.Tensor = self.base_layer(x, *args, **options)
        if self.disable_adapters:
            return result
        first: Any = self.lora_A[ADAPTER]
        inputs = self._cast_input_dtype(x, dtype := first.weight.dtype)
        # DeepSpeed (0.19.8) casts the parameters of a model that is in float32, but not its buffers.
        initial = functional.linear(functional.linear(inputs, self.initial_A.to(dtype)), self.initial_B.to(dtype))
        trained = self.lora_B[ADAPTER](first(self.lora_dropout[ADAPTER](inputs)))
        return result + ((trained - initial) * self.scaling[ADAPTER]).to(result.dtype)


def attach(model: PreTrainedModel, kind: str, compute: bool) -> None:
    """Turn a model's LoRA layers into `InitializedLinear`, all of whose factors are 0 or random until they are loaded,
    or with `compute` those of the weights. A collective if there are several ranks.

    Args:
        kind: pissa, pissa_niter_N (randomized SVD with N iterations) or olora.
        compute: not on the meta device, and not where a checkpoint's values follow.
    """
    layers: list[tuple[str, Any]] = [
        (name, part) for name, part in model.named_modules() if isinstance(part, LoraLayer)
    ]
    for name, layer in layers:
        is_linear: bool = layer.__class__ is Linear
        if not is_linear or layer.use_dora[ADAPTER]:
            raise ConfigError(
                "tuning.init = {kind} is for linear layers without DoRA, and {name} is {layer}. Choose other layers "
                "(tuning.target_modules), or tuning.init=default.",
                kind=kind,
                name=name,
                layer="DoRA" if is_linear else type(layer.get_base_layer()).__name__,
            )
        first, second = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        if len(first) > min(layer.in_features, layer.out_features):
            raise ConfigError(
                "tuning.init = {kind}: tuning.rank = {rank} is more than the rank of {name}, {width} x {height}.",
                kind=kind,
                rank=len(first),
                name=name,
                width=layer.in_features,
                height=layer.out_features,
            )
        layer.register_buffer(FIRST, torch.zeros_like(first, requires_grad=False))
        layer.register_buffer(SECOND, torch.zeros_like(second, requires_grad=False))
        layer.__class__ = InitializedLinear
    if compute and layers and not layers[0][1].initial_A.is_meta:
        _compute([layer for _, layer in layers], kind)
        say("LoRA starts from the weights of {count} layers ({kind}).", count=len(layers), kind=kind)


@torch.no_grad()
def _compute(layers: list[Any], kind: str) -> None:
    """Set the factors of layers, initial and trained ones: a layer's are computed by one rank, which sends them to all
    others. ModelError if some are not finite. A collective if there are several ranks.
    """
    from deepspeed.accelerator import get_accelerator  # takes seconds to import

    device = torch.device(get_accelerator().current_device_name())
    seed, rank, ranks = torch.initial_seed(), process_group.rank(), process_group.world_size()
    size = min(ranks, _AT_ONCE)
    for begin in range(0, len(layers), size):
        group = layers[begin : begin + size]
        computed: tuple[torch.Tensor, torch.Tensor] | None = None
        with weights.full_params([layer.get_base_layer().weight for layer in group]):
            if rank < len(group):
                computed = _factors_of(group[rank], kind, device, seed + begin + rank)
        for owner, layer in enumerate(group):
            factors = ((layer.initial_A, layer.lora_A), (layer.initial_B, layer.lora_B))
            for number, (initial, trained) in enumerate(factors):
                value = torch.empty(initial.shape, device=device)
                if computed is not None and owner == rank:
                    value = computed[number].contiguous()
                if ranks > 1:
                    distributed.broadcast(value, src=owner)
                initial.copy_(value)
                trained[ADAPTER].weight.data.copy_(initial)
            if not (layer.initial_A.isfinite().all() and layer.initial_B.isfinite().all()):
                raise ModelError(
                    "tuning.init = {kind}: a weight of the model has NaN or Inf, or its decomposition does not "
                    "converge. Use tuning.init=default.",
                    kind=kind,
                )


def _factors_of(layer: Any, kind: str, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's initial factors in float32, A0 [rank, in] and B0 [out, rank], by peft's formulas (0.21,
    tuners/lora/layer.py); NaN where the weight cannot be decomposed, as an error on one rank would let others wait.
    """
    weight = layer.get_base_layer().weight.detach().to(device, torch.float32)
    weight = weight.T if layer.fan_in_fan_out else weight
    rank, scaling = layer.r[ADAPTER], layer.scaling[ADAPTER]
    try:
        if kind == "olora":
            left, right = torch.linalg.qr(weight)
            return right[:rank], left[:, :rank]
        if kind == "pissa":
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                left, values, right = torch.svd_lowrank(weight, rank, niter=int(kind.rpartition("_")[2]))
                right = right.T
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return torch.full((rank, weight.size(1)), math.nan), torch.full((weight.size(0), rank), math.nan)
    # Scaling x B0 A0 is what the largest singular values make up of the weight; each factor takes their roots.
    roots = (values[:rank] / scaling).sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def as_plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter_config.json of the plain LoRA of twice the rank that `as_plain_state` makes of an adapter."""
    if not is_from_weights(settings):
        return dict(settings)
    # The scaling, alpha / rank or with rsLoRA alpha / sqrt(rank), stays what it is.
    factor = math.sqrt(2) if settings.get("use_rslora") else 2
    ranks = {name: 2 * rank for name, rank in (settings.get("rank_pattern") or {}).items()}
    alphas = {name: factor * alpha for name, alpha in (settings.get("alpha_pattern") or {}).items()}
    return {
        **settings,
        "init_lora_weights": True,
        "r": 2 * settings["r"],
        "lora_alpha": factor * settings["lora_alpha"],
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def as_plain_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors, by their names in its file, with the initial factors joined to the trained ones:
    B A - B0 A0 is the product of [B, -B0] and [A; A0]. Empty tensors, of ranks that gather nothing, stay empty.
    """
    plain = {name: value for name, value in state.items() if not name.endswith(BUFFERS)}
    # The axis of each factor is that of the rank.
    for buffer, trained, axis, sign in ((FIRST, "lora_A.weight", 0, 1), (SECOND, "lora_B.weight", 1, -1)):
        for name in state:
            if name.endswith(f".{buffer}") and state[name].numel():
                factor, initial = f"{name.removesuffix(buffer)}{trained}", sign * state[name]
                plain[factor] = torch.cat([state[factor], initial.to(state[factor].dtype)], dim=axis)
    return plain
