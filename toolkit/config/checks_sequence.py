"""Rules about what serves long rows: `parallel.sequence` and `kernels.mlp_pieces`. No torch."""

from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import Attention, RunConfig, TuningMethod
from toolkit.errors import ConfigError
from toolkit.messages import tr


def check_sequence(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply the rules that need neither model nor ranks.

    Yields:
        What does not hold.
    """
    yield from _mlp_pieces(loaded)
    ranks = loaded.cfg.parallel.sequence
    for reason in _reasons(loaded.cfg) if ranks > 1 else ():
        yield loaded.error(
            "parallel.sequence",
            tr("parallel.sequence = {ranks} cannot be: {reason}.", ranks=ranks, reason=reason),
        )


def _reasons(cfg: RunConfig) -> Iterator[str]:
    """Yield what rows on several ranks do not go together with, and what to do about it."""
    if cfg.parallel.tensor > 1 or cfg.parallel.pipeline > 1:
        yield tr("the ranks of one model share either rows (sequence), matrices (tensor) or layers (pipeline)")
    if cfg.tuning.method in (TuningMethod.ptuning_v2, TuningMethod.prompt):
        yield tr(
            "what tuning={method} learns stands before a row, and would stand before each part of it. Use tuning=lora",
            method=cfg.tuning.method.value,
        )
    if cfg.model.attention is not Attention.auto:
        yield tr(
            "model.attention = {attention} is computed on one rank. Leave it at auto",
            attention=cfg.model.attention.value,
        )
    if cfg.train.activation_checkpointing.partition_activations:
        yield tr("train.activation_checkpointing.partition_activations = true has no effect beside it. Set it to false")
    if cfg.compile.enabled:
        yield tr("what ranks exchange within attention cannot be compiled. Set compile.enabled=false")


def _mlp_pieces(loaded: LoadedConfig) -> Iterator[ConfigError]:
    cfg, key, pieces = loaded.cfg, "kernels.mlp_pieces", loaded.cfg.kernels.mlp_pieces
    reasons = []
    if pieces > 1 and cfg.compile.enabled:
        reasons.append(tr("layers in pieces cannot be compiled. Set compile.enabled=false"))
    if pieces > 1 and cfg.tuning.dropout and cfg.tuning.method in (TuningMethod.lora, TuningMethod.qlora):
        reasons.append(
            tr(
                "each piece is computed twice, and tuning.dropout = {value} would drop something else the second time. "
                "Set it to 0",
                value=cfg.tuning.dropout,
            )
        )
    for reason in reasons:
        yield loaded.error(key, tr("{key} = {value} cannot be: {reason}.", key=key, value=pieces, reason=reason))
