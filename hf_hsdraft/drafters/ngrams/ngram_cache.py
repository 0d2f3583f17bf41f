"""Drafts out of the text itself: the tokens that followed the same words before ("Cacheback", section 3).

Tables map a leader, a few tokens, to the tokens that followed it. A table that is full forgets the leaders that were
not used for longest. Look-ups along the path drafted so far grow a tree. How often each table is right depends on the
text, so it is counted on the text: before a token is entered, it is looked up as a draft would have looked it up. So
these drafts have probabilities that compare with those of a trained drafter.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...core.draft_tree import DraftTree, from_nodes
from ...core.tuning import TUNING


@dataclass
class FollowerTable:
    """The followers of leaders of one length, and how often they were right.

    Attributes:
        length: number of tokens of a leader.
        followers: for each leader its followers, the latest first. The leader that was used last stands last.
        reached: number of tokens for which a draft would have found a leader in this table.
        right: for each rank, the number of these tokens that were the follower of this rank.
    """

    length: int
    followers: OrderedDict[tuple[int, ...], list[int]] = field(default_factory=OrderedDict)
    reached: int = 0
    right: list[int] = field(default_factory=lambda: [0] * TUNING.ngram_followers)

    def probability(self, rank: int) -> float:
        """Returns the probability that the follower of a rank is the next token, where the leader was found."""
        first = TUNING.ngram_right[min(self.length, len(TUNING.ngram_right)) - 1]
        assumed = first if rank == 0 else (1.0 - first) * TUNING.ngram_earlier ** (rank + 1)
        return (self.right[rank] + TUNING.ngram_prior * assumed) / (self.reached + TUNING.ngram_prior)

    def after(self, path: Sequence[int]) -> list[int]:
        """Returns the followers of the leader that a path ends with; empty if there are none."""
        return self.followers.get(tuple(path[-self.length :]), [])

    def count(self, path: Sequence[int], token: int) -> bool:
        """Counts whether the token after a path is among the followers, and returns it."""
        known = self.after(path)
        self.reached += bool(known)
        if token in known:
            self.right[known.index(token)] += 1
        return token in known

    def enter(self, path: Sequence[int], token: int) -> None:
        """Enters the token that followed a path."""
        if len(path) < self.length:
            return
        leader = tuple(path[-self.length :])
        known = self.followers.setdefault(leader, [])
        self.followers.move_to_end(leader)
        if token in known:
            known.remove(token)
        known.insert(0, token)
        del known[TUNING.ngram_followers :]
        if len(self.followers) > TUNING.ngram_leaders:
            self.followers.popitem(last=False)


class NgramCache:
    """The n-grams of one text, with leaders of 1 to `length` tokens.

    Args:
        length: number of tokens of the longest leader, 1 or more.
        frozen: tables of other texts. They are asked after the text's own table of the same length, and never changed.
        vocab_size: ids from here on, and ids below 0, are no tokens, and no n-gram holds one; 0 for no limit.

    Attributes:
        own: the tables of the text itself.
    """

    def __init__(self, length: int, frozen: Sequence[FollowerTable] = (), vocab_size: int = 0) -> None:
        self._vocab_size = vocab_size
        self.own = [FollowerTable(size) for size in range(length, 0, -1)]
        others = [FollowerTable(table.length, table.followers) for table in frozen]  # with counts of this text's own
        # The table with the longest leaders is asked first.
        self._tables = sorted([*self.own, *others], key=lambda table: -table.length)
        self._tail: list[int] = []  # the last tokens of the text, no more than the longest leader has

    @property
    def last(self) -> int | None:
        """The last token of the text, from which a draft goes on."""
        return self._tail[-1] if self._tail else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Enters further tokens of the text."""
        for token in tokens:
            if token < 0 or 0 < self._vocab_size <= token:
                self._tail = []
                continue
            for table in self._tables:
                if table.count(self._tail, token):  # a draft has found the token, and need not ask further tables
                    break
            for table in self.own:
                table.enter(self._tail, token)
            self._tail = [*self._tail, token][-self._tables[0].length :]

    def draft(
        self,
        tree_size: int,
        depth: int,
        width: int | None = None,
        threshold: float = 0.0,
        after: Sequence[int] = (),
    ) -> DraftTree:
        """Returns the most probable continuations of the text as a tree.

        Args:
            tree_size: greatest number of nodes besides the root.
            depth: greatest depth of a node.
            width: greatest number of children of a node; 1 gives a chain, `None` is no limit.
            threshold: least probability of a path, 0 to 1.
            after: tokens that the text is supposed to go on with first. They are in no n-gram.
        """
        tail = [*self._tail, *after][-self._tables[0].length :]
        floor = math.log(max(threshold, TUNING.ngram_least))
        nodes: list[tuple[int, int, int, float]] = [(tail[-1], -1, 0, 0.0)]
        paths = [tail]
        waiting: list[tuple[float, int, int, int]] = []  # a heap of cost, order of arrival, parent and token
        arrivals = itertools.count()
        while len(nodes) <= tree_size:
            newest = len(nodes) - 1
            if nodes[newest][2] < depth:
                for token, probability in self._next(paths[newest], drafted=newest > 0)[:width]:
                    score = nodes[newest][3] + math.log(probability)
                    if score >= floor:
                        heapq.heappush(waiting, (-score, next(arrivals), newest, token))
            if not waiting:
                break
            cost, _, parent, token = heapq.heappop(waiting)
            nodes.append((token, parent, nodes[parent][2] + 1, -cost))
            paths.append([*paths[parent], token][-self._tables[0].length :])
        return from_nodes(nodes)

    def follow(self, drafted: Sequence[int], most: int) -> list[tuple[int, float]]:
        """Returns the most probable continuation of the text and a drafted path, as far as n-grams tell one.

        Args:
            drafted: tokens of the path.
            most: greatest number of tokens.

        Returns:
            tokens, each with its probability after those before it.
        """
        found: list[tuple[int, float]] = []
        path = [*self._tail, *drafted]
        while len(found) < most:
            ranked = self._next(path, drafted=True)
            if not ranked:
                break
            found.append(ranked[0])
            path.append(ranked[0][0])
        return found

    def _next(self, path: Sequence[int], drafted: bool) -> list[tuple[int, float]]:
        """Returns the tokens that may follow a path with their probabilities, the most probable first.

        Longer leaders are asked first. What they leave over is the share of the shorter ones. The probabilities were
        counted at all places of a leader. After a drafted token they hold for the case that it is right. Then the text
        repeats itself, so in greedy texts the next token is right more often, and its probability is raised. In sampled
        texts it is not right more often, but there the mistake costs next to nothing.

        Args:
            path: the last tokens of the path.
            drafted: whether the last token of the path is a drafted one.
        """
        found: dict[int, float] = {}
        left = 1.0
        for table in self._tables:
            probabilities = {token: table.probability(rank) for rank, token in enumerate(table.after(path))}
            for token, probability in probabilities.items():
                found.setdefault(token, left * probability)
            left *= max(1.0 - sum(probabilities.values()), 0.0)
            if left < TUNING.ngram_least:
                break
        ranked = sorted(found.items(), key=lambda item: -item[1])
        if drafted:
            raised = [(token, probability**TUNING.ngram_beyond) for token, probability in ranked]
            total = max(sum(probability for _, probability in raised), 1.0)
            ranked = [(token, probability / total) for token, probability in raised]
        return ranked
