"""What a run trained of a model, put together with the rest of it: one parameter in memory at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from transformers import PreTrainedModel

from toolkit.checkpoint.convert import iter_weights
from toolkit.config.schema import TuningMethod
from toolkit.messages import CheckpointError, ConfigError
from toolkit.models import adapters, tuning
from toolkit.models.adapters import BaseModel, base_of, check_base, check_numbers, find_base, fingerprint_of, read_base
from toolkit.models.directory import read_object
from toolkit.models.load import empty, load_model, stream
from toolkit.models.save import MODEL_DIR
from toolkit.secrets import hide


@dataclass(frozen=True, slots=True)
class TunedPart:
    """Trained parameters, and the model that the others are of."""

    source: Path
    """Checkpoint or adapter, for messages."""
    settings: dict[str, Any]
    """Content of adapter_config.json; {} where parameters of the model itself were trained."""
    known: BaseModel | None
    """Identifies the model; None where an adapter of other programs says nothing."""
    base: Path
    values: dict[str, torch.Tensor]
    """By name: in the model, or of an adapter in its file."""

    @property
    def can_merge(self) -> bool:
        """Whether it can become a part of the model's own weights."""
        return not self.settings or adapters.method_of(self.settings) is TuningMethod.lora

    def describe(self) -> dict[str, bytes]:
        """Return the files that describe an adapter, and where its base is now."""
        path = hide(str(self.base.absolute()))
        base = BaseModel(path, {} if self.known is None else self.known.numbers)
        settings = self.settings | {"base_model_name_or_path": path}
        return adapters.AdapterState(adapters.method_of(self.settings), settings, base).describe()


def part_of_checkpoint(checkpoint: Path, given: str = "") -> TunedPart | None:
    """Return what a verified checkpoint holds, None if that is the whole model; `given` "" finds the base."""
    described = checkpoint / MODEL_DIR
    known = read_base(described)
    if known is None:
        return None
    settings = read_object(described / adapters.CONFIG) if (described / adapters.CONFIG).is_file() else {}
    dtype = getattr(torch, read_object(described / "config.json")["dtype"])
    values = dict(iter_weights(checkpoint, dtype))
    if settings:
        shell = empty(described)
        adapters.attach_adapter(shell, settings, known)
        stored = adapters.stored_names(shell)
        # Beside it stand buffers, and what is tied under its second name: DeepSpeed takes neither for frozen.
        frozen = {*shell.state_dict()} - {*stored}
        values = {name: value for name, value in values.items() if name not in frozen}
        if wrong := sorted({*values} ^ {*stored}):
            raise CheckpointError("{folder} does not hold its model: {reason}.", folder=checkpoint, reason=wrong[:5])
        values = {stored[name]: value for name, value in values.items()}
    return TunedPart(checkpoint, settings, known, find_base(described, given), values)


def part_of_adapter(folder: Path, given: str = "") -> TunedPart:
    """Return an adapter; `given` "" finds the base."""
    base = adapters.base_of_adapter(folder, given)
    settings, values = adapters.read_settings(folder), adapters.read_adapter_weights(folder)
    return TunedPart(folder, settings, read_base(folder), base, values)


def load_part(part: TunedPart) -> PreTrainedModel:
    """Return the model with what was trained in it or added to it, on the CPU."""
    dtype = next(iter(part.values.values())).dtype
    model = load_model(part.base, dtype=dtype)
    found = base_of(model, part.base)
    if part.known is not None:
        check_base(part.known, found, part.source)
    if not part.settings:
        model.load_state_dict(part.values, strict=False)
        return model
    adapters.attach_adapter(model, part.settings, found)
    adapters.load_values(model, part.values, part.source)
    return model.eval()


def merge_adapter(part: TunedPart) -> tuple[PreTrainedModel, Iterator[tuple[str, torch.Tensor]]]:
    """Return the model with empty parameters, and their values, in the precision of the base's files, or float32 where
    changed.

    While they are read, ConfigError is raised for an addition to one of two tied weights, CheckpointError for values
    that are not finite or not of this model.
    """
    if not part.can_merge:
        raise ConfigError(
            "what {folder} holds stands before the tokens, not in the weights: it cannot be merged. Export it without "
            "merge=true, and use it as an adapter of its base.",
            folder=part.source,
        )
    model, values = stream(part.base)
    return model, _with_trained(part, values, getattr(model, "all_tied_weights_keys", None) or {})


def _with_trained(
    part: TunedPart, values: Iterator[tuple[str, torch.Tensor]], tied: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    layers: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    whole = dict(part.values)
    if part.settings:
        layers, whole = _by_weight(part)
        if apart := sorted({*layers, *whole} & {*tied, *tied.values()}):
            raise ConfigError(
                "{folder} changes {names} alone, which in the model is one with another weight (tie_word_embeddings): "
                "merged, both would change. Use it as an adapter of its base.",
                folder=part.source,
                names=", ".join(apart),
            )
    unused = {*layers, *whole} - {*tied}
    for name, value in values:
        unused.discard(name)
        if part.known is not None and name in part.known.numbers:
            check_numbers(part.known, name, fingerprint_of(value), part.base, part.source)
        if name in layers:
            layer, added = layers[name]
            try:
                yield name, tuning.merge_lora(layer, value, added)
            except ValueError as error:  # peft looks for NaN
                raise CheckpointError("{name} is NaN or Inf: the run had diverged.", name=name) from error
        else:
            yield name, whole.get(name, value)
    if unused:
        raise CheckpointError(
            "{folder} does not hold its model: {reason}.", folder=part.source, reason=sorted(unused)[:5]
        )


def _by_weight(
    part: TunedPart,
) -> tuple[dict[str, tuple[Any, dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Return LoRA's layers with their additions, and what replaces weights, by the name of the weight."""
    shell = empty(part.base)
    adapters.attach_adapter(shell, part.settings, part.known or BaseModel(str(part.base), {}))
    stored = adapters.stored_names(shell)
    values = {name: part.values[stored_name] for name, stored_name in stored.items() if stored_name in part.values}
    layers: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, module in shell.named_modules():
        if not isinstance(module, LoraLayer | ModulesToSaveWrapper):
            continue
        own = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        if isinstance(module, LoraLayer):
            # Of experts in one tensor each parameter has a layer around the layer of the one before.
            added = {key: value for key, value in own.items() if not key.startswith("base_layer.")}
            layers[f"{name.replace('.base_layer', '')}.{tuning.parameter_of(module)}"] = (module, added)
        else:
            prefix = f"modules_to_save.{tuning.ADAPTER}."
            whole |= {f"{name}.{key.removeprefix(prefix)}": value for key, value in own.items()}
    return layers, whole
