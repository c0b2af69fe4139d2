"""Scores a loaded model on tasks of EleutherAI's lm-evaluation-harness, which is used as it is: the scores are those
that its own command line gives on the exported directory.
"""

import difflib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.distributed import process_group
from toolkit.messages import ConfigError, DataError, ModelError, shortened, tr

_INSTALL = "pip install -c constraints.txt -e '.[eval]'"
_MOST_NAMES = 4
"""Names that an error about an unknown task suggests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessOptions:
    """What is passed on to the harness, under its own names."""

    tasks: tuple[str, ...]
    """Names of tasks, groups or tags, or patterns of them."""
    include_path: str = ""
    """Directory with task files of the user; "" none."""
    limit: float | None = None
    """Examples of each task, or their share if it is less than 1; None: all."""
    num_fewshot: int | None = None
    """Solved examples in each prompt; None: each task's own number."""
    batch_size: int | str = 8
    """Prompts at once; "auto": as many as fit into the GPU's memory."""
    apply_chat_template: bool = False
    system: str = ""
    """System message; "" none."""
    allow_code: bool = False
    """Whether tasks may run Python: their own, or code that the model writes."""


class Score(NamedTuple):
    """A figure of a task."""

    task: str
    metric: str
    """With the harness's filter behind a comma, unless that is "none"."""
    value: float
    error: float | None
    """Standard error; None without one."""
    samples: int


class Tasks(NamedTuple):
    """Tasks that are loaded, with their data."""

    manager: Any
    """A `lm_eval.tasks.TaskManager`."""
    loaded: Any
    """What its `load` returned."""


def load_tasks(options: HarnessOptions) -> Tasks:
    """Load tasks and their data, before a model is loaded. ConfigError if the harness is not installed, or if a task is
    unknown, or needs a package or consent; DataError if its data is not on this machine and cannot be downloaded.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # what the metric code_eval asks for
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("tasks= needs lm-evaluation-harness: {command}", command=_INSTALL) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.include_path:
        _check_task_files(Path(options.include_path), options.allow_code)
        # First without the harness's own 14,000 tasks, whose files take seconds to read.
        manager = TaskManager(include_path=options.include_path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in options.tasks):
            try:
                return Tasks(manager, _load(manager, options))
            except KeyError:  # a group of the harness's tasks
                pass
    manager = TaskManager(include_path=options.include_path or None)
    return Tasks(manager, _load(manager, options))


def _check_task_files(folder: Path, allow_code: bool) -> None:
    """Raise ConfigError if a directory of task files does not exist, or names Python functions without consent."""
    if not folder.is_dir():
        raise ConfigError("include_path = {folder} is no directory.", folder=folder)
    for file in sorted(folder.rglob("*.y*ml")):
        if not allow_code and "!function" in file.read_text(encoding="utf-8", errors="replace"):
            raise ConfigError(
                "{file} runs Python of its directory (!function). If you trust it, add allow_code=true.", file=file
            )


def _load(manager: Any, options: HarnessOptions) -> Any:
    """Return what the task manager makes of the tasks; errors: as `load_tasks`, KeyError for a
    group's unknown member.
    """
    for name in options.tasks:
        if not manager.match_tasks([name]):
            raise _unknown_task(name, manager.all_tasks)
    names = manager.match_tasks(list(options.tasks))
    shown = ",".join(options.tasks)
    try:
        loaded = manager.load(names)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "tasks={tasks}: a task needs the Python package {package}: pip install {package}",
            tasks=shown,
            package=error.name,
        ) from error
    except OSError as error:  # of datasets, too: there is no connection, or no such dataset
        from datasets import config

        raise DataError(
            "tasks={tasks}: {reason}. Without a network: copy {cache} from a machine on which the same command has "
            "run, or use files of your own: docs/evaluation.md#benchmarks-without-a-network",
            tasks=shown,
            reason=shortened(" ".join(str(error).split()).rstrip("."), 200),
            cache=config.HF_DATASETS_CACHE,
        ) from error
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            "tasks={tasks} cannot be loaded: {kind}: {reason}.",
            tasks=shown,
            kind=type(error).__name__,
            reason=shortened(" ".join(str(error).split()).rstrip("."), 200),
        ) from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not options.allow_code:
            raise ConfigError(
                "the task {task} runs code that the model writes, as your user. In a container, or on a machine with "
                "nothing to lose: add allow_code=true.",
                task=name,
            )
    return loaded


def _unknown_task(name: str, task_names: Sequence[str]) -> ConfigError:
    """Return the error about a task that does not exist, with the nearest names: first those that it begins."""
    longer = sorted((task for task in task_names if task.startswith(name)), key=len)
    near = [*longer, *difflib.get_close_matches(name, task_names, n=_MOST_NAMES)]
    return ConfigError(
        "tasks: there is no task '{name}'. Nearest: {near}. All: lm_eval ls tasks",
        name=name,
        near=", ".join(list(dict.fromkeys(near))[:_MOST_NAMES]) or tr("none"),
    )


class _OtherRanks:
    """What the harness asks accelerate for where several ranks share the work."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def unwrap_model(self, model: Any) -> Any:
        """Return the model, which is in no wrapper."""
        return model

    def gather(self, tensor: Any) -> Any:
        """Return a tensor of the numbers of all ranks; `tensor`: this rank's."""
        import torch

        return torch.tensor(process_group.gather(tensor.item()))

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        process_group.barrier()


