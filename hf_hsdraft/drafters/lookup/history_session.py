"""Session that drafts from past texts, and from what the other texts of the call have got so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...core.draft_tree import DraftTree
from ...core.tuning import TUNING
from ..base.protocol import Accepted, Ask, Call
from .history import History
from .ngrams import LookupSession
from .past_texts import LONGEST_MATCH, Continuation, HistoryDraft, TokenIndex


class GrowingTexts:
    """The new tokens of the texts of a batch, so that each text may draft from the others."""

    def __init__(self, rooms: Sequence[int]) -> None:
        rooms = [min(room, TUNING.history_shown) + LONGEST_MATCH + 1 for room in rooms]
        self._index = TokenIndex(sum(rooms))
        self._begins = [self._index.begin + sum(rooms[:row]) for row in range(len(rooms))]
        self._room = [begin + room - 1 for begin, room in zip(self._begins, rooms, strict=True)]
        self._ends = list(self._begins)  # of what is written
        self._entered = list(self._begins)

    def begin(self, row: int, known: Sequence[int]) -> None:
        """Takes the end of a prompt, by which matches are told apart, but which is not proposed."""
        self._write(row, known[-LONGEST_MATCH:])
        self._entered[row] = self._ends[row]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self._write(row, tokens)
        if self._ends[row] - self._entered[row] >= TUNING.history_step:  # together, as that takes less time
            self._index.enter(self._entered[row], self._ends[row])
            self._entered[row] = self._ends[row]

    def _write(self, row: int, tokens: Sequence[int]) -> None:
        end = min(self._ends[row] + len(tokens), self._room[row])
        self._index.tokens[self._ends[row] : end] = tokens[: end - self._ends[row]]
        self._ends[row] = end

    def find(self, tail: Sequence[int], depth: int) -> list[Continuation]:
        return self._index.find(tail, depth)


class HistorySession(LookupSession):
    """Drafts for each row by the texts of a history, and by the other rows of the call."""

    def __init__(self, call: Call, history: History) -> None:
        super().__init__(call)
        self._history = history
        self._tails: dict[int, list[int]] = defaultdict(list)
        self._drafts: dict[int, HistoryDraft] = {}  # the last one of each row
        several = call.rows > 1 and call.texts is not None
        self._growing = GrowingTexts([call.texts.room(row) for row in range(call.rows)]) if several else None

    def _tree(self, ask: Ask) -> DraftTree:
        tail, depth = self._tails[ask.row], min(ask.depth, ask.size, TUNING.history_depth)
        if not tail or tail[-1] != ask.root or depth < 1:
            return DraftTree.root(ask.root)
        found = self._history.find(tail, depth)
        if self._growing is not None:
            found = [*self._growing.find(tail, depth), *found]
        draft = self._drafts[ask.row] = HistoryDraft(ask.root, found, self._history.trust)
        return draft.tree(ask.size, depth, 1 if ask.chain else None, self._options.threshold)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            if (draft := self._drafts.pop(each.row, None)) is not None:
                draft.learn(each.tokens)
            earlier = [*each.earlier[-LONGEST_MATCH:]]
            tail = self._tails[each.row] = self._known([*self._tails[each.row], *earlier, *each.tokens])
            if self._growing is not None and earlier:
                self._growing.begin(each.row, tail[: -len(each.tokens)])
            if self._growing is not None:
                self._growing.extend(each.row, each.tokens)

    def _known(self, tokens: list[int]) -> list[int]:
        """The last tokens, after the last id that is no token."""
        tail = tokens[-LONGEST_MATCH:]
        odd = [place for place, token in enumerate(tail) if not 0 <= token < self._history.vocab_size]
        return tail[odd[-1] + 1 :] if odd else tail

    def keep(self, rows: Sequence[int]) -> None:
        for row in self._tails.keys() - set(rows):
            del self._tails[row]
        self._drafts = {}
