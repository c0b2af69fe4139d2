"""Write an HTML report of a dataset: duplicates, leftovers of templates, declined answers, lengths, turns, scripts.

toolkit data-report DATA [output=FILE.html] [format=auto] [workers=N]
toolkit data-report recipe=NAME [output=FILE.html] [key=value …]

  DATA           a file, a directory or a glob, as data.sources takes them
  recipe=NAME    the recipe's training and validation data; they are tokenized too (or their cache is opened), for the
                 share of trained tokens, and the tokenizer's control tokens are looked for
  output=FILE    the page; default: data-report.html here. A report that is there is replaced, any other file is left
  workers=N      processes; default: one for each core
"""

from pathlib import Path

from toolkit.arguments import parse_checked
from toolkit.command_line import named_arguments, one_of, positive_int
from toolkit.config import hub, schema
from toolkit.config.files import known_recipes
from toolkit.messages import say

OUTPUT = "data-report.html"


def run(words: list[str]) -> None:
    """Inspect a data file, or a recipe's data, and write the report's HTML page."""
    first = words[0] if words else ""
    is_file_of_recipe = first.endswith((".yaml", ".yml"))
    is_name_of_recipe = first in known_recipes() and not Path(first).exists()
    # Without words, too: `parse_checked` says that the recipe is missing.
    is_recipe = not words or "=" in first or is_file_of_recipe or is_name_of_recipe
    control_strings: list[str] = []  # the tokenizer's; of a file alone none is known
    tokenizing_report = None  # likewise
    if not is_recipe:
        optional = ("output", "format", "workers")
        usage = "toolkit data-report DATA"
        values = named_arguments(words, required=("path",), optional=optional, usage=usage, bare="path")
        row_format = schema.RowFormat(one_of(values, "format", [choice.value for choice in schema.RowFormat]))
        source = schema.SourceConfig(path=values["path"], format=row_format)
        data, cache_dir = schema.DataConfig(sources=[source]), Path()
    else:
        arguments = parse_checked(words, names=("output", "workers"))
        values, cfg = arguments.values, hub.resolve_model_path(arguments.loaded).cfg
        data, cache_dir = cfg.data, Path(cfg.prepare.dir)
    output = Path(values.get("output") or OUTPUT)
    from toolkit.report.page import check_output  # only now: what draws takes a second to import

    check_output(output)
    if is_recipe:
        from toolkit.tasks.language_data import load_data

        loaded = load_data(cfg)
        tokenizing_report = loaded.report
        control_strings = [str(token) for token in loaded.tokenizer.all_special_tokens]
    from toolkit.data.sources import locate_all, row_limits
    from toolkit.disk import write_atomically
    from toolkit.extras.data_report import data_page, inspect_files

    files = locate_all(data, cache_dir)
    facts = inspect_files(files, control_strings, positive_int(values, "workers") or 0, row_limits(data, files))
    page = data_page(values.get("path") or cfg.recipe, facts, files, tokenizing_report)
    write_atomically(output, page.encode("utf-8", errors="backslashreplace"))
    say("The data report: {file}", file=output)
