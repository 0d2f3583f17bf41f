"""The target of a call in this process: one forward verifies the drafts of all texts."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..core.draft_tree import DraftTree
from ..core.tensors import on_device
from ..drafters.base.protocol import Accepted, Call, Session
from ..pace.pacing import KindOfCall
from ..runtime.findings import kind_of_call
from ..runtime.tree_reading import TargetOutput, picked_taps
from ..verify.verdict import Verdict
from .call_output import path_outputs
from .draft_limits import DraftLimits
from .drafting import Drafting, LateNews, Wanted

# Number of tokens of the first class of lengths with separate costs; each later class is twice as long
# - by hand.
COST_LENGTH = 1024
# Part of the rows that still grow, at which the ended ones leave the cache; leaving moves it - by hand. History:
# leaving at all brought 1.24 instead of 1.20.
LEAVING_SHARE = 0.75
ABREAST = 1  # number of tokens that a row may be ahead of the last one and is still waited for - by hand


@dataclass(frozen=True)
class Read:
    """What a forward has read."""

    trees: dict[int, DraftTree]  # of each text; texts that have ended have no draft
    output: TargetOutput  # logits and taps, in the order of `trees`

    @property
    def rests(self) -> bool:
        """Whether nothing was drafted."""
        return all(len(tree) == 1 for tree in self.trees.values())

    def of(self, states: torch.Tensor, row: int) -> torch.Tensor:
        """A text's part `[nodes, ...]` of the logits or taps of all rows."""
        return states[list(self.trees).index(row)]


