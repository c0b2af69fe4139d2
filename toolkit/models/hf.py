"""Models in transformers' own layout."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.fill import empty_model, read_weights, refuse_other_weights, shapes_of, tied_names
from toolkit.models.layout import TransformersLayout, predicting
from toolkit.models.official import recall_origin
from toolkit.models.remote_code import alone, code_files, is_trusted
from toolkit.models.weights import WeightFiles
from toolkit.outside import reason_of


def load_hf(
    folder: Path,
    dtype: torch.dtype | None,
    ds_config: dict[str, Any] | None,
    own: Callable[[PreTrainedModel], set[str]] | None = None,
) -> PreTrainedModel:
    """Load a folder that transformers knows; with `ds_config` partitioned over the ranks. See `load_model`."""
    config = _known_config(folder)
    if ds_config is None and own is None:
        model = _whole(folder, dtype)
    else:
        model = _empty(folder, config, dtype, ds_config)
        layout = TransformersLayout(model, shapes_of(model))
        read_weights(model, WeightFiles(folder), layout, folder, dtype, own)
    return _finished(model, folder)


def empty_hf(folder: Path) -> PreTrainedModel:
    """Build what a folder's config says, with nothing in the parameters; see `toolkit.models.load.empty`."""
    return _finished(_empty(folder, _known_config(folder), None, None), folder)


def _empty(folder: Path, config: Any, dtype: torch.dtype | None, ds_config: dict[str, Any] | None) -> PreTrainedModel:
    trusted = is_trusted(folder)
    model = empty_model(
        lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusted),
        ds_config,
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _finished(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    # A padding id freezes its row of the embedding (torch.nn.Embedding's padding_idx), also where it is the end
    # token's, as in glm-4-9b-chat-hf. Padding itself is never attended to, so its row needs no such care.
    model.get_input_embeddings().padding_idx = None
    recall_origin(model, folder)
    if is_trusted(folder):
        model.code_files = {str(file.relative_to(folder)): file.read_bytes() for file in code_files(folder)}
    return model.eval()


def _known_config(folder: Path) -> Any:
    """Return the config of an architecture that transformers has, and import the architecture.

    It must be imported before zero.Init begins: DeepSpeed 0.19.8 undoes what decorators make of the constructors of
    classes that are defined meanwhile (transformers' experts would lose their config).
    """
    trusted = is_trusted(folder)
    try:
        with alone() if trusted else nullcontext():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
            own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM") if trusted else None
            if own:
                get_class_from_dynamic_module(own, folder, local_files_only=True)
                return config
    except Exception as error:  # whatever a damaged or absurd config.json makes the library raise
        if trusted and not isinstance(error, (OSError, ValueError, ImportError)):
            raise  # the folder's own code: its author needs the traceback
        raise _refusal(folder, error) from error
    if transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None:
        raise ModelError(
            tr(
                "{folder} holds a {kind}, which is no causal language model that transformers {version} knows.",
                folder=folder,
                kind=config.model_type,
                version=transformers.__version__,
            )
        )
    return config


def _refusal(folder: Path, error: Exception) -> ModelError:
    return ModelError(tr("cannot load the model in {path}: {reason}", path=folder, reason=reason_of(error)))


def _whole(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            trust_remote_code=is_trusted(folder),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        if is_trusted(folder) and not isinstance(error, (OSError, ValueError, RuntimeError)):
            raise
        raise _refusal(folder, error) from error
    # A head that is tied to the embedding is in no file, and rightly so.
    tied = tied_names(model)
    names = {
        kind: sorted(map(str, report.get(kind) or ()))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    missing = [name for name in names["missing_keys"] if name not in tied]
    unexpected = [name for name in names["unexpected_keys"] if not re.search(predicting(model.config), name)]
    refuse_other_weights(folder, model, missing, unexpected, names["mismatched_keys"])
    loaded: PreTrainedModel = model
    return loaded
