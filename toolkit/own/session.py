"""One training session of a model of one's own; what is not the model's or the data's is that of toolkit/cli."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import nn

from toolkit.checkpoint import random_state
from toolkit.checkpoint.directory import RunState
from toolkit.cli.beginning import begin, ready_line, reporter, watchdog, with_optimizer
from toolkit.cli.building import schedule_maker
from toolkit.cli.context import AnySession
from toolkit.cli.tracking import tracked, trackers_of
from toolkit.config.load import to_yaml
from toolkit.config.mesh import accumulation
from toolkit.config.schema import RunConfig
from toolkit.data.sampler import Position
from toolkit.distributed import failure, process_group
from toolkit.distributed.process_group import on_rank0
from toolkit.engine import memory
from toolkit.engine.build import initialize_engine, use_tf32
from toolkit.engine.ds_config import DsConfig, build_ds_config
from toolkit.errors import ConfigError, DataError
from toolkit.export.checkpoint import CUSTOM_CARD, export_in_background
from toolkit.launch import rank_status
from toolkit.launch.environment import Ranks
from toolkit.messages import joined, say, tr
from toolkit.models.load import TORCH_DTYPES
from toolkit.models.save import MODEL_DIR
from toolkit.own.data import Data, data_of
from toolkit.own.evaluation import evaluate
from toolkit.own.finish import finish
from toolkit.own.objective import cast_inputs, objective_of
from toolkit.own.rehearsal import rehearse
from toolkit.own.task import Task, digest
from toolkit.secrets import hide_all
from toolkit.terminal import phase, set_display
from toolkit.track.progress import Progress
from toolkit.train import alike, data_card, folder_lock, run_folder, run_length
from toolkit.train.account import account_of
from toolkit.train.bad_steps import Samples
from toolkit.train.checkpoint import Described, Saver
from toolkit.train.guard import Guard
from toolkit.train.job import Job
from toolkit.train.loop import train as run_loop
from toolkit.train.resume import Origin, go_back, go_on, starting_state
from toolkit.train.run_length import Epoch


def run(task: Task, cfg: RunConfig, ranks: Ranks, started: float) -> Path:
    """Join the process group, train, leave; return the run folder. A collective.

    Args:
        task: what the program brings.
        cfg: checked config.
        ranks: who this process is; the environment is set accordingly.
        started: time.monotonic() when the command was started.
    """
    failure.install_signals()
    set_display(cfg.run.display.value)
    alike.check_settings(cfg)
    device = process_group.start(cfg.distributed)
    memory.set_limit(device, cfg.plan.max_gpu_gib)
    folder = run_session(task, cfg, ranks, started)
    failure.end_watch()
    process_group.stop()
    return folder


def run_session(task: Task, cfg: RunConfig, ranks: Ranks, started: float) -> Path:
    """Train from the run folder to its DONE marker, in a process group that is there. A collective."""
    data = data_of(task, cfg, ranks)
    model = task.build(cfg.run.seed)
    random_state.seed_all(cfg.run.seed + ranks.rank)
    origin, hosts = begin(cfg, ranks)
    cfg = with_optimizer(cfg, origin)
    folder, card = origin.folder, _card(model)
    _check_alike(cfg, data, card)
    ds = build_ds_config(cfg, ranks.world_size, data.total_steps)
    start = on_rank0(lambda: _starting_state(cfg, data, ranks, origin, card))
    on_rank0(lambda: _record(folder, cfg, ds, data, card, hosts))
    if ranks.rank == 0:
        for line in _length_warnings(cfg, data, ranks.world_size):
            say(line)
    engine = _engine(model, cfg, ds, data.total_steps, folder)
    progress = Progress(
        data.total_steps,
        ranks.rank == 0,
        start.step,
        on_first_step=partial(rank_status.report_status, first_step=start.step + 1),
    )
    files = {CUSTOM_CARD: (json.dumps(card, indent=2) + "\n").encode()}
    session = AnySession(
        cfg=cfg,
        ranks=ranks,
        folder=folder,
        ds=ds,
        engine=engine,
        guard=Guard(engine, cfg.train),
        described=Described(files, None, export_in_background, holds_frozen=True),
        trackers=trackers_of(cfg, progress.say),
        started=started,
        reporter=reporter(cfg, folder) if ranks.rank == 0 else None,
    )
    with tracked(session, start.step, _counts(data, card)):
        _train(session, task, data, card, origin, start, progress)
    folder_lock.release()
    return folder


def _train(
    session: AnySession,
    task: Task,
    data: Data,
    card: dict[str, Any],
    origin: Origin,
    start: RunState,
    progress: Progress,
) -> None:
    """Do what a session is for, from the engine that is there to the DONE marker. A collective."""
    cfg, ranks, engine = session.cfg, session.ranks, session.engine
    folder = session.folder / "checkpoints"
    saver = Saver(
        engine,
        folder,
        cfg.checkpoint,
        session.described,
        progress.say,
        cfg.evaluate.keep_best,
        cfg.distributed.timeout_s / 2,
    )
    if origin.checkpoint is not None:
        go_on(saver, origin.checkpoint, start, ranks, cfg.run.seed)
    job = _job(session, task, data, saver, start)
    progress.say(_start_line(session, data, card))
    try:
        if cfg.train.rehearse and start.step < job.total_steps:
            progress.say(rehearse(session, task, job))
        progress.say(ready_line(session))
        outcome = run_loop(job, progress)
    finally:
        progress.close()
        job.watchdog.stop()
    finish(session, task, outcome, job.total_steps, card)
    saver.end()


def _job(session: AnySession, task: Task, data: Data, saver: Saver, start: RunState) -> Job:
    cfg, ranks, engine = session.cfg, session.ranks, session.engine

    def evaluated(step: int, alive: Any) -> dict[str, float]:
        return evaluate(task, cfg, ranks, engine, alive)

    account = account_of(engine, cfg.tuning, recomputes=False)
    return Job(
        cfg=cfg,
        engine=engine,
        batches_from=data.batches_from,
        accumulation=accumulation(cfg, ranks.world_size),
        steps_per_epoch=data.steps_per_epoch,
        total_steps=data.total_steps,
        folder=session.folder,
        evaluate=None if task.validation is None else evaluated,
        saver=saver,
        start=start,
        position_after=data.position_after,
        figures_at=lambda place: {},
        samples_at=lambda place: _samples_at(data, place),
        go_back=lambda checkpoint: go_back(saver, checkpoint, start, session.folder, ranks, cfg.run.seed),
        watchdog=watchdog(session),
        account=replace(account, formula=None),  # it counts a language model's tokens
        guard=session.guard,
        trackers=session.trackers,
        begin_report=session.reporter.begin if session.reporter else lambda: None,
        objective=objective_of(task.loss),
    )


def _samples_at(data: Data, place: Position) -> Samples:
    def shown(name: str) -> dict[str, Any]:
        return {"where": name, "tokens": 1, "trained_tokens": 1, "text": []}

    return [[[shown(name) for name in names] for names in micro] for micro in data.samples_at(place)]


def _engine(model: nn.Module, cfg: RunConfig, ds: DsConfig, total_steps: int, folder: Path) -> DeepSpeedEngine:
    make_schedule = schedule_maker(cfg, total_steps)
    use_tf32(cfg.precision)
    dtype = TORCH_DTYPES[cfg.precision.dtype]
    if dtype is not torch.float32:
        cast_inputs(model, dtype)
    speaks = process_group.rank() == 0
    with phase(tr("Building the engine (the first time DeepSpeed compiles its ops: minutes)"), speaks=speaks):
        values = run_folder.profiled(ds.values, folder)
        return initialize_engine(
            model, values, cfg.train.activation_checkpointing, make_schedule, cfg.compile, cfg.optim
        )


def _card(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint and the report say of the model."""
    stored = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())
    return {
        "model": type(model).__name__,
        "program": sys.argv[0],
        "digest": digest(model),
        "parameters": sum(one.numel() for one in parameters.values()),
        "trained_parameters": sum(one.numel() for one in parameters.values() if one.requires_grad),
        "names": [*parameters, *(name for name, _ in model.named_buffers() if name in stored)],
    }


