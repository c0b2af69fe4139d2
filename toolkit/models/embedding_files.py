"""Files by which sentence-transformers loads an exported embedding model."""

import json
from pathlib import Path

from toolkit.config.schema import Pooling

FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
"""Modules, pooling, maximum length, and the similarity function."""


def describe(pooling: Pooling, width: int, max_length: int) -> dict[str, bytes]:
    """Return path -> content of `FILES`. `width`: of the embeddings; `max_length`: in tokens."""
    module_types = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}  # by directory
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module_type}"}
        for index, (path, module_type) in enumerate(module_types.items())
    ]
    pooling_settings = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": pooling is Pooling.mean,
        "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": pooling is Pooling.last,
        "include_prompt": True,
    }
    lengths = {"max_seq_length": max_length, "do_lower_case": False}
    # In the order of `FILES`.
    contents = modules, pooling_settings, lengths, {"prompts": {}, "similarity_fn_name": "cosine"}
    return {
        name: (json.dumps(content, indent=2) + "\n").encode() for name, content in zip(FILES, contents, strict=True)
    }


def read_files(folder: Path) -> dict[str, bytes]:
    """Return those of `FILES` that are in a directory."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
