"""`toolkit export-gguf`: a trained model as a GGUF file with Ollama's Modelfile, checked by llama.cpp's own server.

llama.cpp converts and quantizes. What it wrote is compared with the export: the header, the prompts of conversations
token by token, and greedy answers with those of this toolkit. Without llama.cpp the Modelfile names the model
directory, which Ollama converts itself for many architectures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from toolkit import disk
from toolkit.config.context_length import position_limit
from toolkit.config.schema import TrainOn
from toolkit.data import preview
from toolkit.evaluate.generate import Sampling, generate
from toolkit.evaluate.servable import resolve_servable
from toolkit.export.convert import export_verified
from toolkit.export.load import load_any
from toolkit.export.write import ExportOptions, scratch_directory
from toolkit.extras import llama_cpp, modelfile, serving
from toolkit.extras.serving import FAILED, PASSED, SKIPPED, Case, Finding
from toolkit.messages import CheckpointError, ConfigError, clauses, tr
from toolkit.models import adapters
from toolkit.models.chat import AnyChatEncoder
from toolkit.models.directory import Architecture, architecture_of, read_config, read_json_or_empty, saved_template
from toolkit.models.tokenizer_files import load_chat_encoder

_CONTEXT = 4096
"""Context window without a longer training: Ollama's on GPUs of less than 24 GiB."""
_ANSWERS, _ANSWER_TOKENS = 4, 24
_TIE = 0.2
"""Standard deviations of the logits by which two tokens may differ where another precision chooses the other one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufOptions:
    """How a GGUF file is written."""

    kind: str = "auto"
    """Type of the weights: one of `llama_cpp.CONVERTED`, or one of llama-quantize's, such as Q4_K_M."""
    checkout: str = ""
    """Directory of llama.cpp; "" looks for its programs on PATH."""
    base: str = ""
    """Directory of the base model of an adapter; "" finds it."""
    system: str = ""
    """System message of conversations that bring none."""
    context: int = 0
    """Context window in tokens; 0: that of the training, at least `_CONTEXT`."""
    trained_length: int = 0
    """Longest sequence of the training; 0 if it is unknown."""
    check: bool = True
    """Compare the file with the model by llama.cpp's server, where it is installed."""


class Result(NamedTuple):
    """What was written."""

    source: Path
    """The GGUF file, or the model directory if llama.cpp is not installed."""
    modelfile: Path
    findings: list[Finding]
    imported_by_ollama: bool
    """Whether Ollama converts this architecture itself."""


def export_gguf(path: Path, output: Path, name: str, options: GgufOptions) -> Result:
    """Write a GGUF file and a Modelfile to the directory `output`, which must not exist. `path`: a run, checkpoint,
    adapter or model directory; an adapter is merged. `name`: that of the file, without its type. CheckpointError if
    llama.cpp does not compute or prompt as the export does; then nothing is left.
    """
    command = llama_cpp.converter(options.checkout)
    if options.checkout and command is None:
        raise ConfigError(
            "llama_cpp = {folder} has no {name}. Name a checkout of https://github.com/ggml-org/llama.cpp.",
            folder=options.checkout,
            name=llama_cpp.CONVERTERS[0],
        )
    quantizer = _quantizer(options)
    kind = "auto" if quantizer else options.kind  # what the converter writes, for llama-quantize or as the result
    with scratch_directory(output) as scratch, _model_directory(path, scratch, options.base) as folder:
        content = scratch / "content"
        content.mkdir()
        encoder, config = load_chat_encoder(folder), read_config(str(folder))
        findings: list[Finding] = []
        if command is None:  # no llama.cpp: Ollama is to convert the model directory
            source = folder
            if scratch in folder.parents:  # merged here: Ollama reads it from the output
                source = folder.rename(content / "model")
        else:
            # The converter writes the type that it has chosen in place of {ftype}.
            source = llama_cpp.convert(command, folder, content / f"{name}-{{ftype}}.gguf", kind)
            if quantizer:
                full, source = source, content / f"{name}-{options.kind}.gguf"
                llama_cpp.quantize(quantizer, full, source, options.kind)
                full.unlink()
            findings = check(source, folder, encoder, config, options)
        from_line = f"./{source.name}" if content in source.parents else str(source.resolve())
        model_folder = folder if folder.exists() else source  # a merged one was renamed to it
        text = _modelfile(from_line, model_folder, encoder, config, options)
        (content / "Modelfile").write_text(text, encoding="utf-8")
        if failed := [finding for finding in findings if finding.state == FAILED]:
            raise CheckpointError(
                "llama.cpp does not serve {file} as the model was trained: {findings}. Nothing was written; check=no "
                "writes it all the same.",
                file=source.name,
                findings=clauses("; ".join([item.check, item.text, *item.details[:1]]) for item in failed),
            )
        content.rename(output)  # last, so that `output` is complete or does not exist
        disk.flush(output.parent)
    source = output / source.name if content in source.parents else source
    known_to_ollama = set(config.get("architectures") or ()) & set(modelfile.CONVERTS)
    return Result(source, output / "Modelfile", findings, bool(known_to_ollama))


