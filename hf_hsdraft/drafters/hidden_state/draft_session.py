"""Session of a hidden-state drafter: what it reads and drafts, and the tokens' bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import is_number
from ...core.draft_tree import DraftTree, merge_trees
from ...core.options import Option
from ...core.tensors import Transform
from ...core.tuning import TUNING
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Call
from ..base.refiners import refiner_of
from ..base.target_weights import TargetWeights
from ..base.tree_session import DraftMemory, ParallelExpansion, TokenBias, TreeSession
from .network import HSDraftNetwork, Injector, Leftover, WorkingWeights
from .roll_out import Pairs, RollOut
from .target_match import warn_of_poor_guesses

logger = logging.get_logger(__name__)

_GONE = "skip"  # may be saved in drafters of an earlier version
REUSES = ("none", "ensemble", "resample")
REUSE_OPTIONS = (
    Option("reuse", "none", lambda value: value in (*REUSES, _GONE), f"one of {', '.join(REUSES)}"),
    Option("reuse_weight", 0.4, lambda value: is_number(value) and value >= 0.0, "a number of 0 or more"),
)


def reuse_of(options: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the form of reuse, and the weight of old logits relative to new ones."""
    reuse, weight = options["reuse"], options["reuse_weight"]
    if reuse == _GONE:
        logger.warning_once("reuse='skip' is gone, as it gained nothing measurable: nothing is reused")
        return "none", weight
    return reuse, weight


@dataclass(frozen=True)
class InjectedTokens(TokenBias):
    """The bias that an injector computes from a path."""

    injector: Injector
    weights: TargetWeights
    projected: torch.Tensor  # `[B, depth, ...]`, `Injector.project` of the drafted states
    # `[B, 1, S]`, for leftover states (reuse form B) the injector's state before the root: they were drafted without
    # the root's token, so it is injected at depth 1 too
    since: torch.Tensor | None = None

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.injector.advance(self.weights.embed(tokens), self.since if level == 1 else states)

    def code(self, level: int, states: torch.Tensor) -> torch.Tensor | None:
        if level == 1 and self.since is None:
            return None
        return self.injector.code(self.projected[:, level - 1 : level], states)

    def up(self, code: torch.Tensor) -> torch.Tensor:
        return self.injector.up(code)

    def among(self, columns: torch.Tensor) -> Transform | None:
        of_outputs = getattr(self.injector.up, "of", None)
        return None if of_outputs is None or len(columns) > 1 else of_outputs(columns[0])


def expansion_of(
    working: WorkingWeights,
    weights: TargetWeights,
    hidden: torch.Tensor,
    logits: torch.Tensor | None = None,
    since: torch.Tensor | None = None,
    **further: Any,
) -> ParallelExpansion:
    """Expands drafted states `[B, depth, D]`; `logits` if they are not the head's, `since` as in `InjectedTokens`."""
    injector, logits = working.injector, working.logits(hidden) if logits is None else logits
    bias = InjectedTokens(injector, weights, injector.project(hidden), since)
    return ParallelExpansion(logits, bias, reach=injector.reach(logits), **further)


@dataclass
class _Row:
    """Drafting state of one row."""

    pending: list[Pairs] = field(default_factory=list)  # pairs not yet read by the trunk
    root: int = -1  # the last accepted token
    drafted: torch.Tensor | None = None  # `[K, D]`, g_0 .. g_{K-1} of the last round
    leftover: Leftover | None = None  # their rest after the accepted ones


