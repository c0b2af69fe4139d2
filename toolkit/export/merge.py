"""An adapter merged into the weights of its base: whether that is possible, the model that comes out, and its values.

`plan_merge` decides from settings and config.json alone, on the meta device: `check`, training and `export-model` all
call it. Where embedding and output layer share a weight and the adapter changes one of them, or both differently, the
merged model has two (tie_word_embeddings=false). Trained biases that the base lacks are added if a key of its config
can do that.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
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
_UNCHANGING_INITS = {"true", "false", "gaussian", "eva", "orthogonal", "mica"}
"""`init_lora_weights` with which peft (0.21) leaves the base's weights unchanged."""
_OF_PEFT = (".lora_", ".modules_to_save.", ".token_adapter.")
"""In the names of parameters that peft adds to a model."""

_TRIAL_ROWS = 4
# How far a merged layer's output may be from that with the adapter beside it, in float32: as shares of what the adapter
# adds, and of the output, whose rounding hides adapters that add hardly anything.
_SHARE_OF_ADDED, _SHARE_OF_OUTPUT = 1e-3, 1e-5
Tensors = Mapping[str, torch.Tensor]
Change = Callable[[torch.Tensor, Tensors], torch.Tensor]
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
    if untied and part.values and _stays_tied(part, changes, stored, untied):
        # Both change in the same way: the first one's changes are enough.
        changes = {name: steps for name, steps in changes.items() if name not in untied}
        untied = {}
    missing_biases = {name for name in changes if name not in base_shapes and name not in untied}
    config = {TIED: False} if untied else {}
    if missing_biases:
        config |= dict.fromkeys(_bias_keys(part, empty_model, base_shapes, missing_biases), True)
    model = part.shaped(load_empty(part.base, config))
    shapes, still_tied = weights.shapes_of(model), weights.tied_parameter_names(model)
    _check_room(part, type(model).__name__, shapes, still_tied, changes, untied)
    # The key unties all pairs at once: also those that no change has separated get a weight of their own.
    copied = {second: first for second, first in tied.items() if second in shapes and second not in still_tied}
    added = frozenset(shapes.keys() - base_shapes.keys() - copied.keys())
    return MergePlan(model, stored, changes, copied, added, config)


