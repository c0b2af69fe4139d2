"""Adapter directories: reading them and putting the adapter into a model.

Directories have peft's layout and names, for P-Tuning v2 the ChatGLM repositories', plus a base.json that identifies
the base model.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from transformers import PreTrainedModel

from toolkit.config.schema import TuningMethod
from toolkit.distributed import process_group
from toolkit.messages import ModelError, clauses, reading
from toolkit.models import adapter_settings, classifier, directory, lora, lora_init, probe, prompt_tuning, weights
from toolkit.models.base_model import BaseModel, check_base, find_base, read_base
from toolkit.models.prompt_tuning import PTUNING_V2
from toolkit.models.record import record_of, tuning_state
from toolkit.models.structure import trained_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCORING = "SEQ_CLS"
"""peft's `task_type` of an adapter with the head of a classifier."""
_METHODS = {"LORA": TuningMethod.lora, "PROMPT_TUNING": TuningMethod.prompt, PTUNING_V2: TuningMethod.ptuning_v2}
_PEFT_PREFIX = "base_model.model."
_SOFT_PROMPT, _PROMPT_IN_FILE = "soft_prompt.embedding.weight", "prompt_embeddings"


@dataclass(frozen=True, slots=True)
class AdapterState:
    """How a model was changed by a fine-tuning method; `ModelRecord.tuned`."""

    method: TuningMethod
    """lora for qlora too, whose adapters are the same."""
    settings: dict[str, Any]
    """Content of adapter_config.json; {} if the model's own parameters are trained."""
    base: BaseModel
    head: classifier.Head | None = None
    """The head if the model is a classifier."""

    @property
    def exported(self) -> "AdapterState":
        """The state that an export has: with the settings of a plain LoRA if training has initial factors as well."""
        return replace(self, settings=lora_init.as_plain_settings(self.settings))

    def describe(self) -> dict[str, bytes]:
        """Return name and content of the files that describe an adapter, or a checkpoint without frozen weights."""
        files = {directory.BASE_FILE: self.base.write()}
        if self.settings:
            files[CONFIG] = (json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n").encode()
            if self.head is not None:
                files[classifier.FILE] = self.head.write()
        return files


def second_names(model: PreTrainedModel) -> dict[str, str]:
    """Return second name -> first name, under which it is saved, of trained parameters that two modules share."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    under_all_names = model.named_parameters(remove_duplicate=False)
    trained = [(name, first_names[id(parameter)]) for name, parameter in under_all_names if parameter.requires_grad]
    return {name: first_name for name, first_name in trained if first_name != name}


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """Return parameter -> its name in an adapter's file, for the trained parameters; for buffers of `modules_to_save`,
    such as the biases of GLM's routers, without which peft does not load them; and for LoRA's initial factors, which
    `lora_init.as_plain_state` joins to the trained ones.
    """
    names, method = trained_names(model), tuning_state(model).method
    if method is TuningMethod.ptuning_v2:
        return {name: f"transformer.{name}" for name in names}
    if method is TuningMethod.prompt:
        return {_SOFT_PROMPT: _PROMPT_IN_FILE}
    copies = [name for name in model.state_dict(keep_vars=True) if f".modules_to_save.{lora.ADAPTER}." in name]
    # peft renames the keys of a state: an empty tensor for each parameter shows which of its names became which.
    stand_ins = {name: torch.empty(0) for name in dict.fromkeys((*names, *copies))}
    name_of = {id(value): name for name, value in stand_ins.items()}
    # save_embedding_layers=False, as peft would ask a hub for the base's config otherwise.
    adapter_state = get_peft_model_state_dict(model, stand_ins, lora.ADAPTER, save_embedding_layers=False)
    stored_by_name = {name_of[id(value)]: _PEFT_PREFIX + stored for stored, value in adapter_state.items()}
    initial = [name for name, _ in model.named_buffers() if name.endswith(lora_init.BUFFERS)]
    return stored_by_name | {name: _PEFT_PREFIX + name for name in initial}


def in_stored_shape(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return an adapter's tensor in peft's shape: LoRA's second factor of a layer's experts becomes a matrix."""
    return value.flatten(1) if ".lora_B." in name and value.dim() == 3 else value


# Settings of peft (0.21) that name modules to import, or files to read while an adapter is added: they are not passed
# on.
_UNSAFE_SETTINGS = {
    *("auto_mapping", "megatron_config", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter's directory, or a P-Tuning v2 checkpoint of the ChatGLM repositories."""
    return (path / CONFIG).is_file() or is_original_prefix(path)


def is_original_prefix(path: Path) -> bool:
    """Whether a directory is a P-Tuning v2 checkpoint of a ChatGLM repository: its config.json has pre_seq_len."""
    return (path / "config.json").is_file() and bool(directory.read_object(path / "config.json").get("pre_seq_len"))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json in an adapter's directory, or what it would be for a ChatGLM repository's prefix.
    ModelError if there is neither, or if its method or its values are not supported.
    """
    if not (folder / CONFIG).is_file():
        if not is_original_prefix(folder):
            raise ModelError("{folder} holds no adapter: there is no {file}.", folder=folder, file=CONFIG)
        original = directory.read_object(folder / "config.json")
        return prompt_tuning.prefix_settings(int(original["pre_seq_len"]), bool(original.get("prefix_projection")), "")
    settings = directory.read_object(folder / CONFIG)
    if str(settings.get("peft_type")) not in _METHODS:
        raise ModelError(
            "{file} is of the kind {kind}, which is not known here. Known: {known}.",
            file=folder / CONFIG,
            kind=settings.get("peft_type"),
            known=", ".join(_METHODS),
        )
    directory.check_sizes(settings, folder / CONFIG)
    adapter_settings.check_names(settings, folder / CONFIG)
    return settings


def base_of_adapter(folder: Path, override: str = "") -> Path:
    """Return the directory of an adapter's base: `override`, or if that is "", what its files name; see `find_base`."""
    configured, base = str(read_settings(folder).get("base_model_name_or_path") or ""), read_base(folder)
    # Both files are written with the same path: if peft's has another one, somebody has edited it, and this counts.
    preferred = configured if base is None or configured != base.path else ""
    return find_base(folder, override or preferred)


def method_of(settings: dict[str, Any]) -> TuningMethod:
    """Return the fine-tuning method of an adapter_config.json."""
    return _METHODS[settings["peft_type"]]


def attach_adapter(
    model: PreTrainedModel,
    settings: dict[str, Any],
    base: BaseModel,
    *,
    dropout: float = 0.0,
    ds_config: dict[str, Any] | None = None,
    is_resumed: bool = False,
) -> None:
    """Add an untrained adapter to a model, which may be on the meta device; only its parameters stay trainable.

    `settings`: content of adapter_config.json, recorded with `base` in `ModelRecord.tuned`. `dropout`: of a P-Tuning v2
    prefix. `ds_config`: the DeepSpeed dict if parameters are partitioned, which makes this a collective. `is_resumed`:
    a checkpoint's values follow, so that initial ones which are costly are not computed.
    """
    method, settings = method_of(settings), settings | {"base_model_name_or_path": base.path}
    if (settings.get("task_type") == SCORING) != probe.is_classifier(model):
        raise ModelError(
            "an adapter with task_type = {kind} does not fit {architecture}: {wanted} are for models that score "
            "sequences, all others for models that write.",
            kind=settings.get("task_type"),
            architecture=type(model).__name__,
            wanted=SCORING,
        )
    model.requires_grad_(False)
    # On the meta device if the model is; a pipeline stage, which has some weights, draws all initial values.
    with torch.device("meta") if all(parameter.is_meta for parameter in model.parameters()) else nullcontext():
        if method is TuningMethod.ptuning_v2:
            prompt_tuning.attach_prefix(model, settings["pre_seq_len"], settings["prefix_projection"], dropout)
        elif method is TuningMethod.prompt:
            shape = settings["num_virtual_tokens"], settings["token_dim"]
            prompt_tuning.attach_prompt(model, prompt_tuning.SoftPrompt(torch.zeros(shape, dtype=model.dtype)))
        else:
            # Without settings of other versions of peft, which this one would reject.
            names = LoraConfig.__dataclass_fields__.keys() - _UNSAFE_SETTINGS
            supported = {name: value for name, value in settings.items() if name in names}
            supported = adapter_settings.with_matched_modules(supported, [name for name, _ in model.named_modules()])
            starts_from_weights = lora_init.is_from_weights(settings)
            if starts_from_weights:
                supported["init_lora_weights"] = True  # peft itself would change the base; see `lora_init`
            lora.inject_lora(model, LoraConfig(**supported | {"inference_mode": False}), ds_config)
            if starts_from_weights:
                lora_init.attach(model, settings["init_lora_weights"].lower(), compute=not is_resumed)
    record_of(model).tuned = AdapterState(method, settings, base, classifier.head_of(model))


def load_adapter(
    model: PreTrainedModel,
    folder: Path,
    base: BaseModel,
    *,
    dropout: float = 0.0,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Add a trained adapter to its base model; ModelError if it was trained on another. See `attach_adapter`."""
    settings, expected = read_settings(folder), read_base(folder)
    if expected is not None and any(base.numbers.values()):  # an empty model has none
        check_base(expected, base, folder)
    values = read_adapter_weights(folder)
    with reading(folder / CONFIG, ModelError):
        attach_adapter(model, settings, base, dropout=dropout, ds_config=ds_config)
    load_values(model, values, folder)


def read_adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their names in its file, ModelError without one; nothing in it is executed."""
    for name in (WEIGHTS, "adapter_model.bin", "pytorch_model.bin"):  # peft's, its older name, ChatGLM's
        if (folder / name).is_file():
            # ChatGLM-6B's own P-Tuning script saved lm_head too.
            start = prompt_tuning.PREFIX if method_of(read_settings(folder)) is TuningMethod.ptuning_v2 else ""
            return {key: value for key, value in weights.read_tensors(folder / name).items() if key.startswith(start)}
    raise ModelError("{folder} holds no adapter: there is no {file}.", folder=folder, file=WEIGHTS)


def load_values(model: PreTrainedModel, values: dict[str, torch.Tensor], folder: object) -> None:
    """Set an adapter's parameters to `values`, full tensors by their names in its file; ModelError if names or shapes
    differ. `folder`: where they are from, for the message.
    """
    state = model.state_dict(keep_vars=True)
    names = {name: in_file for name, in_file in stored_names(model).items() if not name.endswith(lora_init.BUFFERS)}
    misshaped = []
    for name, stored_name in names.items():
        if stored_name not in values:  # `check_fit` rejects that
            continue
        parameter, value = state[name], values[stored_name]
        expected = process_group.full_shape(name, parameter)
        if value.shape != in_stored_shape(name, torch.empty(expected, device="meta")).shape:
            misshaped.append(f"{stored_name} {tuple(value.shape)} != {expected}")
            continue
        own_part = process_group.take_part(name, value.view(expected), *process_group.part_of(parameter))
        parameter.data.copy_(own_part)
    check_fit({*names.values()}, values, folder, misshaped)


def check_fit(names: set[str], values: dict[str, torch.Tensor], folder: object, misshaped: Sequence[str] = ()) -> None:
    """Raise ModelError if the tensors of the adapter in `folder`, `values` by name, have other names than `names`, or
    other shapes than the model's; `misshaped` describes those that have.
    """
    # peft (0.21) stores the base layer of a classifier's head too, which is ignored.
    misnamed = sorted(name for name in names ^ {*values} if not name.endswith(".base_layer.weight"))
    if mismatches := clauses([*misnamed, *misshaped][:5]):
        raise ModelError("the adapter in {folder} does not fit the model: {names}.", folder=folder, names=mismatches)
