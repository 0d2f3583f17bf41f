"""What a language model says about the nodes of draft trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...trees.tree_builders import Expansion
from ...verify.foresight import Race
from .lm_texts import LMTexts


@dataclass(frozen=True)
class LMExpansion(Expansion):
    """The model's distribution after each node, one forward a depth. The state of a node is its path.

    Attributes:
        texts: the texts, whose accepted tokens were read, the roots included.
        first: `[B, 1, V]`, logits after the roots.
        depth: greatest depth of a child.
        vocab_size: number of tokens that may be drafted: the first columns of the logits.
        temperature: of the distributions given.
        race: where the target's draws are foreseen; probabilities are those of winning it then.
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
        """Log-probabilities `[B, n, V']` of the children of nodes, and the nodes' paths `[B, n, level - 1]`.

        Args:
            level: depth of the children.
            tokens: `[B, n]`, int64, tokens of the nodes.
            states: `[B, n, level - 2]`, paths of the nodes' parents; `None` at level 1.
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
    """An expansion that can be asked again: each time from the beginning, in texts of its own.

    Attributes:
        expansion: the expansion.
        texts: the texts that it reads on from.
    """

    expansion: LMExpansion
    texts: LMTexts

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.expansion.depth

    def __call__(self, level: int, tokens: torch.Tensor, states: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if states is None:
            self.texts.forget()
        return self.expansion(level, tokens, states)
