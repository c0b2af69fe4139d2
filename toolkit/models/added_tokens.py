"""`model.add_tokens`: a copy of a model's directory with more tokens, made once in `prepare.dir`/models.

Its tokenizer has the tokens, and its embedding and output layer a row for each: a spare row where the checkpoint has
one, else a new row, the mean of all others (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html, as
transformers' mean_resizing, without its noise). Files without such rows are links to the original's.
"""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedModel

from toolkit.config import files
from toolkit.config.load import LoadedConfig, replace
from toolkit.config.schema import ModelConfig
from toolkit.distributed.file_lock import built_once
from toolkit.messages import ModelError, file_bytes, reading, say, tr
from toolkit.models import (
    base_model,
    chat,
    directory,
    load,
    named_templates,
    quantized,
    stored_form,
    tokenizer_files,
    weights,
)
from toolkit.models.chatglm import official_files

_VERSION = 1
"""Part of the directory's name; increase it when other files are made."""
_CONFIG = "config.json"


class _Tables(NamedTuple):
    """Embedding and output layer of a model: what has a row for each token."""

    names: set[str]
    """Their parameters, tied ones under each name."""
    rows: tuple[int, int]
    """Their rows, before and afterwards."""
    layout: weights.Layout
    config: dict[str, Any]
    """Content of the new config.json."""


