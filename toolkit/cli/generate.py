"""Ask a model: one question, or every row of a file.

toolkit generate PATH prompt="…" [adapter=DIR] [key=value …]
toolkit generate PATH input=FILE output=FILE [adapter=DIR] [batch_size=8] [key=value …]

  PATH                  (or model.path=PATH) a run folder, an export, an official ChatGLM folder or any other model
                        folder; with adapter=DIR it may be left out
  adapter=DIR           an adapter that was trained on that model
  prompt=TEXT           the question; the answer alone goes to stdout
  input=FILE            questions: any file, folder or pattern that could be training data. A last answer of the
                        assistant is not given to the model, but kept as `reference`; rows need none
  format=, columns=     as under data.sources: format=messages 'columns={prompt: question}'
  output=FILE           JSON lines, one for each row in order: messages, answer, reference, prompt_tokens, tokens,
                        finish (stop, or length: cut at max_new_tokens), where; or error, if the row could not be asked.
                        Must not exist. Until all is there it is FILE.part, from which the same command goes on
  batch_size=8          questions at a time
  system=TEXT           system message for questions without one
  max_new_tokens=64     longest answer in tokens
  temperature=0         0 takes the likeliest token; above 0 tokens are drawn, among the likeliest that hold top_p=1 of
                        the probability or the top_k=0 likeliest (0: all), from seed=0
  model.family=NAME     only where nothing in the folder tells ChatGLM2 from ChatGLM3
  engine=deepspeed      through deepspeed.init_inference: started on several ranks, each holds a part of the model:
                        torchrun --nproc-per-node 2 -m toolkit generate PATH engine=deepspeed …
"""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.arguments import named_arguments, one_of, positive_int
from toolkit.cli.asking import MODEL, SAMPLING, check_model, check_system, sampling_of
from toolkit.config.preflight import check_columns
from toolkit.config.schema import RowFormat, SourceConfig
from toolkit.errors import ConfigError
from toolkit.messages import printable, say, tr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from toolkit.evaluate.answers import AnswerFile
    from toolkit.evaluate.generate import Sampling
    from toolkit.export.load import LoadedModel

ENGINES = ("transformers", "deepspeed")
USAGE = 'toolkit generate PATH prompt="…"'
_FOR_FILES = ("output", "format", "columns", "batch_size")


def run(words: list[str]) -> int:
    """Answer."""
    given = named_arguments(
        words,
        required=(),
        optional=(*MODEL, "prompt", "input", *_FOR_FILES, "system", *SAMPLING, "engine"),
        usage=USAGE,
        bare="model.path",
    )
    check_model(given, USAGE)
    is_split = one_of(given, "engine", ENGINES) == "deepspeed"
    if bool(given.get("prompt")) == bool(given.get("input")):
        raise ConfigError(tr('either prompt="…", or input=FILE and output=FILE.'))
    sampling = sampling_of(given, max_new_tokens=64)
    if given.get("input"):
        _ask_file(given, sampling, is_split)
    else:
        _ask(given, sampling, is_split)
    if is_split:
        from toolkit.distributed import process_group

        process_group.stop()
    return 0


def _ask(given: dict[str, str], sampling: "Sampling", is_split: bool) -> None:
    for name in _FOR_FILES:
        if name in given:
            raise ConfigError(tr("{name} has an effect with input=FILE only. Remove it.", name=name))
    usable = _load(given, is_split)
    from toolkit.distributed import process_group
    from toolkit.evaluate.answers import with_system
    from toolkit.evaluate.generate import decode_answer, generate

    messages = with_system([{"role": "user", "content": given["prompt"]}], given.get("system", ""))
    [ids] = generate(usable.model, usable.encoder, [usable.encoder.prompt(messages)], sampling, usable.model.device)
    if process_group.rank() == 0:
        print(printable(decode_answer(usable.encoder, ids)))


