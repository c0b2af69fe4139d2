"""A model for generation, from a model directory, an export, a run, a checkpoint, or base and adapter."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from toolkit.checkpoint import directory, intact
from toolkit.config import files
from toolkit.config.schema import Dtype, ModelConfig
from toolkit.distributed import accelerator
from toolkit.messages import ConfigError, ModelError, tr
from toolkit.models import adapters, base_model, chat, load, save, tokenizer_files


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
    folder, adapter = _model_and_adapter(path, adapter)
    is_checkpoint = (folder / directory.MANIFEST).is_file() and (folder / save.MODEL_DIR).is_dir()
    if is_checkpoint and not adapter:
        loaded = _load_from_checkpoint(folder, family, chat_template, precision)
        return loaded._replace(model=loaded.model.to(target))
    own_tokenizer = bool(adapter) and (Path(adapter) / "tokenizer_config.json").is_file()
    encoder = tokenizer_files.load_chat_encoder(
        adapter if own_tokenizer else folder, family=family, chat_template=chat_template
    )
    model = load.create_model(ModelConfig(path=str(folder)), precision, encoder.tokenizer, seed=0)
    if adapter:
        adapters.load_adapter(model, Path(adapter), base_model.base_of(model, folder))
    return LoadedModel(model.eval().to(target), encoder)


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
    base = adapters.base_of_adapter(Path(adapter), str(folder) if path else "")
    if not path:  # an adapter can name any model: its user shall see which
        note = tr("The base model is {base}, which {adapter} names.", base=base, adapter=adapter)
        print(note, file=sys.stderr)  # noqa: T201  # stdout is for answers
    return base, adapter


def _load_from_checkpoint(checkpoint: Path, family: str, chat_template: str, precision: Dtype) -> LoadedModel:
    """Load a checkpoint's model for generation, on the CPU; ModelError if it makes no text. Arguments: `load_any`."""
    with redirect_stdout(sys.stderr):  # DeepSpeed prints when it is imported; stdout is for answers
        from toolkit.export.checkpoint import load_checkpoint
        from toolkit.models import trainable

    encoder = tokenizer_files.load_chat_encoder(checkpoint / save.MODEL_DIR, family=family, chat_template=chat_template)
    model = load_checkpoint(checkpoint)
    trainable.check_generates_text(model, checkpoint)
    for parameter in model.parameters():  # not the rotary frequencies, which have to stay float32
        parameter.data = parameter.data.to(load.TORCH_DTYPES[precision])
    return LoadedModel(model.eval(), encoder)


def model_of_run(run: Path) -> Path:
    """Return a run directory's export, else its newest complete checkpoint; ConfigError if it has neither."""
    export = run / "export"
    if (export / "config.json").is_file() or adapters.is_adapter(export):
        return export
    newest = intact.resolve_checkpoint(run)
    if newest is None:
        raise ConfigError("the run {folder} has neither export/ nor a checkpoint yet.", folder=run)
    return newest
