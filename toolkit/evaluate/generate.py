"""Answers of a model: batched, padded on the left, with a KV cache, greedy or sampled by a seed; a conversation in the
terminal, and files of questions, whose answers the same command resumes.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from toolkit.config import files, mesh, preflight, schema
from toolkit.data import formats, readers, sources
from toolkit.disk import lock_or_warn, sha256, write_atomically
from toolkit.distributed.process_group import on_rank0, rank
from toolkit.messages import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    RowError,
    did_you_mean,
    joined,
    printable,
    say,
    tr,
)
from toolkit.models import chat, probe, structure


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen, and how many are."""

    max_new_tokens: int = 64
    """Longest answer in tokens, its end token included."""
    temperature: float = 0.0
    """0: greedy, the likeliest token; else the logits are divided by it and a token is drawn."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that hold this share of the probability together."""
    top_k: int = 0
    """Draw among so many tokens; 0 among all."""
    seed: int = 0
    """Of what is drawn: the same seed and batch give the same answers."""


def generate(
    model: PreTrainedModel,
    encoder: chat.AnyChatEncoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    device: torch.device,
    *,
    in_step: bool = False,
    **options: Any,
) -> list[list[int]]:
    """Return the new tokens of each prompt, up to the end token and without it; the prompts are one batch.

    Args:
        model: the model, `engine.module` included; left in its mode.
        encoder: its `stop_ids` end an answer.
        prompts: ids of `encoder.prompt`, of any lengths; too long ones are a ModelError.
        device: where the model computes; under ZeRO-3 with offload its parameters are elsewhere.
        in_step: of a partitioned model: a collective, every rank with as many batches, until the last ends.
        **options: for `transformers`' generate, such as `streamer`.
    """
    longest = max(map(len, prompts))
    check_length(model, longest, sampling.max_new_tokens)
    tokenizer = encoder.tokenizer
    pad = int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:  # with greedy decoding, transformers warns of them
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    own = model.generation_config
    # In its place, as transformers takes from it whatever a config that is passed leaves out.
    model.generation_config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=bool(drawn),
        use_cache=True,
        eos_token_id=encoder.stop_ids,
        pad_token_id=pad,
        **drawn,
    )
    try:
        eagerly = torch.compiler.set_stance("force_eager")  # each new token would be compiled again
        with probe.evaluating(model), eagerly, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(sampling.seed)
            output = model.generate(input_ids=ids, attention_mask=mask, synced_gpus=in_step, **options)
    finally:
        model.generation_config = own
    stops = set(encoder.stop_ids)
    return [until_stop(row, stops) for row in output[:, longest:].tolist()]


def answer(
    model: PreTrainedModel,
    encoder: chat.AnyChatEncoder,
    question: str,
    max_new_tokens: int,
    device: torch.device,
    *,
    in_step: bool,
) -> str:
    """Return the model's greedy answer to one question, which all ranks ask of a partitioned model, `in_step`: GPUs may
    round differently, so one rank's answer may be longer than another's.
    """
    prompt = encoder.prompt([{"role": "user", "content": question}])
    [ids] = generate(model, encoder, [prompt], Sampling(max_new_tokens=max_new_tokens), device, in_step=in_step)
    return decode_answer(encoder, ids)


