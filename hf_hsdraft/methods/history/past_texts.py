"""Past texts in memory: found by their n-grams, bounded, the least recently used forgotten first.

Places of n-grams are kept in hash chains, as in LZ77: a table has the newest place of each hash value, and each place
links to the one before it. So an entry is a store, a look-up follows links, and nothing is ever sorted or merged. There
is a chain for each of several lengths: the long n-grams find the places that match far back, which a chain of short
ones would reach too late.

A draft sorts what is found by how many tokens match, `HISTORY_BINS`, and by whether occurrences agree on what
follows. Long matches come first, shorter ones share the remaining probability, and within a group the tokens share by
their counts. How often a group holds the right token is counted as texts grow, so these probabilities are comparable to
a trained drafter's.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.draft_tree import DraftTree, grown_tree
from ...drafters.base.protocol import Accepted, Ask, Call
from ...drafters.lookup.ngrams import LookupSession

# Lengths of the n-grams that past texts are found by - by hand: the end of a chat's template is longer than 8 in
# many prompts, and shorter n-grams than 3 say little that the running text does not say.
HISTORY_LENGTHS = (3, 8, 24)
HISTORY_MATCHES = 32  # number of earlier places that a draft looks at - by hand
HISTORY_DEPTH = 48  # greatest depth of a draft - by hand: texts that were decoded before repeat for long
# Least lengths of a match, in tokens, that differ in how often the next token is right, and how often it is assumed
# to be - by hand.
HISTORY_BINS = (3, 4, 6, 8, 12, 16, 24, 32, 48)
HISTORY_RIGHT = (0.3, 0.4, 0.55, 0.65, 0.72, 0.78, 0.84, 0.88, 0.92)
HISTORY_PRIOR = 8.0  # number of tokens that these assumptions count for - by hand
HISTORY_MOST = 400.0  # number of tokens that are remembered of a bin - by hand
# Part of the tokens of a history that stays when the least recently used texts leave - by hand.
HISTORY_KEPT = 0.75
# Number of tokens of a text of a batch that the other texts are shown while they grow, and of new ones that are
# entered at once - by hand.
HISTORY_SHOWN = 4096
HISTORY_STEP = 8

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
        lengths = sorted(HISTORY_LENGTHS, reverse=True)
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
            wanted = HISTORY_MATCHES - len(found)
            if wanted <= 0 or len(known) < chain.length or depth < 1:
                continue
            places = [place for place in chain.places(known[::-1], HISTORY_MATCHES) if place not in found]
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


Tokens = npt.NDArray[np.int32]
BLOCK = 32  # tokens; texts that begin alike share whole blocks
START = bytes(8)  # the digest of no tokens
_LEAST_CAPACITY = 2**16
_SHARED_BLOCKS = -(-LONGEST_MATCH // BLOCK)  # before what is new, so that matches reach back as far as anywhere


@dataclass(frozen=True)
class Record:
    """A text, or the part of it that follows a beginning which an earlier record has."""

    tokens: Tokens
    start: bytes = START  # digest of the tokens before, whole blocks


def block_digests(tokens: Tokens, start: bytes = START) -> list[bytes]:
    """Returns for each whole block of a text a digest of all tokens up to its end; `start` is of those before."""
    digests, raw = [start], np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    for end in range(4 * BLOCK, len(raw) + 1, 4 * BLOCK):
        digests.append(_digest(digests[-1] + raw[end - 4 * BLOCK : end]))
    return digests[1:]


def text_digest(tokens: Tokens, start: bytes, blocks: Sequence[bytes]) -> bytes:
    """Returns the digest of a whole text; `blocks` are the digests of its whole blocks."""
    rest = np.ascontiguousarray(tokens[len(blocks) * BLOCK :], dtype="<i4").tobytes()
    return _digest((blocks[-1] if blocks else start) + b"end" + rest)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


@dataclass
class _Kept:
    begin: int  # place of its first token
    record: Record
    used: int  # the last time that it was entered, or a draft was taken from it


class PastTexts:
    """Texts of one target.

    Args:
        records: from the least to the most recently used.
        vocab_size: ids outside 0 to `vocab_size - 1` are no tokens, and end a match.
        most_tokens: bound of the tokens kept, a separator for each text included. The texts used last are kept.
        room: number of tokens to leave room for.
    """

    def __init__(self, records: Iterable[Record], vocab_size: int, most_tokens: int, room: int = 0) -> None:
        records = _last_of(list(records), most_tokens - room)
        self._vocab_size, self._most = vocab_size, most_tokens
        held = _size(records) + room
        self._index = TokenIndex(max(min(2 * held, most_tokens), min(_LEAST_CAPACITY, most_tokens), held))
        self._end = self._index.begin  # of what is written
        self._texts: list[_Kept] = []
        self._begins: list[int] = []
        self._blocks: dict[bytes, int] = {}  # digests of beginnings that are known, and the newest text they are in
        self._whole: dict[bytes, int] = {}  # digests of whole texts
        self._clock = 0
        for record in records:
            self._write(record)
        self._index.enter(self._index.begin, self._end)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def tokens(self) -> int:
        return self._end - self._index.begin - len(self._texts)

    @property
    def bytes(self) -> int:
        """Memory that the index and the records take."""
        return self._index.bytes + sum(text.record.tokens.nbytes for text in self._texts)

    def records(self) -> list[Record]:
        """Returns all records, from the least to the most recently used."""
        return [text.record for text in sorted(self._texts, key=lambda text: text.used)]

    def with_room(self, tokens: int) -> PastTexts:
        """Returns these texts with room for `tokens` more: this object, a larger one, or one without the oldest."""
        if self._end + tokens + 1 <= self._index.end:
            return self
        records = self.records()
        if _size(records) + tokens + 1 > self._most:
            records = _last_of(records, int(HISTORY_KEPT * self._most))
        return PastTexts(records, self._vocab_size, self._most, tokens + 1)

    def unknown_part(self, prompt: Tokens, answer: Tokens) -> Record | None:
        """Returns what is to be kept of a text, its whole answer included; None if all is known."""
        text = np.concatenate([prompt, answer])
        digests = block_digests(text)
        known = 0
        while known < len(digests) and digests[known] in self._blocks:
            known += 1
        whole = self._whole.get(text_digest(text, START, digests))
        if whole is not None and known == len(digests):  # texts with its beginning may have left
            self._use(whole)
            return None
        if known:
            self._use(self._blocks[digests[known - 1]])
        skipped = max(min(known, len(prompt) // BLOCK) - _SHARED_BLOCKS, 0)
        return Record(text[skipped * BLOCK :], digests[skipped - 1] if skipped else START)

    def add(self, record: Record) -> None:
        """Enters a record, for which there has to be room."""
        begin = self._end
        self._write(record)
        self._index.enter(begin, self._end)

    def _write(self, record: Record) -> None:
        begin, end = self._end, self._end + len(record.tokens)
        valid = (record.tokens >= 0) & (record.tokens < self._vocab_size)
        self._index.tokens[begin:end] = np.where(valid, record.tokens, SEPARATOR)
        self._end = end + 1
        self._clock += 1
        digests = block_digests(record.tokens, record.start)
        self._blocks.update(dict.fromkeys(digests, len(self._texts)))
        self._whole[text_digest(record.tokens, record.start, digests)] = len(self._texts)
        self._begins.append(begin)
        self._texts.append(_Kept(begin, record, self._clock))

    def find(self, tail: Sequence[int], depth: int) -> list[Continuation]:
        """As `TokenIndex.find`; the text with the longest match counts as used."""
        found = self._index.find(tail, depth)
        if found:
            best = max(found, key=lambda each: each.length)
            self._use(bisect.bisect(self._begins, best.place) - 1)
        return found

    def _use(self, number: int) -> None:
        self._clock += 1
        self._texts[number].used = self._clock


def _size(records: Iterable[Record]) -> int:
    return sum(len(record.tokens) + 1 for record in records)


def _last_of(records: Sequence[Record], room: int) -> list[Record]:
    """The last records, as many as have room."""
    sizes = itertools.accumulate(len(record.tokens) + 1 for record in reversed(records))
    return list(records[len(records) - sum(size <= room for size in sizes) :])


# Drafts from what was found

_ALONE, _AGREED, _SPLIT = range(3)  # one occurrence; several that one token follows; several that differ
Group = dict[int, list[Continuation]]  # occurrences by the token that follows, the longest and newest first


class Trust:
    """How often the tokens that followed earlier occurrences hold the next one, by length of match and agreement."""

    def __init__(self) -> None:
        self._counts = [[[0.0, 0.0] for _ in range(3)] for _ in HISTORY_BINS]  # right tokens, and all

    def of(self, place: int, group: Group) -> float:
        """Returns the probability that the next token is among a group's tokens."""
        kind, assumed = _kind(group), HISTORY_RIGHT[place]
        if kind == _AGREED:
            assumed = 1.0 - (1.0 - assumed) / 2
        right, reached = self._counts[place][kind]
        return (right + HISTORY_PRIOR * assumed) / (reached + HISTORY_PRIOR)

    def count(self, place: int, group: Group, right: bool) -> None:
        counts = self._counts[place][_kind(group)]
        counts[0] += right
        counts[1] += 1
        if counts[1] > HISTORY_MOST:
            counts[:] = counts[0] / 2, counts[1] / 2


