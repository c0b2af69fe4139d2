"""Fine-tuning methods: what each adds to a model, and what it leaves trainable."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PromptTuningConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from toolkit.config.schema import LoraInit, TuningConfig, TuningMethod
from toolkit.messages import ConfigError, ModelError, say, tr
from toolkit.models import lora, probe, prompt_tuning
from toolkit.models.adapters import (
    SCORING,
    AdapterState,
    attach_adapter,
    load_adapter,
    method_of,
    read_settings,
)
from toolkit.models.base_model import BaseModel, base_of
from toolkit.models.record import record_of, tuning_state
from toolkit.models.structure import decoder_layers, decoder_layers_name
from toolkit.models.trainable import untrained_prefixes
from toolkit.plan.tuning_targets import matching_names, select_names


def freeze(model: PreTrainedModel, config: TuningConfig) -> None:
    """Freeze all parameters but those of the last layers and those that the patterns match."""
    number = len(decoder_layers(model))
    if config.last_layers > number:
        raise ConfigError(
            "tuning.last_layers = {value}, but the model has {number} layers.", value=config.last_layers, number=number
        )
    names = [name for name, _ in model.named_parameters()]
    layers = decoder_layers_name(model)
    last = tuple(f"{layers}.{index}." for index in range(number - config.last_layers, number))
    trained = {name for name in names if name.startswith(last)}
    for pattern in config.patterns:
        trained.update(matching_names("tuning.patterns", pattern, names))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def freeze_untrained(model: PreTrainedModel, base: Path) -> None:
    """Freeze what the loss of text gives no gradient, as weight decay would still change it, and record that the model
    of the directory `base` is trained in part.
    """
    if untrained := untrained_prefixes(model):
        for name, parameter in model.named_parameters():
            if name.startswith(untrained):
                parameter.requires_grad_(False)
        record_of(model).tuned = AdapterState(TuningMethod.freeze, {}, base_of(model, base))


def apply_tuning(
    model: PreTrainedModel,
    config: TuningConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    ds_config: dict[str, Any] | None = None,
    is_resumed: bool = False,
) -> None:
    """Apply a fine-tuning method: add its adapter, or freeze parameters; recorded in `ModelRecord.tuned`.

    Args:
        base: directory of the model.
        tokenizer: for prompt tuning's initial text.
        seed: of the adapter's initial values, which are the same on every rank.
        ds_config: the DeepSpeed dict if parameters are partitioned, which makes this a collective.
        is_resumed: whether a checkpoint's values follow.
    """
    method = config.method
    if method is TuningMethod.full:
        freeze_untrained(model, base)
        return
    base_model = base_of(model, base)
    if method is TuningMethod.prompt and getattr(model, "builds_positions", False):
        raise ModelError(
            tr("ChatGLM-6B finds its positions from its tokens, among which a learned prompt has none: use ptuning_v2.")
        )
    if method is TuningMethod.qlora:
        lora.quantize(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.adapter:
            _load_trained_adapter(model, config, base_model, ds_config)
        elif method is TuningMethod.freeze:
            freeze(model, config)
            record_of(model).tuned = AdapterState(method, {}, base_model)
        else:
            settings = new_settings(model, config, base_model.path)
            attach_adapter(
                model, settings, base_model, dropout=config.dropout, ds_config=ds_config, is_resumed=is_resumed
            )
            if method is TuningMethod.prompt:
                model.soft_prompt.embedding.weight.data.copy_(prompt_tuning.initial_values(model, config, tokenizer))
    _check_learns_tokens(model, config)


def _load_trained_adapter(
    model: PreTrainedModel, config: TuningConfig, base: BaseModel, ds_config: dict[str, Any] | None
) -> None:
    """Add the adapter of `tuning.adapter`, with which training begins; ConfigError if it cannot be trained so."""
    folder = Path(config.adapter)
    adapter_method = method_of(read_settings(folder))
    # Adapters of LoRA and QLoRA are the same.
    if adapter_method is not (TuningMethod.lora if config.method is TuningMethod.qlora else config.method):
        raise ConfigError(
            "tuning.adapter = {folder} is an adapter of tuning={found}, not of tuning={wanted}.",
            folder=folder,
            found=adapter_method.value,
            wanted=config.method.value,
        )
    load_adapter(model, folder, base, dropout=config.dropout, ds_config=ds_config)
    if not all(parameter.is_contiguous() for parameter in model.parameters() if parameter.requires_grad):
        raise ConfigError(
            "tuning.adapter = {folder}: with ensure_weight_tying peft gives output layer and embedding one "
            "LoRA, which DeepSpeed cannot train. Merge it (toolkit export-model {folder} merge=true "
            "output=DIR), and train on DIR.",
            folder=folder,
        )


def _check_learns_tokens(model: PreTrainedModel, config: TuningConfig) -> None:
    """Report the rows of `model.add_tokens` that LoRA trains; ConfigError if no rows of such tokens are trained."""
    ids, embedding = record_of(model).added_token_ids, model.get_input_embeddings()
    if ids and (tables := tuning_state(model).settings.get("trainable_token_indices")):
        say(
            "LoRA also trains the embedding rows of the added tokens: {count} in {tables}.",
            count=len(ids),
            tables=", ".join(tables),
        )
    if ids and not any(value.requires_grad for value in embedding.parameters()):
        adapter, method = f"tuning.adapter = {config.adapter}", f"tuning.method = {config.method.value}"
        raise ConfigError(
            "model.add_tokens: {setting} leaves the embeddings as they are, so that new tokens would never be learned. "
            "With tuning=freeze add tuning.patterns=[embed_tokens.*,lm_head.*]; else start a new adapter.",
            setting=adapter if config.adapter else method,
        )


def new_settings(model: PreTrainedModel, config: TuningConfig, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of a new adapter; `base`: directory of the model."""
    settings: PeftConfig
    if config.method is TuningMethod.ptuning_v2:
        return prompt_tuning.prefix_settings(config.num_tokens, config.projection, base)
    if config.method is TuningMethod.prompt:
        text_config = model.config.get_text_config()
        settings = PromptTuningConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            num_virtual_tokens=config.num_tokens,
            token_dim=model.get_input_embeddings().embedding_dim,  # OPT's and ELECTRA's differ from hidden_size
            num_layers=text_config.num_hidden_layers,
            num_attention_heads=getattr(text_config, "num_attention_heads", None) or 1,  # peft needs one for Mamba, too
            num_transformer_submodules=1,
        )
    else:
        modules = dict(model.named_modules())
        with_weights = {name for name, part in modules.items() if any(True for _ in part.parameters(recurse=False))}
        for name in config.save_modules:
            matching_names("tuning.save_modules", name, with_weights)
        targets, expert_matrices = lora.choose_targets(model, config)
        settings = LoraConfig(
            task_type=SCORING if probe.is_classifier(model) else "CAUSAL_LM",
            base_model_name_or_path=base,
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            use_dora=config.dora,
            target_modules=targets,
            target_parameters=expert_matrices or None,
            fan_in_fan_out=any(isinstance(modules[name], Conv1D) for name in select_names(modules, targets)),
            modules_to_save=config.save_modules or None,
            trainable_token_indices=lora.trained_rows(model, config.save_modules) or None,
            init_lora_weights=_peft_init(config),
        )
    values = settings.to_dict() | {"inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=sorted))  # sets become lists
    return plain


def _peft_init(config: TuningConfig) -> Any:
    """Return peft's `init_lora_weights` for `tuning.init`: True, or a name such as pissa or pissa_niter_4."""
    if config.init is LoraInit.default:
        return True
    return config.init.value + (f"_niter_{config.init_iterations}" if config.init_iterations else "")
