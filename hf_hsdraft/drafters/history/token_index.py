"""Places of n-grams in an array of tokens, the newest first.

Hash chains, as in LZ77: a table has the newest place of each hash value, and each place links to the one before it. So
an entry is a store, a look-up follows links, and nothing is ever sorted or merged. There is a chain for each of several
lengths: the long n-grams find the places that match far back, which a chain of short ones would reach too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.tuning import TUNING

SEPARATOR = -1  # between texts; in no n-gram
LONGEST_MATCH = 48  # tokens that a match is followed back
DEEPEST = 64  # tokens of a continuation

_FACTOR, _SPREAD, _BITS = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 64  # odd numbers, for hashing modulo 2**64
_MASK = 2**_BITS - 1
_PLACE_BITS = 18
_AT_ONCE = 2**_PLACE_BITS  # places that are entered by one pass, which bounds its memory


@dataclass(frozen=True)
class Continuation:
    """What followed an earlier occurrence of a text's last tokens."""

    place: int  # of the last token that matches
    length: int  # tokens that match, at most `LONGEST_MATCH`
    tokens: list[int]  # what followed, at least one token


class _Chain:
    """Places of n-grams of one length, by their hashes."""

    def __init__(self, length: int, capacity: int, places: int) -> None:
        self.length, self._shift = length, _BITS - max(capacity - 1, 1).bit_length()
        self._powers = [pow(_FACTOR, k, 2**_BITS) for k in range(length)]
        self._newest = np.full(2 ** (_BITS - self._shift), -1, dtype=np.int32)
        self._before = np.full(places, -1, dtype=np.int32)

    @property
    def bytes(self) -> int:
        return self._newest.nbytes + self._before.nbytes

    def enter(self, tokens: npt.NDArray[np.int32], begin: int, end: int) -> None:
        """Enters the n-grams that end at the places from `begin` to before `end`."""
        first = begin - self.length + 1
        hashes = np.zeros(end - begin, dtype=np.uint64)
        read = tokens[first:end].astype(np.uint64)
        for back, power in enumerate(self._powers):
            hashes += read[self.length - 1 - back : len(read) - back] * np.uint64(power)
        hashed = ((hashes * np.uint64(_SPREAD)) >> np.uint64(self._shift)).astype(np.int64)
        apart = np.concatenate([[0], np.cumsum(tokens[first:end] < 0)])
        inside = np.flatnonzero(apart[self.length :] == apart[: -self.length])  # without a separator
        order = np.sort(hashed[inside] << _PLACE_BITS | inside)  # by slot, then by place
        slots, places = order >> _PLACE_BITS, (order & (_AT_ONCE - 1)) + begin
        same = slots[1:] == slots[:-1]
        before = self._newest[slots]
        before[1:][same] = places[:-1][same]
        self._before[places] = before
        last = np.append(~same, True)[: len(slots)]
        self._newest[slots[last]] = places[last]

    def places(self, tail: Sequence[int], most: int) -> list[int]:
        """Returns up to `most` of the newest places where the n-gram at the end of `tail` may end."""
        hashed = sum(power * token for power, token in zip(self._powers, reversed(tail), strict=False))
        place = self._newest.item((hashed * _SPREAD & _MASK) >> self._shift)
        found, before = list[int](), self._before
        while place >= 0 and len(found) < most:
            found.append(place)
            place = before.item(place)
        return found


class TokenIndex:
    """Tokens of several texts with separators between them, and the places of their n-grams.

    Args:
        capacity: greatest number of tokens, separators included.
    """

    def __init__(self, capacity: int) -> None:
        self.begin, self.end = LONGEST_MATCH, LONGEST_MATCH + capacity  # of the places that may hold tokens
        self.tokens = np.full(self.end + DEEPEST, SEPARATOR, dtype=np.int32)
        lengths = sorted(TUNING.history_lengths, reverse=True)
        self._chains = [_Chain(length, capacity, self.end) for length in lengths]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.tokens.nbytes + sum(chain.bytes for chain in self._chains)

    def enter(self, begin: int, end: int) -> None:
        """Enters the tokens that have been written to the places from `begin` to before `end`."""
        for start in range(begin, end, _AT_ONCE):
            for chain in self._chains:
                chain.enter(self.tokens, start, min(start + _AT_ONCE, end))

    def find(self, tail: Sequence[int], depth: int) -> list[Continuation]:
        """Returns what followed the last tokens of `tail` before, up to `depth` tokens: long matches, newest first."""
        depth = min(depth, DEEPEST)
        last = np.full(LONGEST_MATCH, SEPARATOR - 1, dtype=np.int32)  # the newest first; no token where there is none
        known = list(tail)[-LONGEST_MATCH:][::-1]
        last[: len(known)] = known
        found: dict[int, Continuation] = {}
        for chain in self._chains:
            wanted = TUNING.history_matches - len(found)
            if wanted <= 0 or len(known) < chain.length or depth < 1:
                continue
            places = [place for place in chain.places(known[::-1], TUNING.history_matches) if place not in found]
            for each in self._followed(places, last, depth)[:wanted]:
                if each.length >= chain.length:  # another n-gram may have the same hash
                    found[each.place] = each
        return list(found.values())

    def _followed(self, places: Sequence[int], last: npt.NDArray[np.int32], depth: int) -> list[Continuation]:
        if not places:
            return []
        ends = np.array(places)[:, None]
        same = self.tokens[ends - np.arange(LONGEST_MATCH)] == last
        lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1).tolist()
        after = self.tokens[ends + np.arange(1, depth + 1)]
        ended = np.logical_or.accumulate(after < 0, axis=1)
        counts = (depth - ended.sum(axis=1)).tolist()
        rows = zip(places, lengths, after.tolist(), counts, strict=True)
        return [Continuation(place, length, tokens[:count]) for place, length, tokens, count in rows if count]
