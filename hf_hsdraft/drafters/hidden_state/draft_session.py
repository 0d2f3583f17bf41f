"""Session of a hidden-state drafter: the positions that its trunk has read, its drafts, and the reuse of these."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import Limit, is_number
from ...core.draft_tree import DraftTree, merge_trees
from ...core.options import Option
from ...core.tensors import Attend, on_device
from ...core.tuning import MASK_ROWS, SPARE_TOKENS
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Call
from ..base.target_weights import TargetWeights
from ..base.tree_session import ParallelSession, TokenBias
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
    Option("reuse", "none", Limit(lambda value: value in (*REUSES, _GONE), f"one of {', '.join(REUSES)}")),
    Option("reuse_weight", 0.4, Limit(lambda value: is_number(value) and value >= 0.0, "a number of 0 or more")),
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


class BatchedTexts:
    """Rows of a batch for one forward of a trunk, which stand one after the other, each with its own buffers."""

    def __init__(self, texts: Sequence[GrowingText], counts: Sequence[int], device: torch.device) -> None:
        self._texts, self._counts = texts, list(counts)
        self.starts = on_device(list(itertools.accumulate(counts)), device) - 1

    def reading(self) -> Attend:
        return partial(self._attend, [text.reading() for text in self._texts], self._counts)

    def rolling(self, step: int, chains: int) -> Attend:
        return partial(self._attend, [text.rolling(step, 1) for text in self._texts], [1] * len(self._texts))

    def _attend(
        self, attends: Sequence[Attend], counts: list[int], layer: int, queries: Any, keys: Any, values: Any, rows: Any
    ) -> torch.Tensor:
        parts = queries.split(counts if rows is None else 1), keys.split(counts, 1), values.split(counts, 1)
        return torch.cat([attend(layer, *part, None) for attend, *part in zip(attends, *parts, strict=True)])


class RollOut:
    """A trunk's state in one call: the positions that it has read of each row, and drafts rolled from their ends.

    Args:
        drafter: with its sizes, device and dtype.
    """

    def __init__(self, trunk: WorkingWeights, drafter: HSDraftNetwork, rows: int = 1) -> None:
        config = drafter.config
        self._trunk, self._window = trunk, config.sliding_window
        sizes = config.num_key_value_heads, 0, config.head_dim
        room = torch.empty(sizes, device=drafter.device, dtype=drafter.dtype)
        layers, tuned = len(trunk.layers), {"spare": SPARE_TOKENS, "mask_rows": MASK_ROWS}
        self._texts = [GrowingText(layers, room, self._window, **tuned) for _ in range(rows)]
        self._text = self._texts[0]
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
            self._texts[row].length -= count

    def forget(self, row: int) -> None:
        """Drops all positions of a row."""
        self._texts[row].length = 0

    def __call__(self, counts: Mapping[int, int], pairs: Pairs, num_draft_steps: int) -> torch.Tensor:
        """Reads accepted positions, then rolls K steps from the last of each row: `[B, K, D]`, g_0 .. g_{K-1}.

        The pairs stand row by row, and `counts` has the number of each row's, in order.
        """
        rolling = getattr(self._trunk, "rolling", None)
        if len(self._texts) == 1 and rolling is not None:
            states = rolling(*self._recent(pairs), self._text, num_draft_steps - 1)
            if states is not None:
                return states[None]
        x, ropes, context = self.read(counts, pairs, num_draft_steps - 1)
        return torch.stack(roll(self._trunk, x, ropes, context), dim=1)

    def read(self, counts: Mapping[int, int], pairs: Pairs, ahead: int = 0) -> tuple[torch.Tensor, list[Rope], Context]:
        """Reads accepted positions only; returns what `roll` needs for `ahead` steps."""
        if len(self._texts) == 1:
            taps, embeds, position_ids = self._recent(pairs)
            self._text.extend(len(taps), ahead)
            return *read(self._trunk, taps, embeds, position_ids, self._text, ahead), self._text
        taps, embeds, position_ids = pairs
        texts = BatchedTexts([self._texts[row] for row in counts], list(counts.values()), taps.device)
        for row, count in counts.items():
            self._texts[row].extend(count, ahead)
        return *read(self._trunk, taps, embeds, position_ids, texts, ahead), texts

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
        super().__init__(drafter, weights, call)
        self._target = call.target
        self.guesses = self.right_guesses = 0  # judged first guesses of drafts, and the right ones
        self._guessed: dict[int, DraftTree] = {}  # trees of the last round, by row
        layers = config.num_hidden_layers, config.num_roll_layers, config.num_step_modules
        sizes = config.hidden_size, layers, config.draft_vocab_size, config.injector
        self._reuse, self._reuse_weight = reuse_of(self._options.own)
        self._working = working or WorkingWeights.of(drafter, weights.head)
        self._roll_out = roll_out or RollOut(self._working, drafter, call.rows)
        self._rows = [_Row() for _ in range(call.rows)]
        self._asked: Sequence[Ask] = ()  # those that are drafted for
        self.kind = *sizes, drafter.dtype, drafter.device

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
        tree = self._guessed.get(news.row)
        if tree is not None and len(tree) > 1:  # its first node is the likeliest next token
            self.guesses += 1
            self.right_guesses += tree.tokens[1] == news.tokens[0]
        row, reused = self._rows[news.row], self._reuse != "none"
        row.leftover = Leftover.of(row.drafted, row.root, news.tokens[:-1]) if reused else None
        row.root, row.drafted = news.tokens[-1], None

    def end(self) -> None:
        warn_of_poor_guesses(self._target, self.drafter, self.guesses, self.right_guesses)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        for row in set(range(len(self._rows))).difference(rows):
            self._rows[row] = _Row()
            self._roll_out.forget(row)

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
        if self._reuse == "ensemble":
            logits = logits.clone()
            for place, ask in enumerate(self._asked):
                if (leftover := self._rows[ask.row].leftover) is not None:
                    self._working.ensemble(logits[place], leftover, ask.root, self._reuse_weight, self.weights.embed)
        return logits, bias_of(self._working, self.weights, hidden, logits)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        self._asked = asks
        trees = super().trees(asks, depth, options)
        if self._reuse == "resample":
            for place, ask in enumerate(asks):
                if (leftover := self._rows[ask.row].leftover) is not None:
                    resampled = self._resampled(ask, leftover, depth, options)
                    if ask.chain:
                        trees[place] = max(trees[place], resampled, key=DraftTree.expected_length)
                    else:
                        trees[place] = merge_trees(trees[place], resampled, options.tree_size)
        return trees

    def _resampled(self, ask: Ask, leftover: Leftover, depth: int, options: DraftOptions) -> DraftTree:
        """Drafts again from old states, with the tokens accepted since."""
        since = self._working.after(leftover.path, self.weights.embed)[None]
        states = leftover.hidden[None, : min(ask.depth, depth)]
        logits = self._working.logits(states)
        bias = bias_of(self._working, self.weights, states, logits, since)
        [tree] = self.grown([ask], self.expanded([ask], states, options, logits, bias), options)
        return tree
