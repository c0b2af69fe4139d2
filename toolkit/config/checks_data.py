"""Rules about which rows make up a step."""

import math
from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.mesh import mesh_of
from toolkit.config.schema import AUTO, SourceConfig, TuningMethod
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr


def _curriculum(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """The longest sample has to grow."""
    curriculum, most = loaded.cfg.data.curriculum, loaded.cfg.data.max_length
    if curriculum.steps and curriculum.start_length >= most:
        key = "data.curriculum.start_length"
        yield loaded.error(
            key,
            tr(
                "{key} = {start} must be less than data.max_length = {most}.",
                key=key,
                start=curriculum.start_length,
                most=most,
            ),
        )


def _weights(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Weights that change: points in their order, something to mix, and always a source to take rows from."""
    sources = loaded.cfg.data.sources
    if not any(source.weights for source in sources):
        return
    key = "data.sources"
    if len(sources) < 2:
        yield loaded.error(key, tr("weights of the only source have no effect: there is nothing to mix it with."))
        return
    if loaded.cfg.data.curriculum.steps:
        yield loaded.error(
            "data.curriculum.steps",
            tr(
                "data.curriculum and weights of a source that change both decide which rows come when: keep one of "
                "them."
            ),
        )
    wrong = [error for number, source in enumerate(sources) for error in _wrong_weights(loaded, number, source)]
    yield from wrong
    times = sorted({0.0, 1.0, *(point.at for source in sources for point in source.weights)})
    empty = [] if wrong else [time for time in times if not any(source.weight_at(time) for source in sources)]
    if empty:
        places = ", ".join(map(str, empty))
        yield loaded.error(key, tr("no source has a weight above 0 at {place} of the run.", place=places))


def _wrong_weights(loaded: LoadedConfig, number: int, source: SourceConfig) -> Iterator[ConfigError]:
    key, places = "data.sources", [point.at for point in source.weights]
    if source.weights and source.weight != 1:
        yield loaded.error(
            key,
            tr("data.sources[{number}]: weight and weights are both given: keep one of them.", number=number),
        )
    if any(not 0 <= place <= 1 for place in places) or places != sorted(set(places)):
        yield loaded.error(
            key,
            tr(
                "data.sources[{number}].weights: the points {places} must rise from 0, the beginning of the run, "
                "to at most 1, its end.",
                number=number,
                places=places,
            ),
        )
    if any(not 0 <= weight < math.inf for weight in [source.weight, *(point.weight for point in source.weights)]):
        yield loaded.error(key, tr("data.sources[{number}]: a weight must be a number of at least 0.", number=number))


def _random_ltd(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Tokens can be dropped where layers are transformers' own, whole, and called as they are."""
    cfg, key = loaded.cfg, "train.random_ltd.steps"
    ltd, parallel = cfg.train.random_ltd, cfg.parallel
    if not ltd.steps:
        return
    if not 0 < ltd.start_share < 1:
        yield loaded.error(
            "train.random_ltd.start_share",
            tr(
                "{key} = {value} must be above 0 and below 1.",
                key="train.random_ltd.start_share",
                value=ltd.start_share,
            ),
        )
    tuning = f"tuning.method = {cfg.tuning.method.value}"
    reasons = {
        tuning: cfg.tuning.method not in (TuningMethod.full, TuningMethod.freeze),
        f"parallel.tensor = {parallel.tensor}": parallel.tensor > 1,
        f"parallel.sequence = {parallel.sequence}": parallel.sequence > 1,
        f"parallel.pipeline = {parallel.pipeline}": parallel.pipeline > 1,
        "compile.enabled = true": cfg.compile.enabled,
    }
    if any(reasons.values()):
        yield loaded.error(
            key,
            tr(
                "train.random_ltd cannot be used with {setting}: it works where all or some layers are trained "
                "(tuning=full or freeze), each whole on its rank and not compiled. Set train.random_ltd.steps=0.",
                setting=", ".join(setting for setting, is_so in reasons.items() if is_so),
            ),
        )


def _neftune(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Noise is drawn by each rank for its own rows: ranks that share rows would disagree about it."""
    parallel = loaded.cfg.parallel
    if not loaded.cfg.train.neftune_alpha:
        return
    for name in ("tensor", "sequence", "pipeline"):
        if getattr(parallel, name) > 1:
            yield loaded.error(
                "train.neftune_alpha",
                tr(
                    "train.neftune_alpha cannot be used with parallel.{name} = {ranks}: each rank draws its own noise, "
                    "and these ranks share rows. Set train.neftune_alpha=0.",
                    name=name,
                    ranks=getattr(parallel, name),
                ),
            )


def _world_sizes(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Reject a global batch that one of `batch.world_sizes` cannot divide evenly; say which ones all of them can."""
    cfg, key = loaded.cfg, "batch.world_sizes"
    sizes, size = cfg.batch.world_sizes, cfg.batch.global_size
    if any(ranks < 1 for ranks in sizes):
        yield loaded.error(key, tr("{key} = {value} must hold numbers of at least 1.", key=key, value=sizes))
        return
    micro = 1 if cfg.batch.micro_per_gpu == AUTO else int(cfg.batch.micro_per_gpu)
    try:
        unit = micro * math.lcm(*(mesh_of(cfg, ranks).data_ranks for ranks in sizes))
    except ConfigError as error:
        yield loaded.error(key, str(error))
        return
    if cfg.parallel.tensor > 1 and len(set(sizes)) > 1:
        yield loaded.error(
            key,
            tr(
                "{key} = {value}: with parallel.tensor = {tensor} a run goes on on as many ranks as it was saved by "
                "only. Take it out.",
                key=key,
                value=sizes,
                tensor=cfg.parallel.tensor,
            ),
        )
    if not sizes or size % unit == 0:
        return
    below, above = size // unit * unit, -(-size // unit) * unit
    yield loaded.error(
        "batch.global_size",
        joined(
            tr(
                "batch.global_size = {size} cannot be divided on each of batch.world_sizes = {ranks}: with "
                "batch.micro_per_gpu = {micro} it must be a multiple of {unit}.",
                size=size,
                ranks=sizes,
                micro=cfg.batch.micro_per_gpu,
                unit=unit,
            ),
            tr("Use {below} or {above}.", below=below, above=above) if below else tr("Use {above}.", above=above),
        ),
    )


DATA_RULES = (_world_sizes, _curriculum, _weights, _random_ltd, _neftune)
"""Rules about which rows make up a step."""
