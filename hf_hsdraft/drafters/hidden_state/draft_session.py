"""Session of a hidden-state drafter: the positions that it has read, what it drafts, and the tokens' bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import is_number
from ...core.draft_tree import DraftTree, merge_trees
from ...core.options import Option
from ...core.tensors import Transform, on_device
from ...core.tuning import TUNING
from ..base.draft_options import DraftOptions
from ..base.packed_texts import DraftContext, PackedTexts
from ..base.protocol import Accepted, Ask, Call
from ..base.reading_session import ReadingSession
from ..base.target_weights import TargetWeights
from ..base.tree_session import ParallelExpansion, TokenBias
from .configuration_hsdraft import HSDraftConfig
from .network import HSDraftNetwork, Injector, Leftover, WorkingWeights
from .target_match import warn_of_poor_guesses
from .trunk import Context, GrowingText, Rope, Trunk, read, roll

logger = logging.get_logger(__name__)

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # `[T, ...]`: taps h_i, embeddings of x_{i+1}, positions i

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


class RollOut:
    """A trunk's state in one call; for a single sequence unless `rows` are passed."""

    def __init__(self, trunk: Trunk, config: HSDraftConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._trunk, window = trunk, config.sliding_window
        room = torch.empty(config.num_key_value_heads, 0, config.head_dim, device=device, dtype=dtype)
        sizes = {"spare": TUNING.spare_tokens, "mask_rows": TUNING.mask_rows}
        self._text = GrowingText(len(trunk.layers), room, window, **sizes)
        self._batch, self._window = DraftContext(), window
        # Number of positions that affect the output at the last one and the drafts after it.
        self._reach = None if window is None else len(trunk.layers) * (window - 1) + 1

    @property
    def context(self) -> DraftContext:
        """A copy of the context of a single sequence, as far back as it matters."""
        text = self._text
        held = slice(max(text.length - (self._reach or text.length), 0), text.length)
        pairs = zip(text.keys, text.values, strict=True)
        return DraftContext([(keys[:, held].clone(), values[:, held].clone()) for keys, values in pairs])

    def resume(self, context: DraftContext) -> None:
        text, sides = self._text, zip(*context.layers, strict=True)
        text.keys, text.values = ([state.clone() for state in side] for side in sides)
        text.length = context.length

    def mark(self) -> tuple[int, DraftContext]:
        """Returns the current end of the sequences, for `reset`."""
        return self._text.length, self._batch

    def reset(self, mark: tuple[int, DraftContext]) -> None:
        """Drops positions read since `mark`, which must be fewer than a window holds."""
        self._text.length, self._batch = mark

    def __call__(self, pairs: Pairs, num_draft_steps: int, rows: Mapping[int, int] | None = None) -> torch.Tensor:
        """Reads accepted positions, then rolls K steps from the last of each row: `[B, K, D]`, g_0 .. g_{K-1}.

        In a batch the pairs stand row by row, and `rows` has the number of pairs of each row, in order.
        """
        x, ropes, context = self.read(pairs, rows, num_draft_steps - 1)
        return torch.stack(roll(self._trunk, x, ropes, context), dim=1)

    def read(
        self, pairs: Pairs, rows: Mapping[int, int] | None = None, ahead: int = 0
    ) -> tuple[torch.Tensor, list[Rope], Context]:
        """Reads accepted positions only; returns what `roll` needs for `ahead` steps."""
        if rows is not None:
            packed = self._packed(pairs[2], ahead + 1, rows)
            x, ropes = read(self._trunk, *pairs, packed, ahead)
            self._batch = packed.context.within(self._window)
            return x, ropes, packed
        taps, embeds, position_ids = pairs
        if self._reach is not None and len(taps) >= self._reach:  # earlier positions no longer matter
            taps, embeds, position_ids = (column[-self._reach :] for column in pairs)
            self._text.length = 0
        self._text.extend(len(taps), ahead)
        return *read(self._trunk, taps, embeds, position_ids, self._text, ahead), self._text

    def _packed(self, position_ids: torch.Tensor, steps: int, rows: Mapping[int, int]) -> PackedTexts:
        counts, device = torch.tensor(list(rows.values())), position_ids.device
        documents = on_device([row for row, count in rows.items() for _ in range(count)], device)
        starts = on_device((counts.cumsum(0) - 1).tolist(), device)
        return PackedTexts(self._batch, position_ids, documents, starts, self._window, steps)


@dataclass
class _Row:
    """What the reuse of rejected drafts knows of a row."""

    root: int = -1  # the last accepted token
    drafted: torch.Tensor | None = None  # `[K, D]`, g_0 .. g_{K-1} of the last round
    leftover: Leftover | None = None  # their rest after the accepted ones


class HSDraftSession(ReadingSession):
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
        super().__init__(drafter, weights, call, 0)  # the roll-out keeps what was read
        self._target = call.target
        self.guesses = self.right_guesses = 0  # judged first guesses of drafts, and the right ones
        self._guessed: dict[int, DraftTree] = {}  # trees of the last round, by row
        layers = config.num_hidden_layers, config.num_roll_layers, config.num_step_modules
        sizes = config.hidden_size, layers, config.draft_vocab_size, config.injector
        self._reuse, self._reuse_weight = reuse_of(self._options.own)
        self._working = working or WorkingWeights.of(drafter, weights.head)
        self._roll_out = roll_out or RollOut(self._working, config, drafter.device, drafter.dtype)
        self._rows = [_Row() for _ in range(call.rows)]
        self.kind = *sizes, drafter.dtype, drafter.device, self._refiner is not None

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = super().draft(asks)
        self._guessed = dict(zip((ask.row for ask in asks), trees, strict=True))
        return trees

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._take_tokens(each)
        super().observe(news)
        self._guessed = {}

    def _take_tokens(self, news: Accepted) -> None:
        """Compares accepted tokens with the last draft."""
        self._count_guess(self._guessed.get(news.row), news.tokens[0])
        state = self._rows[news.row]
        reused = self._reuse != "none"
        state.leftover = Leftover.of(state.drafted, state.root, news.tokens[:-1]) if reused else None
        state.root, state.drafted = news.tokens[-1], None

    def _count_guess(self, tree: DraftTree | None, token: int) -> None:
        first = [] if tree is None else [node for node, depth in enumerate(tree.depths) if depth == 1]
        if tree is not None and first:
            self.guesses += 1
            self.right_guesses += tree.tokens[max(first, key=lambda node: tree.scores[node])] == token

    def end(self) -> None:
        warn_of_poor_guesses(self._target, self.drafter, self.guesses, self.right_guesses)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        for row in set(range(len(self._rows))).difference(rows):
            self._rows[row] = _Row()

    def kept_context(self) -> Any:
        return self._roll_out.context

    def continue_from(self, context: Any) -> None:
        self._roll_out.resume(context)

    def columns(self, news: Accepted) -> Pairs:
        device, dtype = self.drafter.device, self.drafter.dtype
        embeds = news.next_embeds(self.weights.embed)
        return news.taps.to(device, dtype), embeds.to(device, dtype), news.positions.to(device)

    def read_pending(self, rows: Sequence[int]) -> None:
        """Reads what is queued but for the last part of each row, from which a draft rolls."""
        last = {row: self._pending[row].pop() for row in rows}
        self._roll_out.read(*self._pairs(rows))
        for row, part in last.items():
            self._pending[row].append(part)

    def _pairs(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """Takes the queued pairs, and returns them with the number of each row's; None for a single sequence."""
        counts, pairs = self.taken(rows)
        return pairs, counts if len(self._rows) > 1 else None

    def _rolled(self, rows: Sequence[int], depth: int) -> torch.Tensor:
        """Reads queued pairs and rolls from the last of each row: `[B, depth, D]`."""
        pairs, counts = self._pairs(rows)
        states = self._roll_out(pairs, depth, counts)
        for row, drafted in zip(rows, states, strict=True):
            self._rows[row].drafted = drafted
        return states

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
