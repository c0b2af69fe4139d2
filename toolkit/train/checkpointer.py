"""Saving and resuming a run, and what must be equal on all ranks and in a resumed run (compared under names that no
language changes). A save has three states.

*Written*: every rank has handed its files to the system (with `checkpoint.asynchronous`: noted what they will hold; a
thread copies that before the next update, and writes them). *Proven*: a thread of each rank has flushed its files, read
them back and compared their checksums. *Published*: at a step boundary where all ranks have got so far, rank 0 writes
the manifest, renames the directory and names it in `latest`. Killed before that, the previous checkpoint is untouched.

A thread of rank 0 removes old checkpoints, as deleting 70 GB on a network disk takes minutes. They are renamed first,
so that a half-deleted one is never taken for a checkpoint.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

import toolkit
from toolkit import disk, secrets
from toolkit.checkpoint import directory, engine_state, fragments, state_files
from toolkit.config import load, mesh, rule_tables, schema
from toolkit.distributed import process_group
from toolkit.distributed.process_group import gather, on_rank0, rank
from toolkit.engine.parameters import is_muon, is_partitioned, ruined_ranks
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, reason_of, say, tr, warn
from toolkit.models import probe, save, weights
from toolkit.models.chat import TOKENIZER
from toolkit.models.stages import capture_probe, is_pipeline, stage_model, unwrap_model
from toolkit.train import run_dir


def _held_by(engine: DeepSpeedEngine, with_frozen: bool) -> engine_state.Held:
    """Return what an engine's checkpoints hold, under the names of the model."""
    model, whole = stage_model(engine.module), unwrap_model(engine.module)
    # On the last stage of a pipeline a head that is the embedding has a name of its own, and is saved by the first.
    tied = weights.tied_names(whole) if is_pipeline(engine) else {}
    named = {tied.get(name, name): one for name, one in model.named_parameters()}
    twice = {name for name, one in named.items() if getattr(one, "ds_pipe_replicated", False)}
    stored = model.state_dict(keep_vars=True)
    buffers = {name: one for name, one in model.named_buffers() if name in stored}
    return engine_state.Held(named, buffers, with_frozen, frozenset(twice))


def _files_of(engine: DeepSpeedEngine, asynchronous: bool) -> state_files.Files:
    """Return what writes an engine's fragments; its updates wait for copies."""
    asynchronous = asynchronous and not engine.zero_nvme_offload_optimizer()  # what memory has no room for is written
    # With these, optimizer states are moved or changed outside the optimizer's step as well (deepspeed 0.19.8).
    copies_at_once = bool(engine.zenflow or engine.super_offload() or is_muon(engine))
    files = state_files.Files(asynchronous, copies_at_once)
    # ZeRO-3 has another one for partly offloaded sub-groups on the GPU.
    for optimizer in filter(None, (engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None))):
        optimizer.register_step_pre_hook(lambda *_: files.wait_for_copies())
    return files