def _quantizer(options: GgufOptions) -> str | None:
    """Return llama-quantize's path, None if the type needs none; ConfigError if there is no such type or program."""
    if options.kind in llama_cpp.CONVERTED:
        return None
    if not llama_cpp.is_quantized_type(options.kind):
        raise ConfigError(
            "type = {kind} is no type of GGUF: {known}, or one of llama-quantize's, such as Q4_K_M.",
            kind=options.kind,
            known=", ".join(llama_cpp.CONVERTED),
        )
    if program := llama_cpp.find_program("llama-quantize", options.checkout):
        return program
    raise ConfigError(
        "type = {kind} needs llama.cpp's llama-quantize, which is neither on PATH nor in llama_cpp=DIR. Without it: "
        "{known}.",
        kind=options.kind,
        known=", ".join(llama_cpp.CONVERTED),
    )


@contextmanager
def _model_directory(path: Path, scratch: Path, base: str) -> Iterator[Path]:
    """Yield the directory that llama.cpp converts: the export itself, or a copy in `scratch`: an adapter or checkpoint
    as a whole model, GLM in the layout of its official repository. `base`: as `GgufOptions.base`.
    """
    is_run = (path / "export").is_dir() and not (path / "config.json").is_file()
    export = path / "export" if is_run else path
    is_adapter = adapters.is_adapter(export)
    is_model = not is_adapter and (export / "config.json").is_file()
    if not is_model:
        merged = scratch / "merged"
        export_verified(export if is_adapter else path, merged, ExportOptions(merge=is_adapter), base=base)
        export = merged
    config = read_config(str(export))
    if config.get("model_type") == "glm":  # of transformers' layout the converter takes wrong rotary settings and sizes
        export_verified(export, scratch / "official", ExportOptions(format="official"))
        export = scratch / "official"
    elif is_model and architecture_of(config) is not Architecture.glm:  # the official layout is converted as it is
        export = resolve_servable(export)
    yield export


def _modelfile(source: str, folder: Path, encoder: AnyChatEncoder, config: dict[str, Any], options: GgufOptions) -> str:
    """Return the Modelfile of a model in `folder`, with its chat `encoder` and config.json; ConfigError if
    `options.context` is more than the model's positions. `source`: the GGUF file's name, for the line FROM.
    """
    tokenizer = encoder.tokenizer
    bos = tokenizer.bos_token or ""
    # llama.cpp puts the token that begins a prompt in front as the tokenizer does: the template must not repeat it.
    adds_bos = bool(bos) and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
    turns = None
    render = getattr(encoder, "render", None)
    if render is not None and "strftime_now" not in str(encoder.tokenizer.chat_template):  # it would stay today's date
        turns = modelfile.find_turns(lambda messages: str(render(messages, None, True)), bos if adds_bos else "")
    limit = position_limit(config)
    context = options.context or max(_CONTEXT, options.trained_length)
    if limit and options.context > limit:
        raise ConfigError("context = {context}: the model has {limit} positions.", context=context, limit=limit)
    return modelfile.modelfile(
        source,
        turns,
        bos=bos if adds_bos else "",
        system=options.system,
        context=min(context, limit or context),
        stops=[str(tokenizer.convert_ids_to_tokens(token)) for token in dict.fromkeys(encoder.stop_ids)],
        sampling=read_json_or_empty(folder / "generation_config.json"),
    )


