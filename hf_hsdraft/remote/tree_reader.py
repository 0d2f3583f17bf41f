"""One forward of the target over the drafts of several texts, whose separate caches are joined for it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..core.cache_name import CACHE, returned_cache
from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of, on_device
from ..gpu.varying_shapes import varying_shapes
from ..runtime.cache_slots import CacheSlots, make_room
from ..runtime.misreading import same_but_rounding
from ..runtime.target_limits import (
    check_cache,
    check_inputs,
    furthest_read,
    slots_read_alike,
    text_config,
    why_no_trees,
)
from ..runtime.target_runtime import Acceleration, target_output
from ..runtime.tree_reading import (
    AttentionKind,
    Names,
    TargetCall,
    TargetOutput,
    TextRows,
    attention_kinds,
    picked_taps,
    read_trees,
)


@dataclass(frozen=True)
class TreesRead:
    """Outputs of a forward over the trees of several texts; their caches are unchanged so far."""

    cache: Any  # the texts' caches as one
    logits: Sequence[torch.Tensor]  # of each text `[nodes, V]`
    taps: Sequence[torch.Tensor]  # of each text the hidden states that it wants, `[nodes, taps * D]`

    def keep(self, place: int, path: Sequence[int]) -> None:
        """Appends the root and the accepted path of a text's tree to its cache."""
        nodes: slice | torch.Tensor = slice(0, 1 + len(path))
        if list(path) != [*range(1, 1 + len(path))]:
            nodes = on_device([0, *path], self.logits[place].device)
        for layer in self.cache.layers:
            layer.keep(place, nodes)


class TreeReader:
    """Reads prompts and trees by a causal language model with attention layers only.

    Raises a DraftingRefused if it cannot read trees of several texts in one forward. With `packed_weights`, forwards on
    x86 CPUs multiply by packed copies of the weights. Up to `longest` tokens the target reads every token alike.
    """

    def __init__(self, target: Any, packed_weights: bool = False) -> None:
        self.target, self._names = target, Names(target)
        self._acceleration, self._kinds = Acceleration(target), list[AttentionKind]()
        self._keeps_few = "logits_to_keep" in inspect.signature(target.forward).parameters
        check_inputs(target)
        if target.config.is_encoder_decoder:
            raise self._refusal("an encoder-decoder's texts cannot be joined")
        if slots_read_alike(target, 0) < sys.maxsize:
            raise self._refusal("its queries are scaled by cache slot, which all rows of a batch share")
        self.longest = min(furthest_read(target, 0) + 1, sys.maxsize)
        with torch.no_grad():
            self._try()
        self._acceleration.begin(packed_weights, self.longest)

    def _refusal(self, reason: str) -> DraftingRefused:
        return DraftingRefused(f"{type(self.target).__name__} cannot verify for several texts at once: {reason}")

    def _try(self) -> None:
        """Raises a DraftingRefused unless trees of two texts of different lengths give the logits of plain reading."""
        device, vocabulary = device_of(self.target), text_config(self.target).vocab_size
        ids = (torch.arange(1, 15, device=device) * 7 % vocabulary)[None]
        outputs = self.target(ids[:, :5], use_cache=True)
        own, self.vocab_size = returned_cache(outputs), outputs.logits.shape[-1]
        check_cache(self.target, own)
        if reason := why_no_trees(self.target, own):
            raise self._refusal(reason)
        starts, expected = [9, 5], []
        caches = [DynamicCache() for _ in starts]
        for start, cache in zip(starts, caches, strict=True):
            self.read_prompt(cache, ids[:, :start], ())
            make_room(cache)
            try:
                self._kinds = attention_kinds(text_config(self.target), [each.is_initialized for each in cache.layers])
            except ValueError as error:
                raise self._refusal(str(error)) from None
            expected.append(self.target(ids[:, : start + 3], use_cache=False).logits[0, start:])
        wrong = (int(ids[0, 0]) + 1) % vocabulary
        for _ in range(2):  # the second time on the caches the first one left
            trees = [_branched(ids[0, start : start + 3].tolist(), wrong) for start in starts]
            read = self.read(caches, trees, [()] * len(starts))
            for logits, one in zip(read.logits, expected, strict=True):
                if not same_but_rounding(logits[[0, 2, 4]], one.to(logits.dtype)):
                    raise self._refusal("it does not read the nodes of a tree as it reads a text")
            for place in range(len(starts)):
                read.keep(place, [2])
            starts = [start + 2 for start in starts]
            expected = [self.target(ids[:, : start + 3], use_cache=False).logits[0, start:] for start in starts]

    def read_prompt(self, cache: DynamicCache, ids: torch.Tensor, layers: Sequence[int]) -> TargetOutput:
        """Reads a prompt's next tokens `[1, n]`; returns the last logits `[1, 1, V]`, and taps `[1, n, taps * D]`."""
        positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + ids.shape[1], device=ids.device)
        inputs = {
            "input_ids": ids,
            "position_ids": positions[None],
            CACHE: cache,
            "use_cache": True,
            **({"logits_to_keep": 1} if self._keeps_few else {}),
            **self._states_asked_for(layers),
        }
        with varying_shapes(ids.device):
            outputs = self._acceleration.forward(inputs, comes_again=False)
        output = target_output(self.target, outputs, self._names.states, layers)
        return TargetOutput(output.logits[:, -1:], output.taps)

    def read(
        self, caches: Sequence[DynamicCache], trees: Sequence[DraftTree], taps: Sequence[Sequence[int]]
    ) -> TreesRead:
        """Reads a tree for each text, whose cache lacks its root; `taps` are the layers that each text wants."""
        layers = sorted({layer for each in taps for layer in each})
        layers_of_texts = zip(*(cache.layers for cache in caches), strict=True)
        joined = Cache(layers=[JoinedLayer(each) for each in layers_of_texts])
        kept = [cache.get_seq_length() for cache in caches]
        before = torch.full((1,), -1, device=device_of(self.target))  # the position before all texts
        call = TargetCall(self.target, {"use_cache": True, **self._states_asked_for(layers)}, self._acceleration)
        call.slots, call.rows = CacheSlots(joined), TextRows(kept, 0, None, before)
        with varying_shapes(before.device):
            outputs = read_trees(call, trees, max(map(len, trees)), self._kinds)
        output = target_output(self.target, outputs, self._names.states, layers)
        rows = list(zip(trees, output.logits, output.taps, taps, strict=True))
        return TreesRead(
            joined,
            [logits[: len(tree)] for tree, logits, _, _ in rows],
            [picked_taps(states[: len(tree)], layers, wanted) for tree, _, states, wanted in rows],
        )

    def _states_asked_for(self, layers: Sequence[int]) -> dict[str, Any]:
        return {"output_hidden_states": list(layers)} if layers else {}


