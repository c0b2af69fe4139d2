"""Language modelling: the cross entropy of trained tokens on tokenized conversations."""

import json
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from deepspeed import DeepSpeedEngine
from numpy.typing import NDArray

from toolkit import messages, secrets, terminal
from toolkit.checkpoint import state_files
from toolkit.config.mesh import mesh_of, with_micro_batch
from toolkit.config.objective import data_unit
from toolkit.config.schema import EVAL_LOSS, Init, Packing, RunConfig
from toolkit.data import sampler
from toolkit.data.store import TokenizedCache
from toolkit.distributed import process_group
from toolkit.engine import ds_config, parameters
from toolkit.evaluate import generate
from toolkit.export.card import CARD_FILE, card
from toolkit.export.verify import verify_export
from toolkit.export.write import check_exportable, export_model
from toolkit.launch.environment import Ranks
from toolkit.messages import tr, warn
from toolkit.models import chat, directory, loss, probe, save, stages
from toolkit.models.loss import token_loss_sum
from toolkit.models.record import has_adapter, record_of
from toolkit.sample_types import Batch
from toolkit.tasks import language_batches, language_data, language_evaluation, language_model
from toolkit.train import run_dir, schedule, task
from toolkit.train.step import Samples, TokenCounts

if TYPE_CHECKING:
    from toolkit.evaluate.questions import ValidationQuestion
    from toolkit.models.router_loss import Routers


def describe_sample(where: str, ids: NDArray[Any], trained: NDArray[np.bool_], tokenizer: Any) -> dict[str, Any]:
    """Return an item of `Samples`: where a sample stands, its counts, and its text with trained tokens marked."""
    from toolkit.data import preview

    text = preview.colored_spans(tokenizer, ids.tolist(), trained.tolist())
    return {"where": where, "tokens": len(ids), "trained_tokens": int(trained.sum()), "text": text}


