"""The running batch: a target whose texts join and leave between rounds, each in its own place."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..core.draft_tree import DraftTree
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of, embedded_tokens
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ..engine.draft_limits import DraftLimits, TextPositions
from ..engine.drafting import Drafting
from ..engine.local_target import LocalTarget
from ..engine.loop import Keeper, Round
from ..runtime.ended_rows import take_in
from ..runtime.module_hooks import no_hooks_left
from ..runtime.target_runtime import TargetRuntime
from ..runtime.tree_reading import TextRows
from ..verify.foresight import Foresight, Race
from ..verify.verdict import Verdict, Verifier
from .requests import Tally
from .text import Text

_ROOM = 10**6  # number of tokens that a batch without an end may emit


class BatchForesight:
    """What drafts may know of coming draws, as `verify.foresight.Foresight`; `texts.rows` are the texts by row."""

    def __init__(self, texts: Any, vocab_size: int) -> None:
        self._texts, self.vocab_size = texts, vocab_size

    def _of(self, row: int) -> Foresight | None:
        found: Foresight | None = self._texts.rows[row].decoded.foresight
        return None if found is None or not found.draws[0].foreseeable else found

    @property
    def warper_names(self) -> tuple[str, ...]:
        """The cost of drafting depends on them."""
        found = (text.decoded.foresight for text in self._texts.rows.values())
        return tuple(sorted({name for each in found if each is not None for name in each.warper_names}))

    def race(self, rows: Sequence[int], depth: int, vocab_ids: torch.Tensor) -> Any:
        """Returns the races of the next `depth` draws of each row; None if no row draws what can be foreseen."""
        known = [self._of(row) for row in rows]
        races = [None if each is None else each.race([0], depth, vocab_ids) for each in known]
        return BatchRace(races, vocab_ids) if any(each is not None for each in races) else None

    def scored(self, trees: Mapping[int, DraftTree]) -> dict[int, DraftTree]:
        """Returns the trees with scores that take the coming draws into account."""
        known = {row: self._of(row) for row in trees}
        return {row: tree if (own := known[row]) is None else own.scored({0: tree})[0] for row, tree in trees.items()}


@dataclass(frozen=True)
class BatchRace:
    """The races of several texts; None for texts that take the most probable tokens."""

    races: Sequence[Race | None]
    vocab_ids: torch.Tensor  # `[V']`, or `[B, V']` by row

    def among(self, columns: torch.Tensor) -> BatchRace:
        """Returns the races among some columns only: `[C]`, or `[B, C]` for each row."""
        by_row = columns.expand(len(self.races), -1)
        races = [None if race is None else race.among(own) for race, own in zip(self.races, by_row, strict=True)]
        return BatchRace(races, self.vocab_ids[columns])

    def __call__(self, level: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities `[B, n, V']` that tokens are drawn, or chosen, at depth `level`."""
        parts = zip(self.races, logits.float().split(1), strict=True)
        return torch.cat([own.log_softmax(dim=-1) if race is None else race(level, own) for race, own in parts])


class BatchTexts:
    """The texts by row, behind the interface of `engine.decoded_texts.DecodedTexts`."""

    stops_together = chosen_together = follows_logits = False

    def __init__(self, verifier: Verifier, rows: int, vocab_size: int) -> None:
        self.verifier, self.pad_token_id = verifier, 0
        self.rows: dict[int, Text] = {}
        self._places = rows
        self.foresight = BatchForesight(self, vocab_size)

    @property
    def active(self) -> list[int]:
        """All: those that have ended leave before the next round."""
        return list(self.rows)

    @property
    def ids(self) -> Any:
        return next(iter(self.rows.values())).decoded.ids

    def of_rows(self, rows: Sequence[int]) -> torch.Tensor:
        ids = [self.rows[row].decoded.ids.all() for row in rows]
        longest = max(each.shape[1] for each in ids)
        return torch.cat([F.pad(each, (longest - each.shape[1], 0)) for each in ids])

    def new_tokens(self, row: int) -> int:
        return self.rows[row].decoded.new_tokens(0)

    def last_token(self, row: int) -> int:
        return self.rows[row].emitted[-1]

    def room(self, row: int) -> int:
        return self.rows[row].decoded.room(0) if row in self.rows else 0

    def prune(self, row: int, tree: DraftTree) -> DraftTree:
        return self.rows[row].prune(tree)

    def judge(self, row: int, tree: DraftTree, logits: torch.Tensor, taps: torch.Tensor, choices: Any) -> Verdict:
        return self.rows[row].judge(tree, logits, taps)

    def emit(self, row: int, tree: DraftTree, verdict: Verdict, steps: Sequence[Any]) -> None:
        self.rows[row].emit(tree, verdict)

    def end_batch(self) -> None:
        """Nothing: no criterion of a text looks at the others."""

    def stream(self) -> None:
        for text in self.rows.values():
            text.stream()

    def beyond_end(self) -> list[int]:
        return [0] * self._places


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
        for row in self._sessions.keys() - set(rows):
            self._sessions.pop(row).end()

    def end(self) -> None:
        self.keep([])


