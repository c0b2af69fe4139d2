"""Activations by formula, beside what the real models keep for the backward pass."""

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.fine_tuning import apply_tuning
from toolkit.models.outline import _LENGTH, _saved_bytes, outline, saved_by_layer
from toolkit.plan.activations import Rows, activation_bytes, layer_activation_bytes
from toolkit.plan.flops import formula
from toolkit.plan.model_config import published_models, shapes_of_config
from toolkit.plan.outline import flop_sizes, with_tuning

ROWS, LENGTH = 2, 24
SIZES: dict[str, Any] = {"hidden_size": 96, "vocab_size": 200, "num_attention_heads": 6}
KINDS = ("chatglm", "glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
WAYS = {
    "full": TuningConfig(),
    "lora": TuningConfig(method=TuningMethod.lora),
    "lora-all": TuningConfig(method=TuningMethod.lora, target_modules=["all-linear"], dropout=0.1),
    "dora": TuningConfig(method=TuningMethod.lora, dora=True),
    "dora-all": TuningConfig(method=TuningMethod.lora, target_modules=["all-linear"], dora=True, dropout=0.1),
    "freeze": TuningConfig(method=TuningMethod.freeze, last_layers=1),
}


def build(kind: str, dtype: torch.dtype) -> Any:
    """Return a small model in training."""
    if kind == "chatglm":
        sizes = {"inner_hidden_size": 208, "num_layers": 3, "bos_token_id": 150, "eos_token_id": 151}
        model: Any = ChatGLMForConditionalGeneration(ChatGLMConfig(**SIZES, **sizes))
        model.config._attn_implementation = "sdpa"
    else:
        sizes = {"intermediate_size": 208, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16}
        config = transformers.AutoConfig.for_model(kind, **SIZES, **sizes, attention_bias=True, pad_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).train()


@dataclass(eq=False)
class Kept:
    """A tensor that an operation has saved; it lives as long as the graph."""

    tensor: torch.Tensor


def kept(model: Any) -> int:
    """Return the bytes that a forward pass of the layers keeps, each storage once. What it saves for products that it
    drops again, as DoRA's of the factors, is not kept.
    """
    own = {id(one.untyped_storage()): one.untyped_storage() for one in (*model.parameters(), *model.buffers())}
    found = weakref.WeakSet["Kept"]()

    def keep(tensor: torch.Tensor) -> Kept:
        packed = Kept(tensor)
        found.add(packed)
        return packed

    ids = torch.full((ROWS, LENGTH), 5)
    ids[:, -5] = 150
    arguments = {} if model.config.model_type == "chatglm" else {"position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda packed: packed.tensor):
        output = model.base_model(ids, **arguments)
    storages = [packed.tensor.untyped_storage() for packed in found]
    del output
    return sum(one.nbytes() for one in {id(one): one for one in storages if id(one) not in own}.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_formula_is_what_is_kept(kind: str, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, tuning, width = build(kind, dtype), WAYS[way], dtype.itemsize
    known = shapes_of_config(model.config.to_dict())
    assert known is not None
    if tuning.method is not TuningMethod.full:
        apply_tuning(model, tuning, tmp_path, None, 1, {})
    rows = Rows(ROWS, LENGTH, mask_bytes=width if kind == "chatglm" else 0, on_cpu=True)
    assert sum(activation_bytes(with_tuning(*known, tuning), rows, width, tuning.dropout).values()) == kept(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_is_measured_is_the_formula(kind: str, tmp_path: Path) -> None:
    """Of models that no formula knows, on the meta device; here of some that one does."""
    config = build(kind, torch.float32).config
    config.save_pretrained(tmp_path)
    measured = outline(tmp_path)
    known = shapes_of_config(config.to_dict())
    assert known is not None
    assert {name: tuple(shape) for name, shape in measured["shapes"].items()} == known[0]
    for width, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        expected = (
            sum(layer_activation_bytes(with_tuning(*known, TuningConfig()), Rows(1, LENGTH), width, 1).values())
            / LENGTH
        )
        assert measured["sizes"][f"saved_{width}"] == saved_by_layer(tmp_path, dtype) == expected
    for drops, dora in ((0.0, False), (0.1, False), (0.1, True)):
        lora = TuningConfig(method=TuningMethod.lora, target_modules=["q_proj", "v_proj"], dropout=drops, dora=dora)
        found = with_tuning(known[0], known[1] | measured["sizes"], lora)
        one, other = (
            sum(layer_activation_bytes(it, Rows(1, LENGTH), 2, 1, drops).values())
            for it in (found, with_tuning(*known, lora))
        )
        assert one == other


def test_a_hybrid_keeps_the_mean_of_its_layers(tmp_path: Path) -> None:
    """Of Qwen3.5, one layer in four has attention, and the others keep more."""
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    sizes |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    kept = []
    for layers in (4, 8):
        config = transformers.AutoConfig.for_model(
            "qwen3_5_text", **sizes, num_key_value_heads=1, num_hidden_layers=layers
        )
        assert config.layer_types == [*["linear_attention"] * 3, "full_attention"] * (layers // 4)
        config.save_pretrained(tmp_path)
        kept.append(_saved_bytes(tmp_path, 0, torch.bfloat16, trains=True))
    assert saved_by_layer(tmp_path, torch.bfloat16) == (kept[1] - kept[0]) // (4 * _LENGTH)


def test_pairs_of_tokens_are_counted_where_there_is_attention() -> None:
    config = transformers.AutoConfig.for_model(**published_models()["Qwen3.5-4B"]).get_text_config()
    sizes = flop_sizes(lambda name: getattr(config, name, None))
    assert (sizes["layers"], sizes["attending"]) == (32, 8)
    shapes = {f"model.layers.{number}.self_attn.q_proj.weight": (8, 8) for number in range(32)}
    found = formula(shapes, sizes)
    assert found.forward.per_pair == 8 * 2 * sizes["heads"] * 2 * sizes["head_size"]
    assert found.backward.per_pair == 2 * found.forward.per_pair
