"""Language modelling on a stream (`data.streaming`): files are read, tokenized and packed as they are trained."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import transformers
from deepspeed import DeepSpeedEngine
from numpy.typing import NDArray

from toolkit.checkpoint import intact
from toolkit.config import objective
from toolkit.config.mesh import accumulation, mesh_of, micro_rows, with_micro_batch
from toolkit.config.schema import Packing, RunConfig
from toolkit.data import packing, plans, stream, stream_pieces, tokenize
from toolkit.data.loader import Layout, collate_planned
from toolkit.data.sampler import Position
from toolkit.data.sources import check_distinct, locate_all
from toolkit.data.store import Sample, TokenizedCache
from toolkit.data.stream import StreamSample
from toolkit.distributed import process_group
from toolkit.engine import ds_config
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, clauses, say, tr
from toolkit.models import chat
from toolkit.sample_types import Batch
from toolkit.tasks import language_batches, language_data
from toolkit.tasks.language import LanguageTask, describe_sample
from toolkit.train import run_dir
from toolkit.train.schedule import Epoch
from toolkit.train.step import Samples
from toolkit.train.task import FitResult, RunContext


class SampledRows:
    """Samples from all parts of a stream, in the place of the cache of all: a run is tried and described by them."""

    has_values = False

    def __init__(self, of_stream: stream.Stream) -> None:
        self.samples = [sample for estimate in of_stream.estimates for sample in estimate.samples]
        self.report = tokenize.PrepareReport()
        self.num_samples = of_stream.samples_per_epoch
        self.num_tokens = of_stream.total_per_epoch(lambda sample: len(sample.ids))
        self.num_trained_tokens = of_stream.total_per_epoch(lambda sample: int(sample.trained.sum()))
        described = [[file.path.name for file in of_stream.files], of_stream.sizes]
        self.content = self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index][:2]

    def lengths(self, indices: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Return the tokens of each sample."""
        lengths = np.array([len(sample.ids) for sample in self.samples], np.int64)
        return lengths if indices is None else lengths[indices]

    def joined(self, length: int) -> Sample:
        """Return a sample of so many tokens, these one after another, of which the last is trained in any case."""
        times = -(-length // int(self.lengths().sum()))
        ids = np.concatenate([sample.ids for sample in self.samples] * times)[:length]
        trained = np.concatenate([sample.trained for sample in self.samples] * times)[:length]
        trained[-1] = True
        return ids, trained


def check_stream(cfg: RunConfig) -> None:
    """Raise a ConfigError for what a stream cannot do, as far as the rules of rules.yaml do not say it."""
    for number, source in enumerate(cfg.data.sources):
        name = f"data.sources[{number}]"
        if source.max_samples or source.weights:
            key = "max_samples" if source.max_samples else "weights"
            raise ConfigError(
                "{name}.{key} needs the number of rows: remove it, or set data.streaming=false.", name=name, key=key
            )
    if cfg.preference.needs_reference and not objective.has_reference_in_step(cfg):
        raise ConfigError(
            "preference.loss = {loss} needs a reference, which cannot be computed before training with data.streaming."
            "\nUse tuning=lora without parallel=pipeline (each step computes it), or preference=simpo, orpo or cpo.",
            loss=cfg.preference.loss.value,
        )
    if cfg.data.packing is Packing.packed and (reason := language_data.reason_not_to_pack(cfg)):
        raise ConfigError("data.packing = packed with data.streaming: {reason}. Use data.packing=none.", reason=reason)


class StreamTask(LanguageTask):
    """Trains a causal language model on a stream of conversations and texts."""

    stream: stream.Stream
    sampled: SampledRows

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[int, dict[int, stream.Places]] = {}
        """Sequences done -> lane -> where it is: of this rank's lanes, from the last step's begin on."""

    def check(self, cfg: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase | None) -> Any:
        """Raise errors that config and files show; see `LanguageTask.check`."""
        check_stream(cfg)
        return super().check(cfg, tokenizer)

    def load_data(self, cfg: RunConfig, ranks: Ranks) -> None:
        """Read some rows of all parts of the files, and tokenize the validation data."""
        encoder = language_data.build_encoder(cfg)
        self.check(cfg, encoder.tokenizer)
        files = locate_all(cfg.data, Path(cfg.prepare.dir))
        check_distinct(cfg.data, files)
        training_files = [file for file in files if file.source < len(cfg.data.sources)]  # validation's come behind
        self.stream = stream.Stream(cfg, encoder, training_files)
        sampled = self.sampled = SampledRows(self.stream)
        validation, plan, report = _validation(cfg, encoder)
        self.data = language_data.LanguageData(
            encoder=encoder,
            train=cast(TokenizedCache, sampled),  # has what is read of one before and beside training
            validation=validation,
            packing=cfg.data.packing,
            layout=Layout.packed if cfg.data.packing is Packing.packed else Layout.alone,
            train_plan=plans.PackingPlan(len(sampled)),
            validation_plan=plan,
            report=report,
        )
        language_data.check_same_data(cfg, self.data)
        self.stream.say_estimate()

    def settle(self, cfg: RunConfig) -> None:
        """Take the settled config. The steps of an epoch are an estimate, which is not changed during the run."""
        self.cfg, self.has_validation = cfg, self.data.validation is not None
        self.steps_per_epoch = self.stream.steps_per_epoch
        self.total_steps = cfg.train.max_steps or cfg.train.over_epochs(self.steps_per_epoch)
        self.identity = self.data.identity | chat.tokenizer_identity(self.data.tokenizer)
        size = self.stream.lanes
        sequences = size * self.steps_per_epoch
        self.epoch = Epoch(samples=self.sampled.num_samples, sequences=sequences, per_step=size)
        self._order = None  # that of the files

    def data_summary(self) -> dict[str, Any]:
        sampled, names = self.sampled, [source.path or source.hub for source in self.cfg.data.sources]
        estimated = {"samples": sampled.num_samples, "tokens": sampled.num_tokens}
        return {"sources": names, "packing": self.data.packing.value, "estimated": estimated}

    def data_card(self) -> dict[str, Any]:
        """Return what is known of the stream before it is read, and the validation data's counts."""
        validation = self.data.validation
        card = {**self.data_summary(), "files": len(self.stream.files)}
        return card if validation is None else {**card, "splits": {"validation": language_data.split_card(validation)}}

    def batches(self, position: Position, num_steps: int) -> Iterator[Batch]:
        """Return this rank's micro-batches, prefetched; CheckpointError if its places in the stream are not known."""
        self._figures = self._zeros()
        if position.row and position.row not in self.positions:  # row 0 is the begin of all lanes
            raise CheckpointError(tr("the checkpoint holds no position in a stream: its run had no data.streaming."))
        mesh = mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank)
        lanes = range(mesh.data_rank, self.stream.lanes, mesh.data_ranks)
        places = self.positions.get(position.row, {})
        self.positions[position.row] = {lane: self.stream.position_of(lane, places) for lane in lanes}
        parts = map(partial(language_batches.part_of, mesh=mesh), self._micro_batches(position.row, num_steps))
        return language_batches.prefetch(parts, accumulation(self.cfg, self.ranks.world_size))

    def _micro_batches(self, row: int, num_steps: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of steps from `row` (sequences done) on; note lanes' places after each."""
        steps = self.stream.steps(row // self.stream.lanes, self.positions[row])
        for _, (sequences, positions) in zip(range(num_steps), steps, strict=False):
            row += self.stream.lanes
            self.positions[row] = positions
            for rows in self._in_micro_batches(sequences):
                yield self._collated([[sample[:2] for sample in samples] for samples in rows])

    def _in_micro_batches(self, sequences: list[list[StreamSample]]) -> list[list[list[StreamSample]]]:
        """Divide a step's sequences into micro-batches; where each is a sample, longest first, to pad less."""
        if self.data.layout is Layout.alone:
            sequences = sorted(sequences, key=lambda samples: -len(samples[0].ids))
        size = len(sequences) // accumulation(self.cfg, self.ranks.world_size)
        return [sequences[begin : begin + size] for begin in range(0, len(sequences), size)]

    def _collated(self, rows: list[list[Sample]]) -> Batch:
        multiple = plans.pad_multiple(self.cfg.parallel.sequence)
        return collate_planned(rows, self.data.pad_id, self.data.layout, multiple)

    def next_position(self, position: Position) -> Position:
        """Return the position after a step, and forget the lanes' places before the step."""
        for row in [row for row in self.positions if row < position.row]:
            del self.positions[row]
        return Position(0, position.row + self.stream.lanes)

    def stream_state(self, position: Position) -> dict[str, Any]:
        """Return the files, and where all lanes are. A collective."""
        parts = process_group.gather(self.positions[position.row])
        lanes = {lane: position_in_lane for part in parts for lane, position_in_lane in part.items()}
        return {"files": self.stream.signatures, "lanes": [lanes[lane] for lane in range(self.stream.lanes)]}

    def describe_samples_at(self, position: Position) -> Samples:
        """Return the samples of a step: those of this rank, read again; of others only which part of the data."""
        return [
            self._describe_own(position) if rank == self.ranks.rank else self._describe_parts(rank)
            for rank in range(self.ranks.world_size)
        ]

    def _describe_own(self, position: Position) -> list[list[dict[str, Any]]]:
        """Return this rank's samples of a step by micro-batch, see `describe_sample`."""
        steps = self.stream.steps(position.row // self.stream.lanes, self.positions[position.row])
        sequences, _ = next(steps)
        steps.close()
        tokenizer, micro_batches = self.data.tokenizer, self._in_micro_batches(sequences)
        return [
            [describe_sample(each.where, each.ids, each.trained, tokenizer) for samples in rows for each in samples]
            for rows in micro_batches
        ]

    def _describe_parts(self, rank: int) -> list[list[dict[str, Any]]]:
        """Return, by micro-batch, which parts of the stream another rank's samples come from, in their place."""
        mesh = mesh_of(self.cfg, self.ranks.world_size, rank)
        lanes = range(mesh.data_rank, self.stream.lanes, mesh.data_ranks)
        names = [tr("part {lane} of the stream, read by rank {rank}", lane=lane + 1, rank=rank) for lane in lanes]
        parts = [{"where": name, "tokens": 0, "trained_tokens": 0, "text": []} for name in names]
        size = len(parts) // accumulation(self.cfg, self.ranks.world_size)
        return [parts[begin : begin + size] for begin in range(0, len(parts), size)]

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Reject a checkpoint of other files, unless they may change. For rank 0 only."""
        state = intact.read_run_state(checkpoint)
        if state.stream and "data" not in self.cfg.checkpoint.allow_changes:
            stream_pieces.check_same(state.stream["files"], self.stream.signatures)

    def engine_built(self, engine: DeepSpeedEngine, ds: ds_config.DsConfig, source: run_dir.RunSource) -> None:
        """Take the lanes' places from the checkpoint, and where to list bad rows. A collective."""
        super().engine_built(engine, ds, source)
        self.stream.bad_rows_file = source.folder / "logs" / f"bad_rows-rank_{self.ranks.rank}.jsonl"
        if source.checkpoint is None:
            return
        state = intact.read_run_state(source.checkpoint)
        saved = state.stream
        if not saved:  # of a run without data.streaming
            return
        # Lanes (one per sequence of the global batch) are found again only in the same files and with as many lanes.
        if saved["files"] == self.stream.signatures and len(saved["lanes"]) == self.stream.lanes:
            self.positions[state.row] = dict(enumerate(saved["lanes"]))
            return
        self.positions[state.row] = {}  # checkpoint.allow_changes names what has changed, or the resume was rejected
        say(tr("The stream begins again with the first rows of its files."))

    def longest_batch(self, position: Position) -> tuple[Batch, str]:
        """Return the largest micro-batch that may come: of samples of `data.max_length` tokens."""
        batch = self.larger_batch(micro_rows(self.cfg), 1.0)
        rows, tokens = self.shape(batch)
        return batch, tr("the longest batch ({rows} x {tokens} tokens)", rows=rows, tokens=tokens)

    def larger_batch(self, rows: int, share: float) -> Batch:
        sample = self.sampled.joined(max(2, int(share * self.cfg.data.max_length)))
        batch = self._collated([[sample] * self.stream.unit] * rows)
        return language_batches.part_of(batch, mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank))

    def _size_of_data(self) -> str:
        return tr(
            "A stream of {files} files, about {samples} samples by an estimate",
            files=f"{len(self.stream.files):,}",
            samples=f"{self.sampled.num_samples:,}",
        )

    def _baselines(self) -> dict[str, float]:
        return {}

    def summary(self, run: RunContext, result: FitResult) -> dict[str, Any]:
        """Return what other runs do, and of each source how often lanes read it: the one that read least, and most."""
        lanes = [passes for of_rank in process_group.gather(self.stream.passes) for passes in of_rank.values()]
        ends = [[round(min(of_source), 3), round(max(of_source), 3)] for of_source in zip(*lanes, strict=True)]
        return {**super().summary(run, result), "passes": ends}

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        return [*super().end_lines(summary), *self.read_lines(summary)]

    def read_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Return what is printed of how the stream was read."""
        lines = []
        dropped = dict(self.stream.counts.dropped)
        if self.stream.bad_rows:
            dropped[tr("cannot be used")] = self.stream.bad_rows
        for source, (least, most) in zip(self.cfg.data.sources, summary["passes"], strict=True):
            ends = {"least": f"{least:.2f}", "most": f"{most:.2f}"}
            lines.append(
                tr("{source}: its parts were read {least} to {most} times.", source=source.path or source.hub, **ends)
            )
        if dropped:
            reasons = clauses([f"{reason}: {count:,}" for reason, count in dropped.items()])
            rows = f"{self.stream.rows:,}"
            lines.append(tr("Rows skipped, of the {rows} that rank 0 read: {reasons}.", rows=rows, reasons=reasons))
        return lines


def _validation(
    cfg: RunConfig, encoder: chat.AnyChatEncoder
) -> tuple[TokenizedCache | None, plans.PackingPlan | None, tokenize.PrepareReport]:
    """Return the validation data, tokenized once as for other runs, with the plan of its sequences and its report."""
    data = cfg.data
    if not data.validation:
        return None, None, tokenize.PrepareReport()
    only = replace(data, streaming=False, sources=data.validation, validation=[], validation_fraction=0.0)
    cache, _, report = tokenize.build_caches(replace(cfg, data=only), encoder)
    plan = packing.plan_sequences(
        cache,
        data.packing,
        max_length=data.max_length,
        micro_per_gpu=micro_rows(with_micro_batch(cfg)),
        seed=cfg.run.seed,
        sources=[],
        most=cfg.evaluate.max_samples,
        size=objective.data_unit(cfg)[1],
        cache_dir=Path(cfg.prepare.dir),
    )
    return cache, plan, report