class Rotation:
    """Keeps as many checkpoints, and weights of older ones, as configured; what a stopped run leaves, the next start
    does. `export` makes an export of a checkpoint, or raises CheckpointError.
    """

    def __init__(self, folder: Path, config: schema.CheckpointConfig, export: Callable[[Path, Path], None]) -> None:
        self.folder, self.config, self.export = folder, config, export
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._also: Collection[Path] | None = None

    def request(self, also: Collection[Path] | None = None) -> None:
        """Remove what is too much but `also` (None: only what is discarded); at once; the last request counts."""
        with self._lock:
            self._is_due, self._also = True, self._also if also is None else also
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rotation", daemon=True)
                self._thread.start()

    def is_busy(self, patience_s: float = 0.0) -> bool:
        """Return whether something is still to be removed, after waiting at most so many seconds for the end of it."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                also, self._is_due, self._also = self._also, False, None
            try:
                try:
                    directory.empty_trash(self.folder)
                finally:  # what cannot be removed keeps nothing else on the disk
                    if also is not None:
                        self._rotate(also)
            except Exception as error:  # whatever it is: the thread must be there for the next save
                warn("older checkpoints could not be removed: {reason}.", reason=reason_of(error))

    def _rotate(self, also: Collection[Path]) -> None:
        keep, keep_weights = self.config.keep, self.config.keep_weights
        outdated, light = directory.outdated_checkpoints(self.folder, keep, also), directory.weights_only(self.folder)
        steps = sorted({directory.step_of(path) for path in (*outdated, *light)}, reverse=True)
        wanted = {directory.checkpoint_name(step) for step in (steps if keep_weights < 0 else steps[:keep_weights])}
        # These stay until their weights are next to them.
        waiting = [path for path in outdated if path.name in wanted and directory.weights_of(path) not in light]
        try:
            directory.remove_old(self.folder, keep, [*also, *waiting], self.config.max_gib * 2**30, keep_weights)
        finally:
            self._keep_weights(waiting)

    def _keep_weights(self, waiting: Sequence[Path]) -> None:
        for checkpoint in reversed(waiting):  # the oldest first
            try:
                self.export(checkpoint, directory.weights_of(checkpoint))
            except (CheckpointError, OSError) as error:
                warn(
                    "the weights of the checkpoint {name} could not be exported: {reason}. The checkpoint is kept, and "
                    "the export is retried at the next save.",
                    name=checkpoint.name,
                    reason=error,
                )
                continue
            directory.remove_directories([checkpoint])
            directory.remove_old(self.folder, 0, keep_weights=self.config.keep_weights)


_ROOM = 1.1
"""Free space that a save wants, as a multiple of the last checkpoint's size."""
_PROBE_S, _PROBE_SHARE = 0.02, 0.01
"""A probe may take so many seconds, or so much of the time since the last: under ZeRO-3 it gathers all parameters."""
_SLICE_S = 20.0
"""So long rank 0 waits at most for a removal before it meets the other ranks: none waits long in a collective."""
_FIRST_BYTES_PER_PARAMETER = 12
"""What a checkpoint takes at least: fp32 weights and two moments. Where that has no room it need not be tried."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a checkpoint holds of the model next to the engine's files."""

    files: Mapping[str, bytes]
    """Of `toolkit.models.save.describe`; rank 0 alone has them."""
    probe_ids: torch.Tensor | None
    """Of `toolkit.models.probe`; the same on every rank. None for a custom model, which takes who knows what."""
    export: Callable[[Path, Path], None]
    """Makes an export of a checkpoint: what stays of it under `checkpoint.keep_weights`. Raises CheckpointError."""
    holds_frozen: bool = False
    """Whether checkpoints hold what is not trained, too: of a custom model nobody else has it."""


