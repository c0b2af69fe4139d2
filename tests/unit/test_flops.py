"""The FLOP formula against what torch counts while real models run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.architectures import CONFIGS
from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.engine.recompute import _with_input_gradient
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.lora import inject_lora
from toolkit.plan.flops import Work, causal_pairs, formula, is_countable
from toolkit.plan.model_config import published_models, shapes_of_config
from toolkit.plan.outline import MIXTURES, Shapes, flop_sizes, with_tuning

ROWS, TOKENS, LAYERS, HIDDEN, HEADS, VOCAB = 2, 24, 3, 32, 4, 96
RANK = 5
TRAINED = torch.arange(TOKENS) % 3 > 0


def chatglm_6b() -> transformers.PreTrainedModel:
    """Return ChatGLM-6B's own class, small."""
    return ChatGLMForConditionalGeneration(
        ChatGLMConfig(
            hidden_size=HIDDEN,
            inner_hidden_size=80,
            num_layers=LAYERS,
            num_attention_heads=HEADS,
            vocab_size=VOCAB,
            bos_token_id=90,
            eos_token_id=91,
        )
    )


def usual(kind: Callable[..., Any], **more: Any) -> transformers.PreTrainedModel:
    """Return a model of transformers, small."""
    return transformers.AutoModelForCausalLM.from_config(
        kind(
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            head_dim=HIDDEN // HEADS,
            vocab_size=VOCAB,
            pad_token_id=0,
            **more,
        )
    )


def mixture(name: str, **more: Any) -> transformers.PreTrainedModel:
    """Return a mixture whose experts are computed one by one: of PyTorch's product of them all nothing is counted."""
    config = CONFIGS[name]()
    config.update({"_experts_implementation": "eager", **more})
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "chatglm-6b": chatglm_6b,
    "glm": lambda: usual(transformers.GlmConfig, attention_bias=True),
    "llama": lambda: usual(transformers.LlamaConfig),
    "llama, tied": lambda: usual(transformers.LlamaConfig, tie_word_embeddings=True),
    **{name: partial(mixture, name) for name in MIXTURES},
    "deepseek_v3, other sizes": lambda: mixture("deepseek_v3", q_lora_rank=None, v_head_dim=24),
}


def loss_of(model: Any) -> torch.Tensor:
    """Return a loss of trained tokens alone, as training computes it."""
    ids = torch.randint(80, (ROWS, TOKENS))
    ids[:, 5] = 90
    states = model.base_model(ids)
    states = states if isinstance(states, torch.Tensor) else states[0]
    return model.get_output_embeddings()(states[:, TRAINED]).logsumexp(-1).sum()


def counted(model: Any, checkpointing: bool) -> tuple[int, int]:
    """Return what torch counts in the forward and in the backward pass."""
    if checkpointing:
        again = partial(checkpoint, use_reentrant=True)  # of whole layers, as DeepSpeed's, which needs a process group
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)
        first = next(m for m in model.base_model.layers if any(p.requires_grad for p in m.parameters()))
        first._gradient_checkpointing_func = partial(_with_input_gradient, again)
    model.train()
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # layers before the first trained one
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("way", ["full", "lora", "last layer"])
@pytest.mark.parametrize("name", MODELS)
def test_torch_counts_the_same(name: str, way: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.set_attn_implementation("eager")  # whose products are of whole squares, and counted as they are
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and ".layers." in name]
    sizes = flop_sizes(lambda key: getattr(model.config, key, None))
    shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert is_countable(shapes, sizes)
    if way == "lora":
        ends = [
            "query_key_value",
            "q_proj",
            "k_proj",
            "v_proj",
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
        ]
        # peft (0.21) takes down_proj for the routed experts' where these were linear layers once.
        ends += ["o_proj"] if "chosen" in sizes else ["down_proj"]
        ends = [end for end in ends if any(one.endswith(end) for one in linear)]
        planned = with_tuning(shapes, sizes, TuningConfig(method=TuningMethod.lora, rank=RANK, target_modules=ends))
        shapes, trained = planned.shapes, set(planned.trained)
        inject_adapter_in_model(LoraConfig(r=RANK, target_modules=ends), model)
        assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    elif way == "full":
        trained = set(shapes)
    else:
        trained = {name for name in shapes if f".layers.{sizes['layers'] - 1}." in name}
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name in trained)
    work = Work(ROWS * TOKENS, ROWS * TOKENS**2, ROWS * int(TRAINED.sum()))
    expected = formula(shapes, sizes, trained)
    forward, backward = counted(model, checkpointing)
    assert forward == expected.forward.flops(work)
    assert backward == expected.backward.flops(work) + checkpointing * expected.recomputed.flops(work)


