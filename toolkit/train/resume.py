"""Which folder a run works in, and from which checkpoint it goes on. Decided once, by rank 0."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint import changes, convert, directory, engine_files, random_state
from toolkit.checkpoint.directory import RunState
from toolkit.config.load import to_dict
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import RunConfig
from toolkit.disk import check_no_symlinks, unused_path
from toolkit.distributed.process_group import on_rank0
from toolkit.errors import CheckpointError, ConfigError, RunFolderError
from toolkit.launch.environment import Ranks
from toolkit.messages import tr
from toolkit.secrets import hide_all
from toolkit.train import folder_lock, run_folder, starts, stop_file
from toolkit.train.checkpoint import Saver
from toolkit.train.prepared import Prepared

NEVER, AUTO, MUST = "never", "auto", "must"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run works and what it goes on from."""

    folder: Path
    """The run folder."""
    checkpoint: Path | None
    """Verified; None begins anew."""


def choose(cfg: RunConfig, say: Callable[[str], None]) -> Origin:
    """Return where to work, with the folder made and locked. For rank 0 only.

    Raises:
        RunFolderError: the run has finished already, somebody else works in it, or it cannot be made.
        RepeatedDeath: it died twice in one place.
        CheckpointError: there is nothing to go on from although there should be.
        ConfigError: `resume` says something that cannot be.
    """
    named = Path(cfg.run.dir).absolute() / cfg.run.name if cfg.run.name else None
    checkpoint: Path | None
    if cfg.resume not in (NEVER, AUTO, MUST):
        checkpoint = _checkpoint_at(Path(cfg.resume), say)
        if named is None or checkpoint.parent.parent != named:
            return Origin(_new(cfg, checkpoint, say), checkpoint)
        _claim(named, say)
        directory.discard_unfinished(checkpoint.parent)
        _put_aside(named, checkpoint)
        return Origin(named, checkpoint)
    is_run = named is not None and any((named / name).exists() for name in (folder_lock.LOCK, "config.yaml"))
    if named is None or not is_run or cfg.resume == NEVER:  # a folder that is no run is refused as it always was
        if cfg.resume == MUST:
            raise CheckpointError(
                tr(
                    "resume = must, but there is no run {folder}. Check run.name and run.dir.",
                    folder=named or cfg.run.dir,
                )
            )
        return Origin(_new(cfg, None, say), None)
    _claim(named, say)
    checkpoints = named / "checkpoints"
    were_there = bool(directory.published_checkpoints(checkpoints))
    checkpoint = directory.newest_complete(checkpoints, say)
    directory.discard_unfinished(checkpoints)
    if checkpoint is None and (were_there or cfg.resume == MUST):
        raise CheckpointError(
            tr(
                "{folder} holds no checkpoint that is whole. To begin anew, choose another run.name.",
                folder=checkpoints,
            )
        )
    _put_aside(named, checkpoint)
    if checkpoint is None:
        say(tr("The run {folder} was stopped before its first checkpoint: it begins anew.", folder=named))
    return Origin(named, checkpoint)


