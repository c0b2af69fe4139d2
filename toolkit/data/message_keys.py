"""Keys of a message that no format reads: metadata is counted, and what holds text is an error, lest it vanish."""

from collections.abc import Iterator, Mapping

from toolkit.errors import RowError
from toolkit.messages import tr

METADATA = frozenset(
    {
        *("id", "uuid", "message_id", "parent_id", "conversation_id", "tool_call_id", "turn_id", "turn_identifier"),
        *("index", "rank", "score", "name", "author", "source", "model", "model_name", "metadata", "header"),
        *("timestamp", "time", "date", "created_at", "create_time", "update_time"),
        *("lang", "language", "country", "state", "hashed_ip", "status", "tag", "tags", "label", "category"),
    }
)
"""Keys that data sets hang on messages and that no model is meant to learn, whatever they hold."""


_READ = {
    "assistant": ("loss", "weight", "tool_calls", "metadata"),
    "call": ("loss", "weight", "name", "parameters", "observation"),
}
"""Keys that are read besides role and text, by role; "call" is an item that holds a call and its result."""


def unread_keys(item: Mapping[str, object], role: str, speaker: str, said: str) -> Iterator[str]:
    """Yield the keys of a message that are skipped: metadata, and whatever holds no text of its own.

    Args:
        item: the message as it stands in its file.
        role: who speaks, see `_READ`.
        speaker: the key of the role.
        said: the key of the text; the same text under another key is not lost.

    Raises:
        RowError: another key holds text, a list or an object, such as `reasoning_content`.
    """
    read = (speaker, said, *_READ.get(role, ("loss", "weight")))
    for key, value in item.items():
        if key in read:
            continue
        has_text = bool(value.strip()) if isinstance(value, str) else isinstance(value, (list, dict)) and bool(value)
        if has_text and key not in METADATA and value != item.get(said):
            raise RowError(
                tr(
                    "the key '{key}' is not read, and what it holds would be lost. Write it into the message's text "
                    "(reasoning as the model writes it, for example <think>…</think> before the answer), calls into "
                    "the assistant's 'tool_calls', tools into the row's 'tools', or remove the key",
                    key=key[:40],
                )
            )
        yield key