def resolve(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
    """Return a config whose `model.path` is a copy of the model's directory with the tokens of `model.add_tokens`; the
    copy is made once. ModelError if tokens cannot be added to this model.

    With `config_only` the copy has no weights, and if the tokenizer's files are missing the config stays as it is.
    """
    model = loaded.cfg.model
    folder, tokenizer_folder = Path(model.path), Path(model.tokenizer or model.path)
    if list(directory.added_tokens(folder)) == model.add_tokens:  # a copy already, as in a run's config.yaml
        return loaded
    if config_only and not tokenizer_files.has_tokenizer(tokenizer_folder):
        return loaded
    _check_supported(model, tokenizer_folder)
    tokenizer = tokenizer_files.load_tokenizer(tokenizer_folder, family=model.family)
    vocabulary, template = tokenizer.get_vocab(), _template_text(model, tokenizer)
    control_tokens = named_templates.control_tokens(model.chat_template)
    # What the template writes becomes a control token, whose name in a row stays text (`Shield`). Others are ordinary.
    special = [token for token in model.add_tokens if token in template or token in control_tokens]
    for token in model.add_tokens:
        added = AddedToken(token, normalized=False, special=token in special)
        tokenizer.add_tokens([added], special_tokens=token in special)
    ids = dict(zip(model.add_tokens, tokenizer.convert_tokens_to_ids(model.add_tokens), strict=True))
    # Ids of some vocabularies have gaps: the highest says how many rows they need.
    num_rows = max(*tokenizer.get_vocab().values(), len(tokenizer) - 1) + 1
    tables = _tables(folder, num_rows)
    # The directory's name changes with all that decides about its content.
    identity = base_model.weights_digest(folder), chat.tokenizer_identity(tokenizer)
    parts = [_VERSION, str(folder.resolve()), ids, special, tables.rows, identity]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    models = Path(loaded.cfg.prepare.dir) / "models"
    record = json.dumps({"base": str(folder.absolute()), "tokens": ids, "rows": tables.rows}, ensure_ascii=False)
    target = models / name
    if config_only and not target.is_dir():
        target = models / f"{name}-config"
    with built_once(target, partial(_is_complete, record=record)) as building:
        if building is not None:  # None: it is there already
            tokenizer.save_pretrained(building)
            _check_has_one_id_each(building, ids)
            _write_config_and_weights(folder, tables, building, with_weights=not config_only)
            # At last: a directory with this file is complete.
            (building / directory.ADDED_TOKENS).write_text(record + "\n", "utf-8")
    _report_tokens(ids, [token for token in ids if token not in vocabulary], special, tables.rows)
    origin = tr("model.add_tokens of {folder}", folder=folder)
    # Reports name the original model, not the copy's hash.
    values = {"model.path": str(target), "model.tokenizer": "", "model.name": model.name or model.hub_id or folder.name}
    return replace(loaded, {key: (value, origin) for key, value in values.items()})


def _is_complete(folder: Path, record: str) -> bool:
    file = folder / directory.ADDED_TOKENS
    return file.is_file() and file.read_text("utf-8").strip() == record


def _check_supported(model: ModelConfig, tokenizer_folder: Path) -> None:
    """Raise ModelError for models to which no tokens can be added: quantized ones, official ChatGLMs, own code."""
    folder, reason = Path(model.path), ""
    config = directory.read_config(model.path, with_weights=False)
    if directory.is_quantized(folder):
        raise quantized.quantization_error(config, folder)  # tables are changed file by file, as they are stored
    if (
        directory.architecture_of(config) is not None
        or official_files.official_vocabulary(tokenizer_folder) is not None
    ):
        reason = tr(
            "the ids of ChatGLM's own tokenizer are fixed by its code. Use a model in transformers' own layout, such "
            "as zai-org/glm-4-9b-chat-hf"
        )
    elif model.trust_remote_code:
        reason = tr(
            "the model's own code decides what its embeddings are. Use a model whose architecture transformers has"
        )
    if reason:
        raise ModelError(
            "model.add_tokens: no tokens can be added to {folder}: {reason}.", folder=folder, reason=reason
        )


def _template_text(model: ModelConfig, tokenizer: Any) -> str:
    """Return the chat template that training will use."""
    if not model.chat_template:
        return str(tokenizer.chat_template or "")
    with reading(model.chat_template, ModelError, tr("Correct model.chat_template.")):
        return file_bytes(files.chat_template_file(model.chat_template)).decode("utf-8")


def _tables(folder: Path, num_rows: int) -> _Tables:
    """Return the embedding and output layer of the model in `folder`, with at least `num_rows` rows; ModelError if they
    have fewer, and the model cannot have more.
    """
    model = load.load_empty(folder)
    text_config = model.config.get_text_config()
    rows = (text_config.vocab_size, max(text_config.vocab_size, num_rows))
    names = _names_of_tables(model)
    config = directory.read_object(folder / _CONFIG)
    if rows[0] < rows[1]:
        growing, not_growable = _growing_parameters(folder, model, names, rows[1])
        # Where config.json describes the text model: at its top, or in a section such as text_config.
        sections = [config] if text_config is model.config else []
        sections += [part for key, part in config.items() if getattr(model.config, key, None) is text_config]
        if not_growable or not growing or not sections:
            raise ModelError(
                "model.add_tokens: {architecture} in {folder} cannot get more than its {rows} rows: its embeddings do "
                "not simply grow with vocab_size ({others}). Use tokens that its vocabulary has, or another model.",
                architecture=type(model).__name__,
                folder=folder,
                rows=rows[0],
                others=", ".join(sorted(not_growable)) or _CONFIG,
            )
        if "vocab_size" in config:  # multimodal models may repeat the number at the top
            sections.append(config)
        for section in sections:
            section["vocab_size"] = rows[1]
    return _Tables(names, rows, stored_form.TransformersLayout(model, weights.WeightFiles(folder).shapes), config)


def _growing_parameters(
    folder: Path, model: PreTrainedModel, tables: set[str], num_rows: int
) -> tuple[set[str], set[str]]:
    """Return what of the model in `folder` grows with a vocabulary of `num_rows`: the names of all such parameters, and
    of those that are not its `tables`, which cannot be made to grow.
    """
    grown, old = weights.shapes_of(load.load_empty(folder, {"vocab_size": num_rows})), weights.shapes_of(model)
    growing = {name for name, shape in grown.items() if shape != old[name]}
    not_growable = growing - tables
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0):
        not_growable.add(tr("embeddings of each layer"))
    return growing, not_growable


