"""From `model` and `precision` to a transformers model, partitioned while it loads under ZeRO-3."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import GlmConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.schema import Dtype, Init, ModelConfig, ShapeConfig
from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.attention import choose_attention
from toolkit.models.chatglm.modeling import ChatGLMForConditionalGeneration
from toolkit.models.chatglm.tokenizers import GlmTokenizer
from toolkit.models.load import load_model
from toolkit.models.sequence import split_sequences

TORCH_DTYPES = {
    Dtype.fp32: torch.float32,
    Dtype.bf16: torch.bfloat16,
    Dtype.fp16: torch.float16,
}


def build_model(
    config: ModelConfig,
    dtype: Dtype,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    ds_config: dict[str, Any] | None = None,
    packed: bool = False,
    parts: int = 1,
    own: Callable[[PreTrainedModel], set[str]] | None = None,
) -> PreTrainedModel:
    """Build the model that is trained.

    Args:
        config: where the weights come from.
        dtype: the arithmetic; weights are loaded in it.
        tokenizer: its length bounds the vocabulary.
        seed: for the weights of a random model; every rank gets the same.
        ds_config: the DeepSpeed dict; with stage 3 the parameters are partitioned as they are read, so that no rank
            ever holds the whole model. Needs a process group.
        packed: whether rows will hold several samples.
        parts: ranks over which the tokens of each row are divided.
        own: see `load_model`; a random model is built whole in any case.

    Raises:
        ModelError: the weights do not fit the architecture, or the tokenizer does not fit the model.
    """
    if config.init is Init.random:
        # Built whole even under stage 3: random models are small, and every stage then starts from the same bits.
        model = _random_glm(config.shape, tokenizer, seed)
    else:
        model = load_model(config.path, dtype=TORCH_DTYPES[dtype], ds_config=ds_config, own=own)
    _check_vocabulary(model, tokenizer)
    if parts > 1:
        split_sequences(model, parts)
    else:
        choose_attention(model, config.attention, packed, TORCH_DTYPES[dtype])
    model.config.use_cache = False
    return model


def random_config(shape: ShapeConfig, vocab_size: int, eos_token_id: int | None = None) -> GlmConfig:
    """Return the config of a random model.

    Args:
        shape: `model.shape`; its vocabulary is at most what the tokenizer is fitted to, so it is not looked at.
        vocab_size: of the tokenizer.
        eos_token_id: of the tokenizer.
    """
    return GlmConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_positions,
        attention_bias=True,
        # A padding id here would freeze its row of the embedding (torch.nn.Embedding's padding_idx).
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )


def _random_glm(shape: ShapeConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    glm = random_config(shape, len(tokenizer), tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.GlmForCausalLM(glm)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose ids mean something else to the model."""
    if len(tokenizer) > model.config.vocab_size:
        raise ModelError(
            tr(
                "the tokenizer has {tokens} tokens, the model only {rows}: they do not belong together "
                "(model.tokenizer, model.path).",
                tokens=len(tokenizer),
                rows=model.config.vocab_size,
            )
        )
    if isinstance(model, ChatGLMForConditionalGeneration):
        _check_special_ids(model, tokenizer)
    if isinstance(tokenizer, GlmTokenizer):
        ends = model.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        stops = tokenizer.format.stop_ids
        if not set(ends) & set(stops):
            raise ModelError(
                tr(
                    "the model ends its answers with {ends} (eos_token_id in config.json), the tokenizer's format of "
                    "{family} with {stops}: they do not belong together (model.tokenizer, model.path).",
                    ends=ends,
                    family=tokenizer.family.value,
                    stops=stops,
                )
            )


def _check_special_ids(model: ChatGLMForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a ChatGLM-6B tokenizer of another revision, which would put <sop> where the model never looks."""
    for key, token in (("bos_token_id", "<sop>"), ("eos_token_id", "<eop>"), ("gmask_token_id", "[gMASK]")):
        expected, found = getattr(model.config, key), tokenizer.convert_tokens_to_ids(token)
        if found != expected:
            raise ModelError(
                tr(
                    "the tokenizer's {token} is {found}, the model's {expected} ({key} in config.json): they are of "
                    "different revisions. Download tokenizer and model from the same revision.",
                    token=token,
                    found=found,
                    expected=expected,
                    key=key,
                )
            )
