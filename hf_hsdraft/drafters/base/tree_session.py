"""Base sessions that grow trees: `TreeSession`, and `ReadingSession` for drafters that read hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...core.draft_tree import DraftTree
from ...core.tuning import TUNING
from ...trees.builder_registry import TREE_BUILDERS
from ...trees.tree_builders import Expansion, TreeLimits, beam_trees, best_first_trees
from ...verify.foresight import Foresight, Race
from .decoder_layer import LayerSizes
from .draft_memory import DraftMemory
from .draft_options import DraftOptions
from .protocol import Accepted, Ask, Session
from .row_context import RowContext, Slots
from .target_weights import TargetWeights

Columns = tuple[torch.Tensor, ...]  # pending inputs, each `[n, ...]`; the last one is the positions


class TreeSession(Session):
    """Drafts trees (or chains) of the tokens `vocab_ids` `[V']`, int64; families implement `expansion`.

    `foresight` is of the target's draws, and ignored if nodes are drawn.
    """

    def __init__(self, options: DraftOptions, vocab_ids: torch.Tensor, foresight: Foresight | None = None) -> None:
        self._options, self._vocab_ids = options, vocab_ids
        fits = foresight is not None and int(vocab_ids.max()) < foresight.vocab_size
        self._foresight = foresight if fits and not options.drawn else None
        self._build = TREE_BUILDERS[options.tree_builder].grow

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = [ask for ask in asks if ask.depth > 0]
        if wanted:
            options = self.options_for(wanted[0])
            depth = max(ask.depth for ask in wanted)
            trees.update(zip((ask.row for ask in wanted), self.trees(wanted, depth, options), strict=True))
        return list(trees.values())

    def options_for(self, ask: Ask, trees: bool = True) -> DraftOptions:
        """Returns the options with the ask's sizes; without `trees`, for a chain."""
        return replace(self._options, tree_size=ask.size, beam_width=ask.width if trees else 1)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        return self.grown(asks, self.expansion(asks, depth, options), options)

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        raise NotImplementedError

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        """Returns an expansion that can be evaluated again after the call; may be the same one."""
        made: Expansion = expansion
        return made

    def race(self, rows: Sequence[int], depth: int) -> Race | None:
        """Returns the race that decides the coming draws, if they are foreseen."""
        return None if self._foresight is None else self._foresight.race(rows, depth, self._vocab_ids)

    def grown(self, asks: Sequence[Ask], expansion: Expansion, options: DraftOptions) -> list[DraftTree]:
        """Builds the trees. If nodes have no state, the best tree is found exactly."""
        if self.on_expansion is not None:
            self.on_expansion([ask.row for ask in asks], self.repeatable(asks, expansion, options))
        ids = self._vocab_ids
        roots = torch.tensor([ask.root for ask in asks], device=ids.device)
        depths = [min(ask.depth, expansion.depth) for ask in asks]
        limits = TreeLimits(options.tree_size, options.beam_width, options.threshold, depths)
        best_first = self._build is beam_trees and options.beam_width > 1 and not expansion.has_states
        return (best_first_trees if best_first else self._build)(expansion, roots, ids, limits)


@dataclass
class _Row:
    """State of one row: pending inputs, and `[1]`, int64, the position of the last accepted token."""

    pending: list[Columns] = field(default_factory=list)
    anchor: torch.Tensor | None = None


class ReadingSession(TreeSession):
    """Queues accepted positions, and reads them in one forward for the batch before the next draft.

    Families implement `columns`, the queued inputs, and `read`, which stores their keys and values. `layers` is the
    number of layers that attend to accepted positions, `sizes` theirs.
    """

    def __init__(
        self,
        drafter: Any,
        weights: TargetWeights,
        options: DraftOptions,
        rows: int,
        layers: int,
        sizes: LayerSizes,
        foresight: Foresight | None = None,
    ) -> None:
        super().__init__(options, weights.vocab_ids, foresight)
        self.drafter, self.weights = drafter, weights
        heads, width = sizes.num_key_value_heads, sizes.head_dim
        self._context = RowContext(rows, layers, heads, width, drafter.device, drafter.dtype)
        self._rows = [_Row() for _ in range(rows)]

    def columns(self, news: Accepted) -> Columns:
        """Returns the inputs to queue, on the drafter's device."""
        raise NotImplementedError

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        """Stores keys and values of queued inputs in `slots`; `counts` are each row's positions, row by row."""
        raise NotImplementedError

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            row, columns = self._rows[each.row], self.columns(each)
            row.pending.append(columns)
            row.anchor = columns[-1][-1:] + 1
            if len(row.pending) > TUNING.most_pending:  # no draft for a long time
                self.read_pending([each.row])

    def read_pending(self, rows: Sequence[int]) -> None:
        rows = [row for row in rows if self._rows[row].pending]
        if not rows:
            return
        counts = {row: sum(len(part[-1]) for part in self._rows[row].pending) for row in rows}
        parts = [part for row in rows for part in self._rows[row].pending]
        columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        self.read(self._context.reserve(counts, columns[-1]), counts, columns)
        for row in rows:
            self._rows[row].pending.clear()

    def anchors(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns the positions `[B, 1]` of the last accepted tokens."""
        found = [anchor for row in rows if (anchor := self._rows[row].anchor) is not None]
        assert len(found) == len(rows), "a text is observed before it is drafted for"
        return torch.stack(found)

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._rows))).difference(rows):
            self._rows[row] = _Row()
            self._context.forget(row)

    def memory(self, length: int) -> DraftMemory | None:
        if len(self._rows) > 1:
            return None
        return DraftMemory.of(self.drafter, length, self._context.copy_of(0), self._rows[0].pending)

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory of the same sequence; another one's would cost acceptance, so it is ignored."""
        if isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1):
            self._context = memory.context.copy_of(0)
            self._rows[0].pending.extend(memory.pending)
