"""Show samples as training sees them: which tokens are trained, what was skipped, how long they are.

toolkit show recipe=NAME [n=5] [split=train] [color=auto] [key=value …]
toolkit show runs/NAME/logs/bad-step-N.jsonl [n=5] [color=auto]    the samples of a skipped step

  n=5          samples to show (sequences, with data.packing); 0 shows the counts only
  split=train  train or validation
  color=auto   always, never, or auto: colour on a terminal (unless NO_COLOR is set), brackets elsewhere
"""

from pathlib import Path

from toolkit.arguments import parse_checked
from toolkit.command_line import named_arguments, non_negative_int, one_of
from toolkit.config.hub import resolve_model_path
from toolkit.messages import ConfigError, say, tr

COLORS = ("auto", "always", "never")


def run(words: list[str]) -> None:
    """Print samples of a recipe's prepared data, or those of a step that was skipped."""
    from toolkit.data import preview

    if words and words[0].endswith(".jsonl") and "=" not in words[0]:
        usage = "toolkit show runs/NAME/logs/bad-step-N.jsonl n=5 color=auto"
        settings = named_arguments(words[1:], required=(), optional=("n", "color"), usage=usage)
        count, color = non_negative_int(settings, "n", 5), one_of(settings, "color", COLORS)
        say("\n".join(preview.bad_step_lines(Path(words[0]), count, preview.style_of(color))))
        return
    arguments = parse_checked(words, names=("n", "split", "color"))
    count = non_negative_int(arguments.values, "n", 5)
    split = one_of(arguments.values, "split", ("train", "validation"))
    color = one_of(arguments.values, "color", COLORS)
    cfg = resolve_model_path(arguments.loaded).cfg
    from toolkit.tasks.language_data import load_data

    prepared = load_data(cfg)
    cache, plan = prepared.train, prepared.train_plan
    if split == "validation":
        if prepared.validation is None or prepared.validation_plan is None:
            raise ConfigError(tr("this recipe has no validation data: show split=train."))
        cache, plan = prepared.validation, prepared.validation_plan
    # Samples of the training data that were taken for validation, where it has no data of its own.
    held_out = 0 if cfg.data.validation or prepared.validation is None else len(prepared.validation)
    counts = preview.count_lines(cfg, prepared.report, prepared.packing, cache, plan, held_out)
    samples = preview.sample_lines(
        cfg, prepared.tokenizer, prepared.packing, cache, plan, count, preview.style_of(color)
    )
    say("\n".join([*counts, *samples]))