def _names_of_tables(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters of a model's embedding and output layer, tied ones under each name."""
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in wanted}


def _write_config_and_weights(folder: Path, tables: _Tables, target: Path, with_weights: bool) -> None:
    """Write into `target` what a model's directory has besides the tokenizer, made of that in `folder`."""
    for file, content in directory.processor_files(folder).items():
        (target / file).write_bytes(content)
    if (generation := folder / load.GENERATION_FILE).is_file():
        (target / generation.name).write_bytes(generation.read_bytes())
    (target / _CONFIG).write_text(json.dumps(tables.config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if with_weights:
        _write_weights(folder, tables, target)


def _write_weights(folder: Path, tables: _Tables, target: Path) -> None:
    """Write the weight files of `folder` into `target`, with as many rows of the tables as `tables.rows` says; link
    those that hold no table, or all of them if no rows are added.
    """
    stored, (old, new) = weights.WeightFiles(folder), tables.rows
    names, layout = tables.names, tables.layout
    growing: dict[Path, list[str]] = {}  # weight file -> the tables in it
    for name, info in stored.items():
        # By its name in the file (a tied head may be stored too), or by the parameter that it fills.
        is_table = name in names or bool({*layout.parameters(name)} & names)
        if is_table and old < new and info.shape[:1] == (old,):
            growing.setdefault(info.file, []).append(name)
    added_bytes = 0
    for file in directory.weight_files(folder):
        if file not in growing:
            (target / file.name).symlink_to(file.resolve())
            continue
        tensors = load_file(file)
        for name in growing[file]:
            tensors[name] = with_rows(tensors[name], new)
            added_bytes += tensors[name][old:].nbytes
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = directory.read_object(index)
        metadata = content.get("metadata", {})
        metadata["total_size"] = metadata.get("total_size", 0) + added_bytes
        (target / index.name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def with_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a table of a vocabulary with `rows` rows; new ones are the mean of the others, taken in float32."""
    mean = table.float().mean(dim=0, keepdim=True).to(table.dtype)
    return torch.cat([table, mean.expand(rows - len(table), *table.shape[1:])])


def _check_has_one_id_each(folder: Path, ids: dict[str, int]) -> None:
    """Raise ModelError unless the tokenizer saved in `folder` makes of each token its id in `ids`, also in a text."""
    tokenizer = tokenizer_files.load_tokenizer(folder)
    for token, index in ids.items():
        encoded = tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"]
        if encoded.count(index) != 1 or tokenizer.decode([index]).strip() != token.strip():
            raise ModelError(
                "model.add_tokens: the tokenizer of this model does not make one id of '{token}', but {ids}. Choose "
                "another text, such as <|{name}|>.",
                token=token,
                ids=encoded,
                name="name",  # stands in the message as it is: <|name|>
            )


def _report_tokens(ids: dict[str, int], new: list[str], special: list[str], rows: tuple[int, int]) -> None:
    """Report the tokens of `ids`, token -> id: which were added (`new`), and which are control tokens (`special`); and
    the number of rows of the embeddings before and afterwards (`rows`).
    """
    marked = [f"{token} ({index})" if token in new else f"{token} ({index})*" for token, index in ids.items()]
    say(
        "model.add_tokens: {tokens}; control tokens, which only the chat template writes: {special}.",
        tokens=", ".join(marked),
        special=", ".join(special) or tr("none"),
    )
    if len(new) < len(ids):
        say("* was in the vocabulary before.")
    if rows[0] < rows[1]:
        say("Embeddings: {old} rows became {new}; new ones begin as the mean of the others.", old=rows[0], new=rows[1])
    elif new:
        say("Embeddings: the new tokens take spare rows of the {rows} that the checkpoint has.", rows=rows[0])
