"""A run's steps in a plain PyTorch loop in one process, with which `toolkit prove` compares the run.

It shares no code of engine, loss or step with the run: no packing, eager attention, PyTorch's optimizer.
`python -m toolkit.extras.reference SPEC` does what a JSON file says, see `main`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from toolkit.config import mesh, schema
from toolkit.config.hub import resolve_model_path
from toolkit.config.load import load
from toolkit.data import loader, sampler, store
from toolkit.distributed import accelerator
from toolkit.engine.build import parameter_groups
from toolkit.export.load import load_any
from toolkit.export.write import write_folder
from toolkit.extras import shrink
from toolkit.layouts import fp8
from toolkit.models import fine_tuning, save
from toolkit.models.load import TORCH_DTYPES, create_model
from toolkit.sample_types import UNTRAINED
from toolkit.tasks import language_batches, language_data

ROWS = 4
"""Samples per forward pass, and samples whose logits are compared at the end."""


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Do one of three things for a run, by the keys of `spec` beside `words`, its recipe and overrides; return JSON.

    folder, heads: write the recipe's model there, made small, with so many heads; return its number of `parameters`.
    export, world_size: return the `logits` of this export on the run's first samples.
    dtype, device, world_size: train as the run with so many ranks does; see `follow`.
    """
    loaded = load(spec["words"])
    # Of model.add_tokens there is a copy of the model, whose tokenizer knows the tokens.
    cfg = (resolve_model_path(loaded) if loaded.cfg.model.add_tokens else loaded).cfg
    if "folder" in spec:
        model = shrink.shrunk_model(cfg.model.path, cfg.run.seed, spec["heads"])
        encoder = language_data.build_encoder(cfg)
        write_folder(model, save.non_weight_files(model, encoder), Path(spec["folder"]), "hf", None)
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    data = language_data.load_data(cfg)
    [first_batch] = _batches(cfg, data, spec["world_size"], num_steps=1)
    rows = first_batch[:ROWS]  # whose logits are compared
    if "export" in spec:
        model = load_any(spec["export"], dtype="fp32", device="cpu").model
        return {"logits": _logits(model, rows, data.pad_id)}
    return follow(cfg, data, spec["world_size"], spec["dtype"], torch.device(spec["device"]), rows)


def follow(
    cfg: schema.RunConfig,
    data: language_data.LanguageData,
    world_size: int,
    dtype: str,
    device: torch.device,
    rows: list[store.Sample],
) -> dict[str, Any]:
    """Train as the config says, in one process; return `losses` (of each step the mean per trained token of the global
    batch) and `norms` (of its gradient, before clipping), and the `logits` of a few rows after the last step.

    `dtype`: float64, in which a model still computes norms and rotary tables in float32; or the run's own. Weights
    begin as those of the run: rounded to the run's precision.
    """
    accelerator.set_tf32(cfg.precision.tf32)
    run_dtype = TORCH_DTYPES[cfg.precision.dtype]
    model_config = replace(cfg.model, attention=schema.Attention.eager)
    model = create_model(model_config, cfg.precision.dtype, data.tokenizer, cfg.run.seed)
    if cfg.tuning.method is not schema.TuningMethod.full:
        fine_tuning.apply_tuning(model, cfg.tuning, Path(cfg.model.path), data.tokenizer, cfg.run.seed)
    loop_dtype = torch.float64 if dtype == "float64" else TORCH_DTYPES[schema.Dtype(dtype)]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(run_dtype).to(loop_dtype)  # first rounded as in the run
    model.train().to(device)
    if dtype != "float64":  # the loop in the run's own precision shows what rounding does, that of FP8, too
        fp8.convert(model, cfg.precision.fp8)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    is_low = loop_dtype in (torch.bfloat16, torch.float16)  # then the optimizer updates copies in fp32
    masters = {
        name: parameter.detach().float().requires_grad_() if is_low else parameter
        for name, parameter in trained.items()
    }
    optimizer = plain_optimizer(model, masters, cfg.optim)
    losses, norms = [], []
    for samples in _batches(cfg, data, world_size, cfg.train.max_steps):
        losses.append(_backward(model, samples, data.pad_id))
        for name, parameter in trained.items() if is_low else ():  # gradients to the copies
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        max_norm = cfg.train.gradient_clipping or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(masters.values()), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in trained.items() if is_low else ():  # and the new weights back
            parameter.data.copy_(masters[name])
    return {"losses": losses, "norms": norms, "logits": _logits(model.eval(), rows, data.pad_id)}


