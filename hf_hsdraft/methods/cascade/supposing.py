"""Sessions below a middle model: they also draft from tokens that it has chosen and the target may not accept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ...core.draft_tree import DraftTree
from ...drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ...drafters.hidden_state.draft_session import HSDraftSession, Pairs
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...drafters.lookup.cacheback import CachebackDrafter
from ...drafters.lookup.ngrams import NgramSession
from ..language_model.lm_drafter import CausalLMDrafter, CausalLMSession

_LEAST_WINDOW = 256  # a narrower window could drop positions that are needed after tokens are taken back


class SupposingSession(Session):
    """What a cascade asks of the sessions below its models; they need not inherit from it."""

    def suppose(self, news: Sequence[Accepted]) -> None:
        """Continues from tokens that may be taken back: another model has chosen them, the target has not seen them.

        They follow what was observed, and hold until the next news of the same text, supposed or observed. A
        session that reads hidden states gets those of the supposed tokens too, and must get them before each draft.
        """


class SupposingNgrams(NgramSession):
    """Looks up the n-grams of a text behind its supposed tokens, which are in no table."""

    def begin(self) -> None:
        self._supposed: dict[int, list[int]] = {}

    def suppose(self, news: Sequence[Accepted]) -> None:
        self._supposed.update({each.row: each.tokens for each in news})

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._supposed.pop(each.row, None)
        super().observe(news)

    def _tree(self, ask: Ask) -> DraftTree:
        settled = self.caches[ask.row]
        self.caches[ask.row] = supposed = copy.copy(settled)
        supposed._tail = [*settled._tail, *self._supposed.get(ask.row, ())]
        try:
            return super()._tree(ask)
        finally:
            self.caches[ask.row] = settled


class SupposingModel(CausalLMSession):
    """A language model reads supposed tokens like others; it drops from its cache what did not come."""

    def begin(self) -> None:
        self._settled = [0] * len(self._texts)  # number of tokens observed
        self._unknown: set[int] = set()  # rows with supposed tokens that the model does not know

    def suppose(self, news: Sequence[Accepted]) -> None:
        for each in news:
            text = self._texts[each.row]
            text.tokens[self._settled[each.row] :] = each.tokens
            known = all(0 <= token < self._vocab_size for token in each.tokens)
            (self._unknown.discard if known else self._unknown.add)(each.row)

    def observe(self, news: Sequence[Accepted]) -> None:
        self.suppose([Accepted.of_tokens(each.row, []) for each in news])
        super().observe(news)
        for each in news:
            self._settled[each.row] = len(self._texts[each.row].tokens)

    def _knows(self, ask: Ask) -> bool:
        return ask.row not in self._unknown and super()._knows(ask)


class SupposingStates(HSDraftSession):
    """A trunk reads supposed positions last, and forgets them after the draft."""

    def begin(self) -> None:
        self._supposed: dict[int, Pairs] = {}

    def suppose(self, news: Sequence[Accepted]) -> None:
        device, dtype = self.drafter.device, self.drafter.dtype
        for each in news:
            self._rows[each.row].leftover = self._rows[each.row].drafted = None
            self._supposed.pop(each.row, None)
            if len(each.positions):
                pairs = each.taps.to(device, dtype), self.weights.embed(each.following), each.positions.to(device)
                self._supposed[each.row] = pairs

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._supposed.pop(each.row, None)
        super().observe(news)

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        unsure = [ask for ask in asks if ask.row in self._supposed]
        if not unsure:
            return super().drafted(asks, depth)
        waiting = [ask.row for ask in unsure if self._pending[ask.row]]
        if waiting:
            self._roll_out.read(*self.taken(waiting))
        for ask in unsure:
            self._pending[ask.row] = [self._supposed[ask.row]]
        hidden = dict(zip((ask.row for ask in unsure), super().drafted(unsure, depth), strict=True))
        self._roll_out.drop({ask.row: len(self._supposed[ask.row][-1]) for ask in unsure})
        for ask in unsure:
            self._rows[ask.row].drafted = None
        if sure := [ask for ask in asks if ask.row not in hidden]:
            hidden.update(zip((ask.row for ask in sure), super().drafted(sure, depth), strict=True))
        return torch.stack([hidden[ask.row] for ask in asks])


_OF_DRAFTERS = {CachebackDrafter: SupposingNgrams, CausalLMDrafter: SupposingModel, HSDrafter: SupposingStates}


def supposes(drafter: Drafter) -> bool:
    """Whether `supposing_session` can be made of a drafter; an `HSDrafter` needs a wide window for that."""
    window = drafter.config.sliding_window if isinstance(drafter, HSDrafter) else None
    return isinstance(drafter, tuple(_OF_DRAFTERS)) and (window is None or window > _LEAST_WINDOW)


def supposing_session(drafter: Drafter, call: Call) -> Any:
    """Returns a drafter's session, of whatever class a family derives, as a `SupposingSession`."""
    session: Any = drafter.session(call)
    mixin = next(mixin for kind, mixin in _OF_DRAFTERS.items() if isinstance(drafter, kind))
    session.__class__ = type(type(session).__qualname__, (mixin, type(session)), {})
    session.begin()
    return session