def _check_alike(cfg: RunConfig, data: Data, card: dict[str, Any]) -> None:
    """See that all ranks train the same model on the same data: with others they would wait for each other for ever.

    Raises:
        DataError: on every rank.
    """
    mine = {
        **{f"data: {name}": str(value) for name, value in data.identity.items()},
        "data: steps": f"{data.total_steps:,}",
        "model: trained parameters": f"{card['trained_parameters']:,}",
        "model: names and shapes": card["digest"],
    }
    try:
        process_group.check_alike(cfg.distributed, mine, DataError)
    except DataError as error:
        advice = tr(
            "Give every rank the whole dataset, which is divided among the ranks here, and build the same model on "
            "each; with shards_itself=True the length of a dataset is that of all ranks together."
        )
        raise DataError(joined(str(error), advice)) from error


def _length_warnings(cfg: RunConfig, data: Data, world_size: int) -> list[str]:
    epoch = Epoch(samples=data.size, sequences=data.size, per_step=cfg.batch.global_size) if data.size else None
    return run_length.warnings(cfg, epoch, data.total_steps, world_size)


def _counts(data: Data, card: dict[str, Any]) -> dict[str, Any]:
    return {"model": card["model"], "parameters": card["parameters"], **data.identity}


def _starting_state(cfg: RunConfig, data: Data, ranks: Ranks, origin: Origin, card: dict[str, Any]) -> RunState:
    """Return where the run begins. For rank 0 only.

    Raises:
        ConfigError: the checkpoint is of another model.
    """
    file = None if origin.checkpoint is None else origin.checkpoint / MODEL_DIR / CUSTOM_CARD
    if file is not None:
        saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": "?", "digest": ""}
        if saved["digest"] != card["digest"]:
            raise ConfigError(
                tr(
                    "the checkpoint {folder} is of another model ({before}): names or shapes of its parameters are not "
                    "those of {now}. Undo this, or start anew under another run.name.",
                    folder=origin.checkpoint,
                    before=saved["model"],
                    now=card["model"],
                )
            )
    return starting_state(cfg, data.identity, ranks, origin, say)


def _record(folder: Path, cfg: RunConfig, ds: DsConfig, data: Data, card: dict[str, Any], hosts: list[str]) -> None:
    """Write down what begins. For rank 0 only."""
    device = torch.cuda.get_device_name() if get_accelerator().device_name() == "cuda" else ""
    run_folder.record_start(folder, to_yaml(cfg), ds.values, hosts, device)
    known = {
        "total_steps": data.total_steps,
        "steps_per_epoch": data.steps_per_epoch,
        "program": card["program"],
        "model": card["model"],
        **data.identity,
    }
    (folder / data_card.FILE).write_text(json.dumps(hide_all(known), indent=2) + "\n", encoding="utf-8")


def _start_line(session: AnySession, data: Data, card: dict[str, Any]) -> str:
    return tr(
        "{trained} of {parameters} parameters of {model} are trained. {samples}, {steps} steps ({per_epoch} per epoch)."
        " Run folder: {folder}",
        trained=f"{card['trained_parameters']:,}",
        parameters=f"{card['parameters']:,}",
        model=card["model"],
        samples=data.described,
        steps=f"{data.total_steps:,}",
        per_epoch=f"{data.steps_per_epoch:,}",
        folder=session.display_folder,
    )
