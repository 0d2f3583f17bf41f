"""Session of a hidden-state drafter: the positions that its trunk has read, its drafts, and the reuse of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import is_number
from ...core.draft_tree import DraftTree, merge_trees
from ...core.options import Option
from ...core.tensors import Attend, batched_attention
from ...core.tuning import TUNING
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Call
from ..base.reading_session import DraftedNodes, ParallelSession, RowContext, ends_of, reading_attention
from ..base.target_weights import TargetWeights
from ..base.tree_session import ParallelExpansion, TokenBias
from .network import HSDraftNetwork, Leftover, WorkingWeights
from .quick_weights import SearchedBias
from .target_match import warn_of_poor_guesses
from .trunk import Context, GrowingText, Rope, read, roll

logger = logging.get_logger(__name__)

Pairs = tuple[torch.Tensor, ...]  # `[T, ...]`: taps h_i, embeddings of x_{i+1}, positions i
KeyValues = tuple[torch.Tensor, torch.Tensor]  # of a layer, each `[kv_heads, P, head_dim]`

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


def bias_of(
    working: WorkingWeights,
    weights: TargetWeights,
    hidden: torch.Tensor,  # `[B, depth, D]`, drafted states
    logits: torch.Tensor,  # `[B, depth, V']`
    since: torch.Tensor | None = None,  # see `TokenBias`; of leftover states, which the root is injected into too
) -> TokenBias:
    injector, searching = working.injector, getattr(working, "searching", None)
    if searching is not None:
        return SearchedBias(searching, weights, hidden, since)
    return TokenBias(injector, weights.embed, hidden, since=since, reach=injector.reach(logits))


def expansion_of(
    working: WorkingWeights, weights: TargetWeights, hidden: torch.Tensor, **further: Any
) -> ParallelExpansion:
    """Expands drafted states `[B, depth, D]`."""
    logits = working.logits(hidden)
    return ParallelExpansion(logits, bias_of(working, weights, hidden, logits), **further)


class BatchedTexts:
    """The rows of a batch for one forward of a trunk. Rolled positions follow the accepted ones, which are kept.

    Args:
        counts: number of the pairs of each row, which stand row by row.
        positions: `[T]`, of the pairs.
        window: attended positions including the position itself; None for all.
    """

    def __init__(
        self, context: RowContext, counts: Mapping[int, int], positions: torch.Tensor, window: int | None, layers: int
    ) -> None:
        slots = context.reserve(dict(counts), positions)
        self._context, self._rows, self._window = context, list(counts), window
        self._read = reading_attention(context, slots, counts, positions, [window] * layers)
        self.starts = ends_of(counts, positions.device)
        self._last = positions[self.starts][:, None]

    def reading(self) -> Attend:
        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
        ) -> torch.Tensor:
            return self._read(layer, queries, keys.transpose(0, 1), values.transpose(0, 1), rows)

        return attend

    def rolling(self, step: int, chains: int) -> Attend:
        if step == 1:
            self._nodes = DraftedNodes(self._context, self._rows, self._last.device)
            self._numbers = torch.zeros_like(self._last)
        self._numbers = self._nodes.add(self._numbers)
        seen = self._nodes.seen(self._last, None if self._window is None else self._window - step)

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
        ) -> torch.Tensor:
            view = self._nodes.written(layer, *(each.transpose(0, 1)[:, None] for each in (keys, values)))
            return batched_attention(queries[:, None], *view, seen)[:, 0]

        return attend


class RollOut:
    """A trunk's state in one call: the positions that it has read, and drafts rolled from their ends.

    Args:
        drafter: with its sizes, device and dtype.
        context: of the rows of a batch; None for a single sequence.
    """

    def __init__(self, trunk: WorkingWeights, drafter: HSDraftNetwork, context: RowContext | None = None) -> None:
        config = drafter.config
        self._trunk, self._window, self._context = trunk, config.sliding_window, context
        sizes = config.num_key_value_heads, 0, config.head_dim
        room = torch.empty(sizes, device=drafter.device, dtype=drafter.dtype)
        layers, tuned = len(trunk.layers), {"spare": TUNING.spare_tokens, "mask_rows": TUNING.mask_rows}
        self._text = GrowingText(layers, room, self._window, **tuned)
        # Number of positions that affect the output at the last one and the drafts after it.
        self._reach = None if self._window is None else layers * (self._window - 1) + 1

    def saved(self) -> list[KeyValues]:
        """Returns a copy of the keys and values of a single sequence, as far back as they matter."""
        text = self._text
        held = slice(max(text.length - (self._reach or text.length), 0), text.length)
        pairs = zip(text.keys, text.values, strict=True)
        return [(keys[:, held].clone(), values[:, held].clone()) for keys, values in pairs]

    def restore(self, saved: Sequence[KeyValues]) -> None:
        text, sides = self._text, zip(*saved, strict=True)
        text.keys, text.values = ([state.clone() for state in side] for side in sides)
        text.length = text.keys[0].shape[1]

    def drop(self, counts: Mapping[int, int]) -> None:
        """Drops the positions read last, fewer than a window holds; `counts` are by row."""
        for row, count in counts.items():
            if self._context is None:
                self._text.length -= count
            else:
                self._context.drop(row, count)

    def __call__(self, counts: Mapping[int, int], pairs: Pairs, num_draft_steps: int) -> torch.Tensor:
        """Reads accepted positions, then rolls K steps from the last of each row: `[B, K, D]`, g_0 .. g_{K-1}.

        The pairs stand row by row, and `counts` has the number of each row's, in order.
        """
        rolling = getattr(self._trunk, "rolling", None)
        if self._context is None and rolling is not None:
            states = rolling(*self._recent(pairs), self._text, num_draft_steps - 1)
            if states is not None:
                return states[None]
        x, ropes, context = self.read(counts, pairs, num_draft_steps - 1)
        return torch.stack(roll(self._trunk, x, ropes, context), dim=1)

    def read(self, counts: Mapping[int, int], pairs: Pairs, ahead: int = 0) -> tuple[torch.Tensor, list[Rope], Context]:
        """Reads accepted positions only; returns what `roll` needs for `ahead` steps."""
        taps, embeds, position_ids = pairs
        if self._context is not None:
            layers = len(self._trunk.layers)
            texts = BatchedTexts(self._context, counts, position_ids, self._window, layers)
            return *read(self._trunk, taps, embeds, position_ids, texts, ahead), texts
        taps, embeds, position_ids = self._recent(pairs)
        self._text.extend(len(taps), ahead)
        return *read(self._trunk, taps, embeds, position_ids, self._text, ahead), self._text

    def _recent(self, pairs: Pairs) -> Pairs:
        """The pairs that matter of a single sequence; if earlier positions no longer do, these are forgotten."""
        if self._reach is None or len(pairs[0]) < self._reach:
            return pairs
        self._text.length = 0
        return tuple(column[-self._reach :] for column in pairs)


@dataclass
class _Row:
    """What a row's last draft leaves for the next."""

    root: int = -1  # the last accepted token
    drafted: torch.Tensor | None = None  # `[K, D]`, g_0 .. g_{K-1} of the last round
    leftover: Leftover | None = None  # their rest after the accepted ones


