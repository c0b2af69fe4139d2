"""A random model of a directory's architecture with a few layers of a few heads: what `toolkit prove` trains."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from toolkit.messages import ModelError
from toolkit.models.directory import architecture_of, read_config, read_object
from toolkit.models.load import official_class, read_generation_config

LAYERS, HEADS, HEAD_SIZE = 4, 4, 16
"""The least; model-parallel ranks may need more heads. FlexAttention takes no heads smaller than 16 (torch 2.13)."""
LARGEST = 32 * 2**20
"""Parameters beside embedding and output layer; a larger model has sizes under names that are not known here."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")
_OF_LAYERS = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")
_SIZES = {
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "inner_hidden_size", "ffn_dim", "n_inner"), 192),
    **dict.fromkeys(_LAYERS, LAYERS),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim"), HEAD_SIZE),
    "mamba_n_heads": 8,
    "mamba_d_ssm": 8 * HEAD_SIZE,
    "num_nextn_predict_layers": 0,
}
_WIDTHS = ("hidden_size", "n_embd", "d_model", "out_hidden_size", "word_embed_proj_dim")
_QUERY_HEADS, _KEY_HEADS = (
    ("num_attention_heads", "n_head", "num_heads"),
    ("num_key_value_heads", "multi_query_group_num"),
)


def shrunk_config(config: dict[str, Any], heads: int = HEADS) -> dict[str, Any]:
    """Return a config.json with the same architecture and vocabulary, `heads` heads, LAYERS layers and no dropout.

    Architectures name the same size in different ways (num_hidden_layers, n_layer, …), so each key that is there is
    made small by its name. Lists with one entry per layer are shortened so that every kind of layer stays.
    """
    own_layers = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), 0)
    own_heads = next((config[name] for name in _QUERY_HEADS if name in config), 0)
    small = dict(config)
    for name, value in config.items():
        if value is None:
            continue
        if name in _SIZES:
            small[name] = [_SIZES[name]] * LAYERS if isinstance(value, list) else _SIZES[name]
        elif name in _WIDTHS:
            small[name] = heads * HEAD_SIZE
        elif name in _QUERY_HEADS:
            small[name] = heads
        elif name in _KEY_HEADS:  # grouped ones stay fewer; latent attention (kv_lora_rank) has as many as queries
            small[name] = heads if value == own_heads or config.get("kv_lora_rank") else min(value, heads // 2)
        elif ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            small[name] = 0.0
        elif isinstance(value, list) and (name in _OF_LAYERS or (own_layers and len(value) == own_layers)):
            kinds = list(dict.fromkeys(map(json.dumps, value)))  # as JSON, as an entry may be a dict
            small[name] = [json.loads(kinds[layer % len(kinds)]) for layer in range(LAYERS)]
        elif name == "per_layer_config" and isinstance(value, dict):
            small[name] = {layer: value[layer] for layer in value if str(layer) in map(str, range(LAYERS))}
        elif name.endswith("_config") and isinstance(value, dict) and value.get("model_type"):
            small[name] = shrunk_config(value, heads)
        elif name in ("rope_scaling", "rope_parameters"):
            small[name] = _shrunk_rope(value)
    return small


def _shrunk_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions for heads of HEAD_SIZE, of which each pair of numbers is rotated: as many
    factors as pairs, and sections (of time, height and width, as Qwen2-VL's) whose sum that is.
    """
    num_pairs = HEAD_SIZE // 2
    small = {key: factor[:num_pairs] if isinstance(factor, list) else factor for key, factor in rope.items()}
    if "mrope_section" in rope:
        small["mrope_section"] = [4, 2, 2]
    return small


def shrunk_model(path: str, seed: int, heads: int = HEADS) -> transformers.PreTrainedModel:
    """Return a random fp32 model on the CPU of a small version of a directory's config.json, whose weights are not
    read; ModelError if that needs the directory's own Python code, or the model stays large.
    """
    folder = Path(path)
    config = shrunk_config(read_config(path, with_weights=False), heads)
    is_official, generation_file = architecture_of(config) is not None, folder / "generation_config.json"
    generation = read_object(generation_file) if generation_file.is_file() else {}
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel
    if is_official:
        kind, model_config = official_class(folder, config, generation)
        model = kind(model_config)
    else:
        with TemporaryDirectory() as temporary:
            (Path(temporary) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            try:
                model_config = transformers.AutoConfig.from_pretrained(temporary, trust_remote_code=False)
                model = transformers.AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
            except Exception as error:  # whatever a config that does not fit makes the library raise
                raise ModelError(
                    "{path}: no small model of this architecture can be made: {reason}", path=path, reason=error
                ) from error
    # The vocabulary stays as it is: what embeds it may be large.
    outer = {
        id(parameter)
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        for parameter in part.parameters()
    }
    inner = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in outer)
    if inner > LARGEST:
        raise ModelError(
            "{path}: made small, this architecture still has {count} parameters: names of its sizes in config.json are "
            "not known here.",
            path=path,
            count=f"{inner:,}",
        )
    if is_official:
        model.generation_config = transformers.GenerationConfig(eos_token_id=model.config.eos_token_id, pad_token_id=0)
    elif generation:
        model.generation_config = read_generation_config(folder)
    model.get_input_embeddings().padding_idx = None  # as in a run: it would freeze the padding token's row
    return model.eval()
