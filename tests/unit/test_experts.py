"""Experts divided over ranks: what each reads of a directory, and what cannot be divided. Training: tests/ranks."""

import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model

from tests.architectures import CONFIGS, write
from toolkit.config.load import load
from toolkit.layouts import experts
from toolkit.messages import ConfigError, ModelError
from toolkit.models import experts as model_experts, load_model, weights
from toolkit.models.adapters import attach_adapter, in_stored_shape
from toolkit.models.base_model import BaseModel, base_of
from toolkit.models.fine_tuning import apply_tuning
from toolkit.models.lora import ADAPTER, inject_lora, quantize, quantize_layer, without_adapter
from toolkit.models.record import tuning_state
from toolkit.models.structure import trained_names


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_each_rank_reads_its_experts_and_the_rest(name: str, tmp_path: Path) -> None:
    """Whether a directory has experts one by one or all of a layer in one tensor; what is float32 stays so."""
    folder = write(tmp_path / name, name)
    whole = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for rank in range(2):
        keep = partial(experts.keep_own_experts, rank=rank, ranks=2, group="group")
        model = load_model(folder, dtype=torch.bfloat16, needed_rows=keep)
        divided = 0
        for key, value in model.state_dict().items():
            assert not value.is_meta, key
            size, expected = value.size(0), whole[key]
            if ".experts." in key:
                divided += 1
                assert size == whole[key].size(0) // 2
                assert model.get_parameter(key).allreduce is False
                expected = expected[rank * size : (rank + 1) * size]
            assert value.dtype is theirs[key].dtype, key  # routers' biases, and from 5.24 on routers, stay float32
            assert value.equal(expected.to(value.dtype)), key
        assert divided


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("llama", 2, "parallel.expert = 2 is incompatible with LlamaForCausalLM: it has no routed experts"),
        ("glm4_moe", 3, "parallel.expert = 3 is incompatible with Glm4MoeForCausalLM: its 4 experts cannot be divided"),
    ],
)
def test_what_cannot_be_divided(name: str, ranks: int, message: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with pytest.raises(ModelError, match=message):
        experts.check_divides(model, ranks)


TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]


def lora_of(folder: Path, *, computed_by_peft: bool = False) -> transformers.PreTrainedModel:
    """Return a directory's model with LoRA on its experts, which changes what it computes."""
    model = load_model(folder, dtype=torch.float32).train()
    config = LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS[:1], target_parameters=TARGETS[1:])
    torch.manual_seed(4)
    if computed_by_peft:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    else:
        inject_lora(model, config, None)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data = torch.randn(parameter.numel(), generator=draw).view(parameter.shape) * 0.1
    return model


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "gpt_oss"])
def test_lora_of_experts_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / name, name)
    ours, theirs = lora_of(folder), lora_of(folder, computed_by_peft=True)
    ids = torch.randint(0, 900, (2, 12), generator=torch.Generator().manual_seed(2))
    assert sum("lora_" in key and "experts" in key for key, _ in ours.named_parameters()) == 4 * (
        2 if name != "glm4_moe" else 1
    )
    for model in (ours, theirs):
        model(ids, use_cache=False).logits.square().mean().backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (expected[key].grad is None), key
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[key].grad.view(parameter.shape), atol=1e-6, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
        with without_adapter(ours):
            plain = load_model(folder, dtype=torch.float32)
            torch.testing.assert_close(ours(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(plain(ids).logits, theirs(ids).logits, atol=1e-3)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "glm4_moe_lite"])
