"""Scores a finished model for `toolkit eval PATH`: benchmarks of lm-evaluation-harness, and checks of its answers."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoint import directory
from toolkit.cli.eval import output_file
from toolkit.cli.export_model import DTYPES
from toolkit.command_line import non_negative_int, number, one_of, positive_int
from toolkit.config import files, hub
from toolkit.config.dotted_keys import leaves
from toolkit.config.load import load
from toolkit.config.schema import DistributedConfig, RowFormat, SourceConfig
from toolkit.disk import write_atomically
from toolkit.distributed import process_group
from toolkit.evaluate.answer_files import (
    AnswerOptions,
    LocalModel,
    answer_source,
    count_passed,
    question_source,
    read_questions,
    reasons_not_to_ask,
)
from toolkit.evaluate.generate import Sampling, check_system
from toolkit.export.load import LoadedModel, describe_any, load_any, model_of_run
from toolkit.extras import harness
from toolkit.messages import ConfigError, DataError, ModelError, say, tr, warn
from toolkit.models import adapters
from toolkit.models.directory import read_object
from toolkit.models.save import MODEL_DIR
from toolkit.report.run import SCORES, is_run, is_worked_on
from toolkit.report.scores import score_table
from toolkit.secrets import learn_from
from toolkit.tables import text_table
from toolkit.track import backends, queue
from toolkit.train.run_dir import read_rows

BASE = "base"
"""What `compare=` names the model that the run began with."""
_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}
"""Value of a config.json -> precision."""
_FALSE_OR_TRUE = ("false", "true")
_PATIENCE_S = 60.0
"""How long trackers may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `toolkit eval PATH` is asked to do."""

    path: str
    adapter: str
    compare: str
    """BASE, the directory of a model, or "" for neither."""
    tasks: harness.HarnessOptions | None
    questions: str
    """File of questions with a `check` each; "" none."""
    sampling: Sampling
    """Of answers to questions."""
    batch_size: int
    """Questions at once."""
    system: str
    allow_code: bool
    family: str
    chat_template: str
    dtype: str
    """fp32, bf16 or fp16; "" that of the model's files."""
    device: str
    """Such as cuda:1; "" any."""


class Target(NamedTuple):
    """A model that is scored."""

    path: str
    """As typed, or as the run names it."""
    folder: Path
    """A directory with a model or an adapter, or a checkpoint."""
    run: Path | None
    """The run that it belongs to."""


def read_request(values: dict[str, str], sampling: Sampling) -> Request:
    """Return what the arguments of a command ask for; ConfigError if one is wrong."""
    allow_code = one_of(values, "allow_code", _FALSE_OR_TRUE) == "true"
    system, batch_size = values.get("system", ""), values.get("batch_size", "8")
    # "auto" is for the harness, which finds the largest itself; questions are answered in batches of a given size.
    if batch_size != "auto" or values.get("questions"):
        batch_size = str(positive_int({"batch_size": batch_size}, "batch_size"))
    limit = number(values, "limit", 0.0)  # a share below 1, a count from 1 on, 0 for all
    tasks = None
    if task_names := tuple(filter(None, values.get("tasks", "").split(","))):
        tasks = harness.HarnessOptions(
            tasks=task_names,
            include_path=values.get("include_path", ""),
            limit=limit if 0 < limit < 1 else int(limit) or None,
            num_fewshot=non_negative_int(values, "num_fewshot", 0) if "num_fewshot" in values else None,
            batch_size=batch_size if batch_size == "auto" else int(batch_size),
            apply_chat_template=one_of(values, "apply_chat_template", _FALSE_OR_TRUE) == "true",
            system=system,
            allow_code=allow_code,
        )
    return Request(
        path=values.get("model.path", ""),
        adapter=values.get("adapter", ""),
        compare=values.get("compare", ""),
        tasks=tasks,
        questions=values.get("questions", ""),
        sampling=sampling,
        batch_size=1 if batch_size == "auto" else int(batch_size),  # "auto": there are no questions
        system=system,
        allow_code=allow_code,
        family=values.get("model.family") or "auto",
        chat_template=values.get("model.chat_template", ""),
        dtype=one_of(values, "dtype", list(_DTYPES.values())) if "dtype" in values else "",
        device=values.get("device", ""),
    )