class HSDraftSession(TreeSession):
    """Drafts trees (or chains) for a batch from the target's hidden states.

    At the end of the call it warns if drafts did poorly because of another target.
    """

    def __init__(
        self,
        drafter: HSDraftNetwork,
        weights: TargetWeights,
        call: Call,
        working: WorkingWeights | None = None,  # built from drafter and weights by default
        roll_out: RollOut | None = None,  # a growing one by default
    ) -> None:
        config = drafter.config
        super().__init__(call.options, weights.vocab_ids, call.foresight)
        self.drafter, self.weights, self._target = drafter, weights, call.target
        self.guesses = self.right_guesses = 0  # judged first guesses of drafts, and the right ones
        self._guessed: dict[int, DraftTree] = {}  # trees of the last round, by row
        layers = config.num_hidden_layers, config.num_roll_layers, config.num_step_modules
        sizes = config.hidden_size, layers, config.draft_vocab_size, config.injector
        self._reuse, self._reuse_weight = reuse_of(self._options.own)
        self._working = working or WorkingWeights.of(drafter, weights.head)
        self._roll_out = roll_out or RollOut(self._working, config, drafter.device, drafter.dtype)
        self._rows = [_Row() for _ in range(call.rows)]
        self._refiner = refiner_of(drafter, call.options, weights, call.rows)
        self.kind = *sizes, drafter.dtype, drafter.device, self._refiner is not None

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = super().draft(asks)
        self._guessed = dict(zip((ask.row for ask in asks), trees, strict=True))
        return trees

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._take_tokens(each)
            embeds = None if each.embeds is None else each.next_embeds(self.weights.embed)
            self.read(each.taps, each.following, each.positions, each.row, embeds)
        self._guessed = {}

    def _take_tokens(self, news: Accepted) -> None:
        """Compares accepted tokens with the last draft."""
        self._count_guess(self._guessed.get(news.row), news.tokens[0])
        self.settle(news.tokens[:-1], news.row)
        if self._refiner is not None:
            self._refiner.observe(news.row, [*news.earlier, *news.tokens])

    def _count_guess(self, tree: DraftTree | None, token: int) -> None:
        first = [] if tree is None else [node for node, depth in enumerate(tree.depths) if depth == 1]
        if tree is not None and first:
            self.guesses += 1
            self.right_guesses += tree.tokens[max(first, key=lambda node: tree.scores[node])] == token

    def end(self) -> None:
        warn_of_poor_guesses(self._target, self.drafter, self.guesses, self.right_guesses)

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._rows))).difference(rows):
            self._rows[row] = _Row()

    def memory(self, length: int) -> DraftMemory | None:
        if len(self._rows) > 1:
            return None
        return DraftMemory.of(self.drafter, length, self._roll_out.context, self._rows[0].pending)

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory of the same sequence; another one's would cost acceptance, so it is ignored."""
        if isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1):
            self._roll_out.resume(memory.context)
            self._rows[0].pending.extend(memory.pending)

    def read(
        self,
        taps: torch.Tensor,  # `[n, taps * D]`, h_i of the accepted positions i
        next_tokens: torch.Tensor,  # `[n]`, the accepted tokens x_{i+1}; with `embeds`, at least the last
        position_ids: torch.Tensor,  # `[n]`, the positions i
        row: int = 0,
        embeds: torch.Tensor | None = None,  # `[n, D]`, embeddings of the x_{i+1}, for prompts given as embeddings
    ) -> None:
        """Queues accepted pairs; the next `draft` reads them in one forward."""
        device, dtype = self.drafter.device, self.drafter.dtype
        self._rows[row].root = int(next_tokens[-1])
        embeds = self.weights.embed(next_tokens) if embeds is None else embeds.to(device, dtype)
        pending = self._rows[row].pending
        pending.append((taps.to(device, dtype), embeds, position_ids.to(device)))
        waiting = sum(len(part[2]) for part in pending[1:])
        if waiting > TUNING.most_pending:  # no draft for a long time
            early = pending[:-1]
            counts = {row: sum(len(part[2]) for part in early)} if len(self._rows) > 1 else None
            self._roll_out.read(_joined(early), rows=counts)
            del pending[:-1]

    def settle(self, accepted: Sequence[int], row: int = 0) -> None:
        """Takes the accepted tokens of the last draft. Call it before the bonus token is read."""
        state = self._rows[row]
        state.leftover = None
        if self._reuse != "none":
            state.leftover = Leftover.of(state.drafted, state.root, accepted)
        state.drafted = None

    def _rolled(self, rows: Sequence[int], depth: int) -> torch.Tensor:
        """Reads pending pairs and rolls from the last of each row: `[B, depth, D]`."""
        states = self._roll_out(self._pairs(rows), depth, self._counts(rows))
        for row, drafted in zip(rows, states, strict=True):
            self._rows[row].pending.clear()
            self._rows[row].drafted = drafted
        return states

    def _pairs(self, rows: Sequence[int]) -> Pairs:
        return _joined([part for row in rows for part in self._rows[row].pending])

    def _counts(self, rows: Sequence[int]) -> dict[int, int] | None:
        """Pending pairs of each row; None for a single sequence."""
        if len(self._rows) == 1:
            return None
        return {row: sum(len(part[2]) for part in self._rows[row].pending) for row in rows}

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        hidden = self._rolled([ask.row for ask in asks], depth)
        logits = self._working.logits(hidden)
        left = {place: each for place, ask in enumerate(asks) if (each := self._rows[ask.row].leftover) is not None}
        if left and self._reuse == "ensemble":
            logits, embed = logits.clone(), self.weights.embed
            for place, leftover in left.items():
                self._working.ensemble(logits[place], leftover, asks[place].root, self._reuse_weight, embed)
        trees = self.grown(asks, self._expansion(asks, hidden, logits, options), options)
        if self._reuse == "resample":
            for place, leftover in left.items():
                one, since = [asks[place]], self._working.after(leftover.path, self.weights.embed)[None]
                states = leftover.hidden[None, : min(asks[place].depth, depth)]
                expansion = self._expansion(one, states, None, options, since)
                [resampled] = self.grown(one, expansion, options)
                if asks[place].chain:
                    trees[place] = max(trees[place], resampled, key=DraftTree.expected_length)
                else:
                    trees[place] = merge_trees(trees[place], resampled, options.tree_size)
        return trees

    def _expansion(
        self,
        asks: Sequence[Ask],
        hidden: torch.Tensor,
        logits: torch.Tensor | None,
        options: DraftOptions,
        since: torch.Tensor | None = None,
    ) -> ParallelExpansion:
        rows = [ask.row for ask in asks]
        return expansion_of(
            self._working,
            self.weights,
            hidden,
            logits,
            since,
            temperature=options.temperature,
            race=self.race(rows, hidden.shape[1]),
            refinement=None if self._refiner is None else self._refiner.refinement(rows),
        )


def _joined(parts: Sequence[Pairs]) -> Pairs:
    taps, embeds, positions = (torch.cat(column) for column in zip(*parts, strict=True))
    return taps, embeds, positions
