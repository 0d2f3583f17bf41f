"""Drafts out of the text itself: what followed the same words before ("Cacheback", section 3).

Tables map a leader n-gram to the tokens that followed it, the latest first, and forget what was not used for longest.
Looked up again and again, along the path drafted so far, they grow a tree. Which leader length can be trusted how far
depends on the text, so it is counted on the text: before a token is entered, it is looked up where a draft would have
looked for it. Drafts of this kind thus carry probabilities that compare with those of a trained drafter.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...common.tuning import TUNING
from ...trees.draft_tree import DraftTree

MOST_LEADING = 16  # tokens of a leader


@dataclass
class FollowerTable:
    """The followers of leaders of one length, and how often they were right.

    Attributes:
        length: tokens of a leader.
        followers: for each leader its followers, the latest first; leaders in the order of their last use.
        reached: how often a draft would have come to look here and found the leader.
        right: of these, how often the follower of each rank was the next token.
    """

    length: int
    followers: OrderedDict[tuple[int, ...], list[int]] = field(default_factory=OrderedDict)
    reached: int = 0
    right: list[int] = field(default_factory=lambda: [0] * TUNING.ngram_followers)

    def probability(self, rank: int) -> float:
        """That the follower of a rank is the next token, where this leader was found."""
        first = TUNING.ngram_right[min(self.length, len(TUNING.ngram_right)) - 1]
        assumed = first if rank == 0 else (1.0 - first) * TUNING.ngram_earlier ** (rank + 1)
        return (self.right[rank] + TUNING.ngram_prior * assumed) / (self.reached + TUNING.ngram_prior)

    def enter(self, leader: tuple[int, ...], token: int) -> None:
        known = self.followers.get(leader)
        if known is None:
            self.followers[leader] = [token]
            if len(self.followers) > TUNING.ngram_leaders:
                self.followers.popitem(last=False)
            return
        self.followers.move_to_end(leader)
        if known[0] != token:
            if token in known:
                known.remove(token)
            known.insert(0, token)
            del known[TUNING.ngram_followers :]


class NgramCache:
    """The n-grams of one text, with leaders of 1 to `length` tokens.

    Args:
        length: of the longest leader, 1 or more.
        frozen: tables of other texts, asked after the text's own for leaders of their length, and left unchanged.
        vocab_size: ids from there on, as from below 0, are no tokens; no n-gram reaches over one. 0 for no limit.
    """

    def __init__(self, length: int, frozen: Sequence[FollowerTable] = (), vocab_size: int = 0) -> None:
        self._vocab_size = vocab_size
        self._own = [FollowerTable(size) for size in range(length, 0, -1)]
        others = [FollowerTable(table.length, table.followers) for table in frozen]  # each text counts for itself
        # The longest is asked first.
        self._tables = sorted([*self._own, *others], key=lambda table: -table.length)
        self._tail: list[int] = []  # the last tokens of the text, at most `length`

    def extend(self, tokens: Iterable[int]) -> None:
        """Enters further tokens of the text."""
        longest = self._tables[0].length
        for token in tokens:
            if token < 0 or 0 < self._vocab_size <= token:
                self._tail = []
                continue
            found = False
            for table in self._tables:
                if len(self._tail) < table.length:
                    continue
                leader = tuple(self._tail[-table.length :])
                if not found:
                    found = self._count(table, leader, token)
            for table in self._own:
                if len(self._tail) >= table.length:
                    table.enter(tuple(self._tail[-table.length :]), token)
            self._tail = [*self._tail, token][-longest:]

    @property
    def last(self) -> int | None:
        """The last token entered, from which a draft goes on."""
        return self._tail[-1] if self._tail else None

    def _count(self, table: FollowerTable, leader: tuple[int, ...], token: int) -> bool:
        """Counts what a draft would have found of a token here, and whether it would have."""
        known = table.followers.get(leader)
        if known is None:
            return False
        table.reached += 1
        if token not in known:
            return False
        table.right[known.index(token)] += 1
        return True

    def draft(self, tree_size: int, depth: int, width: int | None = None, threshold: float = 0.0) -> DraftTree:
        """The most probable continuations of the text as a tree of at most `tree_size` nodes beside the root.

        Args:
            width: children of a node at most; 1 gives a chain.
            threshold: paths less probable than this are left out, 0 to 1.
        """
        floor = math.log(max(threshold, TUNING.ngram_least))
        root = self._tail[-1]
        nodes: list[tuple[int, int, int, float]] = [(root, -1, 0, 0.0)]
        paths: list[tuple[int, ...]] = [tuple(self._tail)]
        waiting: list[tuple[float, int, int, int]] = []  # cost, order of arrival, parent, token
        arrivals = 0
        node = 0
        while True:
            if nodes[node][2] < depth:
                following = self._next(paths[node])
                for token, probability in (_surer(following) if node else following)[:width]:
                    score = nodes[node][3] + math.log(probability)
                    if score >= floor:
                        heapq.heappush(waiting, (-score, arrivals, node, token))
                        arrivals += 1
            if not waiting or len(nodes) > tree_size:
                break
            cost, _, parent, token = heapq.heappop(waiting)
            node = len(nodes)
            nodes.append((token, parent, nodes[parent][2] + 1, -cost))
            paths.append((*paths[parent], token)[-self._tables[0].length :])
        tokens, parents, depths, scores = zip(*nodes[: tree_size + 1], strict=True)
        return DraftTree(tokens, parents, depths, scores)

    def _next(self, path: Sequence[int]) -> list[tuple[int, float]]:
        """Tokens that may follow a path, with their probabilities: longer leaders first, shorter for what they miss."""
        found: dict[int, float] = {}
        left = 1.0
        for table in self._tables:
            if len(path) < table.length:
                continue
            known = table.followers.get(tuple(path[-table.length :]))
            if known is None:
                continue
            spent = 0.0
            for rank, token in enumerate(known):
                probability = table.probability(rank)
                spent += probability
                if token not in found:
                    found[token] = left * probability
            left *= max(1.0 - spent, 0.0)
            if left < TUNING.ngram_least:
                break
        return sorted(found.items(), key=lambda item: -item[1])


def _surer(following: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Tokens and their probabilities after drafted ones.

    What was counted is how often they follow wherever their leader stands. Here they are asked for where what came
    before them was right, so that the text goes on as it did there: in greedy texts they are right more often. In
    sampled ones they are not, which costs next to nothing.
    """
    raised = [probability**TUNING.ngram_beyond for _, probability in following]
    total = max(sum(raised), 1.0)
    return [(token, value / total) for (token, _), value in zip(following, raised, strict=True)]


def tables_of(texts: Iterable[Sequence[int]], length: int) -> list[FollowerTable]:
    """The tables of some texts, for leaders of up to `length` tokens; none reaches from one text into the next."""
    cache = NgramCache(length)
    for text in texts:
        cache._tail = []
        cache.extend(text)
    return cache._own