def _ask_file(given: dict[str, str], sampling: "Sampling", is_split: bool) -> None:
    if not given.get("output"):
        raise ConfigError(tr("{name} is missing: {usage}", name="output", usage="input=FILE output=FILE"))
    source = _source(given)
    batch_size = positive_int(given, "batch_size") or 8
    from toolkit.evaluate.answers import question_files, read_questions

    total = sum(1 for _ in read_questions(source))  # a broken file is told before the model loads
    from toolkit.distributed import process_group
    from toolkit.evaluate.answers import BATCHES, AnswerFile, answer_rows

    settings = _settings(given, question_files(source), batch_size)
    first = process_group.rank() == 0  # all ranks of engine=deepspeed compute the same; one writes
    opened = AnswerFile(Path(given["output"]), settings, batch_size * BATCHES) if first else contextlib.nullcontext()
    with opened as file:
        usable = _load(given, is_split)
        done = process_group.on_rank0(lambda: file.done if file else 0)
        found = answer_rows(
            usable.model,
            usable.encoder,
            read_questions(source),
            sampling,
            usable.model.device,
            batch_size=batch_size,
            system=given.get("system", ""),
            done=done,
        )
        _write(found, file, total, done)


def _write(found: "Iterator[list[dict[str, Any]]]", file: "AnswerFile | None", total: int, done: int) -> None:
    """Write answers as they come; ranks without a file only help to make them."""
    from tqdm import tqdm

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
    say(tr("wrote {file}: {rows} rows.", file=file.output, rows=f"{total:,}"))
    if cut:
        say(tr("{cut} of the {rows} now asked were cut at max_new_tokens.", cut=f"{cut:,}", rows=asked))
    if failed:
        say(
            tr(
                "{failed} of the {rows} now asked have no answer: their lines hold the error.",
                failed=f"{failed:,}",
                rows=asked,
            )
        )


def _load(given: dict[str, str], is_split: bool) -> "LoadedModel":
    from toolkit.export.load import load_any

    path, family, adapter = (given.get(name, "") for name in MODEL)
    if is_split:
        from deepspeed.accelerator import get_accelerator

        from toolkit.config.schema import DistributedConfig
        from toolkit.distributed import process_group
        from toolkit.evaluate.generate import split_inference

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            process_group.start(DistributedConfig())
        # In host memory until it is split: a part may fit onto a GPU where the whole does not.
        usable = load_any(
            path,
            adapter=adapter,
            family=family or "auto",
            dtype="fp32" if get_accelerator().device_name() == "cpu" else "bf16",
            device="cpu",
        )
        split_inference(usable.model)
    else:
        usable = load_any(path, adapter=adapter, family=family or "auto")
    check_system(usable.encoder, given.get("system", ""))
    return usable


def _source(given: dict[str, str]) -> SourceConfig:
    """Return the questions as a source of data.

    Raises:
        ConfigError: an unknown format, or columns that no format reads.
    """
    formats = [known.value for known in RowFormat]
    row_format = RowFormat(one_of(given, "format", formats))
    import yaml

    try:
        columns = yaml.safe_load(given.get("columns", "{}"))
    except yaml.YAMLError:
        columns = None
    if not isinstance(columns, dict) or not all(isinstance(value, str) for value in columns.values()):
        raise ConfigError(
            tr("columns = {text} is not of the form {{prompt: question, response: answer}}.", text=given["columns"])
        )
    source = SourceConfig(path=given["input"], format=row_format, columns=columns)
    if sentence := check_columns(source, "input"):
        raise ConfigError(sentence)
    return source


def _settings(given: dict[str, str], files: list[Path], batch_size: int) -> dict[str, Any]:
    """Return all that decides about the answers, so that no other command goes on with a file that was begun."""
    from toolkit.disk import sha256

    weights = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for folder in (given.get("model.path"), given.get("adapter"))
        if folder
        for path in sorted(Path(folder).rglob("*"))
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
    }
    chosen = {name: value for name, value in given.items() if name not in ("input", "output", "batch_size")}
    return {
        **chosen,
        "input": {str(path): sha256(path) for path in files},
        "batch_size": batch_size,
        "weights": weights,
    }
