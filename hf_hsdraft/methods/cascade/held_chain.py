"""What a middle model holds of one text: tokens that it has chosen, and the distributions that it chose them from."""

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
    """How a middle model chooses its tokens.

    Attributes:
        temperature: of the distribution that tokens are drawn from; `None` to take the most probable one.
        vocab_size: V', tokens below this may be chosen.
        race: what is known of the target's draws, where tokens are not drawn here.
        begin: number of tokens between the target's text and the first one to choose.
    """

    temperature: float | None
    vocab_size: int
    race: Race | None = None
    begin: int = 0

    def log_probs(self, place: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities `[V]` of the token at a place of the draft, by the model's logits `[V]`."""
        known = logits[: self.vocab_size].float()
        if self.race is not None:
            known = self.race(self.begin + place, known[None, None])[0, 0]
        else:
            known = (known / (self.temperature or 1.0)).log_softmax(dim=-1)
        return pad(known, (0, len(logits) - len(known)), value=-torch.inf)


@dataclass
class HeldChain:
    """The tokens of one text that a middle model has chosen and not yet passed up.

    Attributes:
        tokens: the tokens.
        steps: for each the log-probabilities `[V]` that it was chosen by.
        closed: whether no further token may come, because the model has no position for one.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    closed: bool = False

    def add(self, draft: DraftTree, logits: torch.Tensor, choice: Choice) -> None:
        """Verifies a draft, and adds the tokens that are accepted of it and the model's own next one.

        A draft that was drawn is verified by rejection, and any other one by the model's own choice. So in any case a
        token is distributed by its entry in `steps`, whatever was drafted. This makes these the q of the next level
        ("Hierarchical speculative decoding").

        Args:
            draft: a chain after the tokens held.
            logits: `[nodes, V]`, the model's at the nodes of the draft, the root included.
            choice: how tokens are chosen.
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
        """Returns the tokens as a chain after a root, with their distributions if they were drawn."""
        chosen = [float(step[token]) for step, token in zip(self.steps, self.tokens, strict=True)]
        scores, count = (0.0, *itertools.accumulate(min(each, 0.0) for each in chosen)), len(self.tokens)
        tokens, parents, depths = (root, *self.tokens), tuple(range(-1, count)), tuple(range(count + 1))
        if choice.temperature is None or not count:
            return DraftTree(tokens, parents, depths, scores)
        ids = torch.arange(choice.vocab_size, device=self.steps[0].device)
        log_probs = (*(step[: choice.vocab_size] for step in self.steps), None)
        return DraftTree(tokens, parents, depths, scores, log_probs, ids)
