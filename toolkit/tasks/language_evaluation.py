"""Evaluates a language model: the loss of the validation split, answers to its questions, and their scores."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from deepspeed import DeepSpeedEngine

from toolkit import messages, terminal
from toolkit.config.load import to_dict
from toolkit.config.mesh import Mesh, mesh_of
from toolkit.config.schema import RunConfig
from toolkit.distributed import process_group
from toolkit.engine import memory, parameters
from toolkit.evaluate import generate
from toolkit.evaluate.loss import Measure, evaluate_loss
from toolkit.launch.environment import Ranks
from toolkit.messages import clauses, say, tr, warn
from toolkit.models import loss, stages
from toolkit.tasks import language_batches, language_data

if TYPE_CHECKING:
    from toolkit.evaluate.questions import Answers, ValidationQuestion


def choose_prompts(cfg: RunConfig, data: language_data.LanguageData) -> "list[ValidationQuestion]":
    """Return the validation samples to answer for `evaluate.metrics`, [] without metrics; DataError if none can be."""
    evaluate = cfg.evaluate
    if data.validation is None:
        if evaluate.metrics or evaluate.keep_best:
            raise messages.DataError(
                "the validation split is empty: there is no row left for it. Give data.validation, more rows, or "
                "a larger data.validation_fraction (it is {fraction}).",
                fraction=cfg.data.validation_fraction,
            )
        return []
    if not evaluate.metrics:
        return []
    from toolkit.evaluate.questions import choose_questions

    names, limits = data.source_names, (evaluate.max_samples, evaluate.max_answers)
    limit = min((limit for limit in limits if limit), default=0)
    questions, num_without_question = choose_questions(data.validation, data.encoder, names, limit)
    if not questions:
        raise messages.DataError(
            "evaluate.metrics: none of {count} validation samples has a question and an answer. Leave the metrics "
            "out, or give conversations in data.validation.",
            count=num_without_question,
        )
    if num_without_question:
        say(
            "evaluate.metrics: {count} of {all} validation samples are plain texts or pieces without a question, "
            "and are not answered.",
            count=num_without_question,
            all=num_without_question + len(questions),
        )
    return questions


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """Evaluates a model on the validation split: loss, answers and their scores."""

    cfg: RunConfig
    data: language_data.LanguageData
    """With a validation split."""
    ranks: Ranks
    questions: "list[ValidationQuestion]"
    model: DeepSpeedEngine | transformers.PreTrainedModel
    """The engine, or a model without one."""
    adapter: str = ""
    """Directory of the adapter that `toolkit eval` loaded, "" in a run."""
    measure: Measure = loss.token_losses

    def drop_too_long(self) -> None:
        """Drop questions whose answers could exceed the model's positions; ModelError if none is left."""
        limit, new = generate.max_context_tokens(self._module), self.cfg.evaluate.max_new_tokens
        fitting = [question for question in self.questions if len(question.prompt) + new <= limit]
        dropped = len(self.questions) - len(fitting)
        if dropped:
            sentence = tr(
                "evaluate.max_new_tokens = {new}: with {count} of {all} validation prompts that is more than the "
                "{most} positions of the model.",
                new=new,
                count=dropped,
                all=len(self.questions),
                most=limit,
            )
            if not fitting:
                raise messages.ModelError(messages.joined(sentence, tr("Set it lower.")))
            say(messages.joined(sentence, tr("They are not answered.")))
        self.questions = fitting

    def run(self, file: Path, alive: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Evaluate and return the figures for metrics.jsonl, the same on every rank; the model and random generators
        are restored. A collective. Answers are written to `file`, a line each; settings and all figures to the same
        name with .json. `alive` is called after each batch.
        """
        cfg, data = self.cfg, self.data
        with language_batches.evaluation_with_progress(cfg, data, self.ranks, alive) as batches:
            figures = evaluate_loss(
                self.model, batches, data.source_names, self.model.device, self._layout.copies, self.measure
            )
        if not self.questions:
            return figures
        from toolkit.evaluate.questions import generate_all

        at_once = cfg.evaluate.batch_size * self._layout.data_ranks
        with terminal.phase(tr("Answering"), -(-len(self.questions) // at_once), tr("batches")) as advance:
            answers = generate_all(
                self._module,
                data.encoder,
                [question.prompt for question in self.questions],
                self._sampling(),
                cfg.evaluate.batch_size,
                self.model.device,
                in_step=self._in_step,
                alive=lambda: (alive(), advance(1)),
                replica=self._layout.data_rank,
                num_replicas=self._layout.data_ranks,
            )
        return figures | process_group.on_rank0(lambda: self._score_answers(answers, file, figures))

    def try_once(self) -> None:
        """Evaluate one batch and generate two tokens of answers, changing nothing; or a ModelError. A collective."""
        batches = islice(language_batches.evaluation_batches(self.cfg, self.data, self.ranks), 1)
        names, copies, device = self.data.source_names, self._layout.copies, self.model.device
        evaluate_loss(self.model, batches, names, device, copies, self.measure)
        if not self.questions:
            return
        longest = sorted((question.prompt for question in self.questions), key=len)[-self.cfg.evaluate.batch_size :]
        sampling = replace(self._sampling(), max_new_tokens=min(2, self.cfg.evaluate.max_new_tokens))
        try:
            generate.generate(self._module, self.data.encoder, longest, sampling, device, in_step=self._in_step)
        except Exception as error:
            if memory.is_out_of_memory(error):
                raise
            raise messages.ModelError(
                "evaluate.metrics: the model cannot answer: {kind}: {reason}. Leave the metrics out, or mend that.",
                kind=type(error).__name__,
                reason=error,
            ) from error

    @property
    def _module(self) -> transformers.PreTrainedModel:
        return stages.unwrap_model(getattr(self.model, "module", self.model))

    @property
    def _in_step(self) -> bool:
        """Whether ranks must generate in step, as the model is partitioned over them."""
        return isinstance(self.model, DeepSpeedEngine) and parameters.is_partitioned(self.model)

    @property
    def _layout(self) -> Mesh:
        return mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank)

    def _sampling(self) -> generate.Sampling:
        """Return how answers are sampled, as `evaluate` says."""
        evaluate = self.cfg.evaluate
        return generate.Sampling(
            max_new_tokens=evaluate.max_new_tokens,
            temperature=evaluate.temperature,
            top_p=evaluate.top_p,
            top_k=evaluate.top_k,
            seed=evaluate.seed,
        )

    def _score_answers(self, answers: "Answers", file: Path, figures: dict[str, float]) -> dict[str, float]:
        """Score the answers, write them to `file`, and return the scores; failures are warnings."""
        missing = len(self.questions) - len(answers.ids)
        if missing:
            warn(
                "{count} of {all} validation samples could not be answered: {reason}.",
                count=missing,
                all=len(self.questions),
                reason=clauses(answers.failures),
            )
        if not answers.ids:
            return {}
        from toolkit.evaluate.metrics import score_answers

        results = score_answers(self.questions, answers, self.cfg.evaluate.metrics, self.data.encoder)
        for name, reason in results.failures.items():
            warn("the metric {name} failed and is skipped: {reason}.", name=name, reason=reason)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in results.rows]
            file.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
            config = to_dict(self.cfg)
            record = {
                "figures": figures | results.values,
                "tokenization": results.tokenize,
                "signatures": results.signatures,
                "failures": results.failures,
                "model": config["model"],
                "adapter": self.adapter,
                "evaluate": config["evaluate"],
            }
            text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
            file.with_suffix(".json").write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            warn("{file} cannot be written: {reason}.", file=file, reason=error.strerror or str(error))
        return results.values
