"""The plan of a run that is about to begin: on the machine at hand, for `plan.auto`, the log and what is told."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint import directory
from toolkit.config.mesh import micro_sizes
from toolkit.config.schema import Device, RunConfig
from toolkit.distributed.process_group import gather, on_rank0
from toolkit.engine.memory import limit_bytes
from toolkit.launch.environment import Ranks
from toolkit.messages import OutOfMemory, say, tr, warn
from toolkit.plan.layouts import (
    Layout,
    cheapest,
    evaluate_layout,
    gib,
    layout_numbers,
    layouts,
    memory_table,
    overrides,
    with_layout,
)
from toolkit.plan.machine import Machine, find_gpu, own_memory
from toolkit.plan.memory import process_bytes
from toolkit.plan.outline import cached_outline, outline_of
from toolkit.plan.speed import rates_of
from toolkit.train.run_dir import RunSource


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run is expected to take."""

    layout: Layout
    on_cpu: bool

    @property
    def tensor_bytes(self) -> int:
        """Of a rank, in the phase that takes most."""
        return self.layout.memory.peak(self.layout.memory.worst)

    @property
    def process_bytes(self) -> int:
        """What metrics.jsonl compares with: the GPU's memory, on CPU ranks that of the process."""
        return process_bytes(self.layout.memory) if self.on_cpu else self.tensor_bytes

    def lines(self) -> str:
        """Return the plan of a rank's memory as a table."""
        return "\n".join(memory_table(self.layout))


def plan_run(cfg: RunConfig, vocab_size: int, ranks: Ranks, device: torch.device, file: Path) -> RunPlan | None:
    """Write down and return the plan of a config on this machine; None if the model has no outline. A collective."""
    machine = _machine(cfg, ranks, device)

    def plan() -> RunPlan | None:
        try:
            outline = cached_outline(cfg, vocab_size)
            if outline is None:
                return None
            found = RunPlan(evaluate_layout(outline, cfg, machine, rates_of(cfg, machine, outline)), machine.on_cpu)
            file.write_text(json.dumps(layout_numbers(found.layout), indent=2) + "\n", encoding="utf-8")
        except Exception as error:  # whatever it is: it is there to be told, and training can begin without it
            warn("this run has no plan of its memory: {reason}", reason=repr(error))
            return None
        return found

    return on_rank0(plan)


def choose_layout(cfg: RunConfig, vocab_size: int, ranks: Ranks, device: torch.device, origin: RunSource) -> RunConfig:
    """Return the config with the layout that `plan.auto` chooses, or that the run began with. A collective."""
    if (checkpoint := origin.checkpoint) is not None:
        return on_rank0(lambda: _as_before(cfg, checkpoint, ranks.world_size))
    machine = _machine(cfg, ranks, device)

    def best() -> Layout | None:
        outline = outline_of(cfg, vocab_size)
        return cheapest(list(layouts(outline, cfg, machine, rates_of(cfg, machine, outline))))

    found = on_rank0(best)
    if found is None:
        raise OutOfMemory(
            "plan.auto: nothing fits on {machine}, of which {usable} GiB are for tensors. See  toolkit plan",
            machine=machine.name,
            usable=gib(machine.usable_bytes),
        )
    words = " ".join(overrides(cfg, found.cfg)) or tr("the recipe as it is")
    say("plan.auto: {words}  ({layout})", words=words, layout=found.name)
    return found.cfg


def _as_before(cfg: RunConfig, checkpoint: Path, world_size: int) -> RunConfig:
    before = directory.read_run_state(checkpoint).config
    micro = before["batch"]["micro_per_gpu"]
    possible = micro_sizes(cfg, world_size)
    if micro not in possible:  # on another number of ranks: the nearest below it, which takes no more memory
        micro = max((one for one in possible if one < micro), default=micro)
    return with_layout(
        cfg,
        before["zero"]["stage"],
        Device(before["zero"]["offload_optimizer"]["device"]),
        Device(before["zero"]["offload_param"]["device"]),
        before["train"]["activation_checkpointing"]["enabled"],
        micro,
    )


def _machine(cfg: RunConfig, ranks: Ranks, device: torch.device) -> Machine:
    """Return this run's nodes, each as small as the smallest. A collective."""
    host = own_memory()
    on_cpu = device.type == "cpu"
    local = ranks.local_world_size or ranks.world_size
    available = limit_bytes(device, cfg.plan.max_gpu_gib) or host // local
    found = gather((available, host, local))
    local = max(one for *_, one in found)
    return Machine(
        ranks=local,
        memory_bytes=min(one for one, *_ in found),
        card=None if on_cpu else find_gpu(torch.cuda.get_device_name(device)),
        nodes=-(-ranks.world_size // local),
        uneven_ranks=ranks.world_size,
        host_bytes=min(one for _, one, _ in found),
        on_cpu=on_cpu,
        context_bytes=0,  # it is there already, and not among what is available
    )
