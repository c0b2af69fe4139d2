"""Embeddings: InfoNCE over the pairs of the global batch.

InfoNCE is equation 4 of Oord, Li, Vinyals 2018, https://arxiv.org/abs/1807.03748, with the other positives of a batch
as negatives: for pair i, -log softmax_j(cos(query i, text j) / temperature) at its positive, over all positives and
hard negatives of the batch, as in sentence-transformers' MultipleNegativesRankingLoss.

A pair, which is a query, its positive and `embed.negatives` hard negatives, is compared with those of all ranks and
micro-batches. So all texts are embedded first, without gradients, and each rank computes the loss of the global batch
and its gradient by each embedding; a second pass propagates those of its own texts to the weights (Gao et al. 2021,
https://arxiv.org/abs/2101.06983). That is the gradient of one large batch, on any number of ranks.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch.nn import functional

from toolkit.config import mesh, objective, schema
from toolkit.distributed import process_group, row_exchange
from toolkit.engine.ds_config import DsConfig
from toolkit.evaluate.loss import SAMPLES
from toolkit.messages import ModelError, tr
from toolkit.models import embedding_files, head_outputs, loss, per_sample, probe, stages
from toolkit.sample_types import Batch
from toolkit.tasks import samples
from toolkit.train import run_dir, task

_ROWS = 1024
"""Queries whose similarities are in memory at once."""


def embeddings(engine: Any, batch: Batch, pooling: schema.Pooling) -> torch.Tensor:
    """Run forward and return the embedding of each row's sample, float32 `[B, H]`, of length 1: the mean of its tokens'
    states, or with `Pooling.last` the last token's.
    """
    segments = per_sample.full_row_segments(batch).cpu()
    lengths = (segments > 0).sum(dim=1)
    counts = torch.ones_like(lengths) if pooling is schema.Pooling.last else lengths  # tokens that are pooled
    # Indices of the pooled tokens in the flattened rows: the last `counts` of each row's sample.
    ends = torch.arange(len(lengths)) * segments.size(1) + lengths
    spans = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    indices = torch.cat([torch.arange(begin, end) for begin, end in spans])
    is_own, own_positions = per_sample.part_indices(batch, indices)
    # How many of each row's pooled tokens this rank has, if rows are divided over ranks (parallel.sequence).
    in_rows = torch.bincount(indices[is_own] // segments.size(1), minlength=len(lengths)).tolist()
    inputs = loss.on_device(engine, batch)
    states = head_outputs.states_at(engine, inputs, own_positions.to(engine.device, non_blocking=True)).float()
    # Not index_add, which adds in another order each time on a GPU.
    sums = torch.stack([of_sample.sum(dim=0) for of_sample in states.split(in_rows)])
    means = per_sample.sum_over_row_parts(sums, batch) / counts.to(sums, non_blocking=True)[:, None]
    return functional.normalize(means, dim=1)


def pair_losses(texts: torch.Tensor, temperature: float, size: int) -> torch.Tensor:
    """Return the loss of each of N pairs, [N], of embeddings [N x size, H]: of each pair query, positive, negatives."""
    parts = [
        functional.cross_entropy(similar / temperature, positives, reduction="none")
        for similar, positives in _similarities(texts, size)
    ]
    return torch.cat(parts)


def ranks_of(texts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rank, from 1, of each query's own positive among all positives and negatives, by similarity, [N]."""
    ranks = [
        (similar > similar.gather(1, positives[:, None])).sum(dim=1) + 1
        for similar, positives in _similarities(texts, size)
    ]
    return torch.cat(ranks)


