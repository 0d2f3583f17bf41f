"""Reads drafted nodes with the first layers of a target before they are verified.

They read into the target's cache, after the texts, so images and everything else in the prompts is known. When a
draft is complete the cache is restored. Hidden states, keys and values of the nodes are kept for the verification,
which computes only the other layers: self-speculation as in LayerSkip, section 4.3, and FastVLM. Nodes not read ahead,
such as leaves and n-grams, pass the first layers then.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ...core.draft_tree import DraftTree, TreeBatch, from_nodes
from ...core.kept import kept_with
from ...core.tensors import device_of, on_device
from ...runtime.cache_slots import Mark
from ...runtime.misreading import same_but_rounding
from ...runtime.module_hooks import fingerprint
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import decoder_list
from ...runtime.target_runtime import TargetRuntime
from ...runtime.tree_reading import node_inputs, read_trees
from ..published.levels import further_nodes
from ..published.target_copies import InPlaceOf, with_modules

logger = logging.get_logger(__name__)

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, `[B, heads, nodes, size]` each
_IDLE = -1  # token of a node that was read for the sake of other rows


class LayerSplit:
    """A target's decoder layers in two parts, the first `count` and the rest.

    Each part is a copy of the target with some layers replaced, sharing everything else. The target is never written
    to, so other calls may run it at the same time.
    """

    def __init__(self, target: Any, count: int) -> None:
        self._target, self._count = target, count
        name, layers = decoder_list(target)
        self._name, self._layers = name, list(layers)
        self._others: int | None = None  # see `_Reached`
        last = self._layers[count - 1]

        def reach(*args: Any, **kwargs: Any) -> Any:
            found = last(*args, **kwargs)
            states, others = (found[0], len(found) - 1) if isinstance(found, tuple) and found else (found, None)
            if not isinstance(states, torch.Tensor):
                raise ValueError(f"{type(last).__name__} returns no hidden states")
            raise _Reached(states, others)

        self._first = with_modules(target, {name: nn.ModuleList([*self._layers[: count - 1], InPlaceOf(last, reach)])})

    def first_states(self, run: Callable[[Any], Any]) -> torch.Tensor:
        """Returns the hidden states after the first layers; `run` runs the forward of the model that it is given."""
        try:
            run(self._first)
        except _Reached as reached:
            self._others = reached.others
            return reached.states
        raise ValueError(f"{type(self._target).__name__} did not run layer {self._count} of its decoder")

    def model_after(self, states: torch.Tensor, read: Callable[[], None]) -> Any:
        """Returns a model that computes the other layers after states `[B, n, D]`; `read` stands for the first."""
        others = self._others

        def pass_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states if others is None else (hidden_states, *[None] * others)

        def continue_from(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            read()
            return pass_on(states.to(hidden_states.device))

        runs = [pass_on] * (self._count - 1) + [continue_from]
        first = [InPlaceOf(layer, run) for layer, run in zip(self._layers, runs, strict=False)]
        return with_modules(self._target, {self._name: nn.ModuleList([*first, *self._layers[self._count :]])})


class _Reached(Exception):
    """Raised with the last wanted layer's states `[B, n, D]`; `others` counts its further values, None for no tuple."""

    def __init__(self, states: torch.Tensor, others: int | None) -> None:
        super().__init__()
        self.states, self.others = states, others


@dataclass(frozen=True)
class ReadAhead:
    """Nodes that the first layers have read in a round, m of each row."""

    trees: Sequence[DraftTree]  # of these nodes
    states: torch.Tensor  # `[B, m, D]`, hidden states after the first layers
    keys_values: KeysValues
    kept: Sequence[int]  # where the texts stood, see `TextRows.kept`


