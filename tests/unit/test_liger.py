"""liger-kernel: chosen, refused and called as its release 0.8.5 has it, by a stand-in that records. No GPU is here."""

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch.nn import functional

from toolkit.config.schema import KernelsConfig, LossKernel, When
from toolkit.distributed import accelerator
from toolkit.messages import ConfigError
from toolkit.models.loss import LossHead, LossPath, loss_head, token_loss_sum
from toolkit.models.record import record_of
from toolkit.tasks.language_model import apply_liger


class FusedLoss:
    """Takes what liger's LigerFusedLinearCrossEntropyLoss takes."""

    def __init__(self, *, reduction: str, accum_dtype: torch.dtype) -> None:
        assert (reduction, accum_dtype) == ("sum", torch.float32)

    def __call__(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        CALLS.append(("loss", tuple(_input.shape)))
        return functional.cross_entropy(functional.linear(_input, lin_weight, bias), target, reduction="sum")


CALLS: list[Any] = []


class Model(torch.nn.Module):
    """As little of a language model as there can be."""

    def __init__(self, kind: str = "llama") -> None:
        super().__init__()
        self.config = types.SimpleNamespace(model_type=kind, _attn_implementation="sdpa")
        self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
        self.device = torch.device("cpu")

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the output layer."""
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> types.SimpleNamespace:
        """Run the model."""
        return types.SimpleNamespace(logits=self.head(self.embedding(input_ids)))


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def is_installed(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    """Let Python find the package, or not; others are found as they are, by what transformers imports meanwhile."""
    others = importlib.util.find_spec
    answers = {"liger_kernel": object() if answer else None}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *at: answers[name] if name in answers else others(name, *at)
    )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and the package."""
    CALLS.clear()
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    transformers = modules["liger_kernel.transformers"]
    transformers.LigerFusedLinearCrossEntropyLoss = FusedLoss

    def apply(model: Any, **options: Any) -> None:
        CALLS.append(("layers", model.config.model_type, options))

    known = {"llama": apply, "phi3": apply}
    transformers._apply_liger_kernel_to_instance = lambda model, **options: known[model.config.model_type](
        model=model, **options
    )
    modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN = known
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    is_installed(monkeypatch, True)
    monkeypatch.setattr(accelerator, "trains_on_cuda", lambda: True)


@pytest.mark.usefixtures("package")
def test_layers() -> None:
    own_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    for when in (When.auto, When.always):
        assert apply_liger(Model(), KernelsConfig(liger=when)) == ""
        assert CALLS.pop() == ("layers", "llama", own_loss)
    assert apply_liger(Model("glm"), KernelsConfig()) == ""
    assert CALLS.pop() == ("layers", "glm", {"rope": False, **own_loss})
    assert apply_liger(Model(), KernelsConfig(liger=When.never)) == "kernels.liger is never"
    assert apply_liger(Model("chatglm"), KernelsConfig()) == "liger-kernel does not know chatglm models"
    with pytest.raises(ConfigError, match=r"kernels\.liger = always: liger-kernel does not know chatglm models"):
        apply_liger(Model("chatglm"), KernelsConfig(liger=When.always))
    assert not CALLS


def test_layers_of_glm_are_those_of_phi3_but_for_rotary_positions() -> None:
    """What Liger does to a Phi-3's layers is right for a GLM's, as long as transformers' code of both is the same."""
    import inspect

    from transformers.models.glm import modeling_glm as glm
    from transformers.models.phi3 import modeling_phi3 as phi3

    def code(function: Any) -> str:
        return inspect.getsource(function).replace("FloatTensor", "Tensor")

    assert code(glm.GlmRMSNorm.forward) == code(phi3.Phi3RMSNorm.forward)
    assert code(glm.GlmMLP.forward) == code(phi3.Phi3MLP.forward)
    assert code(glm.rotate_half) != code(phi3.rotate_half)
    own, other = (
        {name for name, _ in layer.named_children()}
        for layer in (
            glm.GlmDecoderLayer(glm.GlmConfig(**SMALL), 0),
            phi3.Phi3DecoderLayer(phi3.Phi3Config(**SMALL), 0),
        )
    )
    assert own <= other


def test_not_here() -> None:
    assert apply_liger(Model(), KernelsConfig()) == "there is no GPU"
    with pytest.raises(ConfigError, match=r"kernels\.liger = always: there is no GPU"):
        apply_liger(Model(), KernelsConfig(liger=When.always))
    with pytest.raises(ConfigError, match=r"kernels\.loss = liger: there is no GPU"):
        apply_liger(Model(), KernelsConfig(loss=LossKernel.liger, liger=When.never))


@pytest.mark.usefixtures("package")
def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_installed(monkeypatch, False)
    reason = r"the package liger-kernel is not installed \(pip install liger-kernel\)"
    with pytest.raises(ConfigError, match=rf"kernels\.loss = liger: {reason}"):
        apply_liger(Model(), KernelsConfig(loss=LossKernel.liger))
    assert apply_liger(Model(), KernelsConfig()).startswith("the package liger-kernel is not installed")


@pytest.mark.usefixtures("package")
def test_loss() -> None:
    """The kernel gets the trained tokens' states alone; where none is trained it is not asked."""
    model = Model()
    ids = torch.arange(8)[None]
    labels = torch.where(ids > 4, ids, -100)
    batch = {"input_ids": ids, "labels": labels, "position_ids": ids, "segment_ids": torch.ones_like(ids)}
    expected = token_loss_sum(model, batch)
    assert not CALLS
    record_of(model).loss_head = LossHead(LossKernel.liger)
    assert loss_head(model).path(model) is LossPath.losses
    torch.testing.assert_close(token_loss_sum(model, batch), expected)
    assert CALLS == [("loss", (3, 4))]
    assert token_loss_sum(model, {**batch, "labels": torch.full_like(ids, -100)}) == 0
    assert len(CALLS) == 1
