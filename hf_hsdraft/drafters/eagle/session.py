"""Session of an EAGLE-3 drafter: drafted rows, the tokens that they predict, and the accepted text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ...core.draft_tree import Expansion
from ...core.tensors import batched_attention
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Call
from ..base.reading_session import (
    Columns,
    DraftedNodes,
    LevelSession,
    RowContext,
    Slots,
    ends_of,
    reading_attention,
)  # fmt: skip
from ..base.target_weights import TargetWeights
from ..base.tree_session import LevelExpansion, ParallelExpansion


class DraftedRows(DraftedNodes):
    """Rows drafted in one round. Row 0 is the last accepted pair; drafted rows follow in the order of `extend`.

    Args:
        weights: what the drafter borrows from its target.
        states: `[B, D]`, y of the last accepted pairs.
        last: `[B, 1]`, int64, positions of these pairs.
    """

    def __init__(
        self,
        network: Any,
        weights: TargetWeights,
        context: RowContext,
        rows: Sequence[int],
        states: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        super().__init__(context, rows, states.device)
        self._network, self._weights, self._last = network, weights, last
        self.states = states[:, None]  # y of all rows by number, `[B, 1 + m, D]`

    def extend(
        self,
        states: torch.Tensor,  # `[B, n, D]`, input states
        embeds: torch.Tensor,  # `[B, n, D]`, embeddings of their tokens
        parents: torch.Tensor,  # `[B, n]`, int64, row numbers
        depths: torch.Tensor,  # `[n]`, int64, distance from the last accepted pair
        causal: bool = False,  # whether each row also sees the earlier rows of this call
    ) -> torch.Tensor:
        """Adds rows, which see the accepted text, their ancestors and themselves; returns their numbers `[B, n]`."""
        numbers = self.add(parents, causal)

        @cache  # layers with the same window share a mask
        def mask(window: int | None) -> torch.Tensor:
            near = None if window is None else (window - depths).expand(len(parents), -1)
            return self.seen(self._last.expand_as(parents), near)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            view = self.written(layer, keys, values)
            return batched_attention(queries, *view, mask(self._network.config.windows[layer]))

        y = self._network.through(states, embeds, self._last + depths, attend)
        self.states = torch.cat([self.states, y], dim=1)
        return numbers

    def of_roots(self) -> torch.Tensor:
        return self._network.logits(self.states[:, :1], self._weights)

    def of_nodes(self, level: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        above = self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))
        depths = torch.full_like(tokens[0], level - 1)
        numbers = self.extend(self._network.fed_back(above), self._weights.embed(tokens), parents, depths)
        return self._network.logits(self.states[:, -tokens.shape[1] :], self._weights), numbers


class EagleSession(LevelSession):
    """Drafts trees (or chains) for a batch, one depth of all rows per forward."""

    def __init__(self, network: Any, weights: TargetWeights, call: Call) -> None:
        config = network.config
        super().__init__(network, weights, call, config.num_hidden_layers)
        parallel = config.mask_token_id is not None
        sizes = config.sizes, config.num_hidden_layers, config.draft_vocab_size
        self.kind = *sizes, parallel, network.dtype, network.device
        self._last: dict[int, torch.Tensor] = {}  # `[D]`, y of each row's last pair read

    def columns(self, news: Accepted) -> Columns:
        device, dtype = self.drafter.device, self.drafter.dtype
        last = self.weights.embed(news.following[-1:])
        if news.embeds is None:
            embeds, count = self.weights.embed(news.following), len(news.positions)
        elif news.embeds.shape[-1] == last.shape[-1]:
            embeds, count = torch.cat([news.embeds.to(last.device, last.dtype), last]), len(news.positions)
        else:  # the drafter's embedding has another width, and the token ids are unknown
            embeds, count = last, 1
        taps, positions = news.taps[-count:], news.positions[-count:]
        return taps.to(device, dtype), embeds.to(device, dtype), positions.to(device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        (taps, embeds, positions), network = columns, self.drafter
        attend = reading_attention(self._context, slots, counts, positions, network.config.windows)
        ends = ends_of(counts, positions.device)
        states = network.through(network.fuse(taps), embeds, positions, attend, ends)
        self._last.update(zip(counts, states, strict=True))

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        network, weights, mask = self.drafter, self.weights, self.drafter.config.mask_token_id
        rows = [ask.row for ask in asks]
        self.read_pending(rows)
        race, temperature = self.race(rows, depth), options.temperature
        states = torch.stack([self._last[row] for row in rows])
        drafted = DraftedRows(network, weights, self._context, rows, states, self.anchors(rows) - 1)
        if mask is None:
            return LevelExpansion(drafted, depth, temperature, race)
        if depth > 1:  # one forward over rows of the mask token; the last accepted pair gives the first depth
            depths = torch.arange(1, depth, device=states.device)
            embeds = weights.embed(torch.full_like(depths, mask)).expand(len(rows), -1, -1)
            parents = torch.zeros_like(depths).expand(len(rows), -1)
            drafted.extend(network.mask_states().expand_as(embeds), embeds, parents, depths, causal=True)
        return ParallelExpansion(network.logits(drafted.states, weights), temperature=temperature, race=race)