class FirstLayers:
    """The first `count` layers of a target in one call with a growing cache; without `reuse` verification runs all."""

    def __init__(self, call: TargetRuntime, count: int, reuse: bool) -> None:
        self._call, self._count, self._split = call, count, LayerSplit(call.target, count)
        self._kinds = [kind for kind in call.kinds if kind.layer < count]
        self._reuse = reuse and not any(call.kwargs.get(f"output_{name}") for name in ("hidden_states", "attentions"))
        self._batch: TreeBatch | None = None  # of the nodes of a draft; an idle one has depth -1
        self._depths: torch.Tensor | None = None  # `[B]`, in a draft: nodes at this depth or deeper are idle
        self._start: Mark | None = None
        self._states: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._read: ReadAhead | None = None
        self._reused = self._verified = 0  # computations of a layer for a node
        self._made_of = fingerprint(call.target)

    def apart(self) -> FirstLayers:
        """Returns first layers that read after the same texts in a separate cache."""
        other = copy.copy(self)
        other._call = self._call.apart_of(range(len(self._call.rows.kept)))
        other._batch = other._start = other._read = None
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
            if self._reuse and self._batch is not None:
                self._read = self._taken(self._batch)
        finally:
            self._forget()

    def read_nodes(self, tokens: torch.Tensor, parents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads nodes `[B, n]`, int64, of one depth below the columns `parents`, likewise; None for roots.

        Roots start over. Returns hidden states `[B, n, D]` after the first layers, and the nodes' columns `[B, n]`.
        """
        count = tokens.shape[1]
        assert self._depths is not None
        if parents is None:
            self._forget()
            self._start = self._call.slots.mark()
        depths = torch.full_like(tokens, len(self._states))
        depths = depths.where(depths < self._depths[:, None], -1)
        batch, columns = further_nodes(self._batch, tokens, depths, parents)
        states = self._states_of(batch, count)
        self._widen(count)
        self._batch = batch
        self._states.append(states)
        self._parents.append(torch.full_like(tokens, -1) if parents is None else parents)
        return states, columns

    def verify(self, trees: Sequence[DraftTree], columns: int) -> Any:
        """The target's outputs for a tree per row, as from `read_trees`; None if nothing was read ahead."""
        read, self._read = self._read, None
        outputs, reused = None, 0
        if read is not None and read.kept == self._call.rows.kept:
            outputs, reused = self._verify_after(read, trees, columns)
        self._reused += self._count * reused
        self._verified += sum(map(len, trees)) * decoder_layers(text_config(self._call.target))
        self._call.reused_share = self._reused / self._verified
        return outputs

    def _verify_after(self, read: ReadAhead, trees: Sequence[DraftTree], columns: int) -> tuple[Any, int]:
        """As `verify`, with the number of nodes reused. The first time both ways run, and have to agree."""
        # By kind of call: whether the target's layers can be split
        trusted: dict[tuple[Any, ...], bool] = kept_with(self._call.target, "can be split", dict)
        if self._kind not in trusted:
            outputs, trusted[self._kind] = self._tried(read, trees, columns)
            return outputs, 0
        self._reuse = trusted[self._kind]
        if not self._reuse:
            return None, 0
        model, inputs, reused = self._model_after(read, trees, columns)
        return self._call.forward(inputs, columns, model), reused

    def _tried(self, read: ReadAhead, trees: Sequence[DraftTree], columns: int) -> tuple[Any, bool]:
        """Returns the target's outputs for trees, read as a whole, and whether the split layers give the same."""
        call, start = self._call, self._call.slots.mark()
        try:
            model, inputs, _ = self._model_after(read, trees, columns)
            outputs = call.acceleration.forward(inputs, comes_again=False, model=model)
            found = outputs.logits[:, -columns:].clone()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model's code may raise anything: its layers cannot be split
            found = None
        call.slots.roll_back(start)
        plain = read_trees(call, trees, columns, call.kinds)
        same = found is not None and all(
            same_but_rounding(found[row, : len(tree)], plain.logits[row, -columns:][: len(tree)])
            for row, tree in enumerate(trees)
        )
        if not same:
            name = type(call.target).__name__
            logger.warning_once(f"all layers of {name} are recomputed in verifying: split in two, it reads differently")
        return plain, same

    @property
    def _kind(self) -> tuple[Any, ...]:
        """Cache key of the split-layers trial."""
        target, rows = self._call.target, self._call.rows
        call = len(rows.kept) > 1, rows.padded
        return self._made_of, self._count, device_of(target), text_config(target)._attn_implementation, *call

    def _states_of(self, batch: TreeBatch, count: int) -> torch.Tensor:
        """Reads the last `count` nodes of a batch; the others are in the cache of the first layers."""
        call = self._call
        inputs = node_inputs(call, batch, count, self._kinds)
        inputs |= dict.fromkeys(("output_hidden_states", "output_attentions"), False)
        return self._split.first_states(lambda model: call.acceleration.forward(inputs, comes_again=False, model=model))

    def _forget(self) -> None:
        if self._start is not None:
            self._call.slots.roll_back(self._start)
        self._batch = self._start = None
        self._states, self._parents = [], []

    def _taken(self, batch: TreeBatch) -> ReadAhead:
        tokens = batch.tokens.where(batch.depths >= 0, _IDLE)
        nodes = (each.tolist() for each in (tokens, torch.cat(self._parents, dim=1), batch.depths))
        trees = [from_nodes([(*node, 0.0) for node in zip(*row, strict=True)]) for row in zip(*nodes, strict=True)]
        keys_values = self._last_slots(tokens.shape[1])
        return ReadAhead(trees, torch.cat(self._states, dim=1), keys_values, list(self._call.rows.kept))

    def _last_slots(self, count: int) -> KeysValues:
        layers = self._call.slots.layers[: self._count]
        return [(layer.keys[..., -count:, :].clone(), layer.values[..., -count:, :].clone()) for layer in layers]

    def _widen(self, by: int) -> None:
        """Widens sliding windows, so that the next nodes see the text as far back. A mark restores them."""
        for index in self._call.slots.windows:
            self._call.slots.layers[index].sliding_window += by if index < self._count else 0

    def _write(self, keys_values: KeysValues) -> None:
        for layer, (keys, values) in zip(self._call.slots.layers[: self._count], keys_values, strict=True):
            layer.update(keys, values)

    def _model_after(
        self, read: ReadAhead, trees: Sequence[DraftTree], columns: int
    ) -> tuple[Any, dict[str, Any], int]:
        """Returns a model that continues after what was read ahead, its inputs, and how many nodes it need not read."""
        call, device, before = self._call, device_of(self._call.target), read.states.shape[1]
        whole, places = zip(*(_joined(*pair) for pair in zip(read.trees, trees, strict=True)), strict=True)
        states, keys_values, missing = read.states, read.keys_values, max(map(len, whole)) - before
        if missing:
            start = call.slots.mark()
            self._write(keys_values)
            self._widen(before)
            batch = TreeBatch.of(whole, device)
            batch = replace(batch, tokens=batch.tokens.clamp(min=0))  # idle ones
            states = torch.cat([states, self._states_of(batch, missing)], dim=1)
            keys_values = self._last_slots(before + missing)
            call.slots.roll_back(start)
        # Roots pad shorter rows.
        index = on_device([[*row, *[row[0]] * (columns - len(row))] for row in places], device)
        states = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
        picked = [(_at(keys, index), _at(values, index)) for keys, values in keys_values]
        inputs = node_inputs(call, TreeBatch.of(trees, device, columns), columns, call.kinds)
        model = self._split.model_after(states, lambda: self._write(picked))
        return model, inputs, sum(place < before for row in places for place in row)


def _joined(read: DraftTree, tree: DraftTree) -> tuple[DraftTree, list[int]]:
    """Appends the missing nodes of `tree`; returns the whole, and the places of all nodes of `tree` in it."""
    nodes = list(zip(read.tokens, read.parents, read.depths, read.scores, strict=True))
    known, places = {(parent, token): node for node, (token, parent, _, _) in enumerate(nodes)}, list[int]()
    for token, parent, depth in zip(tree.tokens, tree.parents, tree.depths, strict=True):
        above = places[parent] if parent >= 0 else -1
        places.append(known.setdefault((above, token), len(nodes)))
        if places[-1] == len(nodes):
            nodes.append((token, above, depth, 0.0))
    return from_nodes(nodes), places


def _at(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values `[B, heads, n, size]` at some nodes `[B, n]`."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
