"""Fine-tuning methods: what each adds to a model, and which parameters it trains.

- LoRA, through peft, in place. Hu et al. 2021, https://arxiv.org/abs/2106.09685; rsLoRA: Kalajdzievski 2023,
  https://arxiv.org/abs/2312.03732; DoRA: Liu et al. 2024, https://arxiv.org/abs/2402.09353. QLoRA: frozen weights in 4
  bits (NF4, double quantisation), by bitsandbytes. Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
- P-Tuning v2: learned keys and values before every layer's own; unlike peft's, positions begin at 0 after the prefix.
  Liu et al. 2021, https://arxiv.org/abs/2110.07602.
- Prompt tuning: learned embeddings before the first token, in peft's files. Lester et al. 2021,
  https://arxiv.org/abs/2104.08691.

P learned tokens, L layers, H hidden width, W = 2 * L * width of one layer's keys.
"""

import inspect
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from toolkit.config.schema import TuningConfig
from toolkit.messages import ConfigError
from toolkit.models.weights import set_value
from toolkit.plan.parameters import ALL_LINEAR, check_matches, default_targets, select_names


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers, first to last."""
    layers: nn.ModuleList = model.get_submodule(decoder_layers_name(model))
    return layers


def decoder_layers_name(model: PreTrainedModel) -> str:
    """Return the name of the list of a model's decoder layers."""
    number = model.config.num_hidden_layers
    found = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == number]
    return min(found, key=len)


def arguments_by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a forward pass by name."""
    if args:
        names = [*inspect.signature(type(model).forward).parameters][1:]
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    return dict(kwargs)


def num_cached(kwargs: dict[str, Any]) -> int:
    """Return how many tokens the cache of a forward pass holds already."""
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def mask_and_positions(kwargs: dict[str, Any], ids: torch.Tensor, num_before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mask and positions of a pass with `num_before` learned tokens in front, which positions do not count.
    `ids`: `[B, S]`, or embeddings `[B, S, H]`; what `kwargs` leave out is made as transformers makes it.
    """
    rows, size = ids.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        earlier = max(num_cached(kwargs) - num_before, 0)
        mask = torch.ones(rows, earlier + size, dtype=torch.long, device=ids.device)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -size:]
    return torch.cat((mask.new_ones(rows, num_before), mask), dim=1), positions


def freeze(model: PreTrainedModel, config: TuningConfig) -> None:
    """Leave trainable the last layers, and the parameters that the patterns name."""
    number = len(decoder_layers(model))
    if config.last_layers > number:
        raise ConfigError(
            "tuning.last_layers = {value}, but the model has {number} layers.",
            value=config.last_layers,
            number=number,
        )
    names = [name for name, _ in model.named_parameters()]
    layers = decoder_layers_name(model)
    last = tuple(f"{layers}.{index}." for index in range(number - config.last_layers, number))
    trained = {name for name in names if name.startswith(last)}
    for pattern in config.patterns:
        trained.update(check_matches("tuning.patterns", pattern, names))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


ADAPTER = "default"


def lora_config(model: PreTrainedModel, config: TuningConfig, base: str) -> LoraConfig:
    """Return peft's settings for a model."""
    modules = {name for name, part in model.named_modules() if next(part.parameters(recurse=False), None) is not None}
    for name in config.save_modules:
        check_matches("tuning.save_modules", name, modules)
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        target_modules=_targets(model, config.target_modules),
        modules_to_save=config.save_modules or None,
    )


def inject_lora(model: PreTrainedModel, config: LoraConfig, ds_config: dict[str, Any] | None) -> None:
    """Put untrained additions into a model; only they, and the modules saved whole, stay trainable."""
    precision = model.dtype
    with ExitStack() as stack:
        if ds_config is not None and any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
            from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

            # peft (0.21) gathers partitioned weights where it reads them, if transformers says that they are. A local
            # name keeps the config, to which transformers has a weak reference.
            _config = HfDeepSpeedConfig(ds_config)
            stack.callback(unset_hf_deepspeed_config)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for parameter in model.parameters():  # peft keeps additions to half-precision models in float32
        if parameter.requires_grad and not hasattr(parameter, "ds_shape"):
            parameter.data = parameter.data.to(precision)


def _targets(model: PreTrainedModel, patterns: list[str]) -> list[str]:
    """Return the names, or ends of names, of the layers that get additions."""
    layers = f"{decoder_layers_name(model)}."
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name.startswith(layers)}
    patterns = patterns or default_targets(model.config.model_type, linear)
    if ALL_LINEAR in patterns:
        return sorted({name.rpartition(".")[2] for name in linear})
    fitting = {name for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Embedding)}
    for pattern in patterns:
        check_matches("tuning.target_modules", pattern, fitting)
    if not any(sign in pattern for pattern in patterns for sign in "*?["):
        return patterns
    return sorted(select_names(fitting, patterns))


def parameter_of(layer: Any) -> str:
    """Return what the parameter is called that one of peft's layers adds to."""
    name: str = getattr(layer, "parameter_name", "weight")
    return name


