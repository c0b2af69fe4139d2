"""Embeddings of texts: one vector for each, and the loss by which those of a pair are found among those of others.

InfoNCE, equation 4 of Oord, Li, Vinyals 2018, https://arxiv.org/abs/1807.03748, with the other positives of a batch in
place of drawn ones: of a pair i, -log softmax_j(cos(query i, text j) / temperature) at its positive, over all positives
and hard negatives of the batch, as sentence-transformers' MultipleNegativesRankingLoss has it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from toolkit.config.schema import Pooling
from toolkit.models import attention, loss

FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
"""What sentence-transformers reads beside a model: its parts, how tokens become one vector, lengths, the comparison."""
_ROWS = 1024
"""So many queries are compared at once."""


def embeddings(engine: Any, batch: attention.Batch, pooling: Pooling) -> torch.Tensor:
    """Run forward and return the embedding of each row's sample, float32 `[B, H]`, of length 1."""
    segments = attention.whole_segments(batch).cpu()
    lengths = (segments > 0).sum(dim=1)
    begins = torch.arange(len(lengths)) * segments.size(1)
    counts = torch.ones_like(lengths) if pooling is Pooling.last else lengths
    spans = zip((begins + lengths - counts).tolist(), (begins + lengths).tolist(), strict=True)
    places = torch.cat([torch.arange(begin, end) for begin, end in spans])
    mine, own = attention.own_places(batch, places)
    in_rows = torch.bincount(places[mine] // segments.size(1), minlength=len(lengths)).tolist()
    head, given = loss.loss_head(engine), loss.on_device(engine, batch)
    states = head.states(engine, given, own.to(engine.device, non_blocking=True)).float()
    # Not index_add, whose order of additions is another one each time on a GPU.
    sums = torch.stack([one.sum(dim=0) for one in states.split(in_rows)])
    means = attention.of_whole_rows(sums, batch) / counts.to(sums, non_blocking=True)[:, None]
    return functional.normalize(means, dim=1)


def pair_losses(texts: torch.Tensor, temperature: float, size: int) -> torch.Tensor:
    """Return the loss of each of N pairs, [N], of embeddings [N x size, H]: query, positive and negatives in turns."""
    parts = [
        functional.cross_entropy(similar / temperature, own, reduction="none")
        for similar, own in _similarities(texts, size)
    ]
    return torch.cat(parts)


def ranks_of(texts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the place of each query's own positive among all texts but queries, by similarity, from 1: [N]."""
    found = [(similar > similar.gather(1, own[:, None])).sum(dim=1) + 1 for similar, own in _similarities(texts, size)]
    return torch.cat(found)


def _similarities(texts: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield of some queries at once their cosines with all positives and negatives, and where their own positive is."""
    groups = texts.unflatten(0, (-1, size))
    others = groups[:, 1:].flatten(0, 1)
    for part in torch.arange(len(groups), device=texts.device).split(_ROWS):
        yield groups[part, 0] @ others.t(), part * (size - 1)


def describe(pooling: Pooling, width: int, max_length: int) -> dict[str, bytes]:
    """Return the content of `FILES`."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    pooled = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": pooling is Pooling.mean,
        "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": pooling is Pooling.last,
        "include_prompt": True,
    }
    lengths = {"max_seq_length": max_length, "do_lower_case": False}
    contents = modules, pooled, lengths, {"prompts": {}, "similarity_fn_name": "cosine"}
    return {
        name: (json.dumps(content, indent=2) + "\n").encode() for name, content in zip(FILES, contents, strict=True)
    }


def read_files(folder: Path) -> dict[str, bytes]:
    """Return those of `FILES` that are in a directory."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
