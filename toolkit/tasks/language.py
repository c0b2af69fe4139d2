"""Language modelling: the cross entropy of trained tokens on tokenized conversations, and its evaluation."""

import gc
import json
import logging
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from deepspeed import DeepSpeedEngine

from toolkit import messages, secrets, terminal
from toolkit.checkpoint import state_files
from toolkit.config.load import to_dict
from toolkit.config.mesh import Mesh, mesh_of, micro_rows, with_micro_batch
from toolkit.config.schema import EVAL_LOSS, Init, Packing, RunConfig, TuningMethod, data_unit
from toolkit.data import loader, preview, sampler
from toolkit.data.store import TokenizedCache
from toolkit.distributed import process_group
from toolkit.engine import build, ds_config, memory, parameters
from toolkit.evaluate import generate, metrics
from toolkit.export import merge, model as export
from toolkit.launch.environment import Ranks
from toolkit.layouts import experts, fp8, pipeline
from toolkit.messages import clauses, say, tr, warn
from toolkit.models import (
    adapters,
    assemble,
    attention,
    base_model,
    chat,
    classifier,
    layers,
    load,
    lora,
    loss,
    probe,
    router_loss,
    save,
    stages,
    structure,
)
from toolkit.models.loss import token_loss_sum
from toolkit.tasks import language_data
from toolkit.train import checkpointer, run_dir, schedule, task, tracking
from toolkit.train.step import Samples