class LocalTarget:
    """A target and the texts that it grows, from the first token of each; see `Target`.

    Args:
        taps: the hidden states that the drafter reads; a verifier may read others too.

    Attributes:
        rows: the texts that forwards read: all but those that have ended and left.
    """

    def __init__(self, call: Call, limits: DraftLimits, taps: Sequence[int] = ()) -> None:
        self._call, self._limits, self._taps = call, limits, taps
        self._runtime, self._texts, self._roots = call.runtime, call.texts, limits.positions.roots
        self.rows = list(range(call.rows))
        self._shared = limits.options  # of each text, as of `set_pace`
        self._closed: set[int] = set()  # texts whose last token has been read
        self._session: Session | None = None  # the drafter's
        call.runtime.keeps_ended = call.outlives
        several = call.rows > 1 and not call.synced_gpus and not call.runtime.records
        if several:
            call.runtime.leave_gaps(keep=call.outlives)
        self._texts_leave = several and call.runtime.let_rows_leave(keep=call.outlives)

    @property
    def forwards(self) -> int:
        return self._runtime.forwards

    def goes_on(self) -> bool:
        call, device = self._call, self._texts.ids.device
        return call.target._has_unfinished_sequences(not self._texts.active, call.synced_gpus, device=device)

    def prepare(self, drafting: Drafting) -> None:
        self._session = drafting.session
        staying = [row for row in self.rows if row not in self._closed] if self._texts_leave else []
        if staying and len(staying) <= LEAVING_SHARE * len(self.rows):
            share = len(staying) / len(self.rows)
            self._runtime.keep_rows([self.rows.index(row) for row in staying])
            self.rows = staying
            drafting.keep(staying)
            self.set_pace(drafting, share)  # the remaining trees share what is verified
        if self._outgrown and self._limits.keep_up(self.rows):
            self.set_pace(drafting)
            if self._limits.options.depth == 0 and self._call.rows > 1:
                drafting.rest()

    @property
    def _outgrown(self) -> bool:
        """Whether it has to be found out again what may be drafted."""
        limits, runtime = self._limits, self._runtime
        outgrown = runtime.refusal is not None or runtime.length >= limits.known_until
        return outgrown and limits.options.depth > 0 and bool(self._texts.active)

    def asks(self) -> list[Wanted]:
        active = self._texts.active
        lengths = {row: self._texts.new_tokens(row) for row in active}
        decide, shortest = waited_for(lengths), min(lengths.values(), default=0)
        depths, options = self._depths(active), self._shared
        return [
            Wanted(
                row,
                self._texts.last_token(row),
                min(depths[row], options.depth),
                options.tree_size,
                options.beam_width,
                reach=depths[row],
                ahead=lengths[row] - shortest,
                decides=row in decide,
            )
            for row in active
        ]

    def _depths(self, active: Sequence[int]) -> dict[int, int]:
        """How deep to draft for each active text, limited by its greatest length, a forward's reach, and the cache."""
        limits, runtime, roots = self._limits, self._runtime, self._roots
        if runtime.length >= limits.alike_until or any(map(operator.gt, roots, limits.ends)):
            limits.look_ahead()
        columns = self._shared.tree_size + 1
        most = min(runtime.deepest, limits.deepest, limits.known_until - runtime.length - 1)
        if limits.options.depth == 0 or (runtime.trees and runtime.length + columns > limits.alike_until):
            most = 0
        reach = [min(end - root, most) for end, root in zip(limits.ends, roots, strict=True)]
        depths = {row: max(min(self._texts.room(row) - 1, reach[row]), 0) for row in active}
        if self._call.outlives and self._texts.stops_together and (runtime.in_step or runtime.slots.windows):
            return dict.fromkeys(active, 0)  # what is read beyond an end that is found later could not be read again
        if runtime.in_step and depths:
            depths = dict.fromkeys(depths, max(min(*depths.values(), *reach), 0))
        return depths

    def undone_on_error(self) -> contextlib.AbstractContextManager[None]:
        return self._runtime.undone_on_error()

    def verify(self, trees: Sequence[DraftTree]) -> Read:
        texts, read = self._texts, dict[int, DraftTree]()
        for row in self.rows:  # a row that drafts nothing reads its root, or an idle node if it has ended
            idle = row in self._closed or not texts.room(row)
            read[row] = (DraftTree.idle if idle else DraftTree.root)(texts.last_token(row))
        read.update(zip(texts.active, trees, strict=True))
        # in step, chains read what plain decoding reads, with padding after rows that have ended
        batch = texts.sequences(max(texts.ids.lengths)) if self._runtime.in_step else texts.ids.all()
        return Read(read, self._runtime.verify(list(read.values()), batch, texts.pad_token_id))

    def accept(self, read: Read) -> dict[int, Verdict]:
        texts, output, active = self._texts, read.output, self._texts.active
        if self._is_plain(read):
            logits, places = output.logits[:, 0], list(read.trees)
            if len(active) < len(places):
                logits = logits[on_device([places.index(row) for row in active], logits.device)]
            return texts.choose(active, logits)
        taps, choices = picked_taps(output.taps, self._runtime.tap_layers, texts.verifier.taps), self._followed(read)
        verdicts = {
            row: texts.judge(row, read.trees[row], read.of(output.logits, row), read.of(taps, row), choices)
            for row in active
        }
        if self._runtime.in_step and verdicts:
            shortest = min(len(verdict.path) for verdict in verdicts.values())
            verdicts = {row: verdict.cut(read.trees[row], shortest) for row, verdict in verdicts.items()}
        return verdicts

    def _is_plain(self, read: Read) -> bool:
        """Whether a round is plain decoding's step, whose tokens are chosen together."""
        return read.rests and self._texts.chosen_together and not self._runtime.records

    def _followed(self, read: Read) -> list[int] | None:
        """The target's choices at the nodes of a single text, where the session drafts behind the forward; else None.

        So acceptance and the next draft are read back at once.
        """
        batch, follow = self._runtime.batch, None if self._session is None else self._session.follow
        if follow is None or batch is None or self._call.rows > 1 or not self._texts.follows_logits:
            return None
        choices, taps = read.output.logits[0].max(dim=-1).indices, self.own_taps(read.output.taps[0])
        return follow(batch, choices, taps, self._roots[0])

    def commit(self, read: Read, verdicts: dict[int, Verdict]) -> None:
        texts, runtime = self._texts, self._runtime
        if self._is_plain(read):
            texts.emit_chosen(verdicts)
        else:
            for row, verdict in verdicts.items():
                steps = path_outputs(runtime, row, verdict.path) if runtime.records else []
                texts.emit(row, read.trees[row], verdict, steps)
        texts.end_batch()
        texts.stream()
        beyond = texts.beyond_end()
        runtime.commit([self._kept(row, verdicts, beyond[row]) for row in self.rows])

    def news(self, read: Read, verdicts: dict[int, Verdict]) -> list[Accepted]:
        if self._runtime.in_step and verdicts:  # rows that have ended are still read
            for row in read.trees.keys() - verdicts.keys():
                self._roots[row] += 1 + min(len(verdict.path) for verdict in verdicts.values())
        news, plain = list[Accepted](), self._is_plain(read)
        for row, verdict in verdicts.items():
            tokens, begin, taps = self._texts.rows[row].emitted, self._roots[row], read.of(read.output.taps, row)
            nodes = slice(1) if plain else on_device([0, *verdict.path], taps.device)
            given = {"tokens": tokens, "num_drafted": verdict.num_drafted, "num_relaxed": len(verdict.relaxed)}
            news.append(LateNews(begin, row=row, taps=self.own_taps(taps[nodes]), **given))
            self._roots[row] += len(tokens)
        return news

    def own_taps(self, taps: torch.Tensor) -> torch.Tensor:
        """Picks the drafter's hidden states out of all, `[..., taps * D]`."""
        return picked_taps(taps, self._runtime.tap_layers, self._taps)

    def _kept(self, row: int, verdicts: dict[int, Verdict], beyond: int) -> list[int] | None:
        """The accepted nodes of a text's tree, without `beyond` tokens beyond the batch's end.

        Of a text that has ended it is the root, once: plain decoding reads its end.
        """
        if row in verdicts:
            path = verdicts[row].path
            return path[: max(len(path) - beyond, 0)]
        if row in self._closed:
            return None
        self._closed.add(row)
        return []

    def read_padding(self) -> None:
        """Reads what plain decoding reads of texts that ended before the longest: their last tokens, and padding."""
        texts, runtime, finished = self._texts, self._runtime, self._call.target._has_unfinished_sequences
        runtime.rejoin([texts.new_tokens(row) for row in range(self._call.rows)])
        ids = texts.sequences()
        while finished(not runtime.lacks(ids.shape[1]), self._call.synced_gpus, device=ids.device):
            runtime.read_missing(ids)

    def set_pace(self, drafting: Drafting, share: float = 1.0) -> None:
        """Sets how much to draft: by costs of this device, drafter, batch and length of text, or fixed."""
        options = self._limits.options
        # Fixed sizes stay the same when texts leave.
        self._shared = options.shared_by(self._call.rows if options.tree_sizing == "fixed" else len(self.rows))
        drafting.set_pace(options.shared_by(len(self.rows)), self.kind(drafting.session), share)

    def kind(self, session: Session) -> KindOfCall:
        rows, runtime, foresight = len(self.rows), self._runtime, self._call.foresight
        options = self._limits.options.shared_by(rows)
        draws = foresight.warper_names if foresight else None  # they take time, and drafts use them
        # A family's options change what a draft costs and how often it is right, as reuse does. A threshold
        # drops nodes after they were drafted: that changes what a depth gains, and no part's cost.
        own = options.verification, repr(sorted(options.own.items()))
        costs = (
            *kind_of_call(runtime),
            options.beam_width,
            (max(self._roots[row] for row in self.rows) // COST_LENGTH).bit_length(),
            runtime.num_texts,
            draws,
            runtime.acceleration.compile_config is not None,
            runtime.acceleration.programs,
            *own,
            type(session).__qualname__,
            *session.kind,
        )
        guesses = options.ngram_length, self._call.history is not None
        habits = draws, rows > 1, options.beam_width, *guesses, options.threshold, *own
        depth = 0 if session.free else options.depth
        return KindOfCall(costs, habits, depth, options.tree_size, rows, runtime.acceleration.packed)


def waited_for(lengths: Mapping[int, int]) -> list[int]:
    """The texts that a batch waits for, by their lengths: it ends with the last of them."""
    shortest = min(lengths.values(), default=0)
    return [row for row, length in lengths.items() if length - shortest <= ABREAST]
