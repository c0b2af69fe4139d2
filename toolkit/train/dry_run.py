"""What is checked before step 1: the memory plan, disk space, and a dry run of longest batch and evaluation."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError
from safetensors.torch import save_file

from toolkit.checkpoint import directory, fragments, state_files
from toolkit.config import mesh
from toolkit.config.schema import CheckpointConfig, RunConfig, TrackConfig
from toolkit.data.sampler import Position
from toolkit.disk import flush
from toolkit.distributed import accelerator, watchdog
from toolkit.distributed.process_group import gather, on_rank0, rank, world_size
from toolkit.engine.memory import PeakMemory, is_out_of_memory, limit_bytes, shown
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, TrackError, listed, reason_of, tr, warn
from toolkit.models import stages
from toolkit.models.record import has_adapter
from toolkit.plan import layouts, speed
from toolkit.plan.lookup import cached_outline
from toolkit.plan.machine import Machine, gpu_by_driver, host_memory_bytes
from toolkit.plan.memory import bf16_chunk_elements, process_bytes
from toolkit.train.step import StepGuard, train_step
from toolkit.train.task import RunContext, Task


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The memory that a run is expected to take on each rank."""

    layout: layouts.Layout
    on_cpu: bool

    @property
    def tensor_bytes(self) -> int:
        """Bytes of a rank's tensors in the phase of a step that takes most."""
        return self.layout.memory.peak(self.layout.memory.worst)

    @property
    def process_bytes(self) -> int:
        """Bytes that metrics.jsonl compares with: a rank's GPU memory, on CPUs the memory of its process."""
        return process_bytes(self.layout.memory) if self.on_cpu else self.tensor_bytes


def plan_run(cfg: RunConfig, vocab_size: int, ranks: Ranks, device: torch.device, file: Path) -> RunPlan | None:
    """Write a config's memory plan to `file` and return it, None if the model cannot be planned. A collective."""
    machine = smallest_machine(cfg, ranks, device)

    def plan() -> RunPlan | None:
        try:
            outline = cached_outline(cfg, vocab_size)
            if outline is None:
                return None
            planned = RunPlan(
                layouts.evaluate_layout(outline, cfg, machine, speed.rates_of(cfg, machine, outline)), machine.on_cpu
            )
            file.write_text(json.dumps(layouts.layout_numbers(planned.layout), indent=2) + "\n", encoding="utf-8")
        except Exception as error:  # whatever it is: the plan only informs, training can begin without it
            warn("this run has no plan of its memory: {reason}", reason=repr(error))
            return None
        return planned

    return on_rank0(plan)


