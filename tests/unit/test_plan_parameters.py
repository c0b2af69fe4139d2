"""Parameters that a config.json describes, beside the real model's, on the meta device."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from toolkit.config.files import conf_folder, read
from toolkit.config.load import load
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.load import model_class, transformers_config
from toolkit.models.trainable import untrained_prefixes
from toolkit.plan.flops import formula
from toolkit.plan.lookup import outline_of
from toolkit.plan.model_config import published_models, shapes_of_config
from toolkit.plan.summary import active_parameters_line

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "glm": {},
    "glm-bias": {"attention_bias": True, "num_key_value_heads": 6},
    "glm4": {"attention_bias": True},
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen3": {"attention_bias": True},
}


def build(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a small model of a kind, on the meta device, and its config.json."""
    config = transformers.AutoConfig.for_model(kind.partition("-")[0], **COMMON | KINDS[kind])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config), config.to_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_the_models(kind: str) -> None:
    model, config = build(kind)
    found = shapes_of_config(config)
    assert found is not None
    assert found[0] == {name: tuple(one.shape) for name, one in model.named_parameters()}


def test_chatglm_6b() -> None:
    config = ChatGLMConfig(
        hidden_size=64,
        inner_hidden_size=160,
        num_layers=3,
        num_attention_heads=4,
        vocab_size=200,
        bos_token_id=150,
        eos_token_id=151,
    )
    with torch.device("meta"):
        model = ChatGLMForConditionalGeneration(config)
    found = shapes_of_config(config.to_dict())
    assert found is not None
    assert found[0] == {name: tuple(one.shape) for name, one in model.named_parameters()}


def test_published_models_have_their_parameters() -> None:
    """As many as the indexes of their weights say (bytes / 2), and GGUF headers, rounded, for GLM-4-0414."""
    found = {name: shapes_of_config(config) for name, config in published_models().items()}
    assert {name: sum(map(math.prod, known[0].values())) for name, known in found.items() if known} == {
        "ChatGLM-6B": 6_707_929_088,
        "ChatGLM2-6B": 6_243_584_000,
        "ChatGLM3-6B": 6_243_584_000,
        "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
        "GLM-4-32B-0414": 32_566_081_536,
        "GLM-4-9B-0414": 9_400_279_040,
        "Llama-3.1-8B-Instruct": 8_030_261_248,
        "Qwen3-0.6B": 596_049_920,
        "Qwen3-1.7B": 1_720_574_976,  # by its sizes; its index has not been read
        "Qwen3-8B": 8_190_735_360,
        "Qwen3-8B-Base": 8_190_735_360,
        "SmolLM2-135M-Instruct": 134_515_008,
        "glm-4-9b-chat": 9_399_951_360,
    }


def test_published_experts_are_measured(tmp_path: Path) -> None:
    """106 billion, as its card says: no formula knows a mixture of experts, and its weights are not here."""
    assert shapes_of_config(published_models()["GLM-4.5-Air"]) is None
    outline = outline_of(load(["recipe=glm45_air_lora", f"prepare.dir={tmp_path}"]).cfg)
    assert outline.num_parameters - outline.num_trained == 106_852_245_504
    assert {name.split(".")[-4] for name in outline.trained} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    # "106B total and 12B active" is near the number in layers.
    assert active_parameters_line(outline) == [
        "Mixture of experts: 13,439,950,848 of 106,868,072,448 parameters are active per token, 12,198,432,768 of "
        "those in layers (8 of 128 routed experts in each)."
    ]
    whole = outline_of(load(["recipe=glm45_air_lora", "tuning=full", f"prepare.dir={tmp_path}"]).cfg)
    dense, routed = 10944, 128 * 1408
    per_layer = 4096 * 128 * (2 * 96 + 2 * 8)
    met = 46 * per_layer + 3 * 4096 * (dense + 45 * (1 + 8) * 1408) + 45 * 128 * 4096
    assert formula(whole.shapes, whole.sizes).forward.per_token == 2 * met
    idle = 45 * 3 * 4096 * (routed - 8 * 1408)
    assert whole.num_parameters - whole.num_active == idle