class HSDraftSession(ParallelSession):
    """Drafts trees (or chains) for a batch; at the end of a call it warns of poor drafts due to another target."""

    reads_tokens = True

    def __init__(
        self,
        drafter: HSDraftNetwork,
        weights: TargetWeights,
        call: Call,
        working: WorkingWeights | None = None,  # built from drafter and weights by default
        roll_out: RollOut | None = None,  # a growing one by default
    ) -> None:
        config = drafter.config
        super().__init__(drafter, weights, call, config.num_hidden_layers, config.sliding_window)
        self._target = call.target
        self.guesses = self.right_guesses = 0  # judged first guesses of drafts, and the right ones
        self._guessed: dict[int, DraftTree] = {}  # trees of the last round, by row
        layers = config.num_hidden_layers, config.num_roll_layers, config.num_step_modules
        sizes = config.hidden_size, layers, config.draft_vocab_size, config.injector
        self._reuse, self._reuse_weight = reuse_of(self._options.own)
        self._working = working or WorkingWeights.of(drafter, weights.head)
        self._roll_out = roll_out or RollOut(self._working, drafter, None if call.rows == 1 else self._context)
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
        """Compares accepted tokens with the last draft, of which what still predicts tokens may be reused."""
        self._count_guess(self._guessed.get(news.row), news.tokens[0])
        row, reused = self._rows[news.row], self._reuse != "none"
        row.leftover = Leftover.of(row.drafted, row.root, news.tokens[:-1]) if reused else None
        row.root, row.drafted = news.tokens[-1], None

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

    def saved(self) -> Any:
        return self._roll_out.saved()

    def restore(self, saved: Any) -> None:
        self._roll_out.restore(saved)

    def read_pending(self, rows: Sequence[int]) -> None:
        """Reads what is queued but for the last part of each row, which a draft reads when it rolls from its end."""
        last = {row: self._pending[row].pop() for row in rows}
        self._roll_out.read(*self.taken(rows))
        for row, part in last.items():
            self._pending[row].append(part)

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Reads pending pairs and rolls from the last of each row: `[B, depth, D]`."""
        rows = [ask.row for ask in asks]
        states = self._roll_out(*self.taken(rows), depth)
        for row, drafted in zip(rows, states, strict=True):
            self._rows[row].drafted = drafted
        return states

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias]:
        logits = self._working.logits(hidden)
        return logits, bias_of(self._working, self.weights, hidden, logits)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        left = {place: each for place, ask in enumerate(asks) if (each := self._rows[ask.row].leftover) is not None}
        if not left:
            return super().trees(asks, depth, options)
        hidden, embed = self.drafted(asks, depth), self.weights.embed
        logits = self._working.logits(hidden)
        if self._reuse == "ensemble":
            logits = logits.clone()
            for place, leftover in left.items():
                self._working.ensemble(logits[place], leftover, asks[place].root, self._reuse_weight, embed)
        trees = self._of_states(asks, hidden, logits, options)
        if self._reuse == "resample":
            for place, leftover in left.items():
                since = self._working.after(leftover.path, embed)[None]
                states = leftover.hidden[None, : min(asks[place].depth, depth)]
                [resampled] = self._of_states([asks[place]], states, self._working.logits(states), options, since)
                if asks[place].chain:
                    trees[place] = max(trees[place], resampled, key=DraftTree.expected_length)
                else:
                    trees[place] = merge_trees(trees[place], resampled, options.tree_size)
        return trees

    def _of_states(
        self,
        asks: Sequence[Ask],
        hidden: torch.Tensor,
        logits: torch.Tensor,
        options: DraftOptions,
        since: torch.Tensor | None = None,
    ) -> list[DraftTree]:
        bias = bias_of(self._working, self.weights, hidden, logits, since)
        return self.grown(asks, self.expanded(asks, hidden, options, logits, bias), options)
