"""An optimizer's states: whether they are numbers, and what a checkpoint leaves to be repaired in them."""

from collections.abc import Iterator

import torch
from deepspeed import DeepSpeedEngine

from toolkit.distributed.process_group import gather


def ruined_ranks(engine: DeepSpeedEngine) -> str:
    """Return which ranks hold optimizer states that are NaN or Inf, "" if none does. A collective.

    Inf in one of Adam's keeps its weight from ever changing again; NaN spoils it at the next step.
    """
    ruined = [str(number) for number, finite in enumerate(gather(are_finite(engine))) if not finite]
    return "" if not ruined else f"rank {', '.join(ruined)}"


def are_finite(engine: DeepSpeedEngine) -> bool:
    """Whether no state that this rank holds has a NaN or an Inf. Reads them once: 0.1 s per GB in host memory.

    States on NVMe are not read.
    """
    basic = engine.basic_optimizer
    parts = (basic, getattr(basic, "aux_optimizer", None))  # Muon's second one, for what is no matrix
    sums: dict[torch.device, list[torch.Tensor]] = {}
    states = [state for part in parts if part is not None for state in _tensors(part)]
    for state in states:
        sums.setdefault(state.device, []).append(state.sum(dtype=torch.float32))
    if all(bool(torch.stack(found).isfinite().all()) for found in sums.values()):
        return True
    return all(bool(state.isfinite().all()) for state in states)  # finite numbers may have a sum that is not


def repair_counts(basic: torch.optim.Optimizer) -> None:
    """Give each state the count of steps that its optimizer takes.

    A tensor of its own for PyTorch's optimizers, a number for all others, whoever saved it: PyTorch's reject numbers,
    and ZeRO-3's universal form (DeepSpeed 0.19.8) lets all sub-groups count in one tensor.
    """
    counting = getattr(basic, "aux_optimizer", None) or basic  # Muon's, for what is no matrix
    is_torch = type(counting).__module__.startswith("torch.optim.")
    for state in basic.state.values():
        if "step" in state:
            count = float(state["step"])
            state["step"] = torch.tensor(count) if is_torch else int(count)


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                yield value
