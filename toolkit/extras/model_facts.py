"""What can be done with a model directory, by its config.json: every answer is what a run with that setting would get,
from the same functions, on the meta device. No weights are read.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from toolkit.config import files, schema
from toolkit.config.requirements import reason_not_to_use_qlora
from toolkit.extras import type_trial
from toolkit.messages import ConfigError, ModelError, ToolkitError, silent, tr
from toolkit.models import directory, experts, extra_tensors, load, packable, quantized, structure, trainable
from toolkit.models.chatglm import official_files
from toolkit.models.record import record_of
from toolkit.plan import kernels
from toolkit.tasks.language_check import check_model

RANKS = 2
"""Over which `parallel` is tried."""


@dataclass(kw_only=True, slots=True)
class Method:
    """A fine-tuning method on a model."""

    refused: str = ""
    """Why training would reject it; "" if it would not."""
    trained: int = 0
    """Parameters that would be trained."""
    targets: list[str] = field(default_factory=list)
    """The linear layers, or ends of their names, that LoRA is added to."""


@dataclass(kw_only=True, slots=True)
class ModelFacts:
    """What `toolkit models` prints of a directory."""

    path: str
    type: str = ""
    architecture: str = ""
    """Class of transformers, or of this toolkit, that computes it."""
    parameters: int = 0
    multimodal: bool = False
    frozen: list[str] = field(default_factory=list)
    """Parts that are never trained, as the loss of text gives them no gradient."""
    frozen_parameters: int = 0
    methods: dict[str, Method] = field(default_factory=dict)
    """By `tuning=…`."""
    grouped: str = ""
    """Why its samples are not packed; "" if they are."""
    parallel: dict[str, str] = field(default_factory=dict)
    """Key of `parallel` -> why two ranks cannot divide the model so; "" if they can."""
    predicting: dict[str, int] = field(default_factory=dict)
    """What config.json says of layers for multi-token prediction."""
    trains_predicting: bool = False
    """Whether the model that is trained has them."""
    quantization: str = ""
    untested: str = ""
    """What a tiny model of its type does, if nobody has trained that type here; see `type_trial`."""
    chat_template: bool = False
    kernels: str = ""
    """Which optional packages its layers would use and are not installed; "" if none."""
    notes: list[str] = field(default_factory=list)
    """transformers' own warnings, such as of packages without which it computes slowly."""
    refused: str = ""
    """Why it cannot be trained, or is no model directory; "" if it can be."""


def model_folders(path: Path) -> list[Path]:
    """Return a model directory, or the model directories in one that is none."""
    if not path.is_dir() and (hub := files.hub_id_of_group(str(path))):
        raise ConfigError(
            "{name} is a model of this list, not on this disk. To see its methods:  hf download {hub} --exclude "
            "'*.safetensors' --local-dir {name}  and then  toolkit models {name}",
            name=path,
            hub=hub,
        )
    files.check_directory(path)
    inner = [] if (path / "config.json").is_file() else sorted(file.parent for file in path.glob("*/config.json"))
    return inner or [path]


def facts_of(folder: Path, max_length: int) -> ModelFacts:
    """Return what is known of a directory; `max_length`: tokens of a sequence, which decide whether windows matter."""
    facts = ModelFacts(path=str(folder))
    try:
        with silent(), _warnings_into(facts.notes):
            _fill(facts, folder, max_length)
    except ToolkitError as error:
        facts.refused = str(error)
    return facts


