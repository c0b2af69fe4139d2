"""Distillation: trained tokens learn a teacher's distribution in addition to their labels (distill_losses.py).

The teacher is another model, and teaches every trained token; or it is the model before training, and teaches the
samples of sources that are marked `general`, so that the model does not forget its distribution there. With a new LoRA
the latter is the model without its adapter, so that there is no second model.

Another model computes in each step, frozen, in the run's precision, on each rank or partitioned by ZeRO-3. With
`distill.top_k` its likeliest tokens are computed by all ranks and stored before the student is loaded, and the teacher
is freed; those of the model before training are computed by the student's engine. Stored scores do not depend on
temperature and loss, and are reused by a digest of their inputs.
"""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from toolkit.config import mesh, objective, schema
from toolkit.config.load import to_dict
from toolkit.data import loader, plans, sampler, targets
from toolkit.data.store import TokenizedCache
from toolkit.distributed import process_group
from toolkit.engine import build, ds_config, parameters
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, DataError, ModelError, say, tr
from toolkit.models import (
    base_model,
    directory,
    head_outputs,
    isolation,
    load,
    lora,
    loss,
    probe,
    quantized,
    stages,
    tokenizer_files,
    weights,
)
from toolkit.models.loss_kernels import Scores
from toolkit.models.packable import reason_not_to_pack
from toolkit.sample_types import Batch
from toolkit.tasks import language, language_batches, language_data
from toolkit.tasks.distill_losses import Distilled, StoredScores, distilled, store
from toolkit.terminal import phase
from toolkit.train import run_dir, task

KL, CE = "distill/kl", "distill/ce"
EVAL_KL, EVAL_GENERAL = schema.EVAL_TAUGHT


