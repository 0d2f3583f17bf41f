"""News of rounds without drafts: a drafter reads them all at once before it drafts again, if it ever does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.tensors import Transform, on_device
from ..core.tuning import TUNING
from ..drafters.base.protocol import Accepted, Session


class LateNews(Accepted):
    """News of one row, whose tensors are made when they are read.

    Args:
        begin: position of the first token that was read.
        parts: for each round the hidden states `[B, 1, D']`, and the row's place in them.
        pick: selects the drafter's hidden states `[n, taps * D]` out of `[n, D']`.
    """

    def __init__(
        self, row: int, tokens: list[int], begin: int, parts: Sequence[tuple[torch.Tensor, int]], pick: Transform
    ) -> None:
        vars(self).update(row=row, tokens=tokens, _begin=begin, _parts=parts, _pick=pick)

    def __getattr__(self, name: str) -> Any:
        if name not in ("taps", "positions", "following"):
            raise AttributeError(name)
        count, device = len(self.tokens), self._parts[0][0].device
        taps = self._pick(torch.cat([states[place] for states, place in self._parts]))
        positions = torch.arange(self._begin, self._begin + count)
        vars(self).update(taps=taps, positions=positions, following=on_device(self.tokens, device))
        return vars(self)[name]

    @classmethod
    def joined(cls, news: Sequence[LateNews]) -> LateNews:
        """The news of successive rounds of a row as those of one round."""
        first = news[0]
        tokens = [token for each in news for token in each.tokens]
        return cls(first.row, tokens, first._begin, [part for each in news for part in each._parts], first._pick)


class LateReader:
    """Holds news back from a session until it drafts.

    Nothing is held for long: after `TUNING.most_pending` rounds the session gets what waits.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: dict[int, list[LateNews]] = {}

    def observe(self, news: Sequence[Accepted], drafted: bool) -> None:
        """Takes a round's news; `drafted` says whether the session drafted for it."""
        late = [each for each in news if isinstance(each, LateNews)]
        if drafted or len(late) < len(news):
            self.catch_up()
            self._session.observe(news)
            return
        for each in late:
            self._waiting.setdefault(each.row, []).append(each)
        if max(map(len, self._waiting.values()), default=0) >= TUNING.most_pending:
            self.catch_up()

    def catch_up(self) -> None:
        """Passes on what waits."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._session.observe([LateNews.joined(news) for news in waiting.values()])

    def keep(self, rows: Sequence[int]) -> None:
        self._waiting = {row: news for row, news in self._waiting.items() if row in rows}
        self._session.keep(rows)
