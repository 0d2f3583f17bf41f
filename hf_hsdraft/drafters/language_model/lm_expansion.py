"""Expansion of tree nodes by a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...trees.tree_builders import Expansion
from ...verify.foresight import Race
from .lm_texts import LMTexts


@dataclass(frozen=True)
class LMExpansion(Expansion):
    """The model's distribution after each node, one forward per depth. A node's state is its path.

    Attributes:
        texts: have read the accepted tokens, including the roots.
        first: `[B, 1, V]`, logits after the roots.
        depth: greatest depth of a child.
        vocab_size: only this many first columns of the logits may be drafted.
        temperature: of the returned distributions.
        race: with foreseen target draws; probabilities are then those of winning the race.
    """

    texts: LMTexts
    first: torch.Tensor
    depth: int
    vocab_size: int
    temperature: float = 1.0
    race: Race | None = None

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[B, n, V']` of the nodes' children, and the nodes' paths `[B, n, level - 1]`.

        `states` `[B, n, level - 2]` are the paths of the nodes' parents; None at level 1.
        """
        if states is None:
            logits, paths = self.first, tokens[..., None][..., :0]
        else:
            logits, paths = self.texts.read_nodes(tokens, states)
        logits = logits[..., : self.vocab_size].float()
        if self.race is not None:
            return self.race(level, logits), paths
        return (logits / self.temperature).log_softmax(dim=-1), paths


@dataclass(frozen=True)
class Repeatable(Expansion):
    """An expansion that can be evaluated again: it starts over on a copy of `texts`."""

    expansion: LMExpansion
    texts: LMTexts

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.expansion.depth

    def __call__(self, level: int, tokens: torch.Tensor, states: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if states is None:
            self.texts.forget()
        return self.expansion(level, tokens, states)
