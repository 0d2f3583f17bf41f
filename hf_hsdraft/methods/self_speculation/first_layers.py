"""Reads drafted nodes with the first layers of a target before they are verified.

They read into the target's cache, after the texts, so images and everything else in the prompts is known. When a
draft is complete the cache is restored. Hidden states, keys and values of the nodes are kept for the verification,
which computes only the other layers: self-speculation as in LayerSkip, section 4.3, and FastVLM. Nodes not read ahead,
such as leaves and n-grams, pass the first layers then.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from ...core.draft_tree import DraftTree
from ...core.tensors import device_of, on_device
from ...runtime.cache_slots import Mark
from ...runtime.misreading import same_but_rounding
from ...runtime.module_hooks import fingerprint
from ...runtime.target_forwards import TargetCall
from ...runtime.target_limits import decoder_layers, known_until, text_config
from ...runtime.tree_reading import AttentionKind, DraftedLevels, TreeBatch, node_inputs, read_trees
from .layer_split import LayerSplit
from .read_ahead import KeysValues, Path, ReadAhead, columns_of, gathered, node_paths

logger = logging.get_logger(__name__)


class FirstLayers:
    """The first `count` layers of a target in one call, after the prompts' forward.

    The call's cache grows, and its target reads trees, with separate masks for each of `kinds`. With `reuse` off,
    verification computes all layers. Of `verified` layer computations of nodes `reused` were saved.
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
        self._depths: torch.Tensor | None = None  # `[B]`, in a draft: nodes at this depth or deeper are idle
        self._read: ReadAhead | None = None
        self.reused, self.verified, self._made_of = 0, 0, fingerprint(call.target)

    @property
    def reused_share(self) -> float:
        """Share of the layers' work in verifying trees that was reused."""
        return self.reused / max(self.verified, 1)

    def apart(self) -> FirstLayers:
        """Returns first layers that read after the same texts in a separate cache."""
        other = copy.copy(self)
        other._call = self._call.apart_of(range(len(self._call.rows.kept)))
        other._levels = other._start = other._read = None
        return other

    @contextlib.contextmanager
    def draft(self, depths: Sequence[int]) -> Iterator[None]:
        """Reads nodes after the texts inside the context; restores the cache at the end.

        `depths` are of each row: nodes of smaller depths are read, none for 0. Deeper nodes may be read for the
        sake of other rows. They are read as idle nodes, at a position that the target has; the results mean nothing
        and are not reused.
        """
        self._depths = on_device(list(depths), device_of(self._call.target))
        self._read = None
        try:
            yield
            if self._reuse and self._levels is not None:
                self._read = self._taken()
        finally:
            self._forget()

    def read_nodes(self, tokens: torch.Tensor, paths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the nodes `[B, n]` of a depth, int64, after their ancestors. Reading roots starts over.

        `paths` `[B, n, depth]` are the ancestors of each node, as columns of the draft; none for a root. Returns the
        hidden states `[B, n, D]` after the first layers, and the paths `[B, n, depth + 1]` that include the nodes.
        """
        if paths.shape[2] == 0:
            self._forget()
            self._levels, self._start = DraftedLevels.nothing(tokens), self._call.slots.mark()
        assert self._levels is not None, "roots are read first"
        count = tokens.shape[1]
        levels = self._levels.with_level(tokens, paths)
        states = self._states_of(self._without_idle(levels.batch), count)
        self._levels = levels
        self._widen(count)
        self._states.append(states)
        self._parents.append(paths[..., -1] if paths.shape[2] else torch.full_like(tokens, -1))
        return states, torch.cat([paths, levels.own_columns(count)], dim=-1)

    def verify(self, trees: Sequence[DraftTree], columns: int) -> Any:
        """The target's outputs for one tree per row, as from `read_trees`; `None` if nothing was read ahead.

        The first time a target's layers are split, both ways are run, and again once texts outgrow the validity of
        a trial. Where they differ by more than rounding, nothing is reused from then on. `columns` is the width of
        the forward.
        """
        read, self._read = self._read, None
        self.verified += sum(map(len, trees)) * decoder_layers(text_config(self._call.target))
        if read is None or read.kept != self._call.rows.kept:
            return None
        known, until = _trusted.setdefault(self._call.target, {}).get(self._kind, (False, -1))
        if self._call.slots.length > until:
            return self._tried(read, trees, columns)
        self._reuse = known
        if not known:
            return None
        model, inputs = self._model_after(read, trees, columns)
        self.reused += self.count * read.count(trees)
        return self._call.forward(inputs, columns, model)

    def _tried(self, read: ReadAhead, trees: Sequence[DraftTree], columns: int) -> Any:
        """Returns the target's outputs for trees, read as a whole; records whether the split gives the same."""
        call, start = self._call, self._call.slots.mark()
        found = self._logits_after(read, trees, columns)
        call.slots.roll_back(start)
        plain = read_trees(call, trees, columns, self._every)
        known = found is not None and all(
            same_but_rounding(found[row, : len(tree)], plain.logits[row, -columns:][: len(tree)])
            for row, tree in enumerate(trees)
        )
        self._reuse, until = known, known_until(call.target, call.slots.length)
        _trusted[call.target][self._kind] = known, until
        if not known:
            name = type(call.target).__name__
            logger.warning_once(f"all layers of {name} are computed anew in verifying: in two parts it reads otherwise")
        return plain

    @property
    def _kind(self) -> tuple[Any, ...]:
        """Cache key of the split-layers trial."""
        target, rows = self._call.target, self._call.rows
        call = len(rows.kept) > 1, rows.padded
        return self._made_of, self.count, device_of(target), text_config(target)._attn_implementation, *call

    def _without_idle(self, batch: TreeBatch) -> TreeBatch:
        """The same nodes, with those that no row wants marked idle; see `DraftTree.idle`."""
        assert self._depths is not None
        wanted = batch.depths < self._depths[:, None]
        return TreeBatch(batch.tokens, batch.depths.where(wanted, -1), batch.ancestors)

    def _states_of(self, batch: TreeBatch, count: int) -> torch.Tensor:
        """Reads the last `count` nodes of a batch; the others are in the cache of the first layers."""
        call = self._call
        inputs = node_inputs(call, batch, count, self._kinds)
        inputs |= dict.fromkeys(("output_hidden_states", "output_attentions"), False)
        return self._split.first_states(lambda model: call.acceleration.forward(inputs, comes_again=False, model=model))

    def _forget(self) -> None:
        if self._start is not None:
            self._call.slots.roll_back(self._start)
        self._levels = self._start = None
        self._states, self._parents = [], []

    def _taken(self) -> ReadAhead:
        assert self._levels is not None
        batch = self._without_idle(self._levels.batch)
        columns = columns_of(batch, torch.cat(self._parents, dim=1).tolist())
        keys_values, kept = self._last_slots(self._levels.count), list(self._call.rows.kept)
        return ReadAhead(batch, torch.cat(self._states, dim=1), keys_values, columns, kept)

    def _last_slots(self, count: int) -> KeysValues:
        layers = self._call.slots.layers[: self.count]
        return [(layer.keys[..., -count:, :].clone(), layer.values[..., -count:, :].clone()) for layer in layers]

    def _widen(self, by: int) -> None:
        """Widens sliding windows, so that the next nodes see the text as far back. A mark restores them."""
        for index in self._call.slots.windows:
            self._call.slots.layers[index].sliding_window += by if index < self.count else 0

    def _write(self, keys_values: KeysValues) -> None:
        for layer, (keys, values) in zip(self._call.slots.layers[: self.count], keys_values, strict=True):
            layer.update(keys, values)

    def _logits_after(self, read: ReadAhead, trees: Sequence[DraftTree], columns: int) -> torch.Tensor | None:
        """The logits `[B, columns, V]` after what was read ahead; `None` where the target cannot run this way."""
        try:
            model, inputs = self._model_after(read, trees, columns)
            outputs = self._call.acceleration.forward(inputs, comes_again=False, model=model)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model's code may raise anything: its layers cannot be split
            return None
        logits: torch.Tensor = outputs.logits[:, -columns:].clone()
        return logits

    def _model_after(self, read: ReadAhead, trees: Sequence[DraftTree], columns: int) -> tuple[Any, dict[str, Any]]:
        call = self._call
        inputs = node_inputs(call, TreeBatch.of(trees, device_of(call.target), columns), columns, self._every)
        paths = [node_paths(tree) for tree in trees]
        whole = self._completed(read, trees, paths)
        index = whole.places(paths, columns)
        states = whole.states.gather(1, index[..., None].expand(-1, -1, whole.states.shape[-1]))
        keys_values = [(gathered(keys, index), gathered(values, index)) for keys, values in whole.keys_values]
        return self._split.model_after(states, lambda: self._write(keys_values)), inputs

    def _completed(self, read: ReadAhead, trees: Sequence[DraftTree], paths: Sequence[Sequence[Path]]) -> ReadAhead:
        """Reads the missing nodes of trees and appends them."""
        unread = read.unread(paths)
        most = max(map(len, unread))
        if most == 0:
            return read
        start, (batch, known) = self._call.slots.mark(), read.with_nodes(trees, paths, unread)
        before = batch.tokens.shape[1] - most
        self._write(read.keys_values)
        self._widen(before)
        states = self._states_of(batch, most)
        keys_values = self._last_slots(before + most)
        self._call.slots.roll_back(start)
        states = torch.cat([read.states, states], dim=1)
        return replace(read, batch=batch, states=states, keys_values=keys_values, columns=known)


# By target and kind of call: whether its layers can be split, and up to which length of text that holds.
_trusted: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[bool, int]]] = weakref.WeakKeyDictionary()