def _branched(path: Sequence[int], wrong: int) -> DraftTree:
    """A tree along a path of three tokens, with a wrong sibling before each node after the root."""
    first, second, third = path
    siblings = [wrong + (wrong == right) for right in (second, third)]
    tokens = (first, siblings[0], second, siblings[1], third)
    return DraftTree(tokens, (-1, 0, 0, 2, 2), (0, 1, 1, 2, 2), (0.0,) * 5)


class JoinedLayer(DynamicLayer):
    """A cache layer of several texts; attention sees them padded to the longest. Only new keys and values are stored.

    `held` are the layers of the texts, keys and values `[1, heads, length, size]`. `keep` appends new slots to them;
    until then they are unchanged, so a failed forward or a rejected draft leaves no trace.
    """

    def __init__(self, held: Sequence[DynamicLayer]) -> None:
        super().__init__()
        self._held, self._read = held, 0
        self._longest = max(each.get_seq_length() for each in held)
        if held[0].is_initialized:  # layers that share the keys of others have none
            self.lazy_initialization(held[0].keys, held[0].values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states `[B, heads, n, size]`; returns old and new ones, joined."""
        self.keys, self.values = key_states, value_states
        self._read = key_states.shape[-2]
        return self._joined("keys", key_states), self._joined("values", value_states)

    def _joined(self, which: str, new: torch.Tensor) -> torch.Tensor:
        rows, heads, count, size = new.shape
        joined = new.new_zeros(rows, heads, self._longest + count, size)  # masked values must be finite
        for row, layer in enumerate(self._held):
            joined[row, :, : layer.get_seq_length()] = getattr(layer, which)[0]
        joined[:, :, self._longest :] = new
        return joined

    def get_seq_length(self) -> int:
        return self._longest + self._read

    def keep(self, row: int, nodes: slice | torch.Tensor) -> None:
        if self._read:
            self._held[row].update(*(states[row : row + 1, :, nodes] for states in (self.keys, self.values)))


def bytes_of(cache: Cache) -> int:
    """Returns the size of the keys and values in a cache, without spare room."""
    states = (getattr(layer, which, None) for layer in cache.layers for which in ("keys", "values"))
    return sum(each.numel() * each.element_size() for each in states if each is not None)