class Batch(LocalTarget):
    """The target of a running batch; see `engine.loop.Target`.

    Attributes:
        texts: those whose prompts have been read, by place.
    """

    def __init__(self, call: Call, taps: Sequence[int], text: Text) -> None:
        self.texts: BatchTexts = call.texts
        runtime: TargetRuntime = call.runtime
        runtime.prepare_trees()
        runtime.make_room(call.options.tree_size + 1)
        super().__init__(call, DraftLimits(call, TextPositions.of_places(call.rows)), taps)
        runtime.leaves_gaps = self._texts_leave = False  # they leave by `change`
        runtime.rows = TextRows.of_slots(list(runtime.rows.kept), device_of(call.target))
        self.rows, self.texts.rows[0] = [], text
        self._misread: int | None = None  # number of slots with which drafts were misread
        self._several: bool | None = None  # whether what is known is of several texts

    def begin(self, drafting: Drafting) -> None:
        """Lets the first text in."""
        self._settle(drafting, [0], [0])

    def change(self, drafting: Drafting, joining: Sequence[Text]) -> None:
        """Drops texts that have ended, and adds others, in the rows of the dropped ones first.

        So the keys and values of the other rows are not copied.
        """
        leaving = [row for row in self.rows if self.texts.rows[row].ended]
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
            self.texts.rows[row] = text
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
        self.texts.rows = {row: self.texts.rows[row] for row in rows}
        drafting.keep([row for row in rows if row not in joined])
        if not rows:
            return
        self._runtime.num_texts = len(rows)
        self._roots[:] = [self.texts.rows[row].root if row in rows else 0 for row in range(self._call.rows)]
        self._limits.look_ahead()
        if self._misread is not None and self._runtime.length < self._misread:
            self._limits.begin_again()
            self._misread = None
        if self._several != (len(rows) > 1):
            self._several, self._limits.known_until = len(rows) > 1, 0
        if self._limits.options.depth and self._runtime.length >= self._limits.known_until:
            self._keep_up(rows)
        if joined:
            drafting.observe([self.texts.rows[row].news_of_prompt(row, self.own_taps) for row in joined])
        self.set_pace(drafting, min(len(rows) / max(before, 1), 1.0))

    def prepare(self, drafting: Drafting) -> None:
        if self._outgrown and self._keep_up(self.rows):
            self.set_pace(drafting)

    def _keep_up(self, rows: Sequence[int]) -> bool:
        """Renews what may be drafted. Sessions stay, so that texts are drafted for again in a shorter batch."""
        changed = self._limits.keep_up(rows)
        if self._limits.options.depth == 0:
            self._misread = self._runtime.length
        return changed

    @property
    def reason(self) -> str:
        """Why nothing is drafted; empty if something may be."""
        return self._limits.reason

    def news(self, read: Any, verdicts: dict[int, Verdict]) -> list[Accepted]:
        found = super().news(read, verdicts)
        for row in verdicts:
            self.texts.rows[row].root = self._roots[row]
        return found


class BatchKeeper(Keeper):
    """Records each round in the statistics of its texts, and in the tally, and reports it to the pace."""

    def __init__(self, batch: Batch, tally: Tally, device: torch.device) -> None:
        super().__init__(DraftStatistics(), device, timed=False)
        self._batch, self._tally = batch, tally

    def ended(self, done: Round) -> None:
        super().ended(done)
        self._tally.took(self.statistics)
        pace = None if self._drafting is None else self._drafting.pace
        for nodes, each in zip(done.nodes, done.news, strict=True):
            own = self._batch.texts.rows[each.row].statistics
            own.target_forwards += done.forwards
            own.row_forwards += done.forwards
            own.accepted_lengths.append(each.num_drafted)
            own.drafted_nodes.append(nodes)
            own.round_rows.append(0)
            own.relaxed_tokens += each.num_relaxed
            own.reason = own.reason or self._batch.reason
            own.plain_seconds = None if pace is None else pace.plain_seconds
            own.packed_weights, own.compiled_layers = self._acceleration.packed, self._acceleration.compiled_layers
        self.statistics = DraftStatistics()


@dataclass
class Running:
    """A batch with what drafts for it."""

    batch: Batch
    runtime: TargetRuntime
    drafting: Drafting
    keeper: BatchKeeper
    resources: contextlib.ExitStack

    @classmethod
    def of(
        cls,
        target: Any,
        drafter: Drafter,
        options: DraftOptions,
        places: int,
        history: Any,
        text: Text,
        tally: Tally,
        drafts: bool = True,
    ) -> Running:
        """Begins a batch of `places` rows with its first text; the `tally` gets all rounds.

        Without `drafts` that stays its only text, and grows as in plain decoding.
        """
        device, runtime = device_of(target), text.handed_over()
        texts = BatchTexts(text.decoded.verifier, places, embedded_tokens(target))
        options = options if drafts else replace(options, depth=0)
        call = Call(target, places, options, texts, runtime, history=history)
        with contextlib.ExitStack() as unless_begun:
            unless_begun.enter_context(call.stack)
            call.stack.enter_context(no_hooks_left(target))  # not installed and removed in each round
            batch = Batch(call, drafter.taps_of(target), text)
            session = drafter.session(call)
            drafting = Drafting(drafter, call, session if session.takes_new_texts else TextSessions(drafter, call))
            acceleration = runtime.acceleration
            if not drafts:
                drafting.rest()
                runtime.read_chains()
                acceleration.off = True
            batch.begin(drafting)
            acceleration.begin(options.packed_weights, _ROOM, options.compiled_layers)
            batch.set_pace(drafting)  # which depends on the acceleration
            keeper = BatchKeeper(batch, tally, device)
            keeper.report_to(drafting, acceleration, lambda: batch.set_pace(drafting))
            unless_begun.pop_all()
        return cls(batch, runtime, drafting, keeper, call.stack)

    def end(self) -> None:
        """Ends the drafter's session once all texts have ended."""
        with self.resources:
            self.drafting.session.end()