class LanguageTask(task.Task):
    """Trains a causal language model on conversations and texts. Its steps work without `load_data` and a run."""

    loss_unit = "nats/token"
    names: tuple[str, ...] = ()
    """Names of the figures of a step."""
    reported: tuple[tuple[str, str], ...] = ()
    """Figures of an evaluation that are reported at the end with its loss, and their names in the summary."""
    cfg: RunConfig
    ranks: Ranks
    data: language_data.LanguageData
    epoch: schedule.Epoch
    questions: "list[ValidationQuestion]"
    evaluation: language_evaluation.Evaluation | None = None

    def __init__(self) -> None:
        self._figures = self._zeros()

    def _zeros(self) -> dict[str, torch.Tensor]:
        """Return the figures of no micro-batch, see `_add`."""
        return dict.fromkeys(self.names, torch.zeros(2))

    def load_data(self, cfg: RunConfig, ranks: Ranks) -> None:
        """Open the tokenized caches, building them first if they are not there."""
        encoder = language_data.build_encoder(cfg)
        self.check(cfg, encoder.tokenizer)
        self.data = language_data.load_data(cfg, encoder)
        language_data.check_same_data(cfg, self.data)

    def check(self, cfg: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase | None) -> Any:
        """Raise errors that the model's and tokenizer's files show, before hours of tokenization; also for `toolkit
        check`, `new` and `prepare`. Arguments and result: see `language_check.check_model`.
        """
        if cfg.model.init is Init.random:
            return None
        from toolkit.tasks.language_check import check_model

        try:
            with messages.silent(), warnings.catch_warnings():  # warnings are repeated when the model is loaded
                warnings.simplefilter("ignore")
                return check_model(cfg, tokenizer)
        except messages.ToolkitError:
            raise
        except Exception as error:  # a library may fail on the meta device alone
            kind = type(error).__name__
            warn("the model could not be tried beforehand: {kind}: {reason}.", kind=kind, reason=error)
            return None

    def begin(self, cfg: RunConfig, ranks: Ranks) -> None:
        """Seed random generators, and choose the questions of evaluations; DataError if there are none."""
        self.cfg, self.ranks = cfg, ranks
        state_files.seed_all(cfg.run.seed + mesh_of(cfg, ranks.world_size, ranks.rank).data_rank)
        self.questions = language_evaluation.choose_prompts(cfg, self.data)
        self.vocab_size = len(self.data.tokenizer)

    def settle(self, cfg: RunConfig) -> None:
        """Take the settled config and count the steps. With grouped packing a sequence is a micro-batch: the data is
        planned again if it was planned for another size (`auto` until now).
        """
        planned = with_micro_batch(self.cfg).batch.micro_per_gpu  # 1 for auto
        if cfg.batch.micro_per_gpu != planned and self.data.packing is Packing.grouped:
            self.data = language_data.load_data_with(cfg, self.data.encoder)
        data, members = self.data, self.data.train_plan.members
        self.cfg, self.steps_per_epoch = cfg, language_batches.epoch_steps(cfg, data)
        self.total_steps = cfg.train.max_steps or cfg.train.over_epochs(self.steps_per_epoch)
        # The tokenizer counts too: another one may give the same samples, but other tokens than the model has learned.
        self.identity = data.identity | chat.tokenizer_identity(data.tokenizer)
        self.has_validation = data.validation is not None
        self.epoch = schedule.Epoch(
            samples=len(data.train) if members is None else len(members),
            sequences=language_batches.epoch_rows(cfg, data),
            per_step=language_batches.rows_per_step(cfg, data.packing)[0],
        )
        self._order = language_batches.changing_order(cfg, data)

    def data_summary(self) -> dict[str, Any]:
        data = self.data
        unit, size = data_unit(self.cfg)  # such as pairs, of 2 samples

        def sizes(cache: TokenizedCache) -> dict[str, int]:
            return {unit: len(cache) // size, "tokens": cache.num_tokens, "trained_tokens": cache.num_trained_tokens}

        return {
            "sources": data.source_names,
            "packing": data.packing.value,
            "fingerprint": data.train.fingerprint,
            "train": sizes(data.train),
            "validation": sizes(data.validation) if data.validation else {},
        }

    def data_card(self) -> dict[str, Any]:
        """Return counts, dropped rows, and a histogram of each split's lengths."""
        data, report = self.data, self.data.report
        splits = {"train": data.train, "validation": data.validation}
        unit, size = data_unit(self.cfg)
        return {
            "unit": unit,
            "packing": data.packing.value,
            "rows_per_epoch": self.epoch.sequences,
            "shared_tokens": data.train_plan.num_shared,
            "rows_read": report.rows_read,
            "dropped": report.dropped,
            "longer": report.longer,
            "truncated": report.truncated,
            "turns_dropped": report.turns_dropped,
            "cut": report.cut,
            "split": report.split,
            "divided": report.divided,
            "duplicates": {"training": report.repeated, "validation": report.leaked},
            "sources": [{**source, "samples": source["samples"] // size} for source in report.sources],
            "splits": {
                name: {**language_data.split_card(cache), "samples": len(cache) // size}
                for name, cache in splits.items()
                if cache is not None
            },
        }

    def batches(self, position: sampler.Position, num_steps: int) -> Iterator[Batch]:
        self._figures = self._zeros()  # without those of a dry run that failed
        return language_batches.training_batches(self.cfg, self.data, self.ranks, num_steps, position)

    def next_position(self, position: sampler.Position) -> sampler.Position:
        return sampler.next_position(position, self.epoch.sequences, self.epoch.per_step)

    def order_metrics(self, position: sampler.Position) -> dict[str, float]:
        return self._order.figures(position) if self._order else {}

    def describe_samples_at(self, position: sampler.Position) -> Samples:
        """Return the samples of a step, with texts in which trained tokens are marked."""
        store, tokenizer = self.data.train, self.data.tokenizer

        def describe(sample: int) -> dict[str, Any]:
            return describe_sample(store.where(sample), *store[sample], tokenizer)

        by_rank = language_batches.step_samples(self.cfg, self.data, self.ranks.world_size, position)
        return [[[describe(sample) for sample in samples] for samples in micro_batches] for micro_batches in by_rank]

    def build_model(self, ds: ds_config.DsConfig, source: run_dir.RunSource) -> torch.nn.Module:
        """Load the model and apply its fine-tuning method. A collective."""
        return language_model.build_model(self.cfg, self.data, ds, source)

    def engine_built(self, engine: DeepSpeedEngine, ds: ds_config.DsConfig, source: run_dir.RunSource) -> None:
        """Check the engine, and report its attention, loss and optimizer. A collective."""
        language_model.check_engine(engine, self.cfg, self.data)

    def model_files(self, engine: DeepSpeedEngine) -> task.ModelFiles:
        """Return config, tokenizer and the adapter's settings, read now, as the model's directory may go away."""
        files: dict[str, bytes] = {}
        model = stages.unwrap_model(engine.module)
        process_group.on_rank0(lambda: files.update(save.non_weight_files(model, self.data.encoder)))
        if tuned := record_of(engine).tuned:
            files |= tuned.describe()
        store = self.data.train
        rows = [store[row][0].tolist() for row in range(min(probe.ROWS, len(store)))]
        return task.ModelFiles(files, probe.probe_ids(rows, model.config))

    def prepare_evaluation(self, run: task.RunContext) -> None:
        """Set the evaluation up, without questions whose answers would be too long for the model."""
        if self.has_validation:
            self.evaluation = language_evaluation.Evaluation(
                cfg=run.cfg, data=self.data, ranks=run.ranks, questions=self.questions, model=run.engine
            )
            self.evaluation.drop_too_long()

    def start_lines(self, run: task.RunContext) -> str:
        store, counts = self.data.train, parameters.count_parameters(stages.unwrap_model(run.engine.module))
        trained = sum(group_count.trained for group_count in counts.values())
        total = sum(group_count.total for group_count in counts.values())
        parts = []
        for group, count in counts.items():
            if count.trained:
                of_total = f" / {count.total:,}" if count.trained < count.total else ""
                parts.append(f"{group} {count.trained:,}{of_total}")
        line = tr(
            "{trained} of {parameters} parameters are trained ({parts}). {samples} with "
            "{tokens} tokens ({trained_tokens} trained), {steps} steps ({per_epoch} per epoch). Run "
            "directory: {folder}",
            trained=f"{trained:,}",
            parameters=f"{total:,}",
            parts=messages.listed(*parts),
            samples=self._size_of_data(),
            tokens=f"{store.num_tokens:,}",
            trained_tokens=f"{store.num_trained_tokens:,}",
            steps=f"{run.total_steps:,}",
            per_epoch=f"{self.steps_per_epoch:,}",
            folder=run.display_folder,
        )
        duplicates = self.data.report.duplicates()
        return f"{line}\n{duplicates}" if duplicates else line

    def _size_of_data(self) -> str:
        return tr("{samples} samples", samples=f"{len(self.data.train):,}")

    def longest_batch(self, position: sampler.Position) -> tuple[Batch, str]:
        """Return the longest rows of the training data."""
        batch = language_batches.longest_batch(self.cfg, self.data, self.ranks.world_size)
        rows, tokens = self.shape(batch)
        name = tr("the longest batch ({rows} x {tokens} tokens)", rows=rows, tokens=tokens)
        return self._with_any_columns(batch), name

    def larger_batch(self, rows: int, share: float) -> Batch:
        return self._with_any_columns(language_batches.repeated_batch(self.cfg, self.data, rows, share))

    def _with_any_columns(self, batch: Batch) -> Batch:
        """Return a micro-batch of the dry run with the further columns that the run's micro-batches have."""
        return batch

    def check_evaluation(self, run: task.RunContext) -> None:
        """Evaluate one batch, and generate two tokens of an answer."""
        cfg = run.cfg.evaluate
        if self.evaluation is not None:
            self.evaluation.try_once()
        for prompt in cfg.prompts:
            encoded = self.data.encoder.prompt([{"role": "user", "content": prompt}])
            generate.check_length(generate.max_context_tokens(run.engine.module), len(encoded), cfg.max_new_tokens)
        if cfg.prompts:
            self._answer(run.engine, cfg.prompts[0], min(2, cfg.max_new_tokens))

    def _answer(self, engine: DeepSpeedEngine, prompt: str, max_new_tokens: int) -> str:
        in_step = parameters.is_partitioned(engine)  # then each forward pass is a collective
        return generate.answer(engine.module, self.data.encoder, prompt, max_new_tokens, engine.device, in_step=in_step)

    def count_losses(self, batch: Batch) -> int:
        return loss.num_trained_tokens(batch)

    def token_counts(self, batches: list[Batch]) -> TokenCounts:
        return TokenCounts(
            total_tokens=sum(int((batch["segment_ids"] > 0).sum()) for batch in batches),
            computed_tokens=sum(batch["input_ids"].numel() for batch in batches),
            # Position p of a sample, in a packed row too, attends to p + 1 tokens.
            pairs=sum(int(((batch["position_ids"] + 1) * (batch["segment_ids"] > 0)).sum()) for batch in batches),
            trained_tokens=sum(map(loss.num_trained_tokens, batches)),
        )

    def shape(self, batch: Batch) -> tuple[int, ...]:
        return tuple(batch["input_ids"].shape)

    def loss_sum(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross entropies of trained tokens, nats."""
        return token_loss_sum(engine, batch)

    def _add(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch's figures, all of `names`, to the step's: each is a sum and its number of values, [2]."""
        self._figures = {name: self._figures[name].to(new, non_blocking=True) + new for name, new in figures.items()}

    def take_figures(self) -> dict[str, torch.Tensor]:
        figures, self._figures = self._figures, self._zeros()
        return figures

    def routers(self, engine: DeepSpeedEngine) -> "Routers | None":
        return record_of(engine).routers

    def evaluate(self, run: task.RunContext, step: int, alive: Callable[[], None]) -> dict[str, float]:
        """Evaluate loss, answers and their scores; the answers are written to evaluations/."""
        assert self.evaluation is not None
        return self.evaluation.run(run.folder / "evaluations" / f"step-{step}.jsonl", alive)

    def answer_before(self, run: task.RunContext) -> None:
        """Answer the recipe's questions, unless the weights are random, whose answers are noise."""
        if run.cfg.model.init is Init.pretrained:
            self._ask(run, "before")

    def answers(self, run: task.RunContext) -> list[dict[str, str]]:
        """Answer the recipe's questions, and write samples.jsonl."""
        return self._ask(run, "answer")

    def _ask(self, run: task.RunContext, field: str) -> list[dict[str, str]]:
        """Ask the recipe's questions on all ranks. Rank 0 writes and returns the rows of samples.jsonl, each with its
        answer as `field` ("before" or "answer"); other ranks return [].
        """
        cfg = run.cfg.evaluate
        answered = {
            secrets.hide(prompt): self._answer(run.engine, prompt, cfg.max_new_tokens) for prompt in cfg.prompts
        }
        if not answered or run.ranks.rank:
            return []
        file = run.folder / "samples.jsonl"
        # Of this command, or of the one that began the run which this one resumes.
        asked_before = [row for row in run_dir.read_rows(file, OSError) if "before" in row]
        before = {str(row.get("prompt")): {"before": str(row["before"])} for row in asked_before}
        rows = [{"prompt": prompt, **before.get(prompt, {}), field: text} for prompt, text in answered.items()]
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return rows

    def check_export(self, run: task.RunContext) -> None:
        """Raise an error if the export could not be read back."""
        model, files = stages.unwrap_model(run.engine.module), run.files.files
        folder = run.folder / "export"
        if has_adapter(model):
            from toolkit.export.adapter import check_adapter_exportable

            process_group.on_rank0(lambda: check_adapter_exportable(model, files, folder))
        else:
            process_group.on_rank0(lambda: check_exportable(model, files, folder))

    def export(self, run: task.RunContext, result: task.FitResult) -> None:
        """Write export/, and check that it computes the same logits as the run."""
        is_adapter = has_adapter(run.engine.module)
        if is_adapter:
            from toolkit.export.adapter import export_adapter, prove_adapter
        described = run.files.files.items()
        # base.json names the base of an adapter: a whole model has none.
        files = {name: content for name, content in described if is_adapter or name != directory.BASE_FILE}
        files[CARD_FILE] = card(result.state, is_adapter)
        folder, probe_ids = run.folder / "export", run.files.probe_ids
        assert probe_ids is not None
        with terminal.phase(tr("Exporting")):
            if is_adapter:
                export_adapter(run.engine, files, probe_ids, folder)
            else:
                export_model(run.engine, files, probe_ids, folder)
        if run.cfg.checkpoint.verify_export:
            with terminal.phase(tr("Comparing the export with the run")):
                if is_adapter:
                    prove_adapter(run.engine, folder)
                else:
                    process_group.on_rank0(lambda: verify_export(folder))
        if run.cfg.export.require_serving:
            with terminal.phase(tr("Checking that the export is served as it was trained")):
                process_group.on_rank0(lambda: self._require_serving(run.cfg, folder))

    def _require_serving(self, cfg: RunConfig, folder: Path) -> None:
        """Raise an error unless servers would tokenize conversations as training does."""
        serving = import_module("toolkit.extras.serving")
        held = serving.held_conversations(cfg.data, Path(cfg.prepare.dir))
        serving.require_serving(folder, self.data.encoder, held, cfg.data.train_on)

    def summary(self, run: task.RunContext, result: task.FitResult) -> dict[str, Any]:
        """Return numbers of parameters and tokens, figures of the first and the last evaluation, and n-gram losses."""
        counts = parameters.count_parameters(stages.unwrap_model(run.engine.module)).values()
        summary: dict[str, Any] = {
            "parameters": sum(count.total for count in counts),
            "trained_parameters": sum(count.trained for count in counts),
            "trained_tokens": result.state.trained_tokens,
            "total_tokens": result.state.total_tokens,
        }
        evaluations = result.state.evaluations
        ends = {"last": evaluations[-1]} if evaluations else {}
        if len(evaluations) > 1:  # a single one is the last
            ends["first"] = evaluations[0]
        for figure, name in ((EVAL_LOSS, EVAL_LOSS), *self.reported):
            if all(figure in row for row in ends.values()):
                summary |= {f"{end}_{name}": row[figure] for end, row in ends.items()}
        if run.cfg.evaluate.ngram_baselines and self.has_validation and run.ranks.rank == 0:
            summary |= self._baselines()
        return summary

    def _baselines(self) -> dict[str, float]:
        """Return the losses of n-gram models on the tokens of the validation loss."""
        data = self.data
        assert data.validation is not None
        measured = None if data.validation_plan is None else data.validation_plan.members
        from toolkit.evaluate.loss import ngram_baselines

        unigram, bigram = ngram_baselines(data.train, data.validation, len(data.tokenizer), measured)
        return {"unigram_loss": unigram, "bigram_loss": bigram}

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        lines = []
        if losses := first_to_last(summary, EVAL_LOSS):
            lines.append(tr("Validation loss {losses} nats/token.", losses=losses))
        if "unigram_loss" in summary:
            baselines = {name: f"{summary[f'{name}_loss']:.3f}" for name in ("unigram", "bigram")}
            lines.append(tr("For comparison, on the same tokens: unigram {unigram}, bigram {bigram}.", **baselines))
        return lines

    def next_steps(self, run: task.RunContext, answers: list[dict[str, str]]) -> list[str]:
        folder = run.display_folder
        if not run.cfg.checkpoint.export:
            return [tr("See the curve:  {command}", command=f"less {folder}/metrics.jsonl")]
        if has_adapter(run.engine.module):
            what = tr("The adapter: {folder}/export", folder=folder)
        elif stages.unwrap_model(run.engine.module).config.model_type == "chatglm":
            what = tr("The model: {folder}/export (transformers itself does not know ChatGLM-6B)", folder=folder)
        else:
            what = tr("The model, for any program that uses transformers: {folder}/export", folder=folder)
        prompt = answers[0]["prompt"] if answers else "Hello"
        command = shlex.join(["toolkit", "generate", str(folder), f"prompt={prompt}"])
        return [what, tr("Ask it:  {command}", command=command)]


def first_to_last(summary: Mapping[str, Any], name: str, form: str = ".3f") -> str:
    """Return a figure of a summary as "7.658 -> 0.101", "0.101" if it was measured once, "" if never."""
    return " -> ".join(f"{summary[key]:{form}}" for key in (f"first_{name}", f"last_{name}") if key in summary)
