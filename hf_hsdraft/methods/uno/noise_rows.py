"""Reads noise tokens after the texts with a target whose linear layers have an adapter for these rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...core.draft_tree import DraftTree
from ...core.tensors import device_of
from ...runtime.target_forwards import TargetCall
from ...runtime.target_parts import InPlaceOf, with_modules
from ...runtime.tree_reading import AttentionKind, TreeBatch, node_inputs

Pair = tuple[torch.Tensor, torch.Tensor]  # the products of an adapter, `[r, inputs]` and `[outputs, r]`, scaled


class NoiseRows:
    """Reads roots and noise tokens of a call's texts, and restores the cache. Verification reads trees as a whole."""

    reused_share = 0.0
    columns = 1  # rows of each text in the forward that runs

    def __init__(self, call: TargetCall, kinds: Sequence[AttentionKind], pairs: Mapping[str, Pair]) -> None:
        self._call, self._kinds = call, kinds
        target = call.target
        layers = {name: target.get_submodule(name) for name in pairs}
        runs = {name: partial(self._adapted, layer, pairs[name]) for name, layer in layers.items()}
        self._model = with_modules(target, {name: InPlaceOf(layer, runs[name]) for name, layer in layers.items()})

    def _adapted(self, layer: nn.Module, pair: Pair, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of a linear layer with an adapter for all rows of a text but the first.

        `x` are inputs `[B, n, inputs]`, or `[B * n, inputs]` as in layers of experts.
        """
        down, up = pair
        made: torch.Tensor = layer(x)
        noise = x.reshape(-1, self.columns, x.shape[-1])[:, 1:]
        more = F.linear(F.linear(noise.to(down.dtype), down), up).to(made.dtype)
        return made + F.pad(more, (0, 0, 1, 0)).view_as(made)

    def verify(self, trees: Sequence[DraftTree], columns: int) -> None:
        """Nothing is read ahead."""

    def logits(self, tokens: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """Returns the logits `[B, n, V]` of the tokens after each of `tokens` `[B, n]`, int64: a root, and noise.

        `depths` are of each row; tokens from that depth on are read as idle nodes, and their logits mean nothing.
        """
        call, device = self._call, device_of(self._call.target)
        self.columns = count = tokens.shape[1]
        steps = torch.arange(count, device=device)
        places = steps.where(steps < torch.tensor(list(depths), device=device)[:, None], -1)
        before = (steps[:, None] >= steps).expand(len(tokens), -1, -1)
        start = call.slots.mark()
        try:
            inputs = node_inputs(call, TreeBatch(tokens.to(device), places, before), count, self._kinds)
            inputs |= dict.fromkeys(("output_hidden_states", "output_attentions"), False)
            found = call.acceleration.forward(inputs, comes_again=False, model=self._model)
            return found.logits[:, -count:].float().clone()
        finally:
            call.slots.roll_back(start)
