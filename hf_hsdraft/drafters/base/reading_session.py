"""Sessions of drafters that read accepted positions, which are queued until the next draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.draft_tree import Expansion
from ...core.tuning import MOST_PENDING
from .draft_options import DraftOptions
from .protocol import Accepted, Ask, Call
from .target_weights import TargetWeights
from .tree_session import Confidence, DraftMemory, ParallelExpansion, TokenBias, TreeSession

Columns = tuple[torch.Tensor, ...]  # pending inputs, each `[n, ...]`; the last one is the positions


class ReadingSession(TreeSession):
    """Queues accepted positions, and reads them in one forward for the batch before the next draft.

    Families implement `read_pending`, which empties the queues, `saved` and `restore`.
    """

    takes_new_texts = True
    reads_tokens = True  # whether an input has the embedding of the token after its position

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        super().__init__(call.options, weights.vocab_ids, call.foresight)
        self.drafter, self.weights = drafter, weights
        self._pending: list[list[Columns]] = [[] for _ in range(call.rows)]

    def columns(self, news: Accepted) -> Columns:
        """Returns the inputs to queue, on the drafter's device: taps, embeddings if they are read, and positions."""
        device, dtype = self.drafter.device, self.drafter.dtype
        taps, positions = news.taps.to(device, dtype), news.positions.to(device)
        if not self.reads_tokens:
            return taps, positions
        return taps, news.next_embeds(self.weights.embed).to(device, dtype), positions

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            pending = self._pending[each.row]
            pending.append(self.columns(each))
            if sum(len(part[-1]) for part in pending[1:]) > MOST_PENDING:  # no draft for a long time
                self.read_pending([each.row])

    def read_pending(self, rows: Sequence[int]) -> None:
        """Reads what is queued of some rows."""
        raise NotImplementedError

    def taken(self, rows: Sequence[int]) -> tuple[dict[int, int], Columns]:
        """Empties the queues of rows; returns each row's number of positions, and all inputs, row by row."""
        counts = {row: sum(len(part[-1]) for part in self._pending[row]) for row in rows}
        parts = [part for row in rows for part in self._pending[row]]
        for row in rows:
            self._pending[row] = []
        return counts, parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._pending))).difference(rows):
            self._pending[row] = []

    def memory(self, length: int) -> DraftMemory | None:
        if len(self._pending) > 1:
            return None
        return DraftMemory.of(self.drafter, length, self.saved(), self._pending[0])

    def saved(self) -> Any:
        """Returns a copy of what the positions read of a single sequence have left, for `restore`."""
        raise NotImplementedError

    def restore(self, saved: Any) -> None:
        raise NotImplementedError

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory of the same sequence; another one's would cost acceptance, so it is ignored."""
        if isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1):
            self.restore(memory.context)
            self._pending[0].extend(memory.pending)


class ParallelSession(ReadingSession):
    """Drafts trees (or chains) for a batch, all depths of all sequences in one forward.

    Families implement `drafted` for the slots, and `predicted` for their logits.
    """

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` for `depth` drafts; must call `read_pending` first."""
        raise NotImplementedError

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        """Returns the logits `[B, depth, V']` of slots `[B, slots, D]`, and the bias of the path's tokens."""
        raise NotImplementedError

    def confidence(self, hidden: torch.Tensor) -> Confidence | None:
        """Returns what the drafter predicts of acceptance from slots `[B, slots, D]`; see `ParallelExpansion`."""
        return None

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        hidden = self.drafted(asks, depth)
        return self.expanded(asks, hidden, options, *self.predicted(hidden, depth))

    def expanded(
        self, asks: Sequence[Ask], hidden: torch.Tensor, options: DraftOptions, logits: torch.Tensor, bias: Any
    ) -> ParallelExpansion:
        """Returns the expansion of slots `[B, slots, D]` with logits `[B, depth, V']`."""
        race = self.race([ask.row for ask in asks], logits.shape[1])
        return ParallelExpansion(logits, bias, options.temperature, race, self.confidence(hidden))
