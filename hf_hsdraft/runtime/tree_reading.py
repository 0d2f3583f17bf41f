"""Trees: their masks, forwards over one tree per row, and committing them to the cache.

Slots and positions differ here. Each node of a tree takes one slot, after the longest text, while siblings share a
position. Rows may differ in length: slots behind a shorter text are left over, and its nodes may not see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..core.draft_tree import DraftTree
from ..core.tensors import device_of, on_device
from .cache_slots import move_slots
from .target_forwards import TargetCall
from .target_limits import text_config, why_no_trees

_WIDTHS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NO_ATTENTION = ("moe", "mlp")  # layer types that never see a mask


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention among a target's layers."""

    name: str  # transformers' name of the layer type
    width: int  # positions of a window or a chunk; 0 for full attention
    layer: int  # index of the first layer of this kind with its own cache
    attention: str = "sdpa"  # transformers' name of the implementation

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
            kinds[name] = AttentionKind(name, width or 0, layer, config._attn_implementation)
    return list(kinds.values())


@dataclass(frozen=True)
class TreeBatch:
    """Trees of a batch as one forward reads them. Shorter ones are padded with copies of the root that none sees."""

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


@dataclass(frozen=True)
class DraftedLevels:
    """Nodes in the order of reading, depth by depth."""

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
        ancestors = torch.cat([F.pad(before.ancestors, (0, count)), torch.cat([seen, own], dim=2)], dim=1)
        batch = TreeBatch(torch.cat([before.tokens, tokens], 1), torch.cat([before.depths, depths], 1), ancestors)
        return DraftedLevels(batch, self.is_chain and count == 1)

    def own_columns(self, count: int) -> torch.Tensor:
        """Returns the columns `[B, count, 1]` of the last `count` nodes."""
        rows, device = len(self.batch.tokens), self.batch.tokens.device
        return torch.arange(self.count - count, self.count, device=device)[None, :, None].expand(rows, -1, -1)


def kinds_of_attention(call: TargetCall) -> list[AttentionKind]:
    """The kinds of attention that need separate masks; raises a ValueError if the target cannot read trees."""
    reason = why_no_trees(call.target, call.slots.cache)
    if not reason and call.rows.last_positions is None:
        reason = "no position_ids reach it, and siblings in a tree share a position"
    if reason:
        raise ValueError(reason)
    own = [getattr(layer, "keys", None) is not None for layer in call.slots.layers]
    return attention_kinds(text_config(call.target), own)


def read_trees(call: TargetCall, trees: Sequence[DraftTree], columns: int, kinds: Sequence[AttentionKind]) -> Any:
    """The target's outputs for a tree of each row; column i is node i. See `read_batch`."""
    return read_batch(call, TreeBatch.of(trees, device_of(call.target), columns), kinds)


def read_batch(call: TargetCall, batch: TreeBatch, kinds: Sequence[AttentionKind]) -> Any:
    """The target's outputs for a batch of trees, all nodes of which are new to the cache."""
    columns = batch.tokens.shape[1]
    return call.forward(node_inputs(call, batch, columns, kinds), columns)


def read_roots(call: TargetCall, roots: Sequence[DraftTree], kinds: Sequence[AttentionKind]) -> Any:
    """The target's outputs for lone roots of rows of equal length, read as in plain decoding; see `read_trees`."""
    rows, device = call.rows, device_of(call.target)
    assert rows.last_positions is not None
    slots, depths = rows.kept[0] + 1, [tree.depths for tree in roots]
    ahead = slots - rows.prompt_slots  # of the prompt's last position
    # Only idle nodes have another depth than 0.
    further = on_device(depths, device) + ahead if any(depth for [depth] in depths) else ahead
    tokens = on_device([tree.tokens for tree in roots], device)
    if rows.attended is None:
        mask = torch.ones(len(roots), slots, dtype=torch.int64, device=device)
    else:
        mask = F.pad(rows.attended, (0, slots - rows.prompt_slots), value=True).expand(len(roots), -1)
        if [(kind.width, kind.attention) for kind in kinds] == [(0, "sdpa")]:
            mask = as_attention_takes_it(mask[:, None], "sdpa", call.slots.layers[kinds[0].layer].keys.dtype)
    inputs = call.inputs(tokens, 1, None, positions=rows.last_positions[..., None] + further)
    inputs[call.names.mask] = mask
    return call.forward(inputs, 1)


