"""Models of a directory, empty or with one layer's weights at a time, and construction with random weights."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, GlmConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from toolkit.config.schema import Dtype, Init, ModelConfig, ShapeConfig
from toolkit.engine.ds_config import tensor_ranks
from toolkit.messages import ModelError, NotStreamable, reading, reason_of
from toolkit.models import attention, directory, probe, save, stored_form, weights
from toolkit.models.record import record_of

if TYPE_CHECKING:
    from toolkit.models.classifier import Head

GENERATION_FILE = "generation_config.json"
TORCH_DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16}
_CONSTRUCTOR_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Errors of model constructors for impossible configs or a missing package; RuntimeErrors may be the machine's."""
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    # Llama 4 with images reads it from its text model's output, which lacks it in transformers 5.24.0.
    MoeCausalLMOutputWithPast.image_outputs = None


def is_read_in_16_bits(folder: Path) -> bool:
    """Whether the files of a directory are quantized and their matrices are read in 16 bits."""
    if not directory.is_quantized(folder):
        return False
    from toolkit.models import quantized

    return quantized.is_read_in_16_bits(folder)


def stream_parameters(
    path: str | Path, only: Set[str] | None = None
) -> tuple[PreTrainedModel, Iterator[tuple[str, torch.Tensor]]]:
    """Return a directory's model with empty parameters, and an iterator over names and values of its parameters.
    The model is loaded at once if the files' format does not allow to read single parameters. Quantized ones are not
    rounded, as merging adds to them. `only`: names of parameters, None for all.
    """
    config = directory.read_config(str(path))
    try:
        model, files, layout = open_directory(Path(path), config, read_as=torch.float32)
    except NotStreamable:
        state = load_by_transformers(Path(path), None).state_dict()
        model = load_empty(path)
        names = [name for name in weights.shapes_of(model) if only is None or name in only]
        return model, ((name, state.pop(name)) for name in names)
    shapes = weights.shapes_of(model)
    return model, weights.stored_values(files, layout, shapes, shapes.keys() if only is None else only)


def load_empty(
    path: str | Path, changed: Mapping[str, Any] | None = None, *, compared: bool = False
) -> PreTrainedModel:
    """Build the model that a directory describes on the meta device, without reading weights.
    `changed`: config key -> value that replaces the file's. With `compared` names and shapes in the headers of the
    weight files are compared with the model's; ModelError if they differ.
    """
    config = directory.read_config(str(path), with_weights=compared)
    return open_directory(Path(path), config)[0] if compared else _build_empty(Path(path), config, changed=changed)


