"""Which official ChatGLM architecture a config.json describes, by its own keys. No torch.

`AutoConfig` is never asked: on an official folder it waits for an answer on stdin, and
`GlmForCausalLM.from_pretrained` builds a random 40-layer model without a word (transformers 5.23).
"""

from enum import Enum
from typing import Any

from toolkit.errors import ModelError
from toolkit.messages import tr


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


def architecture_of(config: dict[str, Any]) -> Architecture | None:
    """Return which official architecture a parsed config.json describes, None for any other model."""
    if "position_encoding_2d" in config or "inner_hidden_size" in config:
        return Architecture.v1
    if "padded_vocab_size" in config or "multi_query_group_num" in config:
        return Architecture.glm
    return None


def check_supported(config: dict[str, Any], architecture: Architecture, folder: object) -> None:
    """Refuse by name what the architecture's code here cannot express.

    Raises:
        ModelError: a quantised repository, a variant of the block, or a key that is missing.
    """
    if config.get("quantization_bit"):
        raise ModelError(
            tr(
                "{folder} holds quantised weights (quantization_bit = {bits} in config.json), which cannot be trained. "
                "Use the repository without -int4 or -int8.",
                folder=folder,
                bits=config["quantization_bit"],
            )
        )
    missing = [key for key in _NEEDS[architecture] if key not in config]
    if missing:
        raise ModelError(
            tr("{folder}/config.json lacks {keys}: download it again.", folder=folder, keys=", ".join(missing))
        )
    for key, expected, absent in _FIXED[architecture]:
        value = config.get(key, absent)
        if value != expected:
            raise ModelError(
                tr(
                    "{folder}/config.json has {key} = {value}; no released ChatGLM has, and only {expected} can be "
                    "read.",
                    folder=folder,
                    key=key,
                    value=value,
                    expected=expected,
                )
            )
