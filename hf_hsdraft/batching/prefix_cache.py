"""Keys, values and hidden states of prompts: one that begins like an earlier prompt reads only what follows.

Prompts are held as a tree of their tokens, so what they have in common is held once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..core.tensors import shared_length

_LEAST = 8  # tokens that are worth copying


@dataclass(eq=False)
class _Part:
    """Tokens that follow those of the parent; `states` `[..., n, size]` are keys and values by layer, then taps."""

    tokens: Sequence[int] = ()
    states: list[torch.Tensor] = field(default_factory=list)
    after: dict[int, _Part] = field(default_factory=dict)  # by first token
    used: int = 0

    def split(self, at: int) -> None:
        """Makes two parts of this one."""
        rest = _Part(self.tokens[at:], [each[..., at:, :].clone() for each in self.states], self.after, self.used)
        self.tokens, self.states = self.tokens[:at], [each[..., :at, :].clone() for each in self.states]
        self.after = {rest.tokens[0]: rest}


class PrefixCache:
    """Holds the beginnings of prompts, up to `most` tokens; those not used for longest leave first.

    Attributes:
        size: number of tokens held.
    """

    def __init__(self, most: int) -> None:
        self._most, self.size, self._clock = most, 0, 0
        self._roots: dict[Hashable, _Part] = {}

    def known(self, kind: Hashable, ids: Sequence[int]) -> int:
        """Number of first tokens that `fill` would put in a cache of plain layers."""
        count = sum(count for _, count in self._along(self._roots[kind], ids)) if kind in self._roots else 0
        return count if count >= _LEAST else 0

    def shared(self, ids: Sequence[int], others: Sequence[int]) -> bool:
        """Whether a prompt that continues like this will begin like another, with what is worth holding."""
        return len(others) <= self._most and list(ids[:_LEAST]) == list(others[:_LEAST])

    def fill(self, kind: Hashable, ids: Sequence[int], cache: Cache | None) -> list[torch.Tensor]:
        """Puts what is known of a prompt's beginning in its empty `cache`; returns its taps `[1, n, D]`, if any.

        Args:
            kind: what the states depend on besides the tokens.
            ids: the prompt without its last token, whose logits are needed.
        """
        if kind not in self._roots or cache is None or type(cache) is not DynamicCache:
            return []
        found = list(self._along(self._roots[kind], ids))
        plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        if sum(count for _, count in found) < _LEAST or not plain:
            return []
        parts = zip(*([each[..., :count, :] for each in part.states] for part, count in found), strict=True)
        *states, taps = (torch.cat(each, dim=-2) for each in parts)
        for index in range(0, len(states), 2):
            cache.update(states[index], states[index + 1], index // 2)
        return [taps]

    def keep(self, kind: Hashable, ids: Sequence[int], cache: Cache, taps: torch.Tensor) -> None:
        """Holds a prompt's keys and values, and its taps `[1, n, D]`, of any `n` where nothing is tapped."""
        taps = taps if taps.shape[-1] else taps.new_empty(1, len(ids), 0)
        if len(ids) > self._most or len(ids) < _LEAST or taps.shape[1] != len(ids):
            return
        part, begin = self._roots.setdefault(kind, _Part()), 0
        for each, count in self._along(part, ids):
            if count < len(each.tokens):
                each.split(count)
            part, begin = each, begin + count
        if begin < len(ids):
            states = [states for layer in cache.layers for states in (layer.keys, layer.values)]
            new = [each[..., begin : len(ids), :].clone() for each in (*states, taps)]
            part.after[ids[begin]] = _Part(ids[begin:], new, used=self._clock)
            self.size += len(ids) - begin
        while self.size > self._most:
            self._drop_oldest()

    def _along(self, part: _Part, ids: Sequence[int]) -> Iterator[tuple[_Part, int]]:
        """The parts that a prompt begins with, and how many of their tokens, which are used now."""
        self._clock += 1
        begin = 0
        while begin < len(ids) and (found := part.after.get(ids[begin])) is not None:
            count = shared_length(found.tokens, ids[begin:])
            part, begin, found.used = found, begin + count, self._clock
            yield found, count
            if count < len(found.tokens):
                return

    def _drop_oldest(self) -> None:
        """Drops the end of a prompt."""
        parts = list(self._roots.values())
        ends = list[tuple[int, _Part, _Part]]()
        while parts:
            part = parts.pop()
            parts += part.after.values()
            ends += [(each.used, part, each) for each in part.after.values() if not each.after]
        _, part, oldest = min(ends, key=lambda end: end[0])
        del part.after[oldest.tokens[0]]
        self.size -= len(oldest.tokens)
        self._roots = {kind: root for kind, root in self._roots.items() if root.after}