def node_inputs(call: TargetCall, batch: TreeBatch, columns: int, kinds: Sequence[AttentionKind]) -> dict[str, Any]:
    """The inputs of a forward over the last `columns` nodes of a batch of trees, whose other nodes are in the cache."""
    rows, device = call.rows, device_of(call.target)
    assert rows.last_positions is not None
    kept = on_device(rows.kept, device)
    ahead = (kept - rows.prompt_slots + 1)[:, None] + batch.depths[:, -columns:]  # of the prompt's last position
    mask = _masks(call, batch, columns, kept, kinds)
    # Without a mask, a static cache would get a causal one, whose length is read back from the device.
    known = mask if call.slots.static is not None and isinstance(mask, torch.Tensor) else None
    positions = rows.last_positions[..., None] + ahead
    inputs = call.inputs(batch.tokens[:, -columns:], columns, known, positions=positions)
    inputs[call.names.mask] = mask
    return inputs


def _masks(call: TargetCall, batch: TreeBatch, columns: int, kept: torch.Tensor, kinds: Sequence[AttentionKind]) -> Any:
    """The masks of the last columns of a batch of trees, by kind of attention if there are several; see `tree_mask`."""
    slots, size = call.slots, batch.tokens.shape[1]
    before = slots.length - (size - columns)  # slots of the texts
    beyond = 0 if slots.static is None else slots.left - size  # empty slots behind the nodes
    masks: dict[str, Any] = {}
    for kind in kinds:
        layer = slots.layers[kind.layer]
        kv_length = layer.get_mask_sizes(columns)[0] - beyond
        seen = tree_mask(batch, kind, call.rows.attended, kept, before, kv_length)[:, size - columns :]
        masks[kind.name] = as_attention_takes_it(F.pad(seen, (0, beyond)), kind.attention, layer.keys.dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def commit_trees(call: TargetCall, paths: Sequence[Sequence[int] | None], columns: int) -> None:
    """Moves root and accepted path of each row to the end of its text, and drops everything behind.

    Args:
        paths: nodes after the root, by row; `None` for rows of which nothing is kept.
        columns: of the forward that read the trees.
    """
    slots, total = call.slots, call.slots.length
    longest = max(call.rows.kept)
    apart = None in paths or min(call.rows.kept) < longest
    if columns == 1 and call.leaves_gaps and apart and longest == total - 1:
        call.rows = call.rows.with_gaps([path is not None for path in paths], device_of(call.target))
        return
    fixed_shape = call.acceleration.compile_config is not None  # a compiled move has one shape only
    source, goal = slots_to_move(call.rows.kept, paths, total - columns, columns if fixed_shape else 0)
    call.rows = call.rows.keeping([tokens_kept(path) for path in paths])
    moved = [i for i in range(len(source[0])) if any(s[i] != g[i] for s, g in zip(source, goal, strict=True))]
    if moved:
        first = 0 if fixed_shape else moved[0]
        picked, placed = (on_device([row[first:] for row in each], device_of(call.target)) for each in (source, goal))
        slots.move(picked, placed, call.acceleration.compiled(move_slots))
    kept = call.rows.kept
    growing = [length for length, path in zip(kept, paths, strict=True) if path is not None or call.keeps_ended]
    # Sliding layers keep what the shortest row still sees.
    slots.widen_windows(max(kept) - min(growing, default=max(kept)))
    slots.drop(total - max(kept))


def close_gaps(call: TargetCall) -> None:
    """Moves the tokens of rows with gaps to where they are without; see `TextRows.with_gaps`."""
    rows, slots = call.rows, call.slots
    if rows.gapless is None or rows.attended is None:
        return
    real = F.pad(rows.attended, (0, slots.length - rows.prompt_slots), value=True)
    real[:, : rows.gapless.prompt_slots] = True
    order = (~real).int().argsort(dim=1, stable=True)[:, None, :, None]
    for layer in slots.layers_with_keys:
        layer.keys, layer.values = (
            states.gather(2, order.to(states.device).expand_as(states)) for states in (layer.keys, layer.values)
        )
    call.rows = rows.gapless
    slots.drop(slots.length - max(call.rows.kept))


def slots_to_move(
    kept: Sequence[int], paths: Sequence[Sequence[int] | None], start: int, columns: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Source and destination slots of each row's root and path; rows are padded by moving slots onto themselves.

    Args:
        kept: number of text slots of each row.
        start: slot of the roots.
        columns: minimum number of slots to move.
    """
    longest = max(columns, *map(tokens_kept, paths))
    source, goal = [], []
    for end, path in zip(kept, paths, strict=True):
        count = tokens_kept(path)
        spare = [*range(start + count, start + longest)]
        source.append([*([] if path is None else [start, *(start + node for node in path)]), *spare])
        goal.append([*range(end, end + count), *spare])
    return source, goal


def tokens_kept(path: Sequence[int] | None) -> int:
    """Number of tokens that a commit keeps: the root and its path, or nothing."""
    return 0 if path is None else 1 + len(path)
