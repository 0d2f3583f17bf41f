"""Base of sessions that grow trees, and the expansion of drafters that draft all depths at once.

The logits of all depths exist before such a tree is built; the tokens of a path only add a low-rank bias. So a node
costs a few small products, whatever the size of the drafter.
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
    best_first_trees,
)
from ...core.tensors import Transform, biased, on_device
from ...core.tuning import TUNING
from ...verify.foresight import Foresight, Race
from .draft_options import DraftOptions
from .protocol import Ask, Session
from .target_weights import TokenHead


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
    """The bias that a head computes from the tokens of a path, for the trees of B sequences with n nodes at a depth.

    Tree builders only gather node states.

    Args:
        embed: the target's embedding.
        hidden: `[B, slots, D]`, drafted states; those of the first depth have the number `first`.
        since: `[B, 1, S]`, the head's states before the roots, for states that were drafted without the root's token.
        reach: `[B, depth, V']`, bool, where the bias applies; None for everywhere.
    """

    def __init__(
        self,
        head: TokenHead,
        embed: Transform,
        hidden: torch.Tensor,
        first: int = 0,
        since: torch.Tensor | None = None,
        reach: torch.Tensor | None = None,
    ) -> None:
        self._head, self._embed, self._hidden, self._first = head, embed, hidden, first
        self.projected, self._since, self.reach = head.project(hidden), since, reach
        self.up, self.among = head.up, head.among

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns the states `[B, n, S]` of nodes with `tokens` `[B, n]`, int64, whose children are at depth `level`.

        `states` `[B, n, S]` are those of their parents; None at level 1, where the nodes are roots.
        """
        head, slot = self._head, self._first + level - 2  # of these nodes; at the root, of what was before the first
        inputs = self._embed(tokens) if head.reads_embeds else tokens
        hidden = self._hidden[:, slot : slot + 1] if head.needs_hidden and slot >= 0 else None
        if level == 1:
            states = head.advance(inputs, self._since)
            if hidden is None:
                return states
        return head.advance(inputs, states, hidden)

    def code(self, level: int, states: torch.Tensor) -> torch.Tensor | None:
        """Returns the codes `[B, n, r]` of nodes with `states` `[B, n, S]`; None if this level has no bias."""
        if self._since is None and level <= self._head.free_depths:
            return None
        slot = self._first + level - 1
        return self._head.code(self.projected[:, slot : slot + 1], states)

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
    up: Transform | None  # maps codes to biases of these columns
    logits: Sequence[torch.Tensor]  # `[B, 1, C]` of each depth
    race: Race | None
    reach: torch.Tensor | None  # `[B, depth, C]`, where the bias applies; None for everywhere
    refined_up: Transform | None  # the refinement's last product for these columns


