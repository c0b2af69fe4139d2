"""Run on every rank: what the engine does with a model folder under ZeRO-3, and with activation checkpointing.

Arguments: a model directory. Each finding is asserted here, on every rank; a failing assertion fails the launch.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import transformers

from toolkit.config.mesh import Mesh
from toolkit.config.schema import (
    ActivationCheckpointingConfig,
    DistributedConfig,
    ScheduleConfig,
    ScheduleName,
    TrainConfig,
)
from toolkit.distributed import process_group
from toolkit.engine.build import initialize_engine
from toolkit.engine.parameters import gathered_parameters, is_partitioned
from toolkit.evaluate.generate import answer
from toolkit.launch import environment
from toolkit.messages import Diverged, ModelError
from toolkit.models.load_weights import load_model
from toolkit.tasks import language
from toolkit.tasks.language import LanguageTask
from toolkit.train import step
from toolkit.train.schedule import Schedule
from toolkit.train.step import AnomalyKind, StepGuard

LAYERS = 2
DS_CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}


def no_schedule(optimizer: torch.optim.Optimizer) -> object:
    """Return a schedule that changes nothing."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def check_loading(path: str) -> None:
    """A partitioned load gives the same bits as transformers' ordinary one, rotary frequencies in fp32 included."""
    model = load_model(path, dtype=torch.bfloat16, ds_config=DS_CONFIG)
    assert all(parameter.numel() == 0 for parameter in model.parameters()), "not partitioned"
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    wanted = dict(expected.named_parameters())
    seen = 0
    for name, value in gathered_parameters(model):
        if torch.distributed.get_rank() == 0:
            assert value.dtype is torch.bfloat16
            assert torch.equal(value, wanted[name]), name
            seen += 1
    assert seen == (len(wanted) if torch.distributed.get_rank() == 0 else 0)
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        assert buffer.dtype is torch.float32
        assert torch.equal(buffer, buffers[name]), name
    engine = initialize_engine(model, DS_CONFIG, ActivationCheckpointingConfig(), no_schedule)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def check_recomputation(path: str) -> None:
    """DeepSpeed's checkpoint function runs once per layer and forward pass when it is on, and never when it is off, nor
    for a frozen layer that no gradient comes to."""
    calls = []
    real = deepspeed.checkpointing.checkpoint

    def counted(function: object, *inputs: object) -> object:
        calls.append(1)
        return real(function, *inputs)

    deepspeed.checkpointing.checkpoint = counted
    batch = torch.arange(8).reshape(1, 8)
    for enabled, trained in ((True, LAYERS), (True, 1), (False, LAYERS)):
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        if trained < LAYERS:
            model.requires_grad_(False).model.layers[-trained:].requires_grad_()
        config = {**DS_CONFIG, "zero_optimization": {"stage": 1}}
        recompute = ActivationCheckpointingConfig(enabled=enabled, synchronize_checkpoint_boundary=enabled)
        engine = initialize_engine(model, config, recompute, no_schedule)
        engine.train()
        for _ in range(3):
            engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
            engine.step()
        assert len(calls) == (3 * trained if enabled else 0), (enabled, trained, len(calls))
        assert not enabled or deepspeed.runtime.activation_checkpointing.checkpointing.SYNCHRONIZE is True
        calls.clear()
    deepspeed.checkpointing.checkpoint = real


def check_skipped_steps(path: str) -> None:
    """A NaN on one rank skips the step on all: counted, weights finite, learning rate not advanced; too many "
    "end the run."""
    config = {**DS_CONFIG, "zero_optimization": {"stage": 2}}
    schedule = ScheduleConfig(name=ScheduleName.linear, warmup_steps=2, warmup_min_ratio=0.1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    engine = initialize_engine(
        model, config, ActivationCheckpointingConfig(), lambda optimizer: Schedule(optimizer, schedule, 0.001, 20, 2)
    )
    ids = torch.arange(8).reshape(1, 8)
    batch = {"input_ids": ids, "labels": ids, "segment_ids": ids * 0 + 1, "position_ids": ids}
    guard, rates = StepGuard(engine, TrainConfig(max_skipped_steps=2)), []
    real, poisoned = language.token_loss_sum, [False]

    def poison(*arguments: object) -> torch.Tensor:
        bad = poisoned[0] and torch.distributed.get_rank() == 1
        return real(*arguments) * (float("nan") if bad else 1.0)

    language.token_loss_sum = poison
    for number, bad in enumerate([False, False, False, True, False, True, True], start=1):
        poisoned[0] = bad
        rates.append(engine.get_lr()[0])
        result = step.train_step(engine, LanguageTask(), [batch, batch], Mesh(world_size=2), guard)
        anomaly = guard.check()
        assert (anomaly is not None and anomaly.kind is AnomalyKind.loss) == bad
        assert math.isinf(result.grad_norm) == bad
        if number == 7:
            with pytest.raises(Diverged, match="2 steps in a row up to step 7 were skipped"):
                guard.check_patience(number)
        else:
            guard.check_patience(number)
    assert engine.skipped_steps == 3
    assert rates[4] == rates[3], "the schedule advanced on a skipped step"
    assert rates[5] != rates[4]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in engine.module.parameters())
    language.token_loss_sum = real


def check_refusals(path: str) -> None:
    """Weights of another shape are refused on every rank, by name."""
    from safetensors.torch import load_file, save_file

    spoilt = Path(path).with_name("spoilt")
    if torch.distributed.get_rank() == 0:
        spoilt.mkdir()
        (spoilt / "config.json").write_bytes((Path(path) / "config.json").read_bytes())
        tensors = load_file(Path(path) / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(5)
        tensors["stray"] = torch.ones(1)
        del tensors["model.embed_tokens.weight"]
        save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    with pytest.raises(ModelError) as refusal:
        load_model(spoilt, dtype=torch.float32, ds_config=DS_CONFIG)
    for part in ("model.embed_tokens.weight", "stray", "model.norm.weight (5,) instead of (32,)"):
        assert part in str(refusal.value), refusal.value


def check_answers(path: str) -> None:
    """Ranks whose answers differ in length, as GPUs may round to another token, come to an end together."""
    config = {**DS_CONFIG, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    model = load_model(path, dtype=torch.bfloat16, ds_config=config)
    engine = initialize_engine(model, config, ActivationCheckpointingConfig(), no_schedule)
    is_first = torch.distributed.get_rank() == 0
    tokenizer = SimpleNamespace(
        eos_token_id=1, pad_token_id=1, decode=lambda ids, skip_special_tokens: " ".join(map(str, ids))
    )
    encoder: Any = SimpleNamespace(
        tokenizer=tokenizer, stop_ids=list(range(64)) if is_first else [64], prompt=lambda messages: [2, 3, 4]
    )
    text = answer(engine.module, encoder, "?", 6, engine.device, in_step=is_partitioned(engine))
    torch.distributed.barrier()
    assert len(text.split()) == (0 if is_first else 6), text


def main() -> None:
    """Run all checks."""
    path = environment.strip_launcher_arguments(sys.argv[1:])[0]
    process_group.start(DistributedConfig(timeout_s=60))
    check_loading(path)
    check_recomputation(path)
    check_skipped_steps(path)
    check_refusals(path)
    check_answers(path)
    print("ALL CHECKED", flush=True)
    process_group.stop()


if __name__ == "__main__":
    main()
