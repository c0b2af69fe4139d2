"""Checks that servers use an export as it was trained: prompts, logits, parsers, stop tokens, config fields.

Each trained answer of some conversations is encoded as training does it. The tokens before it must be exactly the
prompt that a server makes of the messages before it. Transformers is run in a process that imports nothing of this
package; vLLM, SGLang and llama.cpp are started on the export where they are installed, and asked over HTTP. What could
not be checked is reported as such.

vLLM and llama.cpp return the ids of a chat's prompt (`/tokenize` with messages; `/apply-template`, then `/tokenize`),
SGLang only their number (`usage.prompt_tokens`).
"""

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from toolkit import children, disk, messages
from toolkit.checkpoint import directory, intact
from toolkit.config import devices
from toolkit.config.schema import DataConfig, TrainOn
from toolkit.data import preview, readers, sources
from toolkit.data.formats import Conversation, mark_trained
from toolkit.evaluate.servable import resolve_servable
from toolkit.evaluate.server import find_program
from toolkit.evaluate.server_process import NotStarted, running_server
from toolkit.export.verify import judge_logits, logits_of_directory
from toolkit.extras import llama_cpp
from toolkit.launch.environment import free_port, without_ranks
from toolkit.launch.processes import last_line
from toolkit.messages import CheckpointError, DataError, ModelError, RowError, ToolkitError, say, tr, warn
from toolkit.models import answer_spans, chat_template, extra_tensors, load, probe, served_turns, weights
from toolkit.models.chat import AnyChatEncoder
from toolkit.models.span_tokenizer import Shield
from toolkit.sample_types import Message

MOST_CONVERSATIONS = 100
"""Conversations of a run that are tried."""
_SHOWN = 3
_CONTEXT = 256
"""Tokens of a conversation on which logits are compared."""
_PLAIN_PROGRAM = Path(__file__).with_name("plain_transformers.py")
_PLAIN_S = 3600
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    state: str
    """PASSED, FAILED or SKIPPED."""
    text: str
    details: list[str] = field(default_factory=list)
    """The first few differences."""


class Case(NamedTuple):
    """A trained answer of a conversation, and the tokens before it."""

    where: str
    """Where the conversation is from, for messages."""
    messages: Sequence[Message]
    """Those before the answer, as a client sends them."""
    tools: list[Any] | None
    answer: Message
    ids: list[int]
    """Token ids as trained, up to the end of the answer."""
    start: int
    """Index of the answer's first token in `ids`."""
    trains_all: bool
    """Whether the loss covers the answer from its first token on."""