def _similarities(texts: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for _ROWS queries at a time their cosines with all positives and negatives, [_ROWS, N x (size - 1)], and
    the column of each query's own positive, [_ROWS].
    """
    pairs = texts.unflatten(0, (-1, size))
    candidates = pairs[:, 1:].flatten(0, 1)  # of each pair its positive, then its negatives
    for part in torch.arange(len(pairs), device=texts.device).split(_ROWS):
        yield pairs[part, 0] @ candidates.t(), part * (size - 1)


class EmbedTask(samples.ScoreTask):
    """Trains a model to give the texts of a pair similar embeddings."""

    counted = "pairs"
    names = ("recall_at_1",)
    reported = ((schema.EVAL_EMBED[0], schema.EVAL_EMBED[0]),)
    _pair_results: deque[tuple[torch.Tensor, ...]]
    """Of each remaining micro-batch of a step: the losses of its pairs, their gradients by the embeddings, and whether
    a query's own positive is the most similar text.
    """

    def settle(self, cfg: schema.RunConfig) -> None:
        """Take the settled config; the samples of an epoch are pairs."""
        super().settle(cfg)
        self.epoch = replace(self.epoch, samples=self.epoch.sequences)

    def engine_built(self, engine: DeepSpeedEngine, ds: DsConfig, source: run_dir.RunSource) -> None:
        """Raise ModelError if our own code cannot run in the place of the output layer, whose inputs it pools to
        embeddings. It can if that is a plain matrix, as for losses without logits (`LossPath.losses`). A collective.
        """
        super().engine_built(engine, ds, source)
        model = stages.stage_model(engine.module) if stages.is_pipeline(engine) else engine
        # A pipeline's last stage alone has the output layer; it tells the others.
        path = stages.broadcast_from_last(engine, lambda: loss.loss_head(model).path(model))
        if path is not loss.LossPath.losses:
            raise ModelError(
                "{architecture} does something with its output layer, in whose place embeddings would be taken: "
                "task=embed needs a model whose output layer is a plain matrix, such as Qwen3, Llama or GLM.",
                architecture=type(stages.unwrap_model(engine.module)).__name__,
            )

    def model_files(self, engine: DeepSpeedEngine) -> task.ModelFiles:
        """Return the model's files with those that sentence-transformers reads."""
        model_files = super().model_files(engine)
        width = stages.unwrap_model(engine.module).config.get_text_config().hidden_size
        longest = self.cfg.data.max_length
        embedding_config = embedding_files.describe(self.cfg.embed.pooling, width, longest)
        if not model_files.files:  # rank 0 alone has them
            return model_files
        return replace(model_files, files={**model_files.files, **embedding_config})

    def _size_of_data(self) -> str:
        return tr("{pairs} pairs of texts", pairs=f"{len(self.data.train) // self._size:,}")

    @property
    def _size(self) -> int:
        """Texts of a pair, its negatives included."""
        return objective.data_unit(self.cfg)[1]

    def count_losses(self, batch: Batch) -> int:
        """Return the number of pairs, 0 for the filler row of an empty micro-batch."""
        return int(per_sample.samples_in_rows(batch).sum()) // self._size

    def prepare_step(self, engine: Any, batches: list[Batch]) -> None:
        """Embed the pairs of all ranks without gradients, compute the loss and its gradient by each embedding, and keep
        those of this rank's micro-batches for `loss_sum`. A collective.
        """
        with probe.evaluating(engine):
            own_embeddings = [embedded for _, embedded in stages.measure_each(engine, batches, self._embed)]
        all_embeddings, begin = self._gather_embeddings(own_embeddings, engine.device)
        all_embeddings.requires_grad_(True)
        losses = pair_losses(all_embeddings, self.cfg.embed.temperature, self._size)
        gradients = torch.autograd.grad(losses.sum(), all_embeddings)[0]
        is_first = ranks_of(all_embeddings.detach(), self._size) == 1
        self._pair_results = deque()
        for batch_embeddings in own_embeddings:
            end = begin + len(batch_embeddings)
            pairs = slice(begin // self._size, end // self._size)  # each of `_size` embeddings
            self._pair_results.append((losses.detach()[pairs], gradients[begin:end], is_first[pairs]))
            begin = end

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of pairs; its gradients are those of the global batch's loss. A step's
        micro-batches come in the order in which `prepare_step` got them.
        """
        own_embeddings = self._embed(engine, batch)
        losses, gradients, is_first = self._pair_results.popleft()
        count = losses.new_full((), len(losses))
        self._add({"recall_at_1": torch.stack((is_first.sum().to(losses), count))})
        surrogate = (own_embeddings * gradients).sum()  # has the gradients, but another value
        return surrogate + (losses.sum() - surrogate).detach()

    def _embed(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the embeddings of a micro-batch's pairs, in turns, float32 [N x size, H]."""
        return embeddings(engine, batch, self.cfg.embed.pooling)[: self._size * self.count_losses(batch)]

    def _evaluate(self, engine: DeepSpeedEngine, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the means of loss, recall at 1 and reciprocal rank over the queries of all ranks, each compared with
        the positives and negatives of all ranks. A collective.
        """
        with probe.evaluating(engine):
            own_embeddings = [embedded for _, embedded in stages.measure_each(engine, batches, self._embed)]
        all_embeddings, _ = self._gather_embeddings(own_embeddings, engine.device)
        own_positive_ranks = ranks_of(all_embeddings, self._size)
        losses = pair_losses(all_embeddings, self.cfg.embed.temperature, self._size)
        recall, reciprocal = schema.EVAL_EMBED
        return {
            schema.EVAL_LOSS: float(losses.double().mean()),
            SAMPLES: len(own_positive_ranks),
            recall: float((own_positive_ranks == 1).double().mean()),
            reciprocal: float((1 / own_positive_ranks.double()).mean()),
        }

    def _gather_embeddings(self, own_embeddings: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the embeddings of all ranks, [N x size, H], and the index at which this rank's begin. Ranks with parts
        of the same rows have the same ones, which only their leader hands in. A collective.
        """
        own_rows = torch.cat(own_embeddings) if self._is_leader else torch.zeros(0)
        sizes = process_group.gather(len(own_rows))
        rows = row_exchange.gather_metrics({"rows": own_rows}, device)["rows"]
        leader = mesh.mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank).leader
        return rows.to(device), sum(sizes[:leader])

    def _result(self, **values: str) -> str:
        return tr("Validation loss {losses}, recall at 1 {figures}.", **values)

    def _use(self, folder: str) -> str:
        return tr("The model, for AutoModel of transformers and sentence-transformers: {folder}", folder=folder)
