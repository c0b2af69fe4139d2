"""Saving a run, and loading what was saved. A save has three states.

*Written*: every rank has handed its files to the system (with `checkpoint.asynchronous`: noted what they will hold; a
thread copies that before the next update, and writes them). *Proven*: a thread of each rank has flushed its files, read
them back and compared their checksums. *Published*: at a step boundary where all ranks have got so far, rank 0 writes
the manifest, renames the directory and names it in `latest`. Killed before that, the previous checkpoint is untouched.
"""

import json
import math
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit import disk
from toolkit.checkpoint import directory, engine_state, fragments, state_files
from toolkit.config import schema
from toolkit.distributed import process_group
from toolkit.distributed.process_group import gather, on_rank0, rank
from toolkit.engine.parameters import is_muon, is_partitioned, ranks_with_broken_states
from toolkit.messages import CheckpointError, reason_of, say, tr, warn
from toolkit.models import probe, save, weights
from toolkit.models.stages import is_pipeline, stage_model, unwrap_model
from toolkit.train.rotation import Rotation

if TYPE_CHECKING:
    from toolkit.train.task import ModelFiles


def _stored_tensors_of(engine: DeepSpeedEngine, with_frozen: bool) -> engine_state.StoredTensors:
    """Return an engine's tensors that this rank saves, by their names in the full model; frozen ones if asked for."""
    model, full_model = stage_model(engine.module), unwrap_model(engine.module)
    # A head tied to the embedding has its own name on a pipeline's last stage: the embedding's is used for both.
    tied = weights.tied_parameter_names(full_model) if is_pipeline(engine) else {}
    named = {tied.get(name, name): tensor for name, tensor in model.named_parameters()}
    # The last stage's copy of it is marked: the first stage saves it.
    on_other_stage = {name for name, tensor in named.items() if getattr(tensor, "ds_pipe_replicated", False)}
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in persistent}
    return engine_state.StoredTensors(named, buffers, with_frozen, frozenset(on_other_stage))


def _files_of(engine: DeepSpeedEngine, asynchronous: bool) -> state_files.Files:
    """Return the writer of an engine's fragment files; the next update waits until it has copied all states."""
    asynchronous = asynchronous and not engine.zero_nvme_offload_optimizer()  # memory has no room for such copies
    # With these, optimizer states are moved or changed outside the optimizer's step as well (deepspeed 0.19.8).
    copies_at_once = bool(engine.zenflow or engine.super_offload() or is_muon(engine))
    files = state_files.Files(asynchronous, copies_at_once)
    # ZeRO-3 has another optimizer for partly offloaded sub-groups on the GPU.
    for optimizer in filter(None, (engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None))):
        optimizer.register_step_pre_hook(lambda *_: files.wait_for_copies())
    return files


_ROOM = 1.1
"""Free space that a save needs, as a multiple of the last checkpoint's size."""
_PROBE_S, _PROBE_SHARE = 0.02, 0.01
"""A probe may take so many seconds, or so much of the time since the last: under ZeRO-3 it gathers all parameters."""
_SLICE_S = 20.0
"""Seconds that rank 0 waits for a removal between two collectives, so that no rank waits long in one."""
_LEAST_BYTES_PER_PARAMETER = 12
"""An fp32 weight and two moments."""


