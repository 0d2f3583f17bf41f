"""The first layers of a target, by which drafted nodes are read before they are verified.

They read into the target's own cache, after the texts, so images and all else that the prompts held are known there.
When a draft is complete the cache is as it was. Hidden states, keys and values of the nodes are kept for the
verification, which computes the other layers only: self-speculation as in LayerSkip, section 4.3, and FastVLM. Nodes
that nobody has read ahead, such as leaves and n-grams, pass the first layers then.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.utils import logging

from ..common.tensors import on_device
from ..trees.draft_tree import DraftTree
from ..trees.drafted_levels import DraftedLevels
from ..trees.tree_masks import AttentionKind, TreeBatch
from .cache_marks import Mark, mark, roll_back
from .layer_split import LayerSplit
from .misreading import same_but_rounding
from .target_call import TargetCall
from .target_limits import text_config
from .text_configs import decoder_layers
from .tree_reading import node_inputs, read_trees

logger = logging.get_logger(__name__)

_KeysValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, `[B, heads, nodes, size]` each
_Path = tuple[int, ...]  # the tokens from the root to a node


@dataclass(frozen=True)
class _Read:
    """Nodes that the first layers have read in this round.

    Attributes:
        batch: the nodes.
        states: `[B, m, D]`, hidden states after the first layers.
        keys_values: of these layers.
        columns: of each row, the column of a node by its path.
        kept: where the texts stood.
    """

    batch: TreeBatch
    states: torch.Tensor
    keys_values: _KeysValues
    columns: list[dict[_Path, int]]
    kept: list[int]


class FirstLayers:
    """The first layers of a target in one call.

    Args:
        call: the call, after the prompts' forward. Its cache grows, and its target reads trees.
        kinds: kinds of attention that need masks of their own.
        count: number n of layers.
        reuse: whether verification goes on from what was read ahead. If not, it computes all layers.

    Attributes:
        reused: number of times that a layer was not computed for a node, as it had been.
        verified: number of times that a layer would have been computed without that, over all forwards over trees.
    """

    def __init__(self, call: TargetCall, kinds: Sequence[AttentionKind], count: int, reuse: bool) -> None:
        self._call, self._every, self.count = call, kinds, count
        self._split = LayerSplit(call.target, count)
        self._kinds = [kind for kind in kinds if kind.layer < count]
        self._reuse = reuse and not any(call.kwargs.get(f"output_{name}") for name in ("hidden_states", "attentions"))
        self._levels: DraftedLevels | None = None
        self._start: Mark | None = None
        self._states: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._active: torch.Tensor | None = None
        self._read: _Read | None = None
        self.reused = self.verified = 0

    @property
    def reused_share(self) -> float:
        """Share of the layers' work in verifying trees that was reused."""
        return self.reused / max(self.verified, 1)

    def apart(self) -> FirstLayers:
        """Returns first layers that read after the same texts, in a cache of their own."""
        other = copy.copy(self)
        other._call = self._call.apart_of(range(len(self._call.rows.kept)))
        other._levels = other._start = other._read = None
        return other

    @contextlib.contextmanager
    def draft(self, places: Sequence[int]) -> Iterator[None]:
        """Inside, nodes are read after the texts. At the end the cache is as it was.

        Args:
            places: the rows that nodes are read of. Those of other rows mean nothing.
        """
        rows = len(self._call.rows.kept)
        self._active = on_device([row in places for row in range(rows)], self._call.target.device, torch.bool)
        self._read = None
        try:
            yield
            if self._reuse and self._levels is not None:
                self._read = self._taken(places)
        finally:
            self._forget()

    def read_nodes(self, tokens: torch.Tensor, paths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the nodes of a depth after their ancestors. Reading roots begins anew.

        Args:
            tokens: `[B, n]`, int64, the nodes.
            paths: `[B, n, depth]`, int64, the ancestors of each node, as columns of the draft; none of a root.

        Returns:
            The hidden states `[B, n, D]` after the first layers, and the columns `[B, n, depth + 1]` of the nodes'
            paths, their own the last one.
        """
        if paths.shape[2] == 0:
            self._forget()
            self._levels, self._start = DraftedLevels.nothing(tokens), mark(self._call.slots)
        assert self._levels is not None, "roots are read first"
        count = tokens.shape[1]
        levels = self._levels.with_level(tokens, paths)
        states = self._states_of(self._only_active(levels.batch), count)
        self._levels = levels
        self._widen(count)
        self._states.append(states)
        self._parents.append(paths[..., -1] if paths.shape[2] else torch.full_like(tokens, -1))
        return states, torch.cat([paths, levels.own_columns(count)], dim=-1)

    def verify(self, trees: Sequence[DraftTree], columns: int) -> Any:
        """The target's outputs for a tree of each row, as `read_trees` has them; `None` if nothing was read ahead.

        The first time that a target's layers are taken apart, both ways are tried. Where they differ by more than
        rounding, nothing is reused from then on.

        Args:
            columns: of the forward.
        """
        read, self._read = self._read, None
        self.verified += sum(map(len, trees)) * decoder_layers(text_config(self._call.target))
        if read is None or read.kept != self._call.rows.kept:
            return None
        known = _trusted.setdefault(self._call.target, {}).get(self._kind)
        if known is None:
            return self._tried(read, trees, columns)
        self._reuse = known
        if not known:
            return None
        model, inputs = self._model_after(read, trees, columns)
        self.reused += self.count * _known_nodes(read, trees)
        return self._call.forward(inputs, columns, model)

    def _tried(self, read: _Read, trees: Sequence[DraftTree], columns: int) -> Any:
        """The target's outputs for trees, read as a whole; notes whether in two parts it says the same."""
        call, start = self._call, mark(self._call.slots)
        found = self._logits_after(read, trees, columns)
        roll_back(call.slots, start)
        plain = read_trees(call, trees, columns, self._every)
        known = found is not None and all(
            same_but_rounding(found[row, : len(tree)], plain.logits[row, -columns:][: len(tree)])
            for row, tree in enumerate(trees)
        )
        self._reuse = _trusted[call.target][self._kind] = known
        if not known:
            name = type(call.target).__name__
            logger.warning_once(f"all layers of {name} are computed anew in verifying: in two parts it reads otherwise")
        return plain

    @property
    def _kind(self) -> tuple[Any, ...]:
        """What it may depend on whether layers can be taken apart."""
        target, rows = self._call.target, self._call.rows
        call = len(rows.kept) > 1, rows.attended is not None
        return self.count, target.dtype, target.device, text_config(target)._attn_implementation, *call

    def _only_active(self, batch: TreeBatch) -> TreeBatch:
        """The same nodes, with those of other rows where ended texts are read; see `DraftTree.idle`."""
        if self._active is None:
            return batch
        return TreeBatch(batch.tokens, batch.depths.where(self._active[:, None], -1), batch.ancestors)

    def _states_of(self, batch: TreeBatch, count: int) -> torch.Tensor:
        """Reads the last `count` nodes of a batch; the others are in the cache of the first layers."""
        call = self._call
        inputs = node_inputs(call, batch, count, self._kinds)
        inputs |= dict.fromkeys(("output_hidden_states", "output_attentions"), False)
        return self._split.first_states(lambda model: call.acceleration.forward(inputs, comes_again=False, model=model))

    def _forget(self) -> None:
        """Takes all that was read ahead out of the cache."""
        if self._start is not None:
            roll_back(self._call.slots, self._start)
        self._levels = self._start = None
        self._states, self._parents = [], []

    def _taken(self, places: Sequence[int]) -> _Read:
        """What was read ahead, copied from the cache."""
        assert self._levels is not None
        batch, parents = self._only_active(self._levels.batch), torch.cat(self._parents, dim=1).tolist()
        columns: list[dict[_Path, int]] = []
        for row, tokens in enumerate(batch.tokens.tolist()):
            paths: list[_Path] = []
            for token, parent in zip(tokens, parents[row], strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            columns.append({path: column for column, path in enumerate(paths)} if row in places else {})
        keys_values, kept = self._last_slots(self._levels.count), list(self._call.rows.kept)
        return _Read(batch, torch.cat(self._states, dim=1), keys_values, columns, kept)

    def _last_slots(self, count: int) -> _KeysValues:
        layers = self._call.slots.layers[: self.count]
        return [(layer.keys[..., -count:, :].clone(), layer.values[..., -count:, :].clone()) for layer in layers]

    def _widen(self, by: int) -> None:
        """Lets windows keep so many nodes more: the next ones still see the text as far back. A mark puts it back."""
        for index in self._call.slots.windows:
            self._call.slots.layers[index].sliding_window += by if index < self.count else 0

    def _write(self, keys_values: _KeysValues) -> None:
        """Appends keys and values to the cache of the first layers."""
        for layer, (keys, values) in zip(self._call.slots.layers[: self.count], keys_values, strict=True):
            layer.update(keys, values)

    def _logits_after(self, read: _Read, trees: Sequence[DraftTree], columns: int) -> torch.Tensor | None:
        """The logits `[B, columns, V]` after what was read ahead; `None` where the target does not run so."""
        try:
            model, inputs = self._model_after(read, trees, columns)
            outputs = self._call.acceleration.forward(inputs, comes_again=False, model=model)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model's own code raises, its layers cannot be taken apart
            return None
        logits: torch.Tensor = outputs.logits[:, -columns:].clone()
        return logits

    def _model_after(self, read: _Read, trees: Sequence[DraftTree], columns: int) -> tuple[Any, dict[str, Any]]:
        """The model that computes the other layers of trees, and its inputs."""
        call, device = self._call, self._call.target.device
        inputs = node_inputs(call, TreeBatch.of(trees, device, columns), columns, self._every)
        paths = [_paths(tree) for tree in trees]
        unread = [
            [node for node, path in enumerate(own) if path not in known]
            for own, known in zip(paths, read.columns, strict=True)
        ]
        whole, count = self._completed(read, trees, paths, unread), read.batch.tokens.shape[1]
        places = []
        for own, known, rest in zip(paths, read.columns, unread, strict=True):
            new = {node: count + index for index, node in enumerate(rest)}
            row = [new[node] if node in new else known[path] for node, path in enumerate(own)]
            places.append([*row, *[row[0]] * (columns - len(row))])
        index = on_device(places, device)
        states = whole.states.gather(1, index[..., None].expand(-1, -1, whole.states.shape[-1]))
        keys_values = [(_gathered(keys, index), _gathered(values, index)) for keys, values in whole.keys_values]
        return self._split.model_after(states, lambda: self._write(keys_values)), inputs

    def _completed(
        self, read: _Read, trees: Sequence[DraftTree], paths: Sequence[list[_Path]], unread: Sequence[list[int]]
    ) -> _Read:
        """What was read ahead, with the nodes of trees that were not. They stand at the end, as `unread` has them."""
        most = max(map(len, unread))
        if most == 0:
            return read
        before, start = read.batch.tokens.shape[1], mark(self._call.slots)
        tokens, depths, seen = [], [], []
        for tree, own, known, rest in zip(trees, paths, read.columns, unread, strict=True):
            spare = most - len(rest)
            place = {own[node]: before + index for index, node in enumerate(rest)}
            tokens.append([*(tree.tokens[node] for node in rest), *[tree.tokens[0]] * spare])
            depths.append([*(tree.depths[node] for node in rest), *[tree.depths[0]] * spare])
            rows = [_ancestors(own[node], known, place, before + most) for node in rest]
            alone = [[column == before + index for column in range(before + most)] for index in range(len(rest), most)]
            seen.append(rows + alone)
        device = read.batch.tokens.device
        old = read.batch
        batch = TreeBatch(
            torch.cat([old.tokens, on_device(tokens, device)], dim=1),
            torch.cat([old.depths, on_device(depths, device)], dim=1),
            torch.cat([pad(old.ancestors, (0, most)), on_device(seen, device, torch.bool)], dim=1),
        )
        self._write(read.keys_values)
        self._widen(before)
        states = self._states_of(batch, most)
        keys_values = self._last_slots(before + most)
        roll_back(self._call.slots, start)
        return replace(read, batch=batch, states=torch.cat([read.states, states], dim=1), keys_values=keys_values)


def _known_nodes(read: _Read, trees: Sequence[DraftTree]) -> int:
    return sum(path in known for tree, known in zip(trees, read.columns, strict=True) for path in _paths(tree))


def _paths(tree: DraftTree) -> list[_Path]:
    """Returns the tokens from the root to each node of a tree."""
    paths: list[_Path] = [(tree.tokens[0],)]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def _ancestors(path: _Path, known: dict[_Path, int], new: dict[_Path, int], columns: int) -> list[bool]:
    """Returns which columns the last node of a path sees: its ancestors and itself."""
    seen = [False] * columns
    for end in range(1, len(path) + 1):
        part = path[:end]
        seen[known[part] if part in known else new[part]] = True
    return seen


def _gathered(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values `[B, heads, n, size]` at some nodes `[B, n]`."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


# Whether the layers of a target turned out to be taken apart rightly, by `_kind`.
_trusted: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()
