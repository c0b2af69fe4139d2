"""An adapter merged into the weights of its base: whether that is possible, the model that comes out, and its values.

`plan_merge` decides from settings and config.json alone, on the meta device: `check`, training and `export-model` all
call it. Where embedding and output layer share a weight and the adapter changes one of them, or both differently, the
merged model has two (tie_word_embeddings=false). Trained biases that the base lacks are added if a key of its config
can do that.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from transformers import PreTrainedModel

from toolkit import secrets
from toolkit.config.schema import RunConfig, TuningMethod
from toolkit.messages import CheckpointError, ModelError, NotMergeable, clauses, reading, tr, warn
from toolkit.models import adapters, base_model, classifier, directory, fine_tuning, lora, lora_init, structure, weights
from toolkit.models.load import load_empty, stream_parameters
from toolkit.plan.tuning_targets import SCORE, tuning_of

TIED = "tie_word_embeddings"
_UNCHANGED_STARTS = {"true", "false", "gaussian", "eva", "orthogonal", "mica"}
"""`init_lora_weights` with which peft (0.21) leaves the base's weights unchanged."""

_TRIAL_ROWS = 4
# How far a merged layer's output may be from that with the adapter beside it, in float32: as shares of what the adapter
# adds, and of the output, whose rounding hides adapters that add hardly anything.
_SHARE_OF_ADDED, _SHARE_OF_OUTPUT = 1e-3, 1e-5

Change = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
"""Takes a weight of the base and the adapter's tensors (by their names in the model), and returns the merged weight, in
float32 if it was computed."""


