"""The session of a block drafter: what it has read of the texts of a call, and what it drafts next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ...common.attention import batched_attention
from ...common.target_weights import TargetWeights
from ...common.tensors import Transform
from ...common.tuning import TUNING
from ...trees.best_first import best_first_trees
from ...trees.builder_registry import TREE_BUILDERS
from ...trees.draft_tree import DraftTree
from ...trees.tree_builders import TreeLimits
from ...verifiers.foresight import Foresight
from ..draft_memory import DraftMemory
from ..draft_options import DraftOptions
from ..parallel_expansion import ParallelExpansion, TokenBias
from ..protocol import Accepted, Ask, Session
from ..row_context import RowContext
from .block_context import farthest, own_mask
from .configuration import Sight
from .heads import TokenHead
from .network import BlockNetwork


@dataclass
class _Row:
    """What is known of one text.

    Attributes:
        pending: hidden states and positions that wait to be read.
        anchor: `[1]`, int64, position of the last accepted token.
    """

    pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    anchor: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockBias(TokenBias):
    """The bias that a head makes of the tokens of a path.

    Attributes:
        head: the head.
        hidden: `[B, slots, D]`, all slots of the blocks.
        projected: `[B, slots, P]`, what the head makes of them.
        first_slot: the slot of the first draft.
    """

    head: TokenHead
    hidden: torch.Tensor
    projected: torch.Tensor
    first_slot: int

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        slot = self.first_slot + level - 2  # that drafted these nodes; before the first draft it is the anchor's own
        states = self.head.advance(tokens, None, None) if level == 1 else states
        if level == 1 and (slot < 0 or not self.head.needs_hidden):
            assert states is not None
            return states
        return self.head.advance(tokens, self.hidden[:, slot : slot + 1], states)

    def code(self, level: int, states: torch.Tensor) -> torch.Tensor:
        slot = self.first_slot + level - 1
        return self.head.code(self.projected[:, slot : slot + 1], states)

    def up(self, code: torch.Tensor) -> torch.Tensor:
        return F.linear(code, self.head.rows)

    def among(self, columns: torch.Tensor) -> Transform:
        rows = self.head.rows[columns].mT
        return lambda code: code @ rows


class BlockSession(Session):
    """Drafts trees (or chains) for the texts of a batch, a block of each in one forward.

    Args:
        drafter: weights and configuration; not changed.
        weights: what the drafter borrows of the target, see `BlockNetwork.borrow`.
        options: of the call.
        batch_size: number of texts.
        foresight: of the target's draws. The best trees go by it; drawn ones do not.
    """

    def __init__(
        self,
        drafter: BlockNetwork,
        weights: TargetWeights,
        options: DraftOptions,
        *,
        batch_size: int = 1,
        foresight: Foresight | None = None,
    ) -> None:
        config, sizes = drafter.config, drafter.config.sizes
        self.drafter, self.weights, self._options = drafter, weights, options
        layers = config.num_hidden_layers
        extra = config.markov_rank, config.markov_head_type, config.selector_rank, config.conv_kernel_size
        ends = len(config.target_tap_layers), config.draft_vocab_size, config.has_own_head
        self.kind = sizes, layers, config.block_size, *ends, *extra, drafter.dtype, drafter.device
        fits = foresight is not None and int(weights.vocab_ids.max()) < foresight.vocab_size
        self._foresight = foresight if options.tree_builder == "beam" and fits else None
        heads, width = sizes.num_key_value_heads, sizes.head_dim
        self._context = RowContext(batch_size, layers, heads, width, drafter.device, drafter.dtype)
        self._rows = [_Row() for _ in range(batch_size)]
        mask = torch.tensor(config.mask_token_id, device=drafter.device)
        self._mask = weights.embed(mask)
        self._slots = torch.arange(config.block_size, device=drafter.device)

    def observe(self, news: Sequence[Accepted]) -> None:
        device, dtype = self.drafter.device, self.drafter.dtype
        for each in news:
            row = self._rows[each.row]
            positions = each.positions.to(device)
            row.pending.append((each.taps.to(device, dtype), positions))
            row.anchor = positions[-1:] + 1
            if len(row.pending) > TUNING.most_pending:  # nothing was drafted for long
                self._read([each.row])

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = [ask for ask in asks if ask.depth > 0]
        if wanted:
            options = self._options
            if wanted[0].chain and options.beam_width > 1:  # the target has turned out to read no trees
                options = options.as_chain()
            options = options.shared_by(wanted[0].sharing)
            depth = min(max(ask.depth for ask in wanted), options.depth)
            hidden = self.slots([ask.row for ask in wanted], [ask.root for ask in wanted])
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

    def slots(self, rows: Sequence[int], roots: Sequence[int]) -> torch.Tensor:
        """Reads what is pending of some texts, and returns the slots of a block after each: `[B, slots, D]`.

        The whole block is computed, however few drafts are asked for: its slots see each other.

        Args:
            rows: the texts.
            roots: their last accepted tokens, the anchors.
        """
        self._read(rows)
        drafter, context = self.drafter, self._context
        positions = torch.cat([self._anchor(row) for row in rows])[:, None] + self._slots
        anchors = self.weights.embed(torch.tensor(list(roots), device=drafter.device))
        masks: dict[Sight, torch.Tensor | None] = {}  # layers share them

        def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            sight = drafter.config.sights[index]
            if sight not in masks:
                masks[sight] = self._seen(sight, rows, positions)
            sides = zip(context.view(index, rows), (keys, values), strict=True)
            all_keys, all_values = (torch.cat([before, own.transpose(1, 2)], dim=2) for before, own in sides)
            return batched_attention(queries, all_keys, all_values, masks[sight])

        return drafter.run(drafter.block_embeds(anchors, self._mask), positions, attend)

    def expansion(
        self, asks: Sequence[Ask], hidden: torch.Tensor, depth: int, options: DraftOptions
    ) -> ParallelExpansion:
        """Returns the children of the nodes of some trees.

        Args:
            asks: what is asked for of the texts.
            hidden: `[B, slots, D]`, of the same texts.
            depth: number of drafts that are of use.
            options: of the draft.
        """
        drafter, first, head = self.drafter, self.drafter.config.first_slot, self.drafter.token_head
        logits = drafter.logits(hidden[:, first : first + depth], self.weights)
        bias = None
        if head is not None:
            logits = head.keep_candidates(logits)
            bias = BlockBias(head, hidden, head.project(hidden), first)
        race = None
        if self._foresight is not None:
            race = self._foresight.race([ask.row for ask in asks], depth, self.weights.vocab_ids)
        temperature = 1.0 if options.tree_builder == "beam" else options.temperature
        return ParallelExpansion(logits, bias, temperature, race)

    def grown(self, asks: Sequence[Ask], expansion: ParallelExpansion, options: DraftOptions) -> list[DraftTree]:
        """Returns the trees of some texts. Where slots know nothing of a path, its best tree is found exactly."""
        ids = self.weights.vocab_ids
        roots = torch.tensor([ask.root for ask in asks], device=ids.device)
        depths = [min(ask.depth, expansion.depth) for ask in asks]
        limits = TreeLimits(options.tree_size, options.beam_width, options.threshold, depths)
        build = TREE_BUILDERS[options.tree_builder]
        if options.tree_builder == "beam" and options.beam_width > 1 and expansion.bias is None:
            build = best_first_trees
        return build(expansion, roots, ids, limits)

    def _read(self, rows: Sequence[int]) -> None:
        """Keeps the keys and values of what is pending of some texts."""
        counts = {row: sum(len(part[1]) for part in self._rows[row].pending) for row in rows}
        parts = [part for row in rows for part in self._rows[row].pending]
        if not parts:
            return
        taps, positions = (torch.cat(column) for column in zip(*parts, strict=True))
        slots = self._context.reserve(counts, positions)
        states, rope = self.drafter.read(taps), self.drafter.rotary(positions, taps.dtype)
        for index in range(self.drafter.config.num_hidden_layers):
            self._context.write(index, slots, *self.drafter.context_keys(index, states, rope))
        for row in rows:
            self._rows[row].pending.clear()

    def _seen(self, sight: Sight, rows: Sequence[int], positions: torch.Tensor) -> torch.Tensor | None:
        """`[B, slots, P]`, True where a slot may look, P the context positions and then the slots."""
        window = None if sight.reach is None else sight.reach + 1
        context = self._context.seen(rows, farthest(sight, positions), window)
        own = own_mask(sight, len(self._slots), positions.device)
        if context is None and own is None:
            return None
        shape, device = (len(rows), len(self._slots)), positions.device
        if context is None:
            length = max(self._context.lengths[row] for row in rows)
            context = torch.ones(*shape, length, dtype=torch.bool, device=device)
        if own is None:
            own = torch.ones(shape[1], shape[1], dtype=torch.bool, device=device)
        return torch.cat([context, own.expand(shape[0], -1, -1)], dim=2)

    def _anchor(self, row: int) -> torch.Tensor:
        anchor = self._rows[row].anchor
        assert anchor is not None, "a text is observed before it is drafted for"
        return anchor
