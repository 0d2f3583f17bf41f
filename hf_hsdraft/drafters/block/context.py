"""Attention of a block's slots to context positions before the anchor and to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.tensors import batched_attention
from .configuration import Sight

KeysAndValues = tuple[torch.Tensor, torch.Tensor]

_BLOCKS_AT_ONCE = 64  # in training; limits the work on masked pairs of blocks


def own_mask(sight: Sight, slots: int, device: torch.device) -> torch.Tensor:
    """Returns `[slots, slots]`, True where the row's slot sees the column's."""
    place = torch.arange(slots, device=device)
    ahead = place[None, :] - place[:, None]
    mask = ahead <= 0 if sight.causal else torch.ones_like(ahead, dtype=torch.bool)
    return mask if sight.reach is None or sight.of_anchor else mask & (ahead.abs() <= sight.reach)


def farthest(sight: Sight, positions: torch.Tensor) -> torch.Tensor:
    """Returns `[B, slots]`, the position from which each slot counts its reach."""
    return positions[:, :1].expand_as(positions) if sight.of_anchor else positions


def training_attention(
    context: Sequence[KeysAndValues],  # keys and values `[T, kv_heads, head_dim]` of each layer
    sights: Sequence[Sight],
    position_ids: torch.Tensor,  # `[T]`, of the context
    document_ids: torch.Tensor | None,  # `[T]`, of the context
    starts: torch.Tensor,  # `[S]`, index of the last context position that each block sees
    positions: torch.Tensor,  # `[S, slots]`, of the slots
) -> Callable[..., torch.Tensor]:
    """Returns the attention of many blocks to one packed context, see `BlockDrafter.forward`."""
    blocks, slots = positions.shape
    indices = torch.arange(len(position_ids), device=positions.device)
    before = indices[None] <= starts[:, None]
    if document_ids is not None:
        before = before & (document_ids[None] == document_ids[starts, None])

    masks: dict[tuple[Sight, int], torch.Tensor] = {}

    def seen(sight: Sight, begin: int) -> torch.Tensor:
        if (sight, begin) not in masks:
            masks[sight, begin] = made(sight, slice(begin, begin + _BLOCKS_AT_ONCE))
        return masks[sight, begin]

    def made(sight: Sight, part: slice) -> torch.Tensor:
        count = len(range(*part.indices(blocks)))
        mask = before[part, None].expand(-1, slots, -1)
        if sight.reach is not None:
            mask = mask & (farthest(sight, positions[part])[..., None] - position_ids <= sight.reach)
        blockwise = torch.block_diag(*[own_mask(sight, slots, positions.device)] * count)
        return torch.cat([mask.flatten(0, 1), blockwise], dim=1)[None]

    def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
        mixed = []
        for begin in range(0, blocks, _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            sides = [
                torch.cat([shared, own[part].flatten(0, 1)]).transpose(0, 1)[None]
                for shared, own in zip(context[index], (keys, values), strict=True)
            ]
            of_block = queries[part].flatten(0, 1)[None]
            of_part = batched_attention(of_block, sides[0], sides[1], seen(sights[index], begin))
            mixed.append(of_part[0].unflatten(0, (-1, slots)))
        return torch.cat(mixed)

    return attend
