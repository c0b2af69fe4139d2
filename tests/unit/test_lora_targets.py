"""Which layers LoRA is added to by default: what it reaches, what peft makes of it, and what the plan counts."""

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.architectures import CONFIGS, GROUPED, HEADS, SIZES, built
from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.export import merge
from toolkit.export.adapter import write_adapter
from toolkit.messages import ConfigError
from toolkit.models import adapters, base_model, load_model, outline, probe
from toolkit.models.fine_tuning import apply_tuning
from toolkit.models.load_weights import assign_state
from toolkit.models.lora import choose_targets
from toolkit.models.record import tuning_state
from toolkit.models.structure import trained_names
from toolkit.plan.outline import with_tuning

LORA = TuningConfig(method=TuningMethod.lora, rank=4)
TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
ATTENTION = {f"self_attn.{letter}_proj" for letter in "qkvo"}
HYBRIDS: dict[str, tuple[Any, set[str]]] = {
    "gated delta net": (
        lambda: transformers.Qwen3_5TextConfig(**HEADS, **DELTA, **TWO_KINDS),
        ATTENTION
        | {f"linear_attn.{end}" for end in ("out_proj", *(f"in_proj_{letter}" for letter in "ab"))}
        | {"linear_attn.in_proj_qkv", "linear_attn.in_proj_z"},
    ),
    "state space beside attention": (
        lambda: transformers.FalconH1Config(**HEADS, **MAMBA, mamba_d_ssm=64),
        ATTENTION | {"mamba.in_proj"},
    ),
    "short convolution": (
        lambda: transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        {f"self_attn.{end}" for end in ("q_proj", "k_proj", "v_proj", "out_proj")} | {"conv.in_proj", "conv.out_proj"},
    ),
    "blocks of one name": (
        lambda: transformers.MiniMaxConfig(**HEADS, **TWO_KINDS, num_local_experts=2, num_experts_per_tok=1),
        ATTENTION | {"self_attn.qkv_proj", "self_attn.out_proj", "self_attn.output_gate"},
    ),
    "state space alone": (
        lambda: transformers.Mamba2Config(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1
        ),
        {"mixer.in_proj"},
    ),
}
OTHERS: dict[str, tuple[Any, set[str]]] = {
    "turned weights": (CONFIGS["gpt2"], {"attn.c_attn"}),
    "layers called by numbers": (
        lambda: transformers.CTRLConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, dff=48, n_positions=64),
        {f"multi_head_attention.{end}" for end in ("Wq", "Wk", "Wv", "dense")} | {"ffn.0", "ffn.2"},
    ),
    "two lists of layers": (
        lambda: transformers.HrmTextConfig(**HEADS | {"num_hidden_layers": 8}, num_layers_per_stack=1),
        ATTENTION - {"self_attn.o_proj"},
    ),
    "a head with names of layers": (
        lambda: transformers.BertConfig(**SIZES, is_decoder=True),
        {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
        | {"intermediate.dense", "output.dense"},
    ),
    "dense": (CONFIGS["llama"], ATTENTION - {"self_attn.o_proj"}),
}


def in_layers(model: Any) -> set[str]:
    """Return the names within a layer of what has LoRA."""
    names = {name.partition(".lora_")[0] for name in trained_names(model)}
    return {re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in names}


