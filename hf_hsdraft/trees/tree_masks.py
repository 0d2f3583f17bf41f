"""Draft trees as a forward reads them, and their masks for full, sliding-window and chunked attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from ..core.draft_tree import DraftTree
from ..core.tensors import on_device

MASKED_ATTENTION = ("sdpa", "eager", "flex_attention")  # implementations that take a mask of any form

_WIDTHS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NO_ATTENTION = ("moe", "mlp")  # layer types that never see a mask


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention among a target's layers."""

    name: str  # transformers' name of the layer type
    width: int  # positions of a window or a chunk; 0 for full attention
    layer: int  # index of the first layer of this kind with its own cache

    def sees(self, queries: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor) -> torch.Tensor | None:
        """Returns `[B, n, m]`, True where a query is near enough to see a key; `None` where distance does not matter.

        Args:
            queries: `[B, n]`, int64, indices of the queries in their row.
            keys: `[B, m]`, int64, indices of the keys in their row.
            padding: `[B]`, int64, number of masked slots before each text. Chunks are counted from its first token.
        """
        if self.name == "sliding_attention":
            return queries[:, :, None] - keys[:, None, :] < self.width
        if self.name == "chunked_attention":
            chunks = [(index - padding[:, None]).div(self.width, rounding_mode="floor") for index in (queries, keys)]
            return chunks[0][:, :, None] == chunks[1][:, None, :]
        return None


def attention_kinds(config: Any, has_cache: Sequence[bool]) -> list[AttentionKind]:
    """Returns the kinds of attention of a text configuration.

    `has_cache` says for each layer whether it has its own keys and values. Raises a ValueError that names the layer
    type if its mask is unknown.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        windows = [name for name, width in _WIDTHS.items() if width and getattr(config, width, None)]
        types = [windows[0] if windows else "full_attention"] * len(has_cache)
    kinds: dict[str, AttentionKind] = {}
    for layer, name in enumerate(types):
        if name in _NO_ATTENTION:
            continue
        if name not in _WIDTHS:
            raise ValueError(f"it has layers of type {name!r}, which do not take a tree's mask")
        if name not in kinds and layer < len(has_cache) and has_cache[layer]:
            layer_config = config.per_layer_config[layer]
            width = getattr(layer_config, _WIDTHS[name], 0) if _WIDTHS[name] else 0
            kinds[name] = AttentionKind(name, width or 0, layer)
    return list(kinds.values())


@dataclass(frozen=True)
class TreeBatch:
    """Trees of a batch as one forward reads them. Shorter ones are padded with copies of the root."""

    tokens: torch.Tensor  # `[B, N]`, int64
    depths: torch.Tensor  # `[B, N]`, int64
    ancestors: torch.Tensor  # `[B, N, N]`, bool, True where the row's node may see the column's

    @classmethod
    def of(cls, trees: Sequence[DraftTree], device: torch.device, size: int = 0) -> TreeBatch:
        """Returns the batch with columns for at least `size` nodes."""
        size = max(size, *map(len, trees))
        tokens, depths, ancestors = [], [], []
        for tree in trees:
            spare = size - len(tree)
            tokens.append([*tree.tokens, *[tree.tokens[0]] * spare])
            depths.append([*tree.depths, *[tree.depths[0]] * spare])
            alone = ([column == node for column in range(size)] for node in range(len(tree), size))
            ancestors.append([*(row + [False] * spare for row in tree.ancestor_mask()), *alone])
        return cls(on_device(tokens, device), on_device(depths, device), on_device(ancestors, device, dtype=torch.bool))


@dataclass(frozen=True)
class DraftedLevels:
    """Drafted nodes of trees that grow a depth at a time, in the order of reading."""

    batch: TreeBatch  # the first level has depth 0
    is_chain: bool = True  # whether no level has more than one node

    @classmethod
    def nothing(cls, tokens: torch.Tensor) -> DraftedLevels:
        """Returns levels without nodes, for the rows of tokens `[B, n]`, on their device."""
        none = tokens[:, :0]
        return cls(TreeBatch(none, none, none.bool()[:, :, None][:, :, :0]))

    @property
    def count(self) -> int:
        return self.batch.tokens.shape[1]

    def with_level(self, tokens: torch.Tensor, paths: torch.Tensor) -> DraftedLevels:
        """Adds nodes `[B, n]` after ancestors `[B, n, depth]`, given as columns."""
        before, (rows, count) = self.batch, tokens.shape
        depths = torch.full_like(tokens, paths.shape[2])
        seen = torch.zeros(rows, count, self.count, dtype=torch.bool, device=tokens.device).scatter_(2, paths, True)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        ancestors = torch.cat([pad(before.ancestors, (0, count)), torch.cat([seen, own], dim=2)], dim=1)
        batch = TreeBatch(torch.cat([before.tokens, tokens], 1), torch.cat([before.depths, depths], 1), ancestors)
        return DraftedLevels(batch, self.is_chain and count == 1)

    def own_columns(self, count: int) -> torch.Tensor:
        """Returns the columns `[B, count, 1]` of the last `count` nodes."""
        rows, device = len(self.batch.tokens), self.batch.tokens.device
        return torch.arange(self.count - count, self.count, device=device)[None, :, None].expand(rows, -1, -1)


def tree_mask(
    batch: TreeBatch,
    kind: AttentionKind,
    attended: torch.Tensor | None,
    kept: torch.Tensor,
    slots: int,
    kv_length: int,
) -> torch.Tensor:
    """Returns `[B, N, kv_length]`, bool, True where a node may see a slot of the cache or a node of its own tree.

    Args:
        attended: `[B, prompt]`, bool, the prompts' attention mask; `None` if nothing is masked.
        kept: `[B]`, int64, number of slots that hold the text of each row. Further slots, up to `slots`, hold what
            longer paths of other rows have left behind.
        slots: number of slots in the cache before the trees.
        kv_length: number of slots that attention sees: the last ones, the trees' included.
    """
    size, device = batch.tokens.shape[1], batch.tokens.device
    indices = torch.arange(slots - (kv_length - size), slots, device=device)
    prefix = indices[None, :] < kept[:, None]
    padding = torch.zeros_like(kept)
    if attended is not None:
        known = indices < attended.shape[1]
        prefix &= torch.where(known[None, :], attended[:, indices.clamp(max=attended.shape[1] - 1)], True)
        padding = attended.int().argmax(dim=1)
    mask = torch.cat([prefix[:, None, :].expand(-1, size, -1), batch.ancestors], dim=2)
    nodes = kept[:, None] + batch.depths
    seen = kind.sees(nodes, torch.cat([indices.expand(len(kept), -1), nodes], dim=1), padding)
    return mask if seen is None else mask & seen


def as_attention_takes_it(mask: torch.Tensor, attention: str, dtype: torch.dtype) -> Any:
    """Returns a mask `[B, N, KV]`, bool, in the form that an attention implementation takes.

    Flex attention takes a block mask. The others take an additive mask: eager would silently add a bool, and sdpa would
    convert it to an additive mask again in each layer.
    """
    if attention == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return mask[batch, query, key]

        batch_size, queries, keys = mask.shape
        return create_block_mask(visible, batch_size, None, queries, keys, device=str(mask.device), _compile=False)
    hidden = float("-inf") if attention == "sdpa" else torch.finfo(dtype).min
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, hidden)[:, None]
