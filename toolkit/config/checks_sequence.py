"""Rules about what serves long rows: `parallel.sequence` and `kernels.mlp_pieces`. No torch."""

from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.config.schema import Attention, TuningMethod
from toolkit.messages import tr


def check_sequence(loaded: Loaded) -> None:
    """Apply the rules that need neither model nor ranks.

    Raises:
        ConfigError: the first that does not hold.
    """
    _mlp_pieces(loaded)
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
    elif cfg.train.activation_checkpointing.partition_activations:
        reason = tr(
            "train.activation_checkpointing.partition_activations = true has no effect beside it. Set it to false"
        )
    elif cfg.compile.enabled:
        reason = tr("what ranks exchange within attention cannot be compiled. Set compile.enabled=false")
    if reason:
        raise fail(
            loaded,
            "parallel.sequence",
            tr("parallel.sequence = {ranks} cannot be: {reason}.", ranks=ranks, reason=reason),
        )


def _mlp_pieces(loaded: Loaded) -> None:
    cfg, pieces = loaded.cfg, loaded.cfg.kernels.mlp_pieces
    reason = ""
    if pieces > 1 and cfg.compile.enabled:
        reason = tr("layers in pieces cannot be compiled. Set compile.enabled=false")
    elif pieces > 1 and cfg.tuning.dropout and cfg.tuning.method in (TuningMethod.lora, TuningMethod.qlora):
        reason = tr(
            "each piece is computed twice, and tuning.dropout = {value} would drop something else the second time. "
            "Set it to 0",
            value=cfg.tuning.dropout,
        )
    if reason:
        key = "kernels.mlp_pieces"
        raise fail(loaded, key, tr("{key} = {value} cannot be: {reason}.", key=key, value=pieces, reason=reason))
