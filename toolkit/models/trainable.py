"""Which models cannot be trained, checked before their weights are read; and which parts of a model are not trained."""

import re
from pathlib import Path

from transformers import PreTrainedModel

from toolkit.config.schema import TaskKind
from toolkit.messages import ModelError, read_table, say, translated
from toolkit.models.structure import untrained_prefixes

_SEES_ALL = (
    ("is_decoder", (False,), "is_decoder", "true"),
    ("causal", (False,), "causal", "true"),
    ("use_bidirectional_attention", (True, "all"), "is_causal", "false"),
)
"""Key of a config (of BERT and its kind, XLM, EmbeddingGemma); its values for bidirectional attention; the attribute
that is False in modules of classes that read the key; the value to set.
"""


def check_trains(model: PreTrainedModel, folder: Path, task: TaskKind) -> None:
    """Raise ModelError for a model that cannot be trained.

    Args:
        model: may be on the meta device.
        folder: its directory, for the message.
        task: for prediction of tokens, attention must be causal.

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


def frozen_parts(model: PreTrainedModel) -> tuple[list[str], int]:
    """Return the names of the modules that are never trained, `*` for the numbers of layers, and how many parameters
    they have.
    """
    untrained = untrained_prefixes(model)
    outermost = [name for name in untrained if not any(name != other and name.startswith(other) for other in untrained)]
    sizes = [
        getattr(parameter, "ds_numel", parameter.numel())
        for name, parameter in model.named_parameters()
        if name.startswith(untrained)
    ]
    patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name).removesuffix(".") for name in outermost)
    return list(patterns), sum(sizes)


def is_tested(kind: str) -> bool:
    """Whether the toolkit's tests train models of a `model_type`; a newer transformers may have others."""
    return kind in read_table("models/tested.yaml")["types"].split()


def report_untested_type(model: PreTrainedModel) -> None:
    """Report a model type that no test trains."""
    if not is_tested(model.config.model_type):
        say(
            "model_type = {kind} is untested: `toolkit check` tries a tiny model of it.",
            kind=model.config.model_type,
        )


def report_frozen_parts(model: PreTrainedModel) -> None:
    """Report the parts of a model that are never trained."""
    parts, count = frozen_parts(model)
    if count:
        say(
            "Not trained, as the loss of text gives them no gradient: {parts} ({count} parameters).",
            parts=", ".join(parts),
            count=f"{count:,}",
        )
