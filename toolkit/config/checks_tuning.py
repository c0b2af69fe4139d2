"""Rules about `tuning`, and which of its settings each method reads. No torch."""

from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import RunConfig, TuningMethod
from toolkit.errors import ConfigError
from toolkit.messages import tr

_LORA = (TuningMethod.lora, TuningMethod.qlora)
_SHAPE = {
    "rank": _LORA,
    "alpha": _LORA,
    "rslora": _LORA,
    "dora": _LORA,
    "target_modules": _LORA,
    "save_modules": _LORA,
    "num_tokens": (TuningMethod.ptuning_v2, TuningMethod.prompt),
    "projection": (TuningMethod.ptuning_v2,),
    "init_text": (TuningMethod.prompt,),
}
"""What an adapter is, and which methods read it."""
READS = _SHAPE | {
    "adapter": (*_LORA, TuningMethod.ptuning_v2, TuningMethod.prompt),
    "dropout": (*_LORA, TuningMethod.ptuning_v2),
    "last_layers": (TuningMethod.freeze,),
    "patterns": (TuningMethod.freeze,),
}


def unread_tuning(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the settings of `tuning` that its method does not read, why, and the key that decided it."""
    tuning = cfg.tuning
    for name, methods in READS.items():
        if tuning.method not in methods:
            yield f"tuning.{name}", tr("tuning.method is {method}", method=tuning.method.value), "tuning.method"
        elif tuning.adapter and (name in _SHAPE or (name == "dropout" and tuning.method in _LORA)):
            yield f"tuning.{name}", tr("tuning.adapter decides it"), "tuning.adapter"


def check_tuning(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply the rules that need no file.

    Yields:
        What does not hold.
    """
    tuning = loaded.cfg.tuning
    if not 0 <= tuning.dropout < 1:
        yield loaded.error(
            "tuning.dropout",
            tr("{key} = {value} must be from 0 to below 1.", key="tuning.dropout", value=tuning.dropout),
        )
    if not 0 < tuning.alpha < float("inf"):
        yield loaded.error(
            "tuning.alpha", tr("{key} = {value} must be above 0.", key="tuning.alpha", value=tuning.alpha)
        )
    if tuning.method is TuningMethod.freeze and not (tuning.last_layers or tuning.patterns):
        yield loaded.error(
            "tuning.last_layers",
            tr("tuning.method = freeze trains nothing: set tuning.last_layers or tuning.patterns."),
        )
    yield from _check_stage3(loaded)


def _check_stage3(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """What ZeRO-3's pieces of weights do not go together with."""
    tuning = loaded.cfg.tuning
    if loaded.cfg.zero.stage <= tuning.max_stage:
        return
    if tuning.method is TuningMethod.qlora:
        yield loaded.error(
            "tuning.method",
            tr(
                "tuning.method = qlora and zero.stage = 3 do not go together: ZeRO-3 cuts weights into flat pieces of "
                "the training precision and gathers them again, by which numbers of 4 bits lose what they mean. Use "
                "zero=stage2, or tuning=lora."
            ),
        )
    if tuning.dora:
        # peft 0.21, tuners/lora/dora.py: `lora_A.weight.shape[1]` of a weight that is not gathered (IndexError,
        # measured).
        yield loaded.error(
            "tuning.dora",
            tr(
                "tuning.dora = true and zero.stage = 3 do not go together: DoRA measures whole weights, also where "
                "ZeRO-3 has not gathered them. Use zero=stage2, or leave dora out."
            ),
        )
