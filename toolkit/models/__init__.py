"""Models, tokenizers and chat formats for use from other programs; imported when first used, as not all need torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.models.load_weights import load_model as load_model
    from toolkit.models.save import save_model as save_model
    from toolkit.models.tokenizer_files import load_chat_encoder as load_chat_encoder, load_tokenizer as load_tokenizer

_MODULES = {
    "load_chat_encoder": "tokenizer_files",
    "load_model": "load_weights",
    "load_tokenizer": "tokenizer_files",
    "save_model": "save",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"toolkit.models.{_MODULES[name]}"), name)
