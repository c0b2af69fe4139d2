"""Tiny folders in the official layouts, of any size, with random weights and, if wanted, a vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from golden import GOLDEN
from safetensors.torch import save_file

V1 = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "position_encoding_2d": True,
    "hidden_size": 48,
    "inner_hidden_size": 80,
    "num_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 1050,
    "max_sequence_length": 2048,
    "layernorm_epsilon": 1e-5,
    "bos_token_id": 704,
    "eos_token_id": 705,
    "mask_token_id": 700,
    "gmask_token_id": 701,
    "pad_token_id": 3,
    "torch_dtype": "float16",
    "use_cache": True,
}
GLM = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 72,
    "num_layers": 2,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "padded_vocab_size": 1024,
    "seq_length": 2048,
    "layernorm_epsilon": 1e-5,
    "original_rope": True,
    "torch_dtype": "float16",
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "v1": (V1, {}),
    "v2": (GLM, {"_name_or_path": "THUDM/chatglm2-6b"}),
    "v3": (GLM, {"_name_or_path": "THUDM/chatglm3-6b"}),
    "glm4": (GLM, {"rope_ratio": 500, "eos_token_id": [956, 963, 965], "pad_token_id": 956}),
}


def official_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of an official checkpoint, in the official order."""
    hidden = config["hidden_size"]
    if "position_encoding_2d" in config:
        inner, vocab = config["inner_hidden_size"], config["vocab_size"]
        head = hidden // config["num_attention_heads"]
        shapes = {"transformer.word_embeddings.weight": (vocab, hidden)}
        for layer in range(config["num_layers"]):
            prefix = f"transformer.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes |= {f"{prefix}{name}.weight": (hidden,), f"{prefix}{name}.bias": (hidden,)}
            for name, size in (
                ("attention.query_key_value", (3 * hidden, hidden)),
                ("attention.dense", (hidden, hidden)),
                ("mlp.dense_h_to_4h", (inner, hidden)),
                ("mlp.dense_4h_to_h", (hidden, inner)),
            ):
                shapes |= {f"{prefix}{name}.weight": size, f"{prefix}{name}.bias": size[:1]}
            shapes[f"{prefix}attention.rotary_emb.inv_freq"] = (head // 4,)
        return shapes | {
            "transformer.final_layernorm.weight": (hidden,),
            "transformer.final_layernorm.bias": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
    width, inner, vocab = config["kv_channels"], config["ffn_hidden_size"], config["padded_vocab_size"]
    heads = config["num_attention_heads"]
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else heads
    joint = (heads + 2 * groups) * width
    shapes = {
        "transformer.embedding.word_embeddings.weight": (vocab, hidden),
        "transformer.rotary_pos_emb.inv_freq": (width // 4,),
    }
    for layer in range(config["num_layers"]):
        prefix = f"transformer.encoder.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attention.query_key_value.weight": (joint, hidden),
            f"{prefix}self_attention.query_key_value.bias": (joint,),
            f"{prefix}self_attention.dense.weight": (hidden, heads * width),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            f"{prefix}mlp.dense_4h_to_h.weight": (hidden, inner),
        }
        if not config["add_qkv_bias"]:
            del shapes[f"{prefix}self_attention.query_key_value.bias"]
    return shapes | {
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (vocab, hidden),
    }


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random official weights; ChatGLM-6B's LayerNorms are float32, as in the published files."""
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {}
    for name, shape in official_shapes(config).items():
        if name.endswith("inv_freq"):
            exponents = torch.arange(0, 2 * shape[0], 2) / (2 * shape[0])
            weights[name] = (1.0 / 10000**exponents).to(dtype)
            continue
        value = torch.randn(shape, generator=draw) * 0.2
        is_norm = "layernorm" in name
        if is_norm and name.endswith("weight"):
            value += 1
        weights[name] = value.to(torch.float32 if is_norm and "position_encoding_2d" in config else dtype)
    return weights


def write(
    folder: Path,
    family: str,
    *,
    shards: int = 2,
    pickled: bool = False,
    tokenizer: bool = False,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write an official folder.

    Args:
        folder: made if needed.
        family: v1, v2, v3 or glm4.
        shards: number of weight files; 1 writes no index.
        pickled: .bin instead of safetensors.
        tokenizer: with the tiny vocabulary of the family.
        seed: of the weights.
        **changes: keys of config.json.
    """
    base, own = FAMILIES[family]
    config = {**base, **own, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "modeling_chatglm.py").write_text("raise SystemExit('never imported')\n", encoding="utf-8")
    weights = random_weights(config, seed)
    stem, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    names = list(weights)
    weight_map = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"{stem}{suffix}" if shards == 1 else f"{stem}-{number + 1:05d}-of-{shards:05d}{suffix}"
        weight_map |= dict.fromkeys(part, file)
        tensors = {name: weights[name] for name in part}
        if pickled:
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards > 1:
        total = sum(value.numel() * value.element_size() for value in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    if tokenizer:
        source = GOLDEN / f"tok_{family}"
        for file in ("tokenizer_config.json", "ice_text.model" if family == "v1" else "tokenizer.model"):
            shutil.copyfile(source / file, folder / file)
        (folder / "tokenization_chatglm.py").write_text("raise SystemExit('never imported')\n", encoding="utf-8")
    return folder
