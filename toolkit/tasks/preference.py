"""Preference losses: of pairs of a chosen and a rejected answer, or of answers marked good or bad.

Rows of a plan are pairs, which sampler, accumulation and `batch` count; in a micro-batch chosen and rejected answers
alternate. If the model supports packed rows, both are branches of a tree that begins with their prompt.
The reference is the model before training. With a new LoRA that is the model without its adapter, computed in each
step; else its log-probabilities are computed before the first step, with the weights that training starts from, and
stored in the run directory. So there is never a second model.

p, r: log-probabilities of an answer by the model and by the reference, summed over the answer's tokens; bars: their
means; b: beta; e: label_smoothing; S: log sigmoid; D = (p - r of the chosen) - (p - r of the rejected). To each loss
sft_weight x the chosen answer's cross entropy, a mean over its tokens, is added.

- sigmoid (DPO): -S(b D), equation 7 of Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; with label smoothing
  -(1 - e) S(b D) - e S(-b D) (conservative DPO, equation 9 of the next), and robust: that minus twice the swapped
  term, unbiased, (-(1 - e) S(b D) + e S(-b D)) / (1 - 2e), equation 10 of Chowdhury et al. 2024,
  https://arxiv.org/abs/2403.00409.
- hinge: max(0, 1 - b D), the calibration loss of SLiC-HF, Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with
  DPO's ratios in place of log-probabilities, as TRL and LLaMA-Factory have it.
- ipo: (D - 1 / (2b))^2, equation 17 of Azar et al. 2023, https://arxiv.org/abs/2310.12036, of means over tokens in
  place of sums, as its authors advised (TRL, DPO Trainer, "ipo") and TRL and LLaMA-Factory do.
- simpo: -S(b (bar p chosen - bar p rejected) - gamma), equation 6 of Meng et al. 2024,
  https://arxiv.org/abs/2405.14734.
- orpo: -S(log odds ratio) x b, odds = P / (1 - P) with P = exp(bar p), equations 6 and 7 of Hong et al. 2024,
  https://arxiv.org/abs/2403.07691; b is its lambda.
- cpo: -S(b (p chosen - p rejected)), equation 5 of Xu et al. 2024, https://arxiv.org/abs/2401.08417.
- kto, of single answers: w sigmoid(-b (p - r - K)) of a good one, w sigmoid(-b (K - p + r)) of a bad one, equation 7 of
  Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, as in TRL 1.16.0's KTOTrainer; w: desirable_weight,
  undesirable_weight; K, without gradients: the mean of p - r of questions with others' answers, at least 0.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from numpy.typing import NDArray
from torch.nn.functional import logsigmoid

from toolkit import disk, terminal
from toolkit.config import mesh, objective, schema
from toolkit.data import sampler
from toolkit.distributed import process_group
from toolkit.engine.ds_config import DsConfig
from toolkit.evaluate.loss import PAIRS, SAMPLES
from toolkit.messages import tr
from toolkit.models import lora, probe, stages
from toolkit.models.per_sample import answer_log_probabilities, samples_in_rows
from toolkit.sample_types import Batch
from toolkit.tasks import language_batches
from toolkit.tasks.samples import SampleTask
from toolkit.train import run_dir
from toolkit.train.step import TokenCounts

REFERENCE = "reference"
"""Directory in a run's for the reference's log-probabilities."""
FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "kl",
)
"""Figures of pairs. `kl`, only with a reference: the mean of p - r over both answers, nats per answer. It estimates the
divergence on the data's answers, not on those that the model would generate, and can be negative."""
OF_ANSWERS = tuple(name for name in FIGURES if name != "rewards/margins")
"""Figures of KTO, whose `kl` is its K."""


class Answers(NamedTuple):
    """The chosen or the rejected answers of n pairs, float32 [n] each."""

    log_probabilities: torch.Tensor
    """Sums over each answer's tokens, nats."""
    tokens: torch.Tensor
    reference: torch.Tensor
    """Log-probabilities by the reference; unused if the loss needs none."""


class PairLosses(NamedTuple):
    """Losses and rewards of n pairs, float32 [n] each."""

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    """Without gradients, like `rejected_rewards`."""
    rejected_rewards: torch.Tensor


