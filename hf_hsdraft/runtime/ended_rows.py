"""Ended rows of a batch leave the cache: forwards read only the others, and at the end the ended rows are put back.

Plain decoding reads padding for them until the last row has ended. A cache that outlives the call gets the padding at
the end, in a few forwards. In a running batch, other texts take their places.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..core.draft_tree import DraftTree
from ..core.tensors import device_of
from .cache_slots import GrowingLayer
from .module_hooks import has_foreign_hooks
from .tree_reading import AttentionKind, TargetCall, TextRows, TreeBatch, commit_trees, read_batch

# Number of tokens of padding in a forward at the end of a call whose cache outlives it - by hand.
PADDING_COLUMNS = 32


def can_leave(target: Any, model_kwargs: dict[str, Any], known: Collection[str], cache: Any) -> bool:
    """Whether rows can leave a call: `generate()` made the cache, of plain layers; only `known` inputs have rows."""
    others = [value for name, value in model_kwargs.items() if name not in known and value is not None]
    if not all(isinstance(value, (bool, int, float, str, Cache)) for value in others):
        return False
    # Hooks may depend on the row: PEFT's do with one adapter per row.
    if has_foreign_hooks(target):
        return False
    if type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False) or cache.offloading:
        return False
    return all(type(layer) in (DynamicLayer, GrowingLayer) and layer.keys is not None for layer in cache.layers)


class EndedRows:
    """Tracks which rows of a batch are still read (`staying`), and keeps the cache contents of the others if `keep`."""

    def __init__(self, num_rows: int, keep: bool) -> None:
        self.staying = list(range(num_rows))
        self._num_rows, self._keep = num_rows, keep
        self._whole: TextRows | None = None  # all rows, as of the first that left
        self._held: dict[int, list[list[torch.Tensor]]] = {}  # by row and layer: keys, values `[heads, slots, size]`

    def take_out(self, cache: Cache, staying: Sequence[int], rows: TextRows) -> TextRows:
        """Leaves only some rows of the current batch `rows` in the cache, by their places there; returns them."""
        self._whole = self._whole or rows
        for place in set(range(len(self.staying))) - set(staying) if self._keep else ():
            self._held[self.staying[place]] = [
                [states[place, :, : rows.kept[place]].clone() for states in (layer.keys, layer.values)]
                for layer in cache.layers
            ]
        cache.batch_select_indices(torch.tensor(staying))
        self.staying = [self.staying[place] for place in staying]
        return rows.of(staying)

    def put_back(self, cache: Cache, rows: TextRows) -> TextRows:
        """Restores all rows of the cache and returns them, if it is kept; slots that a row has not filled are 0."""
        if not self._keep or self._whole is None or len(self.staying) == self._num_rows:
            return rows
        kept = dict(zip(self.staying, rows.kept, strict=True))
        kept |= {row: held[0][0].shape[1] for row, held in self._held.items()}
        length = max(kept.values())
        for index, layer in enumerate(cache.layers):
            layer.keys, layer.values = (
                self._joined(states, [held[index][which] for held in self._held.values()], length)
                for which, states in enumerate((layer.keys, layer.values))
            )
        self.staying, self._held = list(range(self._num_rows)), {}
        return replace(self._whole, kept=[kept[row] for row in self.staying])

    def _joined(self, states: torch.Tensor, held: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """`[B, heads, length, size]` of all rows: staying ones from `states`, the others from `held`."""
        _, heads, slots, size = states.shape
        joined = states.new_zeros(self._num_rows, heads, length, size)
        joined[torch.tensor(self.staying), :, : min(slots, length)] = states[:, :, :length]
        for row, part in zip(self._held, held, strict=True):
            joined[row, :, : min(part.shape[1], length)] = part[:, :length]
        return joined


def take_in(call: TargetCall, ended: EndedRows, other: TargetCall, place: int | None = None) -> None:
    """Lets the only text of another call join a batch, at the `place` of a row that leaves, or as the last row.

    Rows of both have no padding, so their positions are those of their slots.
    """
    for layer, added in zip(call.slots.layers, other.slots.layers, strict=True):
        layer.keys, layer.values = (
            _with_row(layer.keys, added.keys, place),
            _with_row(layer.values, added.values, place),
        )
    kept, new = list(call.rows.kept), other.slots.length
    if place is None:
        kept.append(new)
        ended.staying.append(len(ended.staying))
    else:
        kept[place] = new
    call.rows = TextRows.of_slots(kept, device_of(call.target))
    call.slots.drop(call.slots.length - max(kept))


def _with_row(states: torch.Tensor, new: torch.Tensor, place: int | None) -> torch.Tensor:
    """Puts `new` `[1, heads, n, size]` to a place of `[B, heads, slots, size]`, or behind the last."""
    spare = new.shape[2] - states.shape[2]
    if spare > 0:
        states = F.pad(states, (0, 0, 0, spare))
    if place is None:
        return torch.cat([states, F.pad(new, (0, 0, 0, max(-spare, 0)))])
    states[place, :, : new.shape[2]] = new[0]
    return states


def read_missing(call: TargetCall, ids: Sequence[Sequence[int]], end: int, kinds: Sequence[AttentionKind]) -> None:
    """Reads on in rows that have filled fewer than `end` slots, by one forward over the next tokens of each.

    Args:
        ids: for each row, the tokens of its slots from the prompt's end on.
    """
    rows, left = call.rows, call.slots.left
    fixed = 0 < call.fixed <= left
    columns = call.fixed if fixed else max(min(end - min(rows.kept), PADDING_COLUMNS, left), 1)
    begins = [kept - rows.prompt_slots for kept in rows.kept]
    most = [max(min(columns, end - kept), 0) for kept in rows.kept]
    texts = [tokens[begin : begin + count] for tokens, begin, count in zip(ids, begins, most, strict=True)]
    chains = [_chain(tokens) if tokens else DraftTree.idle(0) for tokens in texts]
    read_batch(call, TreeBatch.of(chains, device_of(call.target), columns), kinds)
    commit_trees(call, [range(1, len(tokens)) if tokens else None for tokens in texts], columns)


def _chain(tokens: Sequence[int]) -> DraftTree:
    count = len(tokens)
    return DraftTree(tuple(tokens), tuple(range(-1, count - 1)), tuple(range(count)), (0.0,) * count)