def _checkpoint_at(path: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint that a path means: itself, or the newest of a run."""
    path = path.absolute()
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            tr(
                "resume = {path} is a model or an adapter alone, without what training needs to resume. Query it "
                "(toolkit generate {path}), or start another training from it: model.path={path}, of an adapter "
                "tuning.adapter={path}.",
                path=path,
            )
        )
    if (path / directory.MANIFEST).is_file():
        if wrong := directory.manifest_problems(path):
            raise CheckpointError(
                tr("the checkpoint {folder} is damaged: {reason}.", folder=path, reason="; ".join(wrong[:3]))
            )
        return path
    found = directory.newest_complete(path / "checkpoints", say) if path.is_dir() else None
    if found is None:
        raise ConfigError(
            tr(
                "resume = {path} is not auto, must or never, nor a checkpoint or a run directory with one.",
                path=path,
            )
        )
    return found


def _new(cfg: RunConfig, checkpoint: Path | None, say: Callable[[str], None]) -> Path:
    folder = run_folder.create(cfg)
    folder_lock.take(folder, say)
    starts.record(folder, _step(checkpoint))
    return folder


def _step(checkpoint: Path | None) -> int:
    return directory.read_run_state(checkpoint).step if checkpoint else 0


def _claim(folder: Path, say: Callable[[str], None]) -> None:
    """Keep an existing run folder to this process, unless the run has finished, or is not this user's to write to."""
    check_no_symlinks(folder, RunFolderError)
    if (folder / "DONE").exists():
        raise RunFolderError(
            tr("the run {folder} has finished already (DONE). For another one choose another run.name.", folder=folder)
        )
    folder_lock.take(folder, say)
    stop_file.remove_stale(folder, say)


def _put_aside(folder: Path, checkpoint: Path | None) -> None:
    """Make an existing run folder ready for going on: what would be overwritten is put aside."""
    try:
        starts.record(folder, _step(checkpoint))
        for name in ("config.yaml", "ds_config.json", "environment.json", "FAILED"):
            if (folder / name).exists():
                (folder / name).rename(unused_path(folder / "logs" / name))
        if (folder / "export").exists():  # of a run that died before it was DONE
            (folder / "export").rename(unused_path(folder / "export.replaced"))
        for path in [*folder.glob(".export.*.tmp"), *folder.glob(".base.*.tmp")]:
            shutil.rmtree(path)
        if checkpoint is not None:
            directory.move_aside_after(checkpoint)
        elif (folder / "base").exists():  # the random model of another config, maybe
            (folder / "base").rename(unused_path(folder / "base.replaced"))
    except OSError as error:
        raise RunFolderError(
            tr("cannot go on in {folder}: {reason}.", folder=folder, reason=error.strerror or error)
        ) from error


def trim_metrics(folder: Path, length: int) -> None:
    """Put aside the rows of steps that are done again. For rank 0 only.

    Args:
        folder: the run folder.
        length: bytes of metrics.jsonl when the checkpoint was saved.
    """
    path = folder / "metrics.jsonl"
    if not path.exists() or path.stat().st_size <= length:
        return
    content = path.read_bytes()
    with open(folder / "logs" / "metrics-lost.jsonl", "ab") as lost:
        lost.write(content[length:])
    os.truncate(path, length)


def identity(prepared: Prepared) -> dict[str, str]:
    """Return what is the same if a run learns from the same, in the same rows."""
    plan = prepared.train_plan.folder
    return {"store": prepared.train.fingerprint, "rows": plan.name if plan else prepared.packing.value}


def starting_state(
    cfg: RunConfig, data: dict[str, str], ranks: Ranks, origin: Origin, say: Callable[[str], None]
) -> RunState:
    """Return where the run begins, with everything in it that stays the same; put aside what is done again.

    For rank 0 only.

    Args:
        cfg: checked config.
        data: what the run learns from; see `identity`.
        ranks: who this process is.
        origin: run folder, and what the run goes on from.
        say: tells the user.

    Raises:
        ConfigError: the run computes something else than the one that saved the checkpoint.
        CheckpointError: the checkpoint cannot be read, or not by so many ranks.
    """
    config = json.loads(json.dumps(to_dict(cfg)))
    same: dict[str, Any] = {
        "world_size": ranks.world_size,
        "data": data,
        "config": config,
        "versions": run_folder.environment(ranks.world_size),
    }
    if origin.checkpoint is None:
        trim_metrics(origin.folder, 0)
        return RunState(**same)
    state = directory.read_run_state(origin.checkpoint)
    _check_tensor(state, config["parallel"]["tensor"], ranks.world_size)
    changed = changes.check_changes(hide_all(state.config), config, state.data, data, cfg.checkpoint.allow_changes)
    _check_stages(_stage(state), config["zero"]["stage"])
    _check_optimizer(state, cfg, ranks)
    _check_pipeline(state, config, ranks.world_size)
    _check_states(state.config["zero"], config["zero"])
    same_run = origin.checkpoint.parent.parent == origin.folder
    if same_run:
        trim_metrics(origin.folder, state.metrics_bytes)
    say(tr("Going on after step {step} from {checkpoint}.", step=f"{state.step:,}", checkpoint=origin.checkpoint))
    if changed:
        say(tr("Changed since then:") + "\n" + "\n".join(changed))
    return replace(state, **same)


def _stage(state: RunState) -> int:
    return int(state.config["zero"]["stage"])


def _is_converted(saved: RunState, stage: int, ranks: Ranks) -> bool:
    """Whether a checkpoint goes on through DeepSpeed's universal form: other ranks, or another stage."""
    return _stage(saved) != stage or (saved.world_size != ranks.world_size and stage != 0)


def _check_optimizer(state: RunState, cfg: RunConfig, ranks: Ranks) -> None:
    """Refuse other ranks, or another stage, for states that DeepSpeed's universal form does not hold."""
    if _is_converted(state, cfg.zero.stage, ranks) and not OPTIMIZERS[cfg.optim.name].is_adam:
        raise CheckpointError(
            tr(
                "the checkpoint was saved by {before} ranks under ZeRO-{stage}, and DeepSpeed can bring Adam's states "
                "alone to others, not those of optim.name = {name}. Start with {before} ranks and zero.stage={stage}.",
                before=state.world_size,
                stage=_stage(state),
                name=cfg.optim.name.value,
            )
        )


def _check_stages(before: int, now: int) -> None:
    """Refuse a ZeRO stage that the files of a checkpoint cannot be brought into."""
    if before != now and not convert.can_convert(before, now):
        raise CheckpointError(
            tr(
                "the checkpoint was saved under ZeRO-{before}, which cannot go on under ZeRO-{now}: only the stages 1 "
                "and 2 can change into each other. Start with zero.stage={before}, with any number of ranks.",
                before=before,
                now=now,
            )
        )


def _check_tensor(state: RunState, now: int, world_size: int) -> None:
    """Refuse what the parts of layers in a checkpoint cannot be brought into."""
    before = int(state.config.get("parallel", {}).get("tensor", 1))
    if before != now or (now > 1 and state.world_size != world_size):
        raise CheckpointError(
            tr(
                "the checkpoint was saved by {ranks} ranks with parallel.tensor = {before}, and cannot go on with "
                "{now_ranks} and {now}: the parts of layers stay on as many ranks. Start as before, or begin another "
                "training with its weights (toolkit export-model).",
                ranks=state.world_size,
                before=before,
                now_ranks=world_size,
                now=now,
            )
        )


def _check_pipeline(state: RunState, config: dict[str, Any], world_size: int) -> None:
    """Refuse a layout that the files of a pipeline cannot be brought into, or into a pipeline."""
    before, now = (int(one.get("parallel", {}).get("pipeline", 1)) for one in (state.config, config))
    is_same = state.world_size == world_size and _stage(state) == config["zero"]["stage"]
    if before == now and (now == 1 or is_same):
        return
    raise CheckpointError(
        tr(
            "the checkpoint was saved by {ranks} ranks in {before} pipeline stages under ZeRO-{zero}, and a pipeline's "
            "goes on in the same way only: parallel.pipeline={before} zero.stage={zero} on {ranks} ranks. To train the "
            "weights in another way begin another run with model.path=RUN/export.",
            ranks=state.world_size,
            before=before,
            zero=_stage(state),
        )
    )


def _check_states(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse what keeps optimizer states where DeepSpeed's checkpoints (0.19.8) do not look for them."""
    for zero in (before, now):
        for name, section in (("zenflow", "zenflow.enabled"), ("offload_optimizer", "offload_optimizer.super_offload")):
            if zero.get(name, {}).get(section.partition(".")[2]):
                raise CheckpointError(
                    tr(
                        "a run with {key} = true cannot go on from a checkpoint, nor another from its own: DeepSpeed "
                        "does not save a part of its optimizer's states. Take the weights alone: toolkit export-model, "
                        "then model.path=EXPORT under another run.name.",
                        key=f"zero.{section}",
                    )
                )


def go_on(saver: Saver, checkpoint: Path, state: RunState, ranks: Ranks, seed: int) -> None:
    """Put engine and random generators into the state of a checkpoint. A collective.

    Args:
        saver: of the run's engine.
        checkpoint: verified.
        state: of `starting_state`.
        ranks: who this process is.
        seed: `run.seed`.

    Raises:
        CheckpointError: it cannot be read.
    """
    saved = directory.read_run_state(checkpoint)
    if _is_converted(saved, _stage(state), ranks):
        saver.load_universal(checkpoint)
    else:
        saver.load(checkpoint)
    path = checkpoint / random_state.file_name(ranks.rank)
    if saved.world_size == ranks.world_size:
        try:
            random_state.restore(path)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise engine_files.unreadable_error(path, error) from error
    else:  # other ranks, other streams: dropout differs, the mathematics do not
        random_state.seed_all(seed + 1_000_003 * state.step + ranks.rank)


def go_back(saver: Saver, checkpoint: Path, start: RunState, folder: Path, ranks: Ranks, seed: int) -> RunState:
    """Put a running run into the state of an earlier checkpoint, its metrics since then aside. A collective.

    Args:
        saver: of the run's engine.
        checkpoint: that the run saved or began with.
        start: where the run began, with its config.
        folder: the run folder.
        ranks: who this process is.
        seed: `run.seed`.

    Returns:
        The state of the checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = replace(directory.read_run_state(checkpoint), config=start.config)
    on_rank0(lambda: trim_metrics(folder, state.metrics_bytes if checkpoint.parent.parent == folder else 0))
    go_on(saver, checkpoint, state, ranks, seed)
    return state