def _fill(facts: ModelFacts, folder: Path, max_length: int) -> None:
    """Find out everything about a directory, in the order in which it may fail, and write it into `facts`: what was
    found before an error is printed all the same.
    """
    config = directory.read_config(str(folder), with_weights=False)
    facts.type = str(config.get("model_type", ""))
    facts.quantization = quantized.method_of(folder, config)
    quantized.check_readable(folder)
    facts.kernels = kernels.describe_missing(config)
    facts.chat_template = bool(directory.saved_template(folder))
    # Read only where no template is: the vocabulary of an official ChatGLM, which has a chat format, may be an error.
    facts.chat_template = facts.chat_template or official_files.official_vocabulary(folder) is not None
    model = _built(folder)
    facts.architecture = type(model).__name__
    facts.parameters = sum(parameter.numel() for parameter in model.parameters())
    facts.multimodal = bool(structure.tower_prefixes(model))
    facts.frozen, facts.frozen_parameters = trainable.frozen_parts(model)
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            facts.predicting |= {key: section[key] for key in extra_tensors.predicting_keys(section)}
    names = [name for name, _ in model.named_parameters()]
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    facts.trains_predicting = bool(facts.predicting) and extra_tensors.has_predicting_layers(names, layers)
    cfg = schema.RunConfig(model=schema.ModelConfig(path=str(folder)), data=schema.DataConfig(max_length=max_length))
    facts.untested = type_trial.about(folder, cfg)
    facts.refused = _tried(cfg)[1]
    if facts.refused:
        return
    for method in schema.TuningMethod:
        # With the settings of the group of its name, as `tuning=lora` chooses it.
        values = files.read(files.conf_folder() / "tuning" / f"{method.value}.yaml").values
        facts.methods[method.value] = _method(replace(cfg, tuning=schema.TuningConfig(**values | {"method": method})))
    packed = replace(cfg, data=replace(cfg.data, packing=schema.Packing.packed))
    facts.grouped = packable.reason_not_to_pack(cfg.model, max_length) or _tried(packed)[1]
    has_experts = bool(experts.expert_matrix_names(model))
    for way in ("tensor", "sequence", "pipeline", *(["expert"] if has_experts else [])):
        facts.parallel[way] = _tried(replace(cfg, parallel=schema.ParallelConfig(**{way: RANKS})))[1]


def _built(folder: Path) -> PreTrainedModel:
    """Return the model of a directory without weights; ModelError for whatever its code raises."""
    try:
        return load.load_empty(folder)
    except ToolkitError:
        raise
    except Exception as error:
        raise ModelError(_surprise(error)) from error


def _method(cfg: schema.RunConfig) -> Method:
    """Return what a run with this config would train, or why it would be rejected."""
    if cfg.tuning.method is schema.TuningMethod.qlora and (reason := reason_not_to_use_qlora()):
        return Method(refused=reason)
    model, reason = _tried(cfg)
    if model is None:
        return Method(refused=reason)
    tuned = record_of(model).tuned  # how adapters were added; None where a method adds none
    settings = tuned.settings if tuned else {}
    targets = [*(settings.get("target_modules") or []), *(settings.get("target_parameters") or [])]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Method(trained=trained, targets=sorted({name.rpartition(".")[2] for name in targets}))


def _tried(cfg: schema.RunConfig) -> tuple[Any, str]:
    """Return (model, "") with the model as a run with this config would train it, or (None, why it would reject it)."""
    try:
        return check_model(cfg, tokenizer=None, compared=False), ""
    except ToolkitError as error:
        return None, str(error)
    except Exception as error:  # of a library on the meta device
        return None, _surprise(error)


def _surprise(error: Exception) -> str:
    """Return the text about an error that no rule knows, as the check before a run words it."""
    kind = type(error).__name__
    return tr("the model could not be tried beforehand: {kind}: {reason}.", kind=kind, reason=error)


@contextmanager
def _warnings_into(notes: list[str]) -> Iterator[None]:
    """Collect the warnings of transformers, each once, in place of printing them."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = " ".join(record.getMessage().split())
            if text not in notes:
                notes.append(text)

    logger, collector = logging.getLogger("transformers"), Collector(logging.WARNING)
    # Else a warning that an earlier directory has caused would not come again.
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers' own: once in a process
    before, logger.handlers = logger.handlers, [collector]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.handlers = before
