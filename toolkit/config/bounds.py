"""Ranges of single numbers, key by key."""

import math
from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import get_value
from toolkit.errors import ConfigError
from toolkit.messages import tr

LEAST_LENGTH = 8
# What Adam keeps per parameter on NVMe: parameter, gradient, two moments; with fewer DeepSpeed runs out of buffers.
ADAM_STATES = 4
LEAST = {
    "batch.global_size": 1,
    "batch.micro_per_gpu": 1,
    "parallel.tensor": 1,
    "parallel.sequence": 1,
    "parallel.pipeline": 1,
    "data.max_length": LEAST_LENGTH,
    "data.max_samples": 0,
    "data.num_workers": 0,
    "data.packing_window": 0,
    "data.curriculum.steps": 0,
    "data.curriculum.start_length": 1,
    "data.curriculum.levels": 1,
    "prepare.num_workers": 0,
    "kernels.mlp_pieces": 1,
    "tuning.rank": 1,
    "tuning.num_tokens": 1,
    "tuning.last_layers": 0,
    "train.epochs": 1,
    "train.max_steps": 0,
    "train.gradient_clipping": 0,
    "train.neftune_alpha": 0,
    "train.log_every": 1,
    "train.max_skipped_steps": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "checkpoint.keep_weights": -1,
    "checkpoint.max_gib": 0,
    "report.every": 0,
    "evaluate.every": 0,
    "evaluate.max_samples": 0,
    "evaluate.max_answers": 0,
    "evaluate.batch_size": 1,
    "evaluate.max_new_tokens": 1,
    "evaluate.temperature": 0,
    "evaluate.top_k": 0,
    "evaluate.seed": 0,
    "schedule.warmup_steps": 0,
    "schedule.power": 0,
    "schedule.timescale": 0,
    "schedule.decay_steps": 0,
    "optim.weight_decay": 0,
    "optim.adam_lr": 0,
    "zero.reduce_bucket_size": 1,
    "launch.num_nodes": 0,
    "distributed.timeout_s": 1,
    "precision.loss_scale": 0,
    "precision.initial_scale_power": 0,
    "precision.min_loss_scale": 1,
    "precision.loss_scale_window": 1,
    "precision.hysteresis": 1,
    "run.seed": 0,
    "run.max_restarts": 0,
    "model.router_loss": -1,
    "model.shape.num_layers": 1,
    "model.shape.vocab_size": 1,
    "model.shape.hidden_size": 1,
    "model.shape.intermediate_size": 1,
    "model.shape.num_heads": 1,
    "model.shape.num_kv_heads": 1,
    "model.shape.max_positions": LEAST_LENGTH,
    "optim.eps": 0,
    "zero.allgather_bucket_size": 1,
    "zero.sub_group_size": 1,
    "zero.stage3_prefetch_bucket_size": 0,
    "zero.stage3_param_persistence_threshold": 0,
    "zero.stage3_max_live_parameters": 0,
    "zero.stage3_max_reuse_distance": 0,
    "zero.zero_hpz_partition_size": 1,
    "zero.zenflow.select_interval": 1,
    "zero.zenflow.update_interval": 1,
    "zero.zenflow.full_warm_up_rounds": 0,
    "zero.offload_optimizer.buffer_count": ADAM_STATES,
    "zero.offload_param.buffer_count": 1,
    "zero.offload_param.buffer_size": 1,
    "zero.offload_param.max_in_cpu": 0,
    "zero.aio.block_size": 1,
    "zero.aio.queue_depth": 1,
    "zero.aio.intra_op_parallelism": 1,
    "train.random_ltd.steps": 0,
    "train.random_ltd.first_layers": 0,
    "train.random_ltd.last_layers": 0,
    "train.activation_checkpointing.number_checkpoints": 0,
    "plan.max_gpu_gib": 0,
    "track.patience_s": 0,
    "profile.flops.profile_step": 1,
    "profile.flops.module_depth": -1,
    "profile.flops.top_modules": 1,
}


def check_numbers(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield each value out of its range."""
    for key, bound in LEAST.items():
        value = get_value(loaded.cfg, key)
        if isinstance(value, (int, float)) and not bound <= value < math.inf:
            yield loaded.error(key, tr("{key} = {value} must be at least {least}.", key=key, value=value, least=bound))
    cfg = loaded.cfg
    if not 0 < cfg.optim.lr < float("inf"):
        yield loaded.error("optim.lr", tr("optim.lr = {value} must be greater than 0.", value=cfg.optim.lr))
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        yield loaded.error(
            "optim.betas",
            tr("optim.betas = {value} must be two numbers from 0 to below 1.", value=cfg.optim.betas),
        )
    for key in (
        "data.validation_fraction",
        "data.max_bad_fraction",
        "schedule.warmup_ratio",
        "schedule.min_lr_ratio",
        "schedule.decay_ratio",
        "schedule.warmup_min_ratio",
    ):
        value = get_value(cfg, key)
        assert isinstance(value, float)
        if not 0 <= value < 1 and (key, value) != ("schedule.warmup_min_ratio", -1):
            yield loaded.error(key, tr("{key} = {value} must be from 0 to below 1.", key=key, value=value))
    if not 0 < cfg.evaluate.top_p <= 1:
        key, number = "evaluate.top_p", cfg.evaluate.top_p
        yield loaded.error(key, tr("{key} = {value} must be above 0 and at most 1.", key=key, value=number))
    if not 0 <= cfg.zero.offload_optimizer.ratio <= 1:
        key, value = "zero.offload_optimizer.ratio", cfg.zero.offload_optimizer.ratio
        yield loaded.error(key, tr("{key} = {value} must be from 0 to 1.", key=key, value=value))