_WEATHER = {
    "name": "get_weather",
    "description": "天气 weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}


def built_in_conversations() -> list[Conversation]:
    """Return conversations of one and three turns, with and without tools, reasoning and a system message."""
    conversations = []
    for turns, has_tools, thinks, has_system in product((1, 3), (False, True), (False, True), (False, True)):
        messages: list[Message] = [{"role": "system", "content": "回答要简短。 Be brief."}] if has_system else []
        for turn in range(turns):
            why = {"reasoning_content": f"Think {turn}.\n想一想。"} if thinks else {}
            messages.append({"role": "user", "content": f"{turn}: 北京天气？\n\nAnd `x = {turn}`?"})
            if has_tools:
                called = {"name": "get_weather", "arguments": {"city": "北京", "days": turn + 1}}
                calls = [{"type": "function", "function": called}]
                messages.append({"role": "assistant", "content": "", "tool_calls": calls, **why})
                messages.append({"role": "tool", "content": '{"sky": "晴", "degrees": 21}'})
            messages.append({"role": "assistant", "content": f"晴，21 °C.\nx is {turn}.", **why})
        tools = [{"type": "function", "function": _WEATHER}] if has_tools else None
        conversations.append(Conversation(messages, tools))
    return conversations


def held_conversations(data: DataConfig, cache_dir: Path) -> list[tuple[str, Conversation]]:
    """Return (where, conversation) of the first conversations in a run's validation data, else in its training data; []
    with a warning if the files are gone.
    """
    try:
        located = sources.locate_all(data, cache_dir)
    except DataError as error:
        warn("the run's data cannot be read, the built-in conversations alone are tried: {reason}", reason=error)
        return []
    validation = [file for file in located if file.source >= len(data.sources)]  # sources are numbered, these last
    return list(islice(readers.usable_rows(validation or located), MOST_CONVERSATIONS))


def trained_answers(
    encoder: AnyChatEncoder, conversations: Iterable[tuple[str, Conversation]], train_on: TrainOn
) -> tuple[list[Case], Counter[str]]:
    """Return a case for each trained answer, and reason -> number of conversations that cannot be compared."""
    shield = getattr(encoder, "shield", None) or Shield(encoder.tokenizer, ())  # it covers control tokens in texts
    cases: list[Case] = []
    left_out: Counter[str] = Counter()
    for where, conversation in conversations:
        if conversation.is_text:
            left_out[tr("a plain text, not a conversation")] += 1
        elif shield.cover([conversation.messages, conversation.tools]) != [conversation.messages, conversation.tools]:
            left_out[tr("a text holds control tokens, which training keeps as text and servers do not")] += 1
        elif encoder.drops_tools and conversation.tools:
            left_out[tr("the model's format has no place for tools")] += 1
        else:
            try:
                cases += _cases_of(encoder, where, conversation, train_on)
            except RowError:
                left_out[tr("training rejects it: the chat template has no place for what it holds")] += 1
    return cases, left_out


def _cases_of(encoder: AnyChatEncoder, where: str, conversation: Conversation, train_on: TrainOn) -> Iterator[Case]:
    """Yield a case for each trained answer of a conversation, in the parts in which the encoder trains it: itself, or
    prefixes of it where an answer has other tokens once another turn follows. With `only_last` an encoder trains only
    the last answer of a part.
    """
    for marked in mark_trained(conversation, train_on, encoder.only_last):
        for part in encoder.divide(marked.messages, marked.tools):
            all_ids, _ = encoder.encode(part, marked.tools)
            answers = [
                number
                for number, message in enumerate(part)
                if message["role"] == "assistant" and message.get("loss", True)
            ]
            for number in answers[-1:] if encoder.only_last else answers:
                yield _case_of(encoder, where, part, number, all_ids, conversation.tools)


def _case_of(
    encoder: AnyChatEncoder,
    where: str,
    part: Sequence[Message],
    number: int,
    all_ids: Sequence[int],
    tools: list[Any] | None,
) -> Case:
    """Return the case of the answer `part[number]`. `part`: messages that are trained together, and `all_ids` their
    tokens as trained; `where`, `tools`: of their conversation.
    """
    # Encoded up to this answer, and with it alone trained, which tells where it starts and ends.
    before = [{**message, "loss": False} for message in part[:number]]
    answer = {**part[number], "loss": True}
    ids, trained = encoder.encode(part[: number + 1] if encoder.only_last else [*before, answer], tools)
    start = trained.index(True)
    stop = len(trained) - trained[::-1].index(True)  # behind the last trained token
    # Training sees the tokens of the whole part, which may differ (a template may drop earlier reasoning). The token
    # that ends the answer is this encoding's all the same: in the whole part it depends on who speaks next.
    if all_ids[: stop - 1] != ids[: stop - 1]:
        ids = [*all_ids[: stop - 1], ids[stop - 1]]
    sent = [{key: value for key, value in message.items() if key != "loss"} for message in part[:number]]
    trains_all = getattr(encoder, "train_thinking", True)
    return Case(where, served_turns.with_ids(sent), tools, part[number], ids[:stop], start, trains_all)


class Served(NamedTuple):
    """What the checks need: the export, the encoder that training used, and the answers to compare."""

    folder: Path
    encoder: AnyChatEncoder
    cases: list[Case]
    style: preview.Style
    """How differences of tokens are printed."""


def verify_serving(
    folder: Path,
    encoder: AnyChatEncoder,
    conversations: Sequence[tuple[str, Conversation]],
    *,
    train_on: TrainOn = TrainOn.auto,
    programs: Sequence[str] = (),
    style: preview.Style = preview.BRACKETS,
) -> list[Finding]:
    """Run all checks of an export and return their findings. `encoder`: that of the training; `programs`: servers of
    `ENGINES` to try besides transformers, if they are installed.
    """
    folder = resolve_servable(folder)
    built = [
        (tr("built-in conversation {number}", number=n), conversation)
        for n, conversation in enumerate(built_in_conversations(), start=1)
    ]
    cases, left_out = trained_answers(encoder, [*conversations, *built], train_on)
    served = Served(folder, encoder, cases, style)
    findings = [_check_files(folder)]
    saved = probe.read(folder)  # ids and logits, by the training
    probes = [logits_probe for logits_probe in (saved, _own_probe(folder, cases)) if logits_probe is not None]
    try:
        answer, logits = _ask_transformers(served, probes)
    except ModelError as error:
        return [*findings, Finding(tr("transformers loads it"), FAILED, str(error))]
    version = answer["version"]
    # answer["prompts"]: by case and mode of the template, token ids, or a text that says what failed. A mode that fails
    # is none of the template's, unless it is the default, the first one.
    prompts = [[prompt for prompt in by_mode if isinstance(prompt, list)] for by_mode in answer["prompts"]]
    wrong = [by_mode[0] for by_mode in answer["prompts"] if isinstance(by_mode[0], str)]
    note = note_of(left_out)
    findings += [
        compare_prompts(served, f"transformers {version}", prompts, wrong, note),
        _check_parsers(served, answer),
        _check_stop_tokens(served, answer["ends"]),
        _check_config_fields(folder, answer),
        *(
            _check_logits(folder, logits_probe, logits[str(number)], logits_probe is not saved)
            for number, logits_probe in enumerate(probes)
        ),
    ]
    for name in programs:
        try:
            engine_prompts = ENGINES[name](folder, cases)
        except NotRun as error:
            findings.append(Finding(tr("prompts by {program}", program=name), SKIPPED, str(error)))
        else:
            findings.append(compare_prompts(served, name, engine_prompts, [], note))
    return findings


def _own_probe(folder: Path, cases: Sequence[Case]) -> probe.Probe | None:
    """Return the longest prompt of the cases with this toolkit's logits; None without cases, or if the model cannot be
    loaded: transformers will say what is wrong with it.
    """
    if not cases:
        return None
    longest = max(cases, key=lambda case: case.start)
    with suppress(ModelError):
        return logits_of_directory(folder, torch.tensor([longest.ids[: min(longest.start, _CONTEXT)]]))
    return None


def require_serving(
    folder: Path, encoder: AnyChatEncoder, conversations: Sequence[tuple[str, Conversation]], train_on: TrainOn
) -> None:
    """Run the checks with transformers alone. If one fails, rename the export to export.held, write the findings to a
    file next to it, and raise CheckpointError.
    """
    try:
        findings = verify_serving(folder, encoder, conversations, train_on=train_on)
    except ToolkitError as error:
        findings = [Finding(tr("it can be served"), FAILED, str(error))]
    failed = [finding for finding in findings if finding.state == FAILED]
    if not failed:
        passed = sum(finding.state == PASSED for finding in findings)
        say(
            "The export is served as it was trained: {passed} of {total} checks passed.",
            passed=passed,
            total=len(findings),
        )
        return
    held = folder.rename(disk.unused_path(folder.with_name("export.held")))
    report = held.with_name(f"{held.name}.txt")
    report.write_text("\n".join(lines_of(findings)) + "\n", encoding="utf-8")
    raise CheckpointError(
        "the export would not be served as it was trained ({checks}). It is kept as {folder}, and {file} says why; the "
        "checkpoints are untouched. Without export.require_serving the same command exports it all the same.",
        checks=", ".join(finding.check for finding in failed),
        folder=held,
        file=report,
    )


def _check_files(folder: Path) -> Finding:
    """Check the files' sizes and hashes against the export's manifest."""
    check = tr("files as they were written")
    if not (folder / directory.MANIFEST).is_file():
        return Finding(check, SKIPPED, tr("there is no manifest: another program wrote it"))
    wrong = intact.manifest_problems(folder)
    return Finding(check, FAILED if wrong else PASSED, tr("sizes and SHA-256 of manifest.json"), wrong[:_SHOWN])


def _ask_transformers(served: Served, probes: Sequence[probe.Probe]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the answer of extras/plain_transformers.py (see there), run on the export, and name -> logits [R, V] of
    each probe's ids; ModelError if it fails.
    """
    asked = [{"messages": case.messages, "tools": case.tools, "modes": answer_spans.MODES} for case in served.cases]
    answers = [
        {"prompt": case.ids[: case.start], "ids": case.ids[case.start :], "tools": case.tools} for case in served.cases
    ]
    rows = {str(number): logits_probe.ids.tolist() for number, logits_probe in enumerate(probes)}
    request = {"folder": str(served.folder), "prompts": asked, "answers": answers, "rows": rows}
    with TemporaryDirectory() as scratch:
        request_file, answer_file = Path(scratch, "request.json"), Path(scratch, "answer.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        # On the CPU, without the launcher's variables; -I: without PYTHONPATH, by which this package could be imported.
        alone = {"HF_HUB_OFFLINE": "1", devices.visible_variable(): "", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-I", "-X", "utf8", str(_PLAIN_PROGRAM), str(request_file), str(answer_file)]
        try:
            done = children.run(command, capture_output=True, text=True, env=without_ranks() | alone, timeout=_PLAIN_S)
        except subprocess.TimeoutExpired:
            raise ModelError("transformers did not answer within {seconds} s", seconds=_PLAIN_S) from None
        if done.returncode:
            raise ModelError("transformers cannot use it: {reason}", reason=last_line(done.stderr))
        answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
        return answer, load_file(answer_file.with_name("logits.safetensors"))


def note_of(left_out: Counter[str]) -> str:
    """Return why conversations are not compared, for people."""
    return messages.clauses(f"{count} x {reason}" for reason, count in left_out.items())


def compare_prompts(
    served: Served, program: str, prompts: Sequence[Sequence[list[int] | int]], wrong: Sequence[str], note: str
) -> Finding:
    """Compare the tokens before each trained answer with a program's prompts. `prompts`: by case and mode, ids or their
    number alone; one mode must match. `wrong`: errors; `note`: what was not tried.
    """
    details: list[str] = []
    num_equal = num_in_other_mode = 0  # cases that match in some mode, and those of them that do not in the first
    by_length = False
    for case, by_mode in zip(served.cases, prompts, strict=True):
        by_length = by_length or any(isinstance(prompt, int) for prompt in by_mode)
        matches = [_is_prompt_of(case, prompt) for prompt in by_mode]
        if any(matches):
            num_equal += 1
            if not matches[0]:
                num_in_other_mode += 1
            continue
        first = next(iter(by_mode), None)
        shown = tr("no prompt") if first is None else tr("{count} tokens", count=first)
        if isinstance(first, list):
            shown = preview.token_diff(served.encoder.tokenizer, case.ids[: case.start], first, served.style)
        details.append(f"{case.where}: {shown}")
    count = {"equal": num_equal, "all": len(served.cases)}
    if by_length:
        text = tr("{equal} of {all} have as many tokens as in training (it tells no ids)", **count)
    else:
        text = tr("{equal} of {all} equal to training's, token for token", **count)
    if num_in_other_mode:
        text += tr("; {count} of them with enable_thinking set, not by default", count=num_in_other_mode)
    text += tr("; not tried: {reasons}", reasons=note) if note else ""
    check = tr("prompts by {program}", program=program)
    if not served.cases:
        return Finding(check, SKIPPED, text)
    return Finding(check, FAILED if details else PASSED, text, [*dict.fromkeys(wrong), *details][:_SHOWN])


def _is_prompt_of(case: Case, prompt: list[int] | int) -> bool:
    """Whether a server's prompt, or a prompt of so many tokens, is what training has before a case's answer. It may be
    shorter where the loss does not cover the answer's beginning: then the server lets the model write that, too.
    """
    length = prompt if isinstance(prompt, int) else len(prompt)
    if isinstance(prompt, list) and case.ids[:length] != prompt:
        return False
    return length == case.start or (length < case.start and not case.trains_all)


def _check_parsers(served: Served, answer: dict[str, Any]) -> Finding:
    """Check that transformers' parser reads trained answers back as they were; `answer`: of `_ask_transformers`."""
    check, parsed = tr("calls and reasoning are parsed"), answer["parsed"]
    marked = [i for i, case in enumerate(served.cases) if case.answer.get("tool_calls") or _reasoning(case.answer)]
    if parsed is None or not marked:
        text = tr("no answer here calls a tool or reasons")
        if parsed is None:
            text = tr(
                "transformers {version} has no parser for {kind}: its server returns calls and reasoning as text",
                version=answer["version"],
                kind=answer["config"]["model_type"],
            )
        return Finding(check, SKIPPED, text)
    details = []
    for index in marked:
        case, parsed_answer = served.cases[index], parsed[index]
        text = chat_template.THOUGHT.sub("", str(case.answer["content"]), count=1)
        wanted = _parts_of_answer(case.answer, _reasoning(case.answer), text)
        read: Any = parsed_answer  # a text about the error, if parsing failed
        if isinstance(parsed_answer, dict):
            reasoning = parsed_answer.get("reasoning_content") or parsed_answer.get("thinking")
            read = _parts_of_answer(parsed_answer, reasoning, parsed_answer.get("content"))
        if read != wanted:
            shown = [json.dumps(content, ensure_ascii=False) for content in (wanted, read)]
            details.append(
                tr("{where}: trained {wanted}, parsed {read}", where=case.where, wanted=shown[0], read=shown[1])
            )
    count = {"good": len(marked) - len(details), "all": len(marked)}
    text = tr("{good} of {all} trained answers with calls or reasoning come back as they were", **count)
    return Finding(check, FAILED if details else PASSED, text, details[:_SHOWN])


def _parts_of_answer(answer: Mapping[str, Any], reasoning: str | None, content: str | None) -> dict[str, Any]:
    """Return what must be the same of a trained answer and of what a server's parser reads."""
    calls = [_call(call) for call in answer.get("tool_calls") or []]
    return {"calls": calls, "reasoning": str(reasoning or "").strip(), "content": str(content or "").strip()}


def _call(call: dict[str, Any]) -> list[Any]:
    """Return [name, arguments] of a tool call, arguments parsed if they are JSON text."""
    function = call.get("function", {})
    arguments = function.get("arguments")
    return [function.get("name"), json.loads(arguments) if isinstance(arguments, str) else arguments]


def _reasoning(message: Message) -> str:
    """Return the reasoning of an answer, of its field or of a <think> block in its content."""
    block = chat_template.THOUGHT.match(str(message["content"]))
    return str(message.get("reasoning_content") or (block[1] if block else "")).strip()


def _check_stop_tokens(served: Served, ends: int | list[int] | None) -> Finding:
    """Check that the tokens that end trained answers are in generation_config.json's eos_token_id (`ends`)."""
    stop_ids = {ends} if isinstance(ends, int) else {*(ends or [])}
    trained = {case.ids[-1] for case in served.cases} | {*served.encoder.stop_ids}
    names = {token: served.encoder.tokenizer.convert_ids_to_tokens(token) for token in sorted(trained)}
    known, details = sorted(stop_ids), []
    for token, name in names.items():
        if token not in stop_ids:
            shown = f"{name} ({token})"
            details.append(tr("{token} ends answers and is not in eos_token_id {known}", token=shown, known=known))
    text = tr("answers end with {tokens}", tokens=", ".join(names.values()))
    return Finding(tr("stop tokens of generation_config.json"), FAILED if details else PASSED, text, details)


def _check_config_fields(folder: Path, answer: dict[str, Any]) -> Finding:
    """Check that config.json describes the weights: names, layers, precision, class, vocabulary. `answer`: see
    `_ask_transformers`.
    """
    config, files = answer["config"], weights.WeightFiles(folder)  # as transformers read it, with its defaults
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wrong = [f"{kind}: {', '.join(names[:_SHOWN])}" for kind, names in answer["loading"].items() if names]
    has_layers = extra_tensors.has_predicting_layers(files, config.get("num_hidden_layers", 0))
    keys = extra_tensors.predicting_keys(config)
    if keys and not has_layers:
        wrong += [tr("{key} = {value}, but there are no such layers", key=key, value=config[key]) for key in keys]
    if has_layers and not keys:
        wrong.append(tr("there are layers for multi-token prediction, which no field counts"))
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in files.values())
    named_dtype, usual_dtype = stored.get("dtype") or stored.get("torch_dtype"), dtypes.most_common(1)[0][0]
    if named_dtype and named_dtype not in dtypes:
        wrong.append(tr("dtype = {given}, but the weights are {found}", given=named_dtype, found=usual_dtype))
    if (named := stored.get("architectures")) and answer["architecture"] not in named:
        loaded = answer["architecture"]
        wrong.append(tr("architectures = {given}, but transformers loads {found}", given=named, found=loaded))
    if answer["tokens"] > config.get("vocab_size", 0):
        size = config.get("vocab_size")
        wrong.append(tr("vocab_size = {size}, but the tokenizer has {tokens}", size=size, tokens=answer["tokens"]))
    text = tr("precision, vocabulary, class, layers and names of the weights")
    return Finding(tr("config.json describes the weights"), FAILED if wrong else PASSED, text, wrong)


def _check_logits(folder: Path, saved: probe.Probe, logits: torch.Tensor, is_own: bool) -> Finding:
    """Compare transformers' `logits` [R, V] with those of `saved`: that training saved, or with `is_own` that this
    toolkit has just computed.
    """
    check = tr("logits of a conversation") if is_own else tr("logits that training saved")
    if not saved.logits.isfinite().all():
        return Finding(check, SKIPPED, tr("they were NaN or Inf when it was saved: the model had diverged"))
    dtype = str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype") or saved.dtype)
    try:
        text = judge_logits(load.load_empty(folder), folder, probe.Probe(saved.ids, logits, dtype), saved)
    except (CheckpointError, ModelError) as error:
        reason = tr("transformers gives others than this toolkit's forward pass") if is_own else str(error)
        return Finding(check, FAILED, reason)
    if is_own:
        text = tr("transformers gives those of this toolkit's forward pass, {tokens} tokens", tokens=saved.ids.shape[1])
    return Finding(check, PASSED, text)


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Return findings as lines for a terminal."""
    words = {PASSED: tr("passed"), FAILED: tr("FAILED"), SKIPPED: tr("not checked")}
    colon = "：" if messages.current_language() == "zh" else ": "
    lines = []
    for finding in findings:
        lines.append(colon.join((words[finding.state], finding.check, finding.text)))
        lines += [f"    {line}" for line in finding.details]
    return lines


_SLOW_S = 900
_ANSWER_S = 60
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on this machine

Prompts = list[list[list[int] | int]]
"""A server's prompts, by case and mode of the chat template: token ids, or their number alone."""


class NotRun(Exception):
    """A server could not be asked; the message says why."""


@contextmanager
def _server(command: Sequence[str]) -> Iterator[str]:
    """Start a server on a free port and yield its address once it is ready; NotRun if that does not happen."""
    port = free_port()
    address, listen = f"http://127.0.0.1:{port}", ["--host", "127.0.0.1", "--port", str(port)]
    with NamedTemporaryFile() as log:
        try:
            with running_server([*command, *listen], address, "/health", Path(log.name)):
                yield address
        except NotStarted as error:
            raise NotRun(tr("it is installed, but does not start here: {reason}", reason=error)) from error


def _post(url: str, body: dict[str, Any], timeout_s: float = _ANSWER_S) -> dict[str, Any]:
    """Send a JSON request and return the JSON answer; an OSError if it is rejected."""
    content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})  # noqa: S310  ours
    with _OPENER.open(request, timeout=timeout_s) as answer:
        return dict(json.loads(answer.read()))


