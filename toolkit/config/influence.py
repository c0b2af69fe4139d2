"""What a key of the config influences, and so whether a run may be resumed after it has changed.

Each field of the schema declares it as its metadata; a section's holds for all its keys. A field that declares nothing
decides about what is computed: a new key is rejected on resume until it says otherwise.
"""

import dataclasses
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any


class Influence(Enum):
    """What changes with a key."""

    result = "what is computed: rejected, unless `checkpoint.allow_changes` names the key"
    free = "where and how work is done, what is written and shown: may change"
    content = "what data is read: may change, as the fingerprint of the tokenized data is compared instead"
    trained = "which parameters are trained: rejected, as a checkpoint holds those and no others"


def _declares(influence: Influence) -> Mapping[str, Influence]:
    return {"influence": influence}


FREE, BY_CONTENT, TRAINED = map(_declares, (Influence.free, Influence.content, Influence.trained))
"""Metadata of fields."""


def influence_of(key: str, schema: type) -> Influence:
    """Return what a dotted key influences: what its field declares, else the nearest section that it is in.

    Args:
        key: such as optim.lr; one that the schema does not know decides about what is computed.
        schema: the dataclass of the whole config.
    """
    found, kind = Influence.result, typing.cast("Any", schema)
    for part in key.split("."):
        if not dataclasses.is_dataclass(kind):
            break  # inside a list or a mapping
        field = next((one for one in dataclasses.fields(kind) if one.name == part), None)
        if field is None:
            return Influence.result
        found = field.metadata.get("influence", found)
        kind = typing.get_type_hints(kind)[part]
    return found