def test_shapes_of_a_config_count_as_those_of_the_model() -> None:
    model = MODELS["glm"]()
    found = shapes_of_config(model.config.to_dict())
    assert found
    shapes, sizes = found
    real: Shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert formula(shapes, sizes) == formula(real, sizes)


def test_chatglm3_6b_by_hand() -> None:
    """6 FLOPs for each parameter that a token meets, and attention."""
    found = shapes_of_config(published_models()["ChatGLM3-6B"])
    assert found
    per_layer = 4096 * (4096 + 2 * 256) + 4096 * 4096 + 3 * 4096 * 13696
    work = Work(4096, causal_pairs([1000, 3000, 96]), 2000)
    pairs = 500500 + 4501500 + 4656
    needed = 6 * (28 * per_layer * 4096 + 65024 * 4096 * 2000) + 3 * 4 * 28 * 4096 * pairs
    assert formula(*found).model_flops(work) == needed
    assert formula(*found).hardware_flops(work) - needed == 2 * 28 * per_layer * 4096 + 4 * 28 * 4096 * pairs
    assert needed == pytest.approx(6 * 6e9 * 4096, rel=0.1)
    frozen = formula(*found, trained=set())
    assert frozen.model_flops(work) == frozen.forward.flops(work)


def test_a_saved_module_counts_once() -> None:
    found = shapes_of_config(MODELS["llama"]().config.to_dict())
    assert found
    lora = TuningConfig(method=TuningMethod.lora, save_modules=["lm_head"])
    planned, plain = with_tuning(*found, lora), with_tuning(*found, TuningConfig(method=TuningMethod.lora))
    with_head, without = (formula(one.shapes, one.sizes, one.trained) for one in (planned, plain))
    assert with_head.forward == without.forward
    head = with_head.backward.per_trained_token
    assert head == 2 * without.backward.per_trained_token == 4 * HIDDEN * VOCAB


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "qwen3_moe"])
def test_lora_on_routed_experts_counts_for_the_chosen_ones(name: str) -> None:
    torch.manual_seed(0)
    model = mixture(name)
    model.set_attn_implementation("eager")
    sizes = flop_sizes(lambda key: getattr(model.config, key, None))
    before: Shapes = {one: tuple(parameter.shape) for one, parameter in model.named_parameters()}
    queries, experts = ["q_proj", "k_proj", "v_proj"], ["experts.gate_up_proj", "experts.down_proj"]
    inject_lora(model, LoraConfig(r=RANK, target_modules=queries, target_parameters=experts), None)
    shapes: Shapes = {one: tuple(parameter.shape) for one, parameter in model.named_parameters()}
    expected = formula(shapes, sizes, {one for one in shapes if "lora_" in one})
    work = Work(ROWS * TOKENS, ROWS * TOKENS**2, ROWS * int(TRAINED.sum()))
    assert counted(model, checkpointing=False) == (expected.forward.flops(work), expected.backward.flops(work))
    lora = TuningConfig(method=TuningMethod.lora, rank=RANK, target_modules=[*queries, *experts])
    planned = with_tuning(before, sizes, lora)
    assert formula(planned.shapes, sizes, planned.trained) == expected


def test_a_learned_prefix_is_seen_by_every_token() -> None:
    shapes: Shapes = {"model.layers.0.self_attn.q_proj.weight": (8, 8), "prefix_encoder.0.weight": (5, 16)}
    sizes = {"layers": 1, "heads": 2, "head_size": 4}
    found = formula(shapes, sizes, {"prefix_encoder.0.weight"}, prefix_tokens=5)
    assert found.forward.flops(Work(3, 6, 0)) == 3 * 2 * 64 + (6 + 5 * 3) * 4 * 8
    assert found.backward.flops(Work(3, 6, 0)) == 2 * (6 + 5 * 3) * 4 * 8  # nothing trained lies before the matrix
