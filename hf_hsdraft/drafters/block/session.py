"""Session of a block drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.options import Option
from ...core.tensors import batched_attention
from ..base.protocol import Ask, Call
from ..base.reading_session import ParallelSession
from ..base.target_weights import TargetWeights
from ..base.tree_session import Confidence, TokenBias
from .configuration import Sight
from .context import farthest, own_mask

CONFIDENCE = Option(
    "use_confidence_head",
    True,
    lambda value: isinstance(value, bool),
    "true or false",
    "Whether a confidence head decides with the drafter's probabilities which nodes are drafted.",
)


class BlockSession(ParallelSession):
    """Drafts trees (or chains) for a batch, a block of each row in one forward."""

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        config, sizes = drafter.config, drafter.config.sizes
        layers = config.num_hidden_layers
        super().__init__(drafter, weights, call, layers)
        heads = config.markov_rank, config.markov_head_type, config.selector_rank, config.domino_rank, config.gru_size
        extra = *heads, config.conv_kernel_size
        ends = len(config.target_tap_layers), config.draft_vocab_size, config.has_own_head
        place = drafter.dtype, drafter.device, self._refiner is not None
        self.kind = sizes, layers, config.block_size, *ends, *extra, *place
        mask = torch.tensor(config.mask_token_id, device=drafter.device)
        self._mask = weights.embed(mask)
        self._slots = torch.arange(config.block_size, device=drafter.device)

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        drafter, first, head = self.drafter, self.drafter.config.first_slot, self.drafter.token_head
        logits = drafter.logits(hidden[:, first : first + depth], self.weights)
        if head is None:
            return logits, None
        return head.keep_candidates(logits), TokenBias(head, self.weights.embed, hidden, first)

    def confidence(self, hidden: torch.Tensor) -> Confidence | None:
        head, first, tokens = self.drafter.confidence_head, self.drafter.config.first_slot, self.drafter.markov_head
        if head is None or not self._options.own.get(CONFIDENCE.name, CONFIDENCE.default):
            return None

        def of_level(level: int, states: torch.Tensor | None) -> torch.Tensor:
            slot = hidden[:, first + level - 1 : first + level]
            reads_tokens = self.drafter.config.confidence_head == "markov"
            return head(slot, tokens.of_tokens(states) if reads_tokens else None)

        return of_level

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns all slots of a block, whatever the depth: they see each other."""
        drafter, context, rows = self.drafter, self._context, [ask.row for ask in asks]
        self.read_pending(rows)
        positions = self.anchors(rows) + self._slots
        anchors = self.weights.embed(torch.tensor([ask.root for ask in asks], device=drafter.device))
        masks: dict[Sight, torch.Tensor | None] = {}

        def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            sight = drafter.config.sights[index]
            if sight not in masks:
                masks[sight] = self._seen(sight, rows, positions)
            sides = zip(context.view(index, rows), (keys, values), strict=True)
            all_keys, all_values = (torch.cat([before, own.transpose(1, 2)], dim=2) for before, own in sides)
            return batched_attention(queries, all_keys, all_values, masks[sight])

        return drafter.run(drafter.block_embeds(anchors, self._mask), positions, attend)

    def _seen(self, sight: Sight, rows: Sequence[int], positions: torch.Tensor) -> torch.Tensor | None:
        """`[B, slots, P]`, True where a slot may look; P counts the context positions, then the slots."""
        window = None if sight.reach is None else sight.reach + 1
        context = self._context.seen(rows, farthest(sight, positions), window)
        (batch, slots), reach = positions.shape, None if sight.of_anchor else sight.reach
        if context is None:
            if not sight.causal and (reach is None or reach >= slots - 1):  # a slot sees all
                return None
            length = max(self._context.lengths[row] for row in rows)
            context = torch.ones(batch, slots, length, dtype=torch.bool, device=positions.device)
        return torch.cat([context, own_mask(sight, slots, positions.device).expand(batch, -1, -1)], dim=2)