def _prompts_of_server(cases: Sequence[Case], ask: Callable[[dict[str, Any]], list[int] | int]) -> Prompts:
    """Return by case the prompts that a server makes of its messages, one for each of MODES that the server accepts.
    `ask` sends the body of a chat request; it returns the prompt's ids, or their number alone.
    """
    prompts: Prompts = []
    for case in cases:
        body = {"model": "model", "messages": served_turns.with_text_arguments(case.messages), "tools": case.tools}
        of_case: list[list[int] | int] = []
        for mode in answer_spans.MODES:
            with suppress(OSError, ValueError, KeyError):  # the request was rejected; urllib's errors are an OSError
                of_case.append(ask({**body, "chat_template_kwargs": mode or None}))  # `_post` leaves None out
        prompts.append(of_case)
    return prompts


def _vllm(folder: Path, cases: Sequence[Case]) -> Prompts:
    """Ask vLLM's server for the prompts of cases."""
    if not (program := find_program("vllm")):
        raise NotRun(tr("it is not installed"))
    with _server([program, "serve", str(folder), "--served-model-name", "model"]) as url:
        return _prompts_of_server(cases, lambda body: list(_post(f"{url}/tokenize", body)["tokens"]))


def _sglang(folder: Path, cases: Sequence[Case]) -> Prompts:
    """Ask SGLang's server for the prompts of cases, of which it tells the number of tokens."""
    if not (program := find_program("sglang")):
        raise NotRun(tr("it is not installed"))
    with _server([program, "serve", "--model-path", str(folder)]) as url:
        chat = f"{url}/v1/chat/completions"
        return _prompts_of_server(
            cases, lambda body: int(_post(chat, {**body, "max_tokens": 1})["usage"]["prompt_tokens"])
        )


