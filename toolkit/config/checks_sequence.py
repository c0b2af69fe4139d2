"""Rules about `parallel.sequence`. No torch."""

from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.config.schema import Attention, TuningMethod
from toolkit.messages import tr


def check_sequence(loaded: Loaded) -> None:
    """Apply the rules that need neither model nor ranks.

    Raises:
        ConfigError: the first that does not hold.
    """
    cfg, ranks = loaded.cfg, loaded.cfg.parallel.sequence
    if ranks == 1:
        return
    reason = ""
    if cfg.parallel.tensor > 1 or cfg.parallel.pipeline > 1:
        reason = tr("the ranks of one model share either rows (sequence), matrices (tensor) or layers (pipeline)")
    elif cfg.tuning.method in (TuningMethod.ptuning_v2, TuningMethod.prompt):
        reason = tr(
            "what tuning={method} learns stands before a row, and would stand before each part of it. Use tuning=lora",
            method=cfg.tuning.method.value,
        )
    elif cfg.model.attention is not Attention.auto:
        reason = tr(
            "model.attention = {attention} is computed on one rank. Leave it at auto",
            attention=cfg.model.attention.value,
        )
    elif cfg.compile.enabled:
        reason = tr("what ranks exchange within attention cannot be compiled. Set compile.enabled=false")
    if reason:
        raise fail(
            loaded,
            "parallel.sequence",
            tr("parallel.sequence = {ranks} cannot be: {reason}.", ranks=ranks, reason=reason),
        )
