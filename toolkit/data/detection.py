"""Which format a file's rows have, by the keys of the first one; and the error for keys that belong to none."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.config.schema import RowFormat
from toolkit.config.suggest import COLUMNS_MEANT
from toolkit.data.formats import LIST_FIELDS, PAIR_FIELDS, check_trainable
from toolkit.data.message_lists import METADATA
from toolkit.data.readers import Block, DataFile, rows_of
from toolkit.data.rows import as_object, parse_line, quoted_keys
from toolkit.messages import DataError, RowError, tr

_WORD = re.compile(r"(?!(?:true|false|null|yes|no|on|off|nan|inf)$)[^\W\d]\w*", re.IGNORECASE)


def with_detected_format(file: DataFile, block: Block) -> DataFile | None:
    """Return the file with the format that its first row shows; None if no row can be parsed, DataError if unknown."""
    try:
        line, row = first_row(block)
    except RowError:
        return None
    if not isinstance(row, dict):
        # Not an object: a reader of any format rejects it with the clearest error.
        return replace(file, row_format=RowFormat.prompt_response)
    try:
        row_format = detect_format(row, file.columns)
    except RowError as error:  # the whole file is meant, so skipping rows would not help
        raise DataError("{place}: {reason}.", place=f"{file.path}:{line}", reason=error) from None
    return replace(file, row_format=row_format)


def first_row(block: Block) -> tuple[int, object]:
    """Return (line number, row) of a block's first object, else of its first row; RowError if none can be parsed."""
    failure: RowError | None = None
    not_an_object: tuple[int, object] | None = None
    for offset, row in rows_of(block):
        try:
            value = parse_line(row) if isinstance(row, bytes) else row
        except RowError as error:
            failure = failure or error
            continue
        if isinstance(value, dict):
            return block.first + offset, value
        not_an_object = not_an_object or (block.first + offset, value)
    if not_an_object:
        return not_an_object
    raise failure or RowError(tr("no key at all"))


def detect_format(row: Mapping[str, object], columns: Mapping[str, str]) -> RowFormat:
    """Return the format of a file by the keys of its first row; RowError if it is none, or not to be trained on.
    `columns`: field -> the file's key.
    """

    def has(field: str) -> bool:
        return columns.get(field, field) in row

    check_trainable(row, columns)
    if _is_table(row):
        raise RowError(
            "a whole table in one object ({keys}), as pandas' to_json() writes it. Write one row per "
            "line:  to_json(FILE, orient='records', lines=True, force_ascii=False)",
            keys=quoted_keys(row),
        )
    for row_format, field in LIST_FIELDS.items():
        if has(field):
            return row_format
    for are_enough in (all, any):  # first the formats both of whose fields are there, then those with one of them
        for row_format, fields in PAIR_FIELDS.items():
            if are_enough(map(has, fields)):
                return row_format
    if has("text"):
        return RowFormat.text
    as_object(row)  # raises if a CSV's first row has more fields than names
    absent = [key for key in columns.values() if key not in row]
    if absent:
        raise RowError(
            "`columns` names '{name}', but the row has {keys}. Write {columns} or the like",
            name=absent[0],
            keys=quoted_keys(row),
            columns=columns_for(row),
        )
    raise RowError(
        "the keys {keys} belong to no known format. Known are prompt, response (history); query, response; "
        "instruction, output (input, history); conversations; messages; conversation; text. Say which is which: add "
        "{columns} to the command line",
        keys=quoted_keys(row),
        columns=columns_for(row),
    )


def _is_table(row: Mapping[str, object]) -> bool:
    """Whether a row is a whole table, as pandas' to_json() writes it: column -> {row number: value}, row number ->
    {column: value}, or column -> list of plain values.
    """
    values = list(row.values())
    has_one_type = len({type(value) for value in values}) == 1
    if len(row) < 2 or not has_one_type:
        return False
    dicts = [value for value in values if isinstance(value, dict)]
    if dicts:
        return any(keys and all(str(key).isdecimal() for key in keys) for keys in [row, *dicts])  # row numbers
    lists = [value for value in values if isinstance(value, list)]
    return any(lists) and not any(isinstance(item, dict | list) for value in lists for item in value)  # not all empty


def columns_for(row: Mapping[str, Any]) -> str:
    """Return a `columns` argument, quoted for a shell, that guesses from names and order what a row's keys mean, such
    as `'columns={prompt: question, response: answer}'`.
    """
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    all_texts = [key for key, value in row.items() if isinstance(value, str)]
    # `label` is metadata of messages, but of rows a usual name of the answer (COLUMNS_MEANT).
    texts = [key for key in all_texts if key.lower() not in METADATA - {"label"}] or all_texts or list(row)
    if lists:
        columns = {"messages": lists[0]}
    elif len(texts) == 1:
        columns = {"text": texts[0]}
    else:
        # A field gets the key with one of its usual names, else the next key that no field has got by its name.
        by_name = {
            field: next((key for key in texts if key.lower() in names), "") for field, names in COLUMNS_MEANT.items()
        }
        other_keys = iter([key for key in texts if key not in by_name.values()])
        columns = {field: key or next(other_keys, "…") for field, key in by_name.items()}
    quoted = {key: key if _WORD.fullmatch(key) else json.dumps(key, ensure_ascii=False) for key in columns.values()}
    return shlex.quote(f"columns={{{', '.join(f'{field}: {quoted[key]}' for field, key in columns.items())}}}")
