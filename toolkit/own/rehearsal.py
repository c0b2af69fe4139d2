"""What is tried before the first step of a model of one's own: a step, an evaluation, the disk."""

import time
from itertools import islice

from toolkit.cli.context import AnySession
from toolkit.cli.rehearsal import told, try_disk
from toolkit.data.sampler import Position
from toolkit.distributed import process_group
from toolkit.engine.memory import PeakMemory, limit_bytes, shown
from toolkit.messages import tr
from toolkit.own.evaluation import evaluate
from toolkit.own.task import Task
from toolkit.train.job import Job
from toolkit.train.rehearse import rehearse_step, unchanged

_HELPS = ("batch.", "zero")
"""Sections of the config in which something that takes less memory can be set."""


def rehearse(session: AnySession, task: Task, job: Job) -> str:
    """Try what the run will do, with its first micro-batch, and leave everything as it was. A collective.

    Which samples are the largest nobody knows; memory is what the first ones take.

    Raises:
        OutOfMemory: the run does not fit.
        CheckpointError: checkpoints or export cannot be written, or have no room.
        DataError: the program's functions return something else than they should.
    """
    started, cfg, ranks, engine = time.monotonic(), session.cfg, session.ranks, session.engine
    job.watchdog.enter("rehearsal", job.start.step)
    try_disk(session, job.saver, range(job.start.step + 1, job.total_steps + 1))
    limit = limit_bytes(engine.device, cfg.plan.max_gpu_gib)
    doing = tr("forward, backward and update of the first batch")
    with unchanged(engine), PeakMemory(engine.device, limit if engine.device.type == "cpu" else 0) as memory:
        with told(cfg, ranks, doing, memory, limit, None, _HELPS):
            [batch] = islice(job.batches_from(Position(job.start.epoch, job.start.row), 1), 1)
            buffers = [buffer.clone() for buffer in engine.module.buffers()]
            measured = rehearse_step(engine, session.guard, batch, memory, job.accumulation, job.objective)
            for buffer, value in zip(engine.module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        if task.validation is not None:
            with told(cfg, ranks, tr("an evaluation"), memory, limit, None, _HELPS):
                evaluate(task, cfg, ranks, engine, most=1)
        peaks = process_group.gather(max(measured.before, memory.highest()))
    process_group.on_rank0(session.trackers.wait_begun)
    job.watchdog.enter("", job.start.step)
    return tr(
        "Rehearsed in {seconds} s: a batch, an update, the disk{evaluation}. Memory: {peak} at most, on rank {rank}.",
        seconds=f"{time.monotonic() - started:.1f}",
        evaluation="" if task.validation is None else tr(", an evaluation"),
        peak=shown(max(peaks)),
        rank=peaks.index(max(peaks)),
    )