def pair_losses(config: schema.PreferenceConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return the loss of each pair, [pairs], and the rewards of its answers: beta times `_answer_values`."""
    kind, beta = config.loss, config.beta
    better, worse = _answer_values(config, chosen), _answer_values(config, rejected)
    margin = beta * (better - worse)
    if kind is schema.PreferenceLoss.hinge:
        losses = torch.relu(1 - margin)
    elif kind is schema.PreferenceLoss.ipo:
        losses = (better - worse - 1 / (2 * beta)) ** 2
    elif kind is schema.PreferenceLoss.orpo:
        losses = -beta * logsigmoid(_log_odds(better) - _log_odds(worse))
    else:
        losses = _smoothed(margin - config.gamma, config.label_smoothing, kind is schema.PreferenceLoss.robust)
    if config.sft_weight:
        losses = losses - config.sft_weight * chosen.log_probabilities / chosen.tokens
    return PairLosses(losses, beta * better.detach(), beta * worse.detach())


def answer_losses(
    config: schema.PreferenceConfig, ratios: torch.Tensor, is_good: torch.Tensor, divergence: torch.Tensor
) -> torch.Tensor:
    """Return KTO's losses of answers, float32 [n]. `ratios`: log-probabilities less the reference's, [n]; `is_good`:
    bool [n]; `divergence`: the scalar with which the ratios are compared.
    """
    gains = torch.where(is_good, ratios - divergence, divergence - ratios)
    good = is_good.to(ratios.dtype)
    return (config.desirable_weight * good + config.undesirable_weight * (1 - good)) * torch.sigmoid(
        -config.beta * gains
    )


def _answer_values(config: schema.PreferenceConfig, answers: Answers) -> torch.Tensor:
    """Return the value of each answer that the loss compares: its log-probability, minus the reference's if the loss
    needs one, divided by its tokens for ipo, simpo and orpo.
    """
    values = answers.log_probabilities
    if config.needs_reference:
        values = values - answers.reference
    by_token = config.loss in (schema.PreferenceLoss.ipo, schema.PreferenceLoss.simpo, schema.PreferenceLoss.orpo)
    return values / answers.tokens if by_token else values


def _smoothed(margin: torch.Tensor, smoothing: float, is_robust: bool) -> torch.Tensor:
    """Return the loss of DPO with label smoothing, or robust DPO's, for margins [n]."""
    as_labelled, swapped = (1 - smoothing) * logsigmoid(margin), smoothing * logsigmoid(-margin)
    if is_robust:
        return (swapped - as_labelled) / (1 - 2 * smoothing)
    return -as_labelled - swapped


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) of P = exp(means); finite for P = 1 too."""
    means = means.clamp(max=-torch.finfo(means.dtype).eps)
    return means - torch.log(-torch.expm1(means))


class PreferenceTask(SampleTask):
    """Trains a causal language model on pairs of answers."""

    counted = "pairs"
    names: tuple[str, ...] = FIGURES
    reported = ((schema.EVAL_PAIRS[0], "eval_accuracy"),)

    def settle(self, cfg: schema.RunConfig) -> None:
        """Take the settled config; a sequence of the plan is a pair, which counts as one sample of an epoch."""
        super().settle(cfg)
        self.epoch = replace(self.epoch, samples=self.epoch.sequences)
        if not cfg.preference.needs_reference:
            self.names = tuple(name for name in self.names if name != "kl")
            self._figures = self._zeros()  # pipeline stages without a loss contribute zeros of these names

    def engine_built(self, engine: DeepSpeedEngine, ds: DsConfig, source: run_dir.RunSource) -> None:
        """Compute the reference's log-probabilities if they are needed, before a checkpoint is loaded. A collective."""
        super().engine_built(engine, ds, source)
        if self._stores_reference:
            splits = ["train", "validation"] if self.has_validation else ["train"]
            reference = {split: self._reference_of_split(engine, split, source.folder) for split in splits}
            self.data = replace(self.data, reference=reference)

    @property
    def _stores_reference(self) -> bool:
        """Whether the reference is computed before the first step, and not in each step."""
        return self.cfg.preference.needs_reference and not objective.has_reference_in_step(self.cfg)

    def _reference_of_split(self, engine: DeepSpeedEngine, split: str, folder: Path) -> NDArray[np.float32]:
        """Return the reference's log-probability of each answer of a split, float32 [`num_numbers`: the samples, for
        KTO also each with another's answer], computed unless the run has stored them. A collective.
        """
        store, _ = self.data.split(split)
        # For KTO "-2": files of an earlier version may hold a question with another answer to itself.
        version = "-2" if store.num_numbers > len(store) else ""
        file = folder / REFERENCE / f"{store.fingerprint}-{split}{version}.f32"
        stored = process_group.on_rank0(lambda: np.fromfile(file, np.float32) if file.exists() else None)
        if stored is not None and len(stored) == store.num_numbers:
            return stored
        numbers, batches = self._answer_batches(split)
        values = np.zeros(store.num_numbers, np.float32)
        with (
            probe.evaluating(engine),
            terminal.phase(tr("Computing reference log-probabilities"), len(numbers), tr("batches")) as advance,
        ):
            measured = stages.measure_each(engine, batches, answer_log_probabilities)
            # `measured` is empty on pipeline stages but the last: not strict.
            for samples, (_, (log_probabilities, _)) in zip(numbers, measured, strict=False):
                if self._is_leader:  # other ranks keep zeros: the sum over ranks below puts the shares together
                    values[samples] = log_probabilities[: len(samples)].float().cpu().numpy()
                advance(1)
        values = process_group.sum_over_ranks(torch.from_numpy(values), engine.device).float().cpu().numpy()

        def write() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            disk.write_atomically(file, values.tobytes())

        process_group.on_rank0(write)
        return values

    def _answer_batches(self, split: str) -> tuple[list[list[int]], Iterator[Batch]]:
        """Return this rank's share of a split's answers, each of which is on one data-parallel rank: the samples of
        each micro-batch, row by row, and an iterator over the micro-batches. Every rank has as many; the last may be
        empty.
        """
        _, plan = self.data.split(split)
        assert plan.members is not None
        rank_mesh = mesh.mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank)
        # A row is two members. Of the rows with the same two, which weights make, the first one.
        _, rows = np.unique(plan.members[::2], return_index=True)
        shares = sampler.sequential(len(rows), mesh.micro_rows(self.cfg), rank_mesh.data_rank, rank_mesh.data_ranks)
        own_rows = [rows[share].tolist() for share in shares]
        batches = language_batches.load_batches(self.cfg, self.data, split, own_rows)
        parts = map(partial(language_batches.part_of, mesh=rank_mesh), batches)
        samples = [[sample for row in batch_rows for sample in plan[row]] for batch_rows in own_rows]
        return samples, language_batches.prefetch(parts, 2)

    def _size_of_data(self) -> str:
        return tr("{pairs} preference pairs", pairs=f"{len(self.data.train) // 2:,}")

    def count_losses(self, batch: Batch) -> int:
        """Return the number of pairs, 0 for the filler row of an empty micro-batch."""
        return _num_answers(batch) // 2

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of pairs, and add up their figures."""
        losses, figures = self._pairs(engine, batch)
        count = losses.new_full((), self.count_losses(batch))
        self._add({name: torch.stack((value, count)) for name, value in figures.items()})
        return losses

    def _pairs(self, engine: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the losses of a micro-batch's pairs, and the sums of their figures."""
        reference = self._reference(engine, batch)
        values, tokens = answer_log_probabilities(engine, batch)
        end = 2 * self.count_losses(batch)
        # Chosen and rejected answers alternate.
        chosen = Answers(values[0:end:2], tokens[0:end:2], reference[0:end:2])
        rejected = Answers(values[1:end:2], tokens[1:end:2], reference[1:end:2])
        pairs: PairLosses = pair_losses(self.cfg.preference, chosen, rejected)
        margins = pairs.chosen_rewards - pairs.rejected_rewards
        chosen_logps, rejected_logps = chosen.log_probabilities.detach(), rejected.log_probabilities.detach()
        kl = (chosen_logps + rejected_logps - chosen.reference - rejected.reference) / 2
        rewards = pairs.chosen_rewards, pairs.rejected_rewards
        figures = (*rewards, margins, (margins > 0).float(), chosen_logps, rejected_logps, kl)  # in FIGURES' order
        # Without pairs the loss is 0, but has gradients, for which other ranks wait.
        loss = pairs.losses.sum() if end else 0 * values.sum()
        return loss, {name: value.sum() for name, value in zip(FIGURES, figures, strict=True) if name in self.names}

    def _reference(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the reference's log-probabilities of a micro-batch's answers, [answers]; zeros if none are needed."""
        if not self.cfg.preference.needs_reference:
            return torch.zeros(_num_answers(batch), device=engine.device)
        if self._stores_reference:
            return batch["reference"].to(engine.device, non_blocking=True)
        with probe.evaluating(engine), lora.without_adapter(engine.module):
            return answer_log_probabilities(engine, batch)[0]

    def _evaluate(self, engine: DeepSpeedEngine, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the means of the loss and of each figure over the pairs of all ranks' batches. A collective."""
        # This rank's number of pairs, sum of their losses, and sum of each figure, in the order of `names`.
        sums = torch.zeros(2 + len(self.names), dtype=torch.float64)
        with probe.evaluating(engine):
            for batch, (loss_sum, figure_sums) in stages.measure_each(engine, batches, self._pairs):
                if self._is_leader:  # the other ranks of its model computed the same pairs, which must count once
                    num_pairs = loss_sum.new_tensor(self.count_losses(batch))
                    sums += torch.stack((num_pairs, loss_sum, *figure_sums.values())).cpu()
        num_pairs, *totals = process_group.sum_over_ranks(sums, engine.device).tolist()
        mean_loss, *means = (total / num_pairs for total in totals)
        figures = {f"eval_{name}": mean for name, mean in zip(self.names, means, strict=True)}
        return {schema.EVAL_LOSS: mean_loss, PAIRS: int(num_pairs), **figures}

    def _result(self, **values: str) -> str:
        return tr("Validation loss {losses}, reward accuracy {figures}.", **values)


class KtoTask(PreferenceTask):
    """Trains a causal language model on answers that are marked good or bad (KTO).

    A row of a plan has two samples: a question with its answer, and with another question's answer. The mean log-ratio
    of the latter over the global batch, KTO's divergence, is needed before the first loss of a step.
    """

    counted = "answers"
    names = OF_ANSWERS
    _divergence: torch.Tensor

    def token_counts(self, batches: list[Batch]) -> TokenCounts:
        return super().token_counts([_every_second_row(batch, 0) for batch in batches])

    def prepare_step(self, engine: Any, batches: list[Batch]) -> None:
        """Compute the step's divergence between model and reference, on mismatched answers. A collective."""
        mismatched, sums = [_every_second_row(batch, 1) for batch in batches], torch.zeros(2, device=engine.device)
        with probe.evaluating(engine):
            passes = stages.measure_each(engine, mismatched, self._ratios)
            for batch, (_, (ratios, _)) in zip(batches, passes, strict=False):  # no passes on earlier stages
                sums += torch.stack((ratios.sum(), ratios.new_full((), self.count_losses(batch))))
        self._divergence = _mean_at_least_zero(process_group.sum_over_ranks(sums, engine.device))

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of answers, and add up their figures."""
        answers = _every_second_row(batch, 0)
        ratios, values = self._ratios(engine, answers)
        is_good = answers["value"].to(engine.device, non_blocking=True)[: self.count_losses(batch)] > 0
        losses, figures = self._losses(ratios[: len(is_good)], values[: len(is_good)], is_good, self._divergence)
        self._add(figures)
        return losses.sum() if len(is_good) else 0 * ratios.sum()

    def _ratios(self, engine: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the answers' log-probabilities minus the reference's, and without that, [answers] each. An empty
        micro-batch gives the filler's ratio, 0 with gradients, for which other ranks wait.
        """
        reference = self._reference(engine, batch)
        values, _ = answer_log_probabilities(engine, batch)
        ratios = values - reference if len(reference) else 0 * values
        return ratios, values

    def _losses(
        self, ratios: torch.Tensor, values: torch.Tensor, is_good: torch.Tensor, divergence: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each answer, and figure -> its sum over the answers and their number, [2]."""
        losses = answer_losses(self.cfg.preference, ratios, is_good, divergence)
        rewards, good = self.cfg.preference.beta * ratios.detach(), is_good.float()
        every = torch.ones_like(ratios)
        in_order = torch.where(is_good, ratios > divergence, ratios < divergence).float()
        logps = values.detach()
        # In the order of `names`: a value of each answer, and which answers count.
        columns = ((rewards, good), (rewards, 1 - good), (in_order, every), (logps, good), (logps, 1 - good))
        sums = [torch.stack(((value * counts).sum(), counts.sum())) for value, counts in columns]
        sums.append(torch.stack((divergence * len(ratios), every.sum())))
        return losses, dict(zip(self.names, sums, strict=True))

    def _evaluate(self, engine: DeepSpeedEngine, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the means of loss and figures over all ranks' answers, with K (`kl`) over these. A collective."""
        # Of each batch: ratios, log-probabilities, whether answers are good. An empty part, for a rank without batches.
        parts = [(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))]
        mismatched_sums = torch.zeros(2, dtype=torch.float64)  # sum of mismatched answers' ratios, and their number

        def measure(model: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
            """Return ratios and log-probabilities of a micro-batch's answers, and the sum of the mismatched ones'."""
            mismatched, _ = self._ratios(model, _every_second_row(batch, 1))
            return *self._ratios(model, _every_second_row(batch, 0)), mismatched.sum()

        with probe.evaluating(engine):
            for batch, (ratios, values, mismatched) in stages.measure_each(engine, batches, measure):
                count = self.count_losses(batch)
                is_good = _every_second_row(batch, 0)["value"][:count] > 0
                parts.append((ratios[:count].cpu(), values[:count].cpu(), is_good))
                # On every rank, not the leader alone: what all ranks of a model add to both cancels in the quotient.
                mismatched_sums += torch.stack((mismatched.cpu(), torch.tensor(float(count))))
        divergence = _mean_at_least_zero(process_group.sum_over_ranks(mismatched_sums, engine.device)).cpu()
        ratios, values, is_good = (torch.cat(column) for column in zip(*parts, strict=True))
        losses, figures = self._losses(ratios, values, is_good, divergence)
        loss_and_count = torch.stack((losses.sum(), torch.tensor(float(len(losses)))))
        totals = torch.cat((loss_and_count, *figures.values())).double()
        own_totals = totals if self._is_leader else torch.zeros_like(totals)
        all_totals = process_group.sum_over_ranks(own_totals, engine.device).view(-1, 2)  # sum and count of each
        loss, *means = (all_totals[:, 0] / all_totals[:, 1]).tolist()
        # Some means are NaN where there are no good answers, or no bad ones.
        row = {f"eval_{name}": mean for name, mean in zip(self.names, means, strict=True) if not math.isnan(mean)}
        return {schema.EVAL_LOSS: loss, SAMPLES: int(all_totals[0, 1]), **row}

    def _size_of_data(self) -> str:
        return tr("{answers} answers marked good or bad", answers=f"{len(self.data.train):,}")


_COLUMNS = (
    *("input_ids", "inputs_embeds", "labels", "position_ids", "segment_ids", "row_ids", "row_segments"),
    *("reference", "value"),
)


def _num_answers(batch: Batch) -> int:
    return int(samples_in_rows(batch).sum())


def _every_second_row(batch: Batch, first: int) -> Batch:
    """Return a micro-batch of every second row: those with their own answers (`first` 0), or with mismatched ones (1).
    Row 2i + first becomes row i. A filler, which is a single row, is returned unchanged.
    """
    if len(batch["input_ids"]) == 1:
        return batch
    rows = {name: batch[name][first::2] for name in _COLUMNS if name in batch}
    length = batch["input_ids"].size(1)
    # Of the token before each target, whose output predicts it: with divided rows the target may be in the next part.
    row, column = (batch["target_indices"] - 1) // length, (batch["target_indices"] - 1) % length
    is_own = row % 2 == first
    rows |= {"targets": batch["targets"][is_own], "target_indices": row[is_own] // 2 * length + column[is_own] + 1}
    return rows | ({"part": batch["part"]} if "part" in batch else {})


def _mean_at_least_zero(sums: torch.Tensor) -> torch.Tensor:
    """Return K of `sums`: the sum of mismatched answers' ratios, and their number."""
    return (sums[0] / sums[1]).clamp(min=0).float()
