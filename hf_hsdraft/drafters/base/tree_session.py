"""Bases of sessions that grow trees, and the expansion of drafters that draft all depths at once.

The logits of all depths exist before such a tree is built; the tokens of a path only add a low-rank bias. So a node
costs a few small products, whatever the size of the drafter. Accepted positions are queued until the next draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...core.draft_tree import (
    TREE_BUILDERS,
    DraftTree,
    Expansion,
    TreeLimits,
    beam_trees,
    best_children,
)
from ...core.methods import load
from ...core.tensors import Transform, biased, on_device
from ...core.tuning import LIKELY_COLUMNS, MOST_PENDING
from ...verify.foresight import Foresight, Race
from .draft_options import DraftOptions
from .protocol import Accepted, Ask, Call, Session
from .target_weights import TargetWeights, TokenHead


class CacheMemory:
    """What a session leaves on the target's cache. It is never changed; pickling the cache drops it."""

    def __reduce__(self) -> Any:
        return type(self), ()

    def __deepcopy__(self, memo: Any) -> CacheMemory:
        return self


@dataclass(frozen=True)
class DraftMemory(CacheMemory):
    """Drafter state of one sequence."""

    drafter: Callable[[], Any] = lambda: None  # weak reference to the drafter that made it
    length: int = 0  # of the sequence then, including the last token
    context: Any = None  # what the drafter had read; opaque outside its family
    pending: tuple[Any, ...] = ()  # accepted positions not read yet
    place: tuple[Any, ...] = ()  # device and dtype of the drafter then

    @classmethod
    def of(cls, drafter: Any, length: int, context: Any, pending: Sequence[Any]) -> DraftMemory:
        return cls(weakref.ref(drafter), length, context, tuple(pending), (drafter.device, drafter.dtype))

    def fits(self, drafter: Any, length: int) -> bool:
        """Whether this memory is this drafter's, for a sequence of that length, on its current device and dtype."""
        place = drafter.device, drafter.dtype
        return self.drafter() is drafter and self.length == length and self.place == place


class TokenBias:
    """What a path's tokens add to drafted logits, by a head, for the trees of B sequences with n nodes at a depth.

    Args:
        embed: the target's embedding.
        hidden: `[B, depth, D]`, drafted states.
        since: `[B, 1, S]`, the head's states before the roots, for states that were drafted without the root's token.
        reach: `[B, depth, V']`, bool, where the bias applies; None for everywhere.
    """

    free_depths = 1  # number of depths without a bias, where the root's token was known

    def __init__(
        self,
        head: TokenHead,
        embed: Transform,
        hidden: torch.Tensor,
        since: torch.Tensor | None = None,
        reach: torch.Tensor | None = None,
    ) -> None:
        self._head, self._embed = head, embed
        self.projected, self._since, self._reach = head.project(hidden), since, reach

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns the states `[B, n, S]` of nodes with `tokens` `[B, n]`, int64, whose children are at depth `level`.

        `states` `[B, n, S]` are those of their parents; None at level 1, where the nodes are roots.
        """
        return self._head.advance(self._embed(tokens), self._since if level == 1 else states)

    def among(self, columns: torch.Tensor | None) -> Any:
        """Returns the last product for columns `[B, C]`, None for all; None if it computes all columns only."""
        if columns is None:
            return self._head.up, self._reach
        up, reach = self._head.among(columns), self._reach
        if reach is not None:
            reach = reach.gather(-1, columns[:, None].expand(-1, reach.shape[1], -1))
        return None if up is None else (up, reach)

    def told(self, level: int, logits: torch.Tensor, states: torch.Tensor, last: Any) -> torch.Tensor:
        """Returns the logits `[B, n, C]` of the children at depth `level` of nodes with `states` `[B, n, S]`.

        `logits` `[B, 1, C]` are drafted without the path; `last` is from `among` for the same columns.
        """
        if self._since is None and level <= self.free_depths:
            return logits
        up, reach = last
        code = self._head.code(self.projected[:, level - 1 : level], states)
        return biased(logits, up(code), None if reach is None else reach[:, level - 1 : level])

    def search(
        self, logits: torch.Tensor, temperature: float, roots: torch.Tensor, limits: TreeLimits
    ) -> tuple[torch.Tensor, list[int]] | None:
        """As `Expansion.search` for drafted logits `[B, depth, V']` of the drafter's own vocabulary."""
        return None


# Maps a level and the states of its nodes to log-probabilities `[B, n]` or `[B, 1]` that a child drafted is accepted.
Confidence = Callable[[int, torch.Tensor | None], torch.Tensor]


def log_probs_of(level: int, logits: torch.Tensor, temperature: float, race: Race | None) -> torch.Tensor:
    """Returns the log-probabilities of logits at a depth: of winning the race if there is one."""
    if race is not None:
        return race(level, logits)
    logits = logits if temperature == 1.0 else logits.float() / temperature
    return logits.log_softmax(dim=-1, dtype=torch.float32)


