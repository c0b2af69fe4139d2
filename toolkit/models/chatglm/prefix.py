"""P-Tuning v2 prefixes in the official layout: learned keys and values that stand before every layer's own.

Liu et al. 2021, https://arxiv.org/abs/2110.07602. P prefix length, L layers, W = 2 * L * width of one layer's
keys.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.weights import unpickle

_PREFIX = "transformer.prefix_encoder."


class PrefixEncoder(nn.Module):
    """The prefix of one model. Parameters carry the official names (`embedding`, `trans.0`, `trans.2`).

    Args:
        num_tokens: P.
        num_layers: L.
        num_heads: heads of the keys (groups, where heads share them).
        head_size: width of a head.
        embedding_size: width of the embedding under `projection_size`.
        projection_size: width of the MLP between the embedding and the keys; 0: no MLP, the embedding is `[P, W]`.
    """

    def __init__(
        self,
        num_tokens: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        embedding_size: int = 0,
        projection_size: int = 0,
    ) -> None:
        super().__init__()
        self.num_tokens, self.num_layers = num_tokens, num_layers
        self.num_heads, self.head_size = num_heads, head_size
        width = 2 * num_layers * num_heads * head_size
        self.trans: nn.Module | None = None
        if projection_size:
            self.embedding = nn.Embedding(num_tokens, embedding_size)
            self.trans = nn.Sequential(
                nn.Linear(embedding_size, projection_size), nn.Tanh(), nn.Linear(projection_size, width)
            )
        else:
            self.embedding = nn.Embedding(num_tokens, width)

    def forward(self, batch_size: int) -> DynamicCache:
        """Return the prefix as a cache for `batch_size` rows: keys and values `[B, heads, P, head_size]` per layer.

        The keys are not rotated. Positions of the tokens that follow start at 0, not at P; a `[B, S]` attention mask
        gets P ones in front.
        """
        states = self.embedding.weight if self.trans is None else self.trans(self.embedding.weight)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, self.num_heads, self.head_size)
        states = states.permute(1, 2, 0, 3)[:, None].expand(-1, batch_size, -1, -1, -1)  # [2L, B, heads, P, size]
        cache = DynamicCache()
        for layer in range(self.num_layers):
            cache.update(states[2 * layer], states[2 * layer + 1], layer)
        return cache


def prefix_for(model: PreTrainedModel, num_tokens: int, projection: bool) -> PrefixEncoder:
    """Return an untrained prefix with the official sizes for a ChatGLM model.

    Args:
        model: what `load_model` returns.
        num_tokens: P.
        projection: with the MLP.
    """
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 2 * config.num_hidden_layers * heads * head_size
    return PrefixEncoder(
        num_tokens,
        config.num_hidden_layers,
        heads,
        head_size,
        # ChatGLM-6B embeds in the hidden width, its successors in the full one.
        embedding_size=config.hidden_size if config.model_type == "chatglm" else width,
        projection_size=config.hidden_size if projection else 0,
    )


def load_prefix(path: str | Path, model: PreTrainedModel) -> PrefixEncoder:
    """Load a prefix that was trained for a model.

    Args:
        path: safetensors, or a pickled file of tensors such as an official checkpoint's pytorch_model.bin; other
            tensors in it are not read (ChatGLM-6B's own training also saved lm_head).
        model: the model it belongs to.

    Raises:
        ModelError: the file holds no prefix, or one for a model of another size.
    """
    values = {
        name.removeprefix(_PREFIX): value for name, value in _read(Path(path)).items() if name.startswith(_PREFIX)
    }
    if "embedding.weight" not in values:
        raise ModelError(tr("{file} holds no prefix ({name}).", file=path, name=_PREFIX + "embedding.weight"))
    encoder = prefix_for(model, len(values["embedding.weight"]), "trans.0.weight" in values)
    expected = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in values.items()}
    if found != expected:
        raise ModelError(
            tr(
                "the prefix in {file} does not fit the model: it has {found}, the model needs {expected}.",
                file=path,
                found=found,
                expected=expected,
            )
        )
    encoder.load_state_dict(values, assign=True)
    return encoder


def save_prefix(encoder: PrefixEncoder, path: str | Path) -> None:
    """Save a prefix under the official names, in its own precision, as safetensors.

    Raises:
        ModelError: the file exists.
    """
    if Path(path).exists():
        raise ModelError(tr("{folder} exists already: nothing was written. Name another folder.", folder=path))
    state = {_PREFIX + name: value.detach().contiguous() for name, value in encoder.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 -- not a dict
    return unpickle(file, mapped=False)
