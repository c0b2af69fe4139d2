"""Questions from files and validation splits, and a model's answers. Questions of similar length are asked together,
each rank taking its share; the same command resumes a partial file of answers.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from tqdm import tqdm
from transformers import PreTrainedModel

from toolkit.config.preflight import check_columns
from toolkit.config.schema import RowFormat, SourceConfig
from toolkit.data.formats import Conversation, Message, RowReader, parse_row
from toolkit.data.readers import block_bytes, files_of, rows_of
from toolkit.data.sources import DataFile, read_blocks, total_bytes
from toolkit.data.store import TokenizedCache
from toolkit.disk import lock_or_warn, sha256
from toolkit.distributed.process_group import barrier, gather, on_rank0, rank, world_size
from toolkit.evaluate.generate import Sampling, check_length, decode_answer, generate, until_stop, with_system
from toolkit.messages import CheckpointError, ConfigError, DataError, ModelError, RowError, Stopped, say, tr
from toolkit.models.chat import AnyChatEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuestion:
    """One row of a data file."""

    where: str
    """file:line."""
    messages: list[Message] = field(default_factory=list)
    """The model's input; [] if the row cannot be used."""
    tools: list[Any] | None = None
    reference: str | None = None
    """The row's own last answer; None if it has none."""
    error: str = ""


def question_source(path: str, row_format: RowFormat, columns: str) -> SourceConfig:
    """Return questions as a data source; `columns` is YAML such as `{prompt: question}`."""
    try:
        names = yaml.safe_load(columns)
    except yaml.YAMLError:
        names = None
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise ConfigError("columns = {text} is not of the form {{prompt: question, response: answer}}.", text=columns)
    source = SourceConfig(path=path, format=row_format, columns=names)
    if sentence := check_columns(source, "input"):
        raise ConfigError(sentence)
    return source


def read_questions(source: SourceConfig) -> Iterator[RowQuestion]:
    """Yield every row of a source in order, unusable ones too; here a row needs no answer."""
    if source.format in (RowFormat.text, RowFormat.docstrings):
        raise DataError("format = {format} holds no questions.", format=source.format.value)
    files = [DataFile(path, 0, source.format, dict(source.columns)) for path in files_of(source)]
    for _, file, block in read_blocks(files, [0] * len(files), block_bytes(total_bytes(files))):
        if file.row_format is RowFormat.text:
            raise DataError("{path}: rows of plain text hold no questions.", path=file.path)
        # Undecided where no row of the block can be parsed: each then reports its own error.
        row_format = RowFormat.prompt_response if file.row_format is RowFormat.auto else file.row_format
        reader = RowReader(row_format, file.columns, answered=False)
        for offset, row in rows_of(block):
            where = f"{file.path}:{block.first + offset}"
            try:
                yield _question(where, reader.read(parse_row(row)))
            except RowError as error:
                yield RowQuestion(where=where, error=str(error))


def _question(where: str, conversation: Conversation) -> RowQuestion:
    messages: list[Message] = [
        {key: value for key, value in message.items() if key != "loss"} for message in conversation.messages
    ]
    reference = None
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        calls = last.get("tool_calls")
        reference = json.dumps(calls, ensure_ascii=False) if calls and not last["content"] else str(last["content"])
    if all(message["role"] == "system" for message in messages):
        raise RowError(tr("nothing is asked before the answer. Correct or remove the row"))
    return RowQuestion(where=where, messages=messages, tools=conversation.tools, reference=reference)


@dataclass(frozen=True, slots=True)
class ValidationQuestion:
    """A validation sample up to its last answer, and that answer."""

    prompt: list[int]
    """Ids, exactly those before the answer in training."""
    answer: list[int]
    """Ids, without the token that ends it."""
    source: str
    """Name of its source, as in `toolkit show`."""
    where: str
    """file:line of its row."""


