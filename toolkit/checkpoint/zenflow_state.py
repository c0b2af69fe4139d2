"""ZenFlow's state in checkpoints (DeepSpeed 0.19.8): chosen columns, their moments, gradients not applied yet."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from toolkit.checkpoint.engine_state import ZENFLOW_SUM, Piece, stretch
from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.checkpoint.fragments import WEIGHT, Fragment

_CHOSEN = "columns"
"""State of the columns of a matrix that ZenFlow updates in every step."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def add_to_fragment(optimizer: Any, fragment: Fragment, piece: Piece) -> None:
    """Add to a fragment what ZenFlow keeps elsewhere (0.19.8, zenflow_stage_1_and_2.py, zenflow_torch_adam.py).

    The master weights of vectors and chosen columns are outdated, so the model's are saved in their place. They are
    also written over the master's, which nothing reads until ZenFlow does the same, before it chooses columns again.
    """
    parameter: Any = piece.parameter
    offloaded = optimizer.offload_selective_optimizer
    total = optimizer.accumulated_grads_in_cpu.get(optimizer.get_param_id(parameter))
    if optimizer.micro_step_id >= 0 and total is not None:  # there is none without a gradient
        fragment.values[ZENFLOW_SUM] = stretch(total, piece.position, piece.length)
    state = optimizer.selective_optimizer.state.get(parameter)
    if not state:  # not updated yet
        return
    is_outdated = torch.full(parameter.shape[-1:], not fragment.turned)  # of each column, or of a vector's numbers
    if fragment.turned:
        is_outdated[parameter.selected_indices.long().cpu()] = True
    rows = parameter.numel() // len(is_outdated)  # numbers that follow each other are of one column
    is_outdated = stretch(is_outdated.repeat_interleave(rows), piece.position, piece.length)
    live, master = stretch(parameter.t(), piece.position, piece.length), fragment.values[WEIGHT]
    if hasattr(optimizer, "process_optimizer_established"):  # another process may be writing to the master
        fragment.values[WEIGHT] = live.to(master, copy=True)
    else:
        master[is_outdated] = live[is_outdated.to(live.device)].to(master)
    if piece.position == 0:
        columns = {_CHOSEN: parameter.selected_indices} if fragment.turned else {}
        moments = {
            moment: getattr(parameter, f"{moment}_cpu_data") if offloaded else state[moment] for moment in _MOMENTS
        }
        states = {**moments, "step": state["step"], **columns}
        fragment.bound = {f"zenflow_{name}": value for name, value in states.items()}