@dataclass(frozen=True, slots=True)
class TunedPart:
    """Trained parameters (an adapter, or some of a model's own), and the base model that has all others."""

    source: Path | str
    """Checkpoint or adapter, for messages."""
    settings: dict[str, Any]
    """Content of adapter_config.json; {} where parameters of the model itself were trained."""
    identity: base_model.BaseModel | None
    """Identifies the model; None where an adapter of other programs says nothing."""
    base: Path
    values: dict[str, torch.Tensor]
    """By name: in the model, or of an adapter in its file."""
    head: classifier.Head | None = None
    """The classification head trained in place of the base's output layer; None where the base keeps that."""

    @property
    def can_merge(self) -> bool:
        """Whether its fine-tuning method allows merging into the base's weights: LoRA, or no adapter at all."""
        return not self.settings or adapters.method_of(self.settings) is TuningMethod.lora

    def describe(self) -> dict[str, bytes]:
        """Return file name -> content of what describes the adapter: its settings, and where its base is now."""
        path = secrets.hide(str(self.base.absolute()))
        base = base_model.BaseModel(path, {} if self.identity is None else self.identity.numbers)
        settings = self.settings | {"base_model_name_or_path": path}
        return adapters.AdapterState(adapters.method_of(self.settings), settings, base, self.head).describe()

    def shaped(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return `model`, the base, with the trained head in place of its output layer; the head is still random."""
        return model if self.head is None else classifier.with_head(model, self.head, seed=0)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """How an adapter is merged into its base's weights."""

    model: PreTrainedModel
    """The merged model, with empty parameters."""
    stored: dict[str, str]
    """Name of each adapter parameter in the model -> its name in the adapter's file."""
    changes: dict[str, list[Change]]
    """Parameter of the merged model -> its changes, in the order in which they are made."""
    copied: dict[str, str] = field(default_factory=dict)
    """Parameter that was tied in the base, and is untied in the merged model -> the one that it was tied to."""
    added: frozenset[str] = frozenset()
    """Biases that the base lacks; they start from zeros."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the config that differ from the base's."""


def plan_merge(part: TunedPart) -> MergePlan:
    """Return how an adapter is merged into its base, or raise NotMergeable. Decided by its settings and the base's
    config, on the meta device; values are read only to see whether two tied weights stay equal. The base is built
    twice: with the adapter, to see what that changes, and with the config keys that give all changes a place.
    """
    _check_method(part)
    empty_model = part.shaped(load_empty(part.base))
    base_shapes, tied = weights.shapes_of(empty_model), dict(weights.tied_parameter_names(empty_model))
    with reading(part.source, ModelError):
        adapters.attach_adapter(empty_model, part.settings, part.identity or base_model.BaseModel(str(part.base), {}))
    changes, stored = _changes_by_parameter(empty_model), adapters.stored_names(empty_model)
    # Second name -> first, as in `tied`: the weights that the merged model cannot share any more.
    untied = {second: first for second, first in tied.items() if {second, first} & changes.keys()}
    if untied and part.values and _stays_tied(part, changes, stored, untied):  # then one of them is enough
        changes, untied = {name: steps for name, steps in changes.items() if name not in untied}, {}
    needed = {name for name in changes if name not in base_shapes and name not in untied}  # biases that the base lacks
    config = {TIED: False} if untied else {}
    config |= dict.fromkeys(_bias_keys(part, empty_model, base_shapes, needed), True) if needed else {}
    model = part.shaped(load_empty(part.base, config)) if config else part.shaped(load_empty(part.base))
    shapes, still_tied = weights.shapes_of(model), weights.tied_parameter_names(model)
    if not_untied := sorted(name for name in untied if name in still_tied or name not in shapes):
        raise _not_mergeable(
            part,
            tr(
                "it changes {names} and the weight that the model ties to it in different ways, and {architecture} "
                "cannot have two",
                names=", ".join(not_untied),
                architecture=type(model).__name__,
            ),
        )
    if lost := sorted({*changes} - {*shapes}):
        raise _not_mergeable(
            part,
            tr(
                "it trains {names}, for which {architecture} has no place",
                names=clauses(lost[:5]),
                architecture=type(model).__name__,
            ),
        )
    # The key unties all pairs at once: also those that no change has separated get a weight of their own.
    copied = {second: first for second, first in tied.items() if second in shapes and second not in still_tied}
    added = frozenset(shapes.keys() - base_shapes.keys() - copied.keys())
    return MergePlan(model, stored, changes, copied, added, config)


def part_of_recipe(cfg: RunConfig) -> TunedPart:
    """Return the adapter that a recipe will train, without values, so that `plan_merge` can judge it beforehand."""
    base, tuning = Path(cfg.model.path), tuning_of(cfg)
    if tuning.adapter:
        settings = adapters.read_settings(Path(tuning.adapter))
    else:
        settings = lora_init.as_plain_settings(fine_tuning.new_settings(load_empty(base), tuning, str(base)))
    return TunedPart(tuning.adapter or tr("the adapter of this run"), settings, None, base, {})


def tell_unmergeable(part: TunedPart) -> None:
    """Warn before training if the trained adapter could not be merged into its base."""
    if directory.is_trusted(part.base):  # a directory's own code may build what cannot be built on the meta device
        return
    try:
        plan_merge(part)
    except NotMergeable as error:
        warn(str(error))


def _check_method(part: TunedPart) -> None:
    """Raise NotMergeable for a prefix (P-Tuning v2), and for LoRA whose initialization changed the base's weights."""
    if not part.can_merge:
        raise _not_mergeable(part, tr("it stands before the tokens, not in the weights"))
    start = str(part.settings.get("init_lora_weights", True))
    if start.lower() not in _UNCHANGED_STARTS:
        raise NotMergeable(
            "{adapter} cannot be merged into its base: with init_lora_weights = {value} peft also changed the base. "
            "Convert it with peft: save_pretrained(DIR, path_initial_model_for_weight_conversion=START), where START "
            "is the adapter before training.",
            adapter=part.source,
            value=start,
        )


def _not_mergeable(part: TunedPart, reason: str) -> NotMergeable:
    """Return the error for an adapter that cannot be merged into its base."""
    return NotMergeable(
        "{adapter} cannot be merged into its base: {reason}. Use it as an adapter of its base, which toolkit generate, "
        "chat and eval take (adapter=DIR).",
        adapter=part.source,
        reason=reason,
    )


def _changes_by_parameter(empty_model: PreTrainedModel) -> dict[str, list[Change]]:
    """Return parameter of the base -> changes that merging makes to it, read off a model on the meta device with the
    adapter attached. Those that replace a parameter come before those that add to it.
    """
    name_of = {id(parameter): name for name, parameter in empty_model.named_parameters()}  # of shared ones the first
    replaced: dict[str, list[Change]] = {}
    adapted: dict[str, list[Change]] = {}
    for name, module in empty_model.named_modules():  # peft's layers around the base's, which are their `base_layer`
        plain = name.replace(".base_layer", "")
        parameters = {key: name_of[id(value)] for key, value in module.named_parameters(remove_duplicate=False)}
        if isinstance(module, LoraLayer):
            # Of experts in one tensor each parameter has a layer around the layer of the one before.
            parameters = {key: value for key, value in parameters.items() if not key.startswith("base_layer.")}
            adapted.setdefault(f"{plain}.{parameter_of(module)}", []).append(_AddLora(module, parameters))
            if module.lora_bias.get(lora.ADAPTER):
                scaling = module.scaling[lora.ADAPTER]
                bias = parameters[f"lora_B.{lora.ADAPTER}.bias"]
                adapted.setdefault(f"{plain}.bias", []).append(_AddBias(bias, scaling))
        elif isinstance(module, ModulesToSaveWrapper):  # a module trained in full: a copy next to the base's
            prefix = f"modules_to_save.{lora.ADAPTER}."
            stored = [key for key in module.state_dict(keep_vars=True) if key.startswith(prefix)]  # and stored buffers
            for key in stored:
                replaced[f"{name}.{key.removeprefix(prefix)}"] = [_ReplaceBy(parameters.get(key, f"{name}.{key}"))]
        elif isinstance(module, TrainableTokensWrapper):  # rows of an embedding that were trained in full
            rows = module.token_adapter.token_indices[lora.ADAPTER]
            adapted[f"{name}.weight"] = [
                _ReplaceRows(parameters[f"token_adapter.trainable_tokens_delta.{lora.ADAPTER}"], list(rows))
            ]
    for name in structure.trained_names(empty_model):  # biases that peft's `bias` trains
        plain = name.replace(".base_layer", "")
        if ".lora_" not in name and ".modules_to_save." not in name and ".token_adapter." not in name:
            replaced[plain] = [_ReplaceBy(name)]
    return replaced | {name: [*replaced.get(name, []), *steps] for name, steps in adapted.items()}


@dataclass(frozen=True, slots=True)
class _AddLora:
    """Adds the product of LoRA's two matrices to a weight."""

    layer: Any
    """peft's layer, on the meta device."""
    names: dict[str, str]
    """Name of each of its parameters in the layer -> in the model."""

    def __call__(self, weight: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight with LoRA's product added; see `Change`."""
        return merge_lora(self.layer, weight, {key: values[name] for key, name in self.names.items()})


@dataclass(frozen=True, slots=True)
class _AddBias:
    """Adds the bias of LoRA's matrix B, scaled, to a bias."""

    name: str
    scaling: float

    def __call__(self, bias: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the bias with LoRA's scaled bias added."""
        return bias.float() + self.scaling * values[self.name].float()


@dataclass(frozen=True, slots=True)
class _ReplaceBy:
    """Replaces a parameter by one that was trained in full."""

    name: str

    def __call__(self, _: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the trained parameter."""
        return values[self.name]


@dataclass(frozen=True, slots=True)
class _ReplaceRows:
    """Replaces the rows of some tokens in an embedding matrix by trained ones."""

    name: str
    rows: list[int]

    def __call__(self, weight: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the matrix with the trained rows in it."""
        return weight.float().index_copy(0, torch.tensor(self.rows), values[self.name].float())


def parameter_of(layer: Any) -> str:
    """Return the name, in its module, of the parameter that a LoRA layer of peft adapts."""
    name: str = getattr(layer, "parameter_name", "weight")
    return name


def merge_lora(layer: Any, weight: torch.Tensor, trained: dict[str, torch.Tensor]) -> torch.Tensor:
    """Merge LoRA's tensors, `trained` by their names in peft's `layer`, into its base `weight`; return it in float32.

    Raises:
        ValueError: a trained tensor is not finite.
        _MergeDiffersError: the merged layer gives other outputs than the layer with LoRA beside it.
    """
    # A copy: the plan's layer stays on the meta device. Without its kwargs, which may hold another layer's tensors.
    layer = deepcopy(layer, {id(layer.kwargs): {}}).eval()
    layer.lora_bias = dict.fromkeys(layer.lora_bias, False)  # a parameter of its own: see _AddBias
    base, parameter_name = layer.get_base_layer(), parameter_of(layer)
    weights.set_value(base, parameter_name, weight.float())
    for name, value in trained.items():
        is_bias = name.startswith("lora_B.") and name.endswith(".bias")
        weights.set_value(layer, name, torch.zeros(value.shape) if is_bias else value.float())
    with torch.no_grad():
        trial = _trial_input(layer, base)
        outputs = None if trial is None else (layer(trial), base(trial))
        layer.merge(safe_merge=True)
        if outputs is not None:
            _check_same_output(base(trial), *outputs)
    merged: torch.Tensor = base.get_parameter(parameter_name).detach()
    return merged


class _MergeDiffersError(Exception):
    """A merged layer gives other outputs than the layer with its adapter beside it; says by which share."""


def _trial_input(layer: Any, base: torch.nn.Module) -> torch.Tensor | None:
    """Return random inputs (token ids, or features [rows, in]) to compare a layer's outputs before and after merging;
    None for experts in one tensor, whose weight peft changes in training, too. Sets the bias of `base` to 0.
    """
    if hasattr(layer, "parameter_name"):
        return None
    if isinstance(bias := getattr(base, "bias", None), torch.Tensor):
        weights.set_value(base, "bias", torch.zeros(bias.shape))
    draw = torch.Generator().manual_seed(0)  # not the run's own
    if isinstance(base, torch.nn.Embedding):
        return torch.randint(base.num_embeddings, (64,), generator=draw)
    return torch.randn(_TRIAL_ROWS, layer.in_features, generator=draw)


def _check_same_output(merged: torch.Tensor, expected: torch.Tensor, without: torch.Tensor) -> None:
    """Raise _MergeDiffersError unless the outputs of the merged layer are those `expected`, of the layer with LoRA
    beside it; `without`: those of the base layer alone, by which what LoRA adds is known.
    """
    added = float((expected - without).abs().max())
    difference = float((merged - expected).abs().max())
    if difference > _SHARE_OF_ADDED * added + _SHARE_OF_OUTPUT * float(expected.abs().max()):
        raise _MergeDiffersError(f"{difference / added:.2g}" if added else f"{difference:.2g}")


def _stays_tied(
    part: TunedPart, changes: dict[str, list[Change]], stored: dict[str, str], untied: dict[str, str]
) -> bool:
    """Whether merging leaves the tied weights `untied` (second name -> first) equal, so that they can stay tied."""
    if any(second not in changes or first not in changes for second, first in untied.items()):
        return False
    values = _adapter_values(part, stored)
    base = dict(stream_parameters(part.base, {*untied.values()})[1])

    def merged(name: str, value: torch.Tensor) -> torch.Tensor:
        return _apply_changes(name, value, changes, values)

    return all(torch.equal(merged(second, base[first]), merged(first, base[first])) for second, first in untied.items())


def _adapter_values(part: TunedPart, stored: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their names in the model; ModelError if they are not those that it takes."""
    adapters.check_fit({*stored.values()}, part.values, part.source)
    return {name: part.values[stored_name] for name, stored_name in stored.items()}


def _apply_changes(
    name: str, value: torch.Tensor, changes: dict[str, list[Change]], values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a parameter's value after all its changes; `values`: the adapter's tensors. CheckpointError if NaN or Inf,
    or if the merged layer gives other outputs.
    """
    try:
        for change in changes.get(name, []):
            value = change(value, values)
    except ValueError as error:  # peft looks for NaN
        raise CheckpointError("{name} is NaN or Inf: the run had diverged.", name=name) from error
    except _MergeDiffersError as error:
        raise CheckpointError(
            "{name}: merged, the layer computes something else than with the adapter beside it (a difference of {part} "
            "of what the adapter adds). Nothing was written: use the adapter as it is.",
            name=name,
            part=error,
        ) from error
    return value


def _bias_keys(
    part: TunedPart, empty_model: PreTrainedModel, base_shapes: weights.Shapes, needed: set[str]
) -> list[str]:
    """Return the keys of the base's config which, set to true, give its model some of the biases `needed`; found by
    trying them on the meta device.
    """
    config, keys = empty_model.config.get_text_config().to_dict(), []
    for key in [key for key, value in config.items() if "bias" in key and value is False]:
        if needed & (weights.shapes_of(part.shaped(load_empty(part.base, {key: True}))).keys() - base_shapes.keys()):
            keys.append(key)
    return keys


def merge_adapter(part: TunedPart) -> tuple[MergePlan, Iterator[tuple[str, torch.Tensor]]]:
    """Return the plan of a merge, and an iterator of the merged model's (name, value), streamed from the base's files
    in their precision, or in float32 where changed. Iterating raises CheckpointError for values that are NaN or Inf, or
    not of this model.
    """
    plan, trained = None, part.values
    if part.settings:
        plan = plan_merge(part)
        trained = _adapter_values(part, plan.stored)
    model, values = stream_parameters(part.base)
    # Without new keys: the model as its directory has it, with its origin (`ModelRecord.origin`).
    if plan is None or not plan.config:
        model = part.shaped(model)
    if plan is None:  # no adapter: trained parameters of the model itself take the place of the base's
        own_names = {*trained} - {*weights.tied_parameter_names(model)}
        plan = MergePlan(model, {}, {name: [_ReplaceBy(name)] for name in own_names})
    elif not plan.config:
        plan = replace(plan, model=model)
    return plan, _merged(part, plan, values, trained)


def _merged(
    part: TunedPart, plan: MergePlan, values: Iterator[tuple[str, torch.Tensor]], trained: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each parameter of the merged model, from the base's `values` and the `trained` ones;
    CheckpointError if a changed parameter does not occur.
    """
    shapes, unused = weights.shapes_of(plan.model), {*plan.changes}
    for name, value in values if part.head is None else _with_room_for_head(values, shapes):
        if part.identity is not None and name in part.identity.numbers:
            base_model.check_numbers(part.identity, name, base_model.fingerprint_of(value), part.base, part.source)
        for target in (name, *(second for second, first in plan.copied.items() if first == name)):
            unused.discard(target)
            yield target, _apply_changes(target, value, plan.changes, trained)
    for name in plan.added:
        unused.discard(name)
        yield name, _apply_changes(name, torch.zeros(shapes[name]), plan.changes, trained)
    if unused:
        raise CheckpointError(
            "{folder} does not hold its model: {reason}.", folder=part.source, reason=sorted(unused)[:5]
        )


def _with_room_for_head(
    values: Iterator[tuple[str, torch.Tensor]], wanted: weights.Shapes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those of a base's values that a classifier on top of it has too, and zeros for its head's weight."""
    for name, value in values:
        if name in wanted and name != SCORE:
            yield name, value
    yield SCORE, torch.zeros(wanted[SCORE])