def smallest_machine(cfg: RunConfig, ranks: Ranks, device: torch.device) -> Machine:
    """Return this run's nodes for the plan, as if each had the least memory of all and the most ranks. A collective."""
    own_host = host_memory_bytes()
    on_cpu = device.type == "cpu"
    local_ranks = ranks.local_world_size or ranks.world_size
    # A CPU without plan.max_gpu_gib has no limit of its own: its rank gets a share of the host's memory.
    own_memory = limit_bytes(device, cfg.plan.max_gpu_gib) or own_host // local_ranks
    memory_bytes, host_bytes, ranks_per_node = zip(*gather((own_memory, own_host, local_ranks)), strict=True)
    return Machine(
        ranks=max(ranks_per_node),
        memory_bytes=min(memory_bytes),
        card=None if on_cpu else gpu_by_driver(own_memory, accelerator.device_name(device)),
        nodes=-(-ranks.world_size // max(ranks_per_node)),  # rounded up
        uneven_ranks=ranks.world_size,
        host_bytes=min(host_bytes),
        on_cpu=on_cpu,
        context_bytes=0,  # it is there already, and not among what is available
    )


_TINY = {"rehearsal": torch.zeros(16)}
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_STATES_PER_PARAMETER = {"SGD": 1, "Lion": 1, "FusedLion": 1, "DeepSpeedCPULion": 1, "Adafactor": 0, "Adagrad": 0}
"""State values per parameter that an optimizer allocates at its first step; optimizers not listed: 2, as Adam."""
_TRIAL_STEP = -2
"""`global_steps` during a trial step: no number at which DeepSpeed's profiler or progress lines would start."""


def dry_run(task: Task, run: RunContext, plan: RunPlan | None) -> str:
    """Try writing, a step on the longest batch and an evaluation, and leave all as it was; return a line about it.
    Raises OutOfMemory, CheckpointError, TrackError (not writable, no room) or ModelError (export). A collective.
    """
    began, start, cfg, engine = time.monotonic(), run.start, run.cfg, run.engine
    run.watchdog.enter("rehearsal", start.step)
    saves = _num_saves(cfg.checkpoint, range(start.step + 1, run.total_steps + 1))
    check_disk(run, saves)
    if cfg.checkpoint.export:
        task.check_export(run)
    limit = limit_bytes(engine.device, cfg.plan.max_gpu_gib)
    with ExitStack() as stack:
        stack.enter_context(restore_after(engine))
        batch, name = task.longest_batch(Position(start.epoch, start.row))
        # On CPUs this context enforces the limit; a GPU has it since the process group was joined.
        memory = stack.enter_context(PeakMemory(engine.device, limit if engine.device.type == "cpu" else 0))
        limits: dict[str, Any] = {"memory": memory, "limit": limit, "plan": plan, "sections": task.memory_sections}
        with explain_out_of_memory(cfg, tr("forward, backward and update of {batch}", batch=name), **limits):
            measured = trial_step(engine, task, run.guard, batch, memory, run.accumulation)
        with explain_out_of_memory(cfg, tr("an evaluation"), **limits):
            task.check_evaluation(run)
        highest = memory.highest()
    device_bytes = gather((highest, measured.before))
    for hook in run.hooks:
        hook.at_dry_run()
    run.watchdog.enter(watchdog.START, start.step)
    peak, before = max(device_bytes)
    return tr(
        "Dry run passed in {seconds} s: {tried}. Peak tensor memory: {peak} on rank {rank} ({before} before the "
        "step{limit}){planned}.",
        seconds=f"{time.monotonic() - began:.1f}",
        tried=listed(name, _what_was_tried(cfg, saves, task.has_validation)),
        peak=shown(peak),
        rank=device_bytes.index((peak, before)),
        before=shown(before),
        limit=tr(", of {limit}", limit=shown(limit)) if limit else "",
        planned=tr("; planned for the longest rows: {planned}", planned=shown(plan.tensor_bytes)) if plan else "",
    )


def _num_saves(config: CheckpointConfig, steps: range) -> int:
    """Return how many checkpoints are due in these optimizer steps, numbered from 1; those by time are not counted."""
    last = steps.stop - 1
    # Multiples of `every` up to the last step, less those before the first one.
    due = last // config.every - (steps.start - 1) // config.every if config.every else 0
    is_last_due = due != 0 and last % config.every == 0
    return due + 1 if config.at_end and not is_last_due else due


def _what_was_tried(cfg: RunConfig, saves: int, evaluates: bool) -> str:
    """Return what a passed dry run has tried, as a list in words."""
    return listed(
        tr("an update"),
        tr("a save") if saves else "",
        tr("an export") if cfg.checkpoint.export else "",
        tr("an evaluation") if evaluates or cfg.evaluate.prompts else "",
    )


# The disk


def check_disk(run: RunContext, saves: int) -> None:
    """Raise TrackError or CheckpointError if metrics, `saves` checkpoints or export cannot be written. A collective."""
    cfg, folder, checkpoints, export = run.cfg, run.folder, run.checkpointer.folder, run.folder / "export"
    on_rank0(lambda: check_writable(cfg.track, folder))
    try_checkpoint(checkpoints)
    if cfg.checkpoint.export:
        on_rank0(lambda: try_export(export))
    export_size = export_bytes(run.engine, cfg.checkpoint)
    on_rank0(lambda: check_room(checkpoints, cfg.checkpoint, saves, run.checkpointer.least_bytes(), export_size))


def export_bytes(engine: DeepSpeedEngine, config: CheckpointConfig) -> int:
    """Return the bytes of a run's export (only the adapter if the model has one), on any rank; 0 if none is made."""
    if not config.export:
        return 0
    module = stages.unwrap_model(engine.module)
    is_adapter = has_adapter(module)
    exported = [parameter for parameter in module.parameters() if parameter.requires_grad or not is_adapter]
    return sum(getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size() for parameter in exported)


def check_writable(track: TrackConfig, folder: Path) -> None:
    """Raise TrackError unless metrics.jsonl and trackers' local directories can be written. For rank 0 only."""

    def write_into(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()

    def append_to(file: Path) -> None:
        if file.exists():
            open(file, "ab").close()

    trials = [("run.dir", folder, write_into), ("run.dir", folder / "metrics.jsonl", append_to)]
    for name in track.enabled:
        from toolkit.track.backends import BACKENDS

        folders = BACKENDS[name].folders(asdict(getattr(track, name)))
        trials += [(f"track.{name}.{key}", directory, write_into) for key, directory in folders.items()]
    for key, path, write in trials:
        if reason := _failure_of(write, path):
            raise TrackError(
                "{key}: cannot write to {folder}: {reason}. Choose another place.", key=key, folder=path, reason=reason
            )


def _failure_of(write: Callable[..., object], *arguments: object) -> str:
    """Call `write` and return why it failed, "" if it did not."""
    try:
        write(*arguments)
    except (OSError, SafetensorError) as error:
        return reason_of(error)
    return ""


def try_checkpoint(folder: Path) -> None:
    """Write and remove a small file in checkpoints/ on every rank; CheckpointError if one fails. A collective."""
    was_there = on_rank0(lambda: folder.is_dir())
    # Why it failed, by rank; "" where it did not.
    reasons = gather(_failure_of(lambda: folder.mkdir(exist_ok=True)) if rank() == 0 else "")
    path = folder / f".rehearsal-rank-{rank():05d}.tmp"
    files = state_files.Files()

    def write() -> None:
        files.save(fragments.Content(_TINY, {}), path)
        if not files.failure:
            flush(path)
            directory.record_file(path)

    if not any(reasons):
        write_reason = _failure_of(write) or files.failure
        unlink_reason = _failure_of(lambda: path.unlink(missing_ok=True))
        reasons = gather(write_reason or unlink_reason)
    is_left = rank() == 0 and not was_there and folder.is_dir()  # the directory that was made for the trial
    rmdir_reasons = gather(_failure_of(folder.rmdir) if is_left else "")
    by_rank = [*enumerate(reasons), *enumerate(rmdir_reasons)]
    if reason := next((f"{reason} (rank {number})" for number, reason in by_rank if reason), ""):
        raise CheckpointError(
            "checkpoints cannot be written to {folder}: {reason}. Set run.dir to a directory that "
            "every rank may write to.",
            folder=folder,
            reason=reason,
        )


def try_export(folder: Path) -> None:
    """Write a tiny model next to `folder`, the export's place, and remove it, or raise CheckpointError. Rank 0 only."""

    def write() -> None:
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            config, weights = Path(parent) / "config.json", Path(parent) / "model.safetensors"
            save_file(_TINY, weights)
            config.write_text("{}", encoding="utf-8")
            flush(weights)
            flush(config)

    if reason := _failure_of(write):
        raise CheckpointError(
            "cannot write the export to {folder}: {reason}. Set run.dir to a directory that you may "
            "write to, or checkpoint.export=false.",
            folder=folder,
            reason=reason,
        )


def check_room(folder: Path, config: CheckpointConfig, saves: int, each_bytes: int, export_bytes: int) -> None:
    """Raise CheckpointError if the disk of `folder` (checkpoints/) has no room for what will be there at once: those of
    `saves` checkpoints of `each_bytes` that `config` keeps, and an export of `export_bytes` (0: none). Rank 0 only.
    """

    def gigabytes(num_bytes: int) -> str:
        return f"{num_bytes / 1e9:,.3g}"

    # One more than `keep`: an older checkpoint is removed once the next is complete.
    at_once = min(saves, config.keep + 1) if config.keep else saves
    # Those of an earlier start have their room already, but the next one needs some before one of them is removed.
    count = max(at_once - len(directory.published_checkpoints(folder)), min(saves, 1))
    most = count * each_bytes
    if config.max_gib:
        most = min(most, int(config.max_gib * 2**30) + each_bytes)
    needed, free = most + export_bytes, shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
    if needed <= free:
        return
    raise CheckpointError(
        "{folder} has {free} GB free, and this run needs {needed} GB at least: {count} checkpoints of {each} GB "
        "(checkpoint.keep = {keep}, and the next before an older one goes) and an export of {export} GB. Free some, or "
        "lower checkpoint.keep.",
        folder=folder.parent,
        free=gigabytes(free),
        needed=gigabytes(needed),
        count=count,
        each=gigabytes(each_bytes),
        keep=config.keep,
        export=gigabytes(export_bytes),
    )


# The trial step


@contextmanager
def restore_after(engine: DeepSpeedEngine) -> Iterator[None]:
    """Restore after trial steps all that a rejected update changes: counters, loss scale, buffers, generators."""
    buffers = [buffer.clone() for buffer in engine.module.buffers()]  # the statistics of batch norm
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    scaler = _loss_scaler(engine)
    scale = dict(vars(scaler)) if scaler is not None else {}
    generators, is_monitored = state_files.capture_generators(), engine.monitor.enabled
    engine.monitor.enabled = False
    try:
        yield
    finally:
        engine.monitor.enabled = is_monitored
        state_files.restore_generators(generators)
        with torch.no_grad():
            for buffer, value in zip(engine.module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        if scaler is not None:
            vars(scaler).update(scale)
        for name, value in counters.items():
            setattr(engine, name, value)


def _loss_scaler(engine: DeepSpeedEngine) -> object | None:
    """Return the object that holds fp16's loss scale; its name depends on whether ZeRO is used. None without fp16."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


class StepMemory(NamedTuple):
    """Bytes of this rank's device that a trial step used."""

    before: int
    """In use before the step: weights, and what else stays."""
    forward_backward: int
    """Most in use while gradients were computed."""
    update: int
    """Most in use at the update; 0 where gradients overflowed and none was due."""


def trial_step(
    engine: DeepSpeedEngine, task: Task, guard: StepGuard, batch: Any, memory: PeakMemory, num_micro_batches: int
) -> StepMemory:
    """Measure an optimizer step whose update is rejected. A collective; only within `restore_after` and an entered
    `memory`. `batch`, of the same shape on every rank, is passed twice, as only the second pass meets gradients of the
    first and what ZeRO-3 prefetches; with `num_micro_batches` (per step) = 1 each is a step of its own. What does not
    fit raises torch.OutOfMemoryError, on CPUs also RuntimeError.
    """
    forward_backward = update = 0

    def reject(grad_norm: float) -> bool:
        """Stand in for the guard's verdict: measure both phases, then veto the update, when all gradients are there."""
        nonlocal forward_backward, update
        forward_backward = max(memory.peak(), forward_backward)
        memory.restart()
        _take_update_memory(engine)
        update = memory.peak()
        memory.restart()
        return False

    scaler = _loss_scaler(engine)
    for name, value in (("cur_scale", 1.0), ("raise_error_at_min_scale", False)):
        if scaler is not None and name in vars(scaler):  # at the first scale, still far too high, gradients overflow
            setattr(scaler, name, value)
    # Lists of micro-batches, each for one call of `train_step`.
    if stages.is_pipeline(engine):  # takes all micro-batches of a step, and holds several at once
        windows = [[batch] * num_micro_batches]
    else:
        windows = [[batch, batch]] if num_micro_batches > 1 else [[batch], [batch]]
    engine.train()
    before = memory.restart()
    judge, guard.gate.may_update = guard.gate.may_update, reject
    try:
        for window in windows:  # as the last micro-batches of a step: the engine updates after them
            engine.global_steps, engine.micro_steps = _TRIAL_STEP, num_micro_batches - len(window)
            train_step(engine, task, window, mesh.Mesh(world_size=world_size()), guard)
    finally:
        guard.gate.may_update = judge
    return StepMemory(before, max(memory.peak(), forward_backward), update)


def _take_update_memory(engine: DeepSpeedEngine) -> None:
    """Allocate, and free at return, what an update would: missing optimizer states, an fp32 copy of the largest group's
    gradients (deepspeed 0.19.8: ZeRO-1 and 2 flatten a group, ZeRO-3 a tile; PyTorch's Adam needs it for square roots),
    or with states in bf16 a bf16 copy, and a chunk in fp32 (engine/bf16_adam.py).
    """
    optimizer = engine.basic_optimizer
    states = _STATES_PER_PARAMETER.get(type(optimizer).__name__, 2)
    tiles = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3 hands over one after the other
    groups = [[tile] for tile in tiles] if tiles else [group["params"] for group in optimizer.param_groups]
    on_device = [[tensor for tensor in group if tensor.device == engine.device] for group in groups]
    tensors = [tensor for group in on_device for tensor in group]
    missing = [tensor for tensor in tensors if not optimizer.state.get(tensor)]
    allocated = [torch.empty_like(tensor) for tensor in missing for _ in range(states)]
    largest_group = max((sum(tensor.numel() for tensor in group) for group in on_device), default=0)
    if any(tensor.dtype is torch.bfloat16 for tensor in tensors):  # in fp32 elements, of which the copy takes half
        largest_group = largest_group // 2 + bf16_chunk_elements(largest_group)
    allocated.append(torch.empty(largest_group, dtype=torch.float32, device=engine.device))


@contextmanager
def explain_out_of_memory(
    cfg: RunConfig, doing: str, memory: PeakMemory, limit: int, plan: RunPlan | None, sections: tuple[str, ...] = ("",)
) -> Iterator[None]:
    """Turn the body's out-of-memory error into OutOfMemory, with measured and planned bytes and overrides that help.
    `doing`: what the body does; `limit`: bytes that may be used (0: unknown); `sections`: beginnings of such overrides.
    """
    before = memory.restart()
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        from toolkit.train import out_of_memory

        measured = (before, memory.highest(), limit)
        raise out_of_memory.explained(cfg, doing, measured, plan, sections, error) from None
