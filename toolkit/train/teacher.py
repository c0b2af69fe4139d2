"""A student's teacher: another model beside it, or what one was found to say before the first step.

Another model computes with each step, frozen, in the run's precision, on each rank or under ZeRO-3 in parts. With
`distill.top_k` its likeliest tokens are stored by all ranks, for which it is loaded before the student and is gone
afterwards; where the teacher is the model before training, the student's own engine computes them. What is stored does
not depend on temperature and loss, and is found again by what it was made of.
"""

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from toolkit.config.load import to_dict
from toolkit.config.mesh import micro_rows
from toolkit.config.schema import Init, ModelConfig, Packing, RunConfig
from toolkit.data import targets
from toolkit.data.targets import TargetWriter, TokenTargets
from toolkit.distributed import process_group
from toolkit.engine.build import initialize_untrained
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, DataError, ModelError, tr
from toolkit.models import attention, chat, directory, load, loss
from toolkit.models.distillation import store
from toolkit.models.probe import evaluating
from toolkit.models.weights import full_params, return_memory
from toolkit.terminal import phase
from toolkit.train import language_data

_SPOTS, _SPOT_BYTES = 64, 2**16
"""Parts of a weight file, from all over it, by which it is known again."""


def model_of(cfg: RunConfig) -> ModelConfig:
    """Return the teacher as a model to load."""
    return replace(cfg.model, path=cfg.distill.teacher, revision="", init=Init.pretrained, tokenizer="")