def choose_questions(
    store: TokenizedCache, encoder: AnyChatEncoder, names: Sequence[str], max_samples: int
) -> tuple[list[ValidationQuestion], int]:
    """Return questions sampled evenly from a split, and how many samples have no prompt; `max_samples` 0 takes all."""
    count = min(max_samples or len(store), len(store))
    sources = store.sources()
    questions = []
    for sample in (number * len(store) // count for number in range(count)):
        ids, trained = store[sample]
        if parts := split_sample(ids.tolist(), trained.tolist(), encoder):
            questions.append(ValidationQuestion(*parts, names[sources[sample]], store.where(sample)))
    return questions, count - len(questions)


def split_sample(
    ids: Sequence[int], trained: Sequence[bool], encoder: AnyChatEncoder
) -> tuple[list[int], list[int]] | None:
    """Return prompt and answer of a sample; None if only special tokens precede what is trained. The answer is the last
    trained stretch, after the last token that makes the assistant speak.
    """
    end = max((index for index, is_trained in enumerate(trained) if is_trained), default=-1) + 1
    begin = next((index + 1 for index in range(end - 1, -1, -1) if not trained[index]), 0)
    starts = {int(token) for token in encoder.answer_ids}
    begin = next((index + 1 for index in range(end - 1, begin - 1, -1) if ids[index] in starts), begin)
    prompt = list(ids[:begin])
    # The first token of a sample is never trained: alone it is the beginning of a text, or of a piece of one.
    if len(prompt) < 2 or set(prompt) <= set(encoder.tokenizer.all_special_ids):
        return None
    return prompt, until_stop(list(ids[begin:end]), set(encoder.stop_ids))


class AnswerFile:
    """JSON lines in OUTPUT.part until all are written, window by window; OUTPUT.part.json holds the `settings`."""

    def __init__(self, output: Path, settings: Mapping[str, Any], window: int) -> None:
        self.output = output
        self.part, self.record = (output.with_name(f"{output.name}{suffix}") for suffix in (".part", ".part.json"))
        if output.exists():
            raise ConfigError("{file} exists already: nothing was written. Name another file.", file=output)
        with self._writing(), contextlib.ExitStack() as stack:
            self.file = stack.enter_context(self.part.open("a+b"))
            self.done = self._claim(json.loads(json.dumps(settings)), window)
            stack.pop_all()
        if self.done:
            say("Resuming after the {count} lines in {file}.", count=f"{self.done:,}", file=self.part)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.file:
            if kind is None or not self.part.exists():
                return
            if self.part.stat().st_size:
                say("The answers so far are in {file}; the same command resumes.", file=self.part)
            else:
                self.part.unlink()
                self.record.unlink(missing_ok=True)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a window of lines, and flush them to the disk."""
        # A lone surrogate has no UTF-8.
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self._writing():
            self.file.write(lines.encode("utf-8", "backslashreplace"))
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Give the file its name."""
        with self._writing():
            if self.output.exists():
                raise ConfigError(
                    "{file} was created by another process meanwhile; the answers are in {part}.",
                    file=self.output,
                    part=self.part,
                )
            self.part.rename(self.output)
            self.record.unlink()

    def _claim(self, settings: dict[str, Any], window: int) -> int:
        """Lock the file, cut it after its last complete window, and return how many lines it holds."""
        if not lock_or_warn(self.file, self.part):
            raise ConfigError("another process is writing {file}.", file=self.part)
        self.file.seek(0)
        count = sum(line.endswith(b"\n") for line in self.file) // window * window
        if count:
            try:
                known = json.loads(self.record.read_text(encoding="utf-8"))
                changed = sorted(name for name in known.keys() | settings if known.get(name) != settings.get(name))
            except (FileNotFoundError, ValueError, AttributeError):
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
        self.file.truncate(sum(map(len, islice(self.file, count))))
        return count

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError("cannot write {file}: {reason}.", file=self.part, reason=reason) from error


@dataclass(kw_only=True, slots=True)
class Answers:
    """The answers to some prompts, the same on every rank."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Number of the question -> tokens of its answer; without those that failed."""
    failures: list[str] = field(default_factory=list)
    """Why batches failed, each reason once."""
    seconds: float = 0.0
    """From the first batch to the last, over all ranks."""


def generate_all(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int,
    device: torch.device,
    *,
    in_step: bool,
    alive: Callable[[], object],
    place: int | None = None,
    num_places: int | None = None,
) -> Answers:
    """Answer every prompt once over all ranks. A collective; arguments as for `generate`, and these.

    Which prompts share a batch, and what is sampled, does not depend on the number of ranks. A batch that fails is
    counted; with `in_step` it ends the run, as the other ranks are in the middle of theirs.

    Args:
        prompts: the same on every rank; those too long for the model are dropped already.
        batch_size: prompts that a rank answers at once.
        alive: called after each batch.
        place: index among the `num_places` that take batches; None: this rank's own. Equal ones answer together.
    """
    place, at_once = rank() if place is None else place, num_places or world_size()
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    mine: dict[int, list[int]] = {}
    failures: set[str] = set()
    started = time.perf_counter()
    for first in range(0, len(batches), at_once):
        number = first + place
        has_one = number < len(batches)
        # A rank without a batch takes part in the others' forward passes all the same, with the shortest prompt.
        batch = batches[number] if has_one else order[:1]
        if has_one or in_step:
            try:
                seeded = replace(sampling, seed=sampling.seed + number)
                answers = generate(model, encoder, [prompts[one] for one in batch], seeded, device, in_step=in_step)
                mine |= dict(zip(batch, answers, strict=True)) if has_one else {}
            except Stopped:
                raise
            except Exception as error:  # whatever it is, most likely a lack of memory: no reason to end a training run
                if in_step:
                    raise
                failures.add(f"{type(error).__name__}: {error}".splitlines()[0])
        barrier()  # no rank gets so far behind that the others' next collective times out
        alive()
    result = Answers(seconds=time.perf_counter() - started)
    for ids, reasons in gather((mine, failures)):
        result.ids |= ids
        result.failures += sorted(reasons - set(result.failures))
    return result


BATCHES = 8
"""In a window, whose questions are sorted by length and whose answers are written together."""


def answer_rows(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    questions: Iterable[RowQuestion],
    sampling: Sampling,
    *,
    batch_size: int,
    system: str,
    done: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield a row for each question after asking the model, a window of `batch_size * BATCHES` at a time.

    Each has `messages` (`tools`), `answer` or `error`, `reference`, `prompt_tokens`, `tokens`, `finish` (stop, or
    length: cut at max_new_tokens) and `where`. Batches have their own seeds: repeated questions get different answers,
    and skipping the first `done` questions changes none.
    """
    remaining = islice(questions, done, None)
    while window := list(islice(remaining, batch_size * BATCHES)):
        results: list[dict[str, Any]] = []
        prompts: dict[int, list[int]] = {}
        for index, question in enumerate(window):
            messages = with_system(question.messages, system)
            row: dict[str, Any] = {"messages": messages} if question.messages else {}
            row |= {"tools": question.tools} if question.tools else {}
            row |= {"reference": question.reference} if question.reference is not None else {}
            results.append(row | {"where": question.where})
            try:
                if question.error:
                    raise RowError(question.error)
                prompt = encoder.prompt(messages, question.tools)
                if not prompt:
                    raise RowError(tr("the chat template makes nothing of the conversation"))
                check_length(model, len(prompt), sampling.max_new_tokens)
                prompts[index] = prompt
            except (RowError, ModelError) as error:
                results[index]["error"] = str(error)
        # The longest first: what does not fit into memory fails at once.
        order = sorted(prompts, key=lambda index: -len(prompts[index]))
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            seeded = replace(sampling, seed=sampling.seed + done + begin)
            answers = generate(model, encoder, [prompts[index] for index in batch], seeded, model.device)
            for index, ids in zip(batch, answers, strict=True):
                results[index] |= {
                    "answer": decode_answer(encoder, ids),
                    "prompt_tokens": len(prompts[index]),
                    "tokens": len(ids),
                    "finish": "stop" if len(ids) < sampling.max_new_tokens else "length",
                }
        done += len(window)
        yield results


def answer_source(
    source: SourceConfig,
    output: Path,
    load: Callable[[], tuple[PreTrainedModel, AnyChatEncoder]],
    sampling: Sampling,
    *,
    batch_size: int,
    system: str,
    models: Sequence[Path],
    settings: Mapping[str, Any],
) -> None:
    """Ask a model every question of a source, and write a file of answers; resume a partial one. `load` is called once
    questions are readable and the file is open; `models` are the directories of the weights.
    """
    total = sum(1 for _ in read_questions(source))  # a broken file is reported before the model loads
    weights = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for folder in models
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
    }
    inputs = {str(path): sha256(path) for path in files_of(source)}
    settings = {**settings, "input": inputs, "batch_size": batch_size, "weights": weights}
    # All ranks of engine=deepspeed compute the same; one writes.
    opened = AnswerFile(output, settings, batch_size * BATCHES) if rank() == 0 else contextlib.nullcontext()
    failed = cut = 0
    with opened as file:
        model, encoder = load()
        done = on_rank0(lambda: file.done if file else 0)
        questions = read_questions(source)
        windows = answer_rows(model, encoder, questions, sampling, batch_size=batch_size, system=system, done=done)
        with tqdm(total=total, initial=done, unit="row", dynamic_ncols=True, disable=file is None) as bar:
            for rows in windows:
                failed += sum("error" in row for row in rows)
                cut += sum(row.get("finish") == "length" for row in rows)
                if file:
                    file.write(rows)
                bar.update(len(rows))
        if not file:
            return
        file.finish()
    asked = f"{total - done:,}"
    say("wrote {file}: {rows} rows.", file=output, rows=f"{total:,}")
    if cut:
        say("{cut} of {rows} new rows were cut at max_new_tokens.", cut=f"{cut:,}", rows=asked)
    if failed:
        say("{failed} of {rows} new rows have no answer: see their `error`.", failed=f"{failed:,}", rows=asked)