def test_a_router_is_trained_beside_lora(name: str, tmp_path: Path) -> None:
    """`save_modules`: its gradients are those of peft's own copy, with which it computes; nothing else's change."""
    folder = write(tmp_path / name, name)
    attention = "q_b_proj" if name == "glm4_moe_lite" else "q_proj"
    words = [f"tuning.target_modules=[{attention}]", "tuning.rank=2", "tuning.save_modules=[mlp.gate]"]
    ours, theirs = (load_model(folder, dtype=torch.float32).train() for _ in range(2))
    tuning = load(["recipe=quickstart", "model=hf", "tuning=lora", *words]).cfg.tuning
    apply_tuning(ours, tuning, folder, None, 1)  # type: ignore[arg-type]
    config = LoraConfig(r=2, lora_alpha=tuning.alpha, target_modules=[attention], modules_to_save=["mlp.gate"])
    inject_adapter_in_model(config, theirs, adapter_name=ADAPTER)
    assert trained_names(ours) == trained_names(theirs)
    routers = [key for key in trained_names(ours) if key.endswith("mlp.gate.modules_to_save.default.weight")]
    ids = torch.randint(0, 900, (2, 12), generator=torch.Generator().manual_seed(2))
    theirs.load_state_dict(ours.state_dict())
    found = []
    for model in (ours, theirs):
        with torch.no_grad():  # what is computed with is the copy
            for key in routers:
                weight = model.get_parameter(key)
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        found.append(model(ids, use_cache=False).logits)
        found[-1].square().mean().backward()
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    plain = load_model(folder, dtype=torch.float32)(ids).logits
    assert routers and not torch.allclose(plain, found[0], atol=1e-3)
    for key in trained_names(ours):
        mine, expected = ours.get_parameter(key).grad, theirs.get_parameter(key).grad
        torch.testing.assert_close(mine, expected, atol=1e-7, rtol=1e-4)
        assert key not in routers or mine.abs().max() > 0


