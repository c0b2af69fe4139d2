"""What cannot be together with pipeline stages, and why."""

from collections.abc import Iterator, Sequence

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import AUTO, Device, Dtype, RunConfig, TuningMethod
from toolkit.errors import ConfigError
from toolkit.messages import tr


def check_pipeline(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Refuse what a run whose layers are divided into stages cannot do.

    Yields:
        What does not hold.
    """
    stages = loaded.cfg.parallel.pipeline
    if stages == 1:
        return
    for key, value, reason in _impossible(loaded.cfg):
        yield loaded.error(
            key,
            tr(
                "{key} = {value} cannot be together with parallel.pipeline = {stages}: {reason}",
                key=key,
                value=value,
                stages=stages,
                reason=reason,
            ),
        )


def _impossible(cfg: RunConfig) -> list[tuple[str, object, str]]:
    """Return key, value and reason of all that is wrong."""
    zero, dtype = cfg.zero, cfg.precision.dtype
    answers = tr("the layers that an answer needs are on several ranks. Ask the model after the run: toolkit generate.")
    found: list[tuple[bool, str, object, str]] = [
        (
            zero.stage > 1,
            "zero.stage",
            zero.stage,
            tr("DeepSpeed's pipelines know stages 0 and 1. Use zero=stage1, or zero=stage3 without parallel=pipeline."),
        ),
        (
            zero.offload_optimizer.device is not Device.none,
            "zero.offload_optimizer.device",
            zero.offload_optimizer.device.value,
            tr("it was not tried. Use none, or zero=stage2_offload without parallel=pipeline."),
        ),
        (
            dtype is Dtype.fp16,
            "precision.dtype",
            dtype.value,
            tr("an overflow on one stage would have to be known to all. Use precision=bf16 or precision=fp32."),
        ),
        (
            dtype is Dtype.bf16 and zero.stage == 0,
            "zero.stage",
            zero.stage,
            tr("in bf16 gradients would be added up in bf16. Use zero=stage1, which adds them up in fp32."),
        ),
        (
            cfg.tuning.method is not TuningMethod.full,
            "tuning.method",
            cfg.tuning.method.value,
            tr("stages train all parameters of their layers. Use tuning=full, or leave parallel=pipeline out."),
        ),
        (bool(cfg.evaluate.metrics), "evaluate.metrics", _listed(cfg.evaluate.metrics), answers),
        (bool(cfg.evaluate.prompts), "evaluate.prompts", _listed(cfg.evaluate.prompts), answers),
    ]
    return [(key, value, reason) for is_wrong, key, value, reason in [*found, *_untried(cfg)] if is_wrong]


def _untried(cfg: RunConfig) -> list[tuple[bool, str, object, str]]:
    """Return what might be possible, but nobody has seen it."""
    parallel, checkpointing = cfg.parallel, cfg.train.activation_checkpointing
    number = tr("how much of a model a rank holds depends on its stage. Give a number.")
    one = tr("it was not tried. Set it to 1.")
    off = tr("it was not tried. Set it to false.")
    return [
        (parallel.tensor > 1, "parallel.tensor", parallel.tensor, one),
        (parallel.sequence > 1, "parallel.sequence", parallel.sequence, one),
        (cfg.batch.micro_per_gpu == AUTO, "batch.micro_per_gpu", AUTO, number),
        (cfg.plan.auto, "plan.auto", "true", off),
        (cfg.kernels.mlp_pieces > 1, "kernels.mlp_pieces", cfg.kernels.mlp_pieces, one),
        (cfg.compile.enabled, "compile.enabled", "true", off),
        (cfg.profile.flops.enabled, "profile.flops.enabled", "true", off),
        (
            checkpointing.enabled and checkpointing.partition_activations,
            "train.activation_checkpointing.partition_activations",
            "true",
            off,
        ),
    ]


def _listed(values: Sequence[object]) -> str:
    return "[" + ", ".join(str(getattr(value, "value", value)) for value in values) + "]"
