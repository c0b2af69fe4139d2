"""Nothing is fitted to the reference sets: other sizes against a slow calculation, written from the description.

The calculation works on the official tensors, one token at a time, in float64. It shares no code with the package.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from official import random_weights, write

from toolkit.models import load_model, save_model

SIZES = [
    ("v1", {}),
    ("v1", {"num_attention_heads": 2, "hidden_size": 40, "num_layers": 4, "inner_hidden_size": 52}),
    ("v1", {"num_attention_heads": 1, "hidden_size": 16, "num_layers": 1, "layernorm_epsilon": 1e-2}),
    ("v2", {}),
    ("v2", {"multi_query_attention": False, "num_layers": 3}),
    ("v2", {"rope_ratio": 4}),
    ("v2", {"rope_ratio": 50.0, "num_layers": 1}),
    ("v3", {"multi_query_group_num": 1, "num_attention_heads": 6, "kv_channels": 12, "layernorm_epsilon": 1e-3}),
    ("v3", {"rope_ratio": 50, "multi_query_group_num": 4, "add_qkv_bias": False}),
    ("glm4", {"kv_channels": 16, "hidden_size": 32, "ffn_hidden_size": 20, "torch_dtype": "bfloat16"}),
]
Weights = dict[str, torch.Tensor]


def turned(vector: torch.Tensor, angles: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Turn each pair of components by its angle."""
    result = vector.clone()
    for (first, second), angle in zip(pairs, angles.tolist(), strict=True):
        x, y = float(vector[first]), float(vector[second])
        result[first] = x * math.cos(angle) - y * math.sin(angle)
        result[second] = x * math.sin(angle) + y * math.cos(angle)
    return result


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: list[list[int]]) -> torch.Tensor:
    """Return `[S, N * D]`; queries, keys and values `[S, N, D]`; `seen[i]` are the places that place i sees."""
    rows = []
    for place, others in enumerate(seen):
        heads = []
        for head in range(queries.size(1)):
            scores = torch.stack([queries[place, head] @ keys[other, head] for other in others])
            weights = (scores / math.sqrt(queries.size(2))).softmax(0)
            heads.append(sum(weight * values[other, head] for weight, other in zip(weights, others, strict=True)))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def v1_logits(weights: Weights, config: dict[str, Any], ids: list[int]) -> torch.Tensor:
    """ChatGLM-6B."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size = hidden // heads
    quarter = size // 4
    start = ids.index(config["bos_token_id"])
    mask_at = ids.index(config["gmask_token_id"])
    frequencies = torch.tensor([10000 ** (-2 * i / (size // 2)) for i in range(quarter)]).half().double()
    scale = math.sqrt(56)

    def norm(name: str, states: torch.Tensor) -> torch.Tensor:
        centred = states - states.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + config["layernorm_epsilon"]).sqrt()
        return centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(name: str, states: torch.Tensor) -> torch.Tensor:
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    states = weights["transformer.word_embeddings.weight"][ids]
    pairs = [(i, i + quarter) for i in range(quarter)]
    for layer in range(config["num_layers"]):
        prefix = f"transformer.layers.{layer}"
        normed = norm(f"{prefix}.input_layernorm", states)
        joint = linear(f"{prefix}.attention.query_key_value", normed).view(len(ids), heads, 3, size)

        def place(vectors: torch.Tensor) -> torch.Tensor:
            result = vectors.clone()
            for row in range(len(ids)):
                first, second = (row, 0) if row < start else (mask_at, row - start + 1)
                for head in range(heads):
                    left = turned(vectors[row, head, : size // 2], first * frequencies, pairs)
                    right = turned(vectors[row, head, size // 2 :], second * frequencies, pairs)
                    result[row, head] = torch.cat((left, right))
            return result

        seen = [sorted({*range(start), *range(row + 1)}) for row in range(len(ids))]
        attended = attention(place(joint[:, :, 0]), place(joint[:, :, 1]), joint[:, :, 2], seen)
        states = normed * scale + linear(f"{prefix}.attention.dense", attended)
        normed = norm(f"{prefix}.post_attention_layernorm", states)
        wide = linear(f"{prefix}.mlp.dense_h_to_4h", normed)
        wide = 0.5 * wide * (1 + (math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)).tanh())
        states = normed * scale + linear(f"{prefix}.mlp.dense_4h_to_h", wide)
    return norm("transformer.final_layernorm", states) @ weights["lm_head.weight"].T


def glm_logits(weights: Weights, config: dict[str, Any], ids: list[int]) -> torch.Tensor:
    """ChatGLM2 and later."""
    heads, size = config["num_attention_heads"], config["kv_channels"]
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else heads
    ratio, turned_size = config.get("rope_ratio", 1), size // 2
    base, stretch = (10000, ratio) if "chatglm2" in config.get("_name_or_path", "") else (10000 * ratio, 1)
    frequencies = torch.tensor([base ** (-2 * i / turned_size) for i in range(turned_size // 2)]).double()
    pairs = [(2 * i, 2 * i + 1) for i in range(turned_size // 2)]

    def norm(name: str, states: torch.Tensor) -> torch.Tensor:
        mean = states.square().mean(-1, keepdim=True)
        return states / (mean + config["layernorm_epsilon"]).sqrt() * weights[f"{name}.weight"]

    def place(vectors: torch.Tensor) -> torch.Tensor:
        result = vectors.clone()
        for row in range(len(ids)):
            for head in range(vectors.size(1)):
                result[row, head] = turned(vectors[row, head], row / stretch * frequencies, pairs)
        return result

    states = weights["transformer.embedding.word_embeddings.weight"][ids]
    for layer in range(config["num_layers"]):
        prefix = f"transformer.encoder.layers.{layer}"
        normed = norm(f"{prefix}.input_layernorm", states)
        joint = normed @ weights[f"{prefix}.self_attention.query_key_value.weight"].T
        joint = joint + weights.get(f"{prefix}.self_attention.query_key_value.bias", 0)
        if config["multi_query_attention"]:
            queries, keys, values = (
                part.view(len(ids), -1, size)
                for part in joint.split([heads * size, groups * size, groups * size], dim=-1)
            )
        else:
            queries, keys, values = joint.view(len(ids), heads, 3, size).unbind(2)
        keys, values = (part.repeat_interleave(heads // groups, dim=1) for part in (keys, values))
        seen = [list(range(row + 1)) for row in range(len(ids))]
        attended = attention(place(queries), place(keys), values, seen)
        states = states + attended @ weights[f"{prefix}.self_attention.dense.weight"].T
        normed = norm(f"{prefix}.post_attention_layernorm", states)
        gate, up = (normed @ weights[f"{prefix}.mlp.dense_h_to_4h.weight"].T).chunk(2, dim=-1)
        states = states + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.mlp.dense_4h_to_h.weight"].T
    return norm("transformer.encoder.final_layernorm", states) @ weights["transformer.output_layer.weight"].T


@pytest.mark.parametrize(("family", "changes"), SIZES, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("shards", [1, 3])
def test_logits(family: str, changes: dict[str, Any], shards: int, tmp_path: Path) -> None:
    import json

    write(tmp_path, family, shards=shards, pickled=shards == 3, seed=shards, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {name: value.double() for name, value in random_weights(config, shards).items()}
    ids = [9, 17, 5, 33, 8, 120, 64, 7, 250, 3]
    if family == "v1":
        ids[4:6] = [config["gmask_token_id"], config["bos_token_id"]]
    wanted = (v1_logits if family == "v1" else glm_logits)(weights, config, ids)
    found = load_model(tmp_path, dtype=torch.float32)(torch.tensor([ids])).logits[0].detach()
    assert float((found - wanted).abs().max()) < 5e-5


DIVIDES = "seq_idx = torch.arange(seq_len, dtype=dtype, device=device) / self.rope_ratio"
MULTIPLIES = "base = base * self.rope_ratio"


@pytest.mark.parametrize(
    ("family", "changes", "files", "angles"),
    [
        # Position 1000, rotary dimension 4: 1000 / ratio * 10000^(-2i/4), or 1000 * (10000 * ratio)^(-2i/4).
        ("v2", {"rope_ratio": 4}, {}, [250.0, 2.5]),
        ("v2", {}, {}, [1000.0, 10.0]),
        ("v3", {"rope_ratio": 4}, {}, [1000.0, 5.0]),
        ("glm4", {"rope_ratio": 4}, {}, [1000.0, 5.0]),
        ("v3", {"rope_ratio": 4}, {"modeling_chatglm.py": DIVIDES}, [250.0, 2.5]),
        ("v2", {"rope_ratio": 4}, {"modeling_chatglm.py": MULTIPLIES}, [1000.0, 5.0]),
        ("v3", {"rope_ratio": 4, "_name_or_path": "me/mine"}, {"tokenization_chatglm.py": "'<|user|>'"}, [1000.0, 5.0]),
        ("v2", {"rope_ratio": 4, "_name_or_path": "me/mine"}, {"tokenization_chatglm.py": "问："}, [250.0, 2.5]),
    ],
)
def test_what_rope_ratio_means(
    family: str, changes: dict[str, Any], files: dict[str, str], angles: list[float], tmp_path: Path
) -> None:
    """The same key divides ChatGLM2's positions and multiplies the base of the others; code beside them decides."""
    write(tmp_path / "in", family, **changes)
    for name, text in files.items():
        (tmp_path / "in" / name).write_text(text, encoding="utf-8")
    model = load_model(tmp_path / "in")
    save_model(model, tmp_path / "hf")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for one in (model, plain, load_model(tmp_path / "hf")):
        assert (1000 * one.model.rotary_emb.inv_freq).tolist() == pytest.approx(angles, rel=1e-6)
