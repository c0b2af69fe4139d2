"""A training run from its config to the DONE marker: build (data, run directory, engine), fit (the loop), finish."""

import gc
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit import disk, secrets, terminal
from toolkit.checkpoint import directory
from toolkit.config import files as recipe_files, load, mesh, schema
from toolkit.distributed import accelerator, failure, presence, process_group, signals
from toolkit.distributed.watchdog import Watchdog
from toolkit.engine import build, ds_config, memory
from toolkit.launch import environment
from toolkit.messages import RunFolderError, ToolkitError, say, tr, warn
from toolkit.track.metrics import Progress
from toolkit.train import baseline, dry_run, hooks, loop, run_dir, run_lock, schedule, settle, startup
from toolkit.train.checkpointer import Checkpointer
from toolkit.train.step import StepGuard
from toolkit.train.task import TOKENS, FitResult, RunContext, Task

BuiltEngine = tuple[DeepSpeedEngine, StepGuard]
_LOOK_EVERY_S = 1.0


class Trainer:
    """Trains a task that has no data yet. Methods are collectives; `started`: time.monotonic() of the command."""

    progress: Progress
    run: RunContext
    plan: dry_run.RunPlan | None = None
    """What memory is expected to be; None if it is not known."""
    watchdog: Watchdog | None = None
    """From the moment that there is a run directory to the end of the run."""

    def __init__(self, task: Task, cfg: schema.RunConfig, ranks: environment.Ranks, started: float) -> None:
        self.task, self.cfg, self.ranks, self.started = task, cfg, ranks, started

    def train(self) -> Path:
        """Join the process group, train, leave; return the run directory."""
        with self.in_process_group():
            return self.train_in_group()

    @contextmanager
    def in_process_group(self) -> Iterator[None]:
        """Load the data and join the process group for the body; leave it after, unless the body raises an error."""
        signals.install_signals()
        terminal.set_display(self.cfg.run.display.value)
        with ExitStack() as stack:
            if self.ranks.world_size > 1:
                from toolkit.distributed import meeting
                from toolkit.train.consistency import check_settings

                check_settings(self.cfg)
                stack.enter_context(meeting.tell_failure())
            self.task.load_data(self.cfg, self.ranks)
        device = process_group.start(self.cfg.distributed)
        memory.set_limit(device, self.cfg.plan.max_gpu_gib)
        yield
        failure.end_watch()
        process_group.stop()

    def train_in_group(self) -> Path:
        """Train from the run directory to its DONE marker, in a process group that is there, on data that is loaded."""
        try:
            self.build()
            run = self.run
            with hooks.running(run.hooks, run, self.task):
                try:
                    result = self.fit()
                finally:
                    self.progress.close()
                self.finish(result)
                run.checkpointer.end()  # after DONE: no result waits for it
            run_lock.release_run_dir()
            return run.folder
        finally:
            if self.watchdog:
                self.watchdog.stop()

    def build(self) -> None:
        """Choose the run directory, settle the config, write it down, and build the engine in its starting state."""
        task, ranks = self.task, self.ranks
        # From here on a rank that is killed is named; once the run directory is chosen, on all nodes.
        failure.watch_failures(None, ranks.rank, process_group.gather(presence.me()))
        task.begin(self.cfg, ranks)
        source = self._open_run_dir()
        run_hooks = hooks.hooks_of(self.cfg, ranks, source.folder)
        # Changes only what is `auto`; zero.*, parallel.* and what they exclude only with plan.auto.
        self.cfg = settle.settle_config(self.cfg, task.vocab_size, ranks, source)
        # The engine that finds the micro-batch trains with it too; with a known one the engine is built below.
        searched = self._search_micro_batch(source) if self.cfg.batch.micro_per_gpu == schema.AUTO else None
        cfg = self.cfg
        task.settle(cfg)
        total_steps = task.total_steps
        schedule.warn_of_short_run(cfg, task.epoch, total_steps, ranks.world_size)
        ds = ds_config.build_ds_config(cfg, ranks.world_size, total_steps)
        start = process_group.on_rank0(lambda: self._record_start(ds, source))
        if searched is None:
            engine, guard = self._build_engine(cfg, ds, source)
        else:
            from toolkit.train import auto_layout

            engine, guard = searched
            auto_layout.apply_settled(engine, cfg, ds, total_steps)
        # What the engine was given in the end: buckets that fit, and what layouts change for DeepSpeed to count right.
        process_group.on_rank0(lambda: run_dir.write_ds_config(source.folder, engine.received_config))
        files = task.model_files(engine)
        checkpointer = Checkpointer(engine, source.folder / "checkpoints", cfg, files)
        if source.checkpoint is not None:
            from toolkit.train.resume import resume_from

            resume_from(checkpointer, source.checkpoint, start, ranks, cfg)
        status = partial(environment.report_status, first_step=start.step + 1)
        self.progress = Progress(total_steps, ranks.rank == 0, start.step, on_first_step=status)
        assert self.watchdog
        self.run = RunContext(
            cfg=cfg,
            ranks=ranks,
            folder=source.folder,
            ds=ds,
            engine=engine,
            guard=guard,
            files=files,
            checkpointer=checkpointer,
            start=start,
            hooks=[*run_hooks, *hooks.hooks_of_model(task.routers(engine), source.folder)],
            watchdog=self.watchdog,
            total_steps=total_steps,
            accumulation=mesh.accumulation(cfg, ranks.world_size),
            started=self.started,
        )
        if task.vocab_size is not None:
            self.plan = dry_run.plan_run(cfg, task.vocab_size, ranks, engine.device, source.folder / "plan.json")
        task.prepare_evaluation(self.run)

    def measure_baseline(self) -> baseline.Baseline:
        """Return what the run's speed and memory are compared with. A collective."""
        planned_bytes = self.plan.process_bytes if self.plan else None
        recompute = self.cfg.train.activation_checkpointing.enabled
        measured = baseline.measure_baseline(self.run.engine, self.cfg.tuning, recompute, planned_bytes)
        # FLOPs are known of language models alone.
        return measured if self.task.unit == TOKENS else replace(measured, formula=None)

    def fit(self) -> FitResult:
        """Try the run before its first step, then do all its steps."""
        run, progress, cfg = self.run, self.progress, self.cfg
        compared_with = self.measure_baseline()
        say(self.task.start_lines(run))
        if self.task.unit == TOKENS and compared_with.device:  # the speed of a CPU tells users nothing that helps
            say(compared_with.describe())
        if cfg.train.rehearse and run.start.step < run.total_steps:
            with terminal.phase(tr("Dry run")):
                line = dry_run.dry_run(self.task, run, self.plan)
            say(line)
        seconds = f"{time.monotonic() - self.started:.0f}"
        say("Ready after {seconds} s, counted from the start of the command.", seconds=seconds)
        if cfg.evaluate.at_start and not run.start.step:
            self.task.answer_before(run)
        return loop.TrainLoop(self.task, run, compared_with, progress).train()

    def finish(self, result: FitResult) -> None:
        """Answer, export, mark the run done and say what was achieved."""
        task, run = self.task, self.run
        answers = task.answers(run)
        if run.cfg.checkpoint.export:
            with _naming_what_was_trained(run, result):
                task.export(run, result)
        summary = task.summary(run, result) | {
            "steps": result.state.step,
            "skipped_steps": result.skipped_steps,
            "bad_steps": result.state.bad_steps,
            "rewinds": result.state.rewinds,
            "first_loss": result.state.first_loss,
            "last_loss": result.state.last_loss,
            "seconds": round(time.monotonic() - run.started, 1),
            "steps_done": result.steps,
            "steps_seconds": round(result.steps_s, 1),
        }
        for hook in run.hooks:
            hook.at_end(result, answers)
        process_group.barrier()
        process_group.on_rank0(lambda: run_lock.check_not_lost(run.folder))
        if self.ranks.rank:
            return
        say("\n" + "\n".join(self._end_lines(result, summary, answers)))
        for hook in run.hooks:
            hook.before_done(summary)
        run_dir.mark_done(run.folder, summary)
        for hook in run.hooks:
            hook.after_done()
        if line := recipe_files.example_data_notice(run.cfg.data):
            say(line)

    def _open_run_dir(self) -> run_dir.RunSource:
        """Choose the run directory, wait until all ranks see it, start logs and watchdog; set `hosts` (by rank)."""
        ranks = self.ranks
        # In a thread, as every byte of a checkpoint is read.
        source = process_group.patiently_on_rank0(lambda: run_dir.choose_run_dir(self.cfg))
        folder = source.folder
        if ranks.rank and ranks.local_rank == 0:  # for the `toolkit launch` of a node that rank 0 is not on
            environment.report_status(folder=str(folder))
        peers = _peers_that_see(folder)
        # Inodes of earlier starts' markers, now in logs/: file servers may still show them to other nodes as FAILED.
        old_markers = process_group.on_rank0(lambda: {file.stat().st_ino for file in (folder / "logs").glob("FAILED*")})
        failure.watch_failures(folder, earlier_markers=old_markers)
        startup.start_logs(folder / "logs" / f"rank_{ranks.rank}.log", ranks.rank)
        self.hosts = [peer.host for peer in peers]
        limits = self.cfg.distributed.hang_after_s, float(self.cfg.distributed.timeout_s)
        self.watchdog = Watchdog(folder, ranks.rank, ranks.world_size, *limits, self.cfg.compile.enabled)
        return source

    def _search_micro_batch(self, source: run_dir.RunSource) -> BuiltEngine:
        """Set `batch.micro_per_gpu` to the most rows that fit; return the engine that tried them, and its guard."""
        from toolkit.train import auto_layout

        limit = auto_layout.memory_to_fill(self.cfg)
        smallest = mesh.with_micro_batch(self.cfg)
        self.task.settle(smallest)
        ds = ds_config.build_ds_config(smallest, self.ranks.world_size, self.task.total_steps)
        engine, guard = self._build_engine(smallest, ds, source)
        rows = auto_layout.search_micro_batch(smallest, self.task, self.ranks, engine, guard, limit)
        self.cfg = mesh.with_micro_batch(self.cfg, rows)
        return engine, guard

    def _build_engine(self, cfg: schema.RunConfig, ds: ds_config.DsConfig, source: run_dir.RunSource) -> BuiltEngine:
        """Build the model and its engine by a config whose micro-batch is known, and the guard of its steps.

        ConfigError if the run is too short for its schedule.
        """
        module = self.task.build_model(ds, source)
        values = ds_config.with_flops_file(ds.values, source.folder)
        make_schedule = schedule.make_schedule(cfg, self.task.total_steps)
        recompute = cfg.train.activation_checkpointing
        with terminal.phase(tr("Building the engine (the first time DeepSpeed compiles its ops: minutes)")):
            engine = build.initialize_engine(module, values, recompute, make_schedule, cfg.compile, cfg.optim)
        gc.collect()  # building leaves cycles of references behind, which hold memory of weights
        self.task.engine_built(engine, ds, source)
        return engine, StepGuard(engine, cfg.train)

    def _record_start(self, ds: ds_config.DsConfig, source: run_dir.RunSource) -> directory.RunState:
        """Return the starting state, new or the checkpoint's; write down settings and data. For rank 0 only."""
        cfg, task, folder = self.cfg, self.task, source.folder
        start = run_dir.new_state(cfg, task.identity, self.ranks.world_size)
        if source.checkpoint is None:
            run_dir.trim_metrics(folder, 0)
        else:
            from toolkit.train.resume import resumed_state

            task.check_checkpoint(source.checkpoint)
            start = resumed_state(cfg, start, source.checkpoint, folder)
        run_dir.set_aside_settings(folder)
        device = torch.device(get_accelerator().current_device_name())
        name = accelerator.device_name(device)
        run_dir.write_settings(folder, load.to_yaml(cfg), ds.values, self.hosts, name)
        card = {"total_steps": task.total_steps, "steps_per_epoch": task.steps_per_epoch, **task.data_card()}
        text = json.dumps(secrets.hide_all(card), indent=2, ensure_ascii=False) + "\n"
        with suppress(OSError):  # a full disk is reported by what a run cannot do without
            (folder / "data.json").write_text(text, encoding="utf-8", errors="backslashreplace")
        return start

    def _end_lines(self, result: FitResult, summary: Mapping[str, Any], answers: list[dict[str, str]]) -> list[str]:
        """Return the lines that are printed at the end: steps, losses, skipped steps, answers, what to do next."""
        unit = self.task.loss_unit
        digits = 3 if unit else 4  # a custom model's loss may be of any size
        ends = (result.state.first_loss, result.state.last_loss)[-result.state.step :]  # one after a single step
        lines = [
            tr(
                "Done: {steps} steps in {steps_s} s ({seconds} s in all, from the start of the command), training loss "
                "{losses}.",
                steps=summary["steps_done"],
                steps_s=summary["steps_seconds"],
                seconds=summary["seconds"],
                losses=f"{' -> '.join(f'{loss:.{digits}f}' for loss in ends)} {unit}".rstrip(),
            )
        ]
        if result.skipped_steps or result.state.rewinds:
            lines.append(
                tr(
                    "{skipped} steps skipped; {bad} went wrong (logs/bad-step-*.jsonl); {rewinds} "
                    "times back to a checkpoint.",
                    skipped=result.skipped_steps,
                    bad=result.state.bad_steps,
                    rewinds=result.state.rewinds,
                )
            )
        everything = tr(
            "Everything is in {folder}: metrics.jsonl, config.yaml, ds_config.json, checkpoints/.",
            folder=self.run.display_folder,
        )
        dialogs = [_dialog(**answer) for answer in answers]
        next_steps = self.task.next_steps(self.run, answers)
        return [*lines, *self.task.end_lines(summary), *dialogs, everything, *next_steps]


