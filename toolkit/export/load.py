"""A model for generation, from a model directory, an export, a run, a checkpoint, or base and adapter."""

import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from toolkit.checkpoint import directory, intact
from toolkit.config import context_length, files
from toolkit.config.schema import Dtype, ModelConfig
from toolkit.distributed import accelerator
from toolkit.messages import ConfigError, ModelError, NotStreamable, tr
from toolkit.models import adapters, base_model, chat, load, save, tokenizer_files, trainable
from toolkit.models.directory import read_config


class LoadedModel(NamedTuple):
    """A model in evaluation mode, on its device, with its tokenizer and chat format."""

    model: transformers.PreTrainedModel
    encoder: chat.AnyChatEncoder


def usual_precision(device: torch.device) -> Dtype:
    """Return the precision for inference on a device: fp32 on CPUs; bf16 on GPUs that have it, fp16 on older ones."""
    if device.type == "cpu":
        return Dtype.fp32
    return Dtype.bf16 if accelerator.has_bf16(device) else Dtype.fp16


def load_any(
    path: str,
    *,
    adapter: str = "",
    family: str = "auto",
    chat_template: str = "",
    dtype: str = "auto",
    device: str = "",
) -> LoadedModel:
    """Load a model for generation.

    Args:
        path: a model directory; an adapter; a run directory: its export/, else its newest checkpoint; or a checkpoint.
            "" with an adapter: the base that the adapter names.
        adapter: directory of an adapter that was trained on the model in `path`; "" none.
        family: chat format, see `load_chat_encoder`.
        chat_template: file of a chat template; "" the model's.
        dtype: fp32, bf16 or fp16; auto: as `usual_precision`, which is printed to stderr.
        device: such as cuda:1; "" takes the GPU if there is one, unless DS_ACCELERATOR=cpu.
    """
    transformers.utils.logging.disable_progress_bar()
    target = torch.device(device) if device else accelerator.device_alone()
    precision = Dtype(dtype) if dtype != "auto" else usual_precision(target)
    if dtype == "auto":  # stdout is for answers
        print(tr("Computing in {precision} on {device}.", precision=precision.value, device=target), file=sys.stderr)  # noqa: T201
    folder, adapter_folder = _model_and_adapter(path, adapter)
    if adapter_folder and not (adapter and path):  # an adapter can name any model: its user shall see which
        note = tr("The base model is {base}, which {adapter} names.", base=folder, adapter=adapter_folder)
        print(note, file=sys.stderr)  # noqa: T201
    encoder = _load_encoder(folder, adapter_folder, family, chat_template)
    if _is_checkpoint(folder) and not adapter_folder:
        return LoadedModel(_load_checkpoint(folder, precision).to(target), encoder)
    model = load.create_model(ModelConfig(path=str(folder)), precision, encoder.tokenizer, seed=0)
    if adapter_folder:
        adapters.load_adapter(model, Path(adapter_folder), base_model.base_of(model, folder))
    return LoadedModel(model.eval().to(target), encoder)


def describe_any(path: str, *, adapter: str = "", family: str = "auto", chat_template: str = "") -> LoadedModel:
    """Return what `load_any` loads, with empty parameters and without an adapter in it, in about a second. Errors are
    those of `load_any` that need no weights: of the directories, the tokenizer and its template, and the weight files'
    headers. Arguments: `load_any`.
    """
    folder, adapter_folder = _model_and_adapter(path, adapter)
    encoder = _load_encoder(folder, adapter_folder, family, chat_template)
    is_checkpoint = _is_checkpoint(folder)
    described = folder / save.MODEL_DIR if is_checkpoint else folder
    try:
        model = load.load_empty(described, compared=not is_checkpoint)  # a manifest vouches for a checkpoint's weights
    except NotStreamable:  # transformers reads these files as a whole
        model = load.load_empty(described)
    trainable.check_vocabulary(model, encoder.tokenizer)
    trainable.check_generates_text(model, described)
    return LoadedModel(model, encoder)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / directory.MANIFEST).is_file() and (folder / save.MODEL_DIR).is_dir()


def _load_encoder(folder: Path, adapter: str, family: str, chat_template: str) -> chat.AnyChatEncoder:
    """Return the chat encoder of a model's directory or checkpoint, or of the adapter on it if that has its own
    tokenizer. `adapter`: as `_model_and_adapter` returns it; other arguments: `load_any`.
    """
    if adapter:
        has_tokenizer = (Path(adapter) / "tokenizer_config.json").is_file()
        source = Path(adapter) if has_tokenizer else folder
    else:
        source = folder / save.MODEL_DIR if _is_checkpoint(folder) else folder
    return tokenizer_files.load_chat_encoder(source, family=family, chat_template=chat_template)


def load_encoder(
    path: str, *, adapter: str = "", family: str = "auto", chat_template: str = ""
) -> tuple[chat.AnyChatEncoder, float]:
    """Return the tokenizer and chat format of a model that computes elsewhere, and how many tokens prompt and answer
    may have together, inf without a limit. Arguments: `load_any`.
    """
    folder, adapter_folder = _model_and_adapter(path, adapter)
    encoder = _load_encoder(folder, adapter_folder, family, chat_template)
    config = read_config(str(folder / save.MODEL_DIR if _is_checkpoint(folder) else folder), with_weights=False)
    return encoder, context_length.position_limit(config) or math.inf


def _model_and_adapter(path: str, adapter: str) -> tuple[Path, str]:
    """Return the directory of the model, and that of an adapter on it, "" without one. Arguments: `load_any`."""
    folder = Path(path or adapter)
    if path and (folder / "config.yaml").is_file():  # a run's directory
        folder = model_of_run(folder)
    files.check_directory(folder, ModelError)
    if path and adapters.is_adapter(folder):
        if adapter:
            raise ConfigError(
                "{folder} is an adapter itself: {other} cannot be added to it.", folder=folder, other=adapter
            )
        path, adapter = "", str(folder)
    if not adapter:
        return folder, ""
    return adapters.base_of_adapter(Path(adapter), str(folder) if path else ""), adapter


def _load_checkpoint(checkpoint: Path, precision: Dtype) -> transformers.PreTrainedModel:
    """Load a checkpoint's model for generation, on the CPU; ModelError if it makes no text."""
    with redirect_stdout(sys.stderr):  # DeepSpeed prints when it is imported; stdout is for answers
        from toolkit.export.checkpoint import load_checkpoint

    model = load_checkpoint(checkpoint)
    trainable.check_generates_text(model, checkpoint)
    for parameter in model.parameters():  # not the rotary frequencies, which have to stay float32
        parameter.data = parameter.data.to(load.TORCH_DTYPES[precision])
    return model.eval()


def model_of_run(run: Path) -> Path:
    """Return a run directory's export, else its newest complete checkpoint; ConfigError if it has neither."""
    export = run / "export"
    if (export / "config.json").is_file() or adapters.is_adapter(export):
        return export
    newest = intact.resolve_checkpoint(run)
    if newest is None:
        raise ConfigError("the run {folder} has neither export/ nor a checkpoint yet.", folder=run)
    return newest
