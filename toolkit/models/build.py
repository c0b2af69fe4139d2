"""From `model` and `precision` to a transformers model, partitioned while it loads under ZeRO-3."""

from typing import Any

import torch
import transformers
from transformers import GlmConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.schema import Dtype, Init, ModelConfig, ShapeConfig
from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.stream import load_partitioned, refuse_other_weights

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
) -> PreTrainedModel:
    """Build the model that is trained.

    Args:
        config: where the weights come from.
        dtype: the arithmetic; weights are loaded in it.
        tokenizer: its length bounds the vocabulary.
        seed: for the weights of a random model; every rank gets the same.
        ds_config: the DeepSpeed dict; with stage 3 the parameters are partitioned as they are read, so that no rank
            ever holds the whole model. Needs a process group.

    Raises:
        ModelError: the weights do not fit the architecture, or the tokenizer does not fit the model.
    """
    if config.init is Init.random:
        # Built whole even under stage 3: random models are small, and every stage then starts from the same bits.
        model = _random_glm(config.shape, tokenizer, seed)
    else:
        torch_dtype = TORCH_DTYPES[dtype]
        if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3:
            model = load_partitioned(config.path, torch_dtype, ds_config)
        else:
            model = _pretrained(config.path, torch_dtype)
    _check_vocabulary(model, tokenizer)
    model.config.use_cache = False
    return model


def _random_glm(shape: ShapeConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    glm = GlmConfig(
        vocab_size=len(tokenizer),
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
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.GlmForCausalLM(glm)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _pretrained(path: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            tr(
                "cannot load the model in {path}: {reason}",
                path=path,
                reason=str(error).splitlines()[0],
            )
        ) from error
    # A head that is tied to the embedding is in no file, and rightly so.
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names = {
        kind: sorted(map(str, report.get(kind) or ()))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    missing = [name for name in names["missing_keys"] if name not in tied]
    refuse_other_weights(path, model, missing, names["unexpected_keys"], names["mismatched_keys"])
    return model


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > model.config.vocab_size:
        raise ModelError(
            tr(
                "the tokenizer has {tokens} tokens, the model only {rows}: they do not belong together "
                "(model.tokenizer, model.path).",
                tokens=len(tokenizer),
                rows=model.config.vocab_size,
            )
        )
