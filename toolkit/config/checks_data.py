"""Rules about which rows make up a step."""

import math

from toolkit.config.layout import layout_of
from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.config.schema import AUTO
from toolkit.errors import ConfigError
from toolkit.messages import tr


def check_world_sizes(loaded: Loaded) -> None:
    """Refuse a global batch that one of `batch.world_sizes` cannot divide evenly; say which ones all of them can.

    Raises:
        ConfigError: which sizes would do.
    """
    cfg, key = loaded.cfg, "batch.world_sizes"
    sizes, size = cfg.batch.world_sizes, cfg.batch.global_size
    for ranks in sizes:
        if ranks < 1:
            raise fail(loaded, key, tr("{key} = {value} must hold numbers of at least 1.", key=key, value=sizes))
    micro = 1 if cfg.batch.micro_per_gpu == AUTO else int(cfg.batch.micro_per_gpu)
    try:
        unit = micro * math.lcm(*(layout_of(cfg, ranks).data_ranks for ranks in sizes))
    except ConfigError as error:
        raise fail(loaded, key, str(error)) from error
    if not sizes or size % unit == 0:
        return
    below, above = size // unit * unit, -(-size // unit) * unit
    raise fail(
        loaded,
        "batch.global_size",
        tr(
            "batch.global_size = {size} cannot be divided on each of batch.world_sizes = {ranks}: with "
            "batch.micro_per_gpu = {micro} it must be a multiple of {unit}.",
            size=size,
            ranks=sizes,
            micro=cfg.batch.micro_per_gpu,
            unit=unit,
        )
        + " "
        + (tr("Use {below} or {above}.", below=below, above=above) if below else tr("Use {above}.", above=above)),
    )
