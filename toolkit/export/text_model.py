"""The text model of a multimodal one, on its own."""

from copy import deepcopy
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from toolkit.messages import ModelError
from toolkit.models import load_weights, weights


def text_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return the text model inside a multimodal one as a model of its own, with the same tensors.

    Args:
        model: a multimodal model, not partitioned over ranks.
        folder: its directory, for messages.

    Raises:
        ModelError: transformers has no class for the text model, or it would need other tensors.
    """
    text_config = deepcopy(model.config.get_text_config())
    causal_lm_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    is_multimodal = text_config.model_type != model.config.model_type
    if not is_multimodal or causal_lm_class is None:
        raise ModelError(
            "text_only=true: {folder} holds a {architecture}, out of which transformers makes no text model. Leave it "
            "out.",
            folder=folder,
            architecture=type(model).__name__,
        )
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    text_config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    text_config.dtype = model.dtype
    standalone = weights.build_empty(lambda: causal_lm_class(text_config), None)
    if isinstance(decoder, causal_lm_class):  # Llama 4 holds its text model with the output layer
        state = decoder.state_dict()
    else:
        parts = [(standalone.get_decoder(), decoder), (standalone.get_output_embeddings(), head)]
        names = {id(part): name for name, part in standalone.named_modules()}
        # The decoder's and the output layer's tensors, under the names that these parts have in the text model.
        state = {
            f"{names[id(target)]}.{name}": value for target, part in parts for name, value in part.state_dict().items()
        }
    weights.reject_differences(
        folder,
        standalone,
        missing=weights.shapes_of(standalone).keys() - weights.under_first_names(standalone, state).keys(),
        unexpected=state.keys() - standalone.state_dict(keep_vars=True).keys(),
        mismatched=(),
    )
    load_weights.assign_state(standalone, state)
    standalone.generation_config = model.generation_config
    return standalone.eval()