def score(values: dict[str, str], sampling: Sampling, world_size: int) -> None:
    """Score a model, and the one that it is compared with; print a table, write the files, feed the run's trackers. A
    collective of `world_size` processes.
    """
    request = read_request(values, sampling)
    if not (request.tasks or request.questions):
        raise ConfigError("{name} is missing: {usage}", name="tasks", usage="tasks=gsm8k")
    target = find_target(request.path or request.adapter)
    base = find_base(target, request) if request.compare else ""
    if request.questions and world_size > 1:
        raise ConfigError(tr("questions= is answered by one process. Start the command without a launcher."))
    source = _questions(request) if request.questions else None
    folder = target.run / "evaluations" if target.run else Path("runs") / "evaluations"
    file = output_file(folder, SCORES, values.get("output", ""))
    # What is wrong with tasks, questions or either model is said before the first is loaded: scoring takes hours.
    tasks = harness.load_tasks(request.tasks) if request.tasks else None
    models = ["", base] if base else [""]
    for model in models:
        _check_model(request, target, model, source)
    file.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    device = str(process_group.start(DistributedConfig())) if world_size > 1 else request.device
    scored: list[_Scored] = []
    try:
        for model in models:
            if scored and request.tasks:  # loaded again: the harness keeps a model's answers in its tasks
                tasks = harness.load_tasks(request.tasks)
            scored.append(_score_model(request, target, model, device, tasks, source, file))
            if process_group.rank() == 0:  # now, as the second model may fail, or its process be killed
                facts = {"base": model, "step": _step(target), "seconds": round(time.time() - started, 1)}
                _write(request, scored, facts, file)
    finally:
        if scored and process_group.rank() == 0:
            table = _joined_scores(scored)
            _print(request, target, table, file, bool(scored[0].rows))
            _feed_trackers(target, table)
    process_group.stop()


def _loading_arguments(request: Request, target: Target, base: str) -> dict[str, Any]:
    """Return arguments of `load_any` and `describe_any` for a model to score; `base`: see `_score_model`."""
    # With adapter=DIR the path is that of its base, as typed; without, a run's stands for its export or checkpoint.
    path = request.path if request.adapter else str(target.folder)
    return {
        "path": base or path,
        "adapter": "" if base else request.adapter,
        "family": request.family,
        "chat_template": request.chat_template,
    }


def _check_model(request: Request, target: Target, base: str, questions: SourceConfig | None) -> None:
    """Raise what scoring a model would raise for its files, its tokenizer, its chat template, or for questions of which
    it can be asked none; warn if that are some. Arguments: `_score_model`.
    """
    described = describe_any(**_loading_arguments(request, target, base))
    check_system(described.encoder, request.system)
    if request.tasks:
        harness.check_tokenizer(described.encoder.tokenizer, request.tasks)
    if questions:
        asked = read_questions(questions, request.allow_code)
        reasons = list(reasons_not_to_ask(asked, LocalModel(*described), request.sampling, request.system))
        failed = [reason.rstrip(".") for reason in reasons if reason]
        name, file = base or target.path, request.questions
        if len(failed) == len(reasons):
            raise DataError(
                "{model} cannot be asked any question of {file}: {reason}.", model=name, file=file, reason=failed[0]
            )
        if failed:
            warn(
                "{model} cannot be asked {failed} of {rows} questions of {file}, which count as failed: {reason}.",
                model=name,
                failed=len(failed),
                rows=len(reasons),
                file=file,
                reason=failed[0],
            )


class _Scored(NamedTuple):
    """What a model has got."""

    scores: list[harness.Score]
    rows: list[dict[str, Any]]
    """Answers to the harness's tasks."""
    results: dict[str, Any]
    """The harness's own, without the answers."""
    computed: str
    """Precision and device."""


