"""What transformers calls the keys and values of earlier tokens: `cache` from 5.24 on, `past_key_values` before."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

OLDER = "past_key_values"
CACHE = "cache" if "cache" in {one.name for one in fields(CausalLMOutputWithPast)} else OLDER
"""The name here, of an argument and of an output."""


def cache_of(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache among the arguments of a forward pass, by either name; None if there is none."""
    found: Cache | None = arguments.get(CACHE)
    return arguments.get(OLDER) if found is None else found


def num_cached(arguments: Mapping[str, Any]) -> int:
    """Return how many tokens the cache of a forward pass holds already."""
    cache = cache_of(arguments)
    return 0 if cache is None else int(cache.get_seq_length())