@dataclass(frozen=True)
class _Part:
    """The part of the vocabulary that a beam considers."""

    columns: torch.Tensor | None  # `[B, C]`, int64; None for all
    logits: Sequence[torch.Tensor]  # `[B, 1, C]` of each depth, of all columns if the bias needs them
    race: Race | None
    last: Any  # the bias's last product for these columns


@dataclass(frozen=True)
class ParallelExpansion(Expansion):
    """Expands the nodes of a batch, level by level."""

    logits: torch.Tensor  # `[B, depth, V']`, before any token of the path is known
    bias: TokenBias | None = None  # of the path's tokens; without it, nodes have no states
    temperature: float = 1.0  # of the returned distributions
    race: Race | None = None  # with foreseen target draws; probabilities are then those of winning the race
    confidence: Confidence | None = None  # used in the search for the best trees
    _made: dict[bool, _Part] = field(default_factory=dict, init=False, repr=False, compare=False)  # parts, made once

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.logits.shape[1]

    @property
    def has_states(self) -> bool:  # type: ignore[override]
        return self.bias is not None

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, states = self._known(self._part(likely=False), level, tokens, states)
        return log_probs_of(level, logits, self.temperature, self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As in `Expansion`; with a large vocabulary, among the likely columns only."""
        part = self._part(likely=True)
        columns, (logits, states) = part.columns, self._known(part, level, tokens, states)
        if columns is not None and logits.shape[-1] > columns.shape[-1]:
            logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
        log_probs = log_probs_of(level, logits, self.temperature, part.race)
        if self.confidence is not None:
            scores = scores + self.confidence(level, states)
        values, found, parents = best_children(log_probs, scores, count)
        return values, found if columns is None else columns.gather(1, found), parents, states

    def search(self, root_tokens: torch.Tensor, limits: TreeLimits) -> tuple[torch.Tensor, list[int]] | None:
        if self.bias is None or self.race is not None or self.confidence is not None:
            return None
        return self.bias.search(self.logits, self.temperature, root_tokens, limits)

    def _known(
        self, part: _Part, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the logits of the children given their paths, and the nodes' states."""
        logits = part.logits[level - 1]
        if self.bias is None:
            return logits, None
        states = self.bias.advance(level, tokens, states)
        return self.bias.told(level, logits, states, part.last), states

    # Not `cached_property`: its lock cannot be compiled before Python 3.12.
    def _part(self, likely: bool) -> _Part:
        if likely not in self._made:
            self._made[likely] = self._likely_columns() if likely else self._all_columns()
        return self._made[likely]

    def _all_columns(self) -> _Part:
        last = None if self.bias is None else self.bias.among(None)
        return _Part(None, self.logits.split(1, dim=1), self.race, last)

    def _likely_columns(self) -> _Part:
        """The columns that are likely at any depth before the path's tokens are known.

        A path's tokens seldom raise a token from below these, so this skips most of a level's work. If the bias needs
        all columns, all are kept, but the race runs among the likely ones.
        """
        if self.logits.shape[-1] < 2 * LIKELY_COLUMNS:
            return self._part(likely=False)
        columns = self.logits.amax(dim=1).topk(LIKELY_COLUMNS, sorted=False).indices
        race = None if self.race is None else self.race.among(columns)
        last = None if self.bias is None else self.bias.among(columns)
        if self.bias is not None and last is None:
            whole = self._part(likely=False)
            return whole if race is None else replace(whole, columns=columns, race=race)
        logits = self.logits.gather(-1, columns[:, None].expand(-1, self.depth, -1))
        return _Part(columns, logits.split(1, dim=1), race, last)


class TreeSession(Session):
    """Drafts trees (or chains) of tokens `vocab_ids` `[V']`, int64; for drawn nodes `foresight` is ignored."""

    def __init__(self, options: DraftOptions, vocab_ids: torch.Tensor, foresight: Foresight | None = None) -> None:
        self._options, self._vocab_ids = options, vocab_ids
        fits = foresight is not None and int(vocab_ids.max()) < foresight.vocab_size
        self._foresight = foresight if fits and not options.drawn else None
        self._build = TREE_BUILDERS[options.tree_builder].grow

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = [ask for ask in asks if ask.depth > 0]
        if wanted:
            options = self.options_for(wanted[0])
            depth = max(ask.depth for ask in wanted)
            trees.update(zip((ask.row for ask in wanted), self.trees(wanted, depth, options), strict=True))
        return list(trees.values())

    def options_for(self, ask: Ask, trees: bool = True) -> DraftOptions:
        """Returns the options with the ask's sizes; without `trees`, for a chain."""
        return replace(self._options, tree_size=ask.size, beam_width=ask.width if trees else 1)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        return self.grown(asks, self.expansion(asks, depth, options), options)

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        raise NotImplementedError

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        """Returns an expansion that can be evaluated again after the call; may be the same one."""
        made: Expansion = expansion
        return made

    def race(self, rows: Sequence[int], depth: int) -> Race | None:
        """Returns the race that decides the coming draws, if they are foreseen."""
        return None if self._foresight is None else self._foresight.race(rows, depth, self._vocab_ids)

    def grown(self, asks: Sequence[Ask], expansion: Expansion, options: DraftOptions) -> list[DraftTree]:
        """Builds the trees. If nodes have no state, the best tree is found exactly."""
        if self.revise is not None:
            expansion = self.revise([ask.row for ask in asks], expansion)
        if self.on_expansion is not None:
            self.on_expansion([ask.row for ask in asks], self.repeatable(asks, expansion, options))
        ids = self._vocab_ids
        roots = on_device([ask.root for ask in asks], ids.device)
        depths = [min(ask.depth, expansion.depth) for ask in asks]
        limits = TreeLimits(options.tree_size, options.beam_width, options.threshold, depths)
        if self._build is beam_trees and options.beam_width > 1 and not expansion.has_states:  # of methods' drafters
            found: list[DraftTree] = load("growing", "independent depths").best_first_trees(
                expansion, roots, ids, limits
            )
            return found
        return self._build(expansion, roots, ids, limits)


Columns = tuple[torch.Tensor, ...]  # pending inputs, each `[n, ...]`; the last one is the positions


class ReadingSession(TreeSession):
    """Queues accepted positions, and reads them in one forward for the batch before the next draft.

    Families implement `read_pending`, which empties the queues, `saved` and `restore`.
    """

    takes_new_texts = True
    reads_tokens = True  # whether an input has the embedding of the token after its position

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        super().__init__(call.options, weights.vocab_ids, call.foresight)
        self.drafter, self.weights = drafter, weights
        self._pending: list[list[Columns]] = [[] for _ in range(call.rows)]

    def columns(self, news: Accepted) -> Columns:
        """Returns the inputs to queue, on the drafter's device: taps, embeddings if they are read, and positions."""
        device, dtype = self.drafter.device, self.drafter.dtype
        taps, positions = news.taps.to(device, dtype), news.positions.to(device)
        if not self.reads_tokens:
            return taps, positions
        return taps, news.next_embeds(self.weights.embed).to(device, dtype), positions

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            pending = self._pending[each.row]
            pending.append(self.columns(each))
            if sum(len(part[-1]) for part in pending[1:]) > MOST_PENDING:  # no draft for a long time
                self.read_pending([each.row])

    def read_pending(self, rows: Sequence[int]) -> None:
        """Reads what is queued of some rows."""
        raise NotImplementedError

    def taken(self, rows: Sequence[int]) -> tuple[dict[int, int], Columns]:
        """Empties the queues of rows; returns each row's number of positions, and all inputs, row by row."""
        counts = {row: sum(len(part[-1]) for part in self._pending[row]) for row in rows}
        parts = [part for row in rows for part in self._pending[row]]
        for row in rows:
            self._pending[row] = []
        return counts, parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._pending))).difference(rows):
            self._pending[row] = []

    def memory(self, length: int) -> DraftMemory | None:
        if len(self._pending) > 1:
            return None
        return DraftMemory.of(self.drafter, length, self.saved(), self._pending[0])

    def saved(self) -> Any:
        """Returns a copy of what the positions read of a single sequence have left, for `restore`."""
        raise NotImplementedError

    def restore(self, saved: Any) -> None:
        raise NotImplementedError

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory of the same sequence; another one's would cost acceptance, so it is ignored."""
        if isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1):
            self.restore(memory.context)
            self._pending[0].extend(memory.pending)


class ParallelSession(ReadingSession):
    """Drafts trees (or chains) for a batch, all depths of all sequences in one forward.

    Families implement `drafted` for the slots, and `predicted` for their logits.
    """

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` for `depth` drafts; must call `read_pending` first."""
        raise NotImplementedError

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        """Returns the logits `[B, depth, V']` of slots `[B, slots, D]`, and the bias of the path's tokens."""
        raise NotImplementedError

    def confidence(self, hidden: torch.Tensor) -> Confidence | None:
        """Returns what the drafter predicts of acceptance from slots `[B, slots, D]`; see `ParallelExpansion`."""
        return None

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        hidden = self.drafted(asks, depth)
        return self.expanded(asks, hidden, options, *self.predicted(hidden, depth))

    def expanded(
        self, asks: Sequence[Ask], hidden: torch.Tensor, options: DraftOptions, logits: torch.Tensor, bias: Any
    ) -> ParallelExpansion:
        """Returns the expansion of slots `[B, slots, D]` with logits `[B, depth, V']`."""
        race = self.race([ask.row for ask in asks], logits.shape[1])
        return ParallelExpansion(logits, bias, options.temperature, race, self.confidence(hidden))
