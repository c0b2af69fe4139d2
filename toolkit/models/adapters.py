"""Fine-tuning methods: what each adds to a model and trains; adapters as directories, and the base that they fit.

- LoRA, through peft, in place. Hu et al. 2021, https://arxiv.org/abs/2106.09685; rsLoRA: Kalajdzievski 2023,
  https://arxiv.org/abs/2312.03732; DoRA: Liu et al. 2024, https://arxiv.org/abs/2402.09353. QLoRA: frozen weights in 4
  bits (NF4, double quantisation), by bitsandbytes. Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
- P-Tuning v2: learned keys and values before every layer's own; unlike peft's, positions begin at 0 after the prefix.
  Liu et al. 2021, https://arxiv.org/abs/2110.07602.
- Prompt tuning: learned embeddings before the first token, in peft's files. Lester et al. 2021,
  https://arxiv.org/abs/2104.08691.

P learned tokens, L layers, H hidden width, W = 2 * L * width of one layer's keys.

A base is recognised by a few of its numbers, taken under transformers' names: equal, but for rounding, for an official
directory and its conversion. Directories have peft's layout, for P-Tuning v2 the ChatGLM repositories' names, plus
base.json, which identifies the base.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PromptTuningConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from toolkit import secrets
from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.distributed import process_group
from toolkit.layouts import experts
from toolkit.messages import BaseMissing, ConfigError, ModelError, clauses, json_object, reading, tr, warn
from toolkit.models import adapter_settings, classifier, directory, probe, weights
from toolkit.models.cache import CACHE, OLDER, arguments_by_name, cache_of, mask_and_positions, num_cached
from toolkit.plan.outline import ALL_LINEAR, SCORE, check_matches, default_targets, select_names


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers, first to last."""
    layers: nn.ModuleList = model.get_submodule(decoder_layers_name(model))
    return layers