@dataclass(frozen=True)
class ParallelExpansion(Expansion):
    """Expands the nodes of a batch, level by level."""

    logits: torch.Tensor  # `[B, depth, V']`, before any token of the path is known
    bias: TokenBias | None = None  # of the path's tokens; without it, nodes have no states
    temperature: float = 1.0  # of the returned distributions
    race: Race | None = None  # with foreseen target draws; probabilities are then those of winning the race
    refinement: Any = None  # by a refiner's model of the path; see `draft_options`
    confidence: Confidence | None = None  # used in the search for the best trees
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # parts, made once

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.logits.shape[1]

    @property
    def has_states(self) -> bool:  # type: ignore[override]
        return self.bias is not None or self.refinement is not None

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, states = self._known(self._whole, level, tokens, states)
        return log_probs_of(level, logits, self.temperature, self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As in `Expansion`; with a large vocabulary, among the columns of `_part` only."""
        columns, race = self._part.columns, self._part.race
        logits, states = self._known(self._part, level, tokens, states)
        if race is not None and columns is None and race.vocab_ids.dim() > 1:  # each row has its part
            columns = self._columns
            logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
        log_probs = log_probs_of(level, logits, self.temperature, race)
        if self.confidence is not None:
            own = states if self.refinement is None or states is None else states[..., self.refinement.state_size :]
            scores = scores + self.confidence(level, own)
        values, found, parents = best_children(log_probs, scores, count)
        return values, found if columns is None else columns.gather(1, found), parents, states

    def search(self, root_tokens: torch.Tensor, limits: TreeLimits) -> tuple[torch.Tensor, list[int]] | None:
        if self.bias is None or any(each is not None for each in (self.race, self.refinement, self.confidence)):
            return None
        return self.bias.search(self.logits, self.temperature, root_tokens, limits)

    def _known(
        self, part: _Part, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the logits of the children given their paths, and the nodes' states, refinement states first."""
        if self.refinement is None:
            return self._drafted(part, level, tokens, states)
        size, own, model_states = self.refinement.state_size, None, None
        if states is not None:
            model_states, own = states[..., :size], states[..., size:]
        logits, own = self._drafted(part, level, tokens, own)
        model_states = self.refinement.advance(tokens, model_states)
        assert part.refined_up is not None
        logits = self.refinement(level, logits, model_states, part.refined_up)
        return logits, model_states if own is None else torch.cat([model_states, own], dim=-1)

    def _drafted(
        self, part: _Part, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_known`, without the refinement."""
        logits = part.logits[level - 1]
        if self.bias is None:
            return logits, None
        states = self.bias.advance(level, tokens, states)
        code = self.bias.code(level, states)
        if code is not None:
            assert part.up is not None
            reach = None if part.reach is None else part.reach[:, level - 1 : level]
            logits = biased(logits, part.up(code), reach)
        return logits, states

    # Not `cached_property`: its lock cannot be compiled before Python 3.12.
    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def _whole(self) -> _Part:
        return self._once("whole", self._all_columns)

    @property
    def _part(self) -> _Part:
        return self._once("part", self._likely_columns)

    @property
    def _reach(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.reach

    @property
    def _columns(self) -> torch.Tensor:
        """`[B, C]`, the likely columns of each row."""
        most = min(TUNING.likely_columns, self.logits.shape[-1])
        return self._once("columns", lambda: self.logits.amax(dim=1).topk(most, sorted=False).indices)

    def _all_columns(self) -> _Part:
        up = None if self.bias is None else self.bias.up
        refined_up = None if self.refinement is None else self.refinement.among(None)
        return _Part(None, up, self.logits.split(1, dim=1), self.race, self._reach, refined_up)

    def _likely_columns(self) -> _Part:
        """The columns that are likely at any depth before the path's tokens are known.

        A path's tokens seldom raise a token from below these, so this skips most of a level's work. If the bias needs
        all columns, all are kept, but the race runs among the likely ones.
        """
        bias, race = self.bias, self.race
        if self.logits.shape[-1] < 2 * TUNING.likely_columns:
            return self._whole
        up = None if bias is None else bias.among(self._columns)
        if bias is not None and up is None:
            return replace(self._whole, race=None if race is None else race.among(self._columns))
        columns = self._columns[:, None].expand(-1, self.depth, -1)
        race = None if race is None else race.among(self._columns)
        reach = None if self._reach is None else self._reach.gather(-1, columns)
        refined_up = None if self.refinement is None else self.refinement.among(self._columns)
        logits = self.logits.gather(-1, columns).split(1, dim=1)
        return _Part(self._columns, up, logits, race, reach, refined_up)


# Takes arguments of an `Expansion`; returns the children's logits `[B, n, V']` and the nodes' states `[B, n, S]`.
Levels = Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LevelExpansion(Expansion):
    """Expands nodes level by level, one forward each."""

    levels: Levels
    depth: int  # greatest depth of a child
    temperature: float  # of the returned distributions
    race: Race | None  # with foreseen target draws; probabilities are then those of winning the race

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = self.levels(level, tokens, states)
        return log_probs_of(level, logits, self.temperature, self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As in `Expansion`; races sort, so they run among the likely tokens of each row only."""
        logits, states = self.levels(level, tokens, states)
        if self.race is None or logits.shape[-1] < 2 * TUNING.likely_columns:
            return *best_children(log_probs_of(level, logits, self.temperature, self.race), scores, count), states
        columns = logits.amax(dim=1).topk(TUNING.likely_columns, sorted=False).indices
        logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
        values, found, parents = best_children(self.race.among(columns)(level, logits), scores, count)
        return values, columns.gather(1, found), parents, states


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
        if self.on_expansion is not None:
            self.on_expansion([ask.row for ask in asks], self.repeatable(asks, expansion, options))
        ids = self._vocab_ids
        roots = on_device([ask.root for ask in asks], ids.device)
        depths = [min(ask.depth, expansion.depth) for ask in asks]
        limits = TreeLimits(options.tree_size, options.beam_width, options.threshold, depths)
        best_first = self._build is beam_trees and options.beam_width > 1 and not expansion.has_states
        return (best_first_trees if best_first else self._build)(expansion, roots, ids, limits)