def merge_lora(layer: Any, weight: torch.Tensor, trained: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a layer's weight with the `trained` additions, by their names in the layer, computed in float32."""
    layer = deepcopy(layer)  # the layer itself stays on the meta device
    base, own = layer.get_base_layer(), parameter_of(layer)
    set_value(base, own, weight.float())
    for name, value in trained.items():
        set_value(layer, name, value.float())
    with torch.no_grad():
        layer.merge(safe_merge=True)
    merged: torch.Tensor = base.get_parameter(own).detach()
    return merged


def quantize(model: PreTrainedModel) -> None:
    """Put the linear layers of a model's decoder on the GPU in 4 bits, one after another; embedding and head stay."""
    import bitsandbytes

    device = torch.device("cuda", torch.cuda.current_device())
    for layer in decoder_layers(model):
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            small = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=model.dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
            small.load_state_dict(linear.state_dict())
            layer.set_submodule(name, small.to(device))
    model.is_loaded_in_4bit = True  # asked for by peft 0.21


PREFIX = "transformer.prefix_encoder."
"""What the names of its tensors begin with in official checkpoints."""


class PrefixEncoder(nn.Module):
    """The prefix of one model, under the official names. `projection`: an MLP after the embedding, else [P, W]."""

    def __init__(self, config: Any, num_tokens: int, projection: bool, dropout: float) -> None:
        super().__init__()
        self.num_tokens, self.num_layers, self.dropout = num_tokens, config.num_hidden_layers, dropout
        self.num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width, hidden = 2 * self.num_layers * self.num_heads * self.head_size, config.hidden_size
        self.trans: nn.Module | None = None
        if projection:
            # ChatGLM-6B embeds in the hidden width, its successors in the full one.
            embedded = hidden if config.model_type == "chatglm" else width
            self.embedding = nn.Embedding(num_tokens, embedded)
            self.trans = nn.Sequential(nn.Linear(embedded, hidden), nn.Tanh(), nn.Linear(hidden, width))
        else:
            self.embedding = nn.Embedding(num_tokens, width)

    def states(self, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys, which are not rotated, and values, [B, heads, P, head_size] each."""
        indices = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        states = self.embedding(indices)  # looked up, so that ZeRO-3 fetches it
        if self.trans is not None:
            states = self.trans(states)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, self.num_heads, self.head_size).permute(1, 2, 0, 3)
        states = states[:, None].expand(-1, batch_size, -1, -1, -1)
        states = functional.dropout(states, self.dropout, self.training)  # of each row for itself, as the original's
        return [(states[2 * layer], states[2 * layer + 1]) for layer in range(self.num_layers)]

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Put the prefix in front of a forward pass, before it."""
        kwargs = arguments_by_name(model, args, kwargs)
        ids = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        cache: Cache | None = kwargs.get("past_key_values")
        if not getattr(model, "builds_positions", False):  # to ChatGLM-6B, what precedes the mask is a prefix
            kwargs["attention_mask"], kwargs["position_ids"] = mask_and_positions(kwargs, ids, self.num_tokens)
        if not num_cached(kwargs):
            if cache is None:
                cache = DynamicCache() if kwargs.get("use_cache") else FixedCache()
            for layer, (keys, values) in enumerate(self.states(len(ids))):
                DynamicCache.update(cache, keys, values, layer)
        kwargs["past_key_values"] = cache
        return (), kwargs


class FixedCache(DynamicCache):
    """Keys and values that stand before a forward pass's own, which are not kept: the pass can be repeated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix and the new states of a layer, [B, heads, P + S, head_size] each."""
        own = self.layers[layer_idx]
        return torch.cat((own.keys, key_states), dim=-2), torch.cat((own.values, value_states), dim=-2)


def attach_prefix(model: PreTrainedModel, num_tokens: int, projection: bool, dropout: float) -> None:
    """Let every forward pass of a model begin with an untrained prefix, its submodule `prefix_encoder`."""
    model.prefix_encoder = prefix = PrefixEncoder(model.config, num_tokens, projection, dropout).to(model.dtype)
    model.register_forward_pre_hook(prefix.begin, with_kwargs=True)
    for layer in decoder_layers(model):  # transformers would drop the cache where activations are recomputed
        layer._can_checkpoint_with_cache = True  # type: ignore[assignment]


class SoftPrompt(nn.Module):
    """The learned embeddings, which begin as `values`, [P, H]."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.num_tokens = len(values)
        self.embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.is_due = False
        """Whether the tokens that are embedded next begin with places for the prompt."""

    def make_room(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Put places for the prompt in front of a forward pass's tokens, before it."""
        kwargs = arguments_by_name(model, args, kwargs)
        ids = kwargs["input_ids"]
        kwargs["attention_mask"], positions = mask_and_positions(kwargs, ids, self.num_tokens)
        positions = positions + self.num_tokens
        self.is_due = not num_cached(kwargs)
        if self.is_due:
            kwargs["input_ids"] = torch.cat((ids.new_zeros(len(ids), self.num_tokens), ids), dim=1)
            own = torch.arange(self.num_tokens, device=ids.device).expand(len(positions), -1)
            positions = torch.cat((own, positions), dim=1)
        kwargs["position_ids"] = positions
        return (), kwargs

    def fill(self, _: nn.Module, __: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        """Put the prompt where `make_room` left room for it, after the input embedding."""
        if not self.is_due:
            return embedded
        self.is_due = False
        prompt = self.embedding(torch.arange(self.num_tokens, device=embedded.device)).to(embedded.dtype)  # [P, H]
        return torch.cat((prompt.expand(len(embedded), -1, -1), embedded[:, self.num_tokens :]), dim=1)

    def drop_logits(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Drop the logits of the prompt, after the forward pass."""
        if output.logits.size(1) == kwargs["attention_mask"].size(1) > 1:
            output.logits = output.logits[:, self.num_tokens :]
        return output


def attach_prompt(model: PreTrainedModel, prompt: SoftPrompt) -> None:
    """Let every forward pass of a model begin with learned embeddings, its submodule `soft_prompt`."""
    model.soft_prompt = prompt
    model.register_forward_pre_hook(prompt.make_room, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(prompt.fill)
    model.register_forward_hook(prompt.drop_logits, with_kwargs=True)