class DistillTask(language.LanguageTask):
    """Trains a causal language model on labels and on a teacher's distributions."""

    teacher: Any = None
    """Another model, or its engine, that computes in each step."""

    names: tuple[str, ...] = (KL, CE)
    reported = ((EVAL_KL, EVAL_KL), (EVAL_GENERAL, EVAL_GENERAL))

    def __init__(self) -> None:
        super().__init__()
        # Sum and count of divergences; sum and count of cross entropies of general samples.
        self._evaluated = torch.zeros(4, dtype=torch.float64)

    def check(self, cfg: schema.RunConfig, tokenizer: PreTrainedTokenizerBase | None) -> Any:
        """Check as a language model; ModelError too if the teacher has another tokenizer."""
        model = super().check(cfg, tokenizer)
        if tokenizer is not None and cfg.distill.teacher and Path(cfg.distill.teacher).is_dir():
            check_teacher(cfg, tokenizer)
        return model

    def load_data(self, cfg: schema.RunConfig, ranks: Ranks) -> None:
        """Open the tokenized caches, and report the share of general samples if the model is its own teacher."""
        super().load_data(cfg, ranks)
        if not cfg.distill.teacher:
            self._report_general(cfg)

    def _report_general(self, cfg: schema.RunConfig) -> None:
        """Report the share of an epoch's samples that is from sources marked general; DataError if none or all are."""
        data = self.data
        by_sample = is_general_sample(cfg, data.train)
        is_general = by_sample if data.train_plan.members is None else by_sample[np.asarray(data.train_plan.members)]
        if not is_general.any() or is_general.all():
            raise DataError(
                "{count} of {all} training samples come from sources marked general: there must be some, and others.",
                count=int(is_general.sum()),
                all=len(is_general),
            )
        say(
            "{share} of the samples of an epoch are general: on them the model keeps the distribution that it has "
            "before training.",
            share=f"{is_general.mean():.0%}",
        )

    def settle(self, cfg: schema.RunConfig) -> None:
        """Take the settled config, and add the marks of general sources to the identity of the data."""
        super().settle(cfg)
        marks = "".join(str(int(source.general)) for source in cfg.data.sources)
        self.identity = {**self.identity, **({"general": marks} if "1" in marks else {})}
        if language_data.has_targets(cfg) and not self.data.targets:  # a second call keeps stored scores
            self.data = replace(self.data, targets=self._token_targets())

    def _token_targets(self) -> dict[str, targets.TokenTargets]:
        """Return split -> which samples have a teacher: all, or general ones if it is the model before training."""
        tables = {}
        for split, cache in (("train", self.data.train), ("validation", self.data.validation)):
            if cache is not None:
                if self.cfg.distill.teacher:
                    is_taught = np.ones(len(cache), np.bool_)
                else:
                    is_taught = is_general_sample(self.cfg, cache)
                tables[split] = targets.TokenTargets(cache, is_taught)
        return tables

    def build_model(self, ds: ds_config.DsConfig, source: run_dir.RunSource) -> torch.nn.Module:
        """Load the student, after storing another model's scores if `distill.top_k` asks for that. A collective."""
        cfg = self.cfg
        if cfg.distill.top_k and cfg.distill.teacher:
            free_teacher(self._store_teacher_scores(source.folder, lambda: load_teacher(cfg, self.data, ds.values)))
        return super().build_model(ds, source)

    def engine_built(self, engine: DeepSpeedEngine, ds: ds_config.DsConfig, source: run_dir.RunSource) -> None:
        """With `distill.top_k` and no other teacher store the scores of the model before training; load a teacher that
        computes in each step, if it is not yet. A collective.
        """
        super().engine_built(engine, ds, source)
        cfg = self.cfg
        if cfg.distill.top_k and not cfg.distill.teacher:
            self._store_teacher_scores(source.folder, lambda: engine)
        if objective.has_live_teacher(cfg) and self.teacher is None:
            self.teacher = load_teacher(cfg, self.data, ds.values, cfg.parallel.sequence)

    def _store_teacher_scores(self, run_folder: Path, get_teacher: Callable[[], Any]) -> Any:
        """Open the stored scores of the teacher as the data's targets; those that do not exist are computed first.
        Return the teacher if `get_teacher` was called for that, else None. A collective.
        """
        cfg, data, tables, teacher = self.cfg, self.data, self._token_targets(), None
        folder = Path(cfg.distill.dir or run_folder / "teacher")
        identity = process_group.on_rank0(lambda: _teacher_identity(cfg))
        for split, table in tables.items():
            cache, plan = data.split(split)
            # The plan's samples, each once; without `members` it takes all of the split.
            members = np.arange(len(cache)) if plan.members is None else np.unique(plan.members).astype(np.int64)
            samples = table.samples(members)
            made_of = [identity, cache.fingerprint, split, cfg.distill.top_k, len(data.tokenizer)]
            digest = hashlib.sha256(json.dumps(made_of).encode() + samples.tobytes()).hexdigest()[:32]
            target = folder / f"{split}-{digest}"
            if not process_group.on_rank0(partial(targets.is_complete, target)):
                teacher = teacher or get_teacher()
                self._compute_teacher_scores(teacher, table, samples, split, target)
            table.open(target)
        self.data = replace(data, targets=tables)
        return teacher

    def _compute_teacher_scores(
        self, teacher: Any, table: targets.TokenTargets, samples: NDArray[np.int64], split: str, target: Path
    ) -> None:
        """Run the teacher over `samples` of a split, a share on each rank, and write its likeliest tokens to `target`,
        a directory. A collective; DataError if there is no room, or a file cannot be written.
        """
        cfg, ranks, vocabulary = self.cfg, self.ranks, len(self.data.tokenizer)
        top_k = min(cfg.distill.top_k, vocabulary)
        part, num_parts = sample_share(cfg, ranks)
        layout = mesh.mesh_of(cfg, ranks.world_size, ranks.rank)
        # Ranks that split matrices have the same scores, and of pipeline stages the last one has them: one rank writes.
        is_writer = ranks.rank % layout.tensor == 0 and layout.stage == layout.pipeline - 1
        building = target.with_name(f".{target.name}-{cfg.run.name or ranks.world_size}")
        num_bytes = int(table.counts[samples].sum()) * targets.record(top_k).itemsize
        process_group.on_rank0(lambda: _make_empty(building, num_bytes))
        numbers, batches = sample_batches(cfg, self.data, split, ranks, samples)

        def measure(model: Any, batch: Batch) -> StoredScores:
            inputs = loss.on_device(model, batch)
            scores = head_outputs.scores(model, inputs, inputs["target_indices"])
            with weights.full_params([weight for weight in scores[1:] if weight is not None]):  # weight, bias (ZeRO-3)
                return store(scores, vocabulary, top_k)

        try:
            writer = targets.TargetWriter(building, part, top_k) if is_writer else None
            with (
                probe.evaluating(teacher),
                phase(tr("Storing what the teacher says"), len(numbers), tr("batches")) as advance,
            ):
                for _, stored in stages.measure_each(teacher, batches, measure):
                    if writer:
                        writer.append(*stored)
                    advance(1)
            if writer:
                writer.close()
        except OSError as error:
            raise _write_error(building, error) from error
        process_group.barrier()
        shares = [samples[rank::num_parts] for rank in range(num_parts)]  # as in `sample_batches`
        process_group.on_rank0(lambda: targets.publish(building, target, shares, table, top_k))

    def prepare_evaluation(self, run: task.RunContext) -> None:
        """Make evaluations measure the divergence too, in the same forward passes."""
        super().prepare_evaluation(run)
        if self.evaluation is not None:
            self.evaluation.measure = self._measure

    def _with_any_columns(self, batch: Batch) -> Batch:
        """Return a dry run's micro-batch with made-up `TokenTargets.columns`: all tokens taught takes most memory."""
        count, top_k = loss.num_trained_tokens(batch), min(self.cfg.distill.top_k, len(self.data.tokenizer))
        if not self.data.targets:
            return batch
        columns = {"taught": torch.ones(count, dtype=torch.bool)}
        if top_k:
            columns["teacher_ids"] = torch.arange(top_k, dtype=torch.int32).repeat(count, 1)
            columns["teacher_logs"] = torch.zeros(count, top_k + 1).log_softmax(1)  # the last: of all other tokens
        return {**batch, **columns}

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of trained tokens; add both parts to the step's figures."""
        total, losses, _ = self._distill_batch(engine, batch)
        self._add(self._figures_of(losses, batch))
        return total

    def _figures_of(self, losses: Distilled, batch: Batch) -> dict[str, torch.Tensor]:
        """Return sums and counts of a micro-batch's parts of the loss."""
        parts = {KL: losses.divergences, CE: losses.cross_entropies}
        return {name: torch.stack((values.sum(), values.new_full((), len(values)))) for name, values in parts.items()}

    def _distill_batch(self, engine: Any, batch: Batch) -> tuple[torch.Tensor, Distilled, torch.Tensor]:
        """Return the sum of a micro-batch's losses, with gradients; the losses of each token; and the tokens' indices
        in the batch, [T], those with a teacher first.
        """
        inputs = loss.on_device(engine, batch)
        indices, labels = inputs["target_indices"], inputs["targets"]
        num_taught = len(indices)
        if "taught" in batch:
            taught = batch["taught"].cpu()
            order = torch.cat((taught.nonzero()[:, 0], (~taught).nonzero()[:, 0])).to(indices.device, non_blocking=True)
            indices, labels, num_taught = indices[order], labels[order], int(taught.sum())
        teacher_scores = self._teacher_scores(engine, batch, inputs, indices[:num_taught])
        vocabulary = len(self.data.tokenizer)
        results: list[Distilled] = []  # `head_outputs.total` returns only the sum: `compute` leaves all fields here

        def compute(student: Scores) -> torch.Tensor:
            # The student's output layer is gathered here; that of another model may still be partitioned by ZeRO-3.
            has_own_layer = isinstance(teacher_scores, Scores) and teacher_scores.weight is not student.weight
            output_layer = teacher_scores[1:] if has_own_layer else ()  # weight and bias
            with weights.full_params([weight for weight in output_layer if weight is not None]):
                own = inputs.get("own")
                results.append(distilled(student, labels, teacher_scores, vocabulary, self.cfg.distill, own))
            return results[0].loss

        total = head_outputs.total(engine, inputs, indices, compute)
        return total, results[0], indices

    def _teacher_scores(self, engine: Any, batch: Batch, inputs: Batch, indices: torch.Tensor) -> Scores | StoredScores:
        """Return the teacher's scores of the tokens at `indices`, without gradients: stored ones that came with the
        batch, those of the student's model without its adapter, or those of another model, `self.teacher`.
        """
        if "teacher_ids" in inputs:
            return StoredScores(inputs["teacher_ids"].long(), inputs["teacher_logs"])
        if objective.has_own_teacher(self.cfg):
            # Without tokens nothing is computed, unless ranks with other parts of its rows or model wait for this one.
            if not (len(indices) or "part" in batch or parameters.is_partitioned(engine)):
                return Scores(torch.zeros(0, len(self.data.tokenizer), device=indices.device))
            with probe.evaluating(engine), lora.without_adapter(engine.module):
                return head_outputs.scores(engine, inputs, indices)
        with probe.evaluating(self.teacher):
            # `inputs_embeds` of a pipeline stage are the student's states.
            teacher_inputs = {name: tensor for name, tensor in inputs.items() if name != "inputs_embeds"}
            return head_outputs.scores(self.teacher, loss.on_device(self.teacher, teacher_inputs), indices)

    def _measure(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return cross entropies as `token_losses` does; add what else is evaluated of the batch to `_evaluated`."""
        with torch.compiler.set_stance("force_eager"):  # evaluation's shapes are not compiled
            _, losses, indices = self._distill_batch(engine, batch)
        of_labels = losses.cross_entropies
        # Each at the position before its token, [B x S].
        by_position = of_labels.new_zeros(batch["input_ids"].numel()).index_copy_(0, indices - 1, of_labels)
        # Without another teacher, what is taught are the general samples' tokens, which come first.
        of_general = of_labels[:0] if self.cfg.distill.teacher else of_labels[: len(losses.divergences)]
        for index, values in ((0, losses.divergences), (2, of_general)):  # see `_evaluated`
            self._evaluated[index] += float(values.double().sum())
            self._evaluated[index + 1] += len(values)
        return by_position.view(batch["input_ids"].shape)

    def evaluate(self, run: task.RunContext, step: int, alive: Callable[[], None]) -> dict[str, float]:
        """Evaluate as a language model, with the divergence from the teacher."""
        self._evaluated.zero_()
        figures = super().evaluate(run, step, alive)
        kl_sum, num_taught, general_sum, num_general = process_group.sum_over_ranks(
            self._evaluated, run.engine.device
        ).tolist()
        if num_taught:
            figures[EVAL_KL] = kl_sum / num_taught
        if num_general:
            figures[EVAL_GENERAL] = general_sum / num_general
        return figures

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        lines = super().end_lines(summary)
        if losses := language.first_to_last(summary, EVAL_GENERAL):
            lines.append(
                tr(
                    "General validation samples: loss {losses} nats/token, {kl} nats/token from the model before "
                    "training.",
                    losses=losses,
                    kl=f"{summary[f'last_{EVAL_KL}']:.4f}",
                )
            )
        elif kl := language.first_to_last(summary, EVAL_KL, ".4f"):
            lines.append(tr("Divergence from the teacher {kl} nats/token.", kl=kl))
        return lines


def model_of(cfg: schema.RunConfig) -> schema.ModelConfig:
    """Return the model config of the teacher."""
    return replace(cfg.model, path=cfg.distill.teacher, revision="", init=schema.Init.pretrained, tokenizer="")


def check_teacher(cfg: schema.RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the teacher has no config.json that can be read, or another tokenizer than the student."""
    folder = cfg.distill.teacher
    if cfg.model.trust_remote_code and directory.has_runnable_code(folder):
        directory.trust_code(folder)
    directory.read_config(folder)
    quantized.check_readable(folder)
    teacher_tokenizer = tokenizer_files.load_tokenizer(folder, family=cfg.model.family)
    for token_id in range(max(len(tokenizer), len(teacher_tokenizer))):
        own_token = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
        teacher_token = teacher_tokenizer.convert_ids_to_tokens(token_id) if token_id < len(teacher_tokenizer) else None
        if own_token != teacher_token:
            raise ModelError(
                "distill.teacher = {teacher} has another tokenizer than the student: token {place} is {theirs} there "
                "and {mine} here. Both must have the same tokens, as their probabilities are compared.",
                teacher=folder,
                place=token_id,
                theirs=repr(teacher_token),
                mine=repr(own_token),
            )


def load_teacher(
    cfg: schema.RunConfig, data: language_data.LanguageData, ds_values: dict[str, Any], parts: int = 1
) -> Any:
    """Return the teacher, under ZeRO-3 an engine; `parts`: ranks that each sequence is divided over. A collective."""
    packed, model_config = data.packing is schema.Packing.packed, model_of(cfg)
    if packed and (reason := reason_not_to_pack(model_config, cfg.data.max_length)):
        raise ConfigError("data.packing = packed cannot be with this distill.teacher: {reason}.", reason=reason)
    device = torch.device(get_accelerator().current_device_name())
    with phase(tr("Loading the teacher")):
        dtype, seed = cfg.precision.dtype, cfg.run.seed
        model = load.create_model(model_config, dtype, data.tokenizer, seed, ds_values, packed, parts)
        model.requires_grad_(False).eval()
        # `profile.flops` measures the student alone.
        values = {name: value for name, value in ds_values.items() if name != "flops_profiler"}
        teacher = build.initialize_untrained(model, values) if cfg.zero.stage == 3 else model.to(device)
    teacher.eval()
    if packed:
        isolation.check_isolation(
            teacher, len(data.tokenizer), device, cfg.distill.teacher, shared=data.shares_prefixes
        )
    return teacher


def is_general_sample(cfg: schema.RunConfig, store: Any) -> NDArray[np.bool_]:
    """Return which samples of a split are from sources that are marked `general`, bool [samples]."""
    marks = np.array([source.general for source in (*cfg.data.sources, *cfg.data.validation)])
    return marks[store.sources()]


def weighted_sources(cfg: schema.RunConfig, train: TokenizedCache) -> list[schema.SourceConfig]:
    """Return the training sources, with weights by which those marked `general` get `distill.general_share`."""
    sources, share = cfg.data.sources, cfg.distill.general_share
    counts = np.bincount(train.sources(), minlength=len(sources)) * [source.weight for source in sources]
    is_general = np.array([source.general for source in sources])
    general, others = counts[is_general].sum(), counts[~is_general].sum()
    # So that general x factor is `share` of the sum. Without general samples `_report_general` rejects the data later.
    factor = float(share / (1 - share) * others / max(general, 1))
    return [replace(source, weight=source.weight * factor) if source.general else source for source in sources]


def sample_batches(
    cfg: schema.RunConfig, data: language_data.LanguageData, split: str, ranks: Ranks, samples: NDArray[np.int64]
) -> tuple[list[list[int]], Iterator[Batch]]:
    """Return this rank's share of `samples` of a split, each in a row by itself: the samples of each micro-batch, and
    an iterator over the micro-batches. Every rank has as many; the last may be empty.
    """
    cache, _ = data.split(split)
    shares = sampler.sequential(len(samples), mesh.micro_rows(cfg), *sample_share(cfg, ranks))
    numbers = [samples[share].tolist() for share in shares]
    everything = plans.PackingPlan(cache.num_numbers)
    rows = loader.build_loader(cache, everything, numbers, data.pad_id, data.layout, seed=cfg.run.seed)
    return numbers, language_batches.prefetch(iter(rows), 2)


def sample_share(cfg: schema.RunConfig, ranks: Ranks) -> tuple[int, int]:
    """Return the number of this rank's share of samples in undivided rows, and the number of shares; ranks that hold
    parts of one model have the same share. As `Mesh.data_rank`, but ranks that would split a row have one each.
    """
    parts = ranks.world_size // (cfg.parallel.tensor * cfg.parallel.pipeline)
    return ranks.rank // cfg.parallel.tensor % parts, parts


def _make_empty(building: Path, size: int) -> None:
    """Make an empty directory; DataError if its disk has no room for `size` bytes."""
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        free = shutil.disk_usage(building).free
    except OSError as error:
        raise _write_error(building, error) from error
    if size > free:
        raise DataError(
            "distill.top_k stores {size} GiB in {folder}, where {free} GiB are free. Set a smaller distill.top_k, or "
            "distill.dir to a directory on a larger disk.",
            size=f"{size / 2**30:,.1f}",
            folder=building.parent,
            free=f"{free / 2**30:,.1f}",
        )


def _write_error(folder: Path, error: OSError) -> DataError:
    """Return the error for stored scores whose directory `folder`, in that of `distill.dir`, cannot be written."""
    return DataError(
        "what the teacher says cannot be written to {folder}: {reason}. Set distill.dir to another directory.",
        folder=folder.parent,
        reason=error.strerror or str(error),
    )


def free_teacher(teacher: Any) -> None:
    """Free the memory of a teacher, which may be None."""
    if hasattr(teacher, "destroy"):  # an engine, whose hooks refer to it
        teacher.destroy()
    gc.collect()
    get_accelerator().empty_cache()
    weights.return_memory()


def _teacher_identity(cfg: schema.RunConfig) -> list[str]:
    """Return what identifies the teacher's scores: a digest of its files, or of the model's before training."""
    folder = cfg.distill.teacher
    if folder:
        return [base_model.weights_digest(Path(folder)), cfg.precision.dtype.value]
    plain = to_dict(cfg)
    model = {name: plain["model"][name] for name in ("init", "shape", "path", "tokenizer")}
    # The seed, by which random weights are drawn.
    parts = [json.dumps(model, sort_keys=True), str(cfg.run.seed), cfg.precision.dtype.value]
    return parts + [base_model.weights_digest(Path(path)) for path in (cfg.model.path, cfg.tuning.adapter) if path]
