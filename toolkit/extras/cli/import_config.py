"""Convert another program's config into a recipe: LLaMA-Factory, axolotl, ms-swift, ChatGLM repositories, Trainer.

toolkit import-config FILE [DEEPSPEED.json] [world_size=8] [output=FILE.yaml]

  FILE             a YAML of LLaMA-Factory, axolotl, ms-swift, TRL or the finetuning demos of ChatGLM3 and GLM-4, a .sh
                   with the command (`swift sft …`, `trl sft …`, those of ChatGLM-6B, ChatGLM2-6B, Qwen, FastChat), a
                   JSON of Firefly, or TrainingArguments as JSON or YAML
  DEEPSPEED.json   its DeepSpeed JSON, unless FILE names one that exists on this machine
  world_size=8     number of GPUs that FILE was used with, if it does not state it (default 1): determines
                   batch.global_size
  output=FILE.yaml where to write; without it the recipe is printed, and notes go to standard error

Nothing is executed. Keys with a different meaning or without a counterpart are listed.
"""

import re
import sys
import textwrap

from toolkit.command_line import check_output, named_arguments, positive_int, write_output
from toolkit.config.paths import FILES
from toolkit.config.requirements import RULES
from toolkit.extras.translate import convert, read
from toolkit.messages import ConfigError, Problems, printable, tr
from toolkit.secrets import hide

_WIDTH = 118
_USAGE = "toolkit import-config FILE [DEEPSPEED.json] [world_size=8] [output=FILE.yaml]"


def run(words: list[str]) -> None:
    """Convert the files, write or print the recipe, and print what is not the same."""
    paths = [word for word in words if "=" not in word and not word.startswith("-")]
    named_words = [word for word in words if word not in paths]
    arguments = named_arguments(named_words, required=(), optional=("world_size", "output"), usage=_USAGE)
    if not 1 <= len(paths) <= 2:
        raise ConfigError("give one file, and its DeepSpeed JSON if it has one: {usage}", usage=_USAGE)
    check_output(arguments)
    output = arguments.get("output", "")
    config, deepspeed_json = read.read_all(paths, positive_int(arguments, "world_size"))
    converted = convert.convert(config, deepspeed_json)
    head, _, body = converted.text.partition("\n")  # Hydra's `# @package _global_` must be the first line
    text = hide(f"{head}\n{_header(config, converted, output)}\n{body}")
    report = _report(converted)
    if output:
        write_output(arguments, text)
        data = "" if converted.loaded.cfg.data.sources else " data=FILE.jsonl"
        print(report + tr("Wrote {file}. Next:  toolkit check recipe={file}{data}", file=output, data=data))
    else:
        print(text, end="")
        sys.stderr.write(report)


def _header(config: read.ForeignConfig, converted: convert.Converted, output: str) -> str:
    """Return the recipe's leading comment: the file it was made from, how to start it, and what is not the same."""
    name, ranks = output or "FILE.yaml", converted.world_size
    lines = [
        tr(
            "Made by `toolkit import-config` of {file} ({program}); number of ranks there: {ranks}.",
            file=config.shown,
            program=config.program,
            ranks=ranks,
        ),
        f"  deepspeed --num_gpus {ranks} run.py recipe={name}",
    ]
    for title, differences in _differences(converted):
        lines += [title, *(f"- {line}" for line in differences)] if differences else []
    comment_lines: list[str] = []
    for line in lines:
        wrapped = textwrap.wrap(printable(line), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        comment_lines += wrapped or [""]  # of an empty line `wrap` makes none
    return "\n".join(f"# {line}" for line in comment_lines)


def _differences(converted: convert.Converted) -> tuple[tuple[str, list[str]], ...]:
    """Return (title, lines) of what is assumed or missing, what differs and what is lost."""
    return (
        (tr("Assumed, or missing here:"), converted.gaps),
        (tr("Not quite the same here:"), converted.differs),
        (tr("Without counterpart, and training may differ for it:"), converted.lost),
    )


def _report(converted: convert.Converted) -> str:
    """Return the notes to print: what is assumed, differs, is lost, not needed, unknown, or missing on this machine."""
    problems = Problems()
    problems.apply((*FILES, *RULES), converted.loaded)
    # Without "FILE.yaml:LINE: " at their beginning: that is in a file that was removed again, or in a group.
    missing = [re.sub(r"^\S*\.yaml:\d+: ", "", str(error)) for error in problems.errors]
    parts = (
        *_differences(converted),
        (tr("Not needed here:"), converted.needless),
        (tr("Unknown, and ignored:"), converted.unknown),
        (tr("DeepSpeed and data:"), converted.notes),
        (tr("Not here yet, says `toolkit check`:"), missing),
    )
    lines = []
    for title, texts in parts:
        lines += [title, *(f"  {line}" for line in texts), ""] if texts else []
    return hide(printable("\n".join(lines))) + ("\n" if lines else "")