def _score_model(
    request: Request,
    target: Target,
    base: str,
    device: str,
    loaded_tasks: harness.Tasks | None,
    questions: SourceConfig | None,
    output: Path,
) -> _Scored:
    """Load a model, score it on tasks and questions, and return what it got. A collective.

    `base`: directory of the model to score in place of `target`, to compare with, in the same precision; "" for none.
    `device`: such as cuda:1, with several ranks this one's; "" takes the GPU if there is one. `loaded_tasks`: the
    harness's of `request.tasks`, and `questions`: the source of `request.questions`, None without. `output`: file of
    the answers to tasks; those to questions are in a file next to it.
    """
    loaded = load_any(
        **_loading_arguments(request, target, base),
        dtype=request.dtype or stored_dtype(Path(request.adapter) if request.adapter else target.folder),
        device=device,
    )
    scores: list[harness.Score] = []
    results: dict[str, Any] = {}
    if loaded_tasks and request.tasks:
        results = harness.run_tasks(loaded.model, loaded.encoder.tokenizer, request.tasks, loaded_tasks)
    if results:  # on rank 0
        scores += harness.scores_of(results)
    rows = [{"model": base or target.path, **row} for row in harness.sample_rows(results)]
    if questions:
        scores.append(_score_answers(request, questions, loaded, output, is_base=bool(base)))
    computed = f"{str(loaded.model.dtype).removeprefix('torch.')} on {loaded.model.device}"
    shown = {name: value for name, value in results.items() if name not in ("samples", "pretty_env_info")}
    return _Scored(scores, rows, shown, computed)


def _write(request: Request, scored: Sequence[_Scored], facts: Mapping[str, Any], file: Path) -> None:
    """Write the answers to tasks to a file, and scores, settings and the harness's results to one next to it."""
    if rows := [row for model_scored in scored for row in model_scored.rows]:
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_atomically(file, lines.encode("utf-8", "backslashreplace"))
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": request.path or request.adapter,
        **facts,
        "scores": _joined_scores(scored),
        "computed": [model_scored.computed for model_scored in scored],
        "settings": asdict(request),
        "harness": [model_scored.results for model_scored in scored if model_scored.results],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False, default=str) + "\n"
    write_atomically(file.with_suffix(".json"), text.encode("utf-8", "backslashreplace"))


def find_target(path: str) -> Target:
    """Return the model at a path: of a run its export, else its newest checkpoint; ConfigError if there is none."""
    folder = Path(path)
    files.check_directory(folder, ModelError)
    # A run, its export, or as deep as RUN/checkpoints/step-N/model.
    run = next((parent for parent in (folder, *folder.absolute().parents[:3]) if is_run(parent)), None)
    return Target(path, model_of_run(folder) if run == folder else folder, run)


def find_base(target: Target, request: Request) -> str:
    """Return the directory of the model to compare with: the one that `compare=` names, or for compare=base what the
    target was trained from, by its adapter's config or its run's; ConfigError if that is not known.
    """
    if request.compare != BASE:
        files.check_directory(Path(request.compare), ModelError, "compare")
        return request.compare
    adapter = Path(request.adapter) if request.adapter else target.folder
    if adapters.is_adapter(adapter):
        return request.path if request.adapter and request.path else str(adapters.base_of_adapter(adapter))
    config = files.read(target.run / "config.yaml").values if target.run else {}
    path = str((config.get("model") or {}).get("path") or "")
    if path and not Path(path).is_dir() and files.is_hub_name(path):
        words = [f"model.path={path}", f"model.revision={config['model'].get('revision') or ''}"]
        path = hub.resolve_model_path(load(["model=hf", *words])).cfg.model.path
    if not path or not Path(path).is_dir():
        raise ConfigError(
            "compare=base: nothing tells which model {path} was trained from. Name it: compare=DIR", path=target.path
        )
    return path


def stored_dtype(folder: Path) -> str:
    """Return the precision of a model's weights by its config.json, of an adapter that of its base: as the harness, and
    transformers, load it; fp32 if it is not named.
    """
    if adapters.is_adapter(folder):
        folder = adapters.base_of_adapter(folder)
    elif (folder / directory.MANIFEST).is_file() and (folder / MODEL_DIR).is_dir():
        folder /= MODEL_DIR
    config = read_object(folder / "config.json")
    text = config.get("text_config") or {}
    name = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return _DTYPES.get(str(name), "fp32")


