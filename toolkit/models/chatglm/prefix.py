"""P-Tuning v2 prefixes in the official layout: learned keys and values that stand before every layer's own.

Liu et al. 2021, https://arxiv.org/abs/2110.07602. P prefix length, L layers, W = 2 * L * width of one layer's
keys.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

PREFIX = "transformer.prefix_encoder."
"""What the names of its tensors begin with in official checkpoints."""


class PrefixEncoder(nn.Module):
    """The prefix of one model. Parameters carry the official names (`embedding`, `trans.0`, `trans.2`).

    Args:
        num_tokens: P.
        num_layers: L.
        num_heads: heads of the keys (groups, where heads share them).
        head_size: width of a head.
        embedding_size: width of the embedding under `projection_size`.
        projection_size: width of the MLP between the embedding and the keys; 0: no MLP, the embedding is `[P, W]`.
        dropout: of keys and values in training; the original's is 0.1.
    """

    def __init__(
        self,
        num_tokens: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        embedding_size: int = 0,
        projection_size: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
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

    def forward(self) -> torch.Tensor:
        """Return keys and values of all layers, [2 * L, heads, P, head_size]."""
        places = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        states = self.embedding(places)  # looked up, so that ZeRO-3 fetches it
        if self.trans is not None:
            states = self.trans(states)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, self.num_heads, self.head_size)
        return states.permute(1, 2, 0, 3)

    def states(self, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values for so many rows, [B, heads, P, head_size] each.

        The keys are not rotated. Positions of the tokens that follow start at 0, not at P; a `[B, S]` attention mask
        gets P ones in front.
        """
        states = self()[:, None].expand(-1, batch_size, -1, -1, -1)
        states = functional.dropout(states, self.dropout, self.training)  # of each row for itself, as the original's
        return [(states[2 * layer], states[2 * layer + 1]) for layer in range(self.num_layers)]


def prefix_for(model: PreTrainedModel, num_tokens: int, projection: bool, dropout: float = 0.0) -> PrefixEncoder:
    """Return an untrained prefix with the official sizes for a ChatGLM model.

    Args:
        model: what `load_model` returns.
        num_tokens: P.
        projection: with the MLP.
        dropout: see `PrefixEncoder`.
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
        dropout=dropout,
    )