class Checkpointer:
    """All checkpoints of one run, in `folder`. Every method but `is_proven` is a collective."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, cfg: schema.RunConfig, described: ModelFiles) -> None:
        self.engine, self.folder, self.config, self.described = engine, folder, cfg.checkpoint, described
        self.keep_best = cfg.evaluate.keep_best
        self.patience_s = cfg.distributed.timeout_s / 2
        """How long a save waits for the room of those being removed."""
        self.files = _files_of(engine, self.config.asynchronous)
        self.newest: Path | None = None
        self.failed = False
        """Whether the last save came to nothing, and is to be tried again."""
        self.ruin = ""
        """What was NaN or Inf then; "" if it was for another reason."""
        self.good: Path | None = on_rank0(lambda: directory.known_good(folder))
        """The newest checkpoint that a good step has followed: it stays, whatever becomes of newer ones."""
        self._pending: _Pending | None = None
        self._held = _held_by(engine, described.holds_frozen)
        self._rotation = Rotation(folder, self.config, described.export)
        if rank() == 0:
            self._rotation.request()  # what an earlier start has left
        self._rated: list[dict[str, float]] | None = None
        """The evaluations up to the newest checkpoint that this process has published."""
        self._last_bytes = 0
        self._probe_s, self._probed_at = 0.0, 0.0

    def begin(self, state: directory.RunState, is_last: bool = False) -> None:
        """Publish the previous one and write one; the last is probed, as no step shows its weights are good."""
        self.finish()
        name = directory.checkpoint_name(state.step)
        temporary = self.folder / f"{name}.tmp"
        refusal, has_probe = on_rank0(lambda: (self._make_room(temporary), self._may_probe(is_last)))
        if refusal:
            self._give_up(name, refusal)
            return
        self.failed, self.ruin = False, ""
        # Only a divided model needs all ranks for it, and rank 0 writes it.
        runs_probe = has_probe and (rank() == 0 or is_partitioned(self.engine) or is_pipeline(self.engine))
        taken = self._probe() if runs_probe else None
        if has_probe and on_rank0(lambda: taken is not None and not bool(torch.isfinite(taken.logits).all())):
            self.ruin = tr("the weights give logits that are NaN or Inf, an update has ruined them")
        elif ruined := ruined_ranks(self.engine):
            self.ruin = tr("the optimizer's states hold NaN or Inf on {ranks}", ranks=ruined)
        if self.ruin:
            on_rank0(lambda: shutil.rmtree(temporary, ignore_errors=True))  # it is empty
            self._give_up(name, self.ruin)
            return
        pending = self._write(temporary, state, taken)
        last = state.evaluations[-1] if state.evaluations else {}
        is_evaluated = last.get("step") == state.step and math.isfinite(last.get(schema.EVAL_LOSS, math.nan))
        pending.is_good = (is_last and has_probe) or is_evaluated
        pending.thread.start()

    def _write(self, temporary: Path, state: directory.RunState, taken: probe.Probe | None) -> "_Pending":
        """Write this rank's files of a checkpoint, and keep what is still to be proven as pending."""
        self.files.begin()
        for number, content in enumerate(engine_state.contents(self.engine, self._held)):
            self.files.save(content, temporary / fragments.file_name(rank(), number))
        pending = self._pending = _Pending(state.step, temporary, self.files, [*state.evaluations])
        try:
            if not self.files.failure:
                path = temporary / state_files.generators_file(rank())
                state_files.save_generators(path)
                pending.mine.append(path)
            if rank() == 0:
                counts = temporary / engine_state.COUNTS
                counts.write_text(json.dumps(engine_state.counts_of(self.engine), indent=2) + "\n", encoding="utf-8")
                pending.mine += [counts, state.write(temporary), *([probe.write(taken, temporary)] if taken else [])]
                for file, described in self.described.files.items():
                    path = temporary / save.MODEL_DIR / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(described)
                    pending.mine.append(path)
        except (OSError, RuntimeError) as error:
            pending.failure = pending.failure or reason_of(error)
        return pending

    def _may_probe(self, is_last: bool = False) -> bool:
        """Whether the last probe was quick, or long enough ago: saves that follow each other closely do without."""
        if self.described.probe_ids is None:
            return False
        return is_last or self._probe_s <= max(_PROBE_S, _PROBE_SHARE * (time.monotonic() - self._probed_at))

    def _probe(self) -> probe.Probe:
        started = time.monotonic()
        assert self.described.probe_ids is not None
        taken = capture_probe(self.engine, self.described.probe_ids)
        self._probed_at = time.monotonic()
        self._probe_s = self._probed_at - started
        return taken

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint of whatever layout, or raise a CheckpointError."""
        found = fragments.Fragments(checkpoint)
        if not found.names:
            raise CheckpointError("{file} cannot be read: {reason}.", file=checkpoint, reason=tr("it holds no weights"))
        counts = _counts_in(checkpoint)
        engine_state.restore(self.engine, self._held, found)
        engine_state.restore_counts(self.engine, counts)
        if ruined := ruined_ranks(self.engine):
            raise CheckpointError(
                "the checkpoint {folder} cannot be resumed: the optimizer's states hold NaN or Inf on {ranks}. "
                "Resume an earlier one (resume=PATH), or train its weights in another run (toolkit export-model).",
                folder=checkpoint,
                ranks=ruined,
            )
        self.newest = checkpoint

    def is_proven(self) -> bool:
        """Whether this rank has done its part of a save that is not published yet. No collective."""
        return self._pending is not None and not self._pending.thread.is_alive()

    def finish(self) -> None:
        """Publish what was begun; waits until every rank has done its part."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        parts: list[tuple[str, dict[str, directory.FileRecord]]] = gather((pending.failure, pending.records))
        failure = next((reason for reason, _ in parts if reason), "")
        name = pending.folder.name.removesuffix(".tmp")
        records = {file: one for _, part in parts for file, one in part.items()}
        target = self.folder / name
        if not failure:
            try:
                on_rank0(lambda: self._publish(pending, target, records))
            except CheckpointError as error:
                failure = str(error)
        if failure:
            if rank() == 0:
                with suppress(OSError):
                    directory.discard_checkpoint(pending.folder)
                self._rotation.request()
            self._give_up(name, failure)
            return
        self.newest, self.failed = target, False
        self._last_bytes = sum(one.size_bytes for one in records.values())
        self._rated = pending.evaluations
        if pending.is_good:
            self._mark_good(target)
        self._rotate()

    def see_good_step(self) -> None:
        """Take note of a step whose loss and gradient were finite: so are the weights of what was saved before it."""
        if self._pending is not None:
            self._pending.is_good = True
        if self.newest is not None and self.good != self.newest:
            self._mark_good(self.newest)
            self._rotate()

    def _mark_good(self, checkpoint: Path) -> None:
        """Remember it beyond this process too: a resumed run may have to go back to it."""
        self.good = checkpoint
        if rank() == 0 and checkpoint.parent == self.folder:
            with suppress(OSError):  # an earlier one is named then, and stays as long
                directory.write_name(directory.GOOD, checkpoint)

    def end(self) -> None:
        """Wait until rank 0 has removed what is too much, however long that takes. A collective."""
        if rank() == 0 and self._rotation.is_busy():
            say("Removing old checkpoints.")
        while any(gather(rank() == 0 and self._rotation.is_busy(_SLICE_S))):
            pass

    def least_bytes(self) -> int:
        """Return how many bytes a checkpoint will have at least."""
        trained = [p for p in unwrap_model(self.engine.module).parameters() if p.requires_grad]
        return _FIRST_BYTES_PER_PARAMETER * sum(
            getattr(p, "ds_numel", p.numel()) * process_group.part_of(p)[1] for p in trained
        )

    def _make_room(self, temporary: Path) -> str:
        """Make an empty folder; return why not, if there is no room for what will be in it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            directory.discard_checkpoint(temporary)
            temporary.mkdir()
            needed = int(_ROOM * (self._last_bytes or self.least_bytes()))
            if shutil.disk_usage(self.folder).free < needed:
                self._rotation.is_busy(self.patience_s)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            return error.strerror or str(error)
        if free >= needed:
            return ""
        shutil.rmtree(temporary, ignore_errors=True)
        return tr(
            "it takes {needed} MB and {free} MB are free", needed=f"{needed / 1e6:,.0f}", free=f"{free / 1e6:,.0f}"
        )

    def _publish(self, pending: "_Pending", target: Path, records: dict[str, directory.FileRecord]) -> None:
        try:
            directory.write_manifest(pending.folder, records, {"step": pending.step})
            for folder in {pending.folder, *((pending.folder / name).parent for name in records)}:
                disk.flush(folder)
            directory.publish_checkpoint(pending.folder, target)
        except OSError as error:
            raise CheckpointError(error.strerror or str(error)) from error

    def _rotate(self) -> None:
        """Let old checkpoints be removed, unless the new ones may all be ruined; takes no time."""
        if rank() == 0 and self.good is not None and self._rated is not None:
            self._rotation.request([*self._best(self._rated), self.good])

    def _best(self, evaluations: list[dict[str, float]]) -> list[Path]:
        """Return the best checkpoint so far, of equal ones the first, if `evaluate.keep_best` wants it kept."""
        there = {directory.step_of(path): path for path in directory.published_checkpoints(self.folder)}
        sign = 1 if self.keep_best in (schema.EVAL_LOSS, *schema.EVAL_TAUGHT) else -1
        rated = [
            (sign * one[self.keep_best], int(one["step"]))
            for one in evaluations
            # A metric that failed at a step is missing from its row.
            if int(one["step"]) in there and math.isfinite(one.get(self.keep_best, math.nan))
        ]
        return [there[min(rated)[1]]] if rated else []

    def _give_up(self, name: str, reason: str) -> None:
        """Continue without this checkpoint; the caller decides whether the run may."""
        self.failed = True
        warn(
            "the checkpoint {name} could not be saved: {reason}. Earlier ones are untouched, and training continues. "
            "It is retried soon.",
            name=name,
            reason=reason,
        )


@dataclass(slots=True)
class _Pending:
    """One rank's part of a save that is written but not published."""

    step: int
    folder: Path
    files: state_files.Files
    evaluations: list[dict[str, float]]
    mine: list[Path] = field(default_factory=list)
    """Files of this rank next to the engine's."""
    is_good: bool = False
    """Whether a good step has followed, or an evaluation or a probe has shown as much."""
    failure: str = ""
    records: dict[str, directory.FileRecord] = field(default_factory=dict)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._prove, name="checkpoint", daemon=True)

    def wait(self) -> None:
        """Wait until this rank's part is proven, or has failed."""
        self.thread.join()

    def _prove(self) -> None:
        try:
            self.files.write()
            self.failure = self.failure or self.files.failure
            for path in [] if self.failure else [*self.files.written, *self.mine]:
                disk.flush(path)
                self.records[path.relative_to(self.folder).as_posix()] = directory.record_file(path)
            self._flush_rows()
        except OSError as error:
            self.failure = f"{error.filename or ''} {error.strerror or error}".strip()
        except Exception as error:  # whatever it is: a save that has not been proven must not be published
            self.failure = f"{type(error).__name__}: {error}"

    def _flush_rows(self) -> None:
        """Flush the rows of the steps until this one: a run that goes on from it after a loss of power has them."""
        run = self.folder.parent.parent
        if rank() == 0 and (run / "metrics.jsonl").exists():
            disk.flush(run / "metrics.jsonl")
            disk.flush(run)