def check(
    file: Path, folder: Path, encoder: AnyChatEncoder, config: dict[str, Any], options: GgufOptions
) -> list[Finding]:
    """Compare a GGUF file with the model directory (`folder`) it was made from: its header, and by llama.cpp's server
    prompts and greedy answers. `encoder`, `config`: the model's chat encoder and config.json.
    """
    findings = [_check_header(llama_cpp.read_header(file), folder, encoder, config)]
    program = llama_cpp.find_program("llama-server", options.checkout)
    if not options.check or not program:
        reason = tr("llama-server is not installed") if options.check else "check=no"
        return [*findings, Finding(tr("prompts and answers by llama.cpp"), SKIPPED, reason)]
    named = ((f"{number}", talk) for number, talk in enumerate(serving.built_in_conversations(), start=1))
    cases, left_out = serving.trained_answers(encoder, named, TrainOn.auto)
    note = serving.note_of(left_out)
    longest = max(len(case.ids) for case in cases) + _ANSWER_TOKENS
    served = serving.Served(folder, encoder, cases, preview.BRACKETS)
    short = sorted(cases, key=lambda case: case.start)[:_ANSWERS]  # those that are answered
    try:
        with serving.llama_server(program, file, context=2 * longest) as url:  # twice, to be safe
            prompts = serving.llama_prompts(url, cases)
            findings.append(serving.compare_prompts(served, "llama.cpp", prompts, [], note))
            answers = [serving.llama_answer(url, case.ids[: case.start], _ANSWER_TOKENS) for case in short]
    except serving.NotRun as error:
        return [*findings, Finding(tr("greedy answers by llama.cpp"), SKIPPED, str(error))]
    is_exact = options.kind in llama_cpp.CONVERTED[:4]  # all but q8_0, which is quantized
    return [*findings, _check_answers(folder, short, answers, is_exact)]


def _check_header(header: dict[str, Any], folder: Path, encoder: AnyChatEncoder, config: dict[str, Any]) -> Finding:
    """Check the chat template, end token and context window in a file's header."""
    wrong = []
    template = saved_template(folder)
    if isinstance(template, str) and header.get("tokenizer.chat_template") != template:
        wrong.append(tr("its chat template is another than the export's"))
    # llama.cpp ends an answer at any of these: end of sequence, of turn, of message.
    ends = {header.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    if not ends & {*encoder.stop_ids}:
        wrong.append(tr("it ends answers with {found}, training with {trained}", found=ends, trained=encoder.stop_ids))
    length = header.get(f"{header.get('general.architecture')}.context_length")
    # With and without a stretched context, and as ChatGLM's config.json names it.
    limits = {position_limit(config), config.get("max_position_embeddings"), config.get("seq_length")}
    allowed: set[Any] = limits - {None}
    if allowed and length not in allowed:
        wrong.append(tr("context window {found}, config.json has {trained}", found=length, trained=sorted(allowed)))
    return Finding(tr("header of the GGUF file"), FAILED if wrong else PASSED, tr("template, end, context"), wrong)


def _check_answers(folder: Path, cases: Sequence[Case], answers: Sequence[list[int]], is_exact: bool) -> Finding:
    """Compare llama.cpp's greedy `answers` (token ids, by case) with the toolkit's own. Where they differ first, the
    two tokens must be nearly as likely, if the weights were not quantized (`is_exact`): sums in another order may then
    choose the other one, after which the answers say different things.
    """
    loaded = load_any(str(folder))
    sampling = Sampling(max_new_tokens=_ANSWER_TOKENS)
    equal, gaps = 0, [0.0]  # gaps: how much less likely each first different token is, in standard deviations
    for case, theirs in zip(cases, answers, strict=True):
        prompt = case.ids[: case.start]
        [ours] = generate(loaded.model, loaded.encoder, [prompt], sampling, loaded.model.device)
        if ours == theirs:
            equal += 1
            continue
        differences = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        common = next(differences, min(len(ours), len(theirs)))  # tokens before the first difference
        with torch.no_grad():
            ids = torch.tensor([prompt + ours[:common]], device=loaded.model.device)
            logits = loaded.model(input_ids=ids).logits[0, -1].float()
        their_tokens = theirs[common : common + 1] or loaded.encoder.stop_ids  # the one, or those that end an answer
        their_logit = max(logits[token] for token in their_tokens)
        gaps.append(float((logits.max() - their_logit) / logits.std()))
    counts = {"equal": equal, "all": len(cases), "gap": f"{max(gaps):.2f}"}
    text = tr("{equal} of {all} equal to `toolkit generate`, token for token", **counts)
    if equal < len(cases):
        text += tr("; the first different tokens are at most {gap} standard deviations of the logits apart", **counts)
    is_wrong = is_exact and max(gaps) > _TIE
    return Finding(tr("greedy answers by llama.cpp"), FAILED if is_wrong else PASSED, text)
