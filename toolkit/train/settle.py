"""What a run decides before it begins, where its config leaves that open: optimizer, ops, layout and micro-batch."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.checkpoint import directory
from toolkit.config import mesh, native_ops, rule_tables, schema
from toolkit.distributed import process_group
from toolkit.engine import build, ds_config
from toolkit.launch.environment import Ranks
from toolkit.messages import LaunchError, say, tr, user_name, warn
from toolkit.train import run_dir
from toolkit.train.step import StepGuard
from toolkit.train.task import Task

BuiltEngine = tuple[DeepSpeedEngine, StepGuard]
Build = Callable[[schema.RunConfig, ds_config.DsConfig, run_dir.RunSource], BuiltEngine]


def settle_config(
    cfg: schema.RunConfig, task: Task, ranks: Ranks, source: run_dir.RunSource, build_engine: Build
) -> tuple[schema.RunConfig, BuiltEngine | None]:
    """Return the config with nothing left that is `auto`, and the engine with its guard if one had to be built to find
    the micro-batch. `task.settle` gets the same config. A collective.
    """
    built = None
    cfg = with_ops(with_optimizer(cfg, source), cfg)
    if cfg.plan.auto:
        from toolkit.train import auto_layout

        assert task.vocab_size is not None
        device = torch.device(get_accelerator().current_device_name())
        cfg = auto_layout.choose_layout(cfg, task.vocab_size, ranks, device, source)
    elif cfg.batch.micro_per_gpu == schema.AUTO:
        from toolkit.train import auto_layout

        open_cfg = cfg
        rows = process_group.on_rank0(lambda: auto_layout.micro_batch_before(open_cfg, ranks, source))
        if not rows:
            smallest = mesh.with_micro_batch(cfg)
            task.settle(smallest)
            ds = ds_config.build_ds_config(smallest, ranks.world_size, task.total_steps)
            rows, built = auto_layout.search_micro_batch(
                smallest, task, ranks, lambda: build_engine(smallest, ds, source)
            )
        cfg = mesh.with_micro_batch(cfg, rows)
    task.settle(cfg)
    return cfg, built


def with_optimizer(cfg: schema.RunConfig, source: run_dir.RunSource) -> schema.RunConfig:
    """Return the config with `optim.torch` decided, the same on all ranks and in every start of a run. A collective."""
    if cfg.optim.torch != schema.AUTO:
        return cfg
    rank_cfg, reason = native_ops.with_optimizer(cfg)
    choices = process_group.gather((bool(rank_cfg.optim.torch), reason))
    checkpoint = source.checkpoint
    saved_optim = process_group.on_rank0(
        lambda: directory.read_run_state(checkpoint).config.get("optim", {}) if checkpoint else {}
    )
    # A rank without a compiler decides for all, and a resumed run keeps what it began with.
    is_torch = any(is_torch for is_torch, _ in choices) or saved_optim.get("torch") is True
    reason = next((reason for choice, reason in choices if choice == is_torch), tr("as before"))
    if rule_tables.OPTIMIZERS[cfg.optim.name].takes_adam:
        optimizer = tr("PyTorch's own Adam") if is_torch else tr("DeepSpeed's Adam")
        say("optim.torch = auto: {whose} ({reason}).", whose=optimizer, reason=reason)
    return replace(cfg, optim=replace(cfg.optim, torch=is_torch))


def with_ops(cfg: schema.RunConfig, typed: schema.RunConfig) -> schema.RunConfig:
    """Build and load the DeepSpeed ops that `cfg` needs; return it, with PyTorch's optimizer if one cannot be built and
    `typed`, the config as the user wrote it, has optim.torch=auto; LaunchError otherwise. A collective.
    """
    names = native_ops.needed_ops(cfg)
    if missing := [name for name in names if name not in native_ops.built_ops(names)]:
        folder = native_ops.extensions_dir()
        say("Building DeepSpeed's {ops} in {folder}, once: 1 to 3 minutes.", ops=", ".join(missing), folder=folder)
    reason = next(filter(None, process_group.gather(build.load_ops(names))), "")
    if not reason:
        return cfg
    if typed.optim.torch == schema.AUTO and cfg.zero.offload_optimizer.device is schema.Device.none:
        warn("DeepSpeed's optimizer cannot be built ({reason}): PyTorch's fused one is used.", reason=reason)
        return replace(cfg, optim=replace(cfg.optim, torch=True))
    name, folder = reason.partition(":")[0], native_ops.extensions_dir()
    if folder.exists() and not os.access(folder, os.W_OK):  # PyTorch locks it to load from it, too
        raise LaunchError(
            "DeepSpeed cannot build or load {reason}. {folder} cannot be written to by user {user}: let "
            "TORCH_EXTENSIONS_DIR name a directory of yours, or set {other}.",
            reason=reason,
            folder=folder,
            user=user_name(os.geteuid()),
            other=native_ops.without_ops([name]),
        )
    from toolkit.config import compilers

    raise LaunchError(
        "DeepSpeed cannot build or load {reason}. It needs: {commands}. Or set {other}. The whole output is in "
        "logs/rank_*.log in the run directory.",
        reason=reason,
        commands=compilers.how_to_install(compilers.tools_for([name])),
        other=native_ops.without_ops([name]),
    )
