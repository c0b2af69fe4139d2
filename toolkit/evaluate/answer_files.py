"""Answers files of questions; the same command resumes an interrupted one, and shards can run separately."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from tqdm import tqdm
from transformers import PreTrainedModel

from toolkit.config import files, paths, schema
from toolkit.data import data_paths, formats, readers, rows
from toolkit.disk import lock_or_warn, sha256, write_atomically
from toolkit.distributed.process_group import on_rank0, rank
from toolkit.evaluate import checks
from toolkit.evaluate.generate import (
    Sampling,
    check_length,
    decode_answer,
    generate,
    max_context_tokens,
    with_system,
)
from toolkit.messages import CheckpointError, ConfigError, DataError, ModelError, RowError, say, tr, warn
from toolkit.models import chat
from toolkit.sample_types import Message

BATCHES_IN_WINDOW = 8
"""Batches in a window: its questions are sorted by length, and its answers are written together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuestion:
    """A question from a row of a data file."""

    where: str
    """file:line."""
    messages: list[Message] = field(default_factory=list)
    """The model's input; [] if the row cannot be used."""
    tools: list[Any] | None = None
    reference: str | None = None
    """The row's own last answer; None if it has none."""
    check: checks.Check = field(default_factory=dict)
    """What the answer is checked for."""
    error: str = ""
    """Why the row cannot be used."""
    sample: int | None = None
    """Number, from 0, of one of several answers to the question; None if it is answered once."""


def question_source(path: str, row_format: schema.RowFormat, columns: str) -> schema.SourceConfig:
    """Return a data source of questions; `columns` is YAML such as `{prompt: question}`. ConfigError if it is wrong."""
    names = None
    with contextlib.suppress(ConfigError):
        names = files.parse(columns, "columns").values
    if names is None or not all(isinstance(value, str) for value in names.values()):
        raise ConfigError("columns = {text} is not of the form {{prompt: question, response: answer}}.", text=columns)
    source = schema.SourceConfig(path=path, format=row_format, columns=names)
    if sentence := paths.wrong_column(source, "input"):
        raise ConfigError(sentence)
    return source


def read_questions(source: schema.SourceConfig, allow_code: bool = False) -> Iterator[RowQuestion]:
    """Yield a question for every row of a source; DataError if a row's `check` is wrong or not allowed."""
    if source.format in (schema.RowFormat.text, schema.RowFormat.docstrings):
        raise DataError("format = {format} holds no questions.", format=source.format.value)
    data_files = [
        readers.DataFile(path, source=0, row_format=source.format, columns=dict(source.columns))
        for path in data_paths.files_of(source)
    ]
    for _, file, block in readers.read_blocks(data_files):
        if file.row_format is schema.RowFormat.text:
            raise DataError("{path}: rows of plain text hold no questions.", path=file.path)
        reader = formats.RowReader(file.row_format, file.columns, answered=False)
        for location, row in readers.placed_rows(file.path, block):
            yield _question_of_row(row, location, reader, allow_code)


def _question_of_row(row: Any, where: str, reader: formats.RowReader, allow_code: bool) -> RowQuestion:
    """Return a row of a file as a question, with an `error` if it is unusable; DataError if its check is wrong."""
    values = None
    try:
        values = rows.parse_row(row)
        question = _question_of(reader.read(values), where)
    except RowError as error:
        question = RowQuestion(where=where, error=str(error))
    if not isinstance(values, Mapping) or values.get("check") is None:
        return question
    try:
        return replace(question, check=checks.read_check(values["check"], allow_code))
    except RowError as error:
        raise DataError("{file}: {reason}.", file=where, reason=error) from None


def _question_of(conversation: formats.Conversation, where: str) -> RowQuestion:
    """Return a conversation as a question. If its last message is the assistant's, that becomes the reference, not
    a part of the question. RowError if nothing is asked.
    """
    messages: list[Message] = [  # without the key that is for training alone
        {key: value for key, value in message.items() if key != "loss"} for message in conversation.messages
    ]
    reference = None
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        calls, text = last.get("tool_calls"), last["content"]
        # Of an answer without text, which calls tools alone, the calls are the reference.
        reference = json.dumps(calls, ensure_ascii=False) if calls and not text else str(text)
    if all(message["role"] == "system" for message in messages):
        raise RowError(tr("nothing is asked before the answer. Correct or remove the row"))
    return RowQuestion(where=where, messages=messages, tools=conversation.tools, reference=reference)


