"""Resumes a run from a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import secrets
from toolkit.checkpoint import directory, intact, state_files
from toolkit.config import load, mesh, rule_tables, schema
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, say, tr
from toolkit.train import run_dir
from toolkit.train.checkpointer import Checkpointer, counts_in


def resumed_state(cfg: schema.RunConfig, new: directory.RunState, checkpoint: Path, folder: Path) -> directory.RunState:
    """Return a checkpoint's state, with `new`'s config, data and ranks; move rows of repeated steps out of
    metrics.jsonl in `folder`. ConfigError if the run would compute something else than the saved one, CheckpointError
    if its states cannot be loaded in this layout. For rank 0 only.
    """
    state, changed = intact.read_run_state(checkpoint), list[str]()
    if state.is_foreign:
        _check_foreign(checkpoint, cfg.optim.name)
    else:
        from toolkit.train.changes import check_changes

        _check_layout(checkpoint, state, new.config)
        changed = check_changes(
            secrets.hide_all(state.config), new.config, state.data, new.data, cfg.checkpoint.allow_changes
        )
    is_of_run = checkpoint.parent.parent == folder  # `metrics_bytes` of another run's says nothing of this one's file
    run_dir.trim_metrics(folder, state.metrics_bytes if is_of_run else 0)
    say("Resuming after step {step} from {checkpoint}.", step=f"{state.step:,}", checkpoint=checkpoint)
    if changed:
        say(tr("Changed since then:") + "\n" + "\n".join(changed))
    return replace(state, world_size=new.world_size, data=new.data, config=new.config, versions=new.versions)


def _check_foreign(checkpoint: Path, optimizer: schema.OptimizerName) -> None:
    """Print what of another program's checkpoint is not loaded; ConfigError unless the optimizer is an Adam."""
    if not rule_tables.OPTIMIZERS[optimizer].is_adam:
        raise ConfigError(
            "the checkpoint {folder} holds Adam's states, not those of optim.name = {name}. Set optim=adamw, or train "
            "its weights from the start.",
            folder=checkpoint,
            name=optimizer.value,
        )
    say(intact.foreign_text(checkpoint))


def _check_layout(checkpoint: Path, saved: directory.RunState, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the saved config or this run's uses an optimizer whose states cannot be reloaded."""
    if saved.config["zero"].get("zenflow", {}).get("enabled") and "zenflow" not in counts_in(checkpoint):
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
                    "a run with {key} = true cannot be resumed from a checkpoint, nor another run from its "
                    "checkpoints: DeepSpeed keeps Adam's moments in another process. Take the weights: toolkit "
                    "export-model, then model.path=EXPORT under another run.name.",
                    key=f"zero.{section}.{key}",
                )


def resume_from(
    checkpointer: Checkpointer, checkpoint: Path, state: directory.RunState, ranks: Ranks, cfg: schema.RunConfig
) -> None:
    """Load a checkpoint into engine and random generators; `state`: what `resumed_state` returned of it. With another
    number of ranks or another `parallel` the generators are seeded by run.seed, step and data rank. A collective.
    """
    saved = intact.read_run_state(checkpoint)
    checkpointer.load(checkpoint)
    path = checkpoint / state_files.generators_file(ranks.rank)
    if saved.world_size == ranks.world_size and saved.config.get("parallel") == load.to_dict(cfg)["parallel"]:
        try:
            state_files.load_generators(path)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise state_files.unreadable_error(path, error) from error
    else:  # new streams, the same for ranks of one model: dropout differs from that of the saved run
        data_rank = mesh.mesh_of(cfg, ranks.world_size, ranks.rank).data_rank
        state_files.seed_all(cfg.run.seed + 1_000_003 * state.step + data_rank)
