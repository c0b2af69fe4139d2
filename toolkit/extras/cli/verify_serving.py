"""Verify that servers give an export the prompts of training: also logits, calls, stop tokens, config fields.

toolkit verify-serving PATH [programs=all|none|vLLM,SGLang,llama.cpp] [color=auto]

  PATH           a run directory with an export, or an export. In a run its own encoder is compared, on its validation
                 conversations (else its training data) and a built-in set; elsewhere that of the directory, on that set
  programs=all   beside transformers, which always answers in a process that imports nothing of the toolkit, start these
                 where they are installed; none starts no server
  color=auto     always, never, or auto: colour on a terminal (unless NO_COLOR is set), brackets elsewhere

Differing prompts are shown token by token: red (or [-…-]) is what training has, green (or {+…+}) what a server would
feed. Exit code 0 if nothing failed, 74 otherwise; what was not checked is listed as such. export.require_serving=true
does the same, with transformers alone, at the end of a run.
"""

import sys
from pathlib import Path

from toolkit.arguments import parse
from toolkit.cli.show import COLORS
from toolkit.command_line import named_arguments, one_of
from toolkit.config import files
from toolkit.config.hub import resolve_model_path
from toolkit.messages import CheckpointError, ConfigError, say

USAGE = "toolkit verify-serving PATH"


def run(words: list[str]) -> None:
    """Run all checks of an export and print them; CheckpointError if one fails."""
    settings = named_arguments(words, required=("path",), optional=("programs", "color"), usage=USAGE, bare="path")
    path, color = Path(settings["path"]), one_of(settings, "color", COLORS)
    files.check_directory(path)
    # `path` is a run, or the export in one; else there is no recipe.
    recipe_files = (path / "config.yaml", path.absolute().parent / "config.yaml")
    recipe = next((file for file in recipe_files if file.is_file()), None)
    if recipe is not None:
        language = [word for word in words if word.startswith("language=")]  # in place of the recipe's
        cfg = resolve_model_path(parse([str(recipe), *language]).loaded).cfg
    import transformers

    from toolkit.config.schema import TrainOn
    from toolkit.data.preview import style_of
    from toolkit.evaluate.servable import resolve_servable
    from toolkit.extras import serving
    from toolkit.models import load, trainable
    from toolkit.models.tokenizer_files import load_chat_encoder
    from toolkit.tasks.language_data import build_encoder

    transformers.utils.logging.disable_progress_bar()
    folder = resolve_servable(path)
    trainable.check_generates_text(load.load_empty(folder), folder)
    programs = _programs(settings.get("programs", "all"), list(serving.ENGINES))
    if recipe is None:
        say(
            "{folder} is in no run directory: what trained it is unknown. Its own tokenizer, as it is read here, is "
            "compared.",
            folder=folder,
        )
        encoder, conversations, train_on = load_chat_encoder(folder), [], TrainOn.auto
    else:
        encoder, train_on = build_encoder(cfg), cfg.data.train_on
        conversations = serving.held_conversations(cfg.data, Path(cfg.prepare.dir))
    findings = serving.verify_serving(
        folder, encoder, conversations, train_on=train_on, programs=programs, style=style_of(color)
    )
    sys.stdout.write("\n".join(serving.lines_of(findings)) + "\n")
    failed = [finding for finding in findings if finding.state == serving.FAILED]
    if failed:
        raise CheckpointError(
            "{folder} is not served as it was trained: {count} of {total} checks failed ({checks}).",
            folder=folder,
            count=len(failed),
            total=len(findings),
            checks=", ".join(finding.check for finding in failed),
        )
    unchecked = sum(finding.state == serving.SKIPPED for finding in findings)
    say(
        "{folder}: {passed} checks passed, {unchecked} could not be made.",
        folder=folder,
        passed=len(findings) - unchecked,
        unchecked=unchecked,
    )


def _programs(names: str, engines: list[str]) -> list[str]:
    """Return the servers that `programs=` means, spelled as in `engines`; ConfigError if one is unknown."""
    if names in ("all", "none"):
        return engines if names == "all" else []
    engine_of = {name.lower(): name for name in engines}
    if wrong := [name for name in names.split(",") if name.lower() not in engine_of]:
        raise ConfigError(
            "programs = {value}: unknown {names}. Known: {known}.",
            value=names,
            names=", ".join(wrong),
            known=", ".join(["all", "none", *engines]),
        )
    return [engine_of[name.lower()] for name in names.split(",")]
