"""Answers to many questions, and where the questions come from.

A question is a row of a data file (what stands before the last answer, and that answer to compare) or a sample of the
tokenised validation split, as training sees it. They are asked in batches of like length, of which every rank takes its
part, and answers come back in the order of the questions. A file of answers is written beside its place, is complete
when it has its name, and is continued by the same command.
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
from toolkit.errors import CheckpointError, ConfigError, DataError, ModelError, RowError, Stopped
from toolkit.evaluate.generate import Sampling, check_length, decode_answer, generate, until_stop
from toolkit.messages import say, tr
from toolkit.models.chat import AnyChatEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuestion:
    """One row."""

    where: str
    """file:line."""
    messages: list[Message] = field(default_factory=list)
    """What the model is given; [] if the row cannot be used."""
    tools: list[Any] | None = None
    """What it may call."""
    reference: str | None = None
    """The row's own last answer; None if it has none."""
    error: str = ""
    """Why the row cannot be used."""


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


def question_files(source: SourceConfig) -> list[Path]:
    """Return the files that `read_questions` reads."""
    if source.format in (RowFormat.text, RowFormat.docstrings):
        raise DataError("format = {format} holds no questions.", format=source.format.value)
    return files_of(source)


def read_questions(source: SourceConfig) -> Iterator[RowQuestion]:
    """Yield every row of a source in order, also those that cannot be used; here a row needs no answer."""
    files = [DataFile(path, 0, source.format, dict(source.columns)) for path in question_files(source)]
    for _, file, block in read_blocks(files, [0] * len(files), block_bytes(total_bytes(files))):
        if file.row_format is RowFormat.text:
            raise DataError("{path}: rows of plain text hold no questions.", path=file.path)
        # Undecided where no row of the block can be parsed: each then says so itself.
        row_format = RowFormat.prompt_response if file.row_format is RowFormat.auto else file.row_format
        reader = RowReader(row_format, file.columns, answered=False)
        for offset, row in rows_of(block):
            where = f"{file.path}:{block.first + offset}"
            try:
                yield _question(where, reader.read(parse_row(row)))
            except RowError as error:
                yield RowQuestion(where=where, error=str(error))


def _question(where: str, conversation: Conversation) -> RowQuestion:
    """Return a row's question; a RowError if nothing is asked."""
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
    """Name of its source, as `toolkit show` has it."""
    where: str
    """file:line of its row."""


