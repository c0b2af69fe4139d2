"""What a run's speed is compared with: model FLOPs, the GPU's datasheet, and measured matrix products."""

import statistics
import time
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.distributed import accelerator
from toolkit.distributed.process_group import full_shape, gather
from toolkit.engine.memory import is_out_of_memory
from toolkit.messages import tr
from toolkit.models import load, stages
from toolkit.models.record import record_of
from toolkit.plan import machine, outline
from toolkit.plan.flops import Formula, Work, formula, is_countable

_GPU_SIZES = (8192, 4096, 2048)
"""Rows of the square matrices; the later ones are tried if memory is too little for the first."""
_CPU_SIZES = (96, 192, 384, 768)
"""The first that takes long enough to be timed: one of 768 in bf16 takes 2.8 s where the processor has no such unit."""
_LONG_ENOUGH_S = 0.005
_GPU_S, _CPU_S, _AT_ONCE = 0.3, 0.1, 5
"""Seconds for which products are repeated, and products between two synchronizations of a GPU."""


def median_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product, measured: the median of the ranks that have memory for one, 0 if
    none has. A collective, under a second. A GPU needs 0.4 GiB (0.8 GiB in fp32), or a 16th if it is full.
    """
    rank_speed = 0.0
    for size in _sizes(device, dtype):
        try:
            rank_speed = _matmul_flops_per_s(size, device, dtype)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        get_accelerator().empty_cache()
    speeds = [speed for speed in gather(rank_speed) if speed]
    get_accelerator().empty_cache()
    return float(statistics.median_low(speeds)) if speeds else 0.0


def _sizes(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the sizes of matrices to try until one fits; on a CPU the first that is slow enough, or the last."""
    if device.type != "cpu":
        return _GPU_SIZES
    for size in _CPU_SIZES:
        square = torch.ones(size, size, dtype=dtype)
        seconds = []
        for _ in range(2):  # the first loads libraries
            started = time.perf_counter()
            square @ square
            seconds.append(time.perf_counter() - started)
        if min(seconds) > _LONG_ENOUGH_S:
            break
    return (size,)


def _matmul_flops_per_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several products of two matrices [size, size]."""
    seconds, times = (_CPU_S, 1) if device.type == "cpu" else (_GPU_S, _AT_ONCE)
    # Equal numbers would take less power, so a GPU would be faster. A generator of its own: the run's stays as it is.
    random = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
    out = left @ right  # warms up: libraries are loaded, kernels are chosen
    fastest, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds or fastest == float("inf"):
        get_accelerator().synchronize()
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right, out=out)
        get_accelerator().synchronize()
        fastest = min(fastest, (time.perf_counter() - started) / times)
    return 2.0 * size**3 / fastest


@dataclass(frozen=True, slots=True)
class Baseline:
    """What one rank's speed and memory are compared with."""

    formula: Formula | None
    """FLOPs of the model; None if they are not known."""
    recomputes: bool
    """Whether activation checkpointing repeats forward passes, which counts for HFU, not for MFU."""
    dtype: str
    matmul_flops: float
    """FLOP/s of a large matrix product, measured; 0 where there was no memory for it."""
    device: str
    """The driver's name of the GPU; "" on a CPU."""
    card: machine.Gpu | None
    """Its datasheet; None if it is not in plan/gpus.yaml, or on a CPU."""
    planned_bytes: int | None
    """Planned memory of a rank: of its GPU, on CPUs of its process; None without a plan."""

    def speed(self, needed: Work, computed: Work, rank_seconds: float) -> dict[str, float]:
        """Return FLOP/s, MFU and HFU of a mean rank for metrics.jsonl, {} if the model's FLOPs are not known. `needed`
        and `computed`: the work of all ranks without and with padding; `rank_seconds`: their seconds, added up.
        """
        if self.formula is None:
            return {}
        hardware = self.formula.hardware_flops if self.recomputes else self.formula.model_flops
        model_speed, hardware_speed = self.formula.model_flops(needed) / rank_seconds, hardware(computed) / rank_seconds
        row = {"model_flops_per_s": model_speed, "hardware_flops_per_s": hardware_speed}
        if self.matmul_flops:
            row |= {"mfu_matmul": model_speed / self.matmul_flops, "hfu_matmul": hardware_speed / self.matmul_flops}
        if self.card and (peak := self.card.flops(self.dtype)):
            row |= {"mfu": model_speed / peak, "hfu": hardware_speed / peak}
        return row

    def describe(self) -> str:
        """Return the line that says, on GPUs, what MFU is relative to: the measured matrix product, the datasheet."""
        values = {"dtype": self.dtype, "measured": f"{self.matmul_flops / 1e12:.3g}" if self.matmul_flops else "?"}
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


def _formula_of(model: torch.nn.Module, tuning: TuningConfig) -> Formula | None:
    """Return the FLOPs of a model's text part, by the shapes that its parameters have before they are partitioned or
    quantised; None if they are not known.
    """
    shapes: outline.Shapes = {}
    trained: set[str] = set()
    config = getattr(model, "config", None)
    outside_text: tuple[str, ...] = ()  # beginnings of the names of parameters that do not belong to the text part
    if isinstance(model, PreTrainedModel):
        config = model.config.get_text_config()
        if record_of(model).tuned:  # by a method that trains parts of the text model; else everything is trained
            from toolkit.models.trainable import untrained_prefixes

            outside_text = untrained_prefixes(model)
    for name, parameter in model.named_parameters():
        if name.startswith(outside_text):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, torch.nn.Linear) and name.endswith(".weight"):
            shapes[name] = (owner.out_features, owner.in_features)
        else:
            shapes[name] = full_shape(name, parameter)
        if parameter.requires_grad:
            trained.add(name)
    sizes = outline.flop_sizes(lambda name: getattr(config, name, None))
    if not sizes or not is_countable(shapes, sizes):
        return None
    prefix_tokens = tuning.num_tokens if tuning.method is TuningMethod.ptuning_v2 else 0
    return formula(shapes, sizes, trained, prefix_tokens)


def measure_baseline(
    engine: DeepSpeedEngine, tuning: TuningConfig, recomputes: bool, planned_bytes: int | None = None
) -> Baseline:
    """Return what a run with this engine is compared with, counted and measured now; see `Baseline`. A collective."""
    model, device = stages.unwrap_model(engine.module), engine.device
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    device_name = accelerator.device_name(device)
    return Baseline(
        formula=_formula_of(model, tuning),
        recomputes=recomputes,
        dtype=next(name.value for name, torch_dtype in load.TORCH_DTYPES.items() if torch_dtype == dtype),
        matmul_flops=median_matmul_flops(device, dtype),
        device=device_name,
        card=machine.find_gpu(device_name),
        planned_bytes=planned_bytes,
    )
