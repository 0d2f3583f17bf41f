"""Trees: the masks and inputs of a forward over one tree per row, and committing them to the cache.

Slots and positions differ here. Each node of a tree takes one slot, after the longest text, while siblings share a
position. Rows may differ in length: slots behind a shorter text are left over, and its nodes may not see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..core.draft_tree import DraftTree
from ..core.tensors import device_of, on_device
from ..trees.tree_masks import AttentionKind, TreeBatch, as_attention_takes_it, attention_kinds, tree_mask
from .cache_slots import move_slots
from .misreading import distances_of
from .target_call import TargetCall
from .target_limits import text_config, why_no_trees


class AheadReader(Protocol):
    """Reads drafts before they are verified, so that verification has less to compute."""

    @property
    def reused_share(self) -> float:
        """Share of the layers' work in verifying trees that was done before."""

    def verify(self, trees: Sequence[DraftTree], columns: int) -> Any:
        """The target's outputs for a tree of each row, as by `read_trees`; `None` if nothing was read ahead."""


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
    """The target's outputs for a tree of each row; column i is node i.

    Trees smaller than `columns` are padded with nodes that no other node sees.
    """
    batch = TreeBatch.of(trees, device_of(call.target), columns)
    return call.forward(node_inputs(call, batch, columns, kinds), columns)


def noise_of(
    call: TargetCall, tokens: torch.Tensor, alone: torch.Tensor, columns: int, kinds: Sequence[AttentionKind]
) -> float:
    """Distance between a token of each row read alone and read in several columns that do not see each other.

    Both the first and the last column must equal the token read alone, up to rounding. A target that misreads several
    tokens at once may change one of the two, the first or the last. So the smaller distance is the rounding, and its
    column is kept.

    Args:
        tokens: `[B]`.
        alone: `[B, V]`, logits of the tokens read alone.
    """
    apart = torch.eye(columns, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    ids = tokens[:, None].expand(-1, columns)
    outputs = call.forward(node_inputs(call, TreeBatch(ids, torch.zeros_like(ids), apart), columns, kinds), columns)
    logits = outputs.logits[:, -columns:]
    first, last = (float(distances_of(logits[:, column], alone).max()) for column in (0, -1))
    commit_trees(call, [[]] * len(tokens), columns if first < last else 1)
    return min(first, last)


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
    attention, masks = text_config(call.target)._attn_implementation, {}
    for kind in kinds:
        layer = slots.layers[kind.layer]
        kv_length = layer.get_mask_sizes(columns)[0] - beyond
        seen = tree_mask(batch, kind, call.rows.attended, kept, before, kv_length)[:, size - columns :]
        masks[kind.name] = as_attention_takes_it(F.pad(seen, (0, beyond)), attention, layer.keys.dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def commit_trees(call: TargetCall, paths: Sequence[Sequence[int] | None], columns: int) -> None:
    """Moves root and accepted path of each row to the end of its text, and drops everything behind.

    Args:
        paths: nodes after the root, by row; `None` for rows of which nothing is kept.
        columns: of the forward that read the trees.
    """
    slots, total = call.slots, call.slots.length
    fixed_shape = call.acceleration.compile_config is not None  # a compiled move has one shape only
    source, goal = slots_to_move(call.rows.kept, paths, total - columns, columns if fixed_shape else 0)
    call.rows = call.rows.keeping([tokens_kept(path) for path in paths])
    moved = [i for i in range(len(source[0])) if any(s[i] != g[i] for s, g in zip(source, goal, strict=True))]
    if moved:
        first = 0 if fixed_shape else moved[0]
        picked, placed = (on_device([row[first:] for row in each], device_of(call.target)) for each in (source, goal))
        slots.move(picked, placed, call.acceleration.compiled(move_slots))
    kept = call.rows.kept
    growing = [length for length, path in zip(kept, paths, strict=True) if path is not None]
    # Sliding layers keep what the shortest row still sees.
    slots.widen_windows(max(kept) - min(growing, default=max(kept)))
    slots.drop(total - max(kept))


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
