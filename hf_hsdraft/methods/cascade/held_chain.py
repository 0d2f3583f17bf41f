"""Tokens that a middle model has chosen for one text, with the distributions it chose them from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from ...core.draft_tree import DraftTree
from ...verify.foresight import Race
from ...verify.registry import VERIFIERS
from ...verify.verdict import Nodes, draw_token


@dataclass(frozen=True)
class Choice:
    """How a middle model chooses its tokens among the first `vocab_size`, V'; greedily if `temperature` is None.

    `race` is what is known of the target's draws, where tokens are not sampled here; `begin` is the number of tokens
    between the target's text and the first one to choose.
    """

    temperature: float | None
    vocab_size: int
    race: Race | None = None
    begin: int = 0

    def log_probs(self, place: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities `[V]` of the token at a place of the draft, given the model's logits `[V]`."""
        known = logits[: self.vocab_size].float()
        if self.race is not None:
            known = self.race(self.begin + place, known[None, None])[0, 0]
        else:
            known = (known / (self.temperature or 1.0)).log_softmax(dim=-1)
        return pad(known, (0, len(logits) - len(known)), value=-torch.inf)


@dataclass
class HeldChain:
    """Tokens that a middle model has chosen but not yet passed up, with the log-probabilities `[V]` of each choice.

    No token can follow a `closed` chain, because the model has no position for it.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    closed: bool = False

    def add(self, draft: DraftTree, logits: torch.Tensor, choice: Choice) -> None:
        """Verifies a draft, a chain after the held tokens; adds the accepted tokens and the model's next token.

        A sampled draft is verified by rejection, any other by the model's choice. Either way a token is distributed
        by its entry in `steps`, whatever was drafted, which makes these the q of the next level ("Hierarchical
        speculative decoding"). `logits` are `[nodes, V]` at the draft's nodes, root included.
        """
        steps: dict[int, torch.Tensor] = {}

        def scores(node: int, tokens: list[int]) -> torch.Tensor:
            if node not in steps:
                steps[node] = choice.log_probs(len(self.tokens) + len(tokens) + 1, logits[node])
            return steps[node][None]

        draws = None if choice.temperature is None else draw_token
        rule = VERIFIERS["rejection" if draft.log_probs and draws is not None else "walk"]
        verdict = rule.judge(draft, Nodes(logits, scores, lambda path, tokens: False, draws))
        self.tokens += [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
        self.steps += [steps[node] for node in (0, *verdict.path)]

    def tree(self, root: int, choice: Choice) -> DraftTree:
        """Returns the tokens as a chain after a root, with their distributions if they were sampled."""
        chosen = [float(step[token]) for step, token in zip(self.steps, self.tokens, strict=True)]
        scores, count = (0.0, *itertools.accumulate(min(each, 0.0) for each in chosen)), len(self.tokens)
        tokens, parents, depths = (root, *self.tokens), tuple(range(-1, count)), tuple(range(count + 1))
        if choice.temperature is None or not count:
            return DraftTree(tokens, parents, depths, scores)
        ids = torch.arange(choice.vocab_size, device=self.steps[0].device)
        log_probs = (*(step[: choice.vocab_size] for step in self.steps), None)
        return DraftTree(tokens, parents, depths, scores, log_probs, ids)
