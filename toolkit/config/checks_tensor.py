"""Rules about `parallel.tensor`: what layers that are split over ranks do not go together with."""

from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.mesh import check_split
from toolkit.config.schema import Init, OptimizerName, RunConfig, TuningMethod
from toolkit.errors import ConfigError
from toolkit.messages import tr


def check_tensor(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply them.

    Yields:
        What does not hold.
    """
    cfg, key = loaded.cfg, "parallel.tensor"
    size = cfg.parallel.tensor
    if size == 1:
        return
    for reason in _reasons(cfg):
        yield loaded.error(key, tr("{key} = {value} cannot be: {reason}.", key=key, value=size, reason=reason))
    if cfg.model.init is Init.random:
        shape = cfg.model.shape
        try:
            check_split(
                {"heads": shape.num_heads, "key_heads": shape.num_kv_heads, "inner": shape.intermediate_size}, size
            )
        except ConfigError as error:
            yield loaded.error(key, str(error))


def _reasons(cfg: RunConfig) -> Iterator[str]:
    if cfg.zero.stage == 3:
        yield tr(
            "zero.stage = 3 is not supported beside it. Use zero=stage1 or zero=stage2, or parallel.tensor=1",
        )
    if cfg.zero.zenflow.enabled:
        yield tr("zero.zenflow.enabled = true is not supported beside it. Set it to false")
    if cfg.tuning.method not in (TuningMethod.full, TuningMethod.freeze):
        yield tr(
            "tuning.method = {method} adds parameters that are not split with the layers that they belong to. Use "
            "tuning=full or tuning=freeze, or parallel.tensor=1",
            method=cfg.tuning.method.value,
        )
    if cfg.optim.name is OptimizerName.adafactor:
        yield tr(
            "optim.name = adafactor keeps a row and a column for each whole matrix, and ranks have parts. Use "
            "optim=adamw"
        )
    if cfg.train.activation_checkpointing.partition_activations:
        yield tr("train.activation_checkpointing.partition_activations = true has no effect beside it. Set it to false")
    if cfg.compile.enabled:
        yield tr("compile.enabled = true is not supported beside it. Set it to false")
    if cfg.plan.auto:
        yield tr(
            "plan.auto = true looks for ZeRO's stages, also those that do not go together with it. Set it to false"
        )
