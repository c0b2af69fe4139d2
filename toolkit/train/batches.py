"""This rank's micro-batches of a config."""

from collections.abc import Iterable, Iterator

import torch

from toolkit.config.schema import RunConfig
from toolkit.data.loader import build_loader
from toolkit.data.sampler import GlobalBatchSampler, sequential
from toolkit.launch.environment import Ranks
from toolkit.train.prepared import Prepared

Batch = dict[str, torch.Tensor]


def training_batches(cfg: RunConfig, prepared: Prepared, ranks: Ranks, total_steps: int) -> Iterator[Batch]:
    """Return the training micro-batches, accumulation x total_steps of them.

    Args:
        cfg: checked config.
        prepared: tokenizer and stores.
        ranks: who this process is.
        total_steps: optimizer steps.
    """
    sampler = GlobalBatchSampler(
        num_samples=len(prepared.train),
        global_size=cfg.batch.global_size,
        micro_per_gpu=cfg.batch.micro_per_gpu,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=cfg.run.seed,
        end_step=total_steps,
    )
    return iter(
        build_loader(
            prepared.train,
            sampler,
            prepared.pad_id,
            seed=cfg.run.seed,
            num_workers=cfg.data.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
    )


def evaluation_batches(cfg: RunConfig, prepared: Prepared, ranks: Ranks) -> Iterable[Batch]:
    """Return the validation micro-batches of this rank: each sample once over all ranks."""
    assert prepared.validation is not None
    shares = sequential(len(prepared.validation), cfg.batch.micro_per_gpu, ranks.rank, ranks.world_size)
    return build_loader(prepared.validation, shares, prepared.pad_id, seed=cfg.run.seed)