def check_teacher(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the teacher has no config.json that can be read, or another tokenizer than the student."""
    folder = cfg.distill.teacher
    if cfg.model.trust_remote_code and directory.runs_code(folder):
        directory.trust_code(folder)
    directory.read_config(folder)
    other = chat.load_tokenizer(folder, family=cfg.model.family)
    for place in range(max(len(tokenizer), len(other))):
        mine, theirs = (one.convert_ids_to_tokens(place) if place < len(one) else None for one in (tokenizer, other))
        if mine != theirs:
            raise ModelError(
                "distill.teacher = {teacher} has another tokenizer than the student: token {place} is {theirs} there "
                "and {mine} here. Both must have the same tokens, as their probabilities are compared.",
                teacher=folder,
                place=place,
                theirs=repr(theirs),
                mine=repr(mine),
            )


def load_teacher(cfg: RunConfig, data: language_data.LanguageData, ds_values: dict[str, Any]) -> Any:
    """Return the teacher on this rank's device: a model, or under ZeRO-3 an engine with parts. A collective."""
    packed, model_config = data.packing is Packing.packed, model_of(cfg)
    if packed and (reason := directory.packing_unsupported(model_config, cfg.data.max_length)):
        raise ConfigError("data.packing = packed cannot be with this distill.teacher: {reason}.", reason=reason)
    device = torch.device(get_accelerator().current_device_name())
    with phase(tr("Loading the teacher")):
        model = load.create_model(model_config, cfg.precision.dtype, data.tokenizer, cfg.run.seed, ds_values, packed)
        model.requires_grad_(False).eval()
        values = {name: value for name, value in ds_values.items() if name != "flops_profiler"}
        teacher = initialize_untrained(model, values) if cfg.zero.stage == 3 else model.to(device)
    teacher.eval()
    if packed:
        attention.check_isolation(
            teacher, len(data.tokenizer), device, cfg.distill.teacher, shared=data.shares_prefixes
        )
    return teacher


def general_of(cfg: RunConfig, store: Any) -> NDArray[np.bool_]:
    """Return which samples of a split come from sources that are marked `general`."""
    marks = np.array([source.general for source in (*cfg.data.sources, *cfg.data.validation)])
    return marks[store.sources()]


def token_targets(cfg: RunConfig, data: language_data.LanguageData) -> dict[str, TokenTargets]:
    """Return by split which samples have a teacher: those marked `general` where it is the model before training."""
    found = {}
    for split, cache in (("train", data.train), ("validation", data.validation)):
        if cache is not None:
            everything = np.ones(len(cache), np.bool_)
            found[split] = TokenTargets(cache, everything if cfg.distill.teacher else general_of(cfg, cache))
    return found


def stored_targets(
    cfg: RunConfig, data: language_data.LanguageData, ranks: Ranks, run_folder: Path, get_teacher: Callable[[], Any]
) -> dict[str, TokenTargets]:
    """Return the same with what the teacher says of each token, computed unless it is stored already. A collective;
    `get_teacher` is called where it has to be.
    """
    found, folder = token_targets(cfg, data), Path(cfg.distill.dir or run_folder / "teacher")
    teacher, whose = None, process_group.on_rank0(lambda: _identity(cfg))
    for split, table in found.items():
        plan = data.train_plan if split == "train" else data.validation_plan
        cache = data.train if split == "train" else data.validation
        assert plan is not None and cache is not None
        members = np.arange(len(cache)) if plan.members is None else np.unique(plan.members).astype(np.int64)
        samples = table.samples(members)
        made_of = [whose, cache.fingerprint, split, cfg.distill.top_k, len(data.tokenizer)]
        digest = hashlib.sha256(json.dumps(made_of).encode() + samples.tobytes()).hexdigest()[:32]
        target = folder / f"{split}-{digest}"
        if not process_group.on_rank0(partial(targets.is_complete, target)):
            teacher = teacher or get_teacher()
            _compute(cfg, data, ranks, teacher, table, samples, split, target)
        table.open(target)
    return found


def _compute(
    cfg: RunConfig,
    data: language_data.LanguageData,
    ranks: Ranks,
    teacher: Any,
    table: TokenTargets,
    samples: NDArray[np.int64],
    split: str,
    target: Path,
) -> None:
    """Let each rank write what the teacher says of its share of the samples; rank 0 makes a directory of it."""
    top_k = min(cfg.distill.top_k, len(data.tokenizer))
    building = target.with_name(f".{target.name}-{cfg.run.name or ranks.world_size}")
    size = int(table.counts[samples].sum()) * targets.record_bytes(top_k)
    process_group.on_rank0(lambda: _begin(building, size))
    numbers, batches = language_data.sample_batches(cfg, data, split, ranks, samples)
    head = loss.loss_head(teacher)
    try:
        writer = TargetWriter(building, ranks.rank, top_k)
        with evaluating(teacher), phase(tr("Storing what the teacher says"), len(numbers), tr("batches")) as advance:
            for batch in batches:
                given = loss.on_device(teacher, batch)
                scores = head.scores(teacher, given, given["places"])
                with full_params([one for one in scores[1:] if one is not None]):
                    found = store(scores, len(data.tokenizer), top_k)
                writer.append(*found)
                advance(1)
        writer.close()
    except OSError as error:
        raise _not_written(building, error) from error
    process_group.barrier()
    shares = [
        np.array([sample for share in shares for sample in share], np.int64)
        for rank in range(ranks.world_size)
        for shares in [language_data.sample_shares(samples, micro_rows(cfg), rank, ranks.world_size)]
    ]
    process_group.on_rank0(lambda: targets.publish(building, target, shares, table, top_k))


def _begin(building: Path, size: int) -> None:
    """Make an empty directory where so many bytes have room; DataError if they have not."""
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        free = shutil.disk_usage(building).free
    except OSError as error:
        raise _not_written(building, error) from error
    if size > free:
        raise DataError(
            "distill.top_k stores {size} GiB in {folder}, where {free} GiB are free. Set a smaller distill.top_k, or "
            "distill.dir to a directory on a larger disk.",
            size=f"{size / 2**30:,.1f}",
            folder=building.parent,
            free=f"{free / 2**30:,.1f}",
        )


def _not_written(folder: Path, error: OSError) -> DataError:
    return DataError(
        "what the teacher says cannot be written to {folder}: {reason}. Set distill.dir to another directory.",
        folder=folder.parent,
        reason=error.strerror or str(error),
    )


def release(teacher: Any) -> None:
    """Give back the memory of a teacher that is not needed any more."""
    if hasattr(teacher, "destroy"):  # an engine, whose hooks refer to it
        teacher.destroy()
    gc.collect()
    get_accelerator().empty_cache()
    return_memory()


def _identity(cfg: RunConfig) -> list[str]:
    """Return what is the same if the teacher says the same: its files, or the model's before training."""
    folder = cfg.distill.teacher
    if folder:
        return [_digest(Path(folder)), cfg.precision.dtype.value]
    plain = to_dict(cfg)
    model = {name: plain["model"][name] for name in ("init", "shape", "path", "tokenizer")}
    found = [json.dumps(model, sort_keys=True), str(cfg.run.seed), cfg.precision.dtype.value]
    return found + [_digest(Path(path)) for path in (cfg.model.path, cfg.tuning.adapter) if path]


def _digest(folder: Path) -> str:
    """Return a digest of a model directory: its config, and of each weight file size and parts from all over it."""
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "adapter_config.json"):
            whole.update(path.name.encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".pt"):
            size = path.stat().st_size
            whole.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                for begin in np.linspace(0, max(0, size - _SPOT_BYTES), _SPOTS).astype(int).tolist():
                    whole.update(os.pread(file.fileno(), _SPOT_BYTES, begin))
    return whole.hexdigest()