def choose_prompts(cfg: RunConfig, prepared: language_data.LanguageData) -> list[metrics.ValidationQuestion]:
    """Return the validation samples that the model is to answer; before it is loaded, as a DataError may come up."""
    evaluate = cfg.evaluate
    if prepared.validation is None:
        if evaluate.metrics or evaluate.keep_best:
            raise messages.DataError(
                "the validation split is empty: there is no row left for it. Give data.validation, more rows, or "
                "a larger data.validation_fraction (it is {fraction}).",
                fraction=cfg.data.validation_fraction,
            )
        return []
    if not evaluate.metrics:
        return []
    names, limits = prepared.source_names, (evaluate.max_samples, evaluate.max_answers)
    most = min((limit for limit in limits if limit), default=0)
    questions, others = metrics.choose_questions(prepared.validation, prepared.encoder, names, most)
    if not questions:
        raise messages.DataError(
            "evaluate.metrics: none of {count} validation samples has a question and an answer. Leave the metrics "
            "out, or give conversations in data.validation.",
            count=others,
        )
    if others:
        say(
            "evaluate.metrics: {count} of {all} validation samples are plain texts or pieces without a question, "
            "and are not answered.",
            count=others,
            all=others + len(questions),
        )
    return questions


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """Evaluates a model as often as wanted, each time in the same way."""

    cfg: RunConfig
    prepared: language_data.LanguageData
    """The validation split is there."""
    ranks: Ranks
    questions: list[metrics.ValidationQuestion]
    model: DeepSpeedEngine | transformers.PreTrainedModel
    """The engine, or where there is none the model."""
    adapter: str = ""
    """Directory of an adapter that was loaded for this; "" in a run."""
    measure: metrics.Measure = loss.token_losses

    def leave_out_too_long(self) -> None:
        """Drop the questions whose answers could become longer than the model's positions; all: a ModelError."""
        most, new = generate.most_tokens(self._module), self.cfg.evaluate.max_new_tokens
        fitting = [question for question in self.questions if len(question.prompt) + new <= most]
        dropped = len(self.questions) - len(fitting)
        if dropped:
            sentence = tr(
                "evaluate.max_new_tokens = {new}: with {count} of {all} validation prompts that is more than the "
                "{most} positions of the model.",
                new=new,
                count=dropped,
                all=len(self.questions),
                most=most,
            )
            if not fitting:
                raise messages.ModelError(messages.joined(sentence, tr("Set it lower.")))
            say(messages.joined(sentence, tr("They are not answered.")))
        self.questions = fitting

    def run(self, file: Path, alive: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Evaluate without a trace; return the figures for metrics.jsonl, the same on every rank. A collective. Each
        answer is a line of `file`, what is true of all is in its .json; `alive` is called now and then.
        """
        cfg, prepared = self.cfg, self.prepared
        with language_data.shown_evaluation(cfg, prepared, self.ranks, alive) as batches:
            figures = metrics.evaluate_loss(
                self.model, batches, prepared.source_names, self.model.device, self._layout.copies, self.measure
            )
        if not self.questions:
            return figures
        at_once = cfg.evaluate.batch_size * self._layout.data_ranks
        with terminal.phase(tr("Answering"), -(-len(self.questions) // at_once), tr("batches")) as advance:
            answers = metrics.generate_all(
                self._module,
                prepared.encoder,
                [question.prompt for question in self.questions],
                self._sampling(),
                cfg.evaluate.batch_size,
                self.model.device,
                in_step=self._in_step,
                alive=lambda: (alive(), advance(1)),
                place=self._layout.data_rank,
                num_places=self._layout.data_ranks,
            )
        return figures | process_group.on_rank0(lambda: self._judge(answers, file, figures))

    def rehearse(self) -> None:
        """Evaluate one batch, and begin an answer; a ModelError if the model cannot. A collective without a trace."""
        batches = islice(language_data.evaluation_batches(self.cfg, self.prepared, self.ranks), 1)
        names, copies, device = self.prepared.source_names, self._layout.copies, self.model.device
        metrics.evaluate_loss(self.model, batches, names, device, copies, self.measure)
        if not self.questions:
            return
        longest = sorted((question.prompt for question in self.questions), key=len)[-self.cfg.evaluate.batch_size :]
        sampling = replace(self._sampling(), max_new_tokens=min(2, self.cfg.evaluate.max_new_tokens))
        try:
            generate.generate(self._module, self.prepared.encoder, longest, sampling, device, in_step=self._in_step)
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
        """Whether the model is partitioned over the ranks."""
        return isinstance(self.model, DeepSpeedEngine) and parameters.is_partitioned(self.model)

    @property
    def _layout(self) -> Mesh:
        return mesh_of(self.cfg, self.ranks.world_size, self.ranks.rank)

    def _sampling(self) -> generate.Sampling:
        evaluate = self.cfg.evaluate
        return generate.Sampling(
            max_new_tokens=evaluate.max_new_tokens,
            temperature=evaluate.temperature,
            top_p=evaluate.top_p,
            top_k=evaluate.top_k,
            seed=evaluate.seed,
        )

    def _judge(self, answers: metrics.Answers, file: Path, figures: dict[str, float]) -> dict[str, float]:
        """Score and keep the answers; whatever goes wrong is told, and ends nothing."""
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
        results = metrics.score_answers(self.questions, answers, self.cfg.evaluate.metrics, self.prepared.encoder)
        for name, reason in results.failures.items():
            warn("the metric {name} failed and is skipped: {reason}.", name=name, reason=reason)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in results.rows]
            file.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
            config = to_dict(self.cfg)
            whole = {
                "figures": figures | results.values,
                "tokenization": results.tokenize,
                "signatures": results.signatures,
                "failures": results.failures,
                "model": config["model"],
                "adapter": self.adapter,
                "evaluate": config["evaluate"],
            }
            text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
            file.with_suffix(".json").write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            warn("{file} cannot be written: {reason}.", file=file, reason=error.strerror or str(error))
        return results.values


def evaluate_model(cfg: RunConfig, ranks: Ranks, file: Path, adapter: str) -> None:
    """Load a model and its adapter directory ("": none), evaluate it data-parallel, print scores. A collective."""
    checkpointer.check_settings(cfg)
    prepared = language_data.load_data(cfg)
    language_data.check_same_data(cfg, prepared)
    questions = choose_prompts(cfg, prepared)
    if prepared.validation is None:
        raise messages.DataError(tr("the validation split is empty: there are too few rows."))
    device = process_group.start(cfg.distributed)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # for the developers of libraries, not between these lines
    build.use_tf32(cfg.precision)
    packed = prepared.layout is not loader.Layout.alone
    # Steps are not taken: batch.global_size need not fit these ranks.
    batch = replace(cfg.batch, global_size=micro_rows(cfg) * ranks.world_size)
    ds = ds_config.build_ds_config(replace(cfg, batch=batch), ranks.world_size).values
    model = load.create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed, ds, packed)
    if adapter:
        adapters.load_adapter(model, Path(adapter), base_model.base_of(model, Path(cfg.model.path)), ds_config=ds)
    # Under ZeRO-3 partitioned over the ranks as in training, else whole on each of them.
    loaded = build.initialize_untrained(model, ds) if cfg.zero.stage == 3 else model.to(device)
    if packed:
        of_model = loaded, len(prepared.tokenizer), device, cfg.model.name or cfg.model.path
        attention.check_isolation(*of_model, shared=prepared.shares_prefixes)
    evaluation = Evaluation(cfg=cfg, prepared=prepared, ranks=ranks, questions=questions, model=loaded, adapter=adapter)
    evaluation.leave_out_too_long()
    figures = evaluation.run(file)
    say("\n".join(_lines(figures)))
    if not cfg.evaluate.metrics:
        say("To see its answers too: evaluate.metrics=[bleu,chrf,rouge_l]")
    elif file.exists():
        say("Each prompt, answer and score: {file}", file=file)
    process_group.stop()


def _lines(figures: dict[str, float]) -> list[str]:
    """Return the figures as a table, with a column for each source where there are several."""
    sources = sorted({name.partition("/")[2] for name in figures} - {""})
    rows = []
    for name in figures:
        if "/" not in name:
            cells = [figures.get(key, "") for key in (name, *(f"{name}/{source}" for source in sources))]
            shown = [f"{cell:,.4f}" if isinstance(cell, float) else f"{cell:,}" if cell != "" else "" for cell in cells]
            rows.append([name.removeprefix("eval_"), *shown])
    return terminal.text_table(["", tr("all"), *sources], rows)


class LanguageTask(task.Task):
    """Trains a causal language model on conversations and texts; its steps need no data and no run."""

    loss_unit = "nats/token"
    names: tuple[str, ...] = ()
    """Of the figures of a step."""
    reported: tuple[tuple[str, str], ...] = ()
    """Figures of an evaluation that are reported at the end beside its loss, and what the summary calls each."""
    cfg: RunConfig
    ranks: Ranks
    data: language_data.LanguageData
    epoch: schedule.Epoch
    questions: list[metrics.ValidationQuestion]
    evaluation: Evaluation | None = None

    def __init__(self) -> None:
        self._figures = self._zeros()

    def _zeros(self) -> dict[str, torch.Tensor]:
        return dict.fromkeys(self.names, torch.zeros(2))

    # Data

    def load_data(self, cfg: RunConfig, ranks: Ranks) -> None:
        """Open the tokenized caches, building them first if they are not there."""
        encoder = language_data.build_encoder(cfg)
        self.check(cfg, encoder.tokenizer)
        self.data = language_data.load_data(cfg, encoder)
        language_data.check_same_data(cfg, self.data)

    def check(self, cfg: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase | None) -> None:
        """Raise what the model's and tokenizer's files show, before rows are tokenized, which may take hours. `toolkit
        check`, `new` and `prepare` ask the same; `tokenizer`: None where it is not on this disk.
        """
        try:
            with messages.silent(), warnings.catch_warnings():  # about the model they are said when it is loaded
                warnings.simplefilter("ignore")
                assemble.check_model(cfg, tokenizer)
        except messages.ToolkitError:
            raise
        except Exception as error:  # of a library on the meta device: with its weights the model may do all the same
            kind = type(error).__name__
            warn("the model could not be tried beforehand: {kind}: {reason}.", kind=kind, reason=error)

    def begin(self, cfg: RunConfig, ranks: Ranks) -> None:
        """Seed random generators, and choose what is asked at evaluations: before the model is loaded it may fail."""
        self.cfg, self.ranks = cfg, ranks
        state_files.seed_all(cfg.run.seed + mesh_of(cfg, ranks.world_size, ranks.rank).data_rank)
        self.questions = choose_prompts(cfg, self.data)
        self.vocab_size = len(self.data.tokenizer)

    def settle(self, cfg: RunConfig) -> None:
        """Take the settled config; sequences of a grouped plan are micro-batches, and are planned again."""
        planned = with_micro_batch(self.cfg).batch.micro_per_gpu
        if cfg.batch.micro_per_gpu != planned and self.data.packing is Packing.grouped:
            self.data = language_data.load_data_with(cfg, self.data.encoder)
        data, members = self.data, self.data.train_plan.members
        self.cfg, self.steps_per_epoch = cfg, language_data.epoch_steps(cfg, data)
        self.total_steps = cfg.train.max_steps or cfg.train.epochs * self.steps_per_epoch
        # Another tokenizer may give the same samples; it would be exported with a model that has learned other tokens.
        self.identity = data.identity | chat.tokenizer_identity(data.tokenizer)
        self.has_validation = data.validation is not None
        self.epoch = schedule.Epoch(
            samples=len(data.train) if members is None else len(members),
            sequences=language_data.epoch_rows(cfg, data),
            per_step=language_data.rows_per_step(cfg, data.packing)[0],
        )
        self._order = language_data.changing_order(cfg, data)

    def data_summary(self) -> dict[str, Any]:

        def sizes(store: TokenizedCache) -> dict[str, int]:
            return {unit: len(store) // size, "tokens": store.num_tokens, "trained_tokens": store.num_trained_tokens}

        data, (unit, size) = self.data, data_unit(self.cfg)
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

    def batches(self, position: sampler.Position, num_steps: int) -> Iterator[language_data.Batch]:
        self._figures = self._zeros()  # without those of a dry run that failed
        return language_data.training_batches(self.cfg, self.data, self.ranks, num_steps, position)

    def next_position(self, position: sampler.Position) -> sampler.Position:
        return sampler.next_position(position, self.epoch.sequences, self.epoch.per_step)

    def order_metrics(self, position: sampler.Position) -> dict[str, float]:
        return self._order.figures(position) if self._order else {}

    def samples_at(self, position: sampler.Position) -> Samples:
        """Return the samples of a step with their texts, trained tokens apart."""
        store, tokenizer = self.data.train, self.data.tokenizer

        def shown(sample: int) -> dict[str, Any]:
            ids, trained = store[sample]
            text = preview.colored_spans(tokenizer, ids.tolist(), trained.tolist())
            counts = {"tokens": len(ids), "trained_tokens": int(trained.sum())}
            return {"where": store.where(sample), **counts, "text": text}

        by_rank = language_data.step_samples(self.cfg, self.data, self.ranks.world_size, position)
        return [[[shown(sample) for sample in samples] for samples in micro_batches] for micro_batches in by_rank]

    # Model

    def build(self, ds: ds_config.DsConfig, source: run_dir.RunSource) -> DeepSpeedEngine:
        """Load the model, leave trainable what `tuning` says, and hand it to DeepSpeed. A collective."""
        return build_engine(self.cfg, self.data, ds, self.total_steps, source)

    def model_files(self, engine: DeepSpeedEngine) -> checkpointer.ModelFiles:
        """Return config, tokenizer and what tuning added. Now, while the model's directory is there."""
        files: dict[str, bytes] = {}
        model = stages.unwrap_model(engine.module)
        process_group.on_rank0(lambda: files.update(save.describe(model, self.data.encoder)))
        if tuned := getattr(engine.module, "tuned", None):
            files |= tuned.describe()
        store = self.data.train
        rows = [store[row][0].tolist() for row in range(min(probe.ROWS, len(store)))]
        return checkpointer.ModelFiles(files, probe.ids_of(rows, model.config), export.export_in_background)

    def prepare_evaluation(self, run: task.RunContext) -> None:
        """Skip questions whose answers would be too long for the model."""
        if self.has_validation:
            self.evaluation = Evaluation(
                cfg=run.cfg, prepared=self.data, ranks=run.ranks, questions=self.questions, model=run.engine
            )
            self.evaluation.leave_out_too_long()

    def start_lines(self, run: task.RunContext) -> str:
        store, counts = self.data.train, parameters.count_parameters(stages.unwrap_model(run.engine.module))
        trained, total = sum(one.trained for one in counts.values()), sum(one.total for one in counts.values())
        parts = [
            f"{group} {one.trained:,} / {one.total:,}" if one.trained < one.total else f"{group} {one.total:,}"
            for group, one in counts.items()
            if one.trained
        ]
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

    # Dry run

    def longest_batch(self, position: sampler.Position) -> tuple[language_data.Batch, str]:
        """Return the longest rows of the training data."""
        batch = language_data.longest_batch(self.cfg, self.data, self.ranks.world_size)
        rows, tokens = self.shape(batch)
        name = tr("the longest batch ({rows} x {tokens} tokens)", rows=rows, tokens=tokens)
        return self._with_any_columns(batch), name

    def larger_batch(self, rows: int, share: float) -> language_data.Batch:
        return self._with_any_columns(language_data.repeated_batch(self.cfg, self.data, rows, share))

    def _with_any_columns(self, batch: language_data.Batch) -> language_data.Batch:
        """Return a micro-batch of the dry run with what those of the run have beside their tokens."""
        return batch

    def check_evaluation(self, run: task.RunContext) -> None:
        """Evaluate one batch, and begin an answer."""
        cfg = run.cfg.evaluate
        if self.evaluation is not None:
            self.evaluation.rehearse()
        for prompt in cfg.prompts:
            encoded = self.data.encoder.prompt([{"role": "user", "content": prompt}])
            generate.check_length(run.engine.module, len(encoded), cfg.max_new_tokens)
        if cfg.prompts:
            self._answer(run.engine, cfg.prompts[0], min(2, cfg.max_new_tokens))

    def _answer(self, engine: DeepSpeedEngine, prompt: str, most: int) -> str:
        in_step = parameters.is_partitioned(engine)
        return generate.answer(engine.module, self.data.encoder, prompt, most, engine.device, in_step=in_step)

    # Steps

    def count(self, batch: language_data.Batch) -> int:
        return loss.num_trained_tokens(batch)

    def sizes(self, batches: list[language_data.Batch]) -> list[int]:
        """Return tokens without padding and with it, pairs of tokens that attend, and trained tokens."""
        # A sample's tokens are numbered from 0, also in a packed row: each sees itself and those before it.
        return [
            sum(int((batch["segment_ids"] > 0).sum()) for batch in batches),
            sum(batch["input_ids"].numel() for batch in batches),
            sum(int(((batch["position_ids"] + 1) * (batch["segment_ids"] > 0)).sum()) for batch in batches),
            sum(map(loss.num_trained_tokens, batches)),
        ]

    def shape(self, batch: language_data.Batch) -> tuple[int, ...]:
        return tuple(batch["input_ids"].shape)

    def loss_sum(self, engine: Any, batch: language_data.Batch) -> torch.Tensor:
        """Return the sum of the cross entropies of trained tokens, nats."""
        return token_loss_sum(engine, batch)

    def _add(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Add up figures of a micro-batch: sums, and over how many, [2] each."""
        self._figures = {name: self._figures[name].to(pair, non_blocking=True) + pair for name, pair in figures.items()}

    def take_figures(self) -> dict[str, torch.Tensor]:
        taken, self._figures = self._figures, self._zeros()
        return taken

    def routers(self, engine: DeepSpeedEngine) -> router_loss.Routers | None:
        return getattr(engine.module, "routers", None)

    def evaluate(self, run: task.RunContext, step: int, alive: Callable[[], None]) -> dict[str, float]:
        """Evaluate loss, answers and their scores; the answers are kept in evaluations/ and handed to trackers."""
        assert self.evaluation is not None
        figures = self.evaluation.run(run.folder / "evaluations" / f"step-{step}.jsonl", alive)
        if "eval_answers" in figures:
            tracking.log_answers(run, step)
        return figures

    # End

    def samples(self, run: task.RunContext) -> list[dict[str, str]]:
        """Answer the recipe's questions, and write samples.jsonl."""
        cfg = run.cfg.evaluate
        samples = [
            {"prompt": secrets.hide(prompt), "answer": self._answer(run.engine, prompt, cfg.max_new_tokens)}
            for prompt in cfg.prompts
        ]
        if samples and run.ranks.rank == 0:
            lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
            (run.folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return samples

    def check_export(self, run: task.RunContext) -> None:
        """See that what will be exported can be read back."""
        model, files = stages.unwrap_model(run.engine.module), run.checkpointer.described.files
        process_group.on_rank0(lambda: export.check_exportable(model, files, run.folder / "export"))

    def export(self, run: task.RunContext, result: task.FitResult) -> None:
        """Write export/ and prove it: it holds what was trained, and gives the logits that the run gives."""
        is_adapter = structure.has_adapter(run.engine.module)
        files = {
            name: content
            for name, content in run.checkpointer.described.files.items()
            if is_adapter or name != base_model.BASE_FILE
        }
        files[export.CARD_FILE] = export.card(result.state, is_adapter)
        folder, probe_ids = run.folder / "export", run.checkpointer.described.probe_ids
        assert probe_ids is not None
        with terminal.phase(tr("Exporting")):
            (export.export_adapter if is_adapter else export.export_model)(run.engine, files, probe_ids, folder)
        if run.cfg.checkpoint.verify_export:
            with terminal.phase(tr("Comparing the export with the run")):
                if is_adapter:
                    export.prove_adapter(run.engine, folder)
                else:
                    process_group.on_rank0(lambda: _verify_export(folder))
        if run.cfg.export.require_serving:
            with terminal.phase(tr("Checking that the export is served as it was trained")):
                process_group.on_rank0(lambda: self._require_serving(run.cfg, folder))

    def _require_serving(self, cfg: RunConfig, folder: Path) -> None:
        serving = import_module("toolkit.extras.serving")
        held = serving.held_conversations(cfg.data, Path(cfg.prepare.dir))
        serving.require_serving(folder, self.data.encoder, held, cfg.data.train_on)

    def summary(self, run: task.RunContext, result: task.FitResult) -> dict[str, Any]:
        """Return parameters, tokens, what the first and the last evaluation gave, and the losses of n-grams."""
        counts = parameters.count_parameters(stages.unwrap_model(run.engine.module)).values()
        summary: dict[str, Any] = {
            "parameters": sum(one.total for one in counts),
            "trained_parameters": sum(one.trained for one in counts),
            "trained_tokens": result.state.trained_tokens,
            "total_tokens": result.state.total_tokens,
        }
        ends = result.state.evaluations[:1] + result.state.evaluations[-1:]
        for figure, name in ((EVAL_LOSS, EVAL_LOSS), *self.reported):
            if ends and all(figure in row for row in ends):
                summary |= {f"first_{name}": ends[0][figure], f"last_{name}": ends[1][figure]}
        if run.cfg.evaluate.ngram_baselines and self.has_validation and run.ranks.rank == 0:
            summary |= self._baselines()
        return summary

    def _baselines(self) -> dict[str, float]:
        """Return the losses of n-grams, of the samples that the loss is measured on: all are of the same tokens."""
        data = self.data
        assert data.validation is not None
        measured = None if data.validation_plan is None else data.validation_plan.members
        unigram, bigram = metrics.ngram_baselines(data.train, data.validation, len(data.tokenizer), measured)
        return {"unigram_loss": unigram, "bigram_loss": bigram}

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        losses = {name: f"{loss:.3f}" for name, loss in summary.items() if name.endswith("_loss")}
        lines = []
        if "last_eval_loss" in losses:
            first, last = losses["first_eval_loss"], losses["last_eval_loss"]
            lines.append(tr("Validation loss {first} -> {last} nats/token.", first=first, last=last))
        if "unigram_loss" in losses:
            unigram, bigram = losses["unigram_loss"], losses["bigram_loss"]
            lines.append(
                tr(
                    "For comparison, on the same tokens: unigram {unigram}, bigram {bigram}.",
                    unigram=unigram,
                    bigram=bigram,
                )
            )
        return lines

    def next_steps(self, run: task.RunContext, samples: list[dict[str, str]]) -> list[str]:
        folder = run.display_folder
        if not run.cfg.checkpoint.export:
            return [tr("See the curve:  {command}", command=f"less {folder}/metrics.jsonl")]
        if structure.has_adapter(run.engine.module):
            what = tr("The adapter: {folder}/export", folder=folder)
        elif stages.unwrap_model(run.engine.module).config.model_type == "chatglm":
            what = tr("The model: {folder}/export (transformers itself does not know ChatGLM-6B)", folder=folder)
        else:
            what = tr("The model, for any program that uses transformers: {folder}/export", folder=folder)
        prompt = samples[0]["prompt"] if samples else "Hello"
        command = shlex.join(["toolkit", "generate", f"model.path={folder}/export", f"prompt={prompt}"])
        return [what, tr("Ask it:  {command}", command=command)]


def build_engine(
    cfg: RunConfig,
    data: language_data.LanguageData,
    ds: ds_config.DsConfig,
    total_steps: int,
    source: run_dir.RunSource,
) -> DeepSpeedEngine:
    """Load the model, freeze as `tuning` says, build the engine; ModelError or ConfigError if not. A collective."""
    packed, parts, num_stages = data.layout is not loader.Layout.alone, cfg.parallel.sequence, cfg.parallel.pipeline
    build.use_tf32(cfg.precision)
    dtype, mesh = cfg.precision.dtype, mesh_of(cfg, process_group.world_size(), process_group.rank())
    head, own = language_data.head_of(cfg, data), None
    if num_stages > 1:
        own = partial(pipeline.stage_parameters, num_stages=num_stages, stage=mesh.stage, tuning=cfg.tuning)
        own = partial(own, num_scores=len(head.labels)) if head else own
    elif mesh.expert > 1:
        own = partial(experts.divide, ranks=mesh.expert)
    fp8.check_device(cfg.precision.fp8)
    # Each layer as soon as it is read: a model in 16 bits need not fit into host memory.
    ready = lora.quantize_layer if cfg.tuning.method is TuningMethod.qlora else None
    model = load.create_model(
        cfg.model, dtype, data.tokenizer, cfg.run.seed, ds.values, packed, parts, own, head, ready
    )
    without_liger = layers.apply_liger(model, cfg.kernels)
    base = _base_folder(cfg, data, model, source.folder)
    assemble.adapt(model, cfg, data.tokenizer, base, ds.values)
    if cfg.tuning.method is not TuningMethod.full:
        _check_tuned(model, cfg, base, source)
    module = (
        pipeline.PipelineStage(model, num_stages, load.TORCH_DTYPES[dtype], cfg.parallel.tensor)
        if num_stages > 1
        else model
    )
    engine = task.start_engine(module, cfg, ds, total_steps, source.folder)
    # What building leaves behind refers to itself, and would keep the memory of weights until Python looks for it.
    gc.collect()
    of_model = engine, len(data.tokenizer), engine.device, cfg.model.name or cfg.model.path
    # The logits of some of the vocabulary tell as much.
    few = partial(stages.forward_logits, engine, pick=lambda logits: logits[..., :1024])
    forward = few if stages.is_pipeline(engine) else partial(classifier.token_scores, engine) if head else None
    if packed:
        remedy = "data.share_prefixes=false" if cfg.preference.is_paired else "data.packing=grouped"
        attention.check_isolation(*of_model, forward, data.shares_prefixes, remedy)
    if parts > 1:
        attention.check_sequence_parallel(*of_model, forward, packed, data.shares_prefixes)
    say(_in_use(engine, cfg, without_liger))
    _tell_routers(model.routers)
    return engine


def _check_tuned(model: transformers.PreTrainedModel, cfg: RunConfig, base: Path, source: run_dir.RunSource) -> None:
    """Reject another base than a checkpoint's; warn of an adapter that cannot be merged later. A collective."""
    tuned = model.tuned
    if source.checkpoint and (known := base_model.read_base(source.checkpoint / save.MODEL_DIR)):
        base_model.check_base(known, tuned.base, source.checkpoint)
    if cfg.tuning.method in (TuningMethod.lora, TuningMethod.qlora):
        name = cfg.tuning.adapter or tr("the adapter of this run")
        part = merge.TunedPart(name, tuned.settings, None, base, {}, tuned.head)
        process_group.on_rank0(lambda: merge.tell_unmergeable(part))


def _tell_routers(routers: router_loss.Routers | None) -> None:
    """Report how the experts of a mixture are kept in use."""
    if routers is None:
        return
    if routers.coefficient:
        say(
            "Routers: the mean of {count} layers' load-balancing losses x {coefficient} is added to the loss "
            "(model.router_loss).",
            count=routers.num_layers,
            coefficient=routers.coefficient,
        )
    if routers.bias_rate:
        say(
            "Routers: after each step the experts' biases in {count} layers move by {rate} towards an equal load "
            "(model.router_bias_rate).",
            count=routers.num_layers,
            rate=routers.bias_rate,
        )


def _in_use(engine: DeepSpeedEngine, cfg: RunConfig, without_liger: str) -> str:
    """Return a line about what computes this run. A collective."""
    model = stages.stage_model(engine.module)
    ways = {
        loss.LossPath.losses: tr("fused with the output layer ({kernel})", kernel=model.loss_head.name),
        loss.LossPath.picked: tr("from the logits of trained tokens"),
        loss.LossPath.all_logits: tr("from all logits"),
    }
    computes = model if stages.is_pipeline(engine) else engine
    if probe.is_classifier(model):
        way = tr("from the scores of last tokens")
    else:
        way = ways[stages.broadcast_from_last(engine, lambda: loss.loss_head(model).path(computes))]
    optimizer = engine.basic_optimizer
    is_fused = isinstance(optimizer, torch.optim.Adam) and optimizer.defaults["fused"]
    backend = cfg.compile.backend + (" + DeepCompile" if cfg.compile.deepcompile else "")
    return tr(
        "Attention: {attention}. Loss: {loss}. Liger layers: {liger}. Compiled: {compiled}. Optimizer: {optimizer}.",
        attention=model.config._attn_implementation,
        loss=way,
        liger=tr("no, {reason}", reason=without_liger) if without_liger else tr("yes"),
        compiled=tr("yes, {backend}", backend=backend) if cfg.compile.enabled else tr("no"),
        optimizer=type(optimizer).__name__ + (" (PyTorch, fused)" if is_fused else ""),
    )


def _base_folder(
    cfg: RunConfig, data: language_data.LanguageData, model: transformers.PreTrainedModel, folder: Path
) -> Path:
    """Return the folder of the model as it is before training; a random one is written into the run's."""
    if cfg.model.init is Init.pretrained or cfg.tuning.method is TuningMethod.full:
        return Path(cfg.model.path)
    base = folder / base_model.RUN_BASE

    def write() -> None:
        if not base.exists():
            export.write_folder(model, save.describe(model, data.encoder), base, "hf", None)

    process_group.on_rank0(write)
    return base


def _verify_export(folder: Path) -> None:
    """Compare an export with the run: other weights are a CheckpointError, and it is renamed; other rounding is no
    reason to lose a model.
    """
    try:
        with export.aside_if_wrong(folder):
            export.verify_logits(folder)
    except messages.ProofDiffers as error:
        warn(
            "the export does not give the run's logits exactly: {reason}. It is kept in {folder}. Compare "
            "its loss with the run's last validation loss before you use it: toolkit eval.",
            reason=error,
            folder=folder,
        )
