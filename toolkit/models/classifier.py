"""transformers' sequence classifiers: a head that scores sequences in place of a language model's output layer.

The scores of a sequence are those of its last token that is no padding, determined as in transformers by the padding
token's id, so that any program that loads the directory computes the same ones.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel
from transformers.initialization import no_init_weights

from toolkit.messages import ModelError, json_object, reading
from toolkit.models import head_outputs, loss, per_sample, probe
from toolkit.sample_types import Batch

FILE = "score.json"
"""In an adapter's directory: labels and padding token, which the config.json of a full model has."""


@dataclass(frozen=True, slots=True)
class Head:
    """Labels and padding token of a classifier."""

    labels: tuple[str, ...]
    """Names of the scores, in their order."""
    pad_token_id: int
    """Id of the padding token, at which no score is read."""

    def write(self) -> bytes:
        """Return the content of score.json."""
        return (json.dumps(asdict(self), ensure_ascii=False) + "\n").encode()


def head_of(model: PreTrainedModel) -> Head | None:
    """Return the head of a model; None where that is the output layer of a language model."""
    if not probe.is_classifier(model):
        return None
    config = model.config
    return Head(tuple(config.id2label[index] for index in range(config.num_labels)), config.pad_token_id)


def read_head(folder: Path) -> Head | None:
    """Return the head that an adapter's directory describes, None if it describes none."""
    file = folder / FILE
    if not file.is_file():
        return None
    with reading(file, ModelError):
        record = json_object(file, ModelError)
        return Head(tuple(map(str, record["labels"])), int(record["pad_token_id"]))


def with_head(model: PreTrainedModel, head: Head, seed: int) -> PreTrainedModel:
    """Return a classifier of a language model's layers, with a new head whose weights are drawn by `seed`. A classifier
    is returned with its own head. ModelError if its scores or labels are not those of `head`, or if transformers has no
    classifier of such a language model.
    """
    config = model.config
    if probe.is_classifier(model):
        _check_has_scores(config, head.labels)
        _set_labels(config, head)
        config.pad_token_id = head.pad_token_id
        return model
    scorer_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    _set_labels(config, head)
    if scorer_class is not None:
        with no_init_weights(), torch.device("meta"):
            scorer = scorer_class(config)
    takes_layers = scorer_class is not None and scorer.base_model_prefix == model.base_model_prefix
    if not takes_layers or type(getattr(scorer, "score", None)) is not nn.Linear:
        raise ModelError(
            "transformers has no sequence classifier of {architecture} that reads its last token, so there is nothing "
            "to train a score in. Possible are Llama, Qwen2, Qwen3, Mistral, ChatGLM2 and later, GLM-4 and others.",
            architecture=type(model).__name__,
        )
    setattr(scorer, scorer.base_model_prefix, model.base_model)
    if not all(parameter.is_meta for parameter in model.parameters()):  # a pipeline stage has weights of some
        weight = torch.empty(scorer.score.weight.shape)
        weight.normal_(0, getattr(config, "initializer_range", 0.02), generator=torch.Generator().manual_seed(seed))
        scorer.score.weight = nn.Parameter(weight)
    scorer.score.to(model.dtype)
    # Set after the embedding is constructed, where it would become padding_idx, which freezes a row.
    config.pad_token_id = head.pad_token_id
    return scorer.eval()


def _check_has_scores(config: Any, labels: tuple[str, ...]) -> None:
    """Raise ModelError unless a classifier with this config has a score for each label, in their order. Names
    such as LABEL_0 pass: `_set_labels` replaces them.
    """
    if config.num_labels != len(labels):
        raise ModelError(
            "the model gives {found} scores for each sequence, and {wanted} are to be trained. Take the language "
            "model that it was made of.",
            found=config.num_labels,
            wanted=len(labels),
        )
    named = tuple(config.id2label[index] for index in range(config.num_labels))
    if named != labels and set(named) == set(labels):  # the same names in another order
        raise ModelError(
            "the scores of the model are of {found}, in this order. Name the labels so: classify.labels=[{found}].",
            found=",".join(named),
        )


