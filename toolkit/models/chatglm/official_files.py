"""What the files of an official ChatGLM directory say of it, without torch.

`AutoConfig` would wait for an answer on stdin, and `GlmForCausalLM.from_pretrained` would silently build a random model
(transformers 5.23).
"""

import re
from pathlib import Path
from typing import Any

from toolkit.config.schema import Family
from toolkit.messages import ModelError
from toolkit.models.directory import Architecture, architecture_of, read_json_or_empty

_OFFICIAL_KEYS = {
    Architecture.v1: ("hidden_size", "inner_hidden_size", "num_layers", "num_attention_heads", "vocab_size"),
    Architecture.glm: (
        *("hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "kv_channels"),
        *("padded_vocab_size", "seq_length", "layernorm_epsilon"),
    ),
}
# Key, the only supported value, the value if the key is absent.
_OFFICIAL_VALUES: dict[Architecture, tuple[tuple[str, object, object], ...]] = {
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


def named_family(folder: Path) -> Family:
    """Return the ChatGLM family that a directory's files name (chatglm3 for glm-4-9b too), `auto` if they name none."""
    for name in ("tokenizer_config.json", TOKENIZER_CODE, "config.json"):
        text = read_text(folder / name).lower()
        if "<|user|>" in text or "chatglm3" in text:
            return Family.chatglm3
        if "chatglm2" in text or "codegeex2" in text or "问：" in text:  # as ChatGLM2 writes a question
            return Family.chatglm2
    return Family.auto


def divides_positions(config: dict[str, Any], folder: Path) -> bool:
    """Whether `rope_ratio` divides the positions, as in chatglm2-6b-32k, instead of multiplying the rotary base.
    modeling_chatglm.py decides, read as text, else the family that the files name; ModelError if neither is known.
    """
    ratio = config.get("rope_ratio", 1)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < float("inf"):
        raise ModelError(
            "{folder}/config.json has rope_ratio = {value}: not a positive number.", folder=folder, value=ratio
        )
    if ratio == 1:
        return False
    code = read_text(folder / _MODEL_CODE)
    if bool(_DIVIDES.search(code)) != bool(_MULTIPLIES.search(code)):  # it does one of both
        return bool(_DIVIDES.search(code))
    family = named_family(folder)
    if family is not Family.auto:
        return family is Family.chatglm2
    if isinstance(config.get("eos_token_id"), list) or "glm-4" in str(config.get("_name_or_path")).lower():
        return False  # only glm-4-9b has several end tokens
    raise ModelError(
        "{folder}/config.json has rope_ratio = {ratio}, which ChatGLM2 takes otherwise than ChatGLM3 and GLM-4, and no "
        "file in the directory names the model. Download {file} from the model's repository into it: it is read as "
        "text, not executed.",
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
    """Raise ModelError if a config has values that `toolkit.models.chatglm.modeling` does not support, or if nothing in
    `folder` tells what its rope_ratio means.
    """
    if config.get("quantization_bit"):
        raise ModelError(
            "{folder} holds quantised weights (quantization_bit = {bits} in config.json), which cannot be trained. "
            "Use the repository without -int4 or -int8.",
            folder=folder,
            bits=config["quantization_bit"],
        )
    missing = [key for key in _OFFICIAL_KEYS[architecture] if key not in config]
    if missing:
        raise ModelError(
            "{folder}/config.json lacks {keys}: download it again.", folder=folder, keys=", ".join(missing)
        )
    for key, expected, absent in _OFFICIAL_VALUES[architecture]:
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
        divides_positions(config, folder)  # for its errors: the answer is needed where the model is built


def official_vocabulary(folder: Path) -> Path | None:
    """Return the vocabulary file of the official ChatGLM tokenizer in a directory, None if it has no such tokenizer;
    ModelError if the file is missing. The first counts of: in a saved model's directory that in `official/`, whose
    tokenizer never parses control strings; ice_text.model; tokenizer.model, if any file says that it is a ChatGLM's.
    """
    inner = folder / "official"  # without a vocabulary where model.tokenizer was another directory
    if (inner / "layout.json").is_file() and any(inner.glob("*.model")):
        return official_vocabulary(inner)
    config = read_json_or_empty(folder / "tokenizer_config.json")
    is_named = "chatglm" in f"{config.get('auto_map', '')} {config.get('tokenizer_class', '')}".lower()
    if (folder / "ice_text.model").is_file():
        return folder / "ice_text.model"
    if (folder / "tokenizer.model").is_file():
        has_official_config = architecture_of(read_json_or_empty(folder / "config.json")) is not None
        # A vocabulary alone: other families' directories have at least a tokenizer_config.json.
        expected_of_others = ("tokenizer_config.json", "tokenizer.json", "config.json")
        is_alone = not any((folder / name).is_file() for name in expected_of_others)
        if is_named or has_official_config or is_alone or (folder / TOKENIZER_CODE).is_file():
            return folder / "tokenizer.model"
    if is_named and not (folder / "tokenizer.json").is_file():
        raise ModelError(
            "'{folder}' has an official ChatGLM tokenizer, but not its vocabulary (ice_text.model or "
            "tokenizer.model): download it again.",
            folder=folder,
        )
    return None
