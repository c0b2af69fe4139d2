"""From a model folder to a transformers model: official ChatGLM folders and transformers' own layout alike."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from toolkit.models import fill
from toolkit.models.chatglm.family import Architecture, architecture_of, divides_positions
from toolkit.models.chatglm.glm import glm_config
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.fill import empty_model, read_weights
from toolkit.models.folder import read_config, read_object
from toolkit.models.hf import empty_hf, load_hf
from toolkit.models.layout import Layout, TransformersLayout, official_layout
from toolkit.models.official import recall_origin, remember_origin
from toolkit.models.weights import WeightFiles


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    ds_config: dict[str, Any] | None = None,
    own: Callable[[PreTrainedModel], set[str]] | None = None,
) -> PreTrainedModel:
    """Load a model from a local folder; nothing in it is executed, nothing is downloaded.

    Args:
        path: an official ChatGLM folder (ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B, CodeGeeX2-6B, glm-4-9b), or any
            causal language model in transformers' layout.
        dtype: precision of the parameters, by name too ("bfloat16"); None or "auto" keeps what each tensor has in its
            file. Rotary frequencies are float32 in any case.
        ds_config: the DeepSpeed dict. With stage 3 the parameters are partitioned as they are read: a collective, in
            which rank 0 reads and every rank keeps its part, in the precision that the dict says.
        own: gets the empty model and returns the names of the parameters that this process needs; the others stay
            empty. None reads all.

    Returns:
        The model in evaluation mode, on the CPU: a GlmForCausalLM for ChatGLM2 and later, a
        `chatglm.modeling.ChatGLMForConditionalGeneration` for ChatGLM-6B, what transformers has for anything else.

    Raises:
        ModelError: the folder cannot be loaded; the message says why.
    """
    folder = Path(path)
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype)
    config = read_config(str(folder))
    architecture = architecture_of(config)
    partitioned = ds_config is not None and ds_config["zero_optimization"]["stage"] == 3
    if architecture is None:
        return load_hf(folder, dtype, ds_config if partitioned else None, own)
    model = _build_official(folder, config, architecture, ds_config if partitioned else None)
    interleaved = architecture is Architecture.glm and not config.get("multi_query_attention")
    layout, files = official_layout(model.config, interleaved), WeightFiles(folder)
    read_weights(model, files, layout, folder, dtype, own)
    remember_origin(model, folder, files, layout, interleaved)
    return model.eval()


def stream(path: str | Path) -> tuple[PreTrainedModel, Iterator[tuple[str, torch.Tensor]]]:
    """Return a folder's model with nothing in its parameters, and their values one after another.

    Args:
        path: see `load_model`.

    Raises:
        ModelError: the folder cannot be loaded; some of it while the values are read.
    """
    model, files, layout = opened(path)
    return model, fill.stream(model, files, layout, Path(path))


def opened(path: str | Path) -> tuple[PreTrainedModel, WeightFiles, Layout]:
    """Return a folder's model with nothing in its parameters, its files, and how their tensors become parameters.

    Args:
        path: see `load_model`.

    Raises:
        ModelError: the folder cannot be loaded.
    """
    folder = Path(path)
    config = read_config(str(folder))
    architecture = architecture_of(config)
    files = WeightFiles(folder)
    if architecture is None:
        model = empty_hf(folder)
        return model, files, TransformersLayout(model, fill.shapes_of(model))
    model = _build_official(folder, config, architecture, None)
    interleaved = architecture is Architecture.glm and not config.get("multi_query_attention")
    layout = official_layout(model.config, interleaved)
    remember_origin(model, folder, files, layout, interleaved)
    return model.eval(), files, layout


def empty(path: str | Path) -> PreTrainedModel:
    """Build the model that a folder describes, with nothing in its parameters (on the meta device) and no weights read.

    Args:
        path: a folder in transformers' layout, weights or not.

    Raises:
        ModelError: the folder describes no model that can be built.
    """
    folder = Path(path)
    config = read_config(str(folder), with_weights=False)
    architecture = architecture_of(config)
    if architecture is None:
        return empty_hf(folder)
    model = _build_official(folder, config, architecture, None)
    recall_origin(model, folder)
    return model.eval()


def _build_official(
    folder: Path,
    config: dict[str, Any],
    architecture: Architecture,
    ds_config: dict[str, Any] | None,
) -> PreTrainedModel:
    generation_file = folder / "generation_config.json"
    generation = read_object(generation_file) if generation_file.is_file() else {}
    if architecture is Architecture.v1:
        # `_name_or_path` names a hub repository, which other libraries (peft 0.21) would ask for its config.
        foreign = ("auto_map", "architectures", "_name_or_path")
        wanted = {key: value for key, value in config.items() if key not in foreign}
        model_config: Any = ChatGLMConfig(**wanted)
        model = empty_model(lambda: ChatGLMForConditionalGeneration(model_config), ds_config)
    else:
        model_config = glm_config(config, generation, divides_positions=divides_positions(config, folder))
        model = empty_model(lambda: transformers.GlmForCausalLM(model_config), ds_config)
    model.generation_config = GenerationConfig(
        eos_token_id=model_config.eos_token_id,
        pad_token_id=config.get("pad_token_id", generation.get("pad_token_id", 0)),
    )
    return model
