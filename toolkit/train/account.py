"""What a run's figures are measured by: the FLOPs that its model needs, what the machine can do, and the plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.distributed.tensor import full_shape
from toolkit.messages import tr
from toolkit.models.load import TORCH_DTYPES
from toolkit.models.pipeline import unwrap_model
from toolkit.plan.machine import Gpu, find_gpu
from toolkit.plan.parameters import Shapes
from toolkit.plan.speed import Formula, Work, formula, is_countable
from toolkit.train.matmul import median_of_ranks

_DTYPES = {torch_dtype: dtype.value for dtype, torch_dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Account:
    """What one rank's speed and memory are compared with."""

    formula: Formula | None
    """FLOPs of the model; None if they are not known."""
    recomputes: bool
    """Whether activations are computed again."""
    dtype: str
    """Of the model: bf16, fp16, fp32."""
    matmul_flops: float
    """FLOP/s of a large matrix product, measured; 0 where there was no memory for it."""
    device: str
    """What the driver calls the card; "" is a processor."""
    card: Gpu | None
    """Its datasheet, if known."""
    planned_bytes: int | None
    """Memory of a rank that the plan expects."""

    def speed(self, needed: Work, computed: Work, rank_seconds: float) -> dict[str, float]:
        """Return FLOP/s of a rank and what share they are of what is possible; {} where FLOPs are not known.

        Args:
            needed: tokens of all ranks without padding.
            computed: the same with padding.
            rank_seconds: seconds, times ranks.
        """
        if self.formula is None:
            return {}
        hardware = self.formula.hardware_flops if self.recomputes else self.formula.model_flops
        model_speed, hardware_speed = self.formula.model_flops(needed) / rank_seconds, hardware(computed) / rank_seconds
        row = {"model_flops_per_s": model_speed, "hardware_flops_per_s": hardware_speed}
        if self.matmul_flops:
            row |= {"mfu_matmul": model_speed / self.matmul_flops, "hfu_matmul": hardware_speed / self.matmul_flops}
        if peak := self.card and self.card.flops(self.dtype):
            row |= {"mfu": model_speed / peak, "hfu": hardware_speed / peak}
        return row

    def describe(self) -> str:
        """Return a line that says what the shares are of."""
        values = {"dtype": self.dtype, "measured": f"{self.matmul_flops / 1e12:.3g}" if self.matmul_flops else "?"}
        if not self.device:
            return tr("A matrix product ({dtype}) runs at {measured} TFLOP/s per rank.", **values)
        if not (self.card and self.card.flops(self.dtype)):
            return tr(
                "A matrix product ({dtype}) runs at {measured} TFLOP/s per rank. What the datasheet of '{device}' says "
                "of that is not known here: the FLOPs of training are compared with the matrix product alone.",
                device=self.device,
                **values,
            )
        return tr(
            "A matrix product ({dtype}) runs at {measured} TFLOP/s per rank; the datasheet of the {card} says {peak}.",
            card=self.card.name,
            peak=f"{self.card.flops(self.dtype) / 1e12:.4g}",
            **values,
        )


def account_of(
    engine: DeepSpeedEngine, tuning: TuningConfig, recomputes: bool, planned_bytes: int | None = None
) -> Account:
    """Return what a run is measured by; multiplies matrices for less than a second. A collective.

    Args:
        engine: with the model that is trained.
        tuning: how.
        recomputes: whether activations are computed again.
        planned_bytes: memory of a rank by the plan: of its GPU, on a processor of the process.
    """
    model, device = unwrap_model(engine.module), engine.device
    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sizes = _sizes(getattr(model, "config", None))
    shapes, trained = _shapes(model)
    known = sizes and is_countable(shapes)
    prefix = tuning.num_tokens if tuning.method is TuningMethod.ptuning_v2 else 0
    return Account(
        formula=formula(shapes, sizes, trained, prefix) if known else None,
        recomputes=recomputes,
        dtype=_DTYPES[dtype],
        matmul_flops=median_of_ranks(device, dtype),
        device=name,
        card=find_gpu(name),
        planned_bytes=planned_bytes,
    )


def _shapes(model: torch.nn.Module) -> tuple[Shapes, set[str]]:
    """Return the shapes of all parameters, as they are before they are partitioned or quantised, and who is trained."""
    shapes: Shapes = {}
    trained: set[str] = set()
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, torch.nn.Linear) and name.endswith(".weight"):
            shapes[name] = (owner.out_features, owner.in_features)
        else:
            shapes[name] = full_shape(name, parameter)
        if parameter.requires_grad:
            trained.add(name)
    return shapes, trained


def _sizes(config: object) -> Mapping[str, int]:
    """Return what attention's size depends on; {} for a model that does not say it as usual."""
    layers, heads, hidden = (
        getattr(config, name, 0) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (layers and heads and hidden):
        return {}
    return {"layers": layers, "heads": heads, "head_size": getattr(config, "head_dim", None) or hidden // heads}