class AnswerFile:
    """Writes answers as JSON lines to OUTPUT.part, window by window, and renames it at the end; OUTPUT.part.json has
    the `settings`, by which an interrupted file is resumed. `window`: lines that are written together.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], window: int) -> None:
        self.output = output
        self.part = output.with_name(f"{output.name}.part")
        self.record = output.with_name(f"{output.name}.part.json")
        if output.exists():
            raise ConfigError("{file} exists already: nothing was written. Name another file.", file=output)
        with self._writing(), contextlib.ExitStack() as stack:
            self.file = stack.enter_context(self.part.open("a+b"))
            self.done = self._claim(json.loads(json.dumps(settings)), window)  # settings as they will be read back
            """Lines that an earlier call has written."""
            stack.pop_all()  # the file stays open, as claiming it did not fail
        if self.done:
            say("Resuming after the {count} lines in {file}.", count=f"{self.done:,}", file=self.part)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file. After an error say how to resume, or remove the file if it is empty."""
        with self.file:
            if error_type is None or not self.part.exists():
                return
            if self.part.stat().st_size:
                say("The answers so far are in {file}; the same command resumes.", file=self.part)
            else:
                self.part.unlink()
                self.record.unlink(missing_ok=True)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of a window and flush them to disk, so that they survive a crash."""
        # "backslashreplace" for lone surrogates, which have no UTF-8.
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self._writing():
            self.file.write(lines.encode("utf-8", "backslashreplace"))
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self, is_shard: bool = False) -> None:
        """Rename the file to its final name; the settings of a shard are kept for `_merge_shards`."""
        with self._writing():
            if self.output.exists():
                raise ConfigError(
                    "{file} was created by another process meanwhile; the answers are in {part}.",
                    file=self.output,
                    part=self.part,
                )
            self.part.rename(self.output)
            if not is_shard:
                self.record.unlink()

    def _claim(self, settings: dict[str, Any], window: int) -> int:
        """Lock the file, record the settings of a new one, cut an old one after its last complete window, and return
        its number of lines; ConfigError if another process writes it, or it was started with other settings.
        """
        if not lock_or_warn(self.file, self.part):
            raise ConfigError("another process is writing {file}.", file=self.part)
        self.file.seek(0)
        num_lines = sum(line.endswith(b"\n") for line in self.file) // window * window
        if num_lines:
            try:
                recorded = json.loads(self.record.read_text(encoding="utf-8"))
                changed = sorted(
                    name for name in recorded.keys() | settings if recorded.get(name) != settings.get(name)
                )
            except (FileNotFoundError, ValueError, AttributeError):  # no record, or a damaged one
                changed = [self.record.name]
            if changed:
                raise ConfigError(
                    "{file} was started with other settings ({names}), so it cannot be resumed. Move it away, or name "
                    "another output.",
                    file=self.part,
                    names=", ".join(changed),
                )
        else:
            self.record.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        self.file.seek(0)
        kept_bytes = sum(map(len, islice(self.file, num_lines)))
        self.file.truncate(kept_bytes)
        return num_lines

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a CheckpointError."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError("cannot write {file}: {reason}.", file=self.part, reason=reason) from error


def parse_shard(text: str) -> tuple[int, int]:
    """Return the numbers (i, n) of a shard "i/n"; ConfigError for any other text."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not (match and 0 < int(match[1]) <= int(match[2])):
        raise ConfigError("shard = {value} must be i/n, such as 1/4 to 4/4.", value=text)
    return int(match[1]), int(match[2])


def shard_of(output: Path, number: int, shards: int) -> Path:
    """Return the file of shard `number`, from 1, of an output."""
    return output.with_name(f"{output.name}.{number}-of-{shards}")


