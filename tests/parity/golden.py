"""The reference numbers of the original ChatGLM code on tiny random weights, and how far from them we are.

The folders in tests/golden/chatglm hold weights in the official layout, inputs, and what the original computed from
them in float32 with torch 2.13 on a CPU (revisions in each meta.json).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from toolkit.models import load_model
from toolkit.models.chatglm.modeling import GlmLayout
from toolkit.models.record import record_of

GOLDEN = Path(__file__).parents[1] / "golden" / "chatglm"
SETS = ["v1", "v2", "v3", "glm4"]
# What separates right from wrong: right is at most 1e-5 away, the smallest of the wrong variants 1e-4.
LOGITS, LOSS, GRAD_NORM = 5e-5, 1e-5, 1e-5

Tensors = dict[str, torch.Tensor]


def load(name: str, attention: str = "sdpa") -> PreTrainedModel:
    """Return the model of a set, in float32."""
    model = load_model(GOLDEN / name, dtype=torch.float32)
    model.set_attn_implementation(attention)
    return model


def inputs(name: str, case: str) -> Tensors:
    """Return the arguments of one case."""
    found = load_file(GOLDEN / name / "inputs.safetensors")
    return {key.removeprefix(f"{case}."): value for key, value in found.items() if key.startswith(f"{case}.")}


def expected(name: str, case: str) -> Tensors:
    """Return what the original gave for one case."""
    found = load_file(GOLDEN / name / "expected.safetensors")
    return {key.removeprefix(f"{case}."): value for key, value in found.items() if key.startswith(f"{case}.")}


def cases(name: str) -> list[str]:
    """Return the names of the cases with logits."""
    found = load_file(GOLDEN / name / "inputs.safetensors")
    return sorted({key.split(".")[0] for key in found} - {"gen"})


def norm(parameters: Any) -> float:
    """Return the L2 norm over the gradients of all parameters."""
    return float(sum(parameter.grad.double().square().sum() for parameter in parameters) ** 0.5)


def distance(model: PreTrainedModel, name: str, case: str, **arguments: Any) -> tuple[float, float, float]:
    """Return the largest difference of a logit, that of the loss, and the relative one of the gradient's norm."""
    wanted = expected(name, case)
    model.zero_grad()
    found = model(**{**inputs(name, case), **arguments}, use_cache=False)
    found.loss.backward()
    valid = wanted.get("valid", expected(name, case.split(".")[-1]).get("valid"))
    return (
        float((found.logits.detach() - wanted["logits"]).abs().amax(-1)[valid].max()),
        abs(float(found.loss.detach()) - float(wanted["loss"])),
        abs(norm(model.parameters()) / float(wanted["grad_norm"]) - 1),
    )


def is_right(found: tuple[float, float, float]) -> bool:
    """Return whether all three are within the tolerances."""
    return found[0] <= LOGITS and found[1] <= LOSS and found[2] <= GRAD_NORM


def official_grad_norms(model: PreTrainedModel, name: str) -> dict[str, float]:
    """Return the norm of each official parameter's gradient."""
    parameters = dict(model.named_parameters())
    if name == "v1":
        return {key: norm([value]) for key, value in parameters.items()}
    layout = GlmLayout(model.config, interleaved=False)
    keys = [key for key in record_of(model).origin.tensors if layout.parameters(key)]
    return {key: norm([parameters[part] for part in layout.parameters(key)]) for key in keys}


def vocabulary(family: str) -> dict[str, Any]:
    """Return the reference ids of a tiny vocabulary in the official format."""
    return dict(json.loads((GOLDEN / f"tok_{family}" / "expected.json").read_text(encoding="utf-8")))


def lines() -> list[str]:
    """Return the lines of text that the ids belong to."""
    return list(json.loads((GOLDEN / "lines.json").read_text(encoding="utf-8")))
