"""What the architectures of transformers have of their own, each in one process: weights, attention, loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import model_types
from tests.architectures import CONFIGS, WRAPPERS, built, write
from toolkit.config.schema import Attention, LossKernel
from toolkit.messages import ModelError
from toolkit.models import load_model
from toolkit.models.attention import choose_attention
from toolkit.models.fine_tuning import freeze_untrained
from toolkit.models.isolation import check_isolation
from toolkit.models.load import stream_parameters
from toolkit.models.load_weights import assign_state
from toolkit.models.loss import LossHead, token_loss_sum
from toolkit.models.record import record_of
from toolkit.models.stored_form import TransformersLayout
from toolkit.models.trainable import untrained_prefixes

NAMES = [*CONFIGS, *WRAPPERS]


@pytest.mark.parametrize("name", NAMES)
def test_tensor_by_tensor_is_as_transformers_loads_it(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / name, name)
    whole = load_model(folder)
    model, values = stream_parameters(folder)
    assign_state(model, dict(values))
    ids = torch.arange(3, 23).view(2, 10)
    assert torch.equal(model(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_without_logits_is_the_one_from_logits(name: str) -> None:
    """Also where the model bends its logits, of which the loss then takes notice."""
    torch.manual_seed(5)
    model: Any = built(name).train()
    ids = torch.randint(0, 900, (2, 20), generator=torch.Generator().manual_seed(2))
    segments = torch.ones_like(ids)
    segments[1, 15:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(segments == 0, -100), "segment_ids": segments}
    batch["position_ids"] = torch.arange(20).repeat(2, 1)
    found = []
    for kernel in (LossKernel.auto, LossKernel.full):
        record_of(model).loss_head = LossHead(kernel)
        model.zero_grad()
        torch.manual_seed(0)
        loss = token_loss_sum(model, batch)
        loss.backward()
        found.append(
            (loss.detach(), {key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None})
        )
    (loss, gradients), (expected, wanted) = found
    assert all(key.startswith(untrained_prefixes(model)) for key, _ in model.named_parameters() if key not in gradients)
    torch.testing.assert_close(loss, expected)
    for key in wanted:
        torch.testing.assert_close(gradients[key], wanted[key], atol=2e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_attention_that_is_more_than_pytorchs_is_written_out(name: str) -> None:
    """Gemma 2 bends its scores, gpt-oss has sinks: a kernel that does neither would train another model."""
    torch.manual_seed(5)
    model = built(name).eval()
    choose_attention(model, Attention.auto, packed=True, dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match=r"model.attention = varlen is not supported by \w+ \(its attention is more"):
        choose_attention(model, Attention.varlen, packed=True, dtype=torch.float32)


def test_packed_rows_that_a_model_cannot_take() -> None:
    """BLOOM makes its positions of a mask of two dimensions."""
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    choose_attention(model, Attention.auto, packed=True, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"packed rows: it rejects .* \(too many values.*data.packing=grouped"):
        check_isolation(model, 64, torch.device("cpu"), "bloom")


def test_more_in_the_files_than_is_read(tmp_path: Path) -> None:
    """The layer for predicting two tokens at once, which GLM-4.5's files have and transformers leaves out."""
    folder = write(tmp_path / "moe", "glm4_moe")
    wanted = load_model(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.46.eh_proj.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    model, values = stream_parameters(folder)
    assign_state(model, dict(values))
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "marian"])
def test_what_a_class_holds_constant_is_not_trained(kind: str, tmp_path: Path) -> None:
    """Biases of routers and sinusoidal positions, which transformers (5.23) loads as trained: weights decay."""
    built_model = model_types.built(kind)
    built_model.save_pretrained(tmp_path)
    constants = {name for name, parameter in built_model.named_parameters() if not parameter.requires_grad}
    model = load_model(tmp_path)
    assert constants and all(model.get_parameter(name).requires_grad for name in constants)
    freeze_untrained(model, tmp_path)
    assert constants <= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert model.get_input_embeddings().weight.requires_grad


def test_a_form_that_cannot_be_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

    joined = WeightConverter(["q_proj.weight", "k_proj.weight"], "o_proj.weight", [Concatenate(0), Transpose(0, 1)])
    monkeypatch.setattr("toolkit.models.stored_form.get_model_conversion_mapping", lambda model: [joined])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ModelError, match=r"LlamaForCausalLM stores .*q_proj.weight in another form.*Use zero=stage2"):
        TransformersLayout(model, {name: (32, 32)}).parameters(name)
