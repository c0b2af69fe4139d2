"""One training session: data, process group, run folder, engine, loop, export, and what is said at the end."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from toolkit.checkpoint import random_state
from toolkit.checkpoint.directory import RunState
from toolkit.cli.beginning import begin, ready_line, reporter, watchdog, with_optimizer
from toolkit.cli.context import Session
from toolkit.cli.evaluation import Evaluation, questions_of
from toolkit.cli.finish import finish
from toolkit.cli.opening import open_run
from toolkit.cli.planning import RunPlan, plan_run
from toolkit.cli.rehearsal import rehearse
from toolkit.cli.tracking import data_summary, hand_on_answers, tracked, trackers_of
from toolkit.config.load import LoadedConfig
from toolkit.config.mesh import accumulation, mesh_of
from toolkit.config.schema import RunConfig
from toolkit.data.preview import colored_spans
from toolkit.data.sampler import Position
from toolkit.distributed import failure, process_group
from toolkit.engine import memory
from toolkit.engine.parameters import count_parameters, is_partitioned
from toolkit.export.checkpoint import export_in_background
from toolkit.launch import rank_status
from toolkit.launch.environment import Ranks
from toolkit.messages import say, tr
from toolkit.models import probe
from toolkit.models.pipeline import unwrap_model
from toolkit.models.save import describe
from toolkit.terminal import phase, set_display
from toolkit.track.progress import Progress
from toolkit.train import alike, folder_lock
from toolkit.train.account import account_of
from toolkit.train.bad_steps import Samples
from toolkit.train.batches import epoch_steps, order_figures, place_after, step_samples, training_batches
from toolkit.train.checkpoint import Described, Saver
from toolkit.train.job import Job
from toolkit.train.loop import train as run_loop
from toolkit.train.prepared import Prepared, prepare_data
from toolkit.train.resume import Origin, go_back, go_on


def train(loaded: LoadedConfig, ranks: Ranks, started: float) -> int:
    """Join the process group, run one session, leave.

    Args:
        loaded: checked config.
        ranks: who this process is; the environment is set accordingly.
        started: time.monotonic() when the command was started.

    Returns:
        The exit code.
    """
    failure.install_signals()
    set_display(loaded.cfg.run.display.value)
    alike.check_settings(loaded.cfg)
    # Before the process group exists: however long tokenising takes, no collective can time out over it.
    prepared = prepare_data(loaded.cfg, speaks=ranks.rank == 0)
    alike.check_data(loaded.cfg, prepared)
    device = process_group.start(loaded.cfg.distributed)
    memory.set_limit(device, loaded.cfg.plan.max_gpu_gib)
    run_session(loaded.cfg, ranks, prepared, started)
    failure.end_watch()
    process_group.stop()
    return 0


def run_session(cfg: RunConfig, ranks: Ranks, prepared: Prepared, started: float) -> Path:
    """Train one run from its folder to its DONE marker. A collective.

    Args:
        cfg: checked config.
        ranks: who this process is.
        prepared: tokenizer and stores.
        started: time.monotonic() when the command was started.

    Returns:
        The run folder.
    """
    random_state.seed_all(cfg.run.seed + mesh_of(cfg, ranks.world_size, ranks.rank).data_rank)
    questions = questions_of(cfg, prepared, say if ranks.rank == 0 else lambda line: None)
    origin, hosts = begin(cfg, ranks)
    cfg = with_optimizer(cfg, origin)
    folder = origin.folder
    opened = open_run(cfg, prepared, ranks, origin, hosts)
    cfg, prepared, engine = opened.cfg, opened.prepared, opened.engine
    start, total_steps = opened.start, opened.total_steps
    told = partial(rank_status.report_status, first_step=start.step + 1)
    progress = Progress(total_steps, ranks.rank == 0, start.step, on_first_step=told)
    session = Session(
        cfg=cfg,
        ranks=ranks,
        prepared=prepared,
        questions=questions,
        folder=folder,
        ds=opened.ds,
        engine=engine,
        guard=opened.guard,
        described=_describe(engine, prepared),
        trackers=trackers_of(cfg, progress.say),
        started=started,
        reporter=reporter(cfg, folder) if ranks.rank == 0 else None,
    )
    with tracked(session, start.step, data_summary(prepared)):
        _train(session, origin, start, total_steps, progress)
    folder_lock.release()
    return folder


def _train(session: Session, origin: Origin, start: RunState, total_steps: int, progress: Progress) -> None:
    """Do what a session is for, from the engine that is there to the DONE marker. A collective."""
    cfg, ranks, prepared = session.cfg, session.ranks, session.prepared
    engine, folder = session.engine, session.folder
    saver = Saver(
        engine,
        folder / "checkpoints",
        cfg.checkpoint,
        session.described,
        progress.say,
        cfg.evaluate.keep_best,
        cfg.distributed.timeout_s / 2,
    )
    if origin.checkpoint is not None:
        go_on(saver, origin.checkpoint, start, ranks, cfg.run.seed)
    plan = plan_run(cfg, prepared, ranks, engine.device, folder / "plan.json")
    evaluation = _evaluation(session, saver.say) if prepared.validation is not None else None
    job = _job(session, saver, evaluation, start, total_steps, plan)
    if ranks.rank == 0:
        progress.say(f"{_start_line(session, total_steps, job.steps_per_epoch)}\n{job.account.describe()}")
    try:
        if cfg.train.rehearse and start.step < total_steps:
            progress.say(_rehearsed(session, job, evaluation, plan))
        progress.say(ready_line(session))
        outcome = run_loop(job, progress)
    finally:
        progress.close()
        job.watchdog.stop()
    finish(session, outcome, total_steps)
    saver.end()  # after DONE: no result waits for it


def _rehearsed(session: Session, job: Job, evaluation: Evaluation | None, plan: RunPlan | None) -> str:
    with phase(tr("Rehearsing"), speaks=session.ranks.rank == 0):
        return rehearse(session, job, evaluation, plan)


def _describe(engine: DeepSpeedEngine, prepared: Prepared) -> Described:
    """Return what checkpoints hold of the model. Now, while its folder is there, and not hours later."""
    files: dict[str, bytes] = {}
    model = unwrap_model(engine.module)
    process_group.on_rank0(lambda: files.update(describe(model, prepared.encoder)))
    if tuned := getattr(engine.module, "tuned", None):
        files |= tuned.describe()
    store = prepared.train
    rows = [store[row][0].tolist() for row in range(min(probe.ROWS, len(store)))]
    return Described(files, probe.ids_of(rows, model.config), export_in_background)


def _job(
    session: Session,
    saver: Saver,
    evaluation: Evaluation | None,
    start: RunState,
    total_steps: int,
    plan: RunPlan | None,
) -> Job:
    cfg, ranks, prepared = session.cfg, session.ranks, session.prepared
    return Job(
        cfg=cfg,
        engine=session.engine,
        batches_from=lambda place, steps: training_batches(cfg, prepared, ranks, steps, place),
        accumulation=accumulation(cfg, ranks.world_size),
        steps_per_epoch=epoch_steps(cfg, prepared),
        total_steps=total_steps,
        folder=session.folder,
        evaluate=_evaluate(session, evaluation) if evaluation is not None else None,
        saver=saver,
        start=start,
        position_after=place_after(cfg, prepared),
        figures_at=order_figures(cfg, prepared),
        samples_at=partial(_samples_at, session),
        go_back=lambda checkpoint: go_back(saver, checkpoint, start, session.folder, ranks, cfg.run.seed),
        watchdog=watchdog(session),
        account=account_of(
            session.engine,
            cfg.tuning,
            cfg.train.activation_checkpointing.enabled,
            plan.process_bytes if plan else None,
        ),
        guard=session.guard,
        trackers=session.trackers,
        begin_report=session.reporter.begin if session.reporter else lambda: None,
    )


def _evaluation(session: Session, tell: Callable[[str], None]) -> Evaluation:
    engine = session.engine
    evaluation = Evaluation(
        cfg=session.cfg,
        prepared=session.prepared,
        ranks=session.ranks,
        questions=session.questions,
        model=engine,
        device=engine.device,
        in_step=is_partitioned(engine),
        say=tell,
    )
    evaluation.leave_out_too_long()
    return evaluation


def _evaluate(session: Session, evaluation: Evaluation) -> Callable[[int, Callable[[], None]], dict[str, float]]:
    """Return the function that the loop calls to evaluate."""
    folder = session.folder / "evaluations"

    def evaluate(step: int, alive: Callable[[], None]) -> dict[str, float]:
        figures = evaluation.run(folder / f"step-{step}.jsonl", alive)
        if "eval_answers" in figures:
            hand_on_answers(session, step)
        return figures

    return evaluate


def _samples_at(session: Session, place: Position) -> Samples:
    """Return the samples of the step that begins at a place, as `toolkit show` prints them."""
    store, tokenizer = session.prepared.train, session.prepared.tokenizer

    def shown(sample: int) -> dict[str, Any]:
        ids, trained = store[sample]
        text = colored_spans(tokenizer, ids.tolist(), trained.tolist())
        return {"where": store.where(sample), "tokens": len(ids), "trained_tokens": int(trained.sum()), "text": text}

    by_rank = step_samples(session.cfg, session.prepared, session.ranks.world_size, place)
    return [[[shown(sample) for sample in samples] for samples in micro_batches] for micro_batches in by_rank]


def _start_line(session: Session, total_steps: int, steps_per_epoch: int) -> str:
    store = session.prepared.train
    counts = count_parameters(unwrap_model(session.engine.module))
    trained, total = sum(one.trained for one in counts.values()), sum(one.total for one in counts.values())
    parts = [
        f"{group} {one.trained:,} / {one.total:,}" if one.trained not in (0, one.total) else f"{group} {one.total:,}"
        for group, one in counts.items()
        if one.trained
    ]
    line = tr(
        "{trained} of {parameters} parameters are trained ({parts}). {samples} samples with {tokens} tokens "
        "({trained_tokens} trained), {steps} steps ({per_epoch} per epoch). Run folder: {folder}",
        trained=f"{trained:,}",
        parameters=f"{total:,}",
        parts=", ".join(parts),
        samples=f"{len(store):,}",
        tokens=f"{store.num_tokens:,}",
        trained_tokens=f"{store.num_trained_tokens:,}",
        steps=f"{total_steps:,}",
        per_epoch=f"{steps_per_epoch:,}",
        folder=session.display_folder,
    )
    duplicates = session.prepared.report.duplicates()
    return f"{line}\n{duplicates}" if duplicates else line