@pytest.mark.parametrize("name", [*HYBRIDS, *OTHERS])
def test_default_targets_are_what_peft_takes_and_the_plan_counts(name: str, tmp_path: Path) -> None:
    make, expected = (HYBRIDS | OTHERS)[name]
    base = tmp_path / "base"
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(make()).save_pretrained(base)
    model, ids = load_model(base), torch.arange(5, 25)[None]
    apply_tuning(model, LORA, base, None, 1)  # type: ignore[arg-type]
    assert in_layers(model) == expected
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    logits = model.eval()(ids, use_cache=False).logits
    state = {stored: model.get_parameter(key).detach() for key, stored in adapters.stored_names(model).items()}
    folder = tmp_path / "adapter"
    write_adapter(state, tuning_state(model).describe(), folder, probe.capture(model, probe.spread_ids(model.config)))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = plain.eval()(ids, use_cache=False).logits
    assert (logits - without).abs().max() > 0.1 * without.std()
    torch.testing.assert_close(
        peft.PeftModel.from_pretrained(plain, folder).eval()(ids, use_cache=False).logits, logits
    )
    read = adapters.read_settings(folder), base_model.read_base(folder), base, adapters.read_adapter_weights(folder)
    plan, values = merge.merge_adapter(merge.TunedPart(folder, *read))
    assign_state(plan.model, dict(values))
    merged = plan.model.float().eval()(ids, use_cache=False).logits
    assert (merged - logits).abs().max() < 1e-4 * logits.std()
    measured = outline.outline(base)
    shapes = {key: tuple(shape) for key, shape in measured["shapes"].items()}
    counted = with_tuning(shapes, measured["sizes"], LORA, measured["targets"])
    trained = {key: tuple(model.get_parameter(key).shape) for key in trained_names(model)}
    assert {key: counted.shapes[key] for key in counted.trained} == trained


def test_what_is_reached_in_part_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(HYBRIDS["gated delta net"][0]())
    assert choose_targets(model, TuningConfig(target_modules=["q_proj", "v_proj"])) == (["q_proj", "v_proj"], [])
    assert "LoRA reaches 1 of 2 layers" in capsys.readouterr().out
    choose_targets(model, TuningConfig())
    assert "reaches" not in capsys.readouterr().out


def test_what_code_reads_past_its_layer_gets_no_lora(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels for state spaces take the weight of `out_proj` itself, where an addition beside it has no part."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(HYBRIDS["state space alone"][0]())
    assert choose_targets(model, TuningConfig(target_modules=["all-linear"])) == (["in_proj"], [])
    assert "such as backbone.layers.0.mixer.out_proj: the model's code reads" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"LoRA on backbone\.layers\.0\.mixer\.out_proj would do nothing"):
        choose_targets(model, TuningConfig(target_modules=["out_proj"]))


INSIDE = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
VLLM_PREFIXES: dict[str, dict[str, str]] = {
    "qwen2_5_vl": {**INSIDE, "model.": "language_model.model."},
    "qwen3_vl": INSIDE,
    "qwen3_5": INSIDE,
    "gemma3_images": INSIDE,
    "gemma4_images": {**INSIDE, "model": "language_model.model"},
    "mistral3": {**INSIDE, "model.": "language_model.model."},
    "ministral3": {**INSIDE, "model.": "language_model.model."},
    "glm4v": INSIDE,
    "internvl": INSIDE,
    "llama4": {},
}
"""Of vLLM 0.33.0's classes for such models, `hf_to_vllm_mapper.orig_to_new_prefix` as it concerns the text model: what
vLLM makes of the start of an adapter's names without base_model.model., one rule after another.
"""


@pytest.mark.parametrize("kind", VLLM_PREFIXES)
def test_vllm_finds_the_layers_of_an_adapter_of_a_multimodal_model(kind: str, tmp_path: Path) -> None:
    """Names that it does not find are ignored by vLLM without a word, and answers are the base's."""
    model = built(kind)
    apply_tuning(model, LORA, tmp_path, None, seed=0)  # type: ignore[arg-type]
    names = set(adapters.stored_names(model).values())
    assert len(names) > 8
    for name in names:
        inner = name.removeprefix("base_model.model.")
        assert inner != name
        for start, replaced in VLLM_PREFIXES[kind].items():
            inner = replaced + inner.removeprefix(start) if inner.startswith(start) else inner
        assert re.match(r"language_model\.model\.layers\.[01]\.\w+\.", inner), name
