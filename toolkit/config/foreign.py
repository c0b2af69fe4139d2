"""Other programs' names of our keys: the "did you mean" of what people type from habit."""

from collections.abc import Callable
from functools import cache

from toolkit.translate.key import keys_of

_PROGRAMS = ("chatglm", "hf", "factory")
_OTHERS = {
    # DeepSpeed's JSON; a test compares them with the tables of engine.ds_config.
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_per_gpu",
    "gradient_clipping": "train.gradient_clipping",
    "zero_optimization": "zero",
    "scheduler": "schedule",
    "optimizer": "optim",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.betas": "optim.betas",
    "optimizer.params.eps": "optim.eps",
    "activation_checkpointing": "train.activation_checkpointing",
    "tensorboard": "track.tensorboard",
    "wandb": "track.wandb",
    "wall_clock_breakdown": "profile.wall_clock_breakdown",
    "flops_profiler": "profile.flops",
    "comms_logger": "profile.comms",
    # What the Trainer's scripts, peft, TRL, ms-swift and FastChat call it where the tables have no counterpart.
    "output_dir": "run.dir",
    "run_name": "run.name",
    "resume_from_checkpoint": "resume",
    "batch_size": "batch.micro_per_gpu, batch.global_size",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "seq_length": "data.max_length",
    "model_max_length": "data.max_length",
    "model_name": "model.path",
    "data_path": "data.sources",
    "dataset_path": "data.sources",
    "datasets": "data.sources",
    "val_dataset": "data.validation",
    "num_epochs": "train.epochs",
    "grad_clip": "train.gradient_clipping",
    "lora_r": "tuning.rank",
    "target_modules": "tuning.target_modules",
    "train_type": "tuning.method",
    "tuner_type": "tuning.method",
    "torch_dtype": "precision.dtype",
    "zero_stage": "zero.stage",
}


@cache
def names() -> dict[str, tuple[str, ...]]:
    """Return another program's name -> our keys for it."""
    found = {name: key.to for program in _PROGRAMS for name, key in keys_of(program).items() if key.to}
    return {name: tuple(keys.split(", ")) for name, keys in (found | _OTHERS).items()}


def our_keys(path: str, is_key: Callable[[str], bool]) -> tuple[str, ...]:
    """Return our keys for another program's path: for the whole of it, within its section, or by its last part.

    Args:
        path: dotted.
        is_key: whether the schema has a key.
    """
    section, _, rest = path.partition(".")
    inside = tuple(f"{ours}.{rest}" for ours in names().get(section, ()) if rest and is_key(f"{ours}.{rest}"))
    return names().get(path) or inside or names().get(path.rpartition(".")[2], ())


def is_known(name: str) -> bool:
    """Return whether another program has an argument of this name."""
    return any(name in keys_of(program) for program in _PROGRAMS)
