"""Which official ChatGLM architecture a config.json describes, by its own keys. No torch. `AutoConfig` would wait for
an answer on stdin, and `GlmForCausalLM.from_pretrained` silently build a random model (5.23).
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

from toolkit.config.schema import Family
from toolkit.messages import ModelError


class Architecture(str, Enum):
    """The two architectures behind `model_type: chatglm`."""

    v1 = "v1"
    """ChatGLM-6B: prefix attention, two-dimensional rotary positions; `toolkit.models.chatglm.modeling`."""
    glm = "glm"
    """ChatGLM2-6B, ChatGLM3-6B, CodeGeeX2-6B, glm-4-9b: what transformers calls GlmForCausalLM."""


_NEEDS = {
    Architecture.v1: ("hidden_size", "inner_hidden_size", "num_layers", "num_attention_heads", "vocab_size"),
    Architecture.glm: (
        "hidden_size",
        "ffn_hidden_size",
        "num_layers",
        "num_attention_heads",
        "kv_channels",
        "padded_vocab_size",
        "seq_length",
        "layernorm_epsilon",
    ),
}
# Key, the one value that the mapping can express, the value that an absent key stands for.
_FIXED: dict[Architecture, tuple[tuple[str, object, object], ...]] = {
    Architecture.v1: (("position_encoding_2d", True, False),),
    Architecture.glm: (
        ("rmsnorm", True, True),
        ("post_layer_norm", True, True),
        ("apply_residual_connection_post_layernorm", False, False),
        ("add_bias_linear", False, False),
        ("original_rope", True, True),
        ("hidden_dropout", 0, 0),
        ("tie_word_embeddings", False, False),
    ),
}


TOKENIZER_CODE = "tokenization_chatglm.py"
_MODEL_CODE = "modeling_chatglm.py"
_DIVIDES = re.compile(r"seq_idx\s*=[^\n]*/\s*self\.rope_ratio")
_MULTIPLIES = re.compile(r"base\s*=\s*base\s*\*\s*self\.rope_ratio")


def architecture_of(config: dict[str, Any]) -> Architecture | None:
    """Return which official architecture a parsed config.json describes, None for any other model."""
    if "position_encoding_2d" in config or "inner_hidden_size" in config:
        return Architecture.v1
    if "padded_vocab_size" in config or "multi_query_group_num" in config:
        return Architecture.glm
    return None


def named_family(folder: Path) -> Family:
    """Return whether a directory's files, read as text, name ChatGLM2 or ChatGLM3 (glm-4-9b too); `auto` if neither."""
    for name in ("tokenizer_config.json", TOKENIZER_CODE, "config.json"):
        text = read_text(folder / name).lower()
        if "<|user|>" in text or "chatglm3" in text:
            return Family.chatglm3
        if "chatglm2" in text or "codegeex2" in text or "问：" in text:
            return Family.chatglm2
    return Family.auto


def divides_positions(config: dict[str, Any], folder: Path) -> bool:
    """Return whether `rope_ratio` divides the positions, as in chatglm2-6b-32k, or multiplies the base (all others).
    The key is the same: modeling_chatglm.py decides (read as text), then the names in the directory's files.
    """
    ratio = config.get("rope_ratio", 1)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < float("inf"):
        raise ModelError(
            "{folder}/config.json has rope_ratio = {value}: not a positive number.", folder=folder, value=ratio
        )
    if ratio == 1:
        return False
    code = read_text(folder / _MODEL_CODE)
    if bool(_DIVIDES.search(code)) != bool(_MULTIPLIES.search(code)):
        return bool(_DIVIDES.search(code))
    family = named_family(folder)
    if family is not Family.auto:
        return family is Family.chatglm2
    if isinstance(config.get("eos_token_id"), list) or "glm-4" in str(config.get("_name_or_path")).lower():
        return False  # only glm-4-9b has several end tokens
    raise ModelError(
        "{folder}/config.json has rope_ratio = {ratio}, which divides the positions in ChatGLM2 and multiplies the "
        "rotary base in ChatGLM3 and GLM-4, and no file in the directory names the model. Download {file} from the "
        "model's repository into it: the file is read as text, not executed.",
        folder=folder,
        ratio=ratio,
        file=_MODEL_CODE,
    )


def read_text(file: Path) -> str:
    """Return a file's text, "" if it cannot be read; undecodable bytes are replaced."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_supported(config: dict[str, Any], architecture: Architecture, folder: Path) -> None:
    """Reject by name what the architecture's code here cannot express."""
    if config.get("quantization_bit"):
        raise ModelError(
            "{folder} holds quantised weights (quantization_bit = {bits} in config.json), which cannot be trained. "
            "Use the repository without -int4 or -int8.",
            folder=folder,
            bits=config["quantization_bit"],
        )
    missing = [key for key in _NEEDS[architecture] if key not in config]
    if missing:
        raise ModelError(
            "{folder}/config.json lacks {keys}: download it again.", folder=folder, keys=", ".join(missing)
        )
    for key, expected, absent in _FIXED[architecture]:
        value = config.get(key, absent)
        if value != expected:
            raise ModelError(
                "{folder}/config.json has {key} = {value}; no released ChatGLM has, and only {expected} can be read.",
                folder=folder,
                key=key,
                value=value,
                expected=expected,
            )
    if architecture is Architecture.glm:
        divides_positions(config, folder)
