"""How the tensors of a folder become the parameters of a model, and back."""

import re
from typing import Any, Protocol

import torch

from toolkit.models.chatglm.glm import GlmLayout

Shapes = dict[str, tuple[int, ...]]


class Layout(Protocol):
    """The names and shapes of one kind of folder."""

    def parameters(self, name: str) -> list[str]:
        """Return the parameters that a stored tensor fills, [] if it is not read."""
        ...

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return a stored tensor's parts, in the order of `parameters`."""
        ...

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Undo `split`."""
        ...

    def place(self, name: str) -> Any:
        """Return the index at which the parts stand in their parameters, `...` if they fill them."""
        ...

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape a tensor must have to fill parameters of these shapes."""
        ...


class SameNames:
    """Each tensor fills the parameter of its own name.

    Args:
        ignored: ends of the names that are computed instead of read.
    """

    def __init__(self, ignored: tuple[str, ...] = ()) -> None:
        self._ignored = ignored

    def parameters(self, name: str) -> list[str]:
        """Return the name itself; see `Layout`."""
        return [] if self._ignored and name.endswith(self._ignored) else [name]

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor itself; see `Layout`."""
        return [value]

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the one part; see `Layout`."""
        return parts[0]

    def place(self, name: str) -> Any:
        """Return that it fills the parameter; see `Layout`."""
        return ...

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the parameter's own shape; see `Layout`."""
        return shapes[name]


def official_layout(config: Any, interleaved: bool) -> Layout:
    """Return the official layout of a ChatGLM.

    Args:
        config: the model's, a ChatGLMConfig or a GlmConfig.
        interleaved: see `GlmLayout`.
    """
    if config.model_type == "glm":
        return GlmLayout(config, interleaved)
    return SameNames(ignored=(".rotary_emb.inv_freq",))


class FusedExperts(SameNames):
    """transformers keeps the experts of a layer in one tensor and stores them one by one, gate and up apart.

    As transformers 5.23's conversion of qwen2_moe, which GLM-4.5 and later share.

    Args:
        shapes: of the model's parameters.
    """

    _EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self._shapes = shapes

    def parameters(self, name: str) -> list[str]:
        """Return the joint parameter of all experts; see `Layout`."""
        found = self._EXPERT.fullmatch(name)
        if found is None:
            return [name]
        joint = f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"
        return [joint if joint in self._shapes else name]

    def place(self, name: str) -> Any:
        """Return the expert's own part of the joint parameter; see `Layout`."""
        found, [parameter] = self._EXPERT.fullmatch(name), self.parameters(name)
        if found is None or parameter == name:
            return ...
        if found[3] == "down":
            return int(found[2])
        half = self._shapes[parameter][1] // 2
        return int(found[2]), slice(0, half) if found[3] == "gate" else slice(half, 2 * half)

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of one expert's matrix; see `Layout`."""
        [parameter], place = self.parameters(name), self.place(name)
        if place is ...:
            return shapes[parameter]
        _, rows, columns = shapes[parameter]
        return (rows if isinstance(place, int) else rows // 2, columns)
