"""What the toolkit knows of a model besides transformers' config: one record, which the model has as an attribute.

Modules that are added to a model, whose parameters must be registered in it, are its attributes themselves:
`soft_prompt` and `prefix_encoder` (models/prompt_tuning.py), `expert_groups` (engine/build.py).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.models.adapters import AdapterState
    from toolkit.models.loss import LossHead
    from toolkit.models.router_loss import Routers
    from toolkit.models.save import Origin

EXTRA_TENSORS = "extra_tensors.json"
"""File of a checkpoint with `ModelRecord.extra_tensors`."""
_ATTRIBUTE = "toolkit_record"


@dataclass(slots=True)
class ModelRecord:
    """Set while a model is loaded and changed; read where it is trained and saved. Each line names who does."""

    origin: "Origin | None" = None
    """The official ChatGLM directory that it came from. Set by save.py; read by official.py and save.py."""
    stored_shapes: dict[str, list[int]] | None = None
    """Shapes of the tensors in its files, if transformers converts them. Set by stored_form.py; read by save.py."""
    extra_tensors: dict[str, Any] | None = None
    """Tensors in its files that it does not have: their `folder`, and `tensors`, type and shape by name. Set by
    extra_tensors.py; read by save.py, and by load.py to report them."""
    added_token_ids: list[int] = field(default_factory=list)
    """Tokens that its directory adds to the tokenizer. Set by load.py; read by lora.py and fine_tuning.py, which train
    their rows."""
    processor_files: dict[str, bytes] = field(default_factory=dict)
    """Files of a processor in its directory, by name. Set by load.py; read by save.py, which copies them."""
    code_files: dict[str, bytes] | None = None
    """Python files of its directory, by name; None if its class is transformers'. Set by load.py; read by save.py, and
    by stored_form.py, weights.py and trainable.py for what transformers does to its own classes alone."""
    first_position: int = 0
    """Position of a sequence's first token. Set by load.py; read by attention.py, prompt_tuning.py and generate.py."""
    has_delta_layers: bool = False
    """Whether layers of the gated delta rule need the samples' bounds. Set by delta_layers.py; read by attention.py."""
    without_liger: str = ""
    """Why Liger's layers do not replace its own, "" if they do. Set and reported by tasks/language_model.py."""
    loss_head: "LossHead | None" = None
    """What computes losses in place of its output layer. Set by tasks/language_model.py; read by `loss.loss_head`."""
    routers: "Routers | None" = None
    """What computes its routers' losses. Set by tasks/language_model.py; read by `LanguageTask.routers`."""
    tuned: "AdapterState | None" = None
    """How a fine-tuning method changed it, None if all of it is trained. Set by fine_tuning.py and adapters.py; read by
    what exports an adapter."""
    begins: bool = True
    """Whether it takes token ids, and not hidden states of an earlier pipeline stage. Set by layouts/pipeline.py; read
    by loss.py."""


def record_of(model: Any) -> ModelRecord:
    """Return the record of a model, or of the model of an engine."""
    module = getattr(model, "module", model)
    record: ModelRecord | None = getattr(module, _ATTRIBUTE, None)
    return set_record(module, ModelRecord()) if record is None else record


def set_record(model: Any, record: ModelRecord) -> ModelRecord:
    """Let a model have a record, and return it."""
    setattr(model, _ATTRIBUTE, record)
    return record


def has_adapter(model: Any) -> bool:
    """Whether an adapter of a model, or of an engine's, is trained, and not its own parameters."""
    tuned = record_of(model).tuned
    return tuned is not None and bool(tuned.settings)


def tuning_state(model: Any) -> "AdapterState":
    """Return how a fine-tuning method changed a model, or an engine's, which one did."""
    tuned = record_of(model).tuned
    assert tuned is not None
    return tuned
