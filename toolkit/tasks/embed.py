"""Embeddings: InfoNCE over the pairs of the global batch (models/embedding.py).

A pair, a query and its positive with `embed.negatives` hard negatives, is compared with those of all ranks and
micro-batches. So all are embedded first, without gradients, and each rank computes the gradient of the whole loss by
each embedding; a second pass carries that of its own into the weights (Gao et al. 2021,
https://arxiv.org/abs/2101.06983). It is the gradient of one large batch, on any number of ranks.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit.config import mesh, schema
from toolkit.distributed import process_group
from toolkit.engine.ds_config import DsConfig
from toolkit.evaluate.metrics import SAMPLES
from toolkit.messages import ModelError, tr
from toolkit.models import loss, probe, stages
from toolkit.tasks import embedding_losses, language_data, samples
from toolkit.train import checkpointer, run_dir


class EmbedTask(samples.ScoreTask):
    """Trains a model to give the texts of a pair embeddings that find each other."""

    counted = "pairs"
    names = ("recall_at_1",)
    reported = ((schema.EVAL_EMBED[0], schema.EVAL_EMBED[0]),)
    _known: deque[tuple[torch.Tensor, ...]]
    """Of each micro-batch of a step that is to come: the losses of its pairs, their gradients by the embeddings, and
    whether a query's own positive was the most similar one."""

    def settle(self, cfg: schema.RunConfig) -> None:
        """Take the settled config; what is counted as a sample is a pair."""
        super().settle(cfg)
        self.epoch = replace(self.epoch, samples=self.epoch.sequences)

    def build(self, ds: DsConfig, source: run_dir.RunSource) -> DeepSpeedEngine:
        """Build the engine; a ModelError if nothing is known of the states before the output layer. A collective."""
        engine = super().build(ds, source)
        model = stages.stage_model(engine.module) if stages.is_pipeline(engine) else engine
        path = stages.broadcast_from_last(engine, lambda: loss.loss_head(model).path(model))
        if path is not loss.LossPath.losses:
            raise ModelError(
                "{architecture} does something with its output layer, in whose place embeddings would be taken: "
                "task=embed needs a model whose output layer is a plain matrix, such as Qwen3, Llama or GLM.",
                architecture=type(stages.unwrap_model(engine.module)).__name__,
            )
        return engine

    def model_files(self, engine: DeepSpeedEngine) -> checkpointer.ModelFiles:
        """Return also what sentence-transformers reads beside the model."""
        found = super().model_files(engine)
        width, longest = stages.unwrap_model(engine.module).config.hidden_size, self.cfg.data.max_length
        own = embedding_losses.describe(self.cfg.embed.pooling, width, longest)
        return replace(found, files={**found.files, **own}) if found.files else found

    def _size_of_data(self) -> str:
        return tr("{pairs} pairs of texts", pairs=f"{len(self.data.train) // self._size:,}")

    # Steps

    @property
    def _size(self) -> int:
        """Texts of a pair, its negatives included."""
        return schema.data_unit(self.cfg)[1]

    def count(self, batch: language_data.Batch) -> int:
        """Return the pairs; none are in the row that stands in for an empty micro-batch."""
        return int(loss.samples_in_rows(batch).sum()) // self._size

    def prepare_step(self, engine: Any, batches: list[language_data.Batch]) -> None:
        """Embed the pairs of all ranks, and compute the loss and its gradient by each embedding. A collective."""
        with probe.evaluating(engine):
            mine = [found for _, found in stages.measured(engine, batches, self._embed)]
        everything, begin = self._of_all_ranks(mine, engine.device)
        everything.requires_grad_(True)
        losses = embedding_losses.pair_losses(everything, self.cfg.embed.temperature, self._size)
        slopes = torch.autograd.grad(losses.sum(), everything)[0]
        is_first = embedding_losses.ranks_of(everything.detach(), self._size) == 1
        self._known = deque()
        for one in mine:
            end = begin + len(one)
            own = slice(begin // self._size, end // self._size)
            self._known.append((losses.detach()[own], slopes[begin:end], is_first[own]))
            begin = end

    def loss_sum(self, engine: Any, batch: language_data.Batch) -> torch.Tensor:
        """Return the sum of the losses of pairs, whose gradients are those of the whole step."""
        found = self._embed(engine, batch)
        losses, slopes, is_first = self._known.popleft()
        count = losses.new_full((), len(losses))
        self._add({"recall_at_1": torch.stack((is_first.sum().to(losses), count))})
        carried = (found * slopes).sum()
        return carried + (losses.sum() - carried).detach()

    def _embed(self, engine: Any, batch: language_data.Batch) -> torch.Tensor:
        """Return the embeddings of a micro-batch's pairs, in turns, float32 [N x size, H]."""
        return embedding_losses.embeddings(engine, batch, self.cfg.embed.pooling)[: self._size * self.count(batch)]

    def _evaluate(self, engine: DeepSpeedEngine, batches: Iterable[language_data.Batch]) -> dict[str, float]:
        """Return loss, recall and reciprocal rank, each query among the positives of all ranks. A collective."""
        with probe.evaluating(engine):
            mine = [found for _, found in stages.measured(engine, batches, self._embed)]
        everything, _ = self._of_all_ranks(mine, engine.device)
        places = embedding_losses.ranks_of(everything, self._size)
        losses = embedding_losses.pair_losses(everything, self.cfg.embed.temperature, self._size)
        recall, reciprocal = schema.EVAL_EMBED
        return {
            schema.EVAL_LOSS: float(losses.double().mean()),
            SAMPLES: len(places),
            recall: float((places == 1).double().mean()),
            reciprocal: float((1 / places.double()).mean()),
        }

    def _of_all_ranks(self, mine: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks that work on different ones, and where this rank's begin. A collective."""
        own = torch.cat(mine) if self._is_leader else torch.zeros(0)
        sizes = process_group.gather(len(own))
        rows = process_group.gather_metrics({"rows": own}, device)["rows"]
        leader = mesh.mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank).leader
        return rows.to(device), sum(sizes[:leader])

    # End

    def _result(self, **values: str) -> str:
        return tr("Validation loss {first} -> {last}, recall at 1 {before} -> {after}.", **values)

    def _use(self, folder: str) -> str:
        return tr("The model, for AutoModel of transformers and sentence-transformers: {folder}", folder=folder)
