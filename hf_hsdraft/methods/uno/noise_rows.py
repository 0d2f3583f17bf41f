"""Reads noise tokens after the texts with a target whose linear layers have an adapter for these rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.draft_tree import DraftTree
from ...core.tensors import device_of
from ...runtime.target_forwards import TargetCall
from ...runtime.target_parts import with_modules
from ...runtime.tree_reading import AttentionKind, TreeBatch, node_inputs

Pair = tuple[torch.Tensor, torch.Tensor]  # the products of an adapter, `[r, inputs]` and `[outputs, r]`, scaled


class AdaptedRows(nn.Module):
    """A linear layer with an adapter for all rows of a text but the first. The layer is not a submodule.

    `reader` is a `NoiseRows`, which knows how many rows each text has.
    """

    def __init__(self, base: nn.Module, pair: Pair, reader: Any) -> None:
        super().__init__()
        self.__dict__.update(_base=base, _pair=pair, _reader=reader)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[B, n, inputs]`, or `[B * n, inputs]` as in layers of experts, to as many outputs."""
        down, up = self.__dict__["_pair"]
        made: torch.Tensor = self.__dict__["_base"](x)
        noise = x.reshape(-1, self.__dict__["_reader"].columns, x.shape[-1])[:, 1:]
        more = F.linear(F.linear(noise.to(down.dtype), down), up).to(made.dtype)
        return made + F.pad(more, (0, 0, 1, 0)).view_as(made)


class NoiseRows:
    """Reads roots and noise tokens of a call's texts, and restores the cache. Verification reads trees as a whole."""

    reused_share = 0.0
    columns = 1  # rows of each text in the forward that runs

    def __init__(self, call: TargetCall, kinds: Sequence[AttentionKind], pairs: Mapping[str, Pair]) -> None:
        self._call, self._kinds = call, kinds
        target = call.target
        layers = {name: AdaptedRows(target.get_submodule(name), pair, self) for name, pair in pairs.items()}
        self._model = with_modules(target, layers)

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
