"""The session of drafters that draft all depths in one forward, from keys and values of what was accepted.

What is accepted waits until the next draft, and is then read in one forward for all texts of a batch. Only accepted
positions are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.draft_tree import DraftTree
from ...core.tuning import TUNING
from ...trees.best_first import best_first_trees
from ...trees.builder_registry import TREE_BUILDERS
from ...trees.tree_builders import Expansion, TreeBuilder, TreeLimits
from ...verify.foresight import Foresight, Race
from .draft_memory import DraftMemory
from .draft_options import DraftOptions
from .parallel_expansion import ParallelExpansion, TokenBias
from .protocol import Accepted, Ask, Session
from .refiners import refiner_of
from .row_context import RowContext, Slots
from .target_weights import TargetWeights

Columns = tuple[torch.Tensor, ...]  # what waits to be read of some positions, each `[n, ...]`; the positions are last


@dataclass
class _Row:
    """What is known of one text.

    Attributes:
        pending: what waits to be read.
        anchor: `[1]`, int64, position of the last accepted token.
    """

    pending: list[Columns] = field(default_factory=list)
    anchor: torch.Tensor | None = None


class ParallelSession(Session):
    """Drafts trees (or chains) for the texts of a batch, all depths of all texts in one forward.

    A family says by `columns` what it keeps of news until they are read, by `read` what is kept of them then, by
    `drafted` what the slots are, and by `predicted` what they predict.

    Args:
        drafter: weights and configuration; not changed.
        weights: what the drafter borrows of the target.
        options: of the call.
        context: keys and values of the texts, with a room for each.
        foresight: of the target's draws. The best trees go by it; drawn ones do not.
    """

    def __init__(
        self,
        drafter: Any,
        weights: TargetWeights,
        options: DraftOptions,
        context: RowContext,
        foresight: Foresight | None = None,
    ) -> None:
        self.drafter, self.weights, self._options = drafter, weights, options
        fits = foresight is not None and int(weights.vocab_ids.max()) < foresight.vocab_size
        self._foresight = foresight if not options.drawn and fits else None
        self._context = context
        self._rows = [_Row() for _ in context.lengths]
        self._refiner = refiner_of(drafter, options, weights, len(self._rows))

    def columns(self, news: Accepted) -> Columns:
        """Returns what is kept of news until they are read, where the drafter is."""
        raise NotImplementedError

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        """Keeps the keys and values of some positions.

        Args:
            slots: where they are kept.
            counts: number of positions of each text. They stand one text after the other.
            columns: what was waiting of these positions.
        """
        raise NotImplementedError

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` of some texts.

        Args:
            asks: what is asked for of the texts. What was pending of them has not been read yet, see `read_pending`.
            depth: number of drafts that are of use.
        """
        raise NotImplementedError

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        """Returns the logits `[B, depth, V']` of slots, and what the tokens of a path say about them.

        Args:
            hidden: `[B, slots, D]`.
            depth: number of drafts that are of use.
        """
        raise NotImplementedError

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            row, columns = self._rows[each.row], self.columns(each)
            row.pending.append(columns)
            row.anchor = columns[-1][-1:] + 1
            if self._refiner is not None:
                self._refiner.observe(each.row, [*each.earlier, *each.tokens])
            if len(row.pending) > TUNING.most_pending:  # nothing was drafted for long
                self.read_pending([each.row])

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = [ask for ask in asks if ask.depth > 0]
        if wanted:
            options, depth = self._options, max(ask.depth for ask in wanted)
            hidden = self.drafted(wanted, depth)
            grown = self.grown(wanted, self.expansion(wanted, hidden, depth, options), options)
            trees.update(zip((ask.row for ask in wanted), grown, strict=True))
        return list(trees.values())

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._rows))).difference(rows):
            self._rows[row] = _Row()
            self._context.forget(row)

    def memory(self, length: int) -> DraftMemory | None:
        if len(self._rows) > 1:
            return None
        return DraftMemory.of(self.drafter, length, self._context.copy_of(0), self._rows[0].pending)

    def resume(self, memory: Any, cached: int) -> None:
        """Goes on from a memory of the same text; that of another one would cost acceptance, so it is left alone."""
        ours = isinstance(memory, DraftMemory) and isinstance(memory.context, RowContext)
        if ours and memory.fits(self.drafter, cached + 1):
            self._context = memory.context.copy_of(0)
            self._rows[0].pending.extend(memory.pending)

    def read_pending(self, rows: Sequence[int]) -> None:
        """Keeps the keys and values of what is pending of some texts."""
        rows = [row for row in rows if self._rows[row].pending]
        if not rows:
            return
        counts = {row: sum(len(part[-1]) for part in self._rows[row].pending) for row in rows}
        parts = [part for row in rows for part in self._rows[row].pending]
        columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        self.read(self._context.reserve(counts, columns[-1]), counts, columns)
        for row in rows:
            self._rows[row].pending.clear()

    def expansion(self, asks: Sequence[Ask], hidden: torch.Tensor, depth: int, options: DraftOptions) -> Expansion:
        """Returns the children of the nodes of some trees.

        Args:
            asks: what is asked for of the texts.
            hidden: `[B, slots, D]`, of the same texts.
            depth: number of drafts that are of use.
            options: of the draft.
        """
        logits, bias = self.predicted(hidden, depth)
        temperature = options.draw_temperature
        refinement = None if self._refiner is None else self._refiner.refinement([ask.row for ask in asks])
        return ParallelExpansion(logits, bias, temperature, self.race(asks, depth), refinement=refinement)

    def race(self, asks: Sequence[Ask], depth: int) -> Race | None:
        """Returns the race that decides the draws to come, where these are foreseen."""
        if self._foresight is None:
            return None
        return self._foresight.race([ask.row for ask in asks], depth, self.weights.vocab_ids)

    def grown(self, asks: Sequence[Ask], expansion: Expansion, options: DraftOptions) -> list[DraftTree]:
        """Returns the trees of some texts. Where slots know nothing of a path, its best tree is found exactly.

        Args:
            asks: what is asked for of the texts.
            expansion: what `expansion` returned.
            options: of the draft.
        """
        ids = self.weights.vocab_ids
        roots = torch.tensor([ask.root for ask in asks], device=ids.device)
        depths = [min(ask.depth, expansion.depth) for ask in asks]
        limits = TreeLimits(asks[0].size, asks[0].width, options.threshold, depths)
        build: TreeBuilder = TREE_BUILDERS[options.tree_builder]
        if options.tree_builder == "beam" and not asks[0].chain and not expansion.has_states:
            build = best_first_trees
        return build(expansion, roots, ids, limits)

    def _anchor(self, row: int) -> torch.Tensor:
        """Returns the position `[1]` of the last accepted token of a text."""
        anchor = self._rows[row].anchor
        assert anchor is not None, "a text is observed before it is drafted for"
        return anchor
