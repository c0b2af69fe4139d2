"""What a run decides before it begins, where its config leaves that open: optimizer, ops, layout and micro-batch."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.config import mesh, native_ops, rule_tables, schema
from toolkit.distributed import process_group
from toolkit.launch.environment import Ranks
from toolkit.messages import LaunchError, joined, say, tr, user_name, warn
from toolkit.train import run_dir


def settle_config(
    cfg: schema.RunConfig, vocab_size: int | None, ranks: Ranks, source: run_dir.RunSource
) -> schema.RunConfig:
    """Return the config with its `auto` values decided: the optimizer, then the layout (`plan.auto`), else the
    micro-batch: it stays `auto`, for the built engine to search, unless `source` has a checkpoint whose micro-batch
    fits. A collective. `vocab_size`: of the task, needed with `plan.auto`.
    """
    typed = cfg
    cfg = build_ops(agree_on_optimizer(typed, source), typed)
    if not cfg.plan.auto and cfg.batch.micro_per_gpu != schema.AUTO:
        return cfg
    from toolkit.train import auto_layout

    if cfg.plan.auto:  # a layout has a micro-batch too
        assert vocab_size is not None
        device = torch.device(get_accelerator().current_device_name())
        return auto_layout.choose_layout(cfg, vocab_size, ranks, device, source)
    rows = process_group.on_rank0(lambda: auto_layout.micro_batch_before(cfg, ranks, source))
    return mesh.with_micro_batch(cfg, rows) if rows else cfg


def agree_on_optimizer(cfg: schema.RunConfig, source: run_dir.RunSource) -> schema.RunConfig:
    """Return the config with `optim.torch` decided, the same on all ranks and in every start of a run. A collective."""
    if cfg.optim.torch != schema.AUTO:
        return cfg
    rank_cfg, reason = native_ops.resolve_optimizer(cfg)
    choices = process_group.gather((bool(rank_cfg.optim.torch), reason))  # what each rank would choose, and why
    saved_optim = process_group.on_rank0(lambda: _saved_optim(source.checkpoint))
    # A rank without a compiler decides for all, and a resumed run keeps what it began with.
    is_torch = any(choice for choice, _ in choices) or saved_optim.get("torch") is True
    reason = next((reason for choice, reason in choices if choice == is_torch), tr("as before"))
    if rule_tables.OPTIMIZERS[cfg.optim.name].takes_adam:
        optimizer = tr("PyTorch's own Adam") if is_torch else tr("DeepSpeed's Adam")
        say("optim.torch = auto: {whose} ({reason}).", whose=optimizer, reason=reason)
    return replace(cfg, optim=replace(cfg.optim, torch=is_torch))


def _saved_optim(checkpoint: Path | None) -> dict[str, Any]:
    """Return the section `optim` of the run that saved a checkpoint, {} without one."""
    if checkpoint is None:
        return {}
    from toolkit.checkpoint import intact

    return dict(intact.read_run_state(checkpoint).config.get("optim", {}))


def build_ops(cfg: schema.RunConfig, typed: schema.RunConfig) -> schema.RunConfig:
    """Build and load the DeepSpeed ops that `cfg` needs; return it, with PyTorch's optimizer if one cannot be built and
    `typed`, the config as the user wrote it, has optim.torch=auto; LaunchError otherwise. A collective.
    """
    names = native_ops.needed_ops(cfg)
    if not names:
        return cfg
    if missing := [name for name in names if name not in native_ops.built_ops(names)]:
        folder = native_ops.extensions_dir()
        say("Building DeepSpeed's {ops} in {folder}, once: 1 to 3 minutes.", ops=", ".join(missing), folder=folder)
    from toolkit.engine import ops

    reason = next(filter(None, process_group.gather(ops.load_ops(names))), "")
    if not reason:
        return cfg
    if typed.optim.torch == schema.AUTO and cfg.zero.offload_optimizer.device is schema.Device.none:
        warn("DeepSpeed's optimizer cannot be built ({reason}): optim.torch=true is used in its place.", reason=reason)
        return replace(cfg, optim=replace(cfg.optim, torch=True))
    # `reason` begins with the op's name and a colon.
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
    needs, lacking = "", native_ops.lacking_tools([name])
    if lacking:
        from toolkit.config import compilers

        needs = tr("It needs: {commands}.", commands=compilers.how_to_install(lacking))
    raise LaunchError(
        joined(
            tr("DeepSpeed cannot build or load {reason}.", reason=reason),
            needs,
            tr(
                "Do without it: {other}. The whole output is in logs/rank_*.log in the run directory.",
                other=native_ops.without_ops([name]),
            ),
        )
    )