def _llama_cpp(folder: Path, cases: Sequence[Case]) -> Prompts:
    """Convert to GGUF, which keeps the vocabulary and the template, and ask llama.cpp's server."""
    program, command = llama_cpp.find_program("llama-server"), llama_cpp.converter()
    if not program:
        raise NotRun(tr("it is not installed"))
    if not command:
        raise NotRun(tr("its convert_hf_to_gguf.py is not on PATH"))
    with TemporaryDirectory() as scratch:
        try:
            file = llama_cpp.convert(command, folder, Path(scratch, "model.gguf"))
        except ModelError as error:
            raise NotRun(str(error)) from error
        longest = max(len(case.ids) for case in cases)
        with llama_server(program, file, context=2 * longest) as url:  # twice, to be safe
            return llama_prompts(url, cases)


def llama_server(program: str, file: Path, context: int) -> AbstractContextManager[str]:
    """Start llama.cpp's server with a GGUF file; the context manager's value is its address."""
    return _server([program, "-m", str(file), "--jinja", "--ctx-size", str(context), "--parallel", "1"])


def llama_prompts(url: str, cases: Sequence[Case]) -> Prompts:
    """Ask llama.cpp's server for the prompts of cases: the template applied, then tokenized."""

    def ask(body: dict[str, Any]) -> list[int]:
        """Return the ids of the prompt of a chat request."""
        prompt = _post(f"{url}/apply-template", body)["prompt"]
        asked = {"content": prompt, "add_special": True, "parse_special": True}  # as its chat does
        return [int(token) for token in _post(f"{url}/tokenize", asked)["tokens"]]

    return _prompts_of_server(cases, ask)


def llama_answer(url: str, prompt: Sequence[int], most: int) -> list[int]:
    """Return llama.cpp's greedy answer to a prompt, at most `most` tokens without the end's; NotRun if it fails."""
    body = {"prompt": list(prompt), "n_predict": most, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    try:  # on a CPU a large model answers slowly
        return [int(token) for token in _post(f"{url}/completion", body, _SLOW_S)["tokens"]]
    except (OSError, ValueError, KeyError) as error:
        raise NotRun(tr("it does not answer: {reason}", reason=error)) from error


ENGINES: dict[str, Callable[[Path, Sequence[Case]], Prompts]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "llama.cpp": _llama_cpp,
}