def trim_metrics(folder: Path, length: int) -> None:
    """Move rows beyond `length` bytes of metrics.jsonl, of steps that are done again, to a file. For rank 0 only."""
    path = folder / "metrics.jsonl"
    if not path.exists() or path.stat().st_size <= length:
        return
    content = path.read_bytes()
    with open(folder / "logs" / "metrics-lost.jsonl", "ab") as lost:
        lost.write(content[length:])
    os.truncate(path, length)


def starting_state(
    cfg: schema.RunConfig, data: dict[str, str], ranks: Ranks, source: run_dir.RunSource
) -> directory.RunState:
    """Return where the run begins; put aside what is done again. For rank 0 only; `data` is the `identity` of its data.
    ConfigError if the run computes something else than the saved one, CheckpointError if it cannot be read here.
    """
    config = json.loads(json.dumps(load.to_dict(cfg)))
    same: dict[str, Any] = {
        "world_size": ranks.world_size,
        "data": data,
        "config": config,
        "versions": run_dir.describe_environment(ranks.world_size),
    }
    if source.checkpoint is None:
        trim_metrics(source.folder, 0)
        return directory.RunState(**same)
    state, changed = directory.read_run_state(source.checkpoint), list[str]()
    if state.is_foreign:
        _check_foreign(source.checkpoint, cfg.optim.name)
    else:
        _check_layout(source.checkpoint, state, config)
        changed = check_changes(secrets.hide_all(state.config), config, state.data, data, cfg.checkpoint.allow_changes)
    is_own = source.checkpoint.parent.parent == source.folder
    trim_metrics(source.folder, state.metrics_bytes if is_own else 0)
    say("Resuming after step {step} from {checkpoint}.", step=f"{state.step:,}", checkpoint=source.checkpoint)
    if changed:
        say(tr("Changed since then:") + "\n" + "\n".join(changed))
    return replace(state, **same)