def _merge_shards(output: Path, settings: Mapping[str, Any], window: int) -> bool:
    """Join the shards i/n of `output`, if there are any, and return whether there were. Windows of each are taken in
    turn, which is the order of the questions. ConfigError if a shard is missing or has other settings.
    """
    # The numbers of shards in names of `shard_of`, such as OUTPUT.1-of-4.
    shard_name = re.compile(rf"{re.escape(output.name)}\.\d+-of-(\d+)")
    matches = [shard_name.fullmatch(path.name) for path in output.parent.glob("*-of-*")]
    shard_counts = {int(match[1]) for match in matches if match}
    if output.exists() or not shard_counts:  # `AnswerFile` will refuse an output that exists
        return False
    # If shards of several calls are there: the complete ones.
    files_by_count = {count: [shard_of(output, number + 1, count) for number in range(count)] for count in shard_counts}
    complete = [count for count, files in files_by_count.items() if all(path.exists() for path in files)]
    shards = min(complete or shard_counts)
    files = files_by_count[shards]
    for number, path in enumerate(files, start=1):
        if not path.exists():
            raise ConfigError(
                "{file} is missing: run the same command with shard={number}/{shards} first.",
                file=path,
                number=number,
                shards=shards,
            )
        if json.loads(path.with_name(f"{path.name}.part.json").read_text(encoding="utf-8")) != settings:
            raise ConfigError("{file} is a shard of other settings. Move it away, or name another output.", file=path)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(path.open("rb")) for path in files]
        lines: list[bytes] = []
        for file in cycle(opened):
            next_lines = list(islice(file, window))
            if not next_lines:
                break
            lines += next_lines
    write_atomically(output, b"".join(lines))
    for path in files:
        path.unlink()
        path.with_name(f"{path.name}.part.json").unlink()
    return True


class Answering(Protocol):
    """What answers prompts: a `LocalModel`, or a `served_model.ServedModel`."""

    encoder: chat.AnyChatEncoder
    max_tokens: float
    """Most tokens of prompt and answer together."""

    def answer(
        self, prompts: Mapping[int, Sequence[int]], sampling: Sampling, at_once: int
    ) -> dict[int, dict[str, Any]]:
        """Return by the prompts' numbers `answer`, `tokens` and `finish`, or `error`; `at_once` are asked together."""


class LocalModel:
    """A model of this process as `Answering`. Batches have their own seeds: repeated questions get other answers."""

    def __init__(self, model: PreTrainedModel, encoder: chat.AnyChatEncoder) -> None:
        self.model, self.encoder, self.max_tokens = model, encoder, max_context_tokens(model)

    def answer(
        self, prompts: Mapping[int, Sequence[int]], sampling: Sampling, at_once: int
    ) -> dict[int, dict[str, Any]]:
        """Return answers as `Answering` says; a batch begins at a number of prompts, which is added to its seed."""
        answered = {}
        # The longest first, so that a lack of memory shows at once.
        order = sorted(prompts, key=lambda index: -len(prompts[index]))
        for begin in range(0, len(order), at_once):
            batch = order[begin : begin + at_once]
            seeded = replace(sampling, seed=sampling.seed + begin)
            asked = [prompts[index] for index in batch]
            answers = generate(self.model, self.encoder, asked, seeded, self.model.device)
            for index, ids in zip(batch, answers, strict=True):
                text = decode_answer(self.encoder, ids)
                answered[index] = {"answer": text, "tokens": len(ids), "finish": finish_of(ids, sampling)}
        return answered


def answer_rows(
    model: Answering,
    questions: Iterable[RowQuestion],
    sampling: Sampling,
    *,
    batch_size: int,
    system: str,
    done: int,
    shard: tuple[int, int] = (1, 1),
) -> Iterator[list[dict[str, Any]]]:
    """Ask the model, and yield the rows of a window of `batch_size * BATCHES_IN_WINDOW` questions at a time; of `shard`
    i/n every n-th window, from the i-th on. One process that has all windows gives the same answers.
    Each row has `messages` (`tools`), `answer` or `error`, `reference`, `prompt_tokens`, `tokens`, `finish` (stop, or
    length: cut at max_new_tokens), `where`, and of a question that comes several times `sample`. Windows have their own
    seeds: skipping the first `done` questions changes no answer.
    """
    window_size = batch_size * BATCHES_IN_WINDOW
    shard_number, shards = shard
    remaining = iter(questions)
    for number in count():
        window = list(islice(remaining, window_size))
        if not window:
            return
        is_of_shard = number % shards == shard_number - 1
        windows_before = number // shards  # of this shard
        if is_of_shard and windows_before >= done // window_size:
            seeded = replace(sampling, seed=sampling.seed + number * window_size)
            yield _answer_window(window, model, seeded, batch_size, system)