def decoder_layers_name(model: PreTrainedModel) -> str:
    """Return the name of the list of a model's decoder layers; ModelError if there is none."""
    number = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    found = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == number]
    if not found:
        raise ModelError("{architecture} has no list of decoder layers.", architecture=type(model).__name__)
    return min(found, key=len)


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
_OF_MERGING = r"`lora_bias=True` was passed|Model has `tie_word_embeddings=True`"
"""How peft's warnings (0.21) begin about what it cannot merge; see `toolkit.export.merge`."""


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
        stack.enter_context(experts.shown_whole(model))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _OF_MERGING)
        try:
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:  # kinds of layers that peft knows nothing to add to
            raise ModelError(
                "peft cannot add this LoRA to {architecture}: {reason} Name other layers (tuning.target_modules), or "
                "use tuning=full or tuning=freeze.",
                architecture=type(model).__name__,
                reason=str(error).partition("\n")[0],
            ) from error
    experts.attach_lora(model, ADAPTER)
    for name, part in model.named_modules():
        if isinstance(part, AuxiliaryTrainingWrapper) and any(map(process_group.is_expert_part, part.parameters())):
            raise ConfigError(
                "tuning.save_modules: {name} holds experts, which parallel.expert divides over ranks. Add LoRA to them "
                "(tuning.target_modules=[experts.down_proj]), or set parallel.expert=1.",
                name=name,
            )
    for parameter in model.parameters():  # peft keeps additions to half-precision models in float32
        if parameter.requires_grad and not hasattr(parameter, "ds_shape"):
            parameter.data = parameter.data.to(precision)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it does without its LoRA additions, and with the modules that it came with.

    peft's `enable_adapters` would also freeze the additions and thaw them again, behind the back of DeepSpeed's hooks.
    """
    layers: list[Any] = [one for one in model.modules() if isinstance(one, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def quantize(model: PreTrainedModel) -> None:
    """Put what has values of a model's decoder on this rank's device in 4 bits; see `quantize_layer`."""
    for name, _ in list(model.named_parameters()):
        quantize_layer(model, name)
    experts.compute_sorted(model)
    model.is_loaded_in_4bit = True  # asked for by peft 0.21


def quantize_layer(model: PreTrainedModel, name: str) -> None:
    """Put the linear layer of a parameter, or the experts that it is, on this rank's device in 4 bits, unless they are,
    or lack values yet; embedding, head and all else stay. A collective of divided experts.
    """
    if not name.startswith(f"{decoder_layers_name(model)}."):
        return
    import bitsandbytes
    from deepspeed.accelerator import get_accelerator  # as in `attention`

    device = torch.device(get_accelerator().current_device_name())
    path, parameter = name.rpartition(".")[0], model.get_parameter_or_buffer(name)
    if not isinstance(parameter, nn.Parameter):  # a router's bias
        return
    layer, is_stacked = model.get_submodule(path), experts.is_stacked(name, parameter)
    if is_stacked and not model._can_set_experts_implementation():  # only the model itself could compute with them
        return
    needed = [parameter] if is_stacked else list(layer.parameters(recurse=False))
    if any(one.is_meta or hasattr(one, "quant_state") for one in needed):  # meta: of another stage of a pipeline, too
        return
    if is_stacked:
        numbers = fingerprint_of(parameter)
        experts.quantize(layer, name, device).fingerprint = numbers
    elif isinstance(layer, nn.Linear):
        small = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,  # the model's own is known once its first parameter has been read
            compress_statistics=True,
            quant_type="nf4",
        )
        # On some CPUs bitsandbytes would pack weights again in evaluation, and training after it would fail (0.50).
        small.support_avx512bf16_for_cpu = False
        small.load_state_dict(layer.state_dict())
        model.set_submodule(path, small.to(device))
        small.weight.fingerprint = fingerprint_of(layer.weight)


PREFIX = "transformer.prefix_encoder."
"""What the names of its tensors begin with in official checkpoints."""


class PrefixEncoder(nn.Module):
    """The prefix of one model, under the official names. `projection`: an MLP after the embedding, else [P, W]."""

    def __init__(self, config: Any, num_tokens: int, projection: bool, dropout: float) -> None:
        super().__init__()
        self.num_tokens, self.num_layers, self.dropout = num_tokens, config.num_hidden_layers, dropout
        self.num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.tensor_size = 1
        """Ranks that split the layers, of which each has some of the heads."""
        width, hidden = 2 * self.num_layers * self.num_heads * self.head_size, config.hidden_size
        # Before the MLP ChatGLM-6B embeds in the hidden width, its successors in the full one.
        embedded = hidden if projection and config.model_type == "chatglm" else width
        self.embedding, self.trans = nn.Embedding(num_tokens, embedded), None
        if projection:
            self.trans = nn.Sequential(nn.Linear(embedded, hidden), nn.Tanh(), nn.Linear(hidden, width))

    def states(self, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys, which are not rotated, and values, [B, heads, P, head_size] each."""
        indices = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        states = self.embedding(indices)  # looked up, so that ZeRO-3 fetches it
        if self.trans is not None:
            states = self.trans(states)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, -1)
        if self.tensor_size > 1:
            from deepspeed.module_inject.layers import ScatterToTensorParallelRegion  # seconds, as in `attention`

            sizes, group = [states.size(-1) // self.tensor_size] * self.tensor_size, process_group.tensor_group()
            states = ScatterToTensorParallelRegion.apply(group, states, sizes, torch.distributed.get_rank(group))
        states = states.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
        states = states[:, None].expand(-1, batch_size, -1, -1, -1)
        states = functional.dropout(states, self.dropout, self.training)  # of each row for itself, as the original's
        return [(states[2 * layer], states[2 * layer + 1]) for layer in range(self.num_layers)]

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Put the prefix in front of a forward pass, before it."""
        kwargs = arguments_by_name(model, args, kwargs)
        ids = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        cache = cache_of(kwargs)
        # To ChatGLM-6B, what precedes the mask is a prefix; to parts of rows, what keys there are more than queries.
        if not getattr(model, "builds_positions", False) and not kwargs.get("in_parts"):
            kwargs["attention_mask"], kwargs["position_ids"] = mask_and_positions(kwargs, ids, self.num_tokens)
        if not num_cached(kwargs):
            if cache is None:
                cache = DynamicCache() if kwargs.get("use_cache") else FixedCache()
            for layer, (keys, values) in enumerate(self.states(len(ids))):
                DynamicCache.update(cache, keys, values, layer)
        kwargs.pop(OLDER, None)  # newer models know both names, and one of them has to be given
        kwargs[CACHE] = cache
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
        if kwargs.get("in_parts"):
            positions, kwargs["learned"] = kwargs["position_ids"], self.num_tokens
        else:
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
        if output.logits.size(1) == kwargs["position_ids" if kwargs.get("in_parts") else "attention_mask"].size(1) > 1:
            output.logits = output.logits[:, self.num_tokens :]
        return output


def attach_prompt(model: PreTrainedModel, prompt: SoftPrompt) -> None:
    """Let every forward pass of a model begin with learned embeddings, its submodule `soft_prompt`."""
    model.soft_prompt = prompt
    model.register_forward_pre_hook(prompt.make_room, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(prompt.fill)
    model.register_forward_hook(prompt.drop_logits, with_kwargs=True)


BASE_FILE = "base.json"
RUN_BASE = "base"
"""Folder of a run that holds its base where that was random and so is nowhere else."""
_PARAMETERS, _NUMBERS = 8, 8
_ROUNDING = 0.02
"""Largest difference as a fraction of the number; bfloat16 rounds by 0.004."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A model that something was trained on."""

    path: str
    """Absolute path of its directory; without secrets, so that a base below one has to be named again."""
    numbers: dict[str, list[float]]
    """By name of a parameter, eight of its numbers."""

    def write(self) -> bytes:
        """Return the content of base.json."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def base_of(model: PreTrainedModel, path: Path) -> BaseModel:
    """Return what identifies a model, as loaded from `path`. A collective under ZeRO-3, and of stages of a pipeline."""
    # Not the head of a classifier, which is made for training.
    parameters = sorted((one for one in model.named_parameters() if one[0] != SCORE), key=lambda one: one[0])
    indices = torch.linspace(0, len(parameters) - 1, min(_PARAMETERS, len(parameters))).round().long().tolist()
    chosen = [parameters[index] for index in dict.fromkeys(indices)]  # from the first to the last
    numbers = {name: fingerprint_of(parameter) for name, parameter in chosen}
    if any(parameter.is_meta for _, parameter in parameters):  # which another stage holds
        for part in process_group.gather(numbers):
            numbers |= {name: found for name, found in part.items() if found}
    return BaseModel(secrets.hide(str(path.absolute())), numbers)


def fingerprint_of(parameter: torch.Tensor) -> list[float]:
    """Return some of a parameter's numbers, from all over it; none of an empty one. A collective of divided experts."""
    if parameter.is_meta:
        return []
    if found := getattr(parameter, "fingerprint", None):  # of one in 4 bits, as it was before
        return list(found)
    part, count = process_group.part_of(parameter)
    with weights.full_params([parameter]):
        flat = parameter.detach().flatten()
        size = flat.numel()
        indices = torch.linspace(0, size * count - 1, _NUMBERS, dtype=torch.float64).long().tolist()
        found = {index: float(flat[index % size]) for index in indices if index // size == part}
    if count > 1:  # of experts, some on each rank
        for others in process_group.gather(found):
            found |= others
    return [found[index] for index in indices]


def read_base(folder: Path) -> BaseModel | None:
    """Return what an adapter or a checkpoint says of its base, None if it says nothing."""
    file = folder / BASE_FILE
    if not file.is_file():
        return None
    with reading(file, ModelError):
        return BaseModel(**json_object(file, ModelError))


def check_base(known: BaseModel, found: BaseModel, folder: object) -> None:
    """Reject a model, `found`, that is not `known`, the one that was trained on; `folder`: what was trained."""
    for name in known.numbers:
        check_numbers(known, name, found.numbers.get(name, []), found.path, folder)


def check_numbers(known: BaseModel, name: str, found: list[float], path: object, folder: object) -> None:
    """Reject a model of which one parameter differs; see `check_base`. `found`: its `fingerprint_of`."""
    numbers = known.numbers[name]
    if len(found) != len(numbers) or any(
        not abs(one - other) <= _ROUNDING * max(abs(one), abs(other)) + 1e-6
        for one, other in zip(numbers, found, strict=True)
    ):
        raise ModelError(
            "{folder} was trained on another model than {path}: {name} differs. It was trained on {known}; set "
            "model.path to that model.",
            folder=folder,
            path=path,
            name=name,
            known=known.path,
        )


def find_base(folder: Path, given: str = "") -> Path:
    """Return the base of an adapter or checkpoint with base.json: `given`, or if "" where it was, or in its run."""
    known = read_base(folder)
    recorded = given or ("" if known is None else known.path)
    near = [] if given else [parent / RUN_BASE for parent in folder.absolute().parents[:4]]
    for path in [*([Path(recorded)] if recorded else []), *near]:
        if (path / "config.json").is_file():
            return path
    raise BaseMissing(
        "the base model of {folder} was not found: {path}. Name its directory: toolkit export-model PATH base=DIR "
        "output=OUT writes an adapter that records it; toolkit generate, chat and eval take model.path=DIR "
        "adapter={folder}.",
        folder=folder,
        path=recorded or "?",
    )


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PTUNING_V2 = "PTUNING_V2"
SCORING = "SEQ_CLS"
"""peft's `task_type` of an adapter with the head of a classifier."""
_METHODS = {"LORA": TuningMethod.lora, "PROMPT_TUNING": TuningMethod.prompt, PTUNING_V2: TuningMethod.ptuning_v2}
_PEFT_MODEL, _PROMPT = "base_model.model.", "prompt_embeddings"
_SOFT_PROMPT = "soft_prompt.embedding.weight"


@dataclass(frozen=True, slots=True)
class AdapterState:
    """How a model was changed for training a part of it; its attribute `tuned`."""

    method: TuningMethod
    """lora also for qlora: the additions are the same."""
    settings: dict[str, Any]
    """Content of adapter_config.json; {} where the model's own parameters are trained."""
    base: BaseModel
    head: classifier.Head | None = None
    """Of a classifier."""

    def describe(self) -> dict[str, bytes]:
        """Return the files that say what an adapter, or a checkpoint without frozen weights, is."""
        files = {BASE_FILE: self.base.write()}
        if self.settings:
            files[CONFIG] = (json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n").encode()
            files |= {classifier.FILE: self.head.write()} if self.head else {}
        return files


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether what is trained of a model is an adapter, and no part of its own parameters."""
    return bool(getattr(getattr(model, "tuned", None), "settings", None))


def trained_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def shared_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the second name of each trained parameter that is in two places (peft's `ensure_weight_tying`), with the
    first, under which alone it is trained and saved.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in every if one.requires_grad and first[id(one)] != name}


def base_numbers(model: PreTrainedModel) -> dict[str, list[float]]:
    """Return the numbers of the base in memory, without quantised or divided ones. A collective under ZeRO-3."""
    known, found = model.tuned.base.numbers, {}
    for name, parameter in model.named_parameters():
        of_base = name.replace(".base_layer", "").replace(".original_module", "")
        is_its_own = parameter.is_floating_point() and not process_group.is_part(parameter)
        if of_base in known and is_its_own and not parameter.requires_grad:
            found[of_base] = fingerprint_of(parameter)
    return found


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """Return by what name an adapter's file holds each trained parameter; and what else a module that is saved whole
    has, such as the bias of GLM's routers, without which peft does not load it.
    """
    names, method = trained_names(model), model.tuned.method
    if method is TuningMethod.ptuning_v2:
        return {name: f"transformer.{name}" for name in names}
    if method is TuningMethod.prompt:
        return {_SOFT_PROMPT: _PROMPT}
    copies = [name for name in model.state_dict(keep_vars=True) if f".modules_to_save.{ADAPTER}." in name]
    stand_ins = {name: torch.empty(0) for name in dict.fromkeys((*names, *copies))}
    name_of = {id(value): name for name, value in stand_ins.items()}
    # Else it would ask a hub for the base's config.
    found = get_peft_model_state_dict(model, stand_ins, ADAPTER, save_embedding_layers=False)
    return {name_of[id(value)]: _PEFT_MODEL + stored for stored, value in found.items()}


def as_stored(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return an adapter's tensor in peft's shape: of the experts of a layer LoRA's second factor is a matrix there."""
    return value.flatten(1) if ".lora_B." in name and value.dim() == 3 else value


# Of peft's settings: what names modules to import, or data and states to read while an adapter is put in (peft 0.21).
_OUTSIDE = {
    *("auto_mapping", "megatron_config", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter's directory, or a P-Tuning v2 checkpoint of the ChatGLM repositories."""
    return (path / CONFIG).is_file() or is_original_prefix(path)


def is_original_prefix(path: Path) -> bool:
    """Their Trainer writes the prefix into a pytorch_model.bin beside a config.json with pre_seq_len."""
    return (path / "config.json").is_file() and bool(directory.read_object(path / "config.json").get("pre_seq_len"))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return an adapter's adapter_config.json."""
    if not (folder / CONFIG).is_file():
        if not is_original_prefix(folder):
            raise ModelError("{folder} holds no adapter: there is no {file}.", folder=folder, file=CONFIG)
        original = directory.read_object(folder / "config.json")
        return prefix_settings(int(original["pre_seq_len"]), bool(original.get("prefix_projection")), "")
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


def base_of_adapter(folder: Path, given: str = "") -> Path:
    """Return the directory of the model that an adapter was trained on; see `find_base`."""
    named, known = str(read_settings(folder).get("base_model_name_or_path") or ""), read_base(folder)
    # peft's own file names the base too: alone, or by hand, as it is written with the same path as base.json.
    is_edited = known is None or named != known.path
    return find_base(folder, given or (named if is_edited else ""))


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


def attach_adapter(
    model: PreTrainedModel,
    settings: dict[str, Any],
    base: BaseModel,
    *,
    dropout: float = 0.0,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Put an untrained adapter into a model, on the meta device too; only its parameters stay trainable."""
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
    # A stage of a pipeline lacks the others' weights, and draws what they begin with all the same.
    with torch.device("meta") if all(one.is_meta for one in model.parameters()) else nullcontext():
        if method is TuningMethod.ptuning_v2:
            attach_prefix(model, settings["pre_seq_len"], settings["prefix_projection"], dropout)
        elif method is TuningMethod.prompt:
            shape = settings["num_virtual_tokens"], settings["token_dim"]
            attach_prompt(model, SoftPrompt(torch.zeros(shape, dtype=model.dtype)))
        else:
            # Another version of peft may have settings that this one does not know.
            names = LoraConfig.__dataclass_fields__.keys() - _OUTSIDE
            known = {name: value for name, value in settings.items() if name in names}
            known = adapter_settings.with_names(known, [name for name, _ in model.named_modules()])
            inject_lora(model, LoraConfig(**known | {"inference_mode": False}), ds_config)
    model.tuned = AdapterState(method, settings, base, classifier.head_of(model))


def load_adapter(
    model: PreTrainedModel,
    folder: Path,
    base: BaseModel,
    *,
    dropout: float = 0.0,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Put a trained adapter into the model that it was trained on; see `attach_adapter`."""
    settings, known = read_settings(folder), read_base(folder)
    if known is not None and any(base.numbers.values()):  # an empty model has none
        check_base(known, base, folder)
    values = read_adapter_weights(folder)
    with reading(folder / CONFIG, ModelError):
        attach_adapter(model, settings, base, dropout=dropout, ds_config=ds_config)
    load_values(model, values, folder)


def read_adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their stored names; nothing in the file is executed."""
    for name in (WEIGHTS, "adapter_model.bin", "pytorch_model.bin"):
        if (folder / name).is_file():
            # ChatGLM-6B's own P-Tuning saved lm_head too.
            only = PREFIX if method_of(read_settings(folder)) is TuningMethod.ptuning_v2 else ""
            return {key: value for key, value in weights.read_tensors(folder / name).items() if key.startswith(only)}
    raise ModelError("{folder} holds no adapter: there is no {file}.", folder=folder, file=WEIGHTS)


def load_values(model: PreTrainedModel, values: dict[str, torch.Tensor], folder: object) -> None:
    """Give an adapter's parameters their values; all of them, and nothing else."""
    stored, own = stored_names(model), model.state_dict(keep_vars=True)
    wrong = []
    for name, stored_name in stored.items():
        parameter, value = own[name], values.get(stored_name)
        expected = process_group.full_shape(name, parameter)
        if value is not None and value.shape != as_stored(name, torch.empty(expected, device="meta")).shape:
            wrong.append(f"{stored_name} {tuple(value.shape)} != {expected}")
        elif value is not None:
            value = process_group.take_part(name, value.view(expected), *process_group.part_of(parameter))
            parameter.data.copy_(value)
    check_fit({*stored.values()}, values, folder, wrong)


def check_fit(names: set[str], values: dict[str, torch.Tensor], folder: object, wrong: Sequence[str] = ()) -> None:
    """Raise ModelError if an adapter has other tensors, or `wrong` ones; a head beside LoRA is peft's (0.21)."""
    misnamed = sorted(name for name in names ^ {*values} if not name.endswith(".base_layer.weight"))
    if found := clauses([*misnamed, *wrong][:5]):
        raise ModelError("the adapter in {folder} does not fit the model: {names}.", folder=folder, names=found)


def apply_tuning(
    model: PreTrainedModel,
    config: TuningConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Add what a method adds, by `seed` the same on every rank, and leave trainable what it trains: then in
    `model.tuned`. With `ds_config`, where parameters are partitioned, a collective.
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
        quantize(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.adapter:
            folder = Path(config.adapter)
            found = method_of(read_settings(folder))
            if found is not (TuningMethod.lora if method is TuningMethod.qlora else method):
                raise ConfigError(
                    "tuning.adapter = {folder} is an adapter of tuning={found}, not of tuning={wanted}.",
                    folder=folder,
                    found=found.value,
                    wanted=method.value,
                )
            load_adapter(model, folder, known, dropout=config.dropout, ds_config=ds_config)
            if not all(one.is_contiguous() for one in model.parameters() if one.requires_grad):
                raise ConfigError(
                    "tuning.adapter = {folder}: with ensure_weight_tying peft computes LoRA of the output layer from "
                    "the numbers of that of the embedding, which DeepSpeed cannot train as one. Merge it (toolkit "
                    "export-model {folder} merge=true output=DIR), and train on DIR.",
                    folder=folder,
                )
        elif method is TuningMethod.freeze:
            freeze(model, config)
            model.tuned = AdapterState(method, {}, known)
        else:
            settings = new_settings(model, config, known.path)
            attach_adapter(model, settings, known, dropout=config.dropout, ds_config=ds_config)
            if method is TuningMethod.prompt:
                model.soft_prompt.embedding.weight.data.copy_(_prompt_values(model, config, tokenizer))


def _targets(model: PreTrainedModel, config: TuningConfig) -> tuple[list[str], list[str]]:
    """Return which linear layers and matrices of experts get additions, as peft is told."""
    modules, layers = dict(model.named_modules()), f"{decoder_layers_name(model)}."
    linear = {name for name, part in modules.items() if isinstance(part, nn.Linear) and name.startswith(layers)}
    patterns, stacked = config.target_modules or default_targets(model.config.model_type, linear), set[str]()
    fitting = linear
    if ALL_LINEAR in patterns:
        patterns = sorted({name.rpartition(".")[2] for name in linear})
    else:
        fitting = {name for name, part in modules.items() if isinstance(part, nn.Linear | nn.Embedding)}
        stacked = experts.names_of(model)
        for pattern in patterns:
            check_matches("tuning.target_modules", pattern, fitting | stacked)
    of_experts, chosen = sorted(select_names(stacked, patterns)), sorted(select_names(fitting, patterns))
    for key, value in (("tuning.dropout", config.dropout), ("tuning.dora", config.dora)):
        if of_experts and value:
            raise ConfigError(
                "{key} = {value} cannot be: peft has it for linear layers alone, and {name} is a tensor of all "
                "experts. Leave it out, or the experts (tuning.target_modules).",
                key=key,
                value=value,
                name=of_experts[0],
            )
    if lost := adapter_settings.taken_for_experts(model, chosen):
        others = sorted({*chosen} - lost)
        if not (others or of_experts):
            raise ConfigError(
                "tuning.target_modules: peft takes {name} for a matrix of the routed experts, so its adapter could not "
                "be loaded. Name the experts (experts.down_proj), or layers of the attention.",
                name=min(lost),
            )
        warn(
            "LoRA leaves out {count} linear layers, such as {name}: peft takes them for matrices of the experts.",
            count=len(lost),
            name=min(lost),
        )
        return others, of_experts
    by_name = of_experts or any(sign in one for one in patterns for sign in "*?[")
    return (chosen if by_name else patterns), of_experts


def new_settings(model: PreTrainedModel, config: TuningConfig, base: str) -> dict[str, Any]:
    """Return adapter_config.json of an adapter that training begins with."""
    settings: PeftConfig
    if config.method is TuningMethod.ptuning_v2:
        return prefix_settings(config.num_tokens, config.projection, base)
    if config.method is TuningMethod.prompt:
        settings = PromptTuningConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            num_virtual_tokens=config.num_tokens,
            token_dim=model.config.hidden_size,
            num_layers=model.config.num_hidden_layers,
            num_attention_heads=model.config.num_attention_heads,
            num_transformer_submodules=1,
        )
    else:
        modules = dict(model.named_modules())
        held = {name for name, part in modules.items() if next(part.parameters(recurse=False), None) is not None}
        for name in config.save_modules:
            check_matches("tuning.save_modules", name, held)
        targets, of_experts = _targets(model, config)
        settings = LoraConfig(
            task_type=SCORING if probe.is_classifier(model) else "CAUSAL_LM",
            base_model_name_or_path=base,
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            use_dora=config.dora,
            target_modules=targets,
            target_parameters=of_experts or None,
            modules_to_save=config.save_modules or None,
        )
    values = settings.to_dict() | {"inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=sorted))  # sets become lists
    return plain


def _prompt_values(model: PreTrainedModel, config: TuningConfig, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the embeddings that a prompt begins with, [P, H]."""
    embedding, number = model.get_input_embeddings(), config.num_tokens
    if config.init_text:
        ids = tokenizer(config.init_text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError("tuning.init_text = '{text}' holds no token.", text=config.init_text)
        chosen = torch.tensor((ids * (number // len(ids) + 1))[:number])
    else:
        chosen = torch.randint(len(tokenizer), (number,))
    if embedding.weight.is_meta:
        return torch.empty(number, embedding.embedding_dim, device="meta")
    with weights.full_params([embedding.weight]):
        return embedding.weight.detach()[chosen.to(embedding.weight.device)].cpu()
