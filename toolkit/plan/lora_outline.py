"""The outline of a model with LoRA: which layers get factors of which shapes, and trained rows of added tokens."""

from dataclasses import replace

from toolkit.config import schema
from toolkit.plan.outline import HEAD, MAGNITUDES, OUTPUT, TRAINED_ROWS, Outline, Shapes, Sizes, layer_of
from toolkit.plan.tuning_targets import ALL_LINEAR, default_targets, matching_names

_ROUTERS = (".gate.weight", ".router.weight")
"""Names of routers' matrices in transformers (5.23), which are no nn.Linear."""
_EXPERT_LIKE_NAMES = (".gate_proj", ".up_proj", ".down_proj")


def with_lora(shapes: Shapes, sizes: Sizes, tuning: schema.TuningConfig, targets: list[str]) -> Outline:
    """Return the outline of a model with LoRA in the layers `targets`, or if that is [] in those that
    `tuning.target_modules` matches. ConfigError if a pattern of the settings matches nothing.
    """
    # A head that is tied to the embedding can be a target, though it has no parameter of its own.
    embeddings = [shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    is_tied = bool(embeddings) and not any(name in shapes for name in OUTPUT)
    with_head = shapes | {HEAD: embeddings[0]} if is_tied else shapes
    targets = targets or _matching_targets(with_head, tuning.target_modules)
    owners = {name.rpartition(".")[0] for name in with_head}
    saved = {name for pattern in tuning.save_modules for name in matching_names("tuning.save_modules", pattern, owners)}
    added: Shapes = {}
    frozen: Shapes = {}
    for name in dict.fromkeys(targets):
        if len(with_head.get(name, ())) == 3:  # experts: peft has the factors of all of a matrix in two parameters
            number, out, width = with_head[name]
            added[f"{name}.lora_A.default.weight"] = (tuning.rank * number, width)
            added[f"{name}.lora_B.default.weight"] = (out, tuning.rank, number)
            continue
        out, width = with_head[f"{name}.weight"]
        added[f"{name}.lora_A.default.weight"] = (tuning.rank, width)
        added[f"{name}.lora_B.default.weight"] = (out, tuning.rank)
        if tuning.init in (schema.LoraInit.pissa, schema.LoraInit.olora):
            frozen |= {f"{name}.initial_A": (tuning.rank, width), f"{name}.initial_B": (out, tuning.rank)}
        if tuning.dora:
            added[name + MAGNITUDES] = (out,)
    for name, shape in with_head.items():
        owner, _, end = name.rpartition(".")
        if owner in saved:  # peft keeps the original too
            added[f"{owner}.modules_to_save.default.{end}"] = shape
    return Outline(shapes | added | frozen, frozenset(added), sizes, frozenset(targets))


def _matching_targets(shapes: Shapes, patterns: list[str]) -> list[str]:
    """Return the layers, and stacks of experts' matrices, that the `patterns` of `tuning.target_modules` match, [] for
    the usual ones. A layer may match several patterns, and is then named several times.
    """
    linear = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith(_ROUTERS)
    ]
    experts = [name for name, shape in shapes.items() if len(shape) == 3]
    if experts:  # peft mistakes linear layers of these names for experts (adapter_settings.mistaken_for_experts)
        linear = [name for name in linear if not name.endswith(_EXPERT_LIKE_NAMES)]
    inside = [name for name in linear if layer_of(name) >= 0]
    patterns = patterns or default_targets("", inside)
    if ALL_LINEAR in patterns:
        return inside
    names = {*linear, *experts}
    return [name for pattern in patterns for name in matching_names("tuning.target_modules", pattern, names)]


def with_trained_rows(outline: Outline, count: int) -> Outline:
    """Return the outline of a model with LoRA that also trains so many rows of its embedding and output layer, unless
    one of these is trained in full.
    """
    vocabulary = outline.vocabulary
    tables = [name for name, shape in outline.shapes.items() if shape == vocabulary and layer_of(name) < 0]
    if any(name in outline.trained for name in tables):
        return outline
    suffix = f".{TRAINED_ROWS}.trainable_tokens_delta.default"
    rows = {name.removesuffix(".weight") + suffix: (count, vocabulary[1]) for name in tables}
    return replace(outline, shapes=outline.shapes | rows, trained=outline.trained | rows.keys())