def _answer_window(
    window: Sequence[RowQuestion], model: Answering, sampling: Sampling, batch_size: int, system: str
) -> list[dict[str, Any]]:
    """Return the rows of a window, see `answer_rows`."""
    results = [_row_of_question(question, system) for question in window]
    prompts: dict[int, list[int]] = {}
    for index, question in enumerate(window):
        try:
            prompts[index] = _prompt_of_question(question, model, sampling, system)
        except (RowError, ModelError) as error:
            results[index]["error"] = str(error)
    for index, answer in model.answer(prompts, sampling, batch_size).items():
        results[index] |= answer if "error" in answer else {"prompt_tokens": len(prompts[index]), **answer}
    if rank() == 0:  # the only one that writes them
        _add_verdicts(window, results)
    return results


def _row_of_question(question: RowQuestion, system: str) -> dict[str, Any]:
    """Return the row of a question as in `answer_rows`, without an answer."""
    row: dict[str, Any] = {"messages": with_system(question.messages, system)} if question.messages else {}
    row |= {"tools": question.tools} if question.tools else {}
    row |= {"reference": question.reference} if question.reference is not None else {}
    row |= {"where": question.where}
    return row | ({} if question.sample is None else {"sample": question.sample})


def _prompt_of_question(question: RowQuestion, model: Answering, sampling: Sampling, system: str) -> list[int]:
    """Return the token ids to ask the model; RowError or ModelError if the question cannot be asked."""
    if question.error:
        raise RowError(question.error)
    prompt = model.encoder.prompt(with_system(question.messages, system), question.tools)
    if not prompt:
        raise RowError(tr("the chat template makes nothing of the conversation"))
    check_length(model.max_tokens, len(prompt), sampling.max_new_tokens)
    return prompt


def reasons_not_to_ask(
    questions: Iterable[RowQuestion], model: Answering, sampling: Sampling, system: str
) -> Iterator[str]:
    """Yield for each question why the model cannot be asked it, "" if it can; it is not asked."""
    for question in questions:
        try:
            _prompt_of_question(question, model, sampling, system)
        except (RowError, ModelError) as error:
            yield str(error)
        else:
            yield ""


def finish_of(ids: Sequence[int], sampling: Sampling) -> str:
    """Return how an answer ended: stop, or length if it has as many tokens as it may have."""
    return "stop" if len(ids) < sampling.max_new_tokens else "length"


def _add_verdicts(questions: Sequence[RowQuestion], rows: Sequence[dict[str, Any]]) -> None:
    """Add `passed`, and of failed ones `failed` (why), to the rows of questions with a check."""
    for question, row in zip(questions, rows, strict=True):
        if question.check:
            reason = checks.why_failed(question.check, row["answer"]) if "answer" in row else row["error"]
            row["passed"] = not reason
            if reason:
                row["failed"] = reason


def count_passed(output: Path) -> tuple[int, int]:
    """Return how many answers of a file passed their check, and how many had one."""
    with output.open("rb") as lines:
        verdicts = [row["passed"] for row in map(json.loads, lines) if "passed" in row]
    return sum(verdicts), len(verdicts)


def _with_file_identities(
    settings: Mapping[str, Any], source: schema.SourceConfig, models: Sequence[Path]
) -> dict[str, Any]:
    """Return settings as JSON reads them, with hashes of question files, sizes and times of weight files."""
    weights = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for folder in models
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
    }
    inputs = {str(path): sha256(path) for path in data_paths.files_of(source)}
    identified: dict[str, Any] = json.loads(json.dumps({**settings, "input": inputs, "weights": weights}))
    return identified