def check_tokenizer(tokenizer: Any, options: HarnessOptions) -> None:
    """Raise ModelError if a model cannot be scored with its tokenizer."""
    if options.apply_chat_template and not tokenizer.chat_template:
        raise ModelError(
            tr("apply_chat_template=true: the model has no chat template. Name one: model.chat_template=FILE")
        )
    if tokenizer.encode("a")[-1] in tokenizer.all_special_ids:  # ChatGLM-6B's [gMASK]<sop>
        raise ModelError(
            tr(
                "tasks=: the model's tokenizer puts special tokens behind a text, where the harness puts the answer: "
                "the scores would be wrong. Use questions= instead."
            )
        )


def run_tasks(model: Any, tokenizer: Any, options: HarnessOptions, tasks: Tasks) -> dict[str, Any]:
    """Return the harness's results for a model, {} on all ranks but 0. A collective: each rank has a copy of the model
    and takes its share of the examples.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    language_model = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=options.batch_size)
    if process_group.world_size() > 1:  # HFLM takes one process for granted with a loaded model (lm_eval 0.4.13)
        language_model.accelerator = _OtherRanks(model)
        language_model._rank, language_model._world_size = process_group.rank(), process_group.world_size()
        language_model.gather_object = lambda values, dst=0: process_group.gather(values)
    tasks.manager.load = lambda names: tasks.loaded  # `simple_evaluate` would load the data a second time
    with _as_process_0():
        results = lm_eval.simple_evaluate(
            model=language_model,
            tasks=list(options.tasks),
            num_fewshot=options.num_fewshot,
            batch_size=options.batch_size,
            limit=options.limit,
            system_instruction=options.system or None,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.apply_chat_template,
            task_manager=tasks.manager,
            confirm_run_unsafe_code=options.allow_code,
        )
    return results or {}


@contextmanager
def _as_process_0() -> Iterator[None]:
    """Let the harness, which returns results where LOCAL_RANK is 0 only, do so on rank 0 of any node."""
    local_rank = os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def scores_of(results: Mapping[str, Any]) -> list[Score]:
    """Return the figures of groups, and of tasks that belong to none.

    Args:
        results: What lm-evaluation-harness' `simple_evaluate` returns: in `results`, task -> {"metric,filter": value}.
    """
    subtasks: dict[str, list[str]] = results.get("group_subtasks", {})
    members = {member for names in subtasks.values() for member in names}

    def samples(name: str) -> int:
        """Return the number of samples of a task, or of all tasks in a group, which may be groups themselves."""
        if subtasks.get(name):
            return sum(map(samples, subtasks[name]))
        return int(results["n-samples"].get(name, {}).get("effective", 0))

    scores = []
    for task, figures in results["results"].items():
        if task in members:
            continue
        for key, value in figures.items():
            metric, comma, filter_name = key.partition(",")
            # Other figures are the name ("alias"), standard errors, which are read with their score, and "N/A".
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = figures.get(f"{metric}_stderr,{filter_name}")
            shown = metric if filter_name == "none" else f"{metric},{filter_name}"
            scores.append(Score(task, shown, float(value), error if isinstance(error, float) else None, samples(task)))
    return scores


def sample_rows(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer: task, number of the document, filter, prompt, output, reference and its scores."""
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            prompt, output = _prompt_and_output(sample["arguments"], sample["filtered_resps"])
            yield {
                "task": task,
                "doc": sample["doc_id"],
                "filter": sample["filter"],
                "prompt": prompt,
                "output": output,
                "reference": sample["target"],
                **{metric: sample[metric] for metric in sample["metrics"]},
            }


def _prompt_and_output(arguments: Sequence[Sequence[Any]], answers: Sequence[Any]) -> tuple[str, Any]:
    """Return the prompt of a question, and what the model answered. `arguments`: of each request; for a choice (prompt,
    continuation). `answers`: the text of each request, or (log-likelihood, whether it is the likeliest text) of it.

    A question of four choices has four requests; its output is the continuation of the highest log-likelihood.
    """
    if not isinstance(answers[0], (tuple, list)):  # a generated text
        return str(arguments[0][0]), answers[0]
    if len(answers) == 1:  # the log-likelihood of a whole text, as for perplexity
        return str(arguments[0][0]), answers[0][0]
    # acc_mutual_info asks for each continuation without a prompt, too (lm_eval 0.4.13, api/task.py).
    choices = [index for index, (prompt, _) in enumerate(arguments) if prompt] or range(len(answers))
    likeliest = max(choices, key=lambda index: answers[index][0])  # by its log-likelihood
    prompt, output = arguments[likeliest]
    if len({continuation for _, continuation in arguments}) > 1:
        return str(arguments[0][0]), output
    # The choices are in the prompts, as in Winogrande: the chosen one is the answer.
    return str(prompt), f"{prompt}{output}"