def decode_answer(encoder: chat.AnyChatEncoder, ids: Sequence[int]) -> str:
    """Return generated tokens as text, without special tokens and surrounding white space."""
    return str(encoder.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise a ModelError if prompt and answer could be longer than the model's positions."""
    most = most_tokens(model)
    if prompt_tokens + max_new_tokens > most:
        raise ModelError(
            "a prompt of {prompt} tokens and max_new_tokens = {new} are more than the {most} positions that the model "
            "has. Shorten the prompt, or set max_new_tokens to {left} at most.",
            prompt=prompt_tokens,
            new=max_new_tokens,
            most=most,
            left=max(most - prompt_tokens, 0),
        )


def most_tokens(model: PreTrainedModel) -> float:
    """Return how many tokens prompt and answer may have together: the model's positions, infinite where it has none."""
    return preflight.position_limit(model.config.to_dict()) or math.inf


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """Return the ids before the first that ends an answer."""
    return ids[: next((index for index, token in enumerate(ids) if token in stops), len(ids))]


def with_system(messages: Sequence[formats.Message], system: str) -> list[formats.Message]:
    """Return a conversation with a system message, if one is wanted and it has none."""
    if not system or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def has_system_role(encoder: chat.AnyChatEncoder) -> bool:
    """Return whether a system message changes the prompt."""
    asked = [{"role": "user", "content": "?"}]
    try:
        return encoder.prompt(with_system(asked, "!")) != encoder.prompt(asked)
    except RowError:
        return False


def check_system(encoder: chat.AnyChatEncoder, system: str) -> None:
    """Reject a system message that the model would not see."""
    if system and not has_system_role(encoder):
        family = getattr(encoder.tokenizer, "family", None)
        raise ConfigError(
            "the chat format of {name} has no system message: the model would not see it. Leave it out, or put it "
            "into the question.",
            name=family.value if family else encoder.tokenizer.name_or_path,
        )


FAMILIES = tuple(kind for kind in mesh.FAMILIES if kind != "chatglm")
"""Of which a test shows that two ranks answer as one does; DeepSpeed 0.19.8 splits others too, some of them wrongly."""


def split_inference(model: PreTrainedModel) -> PreTrainedModel:
    """Return a full model after `deepspeed.init_inference`, on this rank's device. A collective; the model is changed.
    DeepSpeed 0.19.8 has kernels of its own for none of the families.
    """
    import deepspeed

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ModelError(
            "engine = deepspeed: DeepSpeed's inference engine is not known to split a {kind} rightly; known are "
            "{known}. Leave engine out.",
            kind=type(model).__name__,
            known=", ".join(FAMILIES),
        )
    if structure.has_adapter(model):
        raise ModelError(
            tr("engine = deepspeed splits whole models only. Merge the adapter first: toolkit export-model merge=true")
        )
    groups = model.config.num_key_value_heads
    if groups % ranks:
        raise ModelError(
            "engine = deepspeed: the model's {groups} heads of keys and values cannot be split over {ranks} ranks. "
            "Take a number of ranks that divides {groups}.",
            groups=groups,
            ranks=ranks,
        )
    exact = [(name, value.clone()) for name, value in model.named_buffers() if value.dtype is torch.float32]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which layers it takes
        engine = deepspeed.init_inference(model, dtype=model.dtype, tensor_parallel={"tp_size": ranks})
    split_model: PreTrainedModel = engine.module
    # It casts buffers too; rotary frequencies are right in float32 alone.
    for name, value in exact:
        owner, _, leaf = name.rpartition(".")
        setattr(split_model.get_submodule(owner), leaf, value.to(split_model.device))
    return split_model


class AnswerStream(BaseStreamer):
    """For `generate(…, streamer=…)` with one prompt: `write` gets whole characters. All tokens are decoded again with
    each one, as their text depends on those around them; that costs nothing next to the model.
    """

    def __init__(self, encoder: chat.AnyChatEncoder, write: Callable[[str], None]) -> None:
        self.encoder, self.write = encoder, write
        self.ids: list[int] = []
        self.text = ""
        """What has been written."""
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then a token at a time."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += [token for token in value.flatten().tolist() if token not in self.encoder.stop_ids]
        # Half a character is decoded as U+FFFD.
        self._show(decode_answer(self.encoder, self.ids).rstrip("\ufffd"))

    def end(self) -> None:
        """Write what is left."""
        self._show(decode_answer(self.encoder, self.ids))

    def _show(self, text: str) -> None:
        if len(text) > len(self.text):
            self.write(text[len(self.text) :])
            self.text = text


COMMANDS = ("/reset", "/undo", "/system", "/help", "/exit")


class ChatSession:
    """One conversation with a model; with `is_terminal` mistakes are reported, else they end the command."""

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: chat.AnyChatEncoder,
        sampling: Sampling,
        is_terminal: bool,
        help_text: str,
    ) -> None:
        self.model, self.encoder, self.sampling = model, encoder, sampling
        self.is_terminal, self.help_text = is_terminal, help_text
        self.system = ""
        self.asked = 0
        """Questions so far, those that were undone too: each draws from a seed of its own."""
        self.history: list[formats.Message] = []
        """Question, answer, question, answer …"""

    def talk(self) -> None:
        """Answer until there is nothing more to answer."""
        if self.is_terminal:
            _tell(tr("{commands}; Ctrl-C stops an answer, Ctrl-D ends.", commands=" ".join(COMMANDS)))
        for line in self._lines():
            if not self.take(line):
                return

    def take(self, line: str) -> bool:
        """Answer a question or obey a command; return whether the conversation goes on."""
        try:
            if line.startswith("/"):
                return self._obey(line)
            if line.strip():
                self._answer(line.strip())
        except (ConfigError, ModelError, RowError) as error:
            if not self.is_terminal:
                raise error if isinstance(error, ConfigError | ModelError) else ModelError(str(error)) from None
            _tell(str(error))
        return True

    def set_system(self, text: str) -> None:
        """Set the system message, "" for none; an error if the model would not see it."""
        check_system(self.encoder, text)
        self.system = text

    def _lines(self) -> Iterator[str]:
        """Yield what is typed, or what comes through a pipe."""
        # Half a character, as a terminal may send it, is no reason to end.
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        if not self.is_terminal:
            for line in sys.stdin:
                yield line.removesuffix("\n")
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  editing and history of `input`
        while True:
            try:
                yield input("> ")
            except EOFError:
                _show("\n")
                return
            except KeyboardInterrupt:
                _show("\n")
                _tell(tr("Ctrl-D ends."))

    def _obey(self, line: str) -> bool:
        """Carry a command out, and return whether the conversation goes on."""
        command, _, text = line.partition(" ")
        if command == "/reset":
            self.history.clear()
            _tell(tr("Everything that was said is forgotten."))
        elif command == "/undo":
            if self.history:
                _tell(tr("Forgotten: {question}", question=self.history[-2]["content"][:60]))
            else:
                _tell(tr("Nothing has been said yet."))
            del self.history[-2:]
        elif command == "/system":
            self.set_system(text.strip())
            _tell(tr("System message: {text}", text=self.system or "-"))
        elif command == "/help":
            _tell(self.help_text)
        elif command != "/exit":
            unknown = tr("unknown command '{command}'.", command=command)
            known = tr("Known: {commands}.", commands=", ".join(COMMANDS))
            raise ConfigError(joined(unknown, did_you_mean(command, COMMANDS), known))
        return command != "/exit"

    def _answer(self, question: str) -> None:
        """Ask the model, show the answer as it comes, and remember both."""
        stream = AnswerStream(self.encoder, _show)
        try:
            prompt = self._prompt(question)
            drawn = replace(self.sampling, seed=self.sampling.seed + self.asked)
            self.asked += 1
            [ids] = generate(self.model, self.encoder, [prompt], drawn, self.model.device, streamer=stream)
            answer = decode_answer(self.encoder, ids)
            _show("\n")
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            answer = stream.text
            _show("\n")
            _tell(tr("Stopped."))
        if answer:
            self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _prompt(self, question: str) -> list[int]:
        """Return the prompt, after dropping the oldest turns that have no room; an error if none of them is left."""
        dropped = 0
        while True:
            messages = [*self.history[dropped:], {"role": "user", "content": question}]
            prompt = self.encoder.prompt(with_system(messages, self.system))
            try:
                check_length(self.model, len(prompt), self.sampling.max_new_tokens)
                break
            except ModelError:
                if dropped == len(self.history):
                    raise
                dropped += 2
        if dropped:
            del self.history[:dropped]
            _tell(tr("The context window is full: the oldest {count} questions were dropped.", count=dropped // 2))
        return prompt


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _tell(text: str) -> None:
    """Write what is no answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuestion:
    """One row of a data file."""

    where: str
    """file:line."""
    messages: list[formats.Message] = field(default_factory=list)
    """The model's input; [] if the row cannot be used."""
    tools: list[Any] | None = None
    reference: str | None = None
    """The row's own last answer; None if it has none."""
    error: str = ""
    sample: int | None = None
    """Which of several answers to it is asked for, from 0; None: there is one."""


def question_source(path: str, row_format: schema.RowFormat, columns: str) -> schema.SourceConfig:
    """Return questions as a data source; `columns` is YAML such as `{prompt: question}`."""
    names = None
    with contextlib.suppress(ConfigError):
        names = files.parse(columns, "columns").values
    if names is None or not all(isinstance(value, str) for value in names.values()):
        raise ConfigError("columns = {text} is not of the form {{prompt: question, response: answer}}.", text=columns)
    source = schema.SourceConfig(path=path, format=row_format, columns=names)
    if sentence := preflight.check_columns(source, "input"):
        raise ConfigError(sentence)
    return source


def read_questions(source: schema.SourceConfig) -> Iterator[RowQuestion]:
    """Yield every row of a source in order, unusable ones too; here a row needs no answer."""
    if source.format in (schema.RowFormat.text, schema.RowFormat.docstrings):
        raise DataError("format = {format} holds no questions.", format=source.format.value)
    files = [sources.DataFile(path, 0, source.format, dict(source.columns)) for path in readers.files_of(source)]
    for _, file, block in sources.read_blocks(files):
        if file.row_format is schema.RowFormat.text:
            raise DataError("{path}: rows of plain text hold no questions.", path=file.path)
        reader = formats.RowReader(file.row_format, file.columns, answered=False)
        for offset, row in readers.rows_of(block):
            where = f"{file.path}:{block.first + offset}"
            try:
                yield _question(where, reader.read(formats.parse_row(row)))
            except RowError as error:
                yield RowQuestion(where=where, error=str(error))


def _question(where: str, conversation: formats.Conversation) -> RowQuestion:
    messages: list[formats.Message] = [
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

    def finish(self, is_shard: bool = False) -> None:
        """Give the file its name; of a shard the settings stay, for `_merge`."""
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


def parse_shard(text: str) -> tuple[int, int]:
    """Return i and n of "i/n"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not (found and 0 < int(found[1]) <= int(found[2])):
        raise ConfigError("shard = {value} must be i/n, such as 1/4 to 4/4.", value=text)
    return int(found[1]), int(found[2])


def shard_of(output: Path, number: int, shards: int) -> Path:
    """Return the file of one of several shards of an output, numbered from 1."""
    return output.with_name(f"{output.name}.{number}-of-{shards}")


def _merge(output: Path, settings: Mapping[str, Any], window: int) -> bool:
    """Make one file of the shards that are there, in the order of the questions; return whether there were any."""
    if output.exists():
        return False
    numbers = [re.fullmatch(r".*\.\d+-of-(\d+)", path.name) for path in output.parent.glob("*-of-*")]
    for shards in sorted({int(found[1]) for found in numbers if found and found[0].startswith(f"{output.name}.")}):
        files = [shard_of(output, number + 1, shards) for number in range(shards)]
        for number, path in enumerate(files, start=1):
            if not path.exists():
                raise ConfigError(
                    "{file} is missing: run the same command with shard={number}/{shards} first.",
                    file=path,
                    number=number,
                    shards=shards,
                )
            if json.loads(path.with_name(f"{path.name}.part.json").read_text(encoding="utf-8")) != settings:
                raise ConfigError(
                    "{file} is a shard of other settings. Move it away, or name another output.", file=path
                )
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb")) for path in files]
            lines: list[bytes] = []
            for file in cycle(opened):
                some = list(islice(file, window))
                if not some:
                    break
                lines += some
        write_atomically(output, b"".join(lines))
        for path in files:
            path.unlink()
            path.with_name(f"{path.name}.part.json").unlink()
        return True
    return False


BATCHES = 8
"""In a window, whose questions are sorted by length and whose answers are written together."""


def answer_rows(
    model: PreTrainedModel,
    encoder: chat.AnyChatEncoder,
    questions: Iterable[RowQuestion],
    sampling: Sampling,
    *,
    batch_size: int,
    system: str,
    done: int,
    shard: tuple[int, int] = (1, 1),
) -> Iterator[list[dict[str, Any]]]:
    """Yield a row for each question after asking the model, a window of `batch_size * BATCHES` at a time; of `shard`
    i/n every n-th window, from the i-th on, whose answers are those that one process gives.

    Each has `messages` (`tools`), `answer` or `error`, `reference`, `prompt_tokens`, `tokens`, `finish` (stop, or
    length: cut at max_new_tokens), `where`, and of a question that comes several times `sample`. Batches have their own
    seeds: repeated questions get different answers, and skipping the first `done` questions changes none.
    """
    size, (mine, shards) = batch_size * BATCHES, shard
    remaining = iter(questions)
    for number in count():
        window = list(islice(remaining, size))
        if not window:
            return
        if number % shards != mine - 1 or number // shards < done // size:
            continue
        results: list[dict[str, Any]] = []
        prompts: dict[int, list[int]] = {}
        for index, question in enumerate(window):
            messages = with_system(question.messages, system)
            row: dict[str, Any] = {"messages": messages} if question.messages else {}
            row |= {"tools": question.tools} if question.tools else {}
            row |= {"reference": question.reference} if question.reference is not None else {}
            numbered = {} if question.sample is None else {"sample": question.sample}
            results.append(row | {"where": question.where} | numbered)
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
            seeded = replace(sampling, seed=sampling.seed + number * size + begin)
            answers = generate(model, encoder, [prompts[index] for index in batch], seeded, model.device)
            for index, ids in zip(batch, answers, strict=True):
                results[index] |= {
                    "answer": decode_answer(encoder, ids),
                    "prompt_tokens": len(prompts[index]),
                    "tokens": len(ids),
                    "finish": "stop" if len(ids) < sampling.max_new_tokens else "length",
                }
        yield results


def _known_again(settings: Mapping[str, Any], source: schema.SourceConfig, models: Sequence[Path]) -> dict[str, Any]:
    """Return settings, as JSON has them, with what files of questions and of weights are known by."""
    weights = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for folder in models
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
    }
    inputs = {str(path): sha256(path) for path in readers.files_of(source)}
    found: dict[str, Any] = json.loads(json.dumps({**settings, "input": inputs, "weights": weights}))
    return found


def answer_source(
    source: schema.SourceConfig,
    output: Path,
    load: Callable[[], tuple[PreTrainedModel, chat.AnyChatEncoder]],
    sampling: Sampling,
    *,
    batch_size: int,
    samples: int = 1,
    system: str,
    models: Sequence[Path],
    settings: Mapping[str, Any],
    shard: tuple[int, int] = (1, 1),
) -> None:
    """Ask a model every question of a source `samples` times, and write a file of answers; resume a partial one. `load`
    is called once questions are readable and the file is open; `models` are the directories of the weights. `shard`:
    see `answer_rows`; without one, shards that are there become the file.
    """
    if samples > 1 and not sampling.temperature:
        raise ConfigError(
            "samples = {samples} needs temperature: the likeliest tokens are the same each time.", samples=samples
        )
    total = samples * sum(1 for _ in read_questions(source))  # a broken file is reported before the model loads
    settings = _known_again({**settings, "batch_size": batch_size}, source, models)
    is_shard = shard[1] > 1
    if is_shard:
        output = shard_of(output, *shard)
    elif _merge(output, settings, batch_size * BATCHES):
        say("wrote {file}: {rows} rows.", file=output, rows=f"{total:,}")
        return
    # All ranks of engine=deepspeed compute the same; one writes.
    opened = AnswerFile(output, settings, batch_size * BATCHES) if rank() == 0 else contextlib.nullcontext()
    failed = cut = 0
    with opened as file:
        model, encoder = load()
        done = on_rank0(lambda: file.done if file else 0)
        questions = read_questions(source)
        if samples > 1:
            questions = (replace(one, sample=number) for one in questions for number in range(samples))
        windows = answer_rows(
            model, encoder, questions, sampling, batch_size=batch_size, system=system, done=done, shard=shard
        )
        window = batch_size * BATCHES
        total = sum(min(window, total - begin) for begin in range(0, total, window)[shard[0] - 1 :: shard[1]])
        is_quiet = file is None or shard[0] > 1
        with tqdm(total=total, initial=done, unit=tr("row"), dynamic_ncols=True, disable=is_quiet) as bar:
            for rows in windows:
                failed += sum("error" in row for row in rows)
                cut += sum(row.get("finish") == "length" for row in rows)
                if file:
                    file.write(rows)
                bar.update(len(rows))
        if not file:
            return
        file.finish(is_shard)
    asked = f"{total - done:,}"
    say("wrote {file}: {rows} rows.", file=output, rows=f"{total:,}")
    if cut:
        say("{cut} of {rows} new rows were cut at max_new_tokens.", cut=f"{cut:,}", rows=asked)
    if failed:
        say("{failed} of {rows} new rows have no answer: see their `error`.", failed=f"{failed:,}", rows=asked)