MEASURED = {
    "Gemma-3-12b-it": 12_187_325_040,  # keras-hub counts 12,187,079,280, without 64 rows of the vocabulary
    "Gemma-3-4b-it": 4_300_079_472,  # as keras-hub counts MedGemma 4B
    "Gemma-4-26B-A4B-it": 25_805_933_872,
    "Gemma-4-31B-it": 31_273_086_512,
    "gpt-oss-20b": 20_914_757_184,  # "20.9B"
    "DeepSeek-V3.2": 671_877_929_216,  # "671B", without the layer for multi-token prediction
    "GLM-4.6V-Flash": 10_292_777_472,  # "10B" with its tower
    "GLM-5": 743_911_199_232,  # "744B"
    "Ministral-3-8B-Instruct-2512": 8_918_026_240,  # "8.4B" and a tower of "0.4B"
    "Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,  # "24B"
    "Olmo-3-7B-Instruct": 7_298_011_136,
    "Qwen3.5-0.8B": 852_985_920,
    "Qwen3.5-2B": 2_213_241_664,
    "Qwen3.5-4B": 4_539_265_536,
    "Qwen3.5-9B": 9_409_813_744,
    "Qwen3.5-27B": 27_356_728_560,
    "Qwen3.5-35B-A3B": 35_107_181_936,
    "Qwen3.6-27B": 27_356_728_560,
    "Qwen3.6-35B-A3B": 35_107_181_936,
    "Seed-OSS-36B-Instruct": 36_151_104_512,
    "SmolLM3-3B": 3_075_098_624,
}
"""Parameters of the published models that no formula knows, towers included, and what others say of them."""
OFTEN = {"gpt-oss-20b", "Gemma-3-4b-it", "SmolLM3-3B"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in MEASURED]
)
def test_published_models_are_as_large_as_published(name: str, tmp_path: Path) -> None:
    """Built on the meta device from what their groups say."""
    (tmp_path / "config.json").write_text(json.dumps(published_models()[name]))
    config = transformers_config(tmp_path)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == MEASURED[name]


GROUPS = {
    json.dumps(values["published"]): path.stem
    for path in sorted((conf_folder() / "model").glob("*.yaml"))
    if "model_type" in (values := read(path).values).get("published", {})
}
"""Content of a config.json -> one of the groups with such a model."""


@pytest.mark.nightly
@pytest.mark.parametrize("group", GROUPS.values())
def test_published_models_are_planned_with_their_parameters_and_targets(group: str, tmp_path: Path) -> None:
    """At full size: the plan counts what transformers builds, and LoRA is in linear layers of the text model alone."""
    cfg = load(["recipe=lora", f"model={group}", f"prepare.dir={tmp_path}"]).cfg
    (tmp_path / "config.json").write_text(json.dumps(cfg.model.published))
    config = transformers_config(tmp_path)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    planned = outline_of(cfg)
    assert planned.num_parameters - planned.num_trained == sum(parameter.numel() for parameter in model.parameters())
    modules, untrained = dict(model.named_modules()), untrained_prefixes(model)
    assert planned.targets and not any(name.startswith(untrained or ("\0",)) for name in planned.targets)
    for name in planned.targets:
        assert isinstance(modules[name], torch.nn.Linear), name
    rank = cfg.tuning.rank
    sizes = [modules[name].weight.shape for name in planned.targets]
    assert planned.num_trained == sum(rank * (out + width) for out, width in sizes)


MIXTURES = {"GLM-4.5-Air", "GLM-4.7-Flash", "Qwen3-30B-A3B"}


def test_each_published_model_is_counted() -> None:
    by_formula = {name for name, config in published_models().items() if shapes_of_config(config)}
    assert published_models().keys() == by_formula | MIXTURES | MEASURED.keys()


@pytest.mark.parametrize(
    ("model", "total", "active"), [("glm47_flash", 29.9e9, 3.9e9), ("qwen3_30b_a3b", 30.5e9, 3.35e9)]
)
def test_published_mixtures_are_as_large_as_they_are_called(
    model: str, total: float, active: float, tmp_path: Path
) -> None:
    outline = outline_of(load(["recipe=chatglm", f"model={model}", f"prepare.dir={tmp_path}"]).cfg)
    assert outline.num_parameters == pytest.approx(total, rel=0.005)
    assert outline.num_active == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("name", sorted({*published_models()} - MIXTURES - MEASURED.keys()))
def test_published_models_are_those_that_transformers_builds(name: str) -> None:
    config = published_models()[name]
    if "model_type" not in config:
        pytest.skip("an official ChatGLM directory: test_chatglm_6b, tests/parity")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    found = shapes_of_config(config)
    assert found is not None
    assert found[0] == {name: tuple(one.shape) for name, one in model.named_parameters()}


def test_what_is_not_known_is_not_guessed() -> None:
    assert shapes_of_config({"model_type": "glm4_moe", **COMMON}) is None
    quantized = {"model_type": "llama", **COMMON, "quantization_config": {"quant_method": "fp8"}}  # as it is read
    assert shapes_of_config(quantized) == shapes_of_config({"model_type": "llama", **COMMON})