def _kind(group: Group) -> int:
    if len(group) > 1:
        return _SPLIT
    return _AGREED if len(next(iter(group.values()))) > 1 else _ALONE


class HistoryDraft:
    """The continuations of one text, as a tree that grows from the root, the text's last token."""

    def __init__(self, root: int, found: Sequence[Continuation], trust: Trust) -> None:
        self._root, self._trust = root, trust
        # Of each path, by place in the bins.
        self._at: dict[tuple[int, ...], dict[int, Group]] = {(): _groups(found, 0)}

    def tree(self, size: int, depth: int, width: int | None = None, threshold: float = 0.0) -> DraftTree:
        """Returns the likeliest continuations: `size` nodes, `width` children each, paths of `threshold` or more."""
        return grown_tree(self._root, self._next, size, depth, width, threshold)

    def _next(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """Returns tokens after a path with their probabilities, the most probable first."""
        found, left = dict[int, float](), 1.0
        for place, group in self._groups_at(path).items():
            share = left * self._trust.of(place, group)
            total = sum(map(len, group.values()))
            for token, occurrences in group.items():
                found[token] = found.get(token, 0.0) + share * len(occurrences) / total
            left -= share
        return sorted(found.items(), key=lambda each: -each[1])

    def _groups_at(self, path: tuple[int, ...]) -> dict[int, Group]:
        if path not in self._at:
            above = self._at[path[:-1]].values()
            alike = [each for group in above for each in group.get(path[-1], ())]
            self._at[path] = _groups(alike, len(path))
        return self._at[path]

    def learn(self, tokens: Sequence[int]) -> None:
        """Counts which groups held the tokens that the text got, as far as the tree reaches."""
        for depth, token in enumerate(tokens):
            for place, group in self._groups_at(tuple(tokens[:depth])).items():
                self._trust.count(place, group, token in group)
                if token in group:
                    break
            else:
                break


def _groups(found: Sequence[Continuation], depth: int) -> dict[int, Group]:
    """Occurrences by place in the bins, from the longest matches to the shortest, `depth` tokens after the root."""
    groups: dict[int, Group] = {}
    for each in found:
        if depth < len(each.tokens):
            place = bisect.bisect(HISTORY_BINS, each.length + depth) - 1
            groups.setdefault(place, {}).setdefault(each.tokens[depth], []).append(each)
    return dict(sorted(groups.items(), reverse=True))


class GrowingTexts:
    """The new tokens of the texts of a batch, so that each text may draft from the others."""

    def __init__(self, rooms: Sequence[int]) -> None:
        rooms = [min(room, HISTORY_SHOWN) + LONGEST_MATCH + 1 for room in rooms]
        self._index = TokenIndex(sum(rooms))
        self._begins = [self._index.begin + sum(rooms[:row]) for row in range(len(rooms))]
        self._room = [begin + room - 1 for begin, room in zip(self._begins, rooms, strict=True)]
        self._ends = list(self._begins)  # of what is written
        self._entered = list(self._begins)

    def begin(self, row: int, known: Sequence[int]) -> None:
        """Takes the end of a prompt, by which matches are told apart, but which is not proposed."""
        self._write(row, known[-LONGEST_MATCH:])
        self._entered[row] = self._ends[row]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self._write(row, tokens)
        if self._ends[row] - self._entered[row] >= HISTORY_STEP:  # together, as that takes less time
            self._index.enter(self._entered[row], self._ends[row])
            self._entered[row] = self._ends[row]

    def _write(self, row: int, tokens: Sequence[int]) -> None:
        end = min(self._ends[row] + len(tokens), self._room[row])
        self._index.tokens[self._ends[row] : end] = tokens[: end - self._ends[row]]
        self._ends[row] = end

    def find(self, tail: Sequence[int], depth: int) -> list[Continuation]:
        return self._index.find(tail, depth)


class HistorySession(LookupSession):
    """Drafts for each row by the texts of a `History`, and by the other rows of the call."""

    def __init__(self, call: Call, history: Any) -> None:
        super().__init__(call)
        self._history = history
        self._tails: dict[int, list[int]] = defaultdict(list)
        self._drafts: dict[int, HistoryDraft] = {}  # the last one of each row
        several = call.rows > 1 and call.texts is not None
        self._growing = GrowingTexts([call.texts.room(row) for row in range(call.rows)]) if several else None

    def _tree(self, ask: Ask) -> DraftTree:
        tail, depth = self._tails[ask.row], min(ask.depth, ask.size, HISTORY_DEPTH)
        if not tail or tail[-1] != ask.root or depth < 1:
            return DraftTree.root(ask.root)
        found = self._history.find(tail, depth)
        if self._growing is not None:
            found = [*self._growing.find(tail, depth), *found]
        draft = self._drafts[ask.row] = HistoryDraft(ask.root, found, self._history.trust)
        return draft.tree(ask.size, depth, 1 if ask.chain else None, self._options.threshold)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            if (draft := self._drafts.pop(each.row, None)) is not None:
                draft.learn(each.tokens)
            earlier = [*each.earlier[-LONGEST_MATCH:]]
            tail = self._tails[each.row] = self._known([*self._tails[each.row], *earlier, *each.tokens])
            if self._growing is not None and earlier:
                self._growing.begin(each.row, tail[: -len(each.tokens)])
            if self._growing is not None:
                self._growing.extend(each.row, each.tokens)

    def _known(self, tokens: list[int]) -> list[int]:
        """The last tokens, after the last id that is no token."""
        tail = tokens[-LONGEST_MATCH:]
        odd = [place for place, token in enumerate(tail) if not 0 <= token < self._history.vocab_size]
        return tail[odd[-1] + 1 :] if odd else tail

    def keep(self, rows: Sequence[int]) -> None:
        for row in self._tails.keys() - set(rows):
            del self._tails[row]
        self._drafts = {}