def _dialog(prompt: str, answer: str, before: str | None = None) -> str:
    """Return a question with its answer after training, and that before it, as it is printed."""
    dialog = tr("  Q: {prompt}\n  A: {answer}", prompt=prompt, answer=answer)
    return dialog if before is None else dialog + "\n" + tr("  Before training: {before}", before=before)


@contextmanager
def _naming_what_was_trained(run: RunContext, result: FitResult) -> Iterator[None]:
    """Add to an error of the export what was trained, where it is, and how to export it."""
    try:
        yield
    except Exception as error:
        from toolkit.train.existing_run import what_was_trained

        trained = what_was_trained(run.folder, run.display_folder, result.state.step)
        if isinstance(error, ToolkitError):
            raise type(error)(f"{error}\n{trained}") from error
        warn(trained)
        raise


def _peers_that_see(folder: Path) -> list[presence.Peer]:
    """Wait until every rank sees the run directory, and return the processes of all ranks; RunFolderError if a node
    does not see it in time, as its part of a checkpoint would be lost to the others. A collective.
    """
    started, is_told = time.monotonic(), False
    while True:  # answers, by rank: process, whether it sees the directory, seconds since it began to look
        answers = process_group.gather((presence.me(), folder.is_dir(), time.monotonic() - started))
        blind = sorted({peer.host for peer, sees, _ in answers if not sees})
        if not blind:
            return [peer for peer, *_ in answers]
        if answers[0][2] > disk.STALE_S:  # rank 0's clock counts: all end together
            raise RunFolderError(
                "the run directory {folder} is not there on {hosts}: checkpoints need a disk that all "
                "nodes share. Set run.dir to a directory on one.",
                folder=folder,
                hosts=", ".join(blind),
            )
        if not is_told:
            say("Waiting until {folder} can be seen on {hosts}.", folder=folder, hosts=", ".join(blind))
        is_told = True
        time.sleep(_LOOK_EVERY_S)
