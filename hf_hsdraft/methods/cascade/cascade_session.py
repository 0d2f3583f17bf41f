"""One step of a hierarchy: the session below drafts, and a middle model verifies until it holds enough tokens.

The rounds are those of decoding, with the middle model as the target. They run within one draft and yield a chain,
which the level above verifies in turn, the target last.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn.functional import pad

from ...core.draft_tree import DraftTree
from ...drafters.base.protocol import Accepted, Ask, Session
from ...verify.foresight import Foresight, Race
from ...verify.registry import VERIFIERS
from ...verify.verdict import Nodes, draw_token
from .levels import LMReader, StateFeed
from .supposing import SupposingSession


@dataclass
class HeldChain:
    """Tokens that a middle model has chosen but not yet passed up, with the log-probabilities `[V]` of each choice.

    The model chooses among the first `vocab_size` tokens; greedily if `temperature` is None. `race` is what is known of
    the target's draws, where tokens are not sampled here; `begin` is the number of tokens between the target's text and
    the chain. No token can follow a `closed` chain, because the model has no position for it.
    """

    temperature: float | None
    vocab_size: int
    race: Race | None = None
    begin: int = 0
    tokens: list[int] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    closed: bool = False

    def log_probs(self, place: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities `[V]` of the token at a place of the chain, given the model's logits `[V]`."""
        known = logits[: self.vocab_size].float()
        if self.race is not None:
            known = self.race(self.begin + place, known[None, None])[0, 0]
        else:
            known = (known / (self.temperature or 1.0)).log_softmax(dim=-1)
        return pad(known, (0, len(logits) - len(known)), value=-torch.inf)

    def add(self, draft: DraftTree, logits: torch.Tensor) -> None:
        """Verifies a draft, a chain after the held tokens; adds the accepted tokens and the model's next token.

        A sampled draft is verified by rejection, any other by the model's choice. Either way a token is distributed
        by its entry in `steps`, whatever was drafted, which makes these the q of the next level ("Hierarchical
        speculative decoding"). `logits` are `[nodes, V]` at the draft's nodes, root included.
        """
        steps: dict[int, torch.Tensor] = {}

        def scores(node: int, tokens: list[int]) -> torch.Tensor:
            if node not in steps:
                steps[node] = self.log_probs(len(self.tokens) + len(tokens) + 1, logits[node])
            return steps[node][None]

        draws = None if self.temperature is None else draw_token
        rule = VERIFIERS["rejection" if draft.log_probs and draws is not None else "walk"]
        verdict = rule.judge(draft, Nodes(logits, scores, lambda path, tokens: False, draws))
        self.tokens += [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
        self.steps += [steps[node] for node in (0, *verdict.path)]

    def tree(self, root: int) -> DraftTree:
        """Returns the tokens as a chain after a root, with their distributions if they were sampled."""
        chosen = [float(step[token]) for step, token in zip(self.steps, self.tokens, strict=True)]
        scores, count = (0.0, *itertools.accumulate(min(each, 0.0) for each in chosen)), len(self.tokens)
        tokens, parents, depths = (root, *self.tokens), tuple(range(-1, count)), tuple(range(count + 1))
        if self.temperature is None or not count:
            return DraftTree(tokens, parents, depths, scores)
        ids = torch.arange(self.vocab_size, device=self.steps[0].device)
        log_probs = (*(step[: self.vocab_size] for step in self.steps), None)
        return DraftTree(tokens, parents, depths, scores, log_probs, ids)


@dataclass(frozen=True)
class Step:
    """What one middle model does in a call.

    `below` is the most that the session below drafts at a time, `temperature` None means greedy choice, and token ids
    below `vocab_size` are known to this level and all above.
    """

    tokens: int
    below: int
    temperature: float | None
    vocab_size: int


class CascadeSession(Session):
    """Drafts the tokens that a language model accepts from another session's drafts.

    `feed` passes the model's hidden states to the session below, if that reads them. `foresight` is of the target's
    draws: a greedy middle model runs the same races, a sampling one ignores it.
    """

    def __init__(
        self,
        lower: SupposingSession,
        reader: LMReader,
        step: Step,
        rows: int,
        feed: StateFeed | None = None,
        foresight: Foresight | None = None,
    ) -> None:
        self._lower, self._reader, self._step, self._feed = lower, reader, step, feed
        fits = foresight is not None and step.vocab_size <= foresight.vocab_size
        self._foresight = foresight if fits and step.temperature is None else None
        self._texts: dict[int, list[int]] = {row: [] for row in range(rows)}
        self._supposed: dict[int, list[int]] = {}
        self._lost: set[int] = set()  # texts with a token that the model does not know
        self.kind = step, type(lower).__qualname__, *lower.kind, *reader.kind

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        asks = [replace(ask, depth=min(ask.depth, ask.size)) for ask in asks]  # a chain has a node for each depth
        held = {ask.row: self._begun(ask) for ask in asks if ask.depth > 0 and self._knows(ask)}
        growing = [ask for ask in asks if ask.row in held]
        while growing := [ask for ask in growing if self._short(ask, held[ask.row])]:
            drafts = self._drafts(growing, held)
            texts = {row: [*self._known(row), *held[row].tokens, *tree.tokens[1:]] for row, tree in drafts.items()}
            logits = self._reader.read(texts, {row: len(tree) for row, tree in drafts.items()}) if drafts else {}
            for row, tree in drafts.items():
                held[row].add(tree, logits[row])
        return [held[ask.row].tree(ask.root) if ask.row in held else DraftTree.root(ask.root) for ask in asks]

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            new = [*each.earlier, *each.tokens]
            self._texts[each.row] += new
            self._supposed.pop(each.row, None)
            if not self._are_known(new):
                self._lost.add(each.row)
        if self._feed is None:
            self._lower.observe(news)

    def suppose(self, news: Sequence[Accepted]) -> None:
        self._supposed.update({each.row: list(each.tokens) for each in news})

    def keep(self, rows: Sequence[int]) -> None:
        self._reader.keep(rows)
        self._lower.keep(rows)

    def _known(self, row: int) -> list[int]:
        supposed = self._supposed.get(row)
        return self._texts[row] + supposed if supposed else self._texts[row]

    def _are_known(self, tokens: Sequence[int]) -> bool:
        return all(0 <= token < self._reader.vocab_size for token in tokens)

    def _knows(self, ask: Ask) -> bool:
        known = self._known(ask.row)
        lost = ask.row in self._lost or not self._are_known(self._supposed.get(ask.row, ()))
        return not lost and bool(known) and known[-1] == ask.root

    def _begun(self, ask: Ask) -> HeldChain:
        begin, race, foresight = len(self._supposed.get(ask.row, ())), None, self._foresight
        if foresight is not None:
            ids = torch.arange(self._step.vocab_size, device=foresight.draws[ask.row].device)
            race = foresight.race([ask.row], begin + ask.depth, ids)
        return HeldChain(self._step.temperature, self._step.vocab_size, race, begin)

    def _short(self, ask: Ask, held: HeldChain) -> bool:
        return not held.closed and len(held.tokens) < min(self._step.tokens, ask.depth)

    def _drafts(self, asks: Sequence[Ask], held: Mapping[int, HeldChain]) -> dict[int, DraftTree]:
        """Drafts of the session below after the held tokens, no longer than needed, for texts that can continue.

        The model itself adds one token. Nothing drafted is dropped later: sampling requires that a chain's length
        depends only on the tokens before its end.
        """
        lower_asks, news = [], []
        for ask in asks:
            tokens = held[ask.row].tokens
            length = len(self._known(ask.row)) + len(tokens)
            room = self._reader.room - length
            if room < 0:
                held[ask.row].closed = True
                continue
            depth = min(self._step.below, ask.depth - len(tokens) - 1, room)
            pending = [*self._supposed.get(ask.row, ()), *tokens]
            if self._feed is None:
                news.append(Accepted.of_tokens(ask.row, pending))
            elif not self._feed.tell(ask.row, self._texts[ask.row], pending):
                depth = 0  # the model must read first
            root = tokens[-1] if tokens else ask.root
            lower_asks.append(Ask(ask.row, root, depth, max(depth, 1), width=1))
        if not lower_asks:
            return {}
        if news:
            self._lower.suppose(news)
        trees = self._lower.draft(lower_asks)
        return {ask.row: tree for ask, tree in zip(lower_asks, trees, strict=True)}
