"""From `tuning` to a model of which a part is trained. One function for every method; the loop knows none of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.errors import ConfigError, ModelError
from toolkit.messages import tr
from toolkit.models.fill import whole
from toolkit.models.tuning import adapter, lora
from toolkit.models.tuning.adapter import Tuned
from toolkit.models.tuning.base import Base, base_of
from toolkit.models.tuning.freeze import freeze


def tune(
    model: PreTrainedModel,
    config: TuningConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Add what a method adds, and leave trainable what it trains.

    Args:
        model: as loaded; afterwards `model.tuned` says what was done to it, unless everything is trained.
        config: `tuning`.
        base: folder of the model.
        tokenizer: for `tuning.init_text`.
        seed: of what is added; every rank adds the same.
        ds_config: the DeepSpeed dict if the model's parameters are partitioned: a collective then.

    Raises:
        ConfigError: a setting does not fit the model.
        ModelError: `tuning.adapter` cannot be used, or the model has no such method.
    """
    method = config.method
    if method is TuningMethod.full:
        return
    known = base_of(model, base)
    if method is TuningMethod.prompt and getattr(model, "builds_positions", False):
        raise ModelError(
            tr("ChatGLM-6B finds its positions from its tokens, among which a learned prompt has none: use ptuning_v2.")
        )
    if method is TuningMethod.qlora:
        from toolkit.models.tuning.quantize import quantize

        quantize(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.adapter:
            _go_on_from(model, config, known, ds_config)
        elif method is TuningMethod.freeze:
            freeze(model, config)
            model.tuned = Tuned(method, {}, known)
        else:
            settings = _settings(model, config, known.path)
            adapter.attach(model, settings, known, dropout=config.dropout, ds_config=ds_config)
            if method is TuningMethod.prompt:
                model.soft_prompt.embedding.weight.data.copy_(_prompt_values(model, config, tokenizer))


def _settings(model: PreTrainedModel, config: TuningConfig, base: str) -> dict[str, Any]:
    """Return adapter_config.json of an adapter that is begun."""
    if config.method is TuningMethod.ptuning_v2:
        return adapter.prefix_settings(config.num_tokens, config.projection, base)
    if config.method is TuningMethod.prompt:
        return adapter.prompt_settings(model, config.num_tokens, base)
    return adapter.as_json(lora.lora_config(model, config, base))


def _go_on_from(model: PreTrainedModel, config: TuningConfig, base: Base, ds_config: dict[str, Any] | None) -> None:
    folder = Path(config.adapter)
    found = adapter.method_of(adapter.read_settings(folder))
    if found is not (TuningMethod.lora if config.method is TuningMethod.qlora else config.method):
        raise ConfigError(
            tr(
                "tuning.adapter = {folder} is an adapter of tuning={found}, not of tuning={wanted}.",
                folder=folder,
                found=found.value,
                wanted=config.method.value,
            )
        )
    adapter.load_adapter(model, folder, base, dropout=config.dropout, ds_config=ds_config)


def _prompt_values(model: PreTrainedModel, config: TuningConfig, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the embeddings that a prompt begins with, [P, H]."""
    embedding, number = model.get_input_embeddings(), config.num_tokens
    if config.init_text:
        ids = tokenizer(config.init_text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError(tr("tuning.init_text = '{text}' holds no token.", text=config.init_text))
        places = torch.tensor((ids * (number // len(ids) + 1))[:number])
    else:
        places = torch.randint(len(tokenizer), (number,))
    with whole([embedding.weight]):
        return embedding.weight.detach()[places.to(embedding.weight.device)].cpu()