def _column_choices(optimizer: Any, group: int, parameter: torch.nn.Parameter) -> Iterator[tuple[int, int, int]]:
    """Yield for each rank that has some of a matrix (begin, end, number): it has the whole columns `begin` to `end` - 1
    and chooses so many of them. Nothing for a vector.
    """
    if parameter.dim() != 2:
        return
    number, rows = optimizer.get_param_id(parameter), parameter.shape[0]
    begins = optimizer.grad_start_offset[group]
    edges = sorted(begins[rank][number] for rank in optimizer.param_to_partition_ids[group][number])
    for edge, after in zip(edges, (*edges[1:], parameter.numel()), strict=True):
        begin, end = -(-edge // rows), after // rows
        yield begin, end, max(1, int((end - begin) * optimizer.topk_ratio)) if begin < end else 0


def restore(optimizer: Any, pieces: Sequence[Piece], names: Mapping[int, str], fragments: Fragments) -> None:
    """Put back what `add_to_fragment` added to the fragments of a rank's `pieces`; `names`: of parameters by their id.

    If ranks would choose other columns, or ZenFlow saved none, the next step chooses, and their moments begin again.
    """
    for piece in pieces:
        parameter, name = piece.parameter, names[id(piece.parameter)]
        if ZENFLOW_SUM in fragments.states(name):
            total = _on_host(optimizer, torch.zeros(parameter.numel(), dtype=parameter.dtype))
            value = fragments.read(name, ZENFLOW_SUM, piece.position, piece.length, turned=parameter.dim() == 2)
            stretch(total, piece.position, piece.length).copy_(value)
            optimizer.accumulated_grads_in_cpu[optimizer.get_param_id(parameter)] = total
    chosen = []  # (parameter, its saved states by name, its saved columns by rank)
    for group, parameters in enumerate(optimizer.bit16_groups):
        for parameter in parameters:
            bound = fragments.bound(names[id(parameter)])
            saved = {key.removeprefix("zenflow_"): tensor for key, tensor in bound.items()}
            parts = _split_by_rank(saved.get(_CHOSEN), list(_column_choices(optimizer, group, parameter)))
            if not saved or parts is None:
                _choose_in_next_step(optimizer)
                return
            chosen.append((parameter, saved, parts))
    for parameter, saved, parts in chosen:
        _restore_selective_states(optimizer, parameter, saved, parts)


def _restore_selective_states(
    optimizer: Any, parameter: Any, saved: Mapping[str, torch.Tensor], parts: Sequence[torch.Tensor]
) -> None:
    """Set a parameter's chosen columns, by rank in `parts` ([] for a vector), their moments and the count of steps."""
    saved = {state: tensor.to(parameter.device) for state, tensor in saved.items()}
    state = optimizer.selective_optimizer.state[parameter]
    state["step"] = saved["step"]
    if parts:
        parameter.partition_selected_indices = [part.to(parameter.device) for part in parts]
        columns, rows = len(saved[_CHOSEN]), parameter.shape[0]
        parameter.selected_indices = saved[_CHOSEN]
        parameter.selected_shape = (columns, rows) if rows > 1 else (columns,)
    for moment in _MOMENTS:
        if optimizer.offload_selective_optimizer:
            setattr(parameter, f"{moment}_cpu_data", _on_host(optimizer, saved[moment]))
        else:
            state[moment] = saved[moment].view(parameter.shape[0], -1) if parts else saved[moment]


def _on_host(optimizer: Any, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor flattened, in the memory where the optimizer keeps its own."""
    value = value.flatten().to(optimizer.device)
    return get_accelerator().pin_memory(value) if optimizer.cpu_offload_pin_memory else value


def _split_by_rank(columns: torch.Tensor | None, choices: list[tuple[int, int, int]]) -> list[torch.Tensor] | None:
    """Return the saved columns by the rank that chose them; None if ranks have or choose other ones here, by their
    `_column_choices`; [] for a vector, which has none.
    """
    counts = [count for *_, count in choices]
    if columns is None or len(columns) != sum(counts):
        return None if choices else []
    parts = list(columns.split(counts))
    columns_and_ranges = zip(parts, choices, strict=True)
    has_own_columns = [
        not len(part) or begin <= int(part[0]) <= int(part[-1]) < end for part, (begin, end, _) in columns_and_ranges
    ]
    return parts if all(has_own_columns) else None


def _choose_in_next_step(optimizer: Any) -> None:
    """Let ZenFlow choose columns in the next step, too; it does so once in `select_interval` steps."""
    is_due = optimizer.is_zenflow_select_boundary
    next_step: int | None = None  # known at the first call, which that step makes

    def is_due_or_next() -> bool:
        nonlocal next_step
        next_step = optimizer.micro_step if next_step is None else next_step
        return bool(is_due()) or (optimizer.micro_step == next_step >= optimizer.full_warm_up_rounds)

    optimizer.is_zenflow_select_boundary = is_due_or_next


def counts_of(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    """Return what ZenFlow counts by itself: updates of all columns, gradients added up since (from -1), rates."""
    optimizer: Any = engine.optimizer
    rates = [group["lr"] for group in optimizer.selective_optimizer.param_groups]
    return {"updates": engine.global_steps, "added": optimizer.micro_step_id, "rates": rates}


def restore_counts(engine: deepspeed.DeepSpeedEngine, counts: Mapping[str, Any]) -> None:
    """Set what ZenFlow counts; after a run without it, as if all columns had been updated in each step."""
    optimizer: Any = engine.optimizer
    engine.micro_steps = engine.global_steps
    engine.global_steps = counts.get("updates", engine.global_steps)
    optimizer.micro_step, optimizer.micro_step_id = engine.micro_steps - 1, counts.get("added", -1)
    optimizer._sync_selective_optimizer_lr()
    for group, rate in zip(optimizer.selective_optimizer.param_groups, counts.get("rates", ()), strict=False):
        group["lr"] = rate
