"""Which models cannot be trained, and why: said before their weights are read; and what of a model is not trained."""

from pathlib import Path

from transformers import PreTrainedModel

from toolkit.config.schema import TaskKind
from toolkit.messages import ModelError, read_table, say, translated
from toolkit.models.structure import towers

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


def frozen_parts(model: PreTrainedModel) -> tuple[list[str], int]:
    """Return the parts of a multimodal model that take no text, and so are not trained, and their parameters."""
    beside = towers(model)
    outermost = [name for name in beside if not any(name != other and name.startswith(other) for other in beside)]
    sizes = [
        getattr(parameter, "ds_numel", parameter.numel())
        for name, parameter in model.named_parameters()
        if name.startswith(beside)
    ]
    return [name.removesuffix(".") for name in outermost], sum(sizes)


def is_tested(kind: str) -> bool:
    """Return whether models of a `model_type` were trained and compared; a newer transformers may have others."""
    return kind in read_table("models/tested.yaml")["types"].split()


def tell_untested(model: PreTrainedModel) -> None:
    """Report that nobody has trained a model of this type here yet."""
    if not is_tested(model.config.model_type):
        say(
            "model_type = {kind} is untested: `toolkit check` tries a tiny model of it.",
            kind=model.config.model_type,
        )


def tell_towers(model: PreTrainedModel) -> None:
    """Report what is not trained of a multimodal model."""
    parts, count = frozen_parts(model)
    if count:
        say(
            "A multimodal model: its text model is trained; {parts} ({count} parameters) stay as they are.",
            parts=", ".join(parts),
            count=f"{count:,}",
        )
