"""Rules about `tuning`, and which of its settings each method reads. No torch."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.config.schema import RunConfig, TuningConfig, TuningMethod
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


def check_tuning(loaded: Loaded) -> Iterator[ConfigError]:
    """Apply the rules that need no file.

    Yields:
        What does not hold.
    """
    tuning = loaded.cfg.tuning
    if not 0 <= tuning.dropout < 1:
        yield fail(
            loaded,
            "tuning.dropout",
            tr("{key} = {value} must be from 0 to below 1.", key="tuning.dropout", value=tuning.dropout),
        )
    if not 0 < tuning.alpha < float("inf"):
        yield fail(
            loaded, "tuning.alpha", tr("{key} = {value} must be above 0.", key="tuning.alpha", value=tuning.alpha)
        )
    if tuning.method is TuningMethod.freeze and not (tuning.last_layers or tuning.patterns):
        yield fail(
            loaded,
            "tuning.last_layers",
            tr("tuning.method = freeze trains nothing: set tuning.last_layers or tuning.patterns."),
        )
    yield from _check_stage3(loaded)


def highest_stage(tuning: TuningConfig) -> int:
    """Return the highest ZeRO stage that goes together with a way of tuning; `check_tuning` says why."""
    return 2 if tuning.method is TuningMethod.qlora or tuning.dora else 3


def _check_stage3(loaded: Loaded) -> Iterator[ConfigError]:
    """What ZeRO-3's pieces of weights do not go together with."""
    tuning = loaded.cfg.tuning
    if loaded.cfg.zero.stage <= highest_stage(tuning):
        return
    if tuning.method is TuningMethod.qlora:
        yield fail(
            loaded,
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
        yield fail(
            loaded,
            "tuning.dora",
            tr(
                "tuning.dora = true and zero.stage = 3 do not go together: DoRA measures whole weights, also where "
                "ZeRO-3 has not gathered them. Use zero=stage2, or leave dora out."
            ),
        )


def check_tuning_here(loaded: Loaded) -> Iterator[ConfigError]:
    """Apply the rules about this machine.

    Yields:
        What does not hold.
    """
    tuning = loaded.cfg.tuning
    if tuning.adapter and not Path(tuning.adapter).is_dir():
        yield fail(
            loaded,
            "tuning.adapter",
            tr("tuning.adapter = {path} is not a folder here.", path=tuning.adapter),
        )
    if tuning.method is not TuningMethod.qlora:
        return
    missing = ""
    if importlib.util.find_spec("bitsandbytes") is None:
        missing = tr("the package bitsandbytes (pip install bitsandbytes)")
    elif shutil.which("nvidia-smi") is None:
        missing = tr("an NVIDIA GPU")
    if missing:
        yield fail(
            loaded,
            "tuning.method",
            tr("tuning.method = qlora needs {missing}, which is not here. Use tuning=lora.", missing=missing),
        )
