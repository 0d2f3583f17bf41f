"""What an EAGLE-3 drafter has read of the texts of a call, and the rows of what it drafts after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ...core.attention import batched_attention
from ...core.tensors import on_device
from ...core.tuning import TUNING
from ..base.row_context import RowContext, Slots
from .eagle_network import AttendRows, EagleNetwork

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # taps, embeddings of the following tokens, and positions


@dataclass
class EagleText:
    """One text.

    Attributes:
        pending: accepted pairs that wait to be read.
        state: `[D]`, y of the last pair that was read.
        last: its position.
    """

    pending: list[Pairs] = field(default_factory=list)
    state: torch.Tensor | None = None
    last: int = -1


class EagleTexts:
    """The texts of a call, as far as they have been accepted.

    Args:
        network: of the drafter.
        count: number of texts.
    """

    def __init__(self, network: EagleNetwork, count: int) -> None:
        layer = network.config.layer
        self._network = network
        self.context = RowContext(
            count,
            network.config.num_hidden_layers,
            layer.num_key_value_heads,
            layer.head_dim,
            network.device,
            network.dtype,
        )
        self.texts = [EagleText() for _ in range(count)]

    def add(self, row: int, taps: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> None:
        """Queues accepted pairs of a text; the next `read` reads them.

        Args:
            row: index of the text.
            taps: `[n, taps * target's D]`, h_i of the accepted positions i.
            embeds: `[n, D]`, embeddings of x_{i+1}.
            positions: `[n]`, int64, the positions i.
        """
        device, dtype = self._network.device, self._network.dtype
        pending = self.texts[row].pending
        pending.append((taps.to(device, dtype), embeds.to(device, dtype), positions.to(device)))
        if len(pending) > TUNING.most_pending:  # nothing was drafted for long
            self.read([row])

    def read(self, rows: Sequence[int]) -> None:
        """Reads what is pending of some texts."""
        waiting = [row for row in rows if self.texts[row].pending]
        if not waiting:
            return
        parts = [part for row in waiting for part in self.texts[row].pending]
        taps, embeds, positions = (torch.cat(column) for column in zip(*parts, strict=True))
        counts = {row: sum(len(part[2]) for part in self.texts[row].pending) for row in waiting}
        slots = self.context.reserve(counts, positions)
        ends = on_device(list(counts.values()), positions.device).cumsum(0) - 1
        attend = self._attention(counts, slots, positions)
        states = self._network.through(self._network.fuse(taps), embeds, positions, attend, ends)
        for row, state, last in zip(waiting, states, positions[ends].tolist(), strict=True):
            self.texts[row] = EagleText([], state, last)

    def _attention(self, counts: Mapping[int, int], slots: Slots, positions: torch.Tensor) -> AttendRows:
        """The attention of accepted pairs, which stand text by text: each sees its text up to itself."""
        context, rows, windows = self.context, list(counts), self._network.config.windows

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ends: Any
        ) -> torch.Tensor:
            context.write(layer, slots, keys, values)
            if ends is not None:  # of each text the last pair alone
                seen = context.seen(rows, positions[ends][:, None], windows[layer])
                return batched_attention(queries[:, None], *context.view(layer, rows), seen)[:, 0]
            mixed = []
            texts = zip(rows, queries.split(list(counts.values())), positions.split(list(counts.values())), strict=True)
            for row, own, at in texts:
                view = context.view(layer, [row])
                # A mask of a whole prompt would grow with its square.
                for block, last in zip(own.split(TUNING.mask_rows), at.split(TUNING.mask_rows), strict=True):
                    seen = context.seen([row], last[None], windows[layer])
                    mixed.append(batched_attention(block[None], *view, seen)[0])
            return torch.cat(mixed)

        return attend

    def forget(self, row: int) -> None:
        """Drops a text that has ended."""
        self.texts[row] = EagleText()
        self.context.forget(row)


class DraftedRows:
    """The rows of what is drafted in one round: keys and values by node, and who sees whom.

    Rows have numbers: 0 is a text's last accepted pair, 1 and following the drafted rows in the order of `extend`.

    Args:
        network: of the drafter.
        texts: what was read. What is drafted is written behind it, and counts no longer when more is read.
        rows: the texts that are drafted for; each has been read.
    """

    def __init__(self, network: EagleNetwork, texts: EagleTexts, rows: Sequence[int]) -> None:
        self._network, self._context, self._rows = network, texts.context, list(rows)
        states = [state for row in rows if (state := texts.texts[row].state) is not None]
        self._states = torch.stack(states)[:, None]
        device = self._states.device
        self._last = on_device([texts.texts[row].last for row in rows], device)[:, None]
        self._above = torch.zeros(len(states), 1, 0, dtype=torch.bool, device=device)  # `[B, 1 + m, m]`, drafted ones

    @property
    def states(self) -> torch.Tensor:
        """y of all rows, `[B, 1 + m, D]`, by their numbers."""
        return self._states

    def extend(
        self,
        states: torch.Tensor,
        embeds: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        causal: bool = False,
    ) -> torch.Tensor:
        """Drafts further rows; each sees the accepted text, its ancestors and itself.

        Args:
            states: `[B, n, D]`, the states that the rows read.
            embeds: `[B, n, D]`, embeddings of their tokens.
            parents: `[B, n]`, int64, numbers of their parents.
            depths: `[n]`, int64, by how many positions they are after the last accepted pair.
            causal: whether each row sees those before it in this call too.

        Returns:
            their numbers, `[B, n]`, int64.
        """
        (batch, count), before = parents.shape, self._above.shape[2]
        self._states = torch.cat([self._states, self._run(states, embeds, parents, depths, causal)], dim=1)
        numbers = torch.arange(before + 1, before + 1 + count, device=parents.device)
        return numbers.expand(batch, -1)

    def _run(
        self, states: torch.Tensor, embeds: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        (batch, count), before = parents.shape, self._above.shape[2]
        ancestors = self._above.gather(1, parents[..., None].expand(-1, -1, before))
        own = torch.ones(count, count, dtype=torch.bool, device=parents.device)
        own = own.tril() if causal else own.tril().triu()
        ancestors = torch.cat([ancestors, own.expand(batch, -1, -1)], dim=2)
        self._above = torch.cat([F.pad(self._above, (0, count)), ancestors], dim=1)
        context, rows, drafted = self._context, self._rows, before + count
        slots = context.drafted(rows, before, count)
        places = context.drafted_slots(rows, 0, drafted)[:, None].expand(-1, count, -1)

        @cache  # layers of the same window share a mask
        def seen(window: int | None) -> torch.Tensor:
            near = None if window is None else (window - depths).expand(batch, -1)
            accepted = context.seen(rows, self._last.expand(-1, count), near, drafted)
            assert accepted is not None
            return accepted.expand(-1, count, -1).scatter(2, places, ancestors)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            context.write(layer, slots, keys.flatten(0, 1), values.flatten(0, 1))
            mask = seen(self._network.config.windows[layer])
            return batched_attention(queries, *context.view(layer, rows, drafted), mask)

        return self._network.through(states, embeds, self._last + depths, attend)