@pytest.mark.parametrize("words", ["tuning.dropout=0.1", "tuning.dora=true"])
def test_what_peft_has_for_linear_layers_alone(words: str, tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "m", "qwen3_moe"))
    cfg = load(["recipe=quickstart", "model=hf", "tuning=lora", "tuning.target_modules=[experts.down_proj]", words]).cfg
    with pytest.raises(ConfigError, match=r"peft has it for linear layers alone, and .*0\.mlp\.experts\.down_proj is"):
        apply_tuning(model, cfg.tuning, tmp_path / "m", None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss"])
def test_experts_in_4_bits(name: str, tmp_path: Path) -> None:
    """They compute what their values of 4 bits do in 32; half a byte a number, and nothing of it kept expanded."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder = write(tmp_path / name, name)
    small, plain = (load_model(folder, dtype=torch.float32).train() for _ in range(2))
    quantize(small)
    for key in model_experts.expert_matrix_names(plain):
        packed, whole = small.get_parameter(key), plain.get_parameter(key)
        assert packed.data.nbytes * 2 == whole.numel()
        assert packed.quant_state.shape == whole.shape
        whole.data = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    for key, part in small.named_modules():
        if isinstance(part, bitsandbytes.nn.Linear4bit):
            state = part.weight.quant_state
            plain.get_parameter(f"{key}.weight").data = bitsandbytes.functional.dequantize_4bit(part.weight.data, state)
    ids = torch.randint(0, 900, (2, 12), generator=torch.Generator().manual_seed(2))
    sizes = {plain.get_parameter(key).nbytes for key in model_experts.expert_matrix_names(plain)}
    kept: list[torch.Tensor] = []
    for model in (small, plain):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            logits = model(inputs_embeds=embedded, use_cache=False).logits
        logits.square().mean().backward()
        model.found = logits.detach(), embedded.grad, sum(one.untyped_storage().nbytes() in sizes for one in kept)
        kept.clear()
    torch.testing.assert_close(small.found[0], plain.found[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(small.found[1], plain.found[1], atol=1e-6, rtol=1e-3)
    assert small.found[2] == 0 < plain.found[2]


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss"])
def test_weights_are_quantized_as_they_are_read(name: str, tmp_path: Path) -> None:
    """The same as afterwards, and in the precision that is asked for, whatever is read first."""
    pytest.importorskip("bitsandbytes")
    folder = write(tmp_path / name, name)
    early, late = (
        load_model(folder, dtype=torch.bfloat16, ready=quantize_layer),
        load_model(folder, dtype=torch.bfloat16),
    )
    quantize(early)
    quantize(late)
    values, others = dict(early.state_dict()), dict(late.state_dict())
    assert values.keys() == others.keys()
    assert all(value.equal(others[key]) for key, value in values.items())
    linear = [one for one in early.modules() if hasattr(one, "compute_dtype")]
    assert linear and {one.compute_dtype for one in linear} == {torch.bfloat16}
    assert base_of(early, folder) == base_of(load_model(folder, dtype=torch.bfloat16), folder)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("q_proj,down_proj", {"self_attn.q_proj", "mlp.experts"}),
        ("*.mlp.*", {"mlp.experts", "mlp.experts.base_layer"}),
    ],
)
def test_what_peft_would_put_at_the_experts(
    targets: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linear layers that are called as single experts were are left out and told, and never become the experts'."""
    folder = write(tmp_path / "m", "glm4_moe")
    model = load_model(folder)
    words = ["recipe=quickstart", "model=hf", "tuning=lora", f"tuning.target_modules=[{targets}]"]
    apply_tuning(model, load(words).cfg.tuning, folder, None, 1)  # type: ignore[arg-type]
    added = {name.partition(".lora_")[0].split(".", 3)[3] for name in trained_names(model)}
    assert added == expected
    assert "such as model.layers.0.mlp.down_proj: peft would load it" in capsys.readouterr().out
    loaded = load_model(folder)
    attach_adapter(loaded, tuning_state(model).settings, BaseModel("", {}))
    assert trained_names(loaded) == trained_names(model)
    model = load_model(folder)
    words[-1] = "tuning.target_modules=[shared_experts.up_proj]"
    with pytest.raises(ConfigError, match=r"peft would load LoRA on .*1\.mlp\.shared_experts\.up_proj into"):
        apply_tuning(model, load(words).cfg.tuning, folder, None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [2, 8])
def test_the_grouped_kernel_takes_what_lora_gives_it(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU computes in bf16, with PyTorch's kernel for CPUs, which is as strict about how numbers lie."""
    model = load_model(write(tmp_path / "m", "qwen3_moe"), dtype=torch.bfloat16).train()
    torch.manual_seed(4)
    inject_lora(model, LoraConfig(r=rank, target_modules=[], target_parameters=TARGETS[1:]), None)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 900, (2, 12), generator=torch.Generator().manual_seed(2))
    found = []
    for has_kernel in (False, True):
        monkeypatch.setattr(model_experts, "_has_kernel", lambda rows, has_kernel=has_kernel: has_kernel)
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        logits.float().square().mean().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append([logits.detach().float(), *(one.grad.float() for one in trained)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_what_replaces_their_forward_pass_is_undone(tmp_path: Path) -> None:
    """liger-kernel binds a function to each layer's experts, which knows neither LoRA nor other ranks."""
    model = load_model(write(tmp_path / "m", "qwen3_moe"))
    ids = torch.arange(12)[None]
    before = model(ids).logits
    for layer in model.model.layers:
        layer.mlp.experts.forward = lambda states, *_: states
    assert not torch.equal(model(ids).logits, before)
    model_experts.restore_expert_interface(model)
    assert torch.equal(model(ids).logits, before)


def test_only_loras_second_factor_is_written_as_a_matrix(tmp_path: Path) -> None:
    """Experts that are trained in full beside an adapter keep their shape in its file."""
    folder = write(tmp_path / "m", "qwen3_moe")
    model = load_model(folder)
    words = ["recipe=quickstart", "model=hf", "tuning=lora", "tuning.target_modules=[q_proj]"]
    cfg = load([*words, "tuning.save_modules=[experts]"]).cfg
    apply_tuning(model, cfg.tuning, folder, None, 1)  # type: ignore[arg-type]
    kept = [name for name in trained_names(model) if "modules_to_save" in name]
    assert len(kept) == 4
    for name in kept:
        assert in_stored_shape(name, model.get_parameter(name)).shape == model.get_parameter(name).shape


def test_divided_experts_are_not_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(write(tmp_path / "m", "qwen3_moe"))
    for name in model_experts.expert_matrix_names(model):
        model_experts.mark_as_divided(model.get_parameter(name), "group")
    monkeypatch.setattr(model_experts, "pretend_full_expert_shapes", nullcontext)
    with pytest.raises(ConfigError, match=r"tuning.save_modules: .*mlp.experts holds experts, which parallel.expert"):
        inject_lora(model, LoraConfig(r=2, target_modules=["k_proj"], modules_to_save=["experts"]), None)


def test_buffers_that_no_file_holds_are_computed(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "gemma3")
    model = load_model(folder, needed_rows=lambda empty: dict.fromkeys(weights.shapes_of(empty), slice(None)))
    assert not any(buffer.is_meta for buffer in model.buffers())
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, load_model(folder, dtype="auto")(ids).logits)