def _check_room(
    part: TunedPart,
    architecture: str,
    shapes: Collection[str],
    still_tied: Container[str],
    changes: Iterable[str],
    untied: Iterable[str],
) -> None:
    """Raise NotMergeable unless the merged model has a parameter for each name in `changes`, and one of its own for
    each in `untied`. `shapes`: names of its parameters; `still_tied`: those that it ties to others.
    """
    if not_untied := sorted(name for name in untied if name in still_tied or name not in shapes):
        raise _not_mergeable(
            part,
            tr(
                "it changes {names} and the weight that the model ties to it in different ways, and {architecture} "
                "cannot have two",
                names=", ".join(not_untied),
                architecture=architecture,
            ),
        )
    if lost := sorted({*changes} - {*shapes}):
        raise _not_mergeable(
            part,
            tr(
                "it trains {names}, for which {architecture} has no place",
                names=clauses(lost[:5]),
                architecture=architecture,
            ),
        )


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
    init = str(part.settings.get("init_lora_weights", True))
    if init.lower() not in _UNCHANGING_INITS:
        raise NotMergeable(
            "{adapter} cannot be merged into its base: with init_lora_weights = {value} peft also changed the base. "
            "Convert it with peft: save_pretrained(DIR, path_initial_model_for_weight_conversion=START), where START "
            "is the adapter before training.",
            adapter=part.source,
            value=init,
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
    adapter attached, in which peft's layers stand around the base's: "q_proj.base_layer.bias" is "q_proj.bias" of the
    base. Changes that replace a parameter come before those that add to it.
    """
    name_of = {id(parameter): name for name, parameter in empty_model.named_parameters()}  # of shared ones the first
    replaced: dict[str, list[Change]] = {}
    adapted: dict[str, list[Change]] = {}
    for name, module in empty_model.named_modules():
        # Name of each parameter in the module -> in the model.
        names = {key: name_of[id(value)] for key, value in module.named_parameters(remove_duplicate=False)}
        if isinstance(module, LoraLayer):
            for key, change in _lora_changes(module, names):
                adapted.setdefault(f"{name.replace('.base_layer', '')}.{key}", []).append(change)
        elif isinstance(module, ModulesToSaveWrapper):  # a module trained in full: a copy next to the base's
            prefix = f"modules_to_save.{lora.ADAPTER}."
            for key in module.state_dict(keep_vars=True):  # with its stored buffers, which `names` lacks
                if key.startswith(prefix):
                    trained = names.get(key, f"{name}.{key}")
                    replaced[f"{name}.{key.removeprefix(prefix)}"] = [partial(_replace_by, trained)]
        elif isinstance(module, TrainableTokensWrapper):  # rows of an embedding that were trained in full
            rows = module.token_adapter.token_indices[lora.ADAPTER]
            delta = names[f"token_adapter.trainable_tokens_delta.{lora.ADAPTER}"]
            adapted[f"{name}.weight"] = [partial(_replace_rows, delta, list(rows))]
    for name in structure.trained_names(empty_model):
        if not any(mark in name for mark in _OF_PEFT):  # a bias of the base, which peft's setting `bias` trains
            replaced[name.replace(".base_layer", "")] = [partial(_replace_by, name)]
    return replaced | {name: [*replaced.get(name, []), *steps] for name, steps in adapted.items()}


def _lora_changes(layer: LoraLayer, names: Mapping[str, str]) -> list[tuple[str, Change]]:
    """Return (parameter of the base layer, e.g. "weight"; its change) for what a LoRA layer adds; see `_add_lora`."""
    # Layers that adapt several parameters of a module stand around each other: without those of the layer inside.
    names_of_layer = {key: name for key, name in names.items() if not key.startswith("base_layer.")}
    changes: list[tuple[str, Change]] = [(parameter_of(layer), partial(_add_lora, layer, names_of_layer))]
    if layer.lora_bias.get(lora.ADAPTER):
        bias = names_of_layer[f"lora_B.{lora.ADAPTER}.bias"]
        changes.append(("bias", partial(_add_bias, bias, layer.scaling[lora.ADAPTER])))
    return changes


def _add_lora(layer: Any, names: Mapping[str, str], weight: torch.Tensor, values: Tensors) -> torch.Tensor:
    """Return a weight with the product of LoRA's matrices added. `layer`: peft's, on the meta device; `names`: those of
    its parameters, in the layer -> in the model.
    """
    return merge_lora(layer, weight, {key: values[name] for key, name in names.items()})


def _add_bias(name: str, scaling: float, bias: torch.Tensor, values: Tensors) -> torch.Tensor:
    """Return a bias with `name`, the bias of LoRA's matrix B, added, times `scaling`."""
    return bias.float() + scaling * values[name].float()


def _replace_by(name: str, _: torch.Tensor, values: Tensors) -> torch.Tensor:
    """Return, in place of a parameter, the one `name` that was trained in full."""
    return values[name]


def _replace_rows(name: str, rows: list[int], weight: torch.Tensor, values: Tensors) -> torch.Tensor:
    """Return an embedding matrix with `name`, the trained rows of some tokens, in it."""
    return weight.float().index_copy(0, torch.tensor(rows), values[name].float())


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
    layer.lora_bias = dict.fromkeys(layer.lora_bias, False)
    base, parameter_name = layer.get_base_layer(), parameter_of(layer)
    weights.set_value(base, parameter_name, weight.float())
    for name, value in trained.items():
        is_bias = name.startswith("lora_B.") and name.endswith(".bias")  # which `_add_bias` adds
        weights.set_value(layer, name, torch.zeros(value.shape) if is_bias else value.float())
    with torch.no_grad():
        trial = _trial_input(layer, base)
        if trial is not None:
            expected, without_lora = layer(trial), base(trial)
        layer.merge(safe_merge=True)
        if trial is not None:
            _check_same_output(base(trial), expected, without_lora)
    merged: torch.Tensor = base.get_parameter(parameter_name).detach()
    return merged


class _MergeDiffersError(Exception):
    """A merged layer gives other outputs than the layer with its adapter beside it; says by which share."""


def _trial_input(layer: Any, base: torch.nn.Module) -> torch.Tensor | None:
    """Return random inputs (token ids, or features [rows, in]) to compare a layer's outputs before and after merging;
    None for experts in one tensor, which peft adapts by changing the weight itself. Sets the bias of `base` to 0.
    """
    if hasattr(layer, "parameter_name"):  # experts in one tensor (peft 0.21, tuners/lora/layer.py)
        return None
    if isinstance(bias := getattr(base, "bias", None), torch.Tensor):
        weights.set_value(base, "bias", torch.zeros(bias.shape))
    draw = torch.Generator().manual_seed(0)  # not the run's own
    if isinstance(base, torch.nn.Embedding):
        return torch.randint(base.num_embeddings, (64,), generator=draw)
    return torch.randn(_TRIAL_ROWS, layer.in_features, generator=draw)


def _check_same_output(merged: torch.Tensor, expected: torch.Tensor, without_lora: torch.Tensor) -> None:
    """Raise _MergeDiffersError unless the outputs `merged` of the merged layer are those `expected`, of the layer with
    LoRA beside it. `without_lora`: those of the base layer alone.
    """
    added = float((expected - without_lora).abs().max())
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
    for second, first in untied.items():
        merged = [_apply_changes(name, base[first], changes, values) for name in (second, first)]
        if not torch.equal(*merged):
            return False
    return True


def _adapter_values(part: TunedPart, stored: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their names in the model; ModelError if they are not those that it takes."""
    adapters.check_fit({*stored.values()}, part.values, part.source)
    return {name: part.values[stored_name] for name, stored_name in stored.items()}


def _apply_changes(
    name: str, value: torch.Tensor, changes: dict[str, list[Change]], values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a parameter's value after its changes; CheckpointError if it is not finite, or outputs would differ."""
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
    """Return the keys of the base's config (such as "attention_bias") which, set to true, give its model some of the
    biases `needed`; found by trying them on the meta device.
    """
    config, keys = empty_model.config.get_text_config().to_dict(), []
    for key in [key for key, value in config.items() if "bias" in key and value is False]:
        with_biases = part.shaped(load_empty(part.base, {key: True}))
        if needed & (weights.shapes_of(with_biases).keys() - base_shapes.keys()):
            keys.append(key)
    return keys


def merge_adapter(part: TunedPart) -> tuple[MergePlan, Iterator[tuple[str, torch.Tensor]]]:
    """Return the plan of a merge, and an iterator of the merged model's (name, value), streamed from the base's files
    in their precision, or in float32 where changed. Iterating raises CheckpointError for NaN, Inf or foreign values.
    """
    if part.settings:
        plan = plan_merge(part)
        trained = _adapter_values(part, plan.stored)
        model, values = stream_parameters(part.base)
        if not plan.config:  # no new keys: the model as its directory has it, with its origin (`ModelRecord.origin`)
            plan = replace(plan, model=part.shaped(model))
        return plan, _merged(part, plan, values, trained)
    # No adapter: trained parameters of the model itself take the place of the base's.
    model, values = stream_parameters(part.base)
    model = part.shaped(model)
    own_names = {*part.values} - {*weights.tied_parameter_names(model)}
    plan = MergePlan(model, {}, {name: [partial(_replace_by, name)] for name in own_names})
    return plan, _merged(part, plan, values, part.values)


def _merged(
    part: TunedPart, plan: MergePlan, values: Iterator[tuple[str, torch.Tensor]], trained: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of the merged model's parameters; CheckpointError if a changed one does not occur."""
    shapes, unused = weights.shapes_of(plan.model), {*plan.changes}
    if part.head is not None:
        values = _with_room_for_head(values, shapes)
    for name, value in values:
        if part.identity is not None and name in part.identity.numbers:
            base_model.check_numbers(part.identity, name, base_model.fingerprint_of(value), part.base, part.source)
        untied_names = [second for second, first in plan.copied.items() if first == name]  # they begin with its value
        for target in (name, *untied_names):
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
    """Yield those of a base's values that a classifier with the parameters `wanted` has too, and zeros for its head."""
    for name, value in values:
        if name in wanted and name != SCORE:
            yield name, value
    yield SCORE, torch.zeros(wanted[SCORE])
