"""Which models that transformers calls causal cannot learn to write, and why: said before their weights are read."""

from pathlib import Path

from transformers import PreTrainedModel

from toolkit.config.schema import TaskKind
from toolkit.messages import ModelError, read_table, translated

_SEES_ALL = (
    ("is_decoder", (False,), "is_decoder", "true"),
    ("causal", (False,), "causal", "true"),
    ("use_bidirectional_attention", (True, "all"), "is_causal", "false"),
)
"""Key of a config; the values with which tokens see those after them; what is False in a model's parts if its class
heeds that key; the value to set. So BERT and its kind, XLM, and the Gemma of embeddings."""


def check_trains(model: PreTrainedModel, folder: Path, task: TaskKind) -> None:
    """Reject a model that computes otherwise than rows of samples are trained.

    Args:
        model: may be on the meta device.
        folder: where it came from, for the message.
        task: where tokens are predicted, none may see those after it.

    Raises:
        ModelError: naming the key of config.json, its value, and what to do.
    """
    kind, config = model.config.model_type, model.config.get_text_config()
    if reason := read_table("models/refused.yaml").get(kind):
        raise ModelError(
            "{folder}/config.json has model_type = {kind}, which cannot be trained: {reason}. Use another model.",
            folder=folder,
            kind=kind,
            reason=translated(reason),
        )
    if task not in (TaskKind.language, TaskKind.distill):
        return
    for key, values, attribute, right in _SEES_ALL:
        value = getattr(config, key, None)
        if value in values and any(vars(part).get(attribute) is False for part in model.modules()):
            raise ModelError(
                "{folder}/config.json has {key} = {value}: each token would see those after it, which it is to "
                'predict. Set "{key}": {right} there.',
                folder=folder,
                key=key,
                value=str(value).lower(),
                right=right,
            )
