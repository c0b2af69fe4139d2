"""Adapters as folders: peft's layout for LoRA and prompt tuning, the ChatGLM repositories' names for P-Tuning v2.

`adapter_config.json` and `adapter_model.safetensors`, and beside them base.json, which tells the model they stand on.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model_state_dict
from transformers import PreTrainedModel

from toolkit.config.schema import TuningMethod
from toolkit.distributed.tensor import is_tensor_part
from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.chatglm.prefix import PREFIX, prefix_for
from toolkit.models.folder import read_object
from toolkit.models.limits import check_sizes
from toolkit.models.tuning import lora, patterns
from toolkit.models.tuning.base import FILE as BASE_FILE
from toolkit.models.tuning.base import Base, check_base, find_base, numbers_of, read_base
from toolkit.models.tuning.prefix import attach_prefix
from toolkit.models.tuning.prompt import SoftPrompt, attach_prompt
from toolkit.models.weights import read_tensors
from toolkit.outside import reading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PTUNING_V2 = "PTUNING_V2"
_METHODS = {"LORA": TuningMethod.lora, "PROMPT_TUNING": TuningMethod.prompt, PTUNING_V2: TuningMethod.ptuning_v2}
_PEFT_MODEL, _PROMPT = "base_model.model.", "prompt_embeddings"
_SOFT_PROMPT = "soft_prompt.embedding.weight"


@dataclass(frozen=True, slots=True)
class Tuned:
    """How a model was changed for training a part of it; its attribute `tuned`."""

    method: TuningMethod
    """lora also for qlora: the additions are the same."""
    settings: dict[str, Any]
    """Content of adapter_config.json; {} where the model's own parameters are trained."""
    base: Base
    """The model as it was."""

    def describe(self) -> dict[str, bytes]:
        """Return the files that say what an adapter, or a checkpoint without frozen weights, is."""
        files = {BASE_FILE: self.base.write()}
        if self.settings:
            files[CONFIG] = (json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n").encode()
        return files


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether what is trained of a model is an adapter, and no part of its own parameters."""
    tuned: Tuned | None = getattr(model, "tuned", None)
    return tuned is not None and bool(tuned.settings)


def trained_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def base_numbers(model: PreTrainedModel) -> dict[str, list[float]]:
    """Return the numbers of `Base`, of the base as it is in memory now. A collective under ZeRO-3.

    Without those of parameters that are quantised or divided by tensor parallelism: they are not the base's own.
    """
    known = model.tuned.base.numbers
    found = {}
    for name, parameter in model.named_parameters():
        of_base = name.replace(".base_layer", "").replace(".original_module", "")
        is_its_own = parameter.is_floating_point() and not is_tensor_part(parameter)
        if of_base in known and is_its_own and not parameter.requires_grad:
            found[of_base] = numbers_of(parameter)
    return found


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """Return by what name an adapter's file holds each trained parameter."""
    names, method = trained_names(model), model.tuned.method
    if method is TuningMethod.ptuning_v2:
        return {name: f"transformer.{name}" for name in names}
    if method is TuningMethod.prompt:
        return {_SOFT_PROMPT: _PROMPT}
    stand_ins = {name: torch.empty(0) for name in names}
    name_of = {id(value): name for name, value in stand_ins.items()}
    # Else it would ask a hub for the base's config.
    found = get_peft_model_state_dict(model, stand_ins, lora.ADAPTER, save_embedding_layers=False)
    return {name_of[id(value)]: _PEFT_MODEL + stored for stored, value in found.items()}


# Of peft's settings: what names modules to import, or data and states to read while an adapter is put in (peft 0.21).
_OUTSIDE = (
    *("auto_mapping", "megatron_config", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter's folder, or a P-Tuning v2 checkpoint of the ChatGLM repositories."""
    return (path / CONFIG).is_file() or is_original_prefix(path)


def is_original_prefix(path: Path) -> bool:
    """Their Trainer writes the prefix into a pytorch_model.bin beside a config.json with pre_seq_len."""
    return (path / "config.json").is_file() and bool(read_object(path / "config.json").get("pre_seq_len"))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return an adapter's adapter_config.json.

    Raises:
        ModelError: no adapter is there, or one of a kind that is not known here.
    """
    if not (folder / CONFIG).is_file():
        if not is_original_prefix(folder):
            raise ModelError(tr("{folder} holds no adapter: there is no {file}.", folder=folder, file=CONFIG))
        original = read_object(folder / "config.json")
        return prefix_settings(int(original["pre_seq_len"]), bool(original.get("prefix_projection")), "")
    settings = read_object(folder / CONFIG)
    if str(settings.get("peft_type")) not in _METHODS:
        raise ModelError(
            tr(
                "{file} is of the kind {kind}, which is not known here. Known: {known}.",
                file=folder / CONFIG,
                kind=settings.get("peft_type"),
                known=", ".join(_METHODS),
            )
        )
    check_sizes(settings, folder / CONFIG)
    patterns.check_names(settings, folder / CONFIG)
    return settings


def base_of_adapter(folder: Path, given: str = "") -> Path:
    """Return the folder of the model that an adapter was trained on; see `find_base`.

    Raises:
        ModelError: there is no adapter.
        BaseMissing: the model is nowhere.
    """
    settings = read_settings(folder)
    if not given and read_base(folder) is None:  # peft's own file names the base too
        given = str(settings.get("base_model_name_or_path") or "")
    return find_base(folder, given)


def method_of(settings: dict[str, Any]) -> TuningMethod:
    """Return the method of an adapter_config.json."""
    return _METHODS[settings["peft_type"]]


def prefix_settings(num_tokens: int, projection: bool, base: str) -> dict[str, Any]:
    """Return adapter_config.json of a P-Tuning v2 prefix, with the original's keys."""
    return {
        "peft_type": PTUNING_V2,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "pre_seq_len": num_tokens,
        "prefix_projection": projection,
    }


def prompt_settings(model: PreTrainedModel, num_tokens: int, base: str) -> dict[str, Any]:
    """Return peft's adapter_config.json of a learned prompt."""
    return as_json(
        PromptTuningConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            num_virtual_tokens=num_tokens,
            token_dim=model.config.hidden_size,
            num_layers=model.config.num_hidden_layers,
            num_attention_heads=model.config.num_attention_heads,
            num_transformer_submodules=1,
        )
    )


def as_json(config: Any) -> dict[str, Any]:
    """Return a peft config as its adapter_config.json, for use."""
    values = config.to_dict() | {"inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=sorted))  # sets become lists
    return plain


def attach(
    model: PreTrainedModel,
    settings: dict[str, Any],
    base: Base,
    *,
    dropout: float = 0.0,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Put an untrained adapter into a model; only its parameters stay trainable.

    Args:
        model: as loaded; on the meta device the adapter is too.
        settings: content of adapter_config.json.
        base: of the model.
        dropout: of a prefix in training; LoRA's is among the settings.
        ds_config: the DeepSpeed dict if the model's parameters are partitioned.
    """
    method, settings = method_of(settings), settings | {"base_model_name_or_path": base.path}
    place = torch.device("meta") if model.device.type == "meta" else nullcontext()
    model.requires_grad_(False)
    with place:
        if method is TuningMethod.ptuning_v2:
            encoder = prefix_for(model, settings["pre_seq_len"], settings["prefix_projection"], dropout)
            attach_prefix(model, encoder.to(model.dtype))
        elif method is TuningMethod.prompt:
            shape = settings["num_virtual_tokens"], settings["token_dim"]
            attach_prompt(model, SoftPrompt(torch.zeros(shape, dtype=model.dtype)))
        else:
            # Another version of peft may have settings that this one does not know.
            known = {
                name: value
                for name, value in settings.items()
                if name in LoraConfig.__dataclass_fields__ and name not in _OUTSIDE
            }
            known = patterns.with_names(known, [name for name, _ in model.named_modules()])
            lora.inject(model, LoraConfig(**known | {"inference_mode": False}), ds_config)
    model.tuned = Tuned(method, settings, base)


def load_adapter(
    model: PreTrainedModel,
    folder: Path,
    base: Base,
    *,
    dropout: float = 0.0,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Put a trained adapter into the model that it was trained on; see `attach`.

    Args:
        model: as loaded.
        folder: the adapter's.
        base: of the model; see `base_of`.
        dropout: of a prefix in training.
        ds_config: the DeepSpeed dict if the model's parameters are partitioned.

    Raises:
        ModelError: no adapter, one of another model, or one that is not whole.
    """
    settings, known = read_settings(folder), read_base(folder)
    if known is not None:
        check_base(known, base, folder)
    values = read_weights(folder)
    with reading(folder / CONFIG, ModelError):
        attach(model, settings, base, dropout=dropout, ds_config=ds_config)
    if method_of(settings) is TuningMethod.ptuning_v2:  # ChatGLM-6B's own training saved lm_head too
        values = {name: value for name, value in values.items() if name.startswith(PREFIX)}
    fill(model, values, folder)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their stored names; nothing in the file is executed.

    Raises:
        ModelError: no weights, or damaged ones.
    """
    for name in (WEIGHTS, "adapter_model.bin", "pytorch_model.bin"):
        if (folder / name).is_file():
            return read_tensors(folder / name)
    raise ModelError(tr("{folder} holds no adapter: there is no {file}.", folder=folder, file=WEIGHTS))


def fill(model: PreTrainedModel, values: dict[str, torch.Tensor], folder: Path) -> None:
    """Give an adapter's parameters their values; all of them, and nothing else.

    Args:
        model: with the adapter.
        values: by stored name.
        folder: where they come from, for messages.

    Raises:
        ModelError: a value is missing, too much, or of another shape.
    """
    stored = stored_names(model)
    wrong = sorted({*values} ^ {*stored.values()})
    for name, stored_name in stored.items():
        parameter, value = model.get_parameter(name), values.get(stored_name)
        if value is not None and value.shape != parameter.shape:
            wrong.append(f"{stored_name} {tuple(value.shape)} != {tuple(parameter.shape)}")
        elif value is not None:
            parameter.data.copy_(value)
    if wrong:
        raise ModelError(
            tr("the adapter in {folder} does not fit the model: {names}.", folder=folder, names="; ".join(wrong[:5]))
        )