def plain_optimizer(
    model: torch.nn.Module, masters: dict[str, torch.nn.Parameter], optim: schema.OptimConfig
) -> torch.optim.Optimizer:
    """Return PyTorch's own AdamW, Adam, SGD or Adagrad, as the config says; `masters`: trained parameters by name."""
    groups, betas = parameter_groups(model, optim, masters), (optim.betas[0], optim.betas[1])
    shared: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.name is schema.OptimizerName.sgd:
        return torch.optim.SGD(groups, momentum=optim.momentum, **shared)
    if optim.name is schema.OptimizerName.adagrad:
        return torch.optim.Adagrad(groups, eps=optim.eps, **shared)
    adam_class = torch.optim.AdamW if optim.name is schema.OptimizerName.adamw else torch.optim.Adam
    return adam_class(groups, betas=betas, eps=optim.eps, **shared)


def _batches(
    cfg: schema.RunConfig, data: language_data.LanguageData, world_size: int, num_steps: int
) -> Iterator[list[store.Sample]]:
    """Yield the samples of the global batch of each step, those of all ranks of a run with `world_size` ranks."""
    position, per_step = sampler.BEGINNING, language_batches.rows_per_step(cfg, data.packing)[0]
    for _ in range(num_steps):
        by_rank = language_batches.step_samples(cfg, data, world_size, position)
        # Ranks of one copy of the model compute the same samples.
        parts = {mesh.mesh_of(cfg, world_size, rank).data_rank: samples for rank, samples in enumerate(by_rank)}
        numbers = [number for micro_batches in parts.values() for samples in micro_batches for number in samples]
        yield [data.train[number] for number in numbers]
        position = sampler.next_position(position, language_batches.epoch_rows(cfg, data), per_step)


def _backward(model: PreTrainedModel, samples: list[store.Sample], pad_id: int) -> float:
    """Backpropagate a step's mean loss, ROWS samples at a time; return that loss, in nats per trained token."""
    total = sum(int(trained[1:].sum()) for _, trained in samples)  # no token predicts a sample's first one
    loss = 0.0
    for first in range(0, len(samples), ROWS):
        batch = loader.collate([[sample] for sample in samples[first : first + ROWS]], pad_id)
        logits = _forward(model, batch)[:, :-1].flatten(0, 1)  # each token predicts the next one
        labels = batch["labels"][:, 1:].flatten().to(model.device)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        part = functional.cross_entropy(logits, labels, ignore_index=UNTRAINED, reduction="sum") / total
        part.backward()
        loss += float(part.detach())
    return loss


def _forward(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits [B, S, V] of a padded batch."""
    ids, mask = batch["input_ids"].to(model.device), (batch["segment_ids"] > 0).long().to(model.device)
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits


@torch.no_grad()
def _logits(model: PreTrainedModel, samples: list[store.Sample], pad_id: int) -> list[float]:
    """Return the first 1,024 logits (of the vocabulary) at the last token of each sample, flattened."""
    batch = loader.collate([[sample] for sample in samples], pad_id)
    logits = _forward(model, batch)
    ends = (batch["segment_ids"] > 0).sum(1) - 1
    last_logits = logits[torch.arange(len(samples)), ends.to(logits.device), :1024]
    flat: list[float] = last_logits.double().flatten().tolist()
    return flat


if __name__ == "__main__":
    file = Path(sys.argv[1])
    spec = json.loads(file.read_text(encoding="utf-8"))
    Path(spec["output"]).write_text(json.dumps(main(spec)), encoding="utf-8")
