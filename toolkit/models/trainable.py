"""Which models cannot be trained, checked before their weights are read; and which parts of a model are not trained."""

import re
from copy import deepcopy
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from toolkit.config.schema import Family, TaskKind
from toolkit.messages import ModelError, read_table, say, translated
from toolkit.models import probe
from toolkit.models.record import record_of
from toolkit.models.structure import tower_prefixes


def check_generates_text(model: PreTrainedModel, folder: str | Path) -> None:
    """Raise ModelError for a classifier, which cannot generate text."""
    if probe.is_classifier(model):
        raise ModelError(
            "{folder} holds a model that scores sequences (a reward model or a classifier): it writes no text. Load it "
            "with transformers' AutoModelForSequenceClassification, or train on with task=reward or task=classify.",
            folder=folder,
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if a tokenizer is of another vocabulary, revision or family than the model."""
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise ModelError(
            "the tokenizer has {tokens} tokens, the model only {rows}: they do not match (model.tokenizer, "
            "model.path).",
            tokens=len(tokenizer),
            rows=rows,
        )
    if getattr(model, "builds_positions", False):
        # A tokenizer of another revision would put <sop> where the model never looks.
        for key, token in (("bos_token_id", "<sop>"), ("eos_token_id", "<eop>"), ("gmask_token_id", "[gMASK]")):
            expected, token_id = getattr(model.config, key), tokenizer.convert_tokens_to_ids(token)
            if token_id != expected:
                raise ModelError(
                    "the tokenizer's {token} is {found}, the model's {expected} ({key} in config.json): they are of "
                    "different revisions. Download tokenizer and model from the same revision.",
                    token=token,
                    found=token_id,
                    expected=expected,
                    key=key,
                )
    # Only ChatGLM's tokenizers have a family. That of ChatGLM-6B, also the default here, is compared above.
    family = getattr(tokenizer, "family", Family.chatglm)
    if family is not Family.chatglm:
        ends = model.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        stops = tokenizer.format.stop_ids
        if not set(ends) & set(stops):
            raise ModelError(
                "the model ends its answers with {ends} (eos_token_id in config.json), the tokenizer's format of "
                "{family} with {stops}: they do not match (model.tokenizer, model.path).",
                ends=ends,
                family=family.value,
                stops=stops,
            )


_SEES_ALL = (
    ("is_decoder", (False,), "is_decoder", "true"),
    ("causal", (False,), "causal", "true"),
    ("use_bidirectional_attention", (True, "all"), "is_causal", "false"),
)
"""Key of a config (of BERT and its kind, XLM, EmbeddingGemma); its values for bidirectional attention; the attribute
that is False in modules of classes that read the key; the value to set.
"""


def check_trains(model: PreTrainedModel, folder: Path, task: TaskKind) -> None:
    """Raise ModelError, with the key of config.json and what to do, for a model that cannot be trained; it may be on
    the meta device. `folder`: its directory, for the message. `task`: to predict tokens, attention must be causal.
    """
    kind, config = model.config.model_type, model.config.get_text_config()
    if reason := read_table("models/refused.yaml").get(kind):
        raise ModelError(
            "{folder}/config.json has model_type = {kind}, which cannot be trained: {reason}. Use another model.",
            folder=folder,
            kind=kind,
            reason=translated(reason),
        )
    if task not in (TaskKind.language, TaskKind.distill):
        return
    for key, values, attribute, right in _SEES_ALL:
        value = getattr(config, key, None)
        if value in values and any(vars(part).get(attribute) is False for part in model.modules()):
            raise ModelError(
                "{folder}/config.json has {key} = {value}: each token would see those after it, which it is to "
                'predict. Set "{key}": {right} there.',
                folder=folder,
                key=key,
                value=str(value).lower(),
                right=right,
            )


_TO_ENCODER = r"encoder_attn|encoder_attn_layer_norm"
"""Modules of decoder layers (BART and its kind) that attend to an encoder, which a causal language model lacks."""
_CHOOSERS = "indexer"
"""Modules that choose what attention sees (DeepSeek-V3.2, GLM-5, Qwen4): a choice has no gradient."""
_FOR_IMAGES = "vision_moe"
"""Modules inside decoder layers that images alone go through (ERNIE 4.5 VL MoE)."""
_FOR_SENTENCES = "pooler"
"""Modules that make one vector of a text for an encoder's tasks (BigBird): its causal model computes no such vector."""


def untrained_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the name prefixes of modules to which the loss of text gives no gradient: those of `tower_prefixes`,
    attention to an encoder that there is not, indexers, poolers and constants. Weight decay would still change them.
    """
    kinds = f"{_CHOOSERS}|{_FOR_IMAGES}|{_FOR_SENTENCES}"
    if not getattr(model.config, "is_encoder_decoder", False):
        kinds += f"|{_TO_ENCODER}"
    of_kinds = [f"{name}." for name, _ in model.named_modules() if re.fullmatch(kinds, name.rpartition(".")[2])]
    return tuple(dict.fromkeys((*tower_prefixes(model), *of_kinds, *_constants(model))))


def _constants(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters that a model's class creates without gradient: sinusoidal positions (Marian),
    biases of routers (ERNIE 4.5 MoE, AFMoE). transformers (5.23) lets them have one as it loads them.
    """
    if record_of(model).code_files is not None:  # a directory's own class, with which it does not do so
        return []
    config = deepcopy(model.config)
    config._attn_implementation = "eager"  # with which every class can be constructed
    with no_init_weights(), torch.device("meta"):
        fresh = type(model)(config)
    return [name for name, parameter in fresh.named_parameters() if not parameter.requires_grad]


def frozen_parts(model: PreTrainedModel) -> tuple[list[str], int]:
    """Return the names of modules never trained, `*` for layers' numbers, and how many parameters they have."""
    untrained = untrained_prefixes(model)
    # Without those inside another one.
    outermost = [name for name in untrained if not any(name != outer and name.startswith(outer) for outer in untrained)]
    sizes = [
        getattr(parameter, "ds_numel", parameter.numel())
        for name, parameter in model.named_parameters()
        if name.startswith(untrained)
    ]
    patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name).removesuffix(".") for name in outermost)
    return list(patterns), sum(sizes)


def is_tested(kind: str) -> bool:
    """Whether the toolkit's tests train models of a `model_type`; a newer transformers may have others."""
    return kind in read_table("models/tested.yaml")["types"].split()


def report_untested_type(model: PreTrainedModel) -> None:
    """Report a model type that no test trains."""
    if not is_tested(model.config.model_type):
        kind = model.config.model_type
        say("model_type = {kind} is untested: `toolkit check` tries a tiny model of it.", kind=kind)


def report_frozen_parts(model: PreTrainedModel) -> None:
    """Report the parts of a model that are never trained."""
    parts, count = frozen_parts(model)
    if count:
        say(
            "Not trained, as the loss of text gives them no gradient: {parts} ({count} parameters).",
            parts=", ".join(parts),
            count=f"{count:,}",
        )