def _set_labels(config: Any, head: Head) -> None:
    """Set the number and the names of the scores in a config."""
    config.id2label = dict(enumerate(head.labels))
    config.label2id = {label: index for index, label in enumerate(head.labels)}


_COLUMNS = ("input_ids", "inputs_embeds", "position_ids", "segment_ids", "cu_seq_lens", "part", "row_ids")


def scores(engine: Any, batch: Batch) -> torch.Tensor:
    """Run forward and return the scores of each sample, row by row, float32 `[samples, labels]`."""
    inputs = {name: batch[name].to(engine.device, non_blocking=True) for name in _COLUMNS if name in batch}
    model: Any = getattr(engine, "module", engine)
    token_indices = _last_token_indices(batch, model.config.pad_token_id)
    is_in_part, local_indices = per_sample.part_indices(batch, token_indices)
    local_samples = is_in_part.nonzero()[:, 0].to(engine.device, non_blocking=True)
    local_indices = local_indices.to(engine.device, non_blocking=True)
    layer, size = _score_layer(model), batch["input_ids"].shape
    score_forward = layer.forward

    def score_last_tokens(states: torch.Tensor) -> torch.Tensor:
        """Stand in for the head: return the scores of all samples at each token, of which the model takes one."""
        local_scores: torch.Tensor = score_forward(states.flatten(0, 1).index_select(0, local_indices))
        # Samples that end in another rank's part of the rows have scores of 0 here.
        all_scores = local_scores.new_zeros(len(token_indices), local_scores.size(-1))
        all_scores = all_scores.index_copy(0, local_samples, local_scores)
        return all_scores.view(1, 1, -1).expand(*size, -1)

    if "inputs_embeds" in inputs:  # a later pipeline stage has no ids in which transformers could find the last token
        flat_scores = score_last_tokens(head_outputs.hidden_states(model, inputs))[0, 0]
    else:
        layer.forward = score_last_tokens
        try:
            flat_scores = loss.forward_output(engine, inputs)[0]
        finally:
            del layer.forward
    return per_sample.sum_over_row_parts(flat_scores.view(len(token_indices), -1).float(), batch)


def token_scores(engine: Any, batch: Batch) -> torch.Tensor:
    """Return the scores at every token of rows, float32 `[B, S, labels]`; without gradients."""
    outputs: list[torch.Tensor] = []
    layer = _score_layer(getattr(engine, "module", engine))
    hook = layer.register_forward_hook(lambda _, __, output: outputs.append(output.detach().clone()))
    inputs = {name: batch[name].to(engine.device) for name in _COLUMNS if name in batch}
    try:
        with probe.evaluating(engine):
            if "inputs_embeds" in inputs:
                layer(head_outputs.hidden_states(engine, inputs))
            else:
                loss.forward_output(engine, inputs)
    finally:
        hook.remove()
    return outputs[0].float()


def _score_layer(model: Any) -> Any:
    """Return the head of a classifier, with peft's wrapper around it where there is one."""
    return model.get_submodule("score")


def _last_token_indices(batch: Batch, pad_token_id: int) -> torch.Tensor:
    """Return the index in B x S tokens of each sample's last token that is no padding, int64 `[samples]`."""
    ids, segments = batch.get("row_ids", batch["input_ids"]).cpu(), per_sample.full_row_segments(batch).cpu()
    in_row = per_sample.samples_in_rows(batch)
    in_earlier_rows = (in_row.cumsum(0) - in_row)[:, None]
    is_read = (ids != pad_token_id) & (segments > 0)
    samples = (in_earlier_rows + segments - 1)[is_read]  # segments of a row are numbered from 1
    token_indices = torch.arange(ids.numel()).view(ids.shape)[is_read]
    return torch.zeros(int(in_row.sum()), dtype=torch.int64).scatter_reduce(0, samples, token_indices, "amax")
