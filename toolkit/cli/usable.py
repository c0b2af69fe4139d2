"""A model to be asked, from whatever a user has: a model folder, an export, a run folder, or a base and an adapter."""

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from toolkit.config.schema import Dtype, ModelConfig
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.models.build import build_model
from toolkit.models.chat import AnyChatEncoder, load_chat_encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """A model with what turns text into ids for it."""

    model: PreTrainedModel
    """In evaluation mode, on its device."""
    encoder: AnyChatEncoder
    """Its tokenizer and chat format."""


def load_usable(path: str, *, adapter: str = "", family: str = "auto", dtype: str = "auto", device: str = "") -> Usable:
    """Load a model for generation.

    Args:
        path: a model folder (official or transformers' layout), or a run folder: its export/. "" with an adapter: the
            base that the adapter names.
        adapter: folder of an adapter that was trained on it; "" none.
        family: see `load_chat_encoder`.
        dtype: fp32, bf16 or fp16; auto: bf16 on a GPU, fp32 on CPUs.
        device: such as cuda:1; "" takes the GPU if there is one.

    Raises:
        ConfigError: nothing there that could be asked.
        ModelError: the folder cannot be loaded.
    """
    transformers.utils.logging.disable_progress_bar()
    folder = _model_folder(Path(path))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = Dtype(dtype) if dtype != "auto" else Dtype.fp32 if place.type == "cpu" else Dtype.bf16
    encoder = load_chat_encoder(folder, family=family)
    model = build_model(ModelConfig(path=str(folder)), precision, encoder.tokenizer, seed=0)
    return Usable(model=model.to(place), encoder=encoder)


def _model_folder(path: Path) -> Path:
    """Return the model folder that a path means: itself, or a run folder's export."""
    if (path / "config.json").is_file() or not (path / "config.yaml").is_file():
        return path
    if (path / "export" / "config.json").is_file():
        return path / "export"
    raise ConfigError(
        tr("the run {folder} has no export/ yet: make one with `toolkit export-model {folder}`.", folder=path)
    )
