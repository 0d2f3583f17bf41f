"""The running batch: a target whose texts join and leave between rounds, each in a place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of
from ..drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ..engine.drafting import Drafting
from ..engine.local_target import LocalTarget
from ..engine.loop import Keeper, Round
from ..runtime.ended_rows import take_in
from ..runtime.target_forwards import TextRows
from ..runtime.target_runtime import TargetRuntime
from ..verify.verdict import Verdict, Verifier
from .foresight import BatchForesight
from .limits import BatchLimits
from .text import Text


class BatchTexts:
    """The texts by row, behind the interface of `engine.decoded_texts.DecodedTexts`."""

    stops_together = chosen_together = follows_logits = False

    def __init__(self, verifier: Verifier, rows: int, device: torch.device, vocab_size: int) -> None:
        self.verifier, self.pad_token_id = verifier, 0
        self.at: dict[int, Text] = {}
        self._rows, self._none = range(rows), torch.empty(0, 0, dtype=torch.int64, device=device)
        self.foresight = BatchForesight(self, vocab_size)

    @property
    def active(self) -> list[int]:
        """All: those that have ended leave before the next round."""
        return list(self.at)

    @property
    def ids(self) -> Any:
        return next(iter(self.at.values())).decoded.ids

    @property
    def rows(self) -> Mapping[int, Text]:
        return self.at

    def batch(self) -> torch.Tensor:
        """Nothing: trees are read by their nodes alone."""
        return self._none

    def new_tokens(self, row: int) -> int:
        return self.at[row].decoded.new_tokens(0)

    def last_token(self, row: int) -> int:
        return self.at[row].emitted[-1]

    def room(self, row: int) -> int:
        return self.at[row].decoded.room(0) if row in self.at else 0

    def prune(self, row: int, tree: DraftTree) -> DraftTree:
        return self.at[row].prune(tree)

    def judge(self, row: int, tree: DraftTree, logits: torch.Tensor, taps: torch.Tensor, choices: Any) -> Verdict:
        return self.at[row].judge(tree, logits, taps)

    def emit(self, row: int, tree: DraftTree, verdict: Verdict, steps: Sequence[Any]) -> None:
        self.at[row].emit(tree, verdict)

    def end_batch(self) -> None:
        """Nothing: no criterion of a text looks at the others."""

    def stream(self) -> None:
        for text in self.at.values():
            text.stream()

    def beyond_end(self) -> list[int]:
        return [0 for _ in self._rows]


class TextSessions(Session):
    """A session for each text, of drafters whose sessions take no new texts."""

    def __init__(self, drafter: Drafter, call: Call) -> None:
        self._drafter, self._call = drafter, replace(call, rows=1, texts=None, runtime=None)
        self._sessions: dict[int, Session] = {}
        sample = drafter.session(self._call)
        self.free, self.listens, self.takes_ngrams = sample.free, sample.listens, sample.takes_ngrams
        self.kind = (type(sample).__qualname__, *sample.kind)

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._sessions[ask.row].draft([replace(ask, row=0)])[0] for ask in asks]

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            if each.row not in self._sessions:
                self._sessions[each.row] = self._drafter.session(self._call)
            self._sessions[each.row].observe([each.of_row(0)])

    def keep(self, rows: Sequence[int]) -> None:
        self._sessions = {row: session for row, session in self._sessions.items() if row in rows}


class Batch(LocalTarget):
    """The target of a running batch; see `engine.loop.Target`.

    Attributes:
        texts: those whose prompts have been read, by place.
    """

    def __init__(self, call: Call, limits: BatchLimits, taps: Sequence[int], text: Text) -> None:
        self.texts: BatchTexts = call.texts
        runtime: TargetRuntime = call.runtime
        runtime.prepare_trees()
        runtime.make_room(limits.options.tree_size + 1)
        super().__init__(call, limits, taps)  # type: ignore[arg-type]
        runtime.leaves_gaps = False
        runtime.rows = TextRows.of_slots(list(runtime.rows.kept), device_of(call.target))
        self.rows, self._batch_limits = [], limits
        self.texts.at[0] = text

    def begin(self, drafting: Drafting) -> None:
        """Lets the first text in."""
        self._settle(drafting, [0], [0])

    def change(self, drafting: Drafting, joining: Sequence[Text]) -> None:
        """Drops texts that have ended, and adds others, in the rows of the dropped ones first.

        So the keys and values of the other rows are not copied.
        """
        leaving = [row for row in self.rows if self.texts.at[row].ended]
        if not leaving and not joining:
            return
        rows = list(self.rows)
        free = [row for row in range(self._call.rows) if row not in rows]
        joined = []
        for text in joining:
            at = rows.index(leaving.pop()) if leaving else None
            row = free.pop(0) if at is None else rows[at]
            take_in(self._runtime, self._runtime.ended, text.handed_over(), at)
            if at is None:
                rows.append(row)
            self.texts.at[row] = text
            joined.append(row)
        if leaving:
            places = [place for place, row in enumerate(rows) if row not in leaving]
            rows = [rows[place] for place in places]
            if rows:
                self._runtime.keep_rows(places)
        self._settle(drafting, rows, joined)

    def _settle(self, drafting: Drafting, rows: list[int], joined: Sequence[int]) -> None:
        """Continues with the texts at `rows`, in the order of the runtime's rows; `joined` are new among them."""
        before, self.rows = len(self.rows), rows
        self.texts.at = {row: self.texts.at[row] for row in rows}
        drafting.keep([row for row in rows if row not in joined])
        if not rows:
            return
        self._batch_limits.follow(self._runtime, self.texts.at)
        self._roots = self._batch_limits.positions.roots
        self._batch_limits.keep_up()
        if joined:
            drafting.observe([self.texts.at[row].news_of_prompt(row, self.own_taps) for row in joined])
        self.set_pace(drafting, min(len(rows) / max(before, 1), 1.0))

    def prepare(self, drafting: Drafting) -> None:
        """Renews limits that no longer hold."""
        self._session = drafting.session
        if self._runtime.length >= self._batch_limits.known_until and self._batch_limits.keep_up():
            self.set_pace(drafting)

    def news(self, read: Any, verdicts: dict[int, Verdict]) -> list[Accepted]:
        found = super().news(read, verdicts)
        for row in verdicts:
            self.texts.at[row].root = self._roots[row]
        return found


class BatchKeeper(Keeper):
    """Records each round in the statistics of its texts, and of the batch, and reports it to the pace."""

    def __init__(self, batch: Batch, total: DraftStatistics, device: torch.device) -> None:
        super().__init__(DraftStatistics(), device, timed=False)
        self._batch, self._total = batch, total

    def ended(self, done: Round) -> None:
        super().ended(done)
        self._total.target_forwards += self.statistics.target_forwards
        self._total.row_forwards += self.statistics.row_forwards
        self._total.new_tokens += sum(len(each.tokens) for each in done.news)
        for nodes, each in zip(done.nodes, done.news, strict=True):
            own = self._batch.texts.at[each.row].statistics
            own.target_forwards += done.forwards
            own.row_forwards += done.forwards
            own.accepted_lengths.append(each.num_drafted)
            own.drafted_nodes.append(nodes)
            own.round_rows.append(0)
            own.relaxed_tokens += each.num_relaxed
        self.statistics = DraftStatistics()