class Checkpointer:
    """All checkpoints of one run, in `folder`. Every method but `is_save_verified` is a collective."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, cfg: schema.RunConfig, described: "ModelFiles") -> None:
        self.engine, self.folder, self.config, self.described = engine, folder, cfg.checkpoint, described
        self.keep_best = cfg.evaluate.keep_best
        self.patience_s = cfg.distributed.timeout_s / 2
        """Seconds that a save waits for old checkpoints to be removed if the disk has no room for it."""
        self.files = _files_of(engine, self.config.asynchronous)
        self.newest: Path | None = None
        self.failed = False
        """Whether the last save failed, and is to be tried again."""
        self.no_step_follows = False
        """Whether the run ends with the next save, so that it is not tried again."""
        self.ruin = ""
        """What was NaN or Inf when it failed; "" if it failed for another reason."""
        self.good: Path | None = on_rank0(lambda: directory.known_good(folder))
        """The newest checkpoint that a good step has followed: it stays, whatever becomes of newer ones."""
        self._pending: _Pending | None = None
        self._held = _stored_tensors_of(engine, described.holds_frozen)
        self._rotation = Rotation(folder, self.config)
        if rank() == 0:
            self._rotation.request()  # what an earlier start has left
        self._rated: list[dict[str, float]] | None = None
        """The evaluations up to the newest checkpoint that this process has published."""
        self._last_bytes = 0
        self._probe_s, self._probed_at = 0.0, 0.0

    def begin(self, state: directory.RunState, is_last: bool = False) -> None:
        """Publish the previous checkpoint, then write this state's files, which a thread proves. Give up, with a
        warning and `failed`, if the disk lacks room, or if weights or optimizer states hold NaN or Inf (`ruin`). The
        run's last checkpoint (`is_last`) is probed, as no step follows that could show it good.
        """
        self.finish()
        name = directory.checkpoint_name(state.step)
        temporary = self.folder / f"{name}.tmp"
        refusal, has_probe = on_rank0(lambda: (self._make_room(temporary), self._may_probe(is_last)))
        if refusal:
            self._give_up(name, refusal)
            return
        self.failed = False
        # Rank 0 writes the probe; only of a divided model all ranks compute it.
        runs_probe = has_probe and (rank() == 0 or is_partitioned(self.engine) or is_pipeline(self.engine))
        probed = self._probe() if runs_probe else None
        self.ruin = self._find_ruin(probed, has_probe)
        if self.ruin:
            on_rank0(lambda: shutil.rmtree(temporary, ignore_errors=True))  # it is empty
            self._give_up(name, self.ruin)
            return
        pending = self._write(temporary, state, probed)
        latest = state.evaluations[-1] if state.evaluations else {}
        is_evaluated = latest.get("step") == state.step and math.isfinite(latest.get(schema.EVAL_LOSS, math.nan))
        # A finite evaluation shows good weights; at the end a finite probe does too, as no step follows.
        pending.is_good = (is_last and has_probe) or is_evaluated
        pending.thread.start()

    def _find_ruin(self, probed: probe.Probe | None, has_probe: bool) -> str:
        """Return what is NaN or Inf: logits of the probe, if there is one (`probed` on rank 0), or states; else ""."""
        if has_probe and on_rank0(lambda: probed is not None and not bool(torch.isfinite(probed.logits).all())):
            return tr("the weights give logits that are NaN or Inf, an update has ruined them")
        if ranks := ranks_with_broken_states(self.engine):
            return tr("the optimizer's states hold NaN or Inf on {ranks}", ranks=ranks)
        return ""

    def _write(self, temporary: Path, state: directory.RunState, probed: probe.Probe | None) -> "_Pending":
        """Write this rank's files of a save into `temporary`; return it as pending, with its thread not yet started."""
        self.files.begin()
        for number, content in enumerate(engine_state.contents(self.engine, self._held)):
            self.files.save(content, temporary / fragments.file_name(rank(), number))
        pending = self._pending = _Pending(state.step, temporary, self.files, [*state.evaluations])
        try:
            if not self.files.failure:
                path = temporary / state_files.generators_file(rank())
                state_files.save_generators(path)
                pending.other_files.append(path)
            if rank() == 0:
                counts = temporary / engine_state.COUNTS
                counts.write_text(json.dumps(engine_state.counts_of(self.engine), indent=2) + "\n", encoding="utf-8")
                probe_files = [probe.write(probed, temporary)] if probed else []
                pending.other_files += [counts, state.write(temporary), *probe_files]
                for file, described in self.described.files.items():
                    path = temporary / save.MODEL_DIR / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(described)
                    pending.other_files.append(path)
        except (OSError, RuntimeError) as error:
            pending.failure = pending.failure or reason_of(error)
        return pending

    def _may_probe(self, is_last: bool = False) -> bool:
        """Whether to probe a save: the last of a run, or if the last probe was quick, or is long enough ago."""
        if self.described.probe_ids is None:
            return False
        return is_last or self._probe_s <= max(_PROBE_S, _PROBE_SHARE * (time.monotonic() - self._probed_at))

    def _probe(self) -> probe.Probe:
        """Return the model's logits for a few training rows, by which a checkpoint is verified when it is loaded."""
        started = time.monotonic()
        assert self.described.probe_ids is not None
        probed = probe.capture_probe(self.engine, self.described.probe_ids)
        self._probed_at = time.monotonic()
        self._probe_s = self._probed_at - started
        return probed

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint of whatever layout, or raise a CheckpointError."""
        from toolkit.checkpoint import fragment_reader, restore

        saved = fragment_reader.Fragments(checkpoint)
        if not saved.names:
            raise CheckpointError("{file} cannot be read: {reason}.", file=checkpoint, reason=tr("it holds no weights"))
        counts = counts_in(checkpoint)
        restore.restore(self.engine, self._held, saved)
        restore.restore_counts(self.engine, counts)
        if ruined := ranks_with_broken_states(self.engine):
            raise CheckpointError(
                "the checkpoint {folder} cannot be resumed: the optimizer's states hold NaN or Inf on {ranks}. "
                "Resume an earlier one (resume=PATH), or train its weights in another run (toolkit export-model).",
                folder=checkpoint,
                ranks=ruined,
            )
        self.newest = checkpoint

    def is_save_verified(self) -> bool:
        """Whether this rank has proven its part of a save that is not published yet. No collective."""
        return self._pending is not None and not self._pending.thread.is_alive()

    def finish(self) -> None:
        """Publish the save that was begun, if any, once every rank has proven its part; waits for that."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        parts: list[tuple[str, dict[str, directory.FileRecord]]] = gather((pending.failure, pending.records))
        failure = next((reason for reason, _ in parts if reason), "")
        name = pending.folder.name.removesuffix(".tmp")
        records = {file: record for _, part in parts for file, record in part.items()}
        target = self.folder / name
        if not failure:
            try:
                on_rank0(lambda: self._publish(pending, target, records))
            except CheckpointError as error:
                failure = str(error)
        if failure:
            if rank() == 0:
                with suppress(OSError):
                    directory.discard_checkpoint(pending.folder)  # only renames it
                self._rotation.request()  # its thread removes what was renamed
            self._give_up(name, failure)
            return
        self.newest, self.failed = target, False
        self._last_bytes = sum(record.size_bytes for record in records.values())
        self._rated = pending.evaluations  # by which `_rotate` keeps the best checkpoint
        if pending.is_good:  # its weights are finite: it stays, for a resumed run to go back to
            self._mark_good(target)
        self._rotate()

    def note_good_step(self) -> None:
        """Take note of a step whose loss and gradient were finite: so are the weights of what was saved before it."""
        if self._pending is not None:
            self._pending.is_good = True
        if self.newest is not None and self.good != self.newest:
            self._mark_good(self.newest)
            self._rotate()

    def _mark_good(self, checkpoint: Path) -> None:
        """Record a checkpoint as the newest good one, on the disk too: a resumed run may have to go back to it."""
        self.good = checkpoint
        if rank() == 0 and checkpoint.parent == self.folder:
            with suppress(OSError):  # the file then still names an earlier one, which is not removed
                directory.write_name(directory.GOOD, checkpoint)

    def end(self) -> None:
        """Wait until rank 0 has removed outdated checkpoints, however long that takes. A collective."""
        if rank() == 0 and self._rotation.is_busy():
            say("Removing old checkpoints.")
        while any(gather(rank() == 0 and self._rotation.is_busy(_SLICE_S))):  # is_busy waits, up to _SLICE_S
            pass

    def least_bytes(self) -> int:
        """Return how many bytes a checkpoint of all ranks has at least: what is trained, in fp32, and two moments."""
        trained = [p for p in unwrap_model(self.engine.module).parameters() if p.requires_grad]
        full_sizes = (getattr(p, "ds_numel", p.numel()) * process_group.part_of(p)[1] for p in trained)  # of all parts
        return _LEAST_BYTES_PER_PARAMETER * sum(full_sizes)

    def _make_room(self, temporary: Path) -> str:
        """Make the empty directory `temporary`; return why that fails, or what room is lacking, else "". Rank 0."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            directory.discard_checkpoint(temporary)
            temporary.mkdir()
            needed = int(_ROOM * (self._last_bytes or self.least_bytes()))
            if shutil.disk_usage(self.folder).free < needed:  # wait for old checkpoints that are being removed
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
        """Write the manifest of all ranks' files and rename the save's directory to `target`. For rank 0 only."""
        try:
            directory.write_manifest(pending.folder, records, {"step": pending.step})
            for folder in {pending.folder, *((pending.folder / name).parent for name in records)}:
                disk.flush(folder)
            directory.publish_checkpoint(pending.folder, target)
        except OSError as error:
            raise CheckpointError(error.strerror or str(error)) from error

    def _rotate(self) -> None:
        """Let the rotation's thread remove outdated checkpoints; none before a good one is known to stay."""
        if rank() == 0 and self.good is not None and self._rated is not None:
            self._rotation.request([*self._best(self._rated), self.good])

    def _best(self, evaluations: list[dict[str, float]]) -> list[Path]:
        """Return [the best checkpoint] by `keep_best`, of equals the first; [] if none is rated in `evaluations`."""
        published = {directory.step_of(path): path for path in directory.published_checkpoints(self.folder)}
        sign = 1 if self.keep_best in (schema.EVAL_LOSS, *schema.EVAL_TAUGHT) else -1  # `min` finds the best of either
        rated = []
        for evaluation in evaluations:
            step, value = int(evaluation["step"]), evaluation.get(self.keep_best, math.nan)  # missing where it failed
            if step in published and math.isfinite(value):
                rated.append((sign * value, step))
        return [published[min(rated)[1]]] if rated else []

    def _give_up(self, name: str, reason: str) -> None:
        """Note and warn that a checkpoint could not be saved; training continues unless `no_step_follows`."""
        self.failed = True
        if self.no_step_follows:
            warn("the checkpoint {name} could not be saved: {reason}.", name=name, reason=reason)
            return
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
    other_files: list[Path] = field(default_factory=list)
    """Files of this rank next to the engine's fragments."""
    is_good: bool = False
    """Whether its weights are known to be finite: by a good step after it, an evaluation or a probe."""
    failure: str = ""
    records: dict[str, directory.FileRecord] = field(default_factory=dict)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._prove, name="checkpoint", daemon=True)

    def wait(self) -> None:
        """Wait until this rank's part is proven, or has failed."""
        self.thread.join()

    def _prove(self) -> None:
        """Flush this rank's files and record their sizes and hashes as read back, or `failure`. Runs in the thread."""
        try:
            self.files.write()
            self.failure = self.failure or self.files.failure
            complete_files = [] if self.failure else [*self.files.written, *self.other_files]
            for path in complete_files:
                disk.flush(path)
                self.records[path.relative_to(self.folder).as_posix()] = directory.record_file(path)
            self._flush_metrics()
        except OSError as error:
            self.failure = f"{error.filename or ''} {error.strerror or error}".strip()
        except Exception as error:  # whatever it is: a save that has not been proven must not be published
            self.failure = f"{type(error).__name__}: {error}"

    def _flush_metrics(self) -> None:
        """Flush metrics.jsonl, so that after a loss of power a run resumed from this checkpoint has its rows."""
        run = self.folder.parent.parent  # of RUN/checkpoints/step-N.tmp
        if rank() == 0 and (run / "metrics.jsonl").exists():
            disk.flush(run / "metrics.jsonl")
            disk.flush(run)


def counts_in(checkpoint: Path) -> dict[str, Any]:
    """Return what the engine counted when a checkpoint was saved; CheckpointError if its file cannot be read."""
    try:
        counts: dict[str, Any] = json.loads((checkpoint / engine_state.COUNTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise state_files.unreadable_error(checkpoint / engine_state.COUNTS, error) from None
    return counts