def _questions(request: Request) -> SourceConfig:
    """Return the source of questions; ConfigError if no row has a check, DataError if any row's check is wrong."""
    source = question_source(request.questions, RowFormat.auto, "{}")
    # All rows are read, so that a wrong check is an error before a model is loaded.
    if not sum(bool(question.check) for question in read_questions(source, request.allow_code)):
        raise ConfigError(
            'questions = {file}: no row has a check, such as "check": {{"regex": "^[0-9]+$"}}.', file=request.questions
        )
    return source


def _score_answers(
    request: Request, source: SourceConfig, loaded: LoadedModel, output: Path, *, is_base: bool
) -> harness.Score:
    """Answer and check questions; the answers are in a file next to `output`. Return the share that passed."""
    name = Path(request.questions).stem
    file = output.with_name(f"{output.stem}-{name}{'-base' if is_base else ''}.jsonl")
    options = AnswerOptions(
        sampling=request.sampling,
        batch_size=request.batch_size,
        system=request.system,
        allow_code=request.allow_code,
    )
    answer_source(source, file, lambda: LocalModel(loaded.model, loaded.encoder), options)
    passed, checked = count_passed(file)
    share = passed / checked
    standard_error = math.sqrt(share * (1 - share) / checked)  # of a share of independent questions
    return harness.Score(name, "passed", share, standard_error, checked)


def _joined_scores(scored: Sequence[_Scored]) -> list[dict[str, Any]]:
    """Return the model's scores, each with the base model's if that comes second."""
    base_scored = scored[1:]  # none, or one
    base = {(score.task, score.metric): score for model_scored in base_scored for score in model_scored.scores}
    joined_scores = []
    for score in scored[0].scores:
        other = base.get((score.task, score.metric))
        joined_scores.append(score._asdict() | ({"base": other.value, "base_error": other.error} if other else {}))
    return joined_scores


def _step(target: Target) -> int | None:
    """Return the step of a checkpoint, or the last one of the run whose export it is; None outside a run."""
    if (step := directory.step_of(target.folder)) >= 0:
        return step
    return _last_step(target.run) if target.run else None


def _last_step(run: Path) -> int:
    return max((int(row["step"]) for row in read_rows(run / "metrics.jsonl", OSError)[-1:]), default=0)


def _print(request: Request, target: Target, table: Sequence[Mapping[str, Any]], output: Path, has_rows: bool) -> None:
    """Print the scores, where everything is, and what to do next."""
    heads, rows = score_table(table)
    say("\n".join(text_table(heads, rows)))
    if request.tasks and not request.tasks.apply_chat_template:
        say(tr("The prompts are as the tasks write them. In the model's chat template: apply_chat_template=true"))
    if has_rows:
        say("Each prompt, answer and score: {file}", file=output)
    say("Scores and settings: {file}", file=output.with_suffix(".json"))
    if not request.compare:
        say("To compare with the model before training: compare=base")
    if target.run and output.parent == target.run / "evaluations":
        say("In the run's report: toolkit report {run}", run=files.quoted(target.run))


def _feed_trackers(target: Target, table: Sequence[Mapping[str, Any]]) -> None:
    """Send the scores of a run's last model to its trackers, as figures of the run."""
    run = target.run
    if run is None:
        return
    config = files.read(run / "config.yaml").values if (run / "config.yaml").is_file() else {}
    track = config.get("track") or {}
    trackers = [name for name in backends.BACKENDS if name != "csv"]  # metrics.csv holds steps and evaluations alone
    chosen = {name: track[name] for name in trackers if (track.get(name) or {}).get("enabled")}
    last, step = _last_step(run), _step(target)
    if not chosen or step is None:
        return
    if step < last or is_worked_on(run):
        say("The trackers get scores of a finished run's last model only: not these.")
        return
    learn_from(config)
    session = queue.Trackers(_PATIENCE_S)
    session.begin(run, chosen, dict(leaves(config)), last)
    session.wait_begun()
    # Named as eval_gsm8k/exact_match/strict-match, without commas.
    figures = {f"eval_{score['task']}/{score['metric'].replace(',', '/')}": score["value"] for score in table}
    session.summary(last, figures)
    session.end(backends.FINISHED)