def choose_questions(
    store: TokenizedCache, encoder: AnyChatEncoder, names: Sequence[str], max_samples: int
) -> tuple[list[ValidationQuestion], int]:
    """Take samples evenly from all over a split; return the questions, and how many samples have no prompt.

    Args:
        store: the split.
        encoder: what tokenized it.
        names: of the sources.
        max_samples: how many samples to take; 0 takes all.
    """
    count = min(max_samples or len(store), len(store))
    chosen = [number * len(store) // count for number in range(count)]
    sources = store.sources()
    questions = []
    for sample in chosen:
        ids, trained = store[sample]
        if parts := split_sample(ids.tolist(), trained.tolist(), encoder):
            questions.append(ValidationQuestion(*parts, names[sources[sample]], store.where(sample)))
    return questions, count - len(questions)


def split_sample(
    ids: Sequence[int], trained: Sequence[bool], encoder: AnyChatEncoder
) -> tuple[list[int], list[int]] | None:
    """Return prompt and answer of a sample; None if nothing but special tokens comes before what is trained.

    The answer is the last stretch that is trained. Where a family trains more than answers (ChatGLM-6B's <sop>, tools'
    observations), it begins after the last token that makes the assistant speak.
    """
    end = max((place for place, is_trained in enumerate(trained) if is_trained), default=-1) + 1
    begin = next((place + 1 for place in range(end - 1, -1, -1) if not trained[place]), 0)
    asked = {int(token) for token in encoder.answer_ids}
    begin = next((place + 1 for place in range(end - 1, begin - 1, -1) if ids[place] in asked), begin)
    prompt = list(ids[:begin])
    # The first token of a sample is never trained: alone it is the beginning of a text, or of a piece of one.
    if len(prompt) < 2 or set(prompt) <= set(encoder.tokenizer.all_special_ids):
        return None
    return prompt, until_stop(list(ids[begin:end]), set(encoder.stop_ids))


class AnswerFile:
    """JSON lines that go to OUTPUT.part until all are there; OUTPUT.part.json says which command writes them.

    Args:
        output: must not exist.
        settings: all that decides about the answers; lines that were written with others are not continued.
        window: lines that are written together; an incomplete window is written again.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], window: int) -> None:
        self.output = output
        self.part, self.record = (output.with_name(f"{output.name}{suffix}") for suffix in (".part", ".part.json"))
        if output.exists():
            raise ConfigError("{file} exists already: nothing was written. Name another file.", file=output)
        try:
            self.file = self.part.open("a+b")
        except OSError as error:
            raise self._failed(error) from error
        try:
            self.done = self._claim(json.loads(json.dumps(settings)), window)
        except OSError as error:
            self.file.close()
            raise self._failed(error) from error
        except ConfigError:
            self.file.close()
            raise
        if self.done:
            say("Going on after the {count} lines in {file}.", count=f"{self.done:,}", file=self.part)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.file:
            if kind is None or not self.part.exists():
                return
            if self.part.stat().st_size:
                say("What is there so far is in {file}; the same command goes on from it.", file=self.part)
            else:
                self.part.unlink()
                self.record.unlink(missing_ok=True)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a window of lines, and make sure that they are on the disk."""
        try:
            # A lone surrogate has no UTF-8.
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self.file.write(lines.encode("utf-8", "backslashreplace"))
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Give the file its name."""
        try:
            if self.output.exists():
                raise ConfigError(
                    "{file} was made by somebody else meanwhile; the answers are in {part}.",
                    file=self.output,
                    part=self.part,
                )
            self.part.rename(self.output)
            self.record.unlink()
        except OSError as error:
            raise self._failed(error) from error

    def _claim(self, settings: dict[str, Any], window: int) -> int:
        """Lock the file, cut it after its last whole window, and return how many lines it holds."""
        if not lock_or_warn(self.file, self.part, say):
            raise ConfigError("another process is writing {file}.", file=self.part)
        self.file.seek(0)
        count = sum(line.endswith(b"\n") for line in self.file) // window * window
        if count:
            self._compare(settings)
        else:
            self.record.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        self.file.seek(0)
        self.file.truncate(sum(map(len, islice(self.file, count))))
        return count

    def _compare(self, settings: dict[str, Any]) -> None:
        try:
            known = json.loads(self.record.read_text(encoding="utf-8"))
            changed = sorted(name for name in known.keys() | settings if known.get(name) != settings.get(name))
        except (FileNotFoundError, ValueError, AttributeError):
            changed = [self.record.name]
        if changed:
            raise ConfigError(
                "{file} was begun with something else ({names}), so it cannot be continued. Move it away, or name "
                "another output.",
                file=self.part,
                names=", ".join(changed),
            )

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError("cannot write {file}: {reason}.", file=self.part, reason=error.strerror or error)


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
    """Answer every prompt once over all ranks. A collective.

    Prompts of like length share a batch. Which do, and what is drawn for them, is the same on any number of ranks.

    Args:
        model: see `generate`; so are `encoder`, `sampling`, `device`.
        encoder: see there.
        prompts: the same on every rank; those too long for the model are dropped already.
        sampling: see there.
        batch_size: prompts that a rank answers at once.
        device: see there.
        in_step: see `generate`. A batch that fails then ends the run, as the other ranks are in the middle of theirs;
            otherwise it is counted, and the others continue.
        alive: called after each batch.
        place: of this rank among those that take batches; None: each rank by itself.
        num_places: how many there are; ranks of one place answer the same batches together.
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
                asked = [prompts[question] for question in batch]
                own = replace(sampling, seed=sampling.seed + number)
                found = generate(model, encoder, asked, own, device, in_step=in_step)
                mine |= dict(zip(batch, found, strict=True)) if has_one else {}
            except Stopped:
                raise
            except Exception as error:  # whatever it is, most likely a lack of memory: no reason to end a training run
                if in_step:
                    raise
                failures.add(f"{type(error).__name__}: {error}".splitlines()[0])
        barrier()  # no rank gets so far behind that the others' next collective takes it for dead
        alive()
    answers = Answers(seconds=time.perf_counter() - started)
    for ids, reasons in gather((mine, failures)):
        answers.ids |= ids
        answers.failures += sorted(reasons - set(answers.failures))
    return answers


BATCHES = 8
"""In a window, whose questions are sorted by length and whose answers are given back together."""


def answer_rows(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    questions: Iterable[RowQuestion],
    sampling: Sampling,
    device: torch.device,
    *,
    batch_size: int,
    system: str = "",
    done: int = 0,
) -> Iterator[list[dict[str, Any]]]:
    """Yield a row for each question after asking the model, a window of `batch_size * BATCHES` at a time.

    Each has `messages` (`tools`), `answer`, `reference`, `prompt_tokens`, `tokens`, `finish` (stop, or length: cut at
    max_new_tokens) and `where`; one that could not be asked has `error` instead of an answer. Batches draw from seeds
    of their own, so that a question that comes several times gets several answers. The first `done` questions, complete
    windows, are skipped: the others get the answers that they would have got.
    """
    rows = islice(questions, done, None)
    while window := list(islice(rows, batch_size * BATCHES)):
        results: list[dict[str, Any]] = []
        prompts: dict[int, list[int]] = {}
        for place, question in enumerate(window):
            messages = with_system(question.messages, system)
            results.append(_known(question, messages))
            try:
                prompts[place] = _prompt(model, encoder, question, messages, sampling.max_new_tokens)
            except (RowError, ModelError) as error:
                results[place]["error"] = str(error)
        # The longest first: what does not fit into memory fails at once.
        order = sorted(prompts, key=lambda place: -len(prompts[place]))
        for begin in range(0, len(order), batch_size):
            places = order[begin : begin + batch_size]
            drawn = replace(sampling, seed=sampling.seed + done + begin)
            found = generate(model, encoder, [prompts[place] for place in places], drawn, device)
            for place, ids in zip(places, found, strict=True):
                results[place] |= {
                    "answer": decode_answer(encoder, ids),
                    "prompt_tokens": len(prompts[place]),
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
    """Ask a model every question of a source, and write a file of answers; continue one that was begun.

    Args:
        source: the questions.
        output: JSON lines; see `answer_rows` and `AnswerFile`.
        load: returns the model; called once the questions could be read and the file be opened.
        sampling: how to choose tokens.
        batch_size: questions in a forward.
        system: system message for questions without one.
        models: directories whose weights decide about the answers.
        settings: what else decides about them.
    """
    total = sum(1 for _ in read_questions(source))  # a broken file is reported before the model loads
    inputs = {str(path): sha256(path) for path in question_files(source)}
    weights = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for folder in models
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
    }
    settings = {**settings, "input": inputs, "batch_size": batch_size, "weights": weights}
    first = rank() == 0  # all ranks of engine=deepspeed compute the same; one writes
    opened = AnswerFile(output, settings, batch_size * BATCHES) if first else contextlib.nullcontext()
    with opened as file:
        model, encoder = load()
        done = on_rank0(lambda: file.done if file else 0)
        questions = read_questions(source)
        found = answer_rows(
            model, encoder, questions, sampling, model.device, batch_size=batch_size, system=system, done=done
        )
        _write(found, file, total, done)


def _write(found: Iterator[list[dict[str, Any]]], file: AnswerFile | None, total: int, done: int) -> None:
    """Write answers as they come; ranks without a file only help to make them."""
    failed = cut = 0
    with tqdm(total=total, initial=done, unit="row", dynamic_ncols=True, disable=file is None) as bar:
        for rows in found:
            failed += sum("error" in row for row in rows)
            cut += sum(row.get("finish") == "length" for row in rows)
            if file:
                file.write(rows)
            bar.update(len(rows))
    if not file:
        return
    file.finish()
    asked = f"{total - done:,}"
    say("wrote {file}: {rows} rows.", file=file.output, rows=f"{total:,}")
    if cut:
        say("{cut} of the {rows} now asked were cut at max_new_tokens.", cut=f"{cut:,}", rows=asked)
    if failed:
        say(
            "{failed} of the {rows} now asked have no answer: their lines hold the error.",
            failed=f"{failed:,}",
            rows=asked,
        )


def with_system(messages: Sequence[Message], system: str) -> list[Message]:
    """Return a conversation with a system message, if one is wanted and it has none."""
    if not system or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def has_system_role(encoder: AnyChatEncoder) -> bool:
    """Return whether a system message changes the prompt."""
    asked = [{"role": "user", "content": "?"}]
    try:
        return encoder.prompt(with_system(asked, "!")) != encoder.prompt(asked)
    except RowError:
        return False


def check_system(encoder: AnyChatEncoder, system: str) -> None:
    """Reject a system message that the model would not see."""
    if system and not has_system_role(encoder):
        family = getattr(encoder.tokenizer, "family", None)
        raise ConfigError(
            "the chat format of {name} has no system message: the model would not see it. Leave it out, or put it "
            "into the question.",
            name=family.value if family else encoder.tokenizer.name_or_path,
        )


def _prompt(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    question: RowQuestion,
    messages: Sequence[Message],
    max_new_tokens: int,
) -> list[int]:
    if question.error:
        raise RowError(question.error)
    prompt = encoder.prompt(messages, question.tools)
    if not prompt:
        raise RowError(tr("the chat template makes nothing of the conversation"))
    check_length(model, len(prompt), max_new_tokens)
    return prompt


def _known(question: RowQuestion, messages: list[Message]) -> dict[str, Any]:
    known: dict[str, Any] = {"messages": messages} if question.messages else {}
    if question.tools:
        known["tools"] = question.tools
    if question.reference is not None:
        known["reference"] = question.reference
    return known | {"where": question.where}