def _rows_of_shard(total: int, window: int, number: int, count: int) -> int:
    """Return how many of `total` rows the shard `number` of `count` answers: every `count`-th window of them."""
    return sum(min(window, total - begin) for begin in range(0, total, window)[number - 1 :: count])


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How the questions of a source are answered."""

    sampling: Sampling
    batch_size: int
    samples: int = 1
    """Answers to each question."""
    system: str = ""
    """System message of questions that have none; "" none."""
    shard: tuple[int, int] = (1, 1)
    """(i, n): the i-th of n shards, see `answer_rows`."""
    allow_code: bool = False
    """See `read_questions`."""

    @property
    def window(self) -> int:
        """Answers in a window."""
        return self.batch_size * BATCHES_IN_WINDOW


def answer_source(
    source: schema.SourceConfig,
    output: Path,
    load: Callable[[], Answering],
    options: AnswerOptions,
    *,
    models: Sequence[Path] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Answer every question of a source and write the answers to `output`, or resume that; existing shards are joined.

    Args:
        source: see `question_source`.
        output: the file; with several shards the file of the shard is named after it.
        load: returns the model; called after the questions are checked and the file is open.
        options: how they are answered.
        models: directories of the weights.
        settings: a file of answers is resumed only if they are the same.
    """
    # A broken file is reported before the model loads.
    num_rows = _rows_of_shard(_count_answers(source, options), options.window, *options.shard)
    settings = _with_file_identities({**settings, "batch_size": options.batch_size}, source, models)
    is_shard = options.shard[1] > 1
    if is_shard:
        output = shard_of(output, *options.shard)
    elif _merge_shards(output, settings, options.window):
        _report_written(output, num_rows)
        return
    # All ranks of engine=deepspeed compute the same answers; rank 0 writes them.
    answer_file = AnswerFile(output, settings, options.window) if rank() == 0 else contextlib.nullcontext()
    with answer_file as file:
        asked, cut, failed = _write_answers(source, file, load(), options, num_rows)
        if not file:  # rank 0 reports
            return
        file.finish(is_shard)
    _report_written(output, num_rows)
    _report_incomplete(asked, cut, failed)


def _count_answers(source: schema.SourceConfig, options: AnswerOptions) -> int:
    """Return how many answers a source asks for; ConfigError or DataError if something is wrong with it. Warn if the
    code of answers will be run with the network in reach.
    """
    if options.samples > 1 and not options.sampling.temperature:
        raise ConfigError(
            "samples = {samples} needs temperature: the likeliest tokens are the same each time.",
            samples=options.samples,
        )
    num_questions, runs_code = 0, False
    for question in read_questions(source, options.allow_code):
        num_questions += 1
        runs_code = runs_code or "python" in question.check
    if runs_code:
        from toolkit.evaluate import code_run

        if not code_run.has_no_network():
            warn("check.python: this system allows no namespaces: the code of answers can reach the network.")
    return options.samples * num_questions


def _write_answers(
    source: schema.SourceConfig,
    file: AnswerFile | None,
    model: Answering,
    options: AnswerOptions,
    num_rows: int,
) -> tuple[int, int, int]:
    """Answer what a file lacks of its `num_rows` rows, with a progress bar; return how many those are, and how many of
    them were cut and failed. A collective; rank 0 alone has the file.
    """
    done = on_rank0(lambda: file.done if file else 0)
    questions = read_questions(source, options.allow_code)
    if options.samples > 1:
        questions = (replace(question, sample=number) for question in questions for number in range(options.samples))
    windows = answer_rows(
        model,
        questions,
        options.sampling,
        batch_size=options.batch_size,
        system=options.system,
        done=done,
        shard=options.shard,
    )
    failed = cut = 0
    is_quiet = file is None or options.shard[0] > 1  # of several shards the first shows its progress
    with tqdm(total=num_rows, initial=done, unit=tr("row"), dynamic_ncols=True, disable=is_quiet) as bar:
        for rows in windows:
            failed += sum("error" in row for row in rows)
            cut += sum(row.get("finish") == "length" for row in rows)
            if file:
                file.write(rows)
            bar.update(len(rows))
    return num_rows - done, cut, failed


def _report_written(output: Path, rows: int) -> None:
    """Report how many rows were written, and how many answers passed their check, if there were checks."""
    say("wrote {file}: {rows} rows.", file=output, rows=f"{rows:,}")
    passed, checked = count_passed(output)
    if checked:
        say(
            "Checks: {passed} of {all} answers passed ({share}). `failed` in {file} says why the others did not.",
            passed=f"{passed:,}",
            all=f"{checked:,}",
            share=f"{passed / checked:.1%}",
            file=output,
        )


def _report_incomplete(asked: int, cut: int, failed: int) -> None:
    """Report how many of the rows that were asked have an answer that was cut, or none."""
    if cut:
        say("{cut} of {rows} new rows were cut at max_new_tokens.", cut=f"{cut:,}", rows=f"{asked:,}")
    if failed:
        say("{failed} of {rows} new rows have no answer: see their `error`.", failed=f"{failed:,}", rows=f"{asked:,}")
