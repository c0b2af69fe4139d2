"""What is wrong with a row that is not JSON, in words of the file, not of Python's parser. Read in errors alone."""

import json

from toolkit.messages import RowError, tr

_WIDE = "“”„‘’＂＇｛｝［］：，、"
"""Characters that stand for those of JSON in texts, and that input methods and word processors write."""


def json_error(error: ValueError | RecursionError) -> RowError:
    """Return the RowError that explains an error of parsing JSON; its positions count from 1 within the line."""
    if isinstance(error, UnicodeDecodeError):
        content, start = error.object, error.start
        return RowError(
            "not UTF-8: byte 0x{byte} at position {position} of the line. If the file is in GBK, convert it: "
            "`iconv -f GB18030 -t UTF-8 FILE > NEW`",
            byte=f"{content[start]:02x}",
            position=start - content.rfind(b"\n", 0, start),
        )
    if isinstance(error, json.JSONDecodeError):
        return _syntax_error(error)
    if isinstance(error, RecursionError):
        return RowError(tr("the JSON is nested too deeply. Correct or remove the row"))
    return RowError("broken JSON: {reason}. Correct or remove the row", reason=error)


def _syntax_error(error: json.JSONDecodeError) -> RowError:
    """Return the RowError that explains a syntax error: of what a user most likely did, judged by the text before the
    error and from there on (`after`), else of what the parser says. Its column counts from 1 within the line.
    """
    before, after, column = error.doc[: error.pos].rstrip(), error.doc[error.pos :], error.colno
    is_one_line = "\n" not in error.doc.strip()
    if after.strip() == "," and before[-1:] == "}":
        return RowError(tr("the line ends with a comma, as in a JSON list: remove it, JSONL has none"))
    if after[:1] == "'":
        return RowError(tr("broken JSON: texts stand in double quotes, not in single ones as in Python"))
    if after[:1] and after[0] in _WIDE:
        return RowError(
            "broken JSON at column {column}: '{character}' is no character of JSON, which has \" {{ }} [ ] : , alone",
            column=column,
            character=after[0],
        )
    if error.msg == "Extra data" and before[-1:] == "}" and after.lstrip(" ,\t")[:1] == "{":
        return RowError("several rows on one line, the second at column {column}. Write each on its own", column=column)
    if not after.strip() and before[:1] == "{" and is_one_line:
        return RowError(
            tr(
                "the line ends before its row does: a }} or ] is missing. If the JSON is indented, unite its lines: "
                "`jq -c . FILE > NEW`"
            )
        )
    looks_like_table = after[:1].isalpha() and ("," in after or "\t" in after)
    if not before and looks_like_table and is_one_line:
        return RowError(tr("the line is no JSON. If the file is a table, name it .csv (commas) or .tsv (tabs)"))
    return RowError(
        "broken JSON at column {column}: {reason}. A file holds one {{…}} per line, or one list [{{…}}, …]",
        column=column,
        reason=_reasons().get(error.msg, error.msg),
    )


def _reasons() -> dict[str, str]:
    """Return message of Python's parser -> what is wrong, in words of the file."""
    return {
        "Expecting value": tr("a value is missing, or is not JSON"),
        "Expecting ',' delimiter": tr('a comma is missing, or a \\ before a " in a text'),
        "Expecting ':' delimiter": tr("a colon is missing after a key"),
        "Expecting property name enclosed in double quotes": tr("a key in double quotes is missing"),
        "Expecting ',' or ']'": tr("a comma or ] is missing after a row"),
        "Extra data": tr("something follows the end of the JSON"),
        "Unterminated string starting at": tr("a text has no closing quote"),
        "Invalid control character at": tr("a line break or tab in a text is to be written \\n or \\t"),
        "Invalid \\escape": tr("a backslash in a text is to be written twice"),
        "Invalid \\uXXXX escape": tr("a \\u in a text needs four hexadecimal digits"),
    }