def _build_empty(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype | None = None,
    ds_config: dict[str, Any] | None = None,
    changed: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Build the model of a config.json that `directory.read_config` returned, with empty parameters; with `ds_config`
    partitioned over ranks. `changed`: see `load_empty`.
    """
    if directory.architecture_of(config) is not None:
        return _build_official(folder, config, ds_config, changed)
    model_config, trusted = change_config(transformers_config(folder), changed or {}), directory.is_trusted(folder)
    try:
        model = weights.build_empty(
            lambda: model_class(model_config).from_config(model_config, dtype=dtype, trust_remote_code=trusted),
            ds_config,
        )
    except _CONSTRUCTOR_ERRORS as error:  # from keys that `check_sizes` does not check
        if trusted and not isinstance(error, ValueError):
            raise  # the folder's own code: its author needs the traceback
        raise _loading_error(folder, error) from error
    if (folder / GENERATION_FILE).is_file() and model.can_generate():
        model.generation_config = read_generation_config(folder)
    return _prepare_loaded(model, folder)


def _build_official(
    folder: Path, config: dict[str, Any], ds_config: dict[str, Any] | None, changed: Mapping[str, Any] | None
) -> PreTrainedModel:
    """Build the model of an official ChatGLM directory; arguments as `_build_empty`."""
    generation_file = folder / GENERATION_FILE
    generation = directory.read_object(generation_file) if generation_file.is_file() else {}
    official_model, model_config = official_class(folder, config, generation)
    change_config(model_config, changed or {})
    model = weights.build_empty(lambda: official_model(model_config), ds_config)
    model.generation_config = GenerationConfig(
        eos_token_id=model_config.eos_token_id,
        pad_token_id=config.get("pad_token_id", generation.get("pad_token_id", 0)),
    )
    save.load_origin(model, folder)
    return model.eval()


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read a directory's generation_config.json; ModelError if transformers rejects it."""
    file = folder / GENERATION_FILE
    directory.read_object(file)  # raises ModelError for what is no JSON object, with its place
    with reading(file, ModelError):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def change_config(config: Any, changed: Mapping[str, Any]) -> Any:
    """Set keys of a config and of its text model's config; return the config."""
    for section in (config, config.get_text_config()):
        for key, value in changed.items():
            setattr(section, key, value)
    return config


def official_class(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> tuple[Any, Any]:
    """Return class and config of the model that an official ChatGLM's config.json describes. `config`, `generation`:
    content of config.json and generation_config.json.
    """
    from toolkit.models.chatglm import modeling, official_files

    if directory.architecture_of(config) is directory.Architecture.v1:
        # `_name_or_path` names a hub repository, which other libraries (peft 0.21) would ask for its config.
        foreign = ("auto_map", "architectures", "_name_or_path")
        own_keys = {key: value for key, value in config.items() if key not in foreign}
        return modeling.ChatGLMForConditionalGeneration, modeling.ChatGLMConfig(**own_keys)
    divides = official_files.divides_positions(config, folder)
    return transformers.GlmForCausalLM, modeling.glm_config(config, generation, divides_positions=divides)


def open_directory(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype | None = None,
    ds_config: dict[str, Any] | None = None,
    read_as: torch.dtype | None = None,
) -> tuple[PreTrainedModel, weights.WeightFiles, weights.Layout]:
    """Return a directory's model with empty parameters, its weight files, and how their tensors become parameters.
    ModelError if files and model do not fit, NotStreamable if single parameters cannot be read. `config`: its
    config.json; `dtype`, `ds_config`: as in `load_weights.load_model`; `read_as`: the precision in which quantized
    matrices are read, by default `dtype`. Records in the model what exports need of the files.
    """
    files = weights.files_of(folder, read_as or dtype)
    model = _build_empty(folder, config, dtype, ds_config)
    architecture = directory.architecture_of(config)
    layout: weights.Layout
    if architecture is None:
        try:
            layout = stored_form.record(model, files.shapes)
        except NotStreamable as error:
            if is_read_in_16_bits(folder):  # transformers would need the quantizer's package
                from toolkit.models import quantized

                raise quantized.quantization_error(config, folder) from error
            raise
    else:
        interleaved = architecture is directory.Architecture.glm and not config.get("multi_query_attention")
        from toolkit.models import official
        from toolkit.models.chatglm.modeling import official_layout

        layout = official_layout(model.config, interleaved)
        official.save_origin(model, files, layout, interleaved)
    weights.check_weights_fit(model, files, layout)
    record_extra_tensors(model, files, layout)
    return model, files, layout


def record_extra_tensors(
    model: PreTrainedModel, files: weights.WeightFiles, layout: weights.Layout | None = None
) -> None:
    """Record, in `ModelRecord.extra_tensors`, the tensors in its files that the model does not have."""
    if names := (layout or stored_form.TransformersLayout(model, files.shapes)).unread(files):
        from toolkit.models import extra_tensors

        # In the precision of an export that copies them, whatever that of the model is.
        source = weights.files_of(files.folder) if directory.is_quantized(files.folder) else files
        extra_tensors.record(model, source, names)


def create_model(
    config: ModelConfig,
    dtype: Dtype,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    ds_config: dict[str, Any] | None = None,
    packed: bool = False,
    parts: int = 1,
    needed_rows: Callable[[PreTrainedModel], Mapping[str, slice]] | None = None,
    head: "Head | None" = None,
    ready: Callable[[PreTrainedModel, str], None] | None = None,
) -> PreTrainedModel:
    """Build the model to train; ModelError if it does not fit `tokenizer`. Random weights are the same on every rank.

    `packed`: whether rows hold several samples; `parts`: number of ranks that each row is divided over; `head`: of a
    classifier, in place of the output layer; `ds_config`, `needed_rows`, `ready`: see `load_weights.load_model`.
    """
    if config.init is Init.random:
        # Not partitioned, even under stage 3: such models are small, and all stages start from the same values.
        glm = random_config(config.shape, len(tokenizer), tokenizer.eos_token_id)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.GlmForCausalLM(glm)
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    else:
        from toolkit.models import load_weights, quantized, trainable

        model = load_weights.load_model(
            config.path, dtype=TORCH_DTYPES[dtype], ds_config=ds_config, needed_rows=needed_rows, ready=ready
        )
        quantized.report(Path(config.path), dtype)
        trainable.check_vocabulary(model, tokenizer)
        if head is None:
            trainable.check_generates_text(model, config.path)
    if head is not None:
        from toolkit.models.classifier import with_head

        report_extra_tensors(model, copied=False)
        model = with_head(model, head, seed)
    if parts > 1:
        from toolkit.layouts.sequence import split_sequences

        split_sequences(model, parts, tensor_ranks(ds_config or {}))
    else:
        attention.choose_attention(model, config.attention, packed, TORCH_DTYPES[dtype])
    model.config.use_cache = False
    return model


def report_extra_tensors(model: PreTrainedModel, *, copied: bool = True) -> None:
    """Report the extra tensors in a model's files, and whether exports will have them (`copied`)."""
    if record_of(model).extra_tensors:
        from toolkit.models import extra_tensors

        extra_tensors.report(model, copied=copied)


def random_config(shape: ShapeConfig, vocab_size: int, eos_token_id: int | None = None) -> GlmConfig:
    """Return the config of a random model. `vocab_size`: the tokenizer's; `shape.vocab_size` is its upper bound."""
    return GlmConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_positions,
        attention_bias=True,
        # A padding id here would freeze its row of the embedding (torch.nn.Embedding's padding_idx).
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )


def _prepare_loaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Record what exports need of a model's directory, undo what hinders training, and return it to evaluate."""
    # A padding id freezes its row of the embedding (torch.nn.Embedding's padding_idx), also where it is the end
    # token's, as in glm-4-9b-chat-hf. Padding itself is never attended to, so its row needs no such care.
    model.get_input_embeddings().padding_idx = None
    record = record_of(model)
    record.first_position = attention.first_position(model)
    save.load_origin(model, folder)
    record.added_token_ids = [*directory.added_tokens(folder).values()]
    record.processor_files = directory.processor_files(folder)
    if directory.is_trusted(folder):
        record.code_files = {str(file.relative_to(folder)): file.read_bytes() for file in directory.code_files(folder)}
    stored_form.restore(model, folder)
    return model.eval()


def transformers_config(folder: Path) -> Any:
    """Read a config by transformers, and import its model class; ModelError if it is no causal language model.

    The import must precede zero.Init: DeepSpeed 0.19.8 undoes decorated constructors of classes that are defined inside
    it, by which transformers' experts would lose their config.
    """
    trusted = directory.is_trusted(folder)
    try:
        with directory.lock_module_cache() if trusted else nullcontext():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
            class_reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM") if trusted else None
            if class_reference:  # the directory's own class, which transformers has not registered
                get_class_from_dynamic_module(class_reference, folder, local_files_only=True)
                return config
    except Exception as error:  # whatever a damaged or absurd config.json makes the library raise
        if trusted and not isinstance(error, (OSError, ValueError, ImportError)):
            raise  # the folder's own code: its author needs the traceback
        raise _loading_error(folder, error) from error
    if registered_class(config) is None:
        raise ModelError(
            "{folder} holds a {kind}, which is no causal language model that transformers {version} knows.",
            folder=folder,
            kind=config.model_type,
            version=transformers.__version__,
        )
    if directory.is_quantized(folder):
        from toolkit.models import quantized

        quantized.drop_settings(config)  # what is read has 16 bits; see `weights.files_of`
    return config


def registered_class(config: Any) -> Any:
    """Import and return transformers' class for a config, multimodal or of text; None if there is neither, or if the
    multimodal one writes text to what its encoder has seen alone (Florence-2, Pix2Struct, T5Gemma 2).
    """
    multimodal, text = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    of_images = None if config.is_encoder_decoder else multimodal.get(type(config), None)
    return of_images or text.get(type(config), None)


def model_class(config: Any) -> Any:
    """Return transformers' auto class of a config: of a language model, a sequence classifier or a multimodal model."""
    if probe.describes_classifier(config.to_dict()):
        return transformers.AutoModelForSequenceClassification
    is_multimodal = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM


def _loading_error(folder: Path, error: Exception) -> ModelError:
    return ModelError("cannot load the model in {path}: {reason}", path=folder, reason=reason_of(error))


def check_structure(folder: Path, stored: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless `stored` tensors have the names and shapes of the files of the model that a directory,
    which needs no weights, describes. They may be on the meta device.
    """
    shell = load_empty(folder)
    with torch.device("meta"):  # transformers converts and compares the tensors as if it loaded them
        _, report = type(shell).from_pretrained(
            None,
            config=shell.config,
            state_dict=dict(stored),
            dtype=shell.dtype,
            device_map={"": "meta"},
            output_loading_info=True,
        )
    _check_report(folder, shell, report)


def load_by_transformers(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load a model by transformers' `from_pretrained`; ModelError if its weights do not fit."""
    config = transformers_config(folder)
    try:
        model, report = model_class(config).from_pretrained(
            folder,
            dtype=dtype or "auto",
            trust_remote_code=directory.is_trusted(folder),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        if directory.is_trusted(folder) and not isinstance(error, (OSError, ValueError, RuntimeError)):
            raise  # the folder's own code: its author needs the traceback
        raise _loading_error(folder, error) from error
    _check_report(folder, model, report)
    if not directory.is_trusted(folder):
        files = weights.WeightFiles(folder)  # quantized ones, which transformers loads as they are, too
        record_extra_tensors(model, files, stored_form.record(model, files.shapes))
    return _prepare_loaded(model, folder)


def _check_report(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers reports missing, unexpected or mismatched weights of a model that it loaded."""
    # A head that is tied to the embedding is in no file.
    missing = {*map(str, report["missing_keys"])} - weights.tied_parameter_names(model).keys()
    predicting = re.compile(weights.prediction_layer_pattern(model.config))
    unexpected = [name for name in map(str, report["unexpected_keys"]) if not predicting.search(name)]
    mismatched = map(str, report["mismatched_keys"])
    weights.reject_differences(folder, model, missing=missing, unexpected=unexpected, mismatched=mismatched)


def streamed_model(path: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a directory's model that reads a layer's weights when the layer is called, and drops them afterwards.

    Each forward pass reads all files. Weights that a model uses without calling their layer are NaN. The model is
    loaded at once if the files' format does not allow to read single parameters.
    """
    config = directory.read_config(str(path))
    try:
        model, files, layout = open_directory(Path(path), config)
    except NotStreamable:
        return load_by_transformers(Path(path), dtype)
    shapes = weights.shapes_of(model)
    dtypes = {
        target: dtype if dtype and info.dtype.is_floating_point else info.dtype
        for name, info in files.items()
        for target in layout.parameters(name)
    }
    tied = weights.tied_parameter_names(model)

    def read(names: dict[str, str]) -> None:
        """Set parameters to stored values; `names`: parameter -> the one that has its value, itself if not tied."""
        values = dict(weights.stored_values(files, layout, shapes, {*names.values()}))
        for name, source in names.items():
            weights.set_value(model, name, values[source].to(dtypes[source]).contiguous())

    def drop(names: dict[str, str]) -> None:
        """Replace parameters by NaN that take no memory."""
        for name, source in names.items():
            nothing = torch.full((), torch.nan if dtypes[source].is_floating_point else 0, dtype=dtypes[source])
            weights.set_value(model, name, nothing.expand(shapes[source]))
        weights.return_memory()

    remaining = {name: name for name in shapes}
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    for prefix, part in model.named_modules():
        # Read together: an item of an outermost list, or an embedding or linear layer outside of lists.
        outer_lists = [list_name for list_name in lists if prefix.startswith(f"{list_name}.")]
        is_item = outer_lists == [prefix.rpartition(".")[0]]
        is_single = not outer_lists and isinstance(part, nn.Embedding | nn.Linear)
        if not is_item and not is_single:
            continue
        stored = [f"{prefix}.{name}" for name in part.state_dict(keep_vars=True)]
        names = {name: tied.get(name, name) for name in stored if tied.get(name, name) in shapes}
        for name in names:
            remaining.pop(name, None)
        if names:
            drop(names)
            part.register_forward_pre_hook(lambda *_, names=names: read(names))
            part.register_forward_hook(lambda *_, names=names: drop(names))
    read(remaining)
    weights.compute_buffers(model)
    return model.eval()
