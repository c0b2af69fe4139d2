"""The learning rate of a run that names none: it follows the fine-tuning method."""

from typing import TYPE_CHECKING

from toolkit.config.schema import TuningMethod
from toolkit.messages import tr

if TYPE_CHECKING:
    from toolkit.config.load import Loaded

LEARNING_RATES = {
    TuningMethod.full: 2e-5,
    TuningMethod.freeze: 2e-5,
    TuningMethod.lora: 2e-4,
    TuningMethod.qlora: 2e-4,
    TuningMethod.ptuning_v2: 5e-3,  # the original's 2e-2 diverges in float16
    TuningMethod.prompt: 3e-2,  # as in peft's own examples
}
"""Peak rates with AdamW. Few new parameters that begin at 0 or at random need larger ones than trained weights."""


def follow_method(loaded: "Loaded") -> None:
    """Set `optim.lr` by `tuning.method` where nothing names it."""
    method = loaded.cfg.tuning.method
    if "optim.lr" in loaded.where or loaded.cfg.optim.lr == LEARNING_RATES[method]:
        return
    loaded.cfg.optim.lr = LEARNING_RATES[method]
    loaded.where["optim.lr"] = tr("default of tuning.method = {method}", method=method.value)