def _check_foreign(checkpoint: Path, optimizer: schema.OptimizerName) -> None:
    if not rule_tables.OPTIMIZERS[optimizer].is_adam:
        raise ConfigError(
            "the checkpoint {folder} holds Adam's states, not those of optim.name = {name}. Set optim=adamw, or train "
            "its weights from the start.",
            folder=checkpoint,
            name=optimizer.value,
        )
    say(directory.foreign_text(checkpoint))


def _counts_in(checkpoint: Path) -> dict[str, Any]:
    try:
        counts: dict[str, Any] = json.loads((checkpoint / engine_state.COUNTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise state_files.unreadable_error(checkpoint / engine_state.COUNTS, error) from None
    return counts


def _check_layout(checkpoint: Path, saved: directory.RunState, config: Mapping[str, Any]) -> None:
    """Reject what cannot go from the layout of a checkpoint into another one."""
    if saved.config["zero"].get("zenflow", {}).get("enabled") and "zenflow" not in _counts_in(checkpoint):
        raise CheckpointError(
            "the checkpoint {folder} cannot be resumed: an earlier version saved it under ZenFlow, matrices in another "
            "order and without a part of the states.",
            folder=checkpoint,
        )
    for zero in (saved.config["zero"], config["zero"]):
        for section, key in (("zenflow", "overlap_step"), ("offload_optimizer", "super_offload")):
            # DeepSpeed 0.19.8, zenflow_utils.py and superoffload_utils.py: no command of theirs returns the moments.
            if zero.get(section, {}).get(key):
                raise CheckpointError(
                    "a run with {key} = true cannot be resumed from a checkpoint, nor can another run from its "
                    "checkpoints: DeepSpeed keeps Adam's moments in a process of their own, which does not hand them "
                    "out. Take the weights alone: toolkit export-model, then model.path=EXPORT under another run.name.",
                    key=f"zero.{section}.{key}",
                )


def resume_from(
    checkpointer: Checkpointer, checkpoint: Path, state: directory.RunState, ranks: Ranks, cfg: schema.RunConfig
) -> None:
    """Put engine and random generators into the state of a checkpoint, or raise CheckpointError. A collective."""
    saved = directory.read_run_state(checkpoint)
    checkpointer.load(checkpoint)
    path = checkpoint / state_files.generators_file(ranks.rank)
    if saved.world_size == ranks.world_size and saved.config.get("parallel") == load.to_dict(cfg)["parallel"]:
        try:
            state_files.load_generators(path)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise state_files.unreadable_error(path, error) from error
    else:  # another layout, other streams: dropout differs, the mathematics do not; one stream for ranks of one model
        data_rank = mesh.mesh_of(cfg, ranks.world_size, ranks.rank).data_rank
        state_files.seed_all(cfg.run.seed + 1_000_003 * state.step + data_rank)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return key, old and new value of what differs, in the config's order, no secrets. A key that an older config
    lacks had its default; only what is trained is then unknown (None).
    """
    old = {key: value for key, value in schema.leaves(before) if not schema.did_nothing(key, value)}
    new = dict(schema.leaves(now))
    defaults = schema.leaves(load.to_dict(schema.RunConfig()))
    old = {key: value for key, value in defaults if key in new and not _is_trained(key)} | old
    keys = [*new, *(key for key in old if key not in new)]
    return [(key, old.get(key), new.get(key)) for key in keys if not secrets.are_same(old.get(key), new.get(key))]


def is_allowed_change(key: str) -> bool:
    """Whether a key may change without changing what is computed."""
    return schema.influence_of(key, schema.RunConfig) in (schema.Influence.free, schema.Influence.content)


def _is_trained(key: str) -> bool:
    return schema.influence_of(key, schema.RunConfig) is schema.Influence.trained


def _is_below(key: str, names: Sequence[str]) -> bool:
    """Whether a key is one of the names, or in a section of such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    data_before: Mapping[str, str],
    data_now: Mapping[str, str],
    allowed: Sequence[str],
) -> list[str]:
    """Return a line per change since the checkpoint, of configs and data; ConfigError if one is not in `allowed`, the
    keys and sections of `checkpoint.allow_changes`, and changes what is computed.
    """
    found = [
        (key, old, new, f"  {key}: {_shortened(old)} -> {_shortened(new)}")
        for key, old, new in differences(before, now)
    ]
    adams, optimizer = {"adam", "adamw"}, before.get("optim", {}).get("name")  # these two have the same states
    other_states = [
        line
        for key, old, new, line in found
        if (key == "optim.name" and not {optimizer, new} <= adams)
        or (key in ("optim.decay", "optim.layer_lr_decay") and old is not None)  # older configs know no groups
    ]
    if other_states:
        raise ConfigError(
            "the checkpoint holds the states of another optimizer, or of other parameter groups:\n{changes}\nUndo "
            "this, or start over under another run.name, from model.path=RUN/export.",
            changes="\n".join(other_states),
        )
    if others := [line for key, old, _, line in found if _is_trained(key) and old is not None]:
        raise ConfigError(
            "the checkpoint belongs to a run that trains other parameters:\n{changes}\nUndo this, or start over under "
            "another run.name; from an adapter: tuning.adapter=RUN/export.",
            changes="\n".join(others),
        )
    lines = [(key, line) for key, _, _, line in found]
    lines += _changed_data(data_before, data_now)
    # Where a part of the model is trained, base.json in the checkpoint tells whether the rest is the same.
    is_part = now.get("tuning", {}).get("method", "full") != "full"
    free = [*allowed, "model.path"] if is_part else allowed
    refused = [(key, line) for key, line in lines if not is_allowed_change(key) and not _is_below(key, free)]
    if refused:
        raise ConfigError(
            "the checkpoint belongs to a run that computes something else:\n{changes}\nUndo this, or allow it: "
            "checkpoint.allow_changes=[{keys}]; or start over under another run.name.",
            changes="\n".join(dict.fromkeys(line for _, line in refused)),
            keys=",".join(dict.fromkeys(key for key, _ in refused)),
        )
    return [line for _, line in lines]


def _changed_data(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the key that allows it and a line for each difference of data and tokenizer."""
    parts = {
        "vocabulary": tr("vocabulary"),
        "division of text": tr("division of text"),
        "special tokens": tr("special tokens"),
        "chat template": tr("chat template"),
    }
    for name, digest in now.items():
        if before.get(name) == digest:
            continue
        if not name.startswith(TOKENIZER):
            yield "data", tr("  the prepared data: {name} is another one", name=name)
        elif name in before:  # earlier versions noted none
            # One that is trained on the data is another one with other data, and its tokens mean something else.
            yield (
                "model.tokenizer",
                tr(
                    "  the tokenizer: another {part} than in the checkpoint's model/, which model.tokenizer may name",
                    part=parts[name.removeprefix(TOKENIZER)],
                ),
            )


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


MAY_DIFFER = (
    "language",
    "run.display",
    "run.dir",
    "run.name",
    "prepare.dir",
    "prepare.num_workers",
    "data.num_workers",
    "distributed.interface",
)
"""Keys that ranks may have different values of: rank 0 alone chooses the run directory, and the others say how a node
shows things, or where it keeps and how it reads what is compared by its content."""
_FOLDERS = {"model.path": "model.hub_id", "tuning.adapter": ""}
"""Keys that name a directory, compared by its content; and the key that stands for its path, if any: the cache of
Hugging Face may be elsewhere on another node."""
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".py")
_CODE_FILES = (".py", ".json", ".yaml")  # tables decide too: plan/gpus.yaml chooses layouts
_PART = 1 << 16
"""Bytes that are read at the beginning, in the middle and at the end of a model's file: all would take minutes."""


def check_settings(cfg: schema.RunConfig) -> None:
    """Raise ConfigError on every rank where settings, code or model differ. Before data is prepared. A collective."""
    if process_group.world_size() > 1:
        process_group.check_alike(cfg.distributed, {**_settings(cfg), **_code()}, ConfigError)


def _settings(cfg: schema.RunConfig) -> dict[str, str]:
    """Return the config by key, without secrets, and digests of the directories that it names."""
    values = {key: value for key, value in _leaves(load.to_dict(cfg), "") if not _is_below(key, MAY_DIFFER)}
    for key, path_key in _FOLDERS.items():
        folder = Path(json.loads(values.get(key, '""')))
        if folder.name and folder.is_dir():
            files = sorted(file for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
            values[f"{key}: files"] = _digest((file, _parts(file)) for file in files)
            if json.loads(values.get(path_key, '""')):
                del values[key]
    return values


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each plain value, also of those in lists, and the value as JSON."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]")
    else:
        yield key, json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _code() -> dict[str, str]:
    """Return versions, the device, and digests of the program and of this package."""
    found = {f"version: {name}": version for name, version in run_dir.versions().items()}
    found["version: python"] = sys.version.split()[0]
    files = sorted(file for file in Path(toolkit.__file__).parent.rglob("*.*") if file.suffix in _CODE_FILES)
    found["code: toolkit"] = _digest((file, file.read_bytes()) for file in files)
    program = Path(sys.argv[0])
    if program.is_file():
        found[f"code: {program.name}"] = _digest([(program, program.read_bytes())])
    from deepspeed.accelerator import get_accelerator  # which device it takes is decided when it is first asked

    found["device"] = str(get_accelerator().device_name())
    return found


def _parts(file: Path) -> bytes:
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as handle:
        for place in (0, size // 2, max(0, size - _PART)):
            handle.seek(place)
            parts.append(handle.read(_PART))
    return b"".join(parts)


def _digest(files: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for file, content in files:
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
