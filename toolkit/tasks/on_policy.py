"""On-policy distillation: answers that the student writes take the place of some of a step's, and the teacher scores
them. GKD, Agarwal et al. 2023, algorithm 1, https://arxiv.org/abs/2306.13649: its lambda is `distill.on_policy`.

Before a step's passes all ranks answer prompts of the global batch together, with the model as it is or by a server
(evaluate/completions.py). Which samples are answered, and what is drawn for each, follows from seed, step and sample
alone. rollouts.jsonl holds every answer and every failure: steps that are done again after a crash take theirs from it.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from toolkit import disk, secrets
from toolkit.checkpoint.directory import step_of
from toolkit.config import schema
from toolkit.data import loader, sampler
from toolkit.distributed import process_group, watchdog
from toolkit.engine import ds_config, parameters
from toolkit.evaluate import completions, generate, questions
from toolkit.messages import LaunchError, say, warn
from toolkit.sample_types import Batch
from toolkit.tasks import distill
from toolkit.tasks.distill_losses import Distilled
from toolkit.track.metrics import append_rows
from toolkit.train import hooks, run_dir, task

OWN_KL = "distill/own_kl"
"""The divergence on tokens that the student wrote."""
FILE = "rollouts.jsonl"
_PROBED = 64
"""Longest samples of which the longest prompt is taken for a dry run."""

Answer = list[int] | str
"""Ids of an answer, or why there is none."""


class OnPolicyTask(distill.DistillTask):
    """Distils a teacher on answers of the student."""

    names = (*distill.DistillTask.names, OWN_KL)

    def __init__(self) -> None:
        super().__init__()
        self.counts = RolloutCounts()
        self._client: completions.CompletionClient | None = None
        self._saved: dict[int, dict[int, Answer]] = {}  # step -> sample -> answer, of steps that are done again
        self._run: task.RunContext | None = None  # before `prepare_evaluation`
        self._failed_steps = 0  # in a row, without any answer
        self._is_tried = self._is_warned = False  # whether generation was tried, and a failure reported

    def settle(self, cfg: schema.RunConfig) -> None:
        """Take the settled config; micro-batches get the numbers of their samples."""
        super().settle(cfg)
        self.data = replace(self.data, targets={"train": _SampleNumbers()})  # type: ignore[dict-item]

    def _prompt(self, sample: int, max_tokens: float) -> list[int]:
        """Return the prompt of a sample's last answer, [] if it has none or an answer could exceed `max_tokens`."""
        ids, trained = self.data.train[sample]
        prompt_and_answer = questions.split_sample(ids.tolist(), trained.tolist(), self.data.encoder)
        prompt = prompt_and_answer[0] if prompt_and_answer else []
        return prompt if len(prompt) + self.cfg.distill.rollouts.max_new_tokens <= max_tokens else []

    def _longest_prompt(self, max_tokens: float) -> list[int]:
        """Return the longest prompt of the _PROBED longest samples, [] if none of them has one; see `_prompt`."""
        order = np.argsort(-self.data.train.lengths(), kind="stable")[:_PROBED]
        return max((self._prompt(int(sample), max_tokens) for sample in order), key=len)

    def engine_built(self, engine: DeepSpeedEngine, ds: ds_config.DsConfig, source: run_dir.RunSource) -> None:
        """Read the answers of steps that will be done again, and find out what the server understands. A collective."""
        super().engine_built(engine, ds, source)
        config, checkpoint = self.cfg.distill.rollouts, source.checkpoint
        first = max(0, step_of(checkpoint)) + 1 if checkpoint else 1  # `step_of` is -1 for other programs' names
        # This run's file, and that of the run whose RUN/checkpoints/step-N it continues.
        folders = {source.folder, *([checkpoint.parent.parent] if checkpoint else [])}
        self._saved = process_group.on_rank0(lambda: read_rollouts([folder / FILE for folder in folders], first))
        if config.url and self._client is None:
            encoder = self.data.encoder
            protocol = process_group.on_rank0(lambda: completions.find_protocol(config, encoder))
            self._client = completions.CompletionClient(config, encoder, protocol)
            say("The student's answers come from {url}, model {name}.", url=config.url, name=protocol.model)

    def prepare_evaluation(self, run: task.RunContext) -> None:
        """Prepare the evaluation, and let metrics.jsonl show what answers cost."""
        super().prepare_evaluation(run)
        self._run = run
        run.hooks.append(self.counts)

    def longest_batch(self, position: sampler.Position) -> tuple[Batch, str]:
        """Return the longest rows, of data or of the longest prompt with the longest answer."""
        batch, name = super().longest_batch(position)
        rows, tokens = self.shape(batch)
        longer = self._answered_batch(rows, 1.0)
        return (longer, name) if longer["input_ids"].size(1) > tokens else (batch, name)

    def larger_batch(self, rows: int, share: float) -> Batch:
        """Return a micro-batch of rows as long as data or answers make them."""
        of_data, answered = super().larger_batch(rows, share), self._answered_batch(rows, share)
        return max(of_data, answered, key=lambda batch: batch["input_ids"].size(1))

    def _answered_batch(self, rows: int, share: float) -> Batch:
        """Return a micro-batch of the longest prompt and the longest answer, cut to a share of their tokens."""
        prompt = self._longest_prompt(float("inf"))
        longest = min(self.cfg.data.max_length, len(prompt) + self.cfg.distill.rollouts.max_new_tokens)
        length = max(2, int(share * longest))
        ids = np.resize(np.asarray(prompt or [0], np.int64), length)  # the prompt over and over again
        answer_begin = min(len(prompt), length - 1)  # at least one token is trained
        sample = ids, np.arange(length) >= answer_begin
        return loader.collate_planned([[sample]] * rows, self.data.pad_id, self.data.layout)

    def _try_generation(self, engine: DeepSpeedEngine) -> None:
        """Generate the longest answers to the longest prompt, once, to see that memory suffices. A collective."""
        config = self.cfg.distill.rollouts
        prompt = self._longest_prompt(generate.max_context_tokens(engine.module))
        if self._is_tried or self._client is not None or not prompt:
            return
        self._is_tried = True
        sampling = generate.Sampling(max_new_tokens=config.max_new_tokens)
        generate.generate(
            engine.module,
            self.data.encoder,
            [prompt] * config.batch_size,
            sampling,
            engine.device,
            in_step=parameters.is_partitioned(engine),
            min_new_tokens=config.max_new_tokens,
        )

    def prepare_step(self, engine: Any, batches: list[Batch]) -> None:
        """Put answers of the student in the place of some of the step's. A collective."""
        super().prepare_step(engine, batches)
        if "samples" not in batches[0]:  # a micro-batch of the dry run
            self._try_generation(engine)
            return
        began, step, run = time.perf_counter(), engine.global_steps + 1, self._run
        if run:
            run.watchdog.enter("rollouts", step)
        max_tokens = generate.max_context_tokens(engine.module)
        by_batch = [batch["samples"].tolist() for batch in batches]  # numbers of samples
        own_prompts = {sample: self._prompt(sample, max_tokens) for samples in by_batch for sample in samples}
        prompts: dict[int, list[int]] = {}  # sample -> prompt, of all ranks
        for of_rank in process_group.gather({sample: prompt for sample, prompt in own_prompts.items() if prompt}):
            prompts |= of_rank
        to_answer = choose(sorted(prompts), self.cfg.distill.on_policy, self.cfg.run.seed, step)
        saved = self._saved.pop(step, {})  # of a step that is done again
        answers = {sample: saved[sample] for sample in to_answer if sample in saved}
        missing = {sample: prompts[sample] for sample in to_answer if sample not in answers}
        if missing:
            answers |= self._answer_prompts(engine, step, missing)
        written = {sample: prompts[sample] + ids for sample, ids in answers.items() if isinstance(ids, list)}
        for number, samples in enumerate(by_batch):
            batches[number] = self._with_answers(batches[number], samples, written, prompts)
        self.counts.add(answers, time.perf_counter() - began)
        if run:
            run.watchdog.enter(watchdog.STEP, step, f"rows x tokens: {[self.shape(batch) for batch in batches]}")

    def _answer_prompts(self, engine: Any, step: int, prompts: Mapping[int, list[int]]) -> dict[int, Answer]:
        """Return the answers to `prompts` (sample -> ids), the same on every rank, by sample, and write them down; warn
        of the first failure. LaunchError if the server failed in `max_failed_steps` steps in a row. A collective.
        """
        samples, seed = list(prompts), self.cfg.run.seed
        seeds = [draw_of(seed, step, sample) for sample in samples]
        if self._client is None:
            answers = self._generate(engine, prompts, seeds)
        else:
            # This rank asks for every n-th answer.
            rank_share = slice(process_group.rank(), None, process_group.world_size())
            own_answers = self._client.answer_all(list(prompts.values())[rank_share], seeds[rank_share])
            answers = {}
            for of_rank in process_group.gather(dict(zip(samples[rank_share], own_answers, strict=True))):
                answers |= of_rank
        self._write(step, {sample: answers[sample] for sample in samples})
        failures = [answer for answer in answers.values() if isinstance(answer, str)]
        if failures and not self._is_warned:
            self._is_warned = True
            warn(
                "step {step}: {count} of {all} answers of the student failed; these samples keep the answers of the "
                "data: {reason}. metrics.jsonl counts further failures (rollouts_failed).",
                step=step,
                count=len(failures),
                all=len(answers),
                reason=failures[0],
            )
        self._failed_steps = self._failed_steps + 1 if len(failures) == len(answers) else 0
        patience = self.cfg.distill.rollouts.max_failed_steps
        if patience and self._failed_steps >= patience and self._client is not None:
            raise LaunchError(
                "{url} gave no answer in {count} steps in a row, up to step {step}: {reason}. Start the server; the "
                "same command resumes. distill.rollouts.max_failed_steps=0 continues with the answers of the data.",
                url=self.cfg.distill.rollouts.url,
                count=self._failed_steps,
                step=step,
                reason=failures[-1],
            )
        return answers

    def _generate(self, engine: Any, prompts: Mapping[int, list[int]], seeds: Sequence[int]) -> dict[int, Answer]:
        """Return the answers of the model as it is. A collective."""
        config, run, encoder = self.cfg.distill.rollouts, self._run, self.data.encoder
        samples = list(prompts)

        def options(batch: Sequence[int]) -> dict[str, Any]:
            drawn = Draws([seeds[number] for number in batch], engine.device, config, len(encoder.tokenizer))
            return {"logits_processor": LogitsProcessorList([drawn]), "keeps_end": True}

        result = questions.generate_all(
            engine.module,
            encoder,
            list(prompts.values()),
            generate.Sampling(max_new_tokens=config.max_new_tokens),
            config.batch_size,
            engine.device,
            in_step=parameters.is_partitioned(engine),
            alive=lambda: None if run is None else run.watchdog.enter("rollouts", engine.global_steps + 1),
            options=options,
        )
        reason = "; ".join(result.failures)
        return {sample: result.ids.get(number, reason) for number, sample in enumerate(samples)}

    def _with_answers(
        self, batch: Batch, samples: list[int], written: Mapping[int, list[int]], prompts: Mapping[int, list[int]]
    ) -> Batch:
        """Return the micro-batch of `samples` with the student's answers (`written`: sample -> ids of prompt and
        answer), trained alone, in the place of the data's; `own`, bool [T], says of each trained token whether it is of
        one.
        """
        rows, own = [], []
        for sample in samples:
            ids, trained = self.data.train[sample]
            if sample in written:
                ids = np.asarray(written[sample][: self.cfg.data.max_length], np.int64)
                trained = np.arange(len(ids)) >= len(prompts[sample])
            rows.append([(ids, trained)])
            own += [sample in written] * int(trained[1:].sum())  # no token predicts the first one
        if rows:
            batch = loader.collate_planned(rows, self.data.pad_id, self.data.layout)
        return {**batch, "own": torch.tensor(own, dtype=torch.bool)}

    def _figures_of(self, losses: Distilled, batch: Batch) -> dict[str, torch.Tensor]:
        """Return sums and counts: cross entropies are of labels, and the student's tokens are none."""
        no_own = torch.zeros(len(losses.divergences), dtype=torch.bool)  # of the dry run
        is_own = batch.get("own", no_own).to(losses.divergences)
        # Figure -> values of tokens, and which of them count, 1 or 0.
        parts = {
            distill.KL: (losses.divergences, torch.ones_like(is_own)),
            distill.CE: (losses.cross_entropies, 1 - is_own),
            OWN_KL: (losses.divergences, is_own),
        }
        return {name: torch.stack(((values * mask).sum(), mask.sum())) for name, (values, mask) in parts.items()}

    def _write(self, step: int, answers: Mapping[int, Answer]) -> None:
        """Append a step's answers to rollouts.jsonl. On rank 0 alone."""
        if self._run is None or process_group.rank():
            return
        rollouts = self.cfg.distill.rollouts
        by = {"by": self._client.protocol.answers_as, "url": secrets.hide(rollouts.url)} if self._client else {}
        encoder, lines = self.data.encoder, []
        for sample, answer in answers.items():
            row: dict[str, Any] = {"step": step, "sample": sample, "where": self.data.train.where(sample)}
            if isinstance(answer, str):
                row["failed"] = secrets.hide(answer)
            else:
                row |= {"text": secrets.hide(generate.decode_answer(encoder, answer)), "tokens": answer}
            lines.append(json.dumps({**row, **by, "time": round(time.time(), 3)}, ensure_ascii=False) + "\n")
        file = self._run.folder / FILE
        try:
            append_rows(file, "".join(lines).encode("utf-8", "backslashreplace"))
        except OSError as error:
            warn("{file} cannot be written: {reason}.", file=file, reason=error.strerror or str(error))


