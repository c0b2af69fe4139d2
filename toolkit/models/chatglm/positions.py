"""ChatGLM-6B's positions and masks. B batch, S sequence, N heads, D head size.

A row is `context [gMASK] <sop> answer`: the context, all before the first <sop>, is seen by every token, what follows
is causal. Position channel 0 counts the context and stays at the mask token's place afterwards; channel 1 is 0 in the
context and counts 1, 2, 3 … from <sop> on. GLM, Du et al. 2022, https://arxiv.org/abs/2103.10360, section 2.
"""

from typing import Protocol

import torch

from toolkit.errors import ModelError
from toolkit.messages import tr

_ROTARY_BASE = 10000.0


class SpecialIds(Protocol):
    """The special ids of a ChatGLM-6B config."""

    bos_token_id: int
    """<sop>."""
    gmask_token_id: int
    """[gMASK]."""
    mask_token_id: int
    """[MASK]."""
    pad_token_id: int
    """Padding."""


def rotary_tables(position_ids: torch.Tensor, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of both position channels.

    The inverse frequencies are rounded to float16, as the original always does; the angles are then computed in
    float32, whatever the model's precision (in half precision the original's own table is off by up to 2.0 beyond
    position 1024). Nothing is kept as a buffer, so no cast of the module can reach it.

    Args:
        position_ids: `[B, 2, S]`.
        head_size: D; each half of a head is rotated by one channel, in pairs (i, i + D/4).
        dtype: of the result.

    Returns:
        Two tensors `[B, 1, S, D]`: the first D/2 columns belong to channel 0, the others to channel 1.
    """
    steps = torch.arange(0, head_size // 2, 2, dtype=torch.float32, device=position_ids.device) / (head_size // 2)
    frequencies = (1.0 / (_ROTARY_BASE**steps)).to(torch.float16).to(torch.float32)
    angles = position_ids[..., None].float() * frequencies  # [B, 2, S, D/4]
    angles = torch.cat((angles, angles), dim=-1)  # [B, 2, S, D/2]
    angles = torch.cat((angles[:, 0], angles[:, 1]), dim=-1)[:, None]  # [B, 1, S, D]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys `[B, N, S, D]`, each half of a head by its own channel."""
    first, second, third, fourth = states.chunk(4, dim=-1)
    return states * cos + torch.cat((-second, first, -fourth, third), dim=-1) * sin


def check_rows(input_ids: torch.Tensor, config: SpecialIds) -> None:
    """Make sure that each row `[B, S]` holds <sop>, or nothing but padding: a rank may have no sample left.

    Raises:
        ModelError: one does not.
    """
    has_sop = (input_ids == config.bos_token_id).any(dim=1)
    is_filler = (input_ids == config.pad_token_id).all(dim=1)
    if not (has_sop | is_filler).all():
        raise ModelError(
            tr(
                "a row holds no <sop> (id {sop}): it was cut off, or the tokenizer belongs to another revision of "
                "the model (130,528 or 150,528 tokens).",
                sop=config.bos_token_id,
            )
        )


def build_positions(input_ids: torch.Tensor, config: SpecialIds, padded: torch.Tensor | None) -> torch.Tensor:
    """Return the position ids `[B, 2, S]` of whole rows.

    Args:
        input_ids: `[B, S]`; each row holds <sop>.
        config: names the special ids.
        padded: bool `[B, S]`, True on padding; on the left it is not counted. None: no padding.
    """
    start = first_index(input_ids, config.bos_token_id)[:, None]  # [B, 1]
    # [gMASK], else [MASK], else (where the original gives up) the context's end, where one would stand.
    mask_at = start
    for token in (config.mask_token_id, config.gmask_token_id):
        found = first_index(input_ids, token)[:, None]
        mask_at = torch.where(found < input_ids.size(1), found, mask_at)
    place = torch.arange(input_ids.size(1), device=input_ids.device)[None]  # [1, S]
    num_left = 0 if padded is None else padded.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    context = torch.where(place < start, place, mask_at) - num_left
    block = place - start + 1
    return torch.stack((context.clamp(min=0), block.clamp(min=0)), dim=1)


def build_mask(input_ids: torch.Tensor, config: SpecialIds, padded: torch.Tensor | None) -> torch.Tensor:
    """Return the attention mask of whole rows, bool `[B, 1, S, S]`, True where attention is forbidden.

    Args:
        input_ids: `[B, S]`; each row holds <sop>.
        config: names the special ids.
        padded: bool `[B, S]`, True on padding; neither seen nor seeing. None: no padding.
    """
    size = input_ids.size(1)
    place = torch.arange(size, device=input_ids.device)
    is_context = place[None] < first_index(input_ids, config.bos_token_id)[:, None]  # [B, S]
    masked = (place[None, :] > place[:, None])[None] & ~is_context[:, None, :]
    if padded is not None:
        masked = masked | padded[:, None, :] | padded[:, :, None]
    return masked[:, None]


def first_index(input_ids: torch.Tensor, token: int) -> torch.Tensor:
    """Return the first index of a token in each row `[B]`; S where there is none."""
    found = input_ids == token
    return torch.where(found.any(dim=1), found.int().argmax(dim=1), input_ids.size(1))


def count_on(position_ids: torch.Tensor) -> torch.Tensor:
    """Append the positions of one new token: channel 0 stays, channel 1 counts on."""
    step = position_ids.new_tensor([0, 1])[None, :, None]
    return torch.cat((position_ids, position_ids[..., -1:] + step), dim=-1)
