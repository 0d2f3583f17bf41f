"""Session of heads over the target's last hidden state: what they draft from it, at once or depth by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.draft_tree import Expansion
from ...core.tensors import on_device
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Call
from ..base.reading_session import Columns, ParallelSession, Slots, ends_of
from ..base.target_weights import TargetWeights
from ..base.tree_session import LevelExpansion, Levels


class HeadLevels(Levels):
    """The nodes drafted in one round, by their states; number 0 is the root."""

    def __init__(self, network: Any, weights: TargetWeights, started: torch.Tensor, roots: torch.Tensor) -> None:
        self._network, self._weights = network, weights
        self._states = network.advance(1, started, roots, weights)  # of all nodes by number, `[B, 1 + m, S]`

    def of_roots(self) -> torch.Tensor:
        return self._network.logits_at(1, self._states[:, :1], self._weights)

    def of_nodes(self, level: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._states.shape[1]
        above = self._states.gather(1, parents[..., None].expand(-1, -1, self._states.shape[2]))
        made = self._network.advance(level, above, tokens, self._weights)
        self._states = torch.cat([self._states, made], dim=1)
        numbers = torch.arange(known, known + tokens.shape[1], device=tokens.device)
        return self._network.logits_at(level, made, self._weights), numbers.expand_as(tokens)


class HeadsSession(ParallelSession):
    """Drafts trees (or chains) for a batch from the last hidden state of each row."""

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        super().__init__(drafter, weights, call, layers=0)
        config = drafter.config
        sizes = config.target_hidden_size, config.draft_vocab_size, config.num_draft_steps
        self.kind = type(drafter).__name__, *sizes, drafter.dtype, drafter.device
        self._last: dict[int, torch.Tensor] = {}  # `[H]`, the hidden state of each row's last position read

    def columns(self, news: Accepted) -> Columns:
        taps, positions = super().columns(news)
        return taps[-1:], positions[-1:]  # the others are never read

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        self._last.update(zip(counts, columns[0][ends_of(counts, columns[0].device)], strict=True))

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        network, rows, depth = self.drafter, [ask.row for ask in asks], min(depth, self.drafter.num_draft_steps)
        self.read_pending(rows)
        started = network.start(torch.stack([self._last[row] for row in rows])[:, None])
        if network.reads_tokens:
            roots = on_device([[ask.root] for ask in asks], started.device)
            levels = HeadLevels(network, self.weights, started, roots)
            return LevelExpansion(levels, depth, options.temperature, self.race(rows, depth))
        logits = [network.logits_at(level, started, self.weights) for level in range(1, depth + 1)]
        return self.expanded(asks, started, options, torch.cat(logits, dim=1), None)

    def saved(self) -> Any:
        return super().saved(), self._last.get(0)

    def restore(self, saved: Any) -> None:
        context, last = saved
        super().restore(context)
        self._last = {} if last is None else {0: last}