class _SampleNumbers:
    """Gives micro-batches a column with the numbers of their samples, as `TokenTargets` gives its columns."""

    def columns(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return `samples`, int64."""
        return {"samples": torch.tensor(samples, dtype=torch.int64)}


@dataclass(kw_only=True, slots=True)
class RolloutCounts(hooks.Hook):
    """Answers since the last row of metrics.jsonl, and the seconds that they took."""

    count: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, answers: Mapping[int, Answer], seconds: float) -> None:
        """Count the answers of a step."""
        lengths = [len(answer) for answer in answers.values() if not isinstance(answer, str)]
        self.count, self.failed = self.count + len(answers), self.failed + len(answers) - len(lengths)
        self.tokens, self.seconds = self.tokens + sum(lengths), self.seconds + seconds

    def at_log(self, step: int, position: sampler.Position, times: Any) -> Mapping[str, float]:
        """Return the figures since the last row."""
        figures = {
            "rollouts": self.count,
            "rollouts_failed": self.failed,
            "rollout_tokens": self.tokens / max(1, self.count - self.failed),
            "rollout_s": self.seconds / times.steps,
            "rollout_share": self.seconds / times.seconds,
        }
        self.count = self.failed = self.tokens = 0
        self.seconds = 0.0
        return figures


class Draws(LogitsProcessor):
    """Makes the likeliest token a sample of the distribution, by the Gumbel-max trick: each row has its own generator,
    so that what it gets does not depend on the rows next to it. Logits beyond `vocabulary` are padding of embeddings.
    """

    def __init__(
        self, seeds: Sequence[int], device: torch.device, config: schema.RolloutsConfig, vocabulary: int
    ) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.vocabulary = vocabulary
        self.warpers: list[Callable[..., Any]] = [TemperatureLogitsWarper(float(config.temperature))]
        if config.top_p < 1:
            self.warpers.append(TopPLogitsWarper(config.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] of which the largest of each row is the sample."""
        scores = scores.float()
        scores[:, self.vocabulary :] = -torch.inf
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        noise = [torch.empty_like(scores[0]).exponential_(generator=generator) for generator in self.generators]
        # Gumbel noise is -log of exponential noise; the least positive number stands for 0, whose log is infinite.
        return scores - torch.stack(noise).clamp_min(torch.finfo(torch.float32).tiny).log()


def draw_of(*key: int) -> int:
    """Return a number below 2^63 that follows from the key alone, as good as random."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def choose(samples: Sequence[int], share: float, seed: int, step: int) -> list[int]:
    """Return `share` of a step's samples, drawn by seed and step, in ascending order. Where that is no whole number it
    is rounded up or down at random, so that the mean over steps is right: 2.3 samples are 3 in 30 % of the steps.
    """
    # The 1 at the end: these draws are not those that seed the samples' answers.
    ordered = sorted(samples, key=lambda sample: draw_of(seed, step, sample, 1))
    uniform = draw_of(seed, step) / 2**63
    return sorted(ordered[: int(share * len(samples) + uniform)])


def read_rollouts(files: Sequence[Path], first_step: int) -> dict[int, dict[int, Answer]]:
    """Return step -> sample -> answer, from `first_step` on; lines of the files that are no answers are skipped."""
    saved: dict[int, dict[int, Answer]] = {}
    for file in files:
        for row in disk.json_lines(file) if file.is_file() else ():
            if row and {"step", "sample"} <= row.keys() and row["step"] >= first_step:
                saved.setdefault(row["step"], {})[row["sample"]] = row.get("tokens", str(row.get("failed", "")))
    return saved
