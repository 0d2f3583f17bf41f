"""The session of a self-speculative drafter. The texts' state is in the target's cache alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from ...core.draft_tree import DraftTree
from ...core.tensors import device_of
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.protocol import Ask, Call
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.tree_session import TreeSession, log_probs_of
from ...trees.tree_builders import Expansion
from ...verify.foresight import Race
from .first_layers import FirstLayers

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class ImitationExpansion(Expansion):
    """Predictions of the imitation network for the children of nodes. A node's state is its path.

    `first` are the target's first layers, after the texts; see `FirstLayers.read_nodes`. Where a `race` foresees the
    target's draws, probabilities are those of winning it.
    """

    drafter: Any  # a SelfDrafter
    weights: TargetWeights
    first: FirstLayers
    depth: int
    temperature: float = 1.0
    race: Race | None = None

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[B, n, V']` of the nodes' children, and the nodes' paths `[B, n, level]`.

        `states` `[B, n, level - 1]` are the paths of the nodes' parents; None at level 1.
        """
        above = tokens[..., None][..., :0] if states is None else states
        hidden, paths = self.first.read_nodes(tokens, above)
        imitated = self.drafter.imitated(hidden.to(self.drafter.device, self.drafter.dtype))
        logits = self.drafter.logits(imitated, self.weights).float().to(tokens.device)
        return log_probs_of(level, logits, self.temperature, self.race), paths


class SelfSession(TreeSession):
    """Drafts trees, or chains, depth by depth for all texts of a batch."""

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        config = drafter.config
        super().__init__(call.options, weights.vocab_ids.to(device_of(call.target)), call.foresight)
        self._drafter, self._weights = drafter, weights
        self._rows = list(range(call.rows))
        reuse = call.options.own["layer_reuse"]
        self._first: FirstLayers | None = call.read_ahead(partial(FirstLayers, count=config.draft_layers, reuse=reuse))
        sizes = config.draft_layers, config.num_hidden_layers, config.intermediate_size, config.draft_vocab_size
        self.kind = *sizes, drafter.dtype, drafter.device
        if self._first is None and call.options.depth > 0:
            logger.warning_once(
                f"{type(call.target).__name__} is decoded without drafts of its first layers: they need a cache that "
                "grows, and attention that takes masks"
            )

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        """All rows that the target reads are in each forward; rows without an ask add nothing to it."""
        if self._first is None:
            return [DraftTree.root(ask.root) for ask in asks]
        wanted = {ask.row: ask for ask in asks}
        # Predictions for the other rows are ignored.
        every = [wanted.get(row, Ask(row, root=0, depth=depth, size=0)) for row in self._rows]
        with self._first.draft([min(wanted[row].depth, depth) if row in wanted else 0 for row in self._rows]):
            grown = self.grown(every, self.expansion(every, depth, options), options)
        trees = dict(zip(self._rows, grown, strict=True))
        return [trees[ask.row] for ask in asks]

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        assert self._first is not None
        race = self.race([ask.row for ask in asks], depth)
        return ImitationExpansion(self._drafter, self._weights, self._first, depth, options.temperature, race)

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        first = self._first
        assert first is not None
        self._first = first.apart()  # leaves the target's cache alone
        try:
            return self.expansion(asks, expansion.depth, options)
        finally:
            self._first = first
