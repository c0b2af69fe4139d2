"""Tiny models of many architectures, each with what is special of its kind."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 956,
    "pad_token_id": 956,
    "bos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
HEADS = {**GROUPED, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
INDEXED = {"num_key_value_heads": 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
SLIDING = {"sliding_window": 8, "query_pre_attn_scalar": 16}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS),
    "mistral": lambda: transformers.MistralConfig(**HEADS, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**HEADS, sliding_window=64, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **HEADS, **SLIDING, layer_types=["sliding_attention", "full_attention"]
    ),
    "glm": lambda: transformers.GlmConfig(**HEADS, attention_bias=True),
    "glm4": lambda: transformers.Glm4Config(**HEADS),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**HEADS, **ROUTED, num_nextn_predict_layers=0),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**SIZES, **ROUTED, **LATENT, num_key_value_heads=2),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "smollm3": lambda: transformers.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1, 0]),
    "seed_oss": lambda: transformers.SeedOssConfig(**HEADS, attention_dropout=0.0, residual_dropout=0.0),
    "olmo3": lambda: transformers.Olmo3Config(
        **GROUPED, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **GROUPED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=24
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v32": lambda: transformers.DeepseekV32Config(**SIZES, **ROUTED, **LATENT, **INDEXED),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(**SIZES, **ROUTED, **LATENT, **INDEXED),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES, **ROUTED, **LATENT, num_key_value_heads=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "falcon": lambda: transformers.FalconConfig(**SIZES, new_decoder_architecture=False),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=1024, n_embd=32, n_layer=2, n_head=2, n_positions=1024, bos_token_id=956, eos_token_id=956
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**HEADS, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
}


IMAGES = {
    **{f"{kind}_token_{end}": 1020 for kind in ("image", "video") for end in ("id", "index")},
    "vision_start_token_id": 1021,
    "vision_end_token_id": 1022,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "depth": 1,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def wrapper(kind: str, text: dict[str, Any], vision: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Return the config of a multimodal model around a text model."""
    image = VISION if vision is None else VISION | vision
    return transformers.AutoConfig.for_model(kind, text_config=HEADS | text, vision_config=image, **IMAGES)


WRAPPERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3_images": lambda: wrapper(
        "gemma3", {**SLIDING, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gemma4_images": lambda: wrapper("gemma4", {"hidden_size_per_layer_input": 0, "initializer_range": 0.05}),
    "qwen2_5_vl": lambda: wrapper("qwen2_5_vl", TURNED, {"fullatt_block_indexes": [0]}),
    "qwen3_vl": lambda: wrapper("qwen3_vl", TURNED, {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}),
    "qwen3_5": lambda: wrapper("qwen3_5", {**DELTA, "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3_5_moe": lambda: wrapper(
        "qwen3_5_moe",
        {
            **DELTA,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3_vl_moe": lambda: wrapper(
        "qwen3_vl_moe",
        {**TURNED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},  # no experts that are square
        {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
    ),
    "ernie4_5_vl_moe": lambda: wrapper(
        "ernie4_5_vl_moe",
        {
            "moe_intermediate_size": [24, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "tie_word_embeddings": False,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
        },
    ),
    "llava": lambda: wrapper("llava", {"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "mistral3": lambda: wrapper("mistral3", {"model_type": "mistral"}),
    "ministral3": lambda: wrapper("mistral3", {"model_type": "ministral3"}),
    "llama4": lambda: wrapper(
        "llama4",
        {"num_local_experts": 2, "intermediate_size_mlp": 32},
        {"vision_output_dim": 32, "projector_input_dim": 16, "projector_output_dim": 32},
    ),
    "glm4v": lambda: wrapper("glm4v", {"rope_parameters": {**TURNED["rope_parameters"], "partial_rotary_factor": 1.0}}),
    "internvl": lambda: wrapper("internvl", {"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [14, 14]}),
}
"""Models that take images beside text, of which the text is trained."""


def auto_class(name: str) -> Any:
    """Return transformers' class that loads the models of an architecture."""
    return transformers.AutoModelForImageTextToText if name in WRAPPERS else transformers.AutoModelForCausalLM


def built(name: str) -> Any:
    """Return a random model of an architecture."""
    return auto_class(name).from_config((CONFIGS | WRAPPERS)[name]())


def write(folder: Path, name: str) -> Path:
    """Write a random model of an architecture in the form of published ones; without a tokenizer."""
    torch.manual_seed(3)
    publish(built(name), folder, name)
    return folder


def publish(model: Any, folder: Path, name: str) -> None:
    """Write a model as transformers does, or where files on the hub have another form, in that."""
    if name == "qwen3_5_moe":  # experts are joined in its files, and transformers would write each apart
        model._weight_conversions = []
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    if name == "qwen3_vl_moe":
        stored = {key: value.mT.contiguous() if ".experts." in key else value for key, value in stored.items()}
    elif name == "llava":
        tower = re.compile(r"^vision_tower\.(?!vision_model)")
        stored = {tower.sub("vision_tower.vision_model.", key): value for key, value in stored.items()}
    elif name == "olmo_hybrid":  # transformers divides by three what are three parts of other sizes
        for key in [key for key in stored if key.endswith("linear_attn.q_conv1d.weight")]:
            prefix = key.removesuffix("q_conv1d.weight")
            names = [f"{prefix}{letter}_conv1d.weight" for letter in "qkv"]
            sizes = [len(stored[f"{prefix}{letter}_proj.weight"]) for letter in "qkv"]
            parts = torch.cat([stored[part] for part in names]).split(sizes)
            stored |= {part: value.clone() for part, value in zip(names, parts, strict=True)}
    save_file(stored, file, metadata={"format": "pt"})


# Architecture -> what its published files call such tensors of a model of two layers, and the key that counts them.
PREDICTING = {
    "deepseek_v3": ("model.layers.2.", "num_nextn_predict_layers"),
    "glm4_moe": ("model.layers.2.", "num_nextn_predict_layers"),
    "qwen3_5": ("mtp.layers.0.", "mtp_num_hidden_layers"),
}


def write_predicting(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a model with a layer for multi-token prediction, as published; return that layer's tensors."""
    write(folder, name)
    prefix, key = PREDICTING[name]
    config = json.loads((folder / "config.json").read_text())
    section = config.get("text_config", config)
    section[key] = 1
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    last = re.compile(r".*\.layers\.1\.(?=self_attn|mlp|input)")
    extra = {last.sub(prefix, key): value.clone() for key, value in stored.items() if last.match(key)}
    extra = {key: value for key, value in extra.items() if "visual" not in key}
    extra[f"{prefix}eh_proj.weight"] = torch.randn(32, 64).bfloat16()
    save_file({**stored, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    return extra


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return what a directory holds as its index says, or its single file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    named = json.loads(index.read_text())["weight_map"]
    tensors = {name: value for file in {*named.values()} for name, value in load_file(folder / file).items()}
    assert tensors.keys() == named.keys()
    return tensors
