"""Rules for models that bring Python code of their own."""

import re
from collections.abc import Iterator

from toolkit.config.hub import is_hub_name
from toolkit.config.load import LoadedConfig
from toolkit.config.schema import Init
from toolkit.errors import ConfigError
from toolkit.messages import tr


def check_code(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply every rule.

    Yields:
        What does not hold.
    """
    model, keep = loaded.cfg.model, loaded.cfg.checkpoint.keep_weights
    if not model.trust_remote_code or model.init is Init.random:
        return
    # A mistyped folder must not run a stranger's code, nor a branch what is pushed to it after one has read it.
    if is_hub_name(model.path) and not re.fullmatch("[0-9a-f]{40}", model.revision):
        yield loaded.error(
            "model.revision",
            tr(
                "model.trust_remote_code = true and model.path = {path}, which is no folder here but a name on Hugging "
                "Face, needs the commit that you have read: model.revision=COMMIT, all 40 digits.",
                path=model.path,
            ),
        )
    if keep:
        yield loaded.error(
            "checkpoint.keep_weights",
            tr(
                "checkpoint.keep_weights = {value} and model.trust_remote_code = true do not go together: exports of "
                "old checkpoints run no code of a model's own. Set it to 0.",
                value=keep,
            ),
        )
